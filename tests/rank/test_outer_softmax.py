"""outer_softmax where scores are extreme, tied, or a single one; and what it promises about its neighbours."""

import importlib

import pytest
import torch
from numerics import check
from ops_table.outer_softmax import eager_outer_softmax

import tigon
from tigon.rank.kernels.outer_softmax import outer_softmax_reference

# The module, and not the function of its name.
KERNELS = importlib.import_module("tigon.rank.kernels.outer_softmax")


def rows(B, r, device="cpu", seed=0):
    return torch.randn(B, 3 * r, generator=torch.Generator().manual_seed(seed)).to(device)


# Each number of lanes; full and masked; more columns than threads of a warp can hold.
@pytest.mark.parametrize("r", [1, 4, 8, 32, 60, 65, 128, 300])
def test_any_rank(r, device, triton_backend):
    def draw(generator):
        return (torch.randn(2 if r > 60 else 9, 3 * r, generator=generator).to(device),)

    # Sums over r numbers go in another order than torch's, whose order depends on the processor.
    check(
        tigon.outer_softmax, outer_softmax_reference, draw, eager=eager_outer_softmax, roundings=6, temperature=0.7,
        residual=True,
    )  # fmt: skip


def test_a_tile_has_a_place_for_each_thread():
    """Lanes that were more or fewer than threads would leave sums in registers to be exchanged."""
    for r, (tile, warps) in (
        (r, tile(r)) for r in range(1, 4097, 45) for tile in (KERNELS._fwd_tile, KERNELS._bwd_tile)
    ):
        assert tile["SAMPLES"] * tile["LANES_I"] * tile["LANES_J"] == 32 * warps
        assert tile["BLOCK"] >= r
        assert tile["BLOCK"] % tile["LANES_J"] == tile["STEP"] % tile["LANES_I"] == 0


def test_one_number_attends_to_itself(backend, device):
    x = rows(7, 1, device).requires_grad_()
    y = tigon.outer_softmax(x)
    dy = torch.arange(7.0, device=device)[:, None]
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(y, x[:, 2:])
    assert torch.equal(dx, torch.cat((0 * dy, 0 * dy, dy), 1))


def test_of_tied_scores_y_is_the_mean(backend, device):
    """Whatever q: no score is larger than another. q then has no gradient, and k has that of equal shares."""
    x = torch.randint(-8, 9, (5, 3 * 16), device=device).float()
    x[:, 16:32] = torch.randn(5, 1, device=device)
    x.requires_grad_()
    y = tigon.outer_softmax(x)
    assert torch.equal(y, x[:, 32:].mean(-1, keepdim=True).expand(5, 16))
    (dx,) = torch.autograd.grad(y[:, 0].sum(), x)
    dq, dk, dv = dx.chunk(3, 1)
    assert dq.abs().max() < 1e-5
    torch.testing.assert_close(dk, x[:, :1] * (x[:, 32:] - y[:, :1]) / 16)
    assert torch.equal(dv, torch.full_like(dv, 1 / 16))


def test_extreme_scores_choose_one_number(backend, device):
    x = rows(4, 24, device)
    x[:, :24] = x[:, :24].sign() * 1e5
    x.requires_grad_()
    q, k, v = x.detach().chunk(3, 1)
    y = tigon.outer_softmax(x)
    greatest, least = v.gather(1, k.argmax(1, keepdim=True)), v.gather(1, k.argmin(1, keepdim=True))
    torch.testing.assert_close(y, torch.where(q > 0, greatest, least), rtol=1e-6, atol=0)
    (dx,) = torch.autograd.grad(y.sum(), x)
    dq, dk, dv = dx.chunk(3, 1)
    # What is left of v_j − y_i is a few roundings of v, for q times 1 and for k times q.
    rounding = 4 * 2**-24 * v.abs().max()
    assert dq.abs().max() <= rounding * k.abs().max()
    assert dk.abs().max() <= rounding * 24 * 1e5
    chosen = (dv > 0.5).sum(1)
    assert ((chosen == 2) | (q > 0).all(1) | (q < 0).all(1)).all()
    torch.testing.assert_close(dv.sum(1), torch.full((4,), 24.0, device=device))


def test_k_near_the_largest_number(backend, device):
    """The middle of the range of k is no sum of two large numbers."""
    x = torch.tensor([[2e-38, -2e-38, 0.0, 3e38, 2e38, 3.2e38, 1.0, 2.0, 3.0]], device=device)
    expected = outer_softmax_reference(x.double()).float()
    torch.testing.assert_close(tigon.outer_softmax(x), expected)


def test_a_shift_of_k_changes_no_bit(device, triton_backend):
    x = torch.randint(-8, 9, (3, 3 * 20), device=device).float() / 8
    shifted = x.clone()
    shifted[:, 20:40] += 1024
    a, b = (t.requires_grad_() for t in (x, shifted))
    y, z = tigon.outer_softmax(a), tigon.outer_softmax(b)
    assert torch.equal(y, z)
    assert torch.equal(*(torch.autograd.grad(out.square().sum(), t)[0] for out, t in ((y, a), (z, b))))


def test_a_sample_has_the_bits_that_it_has_alone(device, triton_backend):
    x = rows(9, 16, device).requires_grad_()
    y = tigon.outer_softmax(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    for i in (0, 5, 8):
        alone = x[i : i + 1].detach().requires_grad_()
        z = tigon.outer_softmax(alone)
        assert torch.equal(z, y[i : i + 1])
        assert torch.equal(torch.autograd.grad(z.square().sum(), alone)[0], dx[i : i + 1])


def test_nan_stays_in_its_row_or_sample(backend, device):
    x = rows(3, 8, device)
    x[0, 3], x[2, 8 + 3] = torch.nan, torch.nan  # a q, a k
    y = tigon.outer_softmax(x)
    nan = torch.zeros(3, 8, dtype=torch.bool, device=device)
    nan[0, 3], nan[2] = True, True
    assert torch.equal(y.isnan(), nan)


def test_nothing_but_the_input_is_kept(device, triton_backend):
    x = rows(4, 16, device).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        tigon.outer_softmax(x)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]


def test_a_slice_of_a_wider_projection_is_read_where_it_lies(device, triton_backend, monkeypatch):
    read, launch = [], KERNELS.launch
    monkeypatch.setattr(KERNELS, "launch", lambda *a: read.extend(t.data_ptr() for t in a[2]) or launch(*a))
    wide = torch.randn(6, 100, device=device)
    y = tigon.outer_softmax(wide[:, 7:67])
    assert wide[:, 7:].data_ptr() in read
    torch.testing.assert_close(y, outer_softmax_reference(wide[:, 7:67]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_residual_is_added_before_the_one_rounding(dtype, device, triton_backend):
    x = (8 * rows(50, 16, device)).to(dtype)
    exact = outer_softmax_reference(x.double(), 2.0, residual=True)
    off = (tigon.outer_softmax(x, 2.0, residual=True).double() - exact).abs()
    # Half of the distance to the next number, and fp32 sums.
    assert (off <= exact.abs() * torch.finfo(dtype).eps / 2 + 1e-5).all()
