"""Which films of one sitting a user liked: what gates, set-wise layers and action tokens are worth to LiGR.

    python benchmarks/rank_sittings.py --data ml-100k --output benchmarks/results

MovieLens 100K in RecBole's form, a reader's own copy. A sitting is a run of ratings without a pause of five minutes, at
most the first 100 of them; its films are the candidates, and a rating of 4 or 5 is the label. The history is what the
user rated in earlier sittings, the latest 200. Of each user the last sitting is a test, the one before it validates.
Validation says when a fit ends; the test decides nothing.
"""

from __future__ import annotations

import argparse
import copy
import csv
import itertools
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rank_sequences import Row, read
from torch import Tensor

from tigon import rank
from tigon.bench import report

PAUSE, MOST, HISTORY = 300.0, 100, 200
LIKED = 4
SIDES: dict[str, dict[str, Any]] = {
    "ligr": {},
    "by itself": {"setwise_layers": 0},
    "all layers set-wise": {"setwise_layers": 2},
    "no gate": {"gate": False},
    "no actions": {"actions": False},
    "no times": {"ages": False},
}


class Sittings(NamedTuple):
    """Ratings in the order of users and time. Sitting s is rows first[s] … end[s] − 1, and its history the rows from
    begin[s] to first[s]. part: 0 to train, 1 validates, 2 is a test. item: the film's code, 0 if training has none."""

    film: Tensor
    item: Tensor
    stars: Tensor
    seconds: Tensor
    genres: rank.Ragged  # of films, by code; row 0 has none
    begin: Tensor
    first: Tensor
    end: Tensor
    part: Tensor

    def batch(self, sittings: Tensor) -> rank.Batch:
        """Of these sittings, on the CPU."""
        begin, first, end = self.begin[sittings], self.first[sittings], self.end[sittings]
        history, candidates = _rows(begin, first), _rows(first, end)
        offsets, history_offsets = _offsets(end - first), _offsets(first - begin)
        of = torch.repeat_interleave(first - begin)
        # The sitting begins when its first film is rated: strictly later than its history, by the pause.
        age = self.seconds[first][of] - self.seconds[history]

        def known(rows: Tensor) -> dict[str, Any]:
            return {"item": self.item[rows], "genres": self.genres.take(self.film[rows])}

        label = (self.stars[candidates] >= LIKED).float()
        return rank.Batch(
            offsets, history_offsets, {}, known(candidates), known(history) | {"stars": self.stars[history]}, age,
            {"liked": label}, None, candidates,
        )  # fmt: skip


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))


def _rows(first: Tensor, end: Tensor) -> Tensor:
    offsets = _offsets(end - first)
    return torch.repeat_interleave(first - offsets[:-1], end - first) + torch.arange(int(offsets[-1]))


def sittings_of(folder: Path) -> tuple[Sittings, rank.Schema]:
    data = read(folder, "ml-100k")
    assert data.seconds is not None
    assert data.stars is not None
    path = next(p for p in (folder / "ml-100k.item", folder / "ml-100k" / "ml-100k.item") if p.is_file())
    with path.open(encoding="utf-8", newline="") as file:
        header, *lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    names = [name.partition(":")[0] for name in header]
    film, kinds = names.index("item_id"), names.index("class")
    of_film = {line[film]: line[kinds].split() for line in lines}
    genres = sorted({genre for some in of_film.values() for genre in some})
    code = {genre: n for n, genre in enumerate(genres, 1)}
    lists = [[code[genre] for genre in of_film.get(name, [])] for name in data.names]
    ragged = rank.Ragged(
        torch.tensor([one for some in lists for one in some]), _offsets(torch.tensor([len(some) for some in lists]))
    )
    cuts, begins, parts = [], [], []
    for a, b in zip(data.offsets[:-1].tolist(), data.offsets[1:].tolist(), strict=True):
        pauses = (data.seconds[a + 1 : b] - data.seconds[a : b - 1] > PAUSE).nonzero()[:, 0] + a + 1
        edges = [a, *pauses.tolist(), b]
        own = [(x, min(y, x + MOST)) for x, y in itertools.pairwise(edges) if y - x >= 2]
        cuts += own
        begins += [max(a, x - HISTORY) for x, _ in own]
        # The only sitting of a user is one to train by, the later one of two a test.
        parts += [*[0] * (len(own) - 2), 1, 2] if len(own) > 2 else [0, 2][: len(own)]
    first, end = (torch.tensor(side) for side in zip(*cuts, strict=True))
    begin, part = torch.tensor(begins), torch.tensor(parts)
    # Items that no sitting to train by has are unseen: code 0, known by their genres.
    seen = torch.zeros(data.catalogue + 1, dtype=torch.bool)
    seen[data.items[_rows(begin[part == 0], end[part == 0])]] = True
    item = torch.where(seen[data.items], data.items, 0)
    schema = rank.Schema(
        {"item": "item", "labels": ["liked"], "action": ["stars"]},
        {
            "item": rank.Id(hash_rows=data.catalogue, side="item", history=True),
            "genres": rank.Ids(vocab=tuple(genres), side="item", history=True),
            "stars": rank.Id(hash_rows=5, side="action"),
        },
    )
    made = Sittings(data.items, item, data.stars, data.seconds, ragged, begin, first, end, part)
    return made, schema


# ------------------------------------------------------------------------------------------------------------- the fits


