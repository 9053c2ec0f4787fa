"""Measure an operator: correctness against fp64, peak memory, then interleaved timing.

Times are medians of CUDA events over a cold cache (`triton.testing.do_bench`); on a CPU, of a host clock. Each round
times all implementations of a case once, so that a drift of the card's clocks meets all of them alike. The table has
the median over the rounds and their range. The backward time is forward + backward less forward: timed alone, the
backward would need a retained graph, which several peers overwrite.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from cases import Implementation, Op
from cases.inputs import TOLERANCE, Expected, Inputs, Shape
from torch import Tensor

from tigon.kernels.dispatch import use_triton

# For longer calls a cold cache does not matter, and do_bench's warm-up calls would cost minutes.
LONG_MS = 20.0
LONG_REPEATS = 5
AGAIN_MS = 500.0
TRIMMED = 5
REFERENCE = "the PyTorch reference: no kernels on this device"


@dataclass
class Row:
    """One implementation on one case, in milliseconds and MiB. A value that was not measured is None, never NaN."""

    op: str
    shape: Shape
    dtype: str
    implementation: str
    status: str = "ok"  # ok | wrong | failed
    reason: str = ""
    note: str = ""
    forward_ms: float | None = None
    backward_ms: float | None = None
    total_ms: float | None = None
    total_range_ms: tuple[float, float] | None = None
    # Forward + backward replayed as a CUDA graph: the device's time without the host's. The reason why there is none.
    device_ms: float | None = None
    device_reason: str = ""
    floor_ms: float | None = None
    times_floor: float | None = None
    rate: float | None = None
    rate_unit: str = ""
    peak_mib: float | None = None
    # The first forward + backward: compilation, tuning and the first launch of every kernel.
    first_s: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    # Of the run that measured the row; report.result fills them in.
    date: str = ""
    command: str = ""

    @property
    def error(self) -> float | None:
        return max(self.errors.values()) if self.errors else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Settings:
    """How long to measure: rounds over all implementations, and milliseconds of warm-up and of repeats in each.

    graph_ms: milliseconds of calls in one CUDA graph, which is then replayed ten times. least: how many calls are timed
    if one call takes longer than repeat_ms.
    """

    rounds: int = 3
    warmup_ms: float = 25.0
    repeat_ms: float = 100.0
    graph_ms: float = 50.0
    least: int = LONG_REPEATS


SETTINGS = Settings()
# For trying a script out.
QUICK = Settings(1, 5.0, 20.0, 2.0, least=2)


@dataclass(frozen=True)
class Ceilings:
    """The device's best in this run: a large copy (bytes read + written), and a square matrix product."""

    copy_gbps: float
    matmul_tflops: float
    matmul: str


def time_ms(fn: Callable[[], Any], device: torch.device, settings: Settings, estimate_ms: float | None = None) -> float:
    """Median milliseconds of fn()."""
    if estimate_ms is None:
        fn()
        estimate_ms = _time_once(fn, device)
    if device.type == "cuda" and estimate_ms < LONG_MS:
        from triton.testing import do_bench

        return float(do_bench(fn, warmup=settings.warmup_ms, rep=settings.repeat_ms, return_mode="median"))
    repeats = max(settings.least, min(1000, int(settings.repeat_ms / max(estimate_ms, 1e-3))))
    fn()
    if device.type != "cuda":
        return statistics.median(_time_once(fn, device) for _ in range(repeats))
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in marks:
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize(device)
    times: list[float] = [start.elapsed_time(end) for start, end in marks]
    return statistics.median(times)


