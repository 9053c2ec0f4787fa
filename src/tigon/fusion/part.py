"""The kinds of modules whose whole forward fuse replaces. Each file in tigon.parts registers its kind as a Part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Part:
    """One kind of module.

    kind: the kind that its rows in the report show.
    option: the keyword of `tigon.fuse` that switches the part on and off.
    recognize: a module → its formula, a Reason why it has none, or None for another kind of module.
    forward: replaces the module's forward. It finds the formula in `self._tigon.formula`, counts its calls by
        `ledger.count(kind, patch.key)`, and calls `plain_forward` where the formula does not apply.
    owns_activation: the child that the formula names as `act_module` belongs to this part, and is not fused by itself.
    """

    kind: str
    option: str
    recognize: Callable[[nn.Module], Any]
    forward: Callable[..., Any]
    owns_activation: bool = False


PARTS: list[Part] = []


def register(part: Part) -> Part:
    """Make fuse try a part, after the parts registered before."""
    PARTS.append(part)
    return part
