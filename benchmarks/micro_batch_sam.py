"""How flat are the minima that micro-batch sharpness-aware minimization finds, and what does a step cost?

    python benchmarks/micro_batch_sam.py --output results --jobs 8             the study
    python benchmarks/micro_batch_sam.py --output results --cost               steps of a Llama and a ResNet, timed
    torchrun --nproc-per-node 4 benchmarks/micro_batch_sam.py --output results --cost

The study trains a small network to foresee the next character of Shakespeare's plays, by SGD with momentum, by SGD for
twice as many steps (as many rows through a backward pass as SAM takes), by SAM and by mSAM with 4 and 8 shards. The
learning rate of SGD is chosen on a validation split, the others take it over; rho is chosen there too. Of each run the
largest eigenvalue of the Hessian of the training loss is found by Lanczos' method. The file is written after every run,
and a study that is begun again goes on.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import report
from studies.sharpness import Cost, Run, chosen, table, verdict
from torch import Tensor, nn

from tigon.optim import MicroBatchSAM
from tigon.optim.perturb import perturb, restore, squared_norm

# Shakespeare's plays, in the public domain: the first third of tinyshakespeare, of github.com/karpathy/char-rnn (MIT).
TEXT = Path(__file__).parent / "data" / "shakespeare.txt"
CONTEXT, ROWS, BATCH = 12, 8192, 256
LEARNING_RATES = (0.025, 0.05, 0.1, 0.2)
RHOS = (0.1, 0.2, 0.4, 0.8)
# Name, shards of a batch, factor of the number of steps.
METHODS = (
    ("SGD", 0, 1),
    ("SGD, twice as long", 0, 2),
    ("SAM", 1, 1),
    ("mSAM, 4 shards", 4, 1),
    ("mSAM, 8 shards", 8, 1),
)
BAR = 2.05  # times the step without SAM

# -------------------------------------------------------------------------------------------------------------- study


@functools.cache
def text() -> tuple[Tensor, int]:
    plays = TEXT.read_text()
    letters = sorted(set(plays))
    number = {letter: i for i, letter in enumerate(letters)}
    return torch.tensor([number[letter] for letter in plays]), len(letters)


@functools.cache
def rows(part: str) -> tuple[Tensor, Tensor]:
    """(ROWS, CONTEXT) characters and (ROWS,) that follow: the first 80 % of the text, the next 10 %, the last."""
    ids, _ = text()
    low, high, seed = {"train": (0.0, 0.8, 0), "validation": (0.8, 0.9, 1), "test": (0.9, 1.0, 2)}[part]
    first, last = int(low * len(ids)), int(high * len(ids)) - CONTEXT
    starts = torch.randint(first, last, (ROWS,), generator=torch.Generator().manual_seed(seed))
    windows = ids.unfold(0, CONTEXT + 1, 1)[starts]
    return windows[:, :-1].contiguous(), windows[:, -1].contiguous()


class Next(nn.Module):
    """The characters before, embedded side by side, and two hidden layers."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        _, letters = text()
        self.embedding = nn.Embedding(letters, 16)
        sizes = (16 * CONTEXT, width, width)
        self.hidden = nn.Sequential(*(part for i in (0, 1) for part in (nn.Linear(sizes[i], sizes[i + 1]), nn.GELU())))
        self.out = nn.Linear(width, letters)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(self.embedding(x).flatten(1)))


