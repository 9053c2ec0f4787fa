"""Liger's norms and other small modules: its arguments, its parameters' names and starts, Tigon's operators.

in_place is an attribute and nothing else: whichever, no gradient that a caller can see is overwritten.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from tigon.integrations.liger.functional import (
    liger_dyt,
    liger_fused_add_rms_norm,
    liger_group_norm,
    liger_layer_norm,
    liger_modulated_rms_norm,
    liger_multi_token_attention,
    liger_poly_norm,
    liger_relu_squared,
    liger_rms_norm,
    liger_softmax,
    liger_sparsemax,
)
from tigon.integrations.liger.options import without_effect
from tigon.ops.embedding import embedding


def _start(name: str, width: int, init_fn: str) -> nn.Parameter:
    if init_fn not in ("ones", "zeros"):
        raise ValueError(f"{name}: init_fn must be 'ones' or 'zeros', got {init_fn!r}.")
    return nn.Parameter(torch.ones(width) if init_fn == "ones" else torch.zeros(width))


class LigerRMSNorm(nn.Module):
    """`tigon.rms_norm` with a learned weight; the result has x's dtype. casting_mode is cast of `tigon.rms_norm`."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = True, row_mode: bool | None = None, elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        without_effect(type(self).__name__, row_mode=(row_mode, None))
        self.elementwise_affine = elementwise_affine
        self.weight = _start(type(self).__name__, hidden_size, init_fn) if elementwise_affine else None
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode = in_place, row_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        return liger_rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode)

    def extra_repr(self) -> str:
        shape = None if self.weight is None else tuple(self.weight.shape)
        return f"{shape}, eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LigerRMSNormForGemma(LigerRMSNorm):
    """`LigerRMSNorm` that multiplies by 1 + weight, with a weight that starts at zero, and rounds once."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 1.0, casting_mode: str = "gemma",
        init_fn: str = "zeros", in_place: bool = True, row_mode: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma2(LigerRMSNormForGemma):
    """As `LigerRMSNormForGemma`."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 1.0, casting_mode: str = "gemma",
        init_fn: str = "zeros", in_place: bool = False, row_mode: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForGemma2):
    """As `LigerRMSNormForGemma`."""


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma2):
    """As `LigerRMSNormForGemma`."""


