"""Films and garments as requests that prompts ask about: a reader's own copies of MovieLens 100K and of reviews.

Ten consecutive ratings of a member are a request, its history what the member rated strictly before, the label a rating
of 4 or more. The latest fifth of the requests are the test, the latest tenth of the others validates. A twentieth of
the films, drawn once, is hidden: they stand in no history and in no request but those of the test, where they are new.
So are members whom no earlier request shows.

The garments are women's clothing, by what customers wrote of it; the label is whether they recommend it. Ten reviews of
one garment are a request.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tigon import rank
from tigon.rank import metrics
from tigon.rank.models.prompt import Prompt, Request, Requests, read_impressions

ANSWERS = {"yes": 1, "no": 0}
FILMS = Prompt.from_dict({
    "instruction": "You are given a member's profile and the films they rated.",
    "profile": "Age {{ age }}, {{ gender }}, {{ occupation }}.",
    "event": "{{ title }} ({{ year }}), {{ genres }}: {{ rating }} of 5",
    "candidate": "Film: {{ title }} ({{ year }}), {{ genres }}.",
    "tasks": {"like": {
        "question": "Will the member rate this film 4 or 5 of 5? Answer yes or no.", "answers": ANSWERS,
        "label": "rating >= 4",
    }},
    "columns": {"request": "request", "user": "user", "item": "item", "time": "time"},
})  # fmt: skip
GARMENTS = Prompt.from_dict({
    "instruction": "You are given a garment and what a customer wrote of it.",
    "profile": "{{ department }}, {{ kind }}.",
    "candidate": "Review, age {{ age }}: {{ title }}. {{ text|truncate(400) }}",
    "tasks": {"recommend": {
        "question": "Does the customer recommend the garment? Answer yes or no.", "answers": ANSWERS,
        "label": "recommended == 1",
    }},
    "columns": {"request": "request", "item": "item"},
})  # fmt: skip
SHOWN, HISTORY = 10, 64
TEST, VALIDATION, HIDDEN = 0.2, 0.1, 0.05
GARMENT_REQUESTS = 300  # to train on; as many are the test


# ----------------------------------------------------------------------------------------------------------- the films


def lines(path: Path) -> list[list[str]]:
    """The rows of one of RecBole's files, without its header."""
    if not path.is_file():
        raise SystemExit(f"rank_prompts.py: --data must hold ml-100k.inter, .item and .user, and has no {path.name}.")
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        return list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]


def hidden_films(films: list[str]) -> set[str]:
    order = torch.randperm(len(films), generator=torch.Generator().manual_seed(0)).tolist()
    return {sorted(films, key=int)[i] for i in order[: round(HIDDEN * len(films))]}


def tables(folder: Path) -> tuple[dict[str, Any], float]:
    """Impressions, history, films and members as Arrow tables; and the share of the requests that is the test."""
    import pyarrow as pa

    ratings = [(user, item, int(float(stars)), int(float(when)))
               for user, item, stars, when in lines(folder / "ml-100k.inter")]  # fmt: skip
    films, members = lines(folder / "ml-100k.item"), lines(folder / "ml-100k.user")
    hidden = hidden_films([film[0] for film in films])
    by_user: dict[str, list[tuple[int, str, int]]] = {}
    for user, item, stars, when in ratings:
        by_user.setdefault(user, []).append((when, item, stars))
    requests = []
    for user, own in sorted(by_user.items()):
        own.sort()
        requests += [(user, n, own[start : start + SHOWN]) for n, start in enumerate(range(0, len(own), SHOWN))]
    times = sorted((own[0][0] for _, _, own in requests), reverse=True)
    cut = times[round(TEST * len(times)) - 1]
    shown, early, late = [], set(), set()
    for user, n, own in requests:
        for _, item, stars in own:
            if own[0][0] >= cut or item not in hidden:
                shown.append((f"{user}/{n}", user, item, own[0][0], stars))
                (late if own[0][0] >= cut else early).add((user, n))
    events = [rating for rating in ratings if rating[1] not in hidden]

    def table(names: str, found: list[Any]) -> Any:
        return pa.table(dict(zip(names.split(), map(list, zip(*found, strict=True)), strict=True)))

    people = [(user, age, "male" if gender == "M" else "female", work) for user, age, gender, work, *_ in members]
    return {
        "data": table("request user item time rating", shown),
        "history": table("user item rating time", events),
        "items": table("item title year genres", [film[:4] for film in films]),
        "users": table("user age gender occupation", people),
    }, len(late) / (len(early) + len(late))  # fmt: skip


