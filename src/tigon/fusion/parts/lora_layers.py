"""Linear layers with an adapter that `tigon.lora_linear` computes, read anew at every call.

PEFT switches adapters on and off, scales, merges, adds and deletes them at any time. So no layer state is kept
between calls: `read_lora` reads PEFT's public attributes, and gives the layer as a `tigon.LoRA`, or the Reason why
PEFT's own forward has to run. The frozen layer under the adapter is multiplied by

    plain torch.nn.Linear                      the weight itself, or `FrozenLinear`: its copy in FP8
    4-bit layers from bitsandbytes             `FourBit`: made dense for one product at a time
    weight-only tensor classes from torchao    `DequantizedWeight`: the same. Their forward leaves the dense weight
                                               in the graph until the backward pass
    FP8 layers from transformers               `FrozenBlocks`, `FrozenChannels`: products in FP8; or made dense, too
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

from tigon.fusion.engine.patch import is_hooked
from tigon.fusion.engine.reasons import ADAPTERS_OFF, Reason
from tigon.fusion.fp8.adapters import read_base
from tigon.fusion.fp8.checkpoint import is_fp8_layer, qualify_name, read_stored
from tigon.fusion.parts.sharded_rows import find_class
from tigon.kernels import autocast_dtype
from tigon.ops.dequantize_4bit import FourBit
from tigon.ops.fp8.frozen import FrozenLinear, ReplacedWeight
from tigon.ops.fp8.frozen_checkpoint import StoredFP8
from tigon.ops.linear.lora import Known, LoRA
from tigon.ops.linear.opaque import Opaque

_PLAIN = (Tensor, nn.Parameter)

NOT_PEFT = Reason("its class is not PEFT's own, and may compute something else")
NO_ADAPTER = Reason("no adapter is active on it")
SEVERAL = Reason("several adapters are active on it at once")
SWITCHED_OFF = Reason(ADAPTERS_OFF)
DROPOUT = Reason("its adapter drops every element of its input", "train with lora_dropout below 1")
VARIANT = Reason("its adapter is a LoRA variant (DoRA, aLoRA and the like)")
BIAS = Reason("its adapter has a bias (lora_bias)")
RANK_ZERO = Reason("its adapter has rank 0", "delete the adapter, or load a complete adapter")
INSIDE = Reason("its adapter's own layers have hooks, or are not plain torch.nn.Linear and Dropout")
ZERO3 = Reason("its weights are partitioned by DeepSpeed's ZeRO-3, which gathers them for PEFT's own layers alone")
BASE_HOOKED = Reason("its base layer has hooks or a replaced forward")
TRAINED = Reason("its base layer's weight is trained too")
NO_STATE = Reason("its base layer is quantised, but has no quantisation state yet", "move the model to its device")
ADAPTER_IN_FP8 = Reason("its adapter is in FP8 itself", "call get_peft_model with autocast_adapter_dtype=True")
DTYPES_DIFFER = Reason("its input, base layer and adapter have incompatible dtypes or devices")
SHARDED = Reason("its weights are sharded (DTensor), or use a tensor class that Tigon does not support")


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a layer with LoRA adapters, by PEFT's public attributes."""
    modules = module._modules
    return (
        isinstance(modules.get("lora_A"), nn.ModuleDict)
        and isinstance(modules.get("lora_B"), nn.ModuleDict)
        and isinstance(modules.get("base_layer"), nn.Module)
        and isinstance(getattr(module, "scaling", None), dict)
    )


def adapts_parameter(layer: nn.Module) -> bool:
    """Whether the adapters are on a parameter (`target_parameters`), beside the code that uses it."""
    return _name_peft_class(layer) == "peft.tuners.lora.layer.ParamWrapper"


def lasting_reason(layer: Any) -> Reason | None:
    """Why a layer is left to PEFT whatever the input; None if calls decide."""
    if not find_class(layer).__module__.startswith("peft."):
        return NOT_PEFT
    if not layer.lora_A:
        is_elsewhere = bool(getattr(layer, "lora_embedding_A", None))
        return Reason("its adapters are not on a linear layer") if is_elsewhere else NO_ADAPTER
    if _name_peft_class(layer) not in FORWARDS:
        return Reason(
            f"it is a {find_class(layer).__name__} of PEFT, which may compute something that Tigon does not know"
        )
    adapter = read_adapter(layer)
    return adapter if isinstance(adapter, Reason) and adapter in (VARIANT, BIAS, INSIDE, ZERO3) else None


