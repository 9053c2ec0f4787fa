"""An index on the disk: snapshots beside each other in one folder, of which the newest counts.

    jobs.index/snapshot-000002/manifest.json         what the index is, and checksums of the files beside it
    jobs.index/snapshot-000002/items.safetensors     the items that are there, without gaps
    jobs.index/snapshot-000002/journal               updates since then, if the index was opened with a journal

A snapshot is written beside the old one under another name, and is renamed when all of it is on the disk. That one
rename is what makes it count, so that a kill at any moment leaves the old snapshot or the new one.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tigon.retrieve import coded, disk
from tigon.retrieve.ids import KINDS, StringIds
from tigon.retrieve.journal import Journal, repair, replay
from tigon.retrieve.schema import Schema
from tigon.retrieve.writing import at_rows, distance_bias, put
from tigon.tables.values import Ints

if TYPE_CHECKING:
    from tigon.retrieve.index import Index

FORMAT = 1
FORMATS = 1, 2  # 2: of several files, by tigon.retrieve.sharded_storage
NAME = re.compile(r"snapshot-(\d{6,})")
MANIFEST, ITEMS, JOURNAL = "manifest.json", "items.safetensors", "journal"


def snapshots(path: Path) -> list[Path]:
    """The whole snapshots in a folder, the newest last."""
    if not path.is_dir():
        return []
    return sorted((p for p in path.iterdir() if NAME.fullmatch(p.name)), key=lambda p: int(p.name[9:]))


def save(index: Index, path: Path) -> None:
    """Write a snapshot. The index has to be held still.

    Raises: OSError if the disk is full or the folder cannot be written; what was there before is there still.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"Index.save: path must be a folder, which is made if it is not there, got the file {path}.")
    made = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    before = snapshots(path)
    number = int(before[-1].name[9:]) + 1 if before else 1
    final = path / f"snapshot-{number:06}"
    partial = path / f"{final.name}.partial"
    disk.remove(partial)
    opened = index.journal is not None and index.journal.path.parent.parent.resolve() == path.resolve()
    journal: Journal | None = None
    renamed = False
    try:
        partial.mkdir()
        files = {ITEMS: disk.write_file(partial / ITEMS, disk.safetensors(items(index)))}
        write_manifest(partial, {**about(index, index.capacity, len(index)), "files": files})
        if opened:
            journal = Journal(partial / JOURNAL)
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


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """What the snapshot is, with its own checksum in the last line."""
    manifest = json.dumps(content, indent=1, ensure_ascii=False).encode()
    sealed = json.dumps({"manifest_sha256": _sha(manifest)}).encode()
    disk.write_file(folder / MANIFEST, [manifest, b"\n", sealed, b"\n"])


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def about(index: Index, capacity: int, count: int) -> dict[str, Any]:
    """What an index of so many items is, for its manifest."""
    return {
        "format": FORMAT,
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


def load(kind: type[Index], path: Path, device: Any, journal: bool, mend: bool) -> Index:
    """The index of a folder; with a journal that goes on, or with the updates of the journal that is there."""
    name = "Index.open" if journal else "Index.load"
    found = snapshots(path)
    if not found:
        raise ValueError(f"{name}: path must be a folder that Index.save wrote, got {path}, which holds no snapshot.")
    folder = found[-1]
    known = manifest(name, folder)
    check_files(name, folder, known["files"])
    index = kind(
        known["dim"], known["capacity"], known["dtype"], known["metric"],
        Schema.from_json(json.dumps(known["schema"])), device, known.get("codes"), known.get("bits", 512),
    )  # fmt: skip
    fill(index, folder, known)
    if mend:
        repair(folder / JOURNAL)
    opened = Journal(folder / JOURNAL) if journal else None
    try:
        replay(index, folder / JOURNAL)
    except BaseException:
        if opened is not None:
            opened.close()
        raise
    if opened is not None:
        disk.flush_folder(folder)
        index.journal = opened
        # What a kill left behind.
        for old in [*found[:-1], *path.glob("snapshot-*.partial")]:
            disk.remove(old)
    return index


def manifest(name: str, folder: Path) -> dict[str, Any]:
    """What a snapshot says of itself.

    Raises: ValueError if it is damaged, or of another version.
    """
    path = folder / MANIFEST
    try:
        content, sealed, _ = path.read_bytes().rsplit(b"\n", 2)
        if json.loads(sealed)["manifest_sha256"] != _sha(content):
            raise ValueError
        found = json.loads(content)
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{name}: {path} is damaged: its checksum is not that of its content.") from None
    if found["format"] not in FORMATS:
        read = " and ".join(map(str, FORMATS))
        raise ValueError(f"{name}: {path} has format {found['format']}, this version of Tigon reads {read}.")
    return dict(found)


def check_files(name: str, folder: Path, files: dict[str, Any]) -> None:
    """Compare sizes and checksums.

    Raises: ValueError for the first file that is missing or damaged.
    """
    for file, known in files.items():
        path = folder / file
        if not path.exists():
            raise ValueError(f"{name}: {path} is missing.")
        if disk.digest_of(path) != known:
            raise ValueError(f"{name}: {path} is damaged: its checksum is not that of the manifest.")


def fill(index: Index, folder: Path, about: dict[str, Any], rank: int = 0, ranks: int = 1) -> Ints:
    """Read items into the buffers, a piece at a time: of several ranks each takes the items whose place it has.

    The item at place p becomes row p // ranks of rank p % ranks.

    Returns: the keys of all items, in the order of their places.
    """
    try:
        from safetensors import safe_open
    except ImportError:
        from tigon.install import install

        raise ImportError(f"Index.load: needs safetensors: {install('retrieve')}.") from None
    count, strings = about["items"], about["ids"] == "str"
    keys = np.arange(count)
    texts: list[str] = [""] * count if strings else []
    for name in about["files"]:
        with safe_open(folder / name, framework="pt") as file:
            places = file.get_tensor("places").numpy() if "shards" in about else np.arange(count)
            if strings:
                ends = file.get_tensor("id_ends").tolist()
                blob = file.get_tensor("id_bytes").numpy().tobytes()
                for place, first, last in zip(places.tolist(), [0, *ends[:-1]], ends, strict=True):
                    texts[place] = blob[first:last].decode()
            else:
                keys[places] = file.get_tensor("item_ids").numpy()
            if index.error is not None:
                index.error.copy_(torch.maximum(index.error, file.get_tensor("error").to(index.device)))
            for name in ("embeddings", *_codes(index)):
                _take(index, file.get_slice(name), getattr(index, name), places, rank, ranks)
            words = file.get_slice("attributes")
            for word, buffer in enumerate(index.attributes):
                _take(index, words[word : word + 1][0], buffer, places, rank, ranks)
    index.ids = KINDS[about["ids"]]() if about["ids"] else None
    if isinstance(index.ids, StringIds):
        index.ids.keys(texts)
    own = keys[rank::ranks]
    index.item_ids[: len(own)] = torch.from_numpy(own).to(index.device)
    index.live.copy_(live(len(own), len(index.live)))
    if index.bias is not None:
        index.bias[: len(own)] = distance_bias(index.embeddings[: len(own)])
    index._restart()
    return keys


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
