"""The sum of a cross layer: its values and gradients are those of the formula in fp64, whichever of them are wanted."""

from __future__ import annotations

import pytest
import torch

from tigon.ops.sum_rows import cut
from tigon.rank.kernels.crossed_sum import crossed_sum

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def drawn(rows, columns, dtype, device):
    draw = torch.Generator().manual_seed(rows * columns)
    x0, u, x, dy, ds = (torch.randn(rows, columns, generator=draw).to(device, dtype) for _ in range(5))
    return [x0, u, x, torch.randn(columns, generator=draw).to(device)], dy, ds


def exact(given, dy, ds):
    x0, u, x, bias = (t.double().requires_grad_() for t in given)
    y = x + x0 * (u + bias)
    loss = (y * dy.double()).sum() + (0 if ds is None else (x0 * ds.double()).sum())
    return [y.detach(), *torch.autograd.grad(loss, (x0, u, x, bias))]


def close(got, want, tolerance):
    return ((got.double() - want).abs() <= tolerance * (1 + want.abs())).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 128), (37, 130), (300, 40)])
@pytest.mark.parametrize("goes_on", [False, True])
def test_as_the_formula(rows, columns, dtype, goes_on, backend, device):
    given, dy, ds = drawn(rows, columns, dtype, device)
    ds = ds if goes_on else None
    leaves = [t.clone().requires_grad_() for t in given]
    y, x0 = crossed_sum(*leaves)
    assert torch.equal(x0, given[0])
    results, gradients = ((y, x0), (dy, ds)) if goes_on else ((y,), (dy,))
    found = [y, *torch.autograd.grad(results, leaves, gradients)]
    for got, want, of in zip(found, exact(given, dy, ds), (given[2], *given), strict=True):
        assert got.dtype == of.dtype
        # A sum of fp32 over the rows, each of whose terms may be rounded where torch adds them.
        many = rows if want.dim() == 1 else 2
        assert close(got, want, many * TOLERANCE[dtype])


def test_gradients_that_are_not_wanted_are_not_computed(backend, device):
    given, dy, ds = drawn(5, 7, torch.float32, device)
    want = exact(given, dy, ds)
    for wanted in ([0], [1], [3], [0, 2]):
        leaves = [t.clone().requires_grad_(n in wanted) for n, t in enumerate(given)]
        y, x0 = crossed_sum(*leaves)
        results = [(y, dy), (x0, ds)] if 0 in wanted else [(y, dy)]
        torch.autograd.backward([of for of, _ in results], [gradient for _, gradient in results])
        for n, leaf in enumerate(leaves):
            assert (leaf.grad is not None) == (n in wanted)
            assert leaf.grad is None or close(leaf.grad, want[1 + n], 1e-5)


def test_a_frozen_x0_stays_frozen_for_the_next_layer(backend, device):
    given, _, _ = drawn(5, 7, torch.float32, device)
    x, x0 = crossed_sum(given[0], given[1].requires_grad_(), given[2], given[3])
    assert x.requires_grad
    assert not x0.requires_grad


@pytest.mark.parametrize("shapes", [((2, 3, 4), (2, 3, 4), (2, 3, 4), (4,)), ((2, 3), (2, 4), (2, 3), (3,)),
                                    ((2, 3), (2, 3), (2, 3), (4,))])  # fmt: skip
def test_shapes_that_do_not_fit_are_refused(shapes, backend, device):
    with pytest.raises(ValueError, match=r"crossed_sum: x0, u and x must be \(B, N\) and bias \(N,\), got"):
        crossed_sum(*(torch.ones(shape, device=device) for shape in shapes))


def test_one_tensor_may_be_both_and_x0_alone_may_go_on(backend, device):
    """The first layer's x is x₀; and where nobody uses the sum, x₀'s gradient passes on."""
    given, dy, ds = drawn(9, 12, torch.float32, device)
    leaf = given[0].clone().requires_grad_()
    y, x0 = crossed_sum(leaf, given[1], leaf, given[3])
    (got,) = torch.autograd.grad((y, x0), leaf, (dy, ds))
    want = exact([given[0], given[1], given[0], given[3]], dy, ds)
    assert close(got, want[1] + want[3], 1e-6)
    y, x0 = crossed_sum(leaf, given[1], leaf, given[3])
    assert torch.equal(torch.autograd.grad(x0, leaf, ds)[0], ds)


def test_rows_that_lie_apart_and_no_rows(backend, device):
    given, dy, _ = drawn(6, 10, torch.float32, device)
    apart = [torch.stack((t, t), 1)[:, 0].requires_grad_() for t in given[:3]]
    assert apart[0].stride() == (20, 1)
    y, _ = crossed_sum(*apart, given[3])
    found = [y, *torch.autograd.grad(y, apart, dy.t().contiguous().t())]
    for got, want in zip(found, exact(given, dy, None), strict=False):
        assert close(got, want, 1e-6)
    bias = given[3].clone().requires_grad_()
    y, _ = crossed_sum(*(t[:0] for t in given[:3]), bias)
    y.sum().backward()
    assert torch.equal(bias.grad, torch.zeros_like(bias))


def test_the_bits_are_the_same_on_every_run(backend, device):
    given, dy, ds = drawn(500, 200, torch.bfloat16, device)

    def bits():
        leaves = [t.clone().requires_grad_() for t in given]
        return torch.autograd.grad(crossed_sum(*leaves), leaves, (dy, ds))

    assert all(torch.equal(a, b) for a, b in zip(bits(), bits(), strict=True))


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 4097, 65_536])
@pytest.mark.parametrize("columns", [1, 640, 3504, 10_000_000])
def test_every_row_is_of_one_part(rows, columns, device):
    how = cut(rows, columns, device)
    assert (how.parts - 1) * how.each < rows <= how.parts * how.each
    assert (how.blocks - 1) * how.columns < columns <= how.blocks * how.columns
