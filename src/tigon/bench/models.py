"""One training step of a whole model: tokens/s, peak memory and the loss of each step, side by side.

bf16 weights, AdamW with states in the weights' dtype (fused on a GPU), SDPA where the model has it, random weights and
tokens from one seed, one eighth of each sequence masked out of the loss. Every side runs in a process of its own: Liger
patches classes for the whole process, and one allocator's fragmentation is not the next one's.

    python -m tigon.bench.models --model llama-3-8b --batch 16 --seq 512 --output results

Several models, their floors and profiles in one run: benchmarks/models.py.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tigon.bench.clocks import Clocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WARMUP_STEPS = 3
LEARNING_RATE = 1e-5
WARM_LENGTH = 64  # of the step before the first that memory is measured in
LONG_STEP_MS = 10e3  # of a step that needs no other before it to be timed


@dataclass
class Side:
    """One side of the comparison: a key of SIDES, or "floor", what no side can be faster than (see floor.py)."""

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
    gpus: int = 1
    times_floor: float | None = None
    # Milliseconds of the device in one step by kind of kernel, "idle" among them (see kernels.py).
    profile_ms: dict[str, float] = field(default_factory=dict)
    # Median SM clock and power while the timed steps ran; None where nobody asked nvidia-smi.
    sm_mhz: float | None = None
    watts: float | None = None
    # When and by which command this row was measured; "" where that was not recorded.
    date: str = ""
    command: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _hf(model: PreTrainedModel) -> None:
    pass


def _liger(model: PreTrainedModel) -> None:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise RuntimeError(f"Liger does not know the model type {model.config.model_type!r}")
    _apply_liger_kernel_to_instance(model=model)


def _tigon(model: PreTrainedModel, **options: Any) -> None:
    import tigon

    tigon.fuse(model, **options)


def _compile(model: PreTrainedModel) -> None:
    model.compile()


def _tigon_compile(model: PreTrainedModel) -> None:
    _tigon(model)
    _compile(model)


# What each side does to the plain model.
SIDES: dict[str, Callable[[Any], None]] = {
    "hf": _hf,
    "compile": _compile,
    "liger": _liger,
    "tigon": _tigon,
    "tigon-compile": _tigon_compile,
    # Other levels of what is recomputed than the default.
    **{f"tigon-{level}": functools.partial(_tigon, recompute=level) for level in ("none", "product", "mlp")},
    "tigon-offload": functools.partial(_tigon, recompute="mlp", offload=True),
}
DEFAULT_SIDES = ("hf", "liger", "tigon")


def build(name: str, device: torch.device, dtype: torch.dtype, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A preset with random weights, drawn on the device itself: eight billion of them take a second there."""
    from tigon.presets import auto_class, preset_config

    config = preset_config(name, **overrides)
    config.use_cache = False
    torch.manual_seed(seed)
    with device:
        model = auto_class(config).from_config(config, dtype=dtype)
    return model.train()


