"""Codes: a low-bit copy of the rows, which a search uses to find candidates that it then scores from the rows.

"int8": a row x is s · (c + e), with a scale s, an integer code c from -127 to 127, and an error e. A scan over the
codes bounds every score from above, so the result stays exact.
"sign": signs of random projections (sign.py), from which a search estimates: the result is approximate.

Source: the VA-file computes bounds from few bits, and exact scores for the rest, Weber, Schek and Blott 1998,
https://www.vldb.org/conf/1998/p194.pdf
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class CodedItems(NamedTuple):
    """Rows and their codes, which `tigon.filtered_topk` takes as items. Create with `encode_items`.

    Attributes:
        rows: (N, D) fp16, bf16, float8_e4m3fn or fp32; every returned score is computed from these.
        codes: (N, D) int8; for signs (N, bits / 32) int32, lowest bits first.
        scales: (N,) fp32, per row. inf for a row whose code carries no information. For signs (N,) bf16, the
            row norms; None if all are equal.
        error: (2,) fp32, rounded up: upper bounds on |x / scale - code|₂ and |code|₂ over all rows. For rows
            from several `encode_items` calls, the larger numbers.
        candidates: signs only: the number of rows scored exactly per query, those with the best codes, plus the rows
            next to them. None: 5 k, and at least 256.
        projection: signs only: (terms, bits) int32, the row elements that each sign sums.
    """

    rows: Tensor
    codes: Tensor
    scales: Tensor | None = None
    error: Tensor | None = None
    candidates: int | None = None
    projection: Tensor | None = None
