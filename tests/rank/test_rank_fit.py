"""The loop that trains a ranker: it learns by each loss, stops early, and goes on to the same bits."""

import copy
import math

import pytest
import torch

pytest.importorskip("accelerate")
from rank_made import Linear, Requests

from tigon import rank
from tigon.rank.evaluation.evaluate import check_monitor
from tigon.rank.training import fit as fitting
from tigon.rank.training.fit import LOSSES
from tigon.rank.training.optimizers import lr_multiplier, parameter_groups

TRAIN, VAL = Requests.drawn(seed=1), Requests.drawn(60, seed=2)
QUICK = {"lr": 0.05, "epochs": 4, "batch_size": 16}


@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_learns_the_order(loss):
    ranker = Linear(dropout=0.0)
    before = rank.evaluate(rank.score(ranker, VAL), at=(5,)).value("ndcg@5")
    fitted = rank.fit(ranker, TRAIN, options=rank.FitOptions(loss=loss, **QUICK))
    assert fitted.steps == fitted.best == 4 * math.ceil(len(TRAIN) / 16)
    assert fitted.history == []
    assert not ranker.training
    found = rank.evaluate(rank.score(ranker, VAL), at=(5,))
    assert found.value("ndcg@5") > max(before, 0.9)
    assert found.value("gauc") > 0.85


def test_the_loss_of_a_step_is_the_weighted_sum_over_the_labels():
    train = Requests.drawn(20, names=("click", "buy"))
    options = rank.FitOptions(label_weights={"buy": 0.25}, lr=1e-9, epochs=1, batch_size=20)
    ranker = Linear(("click", "buy"), dropout=0.0)
    logits = {name: x.detach() for name, x in ranker(train.batch(torch.arange(20))).items()}
    of = {name: rank.losses.bce(logits[name], train.labels[name]) for name in logits}
    seen = []
    rank.fit(ranker, train, options=options, after=lambda progress: seen.extend(progress.rows()))
    (row,) = seen
    assert row["loss"] == pytest.approx(float(of["click"] + 0.25 * of["buy"]), rel=1e-6)
    assert row["grad_norm"] > 0
    with pytest.raises(ValueError, match=r"label_weights must be for the labels click, buy, got 'sale'\.$"):
        rank.fit(ranker, train, options=rank.FitOptions(label_weights={"sale": 1.0}))


