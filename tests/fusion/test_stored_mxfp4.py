"""gpt-oss's experts as transformers keeps an MXFP4 checkpoint: taken over with the same bytes, trained, refused.

transformers keeps them so on a GPU with its kernels alone. Here their state is built by hand, with an order of bytes
in memory that only its layout can undo.
"""

import copy
from types import MethodType, SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers.integrations.mxfp4")
import transformers
from test_families import assert_close, step
from transformers.integrations import mxfp4
from zoo import batch

import tigon

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


class Reordered:
    """A layout that pads the last dimension and reverses rows, as kernels' layouts pad and reorder."""

    def __init__(self, width):
        self.width = width

    def swizzle_data(self, data):
        return torch.nn.functional.pad(data, (0, 5)).flip(-2)

    def unswizzle_data(self, data):
        return data.flip(-2)[..., : self.width]


def store(data):
    """A tensor of the kernels: (E, K / 2, N) codes or (E, K / 32, N) scales."""
    layout = Reordered(data.shape[-1])
    return SimpleNamespace(storage=SimpleNamespace(data=layout.swizzle_data(data), layout=layout))


def replace_experts(dense, experts):
    """A layer around them, as transformers makes it: in newer versions of a class of its own."""
    if hasattr(mxfp4, "Mxfp4GptOssMLP"):
        return mxfp4.Mxfp4GptOssMLP(dense.router, experts)
    layer = copy.deepcopy(dense)
    layer.router, layer.experts, layer.forward = dense.router, experts, MethodType(mxfp4.mlp_forward, layer)
    return layer


def keep(model):
    """The model as from_pretrained keeps it, and its twin with the dense weights that transformers dequantizes."""
    dense, stacks = copy.deepcopy(model), {}
    for index, layer in enumerate(model.model.layers):
        stored = replace_experts(layer.mlp, mxfp4.Mxfp4GptOssExperts(model.config))
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)
            E, K, N = weight.shape
            blocks = torch.randint(256, (E, N, K // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 124, (E, N, K // 32), dtype=torch.uint8)
            expected = mxfp4.convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
            stacks[index, name] = expected
            getattr(dense.model.layers[index].mlp.experts, name).data = expected
            del stored.experts._parameters[name]
            setattr(stored.experts, name, store(blocks.view(E, N, -1).transpose(1, 2)))
            setattr(
                stored.experts, f"{name}_precision_config", SimpleNamespace(weight_scale=store(scales.transpose(1, 2)))
            )
            bias = getattr(layer.mlp.experts, f"{name}_bias")
            getattr(stored.experts, f"{name}_bias").data = bias.data.float()
        layer.mlp = stored.train()
    model.hf_quantizer, model.is_quantized, model.quantization_method = object(), True, "mxfp4"
    model.config.quantization_config = {"quant_method": "mxfp4"}
    return model, dense.requires_grad_(False), stacks


def gpt_oss():
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES))
    for name, p in model.named_parameters():
        if name.endswith("proj_bias"):
            p.data.normal_()
    return model.train()


@pytest.fixture
def kept():
    return keep(gpt_oss())


def test_the_stacks_are_the_checkpoint_s(kept):
    model, _, stacks = kept
    state = model.state_dict()
    names = tigon.quantize_experts(model, "mxfp4")
    assert names == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    for (index, name), weight in stacks.items():
        experts = model.model.layers[index].mlp.experts
        assert torch.equal(getattr(experts, name), weight)
        assert experts.parametrizations[name][0].format == "mxfp4"
        assert torch.equal(getattr(experts, f"{name}_bias"), state[f"model.layers.{index}.mlp.experts.{name}_bias"])
    assert not any(hasattr(owner, "quantization_config") for owner in (model, model.config))
    assert not hasattr(model, "hf_quantizer")
    assert not getattr(model, "is_quantized", False)
    assert not any(p.is_meta for p in model.parameters())


