"""The storage format for item vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from tigon.data.values import shorten
from tigon.retrieve.arguments import read_int
from tigon.retrieve.scan.sign import check_bits

Metric = Literal["ip", "cosine", "l2"]
Codes = Literal["int8", "sign"] | None
METRICS = ("ip", "cosine", "l2")
CODES = ("int8", "sign")
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float8_e4m3fn") if hasattr(torch, name)
}


@dataclass(frozen=True)
class VectorFormat:
    """Vector width, dtype and metric, and the kind of codes stored beside the vectors; bits: for codes "sign"."""

    dim: int
    dtype: torch.dtype
    metric: Metric
    codes: Codes = None
    bits: int = 512

    @classmethod
    def parse(cls, name: str, dim: Any, dtype: Any, metric: Any, codes: Any, bits: Any) -> VectorFormat:
        """Check a caller's arguments; errors begin with name.

        Raises: ValueError for numbers that are not positive, or an unknown dtype, metric, code kind or bit count.
        """
        dim, bits = read_int(name, "dim", dim), read_int(name, "bits", bits)
        if codes is not None and (not isinstance(codes, str) or codes not in CODES):
            listed = ", ".join(map(repr, CODES))
            raise ValueError(f"{name}: codes must be None or one of {listed}, got {shorten(codes)}.")
        if codes == "sign":
            check_bits(name, bits)
        if not isinstance(metric, str) or metric not in METRICS:
            raise ValueError(f"{name}: metric must be one of {', '.join(METRICS)}, got {shorten(metric)}.")
        return cls(dim, parse_dtype(name, dtype), metric, codes, bits)  # type: ignore[arg-type]

    @property
    def has_bias(self) -> bool:
        """Whether rows have a bias: "l2" adds −|x|² to 2 q · x."""
        return self.metric == "l2"


def parse_dtype(name: str, dtype: str | torch.dtype) -> torch.dtype:
    parsed = DTYPES.get(str(dtype).removeprefix("torch."))
    if parsed is None:
        raise ValueError(f"{name}: dtype must be one of {', '.join(DTYPES)}, got {dtype}.")
    return parsed
