"""act(gate) · up in e4m3 rows."""

from __future__ import annotations

from torch import Tensor

from tigon.ops.fp8.recipe import Rows
from tigon.ops.fp8.reference import gated_rows_reference


def gated_rows(gate_up: Tensor, act: str, keep: bool = False) -> tuple[Rows, Rows | None]:
    """act(gate) · up of gate_up (M, 2N) in rows; with keep also gate and up, data (M, 2N) and scale (M, 2)."""
    return gated_rows_reference(gate_up, act, keep)
