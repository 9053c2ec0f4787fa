"""What retrieval does on real data: hard filters, items that no one has had, and links between attributes.

    python benchmarks/retrieve.py --data ml-100k --output benchmarks/results     the study, minutes on a CPU
    python benchmarks/retrieve.py --run RUN --output benchmarks/results          filters, on vectors trained before

`--data` holds the reader's own copy of MovieLens 100K, of which nothing is in this repository. Vectors are trained
here, by the exact softmax over all films. Whatever is chosen is chosen on validation pairs. The file is written after
every part of a seed, and a study that is begun again goes on.

`--run` is a folder that `tigon retrieve train` wrote, of which it takes the vectors; the attribute is then made up.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from studies.movielens import Cold, cold_split, of_pairs, pairs_among, split
from studies.retrieve import MOVIELENS, PARTS, Row, tables
from torch import Tensor, nn

from tigon import retrieve
from tigon.bench import report
from tigon.retrieve import clusters, col, metrics

CPU = torch.device("cpu")  # where all of it runs
K = 20
SHARES = (0.01, 0.1, 0.5)
DEPTHS = (100, 1000)
QUERIES = 4096  # of one seed, at most
SIZES, DROPOUTS = (16, 64, 256), (0.0, 0.3)
NEAREST = 10
L1 = (3e-4, 1e-3)
ALPHAS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
# Of MovieLens: from a few trials of one seed on its validation pairs.
SCALE, RATE, BATCH, DIM, HOPS = 4.0, 0.01, 2048, 64, 2


@dataclasses.dataclass(frozen=True)
class Length:
    """epochs: at most. patience: validations, one in two epochs, without a better one."""

    epochs: int = 100
    patience: int = 5


# ------------------------------------------------------------------------------------------------------------ training


def train(vectors: nn.Module, pairs: Tensor, held: Tensor, seed: int, length: Length) -> None:
    """Train a module that returns the vectors of all users and items, and leave it at its best epoch."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(vectors.parameters(), lr=RATE, weight_decay=0.0)
    best, at, kept = -1.0, 0, {}
    for epoch in range(1, length.epochs + 1):
        vectors.train()
        for batch in pairs[torch.randperm(len(pairs))].split(BATCH):
            users, items = vectors()
            loss = retrieve.item_softmax(users[batch[:, 0]], items, batch[:, 1], scale=SCALE)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if epoch % 2 and epoch < length.epochs:
            continue
        found = metrics.evaluate(*of_module(vectors), held, pairs, K)[f"ndcg@{K}"]
        if found > best:
            best, at = found, epoch
            kept = {name: value.clone() for name, value in vectors.state_dict().items()}
        elif epoch - at >= 2 * length.patience:
            break
    vectors.load_state_dict(kept)


@torch.no_grad()
def of_module(vectors: nn.Module) -> tuple[Tensor, Tensor]:
    vectors.eval()
    users, items = vectors()
    return users, items


@functools.cache
def towers(data_path: Path, seed: int, length: Length) -> tuple[Tensor, Tensor]:
    """Vectors of users and films."""
    part = split(data_path, seed)
    torch.manual_seed(seed)
    made = retrieve.TwoTowers(*part.shape, DIM, part.train, hops=HOPS)
    train(made, part.train, part.validation, seed, length)
    return of_module(made)


# ------------------------------------------------------------------------------------------------------------- filters


class Filtered(NamedTuple):
    """A filter: what decides who passes, as text, and as a mask (items,)."""

    attribute: str
    share: float
    where: Any
    passes: Tensor


