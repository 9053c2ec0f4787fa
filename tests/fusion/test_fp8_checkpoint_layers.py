"""fuse on models whose linear layers come in FP8, as transformers loads them: gradients as of dequantised weights."""

import copy
import sys

import pytest
import torch

import tigon

pytest.importorskip("transformers")
pytest.importorskip("peft")
import peft
import transformers as T
from torch import nn
from transformers.integrations.fbgemm_fp8 import FbgemmFp8Linear
from transformers.integrations.finegrained_fp8 import FP8Linear

from tigon.fusion.fp8 import checkpoint

CONFIG = T.LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=128, attention_bias=True,
)  # fmt: skip
E4M3 = torch.float8_e4m3fn
ROUNDED = 0.02  # gradients of a model in bf16 whose sums are rounded in another order


def quantize(linear, kind):
    """A layer as transformers makes it from a checkpoint, and the weight that it stands for."""
    N, K = linear.out_features, linear.in_features
    w = linear.weight.detach().float()
    if kind == "blocks":
        layer, blocks = FP8Linear(K, N, (128, 128)), w.view(N // 128, 128, K // 128, 128)
        s = blocks.abs().amax((1, 3)) / 448
        q = (blocks / s[:, None, :, None]).view(N, K).to(E4M3)
        exact = (q.float().view_as(blocks) * s[:, None, :, None]).view(N, K)
        layer.weight_scale_inv.data = s
    elif kind == "tensor":
        layer, s = FP8Linear(K, N, None), w.abs().amax() / 448
        q = (w / s).to(E4M3)
        exact = q.float() * s
        layer.weight_scale_inv.data = s
    else:
        layer, s = FbgemmFp8Linear(K, N, linear.bias is not None), w.abs().amax(1, keepdim=True) / 448
        q = (w / s).to(E4M3)
        exact = q.float() * s
        layer.weight_scale.data = s
    layer.weight.data = q
    layer.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())
    return layer.requires_grad_(False), exact.to(linear.weight.dtype)


def make(kind="blocks", config=CONFIG, seed=0):
    """A model in FP8, and the same dequantised."""
    torch.manual_seed(seed)
    plain = T.LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
    for p in plain.parameters():
        if p.dim() == 1:
            p.data.normal_(1, 0.1)
    model = copy.deepcopy(plain)
    for name, linear in [*plain.named_modules()]:
        if type(linear) is nn.Linear and name != "lm_head":
            layer, linear.weight.data = quantize(linear, kind)
            model.set_submodule(name, layer)
    return model, plain


def adapt(model, targets="all-linear", **options):
    torch.manual_seed(1)
    options = {"r": 4, "target_modules": targets, "init_lora_weights": False} | options
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def adapt_both(kind, **options):
    model, plain = (adapt(m, **options) for m in make(kind))
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "lora" in k}, strict=False)
    return model, plain


def step(model):
    torch.manual_seed(2)
    ids = torch.randint(CONFIG.vocab_size, (2, 24))
    hidden = []
    handle = model.get_input_embeddings().register_forward_hook(lambda m, i, y: hidden.append(y.requires_grad_()) or y)
    loss = model(input_ids=ids, labels=ids).loss
    handle.remove()
    model.zero_grad()
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients | {"x": hidden[0].grad}


def distance(gradients, truth):
    assert gradients.keys() == truth.keys()
    off = sum((gradients[n].float() - truth[n].float()).square().sum() for n in truth)
    return float((off / sum(g.float().square().sum() for g in truth.values())).sqrt())


def rows(fusion, fused=True):
    return {row.what: row.count for row in fusion.report().rows if row.kind == "fp8_base" and row.fused == fused}


EVERY_KIND = pytest.mark.parametrize("kind", ["blocks", "tensor", "channels"])


@EVERY_KIND
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]], ids=str)
def test_adapters_train_as_on_dequantised_weights(kind, targets):
    model, plain = adapt_both(kind, targets=targets)
    fusion = tigon.fuse(model)
    tigon.fuse(plain)
    (loss, gradients), (wanted, truth) = step(model), step(plain)
    assert len(gradients) == (29 if targets == "all-linear" else 9)
    torch.testing.assert_close(loss, wanted, rtol=1e-3, atol=0)
    assert distance(gradients, truth) < ROUNDED
    others = {} if targets == "all-linear" else {"frozen, with the gradient of its input": 10}
    assert rows(fusion) == others
    adapters = [row for row in fusion.report().rows if row.kind == "adapters"]
    assert sum(row.count for row in adapters) == (14 if targets == "all-linear" else 4)
    assert all(row.calls == row.count for row in adapters)  # by Tigon, and not by PEFT's own code
    assert rows(fusion, fused=False) == {}


