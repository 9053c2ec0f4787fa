"""Losses as modules with their options fixed; a call takes the tensors, and the numbers that belong to one batch.

Losses of a head share `_HeadLoss`: a frozen object of options, and a walk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, Generic, Literal, SupportsInt, TypeVar

import torch
from torch import Tensor

from tigon.losses.distillation import Distill, DistillTopK, TopK, distill, distill_topk
from tigon.losses.head.head import Head, Hidden
from tigon.losses.head.walk import Walk
from tigon.losses.linear_cross_entropy import linear_cross_entropy
from tigon.losses.options import check_choice, check_positive, check_share
from tigon.losses.policy import GRPO, RLOO, Rollout, grpo, rloo
from tigon.losses.preference import CPO, DPO, KTO, ORPO, SimPO, Unpaired, cpo, dpo, kto, orpo, simpo
from tigon.ops.cross_entropy import check_options, cross_entropy
from tigon.ops.divergence import REDUCTIONS, jsd, kl_div, tvd

AnyHead = Head | Tensor | torch.nn.Linear
Reduction = Literal["batchmean", "mean", "sum", "rows"]
Result = tuple[Tensor, dict[str, Tensor]]
Config = TypeVar("Config")


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

    Args:
        reduction: "mean", "batchmean", "sum" or "rows".
        log_target: True for a target of log-probabilities.
        temperature: both sides are logits, divided by it and softmaxed here; None: they are not.
    """

    def __init__(
        self,
        *,
        reduction: Reduction = "mean",
        log_target: bool = False,
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


class _HeadLoss(_Loss, Generic[Config]):
    """A loss of a head, with its options and its walk fixed.

    Args:
        config: the kind of loss and its numbers; None for the defaults.
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    defaults: ClassVar[Any]
    config: Config

    def __init__(self, config: Config | None = None, walk: Walk = Walk()) -> None:
        super().__init__()
        self.config, self.walk = self.defaults if config is None else config, walk

    def of_batch(self, valid: Any, **numbers: Any) -> tuple[Config, Walk]:
        """Options and walk for one batch: its count of tokens, and the options that are numbers of a batch, or None."""
        given = {name: value for name, value in numbers.items() if value is not None}
        return replace(self.config, **given) if given else self.config, _of(self.walk, valid)  # type: ignore[type-var]


class GRPOLoss(_HeadLoss[GRPO]):
    """`tigon.losses.grpo` with its options fixed: forward(x, head, target, rollout).

    Args:
        config: the kind of loss and its numbers; None for the defaults.
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    defaults = GRPO()

    def forward(
        self,
        x: Tensor,
        head: AnyHead,
        target: Tensor,
        rollout: Rollout | Tensor,
        *,
        num_items_in_batch: Tensor | float | None = None,
        valid: Iterable[int] | None = None,
    ) -> Result:
        config, walk = self.of_batch(valid, num_items_in_batch=num_items_in_batch)
        return grpo(x, head, target, rollout, config=config, walk=walk)


class RLOOLoss(_HeadLoss[RLOO]):
    """`tigon.losses.rloo` with its options fixed: forward(x, head, target, rollout).

    Args:
        config: the kind of loss and its numbers; None for the defaults.
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    defaults = RLOO()

    def forward(
        self, x: Tensor, head: AnyHead, target: Tensor, rollout: Rollout | Tensor, *, valid: Iterable[int] | None = None
    ) -> Result:
        config, walk = self.of_batch(valid)
        return rloo(x, head, target, rollout, config=config, walk=walk)


class DPOLoss(_HeadLoss[DPO]):
    """`tigon.losses.dpo` with its options fixed: forward(x, head, target, ref).

    Args:
        config: the kind of loss and its numbers; None for the defaults.
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    defaults = DPO()

    def forward(
        self,
        x: Tensor,
        head: AnyHead,
        target: Tensor,
        ref: tuple[Tensor, Tensor] | Hidden | None = None,
        *,
        bco_delta: Tensor | float | None = None,
        valid: Iterable[int] | None = None,
    ) -> Result:
        config, walk = self.of_batch(valid, bco_delta=bco_delta)
        return dpo(x, head, target, ref, config=config, walk=walk)


class ORPOLoss(_HeadLoss[ORPO]):
    """`tigon.losses.orpo` with its options fixed: forward(x, head, target, completion_mask).

    Args:
        config: the kind of loss and its numbers; None for the defaults.
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    defaults = ORPO()

    def forward(
        self,
        x: Tensor,
        head: AnyHead,
        target: Tensor,
        completion_mask: Tensor | None = None,
        *,
        valid: Iterable[int] | None = None,
    ) -> Result:
        config, walk = self.of_batch(valid)
        return orpo(x, head, target, completion_mask, config=config, walk=walk)


class CPOLoss(_HeadLoss[CPO]):
    """`tigon.losses.cpo` with its options fixed: forward(x, head, target).

    Args:
        config: the kind of loss and its numbers; None for the defaults.
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    defaults = CPO()

    def forward(self, x: Tensor, head: AnyHead, target: Tensor, *, valid: Iterable[int] | None = None) -> Result:
        config, walk = self.of_batch(valid)
        return cpo(x, head, target, config=config, walk=walk)


class SimPOLoss(_HeadLoss[SimPO]):
    """`tigon.losses.simpo` with its options fixed: forward(x, head, target).

    Args:
        config: the kind of loss and its numbers; None for the defaults.
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    defaults = SimPO()

    def forward(self, x: Tensor, head: AnyHead, target: Tensor, *, valid: Iterable[int] | None = None) -> Result:
        config, walk = self.of_batch(valid)
        return simpo(x, head, target, config=config, walk=walk)


class KTOLoss(_HeadLoss[KTO]):
    """`tigon.losses.kto` with its options fixed: forward(x, head, target, unpaired).

    Args:
        config: the kind of loss and its numbers; None for the defaults.
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    defaults = KTO()

    def forward(
        self, x: Tensor, head: AnyHead, target: Tensor, unpaired: Unpaired, *, valid: Iterable[int] | None = None
    ) -> Result:
        config, walk = self.of_batch(valid)
        return kto(x, head, target, unpaired, config=config, walk=walk)


class DistillationLoss(_HeadLoss[Distill]):
    """`tigon.losses.distill` with its options fixed: forward(x, head, teacher, target).

    Args:
        config: the kind of loss and its numbers; None for the defaults.
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    defaults = Distill()

    def forward(
        self,
        x: Tensor,
        head: AnyHead,
        teacher: Hidden,
        target: Tensor | None = None,
        *,
        divisor: Tensor | float | None = None,
        valid: SupportsInt | None = None,
    ) -> Result:
        config, walk = self.of_batch(valid, divisor=divisor)
        return distill(x, head, teacher, target, config=config, walk=walk)


class TopKDistillationLoss(_HeadLoss[DistillTopK]):
    """`tigon.losses.distill_topk` with its options fixed: forward(x, head, teacher, target).

    Args:
        config: the kind of loss and its numbers; None for the defaults.
        walk: how the tokens are walked over; `valid` of a batch goes to forward.
    """

    defaults = DistillTopK()

    def forward(
        self,
        x: Tensor,
        head: AnyHead,
        teacher: TopK,
        target: Tensor | None = None,
        *,
        divisor: Tensor | float | None = None,
        valid: SupportsInt | None = None,
    ) -> Result:
        config, walk = self.of_batch(valid, divisor=divisor)
        return distill_topk(x, head, teacher, target, config=config, walk=walk)
