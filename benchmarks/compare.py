"""Has anything become slower? Tigon alone, quickly, beside the ratios to the floor that the result files hold.

    python benchmarks/compare.py --output DIR                          operators, losses and two models; five minutes
    python benchmarks/compare.py --output DIR --only rms_norm,dpo      some of the operators, no model
    python benchmarks/compare.py --output DIR --beyond 5               per cent from which a row is printed

Times of two runs are not compared, since two GPUs of one model differ: a ratio to the floor that was measured in the
same run is. A row is printed where the ratio is more than 3 % above or below the recorded one; a case that turns up is
measured once more, with twice as many rounds, and the better of the two counts.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from cases import OPS, Op
from harness import report
from harness.floor import measure_floor
from harness.processes import run_in_process
from harness.runner import Case, Ceilings, Settings, measure_ceilings, run_case
from harness.training import RunResult, train_side

RESULTS = Path(__file__).parent / "results"
MODELS = (("llama-3-8b", 16, 512), ("llama-3.2-1b", 16, 2048))
BRIEF = Settings(rounds=3, warmup_ms=15.0, repeat_ms=60.0, graph_ms=10.0)
LONG = Settings(rounds=2)


@dataclass
class Comparison:
    """One case: multiples of the floor, as recorded and now."""

    what: str
    recorded: float
    now: float

    @property
    def percent(self) -> float:
        return 100 * (self.now / self.recorded - 1)


def read_op_ratios(folder: Path) -> dict[tuple[Any, ...], float]:
    """Multiple of the floor of each bf16 case of Tigon's in the result files of one device."""
    found = {}
    for path in sorted(folder.glob("h200-m*.json")):
        content = report.load(path)
        for row in content["rows"] if content["kind"] == "ops" else ():
            if row["implementation"] == "tigon" and row["status"] == "ok" and row["times_floor"]:
                found[report.case_key(row)] = row["times_floor"]
    return found


def read_model_ratios(folder: Path) -> dict[tuple[Any, ...], float]:
    content = report.load(folder / "h200-models.json")
    return {report.case_key(row): row["times_floor"] for row in content["rows"] if row["side"] == "tigon"}


def measure_op(op: Op, shape: tuple[int, ...], device: torch.device, ceilings: Ceilings, twice: bool) -> Any:
    settings = BRIEF if op.flops is None else LONG
    if twice:
        settings = Settings(2 * settings.rounds, settings.warmup_ms, settings.repeat_ms, settings.graph_ms)
    only = {"tigon": op.implementations["tigon"]}
    (row,) = run_case(Case(op, shape), device, ceilings, implementations=only, settings=settings, checked=())
    return row


def compare_ops(options: argparse.Namespace, device: torch.device) -> tuple[list[Comparison], list[Any], list[str]]:
    """The ratio now of each recorded case, the rows, and the cases for which there was no time."""
    start = time.monotonic()
    ceilings = measure_ceilings(device)
    print(f"copy {ceilings.copy_gbps:.0f} GB/s, matmul {ceilings.matmul_tflops:.0f} TFLOP/s", flush=True)
    recorded = read_op_ratios(options.recorded)
    names = options.only.split(",") if options.only else list(OPS)
    cases = [(OPS[name], shape) for name in names for shape in OPS[name].shapes if "tigon" in OPS[name].implementations]
    # Operators bound by memory take seconds, those bound by matrix products minutes: the quick ones run first.
    cases.sort(key=lambda case: case[0].flops is not None)
    found, rows, left = [], [], []
    for op, shape in cases:
        key = (op.name, shape, "bfloat16")
        what = f"{op.name} {'×'.join(map(str, shape))}"
        if key not in recorded or time.monotonic() - start > options.budget:
            left.append(what)
            continue
        row = measure_op(op, shape, device, ceilings, twice=False)
        if row.times_floor and abs(row.times_floor / recorded[key] - 1) > options.beyond / 100:
            again = measure_op(op, shape, device, ceilings, twice=True)
            row = min(row, again, key=lambda one: one.times_floor or float("inf"))
        rows.append(row)
        if row.times_floor is None:
            left.append(f"{what}: {row.reason}")
            continue
        found.append(Comparison(what, recorded[key], row.times_floor))
        report.save(
            options.output / "compare-ops.json", report.result("ops", rows, device=device, ceilings=asdict(ceilings))
        )
    return found, rows, left


def compare_models(options: argparse.Namespace, device: torch.device) -> tuple[list[Comparison], list[str]]:
    recorded = read_model_ratios(options.recorded)
    found, left, rows = [], [], []
    for model, batch, seq in MODELS:
        times = {}
        for name, task, more in (("floor", measure_floor, {}), ("tigon", train_side, {"steps": 6})):
            side = RunResult(model, name, batch, seq, False, "bfloat16")
            (row,) = run_in_process(task, side, device=str(device), overrides={}, **more)
            rows.append(row)
            if row.step_ms is None:
                left.append(f"{model} {name}: {row.reason}")
            else:
                times[name] = row.step_ms
        report.save(options.output / "compare-models.json", report.result("model", rows, device=device))
        key = report.case_key(rows[-1].to_dict())
        if len(times) == 2 and key in recorded:
            found.append(Comparison(f"{model} {batch}×{seq}", recorded[key], times["tigon"] / times["floor"]))
    return found, left


def table(found: list[Comparison], beyond: float) -> str:
    """The cases that differ, the slower ones first, and how many there were."""
    off = sorted((one for one in found if abs(one.percent) > beyond), key=lambda one: -one.percent)
    width = max((len(one.what) for one in off), default=4)
    lines = [f"{'case':<{width}}  recorded      now  change"]
    lines += [f"{one.what:<{width}}  {one.recorded:7.3f}× {one.now:7.3f}×  {one.percent:+.1f} %" for one in off]
    return "\n".join([*lines, f"{len(off)} of {len(found)} cases differ by more than {beyond:g} %"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", required=True, type=Path, help="folder for what is measured")
    parser.add_argument("--recorded", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--only", help="operators, separated by commas, and no model; default: all")
    parser.add_argument("--beyond", type=float, default=3.0, help="per cent from which a row is printed")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which no further operator is begun")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found, _, left = compare_ops(options, device)
    if not options.only:
        models, missing = compare_models(options, device)
        found, left = found + models, left + missing
    for what in left:
        print(f"not compared: {what}")
    print(table(found, options.beyond))


if __name__ == "__main__":
    main()
