"""Codes of an index: they follow every update and are saved, and hits say whether a search with them is exact."""

import copy

import numpy as np
import pytest
import torch

import tigon
from tigon.retrieve import Category, Index, Schema, plan_memory
from tigon.retrieve.index import codes as codes_module
from tigon.retrieve.scan import plan, sign

D = 24


def vectors(count, seed=0):
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed))


def made(device="cpu", codes="int8", metric="ip", dtype="float16", count=100):
    index = Index(D, 150, dtype, metric, device=device, codes=codes, bits=128)
    index.upsert(range(count), vectors(count))
    return index


def check_codes(index):
    """The live vectors' codes: signs are those of the reference, int8 is within the error that the index knows."""
    rows, table = torch.from_numpy(np.flatnonzero(index.table.rows.live_mask())).to(index.device), index.table.codes
    codes = table.codes[rows]
    if table.projection is not None:
        want = sign.signs_reference(index.embeddings[rows], table.projection, scaled=True)
        assert torch.equal(codes, want.codes)
        assert (table.scales is None) == (index.metric == "cosine")
        assert table.scales is None or torch.equal(table.scales[rows], want.scales)
    else:
        ratio = index.embeddings.float()[rows].double() / table.scales[rows].double()[:, None]
        assert ((ratio - codes.double()).norm(dim=1) <= table.error[0]).all()
        assert (codes.double().norm(dim=1) <= table.error[1]).all()
        assert ((ratio - codes.double()).abs() <= 0.51).all()
    assert len(rows) == len(index)
    return rows


def assert_same_hits(index, plain, device):
    query = vectors(3, seed=5).to(device)
    for k in (1, 7, 200):
        got, want = index.search(query, k=k), plain.search(query, k=k)
        assert torch.equal(got.ids, want.ids)
        assert torch.equal(got.scores, want.scores)
        assert got.exact.all()


@pytest.fixture
def always(monkeypatch):
    """Codes are read, however small the index is."""
    monkeypatch.setattr(sign, "OVERHEAD", -(10**12))
    monkeypatch.setattr(plan, "CODED_BYTES", -(1 << 60))


def update(index):
    index.delete([3, 4, 50])
    index.upsert(range(90, 140), vectors(50, seed=1) * 1e-3)  # replaces some
    index.grow(300)
    index.upsert(range(200, 260), vectors(60, seed=2) * 30)
    index.upsert([9], vectors(1, seed=3))
    return index


@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_eight_bits_follow_every_update(metric, dtype, device):
    index, plain = (update(made(device, codes, metric, dtype)) for codes in ("int8", None))
    check_codes(index)
    assert_same_hits(index, plain, device)
    assert "int8 codes" in repr(index)


@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
def test_signs_follow_every_update(metric, device, always):
    index = update(made(device, "sign", metric))
    check_codes(index)
    assert "sign codes of 128 bits" in repr(index)
    query = vectors(2, seed=5)
    exact, few, every = (index.search(query, 10, candidates=many) for many in (0, 40, 460))
    assert exact.exact.all()
    assert not few.exact.any()
    assert torch.equal(every.ids, exact.ids)
    torch.testing.assert_close(every.scores, exact.scores)
    assert torch.isin(few.ids, exact.ids).float().mean() > 0.5
    same = few.ids == exact.ids
    torch.testing.assert_close(few.scores[same], exact.scores[same])


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


def test_small_searches_with_signs_stay_exact(device):
    for options in ({}, {"candidates": 20}):
        assert made(device, "sign").search(vectors(1, seed=5), 10, **options).exact.all()


@pytest.mark.parametrize("codes", ["int8", "sign"])
def test_casts_and_copies_keep_codes_that_are_true(codes, device):
    index = made(device, codes, dtype="float32")
    half = copy.deepcopy(index).half()
    assert half.table.codes.scales.dtype == (torch.float32 if codes == "int8" else torch.bfloat16)
    check_codes(half)
    if codes == "int8":
        assert half.table.codes.error.dtype == torch.float32
        assert not torch.equal(half.table.codes.scales, index.table.codes.scales)  # of the rounded vectors
    loaded = Index(D, 150, "float32", device=device, codes=codes, bits=128)
    loaded.load_state_dict(index.state_dict())
    assert torch.equal(loaded.table.codes.codes, index.table.codes.codes)
    assert isinstance(loaded.table.items(), tigon.CodedItems)
    check_codes(loaded)
    assert_same_hits(loaded, index, device)


