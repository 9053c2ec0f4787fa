"""Where the time of the fused loss goes, product by product, and what would make it faster on a given shape.

    python benchmarks/loss_parts.py --output results
    python benchmarks/loss_parts.py --output results --shapes 10007x2560x151936 --seconds 40

A shape is tokens x width x classes, in bf16. For each shape:

    floor       the three products of the whole batch, each timed alone
    parts       of one chunk of the walk: every product in the forms that cuBLAS has for it, trial forms of it, and the
                pass between them under several geometries. Milliseconds are those of a whole batch of such chunks.
    rows        TFLOP/s of the products over neighbouring numbers of rows: rounds of tiles that are filled in part
    steps       forward and backward pass of today's code, and of trials that are built from the best parts

The trials replace functions of the library while they run. Every step is compared with fp64 on some rows and classes,
and run twice for its bits. Medians, each sample with a cold L2 cache. A part or step that fails is said to have failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from studies import sum_product
from torch import Tensor

import tigon
from tigon.bench import report
from tigon.kernels import HAS_TRITON, INTERPRET, launch_cache, multiprocessors
from tigon.losses.head import chunks as walks
from tigon.losses.head import head as heads
from tigon.losses.head.chunks import Chunks, chunk_budget, chunk_rows, spared_by_one_chunk
from tigon.losses.head.head import Projection, class_blocks, empty_logits, product_into
from tigon.ops.linear import weight_gradient

loss_module = importlib.import_module("tigon.losses.linear_cross_entropy")
row_launches = importlib.import_module("tigon.ops.cross_entropy.launches")

SHAPES = (
    (10007, 2560, 151936), (16384, 5120, 131072), (6000, 1152, 262144), (30000, 3072, 49155), (8192, 4096, 128256),
    (2048, 2048, 50257),
)  # fmt: skip
Change = tuple[Any, str, Any]  # a module or class, a name in it, what stands there meanwhile

# Warps, depth, block, programs a multiprocessor, eviction of the first and the second reading, backwards: `_grad_tile`.
KEEP, DROP = "evict_last", "evict_first"
PASSES = {
    "depth 1": (32, 1, 8192, 0, KEEP, DROP, False),
    "depth 4": (32, 4, 8192, 0, KEEP, DROP, False),
    "16 warps": (16, 4, 4096, 0, KEEP, DROP, False),
    "16 warps, 1 program": (16, 4, 4096, 1, KEEP, DROP, False),
    "backwards": (32, 2, 8192, 0, "", "", True),
    "3/4 programs": (32, 2, 8192, 0.75, KEEP, DROP, False),
    "depth 4, 1/2 programs": (32, 4, 8192, 0.5, KEEP, DROP, False),
}
SPLITS = (2, 3, 4, 8)


# -------------------------------------------------------------------------------------------------------------- trials


@contextlib.contextmanager
def replaced(changes: tuple[Change, ...]) -> Iterator[None]:
    before = [(place, name, getattr(place, name)) for place, name, _ in changes]
    launch_cache._plans.clear()  # warps and programs of the pass are in no key
    try:
        for place, name, value in changes:
            setattr(place, name, value)
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)
        launch_cache._plans.clear()


def by_product(tile: sum_product.Tile) -> tuple[Change, ...]:
    """dW's fp32 sums by `sum_product`."""
    ordinary = weight_gradient.accumulate

    def accumulate(sums: Any, dlogits: Tensor, x: Tensor, first: bool) -> None:
        start = 0
        for dw in sums:
            columns = dlogits[:, start : start + dw.shape[0]]
            # Interpreted where there is no GPU: this product alone, since the pass would take a second a row.
            with tigon.use_backend("triton") if INTERPRET else contextlib.nullcontext():
                taken = sum_product.takes(dw, columns, x)
                if taken:
                    sum_product.product(dw, columns, x, first, tile)
            if not taken:
                ordinary([dw], columns, x, first)
            start += dw.shape[0]

    return ((weight_gradient, "accumulate", accumulate),)


