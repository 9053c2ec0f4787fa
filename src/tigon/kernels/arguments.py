"""Argument checks that run before all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# A weight alone, a weight with its bias, or the layer that holds both.
Layer = Tensor | tuple[Tensor, Tensor | None] | torch.nn.Linear


def check_tensors(name: str, **arguments: Any) -> None:
    """Raise a ValueError for an argument that is neither a tensor nor None, such as a layer passed as a weight."""
    for argument, value in arguments.items():
        if value is None or isinstance(value, Tensor):
            continue
        attribute = argument.rpartition("_")[2]  # gate_weight → weight, the layer's attribute
        advice = f": pass its {attribute}" if isinstance(getattr(value, attribute, None), Tensor) else ""
        raise ValueError(f"{name}: {argument} must be a tensor, got {type(value).__name__}{advice}.")


def check_plain(name: str, /, **arguments: Any) -> None:
    """Raise a ValueError for an argument that is no plain tensor or None: of a DTensor, kernels see a shard alone."""
    check_tensors(name, **arguments)
    for argument, value in arguments.items():
        if hasattr(value, "device_mesh"):
            raise ValueError(f"{name}: {argument} must be a plain tensor, got a DTensor: pass to_local().")


def check_no_shape(name: str, weight: Any) -> None:
    """Raise a ValueError if torch's normalized_shape was passed as the weight."""
    if isinstance(weight, int | tuple | list):
        raise ValueError(
            f"{name}: weight must be a tensor, got {weight}: normalized_shape of torch.nn.functional.{name} is always "
            "the last dimension of x here."
        )


def unknown_keyword(name: str, unknown: Mapping[str, Any], homes: Mapping[str, str]) -> TypeError:
    """Return the TypeError for keywords that a function does not accept.

    Args:
        name: the function's name.
        unknown: the keywords.
        homes: maps keywords that users may look for to Tigon's spelling: "config=tigon.Rope(interleaved=…)".
    """
    keyword, value = next(iter(unknown.items()))
    if keyword not in homes:
        return TypeError(f"{name}: got an unexpected keyword argument {keyword!r}.")
    given = "a tensor" if isinstance(value, Tensor) else repr(value)
    return TypeError(f"{name}: {keyword} must be passed as {homes[keyword]}, got {keyword}={given}.")


def weight_and_bias(name: str, argument: str, layer: Any, *, linear: bool = True) -> tuple[Tensor, Tensor | None]:
    """Return the weight and bias of a `Layer` argument; raise a ValueError for any other type.

    linear: accept a `torch.nn.Linear`. False where several layers' weights are stacked.
    """
    if isinstance(layer, Tensor):
        return layer, None
    if linear and isinstance(layer, torch.nn.Linear) and type(layer).forward is torch.nn.Linear.forward:
        return layer.weight, layer.bias
    if isinstance(layer, tuple) and len(layer) == 2:
        weight, bias = layer
        if isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor)):
            return weight, bias
    held = f" of {', '.join(type(t).__name__ for t in layer)}" if isinstance(layer, tuple) else ""
    kinds = (
        "a weight, a pair of weight and bias, or a torch.nn.Linear"
        if linear
        else "a weight or a pair of weight and bias"
    )
    raise ValueError(f"{name}: {argument} must be {kinds}, got {type(layer).__name__}{held}.")
