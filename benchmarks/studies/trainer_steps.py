"""A Hugging Face Trainer's steps on small batches: plain, fused, and fused as CUDA graphs (`CapturedSteps`).

    python benchmarks/studies/trainer_steps.py --output results              every case, in about 100 s

The sides train one after the other on the same rows, each with a new model and a new Trainer: bf16 weights, AdamW,
schedule and clipping as the Trainer has them, and no log between the steps. A step is the time on the
device between the ends of two steps, the Trainer's own work included. The file is written after every case.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import report
from harness.training import build
from transformers import Trainer, TrainerCallback, TrainingArguments

import tigon
from studies.small_steps import QWEN
from tigon.integrations.capture import CapturedSteps

CASES = (
    ("Qwen3-0.6B", "qwen3-1.7b", QWEN, (256, 1024, 4096)),
    ("Llama-3.2-1B", "llama-3.2-1b", {}, (1024,)),
)
SIDES = ("hf", "tigon", "tigon, captured")
WARMUP, ROUNDS = 10, 25


@dataclass
class TrainerStep:
    """Milliseconds of a step of one side, with a micro-batch of one row of `seq` tokens."""

    model: str
    seq: int
    side: str
    step_ms: float | None = None
    steps_ms: list[float] = field(default_factory=list)
    loss: float | None = None
    peak_gib: float | None = None
    # What CapturedSteps says.
    report: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class StepTimer(TrainerCallback):
    """Marks the end of every step, on the device where there is one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self.marks.append(mark)
        else:
            self.marks.append(time.perf_counter())

    def measure(self) -> list[float]:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self.marks, self.marks[1:], strict=False)]
        return [1e3 * (b - a) for a, b in zip(self.marks, self.marks[1:], strict=False)]


def time_side(name: str, preset: str, overrides: dict[str, Any], seq: int, side: str, rounds: int) -> TrainerStep:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(preset, device, torch.bfloat16 if device.type == "cuda" else torch.float32, **overrides)
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(model.config.vocab_size, (seq,), generator=draw) for _ in range(8)]
    timer = StepTimer(device)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=WARMUP + rounds, per_device_train_batch_size=1, learning_rate=1e-5, report_to=[],
            logging_steps=10**6, save_strategy="no", disable_tqdm=True, bf16=False, use_cpu=device.type == "cpu",
        )  # fmt: skip
        data: Any = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model, args, train_dataset=data, callbacks=[timer])
        if side != "hf":
            tigon.fuse(model)
        captured = None
        if "captured" in side:
            captured = CapturedSteps(trainer, report=False)
            trainer.add_callback(captured)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        losses: list[float] = [trainer.train().training_loss]
    steps = timer.measure()[WARMUP - 1 :]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    said = "" if captured is None else str(captured)
    return TrainerStep(name, seq, side, statistics.median(steps), steps, losses[0], peak, said)


def measure_all(cases: Any, rounds: int) -> Iterator[TrainerStep]:
    for name, preset, overrides, lengths in cases:
        for seq in lengths:
            for side in SIDES:
                yield time_side(name, preset, overrides, seq, side, rounds)
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()


def format_table(rows: list[TrainerStep]) -> str:
    lines = [f"{'':24}" + "".join(f"{side:>28}" for side in SIDES)]
    cases: dict[tuple[str, int], dict[str, TrainerStep]] = {}
    for row in rows:
        cases.setdefault((row.model, row.seq), {})[row.side] = row
    for (model, seq), by in cases.items():
        base = by["hf"].step_ms or 1.0
        cells = [f"{r.step_ms:.2f} ms, {r.step_ms / base:.2f} ×" if r.step_ms else "–" for r in by.values()]
        lines.append(f"{model + f' 1×{seq}':24}" + "".join(f"{cell:>28}" for cell in cells))
        lines += [
            f"    {r.report}  losses {[round(s.loss or 0, 4) for s in by.values()]}" for r in by.values() if r.report
        ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, help="folder for the result file")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds; no side is begun after them")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, for a look at the script on a CPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.monotonic()
    cases: Any = (("llama-tiny", "llama-tiny", {}, (32,)),) if options.smoke else CASES
    rows: list[TrainerStep] = []
    for row in measure_all(cases, 3 if options.smoke else ROUNDS):
        rows.append(row)
        if options.output:
            content = report.result("trainer-steps", rows, device=device)
            report.save(options.output / report.file_name(content), content)
        print(f"{time.monotonic() - began:6.1f} s  {row.model} 1×{row.seq}  {row.side}", flush=True)
        if time.monotonic() - began > options.budget:
            print(f"the budget of {options.budget:.0f} s was spent; what is missing was not measured", flush=True)
            break
    print(format_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
