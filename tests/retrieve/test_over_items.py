"""The softmax over all items: what the table of operators cannot hold."""

from __future__ import annotations

import math

import pytest
import torch
from numerics import check

import tigon
from tigon.retrieve import item_softmax
from tigon.retrieve.training.over_items import launches
from tigon.retrieve.training.over_items.launches import TILES, Tile, split_items, split_queries
from tigon.retrieve.training.over_items.reference import item_softmax_reference


@pytest.fixture
def small_tiles(monkeypatch):
    """So that few items make several shares, and few queries several tiles."""
    tile = Tile(16, 16, 4, 1)
    monkeypatch.setattr(launches, "TILES_FP32", dict.fromkeys((64, 128, 256), tile))
    monkeypatch.setattr(launches, "multiprocessors", lambda device: 12)


def test_shares_of_items_are_merged(device, triton_backend, small_tiles):
    assert split_items(37, 203, 24, Tile(16, 16, 4, 1), 12) == (4, 64)
    inputs = torch.randn(37, 24) / 3, torch.randn(203, 24), torch.randint(0, 203, (37,))
    check(item_softmax, item_softmax_reference, *(t.to(device) for t in inputs), scale=2.0)


@pytest.mark.parametrize("D", [16, 24])
def test_shares_of_queries_are_summed(D, device, triton_backend, small_tiles, monkeypatch):
    monkeypatch.setattr(launches, "SUMMED", 48)
    assert split_queries(215, 37, D, Tile(16, 16, 4, 1)) == (5, 48)
    inputs = torch.randn(215, D) / 3, torch.randn(37, D), torch.randint(0, 37, (215,))
    check(item_softmax, item_softmax_reference, *(t.to(device) for t in inputs), scale=2.0)
    check(item_softmax, item_softmax_reference, *(t.to(device) for t in inputs), reduction="none")


@pytest.mark.parametrize("N", [1, 40, 1_000_000, 16_000_000])
@pytest.mark.parametrize("M", [0, 1, 65536, 65537, 2**25, 2**31 - 1])
def test_shares_hold_each_query_once(M, N):
    tile = TILES["items"][128]
    parts, share = split_queries(M, N, 128, tile)
    assert share % tile.queries == 0
    assert (parts - 1) * share < max(M, 1)
    assert M <= parts * share < 2**31 + launches.SUMMED
    assert parts == 1 or (M > launches.SUMMED and 4 * N * 128 * parts <= launches.SHARES_BYTES)


@pytest.mark.parametrize("N", [1, 16, 127, 128, 129, 1000, 40981, 1_000_000])
@pytest.mark.parametrize("M", [1, 128, 8192])
def test_shares_hold_each_item_once(M, N):
    tile = TILES["scan"][128]
    parts, share = split_items(M, N, 128, tile, 132)
    assert share % tile.items == 0
    assert (parts - 1) * share < N <= parts * share
    assert 4 * M * 130 * parts <= max(launches.SHARES_BYTES, 4 * M * 130)


def test_a_sure_model_keeps_small_gradients(device, triton_backend):
    """p of the target is 1 − 3e-10: as a difference in fp32 it would be 0, and so would the gradients."""
    query, items = torch.zeros(1, 16, device=device), torch.zeros(40, 16, device=device)
    query[0, 0], items[7, 0], items[3, 1] = 1.0, 1.0, 1.0
    query.requires_grad_()
    items.requires_grad_()
    scale = math.log(39 / 3e-10)
    item_softmax(query, items, torch.tensor([7], device=device), scale=scale).backward()
    exact = 39 / (39 + math.exp(scale))
    torch.testing.assert_close(items.grad[7, 0].item(), -exact * scale, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(query.grad[0, 0].item(), -exact * scale, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(query.grad[0, 1].item(), exact * scale / 39, rtol=1e-4, atol=0.0)


def test_many_unlikely_items_count_in_fp16(device, triton_backend):
    """500 items of 2⁻²⁶ each beside one: below fp16's least number, and a gradient of 500 · 2⁻²⁶ along them."""
    items = torch.zeros(502, 16, device=device, dtype=torch.float16)
    items[:2, 0], items[2:, 1] = 1.0, 1.0
    query = torch.zeros(1, 16, device=device, dtype=torch.float16)
    query[0, 0] = 1.0
    query.requires_grad_()
    scale = 26 * math.log(2)
    loss = item_softmax(query, items, torch.tensor([0], device=device), scale=scale, reduction="sum")
    loss.backward()
    want = 500 * 2.0**-26 / (2 + 500 * 2.0**-26) * scale
    torch.testing.assert_close(query.grad[0, 1].item(), want, rtol=2e-3, atol=0.0)


def test_a_target_outside_of_the_items_makes_nan(device, triton_backend, monkeypatch):
    monkeypatch.setattr("tigon.ops.targets.is_concrete", lambda t: False)
    query, items = torch.randn(4, 16, device=device), torch.randn(40, 16, device=device)
    target = torch.tensor([3, 40, -100, -1], device=device)
    loss = item_softmax(query, items, target, reduction="none")
    assert loss.isnan().tolist() == [False, True, False, True]
    assert loss[2] == 0


def test_no_query_that_counts(device, backend):
    query = torch.randn(3, 16, device=device, requires_grad=True)
    items = torch.randn(40, 16, device=device, requires_grad=True)
    loss = item_softmax(query, items, torch.full((3,), -100, device=device))
    loss.backward()
    assert loss == 0
    assert not query.grad.any()
    assert not items.grad.any()


def test_a_bias_that_is_trained_gets_its_gradient(device, backend):
    query, items = torch.randn(9, 16, device=device), torch.randn(40, 16, device=device)
    bias = torch.randn(40, device=device, requires_grad=True)
    target = torch.arange(9, device=device)
    (ours,) = torch.autograd.grad(item_softmax(query, items, target, bias, scale=0.5), bias)
    (theirs,) = torch.autograd.grad(item_softmax_reference(query, items, target, bias, scale=0.5), bias)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
def test_scores_are_never_in_memory():
    query = torch.randn(2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    items = torch.randn(200_000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 200_000, (2048,), device="cuda")
    with tigon.use_backend("triton"):
        item_softmax(query, items, target).backward()
        query.grad = items.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        item_softmax(query, items, target).backward()
    gradients = query.grad.nbytes + items.grad.nbytes
    assert torch.cuda.max_memory_allocated() - before - gradients < 2**28 + 2**26  # the scores: 0.8 GB in bf16
