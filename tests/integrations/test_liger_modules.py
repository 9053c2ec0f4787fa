"""Liger's modules and functions: the answers of plain PyTorch, its parameters, and gradients that are nobody else's."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from numerics import check
from plain import wide

from tigon.integrations import liger

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
H = 24


def drawn(dtype, *shapes):
    return lambda g: [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


# ------------------------------------------------------------------------------------------------------------- norms


def rms(x, weight=None, *, eps=1e-6, offset=0.0, cast="llama"):
    y = wide(x) * torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps)
    if cast == "llama":
        y = y.to(x.dtype)
        return y if weight is None else (offset + weight) * y
    return (y if weight is None else y * (offset + wide(weight))).to(x.dtype)


NORMS = {
    "LigerRMSNorm": {},
    "LigerRMSNormForGemma": {"offset": 1.0, "cast": "gemma"},
    "LigerRMSNormForGemma2": {"offset": 1.0, "cast": "gemma"},
    "LigerRMSNormForGemma3": {"offset": 1.0, "cast": "gemma"},
    "LigerRMSNormForGemma4": {"cast": "gemma"},
    "LigerRMSNormForGlm4": {},
    "LigerRMSNormForMuseGlimmer": {"cast": "gemma"},
    "LigerRMSNormForMuseGlimmerTextCentered": {"offset": 1.0, "cast": "gemma"},
    "LigerRMSNormForOlmo2": {},
    "LigerRMSNormForQwen3Next": {"offset": 1.0, "cast": "gemma"},
}


@pytest.mark.parametrize(("name", "formula"), NORMS.items())
@DTYPES
def test_rms_norms(name, formula, dtype):
    def op(x, weight):
        return torch.func.functional_call(getattr(liger, name)(H, eps=1e-5), {"weight": weight}, x)

    check(op, lambda x, w: rms(x, w, eps=1e-5, **formula), drawn(dtype, (3, 5, H), (H,)), draws=4)
    # As it starts, the weight scales by one.
    torch.testing.assert_close(getattr(liger, name)(H)(torch.ones(2, H)), torch.ones(2, H), rtol=1e-5, atol=1e-5)


def test_norms_without_a_weight():
    x = torch.randn(3, H)
    for norm in (
        liger.LigerRMSNorm(H, elementwise_affine=False),
        liger.LigerRMSNormForGemma4(H, with_scale=False),
        liger.LigerRMSNormForMuseGlimmer(with_scale=False),
    ):
        assert not list(norm.parameters())
        torch.testing.assert_close(norm(x), rms(x, cast="gemma"))


def test_a_norm_has_the_dtype_of_its_input():
    """Also under a weight of fp32, where Hugging Face's has the weight's."""
    x = torch.randn(3, H, dtype=torch.bfloat16)
    assert liger.LigerRMSNorm(H)(x).dtype == torch.bfloat16
    assert liger.LigerFusedAddRMSNorm(H)(x, x)[0].dtype == torch.bfloat16


@DTYPES
def test_fused_add_rms_norm(dtype):
    def op(x, residual, weight):
        return torch.func.functional_call(liger.LigerFusedAddRMSNorm(H), {"weight": weight}, (x, residual))

    check(
        op, lambda x, r, w: (rms(x + r, w), x + r), drawn(dtype, (3, 5, H), (3, 5, H), (H,)), draws=4
    )  # fmt: skip


MODULATION = {"one": (H,), "one row": (1, H), "a row for each sequence": (3, H), "a row for each token": (3, 5, H)}


@pytest.mark.parametrize("shape", MODULATION.values(), ids=MODULATION.keys())
@pytest.mark.parametrize("shifted", [False, True])
@DTYPES
def test_modulated_rms_norm(shape, shifted, dtype):
    norm = liger.LigerModulatedRMSNorm(H)

    def expected(x, weight, scale, *shift):
        of = (3, 1, H) if shape == (3, H) else shape
        y = wide(rms(x, weight)) * (1 + wide(scale).view(of))
        return (y + wide(shift[0]).view(of) if shift else y).to(x.dtype)

    def op(x, weight, *modulation):
        return torch.func.functional_call(norm, {"weight": weight}, (x, *modulation))

    check(op, expected, drawn(dtype, (3, 5, H), (H,), shape, *[shape] * shifted), draws=4)


def test_nothing_that_a_caller_sees_is_overwritten():
    """With in_place=True, Liger's default, the incoming gradient would be."""
    x = torch.randn(4, H, requires_grad=True)
    y = liger.LigerRMSNorm(H, in_place=True)(x)
    upstream = torch.randn_like(y)
    before = upstream.clone()
    y.backward(upstream, retain_graph=True)
    first = x.grad.clone()
    assert torch.equal(upstream, before)
    x.grad = None
    y.backward(upstream)
    assert torch.equal(x.grad, first)


