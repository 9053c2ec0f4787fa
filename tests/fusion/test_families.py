"""Twenty-one families: fused equals plain in loss, gradients and logits, and comes off again without a trace."""

import pytest
import torch
import torch.nn.functional as F

import tigon

pytest.importorskip("transformers")
from zoo import FAMILIES, batch, build

# Calls of each kind in one step, from the configurations: two layers, and what a layer of the family has. A norm that
# runs with the sum before it or the rotation after it counts as a norm too, and that rotation as one.
CALLS = {
    "llama": {"head": 1, "norm": 5, "add_norm": 2, "mlp": 2, "rotary": 2, "linear": 2},
    "mistral": {"head": 1, "norm": 5, "add_norm": 2, "mlp": 2, "rotary": 2, "linear": 2},
    "qwen2": {"head": 1, "norm": 5, "add_norm": 2, "mlp": 2, "rotary": 2, "linear": 2},
    "qwen3": {"head": 1, "norm": 9, "add_norm": 2, "qk_norm": 2, "mlp": 2, "rotary": 2, "linear": 2},
    "gemma": {"head": 1, "norm": 5, "add_norm": 2, "mlp": 2, "rotary": 2, "linear": 2},
    "gemma2": {"head": 1, "norm": 9, "add_norm": 2, "mlp": 2, "rotary": 2, "linear": 2},
    "gemma3": {"head": 1, "norm": 13, "add_norm": 2, "qk_norm": 2, "mlp": 2, "rotary": 2, "linear": 2},
    "mixtral": {"head": 1, "norm": 5, "add_norm": 2, "rotary": 2, "linear": 2, "experts": 2},
    "qwen3_moe": {"head": 1, "norm": 9, "add_norm": 2, "qk_norm": 2, "rotary": 2, "linear": 2, "experts": 2},
    "granite": {"head": 1, "norm": 5, "add_norm": 2, "mlp": 2, "rotary": 2, "linear": 2},
    "granitemoe": {"head": 1, "norm": 5, "add_norm": 2, "rotary": 2, "linear": 2, "experts": 2},
    "cohere": {"head": 1, "norm": 3, "mlp": 2, "rotary": 2, "linear": 2},
    "cohere2": {"head": 1, "norm": 3, "mlp": 2, "rotary": 2, "linear": 2},
    "olmo2": {"head": 1, "norm": 9, "mlp": 2, "rotary": 2, "linear": 2},
    "phi": {"head": 1, "norm": 3, "rotary": 2, "linear": 2, "mlp": 2},
    "phi3": {"head": 1, "norm": 5, "add_norm": 2, "mlp": 2, "rotary": 2},
    "gpt2": {"head": 1, "norm": 5, "mlp": 2},
    "gpt_oss": {"head": 1, "norm": 5, "add_norm": 2, "rotary": 2, "linear": 2, "experts": 2},  # rotates by half a cos
    "deepseek_v3": {"head": 1, "norm": 9, "add_norm": 2, "mlp": 2, "rotary": 2, "experts": 1},  # one dense layer
    "llava": {"head": 1, "norm": 11, "add_norm": 2, "mlp": 5, "rotary": 2, "linear": 4, "patches": 1},
    "qwen2_5_vl": {
        "head": 1,
        "norm": 10,
        "add_norm": 4,
        "mlp": 5,
        "rotary": 4,
        "linear": 2,
        "patches": 1,
        "images": 2,
    },
}


# Without gradients, and beside an adapter on one of them, layers of one input are called one by one.
APART = {family: {k: n for k, n in calls.items() if k != "linear"} for family, calls in CALLS.items()}


