"""Graphs with node features and optional labels and split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tigon.files import read_arrays, read_tensors
from tigon.graph.g2r import check_features, list_edges
from tigon.kernels import check_tensors

NAMES = ("x", "edge_index", "y", "train", "val", "test")


@dataclass(frozen=True)
class Graph:
    """A graph.

    Args:
        x: (n, F) floats, node features.
        edge_index: (2, e) integers, sources and targets, as in PyG.
        y: (n,) integers, each node's class, −1 if unknown; or None.
        train: integers, training nodes; or None.
        val: integers, validation nodes; or None.
        test: integers, test nodes; or None.
    Raises: ValueError for wrong shapes, dtypes or node numbers, and for non-finite features.
    """

    x: Tensor
    edge_index: Tensor
    y: Tensor | None = None
    train: Tensor | None = None
    val: Tensor | None = None
    test: Tensor | None = None

    def __post_init__(self) -> None:
        check_tensors("Graph", **{name: getattr(self, name) for name in NAMES})
        if self.x.dim() != 2 or not self.x.is_floating_point():
            raise ValueError(f"Graph: x must be (n, F) floats, got {tuple(self.x.shape)} {self.x.dtype}.")
        n = len(self.x)
        check_features("Graph", self.x)
        list_edges("Graph", self.edge_index, n)
        if self.y is not None and (self.y.shape != (n,) or not _whole(self.y)):
            raise ValueError(f"Graph: y must be ({n:,},) integers, got {tuple(self.y.shape)} {self.y.dtype}.")
        for name in ("train", "val", "test"):
            nodes = getattr(self, name)
            if nodes is None:
                continue
            if nodes.dim() != 1 or not _whole(nodes):
                raise ValueError(f"Graph: {name} must be a 1-D integer tensor, got {tuple(nodes.shape)} {nodes.dtype}.")
            nodes = nodes.long()  # torch cannot compare unsigned integers wider than 8 bits
            outside = nodes[(nodes < 0) | (nodes >= n)]
            if len(outside):
                raise ValueError(f"Graph: {name} must lie in [0, {n:,}), the nodes, got {int(outside[0]):,}.")


def read_graph(file: str | Path) -> Graph:
    """Read a custom graph from a file.

    Args:
        file: .npz or .safetensors with arrays x and edge_index and, for a probe, y, train, val and test, as in `Graph`.
            Splits may also be masks, (n,) bools, under the same names or as train_mask, val_mask and test_mask.
    Raises: ValueError for other formats, and for missing or inconsistent arrays, such as masks for several splits.
        Pickles, and therefore .pt files, are not supported.
    """
    file = Path(file)
    if not file.is_file():
        raise ValueError(f"read_graph: file must be a file, which {file} is not.")
    if file.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"read_graph: file must be .npz or .safetensors, got {file.name}.")
    arrays = _numpy(file) if file.suffix == ".npz" else read_tensors(file)
    missing = [name for name in ("x", "edge_index") if name not in arrays]
    if missing:
        raise ValueError(
            f"read_graph: {file} must hold x (n, F) and edge_index (2, e), got no {' and no '.join(missing)}; found "
            f"{', '.join(sorted(arrays)) or 'nothing'}."
        )
    for name in NAMES[1:]:
        if name in arrays and _whole(arrays[name]):
            arrays[name] = arrays[name].long()  # torch would treat 8-bit indices as a mask
    parts = [_split(arrays, name) for name in ("train", "val", "test")]
    return Graph(arrays["x"].float(), arrays["edge_index"], arrays.get("y"), *parts)


def _split(arrays: dict[str, Tensor], part: str) -> Tensor | None:
    """Nodes in a split, given as node numbers or as a mask."""
    name = part if part in arrays else f"{part}_mask"
    found = arrays.get(name)
    if found is None or (name == part and found.dtype != torch.bool):
        return found
    nodes = arrays["x"].shape[:1]
    if found.shape != nodes or found.dtype != torch.bool:
        raise ValueError(
            f"read_graph: {name} must be {tuple(nodes)} bools, the mask of one split, got {tuple(found.shape)} "
            f"{found.dtype}."
        )
    return found.nonzero()[:, 0]


def _numpy(file: Path) -> dict[str, Tensor]:
    import numpy as np

    found: dict[str, Tensor] = {}
    for name, array in read_arrays(file).items():
        try:
            found[name] = torch.from_numpy(np.ascontiguousarray(array))
        except TypeError as error:
            raise ValueError(f"read_graph: {name} of {file} must be numbers or bools, got {array.dtype}.") from error
    return found


def _whole(t: Tensor) -> Any:
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)
