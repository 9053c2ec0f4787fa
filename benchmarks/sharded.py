"""A training step of a model that is sharded over several devices with FSDP2, as one rank of it runs it.

One group for every decoder layer and one for the rest, parameters and reductions in the weights' dtype, gradients
averaged over the ranks. Each rank has tokens of its own; all have equally many that count, so the mean of the ranks'
mean losses is the mean over all tokens. A model is built whole on every device before it is sharded: the weights are
the same whatever the number of ranks, and what that takes is over when memory is counted.
"""

from __future__ import annotations

import datetime
import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness.training import WARMUP_STEPS, RunResult, Trainer, peak_gib, synchronize


@dataclass
class Member:
    """Which rank a process is, and where the ranks of this run meet. prefix: tells it from others in the same store."""

    rank: int
    world: int
    host: str
    port: int
    prefix: str

    def join(self, device: torch.device) -> None:
        limit = datetime.timedelta(seconds=120)
        store = dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=limit)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(self.prefix, store),
            rank=self.rank,
            world_size=self.world,
            timeout=limit,
            device_id=device if device.type == "cuda" else None,
        )


def rows_of(row: RunResult, device: torch.device, overrides: dict[str, Any], **options: Any) -> list[RunResult]:
    """The task of harness.processes.run_in_process."""
    options.pop("done")
    return [train_sharded(row, device, overrides=overrides, **options)]


def train_sharded(
    row: RunResult,
    device: torch.device,
    steps: int,
    overrides: dict[str, Any],
    member: dict[str, Any],
    say: Callable[[str], None] = print,
) -> RunResult:
    """Fill one row by training for WARMUP_STEPS + steps; row.batch is that of all ranks together.

    Times and peak memory are the largest of any rank, losses their mean.
    """
    here = Member(**member)
    here.join(device)
    trainer = Trainer(row, device, overrides, prepare=lambda model: shard(model, device, here.world))
    trainer.draw.manual_seed(1 + here.rank)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    losses, times = [], []
    for step in range(WARMUP_STEPS + steps):
        inputs = trainer.batch(row.batch // here.world, row.seq)
        dist.barrier()
        loss, ms = trainer.timed_step(inputs)
        losses.append(loss)
        times.append(ms)
        say(f"{row.side}: step {step + 1} of {WARMUP_STEPS + steps}, loss {loss:.5f}, {ms:.0f} ms")
    synchronize(device)
    peak = peak_gib(device)
    row.losses = [total / here.world for total in _over_ranks(losses, dist.ReduceOp.SUM, device)]
    row.steps_ms = _over_ranks(times, dist.ReduceOp.MAX, device)[WARMUP_STEPS:]
    row.peak_gib = None if peak is None else _over_ranks([peak], dist.ReduceOp.MAX, device)[0]
    row.step_ms = statistics.median(row.steps_ms)
    row.tokens_per_s = 1e3 * row.batch * row.seq / row.step_ms
    dist.destroy_process_group()
    return row


def shard(model: Any, device: torch.device, world: int) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh(device.type, (world,))
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _over_ranks(values: Sequence[float], operation: Any, device: torch.device) -> list[float]:
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, operation)
    return [float(value) for value in found]