def step(model, inputs, **options):
    model.zero_grad()
    outputs = model(**inputs, **options)
    outputs.loss.backward()
    return outputs, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(fused, plain):
    """Gradients to a few fp32 roundings of the largest of them, where a wrong formula is off by its own size."""
    assert fused.keys() == plain.keys()
    largest = max(g.abs().max() for g in plain.values())
    for name, g in plain.items():
        tolerance = 3e-6 * g.abs().max() + 1e-7 * largest
        assert (fused[name] - g).abs().max() <= tolerance, name


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_equals_plain_and_comes_off_again(family):
    model, inputs = build(family), batch(family)
    before = {n: dict(vars(m)) for n, m in model.named_modules()}
    plain, plain_grads = step(model, inputs)
    hooked = {n: vars(m).keys() - before[n].keys() for n, m in model.named_modules()}  # what the model adds by itself

    fusion = tigon.fuse(model)
    fused, fused_grads = step(model, inputs)
    report = fusion.report()
    assert report.calls == CALLS[family]
    assert report.logits_built_by == {}, "the loss was to leave the logits unbuilt"
    torch.testing.assert_close(fused.loss, plain.loss, rtol=2e-6, atol=0)
    assert_close(fused_grads, plain_grads)
    assert fused.logits.shape == plain.logits.shape
    torch.testing.assert_close(fused.logits.detach(), plain.logits.detach(), rtol=1e-5, atol=1e-6)
    if "aux_loss" in plain:
        torch.testing.assert_close(fused.aux_loss, plain.aux_loss, rtol=1e-5, atol=0)

    fusion.remove()
    again, again_grads = step(model, inputs)
    assert torch.equal(again.loss, plain.loss)
    assert all(torch.equal(again_grads[n], g) for n, g in plain_grads.items())
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys() | hooked[name], name


@pytest.mark.parametrize(("family", "count"), [("mixtral", 11), ("phi", torch.tensor(11))])
def test_num_items_in_batch(family, count):
    model, inputs = build(family), batch(family)
    plain, plain_grads = step(model, inputs, num_items_in_batch=count)
    with tigon.fuse(model) as fusion:
        fused, fused_grads = step(model, inputs, num_items_in_batch=count)
        assert fusion.report().calls["head"] == 1
    torch.testing.assert_close(fused.loss, plain.loss, rtol=2e-6, atol=0)
    assert_close(fused_grads, plain_grads)


@pytest.mark.parametrize("family", ["gemma2", "granite", "phi"])
def test_logits_built_after_the_loss_carry_gradients(family):
    """Someone looks at the logits, and trains on them too."""
    model, inputs = build(family), batch(family)

    def both(outputs):
        return outputs.loss + F.softmax(outputs.logits.float(), -1).square().sum() / 100

    def run():
        model.zero_grad()
        loss = both(model(**inputs))
        loss.backward()
        return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    plain, plain_grads = run()
    with tigon.fuse(model) as fusion:
        fused, fused_grads = run()
        assert fusion.report().calls["head"] == 1
        assert fusion.report().logits_built_by == {"softmax": 1}
    torch.testing.assert_close(fused, plain, rtol=2e-6, atol=0)
    assert_close(fused_grads, plain_grads)


def test_in_bf16_the_loss_is_no_further_from_fp64_than_the_plain_one():
    model, inputs = build("llama"), batch("llama")
    exact = model.double()(**inputs).loss.item()
    model.bfloat16()
    plain = abs(model(**inputs).loss.item() - exact)
    with tigon.fuse(model) as fusion:
        fused = abs(model(**inputs).loss.item() - exact)
        assert fusion.report().calls == CALLS["llama"]
    assert fused <= 2 * plain + 2**-8


def test_in_fp64_the_model_runs_as_it_is():
    """The models narrow their logits to fp32 there, so the head is left alone."""
    model, inputs = build("llama").double(), batch("llama")
    plain, plain_grads = step(model, inputs)
    with tigon.fuse(model) as fusion:
        fused, fused_grads = step(model, inputs)
        assert "head" not in fusion.report().calls
    torch.testing.assert_close(fused.loss, plain.loss, rtol=1e-6, atol=0)
    assert_close(fused_grads, plain_grads)
