"""Precomputed filter results: a bit per filter and row, made once and updated as rows are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tigon.kernels import Plan as Launch
from tigon.kernels import cdiv, do_not_specialize, jit, launch, tl, use_triton
from tigon.retrieve.scan.compact import holds
from tigon.retrieve.scan.filters import RowFilter, stack_tables

# Words per program, 32 rows each.
BLOCK, WARPS = 8, 4


class RowBits(NamedTuple):
    """Filter results as bits, in place of the filters themselves. Create with `RowBits.from_filters`.

    Args:
        bits: (F, ⌈N/32⌉) int32. Bit r % 32 in number r // 32 says whether row r passes.
        which: (B,) int32, each query's filter, 0 to F - 1. None: the first filter for all queries.
        starts: (F,) int64, offsets into `bits` where each filter's numbers begin. None: filters are its rows.
    """

    bits: Tensor
    which: Tensor | None = None
    starts: Tensor | None = None

    @classmethod
    def from_filters(
        cls, filters: Sequence[RowFilter], attributes: Tensor, which: Tensor | None = None
    ) -> RowBits:  # fmt: skip
        """Test rows by filters.

        Args:
            filters: F filters.
            attributes: (W, N) int64.
            which: (B,) int32, each query's filter.
        """
        words = cdiv(attributes.shape[1], 32)
        bits = attributes.new_empty((len(filters), words), dtype=torch.int32)
        write_bits(filters, attributes, bits, torch.arange(len(filters), device=attributes.device) * words)
        return cls(bits, which)

    @property
    def filters(self) -> int:
        """The number of filters."""
        return 1 if self.which is None else len(self.bits if self.starts is None else self.starts)

    def beginnings(self) -> Tensor:
        """`starts`, computed if not given."""
        if self.starts is not None:
            return self.starts
        stride = self.bits.stride(0) if len(self.bits) > 1 else 0
        return torch.arange(len(self.bits), device=self.bits.device) * stride

    def mask(self, start: int, stop: int) -> Tensor:
        """(n,) or (B, n) bool, whether each row passes; the kernels' specification."""
        first, past = start // 32, (stop + 31) // 32
        words = self.bits[:1]
        if self.which is not None and self.starts is not None:
            places = torch.arange(self.bits.shape[1], device=self.bits.device)
            words = _flat(self.bits)[self.starts[:, None] + places]
        elif self.which is not None:
            words = self.bits
        passes = ((words[:, first:past, None] >> torch.arange(32, device=words.device)) & 1) != 0
        rows = passes.flatten(1)[:, start - 32 * first : stop - 32 * first]
        return rows[0] if self.which is None else rows[self.which.long()]


def pack_bits(mask: Tensor) -> Tensor:
    """(N,) bool as (⌈N/32⌉,) int32."""
    short = -len(mask) % 32
    if mask.device.type == "cpu":
        given = np.packbits(np.pad(mask.numpy(), (0, short)), bitorder="little")
        return torch.from_numpy(given.view(np.int32))
    places = torch.arange(32, device=mask.device)
    wide = torch.nn.functional.pad(mask, (0, short)).view(-1, 32)
    return (wide.long() << places).sum(1).to(torch.int32)


def write_bits(
    filters: Sequence[RowFilter], attributes: Tensor, bits: Tensor, starts: Tensor, words: Tensor | None = None
) -> None:
    """Test rows by filters, and write 32 results per int32.

    Args:
        filters: distinct objects.
        attributes: (W, N) int64.
        bits: int32, the output buffer.
        starts: (F,) int64, offsets into bits where each filter's ⌈N/32⌉ numbers begin.
        words: (n,) int64, indices to write, for each filter; others stay unchanged. None: all.
    """
    N = attributes.shape[1]
    count = cdiv(N, 32) if words is None else len(words)
    if not count or not filters:
        return
    # The kernels read integers; use_triton needs a float tensor.
    if not use_triton(attributes.new_empty(0, dtype=torch.float32)):
        rows: Any = slice(0, N)
        if words is not None:
            rows = (words[:, None] * 32 + torch.arange(32, device=words.device)).view(-1).clamp(max=N - 1)
        tested, memory = attributes[:, rows], _flat(bits)
        places = torch.arange(count, device=bits.device) if words is None else words
        for row_filter, start in zip(filters, starts.tolist(), strict=True):
            memory[start + places] = pack_bits(row_filter.mask(tested))
        return
    _, (table, bitmaps, _) = stack_tables(list(filters), "bitmaps", attributes.device, len(filters))
    assert table is not None
    attributes = attributes if attributes.stride(-1) == 1 or N == 1 else attributes.contiguous()

    def plan() -> Launch:
        return cdiv(count, BLOCK), (N, count, attributes.stride(0), table.shape[0], BLOCK), {"num_warps": WARPS}

    key = (words is None, N, count, attributes.stride(0), table.shape[0])
    launch(_bits_kernel, key, (attributes, table, bitmaps, starts, words, bits), plan)


def _flat(bits: Tensor) -> Tensor:
    """The memory behind bits, from its first number to its last."""
    reach = (len(bits) - 1) * bits.stride(0) + bits.shape[1]
    return bits.as_strided((reach,), (1,))


@jit
@do_not_specialize("N", "count", "stride", "literals")
def _bits_kernel(
    attributes_ptr, table_ptr, bitmaps_ptr, start_ptr, words_ptr, bits_ptr, N, count, stride, literals,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each filter's bits for BLOCK words. A program owns its words, so no atomics are needed."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = n < count
    if words_ptr is not None:
        place = tl.load(words_ptr + n, mask=there, other=0)
    else:
        place = n.to(tl.int64)
    bit = tl.arange(0, 32)
    i = place[:, None] * 32 + bit[None, :]
    inside = there[:, None] & (i < N)
    keep, some = inside, i < 0
    f = 0
    for literal in range(literals):
        row_ptr = table_ptr + literal * 8
        some = some | holds(row_ptr, bitmaps_ptr, attributes_ptr, stride, i, inside)
        flags = tl.load(row_ptr + 4)
        more = (flags & 2) == 0
        keep = keep & (some | more)
        some = some & more
        if (flags & 4) != 0:
            start = tl.load(start_ptr + f)
            # No two bits in a word overlap: their sum is the word.
            tl.store(bits_ptr + start + place, tl.sum(keep.to(tl.int32) << bit[None, :], 1), mask=there)
            keep = inside
            f += 1
            # The next filter's bitmaps follow this filter's.
            bitmaps_ptr += tl.load(row_ptr + 7)
