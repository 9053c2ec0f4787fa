"""Tensor parallelism for models that transformers has a plan for: heads, gated units and vocabulary over several GPUs.

    q, k, v, gate, up     rows of the weight on each rank, x replicated            no communication
    o, down               columns of the weight, the partial products are summed   all-reduce
    embedding, head       words on each rank                                       all-reduce; logits are gathered

With sequence parallelism each rank runs the operations in between (norms, residual sums) on a part of each sequence:
the all-reduce becomes a reduce-scatter after a product and an all-gather before the next, and activations are split
too.

Sources: Megatron-LM, https://arxiv.org/abs/1909.08053; sequence parallelism, https://arxiv.org/abs/2205.05198.
Implemented by `torch.distributed.tensor.parallel.parallelize_module`.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

__all__ = ["tensor_parallel", "tensor_parallel_plan"]

# transformers' names for the layer styles.
COLUMNS, ROWS, HEAD = ("colwise",), ("rowwise",), ("colwise_gather_output", "colwise_rep")
# A per-head norm, local to each rank.
HEAD_NORM = ("replicated_with_grad_allreduce",)
EMBEDDING = ("embedding_rowwise", "embedding_colwise")


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> nn.Module:
    """Shard a transformers model over a mesh's ranks, in place, before or after `tigon.fuse`.

    Args:
        model: the same weights on every rank, on the mesh's device.
        mesh: one-dimensional. With FSDP2 on top, `mesh["tp"]` from a 2-d mesh, and `fully_shard` afterwards.
        sequence_parallel: norms and residual sums run on a part of each sequence.
    Returns: the model, whose sharded weights are DTensors. Every rank must get the same batch.
    Raises: ValueError where the mesh has several dimensions, a head count is not divisible by the mesh size, or
        `tensor_parallel_plan` has no plan.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"tensor_parallel: mesh must have one dimension, got {mesh.ndim}; if the mesh has several, pass mesh['tp']."
        )
    plan = tensor_parallel_plan(model, sequence_parallel=sequence_parallel)
    check_heads(model, mesh.size())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    tied = head is not None and head.weight is embedding.weight
    parallelize_module(model, mesh, plan)
    if tied:  # each has its own shard for the same words
        head.weight = embedding.weight
    return model


def check_heads(model: nn.Module, ranks: int) -> None:
    """Raise a ValueError if a head count is not divisible by the rank count."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None) or config.num_attention_heads
        if heads % ranks:
            raise ValueError(f"tensor_parallel: {name} must be a multiple of the mesh's {ranks} ranks, got {heads}.")


def tensor_parallel_plan(model: nn.Module, *, sequence_parallel: bool = False) -> dict[str, ParallelStyle]:
    """The plan for `parallelize_module`: transformers' own for the model's products, plus embedding and norms.

    Args:
        model: a transformers model with its own plan.
        sequence_parallel: shard the norms and residual sums between the products over the sequence.
    Returns: a style for each module by name.
    Raises: ValueError for a model without a plan, or with a style that has no counterpart here (experts, latent
        attention), and for sequence parallelism in a model whose layers are not structured like Llama's.
    """
    known = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    known = {name.removeprefix("model."): style for name, style in (known or {}).items()}
    if not known:
        raise ValueError(f"tensor_parallel_plan: transformers has no plan for {type(model).__name__}.")
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    plan: dict[str, ParallelStyle] = {}
    for name, style in known.items():
        if style in EMBEDDING:
            continue  # handled below, for all models
        for module in _matching(model, prefix, name):
            plan[module] = _style(type(model).__name__, name, style, sequence_parallel)
    outside = Shard(1) if sequence_parallel else Replicate()
    # Between modules hidden states are DTensors with whole sequences, so that the model counts its positions right.
    embedding = _find_name(model, model.get_input_embeddings())  # type: ignore[operator]
    plan[embedding] = RowwiseParallel(
        input_layouts=Replicate(), output_layouts=outside, use_local_output=not sequence_parallel
    )
    if sequence_parallel:
        _add_sequence(model, prefix, plan)
    return plan


def _style(model: str, name: str, style: str, sequence: bool) -> ParallelStyle:
    if style in COLUMNS:
        return ColwiseParallel()
    if style in ROWS:
        return RowwiseParallel(output_layouts=Shard(1), use_local_output=False) if sequence else RowwiseParallel()
    if style in HEAD:
        return ColwiseParallel(input_layouts=Shard(1) if sequence else Replicate(), output_layouts=Replicate())
    if style in HEAD_NORM:
        return SequenceParallel(sequence_dim=2, use_local_output=True)  # in (B, T, H, head_dim) the heads are split
    raise ValueError(
        f"tensor_parallel_plan: {model} needs the style {style!r} for {name}, which Tigon does not support."
    )


def _add_sequence(model: Any, prefix: str, plan: dict[str, ParallelStyle]) -> None:
    layers = _matching(model, prefix, "layers.*")
    parts = {name: dict(model.get_submodule(name).named_children()) for name in layers}
    norms = {name for names in parts.values() for name in names if "norm" in name}
    for layer, children in parts.items():
        rest = set(children) - norms - {"self_attn", "mlp"}
        if rest or not {"self_attn", "mlp"} <= set(children):
            raise ValueError(
                f"tensor_parallel_plan: sequence parallelism supports layers with self_attn, mlp and norms; {layer} of "
                f"{type(model).__name__} has {', '.join(sorted(children))}."
            )
        plan |= {f"{layer}.{norm}": SequenceParallel() for norm in children if norm in norms}
        plan[f"{layer}.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        plan[f"{layer}.mlp"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    for name in _matching(model, prefix, "norm"):
        plan[name] = SequenceParallel()


def _matching(model: nn.Module, prefix: str, pattern: str) -> list[str]:
    """Module names matching a pattern; transformers' "*" stands for one name component."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    names = (name for name, _ in model.named_modules())
    return [name for name in names if expression.fullmatch(name.removeprefix(prefix))]


def _find_name(model: nn.Module, part: nn.Module) -> str:
    name: str = next(name for name, module in model.named_modules() if module is part)
    return name
