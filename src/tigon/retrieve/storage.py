"""An index on the disk: snapshots beside each other in one folder, of which the newest counts.

    jobs.index/snapshot-000002/manifest.json         what the index is, and checksums of the files beside it
    jobs.index/snapshot-000002/items.safetensors     the items that are there, without gaps
    jobs.index/snapshot-000002/journal               updates since then, if the index was opened with a journal

A snapshot is written beside the old one under another name, and is renamed when all of it is on the disk. That one
rename is what makes it count, so that a kill at any moment leaves the old snapshot or the new one.
"""

from __future__ import annotations

import json
import math
import os
import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tigon.data.values import Ints
from tigon.retrieve import coded, disk
from tigon.retrieve.folder_lock import FolderLock
from tigon.retrieve.ids import KINDS, StringIds, split_texts
from tigon.retrieve.journal import Journal, repair, replay
from tigon.retrieve.manifest import (
    FORMAT,
    ITEMS,
    MANIFEST,
    read_bytes,
    read_manifest,
    read_schema,
    unseal,
    write_manifest,
)
from tigon.retrieve.writing import at_rows, distance_bias, put

if TYPE_CHECKING:
    from tigon.retrieve.index import Index

NAME = re.compile(r"snapshot-(\d{6,})")
JOURNAL = "journal"
# How often a reader begins again because the snapshot that it reads was replaced.
TRIES = 100


def snapshots(path: Path) -> list[Path]:
    """The whole snapshots in a folder, the newest last. A folder of such a name without a manifest is none."""
    if not path.is_dir():
        return []
    whole = (p for p in path.iterdir() if NAME.fullmatch(p.name) and (p / MANIFEST).is_file())
    return sorted(whole, key=lambda p: int(p.name[9:]))


def save(index: Index, path: Path) -> None:
    """Write a snapshot. The index has to be held still.

    Raises: ValueError if another index or process writes to the folder; OSError if the disk is full or the folder
        cannot be written; what was there before is there still.
    """
    made = check_folder(path)
    path.mkdir(parents=True, exist_ok=True)
    opened = index.folder_lock is not None and index.folder_lock.folder == path.resolve()
    if opened and index.folder_lock is not None and index.folder_lock.is_held():
        _save(index, path, made, opened)
        return
    if opened and index.folder_lock is not None and index.folder_lock.pid != os.getpid():
        raise ValueError(
            f"Index.save: {path} was opened by process {index.folder_lock.pid}, of which this process is a fork: its "
            "copy of the index may lack what was written since. Save it to another folder."
        )
    lock = FolderLock("Index.save", path)
    try:
        _save(index, path, made, opened)
    except BaseException:
        lock.release()
        raise
    if opened:  # the folder was removed since it was opened, and is this index's again
        index.folder_lock = lock
    else:
        lock.release()


