"""Off-policy estimates: exact on a log in which every action occurs as often as its propensity says."""

import itertools
import math

import pytest
import torch

from tigon.rank import off_policy
from tigon.rank.off_policy import direct, dr, ips, replay, snips

# Of two contexts and three actions: how often each is shown, what it earns, and what the policy in question shows.
LOGGED = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]]).double()
REWARD = torch.tensor([[1.0, 0.0, 2.0], [0.5, 3.0, 1.0]]).double()
TARGET = torch.tensor([[0.0, 0.5, 0.5], [0.25, 0.75, 0.0]]).double()
VALUE = float((TARGET * REWARD).sum(1).mean())


def log(logged=LOGGED):
    """(context, action) of 16 rows: each context 8 times, each of its actions 8 · its propensity times."""
    pairs = [(x, a) for x, a in itertools.product(range(2), range(3)) for _ in range(round(8 * float(logged[x, a])))]
    return [torch.tensor(side) for side in zip(*pairs, strict=True)]


def test_estimates_are_the_policy_s_value():
    x, a = log()
    given = REWARD[x, a], LOGGED[x, a], TARGET[x, a]
    assert ips(*given, draws=0).value == pytest.approx(VALUE, abs=1e-12)
    assert snips(*given, draws=0).value == pytest.approx(VALUE, abs=1e-12)
    assert direct((TARGET * REWARD).sum(1)[x], draws=0).value == pytest.approx(VALUE, abs=1e-12)
    wrong = torch.tensor([[0.3, 0.9, 0.1], [2.0, 0.0, 0.7]]).double()
    for q in (wrong, REWARD, torch.zeros(2, 3).double()):
        found = dr(*given, q[x, a], (TARGET * q).sum(1)[x], draws=0)
        assert found.value == pytest.approx(VALUE, abs=1e-12)
        assert (found.low, found.high) == (None, None)
    assert direct((TARGET * wrong).sum(1)[x], draws=0).value != pytest.approx(VALUE, abs=0.1)


def test_replay_is_the_mean_of_the_rows_that_match():
    uniform = torch.full((2, 3), 0.25).double()
    uniform[:, 2] = 0.5
    x, a = log(uniform)
    chosen = torch.tensor([1, 0])  # both actions are shown equally often
    found = replay(REWARD[x, a], a == chosen[x], draws=0)
    assert found.value == pytest.approx((0.0 + 0.5) / 2)
    assert found.left_out == 12
    soft = replay(REWARD[x, a], TARGET[x, a], draws=0)
    assert soft.value == pytest.approx(float((TARGET[x, a] * REWARD[x, a]).sum() / TARGET[x, a].sum()))
    assert math.isnan(replay(torch.ones(3), torch.zeros(3)).value)


def test_intervals_are_those_of_the_mean():
    draw = torch.Generator().manual_seed(0)
    reward = torch.rand(4000, generator=draw)
    logged, target = torch.full((4000,), 0.5), torch.rand(4000, generator=draw)
    terms = reward * target / logged
    found = ips(reward, logged, target, draws=2000)
    half = 1.96 * float(terms.std()) / 4000**0.5
    assert found.value == pytest.approx(float(terms.mean()), abs=1e-6)
    assert found.high - found.value == pytest.approx(half, rel=0.1)
    assert found.value - found.low == pytest.approx(half, rel=0.1)
    assert ips(reward, logged, target) == ips(reward, logged, target)
    narrow = ips(reward, logged, target, draws=2000, level=0.5)
    assert narrow.high - narrow.low == pytest.approx(2 * half * 0.6745 / 1.96, rel=0.1)
    # What a perfect model explains is no longer spread: of a constant reward, DR knows all.
    ones = torch.ones(4000)
    exact = dr(ones, logged, target, ones, ones)
    assert (exact.low, exact.value, exact.high) == pytest.approx((1.0, 1.0, 1.0), abs=1e-12)
    assert snips(ones, logged, target).low == pytest.approx(1.0, abs=1e-12)
    assert ips(ones, logged, target).low < 0.99


def test_clipping_bounds_weights():
    reward, logged, target = torch.ones(2), torch.tensor([0.01, 0.5]), torch.tensor([0.5, 0.5])
    assert ips(reward, logged, target, draws=0).value == pytest.approx(51 / 2, rel=1e-6)
    assert ips(reward, logged, target, clip=3, draws=0).value == pytest.approx(2.0)
    assert dr(reward, logged, target, reward / 2, reward, clip=3, draws=0).value == pytest.approx(1 + 2.0 / 2)


def test_sentences():
    ones, half = torch.ones(3), torch.full((3,), 0.5)
    for call, said in (
        (lambda: ips(ones, torch.tensor([0.5, 0.0, 0.5]), half), "logged must be above 0 for .* got 0 in row 1"),
        (lambda: ips(ones, half, 3 * ones), "target must be from 0 to 1, got 3.0 to 3.0"),
        (lambda: snips(ones, half[:2], half), r"logged must be \(n,\) .* as reward is \(3,\), got \(2,\)"),
        (lambda: dr(ones, half, half, ones[:1], ones), r"predicted must be \(n,\)"),
        (lambda: direct(ones * math.nan), "expected must be finite, got nan"),
        (lambda: direct(torch.zeros(0)), "with at least one row"),
        (lambda: ips(ones, half, half, clip=0), "clip must be above 0"),
        (lambda: ips(ones, half, half, level=1.0), "level in"),
        (lambda: replay(ones, 2 * ones), "matches must be from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    assert off_policy.__doc__
