"""Tigon: fused Triton kernels, losses that never build the logits, and `tigon.fuse(model)`.

The names below are imported on first use, so that `import tigon` costs little more than `import torch`.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "use_backend": "tigon.backend",
    "rms_norm": "tigon.ops.rms_norm",
    "add_rms_norm": "tigon.ops.rms_norm",
    "layer_norm": "tigon.ops.layer_norm",
    "group_norm": "tigon.ops.group_norm",
    "rope": "tigon.ops.rope",
    "qk_norm_rope": "tigon.ops.qk_norm_rope",
    "swiglu": "tigon.ops.gated",
    "geglu": "tigon.ops.gated",
    "reglu": "tigon.ops.gated",
    "relu2": "tigon.ops.relu2",
    "moe_mlp": "tigon.ops.experts",
    "dyt": "tigon.ops.dyt",
    "poly_norm": "tigon.ops.poly_norm",
    "softmax": "tigon.ops.softmax",
    "sparsemax": "tigon.ops.sparsemax",
    "cross_entropy": "tigon.ops.cross_entropy",
    "kl_div": "tigon.ops.divergence",
    "jsd": "tigon.ops.divergence",
    "tvd": "tigon.ops.divergence",
    "embedding": "tigon.ops.embedding",
    "logprob": "tigon.ops.logprob",
    "LogProb": "tigon.ops.logprob",
    "linear_cross_entropy": "tigon.losses.linear_cross_entropy",
    "linear_logprob": "tigon.losses.linear_logprob",
    "fuse": "tigon.models.fusion",
    "Fusion": "tigon.models.fusion",
}
_MODULES = ("backend", "compat", "distributed", "integrations", "losses", "models", "nn", "ops", "optim")

if TYPE_CHECKING:
    from tigon import backend, compat, distributed, integrations, losses, models, nn, ops, optim
    from tigon.backend import use_backend
    from tigon.losses.linear_cross_entropy import linear_cross_entropy
    from tigon.losses.linear_logprob import linear_logprob
    from tigon.models.fusion import Fusion, fuse
    from tigon.ops.cross_entropy import cross_entropy
    from tigon.ops.divergence import jsd, kl_div, tvd
    from tigon.ops.dyt import dyt
    from tigon.ops.embedding import embedding
    from tigon.ops.experts import moe_mlp
    from tigon.ops.gated import geglu, reglu, swiglu
    from tigon.ops.group_norm import group_norm
    from tigon.ops.layer_norm import layer_norm
    from tigon.ops.logprob import LogProb, logprob
    from tigon.ops.poly_norm import poly_norm
    from tigon.ops.qk_norm_rope import qk_norm_rope
    from tigon.ops.relu2 import relu2
    from tigon.ops.rms_norm import add_rms_norm, rms_norm
    from tigon.ops.rope import rope
    from tigon.ops.softmax import softmax
    from tigon.ops.sparsemax import sparsemax

__all__ = [
    "Fusion",
    "LogProb",
    "add_rms_norm",
    "backend",
    "compat",
    "cross_entropy",
    "distributed",
    "dyt",
    "embedding",
    "fuse",
    "geglu",
    "group_norm",
    "integrations",
    "jsd",
    "kl_div",
    "layer_norm",
    "linear_cross_entropy",
    "linear_logprob",
    "logprob",
    "losses",
    "models",
    "moe_mlp",
    "nn",
    "ops",
    "optim",
    "poly_norm",
    "qk_norm_rope",
    "reglu",
    "relu2",
    "rms_norm",
    "rope",
    "softmax",
    "sparsemax",
    "swiglu",
    "tvd",
    "use_backend",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"tigon.{name}")
    else:
        raise AttributeError(f"module 'tigon' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
