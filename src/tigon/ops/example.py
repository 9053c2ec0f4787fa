"""A call of an operator on small random tensors, written at the end of the operator's file.

`tigon doctor --check` runs the calls, and the documentation lists the operators under their groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS, WEIGHT, LOGITS, CLASSES = (256, 1024), (1024,), (256, 1000), 1000
SEQUENCES = (4, 32, 64)
HEAD = (CLASSES, SEQUENCES[-1])


@dataclass(frozen=True)
class Example:
    """group: a heading in docs/ops.md, None for operators with a page of their own. call: a function of tensors with
    these shapes."""

    group: str | None
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., Any]


def make_ids(like: Tensor, *shape: int) -> Tensor:
    """Labels below CLASSES, the same on every device."""
    return (7919 * torch.arange(math.prod(shape), device=like.device) % CLASSES).view(shape)


def make_angles(q: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (1, T, D) for q (B, H, T, D)."""
    angles = torch.outer(torch.arange(q.shape[2]), 100.0 ** -torch.linspace(0, 1, q.shape[3] // 2)).repeat(1, 2)[None]
    return angles.cos().to(q), angles.sin().to(q)
