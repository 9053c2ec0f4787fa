"""Cora, CiteSeer and PubMed from Planetoid's files, with the public split.

The files are pickles; `tigon.graph.pickled` reads them without executing code.

Source: Yang, Cohen & Salakhutdinov 2016, https://arxiv.org/abs/1603.08861, https://github.com/kimiyoung/planetoid.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tigon.files import DamagedFileError, check_memory
from tigon.graph.data import Graph
from tigon.graph.pickled import CSRMatrix, read_pickle
from tigon.losses.options import check_choice

# `G2R` and `G2R.fit` options from the authors' commands.
DATASETS: dict[str, dict[str, Any]] = {
    "cora": {"eps": 0.05, "epochs": 20, "nodes": 768},
    "citeseer": {"eps": 0.1, "epochs": 20, "nodes": 512},
    "pubmed": {"eps": 0.05, "epochs": 40, "nodes": 200},
}
PARTS = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")
VALIDATION = 500  # validation nodes, which follow the training nodes


def planetoid(name: str, folder: str | Path) -> Graph:
    """Load a citation graph with the standard split: 20 training nodes per class, 500 validation and 1,000 test nodes.

    Args:
        name: "cora", "citeseer" or "pubmed".
        folder: contains the files ind.NAME.x, .y, .tx, .ty, .allx, .ally, .graph and .test.index, directly or in data/.
    Returns: `Graph`; each node's features are divided by their sum if it exceeds 1, as is usual for these data sets.
        Edges are in both directions, deduplicated, without self-loops.
    Raises: ValueError for missing or damaged files and for non-array contents. No code in the files is executed.
    """
    check_choice("planetoid", "name", name, tuple(DATASETS))
    place = _folder(name, Path(folder))
    read = {}
    for part in PARTS[:-1]:
        file = place / f"ind.{name}.{part}"
        try:
            read[part] = read_pickle(file)
        except ValueError as error:
            raise ValueError(f"planetoid: {error}") from error
    test = _indices(place / f"ind.{name}.test.index")
    try:
        return _join_parts(place, read, test)
    except DamagedFileError as error:
        raise ValueError(f"planetoid: {error}") from error
    except (ValueError, IndexError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"planetoid: the files ind.{name}.* of {place} are inconsistent ({error}).") from error


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
            f"planetoid: {place} must hold the {name} files, got none of {files}. See the data folder of "
            "https://github.com/kimiyoung/planetoid."
        )
    return place


def _join_parts(place: Path, read: dict[str, Any], test: npt.NDArray[np.int64]) -> Graph:
    labels, test_labels, train_labels = (_table(read[part]) for part in ("ally", "ty", "y"))
    # Test nodes are in test.index order. CiteSeer skips some node numbers: nodes without features or labels.
    n = max(len(read["graph"]), int(test.max()) + 1)
    if int(test.min()) < 0:
        raise ValueError(f"a node must be 0 or more, got {int(test.min())}")
    # Factor 2: dividing the table by its sums makes a copy.
    check_memory(place, 2 * 4 * (n + read["allx"].shape[0] + len(test)) * read["allx"].shape[1])
    known, tested, train = _dense(read["allx"]), _dense(read["tx"]), len(train_labels)
    x = np.zeros((n, known.shape[1]), np.float32)
    y = np.full(n, -1)
    x[: len(known)], x[test] = known, tested
    y[: len(known)], y[test] = labels.argmax(1), test_labels.argmax(1)
    x /= np.maximum(x.sum(1, keepdims=True), 1)
    listed = [(a, b) for a, others in read["graph"].items() for b in others if a != b]
    if not all(type(a) is int and type(b) is int for a, b in listed):
        raise ValueError("the graph must hold lists of node numbers")
    pairs = np.array(listed, dtype=np.int64).reshape(-1, 2)
    edges = np.unique(np.concatenate([pairs, pairs[:, ::-1]]), axis=0).T
    return Graph(
        torch.from_numpy(x), torch.from_numpy(np.ascontiguousarray(edges)).long(), torch.from_numpy(y),
        torch.arange(train), torch.arange(train, train + VALIDATION), torch.from_numpy(np.sort(test)),
    )  # fmt: skip


def _table(found: Any) -> npt.NDArray[Any]:
    if not isinstance(found, np.ndarray) or found.ndim != 2:
        raise ValueError("labels must be an array with a column for each class")
    return found


def _dense(rows: Any) -> npt.NDArray[np.float32]:
    """Features as a dense array; CSR indices were checked when the matrix was read."""
    if not isinstance(rows, CSRMatrix):
        return np.asarray(_table(rows), np.float32)
    dense = np.zeros(rows.shape, np.float32)
    dense[np.repeat(np.arange(len(dense)), np.diff(rows.indptr)), rows.indices] = rows.data
    return dense


def _indices(file: Path) -> npt.NDArray[np.int64]:
    try:
        return np.array([int(word) for word in file.read_text().split()], dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"planetoid: {file} must hold one node number per line ({error}).") from error
