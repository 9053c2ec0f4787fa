"""Plans for tensor parallelism, what they refuse, and norms of single heads, which the ranks have a part of."""

from types import SimpleNamespace

import pytest
import torch
from numerics import Errors
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import SequenceParallel
from world import world_of

import tigon
from tigon.training import tensor_parallel, tensor_parallel_plan

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.xdist_group("distributed")
two = world_of(2)
SMALL = {
    "vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def qwen3():
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, initializer_range=0.1))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.2 * torch.randn_like(p))
    return model


def mesh_of(*sizes):
    return SimpleNamespace(ndim=len(sizes), size=lambda: sizes[0])


def test_norms_of_single_heads_are_each_ranks_own():
    for sequence in (False, True):
        plan = tensor_parallel_plan(qwen3(), sequence_parallel=sequence)
        for norm in ("q_norm", "k_norm"):
            style = plan[f"model.layers.1.self_attn.{norm}"]
            assert isinstance(style, SequenceParallel)
            assert style.sequence_sharding[0].dim == 2, "of (B, T, H, head_dim) the heads"
        between = {"model.norm", "model.layers.0.input_layernorm", "model.layers.1.post_attention_layernorm"}
        assert (between <= plan.keys()) is sequence
        assert {"lm_head", "model.embed_tokens", "model.layers.0.mlp.down_proj"} <= plan.keys()


@pytest.mark.parametrize(
    ("model", "mesh", "options", "sentence"),
    [
        (qwen3, (2, 2), {}, r"tensor_parallel: mesh must have one dimension, got 2; .* mesh\['tp'\]"),
        (qwen3, (3,), {}, "num_attention_heads must be a multiple of the mesh's 3 ranks, got 4"),
        (qwen3, (4,), {}, "num_key_value_heads must be a multiple of the mesh's 4 ranks, got 2"),
        (lambda: nn.Linear(2, 2), (2,), {}, "transformers has no plan for Linear"),
        (
            lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL, num_experts=2)),
            (2,), {}, "Qwen3MoeForCausalLM needs the style '.*' for layers.*, which Tigon does not support",
        ),
        (
            lambda: with_a_part_more(qwen3()), (2,), {"sequence_parallel": True},
            r"layers with self_attn, mlp and norms; model.layers.1 of Qwen3ForCausalLM has .*adapter",
        ),
    ],
    ids=["dimensions", "heads", "heads of keys", "no plan", "experts", "another layer"],
)  # fmt: skip
def test_what_cannot_be_split(model, mesh, options, sentence):
    model = model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=sentence):
        tensor_parallel(model, mesh_of(*mesh), **options)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters()), "left as it was"


def with_a_part_more(model):
    model.model.layers[1].adapter = nn.Linear(32, 32)
    return model


def gradients_of(model, device, dtype=torch.float32):
    ids = torch.arange(2 * 18, device=device).view(2, 18) % 37
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    whole = {name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in grads(model)}
    return {"loss": loss.detach(), **whole}


def grads(model):
    return [(name, p) for name, p in model.named_parameters() if p.grad is not None]


def split(rank, world, device, sequence):
    mesh = init_device_mesh(device.type, (world,))
    model = tensor_parallel(qwen3().to(device), mesh, sequence_parallel=sequence)
    fusion = tigon.fuse(model)
    return gradients_of(model, device), fusion.report().to_dict()


@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequences", "sequence parallel"])
def test_gradients_of_norms_of_heads_are_those_of_one_process(two, sequence):
    eager = gradients_of(qwen3(), "cpu")
    exact = gradients_of(qwen3().double(), "cpu")
    for ours, report in two.run(split, sequence):
        assert ours.keys() == exact.keys()
        compared, allowed = Errors(), Errors()
        compared.add(ours, exact)
        allowed.add(eager, exact)
        compared.assert_at_most_twice(allowed, 32)
        # The norms of heads run by themselves: their weights are DTensors, and the rotation takes plain heads.
        assert min(report["calls"][kind] for kind in ("norm", "mlp", "rotary")) >= 2, report["calls"]
        assert not report["unfused_heads"]


def split_in_fp8(rank, world, device, is_fused_first):
    """Gradients with and without FP8, and what the report says of FP8."""
    from tigon.fusion.fp8.layers import ignore_sizes

    found = []
    for fp8 in (False, tigon.FP8(first=0, head=True)):
        mesh, model = init_device_mesh(device.type, (world,)), qwen3().bfloat16().to(device)
        with ignore_sizes():
            if is_fused_first:
                fusion = tigon.fuse(model, fp8=fp8)
            tensor_parallel(model, mesh)
            if not is_fused_first:
                fusion = tigon.fuse(model, fp8=fp8)
            found.append(gradients_of(model, device))
    rows = [row for row in fusion.report().rows if row.kind == "fp8"]
    return *found, [(row.calls, row.idle if row.fused else row.what) for row in rows]


@pytest.mark.parametrize("is_fused_first", [False, True])
def test_split_layers_and_heads_stay_in_bf16(two, is_fused_first):
    for plain, ours, rows in two.run(split_in_fp8, is_fused_first):
        assert ours.keys() == plain.keys()
        assert all(torch.equal(ours[name], plain[name]) for name in plain)
        assert rows
        reasons = ("a layer had a hook", "its input was a DTensor") if is_fused_first else ("fuse the model before",)
        assert all(calls == 0 and any(reason in why for reason in reasons) for calls, why in rows), rows
