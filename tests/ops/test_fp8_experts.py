"""Experts in FP8: errors against fp64 and the recipe, choices of all kinds, and the parts that only experts have."""

import pytest
import torch
from fp8_recipe import bf16, error, narrow, scale

from tigon import use_backend
from tigon.ops.fp8 import experts as experts_file
from tigon.ops.fp8.columns import to_columns, transpose_rows
from tigon.ops.fp8.expert_columns import fold_expert_scales, list_columns
from tigon.ops.fp8.expert_rows import (
    gather_quantized_rows,
    gather_rows,
    gather_weight_gradients,
    sort_choices,
    sum_rows,
)
from tigon.ops.fp8.experts import multiply_by_experts
from tigon.ops.fp8.gated_gradient import weighted_gated_gradient
from tigon.ops.fp8.gated_rows import gated_rows
from tigon.ops.fp8.mlp import Unit
from tigon.ops.fp8.rows import quantize_rows
from tigon.ops.fp8.weight import measure_stack, quantize_stack, quantize_weight, transpose_stack

D, INNER, E = 32, 48, 4
CHOICES = ["even", "empty experts", "one expert", "one token", "other ranks"]


def draw(*shape, device, dtype=torch.bfloat16, size=1.0):
    return (torch.randn(*shape) * size).to(dtype).to(device)


def draw_choices(kind, device):
    T = 1 if kind == "one token" else 21
    index = torch.stack([torch.randperm(E)[:2] for _ in range(T)])
    if kind == "empty experts":
        index = index % 2 * 2 + 1
    if kind == "one expert":
        index = torch.full((T, 1), 2)
    if kind == "other ranks":
        index[::3, 0], index[1::3, 1] = E, -1
        index[5] = E
    return index.to(device)


def draw_layer(kind, device, dtype=torch.bfloat16):
    index = draw_choices(kind, device)
    x, dy = (draw(len(index), D, device=device, size=s) for s in (1.0, 0.1))
    weights = torch.randn(index.shape).to(device).requires_grad_()  # some are negative
    gate_up = draw(E, 2 * INNER, D, device=device, dtype=dtype, size=0.2)
    down = draw(E, D, INNER, device=device, dtype=dtype, size=0.2)
    return [x.requires_grad_(), index, weights, gate_up.requires_grad_(), down.requires_grad_()], dy


UNIT = Unit()


def run(inputs, dy, unit=UNIT):
    y = multiply_by_experts(*inputs, unit)
    return [y.detach(), *torch.autograd.grad(y, [t for t in inputs if t.requires_grad], dy)]


def test_weights_stored_by_columns(backend, device):
    inputs, dy = draw_layer("even", device)
    strided = [t.detach().mT.contiguous().mT.requires_grad_() for t in inputs[3:]]
    for found, expected in zip(run([*inputs[:3], *strided], dy), run(inputs, dy), strict=True):
        assert torch.equal(found, expected)


def emulate(inputs, dy, keep="bf16", rounds=True):
    """y, dx, d weights, d gate_up and d down of the recipe in fp64, expert by expert; or exact ones."""
    x, index, weights, gate_up, down = (t.detach().double() if t.is_floating_point() else t for t in inputs)
    dy = dy.double()
    q, out = (narrow, bf16) if rounds else (lambda t, s=1.0: t / s, lambda t: t)
    y, dx, dw, dgu, dd = (torch.zeros_like(t) for t in (x, x, weights, gate_up, down))
    for e in range(E):
        token, choice = torch.where(index == e)
        if not len(token):
            continue
        rows, d, w = x[token], dy[token], weights[token, choice, None]
        sx, sd = (scale(t.abs().amax(1, keepdim=True)) for t in (rows, d))
        su, sw = scale(gate_up[e].abs().amax()), scale(down[e].abs().amax())
        z = out(q(rows, sx) @ q(gate_up[e], su).t() * (sx * su))
        gate, up = z.chunk(2, 1)
        h = torch.nn.functional.silu(gate) * up
        sh = scale(h.abs().amax(1, keepdim=True))
        y.index_add_(0, token, w * out(q(h, sh) @ q(down[e], sw).t() * (sh * sw)))
        if keep == "fp8":
            gate, up = (q(t, s) * s for t in (gate, up) for s in [scale(t.abs().amax(1, keepdim=True))])
        sigmoid = gate.sigmoid()
        h = gate * sigmoid * up
        dh = out(q(d, sd) @ q(down[e], sw) * (sd * sw))
        dw[token, choice] = (h * dh).sum(1)
        dz = w * dh
        dz = torch.cat([dz * up * sigmoid * (1 + gate * (1 - sigmoid)), dz * gate * sigmoid], 1)
        sz = scale(dz.abs().amax(1, keepdim=True))
        c = (sh * w.abs() * sd).max()
        dd[e] = out(c * (q(d * (sh * w) / c).t() @ q(h, sh)))
        c = (sz * sx).max()
        dgu[e] = out(c * (q(dz, sz).t() @ q(rows * sz / c)))
        dx.index_add_(0, token, out(q(dz, sz) @ q(gate_up[e], su) * (sz * su)))
    return [out(y), out(dx), dw, dgu, dd]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("keep", ["bf16", "fp8"])
