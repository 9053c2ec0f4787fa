"""How a table is cut into batches; device, evaluation mode and schema check for loops over batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

PRECISIONS = ("auto", "bf16", "fp32")


class BatchSource(Protocol):
    """Data for training and scoring: `rank.Impressions`, or any object with the same `batches`."""

    def __len__(self) -> int:
        """How many requests there are."""

    def batches(
        self, *, requests: int | None = None, tokens: int | None = None, shuffle: torch.Generator | None = None,
        history_max: int | None = None, device: Any = None, skip: int = 0,
    ) -> Iterator[Any]:  # fmt: skip
        """Batches of so many requests, or of at most so many tokens, in the table's order without `shuffle`."""


class BatchOptions(NamedTuple):
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
        self, data: BatchSource, device: torch.device, shuffle: torch.Generator | None = None, skip: int = 0
    ) -> Iterator[Any]:
        size = {"requests": self.requests} if self.tokens is None else {"tokens": self.tokens}
        return data.batches(**size, shuffle=shuffle, history_max=self.history_max, device=device, skip=skip)

    def autocast(self, device: torch.device) -> torch.autocast:
        narrow = self.precision == "bf16" or (self.precision == "auto" and device.type == "cuda")
        return torch.autocast(device.type, torch.bfloat16, enabled=narrow)


@contextmanager
def eval_mode(ranker: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; restores the ranker's mode at the end."""
    training = ranker.training
    ranker.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        ranker.train(training)


def get_device(ranker: nn.Module) -> torch.device:
    return next((p.device for p in ranker.parameters()), torch.device("cpu"))


def check_schema(name: str, ranker: Any, data: Any) -> None:
    """Raise if data was read with another vocabulary or another scale than the ranker's schema has.

    Data without a schema passes.
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
