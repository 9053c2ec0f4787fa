"""MovieLens 100K from a user's own copy, in the form that RecBole gives it: ml-100k.inter, ml-100k.item, ml-100k.user.

GroupLens allows research and no redistribution, so that nothing of it is here; https://grouplens.org/datasets/movielens
"""

from __future__ import annotations

import csv
import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LIKED = 4.0
AGES = (18, 25, 35, 45, 50, 56)  # the bands of MovieLens 1M
# A word in fewer titles tells of no other film.
FEWEST = 3


class MovieLens(NamedTuple):
    """people: age, gender and occupation of each user. films: genres, decade, year and title of each item.

    liked, disliked: (pairs, 2) int64, rows of a user and an item, of ratings from 4 and of lower ones.
    """

    people: dict[str, list[str]]
    films: dict[str, list[str] | list[list[str]] | list[int | None]]
    liked: npt.NDArray[np.int64]
    disliked: npt.NDArray[np.int64]


def load(folder: Path) -> MovieLens:
    """Read the three files.

    Raises: SystemExit with a sentence for a file that is missing or has other columns.
    """
    users = _read(folder, "user", "user_id", "age", "gender", "occupation")
    items = _read(folder, "item", "item_id", "movie_title", "release_year", "class")
    ratings = _read(folder, "inter", "user_id", "item_id", "rating")
    user, item = ({name: row for row, name in enumerate(side[0])} for side in (users, items))
    pairs = [(user[u], item[i]) for u, i in zip(ratings[0], ratings[1], strict=True)]
    rows, stars = np.array(pairs, dtype=np.int64).reshape(-1, 2), np.array(ratings[2], dtype=float)
    years = [int(year) if year.isdigit() else None for year in items[2]]
    films = {
        "genres": [[genre for genre in genres.split() if genre != "unknown"] for genres in items[3]],
        "decade": ["unknown" if year is None else f"{year // 10}0s" for year in years],
        "year": years, "title": items[1],
    }  # fmt: skip
    people = {"age": [_band(int(age)) for age in users[1]], "gender": users[2], "occupation": users[3]}
    return MovieLens(people, films, rows[stars >= LIKED], rows[stars < LIKED])


def _read(folder: Path, kind: str, *columns: str) -> list[list[str]]:
    path = folder / f"ml-100k.{kind}"
    if not path.is_file():
        raise SystemExit(
            f"retrieve study: --data must hold ml-100k.inter, ml-100k.item and ml-100k.user, got {folder} without "
            f"{path.name}. GroupLens does not allow to redistribute them: take them from dataset/ml-100k of "
            "github.com/RUCAIBox/RecBole."
        )
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    names = [name.partition(":")[0] for name in header]
    if wanting := [name for name in columns if name not in names]:
        raise SystemExit(f"retrieve study: {path} must have a column {wanting[0]}, got {', '.join(names)}.")
    return [[row[names.index(name)] for row in rows] for name in columns]


def _band(age: int) -> str:
    below = [low for low in AGES if low <= age]
    above = [low for low in AGES if low > age]
    return f"{below[-1]}–{above[0] - 1}" if below and above else f"from {AGES[-1]}" if below else f"under {AGES[0]}"


def content(data: MovieLens) -> Tensor:
    """(items, D) fp32: genres, decade and title words, each part of length 1, or 0 where nothing is known."""
    films = data.films
    titles = [re.findall(r"[a-z]{3,}", str(title).lower()) for title in films["title"]]
    decades = [[] if decade == "unknown" else [decade] for decade in films["decade"]]
    parts = [_bag(films["genres"], 1), _bag(decades, 1), _bag(titles, FEWEST)]
    return torch.cat([torch.nn.functional.normalize(part, dim=1) for part in parts], 1)