def filters_of(films: dict[str, Any]) -> Iterator[Filtered]:
    """By an attribute that has nothing to do with taste, by year and by genre, of shares near the wanted ones."""
    count = len(films["place"])
    place = torch.tensor(films["place"])
    for share in SHARES:
        bound = round(share * count)
        yield Filtered("made up", share, col("place") < bound, place < bound)
    if "year" not in films:
        return
    years = torch.tensor([9999 if year is None else year for year in films["year"]])
    genres = sorted({genre for some in films["genres"] for genre in some})
    masks = {genre: torch.tensor([genre in some for some in films["genres"]]) for genre in genres}
    for share in SHARES:
        year = min(years.unique().tolist(), key=lambda year: abs(float((years <= year).double().mean()) - share))
        yield Filtered(f"year ≤ {year}", share, col("year") <= year, years <= year)
        genre = min(genres, key=lambda genre: abs(float(masks[genre].double().mean()) - share))
        yield Filtered(f"genre {genre}", share, col("genres").has(genre), masks[genre])


def unseen(index: retrieve.Index, query: Tensor, seen: Tensor, k: int, where: Any = None) -> Tensor:
    """(B, k) rows of the best items that a user has not had, the best first; −1 where there are fewer."""
    rows = index.search(query, k=(k + seen.sum(1)).tolist(), where=where).ids
    kept = (rows >= 0) & ~seen.gather(1, rows.clamp(min=0))
    return first(rows, kept, k)


def first(rows: Tensor, kept: Tensor, k: int) -> Tensor:
    """Of the rows those that are kept, moved to the front."""
    order = (~kept).byte().argsort(dim=1, stable=True)
    return rows.masked_fill(~kept, -1).gather(1, order)[:, :k]


def filtered(
    name: str, seed: int, users: Tensor, items: Tensor, known: Tensor, test: Tensor, films: dict[str, Any]
) -> Iterator[Row]:
    """A row for each filter and way: before the search, and of the best 100 or 1000 after it."""
    draw = np.random.default_rng(seed)
    films = {**films, "place": draw.permutation(len(items)).tolist()}
    kinds = {"place": retrieve.Number(), "year": retrieve.Number(), "genres": retrieve.Tags(32)}
    index = retrieve.Index(
        items.shape[1], len(items), dtype="float32",
        schema=retrieve.Schema(**{column: kinds[column] for column in films if column in kinds}),
    )  # fmt: skip
    index.upsert(np.arange(len(items)), items, {column: films[column] for column in films if column in kinds})
    asked = test[:, 0].unique()
    asked = asked[torch.from_numpy(draw.permutation(len(asked))[:QUERIES])].sort().values
    test = pairs_among(test.flip(1), asked, len(users)).flip(1)  # users by their place among those asked
    seen_pairs = pairs_among(known.flip(1), asked, len(users)).flip(1)
    parts = [slice(at, at + 512) for at in range(0, len(asked), 512)]
    seen = of_pairs(seen_pairs, (len(asked), len(items)))
    begun = time.perf_counter()
    deep = torch.cat([unseen(index, users[asked[part]], seen[part], max(DEPTHS)) for part in parts])
    for one in filters_of(films):
        exact = torch.cat([unseen(index, users[asked[part]], seen[part], K, one.where) for part in parts])
        found = {"where": exact}
        for depth in DEPTHS:
            top = deep[:, :depth]
            found[f"top {depth}"] = first(top, (top >= 0) & one.passes[top.clamp(min=0)], K)
        right = test[one.passes[test[:, 1]]]
        there = (exact >= 0).sum()
        for way, rows in found.items():
            same = (rows[:, :, None] == exact[:, None, :]) & (rows >= 0)[:, :, None]
            yield Row(
                "filters", name, seed, way, {"attribute": one.attribute, "share": one.share},
                {
                    "recall": metrics.ranking(rows, right, K, len(items))[f"recall@{K}"],
                    "of exact": float(same.sum() / there), "hits": float((rows >= 0).sum(1).double().mean()),
                    "passing": float(one.passes.double().mean()), "queries": float(len(right[:, 0].unique())),
                },
                seconds=round(time.perf_counter() - begun, 1),
            )  # fmt: skip
            begun = time.perf_counter()


def filters(data_path: Path, seed: int, length: Length) -> Iterator[Row]:
    part = split(data_path, seed)
    known = torch.cat((part.train, part.validation))
    yield from filtered(MOVIELENS, seed, *towers(data_path, seed, length), known, part.test, part.data.films)


def options_of_run(folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))["options"]
    return options