def test_a_step_is_that_of_the_dense_checkpoint(kept):
    model, dense, _ = kept
    tigon.quantize_experts(model, "mxfp4")
    for each in (model, dense):
        each.requires_grad_(False)
        for name, p in each.named_parameters():
            p.requires_grad_("router" in name or "q_proj" in name)
    want, gradients = step(dense, batch("gpt_oss"))
    own, own_gradients = step(model, batch("gpt_oss"))
    assert torch.equal(own.loss, want.loss)
    assert_close(own_gradients, gradients)
    with tigon.fuse(model) as fusion:
        found, fused_gradients = step(model, batch("gpt_oss"))
        assert fusion.report().calls["experts"] == 2
    torch.testing.assert_close(found.loss, want.loss, rtol=2e-6, atol=0)
    assert any(g.any() for g in gradients.values())
    assert_close(fused_gradients, gradients)


def test_adapters_on_the_stacks(kept):
    """PEFT takes whole names on such layers."""
    peft = pytest.importorskip("peft")
    model, dense, _ = kept
    tigon.quantize_experts(model, "mxfp4")
    targets = [f"model.layers.{i}.mlp.experts.{n}" for i in range(2) for n in ("gate_up_proj", "down_proj")]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets)
    adapted = [peft.get_peft_model(each, config) for each in (model, dense)]
    for each in adapted:  # PEFT nests them in unlike orders
        for name, p in each.named_parameters():
            if "lora" in name:
                p.data.normal_(generator=torch.Generator().manual_seed(sum(p.shape))).mul_(0.2)
    want, gradients = step(adapted[1], batch("gpt_oss"))
    with tigon.fuse(adapted[0]) as fusion:
        found, fused_gradients = step(adapted[0], batch("gpt_oss"))
        assert fusion.report().calls["expert_adapters"] == 2
    torch.testing.assert_close(found.loss, want.loss, rtol=5e-6, atol=0)
    for side in (gradients, fused_gradients):
        assert sum("experts" in name and bool(g.any()) for name, g in side.items()) == 8
    for merge in (adapted[0].merge_adapter, adapted[0].merge_and_unload):
        with pytest.raises(ValueError, match="adapters cannot be merged into experts in 4 bits"):
            merge()


def test_fuse_says_what_to_call(kept):
    fusion = tigon.fuse(kept[0])
    row = next(row for row in fusion.report().skipped_rows if row.kind == "experts")
    assert row.count == 2
    assert "transformers' own MXFP4, whose kernels have no backward pass" in row.what
    with pytest.raises(ValueError, match=r"must not be fused: call tigon.quantize_experts before tigon.fuse"):
        tigon.quantize_experts(kept[0], "mxfp4")


def test_what_is_refused(kept):
    model, _, _ = kept
    before = {name: dict(vars(m)) for name, m in model.named_modules() if "layers.0." in name}
    with pytest.raises(ValueError, match="format must be 'mxfp4' for experts that are in MXFP4 already, got 'nf4'"):
        tigon.quantize_experts(model)
    with pytest.raises(ValueError, match="model must hold its configuration"):
        tigon.quantize_experts(model.model.layers[0].mlp, "mxfp4")
    experts = model.model.layers[1].mlp.experts
    handle = experts.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"layers.1.mlp must have no hooks"):
        tigon.quantize_experts(model, "mxfp4")
    handle.remove()
    experts.down_proj = store(torch.zeros(2, 48, 64, dtype=torch.uint8))  # two of the four experts
    experts.down_proj_precision_config = SimpleNamespace(weight_scale=store(torch.zeros(2, 3, 64, dtype=torch.uint8)))
    with pytest.raises(ValueError, match=r"down_proj must have blocks \(4, 64, 3, 16\) .*, got \(2, 64, 3, 16\)"):
        tigon.quantize_experts(model, "mxfp4")
    del experts.down_proj
    experts.down_proj = torch.nn.Parameter(torch.zeros(4, 64, 48, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match="down_proj of Mxfp4GptOssExperts must be loaded from a checkpoint"):
        tigon.quantize_experts(model, "mxfp4")
    # The first layer, which nothing is wrong with, is as it was.
    assert {name: vars(m) for name, m in model.named_modules() if "layers.0." in name} == before
    assert model.is_quantized
