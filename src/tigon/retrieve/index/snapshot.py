"""An index on disk: a folder with snapshots, of which the newest counts.

    jobs.index/snapshot-000002/manifest.json         the index description, and checksums of the files
    jobs.index/snapshot-000002/items.safetensors     the live items, without gaps
    jobs.index/snapshot-000002/journal               updates since then, if the index was opened with a journal

A snapshot is written beside the old snapshot under another name, and renamed when it is completely on disk. That single
rename commits it, so that a kill at any moment leaves either the old or the new snapshot.
"""

from __future__ import annotations

import json
import math
import os
import re
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tigon.data.values import Ints
from tigon.retrieve.ids import KINDS, Ids, StringIds, join_texts, split_texts
from tigon.retrieve.index.format import VectorFormat
from tigon.retrieve.index.rows import ItemDirectory
from tigon.retrieve.index.snapshot_manifest import (
    FORMAT,
    ITEMS,
    MANIFEST,
    read_bytes,
    read_manifest,
    read_schema,
    unseal,
    write_manifest,
)
from tigon.retrieve.index.table import RowTable, allocate_table, distance_bias
from tigon.retrieve.index.writer import ItemWriter
from tigon.retrieve.storage import disk
from tigon.retrieve.storage.folder_lock import FolderLock
from tigon.retrieve.storage.journal import Journal, repair_journal
from tigon.retrieve.transfer import row_index, scatter_rows_

NAME = re.compile(r"snapshot-(\d{6,})")
JOURNAL = "journal"
# How often a reader restarts because its snapshot was replaced.
TRIES = 100


def list_snapshots(path: Path) -> list[Path]:
    """The complete snapshots in a folder, newest last. A folder without a manifest is not a snapshot."""
    if not path.is_dir():
        return []
    whole = (p for p in path.iterdir() if NAME.fullmatch(p.name) and (p / MANIFEST).is_file())
    return sorted(whole, key=lambda p: int(p.name[9:]))


class OpenFolder:
    """The journal and the lock for the folder that an index was opened from, None otherwise. Copies have none."""

    def __init__(self, journal: Journal | None = None, lock: FolderLock | None = None) -> None:
        self.journal, self.lock = journal, lock

    def __reduce__(self) -> tuple[type[OpenFolder], tuple[()]]:
        return OpenFolder, ()

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()
        if self.lock is not None:
            self.lock.release()
        self.journal = self.lock = None


def save_snapshot(table: RowTable, folder: OpenFolder, path: Path) -> None:
    """Write a snapshot of an index, which no update may change meanwhile.

    Args:
        folder: the folder that the index was opened from; its journal restarts if path is this folder.

    Raises: ValueError if another index or process writes to the folder; OSError if the disk is full or the folder
        cannot be written; the previous content is unchanged then.
    """
    is_new = check_folder(path)
    path.mkdir(parents=True, exist_ok=True)
    own = folder.lock if folder.lock is not None and folder.lock.folder == path.resolve() else None
    if own is not None and own.is_held():
        _save(table, folder, path, is_new, with_journal=folder.journal is not None)
        return
    if own is not None and own.pid != os.getpid():
        raise ValueError(
            f"Index.save: {path} was opened by process {own.pid}, of which this process is a fork: its copy of the "
            "index may lack what was written since. Save it to another folder."
        )
    lock = FolderLock("Index.save", path)
    try:
        _save(table, folder, path, is_new, with_journal=own is not None and folder.journal is not None)
    except BaseException:
        lock.release()
        raise
    if own is not None:  # the folder was removed since it was opened, and belongs to this index again
        folder.lock = lock
    else:
        lock.release()


