"""qk_norm_rope as its two halves, and as models write them."""

import importlib

import pytest
import torch
from ops_table.rotary import eager_qk_norm_rope

import tigon
from tigon import qk_norm_rope
from tigon.ops.qk_norm_rope import qk_norm_rope_reference

GEMMA = {"cast": "gemma", "offset": 1.0}


@pytest.fixture
def inputs(device):
    """q, k as (B, H, T, D) views of projections; their weights; angles."""
    q, k = (torch.randn(2, 6, heads, 16, device=device).transpose(1, 2) for heads in (4, 2))
    weights = (0.3 * torch.randn(2, 16, device=device)).unbind()
    angle = torch.randn(2, 6, 8, device=device)
    return q, k, *weights, *(torch.cat((a, a), -1) for a in (angle.cos(), angle.sin()))


@pytest.mark.parametrize("options", [{}, GEMMA, {"eps": 0.1, "config": tigon.Rope(interleaved=True)}], ids=str)
def test_norm_then_rotation(inputs, options, backend, device):
    q, k, q_weight, k_weight, cos, sin = inputs
    normed = [
        tigon.rms_norm(x, w, **{n: v for n, v in options.items() if n != "config"})
        for x, w in ((q, q_weight), (k, k_weight))
    ]
    expected = tigon.rope(*normed, cos, sin, config=options.get("config", tigon.Rope()))
    for a, b in zip(qk_norm_rope(*inputs, **options), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "norm", "options"), [("qwen3", "Qwen3RMSNorm", {}), ("gemma3", "Gemma3RMSNorm", GEMMA)]
)
def test_the_attention_of_transformers(inputs, family, norm, options, backend, device):
    pytest.importorskip("transformers")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    q, k, q_weight, k_weight, cos, sin = inputs
    norms = [getattr(module, norm)(16).to(device) for _ in range(2)]
    for layer, weight in zip(norms, (q_weight, k_weight), strict=True):
        layer.weight.data.copy_(weight)
    expected = module.apply_rotary_pos_emb(norms[0](q), norms[1](k), cos, sin)
    for a, b in zip(qk_norm_rope(*inputs, **options), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, GEMMA], ids=str)
def test_rounded_once_it_is_nearer_to_the_truth_than_eager_code(inputs, options, backend, device):
    rounded = [t.bfloat16() for t in inputs]
    exact = qk_norm_rope_reference(*(t.double() for t in rounded), **options)
    ours, eager = qk_norm_rope(*rounded, **options), eager_qk_norm_rope(*rounded, **options)
    for y, e, truth in zip(ours, eager, exact, strict=True):
        assert (y - truth).abs().mean() < 0.9 * (e - truth).abs().mean()


def test_nothing_is_kept_but_the_inputs(inputs, device, triton_backend):
    leaves = [t.requires_grad_(i < 4) for i, t in enumerate(inputs)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        qk_norm_rope(*leaves)
    assert set(kept) == {t.data_ptr() for t in leaves}


@pytest.mark.xdist_group("2**31 elements")
def test_heads_two_to_the_31_elements_apart(inputs, device, triton_backend):
    """As in one sequence of 512k tokens, stored head by head. On a CPU memory that nobody touches costs nothing."""

    def far(x):
        strides = 0, 2**30, 16, 1
        return torch.empty(2**31 + 192, dtype=x.dtype, device=device).as_strided(x.shape, strides).copy_(x)

    _, k, *weights, cos, sin = (t.bfloat16() for t in inputs)
    q, dy = torch.randn(2, 1, 3, 6, 16, device=device).bfloat16()
    near, apart = q.clone().requires_grad_(), far(q).requires_grad_()
    expected, y = (qk_norm_rope(x, k[:1], *weights, cos[:1], sin[:1])[0] for x in (near, apart))
    assert torch.equal(y, expected)
    assert torch.equal(torch.autograd.grad(y, apart, far(dy))[0], torch.autograd.grad(expected, near, dy)[0])
