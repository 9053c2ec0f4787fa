"""Embedding tables in 8 bits a number, after training.

bytes a row      width + 4, where fp32 has 4 · width: 20 in place of 64 at width 16
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tigon.rank.models.lirank.model import LiRank


def quantize_tables(ranker: LiRank) -> LiRank:
    """Copy a LiRank with tables of 8 bits a number, and a scale and an offset a row: for scoring alone.

    Args:
        ranker: `rank.LiRank`; it stays as it is.
    Returns: another LiRank, in evaluation mode.
    Raises: ValueError for tables of 8 bits, and for numbers that fp16 does not hold.
    """
    if ranker.config.bits == 8:
        raise ValueError("rank.quantize_tables: tables must have 32 bits, got tables of 8 bits.")
    made = type(ranker)(ranker.schema, dataclasses.replace(ranker.config, bits=8))
    made.to(ranker.device)
    tables = [f"{name}.weight" for name, module in ranker.named_modules() if module in ranker.tables()]
    rest = {name: value for name, value in ranker.state_dict().items() if name not in tables}
    made.load_state_dict(rest, strict=False)
    for small, large in zip(made.tables(), ranker.tables(), strict=True):
        small.quantize_from(large)
    made.explorer = ranker.explorer  # its last layer is the same
    return made.eval()


def count_bytes(ranker: Any) -> dict[str, int]:
    """Bytes of the tables, and of the rest that `save_pretrained` writes."""
    tables = sum(one.nbytes for one in ranker.tables())
    return {"tables": tables, "rest": sum(value.nbytes for value in ranker.state_dict().values()) - tables}
