"""The gradients of gate and up in e4m3 rows, and the product again."""

from __future__ import annotations

from torch import Tensor

from tigon.ops.fp8.recipe import Rows
from tigon.ops.fp8.reference import gated_gradient_reference


def gated_gradient(
    dy: Tensor, gate_up: Tensor, scale: Tensor | None, act: str, product_scale: Tensor | None
) -> tuple[Rows, Tensor | None]:
    """dgate and dup (M, 2N) in rows, and act(gate) · up (M, N) in e4m3 by product_scale unless that is None."""
    return gated_gradient_reference(dy, gate_up, scale, act, product_scale)
