"""Losses as modules with fixed options; a call takes the tensors, and the numbers that belong to the batch.

Losses of a head share `_HeadLoss`: a frozen options object, and how the tokens are walked over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar, Generic, Literal, SupportsInt, TypeVar

import torch
from torch import Tensor

from tigon.losses.distillation import Distill, DistillTopK, distill, distill_topk
from tigon.losses.head.chunk_options import ChunkOptions
from tigon.losses.head.head import Head
from tigon.losses.linear_cross_entropy import linear_cross_entropy
from tigon.losses.options import check_choice, check_positive, check_share
from tigon.losses.policy import GRPO, RLOO, grpo, rloo
from tigon.losses.preference import CPO, DPO, KTO, ORPO, SimPO, cpo, dpo, kto, orpo, simpo
from tigon.ops.cross_entropy import CrossEntropy, cross_entropy
from tigon.ops.divergence import REDUCTIONS, jsd, kl_div, tvd

AnyHead = Head | Tensor | torch.nn.Linear
Reduction = Literal["batchmean", "mean", "sum", "rows"]
Config = TypeVar("Config")


class _Loss(torch.nn.Module):
    """A loss with fixed options, shown in its repr."""

    def extra_repr(self) -> str:
        shown = {k: v for k, v in vars(self).items() if not k.startswith("_") and k != "training"}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


class CrossEntropyLoss(_Loss):
    """`tigon.cross_entropy` with fixed options: forward(logits, target).

    Args:
        weight: (V,) class weights or None; a buffer, as in torch.nn.CrossEntropyLoss.
        config: a `tigon.CrossEntropy`; None for the defaults.
        inplace, details: as in `tigon.cross_entropy`.
    """

    weight: Tensor | None

    def __init__(
        self, weight: Tensor | None = None, *, config: CrossEntropy | None = None, inplace: bool = False,
        details: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.register_buffer("weight", weight)
        self.config, self.inplace, self.details = config or CrossEntropy(), inplace, details

    def forward(self, logits: Tensor, target: Tensor, *, divisor: Tensor | float | None = None) -> Any:
        config = self.config if divisor is None else replace(self.config, divisor=divisor)
        options = {"config": config, "inplace": self.inplace, "details": self.details}
        return cross_entropy(logits, target, self.weight, **options)  # type: ignore[call-overload]


class KLDivLoss(_Loss):
    """`tigon.kl_div` with fixed options: forward(input, target, mask).

    Args:
        reduction: "mean", "batchmean", "sum" or "rows".
        log_target: True if target holds log-probabilities.
        temperature: both sides are logits, which are divided by temperature and softmaxed here; None: they are not.
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
    """`tigon.jsd` with fixed options: forward(input, target, mask).

    Args:
        beta: the teacher's weight in the mixture, in [0, 1].
        reduction: "batchmean", "mean", "sum" or "rows".
        temperature: both sides are logits, which are divided by temperature and softmaxed here; None: they are not.
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
    """`tigon.tvd` with fixed options: forward(input, target, mask).

    Args:
        reduction: "batchmean", "mean", "sum" or "rows".
        temperature: both sides are logits, which are divided by temperature and softmaxed here; None: they are not.
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


class _HeadLoss(_Loss, Generic[Config]):
    """A head's loss with fixed options: forward takes the tensors of `function`, in the same order.

    Args:
        config: the kind of loss and its numbers; None for the defaults.
        chunks: memory and recomputation options for the walk over the tokens.

    forward also takes per-batch values: `valid_tokens`, as in `tigon.losses.ChunkOptions`, and any field of `config` by
    name, such as `divisor`; None keeps the field.
    """

    function: ClassVar[Callable[..., Any]]
    options: ClassVar[type[Any]]
    config: Config

    def __init__(self, config: Config | None = None, chunks: ChunkOptions = ChunkOptions()) -> None:
        super().__init__()
        if config is not None and not isinstance(config, self.options):
            name, kind = type(self).__name__, self.options.__name__
            raise ValueError(f"{name}: config must be a {kind}, got {config!r}.")
        self.config, self.chunks = self.options() if config is None else config, chunks

    def forward(
        self, x: Tensor, head: AnyHead, *tensors: Any, valid_tokens: SupportsInt | Iterable[int] | None = None,
        **of_batch: Any,
    ) -> Any:  # fmt: skip
        fields = {name: of_batch.pop(name) for name in self.options.__dataclass_fields__ if name in of_batch}
        fields = {name: value for name, value in fields.items() if value is not None}
        config = replace(self.config, **fields) if fields else self.config  # type: ignore[type-var]
        chunks = self.chunks if valid_tokens is None else replace(self.chunks, valid_tokens=valid_tokens)
        return type(self).function(x, head, *tensors, config=config, chunks=chunks, **of_batch)


class LinearCrossEntropyLoss(_HeadLoss[CrossEntropy]):
    """`tigon.linear_cross_entropy` with fixed options: forward(x, head, target)."""

    function, options = staticmethod(linear_cross_entropy), CrossEntropy


class GRPOLoss(_HeadLoss[GRPO]):
    """`tigon.losses.grpo` with fixed options: forward(x, head, target, rollout)."""

    function, options = staticmethod(grpo), GRPO


class RLOOLoss(_HeadLoss[RLOO]):
    """`tigon.losses.rloo` with fixed options: forward(x, head, target, rollout)."""

    function, options = staticmethod(rloo), RLOO


class DPOLoss(_HeadLoss[DPO]):
    """`tigon.losses.dpo` with fixed options: forward(x, head, target, ref)."""

    function, options = staticmethod(dpo), DPO


class ORPOLoss(_HeadLoss[ORPO]):
    """`tigon.losses.orpo` with fixed options: forward(x, head, target, completion_mask)."""

    function, options = staticmethod(orpo), ORPO


class CPOLoss(_HeadLoss[CPO]):
    """`tigon.losses.cpo` with fixed options: forward(x, head, target)."""

    function, options = staticmethod(cpo), CPO


class SimPOLoss(_HeadLoss[SimPO]):
    """`tigon.losses.simpo` with fixed options: forward(x, head, target)."""

    function, options = staticmethod(simpo), SimPO


class KTOLoss(_HeadLoss[KTO]):
    """`tigon.losses.kto` with fixed options: forward(x, head, target, unpaired)."""

    function, options = staticmethod(kto), KTO


class DistillationLoss(_HeadLoss[Distill]):
    """`tigon.losses.distill` with fixed options: forward(x, head, teacher, target)."""

    function, options = staticmethod(distill), Distill


class TopKDistillationLoss(_HeadLoss[DistillTopK]):
    """`tigon.losses.distill_topk` with fixed options: forward(x, head, teacher, target)."""

    function, options = staticmethod(distill_topk), DistillTopK