def _bag(lists: list[list[str]], fewest: int) -> Tensor:
    """What each item has, weighed by the logarithm of how rare it is."""
    words = sorted({word for words in lists for word in words})
    number = {word: at for at, word in enumerate(words)}
    bag = torch.zeros(len(lists), len(words))
    for row, one in enumerate(lists):
        for word in one:
            bag[row, number[word]] = 1.0
    seen = bag.sum(0)
    return (bag * (len(lists) / seen).log())[:, seen >= fewest]


# ---------------------------------------------------------------------------------------------------------- the splits


class Split(NamedTuple):
    """Pairs of one seed, (pairs, 2) int64. new: of users of whom no other pair is known. Films stand in any order."""

    data: MovieLens
    train: Tensor
    validation: Tensor
    test: Tensor
    new: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.data.people["age"]), len(self.data.films["title"])


class Cold(NamedTuple):
    """Films in groups, by row, and their pairs, which name films by their place in the group.

    content: of all films. groups, pairs: "validation" and "test", of films without a training pair. train, validation,
    test: pairs of the warm films, of which there are some in training.
    """

    users: int
    content: Tensor
    warm: Tensor
    groups: dict[str, Tensor]
    pairs: dict[str, Tensor]
    train: Tensor
    validation: Tensor
    test: Tensor


@functools.cache
def split(folder: Path, seed: int) -> Split:
    """Of four fifths of the users 80, 10 and 10 % of the pairs; of the others all pairs are tests."""
    draw = np.random.default_rng(seed)
    data = shuffle(load(folder), draw)
    users = len(data.people["age"])
    is_new = np.isin(np.arange(users), draw.permutation(users)[: users // 5])
    pairs = torch.from_numpy(data.liked[draw.permutation(len(data.liked))])
    new = torch.from_numpy(is_new)[pairs[:, 0]]
    return Split(data, *_three(pairs[~new]), pairs[new])


def cold_split(folder: Path, seed: int) -> Cold:
    """A fifth of the films has no pair but tests, and a tenth none but validation; of the others as in `split`."""
    draw = np.random.default_rng(seed)
    data = shuffle(load(folder), draw)
    count = len(data.films["title"])
    order = torch.from_numpy(draw.permutation(count))
    test, validation, warm = order.tensor_split([count // 5, 3 * count // 10])
    pairs = torch.from_numpy(data.liked[draw.permutation(len(data.liked))])
    groups = {"validation": validation, "test": test}
    return Cold(
        len(data.people["age"]), content(data), warm, groups,
        {name: pairs_among(pairs, rows, count) for name, rows in groups.items()},
        *_three(pairs_among(pairs, warm, count)),
    )  # fmt: skip


def shuffle(data: MovieLens, draw: np.random.Generator) -> MovieLens:
    """Films in any order but MovieLens' own, which begins with known ones: equal scores go by row."""
    order = draw.permutation(len(data.films["title"]))
    place = np.argsort(order)
    films: Any = {name: [column[at] for at in order] for name, column in data.films.items()}
    liked, disliked = (np.stack((pairs[:, 0], place[pairs[:, 1]]), 1) for pairs in (data.liked, data.disliked))
    return MovieLens(data.people, films, liked, disliked)


def _three(pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """80, 10 and 10 %."""
    train, validation, test = pairs.tensor_split([int(0.8 * len(pairs)), int(0.9 * len(pairs))])
    return train, validation, test


def of_pairs(pairs: Tensor, shape: tuple[int, int]) -> Tensor:
    """(users, items) bool."""
    found = torch.zeros(shape, dtype=torch.bool)
    found[pairs[:, 0], pairs[:, 1]] = True
    return found


def pairs_among(pairs: Tensor, items: Tensor, count: int) -> Tensor:
    """The pairs of some items, which are numbered by their place among these."""
    place = torch.full((count,), -1)
    place[items] = torch.arange(len(items))
    found = torch.stack((pairs[:, 0], place[pairs[:, 1]]), 1)
    return found[found[:, 1] >= 0]
