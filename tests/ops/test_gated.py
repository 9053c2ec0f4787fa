"""Gated units at the ends of the number range, their packed form and their multipliers."""

import pytest
import torch
import torch.nn.functional as F

import tigon
from tigon.kernels import HAS_TRITON
from tigon.ops.gated import gated_unit
from tigon.ops.gated_linear import gated_linear

ACTS = {
    "silu": (lambda g, u: tigon.swiglu(g, u), lambda g, u: F.silu(g) * u),
    "gelu_tanh": (lambda g, u: tigon.geglu(g, u), lambda g, u: F.gelu(g, approximate="tanh") * u),
    "gelu": (lambda g, u: tigon.geglu(g, u, approximate="none"), lambda g, u: F.gelu(g) * u),
    "relu": (lambda g, u: tigon.reglu(g, u), lambda g, u: F.relu(g) * u),
    "relu2": (lambda g, u: tigon.reglu(g, u, squared=True), lambda g, u: F.relu(g).square() * u),
    "sigmoid": (lambda g, u: gated_unit(g, u, act="sigmoid"), lambda g, u: torch.sigmoid(g) * u),
    "relu2 alone": (lambda g, u: tigon.relu2(g) * u, lambda g, u: F.relu(g).square() * u),
}


@pytest.mark.parametrize("act", ACTS)
def test_extreme_gates(act, backend, device):
    """Neither exp nor tanh may overflow: the result tends to gate·up on one side and to zero on the other."""
    gate = torch.tensor([-1e4, -300, -90, -30, -12, -1e-6, 0, 1e-6, 12, 30, 90, 300, 1e4], device=device)
    up = torch.full_like(gate, 2.0)
    ours, theirs = ACTS[act]
    got, expected = [], []
    for fn, results, dtype in ((ours, got, torch.float32), (theirs, expected, torch.float64)):
        g, u = (t.to(dtype).requires_grad_() for t in (gate, up))
        y = fn(g, u)
        results += [y, *torch.autograd.grad(y.sum(), [g, u])]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [8, 24, 48, 300])  # UNIT 8, and not; a block that a row fills, and not
def test_packed_rows_of_any_width(n, backend, device):
    packed = torch.randn(5, 2 * n, device=device).bfloat16().requires_grad_()
    gate, up = (t.detach().contiguous().requires_grad_() for t in packed.chunk(2, -1))
    dy = torch.randn(5, n, device=device).bfloat16()
    a, b = tigon.swiglu(packed), tigon.swiglu(gate, up)
    a.backward(dy)
    b.backward(dy)
    assert torch.equal(a, b)
    assert torch.equal(packed.grad, torch.cat((gate.grad, up.grad), -1))


def test_nan_is_not_hidden_by_relu(backend, device):
    gate = torch.tensor([float("nan"), -1.0, 1.0], device=device)
    for y in (tigon.reglu(gate, torch.ones_like(gate)), tigon.relu2(gate)):
        assert y.isnan().tolist() == [True, False, False]


@pytest.mark.parametrize("act", ["silu", "relu2"])
def test_multipliers(act, backend, device):
    """Falcon-H1 scales the gate before the activation, and the product after it."""
    op = tigon.swiglu if act == "silu" else lambda g, u, **m: tigon.reglu(g, u, squared=True, **m)
    gate, up = (torch.randn(3, 40, device=device, requires_grad=True) for _ in range(2))
    for one, other in ((0.25, 1.0), (1.0, 3.0), (0.25, 3.0)):
        ours = op(gate, up, gate_multiplier=one, multiplier=other)
        theirs = (F.silu(gate * one) if act == "silu" else F.relu(gate * one).square()) * up * other
        torch.testing.assert_close(ours, theirs)
        dy = torch.randn_like(ours)
        for a, b in zip(*(torch.autograd.grad(y, [gate, up], dy) for y in (ours, theirs)), strict=True):
            torch.testing.assert_close(a, b)


def test_gate_and_up_may_be_one_tensor(backend, device):
    x = torch.randn(4, 33, device=device, requires_grad=True)
    y = tigon.swiglu(x, x)
    (got,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad((F.silu(x) * x).sum(), x)
    torch.testing.assert_close(got, expected)


@pytest.mark.skipif(not HAS_TRITON, reason="the reference keeps it")
def test_the_product_is_not_kept(device):
    """gated_linear saves its own inputs and nothing else; the eager formula saves the product besides."""
    gate, up = (torch.randn(6, 40, device=device, requires_grad=True) for _ in range(2))
    weight = torch.randn(8, 40, device=device, requires_grad=True)
    saved = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with tigon.use_backend("triton"), keep:
        gated_linear(gate, up, weight)
    own = {t.data_ptr() for t in (gate, up, weight)}
    assert {t.data_ptr() for t in saved} == own


@pytest.mark.skipif(not HAS_TRITON, reason="the reference overwrites nothing")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_gradients_over_gate_and_up(packed, kept, device):
    """inplace=True: the same bits, in the memory of gate and up, unless somebody may want those again."""
    makers = [torch.randn(n, 24, device=device, requires_grad=True) for n in ((80,) if packed else (40, 40))]
    x = torch.randn(6, 24, device=device)
    weight = torch.randn(8, 40, device=device, requires_grad=True)
    bias = torch.randn(8, device=device, requires_grad=True)
    dy = torch.randn(6, 8, device=device)

    def gradients(inplace, passes):
        made = [F.linear(x, w) for w in makers]
        seen = []
        for t in made:
            t.register_hook(seen.append)
        y = gated_linear(made[0], made[1] if len(made) > 1 else None, weight, bias, inplace=inplace)
        for left in reversed(range(passes)):
            found = torch.autograd.grad(y, [*makers, weight, bias], dy, retain_graph=left > 0)
        return found, made, seen

    with tigon.use_backend("triton"):
        expected, untouched, _ = gradients(False, 1)
        got, made, seen = gradients(True, 2 if kept else 1)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs)
    # Of two passes the first left gate and up alone, and the second, after which nobody comes, did not.
    there = {t.data_ptr() for t in made}
    assert {t.data_ptr() for t in seen[-len(made) :]} == there
    assert not any(t.data_ptr() in there for t in seen[: -len(made)])
    assert all(t._version == 1 for t in made)
    assert all(t._version == 0 for t in untouched)
