"""What a loss of log-probabilities is to the walk of `tigon.losses.token_loss`: a family, and the parts it sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

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
    sides: further tensors, such as advantages, (S', T) or (S', 1): the family's own named tuple.
    is_top1: (S', T) bool, whether no token is likelier, or None if the family does not ask for it.
    """

    sequences: Tensor | None
    logprob: Tensor
    entropy: Tensor | None
    mean_logit: Tensor | None
    reference: Tensor | None
    mask: Tensor
    sides: Any
    is_top1: Tensor | None = None


class Nothing(NamedTuple):
    """No options, or no tensors."""


class Takes(NamedTuple):
    """The named tuples of a family: of its words, its numbers and its tensors."""

    words: type[Any] = Nothing
    numbers: type[Any] = Nothing
    sides: type[Any] = Nothing


class Term(NamedTuple):
    """A type of loss and its weight, in a family whose types are added up."""

    name: str
    weight: float


class Family:
    """A family of losses: how the loss of a part is computed, and which results it returns beside the loss.

    A subclass registers itself under `key`, and says in `takes` what it takes. Words and numbers cross torch.library as
    plain lists, since its operators take no named tuples; they are named again on the other side.

    Args:
        words, numbers: the options.
        given: the names of the tensors that the call has, those of `takes.sides` that are not None.
        terms: the types that are added up, in a family that has such.
    """

    key: ClassVar[str]
    takes: ClassVar[Takes] = Takes()
    # Names of further results: one number for the batch (a sum over parts), one a sequence, one a token.
    sums: tuple[str, ...] = ()
    per_sequence: tuple[str, ...] = ()
    per_token: tuple[str, ...] = ()
    wants_entropy: bool = False
    wants_mean_logit: bool = False
    wants_is_top1: bool = False

    def __init_subclass__(cls, key: str | None = None) -> None:
        if key is not None:
            cls.key = key
            FAMILIES[key] = cls

    def __init__(self, words: Any, numbers: Any, given: Sequence[str], terms: Sequence[Term] = ()) -> None:
        self.words, self.numbers, self.given, self.terms = words, numbers, given, terms

    @classmethod
    def of(cls, words: Any, numbers: Any, sides: Any, terms: Sequence[Term] = ()) -> Family:
        """The family of a call that has these tensors."""
        return cls(words, numbers, [n for n, t in zip(sides._fields, sides, strict=True) if t is not None], terms)

    def encoded(self) -> tuple[list[str], list[float]]:
        """Words and numbers, as torch.library takes them."""
        words, numbers = [*self.words], [float(n) for n in self.numbers]
        return words + [term.name for term in self.terms], numbers + [float(term.weight) for term in self.terms]

    @classmethod
    def decoded(cls, words: Sequence[str], numbers: Sequence[float], given: Sequence[str]) -> Family:
        """The family that `encoded` came from."""
        n, m = len(cls.takes.words._fields), len(cls.takes.numbers._fields)
        terms = [Term(name, weight) for name, weight in zip(words[n:], numbers[m:], strict=True)]
        return cls(cls.takes.words(*words[:n]), cls.takes.numbers(*numbers[:m]), given, terms)

    def together(self) -> int:
        """ALONE, BATCH, or n: the batch is n equal stacks, and the sequences i of all stacks share a part.

        This is the least that the family has to see together. A part may be the whole batch, whatever the answer.
        """
        return ALONE

    def boost(self, sequences: int, tokens: int) -> float:
        """The factor, about 1 / the size of a slope, that keeps fp16 gradients from underflowing."""
        return float(sequences * tokens)

    def __call__(self, part: Part) -> tuple[Tensor, dict[str, Tensor]]:
        """The part's share of the loss, 0-d, and the further results by name. Only the loss is differentiated."""
        raise NotImplementedError


FAMILIES: dict[str, type[Family]] = {}


def family_of(key: str, words: Sequence[str], numbers: Sequence[float], given: Sequence[str]) -> Family:
    """The family of an operator's arguments: lists with a dummy in front, see `_token_loss_fwd`."""
    return FAMILIES[key].decoded(words[1:], numbers[1:], given[1:])
