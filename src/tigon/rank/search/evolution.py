"""Choose the next trial's graph: initially random, then mutants of survivors, selected by a guide.

The newest `AGE` trials are candidates. The `POPULATION` candidates with the lowest sum, rank by loss plus a tenth of
the rank by FLOPs, survive. A parent is drawn with probability proportional to 1 / its rank among the survivors, and the
guide picks one of `MUTANTS` untried graphs that differ from the parent in one respect.

Source: AutoCTR, Song et al. 2020, https://arxiv.org/abs/2007.06434; survival by age: Real et al. 2019, regularized
evolution, https://arxiv.org/abs/1802.01548
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Literal

from tigon.rank.search.guide import pick_graph
from tigon.rank.search.space import TRIES, Graph, Space, Trial, graph_key

Sampler = Literal["evolution", "random"]
FIRST, MUTANTS, AGE, POPULATION = 20, 100, 50, 20
# Weight for the FLOPs rank; the loss rank has weight 1.
FLOPS_SHARE = 0.1
# Two graphs are alike above this fraction of common blocks.
ALIKE = 0.5


def select_survivors(tried: Sequence[Trial]) -> list[Trial]:
    """Possible parents, best first."""
    young = sorted(tried, key=lambda one: one.number)[-AGE:]
    losses, flops = dense_ranks([one.loss for one in young]), dense_ranks([one.flops for one in young])
    score = {one.number: a + FLOPS_SHARE * b for one, a, b in zip(young, losses, flops, strict=True)}
    return sorted(young, key=lambda one: (score[one.number], one.number))[:POPULATION]


def select_distinct(tried: Sequence[Trial], most: int) -> list[Trial]:
    """The best trials such that no two are alike, then the best others if there are fewer than `most`.

    An evolution's best graphs are mutants of one another with nearly equal losses on all rows, so refitting several
    adds little.
    """
    order = sorted(tried, key=lambda one: (one.loss, one.number))
    found: list[Trial] = []
    for one in order:
        if len(found) < most and all(shared_fraction(one.graph, other.graph) <= ALIKE for other in found):
            found.append(one)
    return [*found, *(one for one in order if one not in found)][:most]


def shared_fraction(first: Graph, second: Graph) -> float:
    """Fraction of the two graphs' blocks with a counterpart, same kind and width, in the other graph."""
    one, other = (Counter((block.kind, block.width) for block in graph) for graph in (first, second))
    return 2 * (one & other).total() / (len(first) + len(second))


def dense_ranks(values: Sequence[float]) -> list[int]:
    """Ranks from 0 for the smallest; equal values share a rank."""
    place = {value: n for n, value in enumerate(sorted(set(values)))}
    return [place[value] for value in values]


def choose_graph(
    space: Space, sampler: Sampler, tried: Sequence[Trial], seen: set[str], seed: int, number: int
) -> Graph:
    """Choose a trial's graph.

    Args:
        tried: finished trials. seen: `graph_key` for all graphs with a trial, finished or not.
        seed, number: search seed and trial number; together with `tried` they determine the draw.
    """
    random = Random(f"{seed} {number}")
    if sampler == "random" or len(tried) < FIRST:
        return draw_unseen(space, random, seen)
    living = select_survivors(tried)
    parent = random.choices(living, [1 / (1 + place) for place in range(len(living))])[0].graph
    mutants: dict[str, Graph] = {}
    for _ in range(2 * MUTANTS):  # a small graph has fewer mutants
        found = space.mutate(parent, random)
        if graph_key(found) not in seen:
            mutants.setdefault(graph_key(found), found)
        if len(mutants) == MUTANTS:
            break
    if not mutants:
        return draw_unseen(space, random, seen)
    return pick_graph(tried, list(mutants.values()), seed)


def draw_unseen(space: Space, random: Random, seen: set[str]) -> Graph:
    """A random graph without a trial; if the space is nearly exhausted, possibly a graph with a trial."""
    result = space.draw(random)
    for _ in range(TRIES):
        if graph_key(result) not in seen:
            break
        result = space.draw(random)
    return result
