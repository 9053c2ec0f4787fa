"""embedding: ids that are wrong, frequent or padding, and gradients that are the same bits on every run."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tigon.ops import embedding as embedding_module
from tigon.ops.embedding import PIECE, embedding, sorted_ids
from tigon.ops.embedding_bag import embedding_bag


def lookup(device, ids, V=9, H=40):
    weight = torch.randn(V, H, device=device).requires_grad_()
    return torch.as_tensor(ids, device=device), weight


def assert_same_gradient(ids, weight, **options):
    upstream = torch.randn(*ids.shape, weight.shape[1], device=weight.device)
    ours, theirs = (
        torch.autograd.grad(fn(ids, weight, **options), weight, upstream)[0] for fn in (embedding, F.embedding)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    return ours


@pytest.mark.parametrize("length", [PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 5 * PIECE + 3])
@pytest.mark.parametrize("before", [0, 1, PIECE - 1, PIECE])
def test_a_run_of_any_length_anywhere(before, length, device, triton_backend):
    """Runs are cut at multiples of PIECE: this one begins and ends on, before and behind them."""
    ids, weight = lookup(device, [3] * before + [4] * length + [7, 8, 8])
    assert_same_gradient(ids, weight)


def test_long_runs_side_by_side(device, triton_backend):
    ids, weight = lookup(device, torch.arange(5).repeat_interleave(torch.tensor([PIECE + 9, 150, 1, 70, 400])) + 2)
    assert_same_gradient(ids[torch.randperm(ids.numel(), device=device)], weight)


@pytest.mark.parametrize("ranked", [0, 2000], ids=["radix", "counted"])
@pytest.mark.parametrize("tokens", [1, 511, 512, 1300])
def test_tokens_aresorted_ids_stably(tokens, ranked, device, triton_backend, monkeypatch):
    """Equal ids within a block of comparisons, and in blocks before and behind it; those without gradient come last."""
    monkeypatch.setattr(embedding_module, "RANKED", ranked)
    ids = torch.randint(-1, 12, (tokens,), device=device)
    keys, order = sorted_ids(ids, 9, 4)
    wanted, stable = torch.sort(torch.where((ids < 0) | (ids >= 9) | (ids == 4), 9, ids).int(), stable=True)
    assert torch.equal(keys, wanted)
    assert torch.equal(order, stable)


@pytest.mark.parametrize("ranked", [0, 2000], ids=["radix", "counted"])
def test_more_tokens_than_are_sorted_at_once(ranked, device, triton_backend, monkeypatch):
    monkeypatch.setattr(embedding_module, "RANKED", ranked)
    monkeypatch.setattr(embedding_module, "SORTED", 256)
    ids = torch.randint(0, 9, (1000,), device=device)
    ids[:400] = 4  # a run over three parts
    weight = torch.randn(9, 40, device=device, dtype=torch.bfloat16).requires_grad_()
    factors = torch.randn(125, 8, device=device).requires_grad_()

    def gradients(bags: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        if bags is None:
            y = embedding(ids, weight, padding_idx=2)
        else:
            y = embedding_bag(ids.view(125, 8), weight, mode="sum", padding_idx=2, per_sample_weights=bags)
        leaves = [weight] if bags is None else [weight, bags]
        return torch.autograd.grad(y.float().square().sum(), leaves)

    parts = gradients(None), gradients(factors)
    monkeypatch.setattr(embedding_module, "SORTED", 1000)
    for ours, whole in zip(parts, (gradients(None), gradients(factors)), strict=True):
        for one, other in zip(ours, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-6)
            assert other.any()


def test_runs_are_bounded_beyond_half_of_32_bits(device, triton_backend):
    """The sum of two places among 2³⁰ + 5 keys is no longer an int32."""
    size = 2**30 + 5
    if device.type == "cpu":  # numpy's zeros are pages that nobody has touched: torch would write 4 GiB
        keys = torch.from_numpy(np.zeros(size, dtype=np.int32))
    else:
        keys = torch.zeros(size, dtype=torch.int32, device=device)
    keys[-6:-2], keys[-2:] = 3, 7
    starts = keys.new_empty(9)
    kernel = embedding_module._embedding_starts_kernel
    kernel[(1,)](keys, starts, keys.numel(), 8, keys.numel().bit_length(), 256)
    assert starts.tolist() == [0, *[2**30 - 1] * 3, *[2**30 + 3] * 4, 2**30 + 5]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_narrow_ids(dtype, backend, device):
    weight = torch.randn(300, 8, device=device, requires_grad=True)
    ids = torch.tensor([[3, 100, 3]], dtype=dtype, device=device)
    y, expected = embedding(ids, weight, padding_idx=-200), F.embedding(ids.long(), weight, -200)
    assert torch.equal(y, expected)
    (dw,), (wanted,) = torch.autograd.grad(y.sum(), weight), torch.autograd.grad(expected.sum(), weight)
    torch.testing.assert_close(dw, wanted)


@pytest.mark.parametrize("wrong", [9, -1, 2**40])
def test_the_kernels_answer_a_wrong_id_with_nan(wrong, device, triton_backend):
    """Nothing out of bounds is read or written: its row is NaN, its gradient goes nowhere."""
    ids, weight = lookup(device, [1, wrong, 8])
    y = torch.ops.tigon.embedding_fwd(weight.detach(), ids, -1)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], weight[[1, 8]])
    dw = torch.ops.tigon.embedding_bwd(torch.ones_like(y), ids, 9, -1)
    assert torch.equal(dw.sum(1), torch.tensor([0.0, 40, 0, 0, 0, 0, 0, 0, 40], device=device))


def test_a_frequent_token_is_summed_in_fp32(device, triton_backend):
    """A sum of 1000 ones in bf16 stays at 256."""
    weight = torch.zeros(3, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    embedding(torch.ones(1000, dtype=torch.long, device=device), weight).sum().backward()
    assert torch.equal(weight.grad[1], torch.full_like(weight.grad[1], 1000))
