"""LoRA adapters on stacked experts (PEFT's `target_parameters`) in fused models, beside PEFT's own sums of weights."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")
import peft
import transformers
from small_llama import batch
from test_peft_fused import SIZES, adapted, assert_as_right, assert_same_step, settled, step

import tigon
from tigon.ops.experts.adapter import ExpertAdapter

STACKED = ["experts.gate_up_proj", "experts.down_proj"]


def tiny(family, **options):
    model, config = (getattr(transformers, f"{family}{kind}") for kind in ("ForCausalLM", "Config"))
    return model(config(**SIZES, num_experts_per_tok=2, **options))


def mixtral():
    return tiny("Mixtral")


def gpt_oss():
    return tiny("GptOss")


def shared_expert():
    return tiny("Qwen2Moe", shared_expert_intermediate_size=48)


def adapted_experts(make=mixtral, parameters=STACKED, targets=("q_proj",), **options):
    return adapted(make, targets=list(targets), target_parameters=parameters, **options)


def count(fusion, kind="expert_adapters"):
    return fusion.report().calls.get(kind, 0)


def rows(fusion, fused=True):
    report = fusion.report()
    found = report.fused_rows if fused else report.skipped_rows
    return {row.what: row.count for row in found if row.kind == "expert_adapters"}


@pytest.mark.parametrize(
    ("make", "targets", "options"),
    [
        (mixtral, ["q_proj"], {"rank_pattern": {"layers.0.mlp.experts": 3}, "use_rslora": True}),
        (gpt_oss, ["q_proj"], {}),
        (shared_expert, ["q_proj", "gate_proj", "up_proj", "down_proj"], {}),
    ],
    ids=["ranks that differ", "biases, by columns", "shared expert"],
)
def test_a_step_in_fp32_is_peft_s(make, targets, options):
    plain, model = (adapted_experts(make, targets=targets, **options) for _ in range(2))
    state = copy.deepcopy(model.state_dict())
    with tigon.fuse(model) as fusion:
        fused, expected = step(model, batch()), step(plain, batch())
        assert_same_step(fused, expected)
        assert sum("experts" in name and "lora" in name for name in fused[1]) == 8  # A and B, of two stacks, twice
        assert count(fusion) == count(fusion, "experts") == 2
        assert count(fusion, "adapters") >= 2
        assert rows(fusion) == {"LoRA on experts: gate_up_proj, down_proj": 2}
    again = step(model, batch())
    assert torch.equal(again[0], expected[0])
    assert all(torch.equal(again[1][name], g) for name, g in expected[1].items())
    assert state.keys() == model.state_dict().keys()


def test_nothing_as_large_as_the_weights_is_made():
    """No sum W + B A: what the backward pass keeps beside the parameters is smaller than a stack of weights."""
    model = adapted_experts(targets=[], r=2)
    stacks = {p.untyped_storage().data_ptr() for n, p in model.named_parameters() if "experts" in n}
    least = min(p.numel() for n, p in model.named_parameters() if n.endswith("down_proj"))
    saved = []

    def keep(t):
        if t.untyped_storage().data_ptr() not in stacks and t.is_floating_point():
            saved.append(t.untyped_storage().nbytes() // t.element_size())
        return t

    ids = torch.randint(0, 90, (1, 3))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model.model(input_ids=ids)
        plain, saved = max(saved), []
        fusion = tigon.fuse(model)
        model.model(input_ids=ids)
    assert count(fusion) == 2
    assert max(saved) < least <= plain


def test_the_memory_of_a_step_is_estimated_for_both_sides():
    from tigon.cli.adapters import add_adapters, new_adapters
    from tigon.cli.problem import Problem
    from tigon.fusion.memory.estimate import step_memory

    stacks = ",".join(STACKED)
    with torch.device("meta"):
        model = add_adapters(mixtral().bfloat16(), new_adapters(2, "q_proj", 0.0, stacks)).train()
    ids = torch.zeros(1, 4, dtype=torch.long, device="meta")

    def estimate():
        return step_memory(model, {"input_ids": ids, "labels": ids}, autocast=torch.bfloat16).kept.parts["activations"]

    plain = estimate()
    tigon.fuse(model)
    # PEFT's sums of weights and adapters stay for the backward pass; here only copies of A and B, of 16 ranks.
    assert estimate() < 0.7 * plain
    with pytest.raises(Problem, match="--lora-target-parameters requires --lora-dropout 0"):
        new_adapters(2, "q_proj", 0.1, stacks)


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_gradients_are_no_further_from_the_truth_than_peft_s(autocast):
    plain, model, wide = (adapted_experts(dtype=torch.bfloat16) for _ in range(3))
    with tigon.fuse(model) as fusion:
        fused = step(model, batch(), autocast)
        assert count(fusion) == 2
    assert_as_right(fused, step(plain, batch(), autocast), step(wide.float(), batch()))


def test_switching_merging_and_further_adapters(tmp_path):
    plain, model = adapted_experts(), adapted_experts()
    fusion = tigon.fuse(model)

    def check(calls):
        with torch.no_grad():
            torch.testing.assert_close(model(**batch()).loss, plain(**batch()).loss, rtol=3e-6, atol=0)
        assert count(fusion) == calls

    check(2)
    with model.disable_adapter(), plain.disable_adapter():
        check(0)
        assert count(fusion, "experts") == 2
    for each in (model, plain):
        each.merge_adapter()
    check(0)
    for each in (model, plain):
        each.unmerge_adapter()
        each.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=STACKED))
        each.set_adapter("other")
        settled(each)
    check(2)
    for each in (model, plain):
        each.base_model.set_adapter(["default", "other"])
    check(0)
    assert "several adapters are active on it at once" in str(fusion.report())
    model.save_pretrained(tmp_path / "fused")
    plain.save_pretrained(tmp_path / "plain")
    files = [(tmp_path / which / "adapter_model.safetensors").read_bytes() for which in ("fused", "plain")]
    assert files[0] == files[1]
    model, plain = model.merge_and_unload(), plain.merge_and_unload()
    check(0)
    assert count(fusion, "experts") == 2
    fusion.remove()
    assert not any("_tigon" in vars(m) for m in model.modules())


def test_adapters_that_come_after_fuse_and_a_copy():
    torch.manual_seed(0)
    bare = mixtral()
    fusion = tigon.fuse(bare)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=STACKED)
    model = settled(peft.get_peft_model(bare, config)).train()
    plain = adapted_experts()
    expected = step(plain, batch())
    assert_same_step(step(model, batch()), expected)
    assert count(fusion) == 2
    copied = copy.deepcopy(model)
    fusion.remove()
    assert_same_step(step(copied, batch()), expected)
    assert count(tigon.fuse(copied)) == 2


def test_checkpoints_and_accumulation():
    plain, model = adapted_experts(), adapted_experts()
    fusion = tigon.fuse(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for each in (plain, model):
        for _ in range(2):
            each(**batch()).loss.backward()
    assert count(fusion) == 2
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert (p.grad - q.grad).abs().max() <= 1e-5 * q.grad.abs().max() + 1e-6, name


def test_experts_that_are_trained_beside_their_adapters():
    plain, model = adapted_experts(), adapted_experts()
    for each in (plain, model):
        for name, p in each.named_parameters():
            p.requires_grad_("experts" in name)
    with tigon.fuse(model) as fusion:
        assert_same_step(step(model, batch()), step(plain, batch()))
        assert count(fusion) == 2


def test_sharded_by_fsdp2_and_gathered_for_the_layer():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain, model = adapted_experts(), adapted_experts()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fusion = tigon.fuse(model)
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        loss, grads = step(model, batch())
        assert count(fusion) == 2
        whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}
        assert_same_step((loss, whole), step(plain, batch()))
    finally:
        dist.destroy_process_group()


def test_what_is_left_has_a_reason():
    def left(model, **options):
        plain = copy.deepcopy(model)
        fusion = tigon.fuse(model, **options)
        with torch.no_grad():
            torch.testing.assert_close(model(**batch()).loss, plain(**batch()).loss, rtol=3e-6, atol=0)
        assert count(fusion) == 0
        return fusion

    router = left(adapted_experts(parameters=["gate.weight"]))
    assert rows(router, fused=False) == {"its adapter is on a parameter that is not a stack of experts": 2}
    told = left(adapted_experts(), parts=tigon.PARTS - {"experts"})
    assert rows(told, fused=False) == {"fuse was told to leave the experts under its adapter": 2}
    hooked = adapted_experts()
    experts = next(m for m in hooked.modules() if type(m).__name__ == "MixtralExperts")
    with tigon.fuse(hooked) as fusion:
        experts.register_forward_hook(lambda *_: None)
        step(hooked, batch())
        assert count(fusion) == 1
        assert "its experts ran their own code" in str(fusion.report())


def test_experts_with_adapters_stay_in_bf16_beside_fp8_and_say_so():
    """Also where the adapters are switched off: a policy and its reference have the same numbers before a step."""
    from tigon.fusion.fp8.layers import ignore_sizes

    plain, model = (adapted_experts(dtype=torch.bfloat16) for _ in range(2))
    with ignore_sizes():
        fusion = tigon.fuse(model, fp8=tigon.FP8(first=0, experts=True, skip=["attn"]))
        found = step(model, batch())
        with tigon.fuse(plain):
            assert torch.equal(found[0], step(plain, batch())[0])
            with torch.no_grad(), model.disable_adapter(), plain.disable_adapter():
                assert torch.equal(model(**batch()).logits, plain(**batch()).logits)
    assert count(fusion, "experts") == 2
    skipped = [(row.what, row.count) for row in fusion.report().skipped_rows if row.kind == "fp8"]
    assert ("it has adapters, which join the experts' products in bf16", 2) in skipped


def test_experts_in_4_bits_stay_so_beside_fp8():
    model = adapted_experts(dtype=torch.bfloat16, parameters=None)
    tigon.quantize_experts(model)
    fusion = tigon.fuse(model, fp8=tigon.FP8(first=0, experts=True))
    assert any(row.what == "its weights are in 4 bits" for row in fusion.report().skipped_rows)


class Listed(nn.Module):
    """Experts that are modules of their own, as in older models: their layers are adapted one by one."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.ModuleDict({n: nn.Linear(8, 8) for n in ("up", "down")}) for _ in range(3))

    def forward(self, x):
        return sum(e["down"](torch.relu(e["up"](x))) for e in self.experts)


