"""Items to be written: a batch is parsed and checked as a whole before any item is written."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tigon.data.values import Ints, Value
from tigon.retrieve.arguments import as_tensor
from tigon.retrieve.index.format import VectorFormat

# Half a step above the largest float8_e4m3fn, 448.
BEYOND_FLOAT8 = 464.0
# For each dtype the exponent bits, which are all set only in infinity and NaN, and the integer dtype of equal width.
EXPONENTS = {
    torch.float16: (np.uint16, 0x7C00), torch.bfloat16: (np.uint16, 0x7F80), torch.float32: (np.uint32, 0x7F800000),
}  # fmt: skip


class ItemBatch(NamedTuple):
    """Items that fit an index.

    Attributes:
        ids: distinct. vectors: as they are stored; None for an index over a parameter. words: (W, items), attributes.
        growth: the values to add to the vocabularies, by column.
        lookup: the ids' keys and rows, −1 for new ids; None for an index that has no ids yet.
    """

    ids: Ints | list[str]
    vectors: Tensor | None
    words: Ints
    growth: dict[str, list[Value]]
    lookup: tuple[Ints, Ints] | None = None


def parse_vectors(embeddings: Any, ids: Ints | list[str], format: VectorFormat) -> Tensor:
    """Convert item vectors to the storage format.

    Raises: ValueError, naming the first offending id, for vectors that do not fit.
    """
    name = "Index.upsert"
    given = as_tensor(name, "embeddings", embeddings)
    source = given.data_ptr()
    if given.dim() != 2 or given.shape[1] != format.dim:
        first = f", id {show_id(ids, 0)} first" if len(ids) else ""
        raise ValueError(
            f"{name}: embeddings must be (items, {format.dim}), the index's dim, got {tuple(given.shape)}{first}."
        )
    if given.shape[0] != len(ids):
        raise ValueError(
            f"{name}: embeddings must have a row for each of the {len(ids):,} ids, got {given.shape[0]:,}."
        )
    if given.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64, format.dtype):
        raise ValueError(f"{name}: embeddings must be floats, got {given.dtype}.")
    if format.metric == "cosine":
        wide = given.float()
        lengths = wide.norm(dim=1, keepdim=True)
        _refuse(lengths[:, 0] == 0, ids, f"{name}: embeddings must have a norm above 0 for cosine, got 0 for id")
        given = torch.where(lengths.isfinite(), wide / lengths, wide)
    stored = given.to(format.dtype)
    is_narrow = stored.element_size() == 1  # torch may write infinity, and larger numbers, as the largest number
    if is_narrow or not _are_all_finite(stored):
        _refuse(~_are_finite(given), ids, f"{name}: embeddings must be finite, got NaN or infinity for id")
        large = (given.float().abs() >= BEYOND_FLOAT8).any(1) if is_narrow else ~_are_finite(stored)
        dtype = str(format.dtype).removeprefix("torch.")
        _refuse(large, ids, f"{name}: embeddings must fit {dtype}, got larger numbers for id")
    return stored.clone() if stored.data_ptr() == source else stored


def show_id(ids: Ints | list[str], position: int) -> str:
    return repr(ids[position]) if isinstance(ids, list) else str(ids[position])


def _are_all_finite(vectors: Tensor) -> bool:
    if vectors.device.type != "cpu" or vectors.dtype not in EXPONENTS or not vectors.is_contiguous():
        return bool(_are_finite(vectors).all())
    kind, exponent = EXPONENTS[vectors.dtype]  # on a CPU six times as fast as `isfinite`
    bits = vectors.view(torch.int16 if kind is np.uint16 else torch.int32).numpy().view(kind)
    return not ((bits & kind(exponent)) == exponent).any()


def _are_finite(vectors: Tensor) -> Tensor:
    wide = vectors.float() if vectors.element_size() == 1 else vectors
    return wide.isfinite().all(1)


def _refuse(wrong: Tensor, ids: Ints | list[str], sentence: str) -> None:
    if bool(wrong.any()):
        raise ValueError(f"{sentence} {show_id(ids, int(wrong.nonzero()[0, 0]))}.")