@EVERY_KIND
def test_layers_without_adapters_multiply_in_fp8(kind, monkeypatch):
    monkeypatch.setattr(checkpoint, "may_multiply", lambda x, dtype, is_in_blocks: dtype is torch.bfloat16)
    model, plain = make(kind)
    tigon.fuse(model)
    (loss, gradients), (wanted, truth) = step(model), step(plain)
    assert [*gradients] == ["x"]
    torch.testing.assert_close(loss, wanted, rtol=0.02, atol=0)
    assert ROUNDED < distance(gradients, truth) < 0.15


@EVERY_KIND
def test_adapters_train_beside_products_in_fp8(kind, monkeypatch):
    monkeypatch.setattr(checkpoint, "may_multiply", lambda x, dtype, is_in_blocks: dtype is torch.bfloat16)
    model, plain = adapt_both(kind, targets=["q_proj", "v_proj"])
    tigon.fuse(model)
    (loss, gradients), (wanted, truth) = step(model), step(plain)
    torch.testing.assert_close(loss, wanted, rtol=0.02, atol=0)
    assert ROUNDED < distance(gradients, truth) < 0.3


def test_fuse_before_adapters_and_remove():
    model, _ = make()
    layer = model.model.layers[0].self_attn.o_proj
    before = {**vars(layer)}
    fusion = tigon.fuse(model)
    adapted = adapt(model, targets=["q_proj"])
    first, gradients = step(adapted)
    assert len(gradients) == 5
    again, _ = step(copy.deepcopy(adapted))
    assert torch.equal(first, again)
    fusion.remove()
    assert vars(layer).keys() == before.keys()
    assert type(layer) is FP8Linear


def test_peft_forwards_get_the_gradient_too():
    """Several adapters at once, adapters off, and hooks on a base layer: PEFT's code calls the layer."""
    model, plain = adapt_both("blocks")
    for m in (model, plain):
        torch.manual_seed(3)
        m.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
        tigon.fuse(m)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "lora" in k}, strict=False)

    def compare():
        (loss, gradients), (wanted, truth) = step(model), step(plain)
        torch.testing.assert_close(loss, wanted, rtol=1e-3, atol=0)
        assert distance(gradients, truth) < ROUNDED

    for m in (model, plain):
        m.base_model.set_adapter(["default", "second"])
    compare()
    for m in (model, plain):
        m.base_model.set_adapter("default")
        m.base_model.model.model.layers[1].mlp.up_proj.base_layer.register_forward_hook(lambda *_: None)
    compare()
    with model.disable_adapter(), plain.disable_adapter():
        (_, gradients), (_, truth) = step(model), step(plain)
    assert distance({"x": gradients["x"]}, {"x": truth["x"]}) < ROUNDED


@pytest.mark.parametrize("recompute", ["checkpoint", "reentrant", "cheap"])
def test_checkpointing_gives_the_same_bits(recompute):
    model = adapt(make()[0])
    tigon.fuse(model, **({"recompute": "cheap"} if recompute == "cheap" else {}))
    plain = adapt(make()[0])
    tigon.fuse(plain)
    truth = step(plain)
    if recompute != "cheap":
        model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
    loss, gradients = step(model)
    assert torch.equal(loss, truth[0])
    assert all(torch.equal(gradients[n], truth[1][n]) for n in truth[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_multiply_the_dense_weight(dtype):
    model, plain = (m.to(dtype) for m in (make()[1], make()[1]))
    linear = plain.model.layers[0].mlp.up_proj
    layer, linear.weight.data = quantize(linear, "blocks")
    model.model.layers[0].mlp.up_proj = layer
    tigon.fuse(model)
    (loss, gradients), (wanted, truth) = step(model), step(plain)
    torch.testing.assert_close(loss, wanted, rtol=1e-3, atol=0)
    assert distance(gradients, truth) < ROUNDED


def test_sizes_that_are_no_multiples_of_blocks():
    linear = nn.Linear(200, 130, bias=False)
    layer = FP8Linear(200, 130, (128, 128)).requires_grad_(False)
    layer.weight.data = linear.weight.detach().mul(1000).to(E4M3)
    layer.weight_scale_inv.data = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) / 1000
    wide = layer.weight_scale_inv.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :200]
    exact = layer.weight.float() * wide
    model = nn.Sequential(layer)
    tigon.fuse(model)
    x = torch.randn(3, 200, requires_grad=True)
    model(x).sum().backward()
    torch.testing.assert_close(model(x), x @ exact.t())
    torch.testing.assert_close(x.grad, exact.sum(0).expand(3, -1))


