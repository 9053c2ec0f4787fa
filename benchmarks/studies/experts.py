"""Full training of experts: `tigon.moe_mlp` beside every implementation that runs here, at the layers of three models.

    python benchmarks/studies/experts.py --output results
    python benchmarks/studies/experts.py --output results --layers Qwen3-30B-A3B --sides tigon,sonic
    python benchmarks/studies/experts.py --output results --tiny    small layers, for a look at the script on a CPU

SonicMoE and Liger tune their kernels when first called: minutes for a layer, with no rows of that layer before the end.

A row is forward and backward of one layer with gradients of tokens, choices' weights and both stacks; its result is
compared with fp64 in the same run. The sides are those of benchmarks/cases/experts.py: a loop over the experts,
transformers' grouped_mm (also compiled) and batched_mm, Liger's Triton kernels and SonicMoE.

Two of transformers' implementations have no row. "deepgemm" writes its products into new tensors, so that no gradient
reaches the weights. "sonicmoe" loads its kernels from the Hub; the row `sonic` calls the same function from PyPI's
sonic-moe. Liger's CuTe experts are split over processes, and need NVSHMEM.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from cases import OPS
from harness import report
from harness.runner import QUICK, Case, Settings, choose, measure_ceilings, run_case

KIND = "ops"  # a table of operators, as benchmarks/run.py makes
SIDES = ("tigon", "sonic", "liger", "transformers", "transformers-compile", "eager", "transformers-batched")
TOKENS = 8192
# width, inner width, experts, choices of a token
LAYERS = {
    "Mixtral-8x7B": ("moe_mlp", (4096, 14336, 8, 2)),
    "Qwen3-30B-A3B": ("moe_mlp", (2048, 768, 128, 8)),
    "gpt-oss-20b": ("moe_mlp-gpt-oss", (2880, 2880, 32, 4)),
}


def list_cases(names: Sequence[str], is_tiny: bool) -> list[Case]:
    layers = [LAYERS[name] for name in names]
    if is_tiny:
        return [Case(OPS[op], (48, 32, 16, 4, 2), torch.float32) for op, _ in layers]
    return [Case(OPS[op], (TOKENS, *layer)) for op, layer in layers]


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a result of Tigon's is wrong, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", required=True, type=Path, help="folder for the result file")
    parser.add_argument("--name", help="name of the result file; default: the device and what was measured")
    parser.add_argument("--sides", default=",".join(SIDES), help="separated by commas; default: all")
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=LAYERS, help="models; default: all")
    parser.add_argument("--tiny", action="store_true", help="small layers, measured briefly")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = QUICK if options.tiny else Settings()
    ceilings = measure_ceilings(device, settings)
    start = time.monotonic()
    rows: list[Any] = []
    for case in list_cases(options.layers, options.tiny):
        chosen = choose(case.op, options.sides.split(","), device)
        # Where SonicMoE cannot be imported its row says why.
        rows += run_case(case, device, ceilings, implementations=chosen, settings=settings)
        content = report.result(KIND, rows, device=device, ceilings=asdict(ceilings))
        report.save(options.output / (options.name or report.file_name(content, "experts")), content)
        print(f"{time.monotonic() - start:6.1f} s  {case}", flush=True)
    print(report.to_text(content))
    for row in rows:
        if row.reason:
            print(f"{row.op} {row.implementation}: {row.status}, {row.reason}")
    return int(any(row.status == "wrong" and row.implementation == "tigon" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
