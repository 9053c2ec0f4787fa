"""The search space: graphs with random block counts, kinds, widths and inputs.

A mutant differs from its parent in one respect: a kind, a width, an added or removed input, or an added or removed
block. Graphs are equal if they compute the same function, regardless of block numbering.

Source: AutoCTR, Song et al. 2020, https://arxiv.org/abs/2007.06434
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from tigon.data.arrow import nearest
from tigon.rank.models.lirank.graph import KINDS, Block

Graph = tuple[Block, ...]
MOST = 7
LEVELS = 4
# Width by level: output width, or rank.
WIDTHS: dict[str, tuple[int, ...]] = {
    "mlp": (32, 64, 128, 256), "fm": (16, 32, 64, 128), "dot": (16, 32, 64, 128), "cross": (8, 16, 32, 64),
    "residual-cross": (8, 16, 32, 64), "gate": (8, 16, 32, 64),
}  # fmt: skip
PAIRED = ("fm", "dot")
# Attempts to draw a graph that is allowed, and that has no trial.
TRIES = 100


class Trial(NamedTuple):
    """A finished trial. number: trial number. loss: validation log loss. flops: per row."""

    number: int
    graph: Graph
    loss: float
    flops: int


@dataclass(frozen=True)
class Space:
    """The set of allowed graphs.

    Args:
        kinds: allowed block kinds. most: maximum blocks per graph.
        vectors: number of feature vectors; fm and dot need two vectors, and each block they read counts as one.

    Raises: ValueError for a space without a path from the features to the towers, and for unknown kinds.
    """

    kinds: tuple[str, ...] = KINDS
    most: int = MOST
    vectors: int = 2

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                raise ValueError(f"rank.search_blocks: there is no block kind {kind!r}; {nearest(kind, list(KINDS))}")
        if not 1 <= self.most <= MOST:
            raise ValueError(
                f"rank.search_blocks: most must be from 1 to {MOST} blocks, got {self.most}: without a block no path "
                "leads from the features to the towers."
            )
        if not self.kinds:
            raise ValueError(
                f"rank.search_blocks: kinds must name one of {', '.join(KINDS)}, got none: without a block no path "
                "leads from the features to the towers."
            )
        if self.vectors < 2 and not set(self.kinds) - set(PAIRED):
            raise ValueError(
                f"rank.search_blocks: kinds must have more than {' and '.join(self.kinds)}, which multiply "
                "vectors: the features are a single vector, so no block can read the features."
            )

    def allows(self, graph: Sequence[Block]) -> bool:
        """Whether the space contains a graph."""
        return 1 <= len(graph) <= self.most and all(
            block.kind in self.kinds and block.width in WIDTHS[block.kind] and self._reads(block, n)
            for n, block in enumerate(graph, 1)
        )

    def _reads(self, block: Block, number: int) -> bool:
        inputs = block.inputs
        if not inputs or list(inputs) != sorted(set(inputs)) or not 0 <= inputs[0] <= inputs[-1] < number:
            return False
        return block.kind not in PAIRED or len(inputs) - 1 + (self.vectors if inputs[0] == 0 else 1) >= 2

    def draw(self, random: Random) -> Graph:
        """Draw a random graph: uniform block count, kinds and levels; each earlier block is read with probability ½."""
        graph: list[Block] = []
        for _ in range(random.randint(1, self.most)):
            graph.append(self.draw_block(random, len(graph) + 1))
        return tuple(graph)

    def draw_block(self, random: Random, number: int) -> Block:
        """Draw the block with a given number, from 1."""
        while True:
            kind = random.choice(self.kinds)
            inputs = tuple(n for n in range(number) if random.random() < 0.5)
            block = Block(kind, WIDTHS[kind][random.randrange(LEVELS)], inputs)
            if self._reads(block, number):
                return block

    def mutate(self, graph: Graph, random: Random) -> Graph:
        """A graph that differs from this graph in one respect."""
        for _ in range(TRIES):
            result = self._change(graph, random)
            if result != graph and self.allows(result):
                return result
        return self.draw(random)  # the space has hardly any graph near this graph

    def _change(self, graph: Graph, random: Random) -> Graph:
        """Change a random block, or add or remove a block. The result may lie outside the space."""
        at = random.randrange(len(graph))
        block, way = graph[at], random.randrange(5)
        if way == 0:
            return (*graph, self.draw_block(random, len(graph) + 1))
        if way == 1:
            return _remove_block(graph, at + 1)
        if way == 2:
            kind = random.choice(self.kinds)
            block = Block(kind, WIDTHS[kind][get_level(block)], block.inputs)
        elif way == 3:
            block = block._replace(width=random.choice(WIDTHS[block.kind]))
        else:
            block = block._replace(inputs=tuple(sorted({*block.inputs} ^ {random.randrange(at + 1)})))
        return (*graph[:at], block, *graph[at + 1 :])


def _remove_block(graph: Graph, gone: int) -> Graph:
    """Remove a block by its number, from 1; blocks that read it read its inputs instead."""
    result = []
    for block in (*graph[: gone - 1], *graph[gone:]):
        reads = {*block.inputs} - {gone} | ({*graph[gone - 1].inputs} if gone in block.inputs else set())
        result.append(block._replace(inputs=tuple(sorted(n - (n > gone) for n in reads))))
    return tuple(result)


def get_level(block: Block) -> int:
    """A block's width level within its kind."""
    return WIDTHS[block.kind].index(block.width)


def graph_key(graph: Sequence[Block]) -> str:
    """A canonical key: equal for graphs that differ only in block order."""
    texts = ["x"]
    for block in graph:
        texts.append(f"{block.kind}:{block.width}({','.join(sorted(texts[n] for n in block.inputs))})")
    return ";".join(sorted(texts[1:]))


def depth(graph: Sequence[Block]) -> int:
    """Number of blocks on the longest path."""
    depths = [0]
    for block in graph:
        depths.append(1 + max(depths[n] for n in block.inputs))
    return max(depths)
