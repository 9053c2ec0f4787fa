"""Week by week on MovieLens 100K: a ranker that goes on from last week's, beside one that begins again on all rows.

    python benchmarks/rank_incremental.py --data ml-100k --output benchmarks/results

MovieLens 100K in RecBole's form, a reader's own copy. A row is a rating, its label 4 or 5, its features the user, the
film and what is known of both. Each ranker has seen the weeks up to one, and is measured on the week after. `cold` is
fitted on all of these weeks, `anchored` goes on from the week before on the newest week alone, `free` the same without
an anchor, and `stale` is the first fit, for ever. What is chosen, how long a fit goes and how hard an anchor pulls, is
chosen on the weeks before those that are reported. Seconds are of one core, and those of an anchor are among them.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tigon import rank
from tigon.bench import report

WEEK = 7 * 24 * 3600
LIKED = 4
DRAWING = rank.BatchOptions(512)
# Chosen on the weeks before, as are epochs: see `chosen`.
RATE, COLD_EPOCHS = 3e-3, (1, 2, 3)
RATES, EPOCHS, STRENGTHS = (3e-4, 1e-3), (1, 2), (1.0, 10.0, 100.0)


@dataclass(frozen=True)
class Row:
    """part: "choice" or "weeks". week: whose rows the ranker has seen last. trained: rows of the fit. auc, log_loss: on
    the rows of the week after. seconds: of the fit, CPU."""

    part: str
    seed: int
    method: str
    week: int
    trained: int
    measured: int
    auc: float
    log_loss: float
    seconds: float
    setting: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _lines(folder: Path, name: str) -> list[dict[str, str]]:
    path = next((p for p in (folder / name, folder / "ml-100k" / name) if p.is_file()), None)
    if path is None:
        raise SystemExit(f"rank_incremental: --data must hold {name}, which {folder} does not")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def _year(word: str) -> float:
    return float(word) if word.isdigit() else float("nan")  # of one film it is "unkonwn"


def weeks_of(folder: Path) -> list[dict[str, Any]]:
    """The columns of each week's ratings, from the first rating on."""
    users = {line["user_id:token"]: line for line in _lines(folder, "ml-100k.user")}
    films = {line["item_id:token"]: line for line in _lines(folder, "ml-100k.item")}
    ratings = _lines(folder, "ml-100k.inter")
    seconds = np.array([float(line["timestamp:float"]) for line in ratings])
    week = ((seconds - seconds.min()) // WEEK).astype(int)
    found = []
    for number in range(week.max() + 1):
        rows = [ratings[r] for r in np.flatnonzero(week == number)]
        of = [(users[row["user_id:token"]], films[row["item_id:token"]]) for row in rows]
        found.append({
            "user": [row["user_id:token"] for row in rows], "film": [row["item_id:token"] for row in rows],
            "age": [float(user["age:token"]) for user, _ in of], "gender": [user["gender:token"] for user, _ in of],
            "occupation": [user["occupation:token"] for user, _ in of],
            "year": [_year(film["release_year:token"]) for _, film in of],
            "genres": [film["class:token_seq"].split() for _, film in of],
            "liked": [int(float(row["rating:float"]) >= LIKED) for row in rows],
        })  # fmt: skip
    return found


SCHEMA = rank.Schema(
    rank.Roles(labels=("liked",)),
    {"user": rank.Id(), "film": rank.Id(), "age": rank.Number(), "gender": rank.Id(), "occupation": rank.Id(),
     "year": rank.Number(), "genres": rank.Ids()},
)  # fmt: skip


def table(weeks: Sequence[dict[str, Any]], schema: rank.Schema) -> rank.Impressions:
    return rank.Impressions.read({name: [x for one in weeks for x in one[name]] for name in weeks[0]}, schema=schema)


@dataclass
class Fit:
    """A ranker, what the next week goes on from, and what it took."""

    ranker: Any
    anchors: list[rank.FisherPrior]
    trained: int
    seconds: float


def options(rate: float, epochs: int, seed: int, strength: float = 0.0) -> rank.FitOptions:
    return rank.FitOptions(lr=rate, epochs=epochs, batch_size=DRAWING.requests, seed=seed, prior_strength=strength)


def cold(weeks: Sequence[dict[str, Any]], epochs: int, seed: int, anchor: bool) -> Fit:
    data = table(weeks, SCHEMA)
    torch.manual_seed(seed)
    began = time.process_time()
    ranker = rank.LiRank(data.schema, rank.LiRankConfig(width=16, layers=2, rank=32, mlp=(128, 64), dropout=0.1))
    rank.fit(ranker, data, None, options(RATE, epochs, seed))
    anchors = [rank.FisherPrior.estimate(ranker, data, DRAWING, seed=seed)] if anchor else []
    return Fit(ranker, anchors, data.rows, time.process_time() - began)


def further(before: Fit, week: dict[str, Any], rate: float, epochs: int, strength: float, seed: int) -> Fit:
    """A fit on one more week, held to the first and the last by `strength`; 0: by nothing."""
    data = table([week], before.ranker.schema.expandable())
    torch.manual_seed(seed)
    began = time.process_time()
    ranker = rank.expand_vocabularies(before.ranker, data.schema)
    anchors = [anchor.expand_to(before.ranker, ranker) for anchor in before.anchors]
    rank.fit(ranker, data, None, options(rate, epochs, seed, strength), priors=anchors if strength else [])
    if strength:
        anchors = [*anchors[:1], rank.FisherPrior.estimate(ranker, data, DRAWING, seed=seed)]
    return Fit(ranker, anchors, data.rows, time.process_time() - began)


def row(part: str, method: str, fit: Fit, number: int, week: dict[str, Any], seed: int, **setting: float) -> Row:
    data = table([week], fit.ranker.schema)
    found = rank.evaluate(rank.score(fit.ranker, data, rank.BatchOptions(8192)), at=()).labels["liked"]
    return Row(part, seed, method, number, fit.trained, data.rows, found["auc"].value, found["log_loss"].value,
               fit.seconds, setting)  # fmt: skip


def chosen(weeks: list[dict[str, Any]], start: int, end: int, rows: list[Row]) -> tuple[int, tuple[float, int, float]]:
    """Epochs of a cold start, and of a week's fit the rate, epochs and strength, by the mean AUC of some weeks."""

    def mean(of: list[Row]) -> float:
        rows.extend(of)
        return float(np.mean([one.auc for one in of]))

    def one_cold(epochs: int) -> float:
        last = cold(weeks[: end + 1], epochs, 0, False)
        return mean([row("choice", "cold", last, end, weeks[end + 1], 0, epochs=epochs)])

    most = max(COLD_EPOCHS, key=one_cold)
    first = cold(weeks[: start + 1], most, 0, True)

    def goes_on(setting: tuple[float, int, float]) -> float:
        fit, found = first, []
        for number in range(start + 1, end + 1):
            fit = further(fit, weeks[number], *setting, 0)
            of = dict(zip(("rate", "epochs", "strength"), setting, strict=True))
            found.append(row("choice", "anchored", fit, number, weeks[number + 1], 0, **of))
        return mean(found)

    return most, max(itertools.product(RATES, EPOCHS, STRENGTHS), key=goes_on)


def study(weeks: list[dict[str, Any]], chosen_from: int, start: int, seeds: int) -> list[Row]:
    rows: list[Row] = []
    most, (rate, epochs, strength) = chosen(weeks, chosen_from, start - 1, rows)
    print(f"epochs {most} of all; of a week {epochs}, rate {rate}, strength {strength}", flush=True)
    for seed in range(seeds):
        first = cold(weeks[: start + 1], most, seed, True)
        anchored = free = first
        for number in range(start + 1, len(weeks) - 1):
            after = weeks[number + 1]
            anchored = further(anchored, weeks[number], rate, epochs, strength, seed)
            free = further(free, weeks[number], rate, epochs, 0.0, seed)
            again = cold(weeks[: number + 1], most, seed, False)
            for method, fit in (("cold", again), ("anchored", anchored), ("free", free), ("stale", first)):
                of_all = method in ("cold", "stale")
                setting = {"epochs": most, "rate": RATE} if of_all else {"epochs": epochs, "rate": rate}
                if method == "anchored":
                    setting["strength"] = strength
                rows.append(row("weeks", method, fit, number, after, seed, **setting))
    return rows


def summary(rows: list[Row]) -> list[str]:
    """The mean of the weeks' AUC, its difference from a cold start with a standard error, and seconds."""
    weeks = [one for one in rows if one.part == "weeks"]
    of = {(one.seed, one.week, one.method): one for one in weeks}
    lines = []
    for method in dict.fromkeys(one.method for one in weeks):
        own = [one for one in weeks if one.method == method]
        base = [of[one.seed, one.week, "cold"] for one in own]
        off = np.array([one.auc / other.auc - 1 for one, other in zip(own, base, strict=True)])
        # Weeks are what varies: seeds of a week share its rows.
        by_week = [off[[one.week == w for one in own]].mean() for w in sorted({one.week for one in own})]
        error = np.std(by_week, ddof=1) / len(by_week) ** 0.5 if len(by_week) > 1 else float("nan")
        seconds = sum(one.seconds for one in own) / sum(one.seconds for one in base)
        lines.append(
            f"{method:9} AUC {np.mean([one.auc for one in own]):.4f}  against cold {100 * off.mean():+.2f} ± "
            f"{100 * error:.2f} %  log loss {np.mean([one.log_loss for one in own]):.4f}  "
            f"time {seconds if method != 'stale' else 0:.3f} of cold"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of MovieLens 100K in RecBole's form")
    parser.add_argument("--output", type=Path, help="folder for the result; default: print it alone")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--choose-from", type=int, default=12, help="the week after which settings are chosen")
    parser.add_argument("--start", type=int, default=20, help="the week of the first fit that is reported")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    weeks = weeks_of(arguments.data)
    rows = study(weeks, arguments.choose_from, arguments.start, arguments.seeds)
    print("\n".join(summary(rows)))
    if arguments.output is not None:
        content = report.result("rank-incremental", rows, device=torch.device("cpu"))
        report.save(arguments.output / "cpu-rank-incremental.json", content)


if __name__ == "__main__":
    main()