class LigerRMSNormForGemma3(LigerRMSNorm):
    """As `LigerRMSNormForGemma`; the width is called `dim`, as in Gemma 3."""

    def __init__(
        self, dim: int, eps: float = 1e-6, offset: float = 1.0, casting_mode: str = "gemma", init_fn: str = "zeros",
        in_place: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """`LigerRMSNorm` that rounds once. with_scale=False leaves the weight out."""

    def __init__(
        self, dim: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "gemma", init_fn: str = "ones",
        in_place: bool = False, with_scale: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmer(LigerRMSNormForGemma4):
    """As `LigerRMSNormForGemma4`; dim may be None with with_scale=False."""

    def __init__(
        self, dim: int | None = None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "gemma",
        init_fn: str = "ones", in_place: bool = False, with_scale: bool = True,
    ) -> None:  # fmt: skip
        if dim is None and with_scale:
            raise ValueError("LigerRMSNormForMuseGlimmer: dim must be the width of the weight, got None.")
        super().__init__(dim or 0, eps, offset, casting_mode, init_fn, in_place, with_scale)


class LigerRMSNormForOlmo2(LigerRMSNorm):
    """As `LigerRMSNorm`."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = False, row_mode: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGlm4(LigerRMSNormForOlmo2):
    """As `LigerRMSNorm`."""


class LigerFusedAddRMSNorm(nn.Module):
    """`tigon.add_rms_norm` with a learned weight: forward(x, residual) → (norm of the sum, the sum)."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        without_effect("LigerFusedAddRMSNorm", in_place=(in_place, False))
        self.weight = _start("LigerFusedAddRMSNorm", hidden_size, init_fn)
        self.variance_epsilon, self.offset, self.casting_mode, self.in_place = eps, offset, casting_mode, in_place

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return liger_fused_add_rms_norm(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerModulatedRMSNorm(nn.Module):
    """`liger_modulated_rms_norm` with a learned weight: forward(x, scale, shift)."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = True, elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.elementwise_affine = elementwise_affine
        self.weight = _start("LigerModulatedRMSNorm", hidden_size, init_fn) if elementwise_affine else None
        self.variance_epsilon, self.offset, self.casting_mode, self.in_place = eps, offset, casting_mode, in_place

    def forward(self, hidden_states: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
        return liger_modulated_rms_norm(
            hidden_states, self.weight, scale, shift, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerLayerNorm(nn.Module):
    """`tigon.layer_norm` with a learned weight and bias. In Liger `bias` says how the bias starts; here it is zero.

    impl, mode and backend choose Liger's kernels, and have no effect here.
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones", impl: str | None = None,
        mode: str | None = None, backend: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        without_effect("LigerLayerNorm", impl=(impl, None), mode=(mode, None), backend=(backend, None))
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.weight = _start("LigerLayerNorm", hidden_size, init_fn)
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return liger_layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}"


class LigerGroupNorm(nn.Module):
    """`tigon.group_norm` with a learned weight and bias; the argument bias as in `LigerLayerNorm`."""

    def __init__(
        self, num_channels: int, num_groups: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"
    ) -> None:
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(f"LigerGroupNorm: num_groups must divide num_channels={num_channels}, got {num_groups}.")
        self.num_channels, self.num_groups = num_channels, num_groups
        self.eps = self.variance_epsilon = eps
        self.weight = _start("LigerGroupNorm", num_channels, init_fn)
        self.bias = nn.Parameter(torch.zeros(num_channels))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return liger_group_norm(
            hidden_states, self.weight, self.bias, self.num_channels, self.num_groups, self.variance_epsilon
        )

    def extra_repr(self) -> str:
        return f"num_channels={self.num_channels}, num_groups={self.num_groups}, eps={self.variance_epsilon}"


class LigerDyT(nn.Module):
    """`tigon.dyt` with learned alpha, gamma and, unless beta is False, beta."""

    def __init__(self, hidden_size: int, beta: bool = True, init_alpha: float = 0.5) -> None:
        super().__init__()
        self.hidden_size, self.init_alpha = hidden_size, init_alpha
        self.alpha = nn.Parameter(torch.full((1,), init_alpha))
        self.gamma = nn.Parameter(torch.ones(hidden_size))
        self.beta = nn.Parameter(torch.zeros(hidden_size)) if beta else None

    def forward(self, x: Tensor) -> Tensor:
        return liger_dyt(x, self.alpha, self.gamma, self.beta)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, init_alpha={self.init_alpha}, beta={self.beta is not None}"


class LigerPolyNorm(nn.Module):
    """`tigon.poly_norm` with a weight (3,) that starts at a third each, and a bias () that starts at one."""

    def __init__(self, eps: float = 1e-6, in_place: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1 / 3))
        self.bias = nn.Parameter(torch.tensor(1.0))
        self.variance_epsilon, self.in_place = eps, in_place

    def forward(self, hidden_states: Tensor) -> Tensor:
        return liger_poly_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"eps={self.variance_epsilon}"


class LigerReLUSquared(nn.Module):
    """`tigon.relu2`."""

    def forward(self, x: Tensor) -> Tensor:
        return liger_relu_squared(x)


class LigerSoftmax(nn.Module):
    """`tigon.softmax` over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return liger_softmax(x)


class LigerSparsemax(nn.Module):
    """`tigon.sparsemax` over `dim`."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return liger_sparsemax(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class LigerEmbedding(nn.Module):
    """`tigon.embedding` with a learned weight. At padding_idx the result is 0, whatever the weight holds there."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.weight = nn.Parameter(torch.randn(num_embeddings, embedding_dim))
        if padding_idx is not None:
            with torch.no_grad():
                self.weight[padding_idx] = 0

    def forward(self, indices: Tensor) -> Tensor:
        y = embedding(indices, self.weight, padding_idx=self.padding_idx)
        return y if self.padding_idx is None else y.masked_fill((indices == self.padding_idx).unsqueeze(-1), 0)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}"


class LigerMultiTokenAttention(nn.Module):
    """`liger_multi_token_attention` with a learned weight and bias: forward(scores)."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding: int = 0,
        dilation: int = 1, groups: int = 1, bias: bool = True, sparse: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_channels, self.out_channels, self.groups, self.sparse = in_channels, out_channels, groups, sparse
        self.kernel_size, self.stride = _pair(kernel_size), _pair(stride)
        self.padding, self.dilation = _pair(padding), _pair(dilation)
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *self.kernel_size))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, scores: Tensor) -> Tensor:
        return liger_multi_token_attention(
            scores, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, self.sparse
        )
