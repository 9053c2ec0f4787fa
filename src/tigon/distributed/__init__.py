"""Training over several devices: what is shared between them, and what stays inside of a node."""

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "apply_hpz": "tigon.distributed.hpz",
    "count_traffic": "tigon.distributed.traffic",
    "tensor_parallel": "tigon.distributed.tp",
    "tensor_parallel_plan": "tigon.distributed.tp",
}
_MODULES = ("hpz",)

if TYPE_CHECKING:
    from tigon.distributed import hpz
    from tigon.distributed.hpz import apply_hpz
    from tigon.distributed.tp import tensor_parallel, tensor_parallel_plan
    from tigon.distributed.traffic import count_traffic

__all__ = ["apply_hpz", "count_traffic", "hpz", "tensor_parallel", "tensor_parallel_plan"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"tigon.distributed.{name}")
    else:
        raise AttributeError(f"module 'tigon.distributed' has no attribute {name!r}")
    globals()[name] = value
    return value
