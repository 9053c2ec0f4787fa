"""Embeddings of citation graphs: the rows of the record, the probe of all methods, and their table.

benchmarks/graphs.py records the rows. The split is the public one: 20 nodes a class, 500 and 1,000.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from harness import report
from torch import Tensor

from studies.rows import Row, columns, markdown

report.COLUMNS["graphs"] = columns("part", "data", "seed")
# What the paper of G2R reports for it, in per cent.
PAPER = {"cora": 82.6, "citeseer": 71.2, "pubmed": 81.7}
TITLES = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
METHODS = {
    "features": "the features themselves",
    "untrained": "G2R's encoder before the fit",
    "g2r, rows": "G2R, groups as in the paper",
    "g2r, columns": "G2R, groups as in its code",
    "dgi": "DGI (PyG)",
    "grace": "GRACE (on PyG's layers)",
}
C = (0.1, 1.0, 10.0, 100.0)


# ----------------------------------------------------------------------------------------------------------- the probe


def logistic(rows: Tensor, labels: Tensor, c: float = 1.0) -> Tensor:
    """Weights of a multinomial logistic regression, (d + 1, classes) fp64, the last row the biases.

    The least of ½‖w‖² + c Σ losses, as scikit-learn has it, where scikit-learn need not be. On the CPU: on a GPU so few
    rows would wait for launches.
    """
    x, labels = rows.double().cpu(), labels.cpu()
    weights = x.new_zeros(x.shape[1] + 1, int(labels.max()) + 1).requires_grad_()
    solver = torch.optim.LBFGS(
        [weights], max_iter=500, tolerance_grad=1e-6, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        solver.zero_grad()
        logits = x @ weights[:-1] + weights[-1]
        found = weights[:-1].square().sum() / 2 + c * torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        found.backward()
        return found

    solver.step(loss)
    return weights.detach().to(rows.device)


def probed(z: Tensor, graph: Any, c: float = 1.0) -> tuple[float, float]:
    """Accuracy on the nodes to validate on and to test on, in per cent; rows are scaled to the length 1."""
    z = torch.nn.functional.normalize(z.detach().double())
    weights = logistic(z[graph.train], graph.y[graph.train], c)
    told = (z @ weights[:-1] + weights[-1]).argmax(1) == graph.y
    return tuple(round(100 * float(told[nodes].double().mean()), 3) for nodes in (graph.val, graph.test))  # type: ignore[return-value]


class Watch:
    """The probe of a fit: after each epoch, or of some of them."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.found: list[tuple[int, float, float]] = []
        self.best = torch.empty(0)
        self.seconds = 0.0

    def look(self, epoch: int, z: Tensor) -> None:
        if z.is_cuda:
            torch.cuda.synchronize()
        began = time.monotonic()
        val, test = probed(z, self.graph)
        if not self.found or val > max(one[1] for one in self.found):
            self.best = z.detach()
        self.found.append((epoch, val, test))
        self.seconds += time.monotonic() - began

    def row(self, data: str, seed: int, method: str, setting: dict[str, Any], seconds: float) -> Row:
        """best: of the epoch that is best on the validation, the first of equals; tuned: with the best c besides.

        seconds: of the fit and its probes, without which they are recorded.
        """
        epoch, val, test = max(self.found, key=lambda one: one[1])
        tuned = max((probed(self.best, self.graph, c) for c in C), key=lambda one: one[0])
        last, most = self.found[-1][2], max(share for *_, share in self.found)
        measures = {
            "best": test,
            "tuned": tuned[1],
            "last": last,
            "most": most,
            "angle": angle(self.best, self.graph.y),
        }
        validation = {"accuracy": val, "epoch": epoch}
        return Row("accuracy", data, seed, method, setting, measures, validation, round(seconds - self.seconds, 2))


def angle(z: Tensor, labels: Tensor) -> float:
    """The mean principal angle of two classes, in degrees."""
    from tigon.graph import principal_angles

    angles = principal_angles(z, labels)
    others = ~torch.eye(len(angles), dtype=torch.bool, device=angles.device)
    return float(angles[others].mean().rad2deg())


