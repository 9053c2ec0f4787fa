"""The ways to spread one training step over several processes: one row each. And the small models that they train.

Every engine gets the same tokens, some rows of them on each rank, in micro-batches that have different numbers of
labels that count, one of them none. Its losses and gradients are those of one process that has all rows in one batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.overrides import TorchFunctionMode

import tigon
from tigon.training.tp import tensor_parallel

ROWS, TOKENS, VOCABULARY = 8, 20, 99  # 99 words are not the same number on two ranks


def llama(*, tied: bool = False) -> nn.Module:
    """Eight heads and four of keys, so that four ranks can have a part of each."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=72, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4, head_dim=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, tie_word_embeddings=tied, use_cache=False, initializer_range=0.1,
        )
    ).train()  # fmt: skip
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:  # fresh norms are all ones, under which a missing weight does not show
                p.add_(0.2 * torch.randn_like(p))
    return model


def batch(step: int) -> dict[str, Tensor]:
    """All rows of a step. Row r does not learn its first 2 r tokens, the sixth none at all."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=draw)
    labels = ids.masked_fill(torch.arange(TOKENS) < 2 * torch.arange(ROWS)[:, None], -100)
    labels[5] = -100
    return {"input_ids": ids, "labels": labels}


def targets(rows: dict[str, Tensor]) -> Tensor:
    """How many tokens the loss of a causal model is a mean over."""
    return ((rows["shift_labels"] if "shift_labels" in rows else rows["labels"][:, 1:]) != -100).sum()


def adapted(*, tied: bool = False) -> Any:
    """The same with LoRA on all linear layers but the head; B is not zero, so that A has a gradient."""
    import peft

    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    model = llama(tied=tied)
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**options)).train()  # type: ignore[arg-type]


def mixture(experts: str, *, all_chosen: bool) -> Any:
    """A small Qwen3-MoE with LoRA on attention and on stacks of five experts, which two ranks share unevenly.

    experts: "dense", or the format of frozen stacks in 4 bits. all_chosen: no rounding changes the router's choice.
    """
    import peft
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=72, moe_intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=5, mlp_only_layers=[0],
            num_experts_per_tok=5 if all_chosen else 2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, use_cache=False, initializer_range=0.1, experts_implementation="eager",
        )
    )  # fmt: skip
    options = {
        "r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }  # fmt: skip
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options)).train()  # type: ignore[arg-type]
    if experts != "dense":
        tigon.quantize_experts(adapted, experts)  # type: ignore[arg-type]
    return adapted


def base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@dataclass(frozen=True)
class Engine:
    """shard: (model, device) → what is trained. tp: how many neighbouring ranks see the same rows; True: all.
    cp: ranks have a part of each sequence each, and attention gathers keys and values. cuda: not on a CPU, where
    DeepSpeed compiles its collectives for minutes. needs: a package. adapters: how many layers with adapters run fused
    in a step; None for a model without. left: why they do not. after: whether all parts can be fused after sharding.
    experts: of a mixture with adapters on its stacks, "dense" or a format in 4 bits.
    """

    shard: Callable[[nn.Module, torch.device], nn.Module]
    worlds: tuple[int, ...] = (2,)
    micro_batches: int = 1
    tp: bool | int = False
    cp: bool = False
    cuda: bool = False
    needs: str = ""
    tied: bool = False
    checkpointing: bool = False
    autocast: bool = False
    bf16: bool = False
    adapters: int | None = None
    left: str = ""
    after: bool = True
    experts: str = ""

    def model(self) -> Any:
        if self.experts:
            return mixture(self.experts, all_chosen=self.bf16)
        return llama(tied=self.tied) if self.adapters is None else adapted(tied=self.tied)

    @property
    def gpu_worlds(self) -> tuple[int, ...]:
        """On GPUs, where processes cost less, all that the engine can do."""
        return self.worlds if 2 not in self.worlds else (2, 4)

    @property
    def steps(self) -> int:
        return 6 if self.bf16 else 2  # the error of a few numbers in bf16 is luck

    @property
    def lr(self) -> float:
        return 1e-3 if self.bf16 else 1e-2  # so small that a step's errors are its own, not those before it


# ----------------------------------------------------------------------------------------------------------- engines


def ddp(model: nn.Module, device: torch.device, **options: Any) -> nn.Module:
    ids = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids, **options)


def fsdp(
    model: Any, device: torch.device, *, layers: bool = True, head: str = "with the root",
    embedding: bool = False, reshard: bool | int | None = None, shape: tuple[int, ...] | None = None,
    units: Callable[[nn.Module], list[nn.Module]] | None = None, **policy: Any,
) -> nn.Module:  # fmt: skip
    """FSDP2, HSDP where the mesh has two dimensions. units: what has a group of its own before the layers have."""
    shape = shape or (dist.get_world_size(),)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**policy)}
    if reshard is not None:
        options["reshard_after_forward"] = reshard
    base = base_of(model)
    for unit in units(base) if units is not None else ():
        fully_shard(unit, **options)
    if layers:
        for layer in base.model.layers:
            fully_shard(layer, **options)
    if embedding:
        fully_shard(model.model.embed_tokens, **options)
    if head == "alone":
        fully_shard(model.lm_head, **options)
    elif head == "alone, kept":
        fully_shard(model.lm_head, **options)
        model.lm_head.set_reshard_after_forward(False)
    elif head == "with the norm":
        fully_shard([model.model.norm, model.lm_head], **options)
    fully_shard(model, **options)
    return model


def fsdp1(model: Any, device: torch.device, *, head: str = "with the root", **options: Any) -> nn.Module:
    """FSDP1: a unit for each layer, perhaps one for the head, and the rest."""
    unit = functools.partial(FullyShardedDataParallel, device_id=device, use_orig_params=True, **options)
    base = base_of(model)
    for at, layer in enumerate(base.model.layers):
        base.model.layers[at] = unit(layer)
    if head == "alone":
        base.lm_head = unit(base.lm_head)
    return unit(model)


def tp(model: Any, device: torch.device, *, size: int | None = None, shard: bool = False, **options: Any) -> nn.Module:
    """Tensor parallelism of all ranks, or of neighbours, with FSDP2 over those that have the same part."""
    size = size or dist.get_world_size()
    mesh = init_device_mesh(device.type, (dist.get_world_size() // size, size), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, mesh["tp"], **options)
    if shard:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def split_sequences(rows: dict[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
    """A part of every row: labels are shifted before, since the next token may be another rank's."""
    shifted = nn.functional.pad(rows["labels"], (0, 1), value=-100)[:, 1:]
    places = torch.arange(TOKENS, device=shifted.device).expand(ROWS, -1)
    rows = {"input_ids": rows["input_ids"], "labels": rows["labels"], "shift_labels": shifted, "position_ids": places}
    return {name: x.chunk(world, dim=1)[rank] for name, x in rows.items()}


