"""One training step of a whole model: tokens/s, peak memory and the loss of each step, side by side.

bf16 weights, AdamW with states in the weights' dtype (fused on a GPU), SDPA where the model has it, random weights and
tokens from one seed, one eighth of each sequence masked out of the loss. Every side runs in a process of its own: Liger
patches classes for the whole process, and one allocator's fragmentation is not the next one's.

    python -m tigon.bench.models --model llama-3-8b --batch 16 --seq 512 --output results
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WARMUP_STEPS = 3
LEARNING_RATE = 1e-5


@dataclass
class Side:
    """One side of the comparison."""

    model: str
    side: str
    batch: int
    seq: int
    checkpointing: bool
    dtype: str
    status: str = "ok"  # ok | failed
    reason: str = ""
    note: str = ""
    tokens_per_s: float | None = None
    step_ms: float | None = None
    steps_ms: list[float] = field(default_factory=list)
    peak_gib: float | None = None
    losses: list[float] = field(default_factory=list)
    start_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _hf(model: PreTrainedModel) -> None:
    pass


def _liger(model: PreTrainedModel) -> None:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise RuntimeError(f"Liger does not know the model type {model.config.model_type!r}")
    _apply_liger_kernel_to_instance(model=model)


def _tigon(model: PreTrainedModel) -> None:
    import tigon

    tigon.fuse(model)


def _compile(model: PreTrainedModel) -> None:
    model.compile()


# What each side does to the plain model.
SIDES: dict[str, Callable[[Any], None]] = {"hf": _hf, "compile": _compile, "liger": _liger, "tigon": _tigon}
DEFAULT_SIDES = ("hf", "liger", "tigon")


def build(name: str, device: torch.device, dtype: torch.dtype, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A preset with random weights, drawn on the device itself: eight billion of them take a second there."""
    from tigon.models.presets import auto_class, preset_config

    config = preset_config(name, **overrides)
    config.use_cache = False
    torch.manual_seed(seed)
    with device:
        model = auto_class(config).from_config(config, dtype=dtype)
    return model.train()


def train_side(
    side: Side, device: torch.device, steps: int, overrides: dict[str, Any], say: Callable[[str], None] = print
) -> Side:
    """Fill one row by training for WARMUP_STEPS + steps. Runs in the process that it is called in."""
    start = time.perf_counter()
    model = build(side.model, device, getattr(torch, side.dtype), **overrides)
    if side.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    attention = model.config._attn_implementation
    side.note = "" if attention == "sdpa" else f"{attention} attention"
    SIDES[side.side](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=device.type == "cuda")
    draw = torch.Generator(device).manual_seed(1)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    side.start_s = time.perf_counter() - start
    losses, times = [], []
    for step in range(WARMUP_STEPS + steps):
        ids = torch.randint(model.config.vocab_size, (side.batch, side.seq), generator=draw, device=device)
        labels = ids.clone()
        labels[:, : side.seq // 8] = -100
        if on_gpu:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(loss.item())
        say(f"{side.side}: step {step + 1} of {WARMUP_STEPS + steps}, loss {losses[-1]:.5f}, {times[-1]:.0f} ms")
    side.losses, side.steps_ms = losses, times[WARMUP_STEPS:]
    side.step_ms = statistics.median(side.steps_ms)
    side.tokens_per_s = 1e3 * side.batch * side.seq / side.step_ms
    if on_gpu:
        side.peak_gib = torch.cuda.max_memory_allocated(device) / 2**30
    return side


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
    """Train each side in a process of its own, one after another. A side that fails gets a row that says why.

    `say` hears of every step; `done` gets the rows so far after each side.
    """
    rows: list[Side] = []
    for name in sides:
        row = Side(model, name, batch, seq, checkpointing, dtype)
        rows.append(_in_own_process(row, steps, device, overrides or {}, timeout_s, say))
        done(rows)
    return rows


def _in_own_process(
    row: Side, steps: int, device: str, overrides: dict[str, Any], timeout_s: float, say: Callable[[str], None]
) -> Side:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "row.json")
        request = {
            "row": row.to_dict(),
            "steps": steps,
            "device": device,
            "overrides": overrides,
            "result": str(result),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "tigon.bench.models", "--side", json.dumps(request)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        last, late = "", threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        watchdog = threading.Timer(timeout_s, end)
        watchdog.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                last = line.strip() or last
                if line.startswith(f"{row.side}: step"):
                    say(f"{row.model} {line.strip()}")
            process.wait()
        finally:
            watchdog.cancel()
            if process.poll() is None:
                process.kill()
                process.wait()
        if late.is_set():
            row.status, row.reason = "failed", f"took longer than {timeout_s:.0f} s"
            return row
        if result.exists():
            return Side(**json.loads(result.read_text()))
        row.status, row.reason = "failed", f"the process ended with code {process.returncode}: {last[:200]}"
        return row


def _serve(request: dict[str, Any]) -> int:
    """The child: one side, its row written to a file at the end."""
    row = Side(**request["row"])
    try:
        row = train_side(
            row,
            torch.device(request["device"]),
            request["steps"],
            request["overrides"],
            lambda text: print(text, flush=True),
        )
    except torch.OutOfMemoryError:
        row.status, row.reason = "failed", "out of memory"
    except ModuleNotFoundError as error:
        row.status, row.reason = "failed", f"{error.name} is not installed"
    except Exception as error:  # a peer may fail in any way, and its row says how
        row.status, row.reason = "failed", " ".join(f"{type(error).__name__}: {error}".split())[:200]
    Path(request["result"]).write_text(json.dumps(row.to_dict()))
    return 0


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
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.side:
        return _serve(json.loads(options.side))
    from tigon.bench import report

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
