"""Arguments and results of a step: tensors, and the rest, by which graphs are told apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# Values that Python's code may depend on. They are part of the signature: another value gets another graph.
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_PLAIN = (Tensor, torch.nn.Parameter)


def taken_apart(value: Any, tensors: list[Tensor], what: str) -> Any:
    """The tensors in a value, appended in order, and the rest as a key that `put_together` reads."""
    if isinstance(value, Tensor):
        if type(value) not in _PLAIN or value.layout is not torch.strided:
            kind = type(value).__name__ if type(value) not in _PLAIN else f"a tensor of {value.layout}"
            raise TypeError(f"graph_step: {what} must be plain tensors, got {kind}.")
        tensors.append(value)
        return Tensor, value.shape, value.dtype, value.device
    if isinstance(value, _CONSTANTS):
        return type(value), value  # 1, 1.0 and True are equal, and not the same
    if isinstance(value, dict) and type(value) is dict:
        return dict, tuple((name, taken_apart(each, tensors, what)) for name, each in value.items())
    if type(value) in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return type(value), tuple(taken_apart(each, tensors, what) for each in value)
    raise TypeError(
        f"graph_step: {what} must be tensors, numbers, strings, and tuples, lists and dicts of them, got "
        f"{type(value).__name__}."
    )


def put_together(shape: Any, tensors: Iterator[Tensor]) -> Any:
    kind, *rest = shape
    if kind is Tensor:
        return next(tensors)
    if kind is dict:
        return {name: put_together(each, tensors) for name, each in rest[0]}
    if issubclass(kind, _CONSTANTS):
        return rest[0]
    made = [put_together(each, tensors) for each in rest[0]]
    return made if kind is list else kind(*made) if hasattr(kind, "_fields") else tuple(made)


def check_results(shape: Any, results: Sequence[Tensor], device: torch.device) -> None:
    if any(t.device != device for t in results) or _has_numbers(shape):
        raise RuntimeError(
            f"graph_step: results of the step must be tensors on {device}, since a replay computes nothing on the "
            "host; got a tensor elsewhere, or a number. Return the tensor, and call .item() on what you get back."
        )


def _has_numbers(shape: Any) -> bool:
    kind, *rest = shape
    if kind in (tuple, list) or hasattr(kind, "_fields"):
        return any(map(_has_numbers, rest[0]))
    return kind in (float, complex) or (kind is dict and any(_has_numbers(each) for _, each in rest[0]))