def data_of_run(folder: Path) -> Path:
    return Path(options_of_run(folder)["data"])


def of_run(folder: Path, seed: int) -> Iterator[Row]:
    """The filters on the vectors that `tigon retrieve train` left in a folder."""
    from tigon.cli.retrieve.pairs import read_pairs

    options, data = options_of_run(folder), data_of_run(folder)
    pairs = read_pairs(data, options["test"] and Path(options["test"]), options["user"], options["item"])
    if pairs.test is None:
        raise SystemExit(f"retrieve study: --run must be a run with test pairs, got {folder} without any.")
    users = torch.from_numpy(np.load(folder / "users.npy"))
    items = retrieve.Index.load(folder / "items.index").embeddings[: len(pairs.items)]
    known, test = torch.from_numpy(pairs.train), torch.from_numpy(pairs.test)
    yield from filtered(data.stem, seed, users, items, known, test, {})


# ----------------------------------------------------------------------------------------------------------- cold start


class Tower(nn.Module):
    """Users by an embedding each, and items by a module; vectors of length 1."""

    def __init__(self, users: int, item: nn.Module) -> None:
        super().__init__()
        self.user = nn.Embedding(users, DIM)
        self.item = item
        nn.init.normal_(self.user.weight, std=0.1)

    def forward(self) -> tuple[Tensor, Tensor]:
        items = self.item.weight if isinstance(self.item, nn.Embedding) else self.item()
        return F.normalize(self.user.weight, dim=1), F.normalize(items, dim=1)


def judged(cold: Cold, users: Tensor, warm: Tensor, new: Callable[[str], Tensor]) -> tuple[dict[str, float], ...]:
    """Validation and test, of vectors of users, of warm films, and of new ones by the name of their group.

    new, ndcg: of new films among themselves. warm: of warm ones among themselves. mixed …: of one list of both.
    """
    found = []
    for name, pairs, out in (("validation", cold.validation, cold.train), ("test", cold.test, cold.train)):
        out = torch.cat((out, cold.validation)) if name == "test" else out
        vectors, fresh = new(name), cold.pairs[name]
        alone = metrics.evaluate(users, vectors, fresh, k=K)
        both = torch.cat((warm, vectors))
        moved = fresh + torch.tensor([0, len(warm)])
        mixed = [metrics.evaluate(users, both, right, out, K)[f"recall@{K}"] for right in (moved, pairs)]
        found.append({
            "new": alone[f"recall@{K}"], "new ndcg": alone[f"ndcg@{K}"],
            "warm": metrics.evaluate(users, warm, pairs, out, K)[f"recall@{K}"],
            "mixed new": mixed[0], "mixed warm": mixed[1],
        })  # fmt: skip
    return tuple(found)


def cold(data_path: Path, seed: int, length: Length) -> Iterator[Row]:
    data = cold_split(data_path, seed)
    users = data.users
    known = F.normalize(data.content[data.warm], dim=1)
    near = {
        name: (F.normalize(data.content[of], dim=1) @ known.t()).topk(NEAREST).indices
        for name, of in data.groups.items()
    }

    def row(method: str, setting: dict[str, Any], begun: float, *vectors: Any) -> Row:
        validation, test = judged(data, *vectors)
        seconds = round(time.perf_counter() - begun, 1)
        return Row("cold", MOVIELENS, seed, method, setting, test, validation, seconds=seconds)

    begun = time.perf_counter()
    counts = data.train[:, 1].bincount(minlength=len(data.warm)).float()[:, None]
    yield row("popularity", {}, begun, torch.ones(users, 1), counts, lambda name: counts[near[name]].mean(1))
    begun = time.perf_counter()
    torch.manual_seed(seed)
    plain = Tower(users, nn.Embedding(len(data.warm), DIM))
    nn.init.normal_(plain.item.weight, std=0.1)
    train(plain, data.train, data.validation, seed, length)
    of_users, of_items = of_module(plain)
    none = {name: F.normalize(torch.randn(len(of), DIM), dim=1) for name, of in data.groups.items()}
    yield row("ids", {}, begun, of_users, of_items, none.__getitem__)
    begun = time.perf_counter()
    yield row(
        "ids, nearest by content", {}, begun, of_users, of_items,
        lambda name: F.normalize(of_items[near[name]].mean(1), dim=1),
    )  # fmt: skip
    for size, dropout in ((size, dropout) for size in SIZES for dropout in DROPOUTS):
        begun = time.perf_counter()
        torch.manual_seed(seed)
        fitted = clusters.fit(data.content[data.warm], 2, min(size, len(data.warm)), seed=seed)
        item = retrieve.ClusteredEmbedding(
            fitted(data.content[data.warm]), min(size, len(data.warm)), DIM, dropout=dropout
        )
        model = Tower(users, item)
        train(model, data.train, data.validation, seed, length)
        of = {name: item.embed_clusters(fitted(data.content[rows])).detach() for name, rows in data.groups.items()}
        unit = {name: F.normalize(vectors, dim=1) for name, vectors in of.items()}
        yield row("clusters", {"size": size, "dropout": dropout}, begun, *of_module(model), unit.__getitem__)


