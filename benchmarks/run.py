"""Measure operators beside eager PyTorch, torch.compile, the installed peers and the hardware's floor, in one run.

    python benchmarks/run.py                                       every operator; small shapes on a CPU
    python benchmarks/run.py rms_norm:8192x4096 swiglu --quick     some operators, or one of their shapes
    python benchmarks/run.py linear_cross_entropy --peers liger,cce --ignored 0.25
    python benchmarks/run.py --host                                microseconds of the host per call, on tiny inputs
    python benchmarks/run.py --output results --record memory --part 1/3      the long list of shapes and dtypes
    python benchmarks/run.py --output results --record memory --resume results/h200-memory.json   what is missing
    python benchmarks/run.py --output results --merge results/h200-memory-*.json
    python benchmarks/run.py --show results/h200-memory.json       the table of a file

Needs torch, triton and PYTHONPATH=src; peers where they are installed. The result file is written after every case, so
that a run which is stopped loses the case at hand and no other. Whole models: models.py. Searches: search.py.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import time
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from cases import OPS
from cases.inputs import DTYPES
from harness import report
from harness.host import HostSettings, run_floor, run_host
from harness.runner import QUICK, Case, Settings, choose, measure_ceilings, parse_shape, run_case

# For shapes that no quoted table has.
EXTRA = Settings(3, 10.0, 30.0, 5.0)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="run.py"
    )
    parser.add_argument("ops", nargs="*", metavar="OP[:SHAPE]", help="operators, such as rms_norm; default: all")
    parser.add_argument("--output", type=Path, help="folder for the result file")
    parser.add_argument("--name", help="name of the result file; default: the device and what was measured")
    parser.add_argument("--plot", action="store_true", help="with --output: a chart beside the result file")
    parser.add_argument(
        "--peers", help="implementations besides tigon, separated by commas; default: all that run here"
    )
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--ignored", type=float, default=0.0, help="fraction of targets that a loss ignores")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all implementations")
    parser.add_argument("--quick", action="store_true", help="small shapes, one short round")
    parser.add_argument("--host", action="store_true", help="microseconds of the host per call, on tiny inputs")
    parser.add_argument("--budget", type=float, default=510.0, help="seconds after which no further case begins")
    parser.add_argument("--record", choices=("memory", "matmul"), help="the long list of shapes and dtypes")
    parser.add_argument("--part", default="1/1", help="with --record: I/N, one of N parts that take about as long")
    parser.add_argument("--resume", type=Path, help="a result file whose cases are kept, and not measured again")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="make one file of several, and end")
    parser.add_argument("--show", nargs="+", type=Path, metavar="FILE", help="print the tables of files, and end")
    options = parser.parse_args(arguments)
    options.peers = options.peers.split(",") if options.peers else None
    names = [name.partition(":")[0] for name in options.ops]
    peers = {name for op in OPS.values() for name in op.implementations}
    for what, given, known in (("OP", names, OPS), ("--peers", options.peers or [], sorted(peers))):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{what} must be among {', '.join(known)}, got {', '.join(unknown)}")
    try:
        options.cases = list_cases(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def list_cases(options: argparse.Namespace) -> list[Case]:
    """Raises ValueError with a sentence for a shape or a part that is none."""
    ops = [name.partition(":") for name in options.ops or OPS]
    if options.record:
        names = [name for name, *_ in ops]
        return select_part([case for case in list_record(options.record) if case.op.name in names], options.part)
    small = options.quick or options.device.type != "cuda"  # the shapes of real models would take a CPU hours
    return [
        Case(OPS[name], one, DTYPES[options.dtype], options.ignored)
        for name, _, shape in ops
        for one in ([parse_shape(OPS[name], shape)] if shape else OPS[name].small if small else OPS[name].shapes)
    ]


def list_record(kind: str) -> list[Case]:
    """All cases of "memory", the operators that memory bounds, or of "matmul", those that arithmetic does."""
    cases = []
    for op in OPS.values():
        if (op.flops is None) != (kind == "memory"):
            continue
        cases += [Case(op, shape) for shape in (*op.shapes, *op.extra)]
        # Products in fp32 take ten times as long, so only the smallest shape is measured in other dtypes.
        few = op.shapes[:1] if op.flops is None else sorted(op.extra, key=op.flops)[:1]
        cases += [Case(op, shape, dtype) for shape in few for dtype in (torch.float16, torch.float32)]
    return cases


def is_quoted(case: Case) -> bool:
    """Whether tables quote the case: all its implementations are checked, and compiled for this shape only."""
    return case.dtype == torch.bfloat16 and case.shape in case.op.shapes


def select_part(cases: list[Case], part: str) -> list[Case]:
    """'2/3': the second of three parts of about equal time. An operator's cases stay together, as they share code."""
    index, _, count = part.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ValueError(f"--part must be I/N with 1 ≤ I ≤ N, got {part!r}")
    weights = [0] * int(count)
    selected: list[Case] = []
    for name in dict.fromkeys(case.op.name for case in cases):
        members = [case for case in cases if case.op.name == name]
        lightest = weights.index(min(weights))
        weights[lightest] += sum(4 if is_quoted(case) else 1 for case in members) * len(OPS[name].implementations)
        if lightest == int(index) - 1:
            selected += members
    return selected


