"""Vector codes: the index's vectors once more in fewer bits, in buffers beside the vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tigon.retrieve.index.format import VectorFormat
from tigon.retrieve.scan import CodedItems, encode_items
from tigon.retrieve.scan.encode import encode_signs
from tigon.retrieve.scan.sign import make_projection

# Buffers with a row for each item.
BUFFERS = ("codes", "scales")
# Bytes in fp32 that are encoded at once.
PIECE = 1 << 26


class VectorCodes(nn.Module):
    """Codes for the vectors in rows.

    Args:
        format: the vector format; `format.codes` is not None.
        rows: the buffers' row count.

    Attributes:
        codes: (rows, …). scales: (rows,); None for codes "sign" with metric "cosine", whose rows have the same norm.
        error: (2,), for codes "int8": the largest rounding error and code norm over all rows.
        projection: for codes "sign"; computed from two numbers, and not part of the state.
        version: `RowTable.version` of the vectors that were encoded; None where unknown.
    """

    codes: Tensor
    scales: Tensor | None
    error: Tensor | None
    projection: Tensor | None

    def __init__(self, format: VectorFormat, rows: int, device: torch.device) -> None:
        super().__init__()
        self.format = format
        self.version: tuple[int, ...] | None = None
        buffers: dict[str, Tensor | None] = {"scales": None, "error": None}
        projection = None
        if format.codes == "sign":
            buffers["codes"] = torch.zeros(rows, format.bits // 32, dtype=torch.int32, device=device)
            if format.metric != "cosine":
                buffers["scales"] = torch.zeros(rows, dtype=torch.bfloat16, device=device)
            projection = make_projection(format.dim, format.bits, 0).to(device, copy=True)
        else:
            buffers["codes"] = torch.zeros(rows, format.dim, dtype=torch.int8, device=device)
            buffers |= {"scales": torch.zeros(rows, device=device), "error": torch.zeros(2, device=device)}
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self.register_buffer("projection", projection, persistent=False)

    def row_buffers(self) -> dict[str, Tensor]:
        """The buffers with a row for each item, by name."""
        return {name: buffer for name in BUFFERS if (buffer := getattr(self, name)) is not None}

    def write(self, rows: Any, vectors: Tensor) -> None:
        """Encode vectors into rows that no search reads. `error` only grows, so that earlier rows' bound stays
        valid.
        """
        if self.projection is not None:
            signs = encode_signs(vectors, self.projection, scaled=self.scales is not None)
            self.codes[rows] = signs.codes
            if self.scales is not None:
                assert signs.scales is not None
                self.scales[rows] = signs.scales
            return
        assert self.scales is not None
        assert self.error is not None
        encoded = encode_items(vectors, "int8")
        assert encoded.scales is not None
        assert encoded.error is not None
        self.codes[rows], self.scales[rows] = encoded.codes, encoded.scales
        self.error.copy_(torch.maximum(self.error, encoded.error))

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `RowTable` loads the codes with its own buffers, under its locks."""

    load = nn.Module._load_from_state_dict

    def rebuild(self, vectors: Tensor, version: tuple[int, ...] | None) -> None:
        """Encode all vectors again."""
        self.restore_dtypes()
        if self.error is not None:
            self.error.zero_()
        size = max(1, PIECE // (vectors.shape[1] * 4))
        for start in range(0, len(vectors), size):
            self.write(slice(start, start + size), vectors[start : start + size])
        self.version = version

    def restore_dtypes(self) -> bool:
        """Restore the scales' dtype after a cast meant for the vectors. Returns whether there was such a cast."""
        if self.scales is None:
            return False
        dtype = torch.bfloat16 if self.projection is not None else torch.float32
        was_cast = self.scales.dtype != dtype
        self.scales = self.scales.to(dtype)
        self.error = None if self.error is None else self.error.float()
        return was_cast

    def attach(self, vectors: Tensor, candidates: int | None = None) -> CodedItems:
        """The first rows with their codes, for a search."""
        end = len(vectors)
        scales = None if self.scales is None else self.scales[:end]
        return CodedItems(vectors, self.codes[:end], scales, self.error, candidates, self.projection)


def code_bytes(format: VectorFormat, rows: int) -> int:
    """The byte size of a row range's codes."""
    if format.codes == "sign":
        per_row = format.bits // 8 + (0 if format.metric == "cosine" else 2)
        return per_row * rows + 4 * make_projection(format.dim, format.bits, 0).numel()
    return 0 if format.codes is None else (format.dim + 4) * rows + 8
