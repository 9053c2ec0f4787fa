"""Kernels for a softmax over many low-dimensional items: no score ever leaves a multiprocessor.

Scores are in units of log 2, so that exponentials are powers of two. The target's own score is excluded from the sums
and added at the end: its probability minus one is then free of cancellation, however confident the model is.
"""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.kernels.tiles.constants import LN2, LOG2E


@jit
def _load_block(
    ptr, stride, first, end, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASK: tl.constexpr
):
    """Rows from `first` on in a matrix (…, D), with zeros from row `end` on."""
    j, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    # int64: row · stride reaches 2³¹ at 17 M items with width 128.
    at = ptr + tl.cast(first, tl.int64) * stride + j[:, None] * stride + d[None, :]
    if MASK:
        if D == BLOCK_D:
            return tl.load(at, mask=(first + j < end)[:, None], other=0.0)
        return tl.load(at, mask=(first + j < end)[:, None] & (d < D)[None, :], other=0.0)
    if D == BLOCK_D:
        return tl.load(at)
    return tl.load(at, mask=(d < D)[None, :], other=0.0)


@jit
def _load_allowed(ptr, lines, n, N, items, MASK: tl.constexpr):
    """The bytes for items n …, 16 at a time: n, and each line's begin and end, are multiples of 16."""
    # 32-bit offsets from a single address: separate addresses per byte would take all registers.
    at = ptr + n // 16 * 16 + (lines + items)  # a product: the compiler knows nothing else about a loop variable
    if MASK:
        return tl.load(at, mask=n + items < tl.cdiv(N, 16) * 16, other=0)
    return tl.load(at)


