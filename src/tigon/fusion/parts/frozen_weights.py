"""How to multiply by a frozen layer under PEFT's adapters: its weight, a dense copy, or the layer's own forward.

    plain torch.nn.Linear                      the weight itself
    4-bit layers from bitsandbytes             `FourBit`: made dense for one product at a time
    weight-only tensor classes from torchao    `DequantizedWeight`: the same. Their forward leaves the dense weight
                                               in the graph until the backward pass
    8-bit layers from bitsandbytes             `Opaque` with a dense weight backward: their own Function hides the
                                               input from all hooks, also where a checkpoint means to drop
                                               the input, and never reads it
    all other layers in PEFT's known classes   `Opaque`: the layer's own forward under autograd, the adapters beside it

A tensor class that also quantises the layer's input is opaque: a dense weight would leave that step out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tigon.ops.dequantize_4bit import FourBit
from tigon.ops.linear.opaque import Opaque

_PLAIN = (Tensor, nn.Parameter)

# PEFT's linear-layer classes with LoRA, all of the form y = base(x) + scale · B(A(x)); and whether the sum always
# has base(x)'s dtype, or under CUDA's autocast the wider dtype of the two parts.
FORWARDS = {
    "peft.tuners.lora.layer.Linear": True,
    "peft.tuners.lora.torchao.TorchaoLoraLinear": True,
    "peft.tuners.lora.inc.IncLoraLinear": True,
    "peft.tuners.lora.gptq.GPTQLoraLinear": True,
    "peft.tuners.lora.te.TeLinear": True,
    "peft.tuners.lora.aqlm.AqlmLoraLinear": True,
    "peft.tuners.lora.bnb.Linear8bitLt": False,
    "peft.tuners.lora.bnb.Linear4bit": False,
    "peft.tuners.lora.awq.AwqLoraLinear": False,
    "peft.tuners.lora.eetq.EetqLoraLinear": False,
    "peft.tuners.lora.hqq.HqqLoraLinear": False,
}

# Tensor classes whose `dequantize()` is all that their product does to the weight, where these attributes are None:
# they quantise or scale the input.
WEIGHT_ONLY = {
    "torchao.Int8Tensor": ("act_quant_kwargs", "act_quant_scale", "act_pre_scale"),
    "torchao.Float8Tensor": ("act_quant_kwargs",),
    "torchao.IntxUnpackedToInt8Tensor": ("activation_quantization",),
}

# Libraries whose tensor classes torch.nn.Linear's own forward multiplies by.
TENSOR_CLASSES = ("torchao",)

# Base layers whose result and input gradient no other code holds; and whether they take rows (M, H) as well as
# (..., H).
FRESH = {
    "bitsandbytes.Linear8bitLt": True,
    "bitsandbytes.Linear4bit": True,
    "transformers.Conv1D": False,
}


def weight_in_8_bits(base: Any) -> Callable[[torch.dtype], Tensor] | None:
    """An 8-bit bitsandbytes weight, by the steps in that layer's backward pass; None where the weight is trained."""
    state = base.state
    if state.has_fp16_weights or any(p.requires_grad for p in base.parameters()):
        return None

    def weight(dtype: torch.dtype) -> Tensor:
        codes: Tensor = state.CB.to(dtype, copy=True)
        return codes.mul_(state.SCB.unsqueeze(1).mul(1.0 / 127.0))

    return weight


# Base layers whose weight can be had dense for the input gradient, though not for the product.
WEIGHTS = {"bitsandbytes.Linear8bitLt": weight_in_8_bits}


def qualify_name(kind: type) -> str:
    """A class's library and name, without the modules between: these move from release to release."""
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"


def is_known_layer(layer: nn.Module) -> bool:
    """Whether a PEFT layer computes the base layer's result plus the adapter's, and no more."""
    return _of_peft(layer) in FORWARDS


def _of_peft(layer: nn.Module) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def is_4bit(base: nn.Module) -> bool:
    return type(base).__module__.startswith("bitsandbytes.") and hasattr(type(base), "set_compute_type")


def is_plain(base: nn.Module) -> bool:
    """Whether the base layer is F.linear by a weight that is an ordinary or a sharded tensor, not quantised."""
    return type(base) is nn.Linear and not is_tensor_class(base._parameters["weight"])


def is_tensor_class(weight: Any) -> bool:
    return type(weight) not in _PLAIN and type(weight).__module__.partition(".")[0] in TENSOR_CLASSES


@dataclass(frozen=True, eq=False)
class DequantizedWeight:
    """A weight whose tensor class quantises the weight alone, as a `tigon.ops.linear.lora.Frozen`."""

    source: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.source.shape)

    @property
    def device(self) -> torch.device:
        return self.source.device

    def dense(self, dtype: torch.dtype) -> Tensor:
        w: Tensor = self.source.dequantize()
        return w if w.dtype == dtype else w.to(dtype)


def _weight_only(base: Any) -> Any:
    """A torch.nn.Linear's weight, if the tensor class quantises the weight alone."""
    weight = base.weight if type(base) is nn.Linear else None
    inputs = WEIGHT_ONLY.get(qualify_name(type(weight)))
    return None if inputs is None or any(getattr(weight, name, None) is not None for name in inputs) else weight


def read_dequantized(base: Any, x: Tensor, dtype: torch.dtype) -> DequantizedWeight | None:
    """The base layer's weight, if only the weight is quantised, and the dtype is that of x and the products."""
    weight = _weight_only(base)
    if weight is None or weight.requires_grad or weight.dim() != 2:
        return None
    # In other dtypes each class casts in a different order.
    return DequantizedWeight(weight) if weight.dtype == x.dtype == dtype else None


def find_source(weight: Any) -> Any:
    """The object that stays the same across reads: the weight, or the tensor that the weight was read from."""
    if isinstance(weight, FourBit):
        return weight.absmax
    if isinstance(weight, DequantizedWeight):
        return weight.source
    return weight.layer if isinstance(weight, Opaque) else weight


def make_opaque(layer: Any, b: Tensor, x: Tensor, hooked: bool) -> Opaque:
    """The base layer's own forward, as PEFT calls it. hooked: other code may hold the layer's result."""
    # GPTQ and similar layers are called by another name; PEFT keeps both.
    base: Callable[[Tensor], Tensor] = getattr(layer, "quant_linear_module", layer.base_layer)
    name = "" if hooked else qualify_name(type(base))
    shape = (b.shape[0], x.shape[-1])
    narrows = FORWARDS[_of_peft(layer)] or not torch.is_autocast_enabled()
    weight = WEIGHTS[name](base) if name in WEIGHTS else None
    flat = FRESH.get(name, False)
    return Opaque(base, shape, x.device, fresh=name in FRESH, flat=flat, narrows=narrows, weight=weight)


def multiplies_itself(base: Any) -> bool:
    """Whether calls run the base layer's own forward whatever the input; for the report."""
    return not is_plain(base) and not is_4bit(base) and _weight_only(base) is None
