"""Small networks of a table's columns, fitted to have their weights read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tigon.rank.data.fields import Id, Number
from tigon.rank.data.infer import infer_field
from tigon.rank.data.labels import Label
from tigon.rank.data.tables import load_columns
from tigon.rank.interactions.networks import Inputs, Loss, Networks, Training, losses
from tigon.rank.interactions.strengths import Network
from tigon.tables.arrow import is_numeric, nearest, numbers
from tigon.tables.values import BadValue

NAME = "fit_mlp"
HELD = 0.2  # of the rows, to choose the epoch by
MOST_ROWS = 100_000
FEWEST_ROWS = 50
BATCH = 100  # rows, at least
EPOCHS, STEPS = 40, 2000  # at least
PENALTIES = (5e-5, 3e-4, 2e-3)
RARE = 10  # values of fewer rows are one value


@dataclass(frozen=True)
class TableMLP:
    """Networks that were fitted to a table, as `rank.find_interactions` reads them.

    Attributes:
        names: the columns that they read.
        networks: of each network how strongly its units read the columns: the standard deviation, over the rows, of
            what a column adds to a unit.
        loss: of each on rows that it was not trained on, but that chose its epoch: log loss, or mean square.
        constant: the same of the best constant.
        l1: the penalty of the weights, of three the strongest whose loss is near the best.
        left_out: column → why it is not read.
        notes: sentences on what one should know before believing the networks.
    """

    names: tuple[str, ...]
    networks: tuple[Network, ...]
    loss: tuple[float, ...]
    constant: float
    l1: float
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class Columns:
    """The columns of a table as networks read them.

    Attributes:
        numbers: (N,) each; names: the column of each, of which one with missing values has two.
        codes: (N,) int64 each; coded: their columns.
        left_out: column → why it is not read.
    """

    numbers: list[Tensor]
    names: list[str]
    codes: list[Tensor]
    coded: list[str]
    left_out: dict[str, str]

    def inputs(self, target: Tensor) -> Inputs:
        """What networks read, with the target (N,)."""
        numbers = torch.stack(self.numbers, 1) if self.numbers else torch.zeros(len(target), 0)
        return Inputs(numbers[None], torch.stack(self.codes, 1) if self.codes else None, target[None])


def fit_mlp(
    data: Any, label: str, features: Sequence[str] | None = None, *, networks: int = 3, seed: int = 0,
    device: torch.device | str = "cpu",
) -> TableMLP:  # fmt: skip
    """Fit small MLPs to a table, for `rank.find_interactions`.

    Each has hidden layers of 140, 100, 60 and 20, and beside them a network of each column alone, so that the MLP is
    left with what columns do together. Numbers are scaled by their quantiles; values of other columns have a
    weight each, those of fewer than ten rows a common one. Of more than 100,000 rows so many are drawn. Each network is
    fitted by three penalties of its weights at once; the strongest counts whose loss on held-out rows is within one
    standard error of the best.

    Args:
        data: a table as `rank.Impressions.read` takes it: a file or files, a pyarrow.Table, a DataFrame, a dict.
        label: column of 0 and 1, a comparison that makes one, such as "income == >50K", or a column of numbers.
        features: columns to read; None: all but the label. Texts, lists and times are left out.
        networks: how many are fitted; their strengths are averaged.
        seed: of the rows that are held out, and of the first weights.
        device: where to.
    Returns: the networks.
    Raises: ValueError, in a sentence, for a label or features that are not there, a label without two values, fewer
        than two columns that can be read, and fewer than fifty rows; and for features that are named but cannot be
        read, as those that have one value only.
    """
    if not isinstance(networks, int) or networks < 1:
        raise ValueError(f"{NAME}: networks must be an integer of 1 or more, got {networks!r}.")
    table = load_columns(data)
    target, loss = _target(table, label)
    rows = np.random.default_rng(seed).permutation(len(target))[:MOST_ROWS]
    if len(rows) < FEWEST_ROWS:
        raise ValueError(f"{NAME}: data must have {FEWEST_ROWS} rows or more, got {len(rows)}.")
    found = _columns(table, Label.parse(label).column, features, rows)
    y = target[torch.from_numpy(rows)]
    inputs = found.inputs((y - y.mean()) / y.std(correction=0) if loss == "squared" else y).to(device)
    cut = round(HELD * len(rows))
    held, train = inputs.take(slice(0, cut)), inputs.take(slice(cut, None))
    levels = tuple(int(codes.max()) + 1 for codes in found.codes)
    made = Networks(networks, len(found.numbers), levels, seed=seed).repeated(len(PENALTIES)).to(device)
    _train(made, train, held, loss, networks, seed)
    mean = train.target.mean()
    least = (torch.logit(mean, 1e-6) if loss == "binary" else mean).expand_as(held.target)
    constant = float(losses(least, held.target, loss).mean())
    by_row = losses(made.outputs(held), held.target, loss).double().view(len(PENALTIES), networks, -1)
    chosen = penalty_of(by_row.mean(1))
    own = tuple(by_row[chosen].mean(1).tolist())
    names = tuple(name for name in table if name in {*found.names, *found.coded})
    read = _read(made, inputs, found, names)[chosen * networks : (chosen + 1) * networks]
    return TableMLP(names, read, own, constant, PENALTIES[chosen], found.left_out, _notes(own, constant))


def _train(made: Networks, train: Inputs, held: Inputs, loss: Loss, networks: int, seed: int) -> None:
    """Epochs until none of the networks has become better for a quarter of them."""
    batch_size = min(500, max(BATCH, len(train) // 50))
    epochs = max(EPOCHS, STEPS * batch_size // len(train))
    l1 = torch.tensor(PENALTIES, device=train.target.device).repeat_interleave(networks)
    training = Training(made, train, held, loss, l1=l1, slower=epochs // 4, batch_size=batch_size, seed=seed)
    since, best = 0, training.best
    while training.epoch < epochs and since < epochs // 4:
        training.run_epoch()
        since, best = (0, training.best) if bool((training.best < best).any()) else (since + 1, best)
    training.finish()


def penalty_of(by_row: Tensor) -> int:
    """The place of the strongest penalty that is worse than the best by no more than one standard error of that.

    by_row: (penalties, N) losses of the held-out rows. With a weak penalty all units read all columns; one that is too
    strong loses interactions.
    """
    worse = by_row - by_row[by_row.mean(1).argmin()]
    near = worse.mean(1) <= worse.std(1) / math.sqrt(by_row.shape[1])
    return int(near.nonzero().max())


def _notes(loss: tuple[float, ...], constant: float) -> tuple[str, ...]:
    idle = sum(one > 0.99 * constant for one in loss)
    if not idle:
        return ()
    return (
        f"{idle} of {len(loss)} networks foretell the label no better than a constant does; what their weights say of "
        "interactions means nothing.",
    )


def _target(table: Mapping[str, Any], label: str) -> tuple[Tensor, Loss]:
    told = Label.parse(label)
    if told.column not in table:
        raise ValueError(f"{NAME}: there is no column {told.column!r}, the label; {nearest(told.column, table)}")
    column = table[told.column]
    try:
        if told.operation is None and is_numeric(column):
            x = numbers(column)
            if np.isnan(x).any():
                raise BadValue(int(np.isnan(x).argmax()), "must be a number, got a missing value")
            y, loss = torch.from_numpy(x.astype(np.float32)), "binary" if np.isin(x, (0, 1)).all() else "squared"
        else:
            y, loss = told.read(column), "binary"
    except BadValue as error:
        raise ValueError(f"{NAME}: column {told.column!r} (label), row {error.position}: {error}.") from None
    if len(y) and bool((y == y[0]).all()):
        raise ValueError(f"{NAME}: label {label!r} must have two values or more, but is {float(y[0]):g} in all rows.")
    return y, loss  # type: ignore[return-value]


def _columns(table: Mapping[str, Any], label: str, features: Sequence[str] | None, rows: Any) -> Columns:
    if isinstance(features, str):
        raise ValueError(f"{NAME}: features must be a list of columns, got {features!r}.")
    found = Columns([], [], [], [], {})
    for name in [name for name in table if name != label] if features is None else dict.fromkeys(features):
        if name not in table:
            raise ValueError(f"{NAME}: there is no column {name!r} (features); {nearest(name, table)}")
        if name == label:
            raise ValueError(f"{NAME}: features must not name the label, {name!r}.")
        why = _add(found, name, table[name].take(rows))
        if why is not None:
            if features is not None:
                raise ValueError(f"{NAME}: column {name!r} (features) cannot be read: {why}.")
            found.left_out[name] = why
    if (many := len({*found.names, *found.coded})) < 2:
        why = "; ".join(f"{name}: {reason}" for name, reason in found.left_out.items())
        raise ValueError(f"{NAME}: there must be two columns that can be read, got {many}{f' ({why})' if why else ''}.")
    return found


def _add(found: Columns, name: str, column: Any) -> str | None:
    """Put a column to the others. Returns: why it cannot be read."""
    kind = infer_field(name, column)
    if isinstance(kind, str):
        return kind
    if isinstance(kind, Number):
        values = kind.fit([kind.values(column)]).encode(column)
        missing = values.isnan()
        values = _standard(values.nan_to_num())
        if not bool(values.any()):
            return "it has one value only"
        found.numbers.append(values)
        found.names.append(name)
        if bool(missing.any()):
            found.numbers.append(_standard(missing.float()))
            found.names.append(name)
        return None
    if not isinstance(kind, Id):
        return f"a {kind.kind} is nothing that an MLP reads"
    kind = Id().fit([kind.values(column)])
    assert isinstance(kind, Id)
    codes = kind.encode(column)
    counts = codes.bincount(minlength=kind.rows)
    own = counts >= RARE
    codes = torch.where(own, own.cumsum(0), 0)[codes]
    if not int(own.sum()):
        return f"each of its {kind.rows - 1:,} values has fewer than {RARE} rows"
    levels = int(codes.max()) + 1
    if levels == 2 and len(codes.unique()) == 1:
        return f"it has one value only in {RARE} rows or more"
    if len(codes.unique()) == 2:
        found.numbers.append(_standard((codes == codes.max()).float()))
        found.names.append(name)
    else:
        found.codes.append(codes)
        found.coded.append(name)
    return None


def _standard(x: Tensor) -> Tensor:
    """Of mean 0 and variance 1; 0 where all are the same."""
    x = x - x.mean()
    spread = x.std(correction=0)
    return x / spread if float(spread) > 1e-6 else torch.zeros_like(x)


@torch.no_grad()
def _read(made: Networks, inputs: Inputs, found: Columns, names: tuple[str, ...]) -> tuple[Network, ...]:
    first, *later = (weight.abs().double().cpu() for weight in made.weights)
    reach = later[-1]
    for weight in reversed(later[:-1]):
        reach = weight @ reach
    squares = torch.zeros(made.count, len(names), first.shape[2], dtype=torch.float64)
    for column, name in enumerate(found.names):  # of variance 1
        squares[:, names.index(name)] += first[:, column].square()
    for number, name in enumerate(found.coded):
        assert inputs.codes is not None
        adds = made.tables[number].double().cpu()
        share = inputs.codes[:, number].cpu().bincount(minlength=adds.shape[1]).double() / len(inputs)
        mean = (share[:, None] * adds).sum(1, keepdim=True)
        squares[:, names.index(name)] += (share[:, None] * (adds - mean).square()).sum(1)
    return tuple(Network(w.T.sqrt().numpy(), z[:, 0].numpy()) for w, z in zip(squares, reach, strict=True))
