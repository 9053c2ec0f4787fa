"""Compute an index's memory use without allocating."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from tigon.data.values import shorten
from tigon.retrieve.arguments import as_number, read_int
from tigon.retrieve.filters.schema import Schema
from tigon.retrieve.ids import slots_for
from tigon.retrieve.index.codes import code_bytes
from tigon.retrieve.index.filter_cache import default_bytes
from tigon.retrieve.index.format import VectorFormat
from tigon.retrieve.index.rows import spare_rows

UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


class MemoryPlan(NamedTuple):
    """An index's bytes, by use. `print` shows them.

    Attributes:
        items: the capacity. vectors, attributes, ids, live, bias, codes: bytes on the device.
        host: bytes on the host: id tables, and string texts.
        filters: the most bytes on the device that the filter cache takes; see `Index.limit_filter_cache`.
    """

    items: int
    vectors: int
    attributes: int
    ids: int
    live: int
    bias: int
    host: int
    codes: int = 0
    filters: int = 0

    @property
    def device_bytes(self) -> int:
        """Bytes that the index allocates at construction."""
        return self.vectors + self.attributes + self.ids + self.live + self.bias + self.codes

    def __str__(self) -> str:
        names = ("vectors", "codes", "attributes", "ids", "live", "bias")
        parts = [(name, getattr(self, name)) for name in names]
        parts.append(("together", self.device_bytes))
        if self.filters:
            parts.append(("filters", self.filters))
        lines = [f"  {name:<11}{format_bytes(size):>12} on the device" for name, size in parts if size]
        if self.filters:
            lines[-1] += ", for cached filters"
        host = f"  {'tables':<11}{format_bytes(self.host):>12} on the host"
        return "\n".join([f"{self.items:,} items", *lines, host])


def plan_memory(
    items: int, dim: int, dtype: str | torch.dtype = "float16", metric: Literal["ip", "cosine", "l2"] = "ip",
    schema: Schema | None = None, id_length: int | None = None, codes: Literal["int8", "sign"] | None = None,
    bits: int = 512,
) -> MemoryPlan:  # fmt: skip
    """Compute an index's memory use without allocating.

    A search takes up to 1.25 GiB more, whatever the index.

    Args:
        items: the capacity.
        dim: the vector width.
        dtype: "float16", "bfloat16", "float32" or "float8_e4m3fn".
        metric: "l2" takes 4 more bytes per item.
        schema: its words take 8 bytes per item each.
        id_length: the mean length of string ids, in bytes; None for int64.
        codes: "int8" takes dim + 4 more bytes per item, "sign" bits / 8 and 2.
        bits: for codes "sign".

    Returns: a MemoryPlan.
    Raises: ValueError if a number is not positive, or the dtype or the code kind is unknown.
    """
    items = read_int("plan_memory", "items", items)
    format = VectorFormat.parse("plan_memory", dim, dtype, metric, codes, bits)
    if schema is not None and not isinstance(schema, Schema):
        raise ValueError(f"plan_memory: schema must be a Schema, got {type(schema).__name__}.")
    length = None if id_length is None else as_number(id_length)
    if id_length is not None and (length is None or not 0 <= length < float("inf")):
        raise ValueError(f"plan_memory: id_length must be in bytes, 0 or more, got {shorten(id_length)}.")
    return make_plan(format, items, Schema() if schema is None else schema, length)


def make_plan(format: VectorFormat, items: int, schema: Schema, id_length: float | None) -> MemoryPlan:
    """An index's memory plan; id_length: the mean bytes per string id, None for int64."""
    rows = items + spare_rows(items)
    return MemoryPlan(
        items=items,
        vectors=rows * format.dim * format.dtype.itemsize,
        attributes=8 * rows * schema.words,
        ids=8 * rows,
        live=(rows + 31) // 32 * 4,
        bias=4 * rows if format.has_bias else 0,
        host=12 * slots_for(items) + rows // 8 + (0 if id_length is None else round((12 + id_length) * items)),
        codes=code_bytes(format, rows),
        filters=default_bytes(rows) if schema.words else 0,
    )


def format_bytes(size: int) -> str:
    unit = next((u for u in ("GiB", "MiB") if size >= UNITS[u]), "KiB")
    return f"{size / UNITS[unit]:,.1f} {unit}"
