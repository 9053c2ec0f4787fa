"""From which sizes linear layers and gated units run faster in FP8 than in bf16.

    python benchmarks/studies/fp8_sizes.py --output results

Forward and backward pass with trainable bf16 weights, layers one after another without waiting, so that a row shows the
slower of host and device, as in a model. `fusion/fp8/layers.py` takes its least sizes from here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness import report
from harness.training import synchronize
from torch import Tensor
from torch.nn.functional import linear

from tigon.ops.fp8.mlp import Stores, Unit, multiply_gated
from tigon.ops.fp8.multiply import Products, multiply
from tigon.ops.fp8.store import JointWeight
from tigon.ops.gated_linear import gated_linear

TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
LINEAR = ((512, 1536), (1024, 1024), (1024, 3072), (2048, 2048), (2048, 3072), (4096, 4096), (4096, 6144))
UNITS = ((512, 2048), (1024, 3072), (2048, 8192), (4096, 14336))
CALLS, ROUNDS = 10, 5


@dataclass
class Row:
    """Milliseconds of a forward and a backward pass. kind: "linear" (inner to outer), or "unit": gate, up and down."""

    kind: str
    inner: int
    outer: int
    tokens: int
    bf16_ms: float
    fp8_ms: float

    @property
    def ratio(self) -> float:
        return self.bf16_ms / self.fp8_ms

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def make_sides(kind: str, inner: int, outer: int, device: torch.device) -> dict[str, Callable[[Tensor], Tensor]]:
    def weight(rows: int, columns: int) -> Tensor:
        drawn = torch.randn(rows, columns, device=device) / columns**0.5
        return drawn.bfloat16().requires_grad_()

    if kind == "linear":
        w, store = weight(outer, inner), JointWeight("use")
        return {
            "bf16": lambda x: linear(x, w),
            "fp8": lambda x: multiply(x, store, [w], [None], Products())[0],
        }
    gate, up, down = weight(outer, inner), weight(outer, inner), weight(inner, outer)
    stores = Stores(JointWeight("use"), JointWeight("use"))
    return {
        "bf16": lambda x: gated_linear(linear(x, gate), linear(x, up), down, inplace=True),
        "fp8": lambda x: multiply_gated(x, stores, (gate, up, down), (None, None, None), Unit()),
    }


def time_passes(side: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, calls: int) -> float:
    """Milliseconds a call."""
    synchronize(x.device)
    start = time.perf_counter()
    for _ in range(calls):
        side(x).backward(dy)
    synchronize(x.device)
    return 1e3 * (time.perf_counter() - start) / calls


def measure(kind: str, inner: int, outer: int, tokens: int, device: torch.device, rounds: int = ROUNDS) -> Row:
    """The median of rounds in which the sides take turns."""
    x = torch.randn(tokens, inner, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, outer if kind == "linear" else inner, device=device, dtype=torch.bfloat16)
    sides = make_sides(kind, inner, outer, device)
    found: dict[str, list[float]] = {name: [] for name in sides}
    for name in sides:
        time_passes(sides[name], x, dy, 2)
    for _ in range(rounds):
        for name, side in sides.items():
            found[name].append(time_passes(side, x, dy, CALLS))
    return Row(kind, inner, outer, tokens, *(statistics.median(found[name]) for name in ("bf16", "fp8")))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the result file")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--widest", type=int, default=4096, help="leave out wider layers")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for kind, sizes in (("linear", LINEAR), ("unit", UNITS)):
        for inner, outer in sizes:
            if inner > options.widest:
                continue
            of_size = [measure(kind, inner, outer, tokens, device) for tokens in options.tokens]
            rows += of_size
            print(f"{kind} {inner} × {outer}:", *(f"{row.tokens}: {row.ratio:.2f}" for row in of_size), flush=True)
    content = report.result("fp8-sizes", rows, device=device)
    report.save(options.output / report.file_name(content), content)


if __name__ == "__main__":
    main()
