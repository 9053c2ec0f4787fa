"""Codes of signs in an index: they follow every update, say that they are not exact, and are calibrated."""

import copy
from importlib.util import find_spec

import pytest
import torch

from tigon.ops.filtered_topk import sign
from tigon.retrieve import Category, Index, Schema, plan_memory

D = 24


def vectors(count, seed=0):
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed))


def made(device, metric="ip", count=200, **options):
    index = Index(D, 400, "float16", metric, device=device, codes="sign", bits=128, **options)
    index.upsert(range(count), vectors(count))
    return index


def assert_codes_are_of_the_vectors(index):
    rows = torch.from_numpy(index.table.rows.live_mask().nonzero()[0]).to(index.device)
    codes = index.table.codes
    want = sign.signs_reference(index.embeddings[rows], codes.projection, scaled=True)
    assert torch.equal(codes.codes[rows], want.codes)
    assert (codes.scales is None) == (index.metric == "cosine")
    assert codes.scales is None or torch.equal(codes.scales[rows], want.scales)
    return rows


@pytest.fixture
def always(monkeypatch):
    """Signs are read, however small the index is."""
    monkeypatch.setattr(sign, "OVERHEAD", -(10**12))


@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
def test_codes_follow_every_update(metric, device, always):
    index = made(device, metric)
    index.delete([3, 4, 50])
    index.upsert(range(190, 260), vectors(70, seed=1) * 3)
    index.grow(600)
    index.upsert(range(400, 460), vectors(60, seed=2))
    assert len(assert_codes_are_of_the_vectors(index)) == len(index)
    assert "sign codes of 128 bits" in repr(index)
    query = vectors(2, seed=5)
    exact, found = index.search(query, 10, candidates=0), index.search(query, 10, candidates=40)
    assert exact.exact.all()
    assert not found.exact.any()
    every = index.search(query, 10, candidates=460)
    assert torch.equal(every.ids, exact.ids)
    torch.testing.assert_close(every.scores, exact.scores)
    assert torch.isin(found.ids, exact.ids).float().mean() > 0.5
    same = found.ids == exact.ids
    torch.testing.assert_close(found.scores[same], exact.scores[same])


def test_filters_reach_signs(device, always):
    index = Index(D, 400, schema=Schema(kind=Category()), device=device, codes="sign", bits=64)
    index.upsert(range(300), vectors(300), {"kind": ["a", "b", "c"] * 100})
    query = vectors(1, seed=5)
    for _ in range(3):  # filters that come again are kept as bits
        found = index.search(query, 10, "kind == 'a'", candidates=300)
        assert not found.exact.any()
        assert torch.equal(found.ids, index.search(query, 10, "kind == 'a'", candidates=0).ids)
        assert (found.ids % 3 == 0).all()
    assert index.search(vectors(2, seed=5), 10, ["kind == 'a'", None]).exact.all()  # a filter for each query


def test_small_searches_stay_exact(device):
    index = made(device)
    assert index.search(vectors(1, seed=5), 10).exact.all()
    assert index.search(vectors(1, seed=5), 10, candidates=20).exact.all()


def test_casts_and_copies_keep_codes_that_are_true(device):
    index = made(device)
    wide = copy.deepcopy(index).float()
    assert wide.table.codes.scales.dtype == torch.bfloat16
    assert_codes_are_of_the_vectors(wide)
    loaded = Index(D, 400, device=device, codes="sign", bits=128)
    loaded.load_state_dict(index.state_dict())
    assert_codes_are_of_the_vectors(loaded)
    weight = torch.nn.Parameter(vectors(60).to(device))
    over = Index.over(weight, codes="sign", bits=64)
    with torch.no_grad():
        weight.mul_(-3)
    assert isinstance(over.table.items(), torch.Tensor)
    over.refresh()
    assert_codes_are_of_the_vectors(over)


@pytest.mark.skipif(find_spec("safetensors") is None, reason="needs safetensors")
@pytest.mark.parametrize("metric", ["ip", "cosine"])
def test_codes_are_saved(metric, tmp_path):
    index = made("cpu", metric)
    index.delete([5, 6])
    index.save(tmp_path)
    loaded = Index.load(tmp_path)
    assert (loaded.table.format.codes, loaded.table.format.bits) == ("sign", 128)
    assert len(assert_codes_are_of_the_vectors(loaded)) == 198


@pytest.mark.parametrize("metric", ["ip", "cosine"])
def test_plan_memory_counts_signs(metric):
    index = made("cpu", metric)
    taken = sum(buffer.numel() * buffer.element_size() for buffer in index.buffers())
    assert index.plan().device_bytes == plan_memory(400, D, metric=metric, codes="sign", bits=128).device_bytes == taken


def test_calibrate_measures_recall(device):
    index = Index(D, 1000, device=device)  # whatever codes it has
    index.upsert(range(900), vectors(900))
    index.delete(range(20))
    found = index.calibrate(vectors(20, seed=3), k=10, bits=(64, 256), candidates=(10, 900))
    assert (found.items, found.queries, found.k) == (880, 20, 10)
    assert [(row.bits, row.candidates) for row in found.rows] == [
        (None, None), (64, 10), (64, 900), (256, 10), (256, 900),
    ]  # fmt: skip
    exact, _, most, few, every = found.rows
    assert exact.recall == most.recall == every.recall == 1
    assert 0.3 < few.recall < 1
    assert few.bytes < every.bytes
    assert all(row.milliseconds > 0 for row in found.rows)
    assert "recall@10" in str(found)
    assert len(str(found).splitlines()) == 7


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Index(4, 4, codes="sign", bits=100), "Index: bits must be one of 64, .*, got 100"),
        (lambda: made("cpu").search(vectors(1), 10, candidates=9), "Index.search: candidates must be 0 or .*, got 9"),
        (lambda: Index(D, 4).search(vectors(1), 1, candidates=5), "Index.search: candidates must be None for an index"),
        (lambda: Index(D, 4).calibrate(vectors(1)), "Index.calibrate: there must be items and queries, got 0 and 1"),
        (lambda: made("cpu").calibrate(vectors(1), bits=(65,)), "Index.calibrate: bits must be one of"),
        (
            lambda: made("cpu").calibrate(vectors(1), 9, candidates=(8,)),
            "Index.calibrate: candidates must be .*, got 8",
        ),
    ],
)
def test_bad_input_gets_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        call()
