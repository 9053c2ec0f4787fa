"""`manifest.json`: the sizes and checksums of a folder's files, by which a reader detects incomplete files.

    {"files": {"model.safetensors": {"bytes": 1024, "crc32": 305419896}}}

A file without a checksum is compared by size alone.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tigon.files import DamagedFileError, read_json

MANIFEST = "manifest.json"
_PIECE = 1 << 24

Fingerprint = dict[str, int]


def compute_fingerprint(file: Path, *, with_checksum: bool = True) -> Fingerprint:
    """A file's size and, with_checksum, its CRC-32."""
    size = file.stat().st_size
    if not with_checksum:
        return {"bytes": size}
    checksum = 0
    with file.open("rb") as handle:
        while piece := handle.read(_PIECE):
            checksum = zlib.crc32(piece, checksum)
    return {"bytes": size, "crc32": checksum}


def read_manifest(folder: Path) -> dict[str, Fingerprint]:
    """Read the fingerprints in a folder's manifest, by file name.

    Raises: DamagedFileError if the manifest is missing or malformed.
    """
    files = read_json(folder / MANIFEST, required=["files"])["files"]
    whole = isinstance(files, dict) and all(
        isinstance(entry, dict) and isinstance(entry.get("bytes"), int) for entry in files.values()
    )
    if not whole:
        raise DamagedFileError(f"{folder / MANIFEST} must list files with their sizes.")
    return dict(files)


def _is_ours(folder: Path) -> bool:
    """Whether a folder's manifest is Tigon's; other programs use the same file name."""
    if not (folder / MANIFEST).exists():
        return False
    content = read_json(folder / MANIFEST, kind=(dict, list))
    return isinstance(content, dict) and "files" in content


def write_manifest(folder: str | Path, names: Iterable[str], *, largest: int | None = None) -> None:
    """Record files in a folder's manifest; the other entries stay. A missing file loses its entry.

    largest: files above this byte size get no checksum; None: every file gets a checksum.
    """
    folder = Path(folder)
    if (folder / MANIFEST).is_file() and not _is_ours(folder):
        return
    files: dict[str, Any] = read_manifest(folder) if (folder / MANIFEST).is_file() else {}
    for name in names:
        files.pop(name, None)
        if (file := folder / name).is_file():
            with_checksum = largest is None or file.stat().st_size <= largest
            files[name] = compute_fingerprint(file, with_checksum=with_checksum)
    partial = folder / f"{MANIFEST}.partial"
    partial.write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / MANIFEST)


def check_manifest(folder: str | Path, names: Iterable[str] | None = None) -> None:
    """Compare a folder's files with its manifest, if there is a manifest.

    names: the files about to be read; None: all files in the manifest.
    Raises: DamagedFileError for the first file that differs. A missing file is left to the reader.
    """
    folder = Path(folder)
    if not _is_ours(folder):
        return
    recorded = read_manifest(folder)
    for name in recorded if names is None else names:
        file = folder / name
        if name not in recorded or not file.is_file():
            continue
        try:
            is_same = compute_fingerprint(file, with_checksum="crc32" in recorded[name]) == recorded[name]
        except OSError as error:
            raise DamagedFileError(f"{file} cannot be read ({error.strerror}).") from error
        if not is_same:
            raise DamagedFileError(
                f"{file} has changed since it was written: the file differs from {MANIFEST} in the same folder. If you "
                f"changed the file yourself, delete {MANIFEST}."
            )