@torch.no_grad()
def scored(ranker: rank.LiGR, data: Sittings, part: int, size: int) -> tuple[Tensor, rank.Batch]:
    """Logits of all candidates of a part, on the CPU, and their batch."""
    ranker.eval()
    of_part = (data.part == part).nonzero()[:, 0]
    logits = [ranker(data.batch(some).to(ranker.device))["liked"].cpu() for some in of_part.split(size)]
    return torch.cat(logits), data.batch(of_part)


def measured(logits: Tensor, batch: rank.Batch) -> dict[str, float]:
    label, offsets = batch.labels["liked"], batch.offsets
    metrics = rank.metrics
    return {
        "ndcg@10": float(metrics.ndcg(logits, label, offsets, k=10).mean),
        "gauc": float(metrics.gauc(logits, label, offsets).mean),
        "auc": float(metrics.auc(logits, label)),
        "log_loss": float(metrics.log_loss(logits.sigmoid(), label)),
        "ece": float(metrics.ece(logits.sigmoid(), label)),
        "diversity@5": diversity(logits, batch),
    }


def diversity(logits: Tensor, batch: rank.Batch, k: int = 5, fewest: int = 10) -> float:
    """Of the best k of sittings with at least so many films: the mean of 1 − |both| / |either| over pairs of genres."""
    genres = [set(some) for some in batch.items["genres"].lists()]
    found = []
    for a, b in zip(batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False):
        if b - a >= fewest:
            best = [genres[a + place] for place in logits[a:b].topk(k).indices.tolist()]
            pairs = [(x, y) for n, x in enumerate(best) for y in best[:n] if x | y]
            found += [1 - len(x & y) / len(x | y) for x, y in pairs]
    return sum(found) / max(1, len(found))


def fit(
    data: Sittings, schema: rank.Schema, name: str, seed: int, setting: dict[str, Any], device: torch.device
) -> Row:
    torch.manual_seed(seed)
    draw = np.random.default_rng(seed)
    size = setting["batch_size"]
    sizes = (setting[key] for key in ("width", "layers", "heads"))
    ranker = rank.LiGR(schema, rank.LiGRConfig(*sizes, dropout=setting["dropout"], **SIDES[name])).to(device)
    optimizer = torch.optim.AdamW(ranker.parameters(), lr=setting["lr"], weight_decay=setting["weight_decay"])
    train = (data.part == 0).nonzero()[:, 0]
    start, best, kept, best_epoch, epoch = time.monotonic(), -1.0, ranker.state_dict(), 0, 0
    while epoch - best_epoch < setting["patience"] and epoch < setting["epochs"]:
        ranker.train()
        for some in torch.from_numpy(draw.permutation(train.numpy())).split(size):
            batch = data.batch(some).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = ranker(batch)["liked"]
            loss = rank.losses.bce(logits, batch.labels["liked"])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        epoch += 1
        found = measured(*scored(ranker, data, 1, size))["ndcg@10"]
        if found > best:
            best, best_epoch, kept = found, epoch, copy.deepcopy(ranker.state_dict())
    seconds = time.monotonic() - start
    ranker.load_state_dict(kept)
    test, validation = (measured(*scored(ranker, data, part, size)) for part in (2, 1))
    own = {**setting, **SIDES[name], "best_epoch": best_epoch, "epochs_run": epoch}
    return Row("sittings", "ml-100k", seed, name, own, test, validation, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with ml-100k.inter and ml-100k.item")
    parser.add_argument("--sides", default="; ".join(SIDES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--batch-size", type=int, default=64, help="sittings")
    parser.add_argument("--epochs", type=int, default=60, help="at most")
    parser.add_argument("--patience", type=int, default=8, help="epochs without a better validation that end a fit")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds after which no further fit is begun")
    parser.add_argument("--output", type=Path, required=True, help="folder of the result file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    began, device = time.monotonic(), torch.device(options.device)
    data, schema = sittings_of(options.data)
    print(", ".join(f"{int((data.part == n).sum()):,} {said}" for n, said in enumerate(("train", "validate", "test"))))
    names = ("width", "layers", "heads", "dropout", "lr", "weight_decay", "batch_size", "epochs", "patience")
    setting = {name: getattr(options, name) for name in names}
    rows: list[Row] = []
    for seed in range(options.seeds):
        for name in (one.strip() for one in options.sides.split(";")):
            if time.monotonic() - began > options.budget:
                print(f"left out, the budget was spent: {name}, seed {seed}")
                continue
            row = fit(data, schema, name, seed, setting, device)
            rows.append(row)
            said = ", ".join(f"{key} {value:.4f}" for key, value in row.measures.items())
            at = time.monotonic() - began
            print(f"{at:5.0f} s  {name}, seed {seed}: {said}; epoch {row.setting['best_epoch']}", flush=True)
            content = report.result("rank-sittings", rows, device=device)
            options.output.mkdir(parents=True, exist_ok=True)
            path = options.output / report.file_name(content, "rank-sittings")
            path.write_text(json.dumps(content, indent=1) + "\n")
    for name in dict.fromkeys(row.method for row in rows):
        some = [row for row in rows if row.method == name]
        values = {key: [row.measures[key] for row in some] for key in some[0].measures}
        said = "  ".join(f"{key} {np.mean(of):.4f} ± {np.std(of):.4f}" for key, of in values.items())
        print(f"{name:20} {said}")


if __name__ == "__main__":
    main()
