"""Experts of a mixture: splits of tokens over them, the sort of their choices, and what surrounds the table's cases."""

from __future__ import annotations

import functools

import pytest
import torch
from numerics import check
from ops_table.experts import MOE_MLP, _eager, _public, _reference
from ops_table.row import Case
from torch import Tensor

import tigon
from tigon.kernels import HAS_TRITON
from tigon.ops.experts import launches, moe_mlp, routing
from tigon.ops.experts.options import Expert


def weights_of(E: int, D: int, inner: int, dtype=torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    gate_up = torch.randn(E, 2 * inner, D, generator=generator) / D**0.5
    return gate_up.to(dtype), (torch.randn(E, D, inner, generator=generator) / inner**0.5).to(dtype)


SPLITS = {
    "all to one": lambda T: torch.full((T, 1), 2),
    "one to each, the rest to the last": lambda T: torch.arange(T).clamp(max=3)[:, None],
    "the same expert twice": lambda T: torch.stack((torch.arange(T) % 4, torch.arange(T) % 4), 1),
    "none at all": lambda T: torch.full((T, 2), 4),
    "none, by negative numbers": lambda T: torch.stack((torch.full((T,), -1), torch.arange(T) % 3), 1),
}


@pytest.mark.parametrize("split", SPLITS)
def test_any_split_of_tokens_over_experts(split, backend, device):
    T, E, D, inner = 21, 4, 16, 12
    index = SPLITS[split](T).to(device)
    gate_up, down = (w.to(device) for w in weights_of(E, D, inner))
    generator = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(T, n, generator=generator).to(device) for n in (D, index.shape[1]))
    if split == "none at all":
        leaves = [t.requires_grad_() for t in (x, weights, gate_up, down)]
        y = moe_mlp(x, index, *leaves[1:])
        assert y.count_nonzero() == 0
        assert all(g.count_nonzero() == 0 for g in torch.autograd.grad(y.sum(), leaves))
        return
    check(moe_mlp, _reference, x, index, weights, gate_up, down, eager=_eager)


def test_experts_without_tokens_get_a_gradient_of_zeros(backend, device):
    gate_up, down = (w.to(device).requires_grad_() for w in weights_of(4, 16, 12))
    x, index = torch.randn(9, 16, device=device), torch.full((9, 1), 2, device=device)
    moe_mlp(x, index, torch.ones(9, 1, device=device), gate_up, down).sum().backward()
    for w in (gate_up, down):
        assert [bool(g.any()) for g in w.grad] == [False, False, True, False]


def test_what_the_weights_of_missing_experts_hold_does_not_matter(backend, device):
    """Expert parallelism masks them; another router may leave anything there."""
    gate_up, down = (w.to(device) for w in weights_of(3, 16, 12))
    x, index = torch.randn(9, 16, device=device), torch.tensor([[0, 3]], device=device).repeat(9, 1)
    weights = torch.tensor([[0.5, float("nan")]], device=device).repeat(9, 1)
    y = moe_mlp(x, index, weights, gate_up, down)
    torch.testing.assert_close(y, moe_mlp(x, index[:, :1], weights[:, :1], gate_up, down))


@pytest.mark.parametrize(("slots", "E"), [(1, 1), (700, 3), (1500, 40)])
@pytest.mark.parametrize("rows", [16, 64])
def test_routing(slots, E, rows, device, triton_backend):
    """Several blocks of slots, and of tiles; against torch's stable sort."""
    index = torch.randint(0, E + 1, (slots, 1), generator=torch.Generator().manual_seed(0)).to(device)
    found = routing.route(index, E, rows)
    flat = index.flatten()
    expected = torch.sort(flat, stable=True).indices[: int((flat < E).sum())].int()
    assert torch.equal(found.order[: len(expected)], expected)
    assert torch.equal(found.place[expected.long()], torch.arange(len(expected), dtype=torch.int32, device=device))
    assert bool((found.place[flat == E] == -1).all())
    counts = torch.bincount(flat, minlength=E + 1)[:E]
    begin = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    assert torch.equal(found.offsets, begin.int())
    tiles = [(e, int(begin[e]) + r) for e in range(E) for r in range(0, int(counts[e]), rows)]
    assert found.tiles.t().tolist()[: len(tiles)] == [list(t) for t in tiles]
    assert bool((found.tiles[0, len(tiles) :] == E).all())
    assert len(tiles) <= routing.tiles_at_most(slots, E, rows) <= found.tiles.shape[1]


