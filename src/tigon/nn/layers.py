"""Norms, activations, softmax and embedding as modules, with the parameters of their torch counterparts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

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

Shape = int | Sequence[int]
Device = torch.device | str | None


def _width(name: str, normalized_shape: Shape) -> int:
    sizes = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if len(sizes) != 1:
        raise ValueError(f"{name}: normalized_shape must name the last dimension alone, got {sizes}.")
    return sizes[0]


class OptionsModule(torch.nn.Module):
    """A module without parameters, with a function's keyword arguments as options, which its repr shows."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


# -------------------------------------------------------------------------------------------------------------- norms


class RMSNorm(torch.nn.RMSNorm):
    """`tigon.rms_norm` with a learned weight, in place of `torch.nn.RMSNorm` over the last dimension.

    Args:
        normalized_shape: width N of the last dimension, as N or (N,).
        eps, offset, cast: as in `tigon.rms_norm`. With offset=1.0 the weight starts at zero, as Gemma stores it.
        elementwise_affine: False for no weight.
    """

    def __init__(
        self, normalized_shape: Shape, eps: float | None = None, elementwise_affine: bool = True, *,
        offset: float = 0.0, cast: Literal["llama", "gemma", "none"] = "llama", device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.offset, self.cast = offset, cast  # first: torch's __init__ resets the weight
        super().__init__(_width("RMSNorm", normalized_shape), eps, elementwise_affine, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps, offset=self.offset, cast=self.cast)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, offset={self.offset}, cast={self.cast!r}"


class LayerNorm(torch.nn.LayerNorm):
    """`tigon.layer_norm` with learned parameters, in place of `torch.nn.LayerNorm` over the last dimension.

    Args:
        normalized_shape: width N of the last dimension, as N or (N,).
        eps: as in `tigon.layer_norm`.
        elementwise_affine: False for neither weight nor bias. bias: False for no bias.
    """

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True, *,
        device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        width = _width("LayerNorm", normalized_shape)
        super().__init__(width, eps, elementwise_affine, bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, eps=self.eps)


class GroupNorm(torch.nn.GroupNorm):
    """`tigon.group_norm` with learned parameters, in place of `torch.nn.GroupNorm`.

    Args:
        num_groups, eps: as in `tigon.group_norm`.
        num_channels: C.
        affine: False for neither weight nor bias.
    """

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, *, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(f"GroupNorm: num_groups must divide num_channels={num_channels}, got {num_groups}.")
        super().__init__(num_groups, num_channels, eps, affine, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return group_norm(x, self.num_groups, self.weight, self.bias, eps=self.eps)


class DyT(torch.nn.Module):
    """`tigon.dyt` with learned parameters: weight · tanh(alpha · x) + bias, in a norm's place.

    Args:
        normalized_shape: width N of the last dimension, as N or (N,).
        init_alpha: the initial value of alpha; weight starts at one, bias at zero.
        bias: False for no bias.
    """

    def __init__(
        self, normalized_shape: Shape, init_alpha: float = 0.5, bias: bool = True, *, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.init_alpha, width = init_alpha, _width("DyT", normalized_shape)
        self.alpha = torch.nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.weight = torch.nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(width, device=device, dtype=dtype)) if bias else None
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

    def __init__(self, eps: float = 1e-6, *, device: Device = None, dtype: torch.dtype | None = None) -> None:
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


# -------------------------------------------------------------------------------------------------------- activations


class _Gated(OptionsModule):
    """act(gate) · up: forward(gate, up), or forward(gate_up) with both halves packed."""

    function: ClassVar[Callable[..., Tensor]]

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return type(self).function(gate, up, **self.options)


class SwiGLU(_Gated):
    """silu(gate) · up: forward(gate, up), or forward(gate_up) with both halves packed. See `tigon.swiglu`."""

    function = staticmethod(swiglu)

    def __init__(self, *, gate_multiplier: float = 1.0, multiplier: float = 1.0) -> None:
        super().__init__(gate_multiplier=gate_multiplier, multiplier=multiplier)


class GEGLU(_Gated):
    """gelu(gate) · up: forward(gate, up), or forward(gate_up) with both halves packed. See `tigon.geglu`."""

    function = staticmethod(geglu)

    def __init__(
        self, approximate: Literal["tanh", "none"] = "tanh", *, gate_multiplier: float = 1.0, multiplier: float = 1.0
    ) -> None:
        super().__init__(approximate=approximate, gate_multiplier=gate_multiplier, multiplier=multiplier)


class ReGLU(_Gated):
    """relu(gate) · up, or relu(gate)² · up where squared: forward(gate, up), or forward(gate_up) with both halves
    packed. See `tigon.reglu`.
    """

    function = staticmethod(reglu)

    def __init__(self, squared: bool = False, *, gate_multiplier: float = 1.0, multiplier: float = 1.0) -> None:
        super().__init__(squared=squared, gate_multiplier=gate_multiplier, multiplier=multiplier)


class ReLU2(OptionsModule):
    """relu(x)² · multiplier. See `tigon.relu2`."""

    def __init__(self, *, multiplier: float = 1.0) -> None:
        super().__init__(multiplier=multiplier)

    def forward(self, x: Tensor) -> Tensor:
        return relu2(x, **self.options)


class Softmax(OptionsModule):
    """`tigon.softmax` over `dim`, in place of `torch.nn.Softmax`: forward(x, mask).

    Args:
        dim, scale, causal: as in `tigon.softmax`.
    """

    def __init__(self, dim: int, *, scale: float = 1.0, causal: bool = False) -> None:
        super().__init__(dim=dim, scale=scale, causal=causal)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return softmax(x, mask=mask, **self.options)


class Sparsemax(OptionsModule):
    """`tigon.sparsemax` over `dim`."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__(dim=dim)

    def forward(self, x: Tensor) -> Tensor:
        return sparsemax(x, **self.options)


class Embedding(torch.nn.Embedding):
    """`tigon.embedding` with a learned weight, in place of `torch.nn.Embedding`: forward(input).

    Args:
        num_embeddings, embedding_dim: V and H. The weight (V, H) starts normally distributed, its padding row at zero.
        padding_idx: this row gets no gradient; negative indices count from the end.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, *, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        return embedding(input, self.weight, padding_idx=self.padding_idx)
