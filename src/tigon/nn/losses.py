"""Losses as modules with fixed options; a call takes the tensors, and the numbers that belong to the batch.

Losses of a head share `_HeadLoss`: a frozen options object, and how the tokens are walked over. Losses between two
distributions share `_Divergence`.
"""

from __future__ import annotations

import inspect
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
from tigon.nn.layers import OptionsModule
from tigon.ops.cross_entropy import CrossEntropy, cross_entropy
from tigon.ops.divergence import REDUCTIONS, jsd, kl_div, tvd

AnyHead = Head | Tensor | torch.nn.Linear
Reduction = Literal["batchmean", "mean", "sum", "rows"]
Config = TypeVar("Config")


class CrossEntropyLoss(OptionsModule):
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
        super().__init__(config=config or CrossEntropy(), inplace=inplace, details=details)
        self.register_buffer("weight", weight)

    def forward(self, logits: Tensor, target: Tensor, *, divisor: Tensor | float | None = None) -> Any:
        options = self.options
        if divisor is not None:
            options = {**options, "config": replace(options["config"], divisor=divisor)}
        return cross_entropy(logits, target, self.weight, **options)


class _Divergence(OptionsModule):
    """A divergence with fixed options: forward(input, target, mask)."""

    function: ClassVar[Callable[..., Tensor]]

    def __init__(self, reduction: Reduction, temperature: float | None, **options: float) -> None:
        name = type(self).__name__
        check_choice(name, "reduction", reduction, REDUCTIONS)
        check_positive(name, temperature=temperature)
        super().__init__(reduction=reduction, temperature=temperature, **options)

    def forward(self, input: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        return type(self).function(input, target, mask=mask, **self.options)


class KLDivLoss(_Divergence):
    """`tigon.kl_div` with fixed options: forward(input, target, mask).

    Args:
        reduction: "mean", "batchmean", "sum" or "rows".
        log_target: True if target holds log-probabilities.
        temperature: both sides are logits, which are divided by temperature and softmaxed here; None: they are not.
    """

    function = staticmethod(kl_div)

    def __init__(
        self, *, reduction: Reduction = "mean", log_target: bool = False, temperature: float | None = None
    ) -> None:
        super().__init__(reduction, temperature, log_target=log_target)


class JSDLoss(_Divergence):
    """`tigon.jsd` with fixed options: forward(input, target, mask).

    Args:
        beta: the teacher's weight in the mixture, in [0, 1].
        reduction: "batchmean", "mean", "sum" or "rows".
        temperature: both sides are logits, which are divided by temperature and softmaxed here; None: they are not.
    """

    function = staticmethod(jsd)

    def __init__(
        self, *, beta: float = 0.5, reduction: Reduction = "batchmean", temperature: float | None = None
    ) -> None:
        check_share("JSDLoss", beta=beta)
        super().__init__(reduction, temperature, beta=beta)


class TVDLoss(_Divergence):
    """`tigon.tvd` with fixed options: forward(input, target, mask).

    Args:
        reduction: "batchmean", "mean", "sum" or "rows".
        temperature: both sides are logits, which are divided by temperature and softmaxed here; None: they are not.
    """

    function = staticmethod(tvd)

    def __init__(self, *, reduction: Reduction = "batchmean", temperature: float | None = None) -> None:
        super().__init__(reduction, temperature)


class _HeadLoss(OptionsModule, Generic[Config]):
    """A head's loss with fixed options: forward takes the tensors of `function`, in the same order.

    Args:
        config: the kind of loss and its numbers; None for the defaults.
        chunks: memory and recomputation options for the walk over the tokens.

    forward also takes per-batch values: `valid_tokens`, as in `tigon.losses.ChunkOptions`, and any field of `config` by
    name, such as `divisor`; None keeps the field.
    """

    function: ClassVar[Callable[..., Any]]
    defaults: ClassVar[Any]

    def __init_subclass__(cls, function: Callable[..., Any] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if function is not None:  # a subclass of a loss keeps the loss's function
            cls.function = staticmethod(function)
            cls.defaults = inspect.signature(function).parameters["config"].default

    def __init__(self, config: Config | None = None, chunks: ChunkOptions = ChunkOptions()) -> None:
        config = self.defaults if config is None else config
        if not isinstance(config, type(self.defaults)):
            name, kind = type(self).__name__, type(self.defaults).__name__
            raise ValueError(f"{name}: config must be a {kind}, got {config!r}.")
        super().__init__(config=config, chunks=chunks)

    def forward(
        self, x: Tensor, head: AnyHead, *tensors: Any, valid_tokens: SupportsInt | Iterable[int] | None = None,
        **of_batch: Any,
    ) -> Any:  # fmt: skip
        config, chunks = self.options["config"], self.options["chunks"]
        fields = {name: of_batch.pop(name) for name in config.__dataclass_fields__ if name in of_batch}
        fields = {name: value for name, value in fields.items() if value is not None}
        config = replace(config, **fields) if fields else config
        chunks = chunks if valid_tokens is None else replace(chunks, valid_tokens=valid_tokens)
        return type(self).function(x, head, *tensors, config=config, chunks=chunks, **of_batch)


class LinearCrossEntropyLoss(_HeadLoss[CrossEntropy], function=linear_cross_entropy):
    """`tigon.linear_cross_entropy` with fixed options: forward(x, head, target)."""


class GRPOLoss(_HeadLoss[GRPO], function=grpo):
    """`tigon.losses.grpo` with fixed options: forward(x, head, target, rollout)."""


class RLOOLoss(_HeadLoss[RLOO], function=rloo):
    """`tigon.losses.rloo` with fixed options: forward(x, head, target, rollout)."""


class DPOLoss(_HeadLoss[DPO], function=dpo):
    """`tigon.losses.dpo` with fixed options: forward(x, head, target, ref)."""


class ORPOLoss(_HeadLoss[ORPO], function=orpo):
    """`tigon.losses.orpo` with fixed options: forward(x, head, target, completion_mask)."""


class CPOLoss(_HeadLoss[CPO], function=cpo):
    """`tigon.losses.cpo` with fixed options: forward(x, head, target)."""


class SimPOLoss(_HeadLoss[SimPO], function=simpo):
    """`tigon.losses.simpo` with fixed options: forward(x, head, target)."""


class KTOLoss(_HeadLoss[KTO], function=kto):
    """`tigon.losses.kto` with fixed options: forward(x, head, target, unpaired)."""


class DistillationLoss(_HeadLoss[Distill], function=distill):
    """`tigon.losses.distill` with fixed options: forward(x, head, teacher, target)."""


class TopKDistillationLoss(_HeadLoss[DistillTopK], function=distill_topk):
    """`tigon.losses.distill_topk` with fixed options: forward(x, head, teacher, target)."""
