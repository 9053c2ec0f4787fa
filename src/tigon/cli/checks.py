"""`tigon doctor --check`: every operator and gradient on this machine, against the PyTorch reference in fp64."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tigon.lazy import find_homes
from tigon.ops.example import Example

# A result is wrong above this ‖out − ref‖ / ‖ref‖, or above twice the reference's error in the same dtype.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-3}


def load_examples() -> dict[str, Example]:
    """The examples in the files of all public operators and losses."""
    homes = {home for package in ("tigon", "tigon.losses") for home in find_homes(package).values()}
    modules = (import_module(home) for home in sorted(homes))
    return {name: example for module in modules for name, example in getattr(module, "EXAMPLES", {}).items()}


def check_operator(name: str, example: Example, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A row with "status" (ok, wrong or failed), "error" and the "reason" of a failure."""
    row: dict[str, Any] = {"op": name, "device": str(device), "status": "ok", "reason": "", "error": None}
    shapes, call = example.shapes, example.call
    # Multiples of 3/32: exact in every dtype, and no sum equals 1, where sparsemax's gradient jumps.
    draw = torch.Generator().manual_seed(0)
    values = [(torch.randn(shape, generator=draw) * 16 / 3).round() * 3 / 32 for shape in shapes]
    try:
        cpu = torch.device("cpu")
        expected = _run(call, values, cpu, torch.float64)
        row["error"] = _compare(_run(call, values, device, dtype), expected)
        bound = max(TOLERANCE[dtype], 2 * _compare(_run(call, values, cpu, dtype), expected))
        if not row["error"] <= min(bound, 0.5):  # NaN is not <=
            row["status"], row["reason"] = "wrong", f"error {row['error']:.1e} above {bound:.1e}"
    except Exception as error:  # the row reports any error
        row["status"], row["reason"] = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return row


def _run(call: Callable[..., Any], values: list[Tensor], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients in fp64 on the CPU."""
    inputs = [value.to(device, dtype).requires_grad_() for value in values]
    result = call(*inputs)
    outputs = result if isinstance(result, tuple) else (result,)
    # Partly along the output: a gradient that sums over the whole output would be a small difference of large sums.
    roots = [out for out in outputs if out.requires_grad]
    upstream = [out.detach() / out.detach().abs().mean() + 1 for out in roots]
    grads = torch.autograd.grad(roots, inputs, upstream, allow_unused=True) if roots else ()
    return [t.detach().double().cpu() for t in (*outputs, *grads) if t is not None]


def _compare(values: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error among outputs and gradients."""
    return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in zip(values, expected, strict=True))
