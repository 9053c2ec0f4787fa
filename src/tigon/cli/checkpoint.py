"""Checkpoints that are complete or absent.

A checkpoint is written to a temporary folder, sealed with a manifest of its files, flushed to the disk and then
renamed: a kill at any moment leaves either the complete checkpoint or nothing that a resume would use. A resume first
compares the manifest with the files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tigon.cli.problem import Problem
from tigon.files import DamagedFileError, read_json, read_tensors
from tigon.manifest import MANIFEST as MANIFEST
from tigon.manifest import compute_fingerprint, read_manifest

STAGING = ".incomplete"
LOCK = ".lock"
NAME = re.compile(r"checkpoint-\d+")
BROKEN = ".broken"  # suffix for a damaged checkpoint, after another has taken its place
# Only the length of larger files is checked: reading 100 GB of optimizer state takes minutes.
CRC_LIMIT = 64 << 20
# File names in a checkpoint of Tigon's own training loops.
TENSORS, FACTS = "state.safetensors", "state.json"


def read_step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def find_checkpoints(output: Path) -> list[Path]:
    """A run's checkpoints, newest first."""
    found = [p for p in output.glob("checkpoint-*") if p.is_dir() and NAME.fullmatch(p.name)]
    return sorted(found, key=read_step, reverse=True)


def seal(folder: Path, largest: int | None = CRC_LIMIT) -> None:
    """Write the manifest of a finished folder, and flush everything to disk.

    largest: files above this byte size get no checksum; None: every file gets a checksum.
    """
    files = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST):
        with open(file, "rb+") as handle:
            os.fsync(handle.fileno())
        with_checksum = largest is None or file.stat().st_size <= largest
        files[file.relative_to(folder).as_posix()] = compute_fingerprint(file, with_checksum=with_checksum)
    write_json(folder / MANIFEST, {"files": files})


def stage(final: Path) -> Path:
    """A fresh temporary folder, for files that `publish` will move to `final`."""
    staged = final.parent / STAGING / final.name
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    return staged


