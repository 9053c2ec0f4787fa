"""The interface of `tigon.losses.token_loss`: loss families, called with parts of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tigon.losses.operator import record, with_floats

ALONE = 0  # tokens are independent
BATCH = -1  # the whole batch


class Part(NamedTuple):
    """Sequences that a loss sees together. Where tokens are independent, each token may be a sequence with length 1.

    A batch whose logits fit a chunk is a single part, in order. A smaller part of a stacked batch holds the first
    stack's sequences first, in the same order as in the other stacks.

    sequences: (S',) int64, the sequence numbers, or token positions in the flattened (S · T) batch; None for the whole
        batch.
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
    """A batch that is a single part, as kernels see it: `Part` before any computation.

    logprob, entropy, mean_logit, reference: (S, T) fp32, contiguous, 0 where masked; None as in `Part`.
    target: (S, T), contiguous, ignore_index at ignored tokens.
    tensors: the family's tensors, unprepared.
    visited: number of visited tokens. If more than that count, the loss is NaN.
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
    """A loss type and its weight, in a family that adds types up."""

    name: str
    weight: float


class Family:
    """A loss family: how a part's loss is computed, and which results come with the loss.

    A subclass registers itself under `key`. `Options` is the option record (`tigon.losses.operator.record`), and
    `Tensors` the named tuple with the tensors, each (S,), (S, T) or None.

    Args:
        options: an `Options`.
        given: names of the `Tensors` fields that are not None.
    """

    key: ClassVar[str]
    Options: ClassVar[type[Any]] = NoOptions
    Tensors: ClassVar[type[Any]] = NoTensors
    # Names of further results: a number for the batch (a sum over parts), for each sequence, for each token.
    sums: tuple[str, ...] = ()
    per_sequence: tuple[str, ...] = ()
    per_token: tuple[str, ...] = ()
    # Whether `finish` computes the results. internal: how many trailing `per_token` results only `finish` reads.
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
        """The family for a call with these tensors."""
        return cls(with_floats(options), [n for n, t in zip(tensors._fields, tensors, strict=True) if t is not None])

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the batch metrics, as `finish` returns them to the caller."""
        return self.sums

    def prepare(self, tensors: Any, mask: Tensor, dtype: torch.dtype) -> Any:
        """Prepare the call's tensors for the parts, once per batch. Returns a named tuple.

        mask: (S, T), True where a token counts. dtype: the loss's dtype.
        """
        return tensors

    def finish(self, results: dict[str, Tensor], tensors: Any, mask: Tensor) -> Sequence[Tensor]:
        """The metrics, 0-d each, from all parts' sums and token results, and from the result of `prepare`."""
        raise NotImplementedError

    def has_kernels(self) -> bool:
        """Whether `launch` handles a single-part batch. Such a family's only token result is logprob, or none."""
        return False

    def has_entropy_slope(self) -> bool:
        """Whether the loss depends on the entropy, where `launch` computes it."""
        return False

    def launch(
        self, batch: Whole, loss: Tensor, metrics: Tensor, slopes: Sequence[Tensor | None], grad_scale: float
    ) -> None:
        """Do the work of `prepare`, `__call__` and `finish` in kernels: usual small batches are host-bound.

        Writes loss, 0-d; metrics, (metrics,); slopes, (S, T), with respect to logprob and entropy, times grad_scale, or
        None.
        """
        raise NotImplementedError

    def group_size(self) -> int:
        """ALONE, BATCH, or n: the batch is n equal stacks, and sequence i from every stack must be in the same part.

        This is a minimum. A part may always be the whole batch.
        """
        return ALONE

    def grad_scale(self, sequences: int, tokens: int) -> float:
        """The factor, about 1 / the slope's size, that keeps fp16 gradients from underflowing."""
        return float(sequences * tokens)

    def __call__(self, part: Part) -> tuple[Tensor, dict[str, Tensor]]:
        """The part's share of the loss, 0-d, and the further results by name. Only the loss is differentiated."""
        raise NotImplementedError


FAMILIES: dict[str, type[Family]] = {}
