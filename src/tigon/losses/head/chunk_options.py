"""How a head loss walks over tokens: options that change the cost, and the result by rounding alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, SupportsInt

import torch

ACCUMULATE = ("fp32", "weight")


# Frozen, because a single ChunkOptions() is the default argument for all calls.
@dataclass(frozen=True)
class ChunkOptions:
    """How a loss walks over the tokens, with logits for a chunk at a time.

    Args:
        valid_tokens: the valid-target count, if you know that number on the host. Other targets are then left out, and
            time and memory follow the valid targets. A token loss takes a number or a `tigon.losses.ValidCount`; a
            sequence loss takes a number per sequence, as a list or a `tigon.losses.ValidLengths`. Too small a number
            gives a NaN loss. None: the number is unknown; on a CPU the loss counts.
        chunk_bytes: logits bytes held at a time; 1 GiB by default (32 MiB on a CPU), or TIGON_CHUNK_BYTES. By default
            the budget grows so that one chunk suffices, if that costs no more memory than the fp32 dW buffer thereby
            avoided.
        accumulate: "fp32" adds the chunks' weight gradients in fp32 and rounds once. "weight" adds in the weight's
            dtype: half the memory, and n roundings for n chunks. Over a group of ranks dx is summed in the same way.
        logits_dtype: for `distill` and `distill_topk`: torch.float32 keeps logits from being rounded to the products'
            dtype.
        keep_bytes: for `tigon.linear_logprob`: logits bytes kept from the forward to the backward pass, beyond the last
            chunk. Kept logits are not recomputed; keeping all saves a fourth of the products.
        fp8: for `tigon.linear_cross_entropy`: all three products in FP8, for products in bf16, H divisible by 16, and
            all classes on each device. The weight is rounded to e4m3 on every call, twice if x gets a gradient: 2 bytes
            per weight on top, until the call ends. Gradients have a relative error of 0.005 to 0.025.
    Raises: ValueError for values that do not fit.
    """

    valid_tokens: SupportsInt | Iterable[int] | None = None
    chunk_bytes: int | None = None
    accumulate: Literal["fp32", "weight"] = "fp32"
    logits_dtype: torch.dtype | None = None
    keep_bytes: int = 0
    fp8: bool = False

    # Checked here, so that the traceback points at the line that wrote the value, not at a later loss call.
    def __post_init__(self) -> None:
        if self.accumulate not in ACCUMULATE:
            raise ValueError(f"ChunkOptions: accumulate must be one of {ACCUMULATE}, got {self.accumulate!r}.")
        if self.chunk_bytes is not None and self.chunk_bytes <= 0:
            raise ValueError(f"ChunkOptions: chunk_bytes must be positive, got {self.chunk_bytes}.")
        # Only fp32: logits narrower than the products would lose precision, and fp64 has no kernel.
        if self.logits_dtype not in (None, torch.float32):
            raise ValueError(f"ChunkOptions: logits_dtype must be None or torch.float32, got {self.logits_dtype}.")
        if self.keep_bytes < 0:
            raise ValueError(f"ChunkOptions: keep_bytes must not be negative, got {self.keep_bytes}.")

    def read_valid_tokens(self, name: str) -> int:
        """`valid_tokens` for a token loss: the number, or −1 if the host does not know."""
        # −1 rather than None: the number passes through a torch.library schema as an int.
        if self.valid_tokens is None:
            return -1
        if isinstance(self.valid_tokens, int):  # not hasattr, which torch.compile does not trace for a changing number
            return self.valid_tokens
        # A list or a `ValidLengths` belongs to a sequence loss; this loss sorts all tokens in the batch together.
        if not hasattr(self.valid_tokens, "__int__"):
            raise ValueError(
                f"{name}: chunks.valid_tokens must be a number or a ValidCount, got {type(self.valid_tokens).__name__}."
            )
        # A `ValidCount` waits here for the copy, queued when the labels were seen: the wait is short or none.
        return int(self.valid_tokens)  # type: ignore[arg-type]

    def check_unused(self, name: str, *fields: str) -> None:
        """Raise a ValueError if a field that this loss does not use is set."""
        for field in fields:
            value = getattr(self, field)
            # An option ignored silently looks as if it had worked. Defaults pass, so the same object may serve several
            # losses.
            if value != getattr(DEFAULT, field):
                raise ValueError(f"{name}: chunks.{field} must be left out: this loss has no use for it, got {value}.")


DEFAULT = ChunkOptions()
