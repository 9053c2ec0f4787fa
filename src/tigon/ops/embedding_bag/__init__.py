"""Embedding bags: y = Σ weight[value] over a bag's values, or their mean; for many tables in a single launch.

The weight's gradient is computed as for `embedding`: sort the values by row, and write each row once.

Source: torch.nn.functional.embedding_bag; a single launch for many tables: Khudia et al. 2021, FBGEMM,
https://arxiv.org/abs/2101.05615
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from tigon.kernels import check_plain, differentiable, use_triton
from tigon.ops.embedding import SORTED
from tigon.ops.embedding_bag.checks import bags_shape, check_bags, complete_offsets, flat_bags
from tigon.ops.embedding_bag.launches import embedding_bag_bwd, embedding_bag_factors, embedding_bag_fwd
from tigon.ops.embedding_bag.reference import embedding_bag_reference
from tigon.ops.embedding_bag.rows import bag_of_rows, save_bags
from tigon.ops.example import HEAD, Example, make_ids

__all__ = ["embedding_bag", "embedding_bag_reference"]


def embedding_bag(
    values: Tensor, weight: Tensor, offsets: Tensor | None = None, *, mode: Literal["sum", "mean"] = "mean",
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
    field_offsets: Tensor | None = None,
    grad: Literal["dense", "rows"] = "dense", dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Look up rows of the weight, and sum or average them per bag.

    Args:
        values: the ids, any integer dtype. (B, L): bags with L ids. (M,) with offsets: bag b holds
            values[offsets[b]:offsets[b + 1]]. With field_offsets: (B, F), an id per field, or (B, F, L), or (M,).
        weight: (V, D), any float dtype; with field_offsets F stacked tables.
        offsets: (B,) int64 from 0, ascending: each bag's start; with field_offsets (B · F,), a sample's fields are
            contiguous.
        mode: "mean" or "sum". An empty bag gives 0 in both.
        per_sample_weights: values' shape, any float dtype: a factor for each row. Only for mode="sum".
        include_last_offset: offsets has an extra last entry, M.
        padding_idx: this id adds nothing, is not counted in means, and gets no gradient. In [−V, V); with
            field_offsets at least 0, and skipped in every field's table.
        field_offsets: (F + 1,) int64, ascending: field f's table is weight[field_offsets[f]:field_offsets[f + 1]], and
            the field's ids count from the table's first row.
        grad: the weight gradient's format. "dense": (V, D), zeros for rows in no bag. "rows": a coalesce_rows
            torch.sparse_coo tensor with the sorted rows that occur, for `tigon.training.RowAdagrad`, or torch's
            SparseAdam and Adagrad.
        dtype: the result's dtype, for example autocast's; any float dtype. None: the weight's. The gradient has the
            weight's dtype.
    Returns: (B, D), with field_offsets (B, F, D), in that dtype.
    Raises: ValueError for invalid shapes, dtypes or options. An id outside its table makes its bag NaN on the GPU and
        gets no gradient; on the CPU or with TIGON_CHECKS=1 it raises a ValueError.

    Sums are taken in fp32 in the order of the values and rounded once, forward and backward; the bits are the same on
    every run. With grad="rows" the forward pass sorts the ids, and the backward pass waits for the sort to learn the
    row count: CUDA graphs and torch.compile support only "dense". grad="rows" sorts at most 2³⁰ ids.

    Replaces::

        y = F.embedding_bag(values, weight, offsets, mode=mode, padding_idx=padding_idx)

    and with tables::

        tables = [weight[a:b] for a, b in zip(field_offsets[:-1], field_offsets[1:])]
        y = torch.stack([F.embedding_bag(values[:, f], t, mode="sum") for f, t in enumerate(tables)], 1)
    """
    name = "embedding_bag"
    check_plain(name, weight=weight, values=values, offsets=offsets, per_sample_weights=per_sample_weights,
                field_offsets=field_offsets)  # fmt: skip
    if weight.dim() != 2 or not weight.dtype.is_floating_point:
        raise ValueError(f"{name}: weight must be (V, D) floats, got {tuple(weight.shape)} {weight.dtype}.")
    if grad not in ("dense", "rows"):
        raise ValueError(f"{name}: grad must be 'dense' or 'rows', got {grad!r}.")
    offsets = complete_offsets(values, offsets, include_last_offset)
    padding = check_bags(name, weight, values, offsets, mode, per_sample_weights, padding_idx, field_offsets)
    if grad == "rows" and torch.compiler.is_compiling():
        raise ValueError(
            f"{name}: grad must be 'dense' under torch.compile, got 'rows', whose number only the device knows."
        )
    if grad == "rows" and values.numel() > SORTED:
        raise ValueError(
            f"{name}: values must be at most 2³⁰ with grad='rows', which sorts them together, got {values.numel()}; "
            "grad='dense' takes any number."
        )
    dtype = weight.dtype if dtype is None else dtype
    if not dtype.is_floating_point:
        raise ValueError(f"{name}: dtype must be a float dtype, got {dtype}.")
    # The kernels do not write fp64: reject such a result as such a weight is rejected.
    other = (weight.new_empty(0, dtype=dtype),) if dtype == torch.float64 else ()
    runs_triton = use_triton(weight, per_sample_weights, *other)
    if not runs_triton and grad == "dense":
        return embedding_bag_reference(
            values, weight, offsets, mode=mode, per_sample_weights=per_sample_weights, include_last_offset=True,
            padding_idx=padding_idx, field_offsets=field_offsets, dtype=dtype,
        )  # fmt: skip
    shape = bags_shape(values, offsets, field_offsets)
    values, per_sample_weights = (flat_bags(t, field_offsets) for t in (values, per_sample_weights))
    args = weight, values, offsets, field_offsets, per_sample_weights, mode == "mean", padding, dtype
    y = _embedding_bag(*args) if grad == "dense" else bag_of_rows(*args, {"runs_triton": runs_triton})
    return y.view(*shape, weight.shape[1])


# --------------------------------------------------------------------------------------------------------- autograd


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dw = df = None
    *bags, factors, weight = ctx.saved_tensors
    if ctx.needs_input_grad[0]:
        dw = embedding_bag_bwd(dy, *bags, factors, ctx.classes, ctx.mean, ctx.padding_idx, ctx.weight_dtype)
    if ctx.needs_input_grad[4]:
        df = embedding_bag_factors(dy, weight, factors, *bags, ctx.padding_idx)
    return dw, None, None, None, df


_embedding_bag = differentiable(embedding_bag_fwd, save_bags, _backward)


EXAMPLES = {
    "embedding_bag": Example("Embedding", (HEAD,), lambda w: embedding_bag(make_ids(w, 64, 4), w, mode="sum")),
}
