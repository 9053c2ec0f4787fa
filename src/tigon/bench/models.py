"""One training step of a whole model: tokens/s, peak memory and the loss of each step, side by side.

bf16 weights, AdamW with states in the weights' dtype (fused on a GPU), SDPA where the model has it, random weights and
tokens from one seed, one eighth of each sequence masked out of the loss. Every side runs in its own process: Liger
patches classes for the whole process, and no side may inherit another side's fragmented allocator.

    python -m tigon.bench.models --model llama-3-8b --batch 16 --seq 512 --output results

Several models, their floors and profiles in one run: benchmarks/models.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tigon.bench import report
from tigon.bench.processes import Processes
from tigon.bench.training import DEFAULT_SIDES, Side


def run_model(
    model: str,
    *,
    batch: int,
    seq: int,
    checkpointing: bool = False,
    steps: int = 10,
    sides: Sequence[str] = DEFAULT_SIDES,
    dtype: str = "bfloat16",
    device: str = "cuda",
    overrides: dict[str, Any] | None = None,
    timeout_s: float = 1800.0,
    say: Callable[[str], None] = lambda text: None,
    done: Callable[[list[Side]], None] = lambda rows: None,
) -> list[Side]:
    """Train each side in its own process, one after another. A side that fails gets a row that says why.

    say: called with a line for every step. done: called with the rows so far, after each side.
    """
    rows: list[Side] = []
    with Processes(len(sides)) as processes:
        for name in sides:
            row = Side(model, name, batch, seq, checkpointing, dtype)
            rows += processes.run(
                row, device=device, timeout_s=timeout_s, say=say, task="train", steps=steps, overrides=overrides or {}
            )
            done(rows)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tigon.bench.models", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", action="append", help="a preset; may be given several times")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--sides", default=",".join(DEFAULT_SIDES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="folder for the result file, which is written after every side")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    finished: list[Side] = []

    def keep(rows: list[Side]) -> None:
        if options.output:
            content = report.result("model", rows, device=device)
            report.save(options.output / report.file_name(content), content)

    for model in options.model or ["llama-3-8b"]:
        finished += run_model(
            model,
            batch=options.batch,
            seq=options.seq,
            checkpointing=options.checkpointing,
            steps=options.steps,
            sides=options.sides.split(","),
            dtype=options.dtype,
            device=options.device,
            say=lambda text: print(text, flush=True),
            done=keep,
        )
    print(report.to_text(report.result("model", finished, device=device)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
