"""Which linear layers carry an adapter that `tigon.lora_linear` computes, read anew at every call.

PEFT switches adapters on and off, scales, merges, adds and deletes them at any time. So no layer state is kept
between calls: `read_lora` reads PEFT's public attributes, and gives the layer as a `tigon.LoRA`, or the Reason why
PEFT's own forward has to run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tigon.fusion.engine.patch import is_hooked
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.parts.frozen_weights import (
    is_4bit,
    is_known_layer,
    is_plain,
    make_opaque,
    multiplies_itself,
    read_dequantized,
)
from tigon.kernels import autocast_dtype
from tigon.ops.dequantize_4bit import FourBit
from tigon.ops.linear.lora import Known, LoRA

_PLAIN = (Tensor, nn.Parameter)

NOT_PEFT = Reason("its class is not PEFT's own, and may compute something else")
NO_ADAPTER = Reason("no adapter is active on it")
SEVERAL = Reason("several adapters are active on it at once")
SWITCHED_OFF = Reason("its adapters are switched off or merged")
DROPOUT = Reason("its adapter drops every element of its input", "train with lora_dropout below 1")
VARIANT = Reason("its adapter is a variant of LoRA (DoRA, aLoRA and the like)")
BIAS = Reason("its adapter has a bias (lora_bias)")
RANK_ZERO = Reason("its adapter has rank 0", "delete the adapter, or load one that is whole")
INSIDE = Reason("its adapter's own layers have hooks, or are not plain torch.nn.Linear and Dropout")
ZERO3 = Reason("its weights are partitioned by DeepSpeed's ZeRO-3, which gathers them for PEFT's own layers alone")
BASE_HOOKED = Reason("its base layer has hooks or a replaced forward")
TRAINED = Reason("its base layer's weight is trained too")
NO_STATE = Reason("its base layer is quantised, but has no quantisation state yet", "move the model to its device")
DTYPES_DIFFER = Reason("its input, base layer and adapter have dtypes or devices that do not go together")
SHARDED = Reason("its weights are sharded (DTensor), or of a tensor class that Tigon does not know")


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a layer with LoRA adapters, by PEFT's public attributes."""
    modules = module._modules
    return (
        isinstance(modules.get("lora_A"), nn.ModuleDict)
        and isinstance(modules.get("lora_B"), nn.ModuleDict)
        and isinstance(modules.get("base_layer"), nn.Module)
        and isinstance(getattr(module, "scaling", None), dict)
    )


def lasting_reason(layer: Any) -> Reason | None:
    """Why a layer is left to PEFT whatever the input; None if calls decide."""
    if not type(layer).__module__.startswith("peft."):
        return NOT_PEFT
    if not layer.lora_A:
        return Reason("its adapters are not on a linear layer") if _is_elsewhere(layer) else NO_ADAPTER
    if not is_known_layer(layer):
        return Reason(f"it is a {type(layer).__name__} of PEFT, and Tigon does not know what else that computes")
    adapter = _adapter(layer)
    return adapter if isinstance(adapter, Reason) and adapter in (VARIANT, BIAS, INSIDE, ZERO3) else None


def _is_elsewhere(layer: Any) -> bool:
    return bool(getattr(layer, "lora_embedding_A", None))


def _adapter(layer: Any) -> Reason | tuple[Any, Any, float, float]:
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
    adapter = _adapter(layer)
    if isinstance(adapter, Reason):
        return adapter
    first, second, scale, dropout = adapter
    base = layer._modules["base_layer"]
    hooked = not _calls_nothing_else(base)
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
        layer = Known(parameters["weight"], a, b, scale, parameters["bias"], dropout)
        return _of_linear(layer, x, cast)
    weight = _of_4bit(base, x, dtype) if is_4bit(base) else read_dequantized(base, x, dtype)
    if isinstance(weight, Reason):
        return weight
    bias = getattr(base, "bias", None)
    fits = bias is None or (type(bias) in _PLAIN and (bias.dtype, bias.device) == (dtype, x.device))
    if weight is None or not fits:
        return LoRA(make_opaque(layer, b, x, hooked), a, b, scale, None, dropout)
    return LoRA(weight, a, b, scale, bias, dropout)


def _of_linear(layer: LoRA, x: Tensor, cast: torch.dtype | None) -> LoRA | Reason:
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


def _of_4bit(base: Any, x: Tensor, dtype: torch.dtype) -> FourBit | Reason | None:
    """The weight; None where the layer has to multiply by itself."""
    state = getattr(base.weight, "quant_state", None)
    if state is None:
        return NO_STATE
    if getattr(state, "packing_format_for_cpu", False):
        return None
    if not base.compute_type_is_set:  # as the layer's forward does at its first call
        base.set_compute_type(x)
        base.compute_type_is_set = True
    fits = base.compute_dtype in (None, dtype) and (base.compute_dtype is not None or dtype == x.dtype)
    return FourBit.from_parameter(base.weight) if fits and base.weight.device == x.device else None