def zero(model: nn.Module, device: torch.device, **options: Any) -> nn.Module:
    import deepspeed

    deepspeed.init_distributed()
    settings = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": options, "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # 1.0 where nothing is said
    }  # fmt: skip
    optimizer = adamw(model, 1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-3, foreach=False)


class AllSequence(torch.autograd.Function):
    """(B, H, T / ranks, D) of each rank → (B, H, T, D) on all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        dy = dy.contiguous()
        dist.all_reduce(dy)
        return dy.chunk(dist.get_world_size(), 2)[dist.get_rank()]


def gather_keys_and_values() -> None:
    """Attention of a part of each sequence: queries are this rank's, keys and values all."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        k, v = AllSequence.apply(k), AllSequence.apply(v)
        first = dist.get_rank() * q.shape[2]
        seen = torch.arange(first, first + q.shape[2], device=q.device)[:, None]
        causal = seen >= torch.arange(k.shape[2], device=q.device)
        y = nn.functional.scaled_dot_product_attention(q, k, v, causal, scale=scaling, enable_gqa=True)
        return y.transpose(1, 2).contiguous(), None

    AttentionInterface.register("gathered", attention)
    AttentionMaskInterface.register("gathered", lambda *_, **__: None)


def adapted_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def wrapped_experts(model: nn.Module) -> list[nn.Module]:
    return [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]  # type: ignore[union-attr]


