"""Feature interactions: a ranking over feature sets, as a table, and as crosses for a schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

from tigon.rank.data.fields import Cross
from tigon.rank.data.schema import Schema
from tigon.rank.interactions.extract import FieldMLP
from tigon.rank.interactions.strengths import Method, Network, check_options, rank_order, rank_prefixes
from tigon.rank.interactions.weights import NAME, check_names, join_columns, parse_network
from tigon.rank.models.ranker import Ranker


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
        some = self._found[:top]
        return pa.table({
            "features": pa.array([list(one.features) for one in some], pa.list_(pa.string())),
            "order": pa.array([len(one.features) for one in some], pa.int64()),
            "strength": pa.array([one.strength for one in some], pa.float64()),
            "share": pa.array([one.share for one in some], pa.float64()),
            "units": pa.array([one.units for one in some], pa.int64()),
        })  # fmt: skip

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
    networks: Sequence[Network]
    notes: Sequence[str] = ()
    if isinstance(model, FieldMLP):
        if names is not None or spread is not None:
            raise ValueError(f"{NAME}: names and spread are those of the ranker's fields.")
        networks, features, notes = model.networks, list(model.names), model.notes
    else:
        if isinstance(model, Ranker):
            raise ValueError(
                f"{NAME}: model must be the result of rank.extract_mlp(ranker, data), whose data say how fields vary, "
                f"got the {type(model).__name__} itself."
            )
        one = parse_network(model)
        first, features = join_columns(one.first, check_names(names, one.first.shape[1]), spread)
        networks = [Network(first, one.reach)]
    if len(features) < 2:
        raise ValueError(f"{NAME}: there must be two features or more, got {', '.join(map(repr, features))}.")
    check_options(method, power, order, len(features))
    strengths = rank_prefixes(networks, method, power) if order is None else rank_order(networks, order, method, power)
    total = sum(one.strength for one in strengths.values()) or 1.0
    ranked = sorted(strengths, key=lambda one: (-strengths[one].strength, len(one), one))
    found = [
        Interaction(tuple(features[place] for place in one), strength, strength / total, units)
        for one in ranked
        for strength, units in (strengths[one],)
    ]
    return Interactions(found, features, order, notes)
