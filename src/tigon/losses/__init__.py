"""Losses of a linear head that never build its logits. The names are imported on first use."""

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "ValidCount": "chunked",
    "ValidLengths": "chunked",
    "cpo": "preference",
    "distill": "distillation",
    "distill_topk": "distillation",
    "dpo": "preference",
    "grpo": "policy",
    "kto": "preference",
    "orpo": "preference",
    "rloo": "policy",
    "simpo": "preference",
}

if TYPE_CHECKING:
    from tigon.losses.chunked import ValidCount, ValidLengths
    from tigon.losses.distillation import distill, distill_topk
    from tigon.losses.policy import grpo, rloo
    from tigon.losses.preference import cpo, dpo, kto, orpo, simpo

__all__ = [
    "ValidCount",
    "ValidLengths",
    "cpo",
    "distill",
    "distill_topk",
    "dpo",
    "grpo",
    "kto",
    "orpo",
    "rloo",
    "simpo",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tigon.losses' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tigon.losses.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