def within_adapters(model: nn.Module) -> list[nn.Module]:
    """As PEFT's policy for automatic wrapping has them: A and B in groups of their own."""
    return [side["default"] for layer in adapted_layers(model) for side in (layer.lora_A, layer.lora_B)]


BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
# By default ZeRO-3 keeps small weights, and weights that it needs again soon: of this Llama all.
PARTITIONED = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
of = functools.partial

ENGINES: dict[str, Engine] = {
    "DDP": Engine(ddp, (2, 4)),
    "DDP, unused parameters looked for": Engine(of(ddp, find_unused_parameters=True)),
    "DDP, static graph": Engine(of(ddp, static_graph=True)),
    "DDP, gradients as views": Engine(of(ddp, gradient_as_bucket_view=True)),
    "DDP, tied embeddings": Engine(ddp, tied=True),
    "DDP, accumulation": Engine(ddp, micro_batches=4),
    "DDP, bf16 autocast": Engine(ddp, autocast=True, bf16=True),
    "FSDP2, one group": Engine(of(fsdp, layers=False)),
    "FSDP2, layers": Engine(fsdp, (2, 4)),
    "FSDP2, layers kept": Engine(of(fsdp, reshard=False)),
    "FSDP2, tied embeddings": Engine(fsdp, tied=True),
    "FSDP2, head alone": Engine(of(fsdp, head="alone"), (2, 4)),
    "FSDP2, head alone, kept": Engine(of(fsdp, head="alone, kept")),
    "FSDP2, head with the norm": Engine(of(fsdp, head="with the norm")),
    "FSDP2, head and embedding alone": Engine(of(fsdp, head="alone", embedding=True)),
    "FSDP2, resharded to pairs": Engine(of(fsdp, head="alone", reshard=2), (4,)),
    "FSDP2, accumulation": Engine(fsdp, micro_batches=4),
    "FSDP2, head alone, accumulation": Engine(of(fsdp, head="alone"), micro_batches=4),
    "FSDP2, head alone, checkpointing": Engine(of(fsdp, head="alone"), checkpointing=True),
    "FSDP2, bf16": Engine(of(fsdp, **BF16), bf16=True),
    "FSDP2, head alone, bf16": Engine(of(fsdp, head="alone", **BF16), bf16=True),
    "FSDP2, head alone, bf16, accumulation": Engine(of(fsdp, head="alone", **BF16), micro_batches=4, bf16=True),
    "FSDP1": Engine(fsdp1, (2, 4), after=False),
    "FSDP1, tied embeddings": Engine(fsdp1, tied=True, after=False),
    "FSDP1, head alone": Engine(of(fsdp1, head="alone"), (2, 4), after=False),
    "FSDP1, head alone, accumulation": Engine(of(fsdp1, head="alone"), micro_batches=4, after=False),
    "HSDP": Engine(of(fsdp, shape=(2, 2)), (4,)),
    "HSDP, head alone, accumulation": Engine(of(fsdp, head="alone", shape=(2, 2)), (4,), micro_batches=2),
    "TP": Engine(tp, tp=True),
    "TP, tied embeddings": Engine(tp, tp=True, tied=True),
    "TP, accumulation": Engine(tp, tp=True, micro_batches=2),
    "TP, sequence parallel": Engine(of(tp, sequence_parallel=True), tp=True),
    "TP and FSDP2": Engine(of(tp, size=2, shard=True), (4,), tp=2),
    "TP, sequence parallel, and FSDP2": Engine(of(tp, size=2, shard=True, sequence_parallel=True), (4,), tp=2),
    "CP, keys and values gathered": Engine(ddp, (2,), cp=True),
    "ZeRO-1": Engine(of(zero, stage=1), needs="deepspeed", cuda=True),
    "ZeRO-2": Engine(of(zero, stage=2), needs="deepspeed", cuda=True),
    "ZeRO-3": Engine(of(zero, stage=3, **PARTITIONED), needs="deepspeed", cuda=True),
    "ZeRO-3, weights kept for the next use": Engine(of(zero, stage=3), needs="deepspeed", cuda=True),
    "ZeRO-3, tied embeddings": Engine(of(zero, stage=3, **PARTITIONED), needs="deepspeed", cuda=True, tied=True),
    "ZeRO++": Engine(of(zero, stage=3, zero_hpz_partition_size=2), (4,), needs="deepspeed", cuda=True),
    "DDP, adapters": Engine(ddp, adapters=14),
    "FSDP2, adapters": Engine(fsdp, adapters=14),
    "FSDP2, adapters, checkpointing": Engine(fsdp, adapters=14, checkpointing=True),
    "FSDP2, adapters, accumulation": Engine(fsdp, adapters=14, micro_batches=4),
    "FSDP2, adapters, bf16": Engine(of(fsdp, **BF16), adapters=14, bf16=True),
    "FSDP2, adapters, each layer of them alone": Engine(of(fsdp, units=adapted_layers), adapters=14),
    "FSDP2, A and B alone": Engine(of(fsdp, units=within_adapters), adapters=0, left="own layers have hooks"),
    "DDP, experts": Engine(ddp, adapters=9, experts="dense"),
    "FSDP2, experts": Engine(fsdp, adapters=9, experts="dense"),
    "FSDP2, experts, checkpointing": Engine(fsdp, adapters=9, experts="dense", checkpointing=True),
    "FSDP2, experts, accumulation": Engine(fsdp, adapters=9, experts="dense", micro_batches=4),
    "FSDP2, experts, bf16": Engine(of(fsdp, **BF16), adapters=9, experts="dense", bf16=True),
    "FSDP2, experts alone": Engine(of(fsdp, units=wrapped_experts), adapters=9, experts="dense"),
    "FSDP2, experts in nf4 alone": Engine(of(fsdp, units=wrapped_experts), adapters=9, experts="nf4"),
    "DDP, experts in nf4": Engine(ddp, adapters=9, experts="nf4"),
    "FSDP2, experts in nf4": Engine(fsdp, adapters=9, experts="nf4"),
    "FSDP2, experts in mxfp4, checkpointing": Engine(fsdp, adapters=9, experts="mxfp4", checkpointing=True),
    "FSDP2, experts in nf4, bf16": Engine(of(fsdp, **BF16), adapters=9, experts="nf4", bf16=True),
    "ZeRO-2, adapters": Engine(of(zero, stage=2), needs="deepspeed", cuda=True, adapters=14),
    "ZeRO-3, adapters": Engine(
        of(zero, stage=3, **PARTITIONED),
        needs="deepspeed",
        cuda=True,
        adapters=0,
        left="partitioned by DeepSpeed's ZeRO-3",
    ),
    "HSDP, bf16": Engine(of(fsdp, head="alone", shape=(2, 2), **BF16), (4,), bf16=True),
}


