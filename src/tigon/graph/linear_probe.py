"""Linear probe: logistic regression accuracy on embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.graph.data import Graph
from tigon.kernels import check_tensors
from tigon.losses.options import check_positive


def probe(z: Tensor, graph: Graph, *, c: float = 1.0) -> dict[str, float]:
    """Accuracy of a logistic regression fitted on the training nodes.

    Rows of z are first scaled to unit length, as the authors of GRACE and G2R do. Needs scikit-learn.

    Args:
        z: (n, d) floats, a row per node, such as `G2R.encode` returns.
        graph: with labels and a split.
        c: inverse regularisation strength: the inverse weight on ½‖w‖² relative to the summed losses.
    Returns: accuracies "val", if there are validation nodes, and "test".
    Raises: ValueError for a graph without labels or split, split nodes without labels, and z with the wrong row count
        or non-finite values.
    """
    from sklearn.linear_model import LogisticRegression

    check_positive("probe", c=c)
    check_tensors("probe", z=z)
    y, train, test = graph.y, graph.train, graph.test
    missing = [name for name, value in (("y", y), ("train", train), ("test", test)) if value is None or not len(value)]
    if y is None or train is None or test is None or missing:
        raise ValueError(f"probe: graph must have y, train and test, got no {' and no '.join(missing)}.")
    if z.dim() != 2 or len(z) != len(graph.x):
        raise ValueError(f"probe: z must be ({len(graph.x):,}, d), a row for each node, got {tuple(z.shape)}.")
    if not bool(z.isfinite().all()):
        raise ValueError("probe: z must be finite, got NaN or infinity: the fit has diverged.")
    parts = {"train": train, "val": graph.val, "test": test}
    known = {name: nodes.cpu().long() for name, nodes in parts.items() if nodes is not None and len(nodes)}
    labels = y.cpu().long()
    for name, nodes in known.items():
        if int(labels[nodes].min()) < 0:
            raise ValueError(
                f"probe: y must have labels for {name}, got {int(labels[nodes].min())}, which is not a label."
            )
    if len(labels[known["train"]].unique()) < 2:
        raise ValueError("probe: train must have nodes from two classes, got one.")
    rows = torch.nn.functional.normalize(z.detach().cpu().double()).numpy()
    fitted = LogisticRegression(C=c, max_iter=1000).fit(rows[known["train"].numpy()], labels[known["train"]].numpy())
    return {
        name: float(fitted.score(rows[nodes.numpy()], labels[nodes].numpy()))
        for name, nodes in known.items() if name != "train"
    }  # fmt: skip
