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
are those of `tigon.rank.models.lirank.cross_layers`, and a gate
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tigon.rank.kernels.outer_softmax import outer_softmax
from tigon.rank.models.lirank.config import Norm
from tigon.rank.models.lirank.cross_layers import CrossLayer
from tigon.rank.models.lirank.graph import CROSSES, Block, find_outputs
from tigon.rank.models.lirank.towers import Hidden


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
        self, blocks: Sequence[Block], vectors: Sequence[int], width: int, norm: Norm, dropout: float,
        temperature: float,
    ) -> None:  # fmt: skip
        super().__init__()
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
        self.ends = find_outputs(self.blocks)
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


def count_flops(module: nn.Module) -> int:
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
