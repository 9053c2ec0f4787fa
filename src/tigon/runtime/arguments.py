"""What is asked of arguments before anything else is."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def check_tensors(name: str, **arguments: Any) -> None:
    """Raise a ValueError for an argument that is neither a tensor nor None, such as a layer in place of its weight."""
    for argument, value in arguments.items():
        if value is None or isinstance(value, Tensor):
            continue
        attribute = argument.rpartition("_")[2]  # a layer's name for gate_weight is weight
        advice = f": pass its {attribute}" if isinstance(getattr(value, attribute, None), Tensor) else ""
        raise ValueError(f"{name}: {argument} must be a tensor, got {type(value).__name__}{advice}.")
