"""How a run's model is spread over its processes, and the Trainer that lets it stay so: `--parallel`.

ddp     each process has the whole model
fsdp    weights, gradients and optimizer sharded over all (FSDP2, a group for each layer)
hsdp    sharded inside of a host or of N neighbours, with copies over the others
hpz     as fsdp, with a second shard of the weights inside of a host or of N neighbours (tigon.distributed.hpz)
tp=N    products split over N neighbours, and what is left of the weights sharded over the others
zero3   DeepSpeed's ZeRO-3
"""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import Trainer

from tigon.cli.options import TrainOptions, parallel_of
from tigon.cli.problem import Problem, needs
from tigon.cli.trainer import CheckpointedTrainer

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"  # the Trainer's names
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class Layout:
    """kind: of --parallel. group: neighbours that share something, by the kind. copies: of each batch."""

    kind: str
    group: int
    processes: int

    @staticmethod
    def of(options: TrainOptions, processes: int) -> Layout:
        """Raises: Problem for a group that the processes cannot be divided into."""
        kind, group = parallel_of(options.parallel)
        if kind != "ddp" and processes == 1:
            raise Problem(
                f"--parallel {options.parallel} is for several processes, got one; start it by "
                "torchrun --nproc-per-node N -m tigon train …"
            )
        if kind in ("hsdp", "hpz") and group is None:
            group = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
        group = group or 1
        if processes % group:
            raise Problem(f"--parallel {options.parallel}: groups of {group} do not divide the {processes} processes")
        if kind == "hpz" and group == processes:
            raise Problem(
                f"--parallel {options.parallel}: a group must not have all {processes} processes; on one host fsdp "
                "does the same"
            )
        if kind == "zero3":
            needs("--parallel zero3", "deepspeed", "deepspeed")
        return Layout(kind, group, processes)

    @property
    def sharded(self) -> bool:
        """Whether `spread` has anything to do; DDP and DeepSpeed are the Trainer's own."""
        return self.kind not in ("ddp", "zero3")

    @property
    def copies(self) -> int:
        return self.group if self.kind == "tp" else 1

    @property
    def readers(self) -> int:
        """How many processes have a batch of their own."""
        return self.processes // self.copies

    def check(self, model: Any) -> None:
        """Raises: Problem for a model that cannot be spread so. Before anything is written, deleted or sent."""
        if self.kind == "tp":
            from tigon.distributed.tp import check_heads, tensor_parallel_plan

            try:
                tensor_parallel_plan(model)
                check_heads(model, self.group)
            except ValueError as error:
                raise Problem(f"--parallel tp={self.group}: {str(error).partition(': ')[2]}") from error

    def spread(self, model: Any, device: torch.device, precision: torch.dtype | None) -> DeviceMesh:
        """Shard a model in place. precision: of products, where it is not the weights'."""
        model.to(device)
        across = self.processes // self.group
        policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=None if precision is None else torch.float32)
        options: dict[str, Any] = {"mp_policy": policy}
        mesh = init_device_mesh(device.type, (self.processes,), mesh_dim_names=("dp_shard",))
        if self.kind == "hpz":
            return _spread_hpz(model, mesh, self.group, options)
        if self.kind == "hsdp":
            mesh = init_device_mesh(device.type, (across, self.group), mesh_dim_names=("dp_replicate", "dp_shard"))
            options["mesh"] = mesh
        elif self.kind == "tp":
            from tigon.distributed.tp import tensor_parallel

            mesh = init_device_mesh(device.type, (across, self.group), mesh_dim_names=("dp_shard", "tp"))
            tensor_parallel(model, mesh["tp"])
            options["mesh"] = mesh["dp_shard"]
        else:
            options["mesh"] = mesh
        for layer in _layers(model):
            fully_shard(layer, **options)
        fully_shard(model, **options)
        return mesh