def check_folder(path: Path) -> bool:
    """Check an index's folder. Returns whether the folder must be created.

    Raises: ValueError if the path is a file.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"Index.save: path must be a folder, which is made if it is not there, got the file {path}.")
    return not path.exists()


def _save(table: RowTable, folder: OpenFolder, path: Path, is_new: bool, with_journal: bool) -> None:
    before = clean(path)
    final = path / f"snapshot-{next_number(path):06}"
    partial = path / f"{final.name}{disk.PARTIAL}"
    journal: Journal | None = None
    renamed = False
    try:
        partial.mkdir()
        files = {ITEMS: disk.write_file(partial / ITEMS, disk.serialize(collect_items(table)))}
        content = describe(table.format, table.directory, table)
        write_manifest(partial, {**content, "files": files})
        if with_journal:
            journal = Journal(partial / JOURNAL, content["id"])
        disk.flush_folder(partial)
        disk.rename(partial, final)
        renamed = True
        disk.flush_folder(path)
        if is_new:
            disk.flush_folder(path.resolve().parent)
    except OSError as error:
        said = "it is written, but the disk does not say so" if renamed else "what was there before is there"
        raise OSError(error.errno, f"Index.save: {path}: {error.strerror}; {said}") from error
    finally:
        if not renamed:
            if journal is not None:
                journal.close()
            disk.remove(partial)
        elif journal is not None:
            if folder.journal is not None:
                folder.journal.close()
            journal.path = final / JOURNAL
            folder.journal = journal
    for old in before:
        disk.remove(old)


def clean(path: Path) -> list[Path]:
    """Remove partial snapshots left by killed saves, under the folder's lock. Returns the snapshots that a new snapshot
    replaces: complete snapshots written by Tigon, by their checksums.
    """
    for partial in path.glob(f"snapshot-*{disk.PARTIAL}"):
        disk.remove(partial)
    return [folder for folder in list_snapshots(path) if unseal(read_bytes(folder / MANIFEST)) is not None]


def next_number(path: Path) -> int:
    """A new snapshot's number: larger than all existing numbers, including foreign folders'."""
    names = (re.match(NAME, p.name) for p in path.iterdir())
    return max((int(name[1]) for name in names if name), default=0) + 1


def describe(format: VectorFormat, directory: ItemDirectory, table: RowTable) -> dict[str, Any]:
    """Describe an index for its manifest. directory: all ranks' rows."""
    return {
        "format": FORMAT,
        "id": uuid.uuid4().hex,
        "dim": format.dim,
        "dtype": str(table.dtype).removeprefix("torch."),
        "metric": format.metric,
        "capacity": directory.capacity,
        "codes": format.codes,
        "bits": format.bits,
        "items": len(directory),
        "ids": directory.ids.kind if directory.ids is not None else None,
        "schema": json.loads(table.schema.to_json()),
    }


def collect_items(table: RowTable, ids: Any = None) -> dict[str, Tensor | disk.SelectedRows]:
    """The rows that hold items, in order. ids: the table of their ids; None: the row directory's table."""
    table.scheduler.wait_for_updates(table.device)
    ids = table.directory.ids if ids is None else ids
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
    return items


# --------------------------------------------------------------------------------------------------------------- load


def load_snapshot(path: Path, device: Any) -> RowTable:
    """Load the rows from a folder, including journal updates. No lock is taken: if the snapshot is replaced while it is
    read, the newer snapshot is read.
    """
    name = "Index.load"
    for _ in range(TRIES):
        folder = find_newest(name, path)
        content_before = read_bytes(folder / MANIFEST)
        try:
            table, content = _load(name, folder, device)
            replay(table, folder, content)
        except (OSError, ValueError):
            if not is_replaced(folder, content_before):
                raise
            continue
        if not is_replaced(folder, content_before):
            return table
    raise ValueError(f"{name}: {path} was saved {TRIES} times, each time before it was read: load it again.")


def replay(table: RowTable, folder: Path, content: dict[str, Any]) -> None:
    """Replay a snapshot's journal."""
    ItemWriter(table).replay(folder / JOURNAL, content["id"])


def is_replaced(folder: Path, manifest: bytes | None) -> bool:
    """Whether a snapshot whose manifest was read has since been removed or replaced."""
    path = folder / MANIFEST
    return read_bytes(path) != manifest or not path.exists()


