"""A gated MLP with adapters in tiles: numbers beside the untiled unit, what it keeps, and fused models that use it."""

import pytest
import torch
from adapters_made import draw_layers
from numerics import check
from torch.nn import functional as F

import tigon
from tigon.ops.acts import ACTS
from tigon.ops.linear import tiled_lora_mlp as module
from tigon.ops.linear.tiled_lora_mlp import tiled_lora_mlp

H, N = 24, 40
SCALES = (2.0, 0.5, 1.5)
TRAINED = (0, 2, 3, 4, 6, 7, 8, 10, 11, 12)  # x, and A, B and bias of each layer


def drawn(rows, dtype=torch.bfloat16, adapters=None, ranks=(4, 4, 4)):
    return draw_layers((rows,), ((N, H), (N, H), (H, N)), ranks, dtype, adapters, b=0.5, bias=0.5)


def layers_of(tensors):
    return tuple(
        tigon.LoRA(w.detach(), a, b, s, bias)
        for (w, a, b, bias), s in zip((tensors[i : i + 4] for i in (0, 4, 8)), SCALES, strict=True)
    )


def ours(x, *tensors, act="silu", tile_bytes=1):
    return tiled_lora_mlp(x, layers_of(tensors), act=act, tile_bytes=tile_bytes)


def eager(x, *tensors, act="silu", tile_bytes=1):
    def run(x, layer):
        low = F.linear(F.linear(x.to(layer.a.dtype), layer.a), layer.b)
        return (F.linear(x, layer.weight, layer.bias) + low * layer.scale).to(x.dtype)

    gate, up, down = layers_of(tensors)
    return run(ACTS[act].value(run(x, gate)) * run(x, up), down)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "options", "act"),
    [(7, {}, "silu"), (300, {}, "gelu_tanh"), (140, {"ranks": (1, 8, 3)}, "relu2")],  # one tile, three, two
)
def test_forward_and_gradients(rows, options, act, dtype, triton_backend, device):
    make = drawn(rows, dtype, **options)
    check(ours, eager, lambda g: make(g, device), grad=TRAINED, act=act, draws=2)


def test_x_alone_is_kept(triton_backend, device):
    inputs = drawn(300)(torch.Generator().manual_seed(0), device)
    leaves = [t.requires_grad_(i in TRAINED) for i, t in enumerate(inputs)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours(*leaves)
    assert [tuple(t.shape) for t in saved if t.shape and t.shape[0] == 300] == [(300, H)]


def test_a_frozen_weight_is_made_dense_once_a_pass(triton_backend, device):
    calls = []

    class Packed:
        def __init__(self, weight):
            self.weight, self.shape, self.device = weight, weight.shape, weight.device

        def dense(self, dtype):
            calls.append(1)
            return self.weight.to(dtype)

    inputs = drawn(300)(torch.Generator().manual_seed(0), device)
    layers = tuple(layer._replace(weight=Packed(layer.weight)) for layer in layers_of(inputs[1:]))
    y = tiled_lora_mlp(inputs[0].requires_grad_(), layers, tile_bytes=1)
    y.sum().backward()
    assert len(calls) == 6


def test_fused_models_use_it(triton_backend, device, monkeypatch):
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    from tigon.fusion.parts import mlp

    def model():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8,
        )  # fmt: skip
        adapters = peft.LoraConfig(r=4, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
        return peft.get_peft_model(LlamaForCausalLM(config).to(device), adapters)

    seen = []
    monkeypatch.setattr(mlp, "tiled_lora_mlp", lambda *a, **k: seen.append(1) or module.tiled_lora_mlp(*a, **k))
    ids = torch.arange(12, device=device)[None]
    gradients = []
    for fused in (False, True):
        made = model()
        if fused:
            fusion = tigon.fuse(made, recompute="mlp")
        with tigon.use_backend("triton" if fused else "auto"):
            made(input_ids=ids, labels=ids).loss.backward()
        gradients.append({n: p.grad for n, p in made.named_parameters() if p.grad is not None})
    assert seen == [1]
    assert fusion.report().calls["adapters"] == 3
    for name, g in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], g, rtol=1e-4, atol=1e-6)