@DTYPES
def test_layer_norm(dtype):
    def op(x, weight, bias):
        return torch.func.functional_call(liger.LigerLayerNorm(H, bias=True), {"weight": weight, "bias": bias}, x)

    def expected(x, weight, bias):
        return F.layer_norm(wide(x), (H,), wide(weight), wide(bias), 1e-6).to(x.dtype)

    check(op, expected, drawn(dtype, (3, 5, H), (H,), (H,)), draws=4)
    assert not liger.LigerLayerNorm(H, bias=True).bias.any()


@DTYPES
def test_group_norm(dtype):
    def op(x, weight, bias):
        norm = liger.LigerGroupNorm(8, 2, bias=True)
        return torch.func.functional_call(norm, {"weight": weight, "bias": bias}, x)

    def expected(x, weight, bias):
        return F.group_norm(wide(x), 2, wide(weight), wide(bias), 1e-6).to(x.dtype)

    check(op, expected, drawn(dtype, (2, 8, 5, 3), (8,), (8,)), draws=4)


@DTYPES
def test_dyt(dtype):
    def op(x, alpha, gamma, beta):
        return torch.func.functional_call(liger.LigerDyT(H), {"alpha": alpha, "gamma": gamma, "beta": beta}, x)

    def expected(x, alpha, gamma, beta):
        return (wide(gamma) * torch.tanh(wide(alpha) * wide(x)) + wide(beta)).to(x.dtype)

    check(op, expected, drawn(dtype, (3, 5, H), (1,), (H,), (H,)), draws=4)
    assert liger.LigerDyT(H, beta=False).beta is None


@DTYPES
def test_poly_norm(dtype):
    def norm(u):
        return u * torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-6)

    def expected(x, weight, bias):
        x32, w = wide(x), wide(weight)
        return (w[0] * norm(x32**3) + w[1] * norm(x32**2) + w[2] * norm(x32) + wide(bias)).to(x.dtype)

    def op(x, weight, bias):
        return torch.func.functional_call(liger.LigerPolyNorm(), {"weight": weight, "bias": bias}, x)

    check(op, expected, drawn(dtype, (3, 5, H), (3,), ()), draws=8)


# -------------------------------------------------------------------------------------------------------- activations


@DTYPES
def test_small_functions(dtype):
    x = drawn(dtype, (3, 5, H))
    pair = drawn(dtype, (3, 5, H), (3, 5, H))
    check(liger.LigerSoftmax(), lambda x: wide(x).softmax(-1).to(x.dtype), x, draws=4)
    check(liger.LigerReLUSquared(), lambda x: wide(x).relu().square().to(x.dtype), x, draws=4)
    check(liger.liger_swiglu, lambda a, b: (F.silu(wide(a)) * wide(b)).to(a.dtype), pair, draws=4)
    check(
        liger.liger_geglu, lambda a, b: (F.gelu(wide(a), approximate="tanh") * wide(b)).to(a.dtype), pair, draws=4
    )  # fmt: skip


def sparsemax(x, dim=-1):
    """By bisection, unlike ours: the threshold at which the rest adds up to one."""
    low, high = x.amax(dim, keepdim=True) - 1, x.amax(dim, keepdim=True)
    for _ in range(80):
        mid = (low + high) / 2
        more = (x - mid).clamp(min=0).sum(dim, keepdim=True) > 1
        low, high = torch.where(more, mid, low), torch.where(more, high, mid)
    return (x - low).clamp(min=0)


