"""Liger's modules and functions: the answers of plain PyTorch, its parameters, and gradients that are nobody else's."""

from __future__ import annotations

import copy
import functools
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


def rms(x, weight=None, *, eps=1e-5, offset=0.0, cast="llama"):
    y = wide(x) * torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps)
    if cast == "llama":
        y = y.to(x.dtype)
        return y if weight is None else (offset + weight) * y
    return (y if weight is None else y * (offset + wide(weight))).to(x.dtype)


def poly(x, weight, bias):
    powers = (wide(x) ** n for n in (3, 2, 1))
    normed = (u * torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-6) for u in powers)
    return (sum(w * u for w, u in zip(wide(weight), normed, strict=True)) + wide(bias)).to(x.dtype)


def sparsemax(x, dim=-1):
    """By bisection, unlike ours: the threshold at which the rest adds up to one."""
    low, high = x.amax(dim, keepdim=True) - 1, x.amax(dim, keepdim=True)
    for _ in range(80):
        mid = (low + high) / 2
        more = (x - mid).clamp(min=0).sum(dim, keepdim=True) > 1
        low, high = torch.where(more, mid, low), torch.where(more, high, mid)
    return (x - low).clamp(min=0)


GEMMA_NORM = {"offset": 1.0, "cast": "gemma"}
NORMS = {
    "LigerRMSNorm": {}, "LigerRMSNormForGlm4": {}, "LigerRMSNormForOlmo2": {},
    "LigerRMSNormForGemma4": {"cast": "gemma"},
    **{f"LigerRMSNormFor{family}": GEMMA_NORM for family in ("Gemma", "Gemma2", "Gemma3", "Qwen3Next")},
}  # fmt: skip
X = (3, 5, H)
# How a module is made, the shapes of its inputs, and its formula in plain PyTorch, of the inputs and the parameters.
MODULES = {
    **{name: (lambda n=name: getattr(liger, n)(H, eps=1e-5), [X], functools.partial(rms, **formula))
       for name, formula in NORMS.items()},
    "LigerFusedAddRMSNorm": (
        lambda: liger.LigerFusedAddRMSNorm(H, eps=1e-5), [X, X], lambda x, r, w: (rms(x + r, w), x + r),
    ),
    "LigerLayerNorm": (
        lambda: liger.LigerLayerNorm(H, bias=True), [X],
        lambda x, w, b: F.layer_norm(wide(x), (H,), wide(w), wide(b), 1e-6).to(x.dtype),
    ),
    "LigerGroupNorm": (
        lambda: liger.LigerGroupNorm(8, 2, bias=True), [(2, 8, 5, 3)],
        lambda x, w, b: F.group_norm(wide(x), 2, wide(w), wide(b), 1e-6).to(x.dtype),
    ),
    "LigerDyT": (
        lambda: liger.LigerDyT(H), [X],
        lambda x, alpha, w, b: (wide(w) * torch.tanh(wide(alpha) * wide(x)) + wide(b)).to(x.dtype),
    ),
    "LigerPolyNorm": (liger.LigerPolyNorm, [X], poly),
    "LigerSoftmax": (liger.LigerSoftmax, [X], lambda x: wide(x).softmax(-1).to(x.dtype)),
    "LigerReLUSquared": (liger.LigerReLUSquared, [X], lambda x: wide(x).relu().square().to(x.dtype)),
}  # fmt: skip


@DTYPES
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, dtype):
    make, shapes, expected = MODULES[name]
    parameters = dict(make().named_parameters())

    def op(*tensors):
        own = dict(zip(parameters, tensors[len(shapes) :], strict=True))
        return torch.func.functional_call(make(), own, tensors[: len(shapes)])

    sizes = [*shapes, *(p.shape for p in parameters.values())]
    check(op, expected, drawn(dtype, *sizes), draws=8 if name == "LigerPolyNorm" else 4)


@DTYPES
def test_gated_functions(dtype):
    pair = drawn(dtype, X, X)
    check(liger.liger_swiglu, lambda a, b: (F.silu(wide(a)) * wide(b)).to(a.dtype), pair, draws=4)
    check(
        liger.liger_geglu, lambda a, b: (F.gelu(wide(a), approximate="tanh") * wide(b)).to(a.dtype), pair, draws=4
    )  # fmt: skip


def test_sparsemax():
    x = torch.randn(4, 7, 9)
    for dim in (-1, 1):
        torch.testing.assert_close(liger.LigerSparsemax(dim)(x), sparsemax(x, dim))


def test_norms_start_as_the_identity_and_have_the_dtype_of_their_input():
    """Also under a weight of fp32, where Hugging Face's has the weight's."""
    ones, x = torch.ones(2, H), torch.randn(3, H)
    for name in NORMS:
        torch.testing.assert_close(getattr(liger, name)(H)(ones), ones, rtol=1e-5, atol=1e-5)
        assert getattr(liger, name)(H)(x.bfloat16()).dtype == torch.bfloat16
    for norm in (liger.LigerRMSNorm(H, elementwise_affine=False), liger.LigerRMSNormForGemma4(H, with_scale=False)):
        assert not list(norm.parameters())
        torch.testing.assert_close(norm(x), rms(x, eps=1e-6, cast="gemma"))
    assert not liger.LigerLayerNorm(H, bias=True).bias.any()
    assert liger.LigerDyT(H, beta=False).beta is None


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


CONFIG = SimpleNamespace(hidden_size=H, intermediate_size=40, hidden_act="silu")
GEMMA = SimpleNamespace(hidden_size=H, intermediate_size=40, hidden_act="gelu_pytorch_tanh")


def tanh(x):
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize(("name", "act"), [("LigerSwiGLUMLP", F.silu), ("LigerGEGLUMLP", tanh)])
def test_mlps(name, act):
    torch.manual_seed(0)
    mlp = getattr(liger, name)(GEMMA if "GEGLU" in name else CONFIG)
    x = torch.randn(2, 50, H)
    outputs = []
    for forward in (mlp, lambda x: mlp.down_proj(act(mlp.gate_proj(x)) * mlp.up_proj(x))):
        mlp.zero_grad()
        leaf = x.clone().requires_grad_()
        y = forward(leaf)
        y.square().sum().backward()
        outputs.append([y.detach(), leaf.grad, *(p.grad.clone() for p in mlp.parameters())])
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    assert len(list(mlp.parameters())) == 3


def test_activations_follow_the_configuration():
    with pytest.raises(ValueError, match=r"LigerSwiGLUMLP: config.hidden_act must be one of silu, swish, got 'gelu"):
        liger.LigerSwiGLUMLP(GEMMA)


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


@pytest.mark.parametrize("name", ["LigerRMSNorm", "LigerFusedAddRMSNorm", "LigerLayerNorm"])
def test_a_start_is_ones_or_zeros(name):
    assert not getattr(liger, name)(H, init_fn="zeros").weight.any()
    with pytest.raises(ValueError, match=f"{name}: init_fn must be 'ones' or 'zeros', got 'random'"):
        getattr(liger, name)(H, init_fn="random")


def test_modules_are_pickled_and_copied():
    for module in (liger.LigerRMSNorm(H), liger.LigerSwiGLUMLP(CONFIG), liger.LigerFusedLinearDPOLoss(beta=0.3)):
        again = pickle.loads(pickle.dumps(module))
        assert repr(again) == repr(module) == repr(copy.deepcopy(module))
