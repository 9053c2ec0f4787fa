"""`tigon retrieve bench --codes`: what is measured of codes, and that wrong answers are seen."""

from __future__ import annotations

import json

import pytest
import torch

import tigon
from tigon.bench import report, search_codes
from tigon.bench.runner import Ceilings, Settings
from tigon.ops.filtered_topk import coded, launches, plan

DTYPE = torch.float16
QUICK = Settings(1, 0.0, 0.0, least=1)


def bench(device):
    return search_codes.Bench(32, DTYPE, device, Ceilings(4000.0, 700.0, ""), QUICK, lambda _: None)


@pytest.fixture
def small_searches_read_codes(monkeypatch):
    monkeypatch.setattr(plan, "CODED_BYTES", -(1 << 60))
    for made in (launches._plan_scan, coded._plan_scan):
        made.cache_clear()
    yield
    for made in (launches._plan_scan, coded._plan_scan):
        made.cache_clear()


def test_the_share_that_codes_prove(small_searches_read_codes, triton_backend, device):
    """512 groups of 64 rows are picked, 32,768 rows: of these all are proven, of far more equal ones none."""
    asked = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).to(device, DTYPE)
    few = torch.randn(900, 16, generator=torch.Generator().manual_seed(1)).to(device, DTYPE)
    assert search_codes._reads(asked, few, 8)
    assert search_codes.certified(asked, tigon.encode_items(few), 8, 1) == 1
    assert not search_codes._reads(torch.ones(65, 16, dtype=DTYPE, device=device), few, 8)
    equal = few[:1].expand(128 * 64 + 64, -1).contiguous()  # a group more than are picked for k = 8
    assert search_codes.certified(asked[:1], tigon.encode_items(equal), 8, 1) == 0


def test_wrong_answers_are_seen(device, monkeypatch):
    """Of a search that reads codes, and of one among signs alone."""
    rows = torch.randn(300, 32, generator=torch.Generator().manual_seed(0)).to(device, DTYPE)
    query = rows[:2]
    right = search_codes.expected(rows, query, 5)
    here = bench(device)

    def searched(items):
        row = here.row(300, 2, 5, "tigon, int8", 1.0, vectors="random", codes="int8")
        return search_codes._search(here, row, query, items, right, rows)

    assert searched(tigon.encode_items(rows)).status == "ok"
    other = searched(tigon.encode_items(rows.flip(0)))
    assert (other.status, other.equal) == ("wrong", 0)
    near = rows.clone()
    near[right[0, 0]] *= 1.001  # the same ids, other scores
    assert searched(tigon.encode_items(near)).reason == "the answer is not that of a search without codes"

    (alone,) = search_codes._signs_alone(here, 3000, 5)
    assert (alone.status, alone.equal, alone.candidates) == ("ok", 1, 256)
    real = search_codes._by_signs
    monkeypatch.setattr(search_codes, "_by_signs", lambda *given: [x.clamp(max=9) for x in real(*given)])
    (alone,) = search_codes._signs_alone(here, 3000, 5)
    assert alone.status == "wrong"


def test_queries_have_neighbours_among_clustered_rows(device):
    rows, asked = search_codes.clustered(5000, 32, DTYPE, 8, device)
    assert rows.shape == (5000, 32)
    assert rows.dtype == asked.dtype == DTYPE
    cosine = torch.nn.functional.cosine_similarity(asked[:, None].float(), rows[None].float(), dim=2)
    near = (cosine > 0.45).float().mean(1)  # one cluster of five, and hardly another row
    assert ((near > 0.1) & (near < 0.3)).all()
    again = search_codes.clustered(5000, 32, DTYPE, 8, device)
    assert torch.equal(rows, again[0])
    assert search_codes.clustered(50, 32, torch.float8_e4m3fn, 2, device)[1].dtype == torch.float16


def test_rows_of_codes_have_columns_of_their_own(tmp_path):
    here = bench(torch.device("cpu"))
    plain = search_codes.SearchRow(9, 32, "float16", 1, 5, "none", 1.0, "tigon", ms=1.0, floor_ms=0.5, times_floor=2.0)
    of_8 = here.row(9, 1, 5, "tigon, int8", 4e6, vectors="random", codes="int8", certified=0.996)
    signs = here.row(2_500_000, 1, 5, "tigon, 64 signs", 1.0, vectors="clustered", candidates=256, recall=0.98765)
    assert of_8.floor_ms == pytest.approx(1e-3)
    content = report.result("search", [plain, of_8, signs], device=torch.device("cpu"))
    report.save(tmp_path / "r.json", content)
    header, cells = report.cells(report.load(tmp_path / "r.json"))
    shown = [dict(zip(header, line, strict=True)) for line in cells]
    assert [(line["rows"], line["certified"], line["recall"], line["candidates"]) for line in shown] == [
        ("–", "–", "–", "–"), ("–", "99.6%", "–", "–"), ("2.5 M clustered", "–", "0.9877", "256"),
    ]  # fmt: skip
    old = json.loads((tmp_path / "r.json").read_text())["rows"][0]
    assert "vectors" not in old  # as in records from before
