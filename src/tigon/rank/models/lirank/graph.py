"""Block graphs as plain data: each block's kind and inputs, and JSON conversion.

`tigon.rank.models.lirank.blocks` defines the computation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from tigon.data.arrow import nearest

Kind = Literal["mlp", "fm", "dot", "cross", "residual-cross", "gate"]
KINDS: tuple[str, ...] = get_args(Kind)
# Kinds for which width is a rank; their output has the features' width.
CROSSES: tuple[str, ...] = ("cross", "residual-cross", "gate")


class Block(NamedTuple):
    """A graph layer.

    Attributes:
        kind: "mlp", "fm", "dot", "cross", "residual-cross" or "gate".
        width: output width for mlp, fm and dot; rank for the others, whose output has the features' width.
        inputs: input numbers: 0 for the features, n for the n-th block, which must precede this block.
    """

    kind: str
    width: int
    inputs: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.width} of {', '.join('x' if n == 0 else str(n) for n in self.inputs)}"


def parse_blocks(told: Sequence[Block | Mapping[str, Any]]) -> tuple[Block, ...]:
    """Parse and validate blocks: each must read something, and only earlier blocks.

    Args:
        told: `Block`s, or dicts with their attributes, as in JSON.
    Raises: ValueError for blocks that do not form a graph from the features to the towers.
    """
    if isinstance(told, (str, Mapping)) or not isinstance(told, Sequence) or not told:
        raise ValueError(
            "LiRank: blocks must be a list of blocks, such as {'kind': 'mlp', 'width': 64, 'inputs': [0]}: otherwise "
            f"no path leads from the features to the towers; got {told!r}."
        )
    result = tuple(_block(number, one) for number, one in enumerate(told, 1))
    for number, (kind, width, inputs) in enumerate(result, 1):
        said = f"LiRank: blocks: block {number}, {kind},"
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"LiRank: blocks: there is no kind {kind!r}; {nearest(str(kind), list(KINDS))}")
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ValueError(f"{said} must have a positive width, got {width!r}.")
        if not inputs:
            raise ValueError(
                f"{said} must read the features, 0, or an earlier block (else no path leads to the block), got []."
            )
        for n in inputs:
            if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < number:
                raise ValueError(
                    f"{said} must read the features, 0, or an earlier block, from 1 to {number - 1}, got {n!r}."
                    if number > 1
                    else f"{said} is the first and can read only the features, 0, got {n!r}."
                )
        if len(set(inputs)) < len(inputs):
            raise ValueError(f"{said} must read each input once, got {list(inputs)}.")
    return result


def _block(number: int, told: Any) -> Block:
    if isinstance(told, Block):
        return told
    names = Block._fields
    if not isinstance(told, Mapping) or set(told) != set(names) or not isinstance(told["inputs"], (list, tuple)):
        raise ValueError(
            f"LiRank: blocks: block {number} must have {', '.join(names)}, the last a list, and nothing else, got "
            f"{told!r}."
        )
    return Block(told["kind"], told["width"], tuple(told["inputs"]))


def blocks_to_json(blocks: Sequence[Block]) -> str:
    """JSON list, one block per line: {"kind": …, "width": …, "inputs": […]}."""
    return "[\n  " + ",\n  ".join(json.dumps(block._asdict()) for block in blocks) + "\n]\n"


def find_outputs(blocks: Sequence[Block]) -> list[int]:
    """Numbers of the blocks that no other block reads, from 1."""
    read = {n for block in blocks for n in block.inputs}
    return [n for n in range(1, len(blocks) + 1) if n not in read]
