"""A finished trial of a search, as plain data."""

from __future__ import annotations

from typing import NamedTuple

from tigon.rank.search.space import Graph


class Trial(NamedTuple):
    """A finished trial. number: of the trial. loss: on the held-out rows. flops: of a row."""

    number: int
    graph: Graph
    loss: float
    flops: int
