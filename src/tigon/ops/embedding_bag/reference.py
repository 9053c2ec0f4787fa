"""Embedding bags with torch operators: the specification."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.embedding_bag.checks import bags_shape, complete_offsets, locate_fields


def embedding_bag_reference(
    values: Tensor, weight: Tensor, offsets: Tensor | None = None, *, mode: str = "mean",
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
    field_offsets: Tensor | None = None, grad: str = "dense", dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    offsets = complete_offsets(values, offsets, include_last_offset)
    dtype = weight.dtype if dtype is None else dtype
    acc = torch.promote_types(torch.promote_types(weight.dtype, dtype), torch.float32)
    shape, (V, D) = bags_shape(values, offsets, field_offsets), weight.shape
    if not D:  # torch reads out of bounds for D = 0
        y = weight.sum(0).expand(*shape, 0).to(dtype)
        return y if per_sample_weights is None else y + per_sample_weights.sum().to(y.dtype)
    rows, table = values.reshape(-1).long(), weight.to(acc)
    if field_offsets is not None:
        rows = rows + field_offsets[locate_fields(values, offsets, field_offsets)]
        if padding_idx is not None:  # an extra row serves all fields' padding
            rows = torch.where(values.reshape(-1) == padding_idx, V, rows)
            table, padding_idx = torch.cat((table, table.new_zeros(1, D))), V
    if offsets is None:
        bags = shape[0] * shape[1] if len(shape) == 2 else shape[0]
        length = values.shape[-1] if values.dim() > len(shape) else 1
        offsets = torch.arange(bags + 1, device=values.device) * length
    factors = None if per_sample_weights is None else per_sample_weights.reshape(-1).to(acc)
    y = F.embedding_bag(
        rows, table, offsets, mode=mode, per_sample_weights=factors, include_last_offset=True, padding_idx=padding_idx
    )
    return y.to(dtype).view(*shape, D)
