"""How the walk of `tigon.losses.token_loss` cuts a batch into parts: sequences that a loss has to see together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tigon.losses.family import ALONE, BATCH
from tigon.losses.head.chunks import Chunks


@dataclass
class Rows:
    """The rows of x that a part consists of.

    chunks: the walk over the part's rows alone. at: their places among the part's S' · T, or None if all are present.
    sequences: (S',) the sequences' numbers; with `alone` the tokens'. None: the part is the batch, in its order.
    shape: S' and T, or T = 1 with `alone`.
    """

    chunks: Chunks
    at: Tensor | None
    sequences: Tensor | None
    shape: tuple[int, int]
    alone: bool = False

    def dense(self, values: Tensor) -> Tensor:
        """A value, or several (n, rows), for each row, as (S', T) or (n, S', T), zero elsewhere."""
        if self.at is not None:
            size = *values.shape[:-1], self.shape[0] * self.shape[1]
            values = values.new_zeros(size).index_copy_(-1, self.at, values)  # 0 · NaN of fresh memory would be NaN
        return values.view(*values.shape[:-1], *self.shape)

    def sparse(self, values: Tensor) -> Tensor:
        """(S', T) as a value for each row."""
        values = values.reshape(-1)
        return values if self.at is None else values.index_select(0, self.at)


def split(
    whole: Chunks, target: Tensor, together: int, lengths: Sequence[int], ignore_index: int, most: int
) -> Iterator[Rows]:
    """Split the batch into parts. Rows that do not count are left out if the host knows how many count.

    Args:
        whole: the walk over the batch's S · T rows; where tokens are independent, over those that count.
        target: (S, T).
        together: the family's `together()`.
        lengths: how many targets of each sequence count; empty if the host does not know.
        most: how many rows the buffer holds.
    """
    S, T = target.shape
    device = target.device
    if S and (sum(lengths) if lengths else S * T) <= most:
        # The usual batch of few tokens, whose time is the host's: no part is cut out of it.
        every, at = not lengths or sum(lengths) == S * T, None
        if not every:
            at = torch.argsort((target == ignore_index).to(torch.uint8).view(-1), stable=True)[: sum(lengths)]
        yield Rows(whole.among(slice(0, S * T) if at is None else at, most), at, None, (S, T))
        return
    if together == ALONE:
        # A token sees no other, so each chunk is a part.
        for start, stop in whole.spans():
            rows = whole.places(start, stop)
            sequences = torch.arange(start, stop, device=device) if isinstance(rows, slice) else rows
            yield Rows(whole.among(rows, most), None, sequences, (stop - start, 1), alone=True)
        return
    stacks = max(1, S) if together == BATCH else together
    # Without sequences a batch is one stack of none.
    units = S // stacks
    # Unit u is sequence u of every stack. A part has its units' sequences as the batch has them, stack behind stack.
    order = torch.arange(S, device=device).view(stacks, units)
    for first, last in _packed(_unit_rows(lengths, stacks, units, T), most):
        sequences = order[:, first:last].reshape(-1)
        count = (last - first) * stacks * T
        at = None
        if lengths:
            valid = sum(lengths[u + k * units] for u in range(first, last) for k in range(stacks))
            if valid < count:
                # As for tokens: a stable sort of a flag puts those that count in front, without a copy to the host.
                ignored = (target.index_select(0, sequences) == ignore_index).to(torch.uint8).view(-1)
                at = torch.argsort(ignored, stable=True)[:valid]
        if at is not None:
            # `at` counts within the part, whose sequences need not be neighbours in the batch.
            rows = sequences.index_select(0, at // T) * T + at % T
        elif stacks == 1:
            # Consecutive rows stay a slice: products then read x and write dx where they lie, without a gather.
            rows = slice(first * T, last * T)
        else:
            rows = (sequences.unsqueeze(1) * T + torch.arange(T, device=device)).view(-1)
        yield Rows(whole.among(rows, most), at, sequences, ((last - first) * stacks, T))


def _unit_rows(lengths: Sequence[int], stacks: int, units: int, T: int) -> list[int]:
    if not lengths:
        return [stacks * T] * units
    return [sum(lengths[u + k * units] for k in range(stacks)) for u in range(units)]


def _packed(rows: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of units, about equally full, that fit the buffer. A unit larger than the buffer is a range of its own."""
    parts = max(1, -(-sum(rows) // most))
    # Equal shares rather than full buffers: a short last part would be a small product.
    aim = min(most, -(-sum(rows) // parts))
    first = held = 0
    for unit, own in enumerate(rows):
        if held and (held + own > most or held >= aim):
            yield first, unit
            first = unit
            held = 0
        held += own
    if rows:
        yield first, len(rows)
