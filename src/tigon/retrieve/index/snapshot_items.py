"""A snapshot's item files in safetensors format: the live items without gaps, written and read in pieces."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tigon.data.values import Ints
from tigon.retrieve.ids import KINDS, Ids, StringIds, join_texts, split_texts
from tigon.retrieve.index.ranks import Ranks
from tigon.retrieve.index.table import RowTable, distance_bias
from tigon.retrieve.index.writer import ItemWriter
from tigon.retrieve.storage import disk
from tigon.retrieve.transfer import row_index, scatter_rows_


def collect_items(writer: ItemWriter, ranks: Ranks) -> dict[str, Tensor | disk.SelectedRows]:
    """This rank's items in row order, for several ranks with each item's position among all items."""
    table, ids = writer.table, writer.directory.ids
    table.scheduler.wait_for_updates(table.device)
    items: dict[str, Tensor | disk.SelectedRows]
    rows = np.flatnonzero(table.rows.live_mask())
    buffers = {"embeddings": table.embeddings, **({} if table.codes is None else table.codes.row_buffers())}
    if len(rows) == table.rows.end:
        selected: Any = slice(len(rows))
        items = {name: buffer[: len(rows)] for name, buffer in buffers.items()}
    else:
        selected = torch.from_numpy(rows).to(table.device)
        items = {name: disk.SelectedRows(buffer, selected) for name, buffer in buffers.items()}
    keys = table.item_ids[selected]
    items |= {"attributes": table.words[:, selected], "item_ids": keys}
    if table.codes is not None and table.codes.error is not None:
        items["error"] = table.codes.error
    if isinstance(ids, StringIds):
        blob, ends = join_texts([ids.text(key) for key in keys.tolist()])
        items |= {"item_ids": torch.arange(len(ends)), "id_bytes": blob, "id_ends": ends}
    if writer.directory is not table.directory:
        places = np.cumsum(writer.directory.rows.live_mask()) - 1
        items["places"] = torch.from_numpy(places[rows * ranks.count + ranks.own].astype(np.int64))
    return items


def fill(
    name: str, table: RowTable, folder: Path, content: dict[str, Any], rank: int = 0, ranks: int = 1
) -> tuple[Ids | None, Ints]:
    """Read items into the buffers in pieces: each rank takes the items at its positions.

    The item at position p becomes row p // ranks on rank p % ranks.

    Returns: an id table, and all items' keys in order of position.
    Raises: ValueError if the files do not belong to such an index.
    """
    count, are_texts = content["items"], content["ids"] == "str"
    keys = np.full(count, -1)
    texts: list[str] = [""] * count if are_texts else []
    is_filled = np.zeros(count, dtype=bool)
    codes = {} if table.codes is None else table.codes.row_buffers()
    error = None if table.codes is None else table.codes.error
    for file_name in content["files"]:
        try:
            with _open(folder / file_name) as file:
                places = _read_places(table, file, content)
                if is_filled[places].any() or len(np.unique(places)) < len(places):
                    raise _UnfitError("several items have the same position")
                is_filled[places] = True
                if are_texts:
                    for place, text in zip(places.tolist(), _read_texts(file), strict=True):
                        texts[place] = text
                else:
                    keys[places] = file.get_tensor("item_ids").numpy()
                if error is not None:
                    error.copy_(torch.maximum(error, file.get_tensor("error").to(table.device)))
                for buffer_name, buffer in {"embeddings": table.embeddings, **codes}.items():
                    _copy_rows(file.get_slice(buffer_name), buffer, places, rank, ranks)
                words = file.get_slice("attributes")
                for word, buffer in enumerate(table.words):
                    _copy_rows(words[word : word + 1][0], buffer, places, rank, ranks)
        except _UnfitError as unfit:
            raise ValueError(f"{name}: {folder / file_name} is damaged: {unfit}.") from None
    if not is_filled.all():
        raise ValueError(f"{name}: {folder} is damaged: the files hold {is_filled.sum():,} of {count:,} items.")
    ids = KINDS[content["ids"]]() if content["ids"] else None
    if isinstance(ids, StringIds):
        keys = ids.keys(texts) if len(set(texts)) == count else keys[:0]
    if len(np.unique(keys)) < count or (keys == -1).any():
        raise ValueError(f"{name}: {folder} is damaged: some items have no id.")
    own = keys[rank::ranks]
    table.item_ids[: len(own)] = torch.from_numpy(own).to(table.device)
    table.live.copy_(make_live_bits(len(own), len(table.live)))
    if table.bias is not None:
        table.bias[: len(own)] = distance_bias(table.embeddings[: len(own)])
    return ids, keys


class _UnfitError(ValueError):
    """An item file that does not belong to the index."""


def _read_texts(file: Any) -> list[str]:
    try:
        return split_texts(file.get_tensor("id_bytes").numpy().tobytes(), file.get_tensor("id_ends").numpy())
    except ValueError as error:
        raise _UnfitError(str(error)) from None


def _open(path: Path) -> Any:
    """Open a safetensors file, whose tensors are read lazily."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        from tigon.install import install

        raise ImportError(f"Index.load: needs safetensors: {install('retrieve')}.") from None
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, RuntimeError):  # torch's error for a file that cannot be opened
        raise _UnfitError("not a complete safetensors file") from None


