"""Training steps that the host sets the pace of: small batches, eager and as CUDA graphs, and lengths that change.

    python benchmarks/studies/small_steps.py --output results              every case, in about 70 s

Plain and fused models train side by side in one process, in turns, on the same tokens, with AdamW on bf16 weights. The
host's time depends on the host: compare the sides of one run. The file is written after every case.
"""

from __future__ import annotations

import argparse
import functools
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import report
from harness.kernels import profile_step
from harness.training import build, synchronize
from torch import Tensor

import tigon

# Qwen3-0.6B is the smaller sister of a preset.
QWEN = {"hidden_size": 1024, "intermediate_size": 3072}
CASES = (
    ("Llama-3.2-1B", "llama-3.2-1b", {}, ((1, 256), (1, 1024))),
    ("Qwen3-0.6B", "qwen3-1.7b", QWEN, ((1, 256), (1, 1024), (1, 4096))),
)
SIDES = ("hf", "tigon", "hf, graph", "tigon, graph")
WARMUP, ROUNDS = 4, 9
LENGTHS, LENGTHS_BATCH, SIGHTS = (256, 2048), 4, 4
ATTENTION = "causal_only"  # by is_causal alone: transformers makes masks in a capture that it leaves out elsewhere


@dataclass
class Step:
    """Milliseconds of a step of one side, from an idle device to an idle device."""

    model: str
    batch: int
    seq: int
    side: str
    status: str = "ok"  # ok | failed
    reason: str = ""
    step_ms: float | None = None
    steps_ms: list[float] = field(default_factory=list)
    # What the device is busy for in one step; None without a GPU, and for graphs.
    device_ms: float | None = None
    losses: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Lengths:
    """Steps whose length changes each time: medians of the steps that meet a length first, and of those after them."""

    model: str
    batch: int
    side: str
    status: str = "ok"
    seqs: list[int] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    later_ms: list[float] = field(default_factory=list)
    first: float | None = None
    later: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Trained:
    """A model with its optimizer; `step` runs eagerly, `graph` replays a CUDA graph of it."""

    def __init__(self, preset: str, overrides: dict[str, Any], fused: bool, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = build(preset, device, dtype, **overrides)
        if fused:
            tigon.fuse(self.model)
        cuda = device.type == "cuda"
        rate = torch.tensor(1e-5, device=device) if cuda else 1e-5
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, fused=cuda, capturable=cuda)
        self.graph = tigon.graph_step(self.step, self.optimizer)

    def step(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def tokens(model: Any, batch: int, seq: int, seed: int, device: torch.device) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (batch, seq), generator=draw).to(device)


def time_call(run: Callable[[Tensor], Tensor], ids: Tensor, device: torch.device) -> tuple[float, float]:
    """Milliseconds, and the loss."""
    synchronize(device)
    start = time.perf_counter()
    loss = run(ids)
    synchronize(device)
    return 1e3 * (time.perf_counter() - start), loss.item()


def small(name: str, batch: int, seq: int, both: dict[str, Trained], device: torch.device) -> list[Step]:
    """The sides in turns: each round one step of each, on the same tokens."""
    rows = {side: Step(name, batch, seq, side) for side in SIDES}
    for attention, sides in (("sdpa", SIDES[:2]), (ATTENTION, SIDES[2:])):
        for trained in both.values():
            trained.model.set_attn_implementation(attention)
        for turn in range(WARMUP + ROUNDS):
            ids = tokens(both["hf"].model, batch, seq, turn, device)
            for side in sides:
                row, trained = rows[side], both[side.split(",")[0]]
                if row.status == "failed":
                    continue
                try:
                    ms, loss = time_call(trained.graph if "graph" in side else trained.step, ids, device)
                except (RuntimeError, ValueError) as error:
                    row.status, row.reason = "failed", f"{type(error).__name__}: {error}"
                    continue
                row.losses.append(loss)
                if turn >= WARMUP:
                    row.steps_ms.append(ms)
    for side, row in rows.items():
        if row.steps_ms:
            row.step_ms = statistics.median(row.steps_ms)
        if device.type == "cuda" and "graph" not in side:
            both[side].model.set_attn_implementation("sdpa")
            kinds = profile_step(functools.partial(both[side].step, ids), device)
            row.device_ms = sum(ms for kind, ms in kinds.items() if kind != "idle")
    return list(rows.values())


def changing(name: str, both: dict[str, Trained], device: torch.device) -> list[Lengths]:
    """Lengths that were never seen, after one step with the longest; then each of them again."""
    least, most = LENGTHS
    draw = random.Random(0)
    seqs = draw.sample(range(least, most), 12)
    rows = [Lengths(name, LENGTHS_BATCH, side, seqs=seqs) for side in SIDES[:2]]
    for row in rows:
        trained = both[row.side]
        trained.model.set_attn_implementation("sdpa")
        for _ in range(2):
            trained.step(tokens(trained.model, LENGTHS_BATCH, most, 0, device))
        for sight in range(SIGHTS):
            for seq in draw.sample(seqs, len(seqs)) if sight else seqs:
                ids = tokens(trained.model, LENGTHS_BATCH, seq, 1 + sight, device)
                ms, _ = time_call(trained.step, ids, device)
                (row.later_ms if sight else row.first_ms).append(ms)
        row.first, row.later = statistics.median(row.first_ms), statistics.median(row.later_ms)
    return rows


def measure_all(
    name: str,
    preset: str,
    overrides: dict[str, Any],
    shapes: Sequence[tuple[int, int]],
    device: torch.device,
) -> Iterator[Sequence[Step | Lengths]]:
    both = {side: Trained(preset, overrides, side == "tigon", device) for side in SIDES[:2]}
    for batch, seq in shapes:
        yield small(name, batch, seq, both, device)
    if name == CASES[0][0]:
        yield changing(name, both, device)
    del both
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def table(rows: Sequence[Step | Lengths]) -> str:
    lines = [f"{'':30}" + "".join(f"{side:>16}" for side in SIDES) + f"{'device, tigon':>16}"]
    cases: dict[tuple[str, int, int], dict[str, Step]] = {}
    for row in (row for row in rows if isinstance(row, Step)):
        cases.setdefault((row.model, row.batch, row.seq), {})[row.side] = row
    for (model, batch, seq), by in cases.items():
        cells = [f"{r.step_ms:.2f} ms" if (r := by[side]).step_ms else r.status for side in SIDES]
        cells.append(f"{by['tigon'].device_ms:.2f} ms" if by["tigon"].device_ms else "–")
        lines.append(f"{model + f' {batch}×{seq}':30}" + "".join(f"{cell:>16}" for cell in cells))
        lines += [f"    {r.side}: {r.reason}" for r in by.values() if r.reason]
    for each in (row for row in rows if isinstance(row, Lengths)):
        lines.append(
            f"{each.model} {each.batch}×{min(each.seqs)}–{max(each.seqs)}, {each.side}: first sight {each.first:.1f} ms"
            f", later {each.later:.1f} ms, {each.first / each.later:.2f} ×"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, help="folder for the result file")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds; no case is begun after them")
    options = parser.parse_args()
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.monotonic()
    rows: list[Step | Lengths] = []
    for name, *case in CASES:
        for found in measure_all(name, *case, device):
            rows += found
            if options.output:
                content = report.result("small-steps", rows, device=device)
                report.save(options.output / report.file_name(content), content)
            print(f"{time.monotonic() - began:6.1f} s  {name}", flush=True)
            if time.monotonic() - began > options.budget:
                print(f"the budget of {options.budget:.0f} s was spent; what is missing was not measured", flush=True)
                print(table(rows))
                return 0
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
