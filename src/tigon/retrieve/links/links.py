"""Learned links: query attributes that raise or lower the score of items with certain attributes.

An edge leads from a query attribute, such as occupation=programmer, to an item attribute, such as tags=sci-fi, and has
a weight. The score is the sum of the edges between the query's and the item's attributes, and
P(confirmed) = sigmoid(bias + score) among the training pairs. Most edges are exactly 0, and are not stored.

Source: Shen et al. 2024, https://arxiv.org/abs/2402.13435, for links learned from confirmed pairs.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tigon.data.columns import read_columns
from tigon.data.values import Ints, Value, shorten
from tigon.files import parse_json, read_tensors
from tigon.retrieve.arguments import read_int, read_path
from tigon.retrieve.filters.columns import Category, Column, Tags
from tigon.retrieve.filters.expressions import Comparison, Expression, Or
from tigon.retrieve.filters.schema import Schema
from tigon.retrieve.links.encoder import Attribute, AttributeEncoder, EncodedAttributes, find_rows
from tigon.retrieve.links.logistic import fit
from tigon.retrieve.storage import disk

FORMAT = 1
# Up to this many item values, the weights have a column for each value, whatever the queries: one kind of search.
FEW = 64


class Edge(NamedTuple):
    """query_column=query_value → item_column=item_value, and the weight that it adds to the score."""

    query_column: str
    query_value: Value
    item_column: str
    item_value: Value
    weight: float

    def __str__(self) -> str:
        return f"{self.query_column}={self.query_value} → {self.item_column}={self.item_value}, {self.weight:+.3g}"


@dataclass(frozen=True)
class LinkOptions:
    """Options for `Links.fit`.

    Args:
        l1: the penalty. An edge is kept if the mean loss has a larger slope: a larger l1 keeps fewer edges.
        negatives: random pairs per confirmed pair.
        steps: the most optimizer steps; the fit warns if they do not suffice.
        seed: for the random pairs. The same seed gives the same bits on the same device.

    Raises: ValueError for numbers that do not fit.
    """

    l1: float = 1e-4
    negatives: int = 4
    steps: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.l1, bool) or not isinstance(self.l1, (int, float)) or not 0 <= self.l1 < float("inf"):
            raise ValueError(f"LinkOptions: l1 must be a number, 0 or more, got {self.l1!r}.")
        for name, least in (("negatives", 1), ("steps", 1), ("seed", 0)):
            object.__setattr__(self, name, read_int("LinkOptions", name, getattr(self, name), least))


class LinkWeights(NamedTuple):
    """The query weights that `Links.weigh` computed, for `Index.search(links=…)`.

    Attributes:
        weights: (B, T) fp32: the weight that each value adds to an item's score.
        values: T, the item column and value for each column of the weights.
        links: the Links themselves. attributes: the queries' attributes.
    """

    weights: Tensor
    values: tuple[Attribute, ...]
    links: Links
    attributes: EncodedAttributes

    def edges(self, query: int, values: Iterable[Attribute]) -> list[Edge]:
        """The edges from a query's attributes to item values, the largest weight first.

        Args:
            query: the query's position, from 0.
            values: item values as (column, value).

        Returns: `Edge`s.
        """
        numbers = np.array([self.links.items.numbers[value] for value in values], dtype=np.int64)
        return self.links._between(self.attributes.row(query), numbers)


class Links:
    """Weighted edges between query attributes and item attributes. `Links.fit` learns them.

    Args:
        queries, items: each side's columns and values.
        query, item: (E,) int64, the attributes that each edge leads from and to.
        weight: (E,) fp32.
        bias: the fitted intercept, which no search adds.
    """

    def __init__(
        self, queries: AttributeEncoder, items: AttributeEncoder, query: Ints, item: Ints,
        weight: npt.NDArray[np.float32], bias: float,
    ) -> None:  # fmt: skip
        self.queries, self.items, self.bias = queries, items, bias
        # Sorted by query attribute, then by item attribute, so that an attribute's edges are contiguous.
        order = np.lexsort((item, query))
        self._query, self._item, self._weight = query[order], item[order], weight[order]
        self._starts = np.searchsorted(self._query, np.arange(len(queries.attributes) + 1))

    @classmethod
    def fit(
        cls, queries: Any, items: Any, pairs: Any, *, query_schema: Schema, item_schema: Schema,
        query_id: str | None = None, item_id: str | None = None, options: LinkOptions | None = None,
        device: torch.device | str | None = None,
    ) -> Links:  # fmt: skip
        """Learn edges from confirmed pairs: a logistic regression with an L1 penalty.

        Each pair (query attribute, item attribute) that occurs is a feature. Negatives are the same queries with
        uniformly drawn items, without confirmed pairs.

        Args:
            queries, items: tables with the schemas' columns: pyarrow, pandas, polars, or a dict of arrays. Other
                columns are ignored.
            pairs: the confirmed pairs, (query, item): an array (P, 2), a list of pairs, or a table with two columns.
            query_schema: the query side's Category and Tags columns.
            item_schema: the index's schema or another, whose Category and Tags columns are used.
            query_id, item_id: id columns that the pairs refer to. None: pairs hold row numbers.
            options: None: the defaults in `LinkOptions`.
            device: where to compute, in fp64. Each attribute pair in each example takes 40 bytes.

        Returns: the Links.
        Raises: ValueError for columns that are missing or of another kind, ids that are not in the tables, no pairs,
            and options that do not fit.
        """
        name = "Links.fit"
        options = LinkOptions() if options is None else options
        sides = (
            AttributeEncoder.from_columns("queries", _select_columns(name, "query_schema", query_schema, strict=True)),
            AttributeEncoder.from_columns("items", _select_columns(name, "item_schema", item_schema, strict=False)),
        )
        (encoded_q, table_q), (encoded_i, table_i) = (
            side.encode(name, table, grow=True) for side, table in zip(sides, (queries, items), strict=True)
        )
        Q, N = len(encoded_q.starts) - 1, len(encoded_i.starts) - 1
        first, second = _parse_pairs(name, pairs)
        q = find_rows(name, "queries", first, table_q, query_id, Q)
        i = find_rows(name, "items", second, table_i, item_id, N)
        confirmed = np.unique(q * N + i)
        drawn = np.random.default_rng(options.seed).integers(0, N, (len(confirmed), options.negatives))
        others = ((confirmed // N)[:, None] * N + drawn).reshape(-1)
        others = others[~np.isin(others, confirmed)]
        if not len(others):
            raise ValueError(f"{name}: pairs must leave some pairs unconfirmed, got every query with every item.")
        both = np.concatenate((confirmed, others))
        features, starts = _cross(encoded_q, encoded_i, both // N, both % N, len(sides[1].attributes))
        known, numbered = np.unique(features, return_inverse=True)
        target = np.repeat([1.0, 0.0], [len(confirmed), len(others)])
        given = [torch.from_numpy(array).to(device or "cpu") for array in (numbered.reshape(-1), starts, target)]
        result = fit(given[0], given[1], given[2], len(known), options.l1, options.steps)
        if not result.converged:
            warnings.warn(f"{name}: not converged in {options.steps} steps; more steps may change edges.", stacklevel=2)
        weights = result.weights.float().cpu().numpy()
        kept = np.flatnonzero(weights)
        wide = max(len(sides[1].attributes), 1)
        return cls(*sides, known[kept] // wide, known[kept] % wide, weights[kept], result.intercept)

    def __len__(self) -> int:
        """The number of edges."""
        return len(self._weight)

    def __repr__(self) -> str:
        return (
            f"Links({len(self):,} edges, {', '.join(self.queries.kinds)} → {', '.join(self.items.kinds)}, "
            f"bias={self.bias:.3g})"
        )

    def edges(self, min_weight: float | None = 0.0) -> Any:
        """The edges as a table, the largest weight first.

        Args:
            min_weight: the least weight. None: all edges, including negative weights.

        Returns: a pyarrow.Table: query_column, query_value, item_column, item_value and weight. A value column that is
            neither all text nor all integers is converted to text.
        """
        import pyarrow

        order = np.argsort(-self._weight, kind="stable")
        order = order if min_weight is None else order[self._weight[order] >= min_weight]
        columns: dict[str, list[Any]] = {name: [] for name in Edge._fields}
        for at in order:
            for name, value in zip(Edge._fields, self._edge(int(at)), strict=True):
                columns[name].append(value)
        for name in ("query_value", "item_value"):
            if len({type(value) for value in columns[name]}) > 1:
                columns[name] = [str(value) for value in columns[name]]
        return pyarrow.table({**columns, "weight": pyarrow.array(columns["weight"], pyarrow.float32())})

    def explain(self, query: Mapping[str, Any], item: Mapping[str, Any]) -> list[Edge]:
        """The edges between a query and an item, the largest first. Their weights sum to the link score.

        Args:
            query, item: a query's and an item's attributes: {"occupation": "programmer"}, {"tags": ["sci-fi", "new"]}.

        Returns: `Edge`s: query_column, query_value, item_column, item_value, weight. The fitted probability is
            sigmoid(bias + their sum).
        Raises: ValueError if a column is missing.
        """
        name = "Links.explain"
        return self._between(self.queries.encode_one(name, query), self.items.encode_one(name, item))

    def weigh(self, queries: Any) -> LinkWeights:
        """The weights that the queries' links add to item scores, for `Index.search(links=…)`.

        Args:
            queries: a table with the query columns, a row per query.

        Returns: `LinkWeights`, whose `weights` (B, T) belong to the T item values in `values`.
        Raises: ValueError if a column is missing.
        """
        encoded, _ = self.queries.encode("Links.weigh", queries)
        B, wide = len(encoded.starts) - 1, len(self.items.attributes)
        at, of_query = self._leading(encoded)
        linked = np.unique(self._item)
        columns = linked if len(linked) <= FEW else np.unique(self._item[at])
        place = np.zeros(wide + 1, dtype=np.int64)
        place[columns] = np.arange(len(columns))
        # Added in the order of the query's attributes, regardless of the rest of the batch.
        sums = np.bincount(
            of_query * len(columns) + place[self._item[at]], self._weight[at], minlength=B * len(columns)
        )
        weights = torch.from_numpy(sums.reshape(B, len(columns)).astype(np.float32))
        return LinkWeights(weights, tuple(self.items.attributes[n] for n in columns), self, encoded)

    def filter(self, queries: Any, min_weight: float = 0.0) -> list[Expression]:
        """A filter for each query that passes the items to which an edge leads, for `Index.search(where=…)`.

        Args:
            queries: a table with the query columns, a row per query.
            min_weight: an edge counts if its weight is larger.

        Returns: an expression for each query. A query without edges matches no item.
        """
        encoded, _ = self.queries.encode("Links.filter", queries)
        filters: list[Expression] = []
        for row in range(len(encoded.starts) - 1):
            at, _ = self._leading(EncodedAttributes(np.array([0, len(encoded.row(row))]), encoded.row(row)))
            linked = np.unique(self._item[at[self._weight[at] > min_weight]])
            values: dict[str, list[Value]] = {}
            for column, value in (self.items.attributes[n] for n in linked):
                values.setdefault(column, []).append(value)
            values = values or {next(iter(self.items.kinds)): []}
            parts: list[Expression] = [
                Comparison(column, "has_any" if self.items.kinds[column] == "Tags" else "in", tuple(listed))
                for column, listed in values.items()
            ]
            filters.append(parts[0] if len(parts) == 1 else Or(tuple(parts)))
        return filters

    def _edge(self, at: int) -> Edge:
        query, item = self.queries.attributes[self._query[at]], self.items.attributes[self._item[at]]
        return Edge(query[0], query[1], item[0], item[1], float(self._weight[at]))

    def _leading(self, encoded: EncodedAttributes) -> tuple[Ints, Ints]:
        """The edges that start at the rows' attributes, and each edge's row."""
        many = np.diff(self._starts)[encoded.numbers]
        row = np.repeat(np.repeat(np.arange(len(encoded.starts) - 1), encoded.sizes), many)
        return _ranges(self._starts[encoded.numbers], many), row

    def _between(self, query: Ints, item: Ints) -> list[Edge]:
        at, _ = self._leading(EncodedAttributes(np.array([0, len(query)]), query))
        edges = [self._edge(int(n)) for n in at[np.isin(self._item[at], item)]]
        return sorted(edges, key=lambda edge: -edge.weight)

    # --------------------------------------------------------------------------------------------------------- files

    def save(self, path: str | Path) -> None:
        """Write the links to a safetensors file; columns and values are JSON in its metadata.

        An existing file is replaced by an atomic rename: a kill leaves either the old or the new file.

        Args:
            path: the file.

        Raises: OSError if the file cannot be written; the previous content is unchanged then.
        """
        path = read_path("Links.save", "path", path)
        about = {
            "format": FORMAT, "bias": self.bias,
            **{s.who: {"kinds": s.kinds, "attributes": s.attributes} for s in (self.queries, self.items)},
        }  # fmt: skip
        text = json.dumps(about, ensure_ascii=False).encode()
        tensors = {
            "about": torch.frombuffer(bytearray(text), dtype=torch.uint8), "query": torch.from_numpy(self._query),
            "item": torch.from_numpy(self._item), "weight": torch.from_numpy(self._weight),
        }  # fmt: skip
        partial = path.with_name(path.name + ".partial")
        partial.unlink(missing_ok=True)
        try:
            disk.write_file(partial, disk.serialize(tensors))
            disk.rename(partial, path)
            disk.flush_folder(path.resolve().parent)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Links:
        """Load links from a file that `save` wrote.

        Args:
            path: the file.

        Raises: ValueError if there is no file, or if the file holds no links.
        """
        path = read_path("Links.load", "path", path)
        try:
            tensors = read_tensors(path, required=("about", "query", "item", "weight"))
            query, item, weight = (tensors[name].numpy() for name in ("query", "item", "weight"))
            about = parse_json(tensors["about"].numpy().tobytes(), "their description", required=("format", "bias"))
            if about["format"] != FORMAT:
                raise ValueError(f"format {shorten(about['format'])}, not {FORMAT}")
            queries, items = (AttributeEncoder.from_json(who, about.get(who)) for who in ("queries", "items"))
            if not isinstance(about["bias"], float) or not math.isfinite(about["bias"]):
                raise ValueError("a bias that is not a number")
            if weight.dtype != np.float32 or weight.ndim != 1 or not np.isfinite(weight).all():
                raise ValueError("weights that are not numbers")
            for numbers, side in ((query, queries), (item, items)):
                if (
                    numbers.dtype != np.int64
                    or numbers.shape != weight.shape
                    or (len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(side.attributes))
                ):
                    raise ValueError("edges with unknown attributes")
        except ValueError as error:
            raise ValueError(
                f"Links.load: {path} is not a file that Links.save wrote: {str(error).rstrip('.')}."
            ) from None
        return cls(queries, items, query, item, weight, about["bias"])


def _select_columns(name: str, option: str, schema: Any, strict: bool) -> dict[str, Column]:
    if not isinstance(schema, Schema):
        raise ValueError(f"{name}: {option} must be a retrieve.Schema, got {type(schema).__name__}.")
    fitting: dict[str, Column] = {
        column: kind for column, kind in schema.columns.items() if isinstance(kind, (Category, Tags))
    }
    other = next((column for column in schema.columns if column not in fitting), None)
    if strict and other is not None:
        raise ValueError(
            f"{name}: columns in {option} must be Category or Tags, got {other!r}, a {schema.columns[other].kind}: "
            "bin the values into categories."
        )
    if not fitting:
        raise ValueError(f"{name}: {option} must have a Category or Tags column, got {schema!r}.")
    return fitting


def _parse_pairs(name: str, pairs: Any) -> tuple[Any, Any]:
    """Query ids and item ids."""
    first: Any
    second: Any
    if isinstance(pairs, (list, tuple)):
        if any(not isinstance(pair, (list, tuple, np.ndarray)) or len(pair) != 2 for pair in pairs):
            raise ValueError(f"{name}: pairs must be (query, item) pairs.")
        first, second = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    elif isinstance(pairs, (np.ndarray, Tensor)):
        if pairs.ndim != 2 or pairs.shape[1] != 2:
            raise ValueError(f"{name}: pairs must be (pairs, 2), each a query and an item, got {tuple(pairs.shape)}.")
        first, second = pairs[:, 0], pairs[:, 1]
    else:
        columns, _ = read_columns("retrieve", pairs)
        if len(columns) != 2:
            raise ValueError(
                f"{name}: pairs must be a two-column table, queries and items, got {', '.join(map(repr, columns))}."
            )
        first, second = columns.values()
    if not len(first):
        raise ValueError(f"{name}: pairs must hold at least one confirmed pair, got none.")
    return first, second


def _cross(queries: EncodedAttributes, items: EncodedAttributes, q: Ints, i: Ints, wide: int) -> tuple[Ints, Ints]:
    """All attribute pairs in each example, as a · wide + b, and each example's start."""
    first, second = queries.sizes[q], items.sizes[i]
    many = first * second
    starts = np.cumsum(many) - many
    within = np.arange(int(many.sum())) - np.repeat(starts, many)
    deep = np.repeat(second, many)
    a = queries.numbers[np.repeat(queries.starts[q], many) + within // np.maximum(deep, 1)]
    b = items.numbers[np.repeat(items.starts[i], many) + within % np.maximum(deep, 1)]
    return a * wide + b, starts


def _ranges(starts: Ints, sizes: Ints) -> Ints:
    """Concatenate the ranges starts[0], starts[0] + 1, …."""
    ends = np.cumsum(sizes)
    ranges: Ints = np.repeat(starts - (ends - sizes), sizes) + np.arange(int(ends[-1]) if len(ends) else 0)
    return ranges
