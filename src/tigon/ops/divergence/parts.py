"""Divergence kernels for few wide rows, each split into parts for several programs; see `tigon.kernels.row_parts`.

    KL, logits                each part's statistics → the row
    other kinds, logits       each part's statistics → the row's, and each part's terms → the row
    given (log-)probabilities each part's terms → the row

A launch's end is the barrier between parts: no atomics, and sums in a fixed order. A program that needs a row's
statistics adds up its parts' statistics; all the row's programs use the same tree and get the same bits. Arguments as
in kernels.py; partial (M, STATISTICS, P) and terms (M, TERMS, P) are unwritten and unread for ignored rows.
"""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.kernels.tiles.constants import LOWEST
from tigon.kernels.tiles.parts import locate_part_of_row, numbers_of_parts
from tigon.ops.divergence.kernels import (
    finish_kl,
    first_difference,
    second_reading,
    store_ignored,
    store_log_sums,
    store_terms,
    sum_statistics,
    sum_terms,
)

# A part's statistics: both maxima and both Σ exp, and KL's Σ e · (b − a). Terms: their sum, and Σ q · u.
STATISTICS, TERMS = tl.constexpr(5), tl.constexpr(2)


@jit
def _is_ignored(mask_ptr, row):
    ignored = False
    if mask_ptr is not None:
        ignored = tl.load(mask_ptr + row) == 0
    return ignored


# A program: part of a row's logits. P and width depend on the row count, which must not trigger recompilation; width
# is specialized all the same, since the compiler must know that 16 divides width to keep a part's loads wide.
@jit
@do_not_specialize("P")
def _part_statistics_kernel(
    input_ptr, target_ptr, mask_ptr, partial_ptr, V, stride_im, stride_tm, k, P, width,
    KIND: tl.constexpr, EDGES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a part's statistics."""
    row, start, columns = locate_part_of_row(P, width, V)
    if _is_ignored(mask_ptr, row):
        return
    input_ptr += row * stride_im
    target_ptr += row * stride_tm
    shift = first_difference(input_ptr, target_ptr)
    top_a, sum_a, _, top_b, sum_b, _, value = sum_statistics(
        input_ptr + start, target_ptr + start, columns, shift, k, None, KIND, EDGES, DEPTH, BLOCK
    )
    partial_ptr += row * STATISTICS * P + tl.program_id(0) % P
    tl.store(partial_ptr, top_a)
    tl.store(partial_ptr + P, sum_a)
    tl.store(partial_ptr + 2 * P, top_b)
    tl.store(partial_ptr + 3 * P, sum_b)
    if KIND == "kl":
        tl.store(partial_ptr + 4 * P, value)


@jit
def _row_statistics(partial_ptr, row, P, k, KIND: tl.constexpr, BLOCK_P: tl.constexpr):
    """A row's maxima, log₂ Σ exp, the teacher's Σ exp, and KL's Σ e · (b − a), from its parts'."""
    top_a = numbers_of_parts(partial_ptr, row, 0, P, LOWEST, STATISTICS, BLOCK_P)
    sum_a = numbers_of_parts(partial_ptr, row, 1, P, 0.0, STATISTICS, BLOCK_P)
    top_b = numbers_of_parts(partial_ptr, row, 2, P, LOWEST, STATISTICS, BLOCK_P)
    sum_b = numbers_of_parts(partial_ptr, row, 3, P, 0.0, STATISTICS, BLOCK_P)
    row_a, row_b = tl.max(top_a, 0), tl.max(top_b, 0)
    weight = tl.exp2((top_b - row_b) * k)
    whole_b = tl.sum(sum_b * weight, 0)
    log_a = tl.log2(tl.sum(sum_a * tl.exp2((top_a - row_a) * k), 0))
    value = 0.0
    if KIND == "kl":
        value = tl.sum(numbers_of_parts(partial_ptr, row, 4, P, 0.0, STATISTICS, BLOCK_P) * weight, 0)
    return row_a, log_a, row_b, whole_b, tl.log2(whole_b), value


# A program: part of a row. Sums the terms: the second reading for logits, otherwise the only reading.
@jit
@do_not_specialize("P")
def _part_terms_kernel(
    input_ptr, target_ptr, mask_ptr, partial_ptr, terms_ptr, stats_ptr, V, stride_im, stride_tm, beta, k, P, width,
    KIND: tl.constexpr, FORM: tl.constexpr, EDGES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Write a part's terms."""
    row, start, columns = locate_part_of_row(P, width, V)
    if _is_ignored(mask_ptr, row):
        return
    input_ptr += row * stride_im + start
    target_ptr += row * stride_tm + start
    part = tl.program_id(0) % P
    terms_ptr += row * TERMS * P + part
    if FORM == "logits":
        row_a, log_a, row_b, _, log_b, _ = _row_statistics(partial_ptr, row, P, k, KIND, BLOCK_P)
        if part == 0:
            store_log_sums(stats_ptr, row, row_a, log_a, row_b, log_b, k)
        terms, mean_u = second_reading(
            input_ptr, target_ptr, columns, row_a, log_a, row_b, log_b, beta, k, None, None, KIND, EDGES, DEPTH, BLOCK
        )
        tl.store(terms_ptr + P, mean_u)
    else:
        terms = sum_terms(input_ptr, target_ptr, columns, beta, k, None, None, KIND, FORM, EDGES, DEPTH, BLOCK)
    tl.store(terms_ptr, terms)


# A program: one row. Writes the row's value, and its statistics unless already written.
@jit
@do_not_specialize("P")
def _fold_parts_kernel(
    input_ptr, target_ptr, mask_ptr, partial_ptr, terms_ptr, rows_ptr, stats_ptr, stride_im, stride_tm, k, P,
    KIND: tl.constexpr, FORM: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Write a row's value from its parts' numbers."""
    row = tl.program_id(0).to(tl.int64)
    if _is_ignored(mask_ptr, row):
        store_ignored(rows_ptr, stats_ptr, row, FORM)
        return
    if KIND == "kl" and FORM == "logits":
        row_a, log_a, row_b, whole_b, log_b, value = _row_statistics(partial_ptr, row, P, k, KIND, BLOCK_P)
        store_log_sums(stats_ptr, row, row_a, log_a, row_b, log_b, k)
        shift = first_difference(input_ptr + row * stride_im, target_ptr + row * stride_tm)
        tl.store(rows_ptr + row, finish_kl(row_a, log_a, row_b, whole_b, log_b, value, shift, k))
    else:
        store_terms(rows_ptr, row, tl.sum(numbers_of_parts(terms_ptr, row, 0, P, 0.0, TERMS, BLOCK_P), 0), KIND)
        if FORM == "logits":
            tl.store(stats_ptr + 5 * row + 4, tl.sum(numbers_of_parts(terms_ptr, row, 1, P, 0.0, TERMS, BLOCK_P), 0))