# --------------------------------------------------------------------------------------------------------------- links


def scores_of(index: retrieve.Index, query: Tensor, **options: Any) -> Tensor:
    """(B, items), of one search for all of them."""
    count = len(index)
    hits = index.search(query, k=count, **options)
    return torch.empty(len(query), count).scatter_(1, hits.ids, hits.scores)


def auc(scores: Tensor, pairs: Tensor, others: Tensor) -> float:
    """How often a pair scores above another item of its user, ties half. others: (users, items) bool."""
    found = []
    for part in pairs.split(4096):
        mine, all_of = scores[part[:, 0], part[:, 1], None], scores[part[:, 0]]
        against, many = others[part[:, 0]], others[part[:, 0]].sum(1)
        won = ((mine > all_of).double() + 0.5 * (mine == all_of).double()).mul(against).sum(1)
        found.append((won / many)[many > 0])
    return float(torch.cat(found).mean())


def ranked(scores: Tensor, pairs: Tensor, seen: Tensor) -> dict[str, float]:
    """Recall and NDCG of all items but those that a user has had."""
    order = scores.masked_fill(seen, -torch.inf).argsort(dim=1, descending=True, stable=True)[:, :K]
    found = metrics.ranking(order, pairs, K, scores.shape[1])
    return {"recall": found[f"recall@{K}"], "ndcg": found[f"ndcg@{K}"]}


