"""A sharded index on the disk: the folder of an index, with a file of items for each rank.

    jobs.index/snapshot-000002/manifest.json          written by rank 0 when all other files are on the disk
    jobs.index/snapshot-000002/items-0.safetensors    rank 0's items, and which in the whole each of them is
    jobs.index/snapshot-000002/items-0.json           the size and the checksum of that file

As for one device, a rename makes the snapshot count. Ranks agree before each step, so that all raise or none.
"""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from tigon.retrieve import disk, storage
from tigon.retrieve.journal import replay
from tigon.retrieve.schema import Schema
from tigon.retrieve.storage import JOURNAL, snapshots
from tigon.retrieve.updates import Rows

if TYPE_CHECKING:
    from tigon.retrieve.sharded import ShardedIndex

# Of manifests that tell of several files.
FORMAT = 2


def save(index: ShardedIndex, path: Path) -> None:
    """Write a snapshot, each rank its file. All ranks have to hold the index still.

    Raises: OSError on all ranks if one of them cannot write; what was there before is there still.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"Index.save: path must be a folder, which is made if it is not there, got the file {path}.")
    before = snapshots(path)
    number = int(before[-1].name[9:]) + 1 if before else 1
    final = path / f"snapshot-{number:06}"
    partial = path / f"{final.name}.partial"
    first, made = index.ranks.own == 0, not path.exists()

    def make() -> None:
        if first:
            path.mkdir(parents=True, exist_ok=True)
            disk.remove(partial)
            partial.mkdir()

    def write() -> None:
        name = f"items-{index.ranks.own}"
        about = disk.write_file(partial / f"{name}.safetensors", disk.safetensors(_items(index)))
        disk.write_file(partial / f"{name}.json", [json.dumps(about).encode()])

    def finish() -> None:
        if not first:
            return
        names = [f"items-{rank}" for rank in range(index.ranks.count)]
        files = {f"{name}.safetensors": json.loads((partial / f"{name}.json").read_bytes()) for name in names}
        about = storage.about(cast(Any, index.shard), index.capacity, len(index))
        storage.write_manifest(partial, {**about, "format": FORMAT, "shards": index.ranks.count, "files": files})
        disk.flush_folder(partial)
        disk.rename(partial, final)
        disk.flush_folder(path)
        if made:
            disk.flush_folder(path.resolve().parent)
        for old in before:
            disk.remove(old)

    try:
        for step in (make, write, finish):
            index.ranks.together(OSError, "another rank could not write, and says why", step)
    except BaseException as error:
        if first:
            disk.remove(partial)
        if not isinstance(error, OSError):
            raise
        said = "it is written, but the disk does not say so" if final.exists() else "what was there before is there"
        raise OSError(error.errno or errno.EIO, f"Index.save: {path}: {error.strerror or error}; {said}") from error


def _items(index: ShardedIndex) -> dict[str, Any]:
    """The items of this rank, and the place of each among all items in the order of rows."""
    shard = index.shard
    places = np.cumsum(index.rows.there()) - 1
    rows = np.flatnonzero(shard.rows.there()) * index.ranks.count + index.ranks.own
    return {**storage.items(shard), "places": torch.from_numpy(places[rows].astype(np.int64))}


def load(kind: type[ShardedIndex], path: Path, device: Any, mesh: Any) -> ShardedIndex:
    """The index of a folder, its items dealt out to the ranks anew."""
    name = "Index.load"
    found = snapshots(path)
    if not found:
        raise ValueError(f"{name}: path must be a folder that Index.save wrote, got {path}, which holds no snapshot.")
    folder = found[-1]
    about = storage.manifest(name, folder)
    if about.get("codes") == "sign":
        raise ValueError(f"{name}: {path} has codes 'sign', which a ShardedIndex does not have: load it on one device.")
    index = kind(
        about["dim"], about["capacity"], about["dtype"], about["metric"], Schema.from_json(json.dumps(about["schema"])),
        device, about.get("codes"), mesh=mesh,
    )  # fmt: skip

    def check() -> None:
        """A share of the files: each is read once for its checksum."""
        names = sorted(about["files"])[index.ranks.own :: index.ranks.count]
        storage.check_files(name, folder, {file: about["files"][file] for file in names})

    def fill() -> None:
        count, total = about["items"], index.rows.total
        keys = storage.fill(index.shard, folder, about, index.ranks.own, index.ranks.count)
        if index.ids is not None:
            index.ids.place(keys, np.arange(count))
        index.rows = Rows.of(storage.live(count, (total + 31) // 32).numpy(), total)
        replay(cast(Any, index), folder / JOURNAL, index._write)

    for step in (check, fill):
        index.ranks.together(ValueError, f"{name}: another rank could not read {folder}, and says why.", step)
    return index
