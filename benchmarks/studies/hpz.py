"""hpZ beside plain FSDP2: the bits of a training, bytes over the links, and the time of a step.

    python -m torch.distributed.run --standalone --nproc-per-node 4 benchmarks/studies/hpz.py --output results

A Llama of four layers, fp32 weights gathered in bf16, gradients of all micro-steps reduced once, in fp32. The GPUs of
one host are taken for nodes of `--group-size`. What would cross from one node to another is counted, and its time can
be emulated (`--links`, GB/s of each GPU to other nodes): the stream of each gather and of each reduction over all ranks
first spins for bytes / link, bytes being what a GPU gets at the least, its part of what its node lacks. `own`: the
host's own links, nothing emulated, and a plain side that is FSDP2 untouched.

Sides: fsdp2; event, `apply_hpz` as it is; and without its check: unchecked; host, in which the device is synchronised
after every copy into a second shard, as https://arxiv.org/abs/2407.01614 does; none, in which nothing waits for the
copy, as before that paper: its time alone is of interest. Steps of the sides alternate. Bits are compared with
deterministic kernels and two sequences in a micro-step, times are taken with the fastest and `--batch`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

# Set before CUDA starts: cuBLAS reads the variable once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from harness import report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from tigon.training import apply_hpz, count_traffic, hpz
from tigon.training.hpz import gather as gather_module
from tigon.training.hpz.gather import NodeGather

SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8,
         "vocab_size": 32000}  # fmt: skip
SIDES = ("fsdp2", "event", "unchecked", "host", "none")
LAYERS = 4
WARMUP = 3
BITS_BATCH = 2  # sequences of a rank where bits are compared


@dataclass
class Row:
    """One side over one kind of link. MiB are those that one GPU gets by gathers in one step.

    same_bits: losses, gradients and weights are those of fsdp2 after `bits_steps` steps, None where not compared.
    """

    model: str
    side: str
    batch: int
    seq: int
    micro_steps: int
    gpus: int
    group_size: int
    link_gbps: float | None
    step_ms: float | None = None
    steps_ms: list[float] = field(default_factory=list)
    plain_ms: float | None = None
    none_ms: float | None = None
    forward_all_mib: float = 0.0
    backward_all_mib: float = 0.0
    node_mib: float = 0.0
    shards_mib: float = 0.0
    bits_steps: int = 0
    same_bits: bool | None = None
    status: str = "ok"
    reason: str = ""
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", required=True, type=Path, help="folder for the result file")
    parser.add_argument("--name", help="name of the result file; default: the device and hpz")
    parser.add_argument("--group-size", type=int, help="GPUs that are taken for a node; default: half of them")
    parser.add_argument("--links", default="own,50,12.5", help="GB/s to other nodes, separated by commas, or own")
    parser.add_argument("--micro-steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank in a micro-step")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=25, help="timed steps of each side, after three of warm-up")
    parser.add_argument("--bits-steps", type=int, default=50, help="steps of which the bits are compared")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    start, trial = time.monotonic(), Trial(options, device)
    trial.say(str(hpz.plan(trial.model(), trial.world, trial.node, micro_steps=options.micro_steps,
                           dtype=torch.bfloat16)))  # fmt: skip
    same = trial.same_bits()
    trial.say(f"{time.monotonic() - start:.1f} s  bits of {options.bits_steps} steps: {same}")
    rows: list[Row] = []
    for link in options.links.split(","):
        rows += trial.timed(None if link == "own" else float(link), same)
        trial.say(f"{time.monotonic() - start:.1f} s  link: {link}")
        if trial.rank == 0:
            content = report.result("hpz", rows, device=device, gpus=trial.world)
            report.save(options.output / (options.name or report.file_name(content)), content)
    if trial.rank == 0:
        print(report.to_text(content), flush=True)
    if not all(same.values()):
        raise SystemExit("hpz.py: the bits are not those of plain FSDP2.")


class Trial:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.node = options.group_size or self.world // 2
        self.mesh = init_device_mesh(device.type, (self.world,))
        self.seq = options.seq
        self.spins = cycles_per_second(device)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    # ------------------------------------------------------------------------------------------------------- training

    def model(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = SIZES
        with self.device:
            return LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, use_cache=False, **sizes)).train()

    def start(self, side: str, link: float | None) -> tuple[Any, Any, Any]:
        """A sharded model, its optimizer, and what apply_hpz gave."""
        model, handle = self.model(), None
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if side == "fsdp2":
            for layer in model.model.layers:
                fully_shard(layer, mesh=self.mesh, mp_policy=policy)
            fully_shard(model, mesh=self.mesh, mp_policy=policy)
        else:
            handle = apply_hpz(model, self.mesh, self.node, check=side == "event", mp_policy=policy)
        if link is not None:
            for unit in (*model.model.layers, model):
                unit.set_custom_reduce_scatter(SlowReduceScatter(self, link))
                if side == "fsdp2":
                    unit.set_custom_all_gather(SlowAllGather())
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), handle

    def step(self, model: Any, optimizer: Any, draw: torch.Generator, batch: int) -> torch.Tensor:
        """Losses of the micro-steps. The gradients stay until the next step sets them to None."""
        optimizer.zero_grad()
        losses = []
        for micro in range(self.options.micro_steps):
            model.set_requires_gradient_sync(micro == self.options.micro_steps - 1)
            shape = (batch, self.seq)
            ids = torch.randint(model.config.vocab_size, shape, generator=draw, device=self.device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses)

    def draw(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(1 + self.rank)

    # ----------------------------------------------------------------------------------------------------------- bits

    def same_bits(self) -> dict[str, bool]:
        """By side: whether all losses, gradients and weights are those of fsdp2.

        Deterministic algorithms also fill new memory with NaN: what is gathered before it has been copied shows. Where
        a side differs, a second fsdp2 tells whether the first one could have been repeated.
        """
        torch.use_deterministic_algorithms(True, warn_only=True)
        with sdpa_kernel(SDPBackend.MATH):  # other backends' backward passes add in any order, and warn_only lets them
            marks = {side: self.trained_bits(side) for side in ("fsdp2", "event", "host")}
            plain = marks.pop("fsdp2")
            same = {side: self.everywhere(torch.equal(x, plain)) for side, x in marks.items()}
            if not all(same.values()):
                same["fsdp2 again"] = self.everywhere(torch.equal(self.trained_bits("fsdp2"), plain))
        torch.use_deterministic_algorithms(False)
        return same

    def trained_bits(self, side: str) -> torch.Tensor:
        """Of each step fingerprints of its losses, of the gradients and of the weights."""
        model, optimizer, _ = self.start(side, None)
        draw, marks = self.draw(), []
        with self.ordered(side):
            for _ in range(self.options.bits_steps):
                losses = self.step(model, optimizer, draw, BITS_BATCH)
                gradients = fingerprint([p.grad.to_local() for p in model.parameters()])
                weights = fingerprint([p.to_local() for p in model.parameters()])
                marks.append(torch.stack([fingerprint([losses]), gradients, weights]))
        found = torch.stack(marks)
        assert len(found.unique()) == found.numel(), "fingerprints of different numbers are the same"
        self.say(f"{side}: last loss {losses[-1].item():.6f}")
        return found

    def everywhere(self, true: bool) -> bool:
        flag = torch.tensor(int(true), device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag.item())

    # ----------------------------------------------------------------------------------------------------------- time

    def timed(self, link: float | None, same: dict[str, bool]) -> list[Row]:
        options, rows = self.options, []
        trained = {side: (*self.start(side, link), self.draw()) for side in SIDES}
        times: dict[str, list[float]] = {side: [] for side in SIDES}
        for i in range(WARMUP + options.steps):
            # The order of the sides changes from round to round.
            for side in SIDES[i % len(SIDES) :] + SIDES[: i % len(SIDES)]:
                model, optimizer, _, draw = trained[side]
                with self.ordered(side), self.slow(link):
                    self.wait()
                    dist.barrier()
                    begin = time.perf_counter()
                    self.step(model, optimizer, draw, options.batch)
                    self.wait()
                    times[side].append(1e3 * (time.perf_counter() - begin))
        for side in SIDES:
            model, optimizer, handle, draw = trained[side]
            row = Row("llama", side, options.batch, self.seq, options.micro_steps, self.world, self.node, link)
            row.steps_ms = self.slowest(times[side])[WARMUP:]
            row.step_ms = statistics.median(row.steps_ms)
            row.note = "" if link is None else "the link is emulated"
            with count_traffic() as traffic, self.ordered(side):
                self.step(model, optimizer, draw, options.batch)
            everyone = tuple(range(self.world))
            of_all = {
                of: traffic.count_bytes("all_gather", ranks=everyone, backward=of == "backward") / 2**20
                for of in ("forward", "backward")
            }
            row.forward_all_mib, row.backward_all_mib = of_all["forward"], of_all["backward"]
            row.node_mib = traffic.count_bytes("all_gather") / 2**20 - sum(of_all.values())
            row.shards_mib = sum(g.nbytes for g in handle.gathers) / 2**20 if handle else 0.0
            if side in same:
                row.same_bits, row.bits_steps = same[side], options.bits_steps
            rows.append(row)
        by_side = {row.side: row.step_ms for row in rows}
        for row in rows:
            row.plain_ms, row.none_ms = by_side["fsdp2"], by_side["none"]
        return rows

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def slowest(self, values: list[float]) -> list[float]:
        found = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def ordered(self, side: str) -> Any:
        """Another order than by events: the host waits until everything has ended behind a copy; or none."""
        if side not in ("host", "none"):
            return nullcontext()
        if side == "none":
            return mock.patch.object(NodeGather, "_after_copy")

        def wait_on_host(gather: NodeGather, stream: Any) -> None:
            if stream == gather.allocating:  # behind a copy, and not before a gather of it
                self.wait()

        return mock.patch.object(NodeGather, "_after_copy", wait_on_host)

    def slow(self, link: float | None) -> Any:
        if link is None:
            return nullcontext()
        gather = gather_module._all_gather

        def slow_gather(output: torch.Tensor, x: Any, group: Any, async_op: bool) -> Any:
            self.cross(output.nbytes, group, link)
            return gather(output, x, group, async_op)

        return mock.patch.object(gather_module, "_all_gather", slow_gather)

    def cross(self, nbytes: int, group: Any, link: float) -> None:
        """Spin on the current stream for as long as a GPU's part of what crosses would take."""
        if group.size() < self.world:
            return
        n = self.node
        seconds = nbytes * (self.world - n) / (self.world * n) / (link * 1e9)
        if self.device.type == "cuda":
            torch.cuda._sleep(int(seconds * self.spins))
        else:
            time.sleep(seconds)


class SlowAllGather:
    """FSDP2's own all-gather, through the function that `Trial.slow` delays."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        return gather_module._all_gather(output_tensor, input_tensor, group, async_op)


class SlowReduceScatter(SlowAllGather):
    def __init__(self, trial: Trial, link: float) -> None:
        self.trial, self.link = trial, link

    def __call__(  # type: ignore[override]
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.trial.cross(input_tensor.nbytes, group, self.link)
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return reduce(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def fingerprint(tensors: list[torch.Tensor]) -> torch.Tensor:
    """An int64 that another bit, or the same bits elsewhere, would very likely change."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for x in tensors:
        bits = x.contiguous().view(torch.int32).flatten().to(torch.int64)
        total = total * 1_000_003 + (bits * (2 * torch.arange(bits.numel(), device=x.device) + 1)).sum()
    return total


def cycles_per_second(device: torch.device) -> float:
    """How many cycles of torch.cuda._sleep the device runs in a second."""
    if device.type != "cuda":
        return 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10_000_000)
    begin.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    torch.cuda.synchronize()
    return 1e8 / (begin.elapsed_time(end) / 1e3)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