def run_cases(options: argparse.Namespace) -> dict[str, Any] | None:
    start, device = time.monotonic(), options.device
    before = report.load(options.resume) if options.resume else None
    done: Collection[Any] = {report.case_key(row) for row in before["rows"]} if before else ()
    ceilings = measure_ceilings(device, QUICK if options.quick else Settings())
    # One process compiles all shapes and dtypes of an operator; at the default limit torch.compile would give up.
    torch._dynamo.config.recompile_limit = 64
    rows: list[Any] = []
    content, compiled_op = before, ""
    # Quoted cases come first, so that a budget that is too small leaves out only further shapes.
    for case in sorted(options.cases, key=lambda case: bool(options.record) and not is_quoted(case)):
        if report.case_key(case.make_row("").to_dict()) in done:
            continue
        if time.monotonic() - start > options.budget:
            print(f"left out, the budget of {options.budget:.0f} s was spent: {case}")
            continue
        # A case collects garbage some thirty times, which takes milliseconds without all that was imported.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        implementations, quoted = choose(case.op, options.peers, device), not options.record or is_quoted(case)
        rows += run_case(
            case,
            device,
            ceilings,
            implementations=implementations,
            settings=QUICK if options.quick else Settings(options.rounds) if quoted else EXTRA,
            checked=None if quoted else [name for name in implementations if name.startswith("tigon")],
            # Beyond the quoted tables one compilation, of dynamic shapes from the second on, serves an operator.
            fresh=quoted or compiled_op != case.op.name,
        )
        compiled_op = "" if quoted else case.op.name
        content = report.result("ops", rows, device=device, ceilings=asdict(ceilings))
        content = report.merge([before, content]) if before else content
        save(options, content)
        print(f"{time.monotonic() - start:6.1f} s  {case}", file=sys.stderr, flush=True)
    return content


def run_hosts(options: argparse.Namespace) -> dict[str, Any]:
    start, device = time.monotonic(), options.device
    settings = HostSettings(10, 5, 3) if options.quick else HostSettings()
    rows: list[Any] = run_floor(device, settings)
    content = report.result("host", rows, device=device)
    for case in {case.op.name: case for case in options.cases}.values():
        if time.monotonic() - start < options.budget:
            rows += run_host(case.op, case.dtype, device, choose(case.op, options.peers, device), settings)
            content = report.result("host", rows, device=device)
            save(options, content)
    return content


def save(options: argparse.Namespace, content: dict[str, Any]) -> None:
    if options.output is None:
        return
    what = None
    if options.merge:
        what = re.sub(r"-\d+of\d+$", "", options.merge[0].stem)
    elif options.record:
        part = "" if options.part == "1/1" else f"-{options.part.replace('/', 'of')}"
        what = report.file_name(content, options.record + part).removesuffix(".json")
    path = options.output / (options.name or (f"{what}.json" if what else report.file_name(content)))
    report.save(path, content)
    if options.plot:
        from harness.plots import plot

        plot(content, path.with_suffix(".png"))


def main(arguments: list[str] | None = None) -> int:
    """1 if a result of Tigon's is wrong, else 0."""
    options = parse(arguments)
    if options.show:
        print("\n\n".join(report.to_text(report.load(path)) for path in options.show))
        return 0
    if options.merge:
        content: dict[str, Any] | None = report.merge([report.load(path) for path in options.merge])
        save(options, content)
        return 0
    content = run_hosts(options) if options.host else run_cases(options)
    if content is None:
        return 0
    print(report.to_text(content))
    return int(any(row["status"] == "wrong" and row["implementation"].startswith("tigon") for row in content["rows"]))


if __name__ == "__main__":
    sys.exit(main())
