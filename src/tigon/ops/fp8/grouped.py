"""Products of e4m3 factors in groups, an expert each, with a scale for each row and one for each expert's weight.

On Hopper CUTLASS multiplies them (`torch._scaled_grouped_mm`). Groups are parts of the rows in `multiply_grouped_rows`,
and of the sum in `multiply_grouped_columns`; they end where a tensor on the device says. Elsewhere the reference
multiplies in fp32, and waits for the ends.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tigon.kernels import autocast_device
from tigon.kernels.dispatch import torch_is_forced
from tigon.ops.fp8.products import why_unsupported
from tigon.ops.fp8.recipe import Rows, Weight
from tigon.ops.fp8.reference import multiply_columns_reference, multiply_rows_reference


def multiply_grouped_rows(rows: Rows, weight: Weight, ends: Tensor, *, is_exact: bool = False) -> Tensor:
    """Each group's rows · its weightᵀ in bf16.

    Args:
        rows: data (S, K), scale (S, 1): group after group. K is a multiple of 16.
        weight: data (E, N, K), scale (E, N). N is a multiple of 16.
        ends: (E,) int32, ascending, where each group's rows end. Groups may be empty.
        is_exact: as for `multiply_rows`.
    Returns: (S, N) bf16; rows behind the last group have any value.
    """
    S, N, dtype = len(rows.data), weight.data.shape[1], torch.bfloat16
    if rows.data.is_meta or not S:
        return rows.scale.new_empty((S, N), dtype=dtype)
    if not _has_products(rows.data):
        with torch.autocast(autocast_device(rows.data.device.type), enabled=False):
            parts = [
                multiply_rows_reference(Rows(*(t[part] for t in rows)), Weight(*(t[e] for t in weight)), None, dtype)
                for e, part in _list_groups(ends)
            ]
        y = torch.cat(parts)
        return torch.cat([y, y.new_zeros(S - len(y), N)])
    return torch._scaled_grouped_mm(
        rows.data, weight.data.transpose(1, 2), rows.scale.view(-1), weight.scale, ends,
        out_dtype=dtype, use_fast_accum=not is_exact,
    )  # fmt: skip


def multiply_grouped_columns(a: Tensor, b: Tensor, c: Tensor, ends: Tensor, *, is_exact: bool = False) -> Tensor:
    """Each group's c · a bᵀ, summed over the group's columns: the weights' gradients.

    Args:
        a: (N, P) e4m3. b: (K, P) e4m3. K is a multiple of 16, and so is every group; no group is empty.
        c: (E,) fp32.
        ends: (E,) int32, ascending, where each group's columns end.
        is_exact: as for `multiply_rows`.
    Returns: (E, N, K) bf16.
    """
    E, N, K, dtype = len(c), len(a), len(b), torch.bfloat16
    if a.is_meta:
        return c.new_empty((E, N, K), dtype=dtype)
    if not _has_products(a):
        with torch.autocast(autocast_device(a.device.type), enabled=False):
            parts = [multiply_columns_reference(a[:, part], b[:, part], c[e], dtype) for e, part in _list_groups(ends)]
        return torch.stack(parts)
    return torch._scaled_grouped_mm(
        a, b.t(), c.repeat_interleave(N, output_size=E * N), c.new_ones(E * K), ends,
        out_dtype=dtype, use_fast_accum=not is_exact,
    )  # fmt: skip


def _has_products(t: Tensor) -> bool:
    return not torch_is_forced() and not why_unsupported(t.device)


def _list_groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for e, end in enumerate(ends.tolist()):
        yield e, slice(start, end)
        start = end
