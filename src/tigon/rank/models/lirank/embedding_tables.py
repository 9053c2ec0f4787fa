"""Embedding tables with a common width in a single tensor, read with one launch; fp32 or 8-bit.

A column is one use of a field: its codes, or values derived from them, such as quotient and remainder. In a group with
a common width, column f owns the weight rows starts[f] … starts[f + 1] − 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.ops.embedding_bag import embedding_bag
from tigon.ops.quantized_table import quantize_rows, quantized_embedding
from tigon.rank.data.ragged import Ragged, expand_spans
from tigon.rank.models.lirank.config import Bits

Grad = Literal["dense", "rows"]


class EmbeddingTables(nn.Module):
    """Tables with a common width.

    Args:
        sizes: rows per column. width: embedding width.
        bits: 32, or 8 for codes with a scale and an offset per row, without gradients.

    Attributes:
        weight: (total rows, width), or codes (rows, width) uint8 and scale_offset (rows, 2) fp16.
        grad: "rows" for row-sparse gradients, as required by `tigon.training.RowAdagrad`.
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
        """(column rows, width), a column's slice of the weight."""
        return self.weight[self.first[column] : self.first[column + 1]]

    def bags(self, values: Sequence[Tensor | Ragged], first: int, dtype: torch.dtype) -> Tensor:
        """(n, F, width): mean embedding for each column's values, in one launch.

        values: for F columns starting at `first`, n each: codes, or code lists.
        """
        flat, offsets = pack_values(values)
        mode: Literal["sum", "mean"] = "sum" if offsets is None else "mean"
        return self._read(flat, offsets, mode, self.starts[first : first + len(values) + 1], dtype)

    def look_up(self, values: Tensor, column: int, dtype: torch.dtype) -> Tensor:
        """(m, width): embeddings for values in a single column."""
        return self._read(values[:, None], None, "sum", self.starts[column : column + 2], dtype)[:, 0]

    def _read(
        self, values: Tensor, offsets: Tensor | None, mode: Literal["sum", "mean"], fields: Tensor, dtype: torch.dtype
    ) -> Tensor:
        if self.bits == 8:
            # Autocast's dtype, or the other weights': codes are dequantized to this dtype on read.
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
        """(…, width): `look_up` with torch operators alone, for exported programs."""
        rows = values + self.first[column]
        if self.bits == 32:
            return F.embedding(rows, self.weight).to(dtype)
        scale, offset = self.scale_offset[rows].to(dtype).split(1, -1)
        out: Tensor = self.codes[rows].to(dtype) * scale + offset
        return out

    @torch.no_grad()
    def quantize_from(self, other: EmbeddingTables) -> None:
        """Quantize a 32-bit table's rows to 8 bits.

        Raises: ValueError for numbers outside fp16's range.
        """
        codes, scale_offset = quantize_rows(other.weight)
        self.codes.copy_(codes)
        self.scale_offset.copy_(scale_offset)

    @property
    def nbytes(self) -> int:
        """Bytes in the rows."""
        return self.weight.nbytes if self.bits == 32 else self.codes.nbytes + self.scale_offset.nbytes


def pack_values(values: Sequence[Tensor | Ragged]) -> tuple[Tensor, Tensor | None]:
    """Pack values from F columns for `embedding_bag`, with a row's columns adjacent.

    Returns: (n, F) and None if each column has one value per row; else (m,), and offsets (n · F + 1,).
    """
    if all(isinstance(value, Tensor) for value in values):
        return torch.stack([value for value in values if isinstance(value, Tensor)], 1), None
    lengths = [value.lengths if isinstance(value, Ragged) else torch.ones_like(value) for value in values]
    ends = torch.stack(lengths, 1).reshape(-1).cumsum(0)
    offsets = torch.cat((ends.new_zeros(1), ends))
    first = offsets[:-1].view(-1, len(values))
    # Target position for each value: its column's offset within the row; list values follow consecutively.
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