def publish(staged: Path, final: Path, *, replace: bool = False) -> None:
    """Rename a sealed folder into place. An existing folder by that name is kept as `….broken`, or replaced."""
    if final.exists() and replace:
        shutil.rmtree(final)
    elif final.exists():
        aside = final.with_name(final.name + BROKEN)
        if aside.exists():
            shutil.rmtree(aside)
        final.rename(aside)
    staged.rename(final)
    if os.name == "posix":
        handle = os.open(final.parent, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def find_defect(folder: Path) -> str | None:
    """Describe a checkpoint's defect; None if the checkpoint is complete."""
    if not (folder / MANIFEST).exists():
        return f"{MANIFEST} is missing: the checkpoint is incomplete, or was not written by tigon"
    try:
        files = read_manifest(folder)
    except DamagedFileError:
        files = {}
    if not files:
        return f"{MANIFEST} cannot be read"
    for name, expected in files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        try:
            found = compute_fingerprint(file, with_checksum="crc32" in expected)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found["bytes"] != expected["bytes"]:
            return f"{name} has {found['bytes']:,} bytes, expected {expected['bytes']:,}"
        if found.get("crc32") != expected.get("crc32"):
            return f"{name} is corrupt: the checksum differs"
    return None


def find_newest(output: Path) -> tuple[Path, list[str]]:
    """The newest complete checkpoint, and a sentence for each newer, damaged checkpoint.

    Raises: Problem if no checkpoint is complete, naming each defect.
    """
    notes: list[str] = []
    for folder in find_checkpoints(output):
        reason = find_defect(folder)
        if reason is None:
            return folder, notes
        notes.append(f"{folder} cannot be used: {reason}")
    if notes:
        raise Problem(f"no complete checkpoint in {output} to resume from; {'; '.join(notes)}")
    raise Problem(f"no checkpoint in {output} to resume from")


def prune(output: Path, keep: int, *, best: str | None = None) -> None:
    """Delete all but the newest checkpoints, and the best, if there is one."""
    for folder in find_checkpoints(output)[keep:]:
        if best is not None and Path(best).name == folder.name:
            continue
        # Renamed first: a kill during the deletion must leave nothing that looks like a checkpoint.
        doomed = stage(folder)
        doomed.rmdir()
        folder.rename(doomed)
        shutil.rmtree(doomed)


def save_checkpoint(
    output: Path, modules: dict[str, dict[str, Any]], optimizer: dict[str, Any], facts: dict[str, Any]
) -> None:
    """Write a checkpoint of one of Tigon's own training loops, then delete older checkpoints.

    modules: state dicts by name; a name has no dot. optimizer: a state dict, whose numbers are tensors. facts: JSON.
    """
    from safetensors.torch import save_file

    number = 1 + max(map(read_step, find_checkpoints(output)), default=0)
    final = output / f"checkpoint-{number}"
    staged = stage(final)
    tensors = {f"{module}.{name}": value for module, state in modules.items() for name, value in state.items()}
    for p, values in optimizer["state"].items():
        tensors |= {f"optimizer.{p}.{name}": value for name, value in values.items()}
    save_file({name: value.detach().contiguous().cpu() for name, value in tensors.items()}, staged / TENSORS)
    write_json(staged / FACTS, {**facts, "groups": optimizer["param_groups"]})
    seal(staged, largest=None)
    publish(staged, final)
    prune(output, 1)


def load_checkpoint(output: Path) -> dict[str, Any] | None:
    """The newest complete checkpoint as passed to `save_checkpoint`: modules, facts and "optimizer" by name, or None.

    Raises: Problem if there are checkpoints, but none is complete.
    """
    if not find_checkpoints(output):
        return None
    folder, _ = find_newest(output)
    state = read_json(folder / FACTS, required=["groups"])
    values: dict[int, dict[str, Any]] = {}
    for name, tensor in read_tensors(folder / TENSORS).items():
        module, _, rest = name.partition(".")
        if module == "optimizer":
            p, _, key = rest.partition(".")
            values.setdefault(int(p), {})[key] = tensor
        else:
            state.setdefault(module, {})[rest] = tensor
    optimizer = {"state": values, "param_groups": state.pop("groups")}
    return {**state, "optimizer": optimizer}


def write_json(file: Path, value: Any) -> None:
    """Write JSON so that a reader sees the whole old file or the whole new file."""
    partial = file.with_name(file.name + ".partial")
    with open(partial, "w", encoding="utf-8") as handle:
        json.dump(value, handle, indent=2)
        handle.write("\n")
        handle.flush()
        os.fsync(handle.fileno())
    partial.replace(file)


@contextlib.contextmanager
def lock_folder(output: Path) -> Iterator[None]:
    """Hold an existing folder for this process, so that two runs do not overwrite each other's checkpoints.

    The system releases the lock when the process ends, however it ends. Child processes do not inherit the lock. On a
    system or file system without such locks, nothing is locked.

    Raises: Problem if another process holds the folder.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with open(output / LOCK, "a") as handle:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise Problem(f"another run is using {output}; wait for that run, or choose another --output") from None
        except OSError:
            pass
        else:
            if not _is_open(handle.fileno(), output / LOCK):  # its holder ended meanwhile, and deleted the file
                raise Problem(f"another run has just ended in {output}; start this one again")
        try:
            yield
        finally:
            (output / LOCK).unlink(missing_ok=True)


def is_locked(folder: Path) -> bool:
    """Whether another process holds a folder by `lock_folder`. A lock whose process was killed does not count."""
    try:
        import fcntl

        with open(folder / LOCK, "r+") as handle:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        return not isinstance(error, PermissionError) or error.filename is None  # else the file cannot be opened
    except (ImportError, OSError):
        return False
    return False


def _is_open(handle: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(file))
    except FileNotFoundError:
        return False