# ---------------------------------------------------------------------------------------------------------- training


def train(
    rank: int, world: int, device: torch.device, name: str, fused: str, levels: tuple[Any, ...] = ("cheap",)
) -> dict[str, Any]:
    """Some steps by one engine. fused: "" for the plain model, or when tigon.fuse is called: "before", "after".

    levels: of recompute, one for all ranks or one for each.
    """
    engine, level = ENGINES[name], levels[rank % len(levels)]
    model = engine.model().to(device)
    if engine.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    fusion = tigon.fuse(model, recompute=level) if fused == "before" else None
    wrapped = engine.shard(model, device)
    fusion = tigon.fuse(wrapped, recompute=level) if fused == "after" else fusion
    if engine.cp:
        gather_keys_and_values()
        model.set_attn_implementation("gathered")
    copies = world if engine.tp is True else engine.tp or 1
    part, parts = rank // copies, world // copies
    optimizer = adamw(wrapped, engine.lr) if engine.needs != "deepspeed" else None
    seen: list[dict[str, Tensor]] = []
    for step in range(engine.steps):
        rows = {key: value[part::parts].to(device) for key, value in batch(step).items()}
        if engine.cp:
            rows = split_sequences({key: value.to(device) for key, value in batch(step).items()}, rank, world)
        # The tokens of the step, on all ranks; each rank's gradients are averaged with the others'.
        count = targets(rows)
        dist.all_reduce(count)
        count = count / copies / parts
        total = torch.zeros((), device=device)
        for i in range(engine.micro_batches):
            share = {key: value[i :: engine.micro_batches].clone() for key, value in rows.items()}
            last = i == engine.micro_batches - 1
            with reducing(wrapped, last), autocast(device, engine.autocast):
                loss = wrapped(**share, num_items_in_batch=count).loss
                loss.backward() if optimizer is not None else wrapped.backward(loss)
            total += loss.detach()
        dist.all_reduce(total)
        seen.append({"loss": total / world, **gradients(model, engine.needs, wrapped)})
        step_of = wrapped if optimizer is None else optimizer
        step_of.step()
        step_of.zero_grad()
    report = None if fusion is None else fusion.report()
    return {"numbers": over_steps(seen), "report": report and report.to_dict()}


