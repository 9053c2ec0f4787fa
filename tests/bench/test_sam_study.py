"""benchmarks/micro_batch_sam.py: its eigenvalues, its splits, how a setting is chosen, what is recorded and shown."""

import functools
import itertools

import pytest
import torch
from harness import report
from studies import sharpness
from studies.sharpness import Run
from torch import nn


@pytest.fixture(scope="module")
def script_of_study(script):
    return script("micro_batch_sam")


@pytest.fixture
def small(script_of_study, monkeypatch):
    """Two learning rates, one rho, a narrow network, few rows; what was cached of the large ones is put aside."""
    monkeypatch.setattr(script_of_study, "Next", functools.partial(script_of_study.Next, width=4))
    monkeypatch.setattr(script_of_study, "ROWS", 64)
    monkeypatch.setattr(script_of_study, "BATCH", 16)
    monkeypatch.setattr(script_of_study, "LEARNING_RATES", (0.05, 0.2))
    monkeypatch.setattr(script_of_study, "RHOS", (0.2,))
    script_of_study.rows.cache_clear()
    yield script_of_study
    script_of_study.rows.cache_clear()


def test_the_eigenvalue_is_that_of_the_whole_hessian(script_of_study):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    x, y = torch.randn(20, 3, dtype=torch.float64), torch.randn(20, 2, dtype=torch.float64)
    params = list(model.parameters())

    def loss(*values):
        named = dict(zip(dict(model.named_parameters()), values or params, strict=True))
        return (torch.func.functional_call(model, named, (x,)) - y).square().mean()

    blocks = torch.autograd.functional.hessian(loss, tuple(p.detach() for p in params))
    sizes = [p.numel() for p in params]
    whole = torch.cat(
        [
            torch.cat([b.reshape(m, n) for b, n in zip(row, sizes, strict=True)], 1)
            for row, m in zip(blocks, sizes, strict=True)
        ]
    )
    expected = torch.linalg.eigvalsh(whole)
    value, residual = script_of_study.lambda_max(loss, params, tolerance=1e-7)
    assert value == pytest.approx(expected[-1].item(), rel=1e-9)
    assert residual < 1e-7
    value, residual = script_of_study.lambda_max(loss, params, steps=3)
    assert 0 < abs(value / expected[-1].item() - 1) <= residual


def test_the_splits_have_no_character_in_common(script_of_study):
    ids, _ = script_of_study.text()
    windows = {part: script_of_study.rows(part) for part in ("train", "validation", "test")}
    for at, (low, high) in {"train": (0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1)}.items():
        x, y = windows[at]
        text = bytes(ids[int(low * len(ids)) : int(high * len(ids))].tolist())
        assert x.shape == (script_of_study.ROWS, script_of_study.CONTEXT)
        assert all(bytes([*row, last]) in text for row, last in zip(x[:300].tolist(), y[:300].tolist(), strict=True))


def test_what_is_chosen_is_said_by_validation(script_of_study):
    scores = {("SGD", 0.1, 0.0): (0.3, 0.4), ("SGD", 0.2, 0.0): (0.4, 0.1), ("SAM", 0.2, 0.1): (0.5, 0.6)}
    rows = [
        Run(method, int(method == "SAM"), rho, lr, 5, seed, 10, 1.0, validation, test - seed / 100, 9.0 - 4 * rho)
        for (method, lr, rho), (validation, test) in scores.items()
        for seed in (0, 1)
    ]
    rows.append(Run("SGD", 0, 0.0, 0.3, 5, 0, status="failed", reason="RuntimeError: out of memory"))
    rows = [row.to_dict() for row in rows]
    assert sharpness.chosen(rows) == {"SGD": (0.2, 0.0), "SAM": (0.2, 0.1)}
    table = sharpness.table(rows)
    assert "| SGD | 0.2 | – | 2 | 10 | 1.00 ± 0.00 | 40.0 ± 0.0 | 9.5 ± 0.7 | 9.00 ± 0.00 |" in table
    assert "| SGD | 0.1 |" not in table
    assert "| SGD | 0.1 |" in sharpness.table(rows, every=True)
    assert "SAM against SGD: λ max lower in 2 of 2 seeds, test accuracy higher in 2." in sharpness.verdict(rows)
    more = [Run("mSAM, 4 shards", 4, rho, 0.2, 5, 0, 10, 1.0, 0.9 - rho, 0.5, 8.0).to_dict() for rho in (0.1, 0.05)]
    assert sharpness.verdict(rows + more).endswith(
        "mSAM, 4 shards against SAM: λ max lower in 1 of 1 seeds, test accuracy higher in 0. "
        "At the same rho: λ max lower in 1 of 1 pairs of runs, test accuracy higher in 0."
    )