def _spread_hpz(model: nn.Module, mesh: DeviceMesh, group: int, options: dict[str, Any]) -> DeviceMesh:
    from tigon.distributed.hpz import apply_hpz

    try:
        apply_hpz(model, mesh, group, units=_layers(model), **options)
    except (RuntimeError, ValueError) as error:
        raise Problem(f"--parallel hpz={group}: {error}") from error
    return mesh


def _layers(model: Any) -> list[nn.Module]:
    """The modules that transformers says are not to be split: the layers."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def deepspeed_config(clip: float) -> dict[str, Any]:
    """What --parallel zero3 asks of DeepSpeed; the rest is the Trainer's."""
    return {
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "gradient_clipping": clip, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"},
    }  # fmt: skip


class ZeroTrainer(CheckpointedTrainer):
    """Trains a model that DeepSpeed spreads; checkpoints are of as many processes, but for their weights."""

    def whole_weights(self) -> Any:
        """On the first process, in the engine's dtype; on the others, which have to ask, too, nothing of use.

        The model's own are empty but for the smallest, here as well as on the others.
        """
        return self.accelerator.get_state_dict(self.deepspeed)


class SpreadTrainer(CheckpointedTrainer):
    """Trains a model that is spread already. Its checkpoints are whole, as those of one process."""

    def __init__(self, *args: Any, layout: Layout, mesh: DeviceMesh, **kwargs: Any) -> None:
        self.layout, self.mesh, self.copies = layout, mesh, layout.copies
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        accelerator.prepare_model = lambda model, *_, **__: model  # it would put DDP around it
        accelerator.clip_grad_norm_ = lambda parameters, limit, norm_type=2: clip(list(parameters), float(limit))
        if self.layout.copies > 1:
            accelerator.state.device_mesh = self.mesh  # by which batches are dealt out

    def get_tp_size(self) -> int:
        return self.layout.copies

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        count = super()._get_num_items_in_batch(*args, **kwargs)
        return count if count is None else count * too_few(Trainer, self.layout.copies)

    def whole_weights(self) -> dict[str, Any]:
        """On the first process; empty on the others, which have to ask, too. Of tied weights the first name alone."""
        model: Any = self.model
        names = {name for named in (model.named_parameters(), model.named_buffers()) for name, _ in named}
        return {name: t for name, t in get_model_state_dict(model, options=WHOLE).items() if name in names}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        weights = self.whole_weights()
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer: Any = self.optimizer
        state = get_optimizer_state_dict(self.model, optimizer.optimizer, options=WHOLE)  # type: ignore[arg-type]
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)  # type: ignore[union-attr]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        optimizer: Any = self.optimizer
        state = torch.load(Path(checkpoint) / OPTIMIZER, map_location="cpu", weights_only=True, mmap=True)
        options = dataclasses.replace(WHOLE, cpu_offload=False)
        set_optimizer_state_dict(self.model, optimizer.optimizer, state, options=options)  # type: ignore[arg-type]
        scheduler = torch.load(Path(checkpoint) / SCHEDULER, weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)  # type: ignore[union-attr]

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Its weights were loaded before they were spread."""


def too_few(trainer: type, copies: int) -> float:
    """By how much a version's number of targets is too small, where each batch is there several times.

    All processes' targets are counted, and the loss is multiplied by the number of processes. Some versions leave out
    the copies in both, some in none, and some in one of them.
    """
    left_out = [
        "get_tp_size" in method.__code__.co_names
        for method in (trainer._get_num_items_in_batch, trainer.compute_loss)  # type: ignore[attr-defined]
    ]
    return float(copies) ** (left_out[0] - left_out[1])


def clip(parameters: list[nn.Parameter], limit: float) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_, also of gradients on several meshes: what is split, and what is not."""
    on: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for p in parameters:
        if p.grad is not None:
            on[p.grad.device_mesh if isinstance(p.grad, DTensor) else None].append(p)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in some if p.grad is not None]) for some in on.values()]
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms])
    )
    if limit != float("inf"):
        for some in on.values():
            torch.nn.utils.clip_grads_with_norm_(some, limit, total)
    return total
