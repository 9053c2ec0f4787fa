"""Whether defaults learn: a signal planted in tables of 10² to 10⁶ rows, and how much of it each command finds.

    python benchmarks/learn_defaults.py --sizes 100,2000,10000 --output benchmarks/results
    python benchmarks/learn_defaults.py --sizes 1000000 --models ligr,lirank,retrieve,graph --output benchmarks/results

"share" is (metric − chance) / (oracle − chance): 1 is what whoever planted the signal knows. The metric is the AUC of
rows that no fit has seen, with the AUC of the true probabilities as its oracle; of `retrieve train` the NDCG@20 of
later pairs, with the most popular items as chance and the true kinds as oracle; of `graph fit`, whose rows are nodes,
the accuracy of the nearest class mean, with the most frequent class as chance and 1 as oracle.

A million rows need a GPU. A run that was killed goes on: what the result file has is not fitted again. The script needs
pyarrow and accelerate beside what Tigon needs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

SHOWN, EVENTS, KINDS = 8, 12, 4
TESTED = 8_000
Columns = dict[str, Any]


@dataclass
class Row:
    model: str
    rows: int
    seed: int
    metric: str
    value: float
    chance: float
    oracle: float
    share: float
    steps: int
    seconds: float
    parameters: int
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# -------------------------------------------------------------------------------------------------------------- plants


def sequences(rows: int, seed: int, first: int = 0, items: int | None = None) -> tuple[Columns, Columns, Any]:
    """Impressions, a history, and the true probabilities: users click what is of the kind that their events are of.

    first: the number of the first user. items: how many, by default one for 48 rows.
    """
    draw = np.random.default_rng(seed)
    users = max(rows // SHOWN, 6)
    items = int(np.clip(rows // 48, 12, 20_000)) if items is None else items
    favourite = draw.integers(KINDS, size=(users, 1))

    def picked(count: int, of_kind: float) -> Any:
        other = draw.integers(KINDS, size=(users, count))
        kind = np.where(draw.random((users, count)) < of_kind, favourite, other)
        return draw.integers(items // KINDS, size=kind.shape) * KINDS + kind

    past, shown = picked(EVENTS, 0.8), picked(SHOWN, 0.3)
    p = np.where(shown % KINDS == favourite, 0.88, 0.12)
    user, now = np.arange(users) + first, (np.arange(users) + first + 1) * 1000
    impressions = {
        "session_id": user.repeat(SHOWN), "user_id": user.repeat(SHOWN), "item_id": shown.ravel(),
        "timestamp": now.repeat(SHOWN), "click": (draw.random(p.shape) < p).astype(int).ravel(),
    }  # fmt: skip
    events = {
        "user_id": user.repeat(EVENTS), "item_id": past.ravel(),
        "timestamp": (now[:, None] - 500 + np.arange(EVENTS)).ravel(),
    }  # fmt: skip
    return impressions, events, p.ravel()


def features(rows: int, seed: int, sized: int | None = None) -> tuple[Columns, Any]:
    """Rows of features and the true probabilities, by an id and a number and, of 1,000 rows and more, by a pair of ids.

    sized: rows of the table to train on, by which ids are as many; None: these.
    """
    sized = rows if sized is None else sized
    draw = np.random.default_rng(seed)
    ids = int(np.clip(sized // 40, 4, 5_000))
    a, b, c = (draw.integers(count, size=rows) for count in (ids, 6, 6))
    x = draw.normal(size=rows)
    z = np.where((a * 2_654_435_761 >> 7) % 2 == 1, 1.6, -1.6) + 0.8 * x
    if sized >= 1_000:
        z = z + np.where(b % 2 == c % 2, 1.3, -1.3)
    p = 1 / (1 + np.exp(-z))
    return {"a_id": a, "b_id": b, "c_id": c, "x": x, "click": (draw.random(rows) < p).astype(int)}, p


def pairs(count: int, seed: int) -> tuple[int, int, Any, Any, Any]:
    """Users, items, pairs to train on, later ones, and the kind of each user: users take items of their kind."""
    draw = np.random.default_rng(seed)
    users, items = max(count // 8, 10), max(int(np.clip(count // 10, 16, 50_000)) // KINDS * KINDS, KINDS)
    kind = draw.integers(KINDS, size=users)

    def picked(each: int) -> Any:
        user = np.arange(users).repeat(each)
        own = np.where(draw.random(len(user)) < 0.9, kind[user], draw.integers(KINDS, size=len(user)))
        return user * items + draw.integers(items // KINDS, size=len(user)) * KINDS + own

    train = np.unique(picked(8))
    later = np.setdiff1d(picked(2), train)
    return (
        users,
        items,
        np.stack((train // items, train % items), 1),
        np.stack((later // items, later % items), 1),
        kind,
    )


def linked(nodes: int, seed: int) -> Any:
    """A graph of three classes: most edges join nodes of one, and features say little."""
    from tigon.graph import Graph

    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(nodes) % 3
    source = torch.randint(nodes, (5 * nodes,), generator=draw)
    same = torch.randint(nodes // 3, source.shape, generator=draw) * 3 + y[source]
    other = torch.randint(nodes, source.shape, generator=draw)
    target = torch.where(torch.rand(source.shape, generator=draw) < 0.8, same, other)
    x = torch.randn(3, 16, generator=draw)[y] + 4 * torch.randn(nodes, 16, generator=draw)
    order = torch.randperm(nodes, generator=draw)
    known = max(nodes // 10, 12)
    edges = torch.stack((source, target))
    parts = {"train": order[:known], "val": order[known : 2 * known], "test": order[2 * known :]}
    return Graph(x, torch.cat((edges, edges.flip(0)), 1), y, **parts)


# ---------------------------------------------------------------------------------------------------------------- fits


def ranked(model: str, rows: int, seed: int, device: torch.device) -> Row:
    from tigon import rank
    from tigon.rank import metrics
    from tigon.rank.training.defaults import Settings, choose_share

    if model == "ligr":
        items = int(np.clip(rows // 48, 12, 20_000))
        shown, events, _ = sequences(rows, seed)
        tested, later, p = sequences(TESTED, seed + 1_000, 10_000_000, items)
        data = rank.Impressions.read(shown, history=events)
    else:
        shown, _ = features(rows, seed)
        tested, p = features(TESTED, seed + 1_000, rows)
        data, later = rank.Impressions.read(shown), None
    by: Any = "time" if model == "ligr" else "request"
    train, val = data.split(by=by, fraction=choose_share(data.rows), seed=seed)
    test = rank.Impressions.read(tested, history=later, schema=train.schema)
    torch.manual_seed(seed)
    kind, config = {"ligr": (rank.LiGR, rank.LiGRConfig), "lirank": (rank.LiRank, rank.LiRankConfig)}[model]
    ranker: Any = kind(train.schema, config(**rank.choose_sizes(model, train))).to(device)
    options = rank.FitOptions(seed=seed, history_max=200)
    began = time.perf_counter()
    fitted = rank.fit(ranker, train.to(device), val.to(device), options)
    seconds = time.perf_counter() - began
    value = rank.evaluate(rank.score(ranker, test, options.batch_options)).value("auc")
    oracle = float(metrics.auc(torch.from_numpy(p), torch.from_numpy(tested["click"]).float()))
    return found(
        model, rows, seed, "auc", value, 0.5, oracle, fitted.steps, seconds, ranker,
        {name: getattr(options.resolve(ranker, train), name) for name in Settings._fields},
    )  # fmt: skip


def retrieved(model: str, rows: int, seed: int, device: torch.device) -> Row:
    from dataclasses import replace

    from tigon.retrieve import metrics
    from tigon.retrieve.cli.loop import evaluate_towers, fit
    from tigon.retrieve.cli.pairs import SPLITS
    from tigon.retrieve.cli.train_options import TrainOptions, choose_settings

    users, items, train, later, kind = pairs(rows, seed)
    chosen = choose_settings(TrainOptions(), len(train))
    settings = TrainOptions(**chosen)
    kept, held = map(torch.from_numpy, SPLITS["random"](train, chosen.pop("val_fraction"), seed))
    began = time.perf_counter()
    first = fit(kept, (users, items), settings, seed, held, device=device)
    every = torch.from_numpy(train)
    last = fit(every, (users, items), replace(settings, epochs=first.best), seed, device=device)
    seconds = time.perf_counter() - began
    right, every = torch.from_numpy(later).to(device), every.to(device)
    value = evaluate_towers(last.towers, right, every)["ndcg@20"]
    popular = every[:, 1].bincount(minlength=items).float().unsqueeze(1)
    chance = metrics.evaluate(torch.ones(users, 1, device=device), popular, right, every, (20,))["ndcg@20"]
    of_users, of_items = (
        torch.nn.functional.one_hot(one, KINDS).float().to(device)
        for one in (torch.from_numpy(kind), torch.arange(items) % KINDS)
    )
    noise = 1e-3 * torch.rand(items, KINDS, generator=torch.Generator().manual_seed(seed)).to(device)
    oracle = metrics.evaluate(of_users, of_items + noise, right, every, (20,))["ndcg@20"]
    steps = (first.epochs + last.epochs) * max(len(train) // settings.batch_size, 1)
    return found(model, rows, seed, "ndcg@20", value, chance, oracle, steps, seconds, last.towers, chosen)


def embedded(model: str, rows: int, seed: int, device: torch.device) -> Row:
    from tigon.graph import G2R
    from tigon.graph.cli.fit import GraphFitOptions, choose_settings

    graph = linked(rows, seed)
    chosen = choose_settings(GraphFitOptions(data="own"), len(graph.x))
    torch.manual_seed(seed)
    sizes = {name: chosen[name] for name in ("hidden", "out", "gamma", "eps")}
    network = G2R(graph.x.shape[1], **sizes).to(device)
    x, edges, best = graph.x.to(device), graph.edge_index.to(device), (-1.0, 0.0)

    def after(epoch: int, loss: Any) -> None:
        nonlocal best
        z = network.encode(x, edges).cpu()
        best = max(best, (nearest(z, graph, graph.val), nearest(z, graph, graph.test)))

    began = time.perf_counter()
    network.fit(x, edges, epochs=chosen["epochs"], nodes=chosen["nodes"], seed=seed, after=after)
    seconds = time.perf_counter() - began
    return found(model, rows, seed, "accuracy", best[1], 1 / 3, 1.0, chosen["epochs"], seconds, network, chosen)


def nearest(z: Any, graph: Any, nodes: Any) -> float:
    """The share of nodes whose class has the nearest mean, of the nodes to train on."""
    z = torch.nn.functional.normalize(z)
    means = torch.stack([z[graph.train[graph.y[graph.train] == label]].mean(0) for label in range(3)])
    return float((torch.cdist(z[nodes], means).argmin(1) == graph.y[nodes]).float().mean())


def found(
    model: str, rows: int, seed: int, metric: str, value: float, chance: float, oracle: float, steps: int,
    seconds: float, module: torch.nn.Module, settings: dict[str, Any],
) -> Row:  # fmt: skip
    share = (value - chance) / (oracle - chance) if oracle > chance else math.nan
    count = sum(p.numel() for p in module.parameters())
    return Row(model, rows, seed, metric, value, chance, oracle, share, steps, seconds, count, settings)


MODELS: dict[str, Callable[[str, int, int, torch.device], Row]] = {
    "lirank": ranked, "retrieve": retrieved, "graph": embedded, "ligr": ranked,
}  # fmt: skip


def short_name(device: torch.device) -> str:
    """The word for the hardware in the name of the result file: cpu, or the GPU's last word, such as h200."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device).split()[-1].lower()


def main() -> None:
    from harness import report

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", default="100,2000,10000")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True, help="folder of the result file")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    file = options.output / f"{short_name(device)}-learn-defaults.json"
    rows = [Row(**row) for row in report.load(file)["rows"]] if file.is_file() else []
    done = {(row.model, row.rows, row.seed) for row in rows}
    sizes, models = map(int, options.sizes.split(",")), options.models.split(",")
    for size, model, seed in itertools.product(sizes, models, range(options.seeds)):
        if (model, size, seed) in done:
            continue
        with warnings.catch_warnings(record=True) as told:
            rows.append(row := MODELS[model](model, size, seed, device))
        print(
            f"{model}, {size:,} rows, seed {seed}: {row.metric} {row.value:.3f}, chance {row.chance:.3f}, oracle "
            f"{row.oracle:.3f}, share {row.share:.2f}; {row.steps:,} steps, {row.seconds:.1f} s",
            *(str(one.message) for one in told if "rank.fit" in str(one.message)), sep="\n  ", flush=True,
        )  # fmt: skip
        report.save(file, report.result("learn-defaults", rows, device=device))


if __name__ == "__main__":
    main()
