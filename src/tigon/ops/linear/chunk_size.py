"""How many rows of a product a chunk has: a budget of bytes, and equal shares of the rows."""

from __future__ import annotations

import os
from typing import Any

import torch

# Logits a chunk may hold. A GPU's matrix products want thousands of rows; a CPU's caches want few.
CHUNK_BYTES = 2**30
# For a frozen head. More rows spread the cost of adding a chunk to dW, and a frozen head has no dW.
FROZEN_CHUNK_BYTES = 2**29
CPU_CHUNK_BYTES = 2**25


def chunk_budget(
    device: torch.device, chunk_bytes: int | None = None, *, whole: Any = 0, spared: int = 0, frozen: bool = False
) -> int:
    """Bytes of logits a chunk may hold: the argument, else TIGON_CHUNK_BYTES, else 1 GiB (32 MiB on a CPU).

    frozen: the head's weight gets no gradient: 512 MiB by default.
    If all logits (`whole` bytes) exceed the default budget by at most `spared` bytes, return `whole`, so that one chunk
    suffices.
    """
    if chunk_bytes is None:
        # Read at each call and not at import: a script may set it between two models.
        text = os.environ.get("TIGON_CHUNK_BYTES")
        if text:
            try:
                chunk_bytes = int(text)
            except ValueError:
                raise ValueError(f"TIGON_CHUNK_BYTES must be a whole number of bytes, got {text!r}.") from None
    if chunk_bytes is None:
        budget = CPU_CHUNK_BYTES if device.type == "cpu" else FROZEN_CHUNK_BYTES if frozen else CHUNK_BYTES
        # Only the default grows. A number that you asked for is a limit, and stays one.
        return whole if spared and budget < whole <= budget + spared else budget
    if chunk_bytes <= 0:
        raise ValueError(f"chunk_bytes must be positive, got {chunk_bytes}.")
    return chunk_bytes


def chunk_rows(rows: int, row_bytes: int, budget: int) -> int:
    """Rows of a chunk: all if the budget holds them, else an equal share, rounded up to the products' tile of 128."""
    if rows * row_bytes <= budget:
        return max(1, rows)
    # Never fewer than one tile, even over the budget: a product of a few rows would leave the device idle.
    # Whole tiles of 128 rows: a tile that is filled in part costs a product as much as a full one.
    most = max(128, budget // max(1, row_bytes) // 128 * 128)
    chunks = max(1, -(-rows // most))
    # Equal shares: a short last chunk would be a small product, which is slow for its size.
    balanced = -(-rows // chunks)
    # Rounded up, so the last chunk alone is shorter. `most` is a multiple of 128, so rounding up does not exceed it.
    return max(1, min(rows, -(-balanced // 128) * 128))