def check_folder(path: Path) -> bool:
    """Whether an index's folder has to be made.

    Raises: ValueError if it is a file.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"Index.save: path must be a folder, which is made if it is not there, got the file {path}.")
    return not path.exists()


def _save(index: Index, path: Path, made: bool, opened: bool) -> None:
    before = clean(path)
    final = path / f"snapshot-{next_number(path):06}"
    partial = path / f"{final.name}{disk.PARTIAL}"
    journal: Journal | None = None
    renamed = False
    try:
        partial.mkdir()
        files = {ITEMS: disk.write_file(partial / ITEMS, disk.safetensors(items(index)))}
        content = about(index, index.capacity, len(index))
        write_manifest(partial, {**content, "files": files})
        if opened and index.journal is not None:
            journal = Journal(partial / JOURNAL, content["id"])
        disk.flush_folder(partial)
        disk.rename(partial, final)
        renamed = True
        disk.flush_folder(path)
        if made:
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
            if index.journal is not None:
                index.journal.close()
            journal.path = final / JOURNAL
            index.journal = journal
    for old in before:
        disk.remove(old)


def clean(path: Path) -> list[Path]:
    """Remove what a kill left of a save, under the folder's lock. Returns the snapshots that a new one replaces: whole
    ones that Tigon wrote, by their checksums."""
    for partial in path.glob(f"snapshot-*{disk.PARTIAL}"):
        disk.remove(partial)
    return [folder for folder in snapshots(path) if unseal(read_bytes(folder / MANIFEST)) is not None]


def next_number(path: Path) -> int:
    """The number of a new snapshot: behind all that there are, whoever made them."""
    names = (re.match(NAME, p.name) for p in path.iterdir())
    return max((int(name[1]) for name in names if name), default=0) + 1


def about(index: Index, capacity: int, count: int) -> dict[str, Any]:
    """What an index of so many items is, for its manifest."""
    return {
        "format": FORMAT,
        "id": uuid.uuid4().hex,
        "dim": index.dim,
        "dtype": str(index.dtype).removeprefix("torch."),
        "metric": index.metric,
        "capacity": capacity,
        "codes": index.coding,
        "bits": index.bits,
        "items": count,
        "ids": index.ids.kind if index.ids is not None else None,
        "schema": json.loads(index.schema.to_json()),
    }


def items(index: Index) -> dict[str, Tensor | disk.Picked]:
    """The rows that hold items, in their order."""
    index.turns.settle(index.device)
    found: dict[str, Tensor | disk.Picked]
    rows = np.flatnonzero(index.rows.there())
    if len(rows) == index.rows.end:
        end = len(rows)
        found = {"embeddings": index.embeddings[:end], "attributes": index.attributes[:, :end]}
        found |= {name: buffer[:end] for name, buffer in _codes(index).items()}
        keys = index.item_ids[:end]
    else:
        at = torch.from_numpy(rows).to(index.device)
        found = {"embeddings": disk.Picked(index.embeddings, at), "attributes": index.attributes[:, at]}
        found |= {name: disk.Picked(buffer, at) for name, buffer in _codes(index).items()}
        keys = index.item_ids[at]
    found["item_ids"] = keys
    if index.error is not None:
        found["error"] = index.error
    if isinstance(index.ids, StringIds):
        texts = [index.ids.text(key).encode() for key in keys.tolist()]
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        found["item_ids"] = torch.arange(len(texts))
        blob = torch.frombuffer(bytearray(b"".join(texts)) or bytearray(1), dtype=torch.uint8)
        found["id_bytes"] = blob[: int(ends[-1]) if len(ends) else 0]
        found["id_ends"] = torch.from_numpy(ends)
    return found


def _codes(index: Index) -> dict[str, Tensor]:
    """The buffers of codes, by their names."""
    return {name: buffer for name in coded.BUFFERS if (buffer := getattr(index, name)) is not None}


# --------------------------------------------------------------------------------------------------------------- load


def load(kind: type[Index], path: Path, device: Any) -> Index:
    """The index of a folder, with the updates of its journal. No lock is taken: if the snapshot is replaced while it is
    read, the newer one is read."""
    name = "Index.load"
    for _ in range(TRIES):
        folder = newest(name, path)
        content_before = read_bytes(folder / MANIFEST)
        try:
            index, content = _load(name, kind, folder, device)
            replay(index, folder / JOURNAL, content["id"])
        except (OSError, ValueError):
            if not is_replaced(folder, content_before):
                raise
            continue
        if not is_replaced(folder, content_before):
            return index
    raise ValueError(f"{name}: {path} was saved {TRIES} times, each time before it was read: load it again.")


def is_replaced(folder: Path, manifest: bytes | None) -> bool:
    """Whether a snapshot whose manifest was read has gone since, or is another."""
    path = folder / MANIFEST
    return read_bytes(path) != manifest or not path.exists()


def open_index(kind: type[Index], path: Path, device: Any, journal: bool, mend: bool) -> Index:
    """The index of a folder, which it has the lock of from here on; with a journal that goes on."""
    name = "Index.open"
    newest(name, path)  # or a lock would be made in what is no index
    lock: FolderLock | None = None
    opened: Journal | None = None
    try:
        lock = FolderLock(name, path)
    except OSError:
        if journal or mend:
            raise
        # Without a journal, in a folder that nobody can save to.
    try:
        folder = newest(name, path)
        index, content = _load(name, kind, folder, device)
        if mend:
            repair(folder / JOURNAL, content["id"])
        if journal:
            opened = Journal(folder / JOURNAL, content["id"])
        replay(index, folder / JOURNAL, content["id"])
        if opened is not None:
            disk.flush_folder(folder)
        if lock is not None:
            for old in clean(path)[:-1]:  # what a kill left behind
                disk.remove(old)
    except BaseException:
        if opened is not None:
            opened.close()
        if lock is not None:
            lock.release()
        raise
    index.journal, index.folder_lock = opened, lock
    return index


def newest(name: str, path: Path) -> Path:
    """The snapshot that counts.

    Raises: ValueError if there is none.
    """
    for _ in range(10):  # a listing beside a save may show neither the old snapshot nor the new one
        if whole := snapshots(path):
            return whole[-1]
    raise ValueError(f"{name}: path must be a folder that Index.save wrote, got {path}, which holds no snapshot.")


def _load(name: str, kind: type[Index], folder: Path, device: Any) -> tuple[Index, dict[str, Any]]:
    content = read_manifest(name, folder)
    check_files(name, folder, content["files"])
    index = kind(
        content["dim"], content["capacity"], content["dtype"], content["metric"],
        read_schema(name, folder, content), device, content["codes"], content["bits"],
    )  # fmt: skip
    fill(name, index, folder, content)
    return index, content


def check_files(name: str, folder: Path, files: dict[str, Any]) -> None:
    """Compare sizes and checksums.

    Raises: ValueError for the first file that is missing or damaged.
    """
    for file, file_about in files.items():
        path = folder / file
        if not path.exists():
            raise ValueError(f"{name}: {path} is missing.")
        if disk.digest_of(path) != file_about:
            raise ValueError(f"{name}: {path} is damaged: its checksum is not that of the manifest.")


def fill(name: str, index: Index, folder: Path, about: dict[str, Any], rank: int = 0, ranks: int = 1) -> Ints:
    """Read items into the buffers, a piece at a time: of several ranks each takes the items whose place it has.

    The item at place p becomes row p // ranks of rank p % ranks.

    Returns: the keys of all items, in the order of their places.
    Raises: ValueError if the files are not those of such an index.
    """
    count, strings = about["items"], about["ids"] == "str"
    keys = np.full(count, -1)
    texts: list[str] = [""] * count if strings else []
    filled = np.zeros(count, dtype=bool)
    for file_name in about["files"]:
        try:
            with _open(folder / file_name) as file:
                places = _places(index, file, about)
                if filled[places].any() or len(np.unique(places)) < len(places):
                    raise _Unfit("items have the same place")
                filled[places] = True
                if strings:
                    ends, blob = file.get_tensor("id_ends").numpy(), file.get_tensor("id_bytes").numpy().tobytes()
                    for place, text in zip(places.tolist(), _split(blob, ends), strict=True):
                        texts[place] = text
                else:
                    keys[places] = file.get_tensor("item_ids").numpy()
                if index.error is not None:
                    index.error.copy_(torch.maximum(index.error, file.get_tensor("error").to(index.device)))
                for buffer_name in ("embeddings", *_codes(index)):
                    _take(index, file.get_slice(buffer_name), getattr(index, buffer_name), places, rank, ranks)
                words = file.get_slice("attributes")
                for word, buffer in enumerate(index.attributes):
                    _take(index, words[word : word + 1][0], buffer, places, rank, ranks)
        except _Unfit as error:
            raise ValueError(f"{name}: {folder / file_name} is damaged: {error}.") from None
    if not filled.all():
        raise ValueError(f"{name}: {folder} is damaged: its files hold {filled.sum():,} items of {count:,}.")
    index.ids = KINDS[about["ids"]]() if about["ids"] else None
    if isinstance(index.ids, StringIds):
        keys = index.ids.keys(texts) if len(set(texts)) == count else keys[:0]
    if len(np.unique(keys)) < count or (keys == -1).any():
        raise ValueError(f"{name}: {folder} is damaged: it does not have an id for each item.")
    own = keys[rank::ranks]
    index.item_ids[: len(own)] = torch.from_numpy(own).to(index.device)
    index.live.copy_(live(len(own), len(index.live)))
    if index.bias is not None:
        index.bias[: len(own)] = distance_bias(index.embeddings[: len(own)])
    index._restart()
    return keys


class _Unfit(ValueError):
    """A file of items that is not of the index."""


def _split(blob: bytes, ends: Ints) -> list[str]:
    try:
        return split_texts(blob, ends)
    except ValueError as error:
        raise _Unfit(str(error)) from None


def _open(path: Path) -> Any:
    """A safetensors file, whose tensors are read as they are asked for."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        from tigon.install import install

        raise ImportError(f"Index.load: needs safetensors: {install('retrieve')}.") from None
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, RuntimeError):  # torch's own for a file that cannot be opened
        raise _Unfit("it is not a whole safetensors file") from None


