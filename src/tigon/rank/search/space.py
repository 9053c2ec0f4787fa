"""The search space as tokens: the block count, and each block's kind, width level and inputs.

A graph is drawn token by token. A mutant differs in one token: a kind, a level, an added or removed input, or an added
or removed block. Graphs are equal if they compute the same function, regardless of block numbering.

Source: AutoCTR, Song et al. 2020, https://arxiv.org/abs/2007.06434
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

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
# Attempts per token before a mutation tries another token.
TRIES = 100


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
                raise ValueError(
                    f"rank.search_blocks: there is no kind {kind!r} of blocks; {nearest(kind, list(KINDS))}"
                )
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
                f"rank.search_blocks: kinds must have more than {' and '.join(self.kinds)}, which multiply vectors by "
                "each other: the features are one vector alone, so that no block can read them."
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

    # ---------------------------------------------------------------------------------------------------- random graphs

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

    # --------------------------------------------------------------------------------------------------------- mutants

    def mutate(self, graph: Graph, random: Random) -> Graph:
        """A graph that differs from this graph in one token."""
        for _ in range(TRIES):
            way = random.choice((_other_kind, _other_level, _other_input, _with_block, _without_block))
            result = way(self, graph, random)
            if result != graph and self.allows(result):
                return result
        return self.draw(random)  # the space has hardly any graph near this graph


def get_level(block: Block) -> int:
    """A block's width level within its kind."""
    return WIDTHS[block.kind].index(block.width)


def _replace_block(graph: Graph, at: int, block: Block) -> Graph:
    return (*graph[:at], block, *graph[at + 1 :])


def _other_kind(space: Space, graph: Graph, random: Random) -> Graph:
    at = random.randrange(len(graph))
    kind = random.choice(space.kinds)
    return _replace_block(graph, at, Block(kind, WIDTHS[kind][get_level(graph[at])], graph[at].inputs))


def _other_level(space: Space, graph: Graph, random: Random) -> Graph:
    at = random.randrange(len(graph))
    return _replace_block(graph, at, graph[at]._replace(width=WIDTHS[graph[at].kind][random.randrange(LEVELS)]))


def _other_input(space: Space, graph: Graph, random: Random) -> Graph:
    at = random.randrange(len(graph))
    inputs = {*graph[at].inputs} ^ {random.randrange(at + 1)}
    return _replace_block(graph, at, graph[at]._replace(inputs=tuple(sorted(inputs))))


def _with_block(space: Space, graph: Graph, random: Random) -> Graph:
    return (*graph, space.draw_block(random, len(graph) + 1))


def _without_block(space: Space, graph: Graph, random: Random) -> Graph:
    """Remove a block; blocks that read it read its inputs instead."""
    gone = random.randrange(len(graph)) + 1
    found = []
    for block in (*graph[: gone - 1], *graph[gone:]):
        reads = {*block.inputs} - {gone} | ({*graph[gone - 1].inputs} if gone in block.inputs else set())
        found.append(block._replace(inputs=tuple(sorted(n - (n > gone) for n in reads))))
    return tuple(found)


# ------------------------------------------------------------------------------------------------- graphs as values


def graph_key(graph: Sequence[Block]) -> str:
    """A canonical key: equal for graphs that differ only in block order."""
    texts = ["x"]
    for block in graph:
        texts.append(f"{block.kind}:{block.width}({','.join(sorted(texts[n] for n in block.inputs))})")
    return ";".join(sorted(texts[1:]))


def graph_tokens(graph: Sequence[Block]) -> dict[str, int | str]:
    """A graph as trial parameters: "blocks", then "1 kind", "1 level" and "1 inputs" for the first block, and so on.

    Inputs are a bit mask: bit n is set if the block reads block n; bit 0 stands for the features.
    """
    result: dict[str, int | str] = {"blocks": len(graph)}
    for number, block in enumerate(graph, 1):
        result[f"{number} kind"] = block.kind
        result[f"{number} level"] = get_level(block)
        result[f"{number} inputs"] = sum(1 << n for n in block.inputs)
    return result


def graph_from_tokens(found: dict[str, int | str]) -> Graph:
    """The graph for the output of `graph_tokens`."""
    graph = []
    for number in range(1, int(found["blocks"]) + 1):
        kind, level, bits = (found[f"{number} {name}"] for name in ("kind", "level", "inputs"))
        inputs = tuple(n for n in range(number) if int(bits) >> n & 1)
        graph.append(Block(str(kind), WIDTHS[str(kind)][int(level)], inputs))
    return tuple(graph)


def depth(graph: Sequence[Block]) -> int:
    """Number of blocks on the longest path."""
    depths = [0]
    for block in graph:
        depths.append(1 + max(depths[n] for n in block.inputs))
    return max(depths)