def read_adapter(layer: Any) -> Reason | tuple[Any, Any, float, float]:
    """A, B, the scale and the dropout of the only active adapter."""
    if layer.disable_adapters or layer.merged:
        return SWITCHED_OFF
    modules = layer._modules  # nn.Module.__getattr__ takes longer, and this runs for every layer in every call
    firsts, seconds = modules["lora_A"]._modules, modules["lora_B"]._modules
    active = layer.active_adapters
    if len(active) != 1 or active[0] not in firsts:
        active = [name for name in active if name in firsts]
        if len(active) != 1:
            return SEVERAL if active else NO_ADAPTER
    name = active[0]
    if name in layer.lora_variant or layer.use_dora.get(name):
        return VARIANT
    if layer.lora_bias.get(name):
        return BIAS
    a, b = firsts[name], seconds[name]
    if not (_is_plain(a) and _is_plain(b)):
        return ZERO3 if hasattr(getattr(a, "weight", None), "ds_id") else INSIDE
    if a._parameters["bias"] is not None or b._parameters["bias"] is not None:
        return BIAS
    dropout, p = modules["lora_dropout"]._modules.get(name), 0.0
    if dropout is not None and (type(dropout) not in (nn.Dropout, nn.Identity) or not _calls_nothing_else(dropout)):
        return INSIDE
    if type(dropout) is nn.Dropout and dropout.training:
        p = float(dropout.p)
        if not p < 1:
            return DROPOUT
    return a, b, float(layer.scaling[name]), p


def _is_plain(layer: Any) -> bool:
    return type(layer) is nn.Linear and _calls_nothing_else(layer)


def _calls_nothing_else(layer: nn.Module) -> bool:
    return "forward" not in vars(layer) and not is_hooked(layer)


def read_lora(layer: Any, x: Any) -> LoRA | Reason:
    """The layer as of now, for an input x; or why PEFT's own forward has to run."""
    adapter = read_adapter(layer)
    if isinstance(adapter, Reason):
        return adapter
    first, second, scale, dropout = adapter
    base = layer._modules["base_layer"]
    hooked = not _calls_nothing_else(base) and not _is_fp8_alone(base)
    # A layer that multiplies by itself runs hooks as PEFT does: in the layer's own call.
    if torch.nn.modules.module._has_any_global_hook() or (hooked and not multiplies_itself(base)):
        return BASE_HOOKED
    a, b = first._parameters["weight"], second._parameters["weight"]
    if not isinstance(x, Tensor) or not x.dim() or not x.dtype.is_floating_point:
        return DTYPES_DIFFER
    if not a.shape[0]:
        return RANK_ZERO
    if type(x) not in _PLAIN or type(a) not in _PLAIN or type(b) not in _PLAIN:
        return SHARDED
    floats = a.dtype.is_floating_point and b.dtype.is_floating_point
    if not floats or not a.device == b.device == x.device or x.shape[-1] != a.shape[1]:
        return DTYPES_DIFFER
    cast = autocast_dtype(x.device.type)
    dtype = cast or x.dtype
    if is_plain(base):
        parameters = base._parameters
        own = read_base(layer, x, parameters["weight"])
        if not isinstance(own, Tensor) or isinstance(own, ReplacedWeight):
            frozen = DequantizedWeight(own) if isinstance(own, ReplacedWeight) else own
            return _read_frozen(LoRA(frozen, a, b, scale, parameters["bias"], dropout), x, parameters["weight"], cast)
        layer = Known(own, a, b, scale, parameters["bias"], dropout)
        return _read_linear(layer, x, cast)
    weight: Any = _read_4bit(base, x, dtype) if is_4bit(base) else read_dequantized(base, x, dtype)
    bias = getattr(base, "bias", None)
    if is_fp8_layer(base):
        if a.dtype.itemsize == 1:
            return ADAPTER_IN_FP8
        weight = read_stored(base, x, dtype)
        bias = bias.to(dtype) if isinstance(bias, Tensor) and weight is not None else bias
    if isinstance(weight, Reason):
        return weight
    fits = bias is None or (type(bias) in _PLAIN and (bias.dtype, bias.device) == (dtype, x.device))
    if weight is None or not fits:
        return LoRA(make_opaque(layer, b, x, hooked), a, b, scale, None, dropout)
    return LoRA(weight, a, b, scale, bias, dropout)


def _read_linear(layer: LoRA, x: Tensor, cast: torch.dtype | None) -> LoRA | Reason:
    weight: Any = layer.weight
    bias = layer.bias
    if weight.requires_grad and torch.is_grad_enabled():
        return TRAINED
    if type(weight) not in _PLAIN or (bias is not None and type(bias) not in _PLAIN):
        return SHARDED
    # Autocast leaves fp64 alone; without autocast torch raises for dtypes that differ.
    fits = x.dtype == weight.dtype or (cast is not None and x.dtype != torch.float64)
    if not fits or weight.device != x.device or (bias is not None and bias.device != x.device):
        return DTYPES_DIFFER
    # Shapes and dtypes that were not changed by hand fit as well. If they were, the operator's checks raise.
    shapes = weight.dim() == 2 and layer.b.shape == (weight.shape[0], layer.a.shape[0]) and layer.a.dim() == 2
    plain = shapes and weight.shape[1] == x.shape[-1] and weight.dtype.is_floating_point
    own = bias is None or (bias.shape == weight.shape[:1] and (cast is not None or bias.dtype == x.dtype))
    return layer if plain and own else LoRA(*layer)


