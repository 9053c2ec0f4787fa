"""How a frozen layer under PEFT's adapters is multiplied by: its weight, its weight made dense, or its own forward.

    plain torch.nn.Linear                      the weight itself
    4-bit layers of bitsandbytes               `FourBit`: made dense for one product at a time
    weight-only tensor classes of torchao      `DequantizedWeight`: the same. Their forward leaves the dense weight
                                               in the graph until the backward pass
    8-bit layers of bitsandbytes               `Opaque` with a dense weight backward: their own Function keeps its
                                               input out of all hooks' sight, also where a checkpoint means to drop
                                               the input, and never reads it
    every other layer of PEFT's known classes  `Opaque`: the layer's own forward under autograd, the adapters beside it

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

# PEFT's classes of linear layers with LoRA, all of the form y = base(x) + scale · B(A(x)); and whether the sum always
# has the dtype of base(x), or under CUDA's autocast the wider one of its two parts.
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

# Libraries whose tensor classes are multiplied by in torch.nn.Linear's own forward.
TENSOR_CLASSES = ("torchao",)

# Base layers whose result and input gradient belong to nobody else; and whether they take rows (M, H) as well as
# (..., H).
FRESH = {
    "bitsandbytes.Linear8bitLt": True,
    "bitsandbytes.Linear4bit": True,
    "transformers.Conv1D": False,
}


def weight_in_8_bits(base: Any) -> Callable[[torch.dtype], Tensor] | None:
    """The weight of an 8-bit layer of bitsandbytes, in the steps of its own backward pass; None where it is trained."""
    state = base.state
    if state.has_fp16_weights or any(p.requires_grad for p in base.parameters()):
        return None

    def weight(dtype: torch.dtype) -> Tensor:
        codes: Tensor = state.CB.to(dtype, copy=True)
        return codes.mul_(state.SCB.unsqueeze(1).mul(1.0 / 127.0))

    return weight


# Base layers whose weight can be had dense for the gradient of the input, though not for the product.
WEIGHTS = {"bitsandbytes.Linear8bitLt": weight_in_8_bits}


def qualify_name(kind: type) -> str:
    """The library and the name of a class, without the modules between: these move from release to release."""
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"


def is_known_layer(layer: nn.Module) -> bool:
    """Whether a layer of PEFT computes its base layer's result, plus the adapter's, and nothing else."""
    return _of_peft(layer) in FORWARDS


def _of_peft(layer: nn.Module) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def is_4bit(base: nn.Module) -> bool:
    return type(base).__module__.startswith("bitsandbytes.") and hasattr(type(base), "set_compute_type")


def is_plain(base: nn.Module) -> bool:
    """Whether the base layer is F.linear by a weight that is an ordinary tensor, or sharded: no quantised one."""
    return type(base) is nn.Linear and not is_tensor_class(base._parameters["weight"])


def is_tensor_class(weight: Any) -> bool:
    return type(weight) not in _PLAIN and type(weight).__module__.partition(".")[0] in TENSOR_CLASSES


@dataclass(frozen=True, eq=False)
class DequantizedWeight:
    """A weight of a tensor class that quantises the weight alone, as a `tigon.ops.linear.lora.Frozen`."""

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
    """The weight of a torch.nn.Linear, if it is of a tensor class that quantises nothing but the weight."""
    weight = base.weight if type(base) is nn.Linear else None
    inputs = WEIGHT_ONLY.get(qualify_name(type(weight)))
    return None if inputs is None or any(getattr(weight, name, None) is not None for name in inputs) else weight


def read_dequantized(base: Any, x: Tensor, dtype: torch.dtype) -> DequantizedWeight | None:
    """The base layer's weight, if only the weight is quantised, and has the dtype of x and of the products."""
    weight = _weight_only(base)
    if weight is None or weight.requires_grad or weight.dim() != 2:
        return None
    # In other dtypes each class has its own order of casts.
    return DequantizedWeight(weight) if weight.dtype == x.dtype == dtype else None


def find_source(weight: Any) -> Any:
    """What stays the same from one reading of a layer to the next: the weight, or what it was read from."""
    if isinstance(weight, FourBit):
        return weight.absmax
    if isinstance(weight, DequantizedWeight):
        return weight.source
    return weight.layer if isinstance(weight, Opaque) else weight


def make_opaque(layer: Any, b: Tensor, x: Tensor, hooked: bool) -> Opaque:
    """The base layer's own forward, as PEFT calls it. hooked: others may hold what the layer gives."""
    # GPTQ and its like call the layer by another name; PEFT keeps both.
    base: Callable[[Tensor], Tensor] = getattr(layer, "quant_linear_module", layer.base_layer)
    name = "" if hooked else qualify_name(type(base))
    shape = (b.shape[0], x.shape[-1])
    narrows = FORWARDS[_of_peft(layer)] or not torch.is_autocast_enabled()
    weight = WEIGHTS[name](base) if name in WEIGHTS else None
    flat = FRESH.get(name, False)
    return Opaque(base, shape, x.device, fresh=name in FRESH, flat=flat, narrows=narrows, weight=weight)


def multiplies_itself(base: Any) -> bool:
    """Whether calls run the base layer's own forward whatever their input; for the report."""
    return not is_plain(base) and not is_4bit(base) and _weight_only(base) is None
