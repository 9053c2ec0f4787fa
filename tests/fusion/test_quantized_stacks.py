"""Stacked experts of models in 4 bits: in place, beside the dequantized model, saved, undone, under PEFT."""

import copy
import gc
import weakref

import pytest
import torch

import tigon

pytest.importorskip("transformers")
from test_families import assert_close, step
from zoo import batch, build

FAMILIES = {"qwen3_moe": "nf4", "gpt_oss": "mxfp4"}


def quantized_format(model):
    return next(m for m in model.modules() if isinstance(m, tigon.QuantizedExperts)).format


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    """A model in 4 bits, its dequantized twin, and inputs. Only the stacks are frozen."""
    torch.manual_seed(0)
    model = build(request.param)
    assert len(tigon.quantize_experts(model, FAMILIES[request.param])) == 2
    dense = copy.deepcopy(model)
    assert len(tigon.dequantize_experts(dense)) == 2
    return model, dense, batch(request.param)


def test_gradients_flow_through_frozen_stacks(pair):
    """Fused, and by the model's own code, as through the dequantized weights."""
    model, dense, inputs = pair
    want, gradients = step(dense, inputs)
    own, own_gradients = step(model, inputs)
    assert torch.equal(own.loss, want.loss)
    assert_close(own_gradients, gradients)
    with tigon.fuse(model) as fusion:
        found, fused_gradients = step(model, inputs)
        assert fusion.report().calls["experts"] == 2
        left = [row for row in fusion.report().skipped_rows if row.kind == "experts"]
    assert not left
    torch.testing.assert_close(found.loss, want.loss, rtol=2e-6, atol=0)
    assert gradients.keys() == fused_gradients.keys()
    assert not any("parametrizations" in name for name in gradients)
    assert_close(fused_gradients, gradients)


def test_names_bytes_and_casts(pair):
    model, dense, _ = pair
    names = {name.rpartition("experts.")[2] for name in model.state_dict() if "parametrizations" in name}
    stacks = ("gate_up_proj", "down_proj")
    assert names == {f"parametrizations.{s}.{k}" for s in stacks for k in ("original", "0.packed", "0.scales")}
    half = copy.deepcopy(model).to(torch.bfloat16)
    stack = next(m for m in half.modules() if type(m).__name__.endswith("Experts")).gate_up_proj
    plain = next(m for m in dense.modules() if type(m).__name__.endswith("Experts")).gate_up_proj
    assert stack.dtype == torch.bfloat16
    assert torch.equal(stack, plain.bfloat16())


def test_adapters_of_peft_on_the_stacks(pair):
    """As on the dequantized model, fused or not; the adapters' checkpoint has the same names."""
    peft = pytest.importorskip("peft")
    model, dense, inputs = pair
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(dense), config)
    want, gradients = step(adapted, inputs)
    names = set(peft.get_peft_model_state_dict(adapted))
    # A dequantized weight is quantized to itself.
    assert len(tigon.quantize_experts(adapted, quantized_format(model))) == 2
    for _ in range(2):  # PEFT leaves nothing behind
        plain, plain_gradients = step(adapted, inputs)
        torch.testing.assert_close(plain.loss, want.loss, rtol=2e-6, atol=0)
        assert_close(plain_gradients, gradients)
    with tigon.fuse(adapted):
        fused, fused_gradients = step(adapted, inputs)
    torch.testing.assert_close(fused.loss, want.loss, rtol=5e-6, atol=0)
    assert_close(fused_gradients, gradients)
    assert any("experts" in name and bool(g.any()) for name, g in gradients.items())
    assert set(peft.get_peft_model_state_dict(adapted)) == names
    twin = copy.deepcopy(adapted)
    for merge in (twin.merge_and_unload, twin.merge_adapter):
        with pytest.raises(ValueError, match="adapters cannot be merged into experts in 4 bits"):
            merge()
    # Nor into the linear layers.
    assert not any(getattr(module, "merged", False) for module in twin.modules())
    assert twin.state_dict().keys() == adapted.state_dict().keys()
    tigon.dequantize_experts(adapted)
    merged, _ = step(adapted.merge_and_unload().requires_grad_(), inputs)
    torch.testing.assert_close(merged.loss, want.loss, rtol=2e-6, atol=0)


def test_what_is_refused():
    with pytest.raises(ValueError, match="must have stacked experts, and has none"):
        tigon.quantize_experts(build("llama"))
    model = build("qwen3_moe")
    with pytest.raises(ValueError, match="format must be 'nf4' or 'mxfp4', got 'fp4'"):
        tigon.quantize_experts(model, "fp4")
    with tigon.fuse(model), pytest.raises(ValueError, match=r"must not be fused: call tigon.quantize_experts before"):
        tigon.quantize_experts(model)
    step(model, batch("qwen3_moe"))
    stack = next(m for m in model.modules() if type(m).__name__.endswith("Experts")).gate_up_proj
    stack.grad = torch.zeros_like(stack)
    with pytest.raises(ValueError, match=r"experts.gate_up_proj must be frozen, and has a gradient"):
        tigon.quantize_experts(model)


def test_a_discarded_model_is_freed(pair):
    """torch's parametrizations derive a class for each module, which refers to that module."""
    peft = pytest.importorskip("peft")
    _, dense, inputs = pair
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    adapted = peft.get_peft_model(copy.deepcopy(dense), config)
    tigon.quantize_experts(adapted)
    fusion = tigon.fuse(adapted)
    step(adapted, inputs)
    parameters = [weakref.ref(p) for p in adapted.parameters()]
    del adapted, fusion
    gc.collect()
    assert not any(p() is not None for p in parameters)
