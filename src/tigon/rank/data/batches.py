"""Batching options; device, evaluation mode and schema check for loops over batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

PRECISIONS = ("auto", "bf16", "fp32")


class BatchSource(Protocol):
    """Data for training and scoring: `rank.Impressions`, or an object with the same `batches`."""

    def __len__(self) -> int:
        """Number of requests."""

    def batches(
        self, *, requests: int | None = None, tokens: int | None = None, shuffle: torch.Generator | None = None,
        history_max: int | None = None, device: Any = None, skip: int = 0,
    ) -> Iterator[Any]:  # fmt: skip
        """Batches with a fixed request count or a token budget, in table order unless `shuffle` is given."""


class BatchOptions(NamedTuple):
    """Batching options.

    Attributes:
        requests: requests per batch.
        tokens: maximum tokens per batch, events plus candidates, instead of `requests`.
        history_max: maximum events per request, newest first; None: all.
        precision: matmul precision: "bf16" or "fp32"; "auto": bf16 on a GPU.
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
def eval_mode(ranker: nn.Module, *, gradients: bool = False) -> Iterator[None]:
    """Evaluation mode, by default without gradients; restores the ranker's mode at the end."""
    training = ranker.training
    ranker.eval()
    try:
        with torch.set_grad_enabled(gradients):
            yield
    finally:
        ranker.train(training)


def get_device(ranker: nn.Module) -> torch.device:
    return next((p.device for p in ranker.parameters()), torch.device("cpu"))


def check_schema(name: str, ranker: Any, data: Any) -> None:
    """Raise if data was read with a vocabulary or scale different from the ranker's schema.

    Data without a schema passes.
    """
    own, other = getattr(ranker.schema, "fields", None), getattr(getattr(data, "schema", None), "fields", None)
    if own is None or other is None or ranker.schema is data.schema:
        return
    for field, known in own.items():
        found = other.get(field)
        if found != known:
            said = (
                f"data has no field {field!r}" if found is None else f"field {field!r} has {_difference(known, found)}"
            )
            raise ValueError(f"{name}: data must be read with the ranker's schema, schema=ranker.schema: {said}.")


def _difference(known: Any, found: Any) -> str:
    sizes = [len(one.vocab) if getattr(one, "vocab", None) is not None else None for one in (found, known)]
    if None not in sizes:
        if sizes[0] == sizes[1]:
            return f"a different vocabulary with {sizes[0]:,} values"
        return f"a vocabulary with {sizes[0]:,} values, but {sizes[1]:,} in the ranker's"
    return "different options"
