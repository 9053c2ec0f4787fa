"""The products of adapters with dropout: masks bit for bit, their statistics, and numbers against fp64."""

from __future__ import annotations

import math

import pytest
import torch
from numerics import check

import tigon
from tigon.ops import lora_dropout
from tigon.ops.lora_dropout import (
    Masks,
    draw_masks,
    dropped_gradient,
    dropped_outer,
    dropped_product,
    keep_mask,
    kept_share,
)


def masks_of(device, seed=1234567890123456789, p=(0.5,), row=0, kernels=False):
    thresholds = tuple(round(65536 * each) for each in p)
    return Masks(torch.tensor([seed], device=device), tuple(range(len(p))), thresholds, row, kernels)


# ------------------------------------------------------------------------------------------------------------ masks


def test_philox_gives_the_known_answer(device):
    """Of Random123's for philox4x32 with 7 rounds, that of counter and key 0."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    found = lora_dropout._philox(zero, zero, zero, 0)
    assert [int(word) for word in found] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


SHAPES = [(1, 1), (3, 8), (33, 140)]  # least, one block of bits, several tiles and a rest


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("p", [0.05, 0.999])
def test_the_kernels_drop_what_the_reference_drops(shape, p, triton_backend, device):
    """Of ones by the unit vectors nothing is left but the mask: of each kernel, for each layer, at a row of its own."""
    rows, columns = shape
    masks = masks_of(device, p=(p, p, p / 2), row=5, kernels=True)
    ranks = [columns, columns, columns]
    x, eye = torch.ones(shape, device=device), torch.eye(columns, device=device)
    t = dropped_product(x, torch.cat([eye] * 3), ranks, masks, torch.float32)
    da = dropped_gradient(torch.eye(rows, device=device).repeat(1, 3), x, [rows] * 3, masks, torch.float32)
    for i in range(3):
        expected = keep_mask(masks, i, rows, columns).float()
        assert torch.equal(t[:, i * columns : (i + 1) * columns], expected)
        assert torch.equal(da[i * rows : (i + 1) * rows], expected)
        one = masks.select([i], 5)
        dx = dropped_outer(torch.ones(rows, 1, device=device), x[:1], [1], one, torch.float32)
        assert torch.equal(dx, expected)


def test_masks_of_tiles_are_those_of_the_whole(device):
    masks = masks_of(device, p=(0.3,))
    whole = keep_mask(masks, 0, 40, 20)
    assert torch.equal(torch.cat([keep_mask(masks.select([0], row), 0, 10, 20) for row in range(0, 40, 10)]), whole)


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_the_share_that_is_kept(p, device):
    """Within five standard deviations of 1-p: of the whole, of every column, and of each of the eight fields."""
    rows, columns = 2048, 64
    drawn = draw_masks([p], device)
    kept = keep_mask(drawn, 0, rows, columns).double()
    spread = math.sqrt(p * (1 - p))
    assert abs(kept.mean() - (1 - p)) < 5 * spread / math.sqrt(rows * columns)
    assert (kept.mean(0) - (1 - p)).abs().max() < 5 * spread / math.sqrt(rows)
    assert (kept.mean(1) - (1 - p)).abs().max() < 6 * spread / math.sqrt(columns)
    assert abs(kept_share(p) - (1 - p)) <= 2**-17


def test_masks_are_independent(device):
    """Of layers, of calls, of neighbouring rows, columns and fields: correlations of a million pairs are noise."""
    one, other = draw_masks([0.5, 0.5], device), draw_masks([0.5, 0.5], device)
    signs = [
        2.0 * keep_mask(masks, i, 2048, 512).double() - 1 for masks, i in ((one, 0), (one, 1), (other, 0), (other, 1))
    ]
    noise = 5 / math.sqrt(signs[0].numel() / 2)
    for i, mask in enumerate(signs):
        for another in signs[i + 1 :]:
            assert (mask * another).mean().abs() < noise
        for shift in (1, 2, 4, 8, 16):
            assert (mask[:, shift:] * mask[:, :-shift]).mean().abs() < noise
            assert (mask[shift:] * mask[:-shift]).mean().abs() < noise


def test_seeds_come_from_torch_s_generator(device):
    torch.manual_seed(7)
    first, second = draw_masks([0.1], device), draw_masks([0.1], device)
    torch.manual_seed(7)
    again = draw_masks([0.1], device)
    assert int(first.seed) == int(again.seed) != int(second.seed)
    assert first.seed.device.type == device.type
    assert draw_masks([0.0, 0.0], device) is None


@pytest.mark.parametrize("p", [2**-18, 1 - 2**-20])
def test_probabilities_next_to_0_and_1(p, device):
    masks = draw_masks([p], device)
    kept = keep_mask(masks, 0, 100, 100).double().mean()
    assert 0 < kept_share(p) <= 1
    assert kept == 1 if p < 0.5 else kept < 0.01


# --------------------------------------------------------------------------------------------------------- products


def product(x, a, *, ranks, masks, dtype=None):
    return dropped_product(x, a, ranks, masks, dtype or a.dtype)


def outer(u, a, *, ranks, masks, dtype=None):
    return dropped_outer(u, a, ranks, masks, dtype or u.dtype)


def gradient(u, x, *, ranks, masks, dtype=None):
    return dropped_gradient(u, x, ranks, masks, dtype or u.dtype)


def by_hand(kind):
    """The same in torch, from masks that are there, in the dtype of the inputs."""

    def run(left, right, *, ranks, masks, dtype=None):
        results, at = [], 0
        for i, rank in enumerate(ranks):
            keep, own = keep_mask(masks, i, left.shape[0], right.shape[1]), slice(at, at + rank)
            if kind is product:
                results.append((left * keep) @ right[own].t())
            elif kind is gradient:
                results.append(left[:, own].t() @ (right * keep))
            else:
                results.append((left[:, own] @ right[own]) * keep)
            at += rank
        if kind is outer:
            return sum(results).to(dtype or left.dtype)
        return torch.cat(results, 1 if kind is product else 0).to(dtype or results[0].dtype)

    return run


RANKS = {
    "one layer": ([4], (0.25,)),
    "q, k, v": ([16, 16, 16], (0.1, 0.1, 0.1)),
    "ranks that differ": ([1, 20, 20, 3], (0.1, 0.1, 0.1, 0.1)),
    "probabilities that differ, and none": ([8, 8, 8], (0.5, 0.0, 0.1)),
    "beyond a program's ranks": ([40, 70], (0.5, 0.5)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", RANKS)
@pytest.mark.parametrize("kind", [product, outer, gradient])
def test_numbers(kind, case, dtype, backend, device):
    ranks, p = RANKS[case]
    masks = masks_of(device, p=p, row=3, kernels=backend == "triton")

    def make(generator):
        M, K, R = 70, 140, sum(ranks)
        shapes = {product: ((M, K), (R, K)), outer: ((M, R), (R, K)), gradient: ((M, R), (M, K))}[kind]
        return [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]

    check(kind, by_hand(kind), make, grad=False, draws=2, ranks=ranks, masks=masks)


@pytest.mark.parametrize("kind", [product, outer, gradient])
def test_thin_factors_in_fp32_beside_bf16(kind, backend, device):
    """Adapters in fp32 outside of autocast: 16 bits of them count."""
    ranks = [4, 20]
    masks = masks_of(device, p=(0.1, 0.1), kernels=backend == "triton")
    M, K, R = 70, 140, sum(ranks)
    shapes = {product: ((M, K), (R, K)), outer: ((M, R), (R, K)), gradient: ((M, R), (M, K))}[kind]
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    if kind is product:
        left = left.bfloat16()
    elif kind is gradient:
        right = right.bfloat16()
    dtype = torch.bfloat16 if kind is outer else torch.float32
    got = kind(left, right, ranks=ranks, masks=masks, dtype=dtype)
    exact = by_hand(kind)(left.double(), right.double(), ranks=ranks, masks=masks)
    assert got.dtype == dtype
    error = (got.double() - exact).norm() / exact.norm()
    assert error < (2**-8 if kind is outer else 2**-14)


def test_strided_rows_empty_inputs_and_many_rows(triton_backend, device):
    masks = masks_of(device, p=(0.5, 0.5), kernels=True)
    x, a = torch.randn(40, 48, device=device).t(), torch.randn(8, 40, device=device)
    u = torch.randn(8, 48, device=device).t()
    for f, args in ((dropped_product, (x, a)), (dropped_gradient, (u, x)), (dropped_outer, (u, a))):
        got = f(*args, [4, 4], masks, torch.float32)
        expected = f(*args, [4, 4], masks._replace(kernels=False), torch.float32)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        args = [t[:0] if t is x or t is u else t for t in args]
        nothing = f(*args, [4, 4], masks, torch.float32)
        assert not nothing.any()
        assert nothing.shape == f(*args, [4, 4], masks._replace(kernels=False), torch.float32).shape
    # Shares of the rows, which are summed afterwards, of which the last is short.
    x, u = torch.randn(1050, 24, device=device), torch.randn(1050, 4, device=device)
    one = masks.select([0])
    got = dropped_gradient(u, x, [4], one, torch.float32)
    exact = dropped_gradient(u, x, [4], one._replace(kernels=False), torch.float32)
    torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-4)


def test_the_ops_are_seen_by_fake_tensors(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), tigon.use_backend("auto"):
        seed = torch.empty(1, dtype=torch.int64)
        x, a, u = torch.empty(7, 24).bfloat16(), torch.empty(6, 24).bfloat16(), torch.empty(7, 6).bfloat16()
        masks = Masks(seed, (0, 1), (9, 9), kernels=True)
        assert dropped_product(x, a, [2, 4], masks, torch.float32).shape == (7, 6)
        assert dropped_outer(u, a, [2, 4], masks, torch.bfloat16).shape == (7, 24)
        assert dropped_gradient(u, x, [2, 4], masks, torch.float32).dtype == torch.float32