@pytest.mark.parametrize("kind", CHOICES)
def test_errors_are_the_recipes(kind, keep, dtype, backend, device):
    inputs, dy = draw_layer(kind, device, dtype)
    ours = run(inputs, dy, Unit(keep=keep))
    exact, theirs = (emulate(inputs, dy, keep, rounds) for rounds in (False, True))
    assert [t.dtype for t in ours] == [torch.bfloat16] * 2 + [torch.float32] + [dtype] * 2
    for i, (a, b, e) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert a.shape == e.shape
        assert error(b, e) > 0.005  # the recipe rounds
        assert error(a, e) <= 1.05 * error(b, e), (i, error(a, e), error(b, e))
        # The sums of a GPU's tensor cores put numbers near a tie on the other side, in every later rounding.
        near = 0.4 if device.type == "cuda" else 0.25
        assert error(a, b) <= near * error(b, e), (i, error(a, b), error(b, e))
        assert error(a, e) <= (1.3 if kind == "one token" else 1.04) * error(b, e) + 3e-3, i


def test_both_implementations_agree(triton_backend, device):
    inputs, dy = draw_layer("other ranks", device)
    ours = run(inputs, dy)
    with use_backend("torch"):
        theirs = run(inputs, dy)
    for a, b in zip(ours, theirs, strict=True):
        assert error(a, b) <= 0.01


def test_frozen_inputs_get_no_gradient(backend, device, monkeypatch):
    inputs, dy = draw_layer("even", device)
    every = run(inputs, dy)[1:]
    wanted = [i for i, t in enumerate(inputs) if t.requires_grad]
    products = []
    multiply = experts_file.multiply_grouped_columns
    monkeypatch.setattr(
        experts_file, "multiply_grouped_columns", lambda *a, **k: products.append(1) or multiply(*a, **k)
    )
    for place, i in enumerate(wanted):
        frozen = [t.detach().requires_grad_() if j == i else t.detach() for j, t in enumerate(inputs)]
        products.clear()
        _, found = run(frozen, dy)
        assert torch.equal(found, every[place])
        assert len(products) == (i in (3, 4))
    with torch.no_grad():
        assert not multiply_by_experts(*inputs, Unit()).requires_grad


def test_experts_without_rows_get_zeros(backend, device):
    inputs, dy = draw_layer("empty experts", device)
    *_, d_above, d_down = run(inputs, dy)
    for gradient in (d_above, d_down):
        assert not gradient[::2].any()
        assert gradient[1::2].flatten(1).any(1).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_token_that_is_not_finite_spoils_its_experts_alone(value, backend, device):
    inputs, dy = draw_layer("even", device)
    with torch.no_grad():
        inputs[0][3, 5] = value
        inputs[1][:] = torch.tensor([0, 1], device=device)
        inputs[1][3] = torch.tensor([2, 3], device=device)
    y, dx, dw, d_above, d_down = run(inputs, dy)
    others = torch.arange(len(y), device=device) != 3
    for t in (y, dx, dw):
        assert not t[3].isfinite().any()
        assert t[others].isfinite().all()
    for t in (d_above, d_down):
        assert t[:2].isfinite().all()
        assert not t[2:].isfinite().flatten(1).all(1).any()


def test_no_tokens(backend, device):
    inputs, dy = draw_layer("even", device)
    inputs = [t[:0].detach().requires_grad_(t.requires_grad) if i < 3 else t for i, t in enumerate(inputs)]
    y, dx, dw, d_above, d_down = run(inputs, dy[:0])
    assert (y.shape, dx.shape, dw.shape) == ((0, D), (0, D), (0, 2))
    assert not d_above.any()
    assert not d_down.any()


def test_the_same_bits(triton_backend, device):
    inputs, dy = draw_layer("even", device)
    assert all(torch.equal(a, b) for a, b in zip(run(inputs, dy), run(inputs, dy), strict=True))


