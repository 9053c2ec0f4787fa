"""Search results."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tigon.data.values import shorten
from tigon.retrieve.ids import Ids, IntIds, read_ids
from tigon.retrieve.links.links import Edge
from tigon.retrieve.links.resolve import HitLinks


class ScoreBreakdown(NamedTuple):
    """The parts of a hit's score: score = vectors + the sum of edge weights, up to rounding.

    Attributes:
        id: the item's id. score: as in `Hits.scores`.
        vectors: alpha times the vector score.
        edges: the links from query attributes to item attributes, the largest weight first.
    """

    id: int | str
    score: float
    vectors: float
    edges: list[Edge]


class Hits:
    """The best items for each query, best first.

    Attributes:
        scores: (B, k) fp32, on the index's device; −inf where fewer than k items pass. For metric "l2" the negative
            squared distance, for "cosine" the cosine.
        ids: (B, k), item ids: for integer ids int64 on the index's device, −1 where there is no item; for string ids a
            numpy array with None there.
        exact: (B,) bool, whether no passing item has a higher score than the returned items.
    """

    def __init__(
        self, scores: Tensor, keys: Tensor, exact: Tensor, ids: Ids | None, links: HitLinks | None = None
    ) -> None:
        self.scores, self.exact = scores, exact
        self._keys, self._ids, self._links = keys, ids, links

    @property
    def ids(self) -> Tensor | npt.NDArray[Any]:
        """The item ids, as described in the class docstring."""
        if self._ids is None or isinstance(self._ids, IntIds):
            return self._keys
        return self._ids.to_ids(self._keys.cpu().numpy())

    def __len__(self) -> int:
        return int(self.scores.shape[0])

    def __repr__(self) -> str:
        B, k = self.scores.shape
        return f"Hits of {B:,} {'query' if B == 1 else 'queries'}, k = {k}"

    def _list_hits(self) -> tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
        """All hits' ids, query by query, with each hit's query, rank and score."""
        keys = self._keys.cpu().numpy()
        query, rank = np.nonzero(self.scores.cpu().numpy() > -np.inf)
        kept = keys[query, rank]
        ids = kept if self._ids is None else self._ids.to_ids(kept)
        return ids, {"query": query, "rank": rank, "score": self.scores.cpu().numpy()[query, rank]}

    def explain(self) -> list[list[ScoreBreakdown]]:
        """Break each query's hits down into score parts, best first. Without links there is one part.

        The links are those to the attributes that an item had at search time.

        Returns: for each query a list with `ScoreBreakdown`s: id, score, vectors, edges.
        """
        ids, hits = self._list_hits()
        has = None if self._links is None else self._links.test()
        parts: list[list[ScoreBreakdown]] = [[] for _ in range(len(self))]
        for id, query, rank, score in zip(
            ids.tolist(), hits["query"].tolist(), hits["rank"].tolist(), hits["score"].tolist(), strict=True
        ):
            edges: list[Edge] = []
            vectors = score
            if self._links is not None and has is not None:
                linked = self._links.links
                there = has[query, rank].nonzero()[:, 0].tolist()
                edges = linked.given.edges(query, [linked.values[tag] for tag in there])
                vectors -= sum(edge.weight for edge in edges)
            parts[query].append(ScoreBreakdown(id, score, vectors, edges))
        return parts

    def to_pandas(self) -> Any:
        """A pandas.DataFrame with a row per hit: query, rank from 0, id, score."""
        import pandas

        ids, hits = self._list_hits()
        return pandas.DataFrame({"query": hits["query"], "rank": hits["rank"], "id": ids, "score": hits["score"]})

    def take(self, table: Any, id: str | None = None) -> Any:
        """Select the table rows that belong to the hits, with query, rank and score as the first columns.

        Args:
            table: a pyarrow.Table, a pandas or polars DataFrame, or a dict of arrays or lists.
            id: the column that holds the item ids. None: ids are row numbers in the table, from 0.

        Returns: a table in the same format, with a row per hit.
        Raises: ValueError if an id is not in the table, or if the table has a column query, rank or score.
        """
        ids, hits = self._list_hits()
        if not isinstance(table, dict) and not hasattr(table, "column_names") and not hasattr(table, "columns"):
            raise ValueError(
                "Hits.take: table must be a pyarrow.Table, a pandas or polars DataFrame, or a dict of arrays, got "
                f"{type(table).__name__}."
            )
        names = list(table) if isinstance(table, dict) else list(getattr(table, "column_names", None) or table.columns)
        if taken := [name for name in hits if name in names]:
            raise ValueError(f"Hits.take: the table must have no column {taken[0]!r}, which is a field of the hits.")
        rows = self._positions(ids, table, names, id)
        kind = type(table).__module__.split(".")[0]
        if kind == "pyarrow":
            part = table.take(rows)
            return type(table).from_pydict({**hits, **dict(zip(names, part.columns, strict=True))})
        if kind == "pandas":
            import pandas

            return pandas.concat([pandas.DataFrame(hits), table.iloc[rows].reset_index(drop=True)], axis=1)
        if kind == "polars":
            import polars

            return polars.DataFrame(hits).hstack(table[rows])
        taken_columns = {
            name: [values[row] for row in rows] if isinstance(values, (list, tuple)) else values[rows]
            for name, values in table.items()
        }
        return {**hits, **taken_columns}

    def _positions(self, ids: npt.NDArray[Any], table: Any, names: list[str], id: str | None) -> npt.NDArray[np.int64]:
        if id is None:
            if self._ids is not None and self._ids.kind == "str":
                raise ValueError("Hits.take: id must name the column with the ids, which are strings, got None.")
            length = len(next(iter(table.values()), [])) if isinstance(table, dict) else len(table)
            wrong = (ids < 0) | (ids >= length)
            if wrong.any():
                raise ValueError(
                    f"Hits.take: id {ids[wrong][0]} is not a row of the table, which has {length:,} rows: name the id "
                    "column, id=…"
                )
            return ids.astype(np.int64)
        if not isinstance(id, str) or id not in names:
            listed = ", ".join(map(repr, names))
            raise ValueError(f"Hits.take: id must be a column in the table, {listed}, got {shorten(id)}.")
        read = read_ids("Hits.take", table[id])
        place = {value: i for i, value in enumerate(read if isinstance(read, list) else read.tolist())}
        missing = [value for value in ids.tolist() if value not in place]
        if missing:
            raise ValueError(f"Hits.take: id {missing[0]!r} is not in the table's column {id!r}.")
        return np.array([place[value] for value in ids.tolist()], dtype=np.int64)
