"""Row count per chunk of a product: a byte budget, and equal shares of the rows."""

from __future__ import annotations

import os
from typing import Any

import torch

# Bytes of logits per chunk. GPU matrix products need thousands of rows; CPU caches favour few.
CHUNK_BYTES = 2**30
# For a frozen head. More rows amortise adding a chunk to dW, and a frozen head has no dW.
FROZEN_CHUNK_BYTES = 2**29
CPU_CHUNK_BYTES = 2**25


def chunk_budget(
    device: torch.device, chunk_bytes: int | None = None, *, whole: Any = 0, spared: int = 0, frozen: bool = False
) -> int:
    """Bytes of logits per chunk: the argument, else TIGON_CHUNK_BYTES, else 1 GiB (32 MiB on a CPU).

    frozen: the head's weight gets no gradient: 512 MiB by default.
    If all logits (`whole` bytes) exceed the default budget by at most `spared` bytes, return `whole`, so that a single
    chunk suffices.
    """
    if chunk_bytes is None:
        # Read on every call, not at import: a script may change the variable between two models.
        text = os.environ.get("TIGON_CHUNK_BYTES")
        if text:
            try:
                chunk_bytes = int(text)
            except ValueError:
                raise ValueError(f"TIGON_CHUNK_BYTES must be a whole number of bytes, got {text!r}.") from None
    if chunk_bytes is None:
        budget = CPU_CHUNK_BYTES if device.type == "cpu" else FROZEN_CHUNK_BYTES if frozen else CHUNK_BYTES
        return whole if spared and budget < whole <= budget + spared else budget
    if chunk_bytes <= 0:
        raise ValueError(f"chunk_bytes must be positive, got {chunk_bytes}.")
    return chunk_bytes


def chunk_rows(rows: int, row_bytes: int, budget: int) -> int:
    """Rows per chunk: all if they fit the budget, else an equal share, rounded up to the products' tile (128)."""
    if rows * row_bytes <= budget:
        return max(1, rows)
    # At least one tile, even over budget: a product with few rows would leave the device idle.
    # Whole tiles of 128 rows: a partial tile costs a product as much as a full tile.
    most = max(128, budget // max(1, row_bytes) // 128 * 128)
    chunks = max(1, -(-rows // most))
    balanced = -(-rows // chunks)
    return max(1, min(rows, -(-balanced // 128) * 128))