def train(run: Run, device: torch.device) -> Run:
    begun = time.perf_counter()
    torch.manual_seed(run.seed)
    model = Next().to(device)
    x, y = (t.to(device) for t in rows("train"))
    base = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=0.9)
    optimizer = MicroBatchSAM(base, model, rho=run.rho) if run.m else base
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps)
    for chosen_rows in itertools.islice(batches(run.seed), run.steps):
        shards = chosen_rows.to(device, non_blocking=True).chunk(max(run.m, 1))
        closures = [lambda i=i: F.cross_entropy(model(x[i]), y[i]) for i in shards]
        optimizer.zero_grad()
        if run.m:
            optimizer.step(closures)  # type: ignore[arg-type]
        else:
            closures[0]().backward()
            optimizer.step()
        schedule.step()
    run.rows = run.steps * BATCH * (2 if run.m else 1)
    with torch.no_grad():
        run.train_loss = F.cross_entropy(model(x), y).item()
        run.validation, run.test = (accuracy(model, part, device) for part in ("validation", "test"))
    run.lambda_max, run.residual = lambda_max(lambda: F.cross_entropy(model(x), y), list(model.parameters()))
    run.seconds = round(time.perf_counter() - begun, 1)
    return run


def batches(seed: int) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(ROWS, generator=draw).split(BATCH)


def accuracy(model: nn.Module, part: str, device: torch.device) -> float:
    x, y = (t.to(device) for t in rows(part))
    return (model(x).argmax(-1) == y).double().mean().item()


def lambda_max(
    loss: Callable[[], Tensor], params: Sequence[Tensor], steps: int = 40, tolerance: float = 1e-3
) -> tuple[float, float]:
    """The largest eigenvalue of the Hessian of a loss, by Lanczos' method with full orthogonalization.

    Returns: λ, and the residual ‖Hv − λv‖ / |λ| of its Ritz vector: there is an eigenvalue within that share of λ.
    """
    grads = torch.autograd.grad(loss(), params, create_graph=True)
    flat = torch.cat([g.flatten() for g in grads])
    draw = torch.Generator().manual_seed(0)
    v = torch.randn(flat.numel(), generator=draw, dtype=flat.dtype).to(flat.device)
    basis, diagonal, below = [v / v.norm()], [], []
    value, residual = 0.0, float("inf")
    for _ in range(min(steps, flat.numel())):
        product = torch.autograd.grad(flat, params, basis[-1], retain_graph=True)
        w = torch.cat([t.flatten() for t in product])
        diagonal.append(float(w @ basis[-1]))
        for _ in range(2):  # twice is enough
            for q in basis:
                w = w - (w @ q) * q
        below.append(float(w.norm()))
        matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        matrix += torch.diag(torch.tensor(below[:-1], dtype=torch.float64), -1)
        values, vectors = torch.linalg.eigh(matrix)  # eigh reads only the lower triangle
        value = float(values[-1])
        residual = below[-1] * abs(float(vectors[-1, -1])) / max(abs(value), 1e-30)
        if residual < tolerance or below[-1] < 1e-12:
            break
        basis.append(w / below[-1])
    return value, residual


def plan(seeds: int, steps: int) -> list[list[Run]]:
    """The runs in two stages: the second one's learning rate is chosen in the first."""
    plain = [
        Run(name, m, 0.0, lr, steps * times, seed)
        for name, m, times in METHODS
        if not m
        for lr in LEARNING_RATES
        for seed in range(seeds)
    ]
    perturbed = [
        Run(name, m, rho, 0.0, steps * times, seed)
        for name, m, times in reversed(METHODS)  # the long ones first
        if m
        for rho in RHOS
        for seed in range(seeds)
    ]
    return [plain, perturbed]


def attempt(run: Run, device: str) -> Run:
    """`train`, or a row with the reason why the run failed."""
    try:
        return train(run, torch.device(device))
    except Exception as error:
        run.status, run.reason = "failed", " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return run


def finished(runs: list[Run], device: str, jobs: int) -> Iterator[Run]:
    """Each run when it has finished; several GPUs take turns."""
    count = torch.cuda.device_count() if device == "cuda" else 0
    devices = [f"cuda:{i}" for i in range(count)] or [device]
    if jobs == 1:
        torch.set_num_threads(1)
        yield from (attempt(run, devices[0]) for run in runs)
        return
    context = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
    with concurrent.futures.ProcessPoolExecutor(jobs, context, torch.set_num_threads, (1,)) as pool:
        waiting = [pool.submit(attempt, run, devices[i % len(devices)]) for i, run in enumerate(runs)]
        yield from (future.result() for future in concurrent.futures.as_completed(waiting))


