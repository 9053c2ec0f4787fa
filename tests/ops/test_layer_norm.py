"""layer_norm and group_norm where their numbers are hard: large means, outliers, equal numbers, strides."""

import pytest
import torch
import torch.nn.functional as F
from numerics import check

import tigon
from tigon.ops import group_norm as group_norm_module
from tigon.ops.group_norm import group_norm_reference
from tigon.ops.layer_norm import layer_norm_reference
from tigon.ops.layer_norm.launches import _row_tile


def eager_layer_norm(x, weight=None, bias=None):
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def eager_group_norm(x, num_groups, weight=None, bias=None):
    return F.group_norm(x, num_groups, weight, bias)


@pytest.mark.parametrize("width", [300, 5000, 16500])  # one tile, two parts, and the loop over blocks
def test_a_mean_of_a_thousand_deviations_costs_no_more_than_in_eager(width, device, triton_backend):
    x = 1000 + torch.randn(3, width, device=device)
    # Not the gradient: eager's own is of no use there (its sums are about zero), and so no measure.
    w, b = torch.randn(width, device=device), torch.randn(width, device=device)
    check(tigon.layer_norm, layer_norm_reference, x, w, b, eager=eager_layer_norm, grad=False)
    exact = layer_norm_reference(x.double())
    assert (tigon.layer_norm(x) - exact).abs().max() < 1e-4  # half a unit in the last place of 1000 is 3e-5


@pytest.mark.parametrize("width", [300, 5000, 9000, 16500])
def test_one_outlier_in_front(width, backend, device):
    """Sums of a wide row are taken about the mean of its first block, which may be far from the row's."""
    x = torch.randn(3, width, device=device)
    x[:, 0] = 1e4
    check(tigon.layer_norm, layer_norm_reference, x, eager=eager_layer_norm)


@pytest.mark.parametrize("size", [1e16, 1e22, 1e30])  # in range; squares overflow; that of a mean's rounding does too
@pytest.mark.parametrize("width", [300, 5000, 9000, 16500])
def test_squares_beyond_fp32_give_the_bias(width, size, backend, device):
    """An infinite variance makes 1/std 0, and nothing else is infinite."""
    x = size * torch.rand(3, width, device=device).sub(0.5)
    w, b = torch.randn(width, device=device), torch.randn(width, device=device)
    if size < 1e17:
        check(tigon.layer_norm, layer_norm_reference, x, w, b, eager=eager_layer_norm, grad=False)
        return
    leaves = [t.requires_grad_() for t in (x, w, b)]
    y = tigon.layer_norm(*leaves)
    assert torch.equal(y, b.expand(3, width))
    dx, dw, db = torch.autograd.grad(y.sum(), leaves)
    assert not dx.any()
    assert not dw.any()
    assert torch.equal(db, torch.full_like(db, 3))


@pytest.mark.parametrize("parts", ["one", "several"])
@pytest.mark.parametrize("size", [1e16, 1e22, 1e30])
def test_squares_beyond_fp32_give_the_bias_of_group_norm(size, parts, backend, device, monkeypatch):
    if parts == "several":  # as a large device does
        monkeypatch.setattr(group_norm_module, "multiprocessors", lambda _: 12)
    x = size * torch.rand(1, 6, 9000, device=device).sub(0.5)
    # Every part alike: the variance between parts is 0, and that within them has to be infinite by itself.
    x[:] = x[:, :1].clone()
    w, b = torch.randn(6, device=device), torch.randn(6, device=device)
    if size < 1e17:
        check(tigon.group_norm, group_norm_reference, x, 2, w, b, eager=eager_group_norm, grad=False)
        return
    leaves = [t.requires_grad_() for t in (x, w, b)]
    y = tigon.group_norm(leaves[0], 2, *leaves[1:])
    assert torch.equal(y, b[:, None].expand(1, 6, 9000))
    dx, dw, _ = torch.autograd.grad(y.sum(), leaves)
    assert not dx.any()
    assert not dw.any()


@pytest.mark.parametrize("width", [100, 4096, 5120, 16384])
def test_a_row_of_equal_numbers_gives_the_bias(width, backend, device):
    x, b = torch.full((2, width), 1000.1, device=device), torch.randn(width, device=device)
    torch.testing.assert_close(tigon.layer_norm(x, None, b), b.expand(2, width), rtol=0, atol=0.1)
    if backend == "triton":
        assert torch.equal(tigon.layer_norm(x, None, b), b.expand(2, width))