@pytest.mark.parametrize("metric", ["ip", "cosine"])
@pytest.mark.parametrize("codes", ["int8", "sign"])
@pytest.mark.parametrize("gaps", [False, True])
def test_codes_are_saved_and_a_journal_brings_them_back(metric, codes, gaps, tmp_path):
    pytest.importorskip("safetensors")
    index = made("cpu", codes, metric)
    if gaps:
        index.delete([5, 6])
    index.save(tmp_path)
    rows = check_codes(index)
    loaded = Index.load(tmp_path)
    assert (loaded.table.format.codes, loaded.table.format.bits) == (codes, 128)
    check_codes(loaded)
    for name, buffer in index.table.codes.row_buffers().items():
        assert torch.equal(getattr(loaded.table.codes, name)[: len(rows)], buffer[rows])
    with_journal = Index.open(tmp_path)
    with_journal.upsert([7, 1000], 100 * torch.eye(D)[:2])  # a larger error than that of the snapshot
    with_journal.close()
    replayed = Index.load(tmp_path)
    for name, buffer in with_journal.table.codes.named_buffers():
        assert torch.equal(getattr(replayed.table.codes, name), buffer)
    check_codes(replayed)


@pytest.mark.parametrize("codes", ["int8", "sign"])
def test_over_a_parameter_codes_that_may_be_old_are_not_read(codes, device):
    weight = torch.nn.Parameter(vectors(60).to(device))
    index = Index.over(weight, codes=codes, bits=64)
    assert isinstance(index.table.items(), tigon.CodedItems)
    with torch.no_grad():
        weight.mul_(-3)
    assert isinstance(index.table.items(), torch.Tensor)
    assert isinstance(copy.deepcopy(index).table.items(), torch.Tensor)
    assert_same_hits(index, Index.over(weight), device)
    index.refresh()
    assert isinstance(index.table.items(), tigon.CodedItems)
    check_codes(index)
    index.load_state_dict(index.state_dict())  # of any weights
    assert isinstance(index.table.items(), torch.Tensor)
    weight.data = weight.data.clone()
    index.refresh()
    index.double()
    assert index.table.codes.scales.dtype == (torch.float32 if codes == "int8" else torch.bfloat16)
    assert isinstance(index.table.items(), torch.Tensor)


def test_large_parameters_are_encoded_in_pieces(monkeypatch):
    weight = torch.nn.Parameter(vectors(60))
    whole = Index.over(weight, codes="int8")
    monkeypatch.setattr(codes_module, "PIECE", 7 * 4 * D)
    pieces = Index.over(weight, codes="int8")
    for name in ("codes", "scales", "error"):
        assert torch.equal(getattr(pieces.table.codes, name), getattr(whole.table.codes, name))


def test_explain_says_when_codes_are_read(monkeypatch):
    index = made()
    assert index.explain(k=5).plan.codes is None  # of so few items they save nothing
    monkeypatch.setattr(plan, "CODED_BYTES", -(1 << 60))
    assert "int8 codes of all rows" in str(index.explain(k=5))
    assert made(codes=None).explain(k=5).plan.codes is None


def test_kernels_find_the_same_with_codes(always, fresh_plans, device, triton_backend):
    index, plain = (made(device, codes, "l2", count=70) for codes in ("int8", None))
    for each in (index, plain):
        each.delete([3, 50])
    query = vectors(2, seed=5).to(device)
    got, want = index.search(query, k=4), plain.search(query, k=4)
    assert torch.equal(got.ids, want.ids)
    assert torch.equal(got.scores, want.scores)


@pytest.mark.parametrize(("codes", "metric"), [("int8", "ip"), ("sign", "ip"), ("sign", "cosine"), (None, "ip")])
def test_plan_memory_counts_codes(codes, metric):
    index = made("cpu", codes, metric)
    taken = sum(buffer.numel() * buffer.element_size() for buffer in index.buffers())
    planned = plan_memory(150, D, metric=metric, codes=codes, bits=128)
    assert index.plan().device_bytes == planned.device_bytes == taken
    assert (planned.codes > 0) == ("codes" in str(index.plan())) == (codes is not None)


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
        (lambda: Index(4, 4, codes="int4"), r"Index: codes must be None or one of 'int8'.*, got 'int4'"),
        (lambda: Index.over(torch.ones(2, 2), codes=8), r"Index.over: codes must be None or one of 'int8'.*, got 8"),
        (lambda: plan_memory(4, 4, codes="int4"), r"plan_memory: codes must be None or one of 'int8'.*, got 'int4'"),
        (lambda: Index(4, 4, codes="sign", bits=100), "Index: bits must be one of 64, .*, got 100"),
        (lambda: made(codes="sign").search(vectors(1), 10, candidates=9), "Index.search: candidates must be 0 or .* 9"),
        (lambda: Index(D, 4).search(vectors(1), 1, candidates=5), "Index.search: candidates must be None for an index"),
        (lambda: Index(D, 4).calibrate(vectors(1)), "Index.calibrate: there must be items and queries, got 0 and 1"),
        (lambda: made().calibrate(vectors(1), bits=(65,)), "Index.calibrate: bits must be one of"),
        (lambda: made().calibrate(vectors(1), 9, candidates=(8,)), "Index.calibrate: candidates must be .*, got 8"),
    ],
)
def test_bad_input_gets_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        call()
