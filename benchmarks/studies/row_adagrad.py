"""A step of RowAdagrad on the rows of a batch, beside torch's Adagrad with sparse and with dense gradients.

    python benchmarks/studies/row_adagrad.py --output results          two tables of 640 and 256 MB, in half a minute

A study of its own: run.py times functions of inputs with their gradients, and a step has neither. It writes into its
table, and the next step finds other numbers there.

Ids are drawn as frequent as Zipf's law has words, and scattered over the table. Gradients are those of the rows that
occur, each once, sorted, as `embedding_bag(grad="rows")` hands them over: torch's step, which would else sort and add
them itself, is spared that, too. The dense gradient is the same, with zeros in all other rows.

The floor counts the bytes of the rows that are touched, whatever the gradient's form: weights and one accumulator a row
read and written, gradients and ids read, at the rate of a large copy. torch keeps an accumulator for each number and
not for each row; its own rows are compared with the formula of that. Both in fp64, on the rows that are touched, and
the others must not have changed. Times are of the step alone, over a cold cache: as called, and in a CUDA graph, which
is the device's time without the host's. torch refuses to capture its Adagrad.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from cases.inputs import TOLERANCE
from harness import report
from harness.runner import (
    Ceilings,
    Settings,
    fill_total,
    forbid_waiting,
    free,
    measure_ceilings,
    one_line,
    peak_mib,
    time_ms,
)
from torch import Tensor

import tigon

KIND = "row-adagrad"
TABLES = ((10_000_000, 16), (1_000_000, 64))
IDS = 65536 * 40
SMALL, SMALL_IDS = ((3000, 16), (500, 64)), 256 * 8
LR, EPS = 0.01, 1e-8
SIDES = ("tigon, rows", "torch, rows", "tigon, dense", "torch, dense")


@dataclass
class Step:
    """A step of one side on one table.

    error: of the change of the touched rows, ‖found − expected‖ / ‖expected‖. peak_mib: beyond what is there before.
    """

    rows: int
    width: int
    touched: int
    side: str
    floor_ms: float
    status: str = "ok"  # ok | wrong | failed
    reason: str = ""
    total_ms: float | None = None
    total_range_ms: tuple[float, float] | None = None
    graph_ms: float | None = None
    state_mb: float | None = None
    peak_mib: float | None = None
    error: float | None = None
    times: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_ids(count: int, rows: int, draw: torch.Generator) -> Tensor:
    """The rows that occur, ascending: id i with probability log((i + 2) / (i + 1)) / log(V + 1), as in `embedding`."""
    chance = torch.rand(count, generator=draw, device=draw.device, dtype=torch.float64)
    index = ((rows + 1) ** chance - 1).long().clamp_max(rows - 1)
    return torch.randperm(rows, generator=draw, device=draw.device)[index].unique()


def floor_bytes(touched: int, width: int) -> int:
    """Weights read and written and gradients read, in fp32; the accumulator of a row read and written; its id."""
    return touched * (3 * 4 * width + 2 * 4 + 8)


def compute_expected(side: str, grad: Tensor) -> Tensor:
    """The change of the touched rows in the first step, in fp64."""
    square = grad.double().square()
    total = square.mean(1, keepdim=True) if side.startswith("tigon") else square
    return -LR * grad.double() / (total.sqrt() + EPS)


def make_optimizer(side: str, table: torch.nn.Parameter) -> torch.optim.Optimizer:
    if side.startswith("tigon"):
        return tigon.training.RowAdagrad([table], lr=LR, eps=EPS)
    return torch.optim.Adagrad([table], lr=LR, eps=EPS)


def check(row: Step, step: Callable[[], Any], table: Tensor, at: Tensor, grad: Tensor) -> None:
    """One step, whose change of the touched rows is that of the formula, and that changes no other row."""
    before = table.detach().clone()
    step()
    change = table.detach()[at].double() - before[at].double()
    exact = compute_expected(row.side, grad)
    row.error = float((change - exact).norm() / exact.norm())
    before[at] = table.detach()[at]
    # A weight has as many bits as before, and its change, which is a hundredth of it, has seven less.
    if not row.error <= TOLERANCE[table.dtype]:
        row.status, row.reason = "wrong", f"relative error above {TOLERANCE[table.dtype]:g}"
    elif not torch.equal(before, table.detach()):
        row.status, row.reason = "wrong", "changes rows that have no gradient"


def graph_ms(step: Callable[[], Any], device: torch.device, settings: Settings) -> float | None:
    """Milliseconds of the step in a CUDA graph; None where there is none."""
    if device.type != "cuda":
        return None
    from triton.testing import do_bench_cudagraph

    try:
        with forbid_waiting():
            step()
        return float(do_bench_cudagraph(step, rep=settings.graph_ms, return_mode="median"))
    except RuntimeError:  # a step that waits for the device, or may not be captured
        torch.cuda.synchronize(device)
        return None


def run_table(
    rows: int, width: int, count: int, device: torch.device, ceilings: Ceilings, settings: Settings
) -> list[Step]:
    """Every side on one table; the sides take turns in each round."""
    draw = torch.Generator(device).manual_seed(0)
    at = make_ids(count, rows, draw)
    grad = torch.randn(at.numel(), width, generator=draw, device=device)
    start = torch.randn(rows, width, generator=draw, device=device)
    sparse = torch.sparse_coo_tensor(at[None], grad, (rows, width), is_coalesced=True, check_invariants=False)
    floor = floor_bytes(at.numel(), width) / ceilings.copy_gbps / 1e6
    found, steps = [], {}
    for side in SIDES:
        row = Step(rows, width, at.numel(), side, floor)
        found.append(row)
        try:
            table = torch.nn.Parameter(start.clone())
            optimizer = make_optimizer(side, table)
            table.grad = sparse if side.endswith("rows") else sparse.to_dense()
            check(row, optimizer.step, table, at, grad)
            row.peak_mib, estimate = peak_mib(optimizer.step, device)
            state = (t for t in optimizer.state[table].values() if isinstance(t, Tensor) and t.dim())
            row.state_mb = sum(t.numel() * t.element_size() for t in state) / 1e6
            steps[side] = optimizer.step, estimate
        except Exception as error:  # as of too little memory: the row says so
            row.status, row.reason = "failed", one_line(error)
        free(device)
    for _ in range(settings.rounds):
        for row in found:
            if row.side in steps:
                step, estimate = steps[row.side]
                row.times.append(time_ms(step, device, settings, estimate))
    for row in found:
        if row.times:
            fill_total(row, row.times)
            if row.side.startswith("tigon"):
                row.graph_ms = graph_ms(steps[row.side][0], device, settings)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", required=True, type=Path, help="folder for the result file")
    parser.add_argument("--name", help="name of the result file; default: the device and what was measured")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings()
    ceilings = measure_ceilings(device, settings)
    rows: list[Step] = []
    for size, width in TABLES:
        rows += run_table(size, width, IDS, device, ceilings, settings)
        content = report.result(KIND, rows, device=device, ceilings=asdict(ceilings))
        report.save(options.output / (options.name or report.file_name(content)), content)
        free(device)
    print(report.to_text(content))


if __name__ == "__main__":
    main()
