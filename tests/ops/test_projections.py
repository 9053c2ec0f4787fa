"""Linear layers of one input and whole gated MLPs, each as one operation, against the layers one by one."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tigon import gated_linear
from tigon.ops.linear.dense_mlp import dense_mlp
from tigon.ops.linear.projections import projections

WIDTHS = 24, 8, 8
DTYPES = [torch.float32, torch.bfloat16]


def layers(dtype, device, widths=WIDTHS, width=16, bias=False, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))

    weights = [draw(n, width) for n in widths]
    return weights, [draw(n) if bias else None for n in widths]


def input_of(dtype, device, *shape):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape or (2, 5, 16), generator=generator).to(device, dtype).requires_grad_()


def gradients(ys, tensors, seed=3):
    generator = torch.Generator().manual_seed(seed)
    dys = [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in ys]
    return torch.autograd.grad(ys, [t for t in tensors if t is not None], dys)


def error(got, exact):
    return (got.double() - exact).norm().item(), (got.double() - exact).abs().max().item()


@pytest.mark.parametrize("shape", [(2, 5, 16), (5, 16), (16,), (0, 16), (1, 1, 3, 16)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_and_weight_gradients_are_torchs_to_the_bit(dtype, bias, shape, device):
    weights, biases = layers(dtype, device, bias=bias)
    x = input_of(dtype, device, *shape)
    plain = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    ours = projections(x, weights, biases)[:3]
    for y, expected in zip(ours, plain, strict=True):
        assert torch.equal(y, expected)
        assert y.stride() == expected.stride()
    dx, *own = gradients(ours, [x, *weights, *biases])
    expected_dx, *expected = gradients(plain, [x, *weights, *biases])
    assert all(torch.equal(d, e) for d, e in zip(own, expected, strict=True))
    assert dx.shape == x.shape
    torch.testing.assert_close(dx, expected_dx, rtol=0.02 if dtype == torch.bfloat16 else 1e-5, atol=0.2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_x_is_no_less_exact_than_torchs(dtype, device):
    ours, plain = [], []
    for seed in range(8):
        weights, biases = layers(dtype, device, (64, 32, 32), 48, seed=seed)
        x = input_of(dtype, device, 3, 40, 48)
        wide = [t.detach().double() for t in (x, *weights)]
        generator = torch.Generator().manual_seed(seed)
        dys = [torch.randn(3, 40, n, generator=generator).to(device, dtype) for n in (64, 32, 32)]
        exact = sum(dy.double() @ w for dy, w in zip(dys, wide[1:], strict=True))
        (dx,) = torch.autograd.grad(projections(x, weights, biases)[:3], [x], dys)
        (theirs,) = torch.autograd.grad([F.linear(x, w) for w in weights], [x], dys)
        ours.append(error(dx, exact))
        plain.append(error(theirs, exact))
    # The largest error of a tensor is one number's: it scatters by more than the norm does.
    for own, expected, most in zip(zip(*ours, strict=True), zip(*plain, strict=True), (1.05, 1.25), strict=True):
        assert sum(own) <= most * sum(expected)


@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3)))
def test_only_what_is_asked_is_computed(wanted, device):
    """wanted: whether x, the second weight, and the biases want a gradient."""
    weights, biases = layers(torch.float32, device, bias=True)
    x = input_of(torch.float32, device).detach().requires_grad_(wanted[0])
    weights[1].requires_grad_(wanted[1])
    for bias in biases:
        bias.requires_grad_(wanted[2])
    ys = projections(x, weights, biases)[:3]
    plain = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    assert [y.requires_grad for y in ys] == [y.requires_grad for y in plain]
    ys, plain = ([y for y in given if y.requires_grad] for given in (ys, plain))
    tensors = [t for t in (x, *weights, *biases) if t.requires_grad]
    for own, expected in zip(gradients(ys, tensors), gradients(plain, tensors), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-4)


def test_frozen_weights_keep_no_input(device):
    weights, biases = layers(torch.float32, device)
    for weight in weights:
        weight.requires_grad_(False)
    x = input_of(torch.float32, device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ys = projections(x, weights, biases)
    assert not any(t.data_ptr() == x.data_ptr() for t in saved)
    (dx,) = gradients(ys[:3], [x])
    torch.testing.assert_close(dx, gradients([F.linear(x, w) for w in weights], [x])[0])


def test_a_result_that_nobody_uses_has_no_gradient(device):
    weights, biases = layers(torch.float32, device)
    x = input_of(torch.float32, device)
    q, _, v = projections(x, weights, biases)[:3]
    dx, dq, dk, dv = torch.autograd.grad(q.sum() + v.sum(), [x, *weights], allow_unused=True)
    assert dk is None
    plain = F.linear(x, weights[0]).sum() + F.linear(x, weights[2]).sum()
    for own, expected in zip((dx, dq, dv), torch.autograd.grad(plain, [x, weights[0], weights[2]]), strict=True):
        torch.testing.assert_close(own, expected)


@pytest.mark.parametrize("bias", [False, True])
def test_results_may_be_written_to(bias, device):
    weights, biases = layers(torch.float32, device, bias=bias)
    x = input_of(torch.float32, device)
    q, k, v = projections(x, weights, biases)[:3]
    q *= 2
    k.view(2, 5, 2, 4).transpose(1, 2).add_(1)
    plain = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    expected = gradients([2 * plain[0], plain[1] + 1, plain[2]], [x, *weights])
    for own, e in zip(gradients([q, k, v], [x, *weights]), expected, strict=True):
        torch.testing.assert_close(own, e, rtol=1e-5, atol=1e-5)


def test_a_kept_graph_is_walked_twice_and_no_second_derivative_is_given(device):
    weights, biases = layers(torch.float32, device)
    x = input_of(torch.float32, device)
    loss = sum(y.square().sum() for y in projections(x, weights, biases)[:3])
    first = torch.autograd.grad(loss, [x, *weights], retain_graph=True)
    second = torch.autograd.grad(loss, [x, *weights], create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for weight in weights:
        with pytest.raises(RuntimeError, match="differentiate twice"):
            torch.autograd.grad(second[0].square().sum(), weight, retain_graph=True)


@pytest.mark.parametrize("bias", [False, True])
def test_no_second_derivative_of_what_is_frozen_either(bias, device):
    weights, biases = layers(torch.float32, device, bias=bias)
    for weight in weights:
        weight.requires_grad_(False)
    leaf = input_of(torch.float32, device)
    ys = projections(leaf * 1.0, weights, biases)[:3]
    (dx,) = torch.autograd.grad(sum(y.square().sum() for y in ys), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(dx.square().sum(), leaf)


# ---------------------------------------------------------------------------------------------------------- whole MLPs


def mlp(dtype, device, packed=False, bias=False, seed=0):
    weights, biases = layers(dtype, device, (80,) if packed else (40, 40), bias=bias, seed=seed)
    (down,), (down_bias,) = layers(dtype, device, (16,), 40, bias=bias, seed=seed + 100)
    if packed:
        weights, biases = [*weights, None], [*biases, None]
    return (*weights, down), (*biases, down_bias)


def one_by_one(x, weights, biases, act="silu"):
    """What a fused MLP runs where one of its layers is not plain."""
    gate, up, down = weights
    g = F.linear(x, gate, biases[0])
    u = None if up is None else F.linear(x, up, biases[1])
    return gated_linear(g, u, down, biases[2], act=act)


@pytest.mark.parametrize("product", [True, False])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_mlp_has_the_bits_of_its_layers_but_for_the_gradient_of_x(
    dtype, packed, bias, product, device, triton_backend
):
    weights, biases = mlp(dtype, device, packed, bias)
    x = input_of(dtype, device)
    expected = one_by_one(x, weights, biases)
    y = dense_mlp(x, weights, biases, act="silu", product=product)
    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()
    dx, *own = gradients([y], [x, *weights, *biases])
    plain_dx, *plain = gradients([expected], [x, *weights, *biases])
    assert all(torch.equal(d, e) for d, e in zip(own, plain, strict=True))
    torch.testing.assert_close(dx, plain_dx, rtol=0.02 if dtype == torch.bfloat16 else 1e-5, atol=0.2)


@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "relu"])
def test_the_gradient_of_an_mlps_input_is_no_less_exact(act, device, triton_backend):
    ours, plain = [], []
    for seed in range(6):
        weights, biases = mlp(torch.bfloat16, device, seed=seed)
        x = input_of(torch.bfloat16, device, 3, 20, 16)
        wide = [t.detach().double() for t in (x, *weights)]
        wide[0].requires_grad_()
        acts = {"silu": F.silu, "relu": F.relu, "gelu_tanh": lambda t: F.gelu(t, approximate="tanh")}
        exact = F.linear(acts[act](F.linear(wide[0], wide[1])) * F.linear(wide[0], wide[2]), wide[3])
        dy = torch.randn(exact.shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)
        (right,) = torch.autograd.grad(exact, wide[0], dy.double())
        for errors, run in ((ours, dense_mlp), (plain, one_by_one)):
            more = {"product": True} if run is dense_mlp else {}
            (dx,) = torch.autograd.grad(run(x, weights, biases, act=act, **more), x, dy)
            errors.append(error(dx, right))
    # The largest error of a tensor is one number's: it scatters by more than the norm does.
    for own, expected, most in zip(zip(*ours, strict=True), zip(*plain, strict=True), (1.05, 1.25), strict=True):
        assert sum(own) <= most * sum(expected)


@pytest.mark.parametrize("trained", [(), (0,), (1,), (2,), (0, 2)])
@pytest.mark.parametrize("need_x", [True, False])
@pytest.mark.parametrize("product", [True, False])
def test_frozen_layers_of_an_mlp(trained, need_x, product, device, triton_backend):
    if not trained and not need_x:
        return
    weights, biases = mlp(torch.float32, device)
    for i, weight in enumerate(weights):
        weight.requires_grad_(i in trained)
    x = input_of(torch.float32, device).detach().requires_grad_(need_x)
    tensors = [t for t in (x, *weights) if t.requires_grad]
    expected = gradients([one_by_one(x, weights, biases)], tensors)
    own = gradients([dense_mlp(x, weights, biases, act="silu", product=product)], tensors)
    for d, e in zip(own, expected, strict=True):
        torch.testing.assert_close(d, e, rtol=1e-5, atol=1e-4)


def test_what_an_mlp_keeps(device, triton_backend):
    """x, gate and up, their product only where it is not made again, and x only for gate's and up's weights."""

    def kept(product, frozen=()):
        weights, biases = mlp(torch.float32, device)
        for i in frozen:
            weights[i].requires_grad_(False)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            dense_mlp(input_of(torch.float32, device), weights, biases, act="silu", product=product)
        return sorted(t.shape[-1] for t in saved if t.dim() == 3)

    assert kept(True) == [16, 40, 40]
    assert kept(False) == [16, 40, 40, 40]
    assert kept(False, frozen=(2,)) == [16, 40, 40]
    assert kept(True, frozen=(0, 1)) == [40, 40]


@pytest.mark.parametrize("product", [True, False])
def test_an_mlps_kept_graph_is_walked_twice(product, device, triton_backend):
    weights, biases = mlp(torch.float32, device)
    x = input_of(torch.float32, device)
    y = dense_mlp(x, weights, biases, act="silu", product=product)
    first = torch.autograd.grad(y.sum(), [x, *weights], retain_graph=True)
    again = torch.autograd.grad(y.sum(), [x, *weights], retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(dx.sum(), weights[0])


@pytest.mark.parametrize("product", [True, False])
def test_a_checkpointed_mlp(product, device, triton_backend):
    weights, biases = mlp(torch.float32, device)
    x = input_of(torch.float32, device)
    expected = gradients([dense_mlp(x, weights, biases, act="silu", product=product)], [x, *weights])

    def run(x):
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return dense_mlp(x, weights, biases, act="silu", product=product, saved_by=hooks)

    own = gradients([checkpoint(run, x, use_reentrant=False)], [x, *weights])
    assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
