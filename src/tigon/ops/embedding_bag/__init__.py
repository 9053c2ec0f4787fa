"""Bags of embeddings: y = Σ weight[value] over the values of a bag, or their mean; of many tables in one launch.

The gradient of the weight is that of `embedding`: values sorted by the row that they name, and each row written once.

Source: torch.nn.functional.embedding_bag; one launch for many tables: Khudia et al. 2021, FBGEMM,
https://arxiv.org/abs/2101.05615
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from tigon.kernels import check_tensors, differentiable, use_triton
from tigon.ops.embedding import SORTED
from tigon.ops.embedding_bag.checks import bags_shape, check_bags, complete_offsets, flat_bags
from tigon.ops.embedding_bag.launches import embedding_bag_bwd, embedding_bag_factors, embedding_bag_fwd
from tigon.ops.embedding_bag.reference import embedding_bag_reference
from tigon.ops.embedding_bag.rows import bag_of_rows, save_bags

__all__ = ["embedding_bag", "embedding_bag_reference"]


def embedding_bag(
    values: Tensor, weight: Tensor, offsets: Tensor | None = None, *, mode: Literal["sum", "mean"] = "mean",
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
    field_offsets: Tensor | None = None,
    grad: Literal["dense", "rows"] = "dense", dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Look up rows of the weight, and add up those of each bag.

    Args:
        values: the ids, of any integer dtype. (B, L): bags of L ids. (M,) with offsets, of which bag b holds
            values[offsets[b]:offsets[b + 1]]. With field_offsets (B, F), an id a field, or (B, F, L), or (M,).
        weight: (V, D), any float dtype; with field_offsets the tables of F fields, one below the other.
        offsets: (B,) int64 from 0, ascending: where each bag begins; with field_offsets (B · F,), the fields of a
            sample side by side.
        mode: "mean" or "sum". An empty bag gives 0 in both.
        per_sample_weights: as values, any float dtype: what each row is multiplied by. For mode="sum" alone.
        include_last_offset: offsets end with M, one entry more.
        padding_idx: this id adds nothing, counts in no mean, and gets no gradient. In [−V, V); with field_offsets at
            least 0, and left out in the table of every field.
        field_offsets: (F + 1,) int64, ascending: the table of field f is weight[field_offsets[f]:field_offsets[f + 1]],
            and ids of that field count from its first row.
        grad: of the weight. "dense": (V, D), rows that no bag holds as zeros. "rows": a coalesced torch.sparse_coo
            tensor of the rows that occur, sorted, for `tigon.training.RowAdagrad`, or SparseAdam and Adagrad of torch.
        dtype: of the result, such as autocast's: any float dtype; None: the weight's. The gradient has the weight's.
    Returns: (B, D), with field_offsets (B, F, D), in that dtype.
    Raises: ValueError for shapes, dtypes and options that do not fit. A bag with an id that its table does not have is
        NaN on the GPU, and that id gets no gradient; on the CPU or with TIGON_CHECKS=1 a ValueError.

    Sums are taken in fp32 in the order of the values, and rounded once, forward and backward; the same bits on every
    run. With grad="rows" the forward sorts the ids, and the backward pass waits until that is done, to learn how many
    rows there are: it fits no CUDA graph and no torch.compile, which "dense" does. It sorts at most 2³⁰ ids.

    Replaces::

        y = F.embedding_bag(values, weight, offsets, mode=mode, padding_idx=padding_idx)

    and with tables::

        tables = [weight[a:b] for a, b in zip(field_offsets[:-1], field_offsets[1:])]
        y = torch.stack([F.embedding_bag(values[:, f], t, mode="sum") for f, t in enumerate(tables)], 1)
    """
    name = "embedding_bag"
    check_tensors(name, weight=weight, values=values, offsets=offsets, per_sample_weights=per_sample_weights,
                  field_offsets=field_offsets)  # fmt: skip
    for what, t in (("weight", weight), ("values", values), ("per_sample_weights", per_sample_weights)):
        if hasattr(t, "to_local"):
            raise ValueError(f"{name}: {what} must be a plain tensor, got a DTensor: pass to_local().")
    if weight.dim() != 2 or not weight.dtype.is_floating_point:
        raise ValueError(f"{name}: weight must be (V, D) floats, got {tuple(weight.shape)} {weight.dtype}.")
    if grad not in ("dense", "rows"):
        raise ValueError(f"{name}: grad must be 'dense' or 'rows', got {grad!r}.")
    offsets = complete_offsets(values, offsets, include_last_offset)
    padding = check_bags(name, weight, values, offsets, mode, per_sample_weights, padding_idx, field_offsets)
    if grad == "rows" and torch.compiler.is_compiling():
        raise ValueError(
            f"{name}: grad must be 'dense' under torch.compile, got 'rows', whose number the device alone knows."
        )
    if grad == "rows" and values.numel() > SORTED:
        raise ValueError(
            f"{name}: values must be at most 2³⁰ with grad='rows', which sorts them together, got {values.numel()}; "
            "grad='dense' takes any number."
        )
    dtype = weight.dtype if dtype is None else dtype
    if not dtype.is_floating_point:
        raise ValueError(f"{name}: dtype must be one of floats, got {dtype}.")
    # A result that kernels do not write is refused as such a weight is.
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


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    dw = df = None
    if dy is not None:
        *bags, factors, weight = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            dw = embedding_bag_bwd(dy, *bags, factors, ctx.classes, ctx.mean, ctx.padding_idx, ctx.weight_dtype)
        if ctx.needs_input_grad[4]:
            df = embedding_bag_factors(dy, weight, factors, *bags, ctx.padding_idx)
    return dw, None, None, None, df, None, None, None


_embedding_bag = differentiable(embedding_bag_fwd, save_bags, _backward)
