"""Parse an MLP, or an MLP's weights, into first-layer weights and the units' output reach."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor, nn

from tigon.rank.interactions.strengths import Array, Network

NAME = "find_interactions"
NONE_AT_ALL = f"{NAME}: a linear model has none; model must be an MLP with a hidden layer."


def parse_network(model: Any) -> Network:
    """Parse an MLP or its layers' weights.

    Raises: ValueError for a model that is not an MLP, and for weights with inconsistent shapes or non-finite values.
    """
    layers = linear_weights(model) if isinstance(model, nn.Module) else _check_arrays(model)
    for place, weight in enumerate(layers, 1):
        if not np.isfinite(weight).all():
            many = int((~np.isfinite(weight)).sum())
            raise ValueError(
                f"{NAME}: weights must be finite, but {many:,} of the {weight.size:,} of layer {place} are not; did "
                "the training diverge?"
            )
    for place, (before, weight) in enumerate(pairwise(layers), 2):
        if weight.shape[1] != before.shape[0]:
            shapes = ", ".join(str(tuple(one.shape)) for one in layers)
            raise ValueError(
                f"{NAME}: weights must be (outputs, inputs) and chain, but layer {place} reads {weight.shape[1]} "
                f"numbers of the {before.shape[0]} before it; the shapes are {shapes}."
            )
    if len(layers) < 2:
        raise ValueError(NONE_AT_ALL)
    reach = np.ones(layers[-1].shape[0])
    for weight in reversed(layers[1:]):
        reach = reach @ np.abs(weight)
    return Network(np.abs(layers[0]), reach)


def _check_arrays(model: Any) -> list[Array]:
    if isinstance(model, (str, bytes)) or not isinstance(model, Sequence):
        raise ValueError(
            f"{NAME}: model must be an MLP, what rank.extract_mlp returned, or a list of weights, got "
            f"{type(model).__name__}."
        )
    result = []
    for place, weight in enumerate(model, 1):
        try:
            array = to_array(weight)
        except (TypeError, ValueError):
            raise ValueError(
                f"{NAME}: layer {place} must be an array of numbers, got {type(weight).__name__}."
            ) from None
        if array.ndim != 2 or not array.size:
            raise ValueError(
                f"{NAME}: layer {place} must be (outputs, inputs), the weight of a linear layer, got shape "
                f"{array.shape}; biases are left out."
            )
        result.append(array)
    if not result:
        raise ValueError(f"{NAME}: model must be an MLP or a list of weights, got an empty list.")
    return result


def to_array(weight: Any) -> Array:
    """A tensor or array as fp64 numpy."""
    if isinstance(weight, Tensor):
        weight = weight.detach().cpu().double().numpy()
    return np.asarray(weight, dtype=np.float64)


def linear_weights(model: nn.Module) -> list[Array]:
    """Linear weights in a chain, in module order.

    BatchNorm1d factors are included: after a linear layer they scale its outputs, elsewhere the next layer's inputs.
    """
    result: list[Array] = []
    factor: Array | None = None
    behind: nn.Module | None = None
    for name, part in model.named_modules():
        if next(part.children(), None) is not None and next(part.parameters(recurse=False), None) is None:
            continue
        if isinstance(part, nn.Linear):
            weight = to_array(part.weight)
            result.append(weight if factor is None or factor.size != weight.shape[1] else weight * factor)
            factor = None
        elif isinstance(part, nn.BatchNorm1d):
            scale = norm_factor(part)
            if isinstance(behind, nn.Linear) and scale.size == result[-1].shape[0]:
                result[-1] = result[-1] * scale[:, None]
            else:
                factor = scale
        elif next(part.parameters(recurse=False), None) is not None:
            raise ValueError(
                f"{NAME}: model must be an MLP, a chain of nn.Linear, but {name or 'it'} is of the class "
                f"{type(part).__name__}."
            )
        behind = part
    if not result:
        raise ValueError(f"{NAME}: model must be an MLP, a chain of nn.Linear, but {type(model).__name__} has none.")
    return result


def norm_factor(part: nn.BatchNorm1d) -> Array:
    """(N,) factors by which the norm multiplies its inputs."""
    factor = np.ones(part.num_features) if part.weight is None else to_array(part.weight)
    if part.running_var is not None:
        factor = factor / np.sqrt(to_array(part.running_var) + part.eps)
    return factor


def join_columns(first: Array, names: Sequence[str], spread: Any) -> tuple[Array, list[str]]:
    """(U, F) feature weights, and the feature names: columns with the same name are merged.

    spread: (P,) column standard deviations that scale the weights; None if all are equal. Merged columns use the root
        of the sum of squares, the spread of their sum if they are uncorrelated.
    """
    if spread is not None:
        first = first * _spreads(spread, names)
    order = list(dict.fromkeys(names))
    if len(order) == len(names):
        return first, order
    place = {name: number for number, name in enumerate(order)}
    squares = np.zeros((len(first), len(order)))
    np.add.at(squares.T, [place[name] for name in names], np.square(first).T)
    return np.sqrt(squares), order


def _spreads(spread: Any, names: Sequence[str]) -> Array:
    try:
        result = to_array(spread)
    except (TypeError, ValueError):
        result = np.full(0, np.nan)
    if result.shape != (len(names),):
        raise ValueError(
            f"{NAME}: spread must have a number for each of the {len(names)} inputs, got "
            f"{f'shape {result.shape}' if result.size else repr(spread)}."
        )
    for name, one in zip(names, result.tolist(), strict=True):
        if not np.isfinite(one) or one < 0:
            raise ValueError(f"{NAME}: spread of {name!r} must be a finite number above 0, got {one!r}.")
        if one == 0:
            raise ValueError(
                f"{NAME}: {name!r} has a variance of 0, and a weight says nothing of an input that is always the same; "
                "leave it out of the model."
            )
    return result


def check_names(names: Any, count: int) -> list[str]:
    """Input names. None: x1, x2, …"""
    if names is None:
        return [f"x{number}" for number in range(1, count + 1)]
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{NAME}: names must be a list of strings, got {names!r}.")
    if len(names) != count:
        raise ValueError(f"{NAME}: names must name each of the {count} inputs of the model, got {len(names)}.")
    return list(names)
