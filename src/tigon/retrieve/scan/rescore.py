"""Exact scores for the picked groups: the only place that computes a returned score."""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.retrieve.scan.compact import is_live
from tigon.retrieve.scan.scan import numbers
from tigon.retrieve.scan.tags import add_tags


@jit
@do_not_specialize("N", "K", "stride_q", "units_x", "stride_w", "columns")
def _rescore_kernel(
    q_ptr, x_ptr, list_ptr, count_ptr, word_ptr, which_ptr, live_ptr, bias_ptr, pick_ptr, candidate_ptr, row_ptr,
    start_ptr, certified_ptr, best_ptr, words_ptr, tags_ptr, weight_ptr,
    N, K, stride_q, units_x, stride_w, columns, D: tl.constexpr, G: tl.constexpr, STRIP: tl.constexpr,
    PLACES: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """A group for a single query: its rows' scores in fp32, -inf for missing rows, and the row numbers.

    The summation order depends only on D and G, and products are not fused with sums: a query's scores have the
    same bits in every plan and batch. start_ptr: offsets from word_ptr to each filter's bits; None for words.
    certified_ptr: per query, whether the result is known; then nothing is scored. best_ptr: (B, K), each group's
    maximum. tags_ptr: (3, columns), `RowTags.table`; weight_ptr: (B, columns) fp32.
    """
    b = (tl.program_id(0) // K).to(tl.int64)
    r = tl.program_id(0) % K
    if certified_ptr is not None:  # noqa: SIM102 - what is None has no address to load from
        if tl.load(certified_ptr + b) != 0:
            return
    group = tl.load(pick_ptr + b * PLACES + r)
    strip = group // (STRIP // G)
    j = group % (STRIP // G) * G + tl.arange(0, G)
    there = tl.full([G], 1, tl.int1) & (group >= 0)
    if list_ptr is not None:
        there = there & (j < tl.load(count_ptr + strip, mask=group >= 0, other=0))
        i = tl.load(list_ptr + strip * STRIP + j, mask=there, other=0)
    else:
        i = strip * STRIP + j
        there = there & (i < N)
    if word_ptr is not None:
        f = 0
        if which_ptr is not None:
            f = tl.load(which_ptr + b)
        if start_ptr is not None:
            there = there & is_live(word_ptr + tl.load(start_ptr + f), i, there)
        else:
            w = tl.load(word_ptr + N.to(tl.int64) * (f // 32) + i, mask=there, other=0)
            there = there & (((w >> (f % 32)) & 1) != 0)
    if live_ptr is not None:
        there = there & is_live(live_ptr, i, there)
    d = tl.arange(0, BLOCK_D)
    x_at = x_ptr + i.to(tl.int64)[:, None] * (units_x * UNIT) + d[None, :]
    sums = tl.zeros([G, BLOCK_D], tl.float32)
    for step in range(0, D, BLOCK_D):
        inside = step + d < D
        x = tl.load(x_at + step, mask=there[:, None] & inside[None, :], other=0)
        q = tl.load(q_ptr + b * stride_q + step + d, mask=inside, other=0.0).to(tl.float32)
        sums += numbers(x, tl.float32) * q[None, :]
    s = tl.sum(sums, 1)
    if bias_ptr is not None:
        s += tl.load(bias_ptr + i, mask=there, other=0.0)
    if tags_ptr is not None:
        s += add_tags(words_ptr, tags_ptr, weight_ptr + b * columns, stride_w, columns, i, there, G)
    s = tl.where(there & (s == s), tl.where(s == 0, 0.0, s), float("-inf"))
    at = (b * K + r) * G + tl.arange(0, G)
    tl.store(candidate_ptr + at, s)
    tl.store(row_ptr + at, i)
    if best_ptr is not None:
        tl.store(best_ptr + b * K + r, tl.max(s, 0))
