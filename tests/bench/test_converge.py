"""How plain and fused runs of a training are judged, recorded and shown."""

import math
from dataclasses import replace

import pytest
import torch
from convergence import Runs, Training, judge, limit, scores, smooth
from harness import report

STEPS, PLAIN = 40, 4


def trainings(far=1.0, seed=0, exact=False, shared=0.0):
    """Runs that differ by noise of 1e-3; the fused ones by `far` as much. shared: an error of all plain runs."""
    draw = torch.Generator().manual_seed(seed)
    sides = [("hf", "labels")] * PLAIN + [("tigon", "labels"), ("tigon", "logits")] + [("exact", "labels")] * exact
    found = []
    for i, (side, path) in enumerate(sides):
        noise = 1e-3 * (far if side == "tigon" else 1.0)
        offset = shared if side == "hf" else 0.0
        losses = torch.linspace(6, 4, STEPS, dtype=torch.float64)
        losses = losses + offset + noise * torch.randn(STEPS, generator=draw, dtype=torch.float64)
        norms = 1 + offset + noise * torch.randn(STEPS, generator=draw, dtype=torch.float64)
        weights = torch.ones(500) + noise * torch.randn(500, generator=draw)
        calls = {"norm": 2, "head": 1} if path == "labels" else {"norm": 2}
        found.append(
            Training(side, path, i, losses.tolist(), norms.tolist(), weights, calls if side == "tigon" else {})
        )
    return found


def row(batches, runs, dtype="fp32"):
    made = Runs("m", dtype, batches, 4, 48, STEPS)
    made.record(runs)
    return made


def rows(**of_the_last):
    found = [row(f"b{i}", trainings(seed=i)) for i in range(6)]
    found.append(row("last", trainings(seed=9, **of_the_last)))
    judge(found)
    return found


def test_equal_runs_are_right_and_far_ones_are_not():
    assert [r.status for r in rows()] == ["ok"] * 7
    *others, last = rows(far=4.0)
    assert {r.status for r in others} == {"ok"}
    assert last.status == "wrong"
    for measure in ("loss", "norm", "weights"):
        assert f"labels: {measure}" in last.reason


def test_a_fused_run_that_fused_nothing_is_wrong():
    runs = trainings()
    runs[PLAIN].calls = {"norm": 2}
    found = [row("a", trainings(seed=1)), row("b", runs)]
    judge(found)
    assert found[1].status == "wrong"
    assert "labels: fused operators ran {'norm': 2}" in found[1].reason


def test_a_run_that_is_not_finite_is_wrong():
    runs = trainings()
    runs[PLAIN + 1].losses[7] = math.nan
    found = [row("a", trainings(seed=1)), row("b", runs)]
    judge(found)
    assert found[1].status == "wrong"


def test_an_error_of_all_plain_runs_is_no_error_of_the_fused():
    found = rows(shared=0.02)
    assert found[-1].status == "wrong"  # nothing says who is right
    exact = [replace(r, dtype="bf16") for r in rows(shared=0.02, exact=True)]
    judge(exact)
    assert exact[-1].status == "ok"
    assert max(exact[-1].of("tigon", "loss")) > exact[-1].limits["loss"]
    wrong = rows(far=40.0, shared=0.02, exact=True)[-1]
    assert wrong.status == "wrong"  # further from the exact run than the plain ones


def test_a_score_is_the_largest_ratio_of_distances():
    plain = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64).expand(3, 30)
    fused = torch.full((1, 30), 3.0, dtype=torch.float64)
    found = scores(torch.cat([plain, fused]), 3, 1e-9)
    # From 3 to 0, 1, 2: √((9 + 4 + 1) / 3); between these: √((1 + 4 + 1) / 3).
    assert found[3] == pytest.approx(math.sqrt(14 / 6))
    assert found[0] == pytest.approx(math.sqrt((1 + 4) / 2))  # of 0 to 1 and 2, which are 1 apart


def test_smoothing_is_a_mean_over_neighbours():
    x = torch.tensor([0.0, 3.0, 6.0, 9.0])
    assert smooth(x, 1).tolist() == [1.5, 3.0, 6.0, 7.5]


def test_the_limit_is_students():
    """Of 12 lognormal scores the quantile of t with 11 degrees of freedom at 1 - 1e-3 is 4.025 (tables)."""
    plain = [math.exp(v) for v in torch.linspace(-1, 1, 12).tolist()]
    deviation = float(torch.linspace(-1, 1, 12).std())
    assert math.log(limit(plain, 1)) == pytest.approx(4.025 * deviation * math.sqrt(13 / 12), rel=0.01)
    assert limit(plain, 100) > limit(plain, 1)


def test_a_run_goes_on_where_it_was_stopped(script, tmp_path, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    converge = script("converge")
    size = ["--output", str(tmp_path), "--short", "--steps", "2", "--plain", "3", "--dtype", "fp32", "--device", "cpu"]
    converge.main([*size, "--families", "llama", "--batches", "rows"])
    (path,) = tmp_path.glob("*-converge.json")
    first = report.load(path)["rows"][0]
    capsys.readouterr()
    converge.main([*size, "--families", "llama", "--batches", "rows,packed"])
    assert "has 1 of 2 rows" in capsys.readouterr().out
    content = report.load(path)
    assert [r["batches"] for r in content["rows"]] == ["rows", "packed"]
    assert content["rows"][0]["loss"] == first["loss"]
    assert content["rows"][1]["runs"][3]["calls"]["head"] == 1
    assert [run["side"] for run in content["rows"][0]["runs"]] == ["hf", "hf", "hf", "tigon", "tigon"]
