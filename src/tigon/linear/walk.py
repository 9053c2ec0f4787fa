"""How a loss of a head walks over its tokens: what does not change the answer, but what the walk costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, SupportsInt

import torch

ACCUMULATE = ("fp32", "weight")


@dataclass(frozen=True)
class Walk:
    """How a loss walks over the tokens, some of whose logits exist at a time.

    Args:
        valid: how many targets count, when the host knows: the others are then left out, and time and memory follow the
            tokens that count. Of a loss of tokens a number or a `tigon.losses.ValidCount`; of a loss of sequences one
            number a sequence, as a list or a `tigon.losses.ValidLengths`. Too small a number gives a NaN loss. None:
            unknown; on a CPU they are counted.
        chunk_bytes: logits held at a time; 1 GiB by default (32 MiB on a CPU), or TIGON_CHUNK_BYTES. By default as many
            more as make do with one chunk, if they take no more memory than the fp32 sum of several would.
        accumulate: "fp32" adds the chunks' weight gradients in fp32 and rounds once; "weight" adds in the weight's
            dtype, at half the memory and n roundings for n chunks; over a group of ranks likewise dx.
        logits_dtype: torch.float32 for logits that are not rounded to the dtype of the products, in `distill` and
            `distill_topk`: see there.
        keep_bytes: of `tigon.linear_logprob`: logits kept from the forward to the backward pass, beyond those of the
            last chunk. What is kept is not computed again; all of them take a fourth of the products away.
    Raises: ValueError for values that do not fit.
    """

    valid: SupportsInt | Iterable[int] | None = None
    chunk_bytes: int | None = None
    accumulate: Literal["fp32", "weight"] = "fp32"
    logits_dtype: torch.dtype | None = None
    keep_bytes: int = 0

    def __post_init__(self) -> None:
        if self.accumulate not in ACCUMULATE:
            raise ValueError(f"Walk: accumulate must be one of {ACCUMULATE}, got {self.accumulate!r}.")
        if self.chunk_bytes is not None and self.chunk_bytes <= 0:
            raise ValueError(f"Walk: chunk_bytes must be positive, got {self.chunk_bytes}.")
        if self.logits_dtype not in (None, torch.float32):
            raise ValueError(f"Walk: logits_dtype must be None or torch.float32, got {self.logits_dtype}.")
        if self.keep_bytes < 0:
            raise ValueError(f"Walk: keep_bytes must not be negative, got {self.keep_bytes}.")

    def number(self, name: str) -> int:
        """`valid` of a loss of tokens, −1 where the host does not know it."""
        if self.valid is None:
            return -1
        if not hasattr(self.valid, "__int__"):
            raise ValueError(f"{name}: walk.valid must be a number or a ValidCount, got {type(self.valid).__name__}.")
        return int(self.valid)  # type: ignore[arg-type]

    def check_unused(self, name: str, *fields: str) -> None:
        """Raise where a field that this loss has no use for was set."""
        for field in fields:
            value = getattr(self, field)
            if value != getattr(DEFAULT, field):
                raise ValueError(f"{name}: walk.{field} must be left out: this loss has no use for it, got {value}.")


DEFAULT = Walk()
