"""A sharded index on the disk: the folder of an index, with a file of items for each rank.

    jobs.index/snapshot-000002/manifest.json          written by rank 0 when all other files are on the disk
    jobs.index/snapshot-000002/items-0.safetensors    rank 0's items, and which in the whole each of them is
    jobs.index/snapshot-000002/items-0.json           the size and the checksum of that file

As for one device, a rename makes the snapshot count. Ranks agree before each step, so that all raise or none.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from tigon.files import read_json
from tigon.retrieve import disk, storage
from tigon.retrieve.folder_lock import FolderLock
from tigon.retrieve.journal import replay
from tigon.retrieve.manifest import MANIFEST, read_bytes, read_manifest, read_schema, write_manifest
from tigon.retrieve.ranks import Ranks
from tigon.retrieve.storage import JOURNAL, newest
from tigon.retrieve.updates import Rows

if TYPE_CHECKING:
    from tigon.retrieve.sharded import ShardedIndex

T = TypeVar("T")


def save(index: ShardedIndex, path: Path) -> None:
    """Write a snapshot, each rank its file. All ranks have to hold the index still.

    Raises: ValueError or OSError on all ranks if one of them cannot write; what was there before is there still.
    """
    made, first = storage.check_folder(path), index.ranks.own == 0
    lock: FolderLock | None = None
    before: list[Path] = []
    final = partial = path

    def begin() -> int:
        nonlocal lock, before
        if not first:
            return 0
        path.mkdir(parents=True, exist_ok=True)
        lock = FolderLock("Index.save", path)
        before = storage.clean(path)
        number = storage.next_number(path)
        (path / _partial(number)).mkdir()
        return number

    def write() -> None:
        name = f"items-{index.ranks.own}"
        about = disk.write_file(partial / f"{name}.safetensors", disk.safetensors(_items(index)))
        disk.write_file(partial / f"{name}.json", [json.dumps(about).encode()])

    def finish() -> None:
        if not first:
            return
        names = [f"items-{rank}" for rank in range(index.ranks.count)]
        files = {f"{name}.safetensors": read_json(partial / f"{name}.json") for name in names}
        about = storage.about(cast(Any, index.shard), index.capacity, len(index))
        write_manifest(partial, {**about, "shards": index.ranks.count, "files": files})
        disk.flush_folder(partial)
        disk.rename(partial, final)
        disk.flush_folder(path)
        if made:
            disk.flush_folder(path.resolve().parent)
        for old in before:
            disk.remove(old)

    def together(step: Callable[[], T]) -> T:
        return index.ranks.together(OSError, "another rank could not write, and says why", step)

    try:
        number = torch.tensor([together(begin)], device=index.ranks.device)
        number = index.ranks.gathered(number).max()
        final, partial = path / f"snapshot-{int(number):06}", path / _partial(int(number))
        together(write)
        together(finish)
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


def _partial(number: int) -> str:
    return f"snapshot-{number:06}{disk.PARTIAL}"


def _items(index: ShardedIndex) -> dict[str, Any]:
    """The items of this rank, and the place of each among all items in the order of rows."""
    shard = index.shard
    places = np.cumsum(index.rows.there()) - 1
    rows = np.flatnonzero(shard.rows.there()) * index.ranks.count + index.ranks.own
    return {**storage.items(shard), "places": torch.from_numpy(places[rows].astype(np.int64))}


def load(kind: type[ShardedIndex], path: Path, device: Any, mesh: Any) -> ShardedIndex:
    """The index of a folder, its items dealt out to the ranks anew. If the snapshot is replaced while it is read, the
    newer one is read by all ranks."""
    name = "Index.load"
    ranks = Ranks(name, mesh, device)
    for _ in range(storage.TRIES):
        folder = ranks.together(ValueError, f"{name}: another rank finds no index {path}.", lambda: newest(name, path))
        content_before = read_bytes(folder / MANIFEST)
        own = torch.frombuffer(bytearray(hashlib.sha256(content_before or b"").digest()), dtype=torch.int64).to(
            ranks.device
        )
        if bool((ranks.gathered(own) != own).any()):
            continue  # the ranks looked before and after a save
        try:
            index = _load(name, kind, folder, device, mesh, ranks)
        except Exception:  # all ranks raise, each its own
            if not ranks.any(storage.is_replaced(folder, content_before)):
                raise
            continue
        if not ranks.any(storage.is_replaced(folder, content_before)):
            return index
    raise ValueError(f"{name}: {path} was saved {storage.TRIES} times, each time before it was read: load it again.")


def _load(
    name: str, kind: type[ShardedIndex], folder: Path, device: Any, mesh: Any, ranks: Ranks
) -> ShardedIndex:  # fmt: skip
    def make() -> tuple[dict[str, Any], ShardedIndex]:
        content = read_manifest(name, folder)
        if content["codes"] == "sign":
            raise ValueError(
                f"{name}: {folder} has codes 'sign', which a ShardedIndex does not have: load it on one device."
            )
        schema = read_schema(name, folder, content)
        kinds = content["dim"], content["capacity"], content["dtype"], content["metric"], schema, device
        return content, kind(*kinds, content["codes"], mesh=mesh)

    said = f"{name}: another rank could not read {folder}, and says why."
    about, index = ranks.together(ValueError, said, make)

    def check() -> None:
        """A share of the files: each is read once for its checksum."""
        names = sorted(about["files"])[index.ranks.own :: index.ranks.count]
        storage.check_files(name, folder, {file: about["files"][file] for file in names})

    def fill() -> None:
        count, total = about["items"], index.rows.total
        keys = storage.fill(name, index.shard, folder, about, index.ranks.own, index.ranks.count)
        if index.ids is not None:
            index.ids.place(keys, np.arange(count))
        index.rows = Rows.of(storage.live(count, (total + 31) // 32).numpy(), total)
        replay(cast(Any, index), folder / JOURNAL, about["id"], index._write)

    for step in (check, fill):
        ranks.together(ValueError, said, step)
    return index
