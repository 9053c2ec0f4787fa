"""Thin modules over the operators and losses, with the names and arguments of their torch counterparts.

Parameters start as the counterpart's do. There are no modules for `rope`, `qk_norm_rope`, `add_rms_norm` and
`gated_linear`: a model calls those with parameters that its own modules hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, SupportsInt

import torch
from torch import Tensor

from tigon.linear.head import Head, Hidden
from tigon.linear.walk import Walk
from tigon.losses.distillation import Distill, DistillTopK, TopK, distill, distill_topk
from tigon.losses.linear_cross_entropy import linear_cross_entropy
from tigon.losses.options import check_choice, check_positive, check_share
from tigon.losses.policy import GRPO, RLOO, Sampler, grpo, rloo
from tigon.losses.preference import CPO, DPO, KTO, ORPO, Mismatched, SimPO, cpo, dpo, kto, orpo, simpo
from tigon.ops.cross_entropy import check_options, cross_entropy
from tigon.ops.divergence import REDUCTIONS, jsd, kl_div, tvd
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

AnyHead = Head | Tensor | torch.nn.Linear
Reduction = Literal["batchmean", "mean", "sum", "rows"]


def _width(name: str, normalized_shape: int | Sequence[int]) -> int:
    sizes = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if len(sizes) != 1:
        raise ValueError(f"{name}: normalized_shape must name the last dimension alone, got {sizes}.")
    return sizes[0]


class RMSNorm(torch.nn.Module):
    """`tigon.rms_norm` with a weight of its own.

    Args:
        normalized_shape: width N of the last dimension, as N or (N,).
        eps, offset, cast: as in `tigon.rms_norm`. With offset=1.0 the weight starts at zero, as Gemma stores it.
        elementwise_affine: False for no weight.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
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


class LayerNorm(torch.nn.Module):
    """`tigon.layer_norm` with parameters of its own, in place of `torch.nn.LayerNorm` over the last dimension.

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
        self.weight = None if empty is None else torch.nn.Parameter(empty)
        self.bias = None if empty is None or not bias else torch.nn.Parameter(torch.empty_like(empty))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        affine, bias = self.weight is not None, self.bias is not None
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={affine}, bias={bias}"


class GroupNorm(torch.nn.Module):
    """`tigon.group_norm` with parameters of its own, in place of `torch.nn.GroupNorm`.

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
        empty = torch.empty(num_channels, device=device, dtype=dtype) if affine else None
        self.weight = None if empty is None else torch.nn.Parameter(empty)
        self.bias = None if empty is None else torch.nn.Parameter(torch.empty_like(empty))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return group_norm(x, self.num_groups, self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.weight is not None}"


class DyT(torch.nn.Module):
    """`tigon.dyt` with parameters of its own: weight · tanh(alpha · x) + bias, in a norm's place.

    Args:
        normalized_shape: width N of the last dimension, as N or (N,).
        init_alpha: what alpha starts at; weight starts at one, bias at zero.
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
    """silu(gate) · up: forward(gate, up), or forward(gate_up) of its two halves. See `tigon.swiglu`."""

    def __init__(self, *, gate_multiplier: float = 1.0, multiplier: float = 1.0) -> None:
        super().__init__()
        self.multipliers = {"gate_multiplier": gate_multiplier, "multiplier": multiplier}

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return swiglu(gate, up, **self.multipliers)


class GEGLU(torch.nn.Module):
    """gelu(gate) · up: forward(gate, up), or forward(gate_up) of its two halves. See `tigon.geglu`."""

    def __init__(
        self, approximate: Literal["tanh", "none"] = "tanh", *, gate_multiplier: float = 1.0, multiplier: float = 1.0
    ) -> None:
        super().__init__()
        self.approximate = approximate
        self.multipliers = {"gate_multiplier": gate_multiplier, "multiplier": multiplier}

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return geglu(gate, up, approximate=self.approximate, **self.multipliers)


class ReGLU(torch.nn.Module):
    """relu(gate) · up, or relu(gate)² · up where squared: forward(gate, up), or forward(gate_up) of its two halves.
    See `tigon.reglu`."""

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

    def __init__(self, dim: int = -1, *, scale: float = 1.0, causal: bool = False) -> None:
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
    """`tigon.embedding` with a weight of its own, in place of `torch.nn.Embedding`: forward(input).

    Args:
        num_embeddings, embedding_dim: V and H. The weight (V, H) starts normally distributed, its padding row at zero.
        padding_idx: this row gets no gradient; negative ones count from the end.
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


