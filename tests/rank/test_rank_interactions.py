"""Interactions from weights: strengths against their formulas, networks that read known features, and bad input."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("pyarrow")

from tigon import rank


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


def test_to_table_has_the_strongest_sets():
    for order in (None, 2):
        found = rank.find_interactions(weights_of(5, 12, 1), list("abcde"), order=order)
        table = found.to_table(4).to_pylist()
        assert [row["features"] for row in table] == [list(one.features) for one in found[:4]]
        assert [row["order"] for row in table] == [len(one.features) for one in found[:4]]
        assert [row["strength"] for row in table] == [one.strength for one in found[:4]]


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
        (lambda: rank.find_interactions(nn.Linear(3, 1)), "got a linear model, which has no interactions"),
        (lambda: rank.find_interactions(GOOD[:1]), "got a linear model, which has no interactions"),
        (lambda: rank.find_interactions(nn.ReLU()), "model must be an MLP, a chain of nn.Linear, but ReLU has none"),
        (lambda: rank.find_interactions(nn.LSTM(3, 4)), "but model has class LSTM"),
        (lambda: rank.find_interactions(nn.Sequential(nn.Embedding(4, 3))), "but 0 has class Embedding"),
        (lambda: rank.find_interactions(7), "model must be an MLP, .* or a list .* got int"),
        (lambda: rank.find_interactions([]), "got an empty list"),
        (lambda: rank.find_interactions([GOOD[0], np.zeros(4)]), r"2 must be \(outputs, inputs\).*got shape \(4,\)"),
        (lambda: rank.find_interactions([["a"], GOOD[1]]), "layer 1 must be an array of numbers, got list"),
        (
            lambda: rank.find_interactions([GOOD[0], np.zeros((1, 5))]),
            r"layer 2 reads 5 numbers and the layer before has 4 outputs; the shapes are \(4, 3\), \(1, 5\)",
        ),
        (lambda: rank.find_interactions(NAN), "1 of 12 in layer 1 are not; did the training diverge"),
        (lambda: rank.find_interactions(GOOD, ["a", "b"]), "names must name each of the 3 model inputs, got 2"),
        (lambda: rank.find_interactions(GOOD, "abc"), "names must be a list of strings, got 'abc'"),
        (lambda: rank.find_interactions(GOOD, ["a"] * 3), "there must be two features or more, got 'a'"),
        (lambda: rank.find_interactions(GOOD, spread=[1, 0, 1]), "'x2' has variance 0, and the weight for a constant"),
        (lambda: rank.find_interactions(GOOD, spread=[1, -1, 1]), "spread of 'x2' must be a finite number above 0"),
        (lambda: rank.find_interactions(GOOD, spread=[1, 2]), r"a number for each of the 3 inputs, got shape \(2,\)"),
        (lambda: rank.find_interactions(GOOD, order=4), "order must be None or an integer from 2 to 3.*got 4"),
        (lambda: rank.find_interactions(GOOD, order=1), "order must be None or an integer from 2 to 3.*got 1"),
        (lambda: rank.find_interactions(GOOD, method="ndi"), "method must be 'persistence' or 'nid', got 'ndi'"),
        (lambda: rank.find_interactions(GOOD, power=0), "power must be a number above 0, got 0"),
        (lambda: rank.find_interactions(weights_of(300, 2, 1), order=4), "300 features have .* sets with order=4"),
        (lambda: rank.find_interactions(GOOD).to_table(0), r"Interactions\.to_table: top must be an integer of 1"),
        (lambda: rank.find_interactions(GOOD).crosses(0), r"Interactions\.crosses: top must be an integer of 1"),
    ],
)  # fmt: skip
def test_bad_input_gets_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        call()
    assert str(error.value).endswith((".", "?"))
