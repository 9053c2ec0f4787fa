"""Block graphs that replace cross layers and MLP: each block reads the features or earlier blocks.

h denotes a block's concatenated inputs; v₁ … v_k the vectors in them, with a common width: one per field, and one
derived from each block; x the mean of the inputs as wide as the features x₀, or x₀ if there are none:

    mlp              relu(norm(W h + b))
    fm               W ½ ((Σ v)² − Σ v²) + b               sum over the products of all pairs
    dot              W [v_i · v_j for i < j] + b
    cross            x₀ ⊙ (U V h + b) + x                  rank r: DCN V2, where h is x
    residual-cross   x₀ ⊙ (U (softmax(q kᵀ / τ) v + v) + b) + x,  q, k, v = Vq h, Vk h, Vv h, r numbers each
    gate             2 x ⊙ σ(U V h + b)

The towers read the blocks that no other block reads.

Source: AutoCTR, Song et al. 2020, https://arxiv.org/abs/2007.06434, for block graphs, mlp, fm and dot; the others come
from `tigon.rank.models.lirank.cross_layers`, plus a gate
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tigon.rank.models.lirank.config import LiRankConfig
from tigon.rank.models.lirank.cross_layers import CrossLayer
from tigon.rank.models.lirank.graph import CROSSES, Block, find_outputs
from tigon.rank.models.lirank.towers import Hidden


class Blocks(nn.Module):
    """A graph of blocks.

    Args:
        vectors: widths of the feature vectors, in order.
        config: with the blocks, the common vector width for fm and dot, and the options for mlp and attention.

    Attributes:
        width: output width.
    """

    def __init__(self, vectors: Sequence[int], config: LiRankConfig) -> None:
        super().__init__()
        self.blocks, wide = config.graph, sum(vectors)
        widths, layers = [wide], list[nn.Module]()
        for block in self.blocks:
            if block.kind == "mlp":
                reads = sum(widths[n] for n in block.inputs)
                layers.append(Hidden(reads, block.width, False, config.norm, config.dropout))
            elif block.kind in CROSSES:
                layers.append(Wide(block, widths, config.temperature))
            else:
                layers.append(Pairs(block, vectors, widths, config.width))
            widths.append(wide if block.kind in CROSSES else block.width)
        self.layers = nn.ModuleList(layers)
        self.ends = find_outputs(self.blocks)
        self.width = sum(widths[n] for n in self.ends)

    def forward(self, x: Tensor) -> Tensor:
        """(C, self.width) outputs for features (C, wide)."""
        found = [x]
        for block, layer in zip(self.blocks, self.layers, strict=True):
            reads = [found[n] for n in block.inputs]
            found.append(layer(_join(reads)) if isinstance(layer, Hidden) else layer(x, reads))
        return _join([found[n] for n in self.ends])


def _join(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


class Wide(CrossLayer):
    """A block with the features' width as output: cross, residual-cross or gate.

    Args:
        widths: widths of the features and all earlier blocks.
    """

    def __init__(self, block: Block, widths: Sequence[int], temperature: float) -> None:
        reads = [widths[n] for n in block.inputs]
        super().__init__(widths[0], block.width, block.kind == "residual-cross", temperature, sum(reads))
        self.gates = block.kind == "gate"
        self.wide = [at for at, width in enumerate(reads) if width == widths[0]]

    def forward(self, x0: Tensor, reads: list[Tensor]) -> Tensor:  # type: ignore[override]
        wide = [reads[at] for at in self.wide] or [x0]
        x = wide[0] if len(wide) == 1 else torch.stack(wide).mean(0)
        up: Tensor = self.up(self.project(_join(reads)))
        if self.gates:
            return 2 * x * up.sigmoid().to(x.dtype)
        return torch.addcmul(x, x0, up.to(x.dtype))


class Pairs(nn.Module):
    """Products between vector pairs: fm or dot.

    Args:
        vectors: the feature vectors' widths. widths: widths of the features and all earlier blocks.
        width: common vector width; fields with another width, and all blocks, get a projection matrix.
    """

    pairs: Tensor  # (k (k − 1) / 2,) int64, indices with i < j in the flattened k × k products

    def __init__(self, block: Block, vectors: Sequence[int], widths: Sequence[int], width: int) -> None:
        super().__init__()
        others = [widths[n] for n in block.inputs if n]
        self.kind, self.size = block.kind, width
        self.vectors = list(vectors) if 0 in block.inputs else []
        self.fields = nn.ModuleDict({str(n): nn.Linear(w, width) for n, w in enumerate(self.vectors) if w != width})
        self.others = nn.ModuleList(nn.Linear(w, width) for w in others)
        self.count = len(self.vectors) + len(others)
        if self.count < 2:
            raise ValueError(f"LiRank: blocks: {block} must read two vectors or more to multiply, got one.")
        self.up = nn.Linear(width if self.kind == "fm" else self.count * (self.count - 1) // 2, block.width)
        i, j = torch.triu_indices(self.count, self.count, 1)
        self.register_buffer("pairs", i * self.count + j, persistent=False)

    def forward(self, x0: Tensor, reads: list[Tensor]) -> Tensor:
        parts = x0.split(self.vectors, 1) if self.vectors else ()
        own = [self.fields[str(n)](part) if str(n) in self.fields else part for n, part in enumerate(parts)]
        # The features, if read, come before the blocks.
        others = reads[len(reads) - len(self.others) :]
        v = torch.stack([*own, *(layer(h) for layer, h in zip(self.others, others, strict=True))], 1)
        if self.kind == "fm":
            return self.up(0.5 * (v.sum(1).square() - v.square().sum(1)))  # type: ignore[no-any-return]
        products = (v @ v.transpose(1, 2)).flatten(1)
        # index_select rather than indexing, whose GPU gradient requires a sort.
        return self.up(products.index_select(1, self.pairs))  # type: ignore[no-any-return]


def count_flops(module: nn.Module) -> int:
    """FLOPs per row in a forward pass, for matmuls and pair products: 2 per multiply-add.

    Args:
        module: a `rank.LiRank`, with or without blocks; embedding lookups count as 0.
    """
    count = 0
    for one in module.modules():
        if isinstance(one, nn.Linear):
            count += 2 * one.in_features * one.out_features
        elif isinstance(one, Pairs):
            count += one.size * (4 * one.count if one.kind == "fm" else 2 * one.count**2)
        elif isinstance(one, CrossLayer) and one.attention:
            count += 4 * one.up.in_features**2  # q kᵀ, and its product with v
    return count