def alone(rank: int, world: int, device: torch.device, dtype: torch.dtype, name: str) -> dict[str, Tensor] | None:
    """The plain model, all rows in one batch, on rank 0."""
    if rank:
        return None
    engine = ENGINES[name]
    model = engine.model().to(device, dtype)
    optimizer = adamw(model, engine.lr)
    seen: list[dict[str, Tensor]] = []
    for step in range(engine.steps):
        rows = {key: value.to(device) for key, value in batch(step).items()}
        with NothingNarrower() if dtype == torch.float64 else contextlib.nullcontext():
            loss = model(**rows, num_items_in_batch=targets(rows)).loss
        loss.backward()
        seen.append({"loss": loss.detach(), **gradients(model)})
        optimizer.step()
        optimizer.zero_grad()
    return over_steps(seen)


def over_steps(seen: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([step[name] for step in seen]) for name in seen[0]}


def gradients(model: nn.Module, host: str = "", wrapped: nn.Module | None = None) -> dict[str, Tensor]:
    found = {}
    if isinstance(wrapped, FullyShardedDataParallel):
        inner = "_fsdp_wrapped_module."
        with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
            return {name.replace(inner, ""): p.grad.detach().clone() for name, p in model.named_parameters()}
    if host == "deepspeed":
        from deepspeed.utils import safe_get_full_grad

        return {name: safe_get_full_grad(p).detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            assert p.grad is None, name
            continue
        assert p.grad is not None, name
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        found[name] = grad.detach().clone()
    return found


def reducing(model: Any, last: bool) -> contextlib.AbstractContextManager[None]:
    """Gradients are reduced over the ranks with the last micro-batch."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()
    return contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()


def autocast(device: torch.device, wanted: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if wanted else contextlib.nullcontext()


class NothingNarrower(TorchFunctionMode):
    """Models compute norms and losses in fp32 by name: in fp64 they shall stay in fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        narrows = func is Tensor.float or (func is Tensor.to and args[1:] == (torch.float32,))
        if narrows and args[0].dtype == torch.float64:
            return args[0]
        if func is nn.functional.softmax and args[0].dtype == torch.float64:  # a router's
            kwargs["dtype"] = None
        return func(*args, **kwargs)