class Films:
    """Requests to train on, to validate and to test, and which test rows are of new members and new films.

    few: how many requests are drawn for what is trained on few. test, most: the first so many, to try.
    """

    def __init__(self, folder: Path, few: int, test: int | None = None, most: int | None = None) -> None:
        self.tables, share = tables(folder)
        words = {**self.tables, "items": _with(self.tables["items"], "genres", lambda text: text.replace(" ", ", "))}
        early, late = read_impressions(FILMS, **words).split(by="time", fraction=share)
        train, validation = early.split(by="time", fraction=VALIDATION)
        self.train = _some(Requests(train, FILMS, history_max=HISTORY), most)
        self.validation = _some(Requests(validation, FILMS, history_max=HISTORY), test)
        self.test = _some(Requests(late, FILMS, history_max=HISTORY), test)
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(1)).tolist()
        self.few = order[:few]
        self.ids = train.request_ids, validation.request_ids, late.request_ids
        seen_users, seen_items = set(train.column("user")), set(train.column("item"))
        rows = sum(len(request.candidates) for request in self.test)
        new_user = torch.tensor([user not in seen_users for user in late.column("user")[:rows]])
        new_item = torch.tensor([item not in seen_items for item in late.column("item")[:rows]])
        self.rows = {
            "": torch.ones(rows, dtype=torch.bool), " new members": new_user, " known members": ~new_user,
            " new films": new_item, " known films": ~new_item,
        }  # fmt: skip
        self.labels, self.offsets = truth(self.test, "like")

    def told(self) -> dict[str, int]:
        counts = {"train requests": len(self.train), "few": len(self.few), "test requests": len(self.test)}
        return counts | {f"test rows{name}": int(mask.sum()) for name, mask in self.rows.items()}

    def worth(self, scores: Tensor) -> dict[str, float]:
        """AUC of all test rows and of each part of them, and what else is measured of a ranking."""
        found = {f"auc{name}": auc(scores[mask], self.labels[mask]) for name, mask in self.rows.items()}
        return {k: v for k, v in found.items() if v == v} | worth(scores, self.labels, self.offsets)

    def for_ligr(self) -> tuple[Any, Any, Any, Any]:
        """The same requests as `rank.Impressions` of ids, genres, years and members: few, train, validation, test."""
        import pyarrow as pa

        items = _with(self.tables["items"], "genres", str.split)
        items = _with(items.drop_columns("title"), "year", lambda year: float(year) if year.isdigit() else None)
        users = _with(self.tables["users"], "age", float)
        roles = {"request": "request", "user": "user", "item": "item", "time": "time", "action": ["rating"],
                 "labels": ["like = rating >= 4"]}  # fmt: skip
        own = {"history": self.tables["history"], "items": items, "users": users}
        data = self.tables["data"]

        def some(requests: set[Any], **how: Any) -> Any:
            rows = pa.array([request in requests for request in data["request"].to_pylist()])
            return rank.Impressions.read(data.filter(rows), **own, **how)

        # Train and validation have the schema of train, and so must all others: its codes are the ranker's.
        early = some({*self.ids[0], *self.ids[1]}, **roles)
        train, validation = early.split(by="time", fraction=VALIDATION)
        few, test = (some(ids, schema=train.schema) for ids in ({self.ids[0][i] for i in self.few}, {*self.ids[2]}))
        assert (train.request_ids, validation.request_ids, test.request_ids) == self.ids
        return few, train, validation, test


def truth(requests: list[Request], task: str) -> tuple[Tensor, Tensor]:
    """Labels of the candidates, fp32: the first answer is right; and where each request begins."""
    counts = torch.tensor([len(request.candidates) for request in requests])
    labels = torch.tensor([1.0 - place for request in requests for place in (request.labels or {})[task]])
    return labels, torch.cat((counts.new_zeros(1), counts.cumsum(0)))


def auc(scores: Tensor, labels: Tensor) -> float:
    """NaN where all labels are one."""
    return float(metrics.auc(scores, labels)) if 0 < labels.sum() < len(labels) else float("nan")


def worth(scores: Tensor, labels: Tensor, offsets: Tensor) -> dict[str, float]:
    return {
        "ndcg@10": float(metrics.ndcg(scores, labels, offsets, k=10).mean),
        "log loss": float(metrics.log_loss(scores.clamp(1e-6, 1 - 1e-6), labels)),
    }


def _some(requests: Requests, most: int | None) -> list[Request]:
    return requests[: len(requests) if most is None else most]


def _with(table: Any, name: str, change: Any) -> Any:
    """The table with a column changed value by value."""
    import pyarrow as pa

    return table.set_column(table.column_names.index(name), name, pa.array(map(change, table[name].to_pylist())))


# -------------------------------------------------------------------------------------------------------- the garments


class Garments:
    """Requests of ten reviews of one garment, to train on and to test."""

    def __init__(self, path: Path, most: int | None = None) -> None:
        import pyarrow.parquet as pq

        names = {"Clothing ID": "garment", "Age": "age", "Title": "title", "Review Text": "text",
                 "Recommended IND": "recommended", "Department Name": "department", "Class Name": "kind"}  # fmt: skip
        rows = pq.read_table(path, columns=list(names)).rename_columns(list(names.values())).to_pylist()
        by_garment: dict[int, list[int]] = {}
        for n, row in enumerate(rows):
            if row["text"] and row["department"]:
                by_garment.setdefault(row["garment"], []).append(n)
        full = [own[start : start + SHOWN] for own in by_garment.values() for start in range(0, len(own), SHOWN)]
        full = [own for own in full if len(own) == SHOWN]
        order = torch.randperm(len(full), generator=torch.Generator().manual_seed(0)).tolist()
        size = GARMENT_REQUESTS if most is None else most
        shown = [{**rows[n], "request": str(r), "item": str(n)} for r in order[: 2 * size] for n in full[r]]
        data = {name: [row[name] for row in shown] for name in shown[0]}
        requests = Requests(read_impressions(GARMENTS, data), GARMENTS)
        self.train, self.test = requests[:size], requests[size : 2 * size]
        self.labels, self.offsets = truth(self.test, "recommend")

    def worth(self, scores: Tensor) -> dict[str, float]:
        return {"auc": auc(scores, self.labels), **worth(scores, self.labels, self.offsets)}
