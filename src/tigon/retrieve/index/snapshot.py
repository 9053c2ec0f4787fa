"""An index on disk: a folder with snapshots, of which the newest counts.

    jobs.index/snapshot-000002/manifest.json         the index description, and checksums of the files
    jobs.index/snapshot-000002/items.safetensors     the live items, without gaps
    jobs.index/snapshot-000002/journal               updates since then, if the index was opened with a journal

A snapshot is written beside the old snapshot under another name, and renamed when it is completely on disk. That single
rename commits it, so that a kill at any moment leaves either the old or the new snapshot.

Several ranks write a file each, `items-0.safetensors` and so on, with each item's global position, and `items-0.json`
with the file's size and checksum, from which rank 0 makes the manifest. Ranks agree before each step, so that all raise
or none.
"""

from __future__ import annotations

import errno
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tigon.files import read_json
from tigon.retrieve.filters.schema import Schema
from tigon.retrieve.index.format import VectorFormat
from tigon.retrieve.index.ranks import ALONE, Ranks
from tigon.retrieve.index.rows import RowAllocator
from tigon.retrieve.index.snapshot_items import collect_items, fill, make_live_bits
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
from tigon.retrieve.index.writer import ItemWriter
from tigon.retrieve.storage import disk
from tigon.retrieve.storage.folder_lock import FolderLock
from tigon.retrieve.storage.journal import Journal, repair_journal

NAME = re.compile(r"snapshot-(\d{6,})")
JOURNAL = "journal"
# How often a reader restarts because its snapshot was replaced.
TRIES = 100
# Allocates the rows for a vector format, a capacity and a schema.
Make = Callable[[VectorFormat, int, Schema], ItemWriter]


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

    @contextmanager
    def hold_lock(self, path: Path) -> Iterator[bool]:
        """Hold the lock of a folder during a save. Yields whether the index was opened from this folder."""
        own = self.lock if self.lock is not None and self.lock.folder == path.resolve() else None
        if own is not None and own.is_held():
            yield True
            return
        if own is not None and own.pid != os.getpid():
            raise ValueError(
                f"Index.save: {path} was opened by process {own.pid}, and this process is a fork: this copy of the "
                "index may lack later writes. Save to another folder."
            )
        lock = FolderLock("Index.save", path)
        try:
            yield own is not None
        except BaseException:
            lock.release()
            raise
        if own is not None:  # the folder was removed since it was opened, and belongs to this index again
            self.lock = lock
        else:
            lock.release()

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()
        if self.lock is not None:
            self.lock.release()
        self.journal = self.lock = None


