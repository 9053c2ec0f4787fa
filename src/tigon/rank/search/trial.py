"""A finished search trial, as plain data."""

from __future__ import annotations

from typing import NamedTuple

from tigon.rank.search.space import Graph


class Trial(NamedTuple):
    """A finished trial. number: trial number. loss: validation log loss. flops: per row."""

    number: int
    graph: Graph
    loss: float
    flops: int