def _read_places(table: RowTable, file: Any, content: dict[str, Any]) -> Ints:
    """The global positions of a file's items; the file's tensors must fit the index.

    Raises: _UnfitError if they do not.
    """
    names = {*file.keys()}
    sharded, strings = "shards" in content, content["ids"] == "str"

    def shape(name: str, dtype: torch.dtype) -> list[int]:
        if name not in names or file.get_slice(name).get_dtype() != disk.DTYPES[dtype]:
            raise _UnfitError(f"the file must hold {name} of {dtype}")
        return list(file.get_slice(name).get_shape())

    count = math.prod(shape("places", torch.int64)) if sharded else content["items"]
    codes = {} if table.codes is None else table.codes.row_buffers()
    wanted: dict[str, tuple[torch.dtype, list[int]]] = {
        "embeddings": (table.dtype, [count, table.format.dim]),
        "attributes": (torch.int64, [table.schema.words, count]),
        "item_ids": (torch.int64, [count]),
        **{name: (buffer.dtype, [count, *buffer.shape[1:]]) for name, buffer in codes.items()},
    }
    if strings:
        bytes_of_ids = math.prod(shape("id_bytes", torch.uint8))
        wanted |= {"id_ends": (torch.int64, [count]), "id_bytes": (torch.uint8, [bytes_of_ids])}
    if sharded:
        wanted["places"] = torch.int64, [count]
    if table.codes is not None and table.codes.error is not None:
        wanted["error"] = table.codes.error.dtype, [*table.codes.error.shape]
    if names - wanted.keys():
        raise _UnfitError(f"the file holds {', '.join(sorted(names - wanted.keys()))}, unknown to this index")
    for name, (dtype, expected) in wanted.items():
        if shape(name, dtype) != expected:
            raise _UnfitError(f"{name} must have shape {expected}, got {shape(name, dtype)}")
    places: Ints = file.get_tensor("places").numpy() if sharded else np.arange(count)
    if count and not 0 <= places.min() <= places.max() < content["items"]:
        raise _UnfitError("the file has positions outside the index")
    return places


def _copy_rows(part: Any, buffer: Tensor, places: Ints, rank: int, ranks: int) -> None:
    """Copy this rank's rows from a file into the buffer."""
    rows = max(1, disk.PIECE // (buffer[:1].numel() * buffer.element_size()))
    for start in range(0, len(places), rows):
        here = places[start : start + rows]
        own = np.flatnonzero(here % ranks == rank)
        if not len(own):
            continue
        piece = part[start : start + len(here)]
        if len(own) < len(here):
            narrow = piece.element_size() == 1  # torch cannot index float8
            piece = (piece.view(torch.uint8) if narrow else piece)[torch.from_numpy(own)].view(piece.dtype)
        scatter_rows_(buffer, row_index(here[own] // ranks, buffer.device), piece.to(buffer.device))


def make_live_bits(items: int, numbers: int) -> Tensor:
    """Set the first rows' live bits."""
    bits = np.zeros(numbers * 32, dtype=np.uint8)
    bits[:items] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32).copy())
