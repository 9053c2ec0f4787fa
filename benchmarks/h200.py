"""The record on one GPU: every operator on the shapes of real models, against every peer that is installed.

    python benchmarks/h200.py --output results --only rms_norm,linear_cross_entropy --peers eager,liger --budget 500
    python benchmarks/h200.py --output results --record memory --part 1/3    the long list of shapes and dtypes, a third
    python benchmarks/h200.py --output results --record memory --resume results/h200-memory.json       what is missing
    python benchmarks/h200.py --output results --merge results/h200-memory-*.json
    python benchmarks/h200.py --output results --only linear_cross_entropy:32768x4096x128256,dpo   one of its shapes
    python benchmarks/h200.py --output results --host                        microseconds of the host per call

Needs torch, triton and tigon alone; peers and transformers where they are there. The result file is written after every
case, so that a run which is stopped loses the case at hand and no other. Whole models: `python -m tigon.bench.models`.
"""

from __future__ import annotations

import argparse
import gc
import re
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tigon.bench import report
from tigon.bench.cases import OPS, Op
from tigon.bench.host import HostSettings, run_floor, run_host
from tigon.bench.inputs import DTYPES, Shape
from tigon.bench.runner import Settings, choose, measure_ceilings, parse_shape, run_case

SMALL = Settings(1, 5.0, 20.0, 2.0)
# For shapes that no quoted table has.
EXTRA = Settings(3, 10.0, 30.0, 5.0, freeze=True)


@dataclass(frozen=True)
class Case:
    op: Op
    shape: Shape
    dtype: str = "bf16"
    # A case of the quoted tables: all implementations are checked against fp64, and compiled for this shape only.
    main: bool = True

    @property
    def key(self) -> tuple[Any, ...]:
        return self.op.name, self.shape, str(DTYPES[self.dtype]).removeprefix("torch.")


def record(kind: str) -> list[Case]:
    """All cases of "memory", the operators that memory bounds, or of "matmul", those that arithmetic does."""
    cases = []
    for op in OPS.values():
        if (op.flops is None) != (kind == "memory"):
            continue
        cases += [Case(op, shape) for shape in op.shapes]
        cases += [Case(op, shape, main=False) for shape in op.extra]
        # Products in fp32 take ten times as long, so only the smallest shape is measured in other dtypes.
        at = op.shapes[:1] if op.flops is None else sorted(op.extra, key=op.flops)[:1]
        cases += [Case(op, shape, dtype, main=False) for shape in at for dtype in ("fp16", "fp32")]
    return cases


def part_of(cases: list[Case], part: str) -> list[Case]:
    """'2/3': the second of three parts of about equal time. An operator's cases stay together, as they share code."""
    index, _, count = part.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise SystemExit(f"h200.py: --part must be I/N with 1 ≤ I ≤ N, got {part!r}")
    weights = [0] * int(count)
    mine: list[Case] = []
    for name in dict.fromkeys(case.op.name for case in cases):
        members = [case for case in cases if case.op.name == name]
        lightest = weights.index(min(weights))
        weights[lightest] += sum(4 if case.main else 1 for case in members) * len(OPS[name].implementations)
        if lightest == int(index) - 1:
            mine += members
    return mine


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.merge:
        contents = [report.load(path) for path in options.merge]
        content = report.take(*contents, options.take) if options.take else report.merge(contents)
        save(options, content)
        return
    if options.host:
        run_hosts(options)
        return
    run_cases(options)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", required=True, type=Path, help="folder for the result file")
    parser.add_argument("--name", help="name of the result file; default: the device and what was measured")
    parser.add_argument("--only", help="operators, separated by commas, also OPERATOR:SHAPE; default: all")
    parser.add_argument("--shape", help="one shape instead of the operator's own")
    parser.add_argument(
        "--peers", help="implementations besides tigon, separated by commas; default: all that are there"
    )
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--ignored", type=float, default=0.0, help="fraction of targets that are ignored")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=510.0, help="seconds after which no further case is started")
    parser.add_argument("--small", action="store_true", help="small shapes, short measurements")
    parser.add_argument("--record", choices=("memory", "matmul"), help="the long list of shapes and dtypes")
    parser.add_argument("--part", default="1/1", help="with --record: I/N, one of N parts that take about as long")
    parser.add_argument("--resume", type=Path, help="a result file whose cases are kept, and not measured again")
    parser.add_argument(
        "--compile-budget",
        type=float,
        default=120.0,
        help="seconds of torch.compile on the further shapes of --record, after which they go without",
    )
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="make one file of several, and end")
    parser.add_argument(
        "--take", metavar="PEER", help="with --merge of two files: only what this one failed with in the first"
    )
    parser.add_argument("--host", action="store_true", help="microseconds of the host per call")
    return parser.parse_args(arguments)


