"""Off-policy evaluation: estimate a policy's reward from another policy's log.

    replay  mean of r over the rows where the policy takes the logged action
    IPS     mean of w r,   w = π(a|x) / μ(a|x)
    SNIPS   Σ w r / Σ w
    DM      mean of Σ_b π(b|x) q(x, b)
    DR      mean of Σ_b π(b|x) q(x, b) + w (r − q(x, a))

μ is the logging policy, with action a and reward r; π is the evaluated policy; q is a reward model. Replay, IPS and DR
are unbiased if μ gives every action of π a positive probability, replay only for uniform μ. DR's variance falls with
better q. DR is unbiased for any q, provided that q was not fitted on the row.

Intervals are bootstrap intervals over rows and reflect only the observed rewards: if the policy's actions have few
rewards in the log, the intervals are too narrow; without any rewards their width is zero.

Source: replay: Li et al. 2011, https://arxiv.org/abs/1003.5956; DR: Dudík et al. 2011, https://arxiv.org/abs/1103.4601;
SNIPS: Swaminathan and Joachims 2015,
https://papers.nips.cc/paper/5748-the-self-normalized-estimator-for-counterfactual-learning
"""

from __future__ import annotations

import math

from torch import Tensor

from tigon.data.metrics import average_groups
from tigon.rank.evaluation.evaluate import Bootstrap, MetricValue


def replay(reward: Tensor, matches: Tensor, *, draws: int = 1000, level: float = 0.95, seed: int = 0) -> MetricValue:
    """Mean reward over the rows where a policy takes the logged action. Requires a uniform logging policy.

    Args:
        reward: (n,), for the logged action. matches: (n,) bool, or the policy's probability for that action, 0 to 1.
        draws: bootstrap samples over rows; 0: no interval. level: interval coverage. seed: for the draws.
    Returns: `rank.MetricValue`; NaN if no row matches. `left_out`: number of non-matching rows.
    Raises: ValueError for wrong shapes and values out of range.
    """
    reward, matches = _check_inputs("replay", reward=reward, matches=matches)
    _check_probabilities("replay", "matches", matches)
    return _estimate(reward, matches, draws, level, seed, int((matches == 0).sum()))


def ips(
    reward: Tensor, logged: Tensor, target: Tensor, *, clip: float = math.inf, draws: int = 1000, level: float = 0.95,
    seed: int = 0,
) -> MetricValue:  # fmt: skip
    """Inverse propensity scoring: mean reward, each row weighted by the ratio of target to logging probability.

    Args:
        reward: (n,), for the logged action.
        logged, target: (n,), probability for that action under the logging policy, above 0, and the evaluated policy.
        clip: maximum row weight: reduces variance, adds bias.
        draws, level, seed: as in `replay`.
    Returns: `rank.MetricValue`.
    Raises: ValueError for wrong shapes and values out of range.
    """
    reward, w = _importance_weights("ips", reward, logged, target, clip)
    return _estimate(w * reward, None, draws, level, seed)


def snips(
    reward: Tensor, logged: Tensor, target: Tensor, *, clip: float = math.inf, draws: int = 1000, level: float = 0.95,
    seed: int = 0,
) -> MetricValue:  # fmt: skip
    """Self-normalised `ips`: divided by the mean weight, which is 1 in expectation.

    Args:
        reward, logged, target, clip: as in `ips`.
        draws, level, seed: as in `replay`.
    Returns: `rank.MetricValue`; NaN if all weights are 0.
    Raises: ValueError as `ips`.
    """
    reward, w = _importance_weights("snips", reward, logged, target, clip)
    return _estimate(reward, w, draws, level, seed)


def direct(expected: Tensor, *, draws: int = 1000, level: float = 0.95, seed: int = 0) -> MetricValue:
    """Direct method: the policy's expected reward under a reward model.

    Args:
        expected: (n,), Σ_b π(b|x) q(x, b) per row.
        draws, level, seed: as in `replay`.
    Returns: `rank.MetricValue`; the interval does not include the reward model's error.
    Raises: ValueError for another shape.
    """
    (expected,) = _check_inputs("direct", expected=expected)
    return _estimate(expected, None, draws, level, seed)


def dr(
    reward: Tensor, logged: Tensor, target: Tensor, predicted: Tensor, expected: Tensor, *, clip: float = math.inf,
    draws: int = 1000, level: float = 0.95, seed: int = 0,
) -> MetricValue:  # fmt: skip
    """Doubly robust: the direct method plus `ips` on the reward model's errors.

    Args:
        reward, logged, target, clip: as in `ips`.
        predicted: (n,), q(x, a) for the logged action. expected: (n,), Σ_b π(b|x) q(x, b). q must be fitted on other
            rows.
        draws, level, seed: as in `replay`.
    Returns: `rank.MetricValue`.
    Raises: ValueError as `ips`.
    """
    reward, w = _importance_weights("dr", reward, logged, target, clip)
    _, predicted, expected = _check_inputs("dr", reward=reward, predicted=predicted, expected=expected)
    return _estimate(expected + w * (reward - predicted), None, draws, level, seed)


def _importance_weights(
    name: str, reward: Tensor, logged: Tensor, target: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Rewards and importance weights, fp64."""
    reward, logged, target = _check_inputs(name, reward=reward, logged=logged, target=target)
    for what, p in (("logged", logged), ("target", target)):
        _check_probabilities(name, what, p)
    if bool((logged == 0).any()):
        row = int((logged == 0).nonzero()[0])
        raise ValueError(f"off_policy.{name}: logged must be above 0 for actions taken, got 0 in row {row}.")
    if not clip > 0:
        raise ValueError(f"off_policy.{name}: clip must be above 0, got {clip}.")
    return reward, (target / logged).clamp(max=clip)


def _check_inputs(name: str, **given: Tensor) -> list[Tensor]:
    first, n = next((key, len(x)) for key, x in given.items())
    for key, x in given.items():
        if x.dim() != 1 or len(x) != n or not n:
            raise ValueError(
                f"off_policy.{name}: {key} must be (n,) with at least one row"
                + (f", as {first} is ({n},)" if key != first else "")
                + f", got {tuple(x.shape)}."
            )
        if not bool(x.double().isfinite().all()):
            raise ValueError(f"off_policy.{name}: {key} must be finite, got {float(x[~x.double().isfinite()][0])}.")
    return [x.detach().cpu().double() for x in given.values()]


def _check_probabilities(name: str, key: str, p: Tensor) -> None:
    if bool(((p < 0) | (p > 1 + 1e-6)).any()):
        raise ValueError(f"off_policy.{name}: {key} must be from 0 to 1, got {float(p.min())} to {float(p.max())}.")


def _estimate(
    values: Tensor, weights: Tensor | None, draws: int, level: float, seed: int, left_out: int = 0
) -> MetricValue:
    """The weighted mean of values, with bootstrap quantiles over resampled rows."""
    if isinstance(draws, bool) or draws < 0 or not 0 < level < 1:
        raise ValueError(f"off_policy: draws must be at least 0 and level in (0, 1), got {draws} and {level}.")
    found = average_groups("off_policy", values, weights)
    return Bootstrap(draws, level, seed).measure_requests(found)._replace(left_out=left_out)