def test_adapters_on_listed_experts_run_as_on_linear_layers():
    torch.manual_seed(0)
    some = peft.LoraConfig(r=2, target_modules=r"experts\.[01]\.(up|down)")  # not on the last expert
    model = settled(peft.get_peft_model(Listed(), some))
    plain, x = copy.deepcopy(model), torch.randn(5, 8)
    with tigon.fuse(model) as fusion:
        torch.testing.assert_close(model(x), plain(x))
        assert count(fusion, "adapters") == 4


def test_shapes_that_do_not_fit_get_a_sentence():
    x, index = torch.ones(3, 4), torch.zeros(3, 2).long()
    stacks = torch.ones(5, 12, 4), torch.ones(5, 4, 6)

    def refuse(sentence, adapter):
        with pytest.raises(ValueError, match=sentence):
            tigon.moe_mlp(x, index, torch.ones(3, 2), *stacks, down_adapter=adapter)

    refuse("down_adapter must be a tigon.ExpertAdapter or None, got tuple", (stacks[0], stacks[1]))
    refuse(r"down_adapter must have A \(5, r, 6\) and B \(5, 4, r\) with a rank r of at least 1", ExpertAdapter(
        torch.ones(5, 0, 6), torch.ones(5, 4, 0)
    ))  # fmt: skip
    refuse("down_adapter must hold floats, got torch.int64", ExpertAdapter(
        torch.ones(5, 2, 6).long(), torch.ones(5, 4, 2)
    ))  # fmt: skip
    refuse("two tensors and a number, got Tensor, Tensor, Tensor", ExpertAdapter(
        torch.ones(5, 2, 6), torch.ones(5, 4, 2), torch.ones(())
    ))  # fmt: skip
