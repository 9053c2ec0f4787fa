"""Interactions from weights: strengths against their formulas, networks that read known features, and bad input."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("pyarrow")

from tigon import rank
from tigon.rank.interactions.networks import Inputs, Networks, Training


def weights_of(*sizes, seed=0):
    draw = np.random.default_rng(seed)
    return [draw.normal(size=(b, a)) for a, b in itertools.pairwise(sizes)]


def strengths(found):
    return {one.features: one.strength for one in found}


def test_strengths_by_hand():
    weights = [np.array([[3.0, -1.0, 0.5]]), np.array([[-2.0]])]  # one unit, which reaches the output by 2
    found = rank.find_interactions(weights, ["a", "b", "c"])
    assert strengths(found) == {("a", "b"): 2 * (1 - 0.5) ** 2, ("a", "b", "c"): 2 * 0.5**2}
    assert [one.units for one in found] == [1, 1]
    assert sum(one.share for one in found) == pytest.approx(1)
    assert strengths(rank.find_interactions(weights, method="nid")) == {("x1", "x2"): 2.0, ("x1", "x2", "x3"): 1.0}
    pairs = strengths(rank.find_interactions(weights, order=2, power=3))
    assert pairs == pytest.approx({("x1", "x2"): 2 * (0.125 + 0.125), ("x1", "x3"): 0.25, ("x2", "x3"): 0.25})


@pytest.mark.parametrize("order", [2, 3, 5])
def test_persistence_of_power_one_is_nid(order):
    weights = weights_of(6, 9, 4, 1)
    weights[0][:, 2] = weights[0][:, 3]  # ties
    weights[0][4] = 0.0
    ours = strengths(rank.find_interactions(weights, order=order, power=1))
    nid = strengths(rank.find_interactions(weights, order=order, method="nid"))
    first, reach = np.abs(weights[0]), (np.abs(weights[2]) @ np.abs(weights[1]))[0]
    by_hand = {
        tuple(f"x{feature + 1}" for feature in one): float(reach @ first[:, one].min(1))
        for one in itertools.combinations(range(6), order)
    }
    assert ours == pytest.approx(by_hand, abs=1e-12)
    assert nid == pytest.approx(by_hand, abs=1e-12)


def test_pairs_have_the_strength_of_the_sets_that_hold_them():
    weights = weights_of(7, 20, 3, 1)
    sets = strengths(rank.find_interactions(weights))
    for pair, strength in strengths(rank.find_interactions(weights, order=2)).items():
        assert strength == pytest.approx(sum(own for one, own in sets.items() if set(pair) <= set(one)))
    found = rank.find_interactions(weights)
    assert [one.strength for one in found] == sorted(sets.values(), reverse=True)
    assert all(one.features == tuple(sorted(one.features)) for one in found)


def test_modules_are_read_as_their_weights():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm1d(5), nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4), nn.Tanh(),
        nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2),
    )  # fmt: skip
    with torch.no_grad():
        for part in model:
            if isinstance(part, nn.BatchNorm1d):
                part.running_var.uniform_(0.5, 2)
                if part.affine:
                    part.weight.uniform_(-2, 2)
    factors = [
        (1 if part.weight is None else part.weight.detach().double().numpy())
        / np.sqrt(part.running_var.double().numpy() + part.eps)
        for part in model if isinstance(part, nn.BatchNorm1d)
    ]  # fmt: skip
    first, second, last = (part.weight.detach().double().numpy() for part in model if isinstance(part, nn.Linear))
    plain = [first * factors[0] * factors[1][:, None], second, last * factors[2]]
    assert strengths(rank.find_interactions(model)) == pytest.approx(strengths(rank.find_interactions(plain)))
    tensors = [torch.tensor(weight, requires_grad=True) for weight in plain]
    assert strengths(rank.find_interactions(tensors)) == strengths(rank.find_interactions(plain))


def test_columns_of_one_name_are_one_feature_and_spreads_scale_them():
    first = np.array([[3.0, 4.0, 1.0], [0.0, 0.0, 2.0]])
    last = np.ones((1, 2))
    joint = strengths(rank.find_interactions([first, last], ["a", "a", "b"], order=2, method="nid"))
    assert joint == {("a", "b"): 1.0}  # min(5, 1) + min(0, 2)
    scaled = rank.find_interactions([first, last], ["a", "a", "b"], order=2, method="nid", spread=[2.0, 1.0, 10.0])
    assert strengths(scaled) == pytest.approx({("a", "b"): np.hypot(6, 4)})


def test_pruned_slices_and_text():
    weights = [np.array([[5.0, 4.0, 3.9], [0.0, 1.0, 0.9]]), np.ones((1, 2))]
    found = rank.find_interactions(weights, ["a", "b", "c"])
    assert [one.features for one in found] == [("a", "b", "c"), ("b", "c"), ("a", "b")]
    assert [one.features for one in found.maximal()] == [("a", "b", "c")]
    assert isinstance(found[:2], rank.Interactions)
    assert len(found[:2]) == 2
    assert found[1] == list(found)[1]
    assert "b × c" in repr(found)


def test_explain_returns_a_table_and_draws(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib import image

    for order in (None, 2):
        found = rank.find_interactions(weights_of(5, 12, 1), list("abcde"), order=order)
        table = found.explain(tmp_path / "found.png", top=4).to_pylist()
        assert [row["features"] for row in table] == [list(one.features) for one in found[:4]]
        assert [row["order"] for row in table] == [len(one.features) for one in found[:4]]
        assert [row["strength"] for row in table] == [one.strength for one in found[:4]]
        picture = image.imread(tmp_path / "found.png")[..., :3]
        assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 20


def test_crosses_are_fields_of_the_strongest_sets():
    found = rank.find_interactions(weights_of(4, 6, 1), ["a", "b", "c", "d"], order=2)
    crosses = found.crosses(3, hash_rows=50)
    assert [cross.of for cross in crosses.values()] == [one.features for one in found[:3]]
    assert [*crosses] == [" × ".join(one.features) for one in found[:3]]
    assert {cross.rows for cross in crosses.values()} == {51}


GOOD = weights_of(3, 4, 1)
NAN = [np.where(np.arange(12).reshape(4, 3) == 5, np.nan, GOOD[0]), GOOD[1]]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: rank.find_interactions(nn.Linear(3, 1)), "a linear model has none"),
        (lambda: rank.find_interactions(GOOD[:1]), "a linear model has none"),
        (lambda: rank.find_interactions(nn.ReLU()), "model must be an MLP, a chain of nn.Linear, but ReLU has none"),
        (lambda: rank.find_interactions(nn.LSTM(3, 4)), "but it is of the class LSTM"),
        (lambda: rank.find_interactions(nn.Sequential(nn.Embedding(4, 3))), "but 0 is of the class Embedding; rank.fit_mlp"),
        (lambda: rank.find_interactions(7), "model must be an MLP, what rank.fit_mlp returned, or a list .* got int"),
        (lambda: rank.find_interactions([]), "got an empty list"),
        (lambda: rank.find_interactions([GOOD[0], np.zeros(4)]), r"layer 2 must be \(outputs, inputs\).*got shape \(4,\)"),
        (lambda: rank.find_interactions([["a"], GOOD[1]]), "layer 1 must be an array of numbers, got list"),
        (
            lambda: rank.find_interactions([GOOD[0], np.zeros((1, 5))]),
            r"layer 2 reads 5 numbers of the 4 before it; the shapes are \(4, 3\), \(1, 5\)",
        ),
        (lambda: rank.find_interactions(NAN), "1 of the 12 of layer 1 are not; did the training diverge"),
        (lambda: rank.find_interactions(GOOD, ["a", "b"]), "names must name each of the 3 inputs of the model, got 2"),
        (lambda: rank.find_interactions(GOOD, "abc"), "names must be a list of strings, got 'abc'"),
        (lambda: rank.find_interactions(GOOD, ["a"] * 3), "there must be two features or more, got 'a'"),
        (lambda: rank.find_interactions(GOOD, spread=[1, 0, 1]), "'x2' has a variance of 0, and a weight says nothing"),
        (lambda: rank.find_interactions(GOOD, spread=[1, -1, 1]), "spread of 'x2' must be a finite number above 0"),
        (lambda: rank.find_interactions(GOOD, spread=[1, 2]), r"a number for each of the 3 inputs, got shape \(2,\)"),
        (lambda: rank.find_interactions(GOOD, order=4), "order must be None or an integer from 2 to 3.*got 4"),
        (lambda: rank.find_interactions(GOOD, order=1), "order must be None or an integer from 2 to 3.*got 1"),
        (lambda: rank.find_interactions(GOOD, method="ndi"), "method must be 'persistence' or 'nid', got 'ndi'"),
        (lambda: rank.find_interactions(GOOD, power=0), "power must be a number above 0, got 0"),
        (lambda: rank.find_interactions(weights_of(300, 2, 1), order=4), "300 features have .* sets of 4, more than"),
        (lambda: rank.find_interactions(GOOD).explain(top=0), r"Interactions\.explain: top must be an integer of 1"),
        (lambda: rank.find_interactions(GOOD).crosses(0), r"Interactions\.crosses: top must be an integer of 1"),
    ],
)  # fmt: skip
def test_bad_input_gets_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        call()
    assert str(error.value).endswith((".", "?"))


# ------------------------------------------------------------------------------------------------------------ networks


def made(count=2, rows=300):
    draw = torch.Generator().manual_seed(1)
    numbers = torch.randn(count, rows, 3, generator=draw)
    codes = torch.randint(4, (rows, 1), generator=draw)
    return Inputs(numbers, codes, numbers[..., 0] * numbers[..., 1] + 0.1 * codes[:, 0])


def trained(networks, data, epochs, **options):
    training = Training(networks, data.take(slice(0, 200)), data.take(slice(200, 300)), batch_size=50, **options)
    for _ in range(epochs):
        training.run_epoch()
    return training


def test_networks_do_not_know_each_other():
    both = Networks(2, 3, (4,), hidden=(8, 4))
    alone = Networks(1, 3, (4,), hidden=(8, 4))
    state = {name: value[len(value) // 2 :].clone() for name, value in both.state_dict().items()}
    alone.load_state_dict(state)
    data = made()
    one = trained(alone, Inputs(data.numbers[1:], data.codes, data.target[1:]), 3)
    two = trained(both, data, 3)
    assert two.best[1] == pytest.approx(float(one.best), rel=1e-4)
    for name, value in one.finish().state_dict().items():
        after = two.finish().state_dict()[name]
        torch.testing.assert_close(value, after[len(after) // 2 :], rtol=1e-3, atol=1e-4)


def test_training_goes_on_to_the_same_bits():
    data = made()
    whole = trained(Networks(2, 3, (4,), hidden=(8, 4)), data, 4)
    half = trained(Networks(2, 3, (4,), hidden=(8, 4)), data, 2)
    rest = trained(Networks(2, 3, (4,), hidden=(8, 4), seed=5), data, 0)
    rest.load(half.state())
    while rest.epoch < 4:
        rest.run_epoch()
    assert torch.equal(rest.best, whole.best)
    mine, other = rest.finish().state_dict(), whole.finish().state_dict()
    assert all(torch.equal(mine[name], other[name]) for name in other)


def test_a_network_keeps_its_best_epoch():
    data = made()
    training = trained(Networks(2, 3, (4,), hidden=(8, 4)), data, 0, lr=0.05)
    history = torch.stack([training.run_epoch() for _ in range(6)])
    assert torch.equal(training.best, history.amin(0))
    found = training.finish().outputs(training.held)
    assert torch.allclose((found - training.held.target).square().mean(1), training.best)


# -------------------------------------------------------------------------------------------------------------- tables


def table(rows=1200, seed=0):
    draw = np.random.default_rng(seed)
    age, hours, income = draw.normal(40, 10, rows), draw.exponential(8, rows), draw.normal(size=rows)
    city = draw.choice(["ams", "bcn", "cgn", "dub"], rows)
    target = (age - 40) / 10 * np.log(hours + 1) + 2 * income + 2 * draw.normal(size=rows)
    return {"age": age, "hours": hours, "income": income, "city": city, "flat": np.ones(rows),
            "note": ["four words of text"] * (rows - 1) + ["and five other words now"],
            "y": target, "high": np.where(target > 0, "yes", "no")}  # fmt: skip


def test_a_table_tells_of_the_columns_that_act_together(monkeypatch):
    monkeypatch.setattr("tigon.rank.interactions.tables.STEPS", 0)  # 400 steps
    data = table()
    fitted = rank.fit_mlp({name: column for name, column in data.items() if name != "high"}, "y", networks=1)
    assert fitted.names == ("age", "hours", "income", "city")
    assert fitted.left_out["flat"] == "it has one value only"
    assert fitted.left_out["note"] == "a Text is nothing that an MLP reads"
    assert fitted.loss[0] < 0.5 * fitted.constant
    assert fitted.notes == ()
    found = rank.find_interactions(fitted, order=2)
    assert found[0].features == ("age", "hours")
    assert found[0].strength > 1.5 * found[1].strength


def test_a_table_of_classes_and_gaps(monkeypatch):
    monkeypatch.setattr("tigon.rank.interactions.tables.STEPS", 0)
    monkeypatch.setattr("tigon.rank.interactions.tables.EPOCHS", 4)
    data = table(400)
    data["age"][::3] = np.nan
    data["rare"] = [f"v{n // 12}" if n < 36 else f"alone{n}" for n in range(400)]
    fitted = rank.fit_mlp(data, "high == yes", ["age", "city", "rare"], networks=2, seed=3)
    assert fitted.names == ("age", "city", "rare")
    assert all(network.first.shape == (140, 3) for network in fitted.networks)
    assert 0.5 < fitted.constant < 0.7  # log 2, of two classes
    again = rank.fit_mlp(data, "high == yes", ["age", "city", "rare"], networks=2, seed=3)
    assert again.loss == fitted.loss
    assert np.array_equal(again.networks[1].first, fitted.networks[1].first)


def test_networks_that_learn_nothing_say_so(monkeypatch):
    monkeypatch.setattr("tigon.rank.interactions.tables.STEPS", 0)
    monkeypatch.setattr("tigon.rank.interactions.tables.EPOCHS", 4)
    draw = np.random.default_rng(0)
    data = {"a": draw.normal(size=200), "b": draw.normal(size=200), "y": draw.normal(size=200)}
    fitted = rank.fit_mlp(data, "y", networks=2)
    assert "foretell the label no better than a constant" in fitted.notes[0]
    assert rank.find_interactions(fitted, order=2).notes == list(fitted.notes)
    with pytest.raises(ValueError, match="names and spread are those of the table"):
        rank.find_interactions(fitted, ["a", "b"])


@pytest.mark.parametrize(
    ("change", "call", "sentence"),
    [
        ({}, {"label": "z"}, "there is no column 'z', the label; there are"),
        ({}, {"label": "higg == yes"}, "there is no column 'higg', the label; did you mean 'high'"),
        ({"y": np.zeros(60)}, {}, "label 'y' must have two values or more, but is 0 in all rows"),
        ({"y": [None] + [1.0] * 59}, {}, r"column 'y' \(label\), row 0: must be a number, got a missing value"),
        ({}, {"features": ["age", "flat"]}, r"column 'flat' \(features\) cannot be read: it has one value only"),
        ({}, {"features": ["age", "hour"]}, r"there is no column 'hour' \(features\); did you mean 'hours'"),
        ({}, {"features": ["age", "y"]}, "features must not name the label, 'y'"),
        ({}, {"features": "age"}, "features must be a list of columns, got 'age'"),
        ({}, {"features": ["age"]}, "there must be two columns that can be read, got 1"),
        ({}, {"networks": 0}, "networks must be an integer of 1 or more, got 0"),
        ({"id": [f"u{n}" for n in range(60)]}, {"features": ["age", "id"]}, "each of its 60 values has fewer than"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_read_gets_a_sentence(change, call, sentence):
    with pytest.raises(ValueError, match=sentence):
        rank.fit_mlp({**table(60), **change}, **{"label": "y", **call})


def test_the_strongest_penalty_counts_that_costs_no_more_than_chance():
    from tigon.rank.interactions.tables import penalty_of

    draw = torch.Generator().manual_seed(0)
    rows = torch.rand(3, 1000, generator=draw, dtype=torch.float64)
    rows[1] = rows[0] + 0.1 * (torch.rand(1000, generator=draw) - 0.499)
    rows[2] = rows[0] + 0.05
    assert penalty_of(rows) == 1
    assert penalty_of(rows.flip(0)) == 2
    assert penalty_of(torch.ones(3, 10)) == 2


def test_few_rows_get_a_sentence():
    with pytest.raises(ValueError, match="data must have 50 rows or more, got 20"):
        rank.fit_mlp(table(20), "y")


# ------------------------------------------------------------------------------------------------------------ the study


def test_the_functions_of_the_study_have_the_interactions_that_it_says():
    from studies.interactions import FEATURES, FUNCTIONS, drawn, true_sets

    for name, (function, _) in FUNCTIONS.items():
        x, value = drawn(name, 400, 0)
        other, _ = drawn(name, 400, 1)
        assert np.isfinite(value).all()

        def of(*moved, function=function, x=x, other=other):
            point = x.copy()
            point[:, moved] = other[:, moved]
            return function(*point.T)

        for pair in itertools.combinations(range(FEATURES), 2):
            # Zero everywhere only if the function is a sum of one without the first and one without the second.
            mixed = np.abs(of(*pair) - of(pair[0]) - of(pair[1]) + of()).max()
            together = any(set(pair) <= set(one) for one in true_sets(name))
            assert (mixed > 1e-9) == together, (name, pair, mixed)


def test_the_measures_of_the_study():
    import interactions as study

    def found(*sets):
        return {
            one: study.SetStrength(float(strength), 1)
            for strength, one in zip(range(len(sets), 0, -1), sets, strict=True)
        }

    true = [(0, 1, 2), (2, 3)]
    pairs = found((0, 1), (2, 3), (0, 3), (0, 2), (1, 2), (1, 3))
    assert study.auc(pairs, true) == pytest.approx((2 * 2 + 2 * 1) / 8)
    order = [(0, 1, 2, 3), (0, 1, 2), (4, 5, 6), (0, 1, 2, 4)]
    assert study.precision(order, [(0, 1, 2), (4, 5, 6)]) == 0.5
    assert study.maximal(order, 3) == [(0, 1, 2, 3), (4, 5, 6), (0, 1, 2, 4)]
    assert study.largest([(0, 1), (0, 1, 2), (3, 4)], 2) == [(0, 1, 2), (3, 4)]


def test_the_study_runs_and_goes_on(tmp_path, monkeypatch):
    import sys

    import interactions as study

    from tigon.bench import report

    monkeypatch.setattr(study, "FUNCTIONS", {name: study.FUNCTIONS[name] for name in ("F5", "F8")})

    def run(epochs, folder):
        options = f"--seeds 1 --rows 120 --epochs {epochs} --device cpu --l1 5e-5 1e-2".split()
        files = ["--output", str(tmp_path / folder), "--state", str(tmp_path / "state.pt")]
        monkeypatch.setattr(sys, "argv", ["interactions.py", *files, *options])
        study.main()
        (file,) = (tmp_path / folder).iterdir()
        return report.load(file)["rows"]

    first, second = run(1, "a"), run(2, "b")
    assert run(2, "c") == second != first
    assert len(second) == 2 * 2 * len(study.READINGS)
    by = study.groups(second)
    for l1 in (5e-5, 1e-2):
        nid, ours = (study.mean(by[l1, name], "auc") for name in ("NID", "persistence, q = 1"))
        assert nid == pytest.approx(ours)
    assert study.mean(by[5e-5, "NID"], "auc") != study.mean(by[1e-2, "NID"], "auc")


def test_the_study_reads_fast(monkeypatch):
    import sys
    from types import SimpleNamespace

    import interactions as study

    class EBM:
        def __init__(self, *, interactions, **_):
            assert interactions == 0  # main effects alone

        def fit(self, x, y):
            return self

        def predict(self, x):
            return np.zeros(len(x))

    def measure(x, y, init_score):
        assert isinstance(init_score, EBM)
        true = study.true_sets("F5")
        return {(b, a): float(any({a, b} <= set(one) for one in true)) for a, b in itertools.combinations(range(10), 2)}

    monkeypatch.setitem(sys.modules, "interpret", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "interpret.glassbox", SimpleNamespace(ExplainableBoostingRegressor=EBM))
    monkeypatch.setitem(sys.modules, "interpret.utils", SimpleNamespace(measure_interactions=measure))
    (row,) = study.fast([("F5", 0)], 500)
    assert (row.measures["auc"], row.measures["top_pairs"]) == (1.0, 1.0)
    assert row.loss == pytest.approx(1, abs=0.2)