@pytest.mark.parametrize(
    ("width", "dtype"), [(32, torch.float32), (8200, torch.bfloat16), (16500, torch.float32)], ids=str
)
def test_one_head_of_a_packed_projection(width, dtype, triton_backend, device):
    """Read where it lies, by each kernel: two strides describe its rows."""
    packed = torch.randn(1, 2, 3, 2, width, device=device, dtype=dtype)
    x = packed[:, :, 1].requires_grad_()
    plain = x.detach().clone().requires_grad_()
    w, b = (torch.randn(width, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    dy = torch.randn(1, 2, 3, width, device=device, dtype=dtype)[:, :, :2]
    y, expected = tigon.layer_norm(x, w, b), tigon.layer_norm(plain, w, b)
    assert torch.equal(y, expected)
    got = torch.autograd.grad(y, (x, w, b), dy)
    for a, e in zip(got, torch.autograd.grad(expected, (plain, w, b), dy.contiguous()), strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("parts", ["one", "several"])
def test_group_norm_of_large_means_and_outliers(parts, backend, device, monkeypatch):
    if parts == "several":  # as a large device does
        monkeypatch.setattr(group_norm_module, "multiprocessors", lambda _: 12)
    x = torch.randn(1, 6, 9000, device=device)
    x[0, :2] += 100  # the group's first channel, from which its sums start, is far from its mean
    x[0, 4, 0] = 1e3
    w, b = torch.randn(6, device=device), torch.randn(6, device=device)
    check(tigon.group_norm, group_norm_reference, x, 2, w, b, eager=eager_group_norm)


def test_group_norm_of_some_channels_and_of_channels_last(backend, device):
    wide = torch.randn(2, 9, 5, 7, device=device)
    w, b = torch.randn(6, device=device), torch.randn(6, device=device)
    check(tigon.group_norm, group_norm_reference, wide[:, 1:7], 3, w, b, eager=eager_group_norm)
    last = wide[:, :6].contiguous(memory_format=torch.channels_last)
    check(tigon.group_norm, group_norm_reference, last, 3, w, b, eager=eager_group_norm)


def test_two_parts_hold_every_column_once():
    for width in (*range(4097, 16385, 8), 5120, 6144, 9216, 10240, 12288):
        first, rest, warps = _row_tile(width)
        assert first < width <= first + rest if rest else width <= first < 2 * width, width
        # Powers of 2, such that the larger folds onto the smaller within a thread; 8 columns a thread of either.
        assert first & (first - 1) == rest & (rest - 1) == 0, width
        assert rest <= first, width
        assert rest % (256 * warps) == first % (256 * warps) == 0


def test_an_infinite_gradient_of_one_channel_stays_in_that_channel(triton_backend, device):
    """A program sums block after block of channels, and may not carry one's sums into the next."""
    g = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(2, 512, 40, generator=g).to(device) for _ in range(2))
    w, b = (torch.randn(512, generator=g).to(device).requires_grad_() for _ in range(2))

    def gradients(dy):
        return torch.autograd.grad(tigon.group_norm(x, 1, w, b), (w, b), dy)

    expected = gradients(dy)
    dy[:, 0, 0] = torch.inf
    for got, right in zip(gradients(dy), expected, strict=True):
        assert torch.equal(got[1:], right[1:])
        assert not got[0].isfinite()


def test_group_norm_cuts_samples_by_blocks_that_fit():
    """A block leaves little of it empty, unless that makes tiles too small; a small sample stays whole."""
    cut = group_norm_module._cut
    assert cut(128, 80, 576, 2, 2, 132, 232448).tile == (16, 128)
    assert cut(96, 20, 900, 2, 2, 132, 232448).tile == (4, 1024), "blocks of 64 places would be tiles of 256"
    assert cut(32, 80, 64, 2, 2, 132, 232448)[:2] == (32, (1, 1))
    for slabs, channels, space in ((64, 10, 9216), (128, 80, 576), (132, 3, 70), (4, 1, 1)):
        found = cut(slabs, channels, space, 2, 2, 132, 232448)
        (parts_c, parts_s), (per_c, per_s), (block_c, block_s) = found.parts, found.per, found.tile
        assert parts_c * per_c * block_c >= channels > (parts_c - 1) * per_c * block_c
        assert parts_s * per_s * block_s >= space > (parts_s - 1) * per_s * block_s
        assert found.programs == slabs * parts_c * parts_s
