"""Layer with gated residuals: y = x + σ(x Wg + bg) ⊙ F(LN(x)), F first attention, then SwiGLU.

Source: LiGR, https://arxiv.org/abs/2502.03417
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from tigon.ops.gated import swiglu
from tigon.ops.gated_residual import gated_residual
from tigon.ops.layer_norm import layer_norm
from tigon.rank.models.ligr.config import LiGRConfig

# Attention over (…, H, D) queries, keys and values.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Residual(nn.Module):
    """y = x + σ(x Wg + bg) ⊙ f, or x + f without a gate. The only place where layers add to the residual stream."""

    def __init__(self, config: LiGRConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.width) if config.gate else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, f: Tensor) -> Tensor:
        f = self.dropout(f)
        return x + f if self.gate is None else gated_residual(x, self.gate(x), f)


class Norm(nn.LayerNorm):
    """`tigon.layer_norm` with torch's parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, eps=self.eps)


class LiGRLayer(nn.Module):
    """Attention and SwiGLU, each with a gated residual."""

    def __init__(self, config: LiGRConfig) -> None:
        super().__init__()
        width, self.heads, inner = config.width, config.heads, round(config.expansion * config.width)
        self.attention_norm, self.unit_norm = Norm(width), Norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate_up, self.down = nn.Linear(width, 2 * inner), nn.Linear(inner, width)
        self.attention_residual, self.unit_residual = (Residual(config) for _ in range(2))

    def forward(self, x: Tensor, attend: Attend, kept: slice = slice(None)) -> Tensor:
        """x: (…, N, width). kept: rows to compute after attention; the other rows serve only as keys and values."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        o = attend(q, k, v)[..., kept, :, :].flatten(-2)
        x = self.attention_residual(x[..., kept, :], self.out(o))
        unit: Tensor = self.unit_residual(x, self.down(swiglu(self.gate_up(self.unit_norm(x)))))
        return unit
