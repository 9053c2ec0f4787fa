"""How plain and fused runs of a training are judged, recorded and shown."""

import math
from dataclasses import replace

import pytest
import torch
from convergence import HeldOut, Runs, Training, curve, describe_held_out, judge, limit, scores, smooth
from harness import report

STEPS, PLAIN = 40, 4


@pytest.fixture(scope="module")
def converge(script):
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    return script("converge")


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


def test_a_run_goes_on_where_it_was_stopped(converge, tmp_path, capsys):
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


# --------------------------------------------------------------------------------------------------------------- FP8


def test_runs_in_fp8_have_scores_and_no_limit():
    def with_fp8(runs, calls):
        far = replace(runs[PLAIN], side="fp8", losses=[loss + 0.1 for loss in runs[PLAIN].losses], calls=calls)
        return [*runs, far]

    found = [row("a", trainings(seed=1)), row("b", with_fp8(trainings(seed=2), {"fp8": 3}))]
    judge(found)
    assert found[1].of("fp8", "loss")[0] > 10 * found[1].limits["loss"]
    assert found[1].status == "ok"
    found[1] = row("b", with_fp8(trainings(seed=2), {"norm": 5}))
    judge(found)
    assert (found[1].status, found[1].reason) == ("wrong", "labels: no layer ran in FP8")


def test_fp8_is_trained_beside_fused_runs_into_its_own_file(converge, tmp_path, capsys):
    size = ["--output", str(tmp_path), "--short", "--steps", "2", "--plain", "3", "--device", "cpu"]
    converge.main([*size, "--families", "llama", "--batches", "rows", "--fp8"])
    (path,) = tmp_path.iterdir()
    assert path.name.endswith("-converge-fp8.json")
    (found,) = report.load(path)["rows"]
    assert [run["side"] for run in found["runs"][3:]] == ["tigon", "tigon", "fp8", "fp8", "exact"]
    assert [run["calls"].get("fp8", 0) for run in found["runs"][3:]] == [0, 0, 3, 3, 0]
    assert len({run["loss"] for run in found["runs"][3:]}) == 5
    assert f"FP8's losses {max(found['scores']['loss'][5:7]):.3g} ×" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        converge.main([*size, "--fp8", "--dtype", "fp32"])
    assert "--fp8 needs --dtype bf16" in capsys.readouterr().err


def held_out(ends, side="tigon", part="p", losses=(3.0, 2.0)):
    return [
        HeldOut(part, side, seed, "plays", 2, 8, len(losses), 1e-3, losses=[*losses], held_out=[(0, 9.0), (2, end)])
        for seed, end in enumerate(ends)
    ]


def test_a_side_is_beyond_the_spread_of_seeds_or_within():
    base = held_out([2.00, 2.02, 2.04])
    for ends, verdict in (
        ([2.03, 2.05, 2.07], "mean +0.0300, within the spread of seeds 0.0400"),
        ([2.05, 2.07, 2.09], "mean +0.0500, BEYOND the spread of seeds 0.0400"),
        ([1.90, 1.90, 1.90], "within"),
        ([2.0, 2.0, math.nan], "BEYOND"),
    ):
        first, second = describe_held_out([*base, *held_out(ends, "tigon-fp8", losses=(3.0, 2.5))], "tigon")
        assert "loss of step 1: 3.000, 2: 2.000; held out 2.0000, 2.0200, 2.0400" in first
        assert "spread" not in first
        assert verdict in second
        assert f"{0.5 * 0.5**0.5:.4f} apart" in second


def test_held_out_text_is_never_trained_on(converge):
    texts = [converge.Text("rows", 2, 64, torch.device("cpu"), "plays", 8, seed) for seed in (0, 1)]
    assert torch.equal(texts[0].held, texts[1].held)
    assert not torch.equal(texts[0].chosen, texts[1].chosen)
    assert texts[0].chosen.sort().values.equal(texts[1].chosen.sort().values)
    trained = {tuple(texts[1].ids[i].tolist()) for i in texts[1].chosen}
    assert len(texts[1].held) == 8
    assert not trained & {tuple(ids) for ids in texts[1].held.tolist()}
    assert len(texts[0].chosen) + 8 == len(texts[0].ids)


def test_fine_tuning_begins_with_the_weights_that_bf16_trained(converge, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(converge, "SEEDS", 1)
    monkeypatch.setitem(converge.SHORT, "steps", 3)
    # Losses of the first steps say little of a seed, of which there is one: the spread is zero.
    converge.main(["--output", str(tmp_path), "--held-out", "--short", "--plot", "--device", "cpu"])
    (path,) = tmp_path.glob("*-held-out.json")
    assert path.with_suffix(".png").stat().st_size > 10_000
    rows = report.load(path)["rows"]
    assert [row["side"] for row in rows] == 2 * [*converge.HELD_SIDES]
    for part, source in ((rows[:4], "plays"), (rows[4:], "pages")):
        assert {row["source"] for row in part} == {source}
        assert len({row["held_out"][0][1] for row in part}) == 1, "all sides begin with the same weights"
        assert [step for step, _ in part[0]["held_out"]] == [0, 3]
        assert all(len(curve(row["losses"])) == 3 for row in part)
        assert len({row["losses"] for row in part}) == 4
        assert [row["calls"].get("fp8", 0) for row in part] == [0, 0, 6, 3]
    taught = dict(rows[1]["held_out"])
    assert taught[3] < taught[0]
    size = converge.HELD_SHORT
    pages = converge.Text("rows", size["batch"], size["seq"], torch.device("cpu"), "pages", size["held"])
    random = converge.build("llama", torch.bfloat16, torch.device("cpu"), num_hidden_layers=3)
    assert rows[4]["held_out"][0][1] != converge.measure_held_out(random, pages)
    capsys.readouterr()