class NewSnapshot:
    """A snapshot that all ranks write beside the previous snapshot. The first rank holds the folder's lock and commits.

    Args:
        folder: the folder that the index was opened from; its journal restarts if path is this folder.
        lock: the context in which the folder's lock is held.
    """

    def __init__(self, writer: ItemWriter, path: Path, folder: OpenFolder, ranks: Ranks, lock: ExitStack) -> None:
        self.writer, self.path, self.folder, self.ranks, self.lock = writer, path, folder, ranks, lock
        self.is_new = check_folder(path)
        self.file = ITEMS if ranks is ALONE else f"items-{ranks.own}.safetensors"
        self.final = self.partial = path
        self.before: list[Path] = []
        self.has_journal = False
        self.journal: Journal | None = None
        self.about: dict[str, Any] = {}

    def name(self, number: int) -> None:
        self.final = self.path / f"snapshot-{number:06}"
        self.partial = self.path / f"{self.final.name}{disk.PARTIAL}"

    def begin(self) -> int:
        """Lock the folder, and make the partial snapshot. Returns the snapshot's number."""
        if self.ranks.own:
            return 0
        self.path.mkdir(parents=True, exist_ok=True)
        self.has_journal = self.lock.enter_context(self.folder.hold_lock(self.path)) and self.folder.journal is not None
        self.before = clean(self.path)
        number = next_number(self.path)
        self.name(number)
        self.partial.mkdir()
        return number

    def write(self) -> None:
        """Write this rank's items; for several ranks also the file's size and checksum."""
        items = disk.serialize(collect_items(self.writer, self.ranks))
        self.about = disk.write_file(self.partial / self.file, items)
        if self.ranks is not ALONE:
            disk.write_file((self.partial / self.file).with_suffix(".json"), [json.dumps(self.about).encode()])

    def commit(self) -> None:
        """Write the manifest, and rename the snapshot once it is on the disk."""
        if self.ranks.own:
            return
        content = describe(self.writer)
        if self.ranks is ALONE:
            content["files"] = {self.file: self.about}
        else:
            content["shards"] = self.ranks.count
            names = [f"items-{rank}" for rank in range(self.ranks.count)]
            content["files"] = {f"{name}.safetensors": read_json(self.partial / f"{name}.json") for name in names}
        write_manifest(self.partial, content)
        if self.has_journal:
            self.journal = Journal(self.partial / JOURNAL, content["id"])
        disk.flush_folder(self.partial)
        disk.rename(self.partial, self.final)
        disk.flush_folder(self.path)
        if self.is_new:
            disk.flush_folder(self.path.resolve().parent)

    def is_written(self) -> bool:
        return self.final != self.path and self.final.exists()

    def settle(self) -> None:
        """Take the new journal into use, or remove what was written."""
        if not self.is_written():
            if self.journal is not None:
                self.journal.close()
            if not self.ranks.own and self.partial != self.path:
                disk.remove(self.partial)
        elif self.journal is not None:
            if self.folder.journal is not None:
                self.folder.journal.close()
            self.journal.path = self.final / JOURNAL
            self.folder.journal = self.journal


def save_snapshot(writer: ItemWriter, path: Path, folder: OpenFolder, ranks: Ranks = ALONE) -> None:
    """Write a snapshot of an index, which no update may change meanwhile.

    Args:
        folder: the folder that the index was opened from; its journal restarts if path is this folder.

    Raises: ValueError if another index or process writes to the folder; OSError if the disk is full or the folder
        cannot be written, on all ranks; the previous content is unchanged then.
    """
    with ExitStack() as lock:
        new = NewSnapshot(writer, path, folder, ranks, lock)
        try:
            said = "another rank could not write; see that rank's error"
            number = torch.tensor([ranks.run_together(OSError, said, new.begin)], device=ranks.device)
            new.name(int(ranks.gather(number).max()))
            for step in (new.write, new.commit):
                ranks.run_together(OSError, said, step)
        except OSError as error:
            said = (
                "the snapshot is written, but the disk did not confirm the write"
                if new.is_written()
                else "the previous content is unchanged"
            )
            code, reason = error.errno or errno.EIO, error.strerror or error
            raise OSError(code, f"Index.save: {path}: {reason}; {said}") from error
        finally:
            new.settle()
        for old in new.before:
            disk.remove(old)


