"""The table of the Liger paper on the GPUs of one host: five models under FSDP2, plain, with Liger and with Tigon.

    python -m torch.distributed.run --standalone --nproc-per-node 4 benchmarks/paper.py --output results
    … benchmarks/paper.py --output results --only mistral-7b --sides hf,tigon
    … benchmarks/paper.py --output results --resume results/h200-4gpus.json           what is missing

Sequences of 512 tokens, bf16 weights, gradients and states of AdamW, SDPA, no checkpointing, random weights; the loss
is the plain mean over the tokens, of which the ranks have equally many. Every rank runs each side in a process of its
own, since Liger patches the modules of transformers. Rank 0 writes the result file after every side.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import report
from harness.processes import run_in_process
from harness.training import RunResult
from sharded import rows_of

from tigon.cli.environment import describe_environment

# The models and batches of arXiv 2410.10989, in sequences over all GPUs.
CASES = {"llama-3-8b": 64, "qwen2-7b": 48, "gemma-7b": 48, "mistral-7b": 128, "phi-3-mini": 128}
SIDES = ("hf", "liger", "tigon")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", required=True, type=Path, help="folder for the result file")
    parser.add_argument("--name", help="name of the result file; default: the device and the number of GPUs")
    parser.add_argument("--only", help=f"models, separated by commas: {', '.join(CASES)}")
    parser.add_argument("--sides", default=",".join(SIDES), help="separated by commas")
    parser.add_argument("--steps", type=int, default=6, help="timed steps, after three of warm-up")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--resume", type=Path, help="a result file whose sides are kept, and not measured again")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no further side is begun")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds after which a side is given up")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


class Ranks:
    """The ranks' messages to each other: which sides to run, whether to begin the next, and that a rank failed."""

    def __init__(self) -> None:
        self.rank, self.local, self.world = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
        )
        self.host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        self.port = int(os.environ["MASTER_PORT"]) if "MASTER_PORT" in os.environ else _free_port()
        # torchrun runs a store already.
        hosts = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = dist.TCPStore(
            self.host, self.port, is_master=hosts, wait_for_workers=False, timeout=timedelta(seconds=1200)
        )
        self.store = dist.PrefixStore("paper", store)

    def agree(self, what: str, value: Any = None) -> Any:
        """The value that rank 0 gives, on every rank."""
        if self.rank == 0:
            self.store.set(what, json.dumps(value))
            return value
        return json.loads(self.store.get(what))

    def failed(self, cell: str) -> str:
        """Why a rank failed, or nothing."""
        return self.store.get(f"{cell} failed").decode() if self.store.check([f"{cell} failed"]) else ""

    def fail(self, cell: str, reason: str) -> None:
        self.store.compare_set(f"{cell} failed", "", reason)  # keeps the first of several reasons

    def wait(self) -> None:
        """Wait for all ranks, because the store lives in rank 0 if torchrun has none."""
        self.store.add("ended", 1)
        while self.rank == 0 and self.store.add("ended", 0) < self.world:
            time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    start, ranks = time.monotonic(), Ranks()
    device = torch.device("cuda", ranks.local) if options.device == "cuda" else torch.device("cpu")
    rows = kept(options, ranks.world) if ranks.rank == 0 else []
    left = ranks.agree("left", missing(options, ranks.world, rows))
    for model, side in left:
        cell, began = f"{model} {side}", time.monotonic()
        if not ranks.agree(f"{cell} begins", began - start < options.budget):
            if ranks.rank == 0:
                print(f"left out, the budget of {options.budget:.0f} s was spent: {cell}", flush=True)
            continue
        row = run(ranks, cell, row_of(model, side, options, ranks.world), device, options)
        if ranks.rank == 0:
            rows = ordered([other for other in rows if (other.model, other.side) != (model, side)] + [row])
            content = save(options, rows, device)
            line = " ".join(report.to_text({**content, "rows": [row.to_dict()]}).split("\n")[-1].split())
            print(f"{time.monotonic() - start:6.1f} s  {time.monotonic() - began:.1f} s  {line}", flush=True)
    ranks.wait()
    if ranks.rank == 0 and rows:
        print(report.to_text(save(options, rows, device)))


def run(ranks: Ranks, cell: str, row: RunResult, device: torch.device, options: argparse.Namespace) -> RunResult:
    """This rank's part of one side. A rank that fails takes the others with it: they would wait for it."""
    member = {"rank": ranks.rank, "world": ranks.world, "host": ranks.host, "port": ranks.port, "prefix": cell}
    row = run_in_process(
        rows_of,
        row,
        device=str(device),
        timeout_s=options.timeout,
        stop=lambda: ranks.failed(cell),
        steps=options.steps,
        overrides={},
        member=member,
    )[-1]
    if row.status == "failed":
        ranks.fail(cell, row.reason)
        row.reason = ranks.failed(cell)
    return row


def row_of(model: str, side: str, options: argparse.Namespace, world: int) -> RunResult:
    batch, seq = CASES[model], options.seq
    if batch % world:
        raise SystemExit(f"paper.py: {world} GPUs cannot share the {batch} sequences of {model} equally.")
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    return RunResult(model, side, batch, seq, False, dtype, gpus=world)


def missing(options: argparse.Namespace, world: int, rows: list[RunResult]) -> list[tuple[str, str]]:
    """Models and sides to measure, in the order of the measurements."""
    names = options.only.split(",") if options.only else list(CASES)
    for what, asked, known in (("--only", names, CASES), ("--sides", options.sides.split(","), SIDES)):
        if unknown := [name for name in asked if name not in known]:
            raise SystemExit(f"paper.py: {what} must be among {', '.join(known)}, got {', '.join(unknown)}")
    done = {(row.model, row.side, row.batch, row.seq) for row in rows if row.status == "ok"}
    wanted = [row_of(model, side, options, world) for model in names for side in options.sides.split(",")]
    return [(row.model, row.side) for row in wanted if (row.model, row.side, row.batch, row.seq) not in done]


def kept(options: argparse.Namespace, world: int) -> list[RunResult]:
    """The rows of the file that is gone on with. Those of another number of GPUs are not compared with these."""
    if options.resume is None or not options.resume.exists():
        return []
    content = report.load(options.resume)
    known = {field.name for field in fields(RunResult)}
    now = json.loads(json.dumps(describe_environment(torch.device(options.device))))
    if any(content["environment"][what] != now[what] for what in ("device", "packages")):
        raise SystemExit(f"paper.py: {options.resume} is of another device or of other versions.")
    if any(row["gpus"] != world for row in content["rows"]):
        raise SystemExit(f"paper.py: {options.resume} is of another number of GPUs than {world}.")
    return [RunResult(**{k: v for k, v in row.items() if k in known}) for row in content["rows"]]


def ordered(rows: list[RunResult]) -> list[RunResult]:
    models = list(CASES)
    return sorted(rows, key=lambda row: (models.index(row.model), SIDES.index(row.side)))


def save(options: argparse.Namespace, rows: list[RunResult], device: torch.device) -> dict[str, Any]:
    content = report.result("model", rows, device=device)
    report.save(options.output / (options.name or report.file_name(content, f"{rows[0].gpus}gpus")), content)
    return content


if __name__ == "__main__":
    main()
