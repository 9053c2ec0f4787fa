"""The signature of a step's arguments or results: the structure, with everything except tensor values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

# Values that Python code may depend on. They are part of the signature: another value gets another graph.
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_PLAIN = (Tensor, torch.nn.Parameter)


class Signature(NamedTuple):
    """A key that is equal for values with the same structure.

    leaves: (Tensor, shape, dtype, device) for a tensor; for a constant type and value, as 1, 1.0 and True are
    equal.
    """

    structure: TreeSpec
    leaves: tuple[tuple[Any, ...], ...]

    def rebuild(self, tensors: Iterable[Tensor]) -> Any:
        remaining = iter(tensors)
        return self.structure.unflatten([next(remaining) if leaf[0] is Tensor else leaf[1] for leaf in self.leaves])

    def check_results(self, results: Sequence[Tensor], device: torch.device) -> None:
        if any(t.device != device for t in results) or any(kind in (float, complex) for kind, *_ in self.leaves):
            raise RuntimeError(
                f"graph_step: results of the step must be tensors on {device}, since a replay computes nothing on the "
                "host; got a tensor elsewhere, or a number. Return the tensor, and call .item() on the returned tensor."
            )


def flatten(value: Any, what: str) -> tuple[Signature, list[Tensor]]:
    """A value's signature, and its tensors in order. what: names the value in errors.

    Raises: TypeError for a leaf that is neither a plain tensor nor a constant.
    """
    values, structure = tree_flatten(value)
    tensors: list[Tensor] = []
    leaves: list[tuple[Any, ...]] = []
    for leaf in values:
        if isinstance(leaf, Tensor):
            if type(leaf) not in _PLAIN or leaf.layout is not torch.strided:
                kind = type(leaf).__name__ if type(leaf) not in _PLAIN else f"a tensor of {leaf.layout}"
                raise TypeError(f"graph_step: {what} must be plain tensors, got {kind}.")
            tensors.append(leaf)
            leaves.append((Tensor, leaf.shape, leaf.dtype, leaf.device))
        elif isinstance(leaf, _CONSTANTS):
            leaves.append((type(leaf), leaf))
        else:
            raise TypeError(
                f"graph_step: {what} must be tensors, numbers, strings, and tuples, lists and dicts of them, got "
                f"{type(leaf).__name__}."
            )
    return Signature(structure, tuple(leaves)), tensors
