"""dyt near zero, at the flat ends of tanh, and for rows of any width."""

import importlib

import pytest
import torch
from numerics import check

import tigon
from tigon.ops.dyt import dyt_reference

# The module, and not the function of its name.
SUMS = importlib.import_module("tigon.ops.sum_rows")


def test_tanh_and_its_slope_are_right_to_a_few_roundings_of_their_own_size(device, triton_backend):
    """tanh(z) is z near zero and its slope 4 exp(-2 |z|) far from it: 1 - exp and 1 - tanh² lose those digits."""
    size = torch.logspace(-12, 1.5, 500, dtype=torch.float64, device=device).float()
    x = torch.cat((size, -size, torch.tensor([0.0, 0.6249999, 0.625], device=device))).requires_grad_()
    alpha = torch.ones(1, device=device)
    y = tigon.dyt(x, alpha)
    (slope,) = torch.autograd.grad(y.sum(), x)
    z = x.detach().double()
    torch.testing.assert_close(y.double(), z.tanh(), rtol=6e-7, atol=0)
    torch.testing.assert_close(slope.double(), z.cosh() ** -2, rtol=3e-6, atol=1e-38)


def test_infinite_and_nan(backend, device):
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e30], device=device, requires_grad=True)
    y = tigon.dyt(x, torch.ones((), device=device))
    assert torch.equal(y.detach().nan_to_num(7), torch.tensor([1.0, -1.0, 7.0, 1.0], device=device))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx.nan_to_num(7), torch.tensor([0.0, 0.0, 7.0, 0.0], device=device))


# A row of many tiles, one that is no power of two, a tile of many rows, the least.
@pytest.mark.parametrize("shape", [(2, 9001), (3, 300), (40, 3), (1, 1)])
def test_any_width(shape, device, triton_backend):
    def inputs(generator):
        x = torch.randn(shape, generator=generator)
        w, b = (torch.randn(shape[1], generator=generator) for _ in range(2))
        return tuple(t.to(device) for t in (x, torch.full((1,), 0.5), w, b))

    # The gradient of alpha is one number a draw, what is left of 18,002 that cancel: eager's error is luck.
    check(tigon.dyt, dyt_reference, inputs, draws=16 if shape[1] < 1000 else 4, roundings=16)


@pytest.mark.parametrize("wanted", [(0, 1, 2, 3), (1,), (1, 2), (1, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("shape", [(200, 100), (2, 9001)])  # several shares of each column; one, of many blocks
def test_one_launch_adds_every_share(shape, wanted, device, triton_backend, monkeypatch):
    launched, launch = [], SUMS.launch
    monkeypatch.setattr(SUMS, "launch", lambda *a: launched.append(a[2]) or launch(*a))
    draw = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=draw).to(device) for _ in range(2))
    given = [x, torch.full((1,), 0.7, device=device), *(torch.randn(shape[1], generator=draw).to(device) for _ in "wb")]
    leaves = [t.requires_grad_(i in wanted) for i, t in enumerate(given)]
    asked = [leaves[i] for i in wanted]
    found = torch.autograd.grad(tigon.dyt(*leaves), asked, dy)
    assert len(launched) == (1 if shape[0] == 200 or 1 in wanted else 0)
    again = torch.autograd.grad(tigon.dyt(*leaves), asked, dy)
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in leaves]
    truth = torch.autograd.grad(dyt_reference(*exact), [exact[i] for i in wanted], dy.double())
    for a, b, right in zip(found, again, truth, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a.double(), right, rtol=1e-5, atol=1e-6 * dy.numel() ** 0.5)
