"""Embeddings of citation graphs: the rows of the record, the probe of all methods, and their table.

benchmarks/studies/graphs/run.py records the rows. The split is the public one: 20 nodes a class, 500 and 1,000.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from studies.rows import Row

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


def probe(z: Tensor, graph: Any, c: float = 1.0) -> tuple[float, float]:
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
        val, test = probe(z, self.graph)
        if not self.found or val > max(one[1] for one in self.found):
            self.best = z.detach()
        self.found.append((epoch, val, test))
        self.seconds += time.monotonic() - began

    def row(self, data: str, seed: int, method: str, setting: dict[str, Any], seconds: float) -> Row:
        """best: of the epoch that is best on the validation, the first of equals; tuned: with the best c besides.

        seconds: of the fit and its probes, without which they are recorded.
        """
        epoch, val, test = max(self.found, key=lambda one: one[1])
        tuned = max((probe(self.best, self.graph, c) for c in C), key=lambda one: one[0])
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
