"""Decide whether `tigon rank fit` streams row groups: on request, or if memory is too small."""

from __future__ import annotations

from typing import Any

from tigon.rank.cli.shared import OWN

# Peak memory while reading a table, relative to its size: Arrow columns, their concatenation, and the tensors.
COPIES = 3


def available() -> int:
    """Free host memory in bytes."""
    import psutil  # installed with accelerate

    return int(psutil.virtual_memory().available)


def streamed(given: dict[str, Any]) -> bool:
    """As --stream or --no-stream say; by default, if parquet files would take more than half the free memory."""
    from tigon.data.parquet import ParquetColumns

    if given["stream"] is not None:
        return bool(given["stream"])
    if {*given["history"]} & {*OWN} - {"none"}:  # own impressions as history must be in memory
        return False
    try:
        columns = ParquetColumns("rank fit", given["data"])
    except ValueError:  # another format; reading the file reports errors
        return False
    return COPIES * columns.bytes > available() / 2


def read_train(given: dict[str, Any], history: Any, schema: Any, sides: dict[str, Any], roles: dict[str, Any]) -> Any:
    """Training impressions: `rank.Impressions`, or a `rank.Stream` if requested."""
    from tigon.rank import Impressions, Stream

    if not given.get("stream"):
        return Impressions.read(given["data"], history=history, schema=schema, **sides, **roles)
    memory = given["stream_mib"]
    return Stream.read(given["data"], history=history, schema=schema, mebibytes=memory, **sides, **roles)
