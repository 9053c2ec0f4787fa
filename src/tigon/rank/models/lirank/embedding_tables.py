"""Embedding tables of one width in one tensor, read in one launch; in fp32, or in 8 bits.

A column is one use of a field: its codes, or what is made of them, such as quotient and remainder. Column f of a group
of one width owns the rows starts[f] … starts[f + 1] − 1 of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.ops.embedding_bag import embedding_bag
from tigon.ops.quantized_embedding import quantize_rows, quantized_embedding
from tigon.rank.data.ragged import Ragged, expand_spans
from tigon.rank.models.lirank.config import Bits

Grad = Literal["dense", "rows"]


class EmbeddingTables(nn.Module):
    """Tables of one width.

    Args:
        sizes: rows of each column. width: numbers of a row.
        bits: 32, or 8 for codes with a scale and an offset a row, which have no gradient.

    Attributes:
        weight: (rows of all columns, width), or codes (rows, width) uint8 and scale_offset (rows, 2) fp16.
        grad: "rows" for gradients of the rows that occur, which `tigon.training.RowAdagrad` takes.
    """

    starts: Tensor
    codes: Tensor
    scale_offset: Tensor

    def __init__(self, sizes: Sequence[int], width: int, bits: Bits = 32) -> None:
        super().__init__()
        self.width, self.bits, self.grad = width, bits, "dense"
        self.first = [0]
        for size in sizes:
            self.first.append(self.first[-1] + size)
        self.register_buffer("starts", torch.tensor(self.first), persistent=False)
        if bits == 32:
            self.weight = nn.Parameter(torch.zeros(self.first[-1], width))
        else:
            self.register_buffer("codes", torch.zeros(self.first[-1], width, dtype=torch.uint8))
            self.register_buffer("scale_offset", torch.zeros(self.first[-1], 2, dtype=torch.float16))

    def column_weight(self, column: int) -> Tensor:
        """(rows of the column, width), the part of the weight that a column has."""
        return self.weight[self.first[column] : self.first[column + 1]]

    def bags(self, values: Sequence[Tensor | Ragged], first: int, dtype: torch.dtype) -> Tensor:
        """(n, F, width): the mean of the rows that each column's values name, in one launch.

        values: of the F columns from `first` on, n each: codes, or lists of them.
        """
        flat, offsets = pack_values(values)
        mode: Literal["sum", "mean"] = "sum" if offsets is None else "mean"
        return self._read(flat, offsets, mode, self.starts[first : first + len(values) + 1], dtype)

    def look_up(self, values: Tensor, column: int, dtype: torch.dtype) -> Tensor:
        """(m, width): the row of each value of one column."""
        return self._read(values[:, None], None, "sum", self.starts[column : column + 2], dtype)[:, 0]

    def _read(
        self, values: Tensor, offsets: Tensor | None, mode: Literal["sum", "mean"], fields: Tensor, dtype: torch.dtype
    ) -> Tensor:
        if self.bits == 8:
            # Autocast's dtype, or that of the other weights: codes are widened to it where they are read.
            return quantized_embedding(
                self.codes, self.scale_offset, values, offsets, mode=mode, include_last_offset=True,
                field_offsets=fields, dtype=dtype,
            )  # fmt: skip
        grad: Grad = "rows" if self.grad == "rows" and torch.is_grad_enabled() else "dense"
        return embedding_bag(
            values, self.weight, offsets, mode=mode, include_last_offset=True, field_offsets=fields, grad=grad,
            dtype=dtype,
        )  # fmt: skip

    def look_up_plain(self, values: Tensor, column: int, dtype: torch.dtype) -> Tensor:
        """(…, width): `each` by operators of torch alone, for programs."""
        rows = values + self.first[column]
        if self.bits == 32:
            return F.embedding(rows, self.weight).to(dtype)
        scale, offset = self.scale_offset[rows].to(dtype).split(1, -1)
        out: Tensor = self.codes[rows].to(dtype) * scale + offset
        return out

    @torch.no_grad()
    def quantize_from(self, other: EmbeddingTables) -> None:
        """The rows of a table of 32 bits, in 8.

        Raises: ValueError for numbers that fp16 does not hold.
        """
        codes, scale_offset = quantize_rows(other.weight)
        self.codes.copy_(codes)
        self.scale_offset.copy_(scale_offset)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.weight.nbytes if self.bits == 32 else self.codes.nbytes + self.scale_offset.nbytes


def pack_values(values: Sequence[Tensor | Ragged]) -> tuple[Tensor, Tensor | None]:
    """Values of F columns as `embedding_bag` takes them, the columns of a row side by side.

    Returns: (n, F) and None if each has one value a row; else (m,), and offsets (n · F + 1,).
    """
    if all(isinstance(value, Tensor) for value in values):
        return torch.stack([value for value in values if isinstance(value, Tensor)], 1), None
    lengths = [value.lengths if isinstance(value, Ragged) else torch.ones_like(value) for value in values]
    ends = torch.stack(lengths, 1).reshape(-1).cumsum(0)
    offsets = torch.cat((ends.new_zeros(1), ends))
    first = offsets[:-1].view(-1, len(values))
    # Where each value goes: its column's place in its row, and on from there for lists.
    places, given = [], []
    for column, value in enumerate(values):
        if isinstance(value, Ragged):
            places.append(expand_spans(first[:, column], value.offsets, len(value.values)))
            given.append(value.values)
        else:
            places.append(first[:, column])
            given.append(value)
    place, value = torch.cat(places), torch.cat(given)
    return torch.empty_like(value).index_copy_(0, place, value), offsets
