"""Row-sparse table gradients: the rows that occur and their sums, as a coalesced torch.sparse_coo tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import differentiable_directly
from tigon.ops.embedding import SORTED, sorted_ids, sums_of_runs
from tigon.ops.embedding_bag.launches import embedding_bag_factors, embedding_bag_fwd, locate_values, measure_bags
from tigon.ops.embedding_bag.reference import embedding_bag_reference


class Sorted(NamedTuple):
    """Bag values sorted by row.

    Attributes:
        keys: (M,), rows, ascending; `classes` and above for values without a gradient.
        order: (M,), the value of each key.
        place: (M,), each key's index among the distinct keys.
        bag, scale: as returned by `locate_values`.
        number: distinct row count; a host tensor, valid once `written` has completed.
        written: None if number is valid already.
    """

    keys: Tensor
    order: Tensor
    place: Tensor
    bag: Tensor | None
    scale: Tensor | None
    number: Tensor
    written: torch.cuda.Event | None

    def unique(self) -> int:
        """Wait until the values are sorted, and only for that, and return the distinct row count."""
        if self.written is not None:
            self.written.synchronize()
        return int(self.number)


def sort_rows(
    values: Tensor, offsets: Tensor | None, fields: Tensor | None, classes: int, mean: bool, padding_idx: int
) -> Sorted:  # fmt: skip
    """Sort the bags' values (at least one), and start copying the distinct row count to the host."""
    ids, padding, bag, scale = locate_values(values, offsets, fields, classes, mean, padding_idx)
    keys, order = sorted_ids(ids, classes, padding)
    begins = torch.ones_like(keys, dtype=torch.bool)
    torch.ne(keys[1:], keys[:-1], out=begins[1:])
    place = begins.cumsum(0, dtype=torch.int32) - 1
    found = place[-1] + (keys[-1] < classes)
    if found.device.type != "cuda":
        return Sorted(keys, order, place, bag, scale, found.cpu(), None)
    number = torch.empty((), dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
    written = torch.cuda.Event()
    written.record(torch.cuda.current_stream(found.device))
    return Sorted(keys, order, place, bag, scale, number, written)


def sums_of_rows(
    dy: Tensor, found: Sorted, values: Tensor, offsets: Tensor | None, factors: Tensor | None, mean: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the rows (U,) that occur, ascending, and their gradient sums (U, D) in the given dtype."""
    unique = found.unique()
    sums = dy.new_empty((unique, dy.shape[-1]), dtype=dtype)
    if not unique:
        return values.new_empty(0, dtype=torch.int64), sums
    scale = found.scale if factors is None else factors.contiguous()
    length = measure_bags(values, offsets)[1]
    starts = sums_of_runs(dy, found.place, found.order, sums, bag=found.bag, length=length, scale=scale, by_bag=mean)
    return found.keys[starts[:unique]].long(), sums


def coalesce_rows(indices: Tensor, dy: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return the distinct rows (U,) in indices (M,), ascending, and their sums of dy (M, D). Waits for U."""
    if indices.numel() > SORTED:
        raise ValueError(f"row_adagrad: grad must name at most 2³⁰ rows, got {indices.numel()}.")
    if not dy.numel():
        return indices.new_empty(0, dtype=torch.int64), dy.new_empty((0, dy.shape[-1]))
    values = indices[:, None]
    found = sort_rows(values, None, None, classes, False, -1)
    return sums_of_rows(dy, found, values, None, None, False, dy.dtype)


def save_bags(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    weight, values, offsets, fields, factors, ctx.mean, ctx.padding_idx, _ = inputs
    ctx.classes, ctx.weight_dtype = weight.shape[0], weight.dtype
    ctx.save_for_backward(values, offsets, fields, factors, None if factors is None else weight)


def _save_bags_of_rows(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    save_bags(ctx, inputs, output)
    weight, values, offsets, fields, _, mean, padding_idx, _ = inputs
    # Sort now: in the backward pass the host would wait for all queued device work, and the device would then wait for
    # the host.
    if ctx.own["runs_triton"] and ctx.needs_input_grad[0] and values.numel() and weight.shape[1]:
        ctx.sorted = sort_rows(values, offsets, fields, weight.shape[0], mean, padding_idx)
    else:
        ctx.sorted = None


def _bag_of_rows_fwd(*args: Any, runs_triton: bool) -> tuple[Tensor]:
    if runs_triton:
        return (embedding_bag_fwd(*args),)
    weight, values, offsets, fields, factors, mean, padding_idx, dtype = args
    rows, padding_idx = _flat_rows(values, offsets, fields, weight.shape[0], padding_idx)
    return (
        embedding_bag_reference(
            rows, torch.cat((weight, weight.new_zeros(1, weight.shape[1]))), offsets, mode="mean" if mean else "sum",
            per_sample_weights=factors, include_last_offset=True, padding_idx=padding_idx, dtype=dtype,
        ),
    )  # fmt: skip


def _flat_rows(
    values: Tensor, offsets: Tensor | None, fields: Tensor | None, V: int, padding_idx: int
) -> tuple[Tensor, int]:
    """Return each value's row in the stacked tables, V for skipped values."""
    rows = values.long()
    if fields is not None:
        at = torch.arange(values.numel(), device=values.device).view_as(values)
        bag = at // values.shape[1] if offsets is None else torch.searchsorted(offsets, at, right=True) - 1
        rows = rows + fields[bag % (fields.shape[0] - 1)]
    return (torch.where(values == padding_idx, V, rows) if padding_idx >= 0 else rows), V


def _rows_reference(
    dy: Tensor, values: Tensor, offsets: Tensor | None, fields: Tensor | None, factors: Tensor | None,
    weight: Tensor | None, classes: int, mean: bool, padding_idx: int, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`sums_of_rows` and the factors' gradient with torch operators."""
    acc = torch.promote_types(torch.promote_types(dy.dtype, dtype), torch.float32)
    rows, _ = _flat_rows(values, offsets, fields, classes, padding_idx)
    at = torch.arange(values.numel(), device=values.device)
    bag = at // max(1, values.shape[1]) if offsets is None else torch.searchsorted(offsets, at, right=True) - 1
    rows = rows.reshape(-1)
    counts = rows < classes
    per_value = dy.to(acc)[bag]
    df = None
    if factors is not None:
        if weight is not None:
            products = (per_value * weight.to(acc)[rows.clamp_max(classes - 1)]).sum(-1)
            df = torch.where(counts, products, 0.0).view_as(factors).to(factors.dtype)
        per_value = per_value * factors.reshape(-1, 1).to(acc)
    if mean:
        size = torch.zeros(dy.shape[0], dtype=acc, device=dy.device).index_add_(0, bag, counts.to(acc))
        per_value = per_value / size[bag].clamp_min(1)[:, None]
    found, place = rows[counts].unique(return_inverse=True)
    sums = torch.zeros(found.numel(), dy.shape[1], dtype=acc, device=dy.device).index_add_(0, place, per_value[counts])
    return found, sums.to(dtype), df


def _backward_of_rows(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    values, offsets, fields, factors, weight = ctx.saved_tensors
    needs_rows, needs_factors = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
    dw = df = None
    if not ctx.own["runs_triton"]:
        seen = weight if needs_factors else None
        rows, sums, df = _rows_reference(
            dy, values, offsets, fields, factors, seen, ctx.classes, ctx.mean, ctx.padding_idx, ctx.weight_dtype
        )
    elif needs_factors:
        df = embedding_bag_factors(dy, weight, factors, values, offsets, fields, ctx.padding_idx)
    if needs_rows:
        if ctx.sorted is not None:
            rows, sums = sums_of_rows(dy, ctx.sorted, values, offsets, factors, ctx.mean, ctx.weight_dtype)
        elif ctx.own["runs_triton"]:
            rows, sums = values.new_empty(0, dtype=torch.int64), dy.new_empty(0, dy.shape[-1], dtype=ctx.weight_dtype)
        size = ctx.classes, sums.shape[1]
        dw = torch.sparse_coo_tensor(rows[None], sums, size, is_coalesced=True, check_invariants=False)
        # torch steals the memory of a sparse gradient without other references, and then loses the coalesced flag.
        # Holding a reference until the end of the pass forces a copy that keeps the flag: a copy of U rows, instead
        # of a sort in the optimizer.
        held = [dw]
        torch.autograd.Variable._execution_engine.queue_callback(held.clear)
    return dw, None, None, None, df


bag_of_rows = differentiable_directly(_bag_of_rows_fwd, _save_bags_of_rows, _backward_of_rows)
