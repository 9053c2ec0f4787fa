"""How `tigon bench` measures: correctness against fp64, peak memory, then interleaved timing.

Times are medians of CUDA events over a cold cache (`triton.testing.do_bench`); on a CPU, of a host clock. Each round
times all implementations of a case once, so that a drift of the card's clocks meets all of them alike. The report has
the median over the rounds and their range. The backward time is forward + backward less forward: timed alone, the
backward would need a retained graph, which several peers overwrite.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tigon.bench.cases import Implementation, Op
from tigon.bench.inputs import TOLERANCE, Expected, Inputs, Shape
from tigon.kernels.dispatch import use_triton

# For longer calls a cold cache does not matter, and do_bench's warm-up calls would cost minutes.
LONG_MS = 20.0
LONG_REPEATS = 5
AGAIN_MS = 500.0
TRIMMED = 5
# Where the allocator holds less of the device's memory, emptying it between rounds costs more than the rounds of a
# short call, and changes nothing of their times: the calls that warm up have allocated before.
ROOMY = 0.25
LATE = "took longer than"
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
    if one call takes longer than repeat_ms. forward: time the forward alone as well. start_s: seconds after which a
    first call is given up. case_s: seconds of one case, after which no third round begins. far: a long call that takes
    this many times as long as the fastest one's has one round. long_ms: calls from this on are timed without a flush of
    the cache. freeze: keep what the first calls have imported out of all later collections of garbage; the caller thaws
    it.
    """

    rounds: int = 3
    warmup_ms: float = 25.0
    repeat_ms: float = 100.0
    graph_ms: float = 50.0
    least: int = LONG_REPEATS
    forward: bool = True
    start_s: float = math.inf
    case_s: float = math.inf
    far: float = math.inf
    long_ms: float = LONG_MS
    freeze: bool = False


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
        estimate_ms = _once_ms(fn, device)
    if device.type == "cuda" and estimate_ms < settings.long_ms:
        from triton.testing import do_bench

        return float(do_bench(fn, warmup=settings.warmup_ms, rep=settings.repeat_ms, return_mode="median"))
    repeats = max(settings.least, min(1000, int(settings.repeat_ms / max(estimate_ms, 1e-3))))
    fn()
    if device.type != "cuda":
        return statistics.median(_once_ms(fn, device) for _ in range(repeats))
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in marks:
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize(device)
    times: list[float] = [start.elapsed_time(end) for start, end in marks]
    return statistics.median(times)