@pytest.mark.parametrize("size", [{"batch_size": 16}, {"batch_size": 1, "batch_tokens": 30}])
@pytest.mark.parametrize("every", [0, 5])
def test_a_run_that_goes_on_from_any_step_ends_at_the_same_bits(size, every):
    options = rank.FitOptions(lr=0.05, epochs=3, eval_every=every, patience=4, **size)
    states = []

    def keep(progress):
        states.append((progress.step, progress.evaluation is None, copy.deepcopy(progress.state())))

    whole = Linear()
    fitted = rank.fit(whole, TRAIN, VAL, options, after=keep)
    assert len(fitted.history) >= 3
    for step, before, state in states[:: max(len(states) // 7, 1)] + states[-2:]:
        again = Linear(seed=5)
        found = rank.fit(again, TRAIN, VAL, options, state=copy.deepcopy(state))
        assert found.history == fitted.history, (step, before)
        assert (found.best, found.steps) == (fitted.best, fitted.steps)
        for name, value in whole.state_dict().items():
            assert torch.equal(value, again.state_dict()[name]), (step, before, name)


def test_a_run_that_goes_on_from_before_its_last_evaluation_does_no_step_more():
    options = rank.FitOptions(lr=3.0, clip=0.0, epochs=9, batch_size=16, eval_every=3, metric="log_loss", patience=2)
    states = {}

    def keep(progress):
        if progress.evaluation is None:
            states[progress.step] = copy.deepcopy(progress.state())

    fitted = rank.fit(Linear(dropout=0.0), TRAIN, VAL, options, after=keep)
    assert fitted.steps < 9 * 8
    found = rank.fit(Linear(dropout=0.0), TRAIN, VAL, options, state=states[fitted.steps])
    assert (found.steps, found.best, found.history) == (fitted.steps, fitted.best, fitted.history)


def test_the_ranker_stays_on_its_device(monkeypatch):
    """Accelerate keeps the device of a process's first Accelerator. "meta" stands for the GPU of an earlier run."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    Accelerator()
    for state in (AcceleratorState, PartialState):
        monkeypatch.setitem(state._shared_state, "device", torch.device("meta"))
    ranker = Linear()
    assert rank.fit(ranker, TRAIN, VAL, rank.FitOptions(epochs=1, batch_size=len(TRAIN))).steps == 1
    assert ranker.head.weight.device.type == "cpu"
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(ValueError, match=r"^rank\.fit: trains on one device, got 2 processes\.$"):
        rank.fit(ranker, TRAIN)


def test_the_precision_is_that_of_the_options(monkeypatch):
    """Accelerate keeps the precision of a process's first Accelerator, such as a Trainer's in bf16."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def losses():
        seen = []
        options = rank.FitOptions(epochs=1, batch_size=20)
        rank.fit(Linear(dropout=0.0), TRAIN, options=options, after=lambda progress: seen.extend(progress.rows()))
        return [row["loss"] for row in seen]

    Accelerator()
    found = losses()
    monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "bf16")
    assert losses() == found


def test_early_stopping_keeps_the_best_weights():
    kept = {}

    def keep(progress):
        if progress.evaluation:
            kept[progress.step] = copy.deepcopy(ranker.state_dict())

    ranker = Linear(dropout=0.0)
    options = rank.FitOptions(lr=3.0, clip=0.0, epochs=50, batch_size=16, metric="log_loss", patience=2)
    fitted = rank.fit(ranker, TRAIN, VAL, options, after=keep)
    values = [row["log_loss"] for row in fitted.history]
    assert values.index(min(values)) == len(values) - 3  # then two were none better
    assert fitted.best == fitted.history[-3]["step"] < fitted.steps < 50 * 8
    assert all(torch.equal(value, kept[fitted.best][name]) for name, value in ranker.state_dict().items())
    assert rank.evaluate(rank.score(ranker, VAL, options.batch_options)).value("log_loss") == min(values)


def test_the_run_ends_where_it_is_told_and_when_the_time_is_up():
    fitted = rank.fit(Linear(), TRAIN, VAL, rank.FitOptions(**QUICK), after=lambda progress: progress.step == 3)
    assert fitted.stopped
    assert fitted.steps == 3
    fitted = rank.fit(Linear(), TRAIN, VAL, rank.FitOptions(max_minutes=1e-9, **QUICK))
    assert not fitted.stopped
    assert fitted.steps == 1
    assert [row["step"] for row in fitted.history] == [1]


def test_the_rate_rises_and_falls():
    rates = []
    options = rank.FitOptions(warmup=0.25, **QUICK)
    rank.fit(Linear(), TRAIN, options=options, after=lambda progress: rates.extend(r["lr"] for r in progress.rows()))
    top = rates.index(max(rates))
    assert top == len(rates) // 4
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert max(rates) <= 0.05
    assert 0 < rates[-1] < 0.001
    assert lr_multiplier("cosine", 0.0, 0.0, 0) == lr_multiplier("cosine", 0.1, 0.1, 0) == 1.0
    assert lr_multiplier("cosine", 1.0, 0.1, 0) == lr_multiplier("linear", 1.0, 0.1, 0) == 0.0
    assert lr_multiplier("linear", 0.55, 0.1, 0) == pytest.approx(0.5)
    assert lr_multiplier("constant", 0.05, 0.1, 0) == 0.5
    assert lr_multiplier("constant", 1.0, 0.1, 0) == 1.0


def test_on_a_plateau_the_rate_falls_to_a_tenth_behind_each_evaluation_that_is_none_the_best(monkeypatch):
    values = iter([0.5, 0.6, 0.6, 0.7, 0.65, 0.6, 0.6])
    monkeypatch.setattr(fitting, "monitored_value", lambda found, metric: next(values))
    options = rank.FitOptions(**{**QUICK, "epochs": 9}, schedule="plateau", warmup=0.0)
    rates, states = [], []

    def after(progress):
        rows = progress.rows()
        if rows:
            rates.append((int(rows[-1]["epoch"] - 1e-9), rows[-1]["lr"] / options.lr))
        if progress.evaluation is not None and len(states) < 5:
            states.append(copy.deepcopy(progress.state()))
        return False

    fitted = rank.fit(Linear(), TRAIN, VAL, options, after=after)
    by_epoch = dict(rates)
    assert [by_epoch[n] for n in range(7)] == pytest.approx([1, 1, 1, 0.1, 0.1, 0.01, 0.001])
    assert len(fitted.history) == 7, "patience counts those behind the best alone"
    # A run that goes on has the same rate.
    rates.clear()
    values = iter([0.6, 0.6])
    rank.fit(Linear(), TRAIN, VAL, options, state=states[4], after=after)
    assert rates[0][1] == pytest.approx(0.01)
    with pytest.raises(ValueError, match="schedule must be cosine, linear or constant without val"):
        rank.fit(Linear(), TRAIN, None, options)


def test_only_weights_of_linear_layers_decay():
    module = torch.nn.Sequential(torch.nn.Embedding(3, 4), torch.nn.Linear(4, 2), torch.nn.LayerNorm(2))
    decayed, others = parameter_groups(module, 0.1)
    assert [p is module[1].weight for p in decayed["params"]] == [True]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert len(others["params"]) == 4
    module[1].requires_grad_(False)
    assert [len(group["params"]) for group in parameter_groups(module, 0.1)] == [3]


def test_a_loss_that_is_not_finite_ends_the_run():
    bad = Requests.drawn(20)
    bad.x[3] = torch.inf
    with pytest.raises(FloatingPointError, match=r"^rank\.fit: the loss became nan at step 1; a lower lr may help\.$"):
        rank.fit(Linear(), bad, VAL, rank.FitOptions(epochs=1))
    with pytest.raises(FloatingPointError, match=r"the loss became nan at step 1"):  # that no evaluation reads
        rank.fit(Linear(), bad, None, rank.FitOptions(epochs=1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "hinge"}, "loss must be one of bce, softmax, pairwise, approx_ndcg, lambda, got 'hinge'"),
        ({"objective": "clicks"}, "objective must be one of impressions, next-item, got 'clicks'"),
        ({"precision": "fp8"}, "precision must be one of auto, bf16, fp32, got 'fp8'"),
        ({"lr": 0.0}, "lr must be above 0, got 0"),
        ({"clip": -1.0}, "clip must be at least 0, got -1"),
        ({"schedule": "cosin"}, "schedule must be one of cosine, linear, constant, plateau, got 'cosin'"),
        ({"warmup": 1.0}, "warmup must be a fraction of the run"),
        ({"epochs": 0}, "epochs must be an integer of at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be an integer of at least 1, got 2.5"),
        ({"metric": "map@3"}, "metric must be one of auc, gauc, log_loss, ece, mrr, ndcg@K and hr@K, .* got 'map@3'"),
        ({"metric": "auc", "objective": "next-item"}, "metric must be one of mrr, ndcg@K and hr@K, or LABEL"),
        ({"label_weights": {"click": -1.0}}, "label_weights must be at least 0, got -1.0 for 'click'"),
    ],
)
def test_options_out_of_range_get_a_sentence(options, words):
    with pytest.raises(ValueError, match=rf"^rank\.fit: {words}"):
        rank.FitOptions(**options)