# ------------------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("kind", CHOICES)
def test_columns_hold_each_experts_rows(kind, backend, device):
    index = draw_choices(kind, device)
    routing = sort_choices(draw(1, 16, device=device), index, E)
    columns = list_columns(routing, index.shape[1])
    rows, tokens, ends = (t.tolist() for t in columns)
    start, before = 0, 0
    for e, end in enumerate(ends):
        chosen = torch.where(index == e)[0].tolist()
        assert end - start == max(16, -(-len(chosen) // 16) * 16)
        padding = [-1] * (end - start - len(chosen))
        assert rows[start:end] == [*range(before, before + len(chosen)), *padding]
        assert tokens[start:end] == chosen + padding
        start, before = end, before + len(chosen)
    assert len(rows) % 16 == 0
    assert set(rows[start:]) | set(tokens[start:]) <= {-1}
    assert start <= len(rows)


def test_scales_are_folded_for_each_expert(backend, device):
    index = draw_choices("other ranks", device)
    routing = sort_choices(draw(1, 16, device=device), index, E)
    columns, S = list_columns(routing, 2), index.numel()
    into, other = (torch.exp2(torch.randint(-9, 9, (S, 1)).float()).to(device) for _ in range(2))
    weight = torch.randn(S, 1).to(device)
    rows, ends = columns.rows.tolist(), columns.ends.tolist()
    for w in (weight, None):
        factor, c = fold_expert_scales(into, w, other, columns)
        start = 0
        for e, end in enumerate(ends):
            group = [r for r in rows[start:end] if r >= 0]
            part = into[group, 0] * (1.0 if w is None else w[group, 0])
            top = (part.abs() * other[group, 0]).max()
            torch.testing.assert_close(c[e], top, rtol=1e-6, atol=0)
            torch.testing.assert_close(factor[start : start + len(group)], part / c[e], rtol=1e-6, atol=0)
            assert not factor[start + len(group) : end].any()
            start = end
        assert not factor[start:].any()
    into[rows[0]] = torch.nan
    factor, c = fold_expert_scales(into, None, other, columns)
    assert c.isnan().tolist() == [True, False, False, False]
    assert not factor[columns.rows < 0].any()


@pytest.mark.parametrize("N", [16, 80, 272])
def test_columns_of_chosen_rows(N, backend, device):
    """The same as of the rows, gathered before, whose zeros are rows of their own."""
    data = quantize_rows(draw(19, N, device=device)).data
    x, factor = draw(19, N, device=device), torch.rand(48).to(device)
    rows = torch.randint(-1, 19, (48,), dtype=torch.int32).to(device)
    one = torch.cat([data.view(torch.uint8), data.view(torch.uint8)[:1] * 0])[rows.long()]
    assert torch.equal(transpose_rows(data, rows).view(torch.uint8), one.t())
    gathered = torch.cat([x, x[:1] * 0])[rows.long()]
    assert torch.equal(to_columns(x, factor, rows=rows).float(), to_columns(gathered, factor).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 144, 272), (1, 16, 2064), (130, 16, 48)])
def test_stacks_are_weights_each_with_a_scale(shape, dtype, backend, device):
    sizes = torch.exp2(torch.arange(shape[0]) % 40.0)[:, None, None].to(device, dtype)
    stack = draw(*shape, device=device, dtype=dtype) * sizes
    amax = measure_stack(stack)
    found, transposed = quantize_stack(stack, amax), transpose_stack(stack, amax)
    for e, weight in enumerate(stack):
        assert amax[e] == weight.abs().max()
        one = quantize_weight([weight], amax[e])
        assert torch.equal(found.data[e].float(), one.data.float())
        assert torch.equal(transposed.data[e].float(), one.data.float().t())
        assert torch.equal(found.scale[e], one.scale)
        assert torch.equal(transposed.scale[e], one.scale[:1].expand(shape[2]))


@pytest.mark.parametrize("n", [48, 1000, 16400])
def test_weights_of_rows_and_their_gradients(n, triton_backend, device):
    """As with the weights in the gradient. 16,400: a row beyond registers."""
    gate_up, dy = draw(5, 2 * n, device=device), draw(5, n, device=device, dtype=torch.float32)
    weight = torch.randn(5, 1).to(device)
    product = gated_rows(gate_up, "silu")[0]
    rows, again, dots = weighted_gated_gradient(dy, gate_up, None, "silu", product.scale, weight)
    theirs, _, _ = weighted_gated_gradient(dy * weight, gate_up, None, "silu", None, torch.ones_like(weight))
    assert torch.equal(again.float(), product.data.float())
    assert error(rows.data.float() * rows.scale, theirs.data.float() * theirs.scale) < 0.01
    gate, up = gate_up.double().chunk(2, 1)
    exact = (torch.nn.functional.silu(gate) * up * dy.double()).sum(1, keepdim=True)
    torch.testing.assert_close(dots.double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", CHOICES)
def test_rows_of_choices(kind, backend, device):
    index = draw_choices(kind, device)
    (T, K), x = index.shape, draw(*(len(index), 32), device=device)
    routing = sort_choices(x, index, E)
    rows = quantize_rows(x)
    gathered, plain = gather_quantized_rows(rows, routing, K), gather_rows(x, routing, K)
    tokens = [t for e in range(E) for t in torch.where(index == e)[0].tolist()]
    count = len(tokens)
    assert torch.equal(plain[:count], x[tokens])
    assert torch.equal(gathered.data[:count].view(torch.uint8), rows.data[tokens].view(torch.uint8))
    assert torch.equal(gathered.scale[:count], rows.scale[tokens])
    weights, known = torch.randn(T, K).to(device), ((index >= 0) & (index < E)).to(torch.float32)
    exact = x.double() * (weights * known).double().sum(1, keepdim=True)
    assert error(sum_rows(plain, routing, weights, x.shape), exact) < 0.005
    assert error(sum_rows(plain, routing, None, x.shape), x.double() * known.double().sum(1, keepdim=True)) < 0.005
    dots = plain[:, :1].float().contiguous()
    assert torch.equal(gather_weight_gradients(dots, routing, index, weights), x[:, :1].float() * known)
