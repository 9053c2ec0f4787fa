"""How a loss of a head walks over its tokens: options that change what the walk costs, and not the answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, SupportsInt

import torch

ACCUMULATE = ("fp32", "weight")


# Frozen, because one ChunkOptions() is the default argument of a loss, and serves all of its calls.
@dataclass(frozen=True)
class ChunkOptions:
    """How a loss walks over the tokens, a chunk of whose logits exists at a time.

    Args:
        valid_tokens: how many targets count, if you know that number on the host. The other targets are then left out,
            and time and memory follow the targets that count. A loss of tokens takes a number or a
            `tigon.losses.ValidCount`; a loss of sequences takes one number a sequence, as a list or a
            `tigon.losses.ValidLengths`. Too small a number gives a NaN loss. None: the number is unknown; on a CPU the
            loss counts.
        chunk_bytes: bytes of logits held at a time; 1 GiB by default (32 MiB on a CPU), or TIGON_CHUNK_BYTES. By
            default the budget grows so that one chunk suffices, if that costs no more memory than the fp32 dW buffer
            it avoids.
        accumulate: "fp32" adds the chunks' weight gradients in fp32 and rounds once. "weight" adds in the weight's
            dtype: half the memory, and n roundings for n chunks. Over a group of ranks dx is summed in the same way.
        logits_dtype: for `distill` and `distill_topk`: torch.float32 keeps logits from being rounded to the dtype of
            the products.
        keep_bytes: for `tigon.linear_logprob`: bytes of logits kept from the forward to the backward pass, beyond the
            last chunk. Logits that are kept are not computed again; keeping all saves a fourth of the products.
    Raises: ValueError for values that do not fit.
    """

    valid_tokens: SupportsInt | Iterable[int] | None = None
    chunk_bytes: int | None = None
    accumulate: Literal["fp32", "weight"] = "fp32"
    logits_dtype: torch.dtype | None = None
    keep_bytes: int = 0

    # Checked when the value is made: the message then points at the line that wrote the number, not at a loss far
    # behind it.
    def __post_init__(self) -> None:
        if self.accumulate not in ACCUMULATE:
            raise ValueError(f"ChunkOptions: accumulate must be one of {ACCUMULATE}, got {self.accumulate!r}.")
        if self.chunk_bytes is not None and self.chunk_bytes <= 0:
            raise ValueError(f"ChunkOptions: chunk_bytes must be positive, got {self.chunk_bytes}.")
        # fp32 alone: logits narrower than the products would lose what the products computed, and fp64 has no kernel.
        if self.logits_dtype not in (None, torch.float32):
            raise ValueError(f"ChunkOptions: logits_dtype must be None or torch.float32, got {self.logits_dtype}.")
        if self.keep_bytes < 0:
            raise ValueError(f"ChunkOptions: keep_bytes must not be negative, got {self.keep_bytes}.")

    def read_valid_tokens(self, name: str) -> int:
        """`valid_tokens` for a loss of tokens: the number, or −1 if the host does not know it."""
        # −1 and not None: the number passes through a schema of torch.library as an int.
        if self.valid_tokens is None:
            return -1
        if isinstance(
            self.valid_tokens, int
        ):  # without hasattr, which torch.compile does not trace of a changing number
            return self.valid_tokens
        # A list, or a `ValidLengths`, belongs to a loss of sequences: one number a sequence, where this loss sorts all
        # tokens of the batch together.
        if not hasattr(self.valid_tokens, "__int__"):
            raise ValueError(
                f"{name}: chunks.valid_tokens must be a number or a ValidCount, got {type(self.valid_tokens).__name__}."
            )
        # A `ValidCount` waits here for its copy, which was queued when the labels were seen: the wait is short or none.
        return int(self.valid_tokens)  # type: ignore[arg-type]

    def check_unused(self, name: str, *fields: str) -> None:
        """Raise a ValueError if you set a field that this loss has no use for."""
        for field in fields:
            value = getattr(self, field)
            # An option that is ignored in silence looks as if it had worked. Defaults pass, so one object may serve
            # several losses.
            if value != getattr(DEFAULT, field):
                raise ValueError(f"{name}: chunks.{field} must be left out: this loss has no use for it, got {value}.")


DEFAULT = ChunkOptions()
