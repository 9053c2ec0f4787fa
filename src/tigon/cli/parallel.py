"""`--parallel`: how a run's model is spread over its processes, and the Trainer for a model that is spread already.

ddp     each process has the whole model
fsdp    weights, gradients and optimizer sharded over all processes (FSDP2, a group for each layer)
hsdp    sharded inside a host or a group of N neighbours, with a copy in each such group
hpz     as fsdp, with a second shard of the weights inside a host or N neighbours (tigon.training.hpz)
tp=N    products split over N neighbours, and each part of the weights sharded over such groups
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

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"  # the Trainer's file names
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class Layout:
    """How a model is spread.

    kind: of --parallel. group: the number of neighbours that work together, if the kind has groups. copies: how many
    processes get the same batch.
    """

    kind: str
    group: int
    processes: int

    @staticmethod
    def of(options: TrainOptions, processes: int) -> Layout:
        """The Layout of these options. Raises: Problem if the processes cannot be divided into groups of that size."""
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
        """Whether `spread` shards the model; the Trainer itself spreads it for DDP and DeepSpeed."""
        return self.kind not in ("ddp", "zero3")

    @property
    def copies(self) -> int:
        return self.group if self.kind == "tp" else 1

    @property
    def readers(self) -> int:
        """How many different batches the processes read at a time."""
        return self.processes // self.copies

    def check(self, model: Any) -> None:
        """Raise a Problem for a model that cannot be spread like this, before anything is written, deleted or sent."""
        if self.kind == "tp":
            from tigon.training.tp import check_heads, tensor_parallel_plan

            try:
                tensor_parallel_plan(model)
                check_heads(model, self.group)
            except ValueError as error:
                raise Problem(f"--parallel tp={self.group}: {str(error).partition(': ')[2]}") from error

    def spread(self, model: Any, device: torch.device, precision: torch.dtype | None) -> DeviceMesh:
        """Shard a model in place. precision: the products' dtype, if it is not the weights'."""
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
            from tigon.training.tp import tensor_parallel

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
    from tigon.training.hpz import apply_hpz

    try:
        apply_hpz(model, mesh, group, units=_layers(model), **options)
    except (RuntimeError, ValueError) as error:
        raise Problem(f"--parallel hpz={group}: {error}") from error
    return mesh


def _layers(model: Any) -> list[nn.Module]:
    """The model's layers: the modules that transformers says must not be split."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def deepspeed_config(clip: float) -> dict[str, Any]:
    """The DeepSpeed settings of --parallel zero3; the Trainer fills in the rest."""
    return {
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "gradient_clipping": clip, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"},
    }  # fmt: skip


class ZeroTrainer(CheckpointedTrainer):
    """Trains a model that DeepSpeed spreads. A resume needs as many processes, except to read the weights."""

    def whole_weights(self) -> Any:
        """The whole weights, in the engine's dtype, on the first process; the others must call too, for nothing.

        The model's own parameters will not do: on every process all but the smallest are empty.
        """
        return self.accelerator.get_state_dict(self.deepspeed)


class SpreadTrainer(CheckpointedTrainer):
    """Trains a model that is spread already. Its checkpoints are whole, like a single process's."""

    def __init__(self, *args: Any, layout: Layout, mesh: DeviceMesh, **kwargs: Any) -> None:
        self.layout, self.mesh, self.copies = layout, mesh, layout.copies
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        accelerator.prepare_model = lambda model, *_, **__: model  # the original would wrap the model in DDP
        accelerator.clip_grad_norm_ = lambda parameters, limit, norm_type=2: clip(list(parameters), float(limit))
        if self.layout.copies > 1:
            accelerator.state.device_mesh = self.mesh  # Accelerate distributes batches by it

    def get_tp_size(self) -> int:
        return self.layout.copies

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        count = super()._get_num_items_in_batch(*args, **kwargs)
        return count if count is None else count * too_few(Trainer, self.layout.copies)

    def whole_weights(self) -> dict[str, Any]:
        """The whole weights on the first process; the others must call too, for nothing. Tied weights have one name.

        With adapters only what is trained: the frozen model is not gathered.
        """
        model: Any = self.model
        if _frozen(model):
            names = {name for name, p in model.named_parameters() if p.requires_grad}
        else:
            names = {name for named in (model.named_parameters(), model.named_buffers()) for name, _ in named}
        return {name: t for name, t in get_model_state_dict(model, options=_whole(model)).items() if name in names}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        weights = self.whole_weights()
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer: Any = self.optimizer
        options = _whole(self.model)
        state = get_optimizer_state_dict(self.model, optimizer.optimizer, options=options)  # type: ignore[arg-type]
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)  # type: ignore[union-attr]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        optimizer: Any = self.optimizer
        state = torch.load(Path(checkpoint) / OPTIMIZER, map_location="cpu", weights_only=True, mmap=True)
        options = dataclasses.replace(_whole(self.model), cpu_offload=False)
        set_optimizer_state_dict(self.model, optimizer.optimizer, state, options=options)  # type: ignore[arg-type]
        scheduler = torch.load(Path(checkpoint) / SCHEDULER, weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)  # type: ignore[union-attr]

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the weights were loaded before they were spread."""


def _frozen(model: Any) -> bool:
    return not all(p.requires_grad for p in model.parameters())


def _whole(model: Any) -> StateDictOptions:
    return dataclasses.replace(WHOLE, ignore_frozen_params=_frozen(model))


def too_few(trainer: type, copies: int) -> float:
    """The factor by which this version of transformers counts too few targets when several processes share a batch.

    The Trainer counts all processes' targets, and multiplies the loss by the number of processes. Some versions leave
    out the copies of a batch in both numbers, some in neither, and some in only one.
    """
    left_out = [
        "get_tp_size" in method.__code__.co_names
        for method in (trainer._get_num_items_in_batch, trainer.compute_loss)  # type: ignore[attr-defined]
    ]
    return float(copies) ** (left_out[0] - left_out[1])


def clip(parameters: list[nn.Parameter], limit: float) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_ for gradients on several meshes, as split and whole parameters have them."""
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
