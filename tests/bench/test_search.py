"""benchmarks/search.py: what is measured of searches, codes and an index beside a writer; wrong answers are seen."""

import pytest
import search
import torch
from harness import report, search_codes, search_latency
from harness.runner import Ceilings, Settings
from harness.search import Bench

import tigon
from tigon.retrieve.scan import coded, launches, plan

DTYPE = torch.float16
QUICK = Settings(1, 0.0, 0.0, least=1)


def measure(folder, *arguments):
    assert search.main([*map(str, arguments), "--device", "cpu", "--output", str(folder)]) == 0
    (path,) = folder.glob("*-search.json")
    assert path.with_suffix(".png").stat().st_size > 1000
    return report.load(path)["rows"]


@pytest.fixture(autouse=True)
def charts():
    pytest.importorskip("matplotlib")


def test_searches_beside_torch(tmp_path):
    size = ("--items", 2000, "--dim", 16, "--queries", "1,3", "-k", "10", "--shares", "1,0.2")
    rows = measure(tmp_path, *size, "--each")
    ours = [row for row in rows if row["implementation"] == "tigon"]
    assert [(row["queries"], row["filters"], row["share"]) for row in ours] == [
        (1, "none", 1), (3, "none", 1), (1, "one", 0.2), (3, "one", 0.2), (1, "each", 0.125), (3, "each", 0.125),
    ]  # fmt: skip
    assert all(row["status"] == "ok" and row["equal"] > 0.99 and row["ms"] > 0 for row in ours)
    assert {row["implementation"] for row in rows} == {"tigon", "torch", "torch-gather"}


def test_searches_beside_a_writer(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(search_latency.measure_beside_updates, "__defaults__", (0.3,))
    size = ("--items", 2000, "--dim", 16, "--queries", "2", "-k", "10", "--shares", "1", "--no-peers")
    rows = measure(tmp_path, *size, "--updates", 5000, "--calls", "256,20")
    rows = [row for row in rows if row["p99_ms"] is not None]
    assert [(row["queries"], row["updates"], row["call"], row["status"]) for row in rows] == [
        (2, 0, 0, "ok"), (2, 5000, 256, "ok"), (2, 5000, 20, "ok"),
    ]  # fmt: skip
    assert all(0 < row["ms"] <= row["p99_ms"] for row in rows)
    assert "Index, 5,000 updates/s in calls of 20" in capsys.readouterr().out


def test_searches_with_codes(tmp_path, monkeypatch):
    monkeypatch.setattr(search_codes, "CLUSTER", 100)
    size = ("--items", 3000, "--dim", 32, "--queries", "1,3", "-k", "10,20", "--shares", "0.5", "--no-peers")
    rows = measure(tmp_path, *size, "--codes")
    assert all(row["status"] == "ok" and row["ms"] > 0 and row["times_floor"] > 0 for row in rows)
    # Beside them stand the plain searches of all rows, which no share asked for.
    plain = [row for row in rows if row["vectors"] is None and row["share"] == 1]
    assert {(row["queries"], row["k"]) for row in plain} == {(1, 10), (3, 10), (1, 20), (3, 20)}
    int8 = [row for row in rows if row["codes"] == "int8"]
    assert {(row["vectors"], row["queries"], row["k"]) for row in int8} == {
        *(("random", b, k) for b in (1, 3) for k in (10, 20)), ("clustered", 1, 10), ("clustered", 1, 20)
    }  # fmt: skip
    assert all(row["equal"] > 0.99 and row["certified"] is None for row in int8)  # without kernels nothing reads codes
    recall = {
        (row["vectors"], row["k"], row["bits"], row["candidates"]): row["recall"]
        for row in rows if row["codes"] == "sign" and row["queries"] == 1 and row["vectors"] != "one"
    }  # fmt: skip
    assert recall.keys() == {
        *(("clustered", 10, *signs) for signs in ((64, 256), (256, 256), (512, 256), (512, 20), (512, 100))),
        ("clustered", 20, 512, 256), ("random", 10, 512, 256), ("random", 20, 512, 256),
    }  # fmt: skip
    assert recall["clustered", 10, 512, 256] > 0.95
    assert recall["clustered", 10, 512, 20] <= recall["clustered", 10, 512, 100] <= 1
    (alone,) = (row for row in rows if row["vectors"] == "one")
    assert (alone["items"], alone["bits"], alone["equal"]) == (3000, 64, 1)


@pytest.fixture
def small_searches_read_codes(monkeypatch):
    monkeypatch.setattr(plan, "CODED_BYTES", -(1 << 60))
    for cached in (launches._plan_scan, coded._plan_scan):
        cached.cache_clear()
    yield
    for cached in (launches._plan_scan, coded._plan_scan):
        cached.cache_clear()


def test_the_share_that_codes_prove(small_searches_read_codes, triton_backend, device):
    """512 groups of 64 rows are picked, 32,768 rows: of these all are proven, of far more equal ones none."""
    query = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).to(device, DTYPE)
    few = torch.randn(900, 16, generator=torch.Generator().manual_seed(1)).to(device, DTYPE)
    assert search_codes.reads_codes(query, few, 8)
    assert search_codes.measure_certified(query, tigon.encode_items(few), 8, 1) == 1
    assert not search_codes.reads_codes(torch.ones(65, 16, dtype=DTYPE, device=device), few, 8)
    equal = few[:1].expand(128 * 64 + 64, -1).contiguous()  # a group more than are picked for k = 8
    assert search_codes.measure_certified(query[:1], tigon.encode_items(equal), 8, 1) == 0


def test_wrong_answers_are_seen(device, monkeypatch):
    """Of a search that reads codes, and of one among signs alone."""
    rows = torch.randn(300, 32, generator=torch.Generator().manual_seed(0)).to(device, DTYPE)
    query = rows[:2]
    right = search_codes.sort_in_fp64(rows, query, 5)
    bench = Bench(32, DTYPE, device, Ceilings(4000.0, 700.0, ""), QUICK)

    def run(items):
        return search_codes._search(bench, bench.make_row(300, 2, 5, "tigon, int8"), query, items, right, rows)

    assert run(tigon.encode_items(rows)).status == "ok"
    other = run(tigon.encode_items(rows.flip(0)))
    assert (other.status, other.equal) == ("wrong", 0)
    near = rows.clone()
    near[right[0, 0]] *= 1.001  # the same ids, other scores
    assert run(tigon.encode_items(near)).reason == "the answer is not that of a search without codes"

    alone = search_codes.measure_signs_alone(bench, 3000, 5)
    assert (alone.status, alone.equal, alone.candidates) == ("ok", 1, 256)
    real = search_codes.search_signs
    monkeypatch.setattr(search_codes, "search_signs", lambda *given: [x.clamp(max=9) for x in real(*given)])
    assert search_codes.measure_signs_alone(bench, 3000, 5).status == "wrong"


def test_queries_have_neighbours_among_clustered_rows(device):
    rows, query = search_codes.draw_clustered(5000, 32, DTYPE, 8, device)
    assert rows.shape == (5000, 32)
    assert rows.dtype == query.dtype == DTYPE
    cosine = torch.nn.functional.cosine_similarity(query[:, None].float(), rows[None].float(), dim=2)
    near = (cosine > 0.45).float().mean(1)  # one cluster of five, and hardly another row
    assert ((near > 0.1) & (near < 0.3)).all()
    assert torch.equal(rows, search_codes.draw_clustered(5000, 32, DTYPE, 8, device)[0])
    assert search_codes.draw_clustered(50, 32, torch.float8_e4m3fn, 2, device)[1].dtype == torch.float16
