"""Interaction strengths from an MLP's weights.

First-layer unit u reads feature j with weight w_uj, and reaches the output with strength z_u. Sort |w_u| and lower a
threshold: the k strongest features form a set at w_(k), and the next feature joins at w_(k+1); after the last feature
the weight is 0. Persistence measures how long a set exists before another feature joins.

    persistence of a set      Σ_u z_u (w_(k) − w_(k+1))^q      over units whose k strongest features form the set
    persistence, fixed order  Σ_u z_u Σ_k (w_(k) − w_(k+1))^q  over all sets that contain the set
    NID of a set              Σ_u z_u w_(k)                    over units whose k strongest features form the set
    NID, fixed order          Σ_u z_u min_{j in S} w_uj

With q = 1 the second row's sum telescopes to the fourth: with a fixed order, NID is persistence with q = 1.

Sources: NID is Tsang, Cheng, Liu 2018, https://arxiv.org/abs/1705.04977. Persistence of interactions is the idea of
Liu, Huang, Chen, Suykens, Tsang 2020, https://arxiv.org/abs/2010.13015; the definition here is our own.
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
MOST = 2_000_000  # maximum number of sets with a given order
LONGEST = 32  # maximum features per set
CHUNK = 1 << 24  # maximum numbers in memory at once


class Network(NamedTuple):
    """An MLP's first layer and output reach.

    Attributes:
        first: (U, P), ≥ 0: how strongly each first-layer unit reads each feature.
        reach: (U,), ≥ 0: how strongly each unit affects the output.
    """

    first: Array
    reach: Array


class SetStrength(NamedTuple):
    """A feature set's strength, and the number of units whose strongest prefix is the set."""

    strength: float
    units: int


def rank_prefixes(networks: Sequence[Network], method: Method, power: float) -> dict[tuple[int, ...], SetStrength]:
    """Sets with two features or more that are some unit's strongest features.

    Each has its own strength, averaged over the networks.
    """
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
    """All sets with a given order, with strengths averaged over the networks.

    A set's strength includes all prefixes that contain the set.

    Raises: ValueError for more than 2 million sets.
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
            last = place[at : at + step][:, sets].max(2)  # the weakest member's position
            strength += reach[at : at + step] @ np.take_along_axis(tails[at : at + step], last, 1) / len(networks)
            units += ((last == order - 1) & lives[at : at + step, None]).sum(0)
    return {
        tuple(one): SetStrength(s, u)
        for one, s, u in zip(sets.tolist(), strength.tolist(), units.tolist(), strict=True)
    }


def _own_strengths(ranked: Array, method: Method, power: float) -> Array:
    """(U, P) strength per prefix. ranked: |w_u|, descending."""
    if method == "nid":
        return ranked
    gaps: Array = -np.diff(ranked, axis=1, append=0.0)
    return gaps**power


def _tail_strengths(ranked: Array, method: Method, power: float) -> Array:
    """(U, P) strength from each prefix on: for persistence, summed with all longer prefixes."""
    if method == "nid":
        return ranked
    tails: Array = np.cumsum(_own_strengths(ranked, method, power)[:, ::-1], axis=1)[:, ::-1]
    return tails


def check_options(method: Any, power: Any, order: Any, features: int) -> None:
    """Raise ValueError for invalid options."""
    if method not in get_args(Method):
        raise ValueError(f"find_interactions: method must be 'persistence' or 'nid', got {method!r}.")
    if not isinstance(power, (int, float)) or not 0 < power < math.inf:
        raise ValueError(f"find_interactions: power must be a number above 0, got {power!r}.")
    if order is not None and (not isinstance(order, int) or isinstance(order, bool) or not 2 <= order <= features):
        raise ValueError(
            f"find_interactions: order must be None or an integer from 2 to {features}, how many features there are, "
            f"got {order!r}."
        )