def by_shares(shares: int) -> tuple[Change, ...]:
    """dX as products over shares of the classes, summed in fp32: more tiles, for rounds that are full."""

    def input_gradient(self: Projection, dlogits: Tensor, out: Tensor) -> Tensor:
        n, V = dlogits.shape
        share = V // shares // 64 * 64
        whole = shares * share
        a = dlogits.as_strided((shares, n, share), (share, dlogits.stride(0), 1))
        b = self.weight[:whole].view(shares, share, -1)
        each = torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())
        total = each.sum(0)
        if whole < V:
            product_into(total, dlogits[:, whole:], self.weight[whole:], first=False)
        return out.copy_(total)

    return ((Projection, "input_gradient", input_gradient),)


def by_pass(name: str) -> tuple[Change, ...]:
    """The pass over the logits in another geometry."""
    return ((row_launches, "_grad_tile", lambda *_: PASSES[name]),)


def in_rows(rows: int) -> tuple[Change, ...]:
    """Chunks of so many rows."""
    return ((walks, "chunk_rows", lambda n, row_bytes, budget: max(1, min(n, rows))),)


def room_of(rows: int, V: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits whose rows begin at no multiple of a large power of two."""
    return like.new_empty(rows, -(-V // 64) * 64 + 64, dtype=dtype)[:, :V]


# Rows of 2¹⁷ or 2¹⁸ classes all begin at the same place of the memory's channels.
APART: tuple[Change, ...] = ((walks, "empty_logits", room_of),)
ONE_BLOCK: tuple[Change, ...] = tuple(
    (place, "class_blocks", lambda V, dtype: [slice(0, V)]) for place in (heads, weight_gradient)
)


def overlapped(programs: float, device: torch.device) -> tuple[Change, ...]:
    """A chunk in two halves: the pass over one half beside a product of the other half, on another stream.

    programs: of the pass, for each multiprocessor; 0 for one a row.
    """
    side = torch.cuda.Stream(priority=-1) if torch.cuda.is_available() else None
    ordinary = row_launches._grad_tile

    def tile(*options: Any) -> Any:
        warps, depth, block, _, *rest = ordinary(*options)
        least = 1 / multiprocessors(device) if programs else 0
        return (warps, depth, block, max(programs, least), *rest)

    def walk(chunks: Chunks, losses: Tensor, factor: Any, dx: Any, dw: Any, db: Any, add: bool, *options: Any) -> None:
        room = empty_logits(chunks.size, chunks.head.weight.shape[0], chunks.head.x, chunks.dtype)
        first = not add
        for start, stop in chunks.spans():
            half = min(stop, start + -(-(stop - start) // 256) * 128)
            parts = []
            for a, b in ((start, half), (half, stop)):
                if a == b:
                    continue
                part = chunks.compute(a, b, room[a - start : b - start])
                passed = part.logits, part.target, losses[part.rows], None, factor, True, *options
                if side is None:
                    row_launches.cross_entropy_rows(*passed)
                    parts.append((part, None))
                    continue
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    row_launches.cross_entropy_rows(*passed)
                    event = torch.cuda.Event()
                    event.record()
                parts.append((part, event))
            for part, event in parts:
                if event is not None:
                    torch.cuda.current_stream().wait_event(event)
                chunks.head.input_gradient(part.logits, dx[part.at])
            weight_gradient.accumulate(dw, room[: stop - start], chunks.head.x[start:stop], first)
            first = False

    return (loss_module, "_walk", walk), (row_launches, "_grad_tile", tile)


# --------------------------------------------------------------------------------------------------------- measurement


class Bench:
    """Times on one device, until the seconds are spent."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.ends = device, time.monotonic() + seconds
        # Several times the L2 cache.
        self.flush = torch.empty(2**28 if device.type == "cuda" else 1, dtype=torch.int8, device=device)

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

    def ms(self, run: Callable[[], Any], samples: int = 4) -> float:
        if self.device.type != "cuda":
            started = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - started)
        run()
        times = []
        for _ in range(samples):
            self.flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            times.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in times)


