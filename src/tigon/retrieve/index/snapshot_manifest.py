"""A snapshot's manifest: `manifest.json`, with its own checksum in the last line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tigon.data.values import shorten
from tigon.files import parse_json
from tigon.retrieve.filters.schema import Schema
from tigon.retrieve.ids import KINDS
from tigon.retrieve.index.format import CODES, DTYPES, METRICS
from tigon.retrieve.storage import disk

FORMAT = 3
MANIFEST, ITEMS = "manifest.json", "items.safetensors"


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write a snapshot's manifest, with the manifest's own checksum in the last line."""
    manifest = json.dumps(content, indent=1, ensure_ascii=False).encode()
    sealed = json.dumps({"manifest_sha256": _sha(manifest)}).encode()
    disk.write_file(folder / MANIFEST, [manifest, b"\n", sealed, b"\n"])


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read_schema(name: str, folder: Path, content: dict[str, Any]) -> Schema:
    try:
        return Schema.from_json(json.dumps(content["schema"]))
    except ValueError as error:
        raise ValueError(f"{name}: {folder / MANIFEST} is damaged: {error}") from None


def read_bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def unseal(content: bytes | None) -> dict[str, Any] | None:
    """A manifest's content; None unless the checksum matches."""
    try:
        body, seal, _ = (content or b"").rsplit(b"\n", 2)
        if parse_json(seal, MANIFEST, required=("manifest_sha256",))["manifest_sha256"] != _sha(body):
            return None
        return dict(parse_json(body, MANIFEST))
    except ValueError:
        return None


def read_manifest(name: str, folder: Path) -> dict[str, Any]:
    """Read and check a snapshot's manifest.

    Raises: ValueError if the manifest is damaged, or has another version.
    """
    path = folder / MANIFEST
    raw = read_bytes(path)
    if raw is None:
        raise ValueError(f"{name}: {path} is missing or cannot be read.")
    content = unseal(raw)
    if content is None:
        raise ValueError(f"{name}: {path} is damaged: the checksum does not match the content.")
    if content.get("format") != FORMAT:
        got = content.get("format")
        raise ValueError(f"{name}: {path} has format {got!r}, this version of Tigon reads {FORMAT}: rebuild the index.")
    for key, fits in FITS.items():
        if key not in content or not fits(content[key]):
            raise ValueError(f"{name}: {path} is damaged: {key} must not be {shorten(content.get(key))}.")
    if content["items"] > (content["capacity"] if content["ids"] else 0):
        raise ValueError(f"{name}: {path} is damaged: more items than capacity or ids.")
    shards = content.get("shards", 0)
    wanted = [f"items-{n}.safetensors" for n in range(len(content["files"]))] if "shards" in content else [ITEMS]
    if {*content["files"]} != {*wanted} or type(shards) is not int or shards not in (0, len(wanted)):
        raise ValueError(f"{name}: {path} is damaged: the files do not form an index.")
    return content


def _is_count(value: Any, least: int = 1) -> bool:
    return type(value) is int and least <= value < 2**62


# Checks for manifest values; `VectorFormat` and `Schema` check further.
FITS: dict[str, Callable[[Any], bool]] = {
    "id": lambda v: isinstance(v, str) and bool(v),
    "dim": _is_count,
    "capacity": _is_count,
    "items": lambda v: _is_count(v, 0),
    "dtype": lambda v: isinstance(v, str) and v in DTYPES,
    "metric": lambda v: v in METRICS,
    "ids": lambda v: v in (None, *KINDS),
    "codes": lambda v: v in (None, *CODES),
    "bits": _is_count,
    "schema": lambda v: isinstance(v, dict),
    "files": lambda v: isinstance(v, dict) and all(isinstance(file, dict) for file in v.values()),
}