class _Loss(torch.nn.Module):
    """A loss with its options fixed, which it shows."""

    def extra_repr(self) -> str:
        shown = {k: v for k, v in vars(self).items() if not k.startswith("_") and k != "training"}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


class CrossEntropyLoss(_Loss):
    """`tigon.cross_entropy` with its options fixed: forward(logits, target).

    Args:
        weight: (V,) class weights or None; a buffer, as torch.nn.CrossEntropyLoss has it.
        ignore_index: targets that do not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: in [0, 1].
        z_loss: coefficient of lse².
        softcap: c > 0 for c · tanh(scale · logits / c); None for none.
        scale: multiplies the logits.
        inplace: the backward pass writes the gradient over the logits.
        details: also return z-loss, accuracy and predicted classes.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum", "none"] = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        scale: float = 1.0,
        inplace: bool = False,
        details: bool = False,
    ) -> None:
        super().__init__()
        check_options("CrossEntropyLoss", reduction, label_smoothing, softcap, scale, None)
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.z_loss, self.softcap, self.scale = z_loss, softcap, scale
        self.inplace, self.details = inplace, details

    def forward(self, logits: Tensor, target: Tensor, *, divisor: Tensor | float | None = None) -> Any:
        return cross_entropy(
            logits, target, weight=self.weight, ignore_index=self.ignore_index, reduction=self.reduction,
            label_smoothing=self.label_smoothing, z_loss=self.z_loss, softcap=self.softcap, scale=self.scale,
            divisor=divisor, inplace=self.inplace, details=self.details,
        )  # type: ignore[call-overload]  # fmt: skip


class KLDivLoss(_Loss):
    """`tigon.kl_div` with its options fixed: forward(input, target, mask).

    Unlike `torch.nn.KLDivLoss` it takes a target of log-probabilities and divides by the rows, unless told otherwise.

    Args:
        reduction: "batchmean", "mean", "sum" or "rows".
        log_target: False for a target of probabilities.
        temperature: both sides are logits, divided by it and softmaxed here; None: they are not.
    """

    def __init__(
        self,
        *,
        reduction: Reduction = "batchmean",
        log_target: bool = True,
        temperature: float | None = None,
    ) -> None:
        super().__init__()
        check_choice("KLDivLoss", "reduction", reduction, REDUCTIONS)
        check_positive("KLDivLoss", temperature=temperature)
        self.reduction, self.log_target, self.temperature = reduction, log_target, temperature

    def forward(self, input: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        return kl_div(
            input, target, reduction=self.reduction, log_target=self.log_target, temperature=self.temperature, mask=mask
        )


class JSDLoss(_Loss):
    """`tigon.jsd` with its options fixed: forward(input, target, mask).

    Args:
        beta: weight of the teacher in the mixture, in [0, 1].
        reduction: "batchmean", "mean", "sum" or "rows".
        temperature: both sides are logits, divided by it and softmaxed here; None: they are not.
    """

    def __init__(
        self,
        *,
        beta: float = 0.5,
        reduction: Reduction = "batchmean",
        temperature: float | None = None,
    ) -> None:
        super().__init__()
        check_choice("JSDLoss", "reduction", reduction, REDUCTIONS)
        check_share("JSDLoss", beta=beta)
        check_positive("JSDLoss", temperature=temperature)
        self.beta, self.reduction, self.temperature = beta, reduction, temperature

    def forward(self, input: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        return jsd(input, target, beta=self.beta, reduction=self.reduction, temperature=self.temperature, mask=mask)


class TVDLoss(_Loss):
    """`tigon.tvd` with its options fixed: forward(input, target, mask).

    Args:
        reduction: "batchmean", "mean", "sum" or "rows".
        temperature: both sides are logits, divided by it and softmaxed here; None: they are not.
    """

    def __init__(
        self,
        *,
        reduction: Reduction = "batchmean",
        temperature: float | None = None,
    ) -> None:
        super().__init__()
        check_choice("TVDLoss", "reduction", reduction, REDUCTIONS)
        check_positive("TVDLoss", temperature=temperature)
        self.reduction, self.temperature = reduction, temperature

    def forward(self, input: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        return tvd(input, target, reduction=self.reduction, temperature=self.temperature, mask=mask)


class LinearCrossEntropyLoss(_Loss):
    """`tigon.linear_cross_entropy` with its options fixed: forward(x, head, target).

    Args:
        ignore_index: targets that do not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: in [0, 1].
        z_loss: coefficient of lse².
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum", "none"] = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        walk: Walk = Walk(),
    ) -> None:
        super().__init__()
        check_options("LinearCrossEntropyLoss", reduction, label_smoothing, None, 1.0, None)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.z_loss, self.walk = z_loss, walk

    def forward(
        self,
        x: Tensor,
        head: AnyHead,
        target: Tensor,
        *,
        divisor: Tensor | float | None = None,
        valid: SupportsInt | None = None,
    ) -> Tensor:
        return linear_cross_entropy(
            x, head, target, ignore_index=self.ignore_index, reduction=self.reduction,
            label_smoothing=self.label_smoothing, z_loss=self.z_loss, divisor=divisor, walk=_of(self.walk, valid),
        )  # fmt: skip


