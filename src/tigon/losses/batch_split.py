"""How `tigon.losses.token_loss` splits a batch into parts: sequences that a loss has to see together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tigon.losses.family import ALONE, BATCH
from tigon.losses.head.chunks import Chunks


@dataclass
class PartRows:
    """A part's rows of x.

    chunks: the walk over the part's rows alone.
    indices: these rows' positions among the part's S' · T, or None if all are present.
    sequences: (S',) sequence numbers; with `alone`, token numbers. None: the part is the whole batch, in order.
    shape: (S', T); T = 1 with `alone`.
    """

    chunks: Chunks
    indices: Tensor | None
    sequences: Tensor | None
    shape: tuple[int, int]
    alone: bool = False

    def scatter(self, values: Tensor) -> Tensor:
        """Reshape (rows,) or (n, rows) to (S', T) or (n, S', T), zero elsewhere."""
        if self.indices is not None:
            size = *values.shape[:-1], self.shape[0] * self.shape[1]
            values = values.new_zeros(size).index_copy_(
                -1, self.indices, values
            )  # zeros, because multiplying fresh memory by 0 may give NaN
        return values.view(*values.shape[:-1], *self.shape)

    def gather(self, values: Tensor) -> Tensor:
        """Reshape (S', T) to (rows,)."""
        values = values.reshape(-1)
        return values if self.indices is None else values.index_select(0, self.indices)


def split_batch(
    whole: Chunks, target: Tensor, group_size: int, lengths: Sequence[int], ignore_index: int, most: int
) -> Iterator[PartRows]:
    """Split the batch into parts. Ignored rows are left out if the host knows the valid count.

    Args:
        whole: the walk over the batch's S · T rows; over the valid ones where tokens are independent.
        target: (S, T).
        group_size: the family's `group_size()`.
        lengths: valid targets per sequence; empty if the host does not know.
        most: the buffer's capacity in rows.
    """
    S, T = target.shape
    device = target.device
    if S and (sum(lengths) if lengths else S * T) <= most:
        # A usual batch with few tokens is host-bound, so no part is cut out.
        every, indices = not lengths or sum(lengths) == S * T, None
        if not every:
            indices = torch.argsort((target == ignore_index).to(torch.uint8).view(-1), stable=True)[: sum(lengths)]
        yield PartRows(whole.subset(slice(0, S * T) if indices is None else indices, most), indices, None, (S, T))
        return
    if group_size == ALONE:
        for start, stop in whole.spans():
            rows = whole.row_indices(start, stop)
            sequences = torch.arange(start, stop, device=device) if isinstance(rows, slice) else rows
            yield PartRows(whole.subset(rows, most), None, sequences, (stop - start, 1), alone=True)
        return
    stacks = max(1, S) if group_size == BATCH else group_size
    # Without sequences the batch is one empty stack.
    units = S // stacks
    # Unit u is sequence u in every stack. A part keeps the batch's order, stack after stack.
    order = torch.arange(S, device=device).view(stacks, units)
    for first, last in _pack_units(_count_unit_rows(lengths, stacks, units, T), most):
        sequences = order[:, first:last].reshape(-1)
        count = (last - first) * stacks * T
        indices = None
        if lengths:
            valid = sum(lengths[u + k * units] for u in range(first, last) for k in range(stacks))
            if valid < count:
                # A stable sort by a flag moves valid rows to the front without a copy to the host.
                ignored = (target.index_select(0, sequences) == ignore_index).to(torch.uint8).view(-1)
                indices = torch.argsort(ignored, stable=True)[:valid]
        if indices is not None:
            # `indices` counts within the part, whose sequences may not be adjacent in the batch.
            rows = sequences.index_select(0, indices // T) * T + indices % T
        elif stacks == 1:
            # Consecutive rows stay a slice: products read x and write dx in place, without a gather.
            rows = slice(first * T, last * T)
        else:
            rows = (sequences.unsqueeze(1) * T + torch.arange(T, device=device)).view(-1)
        yield PartRows(whole.subset(rows, most), indices, sequences, ((last - first) * stacks, T))


def _count_unit_rows(lengths: Sequence[int], stacks: int, units: int, T: int) -> list[int]:
    if not lengths:
        return [stacks * T] * units
    return [sum(lengths[u + k * units] for k in range(stacks)) for u in range(units)]


def _pack_units(rows: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of units that fit the buffer, about equally full. A unit larger than the buffer gets its own range."""
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
