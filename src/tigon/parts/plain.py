"""Linear layers that do no more than F.linear, whose weights an operator may then multiply by in their place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.fusion.patch import is_hooked
from tigon.runtime import autocast_dtype
from tigon.runtime.autograd import is_traced

_PLAIN = (Tensor, nn.Parameter)


def plain_layers(layers: Iterable[Any], x: Any) -> tuple[list[Tensor], list[Tensor | None]] | None:
    """Weights and biases, where calling each of the layers does no more than F.linear; None if one of them may do more.

    Asked at each call, since a layer may have got a hook, an adapter, another forward, or a weight that is sharded,
    quantised or of another dtype. None also without gradients, where there is nothing to join; in traces and under
    transforms; and under autocast, which casts a weight once for all its uses.
    """
    if not torch.is_grad_enabled() or type(x) not in _PLAIN:
        return None
    weights: list[Tensor] = []
    biases: list[Tensor | None] = []
    dtype, device = x.dtype, x.get_device()
    for layer in layers:
        if type(layer) is not nn.Linear:
            return None
        state = layer.__dict__
        if "forward" in state or is_hooked(layer):
            return None
        # FSDP without the original parameters has taken them out of here, and keeps views under their names.
        parameters = state["_parameters"]
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if type(weight) not in _PLAIN or weight.dtype is not dtype or weight.get_device() != device:
            return None
        if bias is not None and (type(bias) not in _PLAIN or bias.dtype is not dtype or bias.get_device() != device):
            return None
        weights.append(weight)
        biases.append(bias)
    if torch.nn.modules.module._has_any_global_hook() or torch._C._are_functorch_transforms_active():
        return None
    if is_traced(x) or autocast_dtype(x.device.type) is not None:
        return None
    return weights, biases