def test_a_study_is_recorded_shown_and_gone_on_with(small, tmp_path, monkeypatch, capsys):
    arguments = ["--output", str(tmp_path), "--device", "cpu", "--steps", "4", "--seeds", "1"]
    trained = []
    train = small.train
    monkeypatch.setattr(small, "train", lambda run, device: trained.append(run) or train(run, device))
    assert small.main(arguments) == 0
    assert len(trained) == 2 * 2 + 3
    said = capsys.readouterr().out
    assert said.count("mSAM, 8 shards against SAM: ") == 1
    (path,) = tmp_path.glob("*-sam.json")
    content = report.load(path)
    runs = [Run(**row) for row in content["rows"]]
    lr = sharpness.chosen(content["rows"])["SGD"][0]
    assert {run.lr for run in runs if run.m} == {lr}
    assert {(run.m, run.rows) for run in runs if run.steps == 4} == {(0, 64), (1, 128), (4, 128), (8, 128)}
    assert {run.rows for run in runs if run.steps == 8} == {128}
    found = {(run.m, run.rho): run.lambda_max for run in runs if run.steps == 4 and run.lr == lr}
    assert len(set(found.values())) == len(found) == 4, "each setting trains another network"
    assert all(run.residual < 0.5 and run.lambda_max > 0 for run in runs)

    monkeypatch.setattr(small, "train", lambda run, device: pytest.fail("it was there"))
    assert small.main(arguments) == 0
    page = sharpness.page(tmp_path, "../charts")
    assert f"![flatness and accuracy](../charts/{path.stem}.png)" in page
    assert page.count("| SAM |") == 2
    sharpness.plot(content, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert "No step has been timed yet." in sharpness.cost_page(tmp_path)


def test_steps_are_timed_and_checked(script_of_study, tmp_path, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    arguments = ["--output", str(tmp_path), "--device", "cpu", "--cost", "--tiny", "--timed", "1"]
    monkeypatch.setattr(script_of_study, "cases", lambda *_: [sharpness.Cost("resnet-18", "", 1, 0, 4, 2)])
    assert script_of_study.main(arguments) == 0
    content = report.load(next(tmp_path.glob("*-sam-cost.json")))
    (row,) = content["rows"]
    assert row["restored"]
    assert row["error"] < 1e-5
    assert row["moved"] > 1e-3
    assert row["ratio"] == pytest.approx(row["sam_ms"] / row["base_ms"])
    assert "| resnet-18 | 1 | 4 | 2 |" in sharpness.cost_page(tmp_path)
    assert "times the plain step" in capsys.readouterr().out

    # A gradient that is not the one at the moved weights is found out.
    accumulate = script_of_study.MicroBatchSAM.accumulate

    def off(self, closure, **options):
        self.param_groups[0]["sam_rho"] = 0.02
        return accumulate(self, closure, **options)

    monkeypatch.setattr(script_of_study.MicroBatchSAM, "accumulate", off)
    assert script_of_study.main(arguments) == 1
    assert "WRONG: restored True" in capsys.readouterr().out


def test_several_gpus_time_both_forms(script_of_study):
    forms = [(row.parallel, row.gpus) for row in script_of_study.cases(4, tiny=True)]
    assert forms == [("DDP", 4), ("HSDP 2×2", 4)]
    assert [row.parallel for row in script_of_study.cases(3, tiny=True)] == ["DDP"]
    alone = {(row.model, row.shards) for row in script_of_study.cases(1, tiny=False)}
    assert alone == set(itertools.product(script_of_study.MODELS, (1, 4)))
