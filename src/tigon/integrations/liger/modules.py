"""Liger's norms and other small modules: Liger's arguments, parameter names and initial values, Tigon's operators.

in_place is only an attribute: in either case no gradient that a caller can see is overwritten.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tigon.integrations.liger.functional import (
    liger_dyt,
    liger_fused_add_rms_norm,
    liger_group_norm,
    liger_layer_norm,
    liger_poly_norm,
    liger_relu_squared,
    liger_rms_norm,
    liger_softmax,
    liger_sparsemax,
)
from tigon.integrations.liger.options import make_loss_module, without_effect
from tigon.ops.acts import ACTS
from tigon.ops.embedding import embedding
from tigon.ops.gated import geglu, swiglu


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


def _make_norm(name: str, width: str, *, with_scale: bool = False, **defaults: Any) -> type[LigerRMSNorm]:
    """Make a family's class: `LigerRMSNorm` under the family's defaults, with the family's name for the width."""
    own = inspect.signature(LigerRMSNorm).parameters
    names = ["eps", "offset", "casting_mode", "init_fn", "in_place", *(["row_mode"] if width == "hidden_size" else [])]
    parameters = [own["hidden_size"].replace(name=width)]
    parameters += [own[option].replace(default=defaults.get(option, own[option].default)) for option in names]
    parameters += [own["elementwise_affine"].replace(name="with_scale")] if with_scale else []
    signature = inspect.Signature(parameters)

    def initialize(self: LigerRMSNorm, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = {
            {width: "hidden_size", "with_scale": "elementwise_affine"}.get(k, k): v for k, v in bound.arguments.items()
        }
        LigerRMSNorm.__init__(self, **given)

    text = f"`LigerRMSNorm` with {', '.join(f'{k}={v!r}' for k, v in defaults.items())}."
    body = {"__init__": initialize, "__doc__": text, "__module__": __name__, "__signature__": signature}
    return type(name, (LigerRMSNorm,), body)


_GEMMA: dict[str, Any] = {"offset": 1.0, "casting_mode": "gemma", "init_fn": "zeros"}
LigerRMSNormForGemma = _make_norm("LigerRMSNormForGemma", "hidden_size", **_GEMMA)
LigerRMSNormForGemma2 = _make_norm("LigerRMSNormForGemma2", "hidden_size", **_GEMMA, in_place=False)
LigerRMSNormForGemma3 = _make_norm("LigerRMSNormForGemma3", "dim", **_GEMMA, in_place=False)
LigerRMSNormForGemma4 = _make_norm(
    "LigerRMSNormForGemma4", "dim", with_scale=True, casting_mode="gemma", in_place=False
)
LigerRMSNormForQwen3Next = _make_norm("LigerRMSNormForQwen3Next", "hidden_size", **_GEMMA, in_place=False)
LigerRMSNormForOlmo2 = _make_norm("LigerRMSNormForOlmo2", "hidden_size", in_place=False)
LigerRMSNormForGlm4 = _make_norm("LigerRMSNormForGlm4", "hidden_size", in_place=False)


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


LigerReLUSquared = make_loss_module("LigerReLUSquared", liger_relu_squared, "x", "")
LigerSoftmax = make_loss_module("LigerSoftmax", liger_softmax, "x", "")
LigerSparsemax = make_loss_module("LigerSparsemax", liger_sparsemax, "x=input", "dim")


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


class LigerSwiGLUMLP(nn.Module):
    """down_proj(silu(gate_proj(x)) · up_proj(x)), for x (..., D) of any width."""

    acts: tuple[str, ...] = ACTS["silu"].aliases

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__()
        if self.acts and config.hidden_act not in self.acts:
            raise ValueError(
                f"{type(self).__name__}: config.hidden_act must be one of {', '.join(self.acts)}, got "
                f"{config.hidden_act!r}."
            )
        self.config, self.hidden_size = config, config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    # The projections are called as modules, so that an adapter on one of them counts.
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return y


class LigerGEGLUMLP(LigerSwiGLUMLP):
    """down_proj(gelu(gate_proj(x)) · up_proj(x)), gelu by its tanh formula whatever the configuration says."""

    acts = ()

    def __init__(self, config: Any) -> None:
        super().__init__(config)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(geglu(self.gate_proj(x), self.up_proj(x)))
        return y
