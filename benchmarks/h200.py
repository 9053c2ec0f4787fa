"""The record on one GPU: every operator on the shapes of real models, against every peer that is installed.

    python benchmarks/h200.py --output results --only rms_norm,linear_cross_entropy --peers eager,liger --budget 500

Needs torch, triton and tigon alone; peers and transformers where they are there. The result file is written after every
case, so that a run which is stopped loses the case at hand and no other. Whole models: `python -m tigon.bench.models`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

import torch

from tigon.bench import report
from tigon.bench.cases import OPS
from tigon.bench.inputs import DTYPES
from tigon.bench.runner import Row, Settings, choose, measure_ceilings, parse_shape, run_case


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", required=True, type=Path, help="folder for the result file")
    parser.add_argument("--name", help="name of the result file; default: the device and what was measured")
    parser.add_argument("--only", help="operators, separated by commas; default: all")
    parser.add_argument("--shape", help="one shape instead of the operator's own")
    parser.add_argument(
        "--peers", help="implementations besides tigon, separated by commas; default: all that are there"
    )
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--ignored", type=float, default=0.0, help="fraction of targets that are ignored")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no further case is started")
    parser.add_argument("--small", action="store_true", help="small shapes, short measurements")
    options = parser.parse_args()

    start = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings(1, 5.0, 20.0) if options.small else Settings(options.rounds)
    names = options.only.split(",") if options.only else list(OPS)
    peers = options.peers.split(",") if options.peers else None
    ceilings = measure_ceilings(device, settings)
    print(
        f"copy {ceilings.copy_gbps:.0f} GB/s, matmul {ceilings.matmul_tflops:.0f} TFLOP/s ({ceilings.matmul})",
        flush=True,
    )

    rows: list[Row] = []
    late: list[str] = []
    for name in names:
        op = OPS[name]
        shapes = op.small if options.small else op.shapes
        for shape in [parse_shape(op, options.shape)] if options.shape else shapes:
            began = time.monotonic()
            if began - start > options.budget:
                late.append(f"{name} {shape}")
                continue
            rows += run_case(
                op,
                shape,
                DTYPES[options.dtype],
                device,
                ceilings,
                implementations=choose(op, peers, device),
                settings=settings,
                ignored=options.ignored,
            )
            content = report.result("ops", rows, device=device, ceilings=asdict(ceilings))
            report.save(options.output / (options.name or report.file_name(content)), content)
            print(f"{time.monotonic() - start:6.1f} s  {name} {shape}: {time.monotonic() - began:.1f} s", flush=True)
    if rows:
        print(report.to_text(content))
    for case in late:
        print(f"left out, the budget of {options.budget:.0f} s was spent: {case}")


if __name__ == "__main__":
    main()
