"""An index over a parameter: its rows are the parameter's, and only their attributes and live bits are the index's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from tigon.retrieve import coded, writing
from tigon.retrieve.ids import KINDS, last_of_each
from tigon.retrieve.schema import Schema

if TYPE_CHECKING:
    from tigon.retrieve.index import Index


def begin(index: Index, parameter: Tensor | nn.Embedding, schema: Schema | None, metric: str) -> None:
    """The buffers beside a parameter.

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
    items, dim = weight.shape
    index._prepare(dim, items, metric, schema, fixed=True)
    index._over = (weight,)  # in a tuple: the parameter stays the model's
    index._buffers_of(items, weight.device)
    index._restart()
    coded.renew(index)


def fill(index: Index, ids: Any, table: Any) -> None:
    """Ids and attributes of all rows.

    Raises: ValueError if they are not of as many rows, or do not fit the schema.
    """
    items = index.capacity
    read = writing.checked_ids(index, "Index.over", np.arange(items) if ids is None else ids)
    if len(read) != items or len(last_of_each(read)) != items:
        raise ValueError(f"Index.over: ids must be {items:,} different ones, one for each row, got {len(read):,}.")
    if index.schema.words and table is None:
        raise ValueError("Index.over: table must hold the attributes of the schema's columns, got None.")
    encoded = index.schema.encode(table, count=items)
    index.schema.take(encoded.growth)
    index.ids = KINDS["str" if isinstance(read, list) else "int64"]()
    keys = index.ids.keys(read)
    index.ids.place(keys, np.arange(items))
    index.item_ids.copy_(torch.from_numpy(keys))
    index.attributes.copy_(torch.from_numpy(encoded.words))
    index.counts.add(encoded.words)
    writing.show(index, np.arange(items), np.zeros(0, dtype=np.int64))
