"""Parse an MLP, or an MLP's weights, into first-layer weights and the units' output reach."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

NAME = "find_interactions"
Array = npt.NDArray[np.float64]


class Network(NamedTuple):
    """An MLP's first layer and output reach.

    Attributes:
        first: (U, P), ≥ 0: how strongly each first-layer unit reads each feature.
        reach: (U,), ≥ 0: how strongly each unit affects the output.
    """

    first: Array
    reach: Array


def parse_network(model: Any) -> Network:
    """Parse an MLP or its layers' weights.

    Raises: ValueError for a model that is not an MLP, and for weights with inconsistent shapes or non-finite values.
    """
    layers = _read_module(model) if isinstance(model, nn.Module) else _read_arrays(model)
    for place, weight in enumerate(layers, 1):
        if not np.isfinite(weight).all():
            many = int((~np.isfinite(weight)).sum())
            raise ValueError(
                f"{NAME}: weights must be finite, but {many:,} of {weight.size:,} in layer {place} are not; did "
                "the training diverge?"
            )
    for place, (before, weight) in enumerate(pairwise(layers), 2):
        if weight.shape[1] != before.shape[0]:
            shapes = ", ".join(str(tuple(one.shape)) for one in layers)
            raise ValueError(
                f"{NAME}: weights must be (outputs, inputs) and chain, but layer {place} reads {weight.shape[1]} "
                f"numbers and the layer before has {before.shape[0]} outputs; the shapes are {shapes}."
            )
    if len(layers) < 2:
        raise ValueError(
            f"{NAME}: model must be an MLP with a hidden layer, got a linear model, which has no interactions."
        )
    return Network(np.abs(layers[0]), compute_reach(np.ones(len(layers[-1])), layers[1:]))


def compute_reach(reach: Array, layers: Sequence[Array]) -> Array:
    """The reach of the layers' inputs, from the reach of their outputs."""
    for weight in reversed(layers):
        reach = reach @ np.abs(weight)
    return reach


def to_array(weight: Any) -> Array:
    """A tensor or array as fp64 numpy."""
    if isinstance(weight, Tensor):
        weight = weight.detach().cpu().double().numpy()
    return np.asarray(weight, dtype=np.float64)


def norm_factor(part: nn.BatchNorm1d) -> Array:
    """(N,) factors by which the norm multiplies its inputs."""
    factor = np.ones(part.num_features) if part.weight is None else to_array(part.weight)
    if part.running_var is not None:
        factor = factor / np.sqrt(to_array(part.running_var) + part.eps)
    return factor


def _read_arrays(model: Any) -> list[Array]:
    if isinstance(model, (str, bytes)) or not isinstance(model, Sequence) or not model:
        got = "an empty list" if isinstance(model, Sequence) and not model else type(model).__name__
        raise ValueError(f"{NAME}: model must be an MLP, a rank.extract_mlp result, or a list of weights, got {got}.")
    result = []
    for place, weight in enumerate(model, 1):
        try:
            result.append(to_array(weight))
        except (TypeError, ValueError):
            got = type(weight).__name__
            raise ValueError(f"{NAME}: layer {place} must be an array of numbers, got {got}.") from None
        if result[-1].ndim != 2 or not result[-1].size:
            raise ValueError(
                f"{NAME}: layer {place} must be (outputs, inputs), the weight of a linear layer, got shape "
                f"{result[-1].shape}; biases are left out."
            )
    return result


def _read_module(model: nn.Module) -> list[Array]:
    """Linear weights in a chain, in module order.

    BatchNorm1d factors are included: after a linear layer they scale its outputs, elsewhere the next layer's inputs.
    """
    result: list[Array] = []
    factor: Array | None = None
    behind: nn.Module | None = None
    for name, part in model.named_modules():
        is_leaf, has_weights = not [*part.children()], bool([*part.parameters(recurse=False)])
        if not is_leaf and not has_weights:
            continue
        if isinstance(part, nn.Linear):
            weight = to_array(part.weight)
            result.append(weight if factor is None or factor.size != weight.shape[1] else weight * factor)
            factor = None
        elif isinstance(part, nn.BatchNorm1d):
            factor = norm_factor(part)
            if isinstance(behind, nn.Linear) and factor.size == len(result[-1]):
                result[-1], factor = result[-1] * factor[:, None], None
        elif has_weights:
            raise ValueError(
                f"{NAME}: model must be an MLP, a chain of nn.Linear, but {name or 'model'} has class "
                f"{type(part).__name__}."
            )
        behind = part
    if not result:
        raise ValueError(f"{NAME}: model must be an MLP, a chain of nn.Linear, but {type(model).__name__} has none.")
    return result