# ----------------------------------------------------------------------------------------------------------- the table


def of(rows: Iterable[dict[str, Any]], data: str, method: str, measure: str) -> list[float]:
    return [
        row["measures"][measure]
        for row in rows
        if row["part"] == "accuracy" and (row["data"], row["method"]) == (data, method)
    ]


def spread(values: list[float], digits: int = 1) -> str:
    if not values:
        return "–"
    return f"{fmean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(set(values)) > 1 else "")


def accuracy(rows: list[dict[str, Any]]) -> str:
    """A line for each method and two columns for each graph: the chosen epoch, and the last."""
    sets = [data for data in TITLES if any(of(rows, data, method, "best") for method in METHODS)]
    lines = [["G2R, its paper", *(text for data in sets for text in (f"{PAPER[data]:.1f}", ""))]]
    most = max((len(of(rows, data, method, "best")) for data in sets for method in METHODS), default=0)
    for method, title in METHODS.items():
        cells = [spread(of(rows, data, method, measure)) for data in sets for measure in ("best", "last")]
        for place, data in enumerate(sets):
            count = len(of(rows, data, method, "best"))
            if method != "features" and 0 < count < most:  # features have no seed
                cells[2 * place] += f" (of {count})"
        if any(cell != "–" for cell in cells):
            lines.append([title, *cells])
    header = ["test nodes told right, %", *(t for data in sets for t in (TITLES[data], "last epoch"))]
    return markdown(header, lines, 1)


def costs(rows: list[dict[str, Any]]) -> str:
    """A line for each method: epoch, seconds, and how far apart the classes are."""
    sets = [data for data in TITLES if any(of(rows, data, method, "best") for method in METHODS)]
    lines = []
    for method, title in METHODS.items():
        some = [row for row in rows if row["part"] == "accuracy" and row["method"] == method]
        if not some:
            continue
        line = [title]
        for data in sets:
            own = [row for row in some if row["data"] == data]
            epochs = spread([row["validation"]["epoch"] for row in own], 0) if own else "–"
            # The other seeds may have shared the machine.
            seconds = [row["seconds"] for row in own if row["seed"] == 0]
            line += [epochs, f"{seconds[0]:.1f}" if seconds else "–", spread(of(rows, data, method, "angle"), 0)]
        lines.append(line)
    header = ["", *(t for data in sets for t in (f"{TITLES[data]}: epoch", "seconds of a fit", "angle, °"))]
    return markdown(header, lines, 1)


def rate(rows: list[dict[str, Any]]) -> str:
    """The coding rate of many groups: milliseconds, and the error against fp64."""
    lines = []
    for row in rows:
        if row["part"] == "rate":
            m = row["measures"]
            lines.append(
                [row["method"], f"{m['forward_ms']:.2f}", f"{m['both_ms']:.2f}", f"{m['value']:.1e}", f"{m['dz']:.1e}"]
            )
    header = ["768 groups of (2,708, 512)", "forward, ms", "and backward, ms", "error of the value", "of the gradient"]
    return markdown(header, lines, 1)


PARTS = {"accuracy": accuracy, "costs": costs, "rate": rate}


def contents(folder: Path) -> list[dict[str, Any]]:
    """The result files, those with the other methods first."""
    found = [report.load(path) for path in sorted(folder.glob("*-graphs.json"))]
    return sorted(found, key=lambda content: not any(row["method"] == "dgi" for row in content["rows"]))


def page(folder: Path, what: str) -> str:
    """Markdown of one part of the result files in a folder: accuracy, costs, rate or source."""
    found = contents(folder)
    if not found:
        return "No run has been recorded yet."
    if what == "source":
        return report.source(found[0])
    rows = found[0]["rows"]
    if what == "rate" and not any(row["part"] == "rate" for row in rows):
        return "No run has been recorded yet."
    return PARTS[what](rows)