def cases_of(options: argparse.Namespace, done: Collection[tuple[Any, ...]] = ()) -> list[Case]:
    names = options.only.split(",") if options.only else list(OPS)
    if options.record:
        missing = [case for case in record(options.record) if case.op.name in names and case.key not in done]
        return part_of(missing, options.part)
    cases = []
    for name in names:
        name, _, shape = name.partition(":")
        op, shape = OPS[name], shape or options.shape
        shapes = [parse_shape(op, shape)] if shape else op.small if options.small else op.shapes
        cases += [Case(op, shape, options.dtype) for shape in shapes]
    return [case for case in cases if case.key not in done]


def run_cases(options: argparse.Namespace) -> None:
    start = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peers = options.peers.split(",") if options.peers else None
    before = report.load(options.resume) if options.resume and options.resume.exists() else None
    done = set() if before is None else {report.case_of(row) for row in before["rows"]}
    if before is not None:
        save(options, before)
    ceilings = measure_ceilings(device, SMALL if options.small else None)
    print(
        f"copy {ceilings.copy_gbps:.0f} GB/s, matmul {ceilings.matmul_tflops:.0f} TFLOP/s ({ceilings.matmul})",
        flush=True,
    )
    # One process compiles all shapes and dtypes of an operator; at the default limit torch.compile would give up.
    torch._dynamo.config.recompile_limit = 64
    rows: list[Any] = []
    late: list[str] = []
    content = None
    compiling, compiled = 0.0, ""
    # Quoted cases come first, so that a budget that is too small leaves out only further shapes.
    for case in sorted(cases_of(options, done), key=lambda case: not case.main):
        began = time.monotonic()
        title = f"{case.op.name} {'×'.join(map(str, case.shape))} {case.dtype}"
        if began - start > options.budget:
            late.append(title)
            continue
        # A case collects garbage some thirty times, which takes milliseconds without all that was imported.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        chosen = choose(case.op, peers, device)
        if not case.main and compiling > options.compile_budget:
            chosen.pop("compile", None)
        measured = run_case(
            case.op,
            case.shape,
            DTYPES[case.dtype],
            device,
            ceilings,
            implementations=chosen,
            settings=SMALL if options.small else Settings(options.rounds, freeze=True) if case.main else EXTRA,
            ignored=options.ignored,
            checked=None if case.main else [name for name in chosen if name.startswith("tigon")],
            # Beyond the quoted tables one compilation, of dynamic shapes from the second on, serves an operator.
            fresh=case.main or compiled != case.op.name,
        )
        rows += measured
        if not case.main:
            compiled = case.op.name
            compiling += sum(row.first_s or 0.0 for row in measured if row.implementation == "compile")
        content = report.result("ops", rows, device=device, ceilings=asdict(ceilings))
        if before is not None:
            content = report.merge([before, content])
        save(options, content)
        took = time.monotonic() - began
        print(f"{time.monotonic() - start:6.1f} s  {title}: {took:.1f} s", flush=True)
    gc.unfreeze()
    if content is not None:
        print(report.to_text({**content, "rows": content["rows"][-len(rows) :]}))
    for title in late:
        print(f"left out, the budget of {options.budget:.0f} s was spent: {title}")


def run_hosts(options: argparse.Namespace) -> None:
    start = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peers = options.peers.split(",") if options.peers else None
    settings = HostSettings(10, 5, 3) if options.small else HostSettings()
    names = options.only.split(",") if options.only else list(OPS)
    rows: list[Any] = run_floor(device, settings)
    for name in names:
        if time.monotonic() - start > options.budget:
            print(f"left out, the budget of {options.budget:.0f} s was spent: {name}")
            continue
        op = OPS[name]
        rows += run_host(
            op, DTYPES[options.dtype], device, implementations=choose(op, peers, device), settings=settings
        )
        content = report.result("host", rows, device=device)
        save(options, content)
        print(f"{time.monotonic() - start:6.1f} s  {name}", flush=True)
    print(report.to_text(content))


def save(options: argparse.Namespace, content: dict[str, Any]) -> None:
    name = options.name or report.file_name(content)
    if options.name is None and options.merge:
        name = re.sub(r"-\d+of\d+\.json$", ".json", options.merge[0].name)
    elif options.name is None and options.record:
        part = "" if options.part == "1/1" else f"-{options.part.replace('/', 'of')}"
        name = name.replace("-ops.json", f"-{options.record}{part}.json")
    report.save(options.output / name, content)


if __name__ == "__main__":
    main()