def study(options: argparse.Namespace) -> int:
    device = torch.device(options.device)
    empty = report.result("sam", [], device=device)
    path = options.output / report.file_name(empty)
    done = kept(path, empty)
    stages = plan(options.seeds, options.steps)
    wanted = 0
    for stage in stages:
        if stage is stages[1]:
            plain = [run.to_dict() for run in done if run.method == "SGD" and run.status == "ok"]
            for run in stage:
                run.lr = chosen(plain)["SGD"][0]
        wanted += len(stage)
        there = {key(run) for run in done}
        for run in finished([run for run in stage if key(run) not in there], options.device, options.jobs):
            done.append(run)
            report.save(path, report.result("sam", done, device=device))
            what = run.reason or f"test {run.test:.4f}, λ max {run.lambda_max:.2f}"
            print(
                f"{run.method} lr {run.lr:g} rho {run.rho:g} seed {run.seed}: {what}, {run.seconds:.0f} s", flush=True
            )
    ran = [run.to_dict() for run in done]
    print(table(ran))
    print(verdict(ran))
    return 0 if sum(run.status == "ok" for run in done) >= wanted else 1


def key(run: Run) -> tuple[Any, ...]:
    return run.method, run.rho, run.lr, run.steps, run.seed


def kept(path: Path, empty: dict[str, Any]) -> list[Run]:
    """The runs that a file of this device and these versions has; those that failed are tried again."""
    if not path.exists():
        return []
    content = report.load(path)
    if content["environment"]["packages"] != empty["environment"]["packages"]:
        raise SystemExit(f"{path} is of other versions: move it away, or choose another --output")
    return [Run(**row) for row in content["rows"] if row["status"] == "ok"]


# --------------------------------------------------------------------------------------------------------------- cost


class Residual(nn.Module):
    """A basic block of ResNet-18."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(narrow, wide, 3, stride, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(wide, wide, 3, 1, 1, bias=False), nn.BatchNorm2d(wide))
        short = nn.Sequential(nn.Conv2d(narrow, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))
        self.short: nn.Module = nn.Identity() if (narrow, stride) == (wide, 1) else short

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.short(x))


def resnet(tiny: bool, device: torch.device) -> tuple[nn.Module, Callable[[int], Any], Any]:
    """ResNet-18 on random pictures, SGD with momentum."""
    widths, size = ((8, 16), 16) if tiny else ((64, 128, 256, 512), 160)
    blocks: list[nn.Module] = [nn.Conv2d(3, widths[0], 7, 2, 3, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    for i, wide in enumerate(widths):
        blocks += [Residual(widths[max(i - 1, 0)], wide, 1 + (i > 0)), Residual(wide, wide, 1)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1000))
    model = model.to(device, memory_format=torch.channels_last)

    def draw(count: int) -> Any:
        x = torch.randn(count, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
        return x, torch.randint(1000, (count,), device=device)

    return model, draw, functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


def llama(tiny: bool, device: torch.device) -> tuple[nn.Module, Callable[[int], Any], Any]:
    """110 million parameters, sequences of 1024 random tokens, AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    if tiny:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    letters, length = (96, 16) if tiny else (32000, 1024)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=letters, tie_word_embeddings=True, **sizes)).to(device)

    def draw(count: int) -> Any:
        return torch.randint(letters, (count, length), device=device)

    return model, draw, functools.partial(torch.optim.AdamW, lr=1e-5, fused=True)


MODELS = {"llama-110m": (llama, 16), "resnet-18": (resnet, 256)}


def loss_of(model: nn.Module, rows: Any) -> Tensor:
    kind = next(model.parameters()).device.type
    with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
        if isinstance(rows, tuple):
            return F.cross_entropy(model(rows[0]).float(), rows[1])
        return model(input_ids=rows, labels=rows).loss


