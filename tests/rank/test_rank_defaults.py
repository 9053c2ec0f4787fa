"""Sizes and settings that follow from the table, and sentences on a fit that has learned nothing."""

import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("accelerate")
from rank_made import Linear, Requests

from tigon import rank
from tigon.rank.training.defaults import choose_prompt_settings, choose_settings, choose_share
from tigon.rank.training.diagnostics import auc_error, count_classes, find_problems

SIZES = [96, 1_720, 9_000, 100_000, 10**6, 10**8]


def table(rows, codes=0):
    fields = {"id": SimpleNamespace(rows=codes), "number": SimpleNamespace()}
    return SimpleNamespace(rows=rows, schema=SimpleNamespace(fields=fields))


def test_weights_grow_with_the_rows():
    found = [rank.choose_sizes("ligr", table(rows)) for rows in SIZES]
    assert [(one["width"], one["layers"]) for one in found] == [(64, 2)] * 3 + [(128, 3), (256, 4), (256, 6)]
    found = [rank.choose_sizes("lirank", table(rows)) for rows in SIZES]
    assert [one["mlp"] for one in found] == [(32,), (64, 64), (64, 64), (128, 128), (256, 256), (256, 256)]
    assert [one["width"] for one in found] == [8, 8, 8, 16, 16, 16]
    # A table of embeddings has ten numbers a row at most, as long as it is wider than 4.
    assert rank.choose_sizes("lirank", table(9_000, 9_000))["width"] == 8
    assert rank.choose_sizes("lirank", table(10**6, 10**6))["width"] == 8
    assert rank.choose_sizes("lirank", table(10**6, 10**5))["width"] == 16
    with pytest.raises(ValueError, match=r"^rank\.choose_sizes: model must be 'ligr' or 'lirank', got 'mlp'\.$"):
        rank.choose_sizes("mlp", table(9))


def test_what_is_given_wins():
    assert rank.choose_sizes("ligr", table(96), {"width": 20}) == {"layers": 2, "heads": 2}
    assert rank.choose_sizes("ligr", table(96), {"width": 22, "layers": 1}) == {"heads": 1}
    assert rank.choose_sizes("lirank", table(96), {"mlp": (), "rank": 4}) == {"width": 8, "layers": 1}
    assert choose_settings(100, 800, None, batch_size=10).batch_size == 10
    assert choose_settings(100, 800, None, epochs=3).epochs == 3
    train = Requests.drawn(120)
    options = rank.FitOptions(lr=0.5, patience=2).resolve(Linear(), train)
    assert (options.lr, options.patience, options.batch_size) == (0.5, 2, 32)
    assert rank.FitOptions(schedule="plateau").resolve(Linear(), train).patience == 3


@pytest.mark.parametrize("shown", [1, 8, 500])
@pytest.mark.parametrize("rows", SIZES)
def test_a_fit_has_hundreds_of_steps_and_a_short_warm_up(rows, shown):
    requests = max(rows // shown, 1)
    found = choose_settings(requests, rows, None)
    steps = math.ceil(requests / found.batch_size)
    assert found.epochs * steps >= 600
    assert found.epochs >= 10
    assert found.batch_size & (found.batch_size - 1) == 0
    assert found.batch_size == 1 or 16 <= found.batch_size * shown <= 2048
    evaluations = found.epochs * steps // found.eval_every if found.eval_every else found.epochs
    assert evaluations <= 41
    assert evaluations // 3 <= found.patience <= evaluations
    assert rank.FitOptions().warmup <= 0.1
    assert 0.1 <= choose_share(rows) <= 0.25


def test_the_rate_falls_with_the_width():
    rates = [choose_settings(100, 800, width).lr for width in (None, 32, 64, 128, 256)]
    assert rates == pytest.approx([3e-3, 3e-3, 3e-3, 1.5e-3, 7.5e-4])


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("rows", SIZES)
def test_prompts_have_steps_enough(rows, trained):
    requests = rows // 8
    found = choose_prompt_settings(requests, rows, 384, trained)
    steps = found["epochs"] * math.ceil(requests * (1 - found["eval_fraction"]) / found["batch_size"])
    assert steps >= (60 if trained else 500)
    assert 1 <= found["epochs"] <= (20 if trained else 200)
    assert ("lr" in found) is not trained
    assert found["save_every"] <= max(steps / 9, 1)
    assert 0.02 <= found["eval_fraction"] <= 0.25


def doubts(history, **changed):
    given = {"steps": 600, "warmup": 30.0, "ended": False, "probabilities": True, "classes": {"click": (50, 150)}}
    given |= changed
    best = max(history, key=lambda row: row["auc"], default=None)
    return find_problems(best, history, "auc", given.pop("classes"), **given)


def rows_of(*aucs, log_loss=0.5):
    return [{"auc": auc, "click:auc": auc, "click:log_loss": log_loss} for auc in aucs]


def test_sentences():
    assert doubts(rows_of(0.6, 0.7, 0.7, 0.69)) == doubts([]) == []
    assert auc_error(50, 150) == pytest.approx(0.0473, abs=1e-4)
    (chance,) = doubts(rows_of(0.5, 0.59))
    assert "after 600 steps the validation AUC is no better than chance: 0.590 for click" in chance
    assert "(chance: 0.5 ± 0.095)" in chance
    assert doubts(rows_of(0.6)) == []
    # One label of two is enough, and one whose AUC is not defined says nothing.
    other = [{**row, "buy:auc": 0.9, "buy:log_loss": 0.1} for row in rows_of(0.5)]
    assert doubts(other, classes={"click": (50, 150), "buy": (100, 100)}) == []
    assert doubts(rows_of(math.nan), classes={"click": (0, 150)}) == []

    (warm,) = doubts(rows_of(0.7), steps=30)
    assert "the fit has 30 steps, all within the learning-rate warm-up of 30" in warm
    (worse,) = doubts(rows_of(0.7, log_loss=0.6))  # of the share 0.562
    assert "validation log loss 0.600, base rate 0.562" in worse
    assert doubts(rows_of(0.7, log_loss=0.6), probabilities=False) == []
    (late,) = doubts(rows_of(0.6, 0.65, 0.7, 0.8), ended=True)
    assert "auc was still improving, by 0.100 in the last quarter, when the fit ended. Raise epochs=…" in late
    assert doubts(rows_of(0.6, 0.65, 0.7, 0.8)) == doubts(rows_of(0.6, 0.79, 0.79, 0.8), ended=True) == []


def test_a_fit_that_ends_at_chance_warns(recwarn):
    train, val = Requests.drawn(60, seed=1), Requests.drawn(60, seed=2)
    draw = torch.Generator().manual_seed(0)
    noise = [
        one.with_labels(click=torch.randint(2, (len(one.x),), generator=draw).float()) for one in (train, val)
    ]  # fmt: skip
    assert sum(sum(two) for two in count_classes(noise[1]).values()) == len(val.x)
    with pytest.warns(UserWarning, match=r"^rank\.fit: after \d+ steps the validation AUC is no better than"):
        fitted = rank.fit(Linear(), *noise, rank.FitOptions(epochs=5))
    assert len(fitted.warnings) >= 1
    recwarn.clear()
    fitted = rank.fit(Linear(dropout=0.0), train, val, rank.FitOptions(lr=0.05, epochs=40, batch_size=16))
    assert fitted.warnings == []
    assert not recwarn.list
