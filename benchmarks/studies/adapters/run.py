"""Adapters (LoRA, QLoRA) on one GPU: Hugging Face + PEFT, Liger, Unsloth and Tigon, in one run.

    python -m studies.adapters.run --output results --name h100-adapters.json           every case, in about 330 s
    python -m studies.adapters.run --output results --only llama-3-8b --sides hf,tigon  some of it

Liger and Unsloth change classes of transformers for good: each has a process of its own. The processes import side by
side, and measure one after the other. The file is written after every side of a case. A side that fails is a row with
its reason; where the time is up, what is left is in the file's notes. `--resume FILE` measures what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from harness import report

from studies.adapters.rows import SIDES, Row
from tigon.cli.environment import read_package_version

HERE = Path(__file__).resolve().parents[2]
# The process that a side runs in: one that changes classes has its own.
PEERS = {"liger": "liger", "unsloth": "unsloth"}
PACKAGES = ("unsloth", "unsloth_zoo", "bitsandbytes")  # beside those that every result file names
USUAL_S = 12.0  # seconds that a side takes of a case, before anything is known of it
START_S = 150.0  # seconds that a process may import
ALL = ("tigon", "unsloth", "hf", "liger")
FP8 = ("tigon-fp8", "tigon-fp8-release")


@dataclass(frozen=True)
class Case:
    """sides: in the order in which they run. fp32, what gradients are compared with, is no side of the tables."""

    model: str
    batch: int
    seq: int
    sides: tuple[str, ...]
    rank: int = 16
    quantized: str = ""
    checkpointing: bool = False
    measure: str = "speed"
    layers: int = 0

    @property
    def name(self) -> str:
        words = [self.model, f"{self.batch}x{self.seq}", self.quantized or "lora", f"r{self.rank}", self.measure]
        return "-".join(words + ["checkpointing"] * self.checkpointing)

    def row(self, side: str) -> Row:
        return Row(
            self.model, side, self.batch, self.seq, self.rank, self.quantized, self.checkpointing, self.measure,
            self.layers,
        )  # fmt: skip


LLAMA = "llama-3-8b"
FAMILIES = ("mistral-7b", "qwen2-7b", "gemma-2-2b")
# The most important first: a budget that is too small leaves out the last ones.
CASES = (
    Case(LLAMA, 2, 1024, ("fp32", "hf", *(s for s in ALL if s != "hf"), *FP8), measure="gradients", layers=4),
    Case(LLAMA, 4, 2048, (*ALL, "tigon-offload", *FP8), checkpointing=True),
    Case(LLAMA, 4, 2048, (*ALL, *FP8)),
    Case(LLAMA, 4, 2048, (*ALL, "tigon-offload", "tigon-mlp-offload"), quantized="nf4", checkpointing=True),
    Case(LLAMA, 2, 1024, ("fp32", "hf", "tigon", "unsloth", "liger"), quantized="nf4", checkpointing=True,
         measure="gradients", layers=4),
    Case("qwen3-1.7b", 8, 2048, ALL),
    *(Case(LLAMA, 1, seq, ("tigon-mlp-offload", "tigon-offload", "unsloth", "hf"), quantized="nf4", checkpointing=True,
           measure="memory") for seq in (16384, 32768)),
    *(Case(LLAMA, 4, 2048, ("tigon", "unsloth", "hf"), rank=rank, checkpointing=True) for rank in (8, 64, 256)),
    # Half of the batch, so that three families fit into the time; Unsloth compiles for each of them, and comes last.
    *(Case(model, 2, 2048, ("tigon", "hf"), checkpointing=True) for model in FAMILIES),
    *(Case(model, 2, 2048, ("unsloth",), checkpointing=True) for model in FAMILIES),
)  # fmt: skip


class Worker:
    """A process that imports at once, and then measures what it is asked for.

    `reason` says why it cannot any more; a fresh one may be able to, unless this one never came to be `ready`.
    """

    def __init__(self, peer: str, logs: Path, folder: Path, module: str = "studies.adapters.sides") -> None:
        self.peer, self.folder, self.began = peer, folder, time.monotonic()
        self.ready_file = Path(tempfile.mkdtemp(dir=folder)) / "ready"
        self.log = logs / f"{peer}.log"
        self.ready = False
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, peer, str(self.ready_file)],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, text=True, cwd=folder,
                env=environment(folder),
            )  # fmt: skip

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def await_ready(self) -> str:
        """Why it cannot measure; nothing if it can."""
        while not self.ready:
            if self.ready_file.exists():
                self.ready = True
            elif self.ended:
                return f"its process ended with code {self.process.returncode}: {self.last_line()}"
            elif time.monotonic() - self.began > START_S:
                self.end()
                return f"its process took longer than {START_S:.0f} s to import"
            else:
                time.sleep(0.05)
        return ""

    def run(self, row: Row, limit_s: float, **request: Any) -> Row:
        """The row as it was measured, or with the reason why it was not."""
        result = self.ready_file.with_name("row.json")
        result.unlink(missing_ok=True)
        message = {"row": row.to_dict(), "result": str(result), **request}
        began = time.monotonic()
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except OSError:  # it has died; its log says why
            self.end()
        while not result.exists():
            if self.ended and not result.exists():
                reason = f"its process ended with code {self.process.returncode}: {self.last_line()}"
                return replace(row, status="failed", reason=reason)
            if time.monotonic() - began > limit_s:
                self.end()
                return replace(row, status="failed", reason=f"took longer than {limit_s:.0f} s")
            time.sleep(0.02)
        return Row(**json.loads(result.read_text()))

    def last_line(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:200] if lines else "it said nothing"

    def end(self) -> None:
        if not self.ended:
            self.process.kill()
        self.process.wait()


def environment(folder: Path) -> dict[str, str]:
    """Of a process that runs in another folder, where Unsloth leaves what it compiles."""
    paths = [*(str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p), str(HERE)]
    (folder / "compiled").mkdir(exist_ok=True)
    return {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True", "UNSLOTH_COMPILE_LOCATION": str(folder / "compiled"),
        "UNSLOTH_DISABLE_STATISTICS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths),
    }  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the result file")
    parser.add_argument("--name", help="name of the result file; default: the device and what was measured")
    parser.add_argument("--only", help="cases whose names contain one of these, separated by commas; default: all")
    parser.add_argument("--sides", help=f"separated by commas: {', '.join(SIDES)}; default: those of every case")
    parser.add_argument("--budget", type=float, default=330.0, help="seconds after which no further side is begun")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after which a side of a case is given up")
    parser.add_argument("--steps", type=int, default=6, help="timed steps")
    parser.add_argument("--warm", type=int, default=2, help="steps before the timed ones")
    parser.add_argument("--resume", type=Path, help="a result file whose rows are kept, and not measured again")
    parser.add_argument("--logs", type=Path, help="folder for what the processes say; default: none is kept")
    return parser.parse_args(arguments)


def plan(options: argparse.Namespace) -> list[Row]:
    """A row for every side of every case, in the order in which they run."""
    chosen = (*options.sides.split(","), "fp32") if options.sides else None
    words = options.only.split(",") if options.only else [""]
    return [
        case.row(side)
        for case in CASES
        if any(word in case.name for word in words)
        for side in case.sides
        if chosen is None or side in chosen
    ]


def key(row: Row) -> tuple[Any, ...]:
    return (*report.case_key(row.to_dict()), row.side)


def run(options: argparse.Namespace) -> dict[str, Any] | None:
    start = time.monotonic()
    device = torch.device("cuda")
    date = report.result("adapters", [], device=device)["date"]
    rows = load_resumed(options.resume)
    done = {key(row) for row in rows if row.status == "ok" or row.reason == "out of memory"}
    left = missing(plan(options), done)
    late: list[str] = []
    longest: dict[str, float] = {}
    content = None
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        peers = list(dict.fromkeys(PEERS.get(row.side, "peft") for row in left))
        workers = {peer: Worker(peer, logs, Path(folder)) for peer in peers}
        never = {}  # why a process never came to be ready
        try:
            for row in left:
                began = time.monotonic()
                title = f"{row.model} {row.batch}×{row.seq} {row.quantized or 'lora'} r={row.rank} {row.measure}"
                title += f"{' checkpointing' * row.checkpointing} {row.side}"
                if began - start + longest.get(row.side, USUAL_S) > options.budget:
                    late.append(title)
                    continue
                peer = PEERS.get(row.side, "peft")
                if peer not in never and workers[peer].ended and workers[peer].ready:
                    workers[peer] = Worker(peer, logs, Path(folder))
                if peer not in never and (reason := workers[peer].await_ready()):
                    never[peer] = reason
                if peer in never:
                    new = replace(row, status="failed", reason=never[peer])
                else:
                    began = time.monotonic()
                    request = {
                        "device": str(device), "overrides": {}, "references": folder, "warm": options.warm,
                        "steps": options.steps,
                    }  # fmt: skip
                    new = workers[peer].run(row, options.limit, **request)
                new.date, new.command = date, report.command()
                took = time.monotonic() - began
                longest[row.side] = min(max(longest.get(row.side, 0.0), took), 2 * USUAL_S)
                rows = sorted([old for old in rows if key(old) != key(new)] + [new], key=place)
                content = save(options, rows, device, date, late)
                print(f"{time.monotonic() - start:6.1f} s  {title}: {took:.1f} s  {figures(new)}", flush=True)
        finally:
            for worker in workers.values():
                worker.end()
    for title in late:
        print(f"left out, the budget of {options.budget:.0f} s was spent: {title}")
    if rows:
        content = save(options, rows, device, date, late)
        print(report.to_text(content))
    return content


def missing(wanted: list[Row], done: set[tuple[Any, ...]]) -> list[Row]:
    """What is still to be measured; with the fp32 side of its case, which leaves its gradients in this run's folder."""
    cases = {report.case_key(row.to_dict()) for row in wanted if key(row) not in done}

    def is_left(row: Row) -> bool:
        return key(row) not in done or (row.side == "fp32" and report.case_key(row.to_dict()) in cases)

    return [row for row in wanted if is_left(row)]