def measure(row: Cost, tiny: bool, steps: int, device: torch.device) -> Cost:
    torch.manual_seed(0)
    make, _ = MODELS[row.model]
    model, draw, optimizer_of = make(tiny, device)
    row.parameters = sum(p.numel() for p in model.parameters())
    model = wrapped(model, row.parallel, device)
    base = optimizer_of(model.parameters())
    sam = MicroBatchSAM(base, model, rho=0.05)
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    shards = [draw(row.batch // row.shards) for _ in range(row.shards)]
    last = row.shards - 1

    def held(i: int) -> Any:
        ddp = isinstance(model, nn.parallel.DistributedDataParallel)
        return model.no_sync() if ddp and i < last else contextlib.nullcontext()

    def plain() -> None:
        for i, rows in enumerate(shards):
            with held(i):
                (loss_of(model, rows) / row.shards).backward()
        base.step()
        base.zero_grad()

    def perturbed() -> None:
        for i, rows in enumerate(shards):
            with held(i):
                sam.accumulate(lambda rows=rows: loss_of(model, rows), weight=1 / row.shards)
        sam.step()
        sam.zero_grad()

    compare(row, model, sam, shards[0])
    times: dict[str, list[float]] = {"base": [], "sam": []}
    for i in range(steps + 3):
        for name, step in (("base", plain), ("sam", perturbed)):
            ms = timed(step, device)
            if i >= 3:
                times[name].append(ms)
    for name, step in (("base", plain), ("sam", perturbed)):
        setattr(row, f"{name}_ms", statistics.median(times[name]))
        low, high = min(times[name]), max(times[name])
        setattr(row, f"{name}_range", 50 * (high - low) / statistics.median(times[name]))
        setattr(row, f"{name}_gib", peak_gib(step, device))
    row.steps_ms = {name: [round(ms, 3) for ms in values] for name, values in times.items()}
    row.ratio = row.sam_ms / row.base_ms  # type: ignore[operator]
    if not row.parallel:
        alone(row, list(model.parameters()), device)
    return row


def wrapped(model: nn.Module, parallel: str, device: torch.device) -> nn.Module:
    if parallel == "DDP":
        ids = [device.index] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    if parallel:
        from torch.distributed.fsdp import fully_shard

        shape = tuple(int(n) for n in parallel.split()[1].split("×"))
        mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def local(tensors: Sequence[Any]) -> list[Tensor]:
    return [t.to_local() if hasattr(t, "to_local") else t.detach() for t in tensors]


def compare(row: Cost, model: nn.Module, sam: MicroBatchSAM, rows: Any) -> None:
    """The weights' bits; and, where no other rank has a part in it, the gradient, against weights moved by hand."""
    params = list(model.parameters())
    before = [p.clone() for p in local(params)]
    buffers = [b.clone() for b in model.buffers()]

    def back() -> None:
        for b, old in zip(model.buffers(), buffers, strict=True):
            b.copy_(old)

    sam.accumulate(lambda: loss_of(model, rows))
    row.restored = all(torch.equal(p, old) for p, old in zip(local(params), before, strict=True))
    ours = [g.clone() for g in local([p.grad for p in params])]
    sam.zero_grad()
    if not row.parallel:
        back()
        loss_of(model, rows).backward()
        own = [p.grad.clone() for p in params]  # type: ignore[union-attr]
        norm = torch.stack([g.double().norm() for g in own]).norm()
        sam.zero_grad()
        back()
        with torch.no_grad():
            for p, g in zip(params, own, strict=True):
                p += (0.05 / norm).float() * g
        loss_of(model, rows).backward()
        theirs = [p.grad.clone() for p in params]  # type: ignore[union-attr]
        sam.zero_grad()
        with torch.no_grad():
            for p, old in zip(params, before, strict=True):
                p.copy_(old)
        back()
        row.error, row.moved = apart(ours, theirs), apart(own, theirs)
    finite = all(bool(g.isfinite().all()) for g in ours) and any(bool(g.any()) for g in ours)
    if not row.restored or not finite or (row.error is not None and not 10 * row.error < row.moved):  # type: ignore[operator]
        row.status = "wrong"
        row.reason = f"restored {row.restored}, finite {finite}, error {row.error}, moved {row.moved}"


def apart(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """‖a − b‖ / ‖b‖"""
    squares = [((x.double() - y.double()).square().sum(), y.double().square().sum()) for x, y in zip(a, b, strict=True)]
    return float((sum(d for d, _ in squares) / sum(s for _, s in squares)) ** 0.5)


def alone(row: Cost, params: list[Tensor], device: torch.device) -> None:
    """The kernels without the passes, on gradients of random numbers."""
    mine = [p.detach().clone() for p in params]
    grads = [torch.randn_like(p) for p in mine]
    rho = [0.05] * len(mine)

    def fused() -> None:
        # After the first call the gradients' memory holds the old weights, which do as well for a timing.
        restore(mine, perturb(mine, grads, squared_norm(mine, grads), rho))

    def foreach() -> None:
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        old = torch._foreach_clone(mine) if hasattr(torch, "_foreach_clone") else [p.clone() for p in mine]
        torch._foreach_add_(mine, torch._foreach_mul(grads, 0.05 / norm))
        torch._foreach_copy_(mine, old)

    moved = sum(g.numel() * (3 * g.element_size() + 4 * p.element_size()) for p, g in zip(mine, grads, strict=True))
    source = torch.randn(max(1, moved // 8), device=device)
    target = torch.empty_like(source)
    for name, run in (("perturb", fused), ("foreach", foreach), ("floor", lambda: target.copy_(source))):
        times = [timed(run, device) for _ in range(23)][3:]
        setattr(row, f"{name}_ms", statistics.median(times))


def timed(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of the device, for all ranks from the moment when the last rank begins."""
    if dist.is_initialized():
        dist.barrier()
    if device.type != "cuda":
        begun = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begun)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end)


def peak_gib(run: Callable[[], Any], device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / 2**30


def cases(world: int, tiny: bool) -> list[Cost]:
    if world > 1:
        forms = ["DDP"] + ([f"HSDP 2×{world // 2}"] if world % 2 == 0 else [])
        return [Cost("llama-110m", form, world, 0, 4 if tiny else 16, 1) for form in forms]
    sizes = {model: 4 if tiny else batch for model, (_, batch) in MODELS.items()}
    return [Cost(model, "", 1, 0, batch, shards) for model, batch in sizes.items() for shards in (1, 4)]


def cost(options: argparse.Namespace) -> int:
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    found: list[Cost] = []
    for row in cases(world, options.tiny):
        try:
            measure(row, options.tiny, options.timed, device)
        except Exception as error:
            if world > 1:
                raise  # the other ranks wait for this one
            row.status, row.reason = "failed", " ".join(f"{type(error).__name__}: {error}".split())[:300]
        found.append(row)
        if rank == 0:
            content = report.result("sam-cost", found, device=device)
            name = "sam-cost" if world == 1 else f"sam-cost-{world}gpus"
            report.save(options.output / report.file_name(content, name), content)
            print(report.to_text({**content, "rows": [row.to_dict()]}).split("\n", 1)[1], flush=True)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        over = [f"{r.model} {r.parallel} {r.shards}: {r.ratio:.3f}" for r in found if r.ratio and r.ratio > BAR]
        print(f"above {BAR} times the plain step: {', '.join(over) or 'none'}")
    return 0 if all(row.status == "ok" for row in found) else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", required=True, type=Path, help="folder for the result file; a begun study goes on")
    parser.add_argument("--cost", action="store_true", help="time steps, in place of the study")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes of the study")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each setting")
    parser.add_argument("--steps", type=int, default=600, help="of a run")
    parser.add_argument("--timed", type=int, default=51, help="timed steps, of each kind in turn")
    parser.add_argument("--tiny", action="store_true", help="small models for --cost, where there is no GPU")
    options = parser.parse_args(arguments)
    return cost(options) if options.cost else study(options)


if __name__ == "__main__":
    sys.exit(main())
