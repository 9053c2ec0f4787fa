"""Strengths of interactions, from the weights of an MLP alone.

Unit u of the first layer reads feature j with weight w_uj, and reaches the output by z_u. Sort |w_u|, and lower a
threshold through it: the k strongest features are joined at w_(k), and the next one joins them at w_(k+1), where the
last is followed by 0. A set lives as long as no feature joins it: its persistence.

    persistence of a set      Σ_u z_u (w_(k) − w_(k+1))^q      over the units whose k strongest features it is
    persistence within all    Σ_u z_u Σ_k (w_(k) − w_(k+1))^q  over all sets that hold it
    NID of a set              Σ_u z_u w_(k)                    over the units whose k strongest features it is
    NID within all            Σ_u z_u min_{j in S} w_uj

With q = 1 the third row's sum telescopes to the fourth: within all sets, NID is persistence with q = 1.

Sources: NID is Tsang, Cheng, Liu 2018, https://arxiv.org/abs/1705.04977. Persistence of interactions is the idea of
Liu, Huang, Chen, Suykens, Tsang 2020, https://arxiv.org/abs/2010.13015; its definition here is our own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Method = Literal["persistence", "nid"]
MOST = 2_000_000  # sets of one order that are counted
LONGEST = 32  # features of a set that is looked at
CHUNK = 1 << 24  # numbers in memory at once


class Network(NamedTuple):
    """What is read of an MLP.

    Attributes:
        first: (U, P), ≥ 0: how strongly each unit of the first layer reads each feature.
        reach: (U,), ≥ 0: how strongly it reaches the output.
    """

    first: Array
    reach: Array


class SetStrength(NamedTuple):
    """The strength of a set of features, and the number of units whose strongest prefix the set is."""

    strength: float
    units: int


def rank_prefixes(networks: Sequence[Network], method: Method, power: float) -> dict[tuple[int, ...], SetStrength]:
    """Sets of two features or more that are the strongest of a unit, each with its own strength: the mean over the
    networks."""
    result: dict[tuple[int, ...], SetStrength] = {}
    for first, reach in networks:
        order = np.argsort(-first, axis=1, kind="stable")
        value = _own_strengths(np.take_along_axis(first, order, 1), method, power) * (reach / len(networks))[:, None]
        for features, values in zip(order[:, :LONGEST].tolist(), value[:, :LONGEST].tolist(), strict=True):
            members: list[int] = []
            for feature, strength in zip(features, values, strict=True):
                members.append(feature)
                if strength > 0 and len(members) > 1:
                    key = tuple(sorted(members))
                    before = result.get(key, SetStrength(0.0, 0))
                    result[key] = SetStrength(before.strength + strength, before.units + 1)
    return result


def rank_order(
    networks: Sequence[Network], order: int, method: Method, power: float
) -> dict[tuple[int, ...], SetStrength]:
    """All sets of so many features, each with the strength of all prefixes that hold it: the mean over the networks.

    Raises: ValueError if there are more than 2 million.
    """
    P = networks[0].first.shape[1]
    count = math.comb(P, order)
    if count > MOST:
        raise ValueError(
            f"find_interactions: {P} features have {count:,} sets of {order}, more than {MOST:,}; order=None looks at "
            "those alone that units read."
        )
    sets = np.array([*itertools.combinations(range(P), order)])
    strength, units = np.zeros(count), np.zeros(count, dtype=np.int64)
    for first, reach in networks:
        ranked = np.argsort(-first, axis=1, kind="stable")
        place = np.argsort(ranked, axis=1, kind="stable")
        sorted_first = np.take_along_axis(first, ranked, 1)
        tails, lives = (
            _tail_strengths(sorted_first, method, power),
            _own_strengths(sorted_first, method, power)[:, order - 1] > 0,
        )
        step = max(1, CHUNK // max(1, sets.size))
        for at in range(0, len(first), step):
            last = place[at : at + step][:, sets].max(2)  # the place of the weakest member
            strength += reach[at : at + step] @ np.take_along_axis(tails[at : at + step], last, 1) / len(networks)
            units += ((last == order - 1) & lives[at : at + step, None]).sum(0)
    return {
        tuple(one): SetStrength(s, u)
        for one, s, u in zip(sets.tolist(), strength.tolist(), units.tolist(), strict=True)
    }


def _own_strengths(ranked: Array, method: Method, power: float) -> Array:
    """(U, P) the strength of each prefix. ranked: |w_u|, falling."""
    if method == "nid":
        return ranked
    gaps: Array = -np.diff(ranked, axis=1, append=0.0)
    return gaps**power


def _tail_strengths(ranked: Array, method: Method, power: float) -> Array:
    """(U, P) the strength of all prefixes from each on."""
    if method == "nid":
        return ranked
    tails: Array = np.cumsum(_own_strengths(ranked, method, power)[:, ::-1], axis=1)[:, ::-1]
    return tails


def check_options(method: Any, power: Any, order: Any, features: int) -> None:
    """Raise ValueError for options that mean nothing."""
    if method not in get_args(Method):
        raise ValueError(f"find_interactions: method must be 'persistence' or 'nid', got {method!r}.")
    if not isinstance(power, (int, float)) or not 0 < power < math.inf:
        raise ValueError(f"find_interactions: power must be a number above 0, got {power!r}.")
    if order is not None and (not isinstance(order, int) or isinstance(order, bool) or not 2 <= order <= features):
        raise ValueError(
            f"find_interactions: order must be None or an integer from 2 to {features}, how many features there are, "
            f"got {order!r}."
        )