def test_gpt_oss_is_written_as_the_model_writes_it(backend, device):
    gate_up, down = (w.to(device) for w in weights_of(2, 16, 12))
    x, index = 4 * torch.randn(9, 16, device=device), torch.arange(9, device=device)[:, None] % 2
    y = moe_mlp(
        x,
        index,
        torch.ones(9, 1, device=device),
        gate_up,
        down,
        config=Expert(interleaved=True, alpha=1.702, limit=2.0, up_offset=1.0),
    )
    for t in range(9):
        z = gate_up[t % 2] @ x[t]
        gate, up = z[::2].clamp(max=2.0), z[1::2].clamp(-2.0, 2.0)
        expected = down[t % 2] @ ((up + 1) * gate * torch.sigmoid(gate * 1.702))
        torch.testing.assert_close(y[t], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_large_tiles_of_a_weight_stored_by_columns(interleaved, device, triton_backend):
    """Gate and up as the two halves of a tile's columns, and as pairs of columns, where parts of them are empty."""
    case = Case(
        "",
        (200, 24, 72, 2, 1),
        {"config": Expert(interleaved=interleaved, act="relu")},
        {"transposed": True, "bias": True},
    )
    inputs = MOE_MLP.draw(case, torch.bfloat16, device)
    check(_public, _reference, *inputs, eager=_eager, **case.options)


def test_the_gradient_of_a_weight_stored_by_columns_is_stored_so_too(backend, device):
    case = Case("by columns", (9, 16, 24, 2, 2), {}, {"transposed": True})
    inputs = MOE_MLP.draw(case, torch.float32, device)
    stored = inputs[3].transpose(1, 2).contiguous().requires_grad_()  # what the model has
    x, index, weights, _, down, *_ = inputs
    moe_mlp(x, index, weights, stored.transpose(1, 2), down).square().sum().backward()
    assert stored.grad.is_contiguous()


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_nothing_as_large_as_all_tokens_of_all_experts_is_kept(device):
    """Kept for the backward pass: what came in, z, and integers."""
    T, D, inner, E, K = 32, 64, 16, 4, 2
    x, index, weights, gate_up, down, *_ = MOE_MLP.draw(Case("", (T, D, inner, E, K)), torch.float32, device)
    leaves = [t.requires_grad_() for t in (x, weights, gate_up, down)]
    saved: list[Tensor] = []
    with (
        tigon.use_backend("triton"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        moe_mlp(x, index, *leaves[1:])
    inputs = {t.data_ptr() for t in (x, index, *leaves[1:])}
    floats = [t for t in saved if t.is_floating_point() and t.numel() and t.data_ptr() not in inputs]
    assert [tuple(t.shape) for t in floats] == [(T * K, 2 * inner)]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("retain_graph", [False, True])
def test_the_gradient_of_z_lies_over_z_where_the_graph_goes(retain_graph, device):
    x, index, weights, gate_up, down, *_ = MOE_MLP.draw(Case("", (32, 64, 16, 4, 2)), torch.float32, device)
    leaves = [t.requires_grad_() for t in (x, weights, gate_up, down)]
    saved: list[Tensor] = []
    with (
        tigon.use_backend("triton"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        y = moe_mlp(x, index, *leaves[1:])
    (z,) = [t for t in saved if t.shape == (64, 32)]
    before = z.clone()
    y.sum().backward(retain_graph=retain_graph)
    assert torch.equal(z, before) == retain_graph


def test_compiled_where_the_reference_serves(device):
    """In a graph it does not know the split, and multiplies all tokens by all experts: with the same result."""
    inputs = MOE_MLP.draw(Case("", (24, 40, 24, 4, 2), {}, {"bias": True}), torch.float32, device)
    with tigon.use_backend("torch"):
        compiled = torch.compile(_public, fullgraph=True, backend="eager")(*inputs)
        torch.testing.assert_close(compiled, _public(*inputs), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(compiled, _eager(*inputs), rtol=1e-5, atol=1e-6)


def test_products_of_fp32_are_as_exact_as_those_of_torch():
    """However that was set: each way is answered by an error where it is asked of the other one."""
    x = torch.empty(0)
    matmul = torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("high")
    assert (launches._precision(x), launches._precision(x.bfloat16())) == ("tf32", "ieee")
    torch.set_float32_matmul_precision("highest")
    assert launches._precision(x) == "ieee"
    if hasattr(matmul, "fp32_precision"):  # since PyTorch 2.9
        matmul.fp32_precision = "none"
        for place in (torch.backends, matmul):
            place.fp32_precision = "ieee"
            assert launches._precision(x) == "ieee"
            place.fp32_precision = "tf32"
            assert launches._precision(x) == "tf32"


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
def test_autocast_takes_any_mixture(x_dtype, w_dtype, backend, device):
    """Hidden states may have autocast's dtype already while the weights are fp32, as behind a linear layer."""
    gate_up, down = (w.to(device, w_dtype).requires_grad_() for w in weights_of(4, 16, 12))
    x = torch.randn(9, 16, device=device).to(x_dtype).requires_grad_()
    index = torch.arange(18, device=device).view(9, 2) % 4
    weights = torch.rand(9, 2, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        y = moe_mlp(x, index, weights, gate_up, down)
    assert y.dtype == x_dtype
    narrow = [t.detach().bfloat16().requires_grad_() for t in (x, gate_up, down)]
    expected = moe_mlp(narrow[0], index, weights, *narrow[1:])
    assert torch.equal(y.bfloat16(), expected)
    got = torch.autograd.grad(y.float().sum(), (x, gate_up, down))
    for g, e in zip(got, torch.autograd.grad(expected.float().sum(), narrow), strict=True):
        assert torch.equal(g.bfloat16(), e)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"act": "tanh"}, r"moe_mlp: act must be one of .*got 'tanh'"),
        ({"act": "gelu", "alpha": 2}, r"moe_mlp: alpha must be 1 where act is not 'silu', got 2.0 and 'gelu'"),
        ({"up_softcap": 0}, r"moe_mlp: up_softcap must be positive or None, got 0.0"),
        ({"gate_softcap": float("inf")}, r"moe_mlp: gate_softcap must be finite, got inf: None is no softcap"),
        (
            {"gate_softcap": 4, "limit": 7},
            r"moe_mlp: gate_softcap and up_softcap must be left .* and limit 7.0",
        ),
        ({"alpha": -1}, r"moe_mlp: alpha must be positive, got -1.0"),
        ({"limit": 0}, r"moe_mlp: limit must be positive or None, got 0.0"),
        ({"gated": False, "limit": 7.0}, r"moe_mlp: interleaved, alpha, .* must be left out .* got limit = 7.0\.$"),
    ],
)
def test_options_that_do_not_fit_raise_when_they_are_made(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        tigon.Expert(**options)


MADE_BEFORE = Expert(limit=0.5)


def test_options_made_before_and_inside_of_a_compiled_function(backend, device):
    """Equal options find the same compiled code, others get their own."""
    inputs = MOE_MLP.draw(Case("", (6, 16, 12, 2, 1), {}, {"bias": True}), torch.float32, device)
    compiled = torch.compile(_public, fullgraph=True, backend="eager")
    for options in ({}, {"limit": 0.5}, {"interleaved": True, "alpha": 2}):
        expected = _public(*inputs, config=Expert(**options))
        for made in (Expert(**options), Expert(**options)):
            torch.testing.assert_close(compiled(*inputs, config=made), expected)

    @functools.partial(torch.compile, fullgraph=True, backend="eager")
    def inside(*inputs):
        return _public(*inputs, config=Expert(act="gelu")), _public(*inputs, config=MADE_BEFORE)

    for got, config in zip(inside(*inputs), (Expert(act="gelu"), MADE_BEFORE), strict=True):
        torch.testing.assert_close(got, _public(*inputs, config=config))
