"""Feature interactions: sets of features, ranked by their strength in an MLP's weights.

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

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, overload

import numpy as np

from tigon.rank.data.fields import Cross
from tigon.rank.data.schema import Schema
from tigon.rank.interactions.extract import FieldMLP
from tigon.rank.interactions.weights import NAME, Array, Network, parse_network, to_array
from tigon.rank.models.ranker import Ranker

Method = Literal["persistence", "nid"]
MOST = 2_000_000  # maximum number of sets with a given order
LONGEST = 32  # maximum features per set
# By set of feature numbers: the strength, and the number of units whose strongest features are the set.
Strengths = dict[tuple[int, ...], tuple[float, int]]


@dataclass(frozen=True)
class Interaction:
    """A set of interacting features.

    Attributes:
        features: feature names, in model input order.
        strength: comparable only within a ranking.
        share: fraction of the ranking's total strength.
        units: number of first-layer units for which these are the strongest features.
    """

    features: tuple[str, ...]
    strength: float
    share: float
    units: int


class Interactions(Sequence[Interaction]):
    """A ranking over feature sets, strongest first. Slices are rankings too.

    Attributes:
        names: all model features.
        order: number of features per set; None for any number.
        notes: caveats about the model.
    """

    def __init__(
        self, found: Sequence[Interaction], names: Sequence[str], order: int | None, notes: Sequence[str] = ()
    ) -> None:
        self._found, self.names, self.order, self.notes = list(found), list(names), order, list(notes)

    def __len__(self) -> int:
        return len(self._found)

    @overload
    def __getitem__(self, place: int) -> Interaction: ...
    @overload
    def __getitem__(self, place: slice) -> Interactions: ...
    def __getitem__(self, place: int | slice) -> Interaction | Interactions:
        return self._with(self._found[place]) if isinstance(place, slice) else self._found[place]

    def __repr__(self) -> str:
        rows = [f"  {one.strength:.4g}  {' × '.join(one.features)}" for one in self._found[:10]]
        return "\n".join([f"Interactions({len(self):,} sets of {len(self.names)} features)", *rows])

    def _with(self, found: Sequence[Interaction]) -> Interactions:
        return Interactions(found, self.names, self.order, self.notes)

    def maximal(self) -> Interactions:
        """The ranking without sets contained in a stronger set."""
        kept: list[Interaction] = []
        for one in self._found:
            if not any(set(one.features) < set(other.features) for other in kept):
                kept.append(one)
        return self._with(kept)

    def to_table(self, top: int = 20) -> Any:
        """The strongest sets as a table.

        Args:
            top: number of sets.
        Returns: a pyarrow.Table with columns features, order, strength, share and units.
        Raises: ValueError unless top is 1 or more.
        """
        import pyarrow as pa

        _check_top("to_table", top)
        rows = [dataclasses.asdict(one) | {"order": len(one.features)} for one in self._found[:top]]
        kinds = {"features": pa.list_(pa.string()), "order": pa.int64(), "strength": pa.float64(),
                 "share": pa.float64(), "units": pa.int64()}  # fmt: skip
        return pa.Table.from_pylist(rows, pa.schema(kinds))

    def crosses(self, top: int = 10, *, hash_rows: int = 100_000, schema: Schema | None = None) -> dict[str, Cross]:
        """Crosses for the strongest sets, for use with `Schema.replace`.

        Args:
            top: number of sets.
            hash_rows: number of codes per cross.
            schema: for the next fit. Skips sets that the schema already has as crosses, and sets with fields that
                cannot be crossed, such as lists and times. None: no set is skipped.
        Returns: name → field, such as "age × hour".
        Raises: ValueError unless top is 1 or more.
        """
        _check_top("crosses", top)
        found = self._found if schema is None else [one for one in self._found if _crossable(schema, one.features)]
        return {" × ".join(one.features): Cross(one.features, hash_rows=hash_rows) for one in found[:top]}


def _crossable(schema: Schema, features: tuple[str, ...]) -> bool:
    known = {frozenset(field.of) for field in schema.fields.values() if isinstance(field, Cross)}
    return frozenset(features) not in known and all(schema.why_no_cross(name) is None for name in features)


def _check_top(what: str, top: Any) -> None:
    if not isinstance(top, int) or isinstance(top, bool) or top < 1:
        raise ValueError(f"Interactions.{what}: top must be an integer of 1 or more, got {top!r}.")


def find_interactions(
    model: Any, names: Sequence[str] | None = None, *, order: int | None = None, method: Method = "persistence",
    power: float = 2.0, spread: Any = None,
) -> Interactions:  # fmt: skip
    """Find interacting features of an MLP from its weights alone.

    A first-layer unit that reads two features strongly makes them interact. A set's persistence is the margin between
    its weakest weight and the largest weight outside the set, to the power q, summed over units weighted by their reach
    to the output. NID uses the weakest weight itself.

    Input weights are comparable only if the inputs have the same spread: standardise them, or pass `spread`. The result
    is a screening, not a proof: weights reflect only what the network has learned.

    Args:
        model: a torch module that is a chain of nn.Linear, the weights of such a chain as (outputs, inputs) arrays, or
            the result of `rank.extract_mlp`.
        names: input names; None: x1, x2, …, or the ranker's fields. Inputs with the same name, such as an embedding's
            columns, are a single feature.
        order: number of features per set. With order=2 all pairs are ranked, each by the strength of every set that
            contains the pair. None: sets with two features or more, each by its own strength.
        method: "persistence", or "nid", which for a given order is persistence with power 1.
        power: q, above 0.
        spread: (P,) input standard deviations; None if all are equal.
    Returns: the sets, strongest first.
    Raises: ValueError for a model that is not an MLP, weights with inconsistent shapes or non-finite values, fewer than
        two features, and a spread of 0.

    Sources: Liu et al. 2020, https://arxiv.org/abs/2010.13015 (the idea; the definition is our own), and for NID Tsang,
    Cheng, Liu 2018, https://arxiv.org/abs/1705.04977.
    """
    notes: Sequence[str] = ()
    if isinstance(model, FieldMLP):
        if names is not None or spread is not None:
            raise ValueError(f"{NAME}: names and spread must be omitted: the ranker's fields define both.")
        network, features, notes = model.network, list(model.names), model.notes
    elif isinstance(model, Ranker):
        raise ValueError(
            f"{NAME}: model must be the result of rank.extract_mlp(ranker, data), which measures how fields vary, got "
            f"the {type(model).__name__} itself."
        )
    else:
        network = parse_network(model)
        first, features = _join_columns(network.first, _check_names(names, network.first.shape[1]), spread)
        network = network._replace(first=first)
    if len(features) < 2:
        raise ValueError(f"{NAME}: there must be two features or more, got {', '.join(map(repr, features))}.")
    _check_options(method, power, order, len(features))
    if method == "nid" and order is not None:
        method, power = "persistence", 1
    strengths = _rank_prefixes(network, method, power) if order is None else _rank_order(network, order, power)
    total = sum(strength for strength, _ in strengths.values()) or 1.0
    ranked = sorted(strengths.items(), key=lambda item: (-item[1][0], len(item[0]), item[0]))
    found = [
        Interaction(tuple(features[place] for place in places), strength, strength / total, units)
        for places, (strength, units) in ranked
    ]
    return Interactions(found, features, order, notes)


def _rank_prefixes(network: Network, method: Method, power: float) -> Strengths:
    """Sets with two features or more that are some unit's strongest features, each with its own strength."""
    result: Strengths = {}
    order = np.argsort(-network.first, axis=1, kind="stable")
    ranked = np.take_along_axis(network.first, order, 1)
    values = (ranked if method == "nid" else _persistence(ranked, power)) * network.reach[:, None]
    for features, own in zip(order[:, :LONGEST].tolist(), values[:, :LONGEST].tolist(), strict=True):
        for size, strength in enumerate(own[1:], 2):
            if strength > 0:
                key = tuple(sorted(features[:size]))
                before, units = result.get(key, (0.0, 0))
                result[key] = before + strength, units + 1
    return result


