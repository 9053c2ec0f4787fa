"""Read user–item pairs from files, as rows in two tables."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tigon.cli.problem import Problem, one_line
from tigon.files import DamagedFileError, check_memory, read_arrays
from tigon.retrieve.cli.files import Source, check_column

NAME = "retrieve train"
USERS, ITEMS = ("user", "user_id", "userId"), ("item", "item_id", "itemId")
Array = npt.NDArray[Any]


class Pairs(NamedTuple):
    """train, test: (pairs, 2) int64 row pairs. users, items: the ids by row. test: None without a test file."""

    train: npt.NDArray[np.int64]
    test: npt.NDArray[np.int64] | None
    users: Array
    items: Array

    @property
    def digest(self) -> str:
        sizes = f"{len(self.users)}-{len(self.items)}"
        parts = (self.train, np.zeros(0) if self.test is None else self.test)
        return "-".join([sizes, *(f"{zlib.crc32(np.ascontiguousarray(part).tobytes()):08x}" for part in parts)])


def read_pairs(data: Path, test: Path | None, user: str | None, item: str | None) -> Pairs:
    """Read training and test pairs.

    Args:
        data: a table with pairs; a .txt file with lines "user item item …"; a scipy .npz file with the user–item
            adjacency matrix; or a folder with train.txt, or s_adj_mat.npz, and test.txt beside it.
        test: the same forms except .npz; None for test.txt in the folder.
        user, item: column names; None for the usual names.
    Raises: Problem for files that are missing, malformed or empty, and for test pairs with unknown users and items.
    """
    if data.is_dir() and ((data / "train.txt").exists() or (data / "s_adj_mat.npz").exists()):
        folder = data
        if test is None and (folder / "test.txt").exists():
            test = folder / "test.txt"
        data = folder / "train.txt"
        try:
            whole = _lists(data) if data.exists() else None
        except Problem:
            if not (folder / "s_adj_mat.npz").exists():
                raise
            whole = None
        data = data if whole is not None else folder / "s_adj_mat.npz"
    for path in (data, test):
        if path is not None and not path.exists():
            raise Problem(f"{NAME}: there is no file {path}")
    if data.suffix == ".npz":
        train, users, items = _adjacency(data)
    elif data.suffix == ".txt":
        train = _lists(data)
        users, items = (np.arange(int(train[:, side].max()) + 1) for side in (0, 1))
    else:
        found = _columns(data, user, item)
        (users, rows), (items, columns) = (np.unique(column, return_inverse=True) for column in found)
        train = np.stack((rows, columns), 1).astype(np.int64)
    train = np.unique(train, axis=0)
    if test is None:
        return Pairs(train, None, users, items)
    named_pairs = _lists(test).T if test.suffix == ".txt" else _columns(test, user, item)
    sides = []
    for what, column, known in zip(("user", "item"), named_pairs, (users, items), strict=True):
        if column.dtype.kind != known.dtype.kind:
            raise Problem(f"{NAME}: {test} has {what} ids of type {column.dtype}, but {data} has {known.dtype}")
        place = np.searchsorted(known, column).clip(max=len(known) - 1)
        if (wrong := known[place] != column).any():
            at = int(np.argmax(wrong))
            raise Problem(
                f"{NAME}: {test}, pair {at:,}: {what} {column[at]} is not among the {len(known):,} {what}s in {data}; "
                "leave out pairs whose user or item has no training pair"
            )
        sides.append(place)
    return Pairs(train, np.unique(np.stack(sides, 1).astype(np.int64), axis=0), users, items)


def split(train: npt.NDArray[np.int64], share: float, seed: int) -> tuple[npt.NDArray[np.int64], Array]:
    """Split training pairs in two: the rest, with at least one pair per user, and the held-out share.

    Raises: Problem if nothing would be held out.
    """
    draw = np.random.default_rng(seed)
    shuffled = train[draw.permutation(len(train))]
    stays = np.zeros(len(train), dtype=bool)
    stays[np.unique(shuffled[:, 0], return_index=True)[1]] = True
    return _part(shuffled, ~stays & (draw.random(len(train)) < share), share)


def split_blocks(train: npt.NDArray[np.int64], share: float, seed: int) -> tuple[npt.NDArray[np.int64], Array]:
    """As `split`, but each user's held-out pairs are consecutive in item order, from a random start on.

    Ids usually follow the order in which items appear, so a user's pairs from about the same time have nearby ids.
    Consecutive held-out pairs are therefore farther from the rest than random pairs are, like a user's future pairs.
    """
    draw = np.random.default_rng(seed)
    ordered = train[np.lexsort((train[:, 1], train[:, 0]))]
    _, starts, which, counts = np.unique(ordered[:, 0], return_index=True, return_inverse=True, return_counts=True)
    # Random rounding also holds out a proportional share from users with few pairs.
    sizes = np.minimum(np.floor(share * counts + draw.random(len(counts))), counts - 1)
    first = np.floor(draw.random(len(counts)) * counts)
    place = np.arange(len(ordered)) - starts[which]
    held = (place - first[which]) % counts[which] < sizes[which]
    order = draw.permutation(len(ordered))
    return _part(ordered[order], held[order], share)


SPLITS = {"random": split, "block": split_blocks}


def _part(
    pairs: npt.NDArray[np.int64], held: npt.NDArray[np.bool_], share: float
) -> tuple[npt.NDArray[np.int64], Array]:
    if not held.any():
        raise Problem(
            f"{NAME}: --val-fraction {share} of {len(pairs):,} pairs leaves the validation set empty, since each user "
            "keeps a pair; raise --val-fraction, or give 0 and --epochs"
        )
    return pairs[~held], pairs[held]


def _lists(path: Path) -> npt.NDArray[np.int64]:
    found: list[tuple[int, int]] = []
    try:
        with open(path, encoding="utf-8") as handle:
            for number, line in enumerate(handle, 1):
                try:
                    user, *items = map(int, line.split()) if line.strip() else (0,)
                except ValueError:
                    raise Problem(f"{NAME}: {path}, line {number}: must be integers, a user and its items") from None
                if min(user, *items, 0) < 0 or max(user, *items, 0) >= 2**31:
                    raise Problem(f"{NAME}: {path}, line {number}: numbers must be from 0 to {2**31 - 1:,}")
                found += [(user, item) for item in items]
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"{NAME}: {path} cannot be read: {one_line(error)}") from error
    if not found:
        raise Problem(f"{NAME}: {path} has no pairs")
    pairs = np.array(found, dtype=np.int64)
    # Each table has a row for every number up to the largest, 8 bytes each here.
    check_memory(f"{path}, by its largest ids,", 8 * (int(pairs.max(0).sum()) + 2))
    return pairs


def _adjacency(path: Path) -> tuple[npt.NDArray[np.int64], Array, Array]:
    """Read a symmetric adjacency matrix, users before items, in scipy's CSR form, without scipy."""
    try:
        stored = read_arrays(path, required=("indptr", "indices"))
    except DamagedFileError as error:
        raise Problem(f"{NAME}: {path} must be a matrix that scipy.sparse.save_npz wrote: {one_line(error)}") from error
    starts, columns = stored["indptr"], stored["indices"]
    if not all(part.ndim == 1 and part.dtype.kind in "iu" and len(part) for part in (starts, columns)):
        raise Problem(f"{NAME}: {path} must have integer rows and columns, got {starts.dtype} and {columns.dtype}")
    starts, columns = starts.astype(np.int64), columns.astype(np.int64)
    count = len(starts) - 1
    is_whole = starts[0] == 0 and starts[-1] == len(columns) and bool((np.diff(starts) >= 0).all())
    if not is_whole or columns.min() < 0 or columns.max() >= count:
        raise Problem(f"{NAME}: {path} must be a square matrix in CSR form, with consistent rows and columns")
    rows = np.repeat(np.arange(count), np.diff(starts))
    above = columns > rows
    if not above.any() or columns[above].min() <= rows[above].max():
        raise Problem(f"{NAME}: {path} must be symmetric, users before items, and join users with items only")
    # The items begin where a user's first column points, unless earlier items have no pair.
    users = int(rows[above].max()) + 1
    train = np.stack((rows[above], columns[above] - users), 1)
    return train, np.arange(users), np.arange(count - users)


def _columns(path: Path, user: str | None, item: str | None) -> tuple[Array, Array]:
    found = Source(NAME, [path])
    columns = []
    for option, given, usual in (("--user", user, USERS), ("--item", item, ITEMS)):
        name = given if given is not None else next((name for name in usual if name in found.names), None)
        if name is None:
            raise Problem(f"{NAME}: {option} must name a column in {found}, {', '.join(found.names)}")
        column = found.column(check_column(NAME, found, option, name))
        if column.null_count:
            raise Problem(f"{NAME}: column {name!r} in {found} has {column.null_count:,} rows without a value")
        values = column.to_numpy(zero_copy_only=False)
        if values.dtype.kind not in "iu":
            if values.dtype.kind != "O" or not isinstance(values[0], str):
                raise Problem(f"{NAME}: column {name!r} in {found} must hold integers or strings, got {column.type}")
            values = values.astype(str)
        if values.dtype == np.uint64 and values.max() >= 2**63:
            raise Problem(f"{NAME}: column {name!r} in {found} must hold integers below 2**63, got {values.max()}")
        columns.append(values if values.dtype.kind == "U" else values.astype(np.int64))
    return columns[0], columns[1]
