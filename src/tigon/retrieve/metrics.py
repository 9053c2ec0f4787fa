"""How good answers are: recall, NDCG and MRR of ranked ids against the ids that are right.

Every function takes `ids`, (queries, k), the best first; −1 and None stand for no item. `right` holds a set of ids for
each query; queries without any are left out of the mean.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ranked = npt.NDArray[Any]


def recall(ids: Ranked, right: Sequence[Collection[Any]]) -> float:
    """The share of the right items that were found: the mean over queries of |found ∩ right| / min(k, |right|).

    Args:
        ids: (queries, k). right: of each query.
    Returns: 0 to 1; NaN if no query has a right item.
    Raises: ValueError if right has another length.
    """
    hit, many = _hits(ids, right)
    return _mean(hit.sum(1), np.minimum(many, ids.shape[1]))


def ndcg(ids: Ranked, right: Sequence[Collection[Any]]) -> float:
    """Normalised discounted cumulative gain with gains of 0 and 1: a hit at rank r, from 1, counts 1 / log₂(r + 1).

    Args:
        ids: (queries, k). right: of each query.
    Returns: 0 to 1; NaN if no query has a right item.
    Raises: ValueError if right has another length.
    """
    hit, many = _hits(ids, right)
    discount = 1 / np.log2(np.arange(2, ids.shape[1] + 2))
    best = np.concatenate([[0.0], discount.cumsum()])
    return _mean(hit @ discount, best[np.minimum(many, ids.shape[1])])


def mrr(ids: Ranked, right: Sequence[Collection[Any]]) -> float:
    """Mean reciprocal rank: 1 / rank of the first right item, 0 where none was found.

    Args:
        ids: (queries, k). right: of each query.
    Returns: 0 to 1; NaN if no query has a right item.
    Raises: ValueError if right has another length.
    """
    hit, many = _hits(ids, right)
    first = np.where(hit.any(1), 1 / (hit.argmax(1) + 1), 0.0) if ids.shape[1] else np.zeros(len(ids))
    return _mean(first, (many > 0).astype(float))


def overlap(ids: Ranked, others: Ranked) -> float:
    """The share of other answers' items that are in these: the recall of one search against another.

    Args:
        ids, others: (queries, k).
    Returns: 0 to 1; NaN if the other answers are empty.
    Raises: ValueError if they have different numbers of queries.
    """
    return recall(ids, [[name for name in row if name is not None and name != -1] for row in others.tolist()])


def _hits(ids: Ranked, right: Sequence[Collection[Any]]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Whether each item is right, (queries, k), and how many right ones each query has."""
    if len(right) != len(ids):
        raise ValueError(f"metrics: right must have a set of ids for each of {len(ids):,} queries, got {len(right):,}.")
    sets = [set(one) for one in right]
    rows = [[name in one for name in row] for row, one in zip(ids.tolist(), sets, strict=True)]
    hit = np.array(rows, dtype=bool).reshape(ids.shape)
    return hit, np.array([len(one) for one in sets], dtype=np.int64)


def _mean(found: npt.NDArray[Any], best: npt.NDArray[Any]) -> float:
    counted = best > 0
    return float((found[counted] / best[counted]).mean()) if counted.any() else float("nan")