@jit
def _items_step(
    q, own, x_ptr, bias_ptr, ids_ptr, allowed_ptr, lines, n, N, stride_x, scale, m, total, acc,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GRAD: tl.constexpr, SHIFT: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of items: the running maximum, sum of powers, and power-weighted item sum.

    allowed_ptr: None, or bytes that mark the items that count for the tile's first query; lines: offsets to each
    query's bytes.
    """
    item = n + tl.arange(0, BLOCK_N)
    x = _load_block(x_ptr, stride_x, n, N, BLOCK_N, D, BLOCK_D, MASK)
    z = tl.dot(q, tl.trans(x), input_precision=PRECISION) * scale
    if bias_ptr is not None:
        z += (tl.load(bias_ptr + item, mask=item < N, other=0.0).to(tl.float32) * LOG2E)[None, :]
    name = item
    if ids_ptr is not None:
        name = tl.load(ids_ptr + item, mask=item < N, other=0)
    keep = name[None, :] != own[:, None]
    if MASK:
        keep = keep & (item < N)[None, :]
    if allowed_ptr is not None:
        keep = keep & (_load_allowed(allowed_ptr, lines[:, None], n, N, tl.arange(0, BLOCK_N)[None, :], MASK) != 0)
    z = tl.where(keep, z, float("-inf"))
    highest = tl.maximum(m, tl.max(z, 1))
    # While a row has seen only excluded items, its maximum is −inf.
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    # SHIFT: fp16 powers are scaled by 2¹⁵, because values below 2⁻²⁴ vanish, and a million such items matter.
    p = tl.exp2(z - (safe - SHIFT)[:, None])
    alpha = tl.exp2(m - safe)
    total = total * alpha + tl.sum(p, 1)
    if GRAD:
        acc = tl.dot(p.to(x.dtype), x, acc * alpha[:, None], input_precision=PRECISION)
    return highest, total, acc


@jit
@do_not_specialize("M", "N", "share")
def _scan_kernel(
    q_ptr, x_ptr, own_ptr, bias_ptr, ids_ptr, allowed_ptr, m_ptr, total_ptr, acc_ptr, M, N, share, stride_q, stride_x,
    stride_a, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SHIFT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A query tile over a share of the items: maximum, sum of powers and weighted item sum for each query."""
    GRAD: tl.constexpr = acc_ptr is not None
    # A share's tiles run concurrently: they read the same items, from the cache.
    tiles = tl.cdiv(M, BLOCK_M)
    row = tl.program_id(0) % tiles * BLOCK_M
    part = tl.program_id(0) // tiles
    rows, d = row + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    live = rows < M
    q = _load_block(q_ptr, stride_q, row, M, BLOCK_M, D, BLOCK_D, True)
    own = tl.load(own_ptr + rows, mask=live, other=0)
    lines = tl.minimum(tl.arange(0, BLOCK_M), M - 1 - row) * stride_a
    if allowed_ptr is not None:
        # int64: M · N reaches 2³¹ at a batch of 46,341.
        allowed_ptr += tl.cast(row, tl.int64) * stride_a
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    start = part * share
    stop = tl.minimum(start + share, N)
    # N may be below start: the last part may be empty.
    whole = start + tl.maximum(stop - start, 0) // BLOCK_N * BLOCK_N
    for n in range(start, whole, BLOCK_N):
        m, total, acc = _items_step(
            q, own, x_ptr, bias_ptr, ids_ptr, allowed_ptr, lines, n, N, stride_x, scale, m, total, acc,
            D, BLOCK_N, BLOCK_D, GRAD, SHIFT, False, PRECISION,
        )  # fmt: skip
    if whole < stop:
        m, total, acc = _items_step(
            q, own, x_ptr, bias_ptr, ids_ptr, allowed_ptr, lines, whole, N, stride_x, scale, m, total, acc,
            D, BLOCK_N, BLOCK_D, GRAD, SHIFT, True, PRECISION,
        )  # fmt: skip
    at = tl.cast(part, tl.int64) * M + rows
    tl.store(m_ptr + at, m, mask=live)
    tl.store(total_ptr + at, total, mask=live)
    if GRAD:
        tl.store(acc_ptr + at[:, None] * D + d[None, :], acc, mask=live[:, None] & (d < D)[None, :])


@jit
@do_not_specialize("M", "N", "parts")
def _merge_kernel(
    q_ptr, x_ptr, target_ptr, bias_ptr, m_ptr, total_ptr, acc_ptr, positive_ptr, positive_bias_ptr,
    loss_ptr, lse_ptr, less_ptr, dq_ptr, M, N, parts, stride_q, stride_x, stride_p, scale, ignore_index,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Combine a query's shares in order, then the target: loss, log-sum-exp, the target's p − 1, and dloss/dq."""
    GRAD: tl.constexpr = acc_ptr is not None
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    live = rows < M
    inside = live[:, None] & (d < D)[None, :]
    far = rows.to(tl.int64)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    for part in range(parts):
        m = tl.maximum(m, tl.load(m_ptr + tl.cast(part, tl.int64) * M + rows, mask=live, other=0.0))
    safe = tl.where(m == float("-inf"), 0.0, m)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for part in range(parts):
        at = tl.cast(part, tl.int64) * M + far
        w = tl.exp2(tl.load(m_ptr + at, mask=live, other=0.0) - safe)
        total += w * tl.load(total_ptr + at, mask=live, other=0.0)
        if GRAD:
            acc += w[:, None] * tl.load(acc_ptr + at[:, None] * D + d[None, :], mask=inside, other=0.0)

    target = tl.load(target_ptr + rows, mask=live, other=0)
    counts = live & (target != ignore_index)
    q = tl.load(q_ptr + far[:, None] * stride_q + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if positive_ptr is None:
        wrong = counts & ((target < 0) | (target >= N))
        right = counts & (target >= 0) & (target < N)
        far_x = target.to(tl.int64)
        x = tl.load(
            x_ptr + far_x[:, None] * stride_x + d[None, :], mask=right[:, None] & (d < D)[None, :], other=0.0
        ).to(tl.float32)
        z = tl.sum(q * x, 1) * scale
        if bias_ptr is not None:
            z += tl.load(bias_ptr + far_x, mask=right, other=0.0).to(tl.float32) * LOG2E
    else:
        wrong = counts & (rows < 0)
        x = tl.load(positive_ptr + far[:, None] * stride_p + d[None, :], mask=inside, other=0.0).to(tl.float32)
        z = tl.sum(q * x, 1) * scale
        if positive_bias_ptr is not None:
            z += tl.load(positive_bias_ptr + rows, mask=live, other=0.0).to(tl.float32) * LOG2E
    highest = tl.maximum(m, z)
    smaller = tl.exp2(m - highest - SHIFT)  # 0 if a query has no other item
    others = total * smaller
    whole = others + tl.exp2(z - highest)
    nan = float("nan")
    loss = (tl.log2(whole) + (highest - z)) * LN2
    less = -others / whole
    tl.store(loss_ptr + rows, tl.where(wrong, nan, tl.where(counts, loss, 0.0)), mask=live)
    # exp2(x − inf) is 0: ignored rows give items no gradient.
    lse = tl.where(counts, highest + tl.log2(whole), float("inf"))
    tl.store(lse_ptr + rows, tl.where(wrong, nan, lse), mask=live)
    tl.store(less_ptr + rows, tl.where(wrong, nan, tl.where(counts, less, 0.0)), mask=live)
    if GRAD:
        dq = (acc * (smaller / whole)[:, None] + less[:, None] * x) * (scale * LN2)
        dq = tl.where(wrong[:, None], nan, tl.where(counts[:, None], dq, 0.0))
        tl.store(dq_ptr + far[:, None] * D + d[None, :], dq, mask=inside)


@jit
@do_not_specialize("M", "N", "share")
def _items_kernel(
    q_ptr, x_ptr, target_ptr, own_ptr, bias_ptr, ids_ptr, allowed_ptr, lse_ptr, less_ptr, weight_ptr, factor_ptr,
    dx_ptr, M, N, share, stride_q, stride_x, stride_a, scale,
    POSITIVE: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SHIFT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient for a tile of items: Σ (p − [target]) · weight · q over a share of the queries, in order.
    dx: (shares, N, D)."""
    # A share's tiles run concurrently: they read the same queries, from the cache.
    tiles = tl.cdiv(N, BLOCK_N)
    n = tl.program_id(0) % tiles * BLOCK_N
    part = tl.program_id(0) // tiles
    item, d = n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    x = _load_block(x_ptr, stride_x, n, N, BLOCK_N, D, BLOCK_D, True)
    above = tl.full([BLOCK_N], SHIFT, tl.float32)
    if bias_ptr is not None:
        above += tl.load(bias_ptr + item, mask=item < N, other=0.0).to(tl.float32) * LOG2E
    if ids_ptr is not None:
        name = tl.load(ids_ptr + item, mask=item < N, other=0)
    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    start = part * share
    for i in range(start, tl.minimum(start + share, M), BLOCK_M):
        rows = i + tl.arange(0, BLOCK_M)
        live = rows < M
        q = _load_block(q_ptr, stride_q, i, M, BLOCK_M, D, BLOCK_D, True)
        lse = tl.load(lse_ptr + rows, mask=live, other=float("inf"))
        z = tl.dot(x, tl.trans(q), input_precision=PRECISION)
        if SHIFT != 0 or bias_ptr is not None:
            p = tl.exp2(z * scale - lse[None, :] + above[:, None])
        else:
            p = tl.exp2(z * scale - lse[None, :])
        if ids_ptr is not None:
            own = tl.load(own_ptr + rows, mask=live, other=0)
            p = tl.where(name[:, None] == own[None, :], 0.0, p)
        if not POSITIVE:
            target = tl.load(target_ptr + rows, mask=live, other=-1)
            less = tl.load(less_ptr + rows, mask=live, other=0.0) * (2.0**SHIFT)
            p = tl.where(item[:, None] == target[None, :], less[None, :], p)
        if weight_ptr is not None:
            p *= tl.load(weight_ptr + rows, mask=live, other=0.0)[None, :]
        w = p.to(q.dtype)
        if allowed_ptr is not None:
            lines = tl.minimum(tl.arange(0, BLOCK_M), M - 1 - i) * stride_a
            line_ptr = allowed_ptr + tl.cast(i, tl.int64) * stride_a
            shown = _load_allowed(line_ptr, lines[None, :], n, N, tl.arange(0, BLOCK_N)[:, None], True)
            if not POSITIVE:
                shown = tl.where(item[:, None] == target[None, :], 1, shown)
            # Multiplied in q's dtype: 32-bit values that wait for these bytes would stall the tensor cores on every
            # product.
            w = w * shown.to(q.dtype)
        acc = tl.dot(w, q, acc, input_precision=PRECISION)
    dx = acc * (tl.load(factor_ptr) * (scale * LN2 * 2.0**-SHIFT))
    at = (tl.cast(part, tl.int64) * N + n) * D + tl.arange(0, BLOCK_N)[:, None] * D + d[None, :]
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=(item < N)[:, None] & (d < D)[None, :])
