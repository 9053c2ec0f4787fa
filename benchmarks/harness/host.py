"""The host's time for a call: Python, autograd and launches, on inputs so small that the device never delays the host.

Calls are issued in batches, without waiting inside a batch. Between batches, outside of the timing, the host waits for
the device, so that the queue never fills. Batches of all implementations take turns; the result is the median over
batches.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from cases import Implementation, Op
from cases.inputs import Shape
from harness.runner import REFERENCE, format_dtype, one_line, run_once, synchronize
from torch import Tensor

from tigon.kernels import jit, launch, tl, use_triton

FLOOR = "floor"
# Share of a batch's time that the device may still need when its last call is issued.
HELD_UP = 0.1


@dataclass
class HostRow:
    """Microseconds of host time per call of one implementation; None if not measured."""

    op: str
    shape: Shape
    dtype: str
    implementation: str
    status: str = "ok"  # ok | failed
    reason: str = ""
    note: str = ""
    forward_us: float | None = None
    total_us: float | None = None
    times_eager: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class HostSettings:
    # 50 calls are a few hundred launches; the driver queues a thousand before it makes the host wait.
    calls: int = 50
    batches: int = 40
    warmup: int = 20


@dataclass
class HostTimer:
    """One call, and the times of its batches so far."""

    call: Callable[[], Any]
    us: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


Timers = dict[tuple[str, str], HostTimer]  # by implementation, and "forward" or "total"


def run_host(
    op: Op, dtype: torch.dtype, device: torch.device, implementations: dict[str, Implementation], settings: HostSettings
) -> list[HostRow]:
    """Host time of every implementation of one operator at its tiny shape."""
    if "compile" in implementations:
        torch._dynamo.reset()  # operators share code, which must be compiled anew for each
    inputs = op.make(op.tiny, dtype, device, 0.0)
    rows: dict[str, HostRow] = {}
    timers: Timers = {}
    for name, implementation in implementations.items():
        row = rows[name] = HostRow(op.name, op.tiny, format_dtype(dtype), name, note=implementation.note)
        if implementation.gpu_only and device.type != "cuda":
            row.status, row.reason = "failed", "runs on a GPU only"
            continue
        if name.startswith("tigon") and not use_triton(inputs.sample):
            row.note = REFERENCE
        try:
            fn, own = implementation.load(), inputs.clone()
            for _ in range(settings.warmup):
                run_once(fn, own)
            timers[name, "forward"] = HostTimer(functools.partial(fn, **own.arguments))
            timers[name, "total"] = HostTimer(functools.partial(run_once, fn, own))
        except Exception as error:  # a peer may fail in any way; its row then says how
            if implementation.where_installed and isinstance(error, ImportError):
                del rows[name]
            row.status, row.reason = "failed", one_line(error)
    _take_turns(timers, device, settings)
    _fill(rows, timers)
    return list(rows.values())


def run_floor(device: torch.device, settings: HostSettings) -> list[HostRow]:
    """The cost below every operator: an allocation, an autograd.Function without further work, one cached launch."""
    shape = (8, 64)
    x = torch.randn(shape, device=device).requires_grad_()
    dy = torch.randn_like(x)
    rows = {
        "new_empty": HostRow(FLOOR, shape, "float32", "new_empty", note="one allocation"),
        "Function": HostRow(FLOOR, shape, "float32", "Function", note="autograd.Function that allocates y and dx"),
        "launch": HostRow(FLOOR, shape, "float32", "launch", note="one empty kernel, launched before"),
    }
    calls: dict[tuple[str, str], Callable[[], Any]] = {
        ("new_empty", "forward"): lambda: x.new_empty(shape),
        ("Function", "forward"): lambda: _EmptyFunction.apply(x),
        ("Function", "total"): lambda: torch.autograd.grad(_EmptyFunction.apply(x), x, dy),
        ("launch", "forward"): lambda: launch(_empty_kernel, ("empty",), (x,), lambda: (1, (), {"num_warps": 4})),
    }
    if device.type != "cuda":
        del calls["launch", "forward"]
        rows["launch"].status, rows["launch"].reason = "failed", "runs on a GPU only"
    for call in calls.values():
        for _ in range(settings.warmup):
            call()
    timers = {key: HostTimer(call) for key, call in calls.items()}
    _take_turns(timers, device, settings)
    _fill(rows, timers)
    return list(rows.values())


@jit
def _empty_kernel(x_ptr):
    tl.static_assert(True)


class _EmptyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.new_empty(dy.shape)


def _take_turns(timers: Timers, device: torch.device, settings: HostSettings) -> None:
    gc.collect()
    for _ in range(settings.batches):
        for timer in timers.values():
            call = timer.call
            synchronize(device)
            start = time.perf_counter()
            for _ in range(settings.calls):
                call()
            issued = time.perf_counter()
            synchronize(device)
            timer.us.append(1e6 * (issued - start) / settings.calls)
            timer.waits.append((time.perf_counter() - issued) / (issued - start))


def _fill(rows: dict[str, HostRow], timers: Timers) -> None:
    for (name, part), timer in timers.items():
        setattr(rows[name], f"{part}_us", statistics.median(timer.us))
        # Not on a CPU, where a call returns when its work is done.
        if statistics.median(timer.waits) > HELD_UP and "held up" not in rows[name].note:
            rows[name].note = "; ".join(filter(None, [rows[name].note, "in part held up by the device"]))
    eager = rows["eager"].total_us if "eager" in rows else None
    for row in rows.values():
        if row.total_us is not None and eager:
            row.times_eager = row.total_us / eager
