"""The tables of a fit or a search: their options, and how the tables are read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from tigon.cli.options import option
from tigon.cli.problem import Problem, check_choice
from tigon.rank.cli.report import sentences
from tigon.rank.cli.warm_start import load_schema

SPLITS = ("time", "request")
ROLES = ("request", "item", "user", "time", "weight")
FILES = ("data", "history", "items", "users", "val", "test")
# --history keywords that are not files.
OWN = ("self", "positives", "none")
# Peak memory while reading a table, relative to its size: Arrow columns, their concatenation, and the tensors.
COPIES = 3
# For larger files, the digest reads this many bytes at the start and at the end.
DIGESTED = 32 << 20


# ruff: noqa: E501 (one line for each option)
# fmt: off
@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Tables of `tigon rank fit` and `tigon rank search`."""

    PANEL: ClassVar[str] = "Data"

    data: list[str] | None = option(None, "Impressions, one per row: files or a folder, in parquet, csv or JSON lines.")
    items: list[str] | None = option(None, "Item features, one row per item.")
    users: list[str] | None = option(None, "User features, one row per user.")
    val: list[str] | None = option(None, "Validation impressions; default: a fraction of the data.")
    test: list[str] | None = option(None, "Test impressions, evaluated at the end.")
    schema: str | None = option(None, "Edited schema.json; default: infer a schema from the data.")
    request: str | None = option(None, "Request column (items shown together); default: session_id, request_id, …, or user and time.")
    item: str | None = option(None, "Item column; default: item_id, item, ….")
    user: str | None = option(None, "User column; default: user_id, user, ….")
    time: str | None = option(None, "Time column; default: timestamp, time, ….")
    label: list[str] | None = option(None, "Label column with 0 and 1, or a comparison, such as 'like=rating>=4'; repeat for each label; default: click, label, ….")
    weight: str | None = option(None, "Sample-weight column; default: sample_weight.")
    val_fraction: float | None = option(None, "Fraction of requests held out for validation, without --val; 0: train for --epochs. \\[default: from the data]", min=0, max=0.9)
    val_split: str | None = option(None, "Validation split: the latest requests (time) or random requests (request); default: time if the data has times.")
# fmt: on


class Tables(NamedTuple):
    """Training, validation and test impressions; None if absent."""

    train: Any
    val: Any
    test: Any


class History(NamedTuple):
    """Events, and what a fit knows beside the tables. files: --history. actions: --action. stream: mebibytes, or None.

    ranker: the folder of --from's ranker, which has the schema.
    """

    files: Sequence[str] = ()
    actions: Sequence[str] = ()
    stream: int | None = None
    ranker: str | None = None
    needs_label: bool = True


def read_tables(command: str, options: TableOptions, seed: int, history: History = History()) -> Tables:
    """Read the impressions named by the options; validation and test use the training schema."""
    from tigon.rank import Impressions, Schema, Stream
    from tigon.rank.training.defaults import choose_share

    check_choice(command, options, val_split=SPLITS)
    roles: dict[str, Any] = {name: value for name in ROLES if (value := getattr(options, name)) is not None}
    roles |= {name: given for name, given in (("labels", options.label), ("action", history.actions)) if given}
    if roles and (options.schema is not None or history.ranker):
        source = "--from" if options.schema is None else "--schema"
        raise Problem(f"{command}: {source} already defines the columns, got also --{next(iter(roles))}")
    with sentences(command):
        schema = None if options.schema is None else Schema.load(options.schema)
        if schema is None and history.ranker:
            schema = load_schema(Path(history.ranker))
        events = parse_history(history.files)
        given: dict[str, Any] = {"items": options.items or None, "users": options.users or None}
        if history.stream is None:
            train: Any = Impressions.read(options.data or [], history=events, schema=schema, **given, **roles)
        else:
            train = Stream.read(
                options.data or [], history=events, schema=schema, mebibytes=history.stream, **given, **roles
            )
        if history.needs_label and not train.schema.labels:
            raise Problem(f"{command}: --label must name an outcome: a column with 0 and 1, or 'like=rating>=4'")
        val = None
        share = choose_share(train.rows) if options.val_fraction is None else options.val_fraction
        if not options.val and share:
            timed = train.schema.roles.time in train.schema.fields
            by: Any = options.val_split or ("time" if timed else "request")
            train, val = train.split(by=by, fraction=share, seed=seed)
        # The schema is fitted on the training impressions, which may serve as history for the other parts.
        past = add_own_history(events, options.data or [])
        val, test = (
            Impressions.read(files, history=past, schema=train.schema, **given) if files else found
            for files, found in ((options.val, val), (options.test, None))
        )
    for name, data in (("train", train), ("validate", val)):
        if data is not None and not len(data):
            raise Problem(f"{command}: --val-fraction {share:g} leaves no request to {name} on")
    return Tables(train, val, test)


def should_stream(data: list[str], history: Iterable[str]) -> bool:
    """Whether parquet files would take more than half the free memory, so that row groups are read one at a time."""
    import psutil  # installed with accelerate

    from tigon.data.parquet import ParquetColumns

    if {*history} & {"self", "positives"}:  # own impressions as history must be in memory
        return False
    try:
        columns = ParquetColumns("rank fit", data)
    except ValueError:  # another format; reading the file reports errors
        return False
    return bool(COPIES * columns.bytes > psutil.virtual_memory().available / 2)


def resolve_paths(values: Iterable[str] | None) -> list[str]:
    """Make paths absolute, so that a run can resume from any directory; keywords are unchanged."""
    return [value if value in OWN else str(Path(value).expanduser().resolve()) for value in values or []]


def parse_history(given: Sequence[str]) -> Any:
    """Convert --history for `Impressions.read`."""
    given = list(given)
    if not given or given == ["none"]:
        return None
    return given[0] if given in (["self"], ["positives"]) else given


def add_own_history(history: Any, data: Sequence[str]) -> Any:
    """The history for other impressions: with `data` before it, if the history is the impressions' own."""
    words = [history] if isinstance(history, str) else history or []
    return [*words, *(path for path in data if path not in words)] if {"self", "positives"} & {*words} else history


def compute_digest(paths: Iterable[str]) -> str:
    """Digest over files and folder contents: sizes and contents, for large files both ends."""
    found = hashlib.blake2b(digest_size=16)
    for path in filter(Path.exists, map(Path, paths)):
        for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
            size = file.stat().st_size
            found.update(str(size).encode())
            with open(file, "rb") as handle:
                found.update(handle.read(DIGESTED))
                if size > DIGESTED:
                    handle.seek(max(DIGESTED, size - DIGESTED))
                    found.update(handle.read())
    return found.hexdigest()


def move_near(data: Any, device: Any) -> Any:
    """The table on the device, or on the host if device memory is too small beside training."""
    import torch

    # A stream copies each buffer to the device itself.
    if data is None or device.type == "cpu" or not hasattr(data, "to"):
        return data
    try:
        near = data.to(device)
    except torch.OutOfMemoryError:
        return data
    free, total = torch.cuda.mem_get_info(device)
    return near if free > total / 2 else data
