"""benchmarks/studies/fp8_error.py: what an error is, and a toy run of every side."""

import contextlib

import pytest
import torch

pytest.importorskip("transformers")
from harness import report
from studies import fp8_error
from studies.rows import Row


def test_errors_are_relative_and_by_layer():
    exact = {"embed": torch.ones(8), "model.layers.0.w": torch.full((2, 4), 2.0), "model.layers.11.w": torch.ones(4)}
    gradients = {name: g.clone() for name, g in exact.items()}
    assert fp8_error.measure_errors(gradients, exact) == {"all": 0.0, "layer 0": 0.0, "layer 11": 0.0}
    gradients["model.layers.0.w"] *= 1.25
    errors = fp8_error.measure_errors(gradients, exact)
    assert errors == pytest.approx({"all": 0.25 * (32 / 44) ** 0.5, "layer 0": 0.25, "layer 11": 0.0})
    assert fp8_error.measure_errors({n: 0 * g for n, g in exact.items()}, exact)["all"] == 1.0


def test_bars_compare_sides_of_one_seed():
    def row(seed, side, error):
        return Row("gradients", "", seed, side, {}, {"all": error})

    sides = ("tigon-fp8 first=0", "tigon-fp8 first=1", "torchao-rowwise first=0")
    rows = [row(seed, *pair) for seed in (0, 1) for pair in zip(sides, (0.305 + 0.01 * seed, 0.15, 0.3), strict=True)]
    lines = fp8_error.describe_bars(rows)
    assert [("within" in line, "ABOVE" in line) for line in lines] == [(1, 0), (0, 1), (1, 0), (1, 0)]
    assert fp8_error.describe_bars(rows[:2]) == []


def test_every_side_is_measured(tmp_path, capsys):
    fp8_error.main(["--toy", "--device", "cpu", "--output", str(tmp_path)])
    (path,) = tmp_path.glob("*-fp8-error.json")
    errors = {row["method"]: row["measures"]["all"] for row in report.load(path)["rows"]}
    there = [side for side in fp8_error.SIDES if not fp8_error.why_missing(side)]
    assert list(errors) == there
    assert 0.001 < errors["tigon"] < 0.02
    assert 0.001 < errors["hf"] < 0.02
    assert 5 * errors["hf"] < errors["tigon-fp8 first=0"] < 0.2
    order = [errors[f"tigon-fp8 first={first}"] for first in (2, 1, 0)]
    assert order == sorted(order)
    assert len(set(errors.values())) == len(errors), "two sides are the same"
    capsys.readouterr()


def test_a_side_that_did_not_run_in_fp8_is_no_result(monkeypatch):
    monkeypatch.setattr(fp8_error, "ignore_sizes", contextlib.nullcontext)
    with pytest.raises(RuntimeError, match="first=0 ran 0 calls in FP8"):
        list(fp8_error.measure_sides(0, True, torch.device("cpu")))
