"""Whether `tigon rank fit` reads its impressions by row groups: where memory is too small, or as it is asked."""

from __future__ import annotations

from typing import Any

from tigon.rank.cli.shared import OWN

# What a table takes while it is read, in its own bytes: as Arrow reads it, its columns joined, and the tensors.
COPIES = 3


def available() -> int:
    """Bytes of the host's memory that are free."""
    import psutil  # comes with accelerate

    return int(psutil.virtual_memory().available)


def streamed(given: dict[str, Any]) -> bool:
    """By --stream or --no-stream; without them, where parquet files would take more than half of the free memory."""
    from tigon.data.lazily import ParquetColumns

    if given["stream"] is not None:
        return bool(given["stream"])
    if {*given["history"]} & {*OWN} - {"none"}:  # events that are the impressions themselves are needed as a whole
        return False
    try:
        columns = ParquetColumns("rank fit", given["data"])
    except ValueError:  # another format; what is wrong with a file is said by who reads it
        return False
    return COPIES * columns.bytes > available() / 2


def read_train(given: dict[str, Any], history: Any, schema: Any, sides: dict[str, Any], roles: dict[str, Any]) -> Any:
    """The impressions to train on: `rank.Impressions`, or a `rank.Stream` where the options say so."""
    from tigon.rank import Impressions, Stream

    if not given.get("stream"):
        return Impressions.read(given["data"], history=history, schema=schema, **sides, **roles)
    memory = given["stream_mib"]
    return Stream.read(given["data"], history=history, schema=schema, mebibytes=memory, **sides, **roles)