def _read_frozen(layer: LoRA, x: Tensor, weight: Tensor, cast: torch.dtype | None) -> LoRA | Reason:
    """A layer whose weight (N, H) stands in another representation; weight: as the base layer has it."""
    if isinstance(weight, ReplacedWeight):
        dtype, device, shape = weight.facts
    else:
        dtype, device, shape = weight.dtype, weight.device, weight.shape
    fits = x.dtype == dtype or (cast is not None and x.dtype != torch.float64)
    bias = layer.bias
    if not fits or device != x.device or (bias is not None and type(bias) not in _PLAIN):
        return DTYPES_DIFFER
    known = shape == (layer.b.shape[0], x.shape[-1]) and layer.b.shape[1] == layer.a.shape[0]
    own = bias is None or (bias.device == x.device and (cast is not None or bias.dtype == x.dtype))
    return Known(*layer) if known and own else layer


def _read_4bit(base: Any, x: Tensor, dtype: torch.dtype) -> FourBit | Reason | None:
    """The weight; None where the layer has to multiply by itself."""
    # FSDP2 gathers a plain tensor; the layer keeps the state, as bitsandbytes' own forward reads it then.
    state = getattr(base.weight, "quant_state", None) or getattr(base, "quant_state", None)
    if state is None:
        return NO_STATE
    if getattr(state, "packing_format_for_cpu", False):
        return None
    if not base.compute_type_is_set:  # as the layer's forward does at its first call
        base.set_compute_type(x)
        base.compute_type_is_set = True
    fits = base.compute_dtype in (None, dtype) and (base.compute_dtype is not None or dtype == x.dtype)
    return FourBit.from_parameter(base.weight, state=state) if fits and base.weight.device == x.device else None


# -------------------------------------------------------------------------------------------------------- frozen layers

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


def _name_peft_class(layer: nn.Module) -> str:
    kind = find_class(layer)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_4bit(base: nn.Module) -> bool:
    return type(base).__module__.startswith("bitsandbytes.") and hasattr(type(base), "set_compute_type")


def _is_fp8_alone(base: nn.Module) -> bool:
    """Whether an FP8 layer has no forward but Tigon's own, which computes what `read_stored` gives."""
    patch = vars(base).get("_tigon")
    return is_fp8_layer(base) and patch is not None and patch.is_installed_on(base) and not is_hooked(base)


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


def has_plain_base(layer: LoRA) -> bool:
    """Whether the base layer is a plain torch.nn.Linear, whose result has the dtype of its product."""
    weight = layer.weight
    is_replaced = isinstance(weight, DequantizedWeight) and isinstance(weight.source, ReplacedWeight)
    return isinstance(weight, Tensor | FrozenLinear) or is_replaced


def find_source(weight: Any) -> Any:
    """The object that stays the same across reads: the weight, or the tensor that the weight was read from."""
    if isinstance(weight, FourBit):
        return weight.absmax
    if isinstance(weight, DequantizedWeight | FrozenLinear):
        return weight.source
    if isinstance(weight, StoredFP8):
        return weight.data
    return weight.layer if isinstance(weight, Opaque) else weight


def make_opaque(layer: Any, b: Tensor, x: Tensor, hooked: bool) -> Opaque:
    """The base layer's own forward, as PEFT calls it. hooked: other code may hold the layer's result."""
    # GPTQ and similar layers are called by another name; PEFT keeps both.
    base: Callable[[Tensor], Tensor] = getattr(layer, "quant_linear_module", layer.base_layer)
    name = "" if hooked else qualify_name(type(base))
    shape = (b.shape[0], x.shape[-1])
    narrows = FORWARDS[_name_peft_class(layer)] or not torch.is_autocast_enabled()
    weight = WEIGHTS[name](base) if name in WEIGHTS else None
    flat = FRESH.get(name, False)
    return Opaque(base, shape, x.device, fresh=name in FRESH, flat=flat, narrows=narrows, weight=weight)


def multiplies_itself(base: Any) -> bool:
    """Whether calls run the base layer's own forward whatever the input; for the report."""
    return not is_plain(base) and not is_4bit(base) and not is_fp8_layer(base) and _weight_only(base) is None
