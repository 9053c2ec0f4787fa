"""Cora, CiteSeer and PubMed as Planetoid's files have them, with the public split. No pickle in them runs code.

The files are pickles of numpy arrays, of scipy's CSR matrices and of dicts of lists. The unpickler here knows these, by
the names that numpy and scipy have had for them, and nothing else; scipy need not be installed.

Source: Yang, Cohen & Salakhutdinov 2016, https://arxiv.org/abs/1603.08861, https://github.com/kimiyoung/planetoid.
"""

from __future__ import annotations

import collections
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tigon.graph.data import Graph
from tigon.losses.options import check_choice

# Options of `G2R` and of `G2R.fit` that its authors' commands have for them.
DATASETS: dict[str, dict[str, Any]] = {
    "cora": {"eps": 0.05, "epochs": 20, "nodes": 768},
    "citeseer": {"eps": 0.1, "epochs": 20, "nodes": 512},
    "pubmed": {"eps": 0.05, "epochs": 40, "nodes": 200},
}
PARTS = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")
VALIDATION = 500  # nodes behind those to train on


def planetoid(name: str, folder: str | Path) -> Graph:
    """One of the three graphs of citations with the split that papers report: 20 nodes a class, 500, and 1,000.

    Args:
        name: "cora", "citeseer" or "pubmed".
        folder: that has the files ind.NAME.x, .y, .tx, .ty, .allx, .ally, .graph and .test.index, or has them in data/.
    Returns: `Graph`; features are divided by their sum in a node where it exceeds 1, as is usual for these. Edges are
        there both ways, each once, and none leads from a node to itself.
    Raises: ValueError for files that are missing, are damaged, or hold what is no array. Nothing in them is run.
    """
    check_choice("planetoid", "name", name, tuple(DATASETS))
    place = _folder(name, Path(folder))
    read = {part: _read(place / f"ind.{name}.{part}") for part in PARTS if part != "test.index"}
    test = _indices(place / f"ind.{name}.test.index")
    try:
        return _joined(read, test)
    except (ValueError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"planetoid: the files ind.{name}.* of {place} do not fit together ({error}).") from error


def _folder(name: str, folder: Path) -> Path:
    for place in (folder, folder / "data"):
        missing = [part for part in PARTS if not (place / f"ind.{name}.{part}").is_file()]
        if len(missing) < len(PARTS):
            break
    else:
        place = folder
    if missing:
        files = ", ".join(f"ind.{name}.{part}" for part in missing)
        raise ValueError(
            f"planetoid: {place} must hold the files of {name}, got none of {files}. They are in the folder data of "
            "https://github.com/kimiyoung/planetoid."
        )
    return place


def _joined(read: dict[str, Any], test: npt.NDArray[np.int64]) -> Graph:
    known, labels = _dense(read["allx"]), np.asarray(read["ally"])
    tested, train = _dense(read["tx"]), len(read["y"])
    # Test nodes stand in the order of test.index. CiteSeer lacks some numbers between: nodes without features or label.
    n = max(len(read["graph"]), int(test.max()) + 1)
    x = np.zeros((n, known.shape[1]), np.float32)
    y = np.full(n, -1)
    x[: len(known)], x[test] = known, tested
    y[: len(known)], y[test] = labels.argmax(1), np.asarray(read["ty"]).argmax(1)
    x /= np.maximum(x.sum(1, keepdims=True), 1)
    pairs = np.array([(a, b) for a, others in read["graph"].items() for b in others if a != b]).reshape(-1, 2)
    edges = np.unique(np.concatenate([pairs, pairs[:, ::-1]]), axis=0).T
    return Graph(
        torch.from_numpy(x), torch.from_numpy(np.ascontiguousarray(edges)).long(), torch.from_numpy(y),
        torch.arange(train), torch.arange(train, train + VALIDATION), torch.from_numpy(np.sort(test)),
    )  # fmt: skip


def _indices(file: Path) -> npt.NDArray[np.int64]:
    try:
        return np.array([int(word) for word in file.read_text().split()], dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"planetoid: {file} must hold a number of a node a line ({error}).") from error


# ------------------------------------------------------------------------------------------------------------- pickles


class _Rows:
    """What a pickled CSR matrix consists of."""

    data: Any
    indices: Any
    indptr: Any
    shape: Any

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.data, self.indices, self.indptr = (state.get(name) for name in ("data", "indices", "indptr"))
        self.shape = state.get("_shape", state.get("shape"))


def _dense(rows: Any) -> npt.NDArray[np.float32]:
    if not isinstance(rows, _Rows):
        return np.asarray(rows, np.float32)
    dense = np.zeros(rows.shape, np.float32)
    dense[np.repeat(np.arange(len(dense)), np.diff(rows.indptr)), rows.indices] = rows.data
    return dense


def _bytes(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes for Python 2; of the encodings there is this one."""
    return text.encode("latin1")


# What pickles of an array and of a number of it call, wherever this numpy has it.
_ARRAY, _NUMBER = np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0]
# By module and name, in all the places that they have had.
_ADMITTED: dict[tuple[str, str], Any] = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _ARRAY for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _NUMBER for core in ("core", "_core")},
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    **{(f"scipy.sparse.{module}", "csr_matrix"): _Rows for module in ("csr", "_csr")},
    **{(builtins, "list"): list for builtins in ("__builtin__", "builtins")},
    ("_codecs", "encode"): _bytes,
    ("collections", "defaultdict"): collections.defaultdict,
}


class _Arrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _ADMITTED.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it wants {module}.{name}, and arrays and lists are all that is read")
        return found


def _read(file: Path) -> Any:
    with open(file, "rb") as handle:
        try:
            return _Arrays(handle, encoding="latin1").load()
        except Exception as error:  # a damaged pickle raises whatever the operation that it breaks raises
            raise ValueError(f"planetoid: {file} is no pickle of arrays: {error}.") from error