def _once_ms(fn: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    fn()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_ceilings(device: torch.device, settings: Settings | None = None) -> Ceilings:
    settings = settings or Settings()
    on_gpu = device.type == "cuda"
    elements = 1 << (29 if on_gpu else 23)
    if on_gpu:  # source and copy take at most a quarter of the free memory
        elements = min(elements, torch.cuda.mem_get_info(device)[0] // 16)
    copy_gbps = _copy_gbps(elements, torch.bfloat16 if on_gpu else torch.float32, device, settings)
    free(device)
    n, dtype = (8192, torch.bfloat16) if on_gpu else (512, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    ms = time_ms(lambda: torch.mm(a, b, out=out), device, settings)
    return Ceilings(copy_gbps, 2 * n**3 / ms / 1e9, f"{n}³ {str(dtype).removeprefix('torch.')}")


def _copy_gbps(elements: int, dtype: torch.dtype, device: torch.device, settings: Settings) -> float:
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


def left_out(op: Op, chosen: dict[str, Implementation], rows: Iterable[Row], device: torch.device) -> dict[str, str]:
    """Peers of an operator without a row, if no peers were named, and why."""
    present = {row.implementation for row in rows if row.op == op.name}
    found = {name: "is not installed" for name in chosen if name not in present}
    for name, implementation in op.implementations.items():
        if name not in chosen and not implementation.on_request:
            gpu = implementation.gpu_only and device.type != "cuda"
            found[name] = "runs on a GPU only" if gpu else "takes long to compile: --peers compile measures it"
    return found


def run_case(
    op: Op,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    ceilings: Ceilings,
    *,
    implementations: dict[str, Implementation] | None = None,
    settings: Settings | None = None,
    ignored: float = 0.0,
    options: Mapping[str, Any] | None = None,
    checked: Iterable[str] | None = None,
    graphed: Callable[[list[Row]], Collection[str]] | None = None,
    fresh: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Check and time every implementation of one operator on one shape. A failing one gets a row that says why.

    Args:
        options: further arguments of every implementation.
        checked: names of the implementations whose results are compared with fp64; None: all.
        graphed: names of the implementations that are also timed as a CUDA graph, once the rows are known; None: all.
        fresh: compile anew, for this shape only. Otherwise code that torch.compile made for earlier shapes may serve.
    """
    settings = settings or Settings()
    implementations = choose(op, None, device) if implementations is None else implementations
    dtype_name = str(dtype).removeprefix("torch.")
    title = f"{op.name} {'×'.join(map(str, shape))} {dtype_name}"
    if fresh and "compile" in implementations:
        torch._dynamo.reset()
    say(f"{title}: reference")
    unchecked = ""
    try:
        inputs = op.make(shape, dtype, device, ignored)
        inputs.arguments |= options or {}
    except torch.OutOfMemoryError:
        reason = "out of memory for the inputs"
        return [Row(op.name, shape, dtype_name, name, "failed", reason) for name in implementations]
    wanted = [name for name in implementations if checked is None or name in checked]
    expected: Expected = {}
    try:
        expected = op.expect(inputs) if wanted else {}
    except torch.OutOfMemoryError:
        unchecked = "not checked: out of memory for the reference"
    bounds = _bounds(op, inputs, expected, dtype)
    free(device)

    rows, steps, estimates = {}, {}, {}
    for name, implementation in implementations.items():
        say(f"{title}: check {name}")
        row = rows[name] = Row(op.name, shape, dtype_name, name, note=unchecked or implementation.note)
        if name.startswith("tigon") and not use_triton(inputs.sample):
            row.note = "; ".join(filter(None, [REFERENCE, row.note]))
        if implementation.gpu_only and device.type != "cuda":
            row.status, row.reason = "failed", "runs on a GPU only"
            continue
        try:
            with within(settings.start_s):
                fn = implementation.load()
                values = _first_run(row, fn, inputs.clone(), device)
            if name in wanted:
                _check(row, values, expected, bounds)
            del values
            own = inputs.clone()
            row.peak_mib, estimates[name] = peak_mib(functools.partial(run_once, fn, own), device)
            del own
            steps[name] = fn
        except Exception as error:  # a peer may fail in any way; its row then says how
            if implementation.where_installed and isinstance(error, ImportError):
                del rows[name]
            row.status, row.reason = "failed", one_line(error)
        free(device)
    del expected

    floor = _Floor(op, inputs, shape, dtype, device, ceilings, settings)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    if settings.freeze:
        gc.freeze()
    began = time.monotonic()
    for r in range(settings.rounds):
        if r > 1 and time.monotonic() - began > settings.case_s:
            break
        floor.measure()
        for name in _near(times, settings.far) if r else list(steps):
            say(f"{title}: round {r + 1} of {settings.rounds}, {name}")
            try:
                times[name].append(
                    _time_round(steps[name], implementations[name], inputs, device, settings, estimates[name])
                )
            except Exception as error:
                rows[name].status, rows[name].reason = "failed", one_line(error)
                del steps[name], times[name]
            if not (settings.freeze and _roomy(device)):
                free(device)
    for name, measured in times.items():
        _fill(rows[name], measured, floor)
    for name in list(times) if graphed is None else [name for name in graphed(list(rows.values())) if name in times]:
        say(f"{title}: CUDA graph of {name}")
        row, step, implementation = rows[name], steps[name], implementations[name]
        try:
            row.device_ms = _device_ms(step, implementation, inputs, device, settings, estimates[name])
        except Exception as error:  # a peer that waits for the device, or allocates as a capture forbids
            row.device_reason = one_line(error)
            synchronize(device)
        free(device)
    return list(rows.values())


def _near(times: dict[str, list[tuple[float, float]]], far: float) -> list[str]:
    """Those whose calls are short, or take less than `far` times as long as the fastest one's; and Tigon's."""
    least = {name: min(total for _, total in measured) for name, measured in times.items()}
    most = max(LONG_MS, far * min(least.values(), default=0.0))
    return [name for name in times if least[name] <= most or name.startswith("tigon")]


def run_once(fn: Callable[..., Any], inputs: Inputs) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    out = fn(**inputs.arguments)
    outs = out if isinstance(out, tuple) else (out,)
    if not inputs.wrt:
        return outs, ()
    return outs, torch.autograd.grad(outs, [inputs.arguments[k] for k in inputs.wrt], inputs.grads)


def check(op: Op, shape: Shape, dtype: torch.dtype, device: torch.device, name: str) -> Row:
    """Compare one implementation with fp64, without timing."""
    row = Row(op.name, shape, str(dtype).removeprefix("torch."), name)
    inputs = op.make(shape, dtype, device, 0.0)
    try:
        values = _first_run(row, op.implementations[name].load(), inputs.clone(), device)
        expected = op.expect(inputs)
        _check(row, values, expected, _bounds(op, inputs, expected, dtype))
    except Exception as error:
        row.status, row.reason = "failed", one_line(error)
    return row


def _first_run(row: Row, fn: Callable[..., Any], inputs: Inputs, device: torch.device) -> dict[str, Tensor]:
    """Outputs and gradients by name; the seconds that they took go into the row."""
    start = time.perf_counter()
    outs, grads = run_once(fn, inputs)
    synchronize(device)
    row.first_s = time.perf_counter() - start
    return _named(inputs, outs, grads)


def _check(row: Row, values: dict[str, Tensor], expected: Expected, bounds: dict[str, float]) -> None:
    row.errors = _errors(values, expected)
    off: dict[str, list[str]] = {}
    for name, error in row.errors.items():
        if not error <= bounds[name]:  # NaN is not <=
            off.setdefault(f"{bounds[name]:.2g}", []).append(name)
    if off:
        above = "; ".join(f"above {bound} in {', '.join(names)}" for bound, names in off.items())
        row.status, row.reason = "wrong", f"relative error {above}"


def _bounds(op: Op, inputs: Inputs, expected: Expected, dtype: torch.dtype) -> dict[str, float]:
    """Each error's bound: twice eager code's error on the same inputs, as in the tests, or at least a few roundings.

    The error of rounding depends on the shape: a mean over few labels is a small sum of large terms. A result of zeros,
    whose error is 1, never passes.
    """
    least = TOLERANCE[dtype] * (op.slack if dtype.itemsize == 2 else 1.0)
    bounds = dict.fromkeys(expected, least)
    if expected and "eager" in op.implementations:
        with contextlib.suppress(Exception):  # out of memory, say: eager's own row reports it
            outs, grads = run_once(op.implementations["eager"].load(), inputs.clone())
            errors = _errors(_named(inputs, outs, grads), expected)
            bounds |= {name: max(least, min(2 * error, 0.5)) for name, error in errors.items() if math.isfinite(error)}
    return bounds


def _named(inputs: Inputs, outs: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
    names = (*inputs.outputs, *(f"d{k}" for k in inputs.wrt))
    return {name: value.detach() for name, value in zip(names, (*outs, *grads), strict=True)}


def _errors(values: dict[str, Tensor], expected: Expected) -> dict[str, float]:
    errors = {}
    for name, parts in expected.items():
        wrong = sum((values[name][index].double() - value).square().sum() for index, value in parts)
        size = sum(value.square().sum() for _, value in parts)
        errors[name] = float(torch.as_tensor(wrong / size).sqrt())
    return errors


def peak_mib(run: Callable[[], object], device: torch.device) -> tuple[float | None, float]:
    """Peak memory of forward + backward beyond what is there before (gradients count), and its rough time."""
    if device.type != "cuda":
        return None, _once_ms(run, device)
    free(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    ms = _once_ms(run, device)
    peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    if LONG_MS <= ms < AGAIN_MS:  # of a short call most of it may be memory that the driver has to find
        ms = _once_ms(run, device)
    return peak, ms


def _time_round(
    fn: Callable[..., Any],
    implementation: Implementation,
    inputs: Inputs,
    device: torch.device,
    settings: Settings,
    estimate_ms: float,
) -> tuple[float, float]:
    """Milliseconds of the forward, as in training, NaN if it is not timed, and of forward + backward.

    Without a gradient both are the forward's.
    """
    if implementation.overwrites:
        inputs = inputs.clone()
    forward = math.nan
    if settings.forward and inputs.wrt:
        forward = time_ms(lambda: fn(**inputs.arguments), device, settings, estimate_ms)
    total = time_ms(lambda: run_once(fn, inputs), device, settings, estimate_ms)
    return (forward if inputs.wrt else total), total


def _device_ms(
    fn: Callable[..., Any],
    implementation: Implementation,
    inputs: Inputs,
    device: torch.device,
    settings: Settings,
    estimate_ms: float,
) -> float | None:
    """Milliseconds of forward + backward as one CUDA graph; None if a graph adds nothing."""
    if device.type != "cuda" or estimate_ms >= LONG_MS:
        return None
    from triton.testing import do_bench_cudagraph

    if implementation.overwrites:
        inputs = inputs.clone()
    # A capture that a wait for the device breaks is never closed: from then on the allocator returns no memory that it
    # keeps when it has none left, and all that follows runs out of memory. So the wait is found before a capture.
    with no_waiting():
        run_once(fn, inputs)
    free(device)
    return float(do_bench_cudagraph(lambda: run_once(fn, inputs), rep=settings.graph_ms, return_mode="median"))


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
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
        self,
        op: Op,
        inputs: Inputs,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        ceilings: Ceilings,
        settings: Settings,
    ) -> None:
        self.op, self.inputs, self.device, self.settings = op, inputs, device, settings
        self.bytes = sum(op.nbytes(shape, dtype.itemsize))
        self.flops = sum(op.flops(shape)) if op.flops else None
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
        if not (self.settings.freeze and _roomy(self.device)):
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
    if not any(math.isnan(forward) for forward, _ in measured):
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


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer, also in a peer's loop of autotuning. Only where signals can be had."""
    if not math.isfinite(seconds) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise TimeoutError(f"{LATE} {seconds:g} s to start")

    before = signal.signal(signal.SIGALRM, late)
    # Again and again: what catches the first error goes on.
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def one_line(error: BaseException) -> str:
    # cuBLAS takes memory of its own where the allocator has left none, and has no exception for it.
    if isinstance(error, torch.OutOfMemoryError) or "CUBLAS_STATUS_ALLOC_FAILED" in str(error):
        return "out of memory"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}{'…' if len(text) > 160 else ''}"


def _roomy(device: torch.device) -> bool:
    """Whether the allocator holds so little that the next call need not find it empty."""
    if device.type != "cuda":
        return True
    return torch.cuda.memory_reserved(device) < ROOMY * torch.cuda.get_device_properties(device).total_memory


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
