"""Scores of all rows of a table by a ranker: what evaluation measures, and what is written to a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tigon.rank.explore import explorer_of

PRECISIONS = ("auto", "bf16", "fp32")


class Batched(Protocol):
    """What is trained on and scored: `rank.Impressions`, or anything with its `batches`, in batches."""

    def __len__(self) -> int:
        """How many requests there are."""

    def batches(
        self, *, requests: int | None = None, tokens: int | None = None, shuffle: torch.Generator | None = None,
        history_max: int | None = None, device: Any = None, skip: int = 0,
    ) -> Iterator[Any]:  # fmt: skip
        """Batches of so many requests, or of at most so many tokens, in the table's order without `shuffle`."""


class Drawing(NamedTuple):
    """How a table is cut into batches.

    Attributes:
        requests: of a batch.
        tokens: of a batch, events and candidates together, instead of so many requests.
        history_max: the newest events of a request that are kept; None: all.
        precision: of the products: "bf16" or "fp32"; "auto": bf16 on a GPU.
    """

    requests: int = 256
    tokens: int | None = None
    history_max: int | None = None
    precision: str = "auto"

    def batches(
        self, data: Batched, device: torch.device, shuffle: torch.Generator | None = None, skip: int = 0
    ) -> Iterator[Any]:
        size = {"requests": self.requests} if self.tokens is None else {"tokens": self.tokens}
        return data.batches(**size, shuffle=shuffle, history_max=self.history_max, device=device, skip=skip)

    def autocast(self, device: torch.device) -> torch.autocast:
        narrow = self.precision == "bf16" or (self.precision == "auto" and device.type == "cuda")
        return torch.autocast(device.type, torch.bfloat16, enabled=narrow)


class Scored(NamedTuple):
    """Scores of all rows, request by request, on the CPU.

    Attributes:
        offsets: (R + 1,) int64: request r is the rows offsets[r] to offsets[r + 1] − 1 of the others.
        rows: (n,) int64, which row of the table each is.
        logits: by label, (n,) fp32; their sigmoids are the probabilities.
        score: (n,) fp32, by which rows are ordered: the sum of the probabilities, by the ranker's weights.
        labels: by label, (n,) fp32, NaN where a row has no value of one; {} for a table without.
        weights: (n,) fp32, or None.
    """

    offsets: Tensor
    rows: Tensor
    logits: dict[str, Tensor]
    score: Tensor
    labels: dict[str, Tensor]
    weights: Tensor | None

    def take(self, kept: Tensor) -> Scored:
        """Some of the rows; requests that lose all of theirs go, too.

        Args:
            kept: (n,) bool, which rows.
        """
        before = torch.cat((kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)))
        weights = None if self.weights is None else self.weights[kept]
        logits, labels = ({name: x[kept] for name, x in values.items()} for values in (self.logits, self.labels))
        return Scored(before[self.offsets].unique(), self.rows[kept], logits, self.score[kept], labels, weights)


@contextmanager
def evaluating(ranker: nn.Module) -> Iterator[None]:
    """The ranker as it is served, without gradients, and in the mode that it was in at the end."""
    training = ranker.training
    ranker.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        ranker.train(training)


def device_of(ranker: nn.Module) -> torch.device:
    return next((p.device for p in ranker.parameters()), torch.device("cpu"))


def check_schema(name: str, ranker: Any, data: Any) -> None:
    """Raise if the codes of data are not those that the ranker knows: a field has another vocabulary, or another scale.

    Data without a schema is not looked at.
    """
    own, other = getattr(ranker.schema, "fields", None), getattr(getattr(data, "schema", None), "fields", None)
    if own is None or other is None or ranker.schema is data.schema:
        return
    for field, known in own.items():
        found = other.get(field)
        if found != known:
            said = f"it has no field {field!r}" if found is None else f"field {field!r} has {_difference(known, found)}"
            raise ValueError(f"{name}: data must be read with the ranker's schema, schema=ranker.schema: {said}.")


def _difference(known: Any, found: Any) -> str:
    sizes = [len(one.vocab) if getattr(one, "vocab", None) is not None else None for one in (found, known)]
    if None not in sizes:
        if sizes[0] == sizes[1]:
            return f"another vocabulary of {sizes[0]:,} values"
        return f"a vocabulary of {sizes[0]:,} values, and one of {sizes[1]:,} in the ranker's"
    return "other options"


def scored_batches(
    ranker: Any, data: Batched, drawing: Drawing = Drawing(), *, explore: float = 0.0, seed: int = 0
) -> Iterator[Scored]:
    """`score`, a batch at a time: what does not fit in memory is written as it comes."""
    check_schema("rank.score", ranker, data)
    device = device_of(ranker)
    draws = explorer_of("rank.score", ranker).draws(explore, seed) if explore else None
    with evaluating(ranker):
        for batch in drawing.batches(data, device):
            with drawing.autocast(device):
                logits = ranker(batch) if draws is None else draws.logits(ranker, batch)
            logits = {name: value.float() for name, value in logits.items()}
            weights = None if batch.weights is None else batch.weights.cpu()
            yield Scored(
                batch.offsets.cpu(), batch.rows.cpu(), {name: value.cpu() for name, value in logits.items()},
                ranker.combine(logits).cpu(), {name: value.cpu() for name, value in batch.labels.items()}, weights,
            )  # fmt: skip


def score(ranker: Any, data: Batched, drawing: Drawing = Drawing(), *, explore: float = 0.0, seed: int = 0) -> Scored:
    """Score every row of a table, on the device of the ranker.

    Args:
        ranker: a `rank.Ranker`; it is in evaluation mode meanwhile.
        data: `rank.Impressions`, with labels or without.
        drawing: `rank.Drawing`, how the table is cut into batches. Scores do not depend on it but for rounding.
        explore: a, how far the weights of the last layer are drawn from where they are, for each request: 1 as far as
            the data leaves open, 0 not at all. It needs `rank.Explorer.fit(ranker, data)` once.
        seed: of the draws.
    Returns: `rank.Scored`.
    Raises: ValueError if there are no requests; to explore, for a ranker without an explorer, or with one of other
        weights.
    """
    if not len(data):
        raise ValueError("rank.score: data has no requests.")
    return joined(list(scored_batches(ranker, data, drawing, explore=explore, seed=seed)))


def joined(parts: list[Scored]) -> Scored:
    """Scores of one batch after another as one."""
    sizes = torch.cat([part.offsets.diff() for part in parts])
    offsets = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    first = parts[0]
    logits = {name: torch.cat([part.logits[name] for part in parts]) for name in first.logits}
    labels = {name: torch.cat([part.labels[name] for part in parts]) for name in first.labels}
    weights = None if first.weights is None else torch.cat([part.weights for part in parts if part.weights is not None])
    rows, order = (torch.cat([getattr(part, name) for part in parts]) for name in ("rows", "score"))
    return Scored(offsets, rows, logits, order, labels, weights)