class Trainer:
    """The model of a side with its optimizer; a step runs on tokens that are the same for every side."""

    def __init__(
        self,
        side: Side,
        device: torch.device,
        overrides: dict[str, Any],
        prepare: Callable[[Any], None] = lambda model: None,
    ) -> None:
        """prepare: what happens to the model between the side's own doing and the optimizer."""
        self.device = device
        self.model = build(side.model, device, getattr(torch, side.dtype), **overrides)
        if side.checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        attention = self.model.config._attn_implementation
        side.note = "" if attention == "sdpa" else f"{attention} attention"
        SIDES[side.side](self.model)
        prepare(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=device.type == "cuda")
        self.draw = torch.Generator(device).manual_seed(1)

    def batch(self, batch: int, seq: int) -> dict[str, Tensor]:
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (batch, seq), generator=self.draw, device=self.device)
        labels = ids.clone()
        labels[:, : seq // 8] = -100
        return {"input_ids": ids, "labels": labels}

    def step(self, inputs: dict[str, Tensor]) -> Tensor:
        loss = self.model(**inputs).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def timed_step(self, inputs: dict[str, Tensor]) -> tuple[float, float]:
        """Loss and milliseconds, from an idle device to an idle device."""
        synchronize(self.device)
        start = time.perf_counter()
        loss = self.step(inputs)
        synchronize(self.device)
        return loss.item(), 1e3 * (time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_gib(device: torch.device) -> float | None:
    """Most memory allocated since the counter was reset; None where nobody counts."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def train_side(
    side: Side,
    device: torch.device,
    steps: int,
    overrides: dict[str, Any],
    say: Callable[[str], None] = print,
    profile: bool = False,
) -> Side:
    """Fill one row by training for WARMUP_STEPS + steps. Runs in the process that it is called in.

    profile: of further steps one is recorded by kind of kernel.
    """
    start = time.perf_counter()
    trainer = Trainer(side, device, overrides)
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    side.start_s = time.perf_counter() - start
    times = []
    for step in range(WARMUP_STEPS + steps):
        loss, ms = trainer.timed_step(trainer.batch(side.batch, side.seq))
        side.losses.append(loss)
        times.append(ms)
        say(f"{side.side}: step {step + 1} of {WARMUP_STEPS + steps}, loss {loss:.5f}, {ms:.0f} ms")
    side.steps_ms = times[WARMUP_STEPS:]
    side.step_ms = statistics.median(side.steps_ms)
    side.tokens_per_s = 1e3 * side.batch * side.seq / side.step_ms
    side.peak_gib = peak_gib(device)
    if profile:
        from tigon.bench.kernels import profile_step

        inputs = trainer.batch(side.batch, side.seq)
        side.profile_ms = profile_step(lambda: trainer.step(inputs), device)
    return side


def measure_lengths(
    side: Side,
    device: torch.device,
    longest: int,
    overrides: dict[str, Any],
    say: Callable[[str], None] = print,
    done: Callable[[list[Side]], None] = lambda rows: None,
    steps: int = 1,
    profile_at: int | None = None,
) -> list[Side]:
    """Time and peak memory of a training step over the length of the sequences: side.seq doubled until it does not fit.

    Between the last length that fits and the first that does not, the one in the middle is tried as well. The
    optimizer's states are there before the first length is measured. `done` gets the rows so far after each length.

    The first step of a length is not counted, unless it is longer than LONG_STEP_MS or the only one that is wanted.

    Args:
        longest: no length beyond it is tried, in tokens.
        steps: timed at each length, at most; once they have taken LONG_STEP_MS together, no further one is begun.
        profile_at: the length of which one further step is recorded by kind of kernel.
    """
    trainer = Trainer(side, device, overrides)
    trainer.step(trainer.batch(side.batch, WARM_LENGTH))
    rows: list[Side] = []

    def time_steps(row: Side, clocks: Clocks) -> None:
        for step in range(steps + 1):
            since = len(clocks.samples)
            loss, ms = trainer.timed_step(trainer.batch(side.batch, row.seq))
            row.losses.append(loss)
            say(f"{side.side}: step of {row.seq} tokens, {ms:.0f} ms")
            if step == 0 and steps > 1 and ms < LONG_STEP_MS:
                continue
            if not row.steps_ms:
                first = since
            row.steps_ms.append(ms)
            if len(row.steps_ms) == steps or sum(row.steps_ms) >= LONG_STEP_MS:
                break
        row.sm_mhz, row.watts = clocks.medians(first)

    def fits(seq: int, clocks: Clocks) -> bool:
        row = replace(side, seq=seq, losses=[], steps_ms=[])
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        try:
            time_steps(row, clocks)
            row.step_ms = statistics.median(row.steps_ms)
            row.tokens_per_s = 1e3 * side.batch * seq / row.step_ms
            row.peak_gib = peak_gib(device)
            if seq == profile_at:
                from tigon.bench.kernels import recorded

                inputs = trainer.batch(side.batch, seq)
                row.profile_ms = recorded(lambda: trainer.step(inputs), device)
        except torch.OutOfMemoryError:
            row.status, row.reason = "failed", "out of memory"
        trainer.optimizer.zero_grad(set_to_none=True)
        rows.append(row)
        done(rows)
        return row.status == "ok"

    with Clocks(device) as clocks:
        seq = side.seq
        while seq <= longest and fits(seq, clocks):
            seq *= 2
        if len(rows) > 1 and rows[-1].status == "failed":
            fits(seq // 4 * 3, clocks)
    return sorted(rows, key=lambda row: row.seq)


class Processes:
    """Processes that each do one thing and end, one after another: the next one imports while this one works.

    Args:
        count: how many there will be.
    """

    def __init__(self, count: int) -> None:
        self.left = count
        self.waiting: subprocess.Popen[str] | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        if self.waiting is not None:
            _end(self.waiting)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tigon.bench.models", "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(
        self,
        row: Side,
        *,
        device: str,
        timeout_s: float = 1800.0,
        say: Callable[[str], None] = lambda text: None,
        stop: Callable[[], str] = lambda: "",
        **request: Any,
    ) -> list[Side]:
        """The rows that a task of TASKS makes of this one; one with the reason when its process fails.

        Args:
            stop: asked several times a second for a reason to end the process before its time.
            request: "task", and the arguments of its function.
        """
        process, self.waiting = self.waiting or self._start(), None
        self.left -= 1
        if self.left > 0:
            self.waiting = self._start()
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder, "rows.json")
            message = {"row": row.to_dict(), "device": device, "result": str(result), **request}
            last, done, reasons = "", threading.Event(), []

            def watch() -> None:
                deadline = time.monotonic() + timeout_s
                while not done.wait(0.1):
                    reason = stop() or (f"took longer than {timeout_s:g} s" if time.monotonic() > deadline else "")
                    if reason:
                        reasons.append(reason)
                        process.kill()
                        return

            watchdog = threading.Thread(target=watch, daemon=True)
            watchdog.start()
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                with contextlib.suppress(BrokenPipeError):  # it has died; its last words say why
                    process.stdin.write(json.dumps(message) + "\n")
                    process.stdin.close()
                for line in process.stdout:
                    last = line.strip() or last
                    if line.startswith(f"{row.side}: step"):
                        say(f"{row.model} {line.strip()}")
                process.wait()
            finally:
                done.set()
                watchdog.join()
                _end(process)
            rows = [Side(**one) for one in json.loads(result.read_text())] if result.exists() else []
        if reasons:
            rows.append(replace(row, status="failed", reason=reasons[0]))
        elif not rows:
            reason = f"the process ended with code {process.returncode}: {last[:200]}"
            rows.append(replace(row, status="failed", reason=reason))
        return rows


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


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
    with Processes(len(sides)) as processes:
        for name in sides:
            row = Side(model, name, batch, seq, checkpointing, dtype)
            rows += processes.run(
                row, device=device, timeout_s=timeout_s, say=say, task="train", steps=steps, overrides=overrides or {}
            )
            done(rows)
    return rows


def _floor(row: Side, device: torch.device, overrides: dict[str, Any], say: Callable[[str], None]) -> list[Side]:
    from tigon.bench.floor import measure_floor

    row.profile_ms = measure_floor(row, device, overrides)
    row.step_ms = sum(row.profile_ms.values())
    row.tokens_per_s = 1e3 * row.batch * row.seq / row.step_ms
    row.note = "matrix products, attention and optimizer alone"
    say(f"{row.side}: step of {row.step_ms:.0f} ms")
    return [row]


def _train(row: Side, device: torch.device, overrides: dict[str, Any], **options: Any) -> list[Side]:
    options.pop("done")
    return [train_side(row, device, overrides=overrides, **options)]


def _lengths(row: Side, device: torch.device, overrides: dict[str, Any], **options: Any) -> list[Side]:
    return measure_lengths(row, device, overrides=overrides, **options)


def _sharded(row: Side, device: torch.device, overrides: dict[str, Any], **options: Any) -> list[Side]:
    from tigon.bench.sharded import train_sharded

    options.pop("done")
    return [train_sharded(row, device, overrides=overrides, **options)]


# What a process can be asked for.
TASKS: dict[str, Callable[..., list[Side]]] = {
    "train": _train,
    "floor": lambda row, done, **options: _floor(row, **options),
    "lengths": _lengths,
    "sharded": _sharded,
}


def _serve() -> int:
    """The child: imports, waits for one request, and writes its rows to a file."""
    import transformers.modeling_utils  # noqa: F401

    import tigon.fusion.model  # noqa: F401

    line = sys.stdin.readline()
    if not line:  # whoever started this needs nothing more
        return 0
    request = json.loads(line)
    row, result = Side(**request.pop("row")), Path(request.pop("result"))
    task, device = TASKS[request.pop("task")], torch.device(request.pop("device"))

    def keep(rows: list[Side]) -> None:
        part = result.with_suffix(".part")
        part.write_text(json.dumps([one.to_dict() for one in rows]))
        part.replace(result)

    try:
        rows = task(row, device=device, say=lambda text: print(text, flush=True), done=keep, **request)
    except torch.OutOfMemoryError:
        rows = [replace(row, status="failed", reason="out of memory")]
    except ModuleNotFoundError as error:
        rows = [replace(row, status="failed", reason=f"{error.name} is not installed")]
    except Exception as error:  # a peer may fail in any way, and its row says how
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        rows = [replace(row, status="failed", reason=reason)]
    keep(rows)
    sys.stdout.flush()
    # Not by sys.exit: what is left of a process group would wait for ranks that have failed.
    os._exit(0)


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
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        return _serve()
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
