"""A sharded index on disk: an index folder with an item file per rank.

    jobs.index/snapshot-000002/manifest.json          written by rank 0 when all other files are on the disk
    jobs.index/snapshot-000002/items-0.safetensors    rank 0's items, and each item's global position
    jobs.index/snapshot-000002/items-0.json           that file's size and checksum

As on one device, a rename commits the snapshot. Ranks agree before each step, so that all raise or none.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from tigon.files import read_json
from tigon.retrieve.index import snapshot
from tigon.retrieve.index.ranks import Ranks
from tigon.retrieve.index.rows import RowAllocator
from tigon.retrieve.index.shard import Shard, allocate_shard
from tigon.retrieve.index.snapshot import JOURNAL, TRIES, find_newest
from tigon.retrieve.index.snapshot_manifest import MANIFEST, read_bytes, read_manifest, read_schema, write_manifest
from tigon.retrieve.storage import disk
from tigon.retrieve.storage.folder_lock import FolderLock

T = TypeVar("T")


def save_shards(shard: Shard, path: Path) -> None:
    """Write a snapshot, with a file per rank. No rank's index may change meanwhile.

    Raises: ValueError or OSError on all ranks if any rank cannot write; the previous content is unchanged.
    """
    ranks = shard.ranks
    is_new, first = snapshot.check_folder(path), ranks.own == 0
    lock: FolderLock | None = None
    before: list[Path] = []
    final = partial = path

    def begin() -> int:
        nonlocal lock, before
        if not first:
            return 0
        path.mkdir(parents=True, exist_ok=True)
        lock = FolderLock("Index.save", path)
        before = snapshot.clean(path)
        number = snapshot.next_number(path)
        (path / _name_partial(number)).mkdir()
        return number

    def write() -> None:
        name = f"items-{ranks.own}"
        about = disk.write_file(partial / f"{name}.safetensors", disk.serialize(_collect_items(shard)))
        disk.write_file(partial / f"{name}.json", [json.dumps(about).encode()])

    def finish() -> None:
        if not first:
            return
        names = [f"items-{rank}" for rank in range(ranks.count)]
        files = {f"{name}.safetensors": read_json(partial / f"{name}.json") for name in names}
        content = snapshot.describe(shard.table.format, shard.directory, shard.table)
        write_manifest(partial, {**content, "shards": ranks.count, "files": files})
        disk.flush_folder(partial)
        disk.rename(partial, final)
        disk.flush_folder(path)
        if is_new:
            disk.flush_folder(path.resolve().parent)
        for old in before:
            disk.remove(old)

    def run_together(step: Callable[[], T]) -> T:
        return ranks.run_together(OSError, "another rank could not write, and says why", step)

    try:
        number = torch.tensor([run_together(begin)], device=ranks.device)
        number = ranks.gather(number).max()
        final, partial = path / f"snapshot-{int(number):06}", path / _name_partial(int(number))
        run_together(write)
        run_together(finish)
    except BaseException as error:
        if first and partial != path:
            disk.remove(partial)
        if not isinstance(error, OSError):
            raise
        written = final != path and final.exists()
        said = "it is written, but the disk does not say so" if written else "what was there before is there"
        raise OSError(error.errno or errno.EIO, f"Index.save: {path}: {error.strerror or error}; {said}") from error
    finally:
        if lock is not None:
            lock.release()


def _name_partial(number: int) -> str:
    return f"snapshot-{number:06}{disk.PARTIAL}"


def _collect_items(shard: Shard) -> dict[str, Any]:
    """This rank's items, and each item's position among all items in row order."""
    places = np.cumsum(shard.directory.rows.live_mask()) - 1
    rows = np.flatnonzero(shard.table.rows.live_mask()) * shard.ranks.count + shard.ranks.own
    items = snapshot.collect_items(shard.table, shard.directory.ids)
    return {**items, "places": torch.from_numpy(places[rows].astype(np.int64))}


def load_shards(path: Path, device: Any, mesh: Any) -> Shard:
    """Load shards from a folder and redistribute the items over the ranks. If the snapshot is replaced while it is
    read, all ranks read the newer snapshot.
    """
    name = "Index.load"
    ranks = Ranks(name, mesh, device)
    for _ in range(TRIES):
        said = f"{name}: another rank finds no index {path}."
        folder = ranks.run_together(ValueError, said, lambda: find_newest(name, path))
        content_before = read_bytes(folder / MANIFEST)
        digest = bytearray(hashlib.sha256(content_before or b"").digest())
        own = torch.frombuffer(digest, dtype=torch.int64).to(ranks.device)
        if bool((ranks.gather(own) != own).any()):
            continue  # a save happened between two ranks' lookups
        try:
            shard = _load(name, folder, ranks)
        except Exception:  # every rank raises its own error
            if not ranks.any(snapshot.is_replaced(folder, content_before)):
                raise
            continue
        if not ranks.any(snapshot.is_replaced(folder, content_before)):
            return shard
    raise ValueError(f"{name}: {path} was saved {TRIES} times, each time before it was read: load it again.")


def _load(name: str, folder: Path, ranks: Ranks) -> Shard:
    def make() -> tuple[dict[str, Any], Shard]:
        content = read_manifest(name, folder)
        if content["codes"] == "sign":
            raise ValueError(
                f"{name}: {folder} has codes 'sign', which a ShardedIndex does not have: load it on one device."
            )
        schema = read_schema(name, folder, content)
        return content, allocate_shard(snapshot.parse_format(content), content["capacity"], schema, ranks)

    said = f"{name}: another rank could not read {folder}, and says why."
    content, shard = ranks.run_together(ValueError, said, make)

    def check() -> None:
        """Check this rank's share of the files: each file is read once for its checksum."""
        names = sorted(content["files"])[ranks.own :: ranks.count]
        snapshot.check_files(name, folder, {file: content["files"][file] for file in names})

    def fill() -> None:
        directory, count = shard.directory, content["items"]
        directory.ids, keys = snapshot.fill(name, shard.table, folder, content, ranks.own, ranks.count)
        shard.table.restart(with_ids=False)
        if directory.ids is not None:
            directory.ids.place(keys, np.arange(count))
        total = directory.rows.total
        live = snapshot.make_live_bits(count, (total + 31) // 32)
        directory.rows = RowAllocator.from_live_bits(live.numpy(), total)
        shard.replay(folder / JOURNAL, content["id"])

    for step in (check, fill):
        ranks.run_together(ValueError, said, step)
    return shard
