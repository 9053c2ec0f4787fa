"""Pick the most promising graph: LightGBM, trained to order finished trials by loss.

Features are each block's kind, width and inputs, and sums over blocks that do not depend on the block order. All
finished trials form a single `lambdarank` query, with grades by loss decile.

Source: AutoCTR, Song et al. 2020, https://arxiv.org/abs/2007.06434
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tigon.rank.models.lirank.graph import KINDS, find_outputs
from tigon.rank.search.space import MOST, Graph, Trial, depth, get_level

GRADES, TREES = 10, 60
# LightGBM's maximum rows per query; the newest are kept.
MOST_TRIED = 5000
OPTIONS: dict[str, Any] = {
    "objective": "lambdarank", "verbosity": -1, "num_threads": 1, "deterministic": True, "force_row_wise": True,
    "num_leaves": 8, "min_data_in_leaf": 3, "learning_rate": 0.1, "feature_fraction": 0.8, "feature_pre_filter": False,
    "lambdarank_truncation_level": 100,
}  # fmt: skip


def pick_graph(tried: Sequence[Trial], graphs: Sequence[Graph], seed: int) -> Graph:
    """The graph with the highest score; the first on ties."""
    import lightgbm

    tried = tried[-MOST_TRIED:]
    x = np.stack([vector(one.graph) for one in tried])
    data = lightgbm.Dataset(x, grades([one.loss for one in tried]), group=[len(tried)])
    guide = lightgbm.train({**OPTIONS, "seed": seed}, data, TREES)
    scores = np.asarray(guide.predict(np.stack([vector(graph) for graph in graphs])))
    return graphs[int(scores.argmax())]


def grades(losses: Sequence[float]) -> npt.NDArray[np.int64]:
    """(n,) deciles: 0 for the largest losses, 9 for the smallest."""
    order = np.argsort(np.argsort(-np.asarray(losses), kind="stable"), kind="stable")
    return order * GRADES // len(losses)


def vector(graph: Graph) -> npt.NDArray[np.float64]:
    """A graph as numbers: kind, level and inputs per block, then counts and sums over the blocks."""
    each = np.zeros((MOST, len(KINDS) + 1 + MOST))
    for at, block in enumerate(graph):
        each[at, KINDS.index(block.kind)] = 1
        each[at, len(KINDS)] = 1 + get_level(block)
        each[at, [len(KINDS) + 1 + n for n in block.inputs]] = 1
    counts = each[:, : len(KINDS)].sum(0)
    levels = each[:, : len(KINDS)].T @ each[:, len(KINDS)]
    ends = [graph[n - 1].kind for n in find_outputs(graph)]
    last = [float(kind in ends) for kind in KINDS]
    reads = [len(block.inputs) for block in graph]
    whole = [len(graph), depth(graph), len(ends), sum(reads), float(sum(0 in block.inputs for block in graph))]
    return np.concatenate((each.ravel(), counts, levels, last, whole))
