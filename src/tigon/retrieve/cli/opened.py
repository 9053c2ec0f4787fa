"""Load the index and the queries for a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon.cli.problem import Problem, device_of
from tigon.files import read_array
from tigon.retrieve.cli.files import numbers, sentences

if TYPE_CHECKING:
    from tigon.retrieve import Hits, Index


def load(command: str, path: Path, device: str) -> Index:
    """Load an index folder onto a device.

    Raises: Problem if there is no index, if the index is damaged, or if there is no such device.
    """
    from tigon.retrieve import Index

    place = device_of(device, command)
    if not path.is_dir():
        raise Problem(f"{command}: there is no index {path}; tigon retrieve build makes one")
    with sentences(command):
        return Index.load(path, device=place)


def ids_of(hits: Hits) -> Any:
    """(queries, k) in numpy, -1 or None where there is no item."""
    ids = hits.ids
    return ids.cpu().numpy() if hasattr(ids, "cpu") else ids


def query(command: str, index: Index, text: str | None, file: Path | None, like: str | None) -> Any:
    """(queries, dim) from one of three options: numbers, a .npy file, or an index item."""
    import numpy as np

    given = [
        option for option, value in (("--vector", text), ("--vectors", file), ("--like", like)) if value is not None
    ]
    if len(given) != 1:
        got = " and ".join(given) if given else "none"
        raise Problem(f"{command}: one of --vector, --vectors and --like must be given, got {got}")
    if like is not None:
        return _of_item(command, index, like)
    if text is not None:
        values = numbers(text)
        if values is None:
            raise Problem(f"{command}: --vector must be numbers separated by commas, got {text[:60]!r}")
        matrix = np.array([values], dtype=np.float32)
    else:
        assert file is not None
        matrix = read_array(file)
        if matrix.ndim not in (1, 2) or matrix.dtype.kind != "f":
            raise Problem(
                f"{command}: --vectors must be floats (queries, {index.dim}) or ({index.dim},), got {matrix.shape} "
                f"{matrix.dtype}"
            )
        matrix = matrix[None] if matrix.ndim == 1 else matrix
    if matrix.shape[1] != index.dim:
        raise Problem(f"{command}: a query must have {index.dim} numbers, as the index has, got {matrix.shape[1]}")
    if not np.isfinite(matrix).all():
        raise Problem(f"{command}: a query must have finite numbers, got NaN or infinity")
    return matrix


def _of_item(command: str, index: Index, like: str) -> Any:
    ids = index.table.directory.ids
    kind = None if ids is None else ids.kind
    wanted: Any = like
    if kind == "int64":
        try:
            wanted = int(like)
        except ValueError:
            raise Problem(f"{command}: --like must be an id of the index, which are integers, got {like!r}") from None
    is_too_large = isinstance(wanted, int) and not -(2**63) <= wanted < 2**63
    if ids is None or is_too_large or wanted not in index:
        raise Problem(f"{command}: --like must be an id of the index, got {like}")
    row = int(ids.find([wanted])[1][0])
    return index.embeddings[row : row + 1].float()
