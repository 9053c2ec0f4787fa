"""Norms, activations, softmax and embedding as modules, with the parameters of their torch counterparts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from tigon.ops.dyt import dyt
from tigon.ops.embedding import embedding
from tigon.ops.gated import geglu, reglu, swiglu
from tigon.ops.group_norm import group_norm
from tigon.ops.layer_norm import layer_norm
from tigon.ops.poly_norm import poly_norm
from tigon.ops.relu2 import relu2
from tigon.ops.rms_norm import rms_norm
from tigon.ops.softmax import softmax
from tigon.ops.sparsemax import sparsemax


def _width(name: str, normalized_shape: int | Sequence[int]) -> int:
    sizes = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if len(sizes) != 1:
        raise ValueError(f"{name}: normalized_shape must name the last dimension alone, got {sizes}.")
    return sizes[0]


class RMSNorm(torch.nn.Module):
    """`tigon.rms_norm` with a learned weight.

    Args:
        normalized_shape: width N of the last dimension, as N or (N,).
        eps, offset, cast: as in `tigon.rms_norm`. With offset=1.0 the weight starts at zero, as Gemma stores it.
        elementwise_affine: False for no weight.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        offset: float = 0.0,
        cast: Literal["llama", "gemma", "none"] = "llama",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.offset, self.cast = eps, offset, cast
        empty = torch.empty(_width("RMSNorm", normalized_shape), device=device, dtype=dtype)
        self.weight = torch.nn.Parameter(empty) if elementwise_affine else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            torch.nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps, offset=self.offset, cast=self.cast)

    def extra_repr(self) -> str:
        width = None if self.weight is None else self.weight.shape[0]
        return f"{width}, eps={self.eps}, offset={self.offset}, cast={self.cast!r}"


class _Affine(torch.nn.Module):
    """A norm with a weight that starts at one and a bias that starts at zero, or without either."""

    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None

    def _make(self, empty: Tensor | None, bias: bool) -> None:
        """empty: (N,), the weight's memory, or None for neither."""
        self.weight = None if empty is None else torch.nn.Parameter(empty)
        self.bias = None if empty is None or not bias else torch.nn.Parameter(torch.empty_like(empty))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)


class LayerNorm(_Affine):
    """`tigon.layer_norm` with learned parameters, in place of `torch.nn.LayerNorm` over the last dimension.

    Args:
        normalized_shape: width N of the last dimension, as N or (N,).
        eps: as in `tigon.layer_norm`.
        elementwise_affine: False for neither weight nor bias. bias: False for no bias.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape, self.eps = _width("LayerNorm", normalized_shape), eps
        empty = torch.empty(self.normalized_shape, device=device, dtype=dtype) if elementwise_affine else None
        self._make(empty, bias)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        affine, bias = self.weight is not None, self.bias is not None
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={affine}, bias={bias}"


class GroupNorm(_Affine):
    """`tigon.group_norm` with learned parameters, in place of `torch.nn.GroupNorm`.

    Args:
        num_groups, eps: as in `tigon.group_norm`.
        num_channels: C.
        affine: False for neither weight nor bias.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(f"GroupNorm: num_groups must divide num_channels={num_channels}, got {num_groups}.")
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self._make(torch.empty(num_channels, device=device, dtype=dtype) if affine else None, True)

    def forward(self, x: Tensor) -> Tensor:
        return group_norm(x, self.num_groups, self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.weight is not None}"


class DyT(torch.nn.Module):
    """`tigon.dyt` with learned parameters: weight · tanh(alpha · x) + bias, in a norm's place.

    Args:
        normalized_shape: width N of the last dimension, as N or (N,).
        init_alpha: the initial value of alpha; weight starts at one, bias at zero.
        bias: False for no bias.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        init_alpha: float = 0.5,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.init_alpha = init_alpha
        self.alpha = torch.nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        width = _width("DyT", normalized_shape)
        self.weight = torch.nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        empty = torch.empty(width, device=device, dtype=dtype) if bias else None
        self.bias = None if empty is None else torch.nn.Parameter(empty)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.alpha, self.init_alpha)
        torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return dyt(x, self.alpha, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, init_alpha={self.init_alpha}, bias={self.bias is not None}"


class PolyNorm(torch.nn.Module):
    """`tigon.poly_norm` with a weight (3,) that starts at a third each, and a bias (1,) that starts at zero.

    Args:
        eps: as in `tigon.poly_norm`.
    """

    def __init__(
        self, eps: float = 1e-6, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.weight, 1 / 3)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return poly_norm(x, self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class SwiGLU(torch.nn.Module):
    """silu(gate) · up: forward(gate, up), or forward(gate_up) with both halves packed. See `tigon.swiglu`."""

    def __init__(self, *, gate_multiplier: float = 1.0, multiplier: float = 1.0) -> None:
        super().__init__()
        self.multipliers = {"gate_multiplier": gate_multiplier, "multiplier": multiplier}

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return swiglu(gate, up, **self.multipliers)


class GEGLU(torch.nn.Module):
    """gelu(gate) · up: forward(gate, up), or forward(gate_up) with both halves packed. See `tigon.geglu`."""

    def __init__(
        self, approximate: Literal["tanh", "none"] = "tanh", *, gate_multiplier: float = 1.0, multiplier: float = 1.0
    ) -> None:
        super().__init__()
        self.approximate = approximate
        self.multipliers = {"gate_multiplier": gate_multiplier, "multiplier": multiplier}

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return geglu(gate, up, approximate=self.approximate, **self.multipliers)


class ReGLU(torch.nn.Module):
    """relu(gate) · up, or relu(gate)² · up where squared: forward(gate, up), or forward(gate_up) with both halves
    packed. See `tigon.reglu`.
    """

    def __init__(self, squared: bool = False, *, gate_multiplier: float = 1.0, multiplier: float = 1.0) -> None:
        super().__init__()
        self.squared = squared
        self.multipliers = {"gate_multiplier": gate_multiplier, "multiplier": multiplier}

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return reglu(gate, up, squared=self.squared, **self.multipliers)


class ReLU2(torch.nn.Module):
    """relu(x)² · multiplier. See `tigon.relu2`."""

    def __init__(self, *, multiplier: float = 1.0) -> None:
        super().__init__()
        self.multiplier = multiplier

    def forward(self, x: Tensor) -> Tensor:
        return relu2(x, multiplier=self.multiplier)


class Softmax(torch.nn.Module):
    """`tigon.softmax` over `dim`, in place of `torch.nn.Softmax`: forward(x, mask).

    Args:
        dim, scale, causal: as in `tigon.softmax`.
    """

    def __init__(self, dim: int, *, scale: float = 1.0, causal: bool = False) -> None:
        super().__init__()
        self.dim, self.scale, self.causal = dim, scale, causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return softmax(x, self.dim, scale=self.scale, mask=mask, causal=self.causal)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, scale={self.scale}, causal={self.causal}"


class Sparsemax(torch.nn.Module):
    """`tigon.sparsemax` over `dim`."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return sparsemax(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class Embedding(torch.nn.Module):
    """`tigon.embedding` with a learned weight, in place of `torch.nn.Embedding`: forward(input).

    Args:
        num_embeddings, embedding_dim: V and H. The weight (V, H) starts normally distributed, its padding row at zero.
        padding_idx: this row gets no gradient; negative indices count from the end.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.padding_idx = padding_idx
        self.weight = torch.nn.Parameter(torch.empty((num_embeddings, embedding_dim), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx] = 0

    def forward(self, input: Tensor) -> Tensor:
        return embedding(input, self.weight, padding_idx=self.padding_idx)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}, padding_idx={self.padding_idx}"
