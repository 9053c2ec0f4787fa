"""Whole models on one GPU: a training step beside Hugging Face, torch.compile, Liger and the step's floor.

    python benchmarks/models.py --output results                            every row and side of six models
    python benchmarks/models.py --model llama-3.2-1b --shape 4x2048         one preset: Hugging Face, Liger and Tigon
    python benchmarks/models.py --output results --profile                  and where the device's time goes
    python benchmarks/models.py --output results --only llama-3.2-1b --sides hf,liger,tigon
    python benchmarks/models.py --output results --resume results/h200-models.json            what is missing
    python benchmarks/models.py --output results --name fp8-models.json --only llama-3-8b-16x512
        --sides compile-layers,tigon,tigon-fp8,torchao-tensorwise,torchao-tensorwise-compile  FP8; pip install torchao
    python benchmarks/models.py --output results --memory-over-sequence     Llama-3-8B over the length
    python benchmarks/models.py --output results --name same-attention.json --only llama-3.2-1b --profile
        --sides hf,compile-layers,compile-causal,liger,tigon --settings 1x0.125,1x0,4x0

The last measures torch.compile with the attention kernel of the other sides, without masked labels and with accumulated
steps too. Every side trains in a process of its own. The result file is written after every side. Sides that compile
come last: they take a minute each, and a budget that is too small leaves them out.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from harness import report
from harness.floor import measure_floor
from harness.processes import run_in_process
from harness.training import DEFAULT_SIDES, MASKED, RunResult, measure_lengths, train_side, why_missing

from tigon.presets import PRESETS

# Only --sides selects these: torch.compile with the flash kernel, the levels of recompute, the highest of them with
# activations in host memory, FP8, and torchao's FP8 layers in plain and in fused models.
CHOSEN = (
    "compile-causal", "compile-layers", "tigon-none", "tigon-product", "tigon-cheap", "tigon-mlp", "tigon-offload",
    "tigon-fp8", "tigon-fp8-keep", "tigon-fp8-head", "torchao-tensorwise", "torchao-rowwise", "tigon-torchao",
    "torchao-tensorwise-compile", "torchao-rowwise-compile", "tigon-torchao-compile",
)  # fmt: skip
ORDER = ("floor", "hf", "compile", *CHOSEN[:2], "liger", "tigon", "tigon-compile", *CHOSEN[2:])


@dataclass(frozen=True)
class Case:
    """compiled: also under torch.compile. steps: timed, after three of warm-up. layers: None for all of the model's."""

    model: str
    batch: int
    seq: int
    checkpointing: bool = False
    compiled: bool = False
    steps: int = 6
    layers: int | None = None

    @property
    def name(self) -> str:
        return f"{self.model}-{self.batch}x{self.seq}" + ("-checkpointing" if self.checkpointing else "")

    def sides(self) -> list[str]:
        return [side for side in ORDER if side not in CHOSEN and (self.compiled or "compile" not in side)]


