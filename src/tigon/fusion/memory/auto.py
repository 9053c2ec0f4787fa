"""recompute="auto": for each forward pass "cheap" where recomputing pays, else "product", decided from shapes alone.

The "cheap" hooks see every saved tensor in Python: 10 to 15 µs each, about 0.75 ms for a Llama layer. Where
the device is the limit, the host has that time to spare. Where the host is the limit, the step takes that much longer,
for memory that such small batches leave free. So a forward pass recomputes if either condition holds:

    tokens · width² ≥ 2·10¹⁰       the device is the limit
    results > weights + gradients  (and more than 1 GiB) the results are large beside the model

The bits are the same at both levels, and recipes call no collective, so ranks with different batches may choose
different levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# A layer of width D has about 14 D² weights, so the forward and backward pass take 84 · tokens · D² operations. At
# 2·10¹⁰ that is 3 ms on a GPU that does 6·10¹⁴ operations a second. A host takes 2.4 ms to launch a fused layer's
# forward and backward pass, and 3.2 ms with the hooks (Llama-3.2-1B, 16 layers: 39 and 51 ms a step on an H200). The
# bound is derived from these figures, not measured.
LEAST_WORK = 2 * 10**10
# Fewer bytes are a small share of any GPU's memory, however small the model is.
LEAST_BYTES = 2**30
# Arguments to transformers models that have a row for each token; `labels` may have a row for each sequence.
IDS = ("input_ids", "decoder_input_ids")
EMBEDDINGS = ("inputs_embeds", "decoder_inputs_embeds")


@dataclass(frozen=True)
class Extent:
    """The model sizes that the rule uses.

    width: the widest norm's. token_bytes: the results that "cheap" recomputes per token, approximately: all norms count
    as the widest, since head norms leave q and k about as wide. own_bytes: the weights and their gradients.
    """

    width: int = 0
    token_bytes: int = 0
    own_bytes: int = 0

    def count_tokens(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """The number of tokens in the arguments to the model's forward; None if unknown."""
        counts = [t.numel() for t in _tensors(kwargs, IDS)]
        counts += [t.numel() // max(t.shape[-1], 1) for t in _tensors(kwargs, EMBEDDINGS) if t.dim()]
        if not counts:
            first = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
            if first is None or not first.dim():
                return None
            if not first.is_floating_point() and not first.is_complex():
                counts = [first.numel()]
            elif first.shape[-1] == self.width:
                counts = [first.numel() // first.shape[-1]]
        # A tracer's tensor may have a symbol for its size.
        return max(counts) if counts and all(type(n) is int for n in counts) else None

    def choice(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Choice:
        return Choice(self, self.count_tokens(args, kwargs) if self.width else None)


@dataclass(frozen=True)
class Choice:
    """The decision for one forward pass. tokens: None if the arguments or the model did not tell."""

    extent: Extent
    tokens: int | None

    @property
    def cheap(self) -> bool:
        return self.tokens is None or self._device_is_the_limit or self._results_are_large

    @property
    def _device_is_the_limit(self) -> bool:
        return self.tokens is not None and self.tokens * self.extent.width**2 >= LEAST_WORK

    @property
    def _results_are_large(self) -> bool:
        size = (self.tokens or 0) * self.extent.token_bytes
        return size > max(self.extent.own_bytes, LEAST_BYTES)

    def __str__(self) -> str:
        """The decision and the reason, for the report."""
        if not self.extent.width:
            return ""  # no norm: there is little to choose
        again = "cheap: norm results are recomputed in the backward pass"
        if self.tokens is None:
            return f"{again}, since the model's arguments do not determine the number of tokens"
        least = -(-LEAST_WORK // self.extent.width**2)
        if self._device_is_the_limit:
            return f"{again}, which costs no time at {least:,} tokens or more; the step had {self.tokens:,}"
        results = _size(self.tokens * self.extent.token_bytes)
        if self._results_are_large:
            own = _size(self.extent.own_bytes)
            return f"{again}, since they take {results}, more than the weights with their gradients ({own})"
        return (
            f"product: norm results are saved ({results}), since recomputing them costs time in steps with fewer than "
            f"{least:,} tokens; the step had {self.tokens:,}"
        )


def _tensors(kwargs: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[Tensor]:
    return (t for name in names if isinstance(t := kwargs.get(name), Tensor))


def _size(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 / 100 else f"{size / 2**20:,.2f} MiB"
