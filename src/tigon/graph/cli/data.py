"""The graph that `tigon graph` commands read, by --data and --root."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tigon.cli.problem import Problem, sentences


def load_graph(command: str, data: str, root: str | None) -> Any:
    """Load the `tigon.graph.Graph` for --data and --root."""
    from tigon.graph import planetoid, read_graph
    from tigon.graph.citations import DATASETS

    if data in DATASETS:
        if root is None:
            raise Problem(f"{command}: --root must name the folder with the {data} files, ind.{data}.x and so on")
        with sentences(command):
            return planetoid(data, root)
    if root is not None:
        raise Problem(f"{command}: --root is for --data {', '.join(DATASETS)}, got {data}")
    if not Path(data).is_file():
        raise Problem(f"{command}: --data must be one of {', '.join(DATASETS)}, or a file, got {data}")
    with sentences(command):
        return read_graph(data)


def compute_digest(graph: Any) -> str:
    """A digest that identifies a graph when a run resumes."""
    from tigon.graph.data import NAMES

    found = hashlib.blake2b(digest_size=16)
    for name in NAMES:
        tensor = getattr(graph, name)
        found.update(b"-" if tensor is None else f"{name} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return found.hexdigest()
