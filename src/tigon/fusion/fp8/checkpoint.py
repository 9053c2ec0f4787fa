"""Layers whose weights a checkpoint holds in FP8, as transformers makes them, read anew at every call.

Such a layer's own forward may return a result that knows no gradient for its input: `drops_gradient`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from tigon.fusion.engine.reasons import Reason
from tigon.ops.fp8.frozen_checkpoint import StoredFP8, freeze_fp8
from tigon.ops.fp8.products import why_no_blocks, why_unsupported

# The parameter with the scales of the weight. Matched by library and class, so that transformers is not imported.
SCALES = {"transformers.FP8Linear": "weight_scale_inv", "transformers.FbgemmFp8Linear": "weight_scale"}

_PLAIN = (Tensor, nn.Parameter)

_DENSE = "load the model with FineGrainedFP8Config(dequantize=True)"
STATIC = Reason("its input has a static scale (activation_scale), which gradients would need as well", _DENSE)
NO_SCALE = Reason("it is in FP8, but has no scales for its weight", "load the model from its checkpoint")
ELSEWHERE = Reason("its weight in FP8 is sharded, or on another device than its input")


def qualify_name(kind: type) -> str:
    """A class's library and name, without the modules between: these move from release to release."""
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"


def is_fp8_layer(layer: Any) -> bool:
    return qualify_name(type(layer)) in SCALES


def read_stored(layer: Any, x: Tensor, dtype: torch.dtype) -> StoredFP8 | Reason | None:
    """The layer's weight for products in this dtype; None where the layer is no FP8 layer, or no longer one.

    Products run in FP8 where dtype is bf16 and the device has them; elsewhere the weight is made dense for each.
    """
    name = SCALES.get(qualify_name(type(layer)))
    if name is None:
        return None
    weight, scale = layer._parameters.get("weight"), layer._parameters.get(name)
    if type(weight) not in _PLAIN or type(scale) not in (*_PLAIN, type(None)) or weight.device != x.device:
        return ELSEWHERE
    if weight.element_size() > 1:
        return None
    if weight.dtype != torch.float8_e4m3fn:
        return Reason(f"its weight is {str(weight.dtype).removeprefix('torch.')}, and Tigon reads float8_e4m3fn alone")
    if layer._parameters.get("activation_scale") is not None:
        return STATIC
    if scale is None:
        return NO_SCALE
    size = getattr(layer, "block_size", None)
    blocks = None if size is None else (int(size[0]), int(size[1]))
    if not StoredFP8.fits(weight, scale, blocks):
        where = "" if blocks is None else f" in blocks of {blocks[0]} × {blocks[1]}"
        return Reason(f"its scales {tuple(scale.shape)} do not fit its weight {tuple(weight.shape)}{where}")
    make = freeze_fp8 if may_multiply(x, dtype, is_in_blocks=blocks is not None) else StoredFP8
    return make(weight, scale, blocks)


def may_multiply(x: Tensor, dtype: torch.dtype, *, is_in_blocks: bool) -> bool:
    """Whether products of x run in FP8."""
    if dtype is not torch.bfloat16 or not x.is_cuda:
        return False
    return not (why_no_blocks if is_in_blocks else why_unsupported)(x.device)


def drops_gradient(layer: Any) -> bool:
    """Whether an FP8 layer's own forward returns no gradient for its input.

    In transformers 5.17 all do; in 5.23 FP8Linear has an autograd Function of that name, and FbgemmFp8Linear none.
    """
    if getattr(layer._parameters.get("weight"), "dtype", None) not in _EIGHT_BITS:
        return False
    return not hasattr(sys.modules.get(type(layer).__module__), f"{type(layer).__name__}Function")


def check_gradient(layer: Any, x: Any, why: str) -> None:
    """Raise where the layer's own forward is about to drop a gradient."""
    if not torch.is_grad_enabled() or not isinstance(x, Tensor) or not x.requires_grad or not drops_gradient(layer):
        return
    raise RuntimeError(
        f"fuse: a {type(layer).__name__} runs its own forward, since {why}. In this release of transformers that "
        "forward drops the gradient for all layers before it: load the model dequantised, as by "
        "FineGrainedFP8Config(dequantize=True)."
    )


_EIGHT_BITS = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int8,
)  # fmt: skip
