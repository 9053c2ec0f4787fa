"""The codes of an index: its vectors once more in fewer bits, in buffers beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tigon.data.values import shorten
from tigon.retrieve.scan import CodedItems, encode_items
from tigon.retrieve.scan.codes import signs_of
from tigon.retrieve.scan.sign import check_bits, projection_of

if TYPE_CHECKING:
    from tigon.retrieve.index import Index

KINDS = ("int8", "sign")
# Of the buffers those that have a row for each item.
BUFFERS = ("codes", "scales")
# Bytes of fp32 that are encoded at once.
PIECE = 1 << 26


def checked(name: str, codes: Any, bits: int = 512) -> str | None:
    """The kind of codes that is asked for.

    Raises: ValueError if there is no such kind, or if signs are not as many as they can be.
    """
    if codes is not None and (not isinstance(codes, str) or codes not in KINDS):
        raise ValueError(f"{name}: codes must be None or one of {', '.join(map(repr, KINDS))}, got {shorten(codes)}.")
    if codes == "sign":
        check_bits(name, bits)
    return None if codes is None else str(codes)


def begin(index: Index, rows: int, device: torch.device) -> None:
    """Buffers for the codes of rows; None without codes."""
    empty: dict[str, Tensor | None] = dict.fromkeys((*BUFFERS, "error"))
    projection = None
    if index.coding == "sign":
        empty["codes"] = torch.zeros(rows, index.bits // 32, dtype=torch.int32, device=device)
        if index.metric != "cosine":  # whose rows all have the same norm
            empty["scales"] = torch.zeros(rows, dtype=torch.bfloat16, device=device)
        projection = projection_of(index.dim, index.bits, 0).to(device, copy=True)
    elif index.coding is not None:
        empty = {
            "codes": torch.zeros(rows, index.dim, dtype=torch.int8, device=device),
            "scales": torch.zeros(rows, device=device),
            "error": torch.zeros(2, device=device),
        }
    for name, buffer in empty.items():
        index.register_buffer(name, buffer)
    index.register_buffer("projection", projection, persistent=False)  # made of two numbers, whenever it is needed


def code_bytes(coding: str | None, dim: int, rows: int, metric: str, bits: int) -> int:
    """Of the codes of rows."""
    if coding == "sign":
        return (bits // 8 + (0 if metric == "cosine" else 2)) * rows + 4 * projection_of(dim, bits, 0).numel()
    return 0 if coding is None else (dim + 4) * rows + 8


def write(index: Index, at: Any, vectors: Tensor) -> None:
    """The codes of vectors, in rows that no search looks at. `error` only ever grows: earlier rows keep their bound."""
    if index.codes is None:
        return
    if index.projection is not None:
        signs = signs_of(vectors, index.projection, scaled=index.scales is not None)
        index.codes[at] = signs.codes
        if index.scales is not None:
            assert signs.scales is not None
            index.scales[at] = signs.scales
        return
    assert index.scales is not None
    assert index.error is not None
    made = encode_items(vectors, "int8")
    assert made.scales is not None
    assert made.error is not None
    index.codes[at], index.scales[at] = made.codes, made.scales
    index.error.copy_(torch.maximum(index.error, made.error))


def renew(index: Index) -> None:
    """All codes from the vectors as they are."""
    if index.codes is None:
        return
    _keep_dtypes(index)
    if index.error is not None:
        index.error.zero_()
    rows = index.embeddings
    size = max(1, PIECE // (rows.shape[1] * 4))
    for start in range(0, len(rows), size):
        write(index, slice(start, start + size), rows[start : start + size])
    index.coded_state = _state(index)


def applied(index: Index, dtype: torch.dtype) -> None:
    """After the buffers were moved or cast; dtype: of the vectors before."""
    if index.codes is None:
        return
    cast = _keep_dtypes(index)
    if index._over:  # the parameter moves with its model, before or after
        index.coded_state = None
    elif index.dtype != dtype or cast:
        renew(index)


def _keep_dtypes(index: Index) -> bool:
    """Scales as they are kept: half() is meant for the vectors. Whether it has cast them."""
    if index.scales is None:
        return False
    dtype = torch.bfloat16 if index.projection is not None else torch.float32
    cast = index.scales.dtype != dtype
    index.scales = index.scales.to(dtype)
    index.error = None if index.error is None else index.error.float()
    return cast


def _state(index: Index) -> tuple[int, ...] | None:
    """What changes when the parameter that the index is over is written; () for an index with vectors of its own."""
    if not index._over:
        return ()
    weight = index._over[0]
    return None if weight.is_inference() else (weight.data_ptr(), weight._version)


def items(index: Index, end: int, candidates: int | None = None) -> Tensor | CodedItems:
    """The first rows for a search: without codes where the parameter may have been written since they were made."""
    rows = index.embeddings[:end]
    if index.codes is None:
        return rows
    state = _state(index)
    if state is None or state != index.coded_state:
        return rows
    scales = None if index.scales is None else index.scales[:end]
    return CodedItems(rows, index.codes[:end], scales, index.error, candidates, index.projection)