def _rank_order(network: Network, order: int, power: float) -> Strengths:
    """All sets with a given order; a set's strength includes all prefixes that contain the set.

    Raises: ValueError for more than 2 million sets.
    """
    P = network.first.shape[1]
    if (count := math.comb(P, order)) > MOST:
        raise ValueError(
            f"{NAME}: {P} features have {count:,} sets with order={order}, over {MOST:,}; order=None ranks only sets "
            "that units read."
        )
    sets = np.array([*itertools.combinations(range(P), order)])
    strength, units = np.zeros(count), np.zeros(count, dtype=np.int64)
    ranked = np.argsort(-network.first, axis=1, kind="stable")
    places = np.argsort(ranked, axis=1, kind="stable")
    own = _persistence(np.take_along_axis(network.first, ranked, 1), power)
    tails = np.cumsum(own[:, ::-1], axis=1)[:, ::-1]
    # A unit at a time: the memory is that of the sets.
    for place, tail, value, reach in zip(places, tails, own[:, order - 1], network.reach, strict=True):
        last = place[sets].max(1)  # the weakest member's position
        strength += reach * tail[last]
        units += (last == order - 1) & (value > 0)
    return dict(zip(map(tuple, sets.tolist()), zip(strength.tolist(), units.tolist(), strict=True), strict=True))


