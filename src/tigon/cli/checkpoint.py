"""Checkpoints that are complete or absent.

A checkpoint is written to a temporary folder, sealed with a manifest of its files, flushed to the disk and then
renamed: a kill at any moment leaves either the complete checkpoint or nothing that a resume would use. A resume first
compares the manifest with the files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from tigon.cli.problem import Problem
from tigon.files import DamagedFileError
from tigon.manifest import MANIFEST as MANIFEST
from tigon.manifest import compute_fingerprint, read_manifest

STAGING = ".incomplete"
RECORD = "run.json"
NAME = re.compile(r"checkpoint-\d+")
BROKEN = ".broken"  # suffix for a damaged checkpoint, after another has taken its place
# Only the length of larger files is checked: reading 100 GB of optimizer state takes minutes.
CRC_LIMIT = 64 << 20


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def checkpoints(output: Path) -> list[Path]:
    """A run's checkpoints, newest first."""
    found = [p for p in output.glob("checkpoint-*") if p.is_dir() and NAME.fullmatch(p.name)]
    return sorted(found, key=step_of, reverse=True)


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


def publish(staged: Path, final: Path) -> None:
    """Rename a sealed folder into place. An existing folder by that name is kept as `….broken`."""
    if final.exists():
        aside = final.with_name(final.name + BROKEN)
        if aside.exists():
            shutil.rmtree(aside)
        final.rename(aside)
    staged.rename(final)
    _flush_directory(final.parent)


def manifest(folder: Path) -> dict[str, dict[str, int]] | None:
    """Each required file's size and checksum; None if the manifest is missing or malformed."""
    try:
        return read_manifest(folder) or None
    except DamagedFileError:
        return None


def defect(folder: Path) -> str | None:
    """Describe a checkpoint's defect; None if the checkpoint is complete."""
    if not (folder / MANIFEST).exists():
        return f"it has no {MANIFEST}, so it was not written to its end, or not by tigon"
    files = manifest(folder)
    if files is None:
        return f"its {MANIFEST} is not readable"
    for name, expected in files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        try:
            found = compute_fingerprint(file, with_checksum="crc32" in expected)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found["bytes"] != expected["bytes"]:
            return f"{name} has {found['bytes']:,} bytes and must have {expected['bytes']:,}"
        if found.get("crc32") != expected.get("crc32"):
            return f"the contents of {name} are not what was written (its checksum differs)"
    return None


def newest_whole(output: Path) -> tuple[Path, list[str]]:
    """The newest complete checkpoint, and a sentence for each newer, damaged checkpoint.

    Raises: Problem if no checkpoint is complete, naming each defect.
    """
    notes: list[str] = []
    for folder in checkpoints(output):
        reason = defect(folder)
        if reason is None:
            return folder, notes
        notes.append(f"{folder} cannot be used: {reason}")
    if notes:
        raise Problem(f"there is no whole checkpoint in {output} to resume from; {'; '.join(notes)}")
    raise Problem(f"there is no checkpoint in {output} to resume from")


def prune(output: Path, keep: int, *, best: str | None = None) -> None:
    """Delete all but the newest checkpoints, and the best, if there is one."""
    for folder in checkpoints(output)[keep:]:
        if best is not None and Path(best).name == folder.name:
            continue
        # Renamed first: a kill during the deletion must leave nothing that looks like a checkpoint.
        doomed = output / STAGING / folder.name
        doomed.parent.mkdir(exist_ok=True)
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def write_json(file: Path, value: Any) -> None:
    """Write JSON so that a reader sees the whole old file or the whole new file."""
    partial = file.with_name(file.name + ".partial")
    with open(partial, "w", encoding="utf-8") as handle:
        json.dump(value, handle, indent=2)
        handle.write("\n")
        handle.flush()
        os.fsync(handle.fileno())
    partial.replace(file)


def _flush_directory(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