def test_sparsemax():
    x = torch.randn(4, 7, 9)
    for dim in (-1, 1):
        torch.testing.assert_close(liger.LigerSparsemax(dim)(x), sparsemax(x, dim))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_multi_token_attention(sparse, groups):
    L = 7
    attention = liger.LigerMultiTokenAttention(4, 2, 3, padding=1, groups=groups, sparse=sparse)
    future = torch.ones(L, L, dtype=torch.bool).triu(1)

    def expected(scores, weight, bias):
        scores = scores.masked_fill(future, -1e9)
        if sparse:
            support = (sparsemax(scores.detach()) > 0).to(scores)
            p = (scores - ((scores * support).sum(-1, keepdim=True) - 1) / support.sum(-1, keepdim=True)) * support
        else:
            p = scores.softmax(-1)
        return F.conv2d(p, weight, bias, padding=1, groups=groups).masked_fill(future, 0.0)

    def op(scores, weight, bias):
        return torch.func.functional_call(attention, {"weight": weight, "bias": bias}, scores)

    check(
        op, expected, drawn(torch.float32, (2, 4, L, L), (2, 4 // groups, 3, 3), (2,)), draws=2, roundings=16
    )  # fmt: skip


def test_embedding():
    table = liger.LigerEmbedding(11, H, padding_idx=3)
    assert not table.weight[3].any()
    with torch.no_grad():
        table.weight[3] = 1.0  # as a checkpoint may have it: the result is zero all the same
    ids = torch.tensor([[1, 3, 5], [10, 1, 3]])
    y = table(ids)
    torch.testing.assert_close(y, F.embedding(ids, table.weight) * (ids != 3).unsqueeze(-1))
    upstream = torch.randn_like(y)
    y.backward(upstream)
    expected = torch.zeros(11, H).index_add(0, ids.flatten(), upstream.flatten(0, 1))
    expected[3] = 0
    torch.testing.assert_close(table.weight.grad, expected)


# --------------------------------------------------------------------------------------------------------------- MLPs


CONFIG = SimpleNamespace(
    hidden_size=H, intermediate_size=40, hidden_act="silu", mlp_bias=False, mlp_multipliers=(0.7, 1.3)
)
GEMMA = SimpleNamespace(
    hidden_size=H, intermediate_size=40, hidden_act="gelu_pytorch_tanh", use_double_wide_mlp=True,
    num_hidden_layers=6, num_kv_shared_layers=2,
)  # fmt: skip


def gated(gate, up, down, act=F.silu, a=1.0, b=1.0):
    return lambda x: down(act(gate(x) * a) * up(x)) * b


def tanh(x):
    return F.gelu(x, approximate="tanh")


MLPS = {
    "LigerSwiGLUMLP": lambda m: gated(m.gate_proj, m.up_proj, m.down_proj),
    "LigerMLP": lambda m: gated(m.gate_proj, m.up_proj, m.down_proj),
    "LigerQwen3MoeSwiGLUMLP": lambda m: gated(m.gate_proj, m.up_proj, m.down_proj),
    "LigerHunyuanV1SwiGLUMLP": lambda m: gated(m.gate_proj, m.up_proj, m.down_proj),
    "LigerSwiGLUMLPForMuseGlimmer": lambda m: gated(m.gate_proj, m.up_proj, m.down_proj),
    "LigerTiledSwiGLUMLP": lambda m: gated(m.gate_proj, m.up_proj, m.down_proj),
    "LigerBlockSparseTop2MLP": lambda m: gated(m.w1, m.w3, m.w2),
    "LigerPhi3SwiGLUMLP": lambda m: (
        lambda x: m.down_proj(F.silu(m.gate_up_proj(x)[..., :40]) * m.gate_up_proj(x)[..., 40:])
    ),
    "LigerFalconH1SwiGLUMLP": lambda m: gated(m.gate_proj, m.up_proj, m.down_proj, a=0.7, b=1.3),
    "LigerFalconH1MLP": lambda m: gated(m.gate_proj, m.up_proj, m.down_proj, a=0.7, b=1.3),
    "LigerGEGLUMLP": lambda m: gated(m.gate_proj, m.up_proj, m.down_proj, tanh),
    "LigerGEGLUMLPForGemma4": lambda m: gated(m.gate_proj, m.up_proj, m.down_proj, tanh),
    "LigerTiledGEGLUMLP": lambda m: gated(m.gate_proj, m.up_proj, m.down_proj, tanh),
}


@pytest.mark.parametrize(("name", "formula"), MLPS.items())
def test_mlps(name, formula):
    torch.manual_seed(0)
    mlp = getattr(liger, name)(GEMMA if "GEGLU" in name else CONFIG)
    x = torch.randn(2, 50, H)
    outputs = []
    for forward in (mlp, formula(mlp)):
        mlp.zero_grad()
        leaf = x.clone().requires_grad_()
        y = forward(leaf)
        y.square().sum().backward()
        outputs.append([y.detach(), leaf.grad, *(p.grad.clone() for p in mlp.parameters())])
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    assert len(list(mlp.parameters())) == (2 if name == "LigerPhi3SwiGLUMLP" else 3)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_experts": 5, "moe_intermediate_size": 12},
        {"num_local_experts": 5},
        {"n_routed_experts": 5},
    ],
)
def test_experts(sizes):
    """Some of them without a token."""
    experts = liger.LigerExperts(SimpleNamespace(hidden_size=H, intermediate_size=16, hidden_act="silu", **sizes))
    width = sizes.get("moe_intermediate_size", 16)
    index = torch.randint(0, 4, (2, 7, 2), generator=torch.Generator().manual_seed(0))

    def expected(x, weights, gate_up, down):
        y = torch.zeros_like(x)
        for e in range(5):
            gate, up = F.linear(x, gate_up[e]).split(width, dim=-1)
            share = (weights * (index == e)).sum(-1, keepdim=True)
            y = y + share * F.linear(F.silu(gate) * up, down[e])
        return y

    def op(x, weights, gate_up, down):
        parameters = {"gate_up_proj": gate_up, "down_proj": down}
        return torch.func.functional_call(experts, parameters, (x, index, weights))

    check(
        op, expected, drawn(torch.float32, (2, 7, H), (2, 7, 2), (5, 2 * width, H), (5, H, width)), draws=2, roundings=8
    )  # fmt: skip