class Shape:
    """One shape: its inputs, and what was measured of it."""

    def __init__(self, bench: Bench, shape: tuple[int, int, int], chunk_bytes: int | None = None) -> None:
        self.bench, self.shape, self.chunk_bytes = bench, shape, chunk_bytes
        N, H, V = shape
        generator = torch.Generator(device=bench.device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=bench.device)

        self.x = normal(N, H).bfloat16().requires_grad_()
        self.weight = (2 * H**-0.5 * normal(V, H)).bfloat16().requires_grad_()
        self.target = torch.randint(0, V, (N,), generator=generator, device=bench.device)
        spared = spared_by_one_chunk(self.weight, torch.bfloat16, "fp32")
        budget = chunk_budget(bench.device, chunk_bytes, whole=N * V * 2, spared=spared)
        self.rows = chunk_rows(N, V * 2, budget)
        self.count = -(-N // self.rows)
        self.tflop = 2 * N * H * V / 1e9  # of one product; over milliseconds TFLOP/s
        self.kernels = HAS_TRITON and (INTERPRET or bench.device.type == "cuda")
        self.parts: dict[str, float] = {}
        self.sweep: dict[int, tuple[float, float]] = {}
        self.steps: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}

    def record(self) -> dict[str, Any]:
        names = "parts", "sweep", "steps", "failed"
        return {"shape": self.shape, "rows": self.rows, "floor": self.floor} | {n: getattr(self, n) for n in names}

    @property
    def floor(self) -> float:
        return sum(self.parts[f"whole {name}"] for name in ("logits", "dx", "dw"))

    def part(self, name: str, run: Callable[[], Any], changes: tuple[Change, ...] = (), scale: float = 0.0) -> float:
        """Milliseconds of a whole batch of what `run` does for one chunk; NaN where it fails."""
        try:
            with replaced(changes):
                found = self.bench.ms(run) * (scale or self.shape[0] / self.rows)
        except Exception as error:
            self.failed[name], found = repr(error)[:300], math.nan
        self.parts[name] = found
        return found

    def best(self, prefix: str, than: str) -> str | None:
        """The fastest part of these, if it is faster than another one by more than 1.5 %."""
        names = [n for n, t in self.parts.items() if n.startswith(prefix) and not math.isnan(t)]
        found = min(names, key=self.parts.__getitem__, default=None)
        return found if found is not None and self.parts[found] < 0.985 * self.parts[than] else None

    def measure_parts(self) -> None:
        N, H, V = self.shape
        x, weight = self.x.detach(), self.weight.detach()
        head = Projection(x, weight, None)
        whole, dx = empty_logits(N, V, x, torch.bfloat16), torch.empty_like(x)
        narrow = torch.empty_like(weight)
        self.part("whole logits", lambda: head.logits(x, whole), scale=1)
        self.part("whole dx", lambda: head.input_gradient(whole, dx), scale=1)
        self.part("whole dw", lambda: weight_gradient.accumulate([narrow], whole, x, True), scale=1)
        n = self.rows
        room, rows, out, target = whole[:n], x[:n], dx[:n], self.target[:n]
        losses = torch.empty(n, device=x.device)
        factor = torch.full((), 1 / N, device=x.device)
        options = -100, 0.0, 0.0, 0.0, 1.0
        blocks = class_blocks(V, torch.bfloat16)

        def over(logits: Tensor) -> Callable[[], None]:
            # A pass over gradients takes as long as a pass over logits.
            return lambda: row_launches.cross_entropy_rows(logits, target, losses, None, factor, True, *options)

        self.part("logits", lambda: head.logits(rows, room))
        self.part("pass", over(room))
        for name in PASSES if V > 65536 and self.kernels else ():
            self.part(f"pass, {name}", over(room), by_pass(name))
        head.logits(rows, room)
        over(room)()
        self.part("dx", lambda: head.input_gradient(room, out))
        for shares in SPLITS:
            self.part(f"dx, {shares} shares", lambda: head.input_gradient(room, out), by_shares(shares))
        sums = torch.zeros(V, H, device=x.device)

        def summed(logits: Tensor, first: bool) -> Callable[[], None]:
            return lambda: weight_gradient.accumulate([sums], logits, rows, first)

        self.part("dw, bf16", lambda: weight_gradient.accumulate([narrow], room, rows, True))
        self.part("dw, first", summed(room, True))
        self.part("dw, add", summed(room, False))
        for name, tile in sum_product.TILES.items() if self.kernels else ():
            for first in (True, False):
                self.part(f"dw, {'first' if first else 'add'}, {name}", summed(room, first), by_product(tile))
        self.part("narrowing", lambda: narrow.copy_(sums), scale=1)
        if len(blocks) > 1:
            few = blocks[1]
            self.part("logits, one block", lambda: head.logits(rows, room), ONE_BLOCK)
            self.part("dx, one block", lambda: head.input_gradient(room, out), ONE_BLOCK)
            self.part("dw, one block", summed(room, False), ONE_BLOCK)
            self.part("last classes: logits", lambda: torch.mm(rows, weight[few].t(), out=room[:, few]))
            self.part("last classes: dx", lambda: product_into(out, room[:, few], weight[few], True))
            self.part("last classes: dw", lambda: product_into(sums[few], room[:, few].t(), rows, False))
        apart = room_of(n, V, x, torch.bfloat16)
        self.part("logits, apart", lambda: head.logits(rows, apart))
        self.part("pass, apart", over(apart))
        self.part("dx, apart", lambda: head.input_gradient(apart, out))
        self.part("dw, apart", summed(apart, False))
        for more in range(-6, 4):
            few_rows = min(N, n + 128 * more)
            if few_rows > 0 and few_rows not in self.sweep:
                flop, z, r = 2 * few_rows * H * V / 1e9, whole[:few_rows], x[:few_rows]
                times = self.bench.ms(lambda r=r, z=z: head.logits(r, z), 3), self.bench.ms(
                    lambda z=z: head.input_gradient(z, dx[: z.shape[0]]), 3
                )  # fmt: skip
                self.sweep[few_rows] = flop / times[0], flop / times[1]

    def expected(self) -> tuple[float, Tensor, Tensor, Tensor]:
        """The loss, dx of the first rows, and dW of some classes, from logits in fp32."""
        N, _, V = self.shape
        x, weight = self.x.detach(), self.weight.detach()
        some = torch.cat([self.target[:16], torch.arange(0, V, max(1, V // 16), device=x.device)[:16]]).unique()
        loss, dx, dw = 0.0, torch.empty(0), torch.zeros(len(some), x.shape[1], dtype=torch.float64, device=x.device)
        for i in range(0, N, 1024):
            rows, t = x[i : i + 1024], self.target[i : i + 1024, None]
            wide = torch.mm(rows, weight.T, out_dtype=torch.float32) if x.is_cuda else rows.float() @ weight.float().T
            lse = wide.logsumexp(-1, keepdim=True)
            loss += (lse - wide.gather(1, t)).double().sum().item() / N
            dw += ((wide[:, some].double() - lse.double()).exp() - (t == some).double()).T @ rows.double() / N
            if not i:
                slope = (wide[:32] - lse[:32]).exp()
                slope.scatter_add_(1, t[:32], -torch.ones_like(slope[:, :1]))
                steps = (slice(c, c + 8192) for c in range(0, V, 8192))
                dx = sum((slope[:, c].double() @ weight[c].double() / N for c in steps), torch.zeros(()).to(dw))
        return loss, dx, some, dw

    def step(self) -> tuple[Tensor, ...]:
        walk = tigon.losses.Walk(chunk_bytes=self.chunk_bytes)
        loss = tigon.linear_cross_entropy(self.x, self.weight, self.target, walk=walk)
        return loss.detach(), *torch.autograd.grad(loss, (self.x, self.weight))

    def measure_step(self, name: str, right: tuple[float, Tensor, Tensor, Tensor], *changes: Change) -> None:
        def relative(a: Tensor, b: Tensor) -> float:
            return float((a.double() - b).norm() / b.norm())

        try:
            with replaced(changes):
                loss, dx, dw = found = self.step()
                errors = abs(loss.item() / right[0] - 1), relative(dx[:32], right[1]), relative(dw[right[2]], right[3])
                same = all(torch.equal(a, b) for a, b in zip(found, self.step(), strict=True))
                del loss, dx, dw, found
                peak = None
                if self.bench.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    self.step()
                    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
                ms = self.bench.ms(self.step, 7)
        except Exception as error:
            self.failed[name] = repr(error)[:300]
            return
        row = {"ms": ms, "times_floor": ms / self.floor, "peak_gib": peak, "same_bits": same}
        self.steps[name] = row | dict(zip(("loss", "dx", "dw"), errors, strict=True))

    def measure_steps(self) -> None:
        right = self.expected()
        self.measure_step("today", right)
        trials: list[tuple[str, tuple[Change, ...]]] = []
        base: tuple[Change, ...] = ()
        adding = self.best("dw, add, ", "dw, add")
        if self.count > 1 and adding is not None:
            base = by_product(sum_product.TILES[adding.removeprefix("dw, add, ")])
            trials.append((adding, base))
        geometry = self.best("pass, ", "pass")
        if geometry is not None and geometry != "pass, apart":
            base = (*base, *by_pass(geometry.removeprefix("pass, ")))
            trials.append((geometry, base))
        shares = self.best("dx, ", "dx")
        if shares is not None and shares.endswith("shares"):
            base = (*base, *by_shares(int(shares.split()[1])))
            trials.append((shares, base))
        trials.append(("apart", (*base, *APART)))
        if len(class_blocks(self.shape[2], torch.bfloat16)) > 1:
            trials.append(("one block", (*base, *ONE_BLOCK)))
        if self.kernels:
            device = self.bench.device
            trials += [(f"overlapped, {p} programs", (*base, *overlapped(p, device))) for p in (0.25, 0.5, 0)]
        if self.count > 1:
            more = -(-self.shape[0] // (self.count + 1) // 128) * 128
            for rows in dict.fromkeys((more, max(128, self.rows - 128), max(128, self.rows // 256 * 128))):
                trials.append((f"chunks of {rows}", (*base, *in_rows(rows))))
        for name, changes in trials:
            if self.bench.left > 0:
                self.measure_step(name, right, *changes)

    def lines(self) -> list[str]:
        title = "x".join(map(str, self.shape))
        found = [f"{title}: {self.count} chunks of {self.rows}, floor {self.floor:.2f} ms"]
        for name, ms in self.parts.items():
            rate = "" if name.startswith(("pass", "narrow", "last")) else f" {self.tflop / ms:7.1f} TFLOP/s"
            found.append(f"    {name:32s} {ms:9.3f} ms{rate}")
        rows = "  ".join(f"{rows}: {a:.0f} {b:.0f}" for rows, (a, b) in sorted(self.sweep.items()))
        found.append(f"    TFLOP/s of logits and dx by rows  {rows}")
        for name, row in self.steps.items():
            memory = "" if row["peak_gib"] is None else f" {row['peak_gib']:.2f} GiB"
            bits = "" if row["same_bits"] else ", BITS DIFFER"
            found.append(
                f"  {name:34s} {row['ms']:9.2f} ms {row['times_floor']:.3f}x{memory}  loss {row['loss']:.0e} "
                f"dx {row['dx']:.1e} dw {row['dw']:.1e}{bits}"
            )
        return [*found, *(f"    {name} failed: {why}" for name, why in self.failed.items())]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the folder for loss-parts.json")
    parser.add_argument("--shapes", nargs="+", default=["x".join(map(str, shape)) for shape in SHAPES])
    parser.add_argument("--seconds", type=float, default=110, help="after which no further trial is begun")
    parser.add_argument("--chunk-bytes", type=int)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    bench = Bench(device, options.seconds)
    result: dict[str, Any] = report.result("loss-parts", [], device=device)
    options.output.mkdir(parents=True, exist_ok=True)
    for text in options.shapes:
        if bench.left <= 0:
            break
        n, h, v = map(int, text.split("x"))
        shape = Shape(bench, (n, h, v), options.chunk_bytes)
        shape.measure_parts()
        shape.measure_steps()
        print("\n".join(shape.lines()), flush=True)
        result["rows"].append(shape.record())
        # After each shape: a run that is cut off leaves what it has measured.
        report.save(options.output / "loss-parts.json", result)
        del shape
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return result


if __name__ == "__main__":
    main()