def test_what_cannot_be_fitted_gets_a_sentence():
    one_class = VAL.with_labels(click=torch.zeros_like(VAL.labels["click"]))
    with pytest.raises(
        ValueError, match=r"metric auc is not defined on val: click: all rows are 0, so AUC and ranking"
    ):
        rank.fit(Linear(), TRAIN, one_class, rank.FitOptions(epochs=1))
    alone = rank.Impressions.read({"age": [1.0, 2.0, 3.0], "click": [0, 1, 0]})
    with pytest.raises(ValueError, match=r"one of auc.*got 'ndcg@5'; each request has a single row"):
        check_monitor(alone, "ndcg@5")
    with pytest.raises(ValueError, match=r"loss must be bce if each request has a single row.*got 'pairwise'"):
        rank.fit(rank.LiRank(alone.schema), alone, options=rank.FitOptions(loss="pairwise"))
    with pytest.raises(ValueError, match=r"metric must be for one of the labels click, got 'buy:auc'\.$"):
        rank.fit(Linear(), TRAIN, VAL, rank.FitOptions(metric="buy:auc"))
    with pytest.raises(ValueError, match=r"train must have labels"):
        rank.fit(Linear(), TRAIN.with_labels())
    with pytest.raises(ValueError, match=r"train has no requests"):
        rank.fit(Linear(), Requests.drawn(0))
    with pytest.raises(ValueError, match=r"objective must be impressions for Linear, which has no next-item loss"):
        rank.fit(Linear(), TRAIN, options=rank.FitOptions(objective="next-item"))