def _time_once(fn: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    fn()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_ceilings(device: torch.device, settings: Settings = SETTINGS) -> Ceilings:
    on_gpu = device.type == "cuda"
    elements = 1 << (29 if on_gpu else 23)
    if on_gpu:  # source and copy take at most a quarter of the free memory
        elements = min(elements, torch.cuda.mem_get_info(device)[0] // 16)
    copy_gbps = _measure_copy_gbps(elements, torch.bfloat16 if on_gpu else torch.float32, device, settings)
    free(device)
    n, dtype = (8192, torch.bfloat16) if on_gpu else (512, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    ms = time_ms(lambda: torch.mm(a, b, out=out), device, settings)
    return Ceilings(copy_gbps, 2 * n**3 / ms / 1e9, f"{n}³ {str(dtype).removeprefix('torch.')}")


def _measure_copy_gbps(elements: int, dtype: torch.dtype, device: torch.device, settings: Settings) -> float:
    source = torch.randn(elements, device=device, dtype=dtype)
    target = torch.empty_like(source)
    ms = time_ms(lambda: target.copy_(source), device, settings)
    return 2 * source.numel() * source.element_size() / ms / 1e6


def choose(op: Op, names: Iterable[str] | None, device: torch.device) -> dict[str, Implementation]:
    """The implementations to measure: all that run here by default, or `tigon` and those named, with their variants.

    A named implementation gets a row even if it is not installed.
    """
    if names is None:
        return {
            name: implementation
            for name, implementation in op.implementations.items()
            if not implementation.on_request and (device.type == "cuda" or not implementation.gpu_only)
        }
    wanted = {"tigon", *names}
    return {
        name: replace(implementation, where_installed=False)
        for name, implementation in op.implementations.items()
        if name in wanted or (name.split("-")[0] in wanted and not implementation.on_request)
    }


@dataclass(frozen=True)
class Case:
    """One operator on one shape. ignored: the fraction of targets that are -100."""

    op: Op
    shape: Shape
    dtype: torch.dtype = torch.bfloat16
    ignored: float = 0.0

    def make_inputs(self, device: torch.device) -> Inputs:
        return self.op.make(self.shape, self.dtype, device, self.ignored)

    def make_row(self, implementation: str, status: str = "ok", reason: str = "") -> Row:
        return Row(self.op.name, self.shape, format_dtype(self.dtype), implementation, status, reason)

    def __str__(self) -> str:
        return f"{self.op.name} {'×'.join(map(str, self.shape))} {format_dtype(self.dtype)}"


def format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def run_case(
    case: Case,
    device: torch.device,
    ceilings: Ceilings,
    *,
    implementations: dict[str, Implementation] | None = None,
    settings: Settings = SETTINGS,
    checked: Collection[str] | None = None,
    fresh: bool = True,
) -> list[Row]:
    """Check and time every implementation of one case. A failing one gets a row that says why.

    Args:
        checked: names of the implementations whose results are compared with fp64; None: all.
        fresh: compile anew, for this shape only. Otherwise code that torch.compile made for earlier shapes may serve.
    """
    op, dtype = case.op, case.dtype
    implementations = choose(op, None, device) if implementations is None else implementations
    if fresh and "compile" in implementations:
        torch._dynamo.reset()
    try:
        inputs = case.make_inputs(device)
    except torch.OutOfMemoryError:
        return [case.make_row(name, "failed", "out of memory for the inputs") for name in implementations]
    checked = [name for name in implementations if checked is None or name in checked]
    note, expected = "", {}
    try:
        expected = op.expect(inputs) if checked else {}
    except torch.OutOfMemoryError:
        note = "not checked: out of memory for the reference"
    bounds = _compute_bounds(op, inputs, expected, dtype)
    free(device)

    rows: dict[str, Row] = {}
    steps: dict[str, _Step] = {}
    for name, implementation in implementations.items():
        row = rows[name] = case.make_row(name)
        row.note = note or implementation.note
        if name.startswith("tigon") and not use_triton(inputs.sample):
            row.note = "; ".join(filter(None, [REFERENCE, row.note]))
        if implementation.gpu_only and device.type != "cuda":
            row.status, row.reason = "failed", "runs on a GPU only"
            continue
        try:
            fn = implementation.load()
            values = _run_first(row, fn, inputs.clone(), device)
            if name in checked:
                _check_errors(row, values, expected, bounds)
            del values
            own = inputs.clone()
            row.peak_mib, estimate_ms = peak_mib(functools.partial(run_once, fn, own), device)
            del own
            steps[name] = _Step(fn, implementation.overwrites, estimate_ms, device, settings)
        except Exception as error:  # a peer may fail in any way; its row then says how
            if implementation.where_installed and isinstance(error, ImportError):
                del rows[name]
            row.status, row.reason = "failed", one_line(error)
        free(device)
    del expected

    floor = _Floor(case, inputs, device, ceilings, settings)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(settings.rounds):
        floor.measure()
        for name in list(steps):
            try:
                times[name].append(steps[name].time_round(inputs))
            except Exception as error:
                rows[name].status, rows[name].reason = "failed", one_line(error)
                del steps[name], times[name]
            free(device)
    for name, measured in times.items():
        _fill(rows[name], measured, floor)
        try:
            rows[name].device_ms = steps[name].time_graph(inputs)
        except Exception as error:  # a peer that waits for the device, or allocates as a capture forbids
            rows[name].device_reason = one_line(error)
            synchronize(device)
        free(device)
    return list(rows.values())


def run_once(fn: Callable[..., Any], inputs: Inputs) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    out = fn(**inputs.arguments)
    outs = out if isinstance(out, tuple) else (out,)
    if not inputs.wrt:
        return outs, ()
    return outs, torch.autograd.grad(outs, [inputs.arguments[k] for k in inputs.wrt], inputs.grads)


def check(case: Case, device: torch.device, name: str) -> Row:
    """Compare one implementation with fp64, without timing."""
    row = case.make_row(name)
    inputs = case.make_inputs(device)
    try:
        values = _run_first(row, case.op.implementations[name].load(), inputs.clone(), device)
        expected = case.op.expect(inputs)
        _check_errors(row, values, expected, _compute_bounds(case.op, inputs, expected, case.dtype))
    except Exception as error:
        row.status, row.reason = "failed", one_line(error)
    return row


def _run_first(row: Row, fn: Callable[..., Any], inputs: Inputs, device: torch.device) -> dict[str, Tensor]:
    """Outputs and gradients by name; the seconds that they took go into the row."""
    start = time.perf_counter()
    outs, grads = run_once(fn, inputs)
    synchronize(device)
    row.first_s = time.perf_counter() - start
    return _name_values(inputs, outs, grads)


def _check_errors(row: Row, values: dict[str, Tensor], expected: Expected, bounds: dict[str, float]) -> None:
    row.errors = compute_errors(values, expected)
    off: dict[str, list[str]] = {}
    for name, error in row.errors.items():
        if not error <= bounds[name]:  # NaN is not <=
            off.setdefault(f"{bounds[name]:.2g}", []).append(name)
    if off:
        above = "; ".join(f"above {bound} in {', '.join(names)}" for bound, names in off.items())
        row.status, row.reason = "wrong", f"relative error {above}"


def _compute_bounds(op: Op, inputs: Inputs, expected: Expected, dtype: torch.dtype) -> dict[str, float]:
    """Each error's bound: twice eager code's error on the same inputs, as in the tests, or at least a few roundings.

    The error of rounding depends on the shape: a mean over few labels is a small sum of large terms. A result of zeros,
    whose error is 1, never passes.
    """
    least = TOLERANCE[dtype] * (op.slack if dtype.itemsize == 2 else 1.0)
    bounds = dict.fromkeys(expected, least)
    if expected and "eager" in op.implementations:
        with contextlib.suppress(Exception):  # out of memory, say: eager's own row reports it
            outs, grads = run_once(op.implementations["eager"].load(), inputs.clone())
            errors = compute_errors(_name_values(inputs, outs, grads), expected)
            bounds |= {name: max(least, min(2 * error, 0.5)) for name, error in errors.items() if math.isfinite(error)}
    return bounds


def _name_values(inputs: Inputs, outs: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
    names = (*inputs.outputs, *(f"d{k}" for k in inputs.wrt))
    return {name: value.detach() for name, value in zip(names, (*outs, *grads), strict=True)}


def compute_errors(values: dict[str, Tensor], expected: Expected) -> dict[str, float]:
    errors = {}
    for name, parts in expected.items():
        wrong = sum((values[name][index].double() - value).square().sum() for index, value in parts)
        size = sum(value.square().sum() for _, value in parts)
        errors[name] = float(torch.as_tensor(wrong / size).sqrt())
    return errors


def peak_mib(run: Callable[[], object], device: torch.device) -> tuple[float | None, float]:
    """Peak memory of forward + backward beyond what is there before (gradients count), and its rough time."""
    if device.type != "cuda":
        return None, _time_once(run, device)
    free(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    ms = _time_once(run, device)
    peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    if LONG_MS <= ms < AGAIN_MS:  # of a short call most of it may be memory that the driver has to find
        ms = _time_once(run, device)
    return peak, ms


@dataclass(frozen=True)
class _Step:
    """One implementation, ready to be timed. estimate_ms: its forward + backward, roughly."""

    fn: Callable[..., Any]
    overwrites: bool
    estimate_ms: float
    device: torch.device
    settings: Settings

    def time_round(self, inputs: Inputs) -> tuple[float, float]:
        """Milliseconds of the forward, as in training, and of forward + backward. Without a gradient both are equal."""
        inputs = inputs.clone() if self.overwrites else inputs
        forward = functools.partial(self.fn, **inputs.arguments)
        forward_ms = time_ms(forward, self.device, self.settings, self.estimate_ms) if inputs.wrt else None
        total = time_ms(lambda: run_once(self.fn, inputs), self.device, self.settings, self.estimate_ms)
        return (total if forward_ms is None else forward_ms), total

    def time_graph(self, inputs: Inputs) -> float | None:
        """Milliseconds of forward + backward as one CUDA graph; None if a graph adds nothing."""
        if self.device.type != "cuda" or self.estimate_ms >= LONG_MS:
            return None
        from triton.testing import do_bench_cudagraph

        inputs = inputs.clone() if self.overwrites else inputs
        # A capture that a wait for the device breaks is never closed: from then on the allocator gives back no memory
        # that it keeps, and all that follows runs out of memory. So the wait is found before a capture.
        with forbid_waiting():
            run_once(self.fn, inputs)
        free(self.device)
        call = functools.partial(run_once, self.fn, inputs)
        return float(do_bench_cudagraph(call, rep=self.settings.graph_ms, return_mode="median"))


@contextlib.contextmanager
def forbid_waiting() -> Iterator[None]:
    """Raise RuntimeError where the host would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _Floor:
    """The least time of forward and backward on this device: bytes at the copy bandwidth, or GEMMs timed alone."""

    def __init__(
        self, case: Case, inputs: Inputs, device: torch.device, ceilings: Ceilings, settings: Settings
    ) -> None:
        self.op, self.inputs, self.device, self.settings = case.op, inputs, device, settings
        self.bytes = sum(case.op.nbytes(case.shape, case.dtype.itemsize))
        self.flops = sum(case.op.flops(case.shape)) if case.op.flops else None
        self.measured: list[float] = []
        self._by_bytes = self.bytes / ceilings.copy_gbps / 1e6

    def measure(self) -> None:
        if self.op.floor is None:
            return
        with contextlib.suppress(RuntimeError):  # no memory, of which cuBLAS may say only that it failed
            products = self.op.floor(self.inputs)
            self.measured.append(
                sum(min(time_ms(way, self.device, self.settings) for way in ways) for ways in products)
            )
        free(self.device)

    @property
    def ms(self) -> float | None:
        if self.op.floor is None:
            return self._by_bytes
        return statistics.median(self.measured) if self.measured else None


# The least share of the forward's time that forward + backward can take without one of the two being noise. A loss that
# computes its gradients in the forward pass has a backward pass of nearly nothing.
PLAUSIBLE = 0.9
NOISE = "noise: the forward alone took longer than forward + backward"


def fill_total(row: Row, totals: list[float]) -> None:
    """The median of the rounds and their range; of five and more the shortest and the longest are no part of it."""
    ordered = sorted(totals)
    ordered = ordered[1:-1] if len(ordered) >= TRIMMED else ordered
    row.total_ms = statistics.median(ordered)
    row.total_range_ms = (ordered[0], ordered[-1])


def _fill(row: Row, measured: list[tuple[float, float]], floor: _Floor) -> None:
    fill_total(row, [total for _, total in measured])
    assert row.total_ms is not None
    row.forward_ms = statistics.median(forward for forward, _ in measured)
    if row.total_ms < PLAUSIBLE * row.forward_ms:
        row.note = "; ".join(filter(None, [row.note, NOISE]))
    elif floor.inputs.wrt:
        row.backward_ms = max(0.0, statistics.median(total - forward for forward, total in measured))
    row.floor_ms = floor.ms
    row.times_floor = None if floor.ms is None else row.total_ms / floor.ms
    if floor.flops is not None:
        row.rate, row.rate_unit = floor.flops / row.total_ms / 1e9, "TFLOP/s"
    else:
        row.rate, row.rate_unit = floor.bytes / row.total_ms / 1e6, "GB/s"


def one_line(error: BaseException) -> str:
    # cuBLAS takes memory of its own where the allocator has left none, and has no exception for it.
    if isinstance(error, torch.OutOfMemoryError) or "CUBLAS_STATUS_ALLOC_FAILED" in str(error):
        return "out of memory"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}{'…' if len(text) > 160 else ''}"


def free(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def parse_shape(op: Op, text: str) -> Shape:
    """'8192x4096' as numbers. Raises ValueError with a sentence unless the operator takes as many numbers."""
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) != len(op.shape_names) or not all(p.isdecimal() and int(p) > 0 for p in parts):
        example = "x".join(map(str, op.small[0]))
        raise ValueError(
            f"{op.name}: shape must be {'x'.join(n.replace(' ', '-') for n in op.shape_names)}, such as {example}, "
            f"got {text!r}."
        )
    shape = tuple(map(int, parts))
    if math.prod(shape) >= 1 << 48:
        raise ValueError(f"{op.name}: shape {text} has {math.prod(shape):.1e} elements, more than any device holds.")
    return shape
