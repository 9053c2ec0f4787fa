"""Linear layers that do no more than F.linear, whose weights an operator may then multiply by in their place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tigon.fusion.engine.patch import is_hooked
from tigon.fusion.logits.recipe import DTYPES
from tigon.kernels import autocast_dtype, use_triton
from tigon.kernels.autograd import is_traced

_PLAIN = (Tensor, nn.Parameter)


class PlainLayers(NamedTuple):
    """Operands for layers with one input, all in one dtype: under autocast cast as autocast casts them."""

    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor | None]


def plain_layers(layers: Iterable[Any], x: Any) -> PlainLayers | None:
    """The layers' operands, if each call does no more than F.linear; None if any layer may do more.

    Asked at each call, since a layer may have got a hook, an adapter, another forward, or a weight that is sharded,
    quantised or in another dtype. None also without gradients, where there are no gradients to join, in traces, and
    under transforms.
    """
    if not torch.is_grad_enabled() or type(x) not in _PLAIN:
        return None
    weights: list[Tensor] = []
    biases: list[Tensor | None] = []
    dtype, device = x.dtype, x.get_device()
    narrow = autocast_dtype(x.device.type)
    if narrow is not None and dtype not in DTYPES:
        return None  # autocast leaves fp64 alone
    for layer in layers:
        if type(layer) is not nn.Linear:
            return None
        state = layer.__dict__
        if "forward" in state or is_hooked(layer):
            return None
        # FSDP without the original parameters has taken them out here, and keeps views under their names.
        parameters = state["_parameters"]
        weight, bias = parameters.get("weight"), parameters.get("bias")
        for t in (weight,) if bias is None else (weight, bias):
            if type(t) not in _PLAIN or t.get_device() != device:
                return None
            if t.dtype is not dtype if narrow is None else t.dtype not in DTYPES:
                return None
        weights.append(weight)
        biases.append(bias)
    if torch.nn.modules.module._has_any_global_hook() or torch._C._are_functorch_transforms_active() or is_traced(x):
        return None
    if narrow is not None and use_triton(x, *weights):  # without kernels the layers are called, and cast themselves
        # The input is cast once for all layers, where autocast casts it per layer.
        x, weights = x.to(narrow), [t.to(narrow) for t in weights]
        biases = [t if t is None else t.to(narrow) for t in biases]
    return PlainLayers(x, weights, biases)


def why_not_plain(x: Any) -> str:
    """Why `plain_layers` gave None, as a clause for the report."""
    if not torch.is_grad_enabled():
        return "no gradients were recorded, so there was nothing to join"
    dtype = str(getattr(x, "dtype", "")).removeprefix("torch.")
    return f"a layer had an adapter, a hook, or a weight that is not a plain tensor beside the {dtype} input"
