"""Minimise a small convex loss with L-BFGS."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def minimize(values: list[Tensor], loss: Callable[[], Tensor]) -> None:
    """Minimise `loss()` in place over `values`, leaves that require gradients."""
    solver = torch.optim.LBFGS(values, max_iter=200, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        result = loss()
        result.backward()
        return result

    with torch.enable_grad():
        solver.step(closure)