def test_falcons_multiplier_is_of_the_bias_too():
    config = copy.copy(CONFIG)
    config.mlp_bias = True
    mlp = liger.LigerFalconH1SwiGLUMLP(config)
    x = torch.randn(3, H)
    torch.testing.assert_close(mlp(x), gated(mlp.gate_proj, mlp.up_proj, mlp.down_proj, a=0.7, b=1.3)(x))
    assert mlp.down_proj.bias.any()


def test_widths_and_activations_follow_the_configuration():
    assert liger.LigerSwiGLUMLP(CONFIG, intermediate_size=8).up_proj.out_features == 8
    assert liger.LigerGEGLUMLPForGemma4(GEMMA, layer_idx=3).up_proj.out_features == 40
    assert liger.LigerGEGLUMLPForGemma4(GEMMA, layer_idx=4).up_proj.out_features == 80
    with pytest.raises(ValueError, match=r"LigerSwiGLUMLP: config.hidden_act must be one of silu, swish, got 'gelu"):
        liger.LigerSwiGLUMLP(GEMMA)
    with pytest.raises(ValueError, match=r"LigerTiledGEGLUMLP: config.hidden_act must be one of gelu"):
        liger.LigerTiledGEGLUMLP(CONFIG)


def test_a_tiled_mlp_keeps_one_tile():
    mlp = liger.LigerTiledSwiGLUMLP(CONFIG, num_shards=5)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape[-1]) or t, lambda t: t):
        mlp(torch.randn(2, 50, H, requires_grad=True))
    assert CONFIG.intermediate_size not in saved


# ------------------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: liger.LigerRMSNorm(H, row_mode=True), "LigerRMSNorm: row_mode=True"),
        (lambda: liger.LigerFusedAddRMSNorm(H, in_place=True), "LigerFusedAddRMSNorm: in_place=True"),
        (lambda: liger.LigerLayerNorm(H, impl="nvidia-cutile"), "LigerLayerNorm: impl='nvidia-cutile'"),
        (lambda: liger.LigerLayerNorm(H, backend="triton"), "LigerLayerNorm: backend='triton'"),
    ],
)
def test_options_without_effect_say_so(make, option):
    with pytest.warns(UserWarning, match=f"{option}.* has no effect here"):
        make()


@pytest.mark.parametrize("name", ["LigerRMSNorm", "LigerFusedAddRMSNorm", "LigerLayerNorm", "LigerModulatedRMSNorm"])
def test_a_start_is_ones_or_zeros(name):
    assert not getattr(liger, name)(H, init_fn="zeros").weight.any()
    with pytest.raises(ValueError, match=f"{name}: init_fn must be 'ones' or 'zeros', got 'random'"):
        getattr(liger, name)(H, init_fn="random")


def test_modules_are_pickled_and_copied():
    for module in (liger.LigerRMSNorm(H), liger.LigerSwiGLUMLP(CONFIG), liger.LigerFusedLinearDPOLoss(beta=0.3)):
        again = pickle.loads(pickle.dumps(module))
        assert repr(again) == repr(module) == repr(copy.deepcopy(module))
