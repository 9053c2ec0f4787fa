"""The kinds of modules whose forward fuse replaces as a whole: a row each, which its file in tigon.parts registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Part:
    """One kind of module.

    kind: of its rows in the report. option: the keyword of `tigon.fuse` that switches it. recognize: a module → its
    formula, a Reason why it has none, or None for another kind of module. forward: what is put in the place of the
    module's own; it finds its formula in `self._tigon.formula`, counts itself by `ledger.count(kind, patch.key)`, and
    calls `plain_forward` where the formula does not apply. owns_activation: the child that the formula names as
    `act_module` is a part of this one, and no part by itself.
    """

    kind: str
    option: str
    recognize: Callable[[nn.Module], Any]
    forward: Callable[..., Any]
    owns_activation: bool = False


PARTS: list[Part] = []


def register(part: Part) -> Part:
    """Make fuse try a part, behind those registered before."""
    PARTS.append(part)
    return part
