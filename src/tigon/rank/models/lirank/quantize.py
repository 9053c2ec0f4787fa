"""Post-training 8-bit quantization for embedding tables.

bytes per row    width + 4, where fp32 has 4 · width: 20 instead of 64 at width 16
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tigon.rank.models.lirank.model import LiRank


def quantize_tables(ranker: LiRank) -> LiRank:
    """Copy a LiRank with 8-bit tables, with a scale and an offset per row. For scoring only.

    Args:
        ranker: `rank.LiRank`; unchanged.
    Returns: another LiRank, in evaluation mode.
    Raises: ValueError for 8-bit tables, and for numbers outside fp16's range.
    """
    if ranker.config.bits == 8:
        raise ValueError("rank.quantize_tables: tables must have 32 bits, got 8-bit tables.")
    made = type(ranker)(ranker.schema, dataclasses.replace(ranker.config, bits=8))
    made.to(ranker.device)
    tables = [f"{name}.weight" for name, module in ranker.named_modules() if module in ranker.tables()]
    rest = {name: value for name, value in ranker.state_dict().items() if name not in tables}
    made.load_state_dict(rest, strict=False)
    for small, large in zip(made.tables(), ranker.tables(), strict=True):
        small.quantize_from(large)
    made.explorer = ranker.explorer  # the last layer is unchanged
    return made.eval()


def count_bytes(ranker: Any) -> dict[str, int]:
    """Bytes for the tables, and for the rest that `save_pretrained` writes."""
    tables = sum(one.nbytes for one in ranker.tables())
    return {"tables": tables, "rest": sum(value.nbytes for value in ranker.state_dict().values()) - tables}
