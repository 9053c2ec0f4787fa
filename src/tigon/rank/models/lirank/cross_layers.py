"""Cross layers: feature products whose degree grows by one per layer, with low-rank matrices.

    dcn        h = V x_l                                      x_{l+1} = x₀ ⊙ (U h + b) + x_l
    residual   q, k, v = Vq x_l, Vk x_l, Vv x_l
               h = softmax(q kᵀ / τ) v + v

Attention runs between the r numbers in h. The r × r matrix per row is never materialised.

Source: DCN V2, Wang et al. 2021, https://arxiv.org/abs/2008.13535; residual: LiRank, Borisyuk et al. 2024,
https://arxiv.org/abs/2402.06859, section 3.2
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.rank.kernels.crossed_sum import crossed_sum
from tigon.rank.kernels.outer_softmax import outer_softmax
from tigon.rank.models.lirank.config import Cross
from tigon.rank.models.lirank.padded_linear import is_plain


class CrossLayer(nn.Module):
    """Computes x_{l+1} from x₀ and x_l.

    Args:
        width: width of x. rank: r, for U and V; None, without attention, for a full matrix.
        attention: whether the numbers in h attend to each other. temperature: τ.
        inputs: width that V reads; None: `width`.
    """

    def __init__(
        self, width: int, rank: int | None, attention: bool, temperature: float, inputs: int | None = None
    ) -> None:
        super().__init__()
        self.attention, self.temperature = attention, temperature
        self.down = None if rank is None else nn.Linear(inputs or width, (3 if attention else 1) * rank, bias=False)
        self.up = nn.Linear(width if rank is None else rank, width)

    def project(self, x: Tensor) -> Tensor:
        """h, the rank's numbers."""
        h = x if self.down is None else self.down(x)
        return outer_softmax(h, self.temperature, residual=True) if self.attention else h

    def forward(self, x0: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """x_{l+1}, and x₀ for the next layer, so that dx₀ accumulates within each layer's backward."""
        h = self.project(x)
        if not is_plain(self.up):
            return torch.addcmul(x, x0, self.up(h).to(x.dtype)), x0
        # Fuse the bias here: the backward pass reads u anyway and also sums the bias gradient.
        u = F.linear(h, self.up.weight)
        return crossed_sum(x0, u.to(x.dtype), x, self.up.bias)


class CrossLayers(nn.Module):
    """Stacked cross layers.

    Args:
        kind: "residual" or "dcn". layers: number of layers. width, rank, temperature: as in `CrossLayer`.
    """

    def __init__(self, kind: Cross, layers: int, width: int, rank: int | None, temperature: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CrossLayer(width, rank, kind == "residual", temperature) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x0 = x
        for layer in self.layers:
            x, x0 = layer(x0, x)
        return x