def _persistence(ranked: Array, power: float) -> Array:
    """(U, P) strength per prefix. ranked: |w_u|, descending."""
    gaps: Array = -np.diff(ranked, axis=1, append=0.0)
    return gaps**power


def _join_columns(first: Array, names: Sequence[str], spread: Any) -> tuple[Array, list[str]]:
    """(U, F) feature weights, and the feature names: columns with the same name are merged.

    spread: (P,) column standard deviations that scale the weights; None if all are equal. Merged columns use the root
        of the sum of squares, the spread of their sum if they are uncorrelated.
    """
    if spread is not None:
        first = first * _check_spread(spread, names)
    order = list(dict.fromkeys(names))
    if len(order) == len(names):
        return first, order
    squares = np.zeros((len(first), len(order)))
    np.add.at(squares.T, [order.index(name) for name in names], np.square(first).T)
    return np.sqrt(squares), order


def _check_spread(spread: Any, names: Sequence[str]) -> Array:
    try:
        result = to_array(spread)
    except (TypeError, ValueError):
        result = np.full(0, np.nan)
    if result.shape != (len(names),):
        raise ValueError(
            f"{NAME}: spread must have a number for each of the {len(names)} inputs, got "
            f"{f'shape {result.shape}' if result.size else repr(spread)}."
        )
    for name, one in zip(names, result.tolist(), strict=True):
        if not np.isfinite(one) or one < 0:
            raise ValueError(f"{NAME}: spread of {name!r} must be a finite number above 0, got {one!r}.")
        if one == 0:
            raise ValueError(
                f"{NAME}: {name!r} has variance 0, and the weight for a constant input carries no information; "
                "remove this input from the model."
            )
    return result


def _check_names(names: Any, count: int) -> list[str]:
    """Input names. None: x1, x2, …"""
    if names is None:
        return [f"x{number}" for number in range(1, count + 1)]
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{NAME}: names must be a list of strings, got {names!r}.")
    if len(names) != count:
        raise ValueError(f"{NAME}: names must name each of the {count} model inputs, got {len(names)}.")
    return list(names)


def _check_options(method: Any, power: Any, order: Any, features: int) -> None:
    if method not in get_args(Method):
        raise ValueError(f"{NAME}: method must be 'persistence' or 'nid', got {method!r}.")
    if not isinstance(power, (int, float)) or not 0 < power < math.inf:
        raise ValueError(f"{NAME}: power must be a number above 0, got {power!r}.")
    if order is not None and (not isinstance(order, int) or isinstance(order, bool) or not 2 <= order <= features):
        raise ValueError(
            f"{NAME}: order must be None or an integer from 2 to {features}, the number of features, got {order!r}."
        )
