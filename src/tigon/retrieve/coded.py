"""The codes of an index: its vectors once more in fewer bits, in buffers beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tigon.ops.filtered_topk import CodedItems, encode_items

if TYPE_CHECKING:
    from tigon.retrieve.index import Index

KINDS = ("int8",)
# Of the buffers those that have a row for each item.
BUFFERS = ("codes", "scales")
# Bytes of fp32 that are encoded at once.
PIECE = 1 << 26


def checked(name: str, codes: Any) -> str | None:
    """The kind of codes that is asked for.

    Raises: ValueError if there is no such kind.
    """
    if codes is not None and codes not in KINDS:
        raise ValueError(f"{name}: codes must be None or one of {', '.join(map(repr, KINDS))}, got {codes!r}.")
    return codes if codes is None else str(codes)


def begin(index: Index, rows: int, device: torch.device) -> None:
    """Buffers for the codes of rows; None without codes."""
    empty: dict[str, Tensor | None] = dict.fromkeys((*BUFFERS, "error"))
    if index.coding is not None:
        empty = {
            "codes": torch.zeros(rows, index.dim, dtype=torch.int8, device=device),
            "scales": torch.zeros(rows, device=device),
            "error": torch.zeros(2, device=device),
        }
    for name, buffer in empty.items():
        index.register_buffer(name, buffer)


def code_bytes(coding: str | None, dim: int, rows: int) -> int:
    """Of the codes of rows."""
    return 0 if coding is None else (dim + 4) * rows + 8


def write(index: Index, at: Any, vectors: Tensor) -> None:
    """The codes of vectors, in rows that no search looks at. `error` only ever grows: earlier rows keep their bound."""
    if index.codes is None or index.scales is None or index.error is None:
        return
    made = encode_items(vectors, "int8")
    assert made.scales is not None
    assert made.error is not None
    index.codes[at], index.scales[at] = made.codes, made.scales
    index.error.copy_(torch.maximum(index.error, made.error))


def renew(index: Index) -> None:
    """All codes from the vectors as they are."""
    if index.scales is None or index.error is None:
        return
    # half() is meant for the vectors.
    index.scales, index.error = index.scales.float(), index.error.float().zero_()
    rows = index.embeddings
    size = max(1, PIECE // (rows.shape[1] * 4))
    for start in range(0, len(rows), size):
        write(index, slice(start, start + size), rows[start : start + size])
    index.coded_state = _state(index)


def applied(index: Index, dtype: torch.dtype) -> None:
    """After the buffers were moved or cast; dtype: of the vectors before."""
    if index.scales is None:
        return
    if index._over:  # the parameter moves with its model, before or after
        index.scales, index.coded_state = index.scales.float(), None
        index.error = None if index.error is None else index.error.float()
    elif index.dtype != dtype or index.scales.dtype != torch.float32:
        renew(index)


def _state(index: Index) -> tuple[int, ...] | None:
    """What changes when the parameter that the index is over is written; () for an index with vectors of its own."""
    if not index._over:
        return ()
    weight = index._over[0]
    return None if weight.is_inference() else (weight.data_ptr(), weight._version)


def items(index: Index, end: int) -> Tensor | CodedItems:
    """The first rows for a search: without codes where the parameter may have been written since they were made."""
    rows = index.embeddings[:end]
    if index.codes is None or index.scales is None:
        return rows
    state = _state(index)
    if state is None or state != index.coded_state:
        return rows
    return CodedItems(rows, index.codes[:end], index.scales[:end], index.error)
