"""Blocks in place of cross layers and MLP: a graph of layers that each read the features, or blocks before them.

With h all that a block reads, side by side; v₁ … v_k the vectors in it, those of the fields and one made of each
block, all of one width; and x the mean of what it reads that is as wide as the features x₀, or x₀ where nothing is:

    mlp              relu(norm(W h + b))
    fm               W ½ ((Σ v)² − Σ v²) + b               the products of all pairs, summed
    dot              W [v_i · v_j for i < j] + b
    cross            x₀ ⊙ (U V h + b) + x                  of rank r: DCN V2, where h is x
    residual-cross   x₀ ⊙ (U (softmax(q kᵀ / τ) v + v) + b) + x,  q, k, v = Vq h, Vk h, Vv h, r numbers each
    gate             2 x ⊙ σ(U V h + b)

What the towers read are the blocks that no other block reads.

Source: AutoCTR, Song et al. 2020, https://arxiv.org/abs/2007.06434, for graphs of blocks, mlp, fm and dot; the others
are those of `tigon.rank.features.cross`, and a gate
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from tigon.data.arrow import nearest
from tigon.rank.features.cross import CrossLayer
from tigon.rank.features.towers import Hidden, Normed, check_norm
from tigon.rank.kernels.outer_softmax import outer_softmax

Kind = Literal["mlp", "fm", "dot", "cross", "residual-cross", "gate"]
KINDS: tuple[str, ...] = get_args(Kind)
# The kinds whose width is a rank, and that come out as wide as the features.
CROSSES: tuple[str, ...] = ("cross", "residual-cross", "gate")


class Block(NamedTuple):
    """A layer of a graph.

    Attributes:
        kind: "mlp", "fm", "dot", "cross", "residual-cross" or "gate".
        width: of what comes out of mlp, fm and dot; the rank of the others, which come out as wide as the features.
        inputs: what it reads: 0 is the features, n the n-th block, which comes before it.
    """

    kind: str
    width: int
    inputs: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.width} of {', '.join('x' if n == 0 else str(n) for n in self.inputs)}"


def blocks_of(told: Sequence[Block | Mapping[str, Any]]) -> tuple[Block, ...]:
    """Blocks as `Block`s, checked: each reads something, and nothing that comes behind it.

    Args:
        told: `Block`s, or dicts of their attributes, as JSON holds them.
    Raises: ValueError for blocks that make no graph from the features to the towers.
    """
    if isinstance(told, (str, Mapping)) or not isinstance(told, Sequence) or not told:
        raise ValueError(
            "LiRank: blocks must be a list of blocks, such as {'kind': 'mlp', 'width': 64, 'inputs': [0]}: without one "
            f"no path leads from the features to the towers; got {told!r}."
        )
    found = tuple(_block(number, one) for number, one in enumerate(told, 1))
    for number, (kind, width, inputs) in enumerate(found, 1):
        said = f"LiRank: blocks: block {number}, {kind},"
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"LiRank: blocks: there is no kind {kind!r}; {nearest(str(kind), list(KINDS))}")
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ValueError(f"{said} must have a positive width, got {width!r}.")
        if not inputs:
            raise ValueError(f"{said} must read the features, 0, or a block before it: no path leads to it, got [].")
        for n in inputs:
            if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < number:
                raise ValueError(
                    f"{said} must read the features, 0, or a block before it, from 1 to {number - 1}, got {n!r}."
                    if number > 1
                    else f"{said} is the first and can read the features alone, 0, got {n!r}."
                )
        if len(set(inputs)) < len(inputs):
            raise ValueError(f"{said} must read each of its inputs once, got {list(inputs)}.")
    return found


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
    """Blocks as JSON, a line each: a list of {"kind": …, "width": …, "inputs": […]}."""
    return "[\n  " + ",\n  ".join(json.dumps({**b._asdict(), "inputs": list(b.inputs)}) for b in blocks) + "\n]\n"


def unread(blocks: Sequence[Block]) -> list[int]:
    """The numbers of the blocks that no other block reads, from 1."""
    read = {n for block in blocks for n in block.inputs}
    return [n for n in range(1, len(blocks) + 1) if n not in read]


class Blocks(nn.Module):
    """A graph of blocks.

    Args:
        blocks: as `blocks_of` returns them.
        vectors: the widths of the vectors that the features are made of, in their order.
        width: of the vectors of fm and dot. norm, dropout: of mlp. temperature: τ.

    Attributes:
        width: of what comes out.
    """

    def __init__(
        self, blocks: Sequence[Block], vectors: Sequence[int], width: int, norm: Normed, dropout: float,
        temperature: float,
    ) -> None:  # fmt: skip
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"LiRank: temperature must be positive, got {temperature}.")
        check_norm(norm)
        self.blocks, wide = tuple(blocks), sum(vectors)
        widths, layers = [wide], list[nn.Module]()
        for block in self.blocks:
            reads = [widths[n] for n in block.inputs]
            if block.kind == "mlp":
                layers.append(Hidden(sum(reads), block.width, False, norm, dropout))
            elif block.kind in CROSSES:
                layers.append(Wide(block, widths, temperature))
            else:
                layers.append(Pairs(block, vectors, [w for n, w in zip(block.inputs, reads, strict=True) if n], width))
            widths.append(wide if block.kind in CROSSES else block.width)
        self.layers = nn.ModuleList(layers)
        self.ends = unread(self.blocks)
        self.width = sum(widths[n] for n in self.ends)

    def forward(self, x: Tensor) -> Tensor:
        """(C, self.width) of features (C, wide)."""
        found = [x]
        for block, layer in zip(self.blocks, self.layers, strict=True):
            reads = [found[n] for n in block.inputs]
            if isinstance(layer, Hidden):
                found.append(layer(torch.cat(reads, 1) if len(reads) > 1 else reads[0]))
            else:
                found.append(layer(x, reads))
        ends = [found[n] for n in self.ends]
        return torch.cat(ends, 1) if len(ends) > 1 else ends[0]


class Wide(nn.Module):
    """A block that comes out as wide as the features: cross, residual-cross or gate.

    Args:
        widths: of the features and of the blocks before it.
    """

    def __init__(self, block: Block, widths: Sequence[int], temperature: float) -> None:
        super().__init__()
        self.kind, self.rank, self.temperature = block.kind, block.width, temperature
        reads = [widths[n] for n in block.inputs]
        self.wide = [at for at, width in enumerate(reads) if width == widths[0]]
        self.down = nn.Linear(sum(reads), (3 if self.attention else 1) * block.width, bias=False)
        self.up = nn.Linear(block.width, widths[0])

    @property
    def attention(self) -> bool:
        return self.kind == "residual-cross"

    def forward(self, x0: Tensor, reads: list[Tensor]) -> Tensor:
        h = self.down(torch.cat(reads, 1) if len(reads) > 1 else reads[0])
        if self.attention:
            h = outer_softmax(h, self.temperature, residual=True)
        wide = [reads[at] for at in self.wide] or [x0]
        x = wide[0] if len(wide) == 1 else torch.stack(wide).mean(0)
        up: Tensor = self.up(h)
        if self.kind == "gate":
            return 2 * x * up.sigmoid().to(x.dtype)
        return torch.addcmul(x, x0, up.to(x.dtype))


class Pairs(nn.Module):
    """The products of pairs of vectors: fm or dot.

    Args:
        vectors: widths of those of the features. others: widths of the blocks that it reads.
        width: of all vectors here; a field of another width gets a matrix, and so does each block.
    """

    pairs: Tensor  # (k (k − 1) / 2,) int64, which of k × k products are of i < j

    def __init__(self, block: Block, vectors: Sequence[int], others: Sequence[int], width: int) -> None:
        super().__init__()
        self.kind, self.size, self.inputs = block.kind, width, block.inputs
        self.vectors = list(vectors) if 0 in block.inputs else []
        self.fields = nn.ModuleDict({str(n): nn.Linear(w, width) for n, w in enumerate(self.vectors) if w != width})
        self.others = nn.ModuleList(nn.Linear(w, width) for w in others)
        self.count = len(self.vectors) + len(others)
        if self.count < 2:
            raise ValueError(f"LiRank: blocks: {block} must read two vectors or more, which have a product, got one.")
        self.up = nn.Linear(width if self.kind == "fm" else self.count * (self.count - 1) // 2, block.width)
        i, j = torch.triu_indices(self.count, self.count, 1)
        self.register_buffer("pairs", i * self.count + j, persistent=False)

    def forward(self, x0: Tensor, reads: list[Tensor]) -> Tensor:
        made = (
            [layer(h) for layer, h in zip(self.others, reads[-len(self.others) :], strict=True)] if self.others else []
        )
        v = torch.stack([*self._fields(x0), *made], 1)
        if self.kind == "fm":
            return self.up(0.5 * (v.sum(1).square() - v.square().sum(1)))  # type: ignore[no-any-return]
        products = (v @ v.transpose(1, 2)).flatten(1)
        # Not by indexing, whose gradient on a GPU is a sort.
        return self.up(products.index_select(1, self.pairs))  # type: ignore[no-any-return]

    def _fields(self, x0: Tensor) -> list[Tensor]:
        parts = x0.split(self.vectors, 1) if self.vectors else ()
        return [self.fields[str(n)](part) if str(n) in self.fields else part for n, part in enumerate(parts)]


def flops(module: nn.Module) -> int:
    """The FLOPs of a row in a forward pass, of products of matrices and of pairs: 2 for each product and its sum.

    Args:
        module: a `rank.LiRank`, with blocks or without; look-ups of embeddings are none.
    """
    count = 0
    for one in module.modules():
        if isinstance(one, nn.Linear):
            count += 2 * one.in_features * one.out_features
        elif isinstance(one, Pairs):
            count += one.size * (4 * one.count if one.kind == "fm" else 2 * one.count**2)
        elif isinstance(one, (Wide, CrossLayer)) and one.attention:
            rank = one.rank if isinstance(one, Wide) else one.up.in_features
            count += 4 * rank * rank  # q kᵀ, and its product with v
    return count