def links(data_path: Path, seed: int, length: Length) -> Iterator[Row]:
    part = split(data_path, seed)
    films, people = part.data.films, part.data.people
    schema = retrieve.Schema(genres=retrieve.Tags(32), decade=retrieve.Category(32))
    attributes = {name: films[name] for name in ("genres", "decade")}
    seen = of_pairs(part.train, part.shape)
    seen_later = seen | of_pairs(part.validation, part.shape)
    liked, disliked = (of_pairs(torch.from_numpy(of), part.shape) for of in (part.data.liked, part.data.disliked))
    users, items = towers(data_path, seed, length)
    counts = part.train[:, 1].bincount(minlength=part.shape[1]).float().log1p()[:, None]

    def index_of(vectors: Tensor) -> retrieve.Index:
        index = retrieve.Index(vectors.shape[1], len(vectors), dtype="float32", schema=schema)
        index.upsert(np.arange(len(vectors)), vectors, attributes)
        return index

    popular = index_of(counts), torch.ones(len(users), 1)
    embedded = index_of(items), users

    def row(method: str, setting: dict[str, Any], scores: Tensor, tried: dict[str, float], begun: float) -> Row:
        found = ranked(scores, part.test, seen_later)
        found |= {"auc": auc(scores, part.test, ~liked), "auc disliked": auc(scores, part.test, disliked)}
        if "vectors" not in method:  # a user without a pair has no vector
            new = {**ranked(scores, part.new, torch.zeros_like(seen)), "auc": auc(scores, part.new, ~liked)}
            found |= {f"new {name}": value for name, value in new.items()}
        seconds = round(time.perf_counter() - begun, 1)
        return Row("links", MOVIELENS, seed, method, setting, found, tried, seconds=seconds)

    begun = time.perf_counter()
    yield row("popularity", {}, scores_of(*popular), {}, begun)
    begun = time.perf_counter()
    made, tried = {}, {}
    for l1 in L1:
        made[l1] = retrieve.Links.fit(
            people, attributes, part.train, item_schema=schema, options=retrieve.LinkOptions(l1=l1, seed=seed),
            query_schema=retrieve.Schema(**{name: retrieve.Category(64) for name in people}),
        )  # fmt: skip
        scores = scores_of(*popular, links=made[l1].weigh(people), alpha=0)
        tried[f"{l1:g}"] = auc(scores, part.validation, ~liked)
    chosen = max(L1, key=lambda l1: tried[f"{l1:g}"])
    learned = made[chosen]
    of_people = learned.weigh(people)
    alone = row(
        "links", {"l1": chosen, "edges": len(learned)}, scores_of(*popular, links=of_people, alpha=0), tried, begun
    )
    alone.edges = sorted(learned.edges(None).to_pylist(), key=lambda edge: -abs(edge["weight"]))[:K]
    yield alone
    for method, base in (("popularity", popular), ("vectors", embedded)):
        begun = time.perf_counter()
        if method == "vectors":
            yield row(method, {}, scores_of(*base), {}, begun)
        tried = {
            f"{alpha:g}": ranked(scores_of(*base, links=of_people, alpha=alpha), part.validation, seen)["recall"]
            for alpha in ALPHAS
        }
        alpha = max(ALPHAS, key=lambda alpha: tried[f"{alpha:g}"])
        both = scores_of(*base, links=of_people, alpha=alpha)
        yield row(f"{method} + links", {"alpha": alpha, "l1": chosen}, both, tried, begun)


# ---------------------------------------------------------------------------------------------------------------- main


def kept(path: Path, empty: dict[str, Any]) -> list[Row]:
    """The rows that a file of this device and these versions has."""
    if not path.exists():
        return []
    content = report.load(path)
    if content["environment"]["packages"] != empty["environment"]["packages"]:
        raise SystemExit(f"{path} is of other versions: move it away, or choose another --output or --name")
    return [Row(**row) for row in content["rows"]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, help="folder of ml-100k.inter, ml-100k.item and ml-100k.user")
    parser.add_argument("--run", type=Path, help="folder that `tigon retrieve train` wrote, for filters on its vectors")
    parser.add_argument("--output", required=True, type=Path, help="folder for the result file; a begun study goes on")
    parser.add_argument("--name", help="name of the result file; default: by the device")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="what is measured")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--epochs", type=int, default=100, help="of a training, at most")
    options = parser.parse_args(arguments)
    if options.data is None and options.run is None:
        parser.error("--data or --run must be given")
    length = Length(options.epochs)
    todo: list[tuple[str, str, Callable[[int], Iterator[Row]]]] = []
    if options.data is not None:
        makers = {"filters": filters, "cold": cold, "links": links}
        todo += [(p, MOVIELENS, lambda s, p=p: makers[p](options.data, s, length)) for p in options.parts]
    if options.run is not None:
        todo.append(("filters", data_of_run(options.run).stem, lambda seed: of_run(options.run, seed)))
    empty = report.result("retrieve-study", [], device=CPU)
    path = options.output / (options.name or report.file_name(empty))
    done = kept(path, empty)
    there = {(row.part, row.data, row.seed) for row in done}
    for seed in range(options.seeds):
        for part, data, make in todo:
            if (part, data, seed) in there:
                continue
            begun = time.perf_counter()
            found = list(make(seed))
            done += found
            report.save(path, report.result("retrieve-study", done, device=CPU))
            print(f"{part}, seed {seed}: {len(found)} rows in {time.perf_counter() - begun:.0f} s", flush=True)
    print(tables([row.to_dict() for row in done]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