def _places(index: Index, file: Any, about: dict[str, Any]) -> Ints:
    """The places of a file's items in the order of all; the file's tensors must be those of an index.

    Raises: _Unfit if they are not.
    """
    names = {*file.keys()}
    sharded, strings = "shards" in about, about["ids"] == "str"

    def shape(name: str, dtype: torch.dtype) -> list[int]:
        if name not in names or file.get_slice(name).get_dtype() != disk.DTYPES[dtype]:
            raise _Unfit(f"it must hold {name} of {dtype}")
        return list(file.get_slice(name).get_shape())

    count = math.prod(shape("places", torch.int64)) if sharded else about["items"]
    wanted: dict[str, tuple[torch.dtype, list[int]]] = {
        "embeddings": (index.dtype, [count, index.dim]),
        "attributes": (torch.int64, [index.schema.words, count]),
        "item_ids": (torch.int64, [count]),
        **{name: (buffer.dtype, [count, *buffer.shape[1:]]) for name, buffer in _codes(index).items()},
    }
    if strings:
        bytes_of_ids = math.prod(shape("id_bytes", torch.uint8))
        wanted |= {"id_ends": (torch.int64, [count]), "id_bytes": (torch.uint8, [bytes_of_ids])}
    if sharded:
        wanted["places"] = torch.int64, [count]
    if index.error is not None:
        wanted["error"] = index.error.dtype, [*index.error.shape]
    if names - wanted.keys():
        raise _Unfit(f"it holds {', '.join(sorted(names - wanted.keys()))}, which such an index does not have")
    for name, (dtype, expected) in wanted.items():
        if shape(name, dtype) != expected:
            raise _Unfit(f"{name} must have shape {expected}, got {shape(name, dtype)}")
    places: Ints = file.get_tensor("places").numpy() if sharded else np.arange(count)
    if count and not 0 <= places.min() <= places.max() < about["items"]:
        raise _Unfit("it has places of other items")
    return places


def _take(index: Index, part: Any, buffer: Tensor, places: Ints, rank: int, ranks: int) -> None:
    """Rows of a file into the buffer's, as far as their places are the rank's."""
    rows = max(1, disk.PIECE // (buffer[:1].numel() * buffer.element_size()))
    for start in range(0, len(places), rows):
        here = places[start : start + rows]
        own = np.flatnonzero(here % ranks == rank)
        if not len(own):
            continue
        piece = part[start : start + len(here)]
        if len(own) < len(here):
            narrow = piece.element_size() == 1  # torch indexes no float8
            piece = (piece.view(torch.uint8) if narrow else piece)[torch.from_numpy(own)].view(piece.dtype)
        put(buffer, at_rows(here[own] // ranks, index.device), piece.to(index.device))


def live(items: int, numbers: int) -> Tensor:
    """Live bits of the first rows."""
    bits = np.zeros(numbers * 32, dtype=np.uint8)
    bits[:items] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32).copy())
