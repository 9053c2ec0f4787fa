"""Codes of an index: they are those of its vectors after every update, and searches find the same with them."""

import copy
from importlib.util import find_spec

import numpy as np
import pytest
import torch

import tigon
from tigon.ops.filtered_topk import coded as launches_coded
from tigon.ops.filtered_topk import plan
from tigon.retrieve import Index, plan_memory
from tigon.retrieve.index import codes as codes_module

D = 24


def vectors(count, seed=0):
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed))


def made(device, metric="ip", dtype="float16", codes="int8", count=100):
    index = Index(D, 150, dtype, metric, device=device, codes=codes)
    index.upsert(range(count), vectors(count))
    return index


def assert_codes_bound(index):
    """Each live vector is its code within the error that the index knows."""
    rows = torch.from_numpy(np.flatnonzero(index.table.rows.live_mask())).to(index.device)
    stored, codes = index.embeddings.float()[rows].double(), index.table.codes.codes[rows].double()
    ratio = stored / index.table.codes.scales[rows].double()[:, None]
    assert ((ratio - codes).norm(dim=1) <= index.table.codes.error[0]).all()
    assert (codes.norm(dim=1) <= index.table.codes.error[1]).all()
    assert ((ratio - codes).abs() <= 0.51).all()
    return rows


def assert_same_hits(index, plain, device):
    query = vectors(3, seed=5).to(device)
    for k in (1, 7, 200):
        got, want = index.search(query, k=k), plain.search(query, k=k)
        assert torch.equal(got.ids, want.ids)
        assert torch.equal(got.scores, want.scores)
        assert got.exact.all()


@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_codes_follow_every_update(metric, dtype, device):
    index, plain = made(device, metric, dtype), made(device, metric, dtype, None)
    for each in (index, plain):
        each.delete([3, 4, 50])
        each.upsert(range(90, 140), vectors(50, seed=1) * 1e-3)  # replaces some
        each.grow(300)
        each.upsert(range(200, 260), vectors(60, seed=2) * 30)
        each.upsert([9], vectors(1, seed=3))
    assert len(assert_codes_bound(index)) == len(index)
    assert_same_hits(index, plain, device)
    assert "int8 codes" in repr(index)


def test_casts_and_copies_keep_codes_that_are_true(device):
    index = made(device, dtype="float32")
    half = copy.deepcopy(index).half()
    assert half.table.codes.scales.dtype == half.table.codes.error.dtype == torch.float32
    assert_codes_bound(half)
    assert not torch.equal(half.table.codes.scales, index.table.codes.scales)  # of the rounded vectors
    assert half.half() is half
    assert_codes_bound(half)
    loaded = Index(D, 150, "float32", device=device, codes="int8")
    loaded.load_state_dict(index.state_dict())
    assert torch.equal(loaded.table.codes.codes, index.table.codes.codes)
    assert torch.equal(loaded.table.codes.error, index.table.codes.error)
    assert isinstance(loaded.table.items(), tigon.CodedItems)
    assert_same_hits(loaded, index, device)


@pytest.mark.skipif(find_spec("safetensors") is None, reason="needs safetensors")
@pytest.mark.parametrize("gaps", [False, True])
def test_codes_are_saved_and_a_journal_brings_them_back(gaps, tmp_path):
    index = made("cpu")
    if gaps:
        index.delete([5, 6])
    index.save(tmp_path)
    rows = assert_codes_bound(index)
    loaded = Index.load(tmp_path)
    assert loaded.table.format.codes == "int8"
    assert torch.equal(loaded.table.codes.codes[: len(rows)], index.table.codes.codes[rows])
    assert torch.equal(loaded.table.codes.scales[: len(rows)], index.table.codes.scales[rows])
    assert torch.equal(loaded.table.codes.error, index.table.codes.error)
    with_journal = Index.open(tmp_path)
    with_journal.upsert([7, 1000], 100 * torch.eye(D)[:2])  # a larger error than that of the snapshot
    with_journal.close()
    replayed = Index.load(tmp_path)
    assert torch.equal(replayed.table.codes.codes, with_journal.table.codes.codes)
    assert torch.equal(replayed.table.codes.error, with_journal.table.codes.error)
    assert_codes_bound(replayed)


def test_over_a_parameter_codes_that_may_be_old_are_not_read(device):
    weight = torch.nn.Parameter(vectors(60).to(device))
    index = Index.over(weight, codes="int8")
    assert isinstance(index.table.items(), tigon.CodedItems)
    with torch.no_grad():
        weight.mul_(-3)
    assert isinstance(index.table.items(), torch.Tensor)
    assert isinstance(copy.deepcopy(index).table.items(), torch.Tensor)
    assert_same_hits(index, Index.over(weight), device)
    index.refresh()
    assert isinstance(index.table.items(), tigon.CodedItems)
    assert_codes_bound(index)
    index.load_state_dict(index.state_dict())  # of any weights
    assert isinstance(index.table.items(), torch.Tensor)
    weight.data = weight.data.clone()
    index.refresh()
    index.double()
    assert index.table.codes.scales.dtype == torch.float32
    assert isinstance(index.table.items(), torch.Tensor)


def test_large_parameters_are_encoded_in_pieces(monkeypatch):
    weight = torch.nn.Parameter(vectors(60))
    whole = Index.over(weight, codes="int8")
    monkeypatch.setattr(codes_module, "PIECE", 7 * 4 * D)
    pieces = Index.over(weight, codes="int8")
    for name in ("codes", "scales", "error"):
        assert torch.equal(getattr(pieces.table.codes, name), getattr(whole.table.codes, name))


def test_explain_says_when_codes_are_read(monkeypatch):
    index = made("cpu")
    assert index.explain(k=5).plan.codes is None  # of so few items they save nothing
    monkeypatch.setattr(plan, "CODED_BYTES", -(1 << 60))
    assert "int8 codes of all rows" in str(index.explain(k=5))
    assert made("cpu", codes=None).explain(k=5).plan.codes is None


def test_kernels_find_the_same_with_codes(monkeypatch, device, triton_backend):
    monkeypatch.setattr(plan, "CODED_BYTES", -(1 << 60))
    launches_coded._plan_scan.cache_clear()
    index, plain = (made(device, "l2", codes=codes, count=70) for codes in ("int8", None))
    for each in (index, plain):
        each.delete([3, 50])
    query = vectors(2, seed=5).to(device)
    got, want = index.search(query, k=4), plain.search(query, k=4)
    assert torch.equal(got.ids, want.ids)
    assert torch.equal(got.scores, want.scores)
    launches_coded._plan_scan.cache_clear()


def test_plan_memory_counts_codes():
    index = made("cpu")
    taken = sum(buffer.numel() * buffer.element_size() for buffer in index.buffers())
    assert index.plan().device_bytes == plan_memory(150, D, codes="int8").device_bytes == taken
    assert "codes" in str(index.plan())
    assert plan_memory(150, D).codes == 0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Index(4, 4, codes="int4"), r"Index: codes must be None or one of 'int8'.*, got 'int4'"),
        (lambda: Index.over(torch.ones(2, 2), codes=8), r"Index.over: codes must be None or one of 'int8'.*, got 8"),
        (lambda: plan_memory(4, 4, codes="int4"), r"plan_memory: codes must be None or one of 'int8'.*, got 'int4'"),
    ],
)
def test_unknown_codes_get_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        make()
