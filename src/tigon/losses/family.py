"""The interface of `tigon.losses.token_loss`: families of losses, called with parts of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tigon.losses.operator import record, with_floats

ALONE = 0  # every token by itself
BATCH = -1  # the whole batch


class Part(NamedTuple):
    """Sequences that a loss sees together. Where tokens are independent, each token may be a sequence of one.

    A batch whose logits fit a chunk is one part, in its order. A smaller part of a batch of stacks has the sequences of
    the first stack first, in the same order as those of the others.

    sequences: (S',) int64, the sequences' numbers, or the tokens' places in the flattened (S · T) batch; None for the
        whole batch.
    logprob: (S', T) fp32, 0 where masked. entropy, mean_logit: alike, or None if the family does not ask for them.
    reference: log-probabilities under the reference head, alike, or None.
    mask: (S', T), True where a token counts.
    tensors: the family's tensors, such as advantages, (S', T) or (S', 1), as `Family.prepare` returns them.
    is_top1: (S', T) bool, whether no token is likelier, or None if the family does not ask for it.
    """

    sequences: Tensor | None
    logprob: Tensor
    entropy: Tensor | None
    mean_logit: Tensor | None
    reference: Tensor | None
    mask: Tensor
    tensors: Any
    is_top1: Tensor | None = None


class Whole(NamedTuple):
    """A batch that is one part, as a family's own kernels see it: `Part` before anything has been computed of it.

    logprob, entropy, mean_logit, reference: (S, T) fp32, contiguous, 0 where masked; None as in `Part`.
    target: (S, T), contiguous, ignore_index where a token does not count.
    tensors: the family's tensors, as they came.
    visited: how many tokens the walk has visited. If more than that count, the loss is NaN.
    """

    logprob: Tensor
    entropy: Tensor | None
    mean_logit: Tensor | None
    reference: Tensor | None
    is_top1: Tensor | None
    target: Tensor
    ignore_index: int
    tensors: Any
    visited: int


@record
class NoOptions(NamedTuple):
    """No options."""


class NoTensors(NamedTuple):
    """No tensors."""


@record
class Term(NamedTuple):
    """A type of loss and its weight, in a family whose types are added up."""

    name: str
    weight: float


class Family:
    """A family of losses: how the loss of a part is computed, and which results it returns beside the loss.

    A subclass registers itself under `key`. `Options` is the record of its options (`tigon.losses.operator.record`),
    and `Tensors` the named tuple of its tensors, (S,) or (S, T) each, or None.

    Args:
        options: of type `Options`.
        given: the names of the tensors that the call has, those of `Tensors` that are not None.
    """

    key: ClassVar[str]
    Options: ClassVar[type[Any]] = NoOptions
    Tensors: ClassVar[type[Any]] = NoTensors
    # Names of further results: one number for the batch (a sum over parts), one a sequence, one a token.
    sums: tuple[str, ...] = ()
    per_sequence: tuple[str, ...] = ()
    per_token: tuple[str, ...] = ()
    # Whether `finish` computes the results. internal: how many of `per_token`, the last, are for it alone.
    finishes: ClassVar[bool] = False
    internal: int = 0
    wants_entropy: bool = False
    wants_mean_logit: bool = False
    wants_is_top1: bool = False

    def __init_subclass__(cls, key: str | None = None) -> None:
        if key is not None:
            cls.key = key
            FAMILIES[key] = cls

    def __init__(self, options: Any, given: Sequence[str]) -> None:
        self.options, self.given = options, tuple(given)

    @classmethod
    def for_tensors(cls, options: Any, tensors: Any) -> Family:
        """The family of a call that has these tensors."""
        return cls(with_floats(options), [n for n, t in zip(tensors._fields, tensors, strict=True) if t is not None])

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the numbers of the batch that the caller gets, as `finish` returns them."""
        return self.sums

    def prepare(self, tensors: Any, mask: Tensor, dtype: torch.dtype) -> Any:
        """The tensors that parts see, from those of the call: a named tuple; once for the batch.

        mask: (S, T), True where a token counts. dtype: of the loss.
        """
        return tensors

    def finish(self, results: dict[str, Tensor], tensors: Any, mask: Tensor) -> Sequence[Tensor]:
        """The metrics, 0-d each, from sums and results of tokens of all parts, and from the result of `prepare`."""
        raise NotImplementedError

    def has_kernels(self) -> bool:
        """Whether `launch` takes a batch that is one part. Such a family's results of tokens are logprob, or none."""
        return False

    def has_entropy_slope(self) -> bool:
        """Whether the loss depends on the entropy, where `launch` computes it."""
        return False

    def launch(
        self, batch: Whole, loss: Tensor, metrics: Tensor, slopes: Sequence[Tensor | None], grad_scale: float
    ) -> None:
        """All that `prepare`, calling and `finish` do, by kernels: for the usual small batch, whose time is the host's.

        loss: 0-d. metrics: (metrics,). slopes: (S, T) of logprob and of entropy, times grad_scale, or None. All are
        written.
        """
        raise NotImplementedError

    def group_size(self) -> int:
        """ALONE, BATCH, or n: the batch is n equal stacks, and the sequences i of all stacks share a part.

        This is the least that the family has to see together. A part may be the whole batch, whatever the answer.
        """
        return ALONE

    def grad_scale(self, sequences: int, tokens: int) -> float:
        """The factor, about 1 / the size of a slope, that keeps fp16 gradients from underflowing."""
        return float(sequences * tokens)

    def __call__(self, part: Part) -> tuple[Tensor, dict[str, Tensor]]:
        """The part's share of the loss, 0-d, and the further results by name. Only the loss is differentiated."""
        raise NotImplementedError


FAMILIES: dict[str, type[Family]] = {}
