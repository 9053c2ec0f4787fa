"""Embeddings of citation graphs without labels, probed by a logistic regression: G2R beside DGI and GRACE.

    python -m studies.graphs.run --data FOLDER --output benchmarks/results

FOLDER holds the files of https://github.com/kimiyoung/planetoid, ind.cora.x and so on. DGI and GRACE need
torch_geometric, and are left out by --methods. A run that was killed goes on: what the result file has is not fitted
again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from harness import report
from torch import Tensor, nn

from studies.graphs.probe import METHODS, TITLES, Watch
from studies.rows import Row
from tigon.graph import G2R, Graph, group_neighbors, planetoid
from tigon.graph.citations import DATASETS
from tigon.losses import coding_rate

# Of the configuration that GRACE's authors give.
GRACE = {
    "cora": {"hidden": 128, "lr": 5e-4, "edges": (0.2, 0.4), "features": (0.3, 0.4), "tau": 0.4, "epochs": 200},
    "citeseer": {"hidden": 256, "lr": 1e-3, "edges": (0.2, 0.0), "features": (0.3, 0.2), "tau": 0.9, "epochs": 200},
    "pubmed": {"hidden": 256, "lr": 1e-3, "edges": (0.4, 0.1), "features": (0.0, 0.2), "tau": 0.7, "epochs": 1500},
}  # fmt: skip
# Of PyG's example; its paper stops by the training loss, here as elsewhere the validation chooses the epoch.
DGI = {"hidden": 512, "lr": 1e-3, "epochs": 300}
EVERY = 10  # epochs between the probes of DGI and GRACE


def near(x: Tensor) -> Tensor:
    return x.to_sparse() if float((x != 0).float().mean()) < 0.1 else x


# ------------------------------------------------------------------------------------------------------------- methods


def by_features(graph: Graph, data: str, seed: int, watch: Watch) -> dict[str, Any]:
    watch.look(0, graph.x)
    return {}


def by_untrained(graph: Graph, data: str, seed: int, watch: Watch) -> dict[str, Any]:
    watch.look(0, G2R(graph.x.shape[1]).to(graph.x.device).encode(near(graph.x), graph.edge_index))
    return {}


def by_g2r(normalize: Any) -> Callable[..., dict[str, Any]]:
    def fit(graph: Graph, data: str, seed: int, watch: Watch) -> dict[str, Any]:
        chosen = DATASETS[data]
        model, x = G2R(graph.x.shape[1], eps=chosen["eps"]).to(graph.x.device), near(graph.x)
        steps = {name: chosen[name] for name in ("epochs", "nodes")}
        model.fit(
            x, graph.edge_index, normalize=normalize, seed=seed, **steps,
            after=lambda epoch, _: watch.look(epoch, model.encode(x, graph.edge_index)),
        )  # fmt: skip
        return {**chosen, "normalize": normalize}

    return fit


def by_dgi(graph: Graph, data: str, seed: int, watch: Watch) -> dict[str, Any]:
    from torch_geometric.nn import DeepGraphInfomax, GCNConv

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act = GCNConv(graph.x.shape[1], DGI["hidden"]), nn.PReLU(DGI["hidden"])

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.act(self.conv(x, edge_index))

    model = DeepGraphInfomax(
        DGI["hidden"], Encoder(), summary=lambda z, *_: z.mean(0).sigmoid(),
        corruption=lambda x, edges: (x[torch.randperm(len(x), device=x.device)], edges),
    ).to(graph.x.device)  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=DGI["lr"])
    for epoch in range(1, DGI["epochs"] + 1):
        loss = model.loss(*model(graph.x, graph.edge_index))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch % EVERY == 0:
            with torch.no_grad():
                watch.look(epoch, model.encoder(graph.x, graph.edge_index))
    return DGI


class Grace(nn.Module):
    """Two convolutions; and the two layers through which embeddings of two views are compared."""

    def __init__(self, features: int, hidden: int, act: nn.Module) -> None:
        from torch_geometric.nn import GCNConv

        super().__init__()
        self.first, self.second, self.act = GCNConv(features, 2 * hidden), GCNConv(2 * hidden, hidden), act
        self.project = nn.Sequential(nn.Linear(hidden, hidden), nn.ELU(), nn.Linear(hidden, hidden))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.act(self.second(self.act(self.first(x, edge_index)), edge_index))


def info_nce(h1: Tensor, h2: Tensor, tau: float) -> Tensor:
    """A node of one view tells its own in the other from all nodes of both, itself left out; both ways, the mean."""
    h1, h2 = nn.functional.normalize(h1), nn.functional.normalize(h2)
    between = h1 @ h2.T / tau
    found = between.new_zeros(())
    for own, across in ((h1 @ h1.T / tau, between), (h2 @ h2.T / tau, between.T)):
        others = own.masked_fill(torch.eye(len(own), dtype=torch.bool, device=own.device), -torch.inf)
        found = found + (torch.cat([others, across], 1).logsumexp(1) - between.diagonal()).mean() / 2
    return found


def by_grace(graph: Graph, data: str, seed: int, watch: Watch) -> dict[str, Any]:
    of, x, edges = GRACE[data], graph.x, graph.edge_index
    model = Grace(x.shape[1], of["hidden"], nn.PReLU() if data == "citeseer" else nn.ReLU()).to(x.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=of["lr"], weight_decay=1e-5)

    def view(drop_edges: float, drop_features: float) -> Tensor:
        kept = torch.rand(edges.shape[1], device=x.device) >= drop_edges
        columns = torch.rand(x.shape[1], device=x.device) >= drop_features
        return model(x * columns, edges[:, kept])

    for epoch in range(1, of["epochs"] + 1):
        views = [view(*drop) for drop in zip(of["edges"], of["features"], strict=True)]
        loss = info_nce(*map(model.project, views), of["tau"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch % EVERY == 0:
            with torch.no_grad():
                watch.look(epoch, model(x, edges))
    return of


FITS: dict[str, Callable[..., dict[str, Any]]] = {
    "features": by_features,
    "untrained": by_untrained,
    "g2r, rows": by_g2r("rows"),
    "g2r, columns": by_g2r("columns"),
    "dgi": by_dgi,
    "grace": by_grace,
}


# ---------------------------------------------------------------------------------------------------------------- rate


def time_call(call: Callable[[], Any], device: torch.device, rounds: int = 20) -> float:
    """Milliseconds of a call, the median."""
    found = []
    for _ in range(rounds + 3):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - began))
    return sorted(found[3:])[rounds // 2]


def determinants(z: Tensor, groups: list[Tensor], eps: float) -> Tensor:
    """The same by d × d determinants, some groups at once, whose rows are filled up with zeros."""
    n, d = z.shape
    rate = z[:0].sum()
    for start in range(0, len(groups), 64):
        some = groups[start : start + 64]
        size = torch.tensor([len(rows) for rows in some], device=z.device).clamp(min=1)
        y = nn.utils.rnn.pad_sequence([z[rows] for rows in some], batch_first=True)
        matrix = torch.eye(d, dtype=z.dtype, device=z.device) + d / (size[:, None, None] * eps) * y.mT @ y
        rate = rate + torch.linalg.cholesky(matrix).diagonal(dim1=1, dim2=2).log().sum() / n
    return rate


def rate_row(graph: Graph, rounds: int) -> Row:
    """The rate of 768 neighbourhoods and its gradient; and both in fp64, by a d × d determinant a group."""
    device, n, d, eps = graph.x.device, len(graph.x), 512, 0.05
    torch.manual_seed(0)
    z = nn.functional.normalize(torch.randn(n, d, device=device), p=1.0).requires_grad_()
    drawn = torch.randperm(n)[:768]
    groups = group_neighbors(graph.edge_index, n).take(drawn)

    def both() -> Tensor:
        z.grad = None
        value = coding_rate(z, groups, eps=eps)
        value.backward()
        return value.detach()

    value, exact = both(), z.detach().double().requires_grad_()
    source, target = graph.edge_index
    total = determinants(exact, [source[target == node] for node in drawn.tolist()], eps)
    (dz,) = torch.autograd.grad(total, exact)
    assert z.grad is not None
    measures = {
        "value": abs(float(value) / float(total.detach()) - 1),
        "dz": float((z.grad.double() - dz).norm() / dz.norm()),
    }
    with torch.no_grad():
        measures["forward_ms"] = time_call(lambda: coding_rate(z, groups, eps=eps), device, rounds)
    measures["both_ms"] = time_call(both, device, rounds)
    return Row("rate", "cora", 0, "coding_rate", {"groups": 768, "n": n, "d": d}, measures)


# ---------------------------------------------------------------------------------------------------------------- main


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", required=True, type=Path, help="folder of Planetoid's files")
    parser.add_argument("--output", required=True, type=Path, help="folder of the result file")
    parser.add_argument("--sets", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--rate", type=int, default=0, metavar="ROUNDS", help="time the coding rate so often")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    empty = report.result("graphs", [], device=device)
    file = options.output / (report.file_name(empty) if device.type == "cuda" else "cpu-graphs.json")
    rows = [Row(**row) for row in report.load(file)["rows"]] if file.exists() else []

    def keep(row: Row) -> None:
        rows.append(row)
        report.save(file, report.result("graphs", rows, device=device))

    for data in options.sets:
        graph = planetoid(data, options.data)
        graph = Graph(**{field.name: getattr(graph, field.name).to(device) for field in fields(Graph)})
        if data == "cora" and options.rate and not any(row.part == "rate" for row in rows):
            keep(rate_row(graph, options.rate))
        for seed in options.seeds:
            for method in options.methods:
                if any((row.data, row.seed, row.method) == (data, seed, method) for row in rows):
                    continue
                if method == "features" and seed:
                    continue  # nothing in it is drawn
                torch.manual_seed(seed)
                watch, began = Watch(graph), time.monotonic()
                setting = FITS[method](graph, data, seed, watch)
                row = watch.row(data, seed, method, setting, time.monotonic() - began)
                keep(row)
                shown = "  ".join(f"{name} {value:.1f}" for name, value in row.measures.items())
                print(f"{data} {seed} {method}: {shown}  {row.seconds} s", flush=True)
    print(report.to_text(report.load(file)))


if __name__ == "__main__":
    main()
