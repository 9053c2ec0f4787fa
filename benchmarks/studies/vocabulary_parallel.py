"""Losses of a head whose classes lie on several GPUs, against the whole head on one of them, and others' ways.

    torchrun --nproc-per-node 4 benchmarks/studies/vocabulary_parallel.py --output results
    torchrun --nproc-per-node 4 benchmarks/studies/vocabulary_parallel.py --output results --losses jsd hinton top64
    torchrun --nproc-per-node 2 benchmarks/studies/vocabulary_parallel.py --device cpu --shapes 256x64x1000

Cross entropy, or distillation, whose teacher has a head of the student's size that is split as the student's is.

Forward and backward pass, bf16, no token ignored; each side's result is checked against fp64 before it is timed. A time
is the median over samples of some passes in a row, of the rank that took longest. Beside the sides:

    share        what one GPU takes, over the number of them: as if nothing had to be said to the others
    in silence   the same walk with the collective operations left out; what they cost is the difference
    collectives  those alone, one after the other, under no matrix product
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import report
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import tigon
from tigon.losses import ChunkOptions, Distill, Hidden, TopK, distill, distill_topk
from tigon.losses.head.vocabulary_parallel import PendingTensor, Shards

SHAPES = ((8192, 4096, 128256), (32768, 4096, 128256), (16384, 2048, 151936), (32768, 2304, 256000))
CHECKED_ROWS = 512  # of the batch, in fp64
SECONDS = 150


@dataclass
class Row:
    """Milliseconds, and GiB beyond the inputs. Errors are means, over eager PyTorch's in one process, against fp64."""

    op: str
    shape: tuple[int, int, int]
    side: str
    status: str = "ok"
    reason: str = ""
    ms: float | None = None
    samples_ms: list[float] = field(default_factory=list)
    peak_gib: float | None = None
    errors: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Problem:
    """One loss and shape: the whole heads, and this rank's part of them, as torch.chunk has it."""

    def __init__(self, name: str, shape: tuple[int, int, int], device: torch.device, world: int, rank: int) -> None:
        N, H, V = shape
        draw = torch.Generator(device).manual_seed(0)  # the same on all ranks
        options: dict[str, Any] = {"generator": draw, "device": device}
        self.loss = LOSSES[name]
        self.shape, self.device, self.world, self.rank = shape, device, world, rank
        self.x = torch.randn(N, H, **options).bfloat16().requires_grad_()
        self.weight = (torch.randn(V, H, **options) / H**0.5).bfloat16().requires_grad_()
        self.target = torch.randint(V, (N,), **options)
        size = -(-V // world)
        self.span = slice(min(V, rank * size), min(V, (rank + 1) * size))
        self.own = self.weight.detach()[self.span].clone().requires_grad_()
        self.mesh = dist.device_mesh.init_device_mesh(device.type, (world,))
        if self.loss.teaches:
            self.teacher_x = torch.randn(N, H, **options).bfloat16()
            self.teacher_weight = (torch.randn(V, H, **options) / H**0.5).bfloat16()
            self.teacher_own = self.teacher_weight[self.span].clone()
        if self.loss.gives:
            found = [self.given(rows) for rows in self.teacher_x.split(1024)]
            self.logprobs, self.ids = (torch.cat(parts) for parts in zip(*found, strict=True))

    def given(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of these rows the teacher's likeliest classes."""
        logprobs, ids = F.linear(rows, self.teacher_weight).float().log_softmax(-1).topk(self.loss.gives)
        return logprobs, ids

    def first(self, rows: int) -> tuple[Tensor, Tensor]:
        return self.x.detach()[:rows].clone().requires_grad_(), self.target[:rows]


# Loss, gradient of x, and of the weight, the whole one or this rank's rows of it.
Result = tuple[Tensor, Tensor, Tensor]
Side = Callable[[Problem, Tensor, Tensor], Result]


@dataclass(frozen=True)
class Loss:
    """tigon(p, x, weight, teacher_weight, target, **options), and of whole logits plain(p, z, target).

    teaches: there is a teacher's head. gives: how many classes the teacher gave of each row.
    """

    op: str
    tigon: Callable[..., Tensor]
    plain: Callable[[Problem, Tensor, Tensor], Tensor]
    teaches: bool = True
    gives: int = 0


def cross_entropy(p: Problem, x: Tensor, weight: Tensor, _: Tensor | None, target: Tensor, **options: Any) -> Tensor:
    return tigon.linear_cross_entropy(x, _head(weight, options), target, chunks=ChunkOptions(**options))


def _head(weight: Tensor, options: dict[str, Any]) -> tigon.Head:
    """The head with the group that its classes are split over, which is taken out of the options; a walk's remain."""
    return tigon.Head(weight, group=options.pop("group", None))


def distill_jsd(
    p: Problem, x: Tensor, weight: Tensor, teacher_weight: Tensor, target: Tensor, *, hinton: bool = False,
    **options: Any,
) -> Tensor:  # fmt: skip
    config = Distill(loss_type="kl", temperature=2.0, hard_weight=0.5) if hinton else Distill()
    teacher = Hidden(p.teacher_x[: x.shape[0]], teacher_weight)
    return distill(x, _head(weight, options), teacher, target, config=config, chunks=ChunkOptions(**options))[0]


def distilled_topk(p: Problem, x: Tensor, weight: Tensor, _: Tensor, target: Tensor, **options: Any) -> Tensor:
    rows = x.shape[0]
    teacher = TopK(p.ids[:rows], p.logprobs[:rows])
    return distill_topk(x, _head(weight, options), teacher, target, chunks=ChunkOptions(**options))[0]


def teachers(p: Problem, z: Tensor) -> Tensor:
    """The teacher's logits beside z: products in bf16, or in fp64 beside fp64."""
    dtype = torch.bfloat16 if z.dtype == torch.float32 else z.dtype
    return F.linear(p.teacher_x[: z.shape[0]].to(dtype), p.teacher_weight.to(dtype)).to(z.dtype)


def plain_jsd(p: Problem, z: Tensor, target: Tensor) -> Tensor:
    q, t = z.log_softmax(-1), teachers(p, z).log_softmax(-1)
    m = torch.logsumexp(torch.stack([q, t]), 0) - math.log(2)
    both = (F.kl_div(m, side, reduction="batchmean", log_target=True) for side in (t, q))
    return sum(both, z.new_zeros(())) / 2


def plain_hinton(p: Problem, z: Tensor, target: Tensor) -> Tensor:
    q, t = (z / 2).log_softmax(-1), (teachers(p, z) / 2).log_softmax(-1)
    return (F.kl_div(q, t, reduction="batchmean", log_target=True) + F.cross_entropy(z, target)) / 2


def plain_topk(p: Problem, z: Tensor, target: Tensor) -> Tensor:
    """KL of the given classes, and one more that stands for the rest."""
    ids, given = p.ids[: z.shape[0]], p.logprobs[: z.shape[0]].to(z.dtype).exp()
    log_q = z.log_softmax(-1)
    rest = torch.logsumexp(log_q.scatter(-1, ids, -torch.inf), -1, keepdim=True)
    log_q = torch.cat([log_q.gather(-1, ids), rest], -1)
    return F.kl_div(log_q, torch.cat([given, 1 - given.sum(-1, keepdim=True)], -1), reduction="batchmean")


LOSSES = {
    "cross_entropy": Loss("linear_cross_entropy", cross_entropy, lambda p, z, t: F.cross_entropy(z, t), teaches=False),
    "jsd": Loss("distill, JSD", distill_jsd, plain_jsd),
    "hinton": Loss("distill, KL and cross entropy, τ = 2", functools.partial(distill_jsd, hinton=True), plain_hinton),
    "top64": Loss("distill_topk, K = 64", distilled_topk, plain_topk, gives=64),
}


def with_gradients(loss: Tensor, x: Tensor, weight: Tensor) -> Result:
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


def one_gpu(p: Problem, x: Tensor, target: Tensor) -> Result:
    loss = p.loss.tigon(p, x, p.weight, p.teacher_weight if p.loss.teaches else None, target)
    return with_gradients(loss, x, p.weight)


def run_sharded(p: Problem, x: Tensor, target: Tensor, **options: Any) -> Result:
    teacher_weight = p.teacher_own if p.loss.teaches else None
    loss = p.loss.tigon(p, x, p.own, teacher_weight, target, group=dist.group.WORLD, **options)
    return with_gradients(loss, x, p.own)


def sharded_in_bf16(p: Problem, x: Tensor, target: Tensor) -> Result:
    return run_sharded(p, x, target, accumulate="weight")


def torch_loss_parallel(p: Problem, x: Tensor, target: Tensor) -> Result:
    """A head that is Shard(0), logits that are Shard(-1); torch wants the backward pass inside, too."""
    shape = {"shape": p.weight.shape, "stride": p.weight.stride()}
    head = DTensor.from_local(p.own, p.mesh, [Shard(0)], run_check=False, **shape)
    rows = DTensor.from_local(x, p.mesh, [Replicate()], run_check=False)
    with loss_parallel():
        loss = F.cross_entropy(F.linear(rows, head).float(), target)
        found = with_gradients(loss, x, p.own)
    return found[0].to_local() if isinstance(found[0], DTensor) else found[0], *found[1:]


def cut_cross_entropy(p: Problem, x: Tensor, target: Tensor) -> Result:
    from cut_cross_entropy import VocabParallelOptions, linear_cross_entropy

    options = VocabParallelOptions(p.span.start, p.span.stop, group=dist.group.WORLD)
    return with_gradients(linear_cross_entropy(x, p.own, target, vocab_parallel_options=options), x, p.own)


@contextlib.contextmanager
def replace_functions(**functions: Any) -> Iterator[None]:
    """Inside, Shards has these methods in place of its own."""
    before = {name: getattr(Shards, name) for name in functions}
    for name, function in functions.items():
        setattr(Shards, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(Shards, name, function)


class Nothing:
    def wait(self) -> None:
        return


def in_silence(p: Problem, x: Tensor, target: Tensor) -> Result:
    """The walk without collectives: every device takes its own statistics for all, and its share of dx for the sum."""

    def gather(self: Shards, own: Tensor) -> PendingTensor:
        return PendingTensor(own.expand(len(self.sizes), *own.shape).contiguous(), Nothing())

    with replace_functions(gather=gather, sum=lambda self, t: PendingTensor(t, Nothing())):
        return run_sharded(p, x, target)


class Collectives:
    """Records the collectives that `sharded` runs, in order; a call runs the same ones again."""

    def __init__(self, p: Problem) -> None:
        self.sent: list[tuple[Any, Tensor]] = []
        gather, sum_ = Shards.gather, Shards.sum

        def recorded(send: Any) -> Any:
            def record(shards: Shards, t: Tensor) -> PendingTensor:
                self.sent.append((lambda u: send(shards, u).wait(), torch.zeros_like(t)))
                return send(shards, t)  # type: ignore[no-any-return]

            return record

        with replace_functions(gather=recorded(gather), sum=recorded(sum_)):
            run_sharded(p, p.x, p.target)

    def __call__(self) -> None:
        for send, t in self.sent:
            send(t)

    def bytes(self) -> list[int]:
        return [t.numel() * t.element_size() for _, t in self.sent]


SIDES: dict[str, Side] = {
    "tigon, one GPU": one_gpu,
    "tigon": run_sharded,
    "tigon, accumulate='weight'": sharded_in_bf16,
    "torch loss_parallel": torch_loss_parallel,
    "cut-cross-entropy": cut_cross_entropy,
}
OF_CROSS_ENTROPY = ("torch loss_parallel", "cut-cross-entropy")


def compute_errors(p: Problem, side: Side) -> dict[str, float]:
    """Mean errors against fp64 on the first rows, over those of eager PyTorch with the whole head."""
    x, target = p.first(min(CHECKED_ROWS, p.shape[0]))
    exact_x, exact_w = x.detach().double().requires_grad_(), p.weight.detach().double().requires_grad_()
    truth = p.loss.plain(p, F.linear(exact_x, exact_w), target)
    exact = list(with_gradients(truth, exact_x, exact_w))
    eager = p.loss.plain(p, F.linear(x, p.weight).float(), target)
    base = list(with_gradients(eager, x, p.weight))
    found = side(p, x, target)
    if found[2].shape != p.weight.shape:
        exact[2], base[2] = exact[2][p.span], base[2][p.span]
    errors = {}
    for name, mine, theirs, right in zip(("loss", "dx", "dw"), found, base, exact, strict=True):
        size = float(right.abs().mean()) if right.numel() else 0.0
        # Both losses are right to fp32, so the ratio of two tiny errors would be luck.
        floor = 1e-5 * size if name == "loss" else torch.finfo(torch.bfloat16).eps / 2 * size
        error, allowed = float((mine.double() - right).abs().mean()), float((theirs.double() - right).abs().mean())
        assert size > 0, f"{name} is zero"
        errors[name] = error / max(allowed, floor)
    return errors


class Clock:
    """Samples of some passes in a row, all ranks beginning together; of each sample the slowest rank's time."""

    def __init__(self, device: torch.device, samples: int, passes: int) -> None:
        self.device, self.samples, self.passes = device, samples, passes

    def __call__(self, run: Callable[[], Any]) -> list[float]:
        cuda = self.device.type == "cuda"
        times = []
        for sample in range(-2, self.samples):  # two samples of warm-up: kernels compile, libraries choose theirs
            self.wait()
            if cuda:
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
            began = time.perf_counter()
            for _ in range(self.passes):
                run()
            if cuda:
                stop.record()
            self.wait()
            ms = start.elapsed_time(stop) if cuda else 1e3 * (time.perf_counter() - began)
            if sample >= 0:
                times.append(ms / self.passes)
        return slowest(times, self.device)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def slowest(values: list[float], device: torch.device) -> list[float]:
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [round(float(value), 5) for value in found]


def measure(p: Problem, clock: Clock, sides: list[str]) -> list[Row]:
    rows = []
    for name in sides:
        if p.loss.teaches and name in OF_CROSS_ENTROPY:
            continue
        side, row = SIDES[name], Row(p.loss.op, p.shape, name)
        rows.append(row)
        try:
            errors = compute_errors(p, side)
            row.errors = dict(zip(errors, slowest(list(errors.values()), p.device), strict=True))
            before = memory(p.device)
            row.samples_ms = clock(functools.partial(side, p, p.x, p.target))
            row.peak_gib = None if before is None else peak(p.device, before)
        except ImportError as error:
            row.status, row.reason = "skipped", error.msg.partition(" (")[0]  # without this machine's path
            continue
        row.ms = statistics.median(row.samples_ms)
        if max(row.errors.values()) > 2:
            row.status, row.reason = "wrong", "its mean error is above twice eager's"
    times = clock(functools.partial(in_silence, p, p.x, p.target))
    silent = Row(p.loss.op, p.shape, "tigon, in silence", samples_ms=times)
    alone = Collectives(p)
    sent = Row(p.loss.op, p.shape, "collectives", samples_ms=clock(alone), reason=f"bytes: {alone.bytes()}")
    for row in (silent, sent):
        row.ms = statistics.median(row.samples_ms)
    return [*rows, silent, sent]


def memory(device: torch.device) -> int | None:
    """Bytes that are there before a side begins: the inputs of all sides, the whole head among them."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak(device: torch.device, before: int) -> float:
    return slowest([(torch.cuda.max_memory_allocated(device) - before) / 2**30], device)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder for the record")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="*", default=["x".join(map(str, shape)) for shape in SHAPES])
    parser.add_argument("--losses", nargs="*", default=["cross_entropy"], choices=list(LOSSES))
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="no further loss or shape is begun after that")
    options = parser.parse_args()
    began = time.monotonic()
    rank, device = int(os.environ.get("LOCAL_RANK", 0)), torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(seconds=60),
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    world, rows = dist.get_world_size(), []
    clock = Clock(device, options.samples, options.passes)
    sides = list(dict.fromkeys(["tigon, one GPU", "tigon", *options.sides]))
    for text, name in itertools.product(options.shapes, options.losses):
        if slowest([time.monotonic() - began], device)[0] > options.seconds:
            break
        N, H, V = (int(n) for n in text.split("x"))
        found = measure(Problem(name, (N, H, V), device, world, dist.get_rank()), clock, sides)
        rows += found
        if dist.get_rank() == 0:
            print(*found, sep="\n", flush=True)
    if dist.get_rank() == 0:
        print(f"{time.monotonic() - began:.0f} s")
        if options.output is not None:
            content = report.result("vocabulary-parallel", rows, device=device, gpus=world)
            name = "h200" if "H200" in content["environment"]["device"] else device.type
            more = "" if "cross_entropy" in options.losses else "-distill"  # beside the other record, never over it
            report.save(options.output / f"{name}-vocabulary-parallel{more}.json", content)
    dist.destroy_process_group()
    return int(any(row.status == "wrong" and row.side.startswith("tigon") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