def spoil(layer, how):
    if how == "static":
        layer.activation_scale = nn.Parameter(torch.ones(()), requires_grad=False)
    elif how == "e5m2":
        layer.weight.data = layer.weight.data.to(torch.float8_e5m2)
    elif how == "fnuz":
        layer.weight.data = layer.weight.data.view(torch.float8_e4m3fnuz)
    elif how == "no scale":
        layer.weight_scale_inv = None
    elif how == "other scales":
        layer.weight_scale_inv.data = torch.ones(1, 3)


REASONS = {
    "static": "its input has a static scale",
    "e5m2": "its weight is float8_e5m2, and Tigon reads float8_e4m3fn alone",
    "fnuz": "its weight is float8_e4m3fnuz",
    "no scale": "it is in FP8, but has no scales for its weight",
    "other scales": r"its scales \(1, 3\) do not fit its weight \(256, 128\) in blocks of 128 × 128",
}


@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize("how", REASONS)
def test_layers_that_cannot_be_read_raise_where_a_gradient_would_be_lost(how, is_adapted, monkeypatch):
    monkeypatch.delattr(sys.modules[FP8Linear.__module__], "FP8LinearFunction", raising=False)  # as transformers 5.17
    model, _ = make()
    spoil(model.model.layers[1].self_attn.q_proj, how)
    model = adapt(model, targets=["q_proj" if is_adapted else "v_proj"])
    tigon.fuse(model)
    with pytest.raises(RuntimeError, match=f"fuse: a FP8Linear runs its own forward, since {REASONS[how]}"):
        step(model)


@pytest.mark.parametrize("way", ["compile", "keyword"])
def test_calls_that_tigon_leaves_raise_where_a_gradient_would_be_lost(way, monkeypatch):
    monkeypatch.delattr(sys.modules[FP8Linear.__module__], "FP8LinearFunction", raising=False)  # as transformers 5.17
    monkeypatch.setattr(FP8Linear, "forward", lambda self, input: input.detach())
    model = nn.Sequential(make()[0].model.layers[0].mlp.up_proj)
    tigon.fuse(model)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: way == "compile")
    x = torch.randn(3, 128, dtype=torch.bfloat16, requires_grad=True)
    call = (lambda: model[0](input=x)) if way == "keyword" else (lambda: model[0](x))
    with pytest.raises(RuntimeError, match=r"since it was called by torch\.compile, .* or with keywords"):
        call()
    with torch.no_grad():
        call()


def test_layers_that_cannot_be_read_run_their_own_forward(monkeypatch):
    """Where that has a gradient, and where none is needed."""
    calls = []

    def forward(x, *rest):
        calls.append(x)
        return x.clone()

    module = sys.modules[FP8Linear.__module__]
    monkeypatch.setattr(module, "fp8_linear", lambda x, *rest, **named: forward(x))
    monkeypatch.setattr(module, "FP8LinearFunction", type("Own", (), {"apply": forward}), raising=False)
    layer = FP8Linear(128, 128, (128, 128)).requires_grad_(False)
    spoil(layer, "static")
    model = nn.Sequential(layer)
    fusion = tigon.fuse(model)
    x = torch.randn(2, 128, requires_grad=True)
    model(x)
    with torch.no_grad():
        model(x)
    assert len(calls) == 2
    assert "its input has a static scale" in str(fusion.report())


def test_a_weight_that_was_dequantised_runs_as_the_layer_does():
    model, plain = make()
    layer, linear = model.model.layers[0].mlp.down_proj, plain.model.layers[0].mlp.down_proj
    layer.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
    tigon.fuse(model)
    (loss, gradients), (wanted, truth) = step(model), step(plain)
    torch.testing.assert_close(loss, wanted, rtol=1e-3, atol=0)
    assert distance(gradients, truth) < ROUNDED


def test_adapters_in_fp8_are_left_to_peft():
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj"])
    model = peft.get_peft_model(make()[0], adapters, autocast_adapter_dtype=False)
    fusion = tigon.fuse(model)
    with pytest.raises(RuntimeError, match="Float8"):
        step(model)
    assert "its adapter is in FP8 itself" in str(fusion.report())


def test_autocast_and_inference():
    model, _ = make()
    layer = model.model.layers[0].mlp.up_proj
    tigon.fuse(model)
    x = torch.randn(3, 128, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert (y.dtype, y.shape[1]) == (torch.float32, 256)
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(layer(x.bfloat16()).float(), y.detach(), rtol=0.02, atol=0.02)