def check_folder(path: Path) -> bool:
    """Check an index's folder. Returns whether the folder must be created.

    Raises: ValueError if the path is a file.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"Index.save: path must be a folder, which is created if missing, got the file {path}.")
    return not path.exists()


def clean(path: Path) -> list[Path]:
    """Remove partial snapshots left by killed saves, under the folder's lock. Returns the snapshots that a new snapshot
    replaces: complete snapshots written by Tigon, by their checksums.
    """
    for left in path.glob(f"snapshot-*{disk.PARTIAL}"):
        disk.remove(left)
    return [folder for folder in list_snapshots(path) if unseal(read_bytes(folder / MANIFEST)) is not None]


def next_number(path: Path) -> int:
    """A new snapshot's number: larger than all existing numbers, including foreign folders'."""
    names = (re.match(NAME, p.name) for p in path.iterdir())
    return max((int(name[1]) for name in names if name), default=0) + 1


def describe(writer: ItemWriter) -> dict[str, Any]:
    """Describe an index for its manifest."""
    table, directory, format = writer.table, writer.directory, writer.table.format
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


# --------------------------------------------------------------------------------------------------------------- load


def load_snapshot(path: Path, make: Make, ranks: Ranks = ALONE) -> ItemWriter:
    """Load a folder's items, including journal updates, and distribute them over the ranks. No lock is taken: if the
    snapshot is replaced while it is read, all ranks read the newer snapshot.

    make: allocates the rows.
    """
    name = "Index.load"
    said = f"{name}: another rank could not read {path}; see that rank's error."
    for _ in range(TRIES):
        folder = ranks.run_together(ValueError, said, lambda: find_newest(name, path))
        content_before = read_bytes(folder / MANIFEST)
        if not ranks.are_alike(content_before or b""):
            continue  # a save happened between two ranks' lookups
        try:
            writer, content = _load(name, folder, make, ranks)
            ranks.run_together(ValueError, said, partial(replay, writer, folder, content))
        except Exception:  # every rank raises its own error
            if not ranks.any(is_replaced(folder, content_before)):
                raise
            continue
        if not ranks.any(is_replaced(folder, content_before)):
            return writer
    raise ValueError(f"{name}: {path} was replaced during each of {TRIES} reads: load the index again.")


def _load(name: str, folder: Path, make: Make, ranks: Ranks) -> tuple[ItemWriter, dict[str, Any]]:
    """Load a snapshot without its journal, with the manifest's content."""
    said = f"{name}: another rank could not read {folder}; see that rank's error."

    def allocate() -> tuple[ItemWriter, dict[str, Any]]:
        content = read_manifest(name, folder)
        return make(parse_format(content), content["capacity"], read_schema(name, folder, content)), content

    writer, content = ranks.run_together(ValueError, said, allocate)
    directory = writer.directory

    def check() -> None:
        """Check this rank's share of the files: each file is read once for its checksum."""
        names = sorted(content["files"])[ranks.own :: ranks.count]
        check_files(name, folder, {file: content["files"][file] for file in names})

    def read() -> None:
        directory.ids, keys = fill(name, writer.table, folder, content, ranks.own, ranks.count)
        writer.table.restart(with_ids=False)
        if directory.ids is not None:
            directory.ids.place(keys, np.arange(content["items"]))
        total = directory.rows.total
        directory.rows = RowAllocator.from_live_bits(
            make_live_bits(content["items"], (total + 31) // 32).numpy(), total
        )

    for step in (check, read):
        ranks.run_together(ValueError, said, step)
    return writer, content


def replay(writer: ItemWriter, folder: Path, content: dict[str, Any]) -> None:
    """Replay a snapshot's journal."""
    writer.replay(folder / JOURNAL, content["id"])


def is_replaced(folder: Path, manifest: bytes | None) -> bool:
    """Whether a snapshot whose manifest was read has since been removed or replaced."""
    path = folder / MANIFEST
    return read_bytes(path) != manifest or not path.exists()


def open_snapshot(path: Path, make: Make, *, journal: bool, repair: bool) -> tuple[ItemWriter, OpenFolder]:
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
        writer, content = _load(name, folder, make, ALONE)
        if repair:
            repair_journal(folder / JOURNAL, content["id"])
        if journal:
            opened.journal = Journal(folder / JOURNAL, content["id"])
        replay(writer, folder, content)
        if opened.journal is not None:
            disk.flush_folder(folder)
        if opened.lock is not None:
            for old in clean(path)[:-1]:  # left by a kill
                disk.remove(old)
    except BaseException:
        opened.close()
        raise
    return writer, opened


def find_newest(name: str, path: Path) -> Path:
    """Find the newest complete snapshot.

    Raises: ValueError if there is none.
    """
    for _ in range(10):  # a listing during a save may show neither the old nor the new snapshot
        if whole := list_snapshots(path):
            return whole[-1]
    raise ValueError(f"{name}: path must be a folder that Index.save wrote, got {path}, which holds no snapshot.")


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
            raise ValueError(f"{name}: {path} is damaged: the checksum differs from the manifest.")