def open_snapshot(path: Path, device: Any, *, journal: bool, repair: bool) -> tuple[RowTable, OpenFolder]:
    """Load the rows from a folder and hold its lock; with a journal, later updates are appended."""
    name = "Index.open"
    find_newest(name, path)  # or a lock would be created in a folder without an index
    opened = OpenFolder()
    try:
        opened.lock = FolderLock(name, path)
    except OSError:  # without a journal, a read-only folder needs no lock
        if journal or repair:
            raise
    try:
        folder = find_newest(name, path)
        table, content = _load(name, folder, device)
        if repair:
            repair_journal(folder / JOURNAL, content["id"])
        if journal:
            opened.journal = Journal(folder / JOURNAL, content["id"])
        replay(table, folder, content)
        if opened.journal is not None:
            disk.flush_folder(folder)
        if opened.lock is not None:
            for old in clean(path)[:-1]:  # left by a kill
                disk.remove(old)
    except BaseException:
        opened.close()
        raise
    return table, opened


def find_newest(name: str, path: Path) -> Path:
    """Find the newest complete snapshot.

    Raises: ValueError if there is none.
    """
    for _ in range(10):  # a listing during a save may show neither the old nor the new snapshot
        if whole := list_snapshots(path):
            return whole[-1]
    raise ValueError(f"{name}: path must be a folder that Index.save wrote, got {path}, which holds no snapshot.")


def _load(name: str, folder: Path, device: Any) -> tuple[RowTable, dict[str, Any]]:
    content = read_manifest(name, folder)
    check_files(name, folder, content["files"])
    table = allocate_table(parse_format(content), content["capacity"], read_schema(name, folder, content), device)
    table.directory.ids, _ = fill(name, table, folder, content)
    table.restart()
    return table, content


def parse_format(content: dict[str, Any]) -> VectorFormat:
    """Parse a manifest's vector format."""
    return VectorFormat.parse("Index", *(content[key] for key in ("dim", "dtype", "metric", "codes", "bits")))


def check_files(name: str, folder: Path, files: dict[str, Any]) -> None:
    """Compare sizes and checksums.

    Raises: ValueError for the first file that is missing or damaged.
    """
    for file, file_about in files.items():
        path = folder / file
        if not path.exists():
            raise ValueError(f"{name}: {path} is missing.")
        if disk.compute_digest(path) != file_about:
            raise ValueError(f"{name}: {path} is damaged: its checksum is not that of the manifest.")


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
                    raise _UnfitError("items have the same place")
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
        raise ValueError(f"{name}: {folder} is damaged: its files hold {is_filled.sum():,} items of {count:,}.")
    ids = KINDS[content["ids"]]() if content["ids"] else None
    if isinstance(ids, StringIds):
        keys = ids.keys(texts) if len(set(texts)) == count else keys[:0]
    if len(np.unique(keys)) < count or (keys == -1).any():
        raise ValueError(f"{name}: {folder} is damaged: it does not have an id for each item.")
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
        raise _UnfitError("it is not a whole safetensors file") from None


def _read_places(table: RowTable, file: Any, content: dict[str, Any]) -> Ints:
    """The global positions of a file's items; the file's tensors must fit the index.

    Raises: _UnfitError if they do not.
    """
    names = {*file.keys()}
    sharded, strings = "shards" in content, content["ids"] == "str"

    def shape(name: str, dtype: torch.dtype) -> list[int]:
        if name not in names or file.get_slice(name).get_dtype() != disk.DTYPES[dtype]:
            raise _UnfitError(f"it must hold {name} of {dtype}")
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
        raise _UnfitError(f"it holds {', '.join(sorted(names - wanted.keys()))}, which such an index does not have")
    for name, (dtype, expected) in wanted.items():
        if shape(name, dtype) != expected:
            raise _UnfitError(f"{name} must have shape {expected}, got {shape(name, dtype)}")
    places: Ints = file.get_tensor("places").numpy() if sharded else np.arange(count)
    if count and not 0 <= places.min() <= places.max() < content["items"]:
        raise _UnfitError("it has places of other items")
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