CASES = (
    Case("llama-3-8b", 16, 512, compiled=True),
    Case("llama-3-8b", 16, 2048, checkpointing=True, steps=4),
    Case("llama-3.2-1b", 16, 2048, compiled=True),
    Case("qwen3-1.7b", 8, 2048),
    Case("gemma-2-2b", 8, 2048),
    Case("olmo-2-7b", 8, 1024, layers=16),
)
# Weights, gradients and states of eight billion parameters are 60 GiB; from 1024 tokens on, one sequence at a time.
LENGTHS = Case("llama-3-8b", 1, 1024, checkpointing=True)
LENGTH_SIDES = ("hf", "liger", "tigon", "tigon-offload")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, help="folder for the result file")
    parser.add_argument("--name", help="name of the result file; default: the device and what was measured")
    parser.add_argument("--model", choices=PRESETS, help="a preset with random weights, in place of the six models")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, with --model")
    parser.add_argument("--only", help="rows whose names contain one of these, separated by commas; default: all")
    parser.add_argument("--sides", help=f"of every row, separated by commas: {', '.join(ORDER)}")
    parser.add_argument("--steps", type=int, help="timed steps; default: those of the row")
    parser.add_argument("--profile", action="store_true", help="record one more step of each side by kind of kernel")
    parser.add_argument("--resume", type=Path, help="a result file whose sides are kept, and not measured again")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no further side is begun")
    parser.add_argument("--memory-over-sequence", action="store_true", help="peak memory over the sequence's length")
    parser.add_argument("--longest", type=int, default=131072, help="tokens, with --memory-over-sequence")
    parser.add_argument("--profile-at", type=int, help="tokens, with --memory-over-sequence: the length to profile")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=N", help="of every model's configuration")
    parser.add_argument("--shape", help="BATCHxSEQ instead of every row's own")
    parser.add_argument(
        "--settings", default=f"1x{MASKED}", type=read_settings,
        help="micro-batches of a step x share of masked labels, separated by commas: 1x0.125,1x0,4x0",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    unknown = [side for side in (options.sides or "").split(",") if side and side not in ORDER]
    if unknown:
        parser.error(f"--sides must be among {', '.join(ORDER)}, got {', '.join(unknown)}")
    return options


def read_settings(text: str) -> list[tuple[int, float]]:
    pairs = [part.partition("x") for part in text.split(",")]
    return [(int(accumulation), float(masked)) for accumulation, _, masked in pairs]


def plan(options: argparse.Namespace) -> list[tuple[Case, str]]:
    """The cases and their sides, in the order in which they run."""
    cases = (LENGTHS,) if options.memory_over_sequence else CASES
    if options.model:
        cases = (Case(options.model, 1, 512, options.checkpointing),)
    if options.only:
        cases = tuple(case for case in cases if any(word in case.name for word in options.only.split(",")))
    chosen = options.sides.split(",") if options.sides else None
    pairs = []
    for case in cases:
        possible = LENGTH_SIDES if options.memory_over_sequence else DEFAULT_SIDES if options.model else case.sides()
        pairs += [(case, side) for side in chosen or possible]
    return sorted(pairs, key=lambda pair: "compile" in pair[1])


def make_row(case: Case, side: str, options: argparse.Namespace) -> RunResult:
    """The row of a side in the first of the settings."""
    batch, seq = map(int, options.shape.split("x")) if options.shape else (case.batch, case.seq)
    accumulation, masked = options.settings[0]
    return RunResult(
        case.model, side, batch, seq, case.checkpointing, options.dtype, layers=case.layers,
        masked=masked, accumulation=accumulation,
    )  # fmt: skip


def run(options: argparse.Namespace) -> None:
    start = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = "sequence" if options.memory_over_sequence else "model"
    overrides = {name: int(value) for name, value in (pair.split("=") for pair in options.set)}
    rows = load_rows(options.resume, kind, device)
    done = {key(row) for row in rows if row.status == "ok"}
    left = [
        (case, side)
        for case, side in plan(options)
        if not all(key(replace(make_row(case, side, options), accumulation=n, masked=masked)) in done
                   for n, masked in options.settings)
    ]  # fmt: skip
    for case, side in left:
        began = time.monotonic()
        if began - start > options.budget:
            print(f"left out, the budget of {options.budget:.0f} s was spent: {case.name} {side}", flush=True)
            continue
        if why := why_missing(side):
            print(f"left out, {why}: {case.name} {side}", flush=True)
            continue
        task, request = train_side, {"steps": options.steps or case.steps, "profile": options.profile}
        request["settings"] = options.settings
        if side == "floor":
            task, request = measure_floor, {}
        elif kind == "sequence":
            task, request = measure_lengths, {"longest": options.longest, "steps": options.steps or 1}
            request["profile_at"] = None if side == "tigon-offload" else options.profile_at
        built = ({"num_hidden_layers": case.layers} if case.layers else {}) | overrides
        new = run_in_process(task, make_row(case, side, options), device=str(device), overrides=built, **request)
        replaced = {key(row) for row in new}
        rows = sort_rows([row for row in rows if key(row) not in replaced] + new)
        save(options, kind, rows, device)
        took = time.monotonic() - began
        words = " ".join(report.to_text(report.result(kind, new[-1:], device=device)).split("\n")[-1].split())
        print(f"{time.monotonic() - start:6.1f} s  {case.name}: {took:.1f} s  {words}", flush=True)
    if rows:
        save(options, kind, rows, device)
        print(report.to_text(report.result(kind, rows, device=device)))


def key(row: RunResult) -> tuple[str, int, int, bool, float, int, str]:
    return row.model, row.batch, row.seq, row.checkpointing, row.masked, row.accumulation, row.side


def load_rows(path: Path | None, kind: str, device: torch.device) -> list[RunResult]:
    if path is None or not path.exists():
        return []
    content = report.load(path)
    try:
        report.check_environment(content, report.result(kind, [], device=device))
    except ValueError as error:
        raise SystemExit(f"models.py: {path}: {error}") from None
    known = {field.name for field in fields(RunResult)}
    return [RunResult(**{k: v for k, v in row.items() if k in known}) for row in content["rows"]]


def sort_rows(rows: list[RunResult]) -> list[RunResult]:
    """Cases as they are in the table, sides as in ORDER; and each beside the floor of its case."""
    floors = {key(row)[:-1]: row.step_ms for row in rows if row.side == "floor" and row.step_ms}
    for row in rows:
        floor = floors.get(key(row)[:-1])
        row.times_floor = row.step_ms / floor if floor and row.step_ms else None
    models = {case.model: place for place, case in enumerate(CASES)}
    return sorted(
        rows,
        key=lambda r: (
            models.get(r.model, 0), r.checkpointing, r.batch, r.seq, r.accumulation, -r.masked, ORDER.index(r.side)
        ),
    )  # fmt: skip


def save(options: argparse.Namespace, kind: str, rows: list[RunResult], device: torch.device) -> None:
    if options.output is None:
        return
    content = report.result(kind, rows, device=device)
    # The file of one case has the same name as the file of many, so that a later run can resume it.
    name = options.name or report.file_name(content, "models" if kind == "model" else None)
    report.save(options.output / name, content)


if __name__ == "__main__":
    run(parse(None))