def place(row: Row) -> tuple[int, ...]:
    """Where a row stands in the file: as in CASES."""
    for number, case in enumerate(CASES):
        same = replace(row, batch=case.batch, seq=case.seq, layers=case.layers)
        if row.side in case.sides and key(same) == key(case.row(row.side)):
            return number, case.sides.index(row.side), row.seq
    return len(CASES), 0, row.seq


def figures(row: Row) -> str:
    """The numbers of a row that was just measured."""
    if row.status != "ok":
        return f"{row.status.upper()}: {row.reason}"
    parts = [f"{row.tokens_per_s:,.0f} tokens/s"] if row.tokens_per_s else []
    parts += [f"{row.peak_gib:.2f} GiB"] if row.peak_gib else []
    parts += [f"error {row.error:.4f}"] if row.error is not None else []
    return ", ".join(parts) or f"loss {row.loss:.4f}"


def load_resumed(path: Path | None) -> list[Row]:
    if path is None or not path.exists():
        return []
    content = report.load(path)
    if content["kind"] != "adapters":
        raise SystemExit(f"adapters.py: {path} is of kind {content['kind']!r}, this run is of 'adapters'.")
    now = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if now is not None and content["environment"]["device"] != now:
        raise SystemExit(f"adapters.py: {path} is of another device, {content['environment']['device']}.")
    return [Row(**row) for row in content["rows"]]


def save(
    options: argparse.Namespace, rows: list[Row], device: torch.device, date: str, late: list[str]
) -> dict[str, Any]:
    """Write the file. It has the date at which this run began, as this run's rows have."""
    content = report.result("adapters", rows, device=device) | {"date": date}
    content["environment"]["packages"] |= {name: read_package_version(name) for name in PACKAGES}
    content["runs"] = [{"date": day, "command": how} for day, how in sorted({(row.date, row.command) for row in rows})]
    content["notes"] = [f"left out, the time was up: {title}" for title in late]
    report.save(options.output / (options.name or report.file_name(content)), content)
    return content


def main(arguments: Sequence[str] | None = None) -> int:
    content = run(parse(arguments))
    return 0 if content is not None else 1


if __name__ == "__main__":
    sys.exit(main())
