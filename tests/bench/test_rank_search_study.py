"""The study of searches: a tiny run that is cut and goes on, its tables, and p by hand."""

from pathlib import Path

import numpy as np
import pytest

for package in ("optuna", "lightgbm", "accelerate"):
    pytest.importorskip(package)
import rank_search as script  # noqa: E402
from harness import report  # noqa: E402
from studies import rank_search as study  # noqa: E402
from studies.clicks import data  # noqa: E402
from studies.rows import Row  # noqa: E402

WORDS = ("--sets", "adult", "--seeds", 2, "--trials", 3, "--best", 1, "--epochs", 1, "--width", 4, "--rank", 4,
         "--layers", 1, "--mlp", "16", "--batch-size", 64, "--rows", 0.5, "--device", "cpu")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("tables")
    (root / "adult").mkdir()
    draw = np.random.default_rng(0)
    rows = []
    for _ in range(300):
        letters, numbers = draw.integers(3, size=len(data.ADULT)), draw.integers(9, size=len(data.ADULT_NUMBERS))
        rows.append([*("abc"[n] for n in letters), *map(str, numbers), "<>"[(letters[0] + letters[1]) % 2] + "50K"])
    header = [*data.ADULT, *data.ADULT_NUMBERS, "income"]
    (root / "adult" / "adult.csv").write_text("\n".join(",".join(row) for row in [header, *rows]) + "\n")
    return root


def run(monkeypatch, folder, *words):
    monkeypatch.setattr("sys.argv", ["rank_search.py", "--data", str(folder), *map(str, (*WORDS, *words))])
    script.main()


def test_a_run_that_is_cut_goes_on(folder, monkeypatch, capsys, tmp_path):
    run(monkeypatch, folder, "--studies", tmp_path / "studies", "--output", tmp_path, "--budget", 0)
    assert "left out, since the budget was spent: 6 searches, and 0 that were begun" in capsys.readouterr().out
    (path,) = tmp_path.glob("*-rank-search.json")
    assert report.load(path)["rows"] == []
    first = ("--studies", tmp_path / "studies", "--output", tmp_path / "one", "--seeds", 1)
    run(monkeypatch, folder, *first)
    (path,) = (tmp_path / "one").glob("*-rank-search.json")
    run(monkeypatch, folder, "--studies", tmp_path / "studies", "--output", tmp_path / "two", "--resume", path)
    (path,) = (tmp_path / "two").glob("*-rank-search.json")
    content = report.load(path)
    rows = content["rows"]
    assert {(row["part"], row["method"], row["seed"]) for row in rows} >= {
        *(("trials", method, seed) for method in study.SAMPLERS for seed in (0, 1)),
        *(("refit", method, seed) for method in study.SAMPLERS for seed in (0, 1)),
        ("hand", study.HAND, 0), ("hand", study.HAND, 1),
    }  # fmt: skip
    assert content["setting"]["trials"] == 3
    # Three trials are random by either sampler.
    trials = {(row["method"], row["seed"]): row for row in rows if row["part"] == "trials"}
    for seed in (0, 1):
        a, b = (trials[method, seed] for method in study.SAMPLERS)
        assert a["validation"] == b["validation"]
        assert a["measures"] == b["measures"]
        assert a["setting"]["tried"] == sorted(a["setting"]["tried"], reverse=True)
        assert a["setting"]["tried"][-1] == a["validation"]["log_loss"]
    hand = next(row for row in rows if row["part"] == "hand")
    assert all(row["setting"]["flops"] <= hand["setting"]["flops"] for row in rows if row["part"] == "within")
    said = capsys.readouterr().out
    assert "| adult | 2 | " in said
    assert "6 searches and models" in said
    for part in study.PARTS:
        assert study.page(tmp_path / "two", part) in said
    assert "No run has been recorded yet." in study.page(tmp_path / "studies", "refit")


def test_searches_are_compared_seed_by_seed():
    losses = {"evolution": (0.50, 0.52, 0.51), "random": (0.51, 0.525, 0.505)}
    rows = [
        Row("trials", name, seed, method, {"flops": 1}, {"log_loss": value + 0.1}, {"log_loss": value}).to_dict()
        for name in ("a", "b")
        for method, values in losses.items()
        for seed, value in enumerate(values)
    ]
    a, b, both = study.compared(rows, ("trials", "evolution"), ("trials", "random"), "validation")
    # −0.01, −0.005 and 0.005: of 8 ways to turn the signs, all but two, whose mean is 0, are as far from 0 or farther.
    assert a == ["a", "3", "0.5100", "0.5133", "−33.3", "2 of 3", "0.750"]
    assert b[1:] == a[1:]
    assert both[:2] == ["all, %", "6"]
    assert both[5] == "4 of 6"
    assert study.p_paired([-1.0, -1, -1, -1, -1]) == 2 / 32
    assert "evolution | random | difference, 10⁻⁴" in study.table("objective", rows)
    assert study.table("refit", rows) == ""


def test_a_method_that_there_is_not(folder, monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="--methods must be of evolution, random, residual-dcn, got 'tpe'"):
        run(monkeypatch, folder, "--methods", "tpe", "--output", tmp_path)


def test_what_the_page_says_is_in_the_record():
    root = Path(__file__).parents[2]
    text = (root / "docs" / "rank" / "search.md").read_text()
    rows = report.load(root / "benchmarks" / "results" / "h200-rank-search.json")["rows"]
    lines = {part: {line[0]: line for line in of} for part, of in (
        ("objective", study.compared(rows, ("trials", "evolution"), ("trials", "random"), "validation")),
        ("trials", study.compared(rows, ("trials", "evolution"), ("trials", "random"), "measures")),
        ("refit", study.compared(rows, ("refit", "evolution"), ("refit", "random"), "measures")),
        ("hand", study.compared(rows, ("within", "evolution"), ("hand", study.HAND), "measures")),
    )}  # fmt: skip
    seeds, away, lower, p = 1, 4, 5, 6
    every = [lines[part]["all, %"] for part in ("objective", "trials")]
    assert [one[seeds] for one in every] == ["15", "15"]
    assert "a log loss {} % lower than the best of as many random graphs, and {} % lower on the test".format(
        *(one[away].removeprefix("−") for one in every)
    ) in text  # fmt: skip
    assert all(float(one[p]) < 0.05 for one in every)
    sets = ("frappe", "ml-100k", "adult")
    assert all(float(lines[part][one][p]) > 0.05 for part in ("objective", "trials") for one in sets)
    assert [lines["refit"][one][lower] for one in sets] == ["0 of 5", "3 of 5", "1 of 5"]
    away_of, p_of = lines["refit"]["all, %"][away].removeprefix("+"), lines["refit"]["all, %"][p]
    frappe = float(lines["refit"]["frappe"][2]) / float(lines["refit"]["frappe"][3]) - 1
    assert (
        f"over all 15 searches by {away_of} % of the log loss (p {p_of}), on Frappe by {100 * frappe:.1f} % in" in text
    )
    assert "in five searches of five, on Adult in four of five; on MovieLens they are ahead in three" in text
    assert lines["hand"]["ml-100k"][lower] == "5 of 5"
    assert all(float(lines["hand"][one][p]) > 0.9 for one in ("frappe", "adult"))
