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
from tigon.retrieve.writing import distance_bias

if TYPE_CHECKING:
    from tigon.retrieve.index import Index

FORMAT = 1
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
        files = {ITEMS: disk.write_file(partial / ITEMS, disk.safetensors(_items(index)))}
        manifest = json.dumps({**_about(index), "files": files}, indent=1, ensure_ascii=False).encode()
        sealed = json.dumps({"manifest_sha256": _sha(manifest)}).encode()
        disk.write_file(partial / MANIFEST, [manifest, b"\n", sealed, b"\n"])
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


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _about(index: Index) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "dim": index.dim,
        "dtype": str(index.dtype).removeprefix("torch."),
        "metric": index.metric,
        "capacity": index.capacity,
        "codes": index.coding,
        "bits": index.bits,
        "items": len(index),
        "ids": index.ids.kind if index.ids is not None else None,
        "schema": json.loads(index.schema.to_json()),
    }


def _items(index: Index) -> dict[str, Tensor | disk.Picked]:
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
    about = _manifest(name, folder)
    _check_files(name, folder, about)
    index = kind(
        about["dim"], about["capacity"], about["dtype"], about["metric"],
        Schema.from_json(json.dumps(about["schema"])), device, about.get("codes"), about.get("bits", 512),
    )  # fmt: skip
    _fill(index, folder / ITEMS, about)
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


def _manifest(name: str, folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest, sealed, _ = path.read_bytes().rsplit(b"\n", 2)
        if json.loads(sealed)["manifest_sha256"] != _sha(manifest):
            raise ValueError
        about = json.loads(manifest)
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{name}: {path} is damaged: its checksum is not that of its content.") from None
    if about["format"] != FORMAT:
        raise ValueError(f"{name}: {path} has format {about['format']}, this version of Tigon reads {FORMAT}.")
    return dict(about)


def _check_files(name: str, folder: Path, about: dict[str, Any]) -> None:
    for file, known in about["files"].items():
        path = folder / file
        if not path.exists():
            raise ValueError(f"{name}: {path} is missing.")
        if disk.digest_of(path) != known:
            raise ValueError(f"{name}: {path} is damaged: its checksum is not that of the manifest.")


def _fill(index: Index, path: Path, about: dict[str, Any]) -> None:
    """Read the items into the buffers, a piece at a time."""
    try:
        from safetensors import safe_open
    except ImportError:
        from tigon.install import install

        raise ImportError(f"Index.load: needs safetensors: {install('retrieve')}.") from None
    items = about["items"]
    with safe_open(path, framework="pt") as file:
        if index.error is not None:
            index.error.copy_(file.get_tensor("error"))
        for name in ("embeddings", "attributes", "item_ids", *_codes(index)):
            part, buffer = file.get_slice(name), getattr(index, name)
            if name == "attributes":
                for word in range(buffer.shape[0]):
                    buffer[word, :items] = part[word : word + 1][0].to(buffer.device)
                continue
            width = buffer[:1].numel() * buffer.element_size()
            rows = max(1, disk.PIECE // width)
            for start in range(0, items, rows):
                piece = part[start : min(start + rows, items)].to(buffer.device)
                buffer[start : start + len(piece)] = piece
                if name == "embeddings" and index.bias is not None:
                    index.bias[start : start + len(piece)] = distance_bias(piece)
        texts: tuple[Any, ...] = ()
        if about["ids"] == "str":
            texts = (file.get_tensor("id_bytes").numpy().tobytes(), file.get_tensor("id_ends").numpy())
    index.ids = KINDS[about["ids"]](*texts) if about["ids"] else None
    index.live.copy_(_live(items, len(index.live)))
    index._restart()


def _live(items: int, numbers: int) -> Tensor:
    """Live bits of the first rows."""
    bits = np.zeros(numbers * 32, dtype=np.uint8)
    bits[:items] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32).copy())
