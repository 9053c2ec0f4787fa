"""An index over a parameter: its vectors are the parameter's rows; the index owns only attributes and live bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tigon.retrieve.filters.schema import Schema
from tigon.retrieve.index.format import VectorFormat
from tigon.retrieve.index.rows import ItemDirectory
from tigon.retrieve.index.table import RowTable


def parse_weight(parameter: Tensor | nn.Embedding, metric: Any) -> Tensor:
    """Get the weight (items, dim) to build an index over.

    Raises: ValueError for another shape, and for a metric that needs a copy.
    """
    weight = parameter.weight if isinstance(parameter, nn.Embedding) else parameter
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point() or not weight.numel():
        got = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(
            f"Index.over: parameter must be a float tensor (items, dim), neither 0, or an Embedding, got {got}."
        )
    if metric == "cosine":
        raise ValueError(
            "Index.over: metric must be 'ip' or 'l2', got 'cosine', which needs a scaled copy: scale the rows in the "
            "model."
        )
    return weight


def make_table(weight: Tensor, format: VectorFormat, schema: Schema, ids: Any, table: Any) -> RowTable:
    """Build the row table over a weight, whose rows all hold items.

    Raises: ValueError if ids or attributes have another row count, or do not fit the schema.
    """
    items = len(weight)
    directory = ItemDirectory(items, items)
    rows = RowTable(format, directory, schema, None, weight)
    keys = directory.number_rows(directory.read("Index.over", np.arange(items) if ids is None else ids))
    if schema.words and table is None:
        raise ValueError("Index.over: table must hold the attributes of the schema's columns, got None.")
    encoded = schema.encode(table, count=items)
    schema.grow_vocabularies(encoded.growth)
    rows.item_ids.copy_(torch.from_numpy(keys))
    rows.words.copy_(torch.from_numpy(encoded.words))
    rows.attributes.counts.add(encoded.words)
    rows.rebuild_codes()
    rows.publish(np.arange(items), np.zeros(0, dtype=np.int64))
    return rows