def _of(walk: Walk, valid: Any) -> Walk:
    """The walk over a batch, of which the host may know how many tokens count."""
    return walk if valid is None else replace(walk, valid=valid)


class GRPOLoss(_Loss):
    """`tigon.losses.grpo` with its options fixed: forward(x, head, target, advantages, old=…, ref=…, sampler=…).

    Args:
        config: the kind of loss and its numbers.
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    def __init__(self, config: GRPO = GRPO(), walk: Walk = Walk()) -> None:
        super().__init__()
        self.config, self.walk = config, walk

    def forward(
        self,
        x: Tensor,
        head: AnyHead,
        target: Tensor,
        advantages: Tensor,
        *,
        old: Tensor | None = None,
        ref: Tensor | Hidden | None = None,
        sampler: Tensor | Sampler | None = None,
        num_items_in_batch: Tensor | float | None = None,
        valid: Iterable[int] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config, walk = self.config, _of(self.walk, valid)
        if num_items_in_batch is not None:
            config = replace(config, num_items_in_batch=num_items_in_batch)
        return grpo(x, head, target, advantages, old=old, ref=ref, sampler=sampler, config=config, walk=walk)


class RLOOLoss(_Loss):
    """`tigon.losses.rloo` with its options fixed: forward(x, head, target, advantages, old=…).

    Args:
        config: the kind of loss and its numbers.
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    def __init__(self, config: RLOO = RLOO(), walk: Walk = Walk()) -> None:
        super().__init__()
        self.config, self.walk = config, walk

    def forward(
        self,
        x: Tensor,
        head: AnyHead,
        target: Tensor,
        advantages: Tensor,
        *,
        old: Tensor | None = None,
        valid: Iterable[int] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return rloo(x, head, target, advantages, old=old, config=self.config, walk=_of(self.walk, valid))


class DPOLoss(_Loss):
    """`tigon.losses.dpo` with its options fixed: forward(x, head, target, ref).

    Args:
        config: the kind of loss and its numbers.
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    def __init__(self, config: DPO = DPO(), walk: Walk = Walk()) -> None:
        super().__init__()
        self.config, self.walk = config, walk

    def forward(
        self,
        x: Tensor,
        head: AnyHead,
        target: Tensor,
        ref: tuple[Tensor, Tensor] | Hidden | None = None,
        *,
        bco_delta: Tensor | float | None = None,
        valid: Iterable[int] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config if bco_delta is None else replace(self.config, bco_delta=bco_delta)
        return dpo(x, head, target, ref, config=config, walk=_of(self.walk, valid))


class ORPOLoss(_Loss):
    """`tigon.losses.orpo` with its options fixed: forward(x, head, target, completion_mask).

    Args:
        config: the kind of loss and its numbers.
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    def __init__(self, config: ORPO = ORPO(), walk: Walk = Walk()) -> None:
        super().__init__()
        self.config, self.walk = config, walk

    def forward(
        self,
        x: Tensor,
        head: AnyHead,
        target: Tensor,
        completion_mask: Tensor | None = None,
        *,
        valid: Iterable[int] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return orpo(x, head, target, completion_mask, config=self.config, walk=_of(self.walk, valid))


class CPOLoss(_Loss):
    """`tigon.losses.cpo` with its options fixed: forward(x, head, target).

    Args:
        config: the kind of loss and its numbers.
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    def __init__(self, config: CPO = CPO(), walk: Walk = Walk()) -> None:
        super().__init__()
        self.config, self.walk = config, walk

    def forward(
        self,
        x: Tensor,
        head: AnyHead,
        target: Tensor,
        *,
        valid: Iterable[int] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return cpo(x, head, target, config=self.config, walk=_of(self.walk, valid))


class SimPOLoss(_Loss):
    """`tigon.losses.simpo` with its options fixed: forward(x, head, target).

    Args:
        config: the kind of loss and its numbers.
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    def __init__(self, config: SimPO = SimPO(), walk: Walk = Walk()) -> None:
        super().__init__()
        self.config, self.walk = config, walk

    def forward(
        self,
        x: Tensor,
        head: AnyHead,
        target: Tensor,
        *,
        valid: Iterable[int] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return simpo(x, head, target, config=self.config, walk=_of(self.walk, valid))


class KTOLoss(_Loss):
    """`tigon.losses.kto` with its options fixed: forward(x, head, target, label, ref=…, kl=…).

    Args:
        config: the kind of loss and its numbers.
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    def __init__(self, config: KTO = KTO(), walk: Walk = Walk()) -> None:
        super().__init__()
        self.config, self.walk = config, walk

    def forward(
        self,
        x: Tensor,
        head: AnyHead,
        target: Tensor,
        label: Tensor,
        *,
        ref: Tensor | Hidden,
        kl: Tensor | float | tuple[Tensor, Tensor] | Mismatched | None = None,
        valid: Iterable[int] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return kto(x, head, target, label, ref=ref, kl=kl, config=self.config, walk=_of(self.walk, valid))


class DistillationLoss(_Loss):
    """`tigon.losses.distill` with its options fixed: forward(x, head, teacher, target).

    Args:
        config: the kind of loss and its numbers.
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    def __init__(self, config: Distill = Distill(), walk: Walk = Walk()) -> None:
        super().__init__()
        self.config, self.walk = config, walk

    def forward(
        self,
        x: Tensor,
        head: AnyHead,
        teacher: Hidden,
        target: Tensor | None = None,
        *,
        divisor: Tensor | float | None = None,
        valid: SupportsInt | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config if divisor is None else replace(self.config, divisor=divisor)
        return distill(x, head, teacher, target, config=config, walk=_of(self.walk, valid))


class TopKDistillationLoss(_Loss):
    """`tigon.losses.distill_topk` with its options fixed: forward(x, head, teacher, target).

    Args:
        config: the kind of loss and its numbers.
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    def __init__(self, config: DistillTopK = DistillTopK(), walk: Walk = Walk()) -> None:
        super().__init__()
        self.config, self.walk = config, walk

    def forward(
        self,
        x: Tensor,
        head: AnyHead,
        teacher: TopK,
        target: Tensor | None = None,
        *,
        divisor: Tensor | float | None = None,
        valid: SupportsInt | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config if divisor is None else replace(self.config, divisor=divisor)
        return distill_topk(x, head, teacher, target, config=config, walk=_of(self.walk, valid))
