"""Interactions of features: a ranking of sets of features, as a table, and as crosses for a schema."""

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
    """Features that act together.

    Attributes:
        features: their names, in the order of the model's inputs.
        strength: how strongly; comparable within one ranking alone.
        share: of the strengths of all sets of the ranking.
        units: of how many units of the first layer they are the strongest features.
    """

    features: tuple[str, ...]
    strength: float
    share: float
    units: int


class Interactions(Sequence[Interaction]):
    """A ranking of sets of features, the strongest first. A slice is a ranking, too.

    Attributes:
        names: all features of the model.
        order: how many features the sets have; None where they have any number.
        notes: sentences on what one should know of the model before believing it.
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
        """The ranking without sets whose features all lie in a stronger set."""
        kept: list[Interaction] = []
        for one in self._found:
            if not any(set(one.features) < set(other.features) for other in kept):
                kept.append(one)
        return self._with(kept)

    def to_table(self, top: int = 20) -> Any:
        """The strongest sets as a table.

        Args:
            top: how many sets.
        Returns: a pyarrow.Table of the columns features, order, strength, share and units.
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
        """Fields that hold the features of the strongest sets together, for `Schema.replace`.

        Args:
            top: how many sets.
            hash_rows: how many codes each field has.
            schema: of the next fit. Sets that it has as crosses already, and sets of fields that have no crosses, such
                as lists and times, are passed over. None: none is.
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
    """Which features of an MLP act together, from its weights alone.

    A unit of the first layer that reads two features strongly lets them act together. The persistence of a set is how
    far the weakest of its weights stands above those of all other features, to the power q, summed over the units and
    weighted by how far each reaches the output. NID counts the weakest weight itself.

    The weights of inputs compare only where the inputs have the same spread: standardise them, or give `spread`. This
    is a screening, not a proof: the weights hold only what the network has learned.

    Args:
        model: a torch module that is a chain of nn.Linear, the weights of such a chain as (outputs, inputs) arrays, or
            the result of `rank.extract_mlp`.
        names: of the inputs; None: x1, x2, …, or the ranker's fields. Inputs of one name, such as the columns of an
            embedding, are one feature.
        order: how many features sets have. With order=2 all pairs are ranked, each by the strength of every set
            that contains it. None: sets of two features or more, each by its own strength.
        method: "persistence", or "nid", which for a given order is persistence with power 1.
        power: q, above 0.
        spread: (P,) standard deviations of the inputs; None where they have the same.
    Returns: the sets, the strongest first.
    Raises: ValueError, in a sentence, for a model that is no MLP, weights that do not chain or are not finite, fewer
        than two features, and a spread of 0.

    Sources: Liu et al. 2020, https://arxiv.org/abs/2010.13015 (the idea; the definition is our own), and for NID
        Tsang, Cheng, Liu 2018, https://arxiv.org/abs/1705.04977.
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
