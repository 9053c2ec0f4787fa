"""Kernel that owns a tile of queries: attention output (forward) or the queries' gradient (backward), in a single walk.

A tile holds a few consecutive tokens of a request with the N = H/G heads that share a key head: BLOCK_M rows. The walk
visits: the own key for a single-token suffix; the prefix's blocks from its start, unmasked except for the last block;
then the blocks of each suffix that has tokens in the tile, from the suffix's start. So the order of a row's sums
depends only on the row's suffix and prefix, never on the tile's other rows: a masked key adds an exact zero.

A prefix, and a document of varlen_attention, is a sequence without a prefix and alone in its tiles: only the last step.
"""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.kernels.tiles.cap import cap
from tigon.kernels.tiles.constants import LOG2E, LOWEST


@jit
def load_block(ptr, at, inside, D: tl.constexpr, BLOCK_D: tl.constexpr, MASK: tl.constexpr):
    """Load rows at pointer offsets `at`; zeros where not inside, and beyond D."""
    d = tl.arange(0, BLOCK_D)
    at = at[:, None] + d[None, :]
    if D != BLOCK_D:
        return tl.load(ptr + at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    if MASK:
        return tl.load(ptr + at, mask=inside[:, None], other=0.0)
    return tl.load(ptr + at)


@jit
def scale_scores(s, scale, softcap):
    """Map q · k products to base-2 scores, and return the score's slope up to the factor `scale`."""
    if softcap is not None:
        z, slope = cap(s, scale, softcap)
        return z * LOG2E, slope
    return s * (scale * LOG2E), s


@jit
def _step(
    q, do, k, v, keep, m, total, acc, scale, softcap, GRAD: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Process a block of keys. m, total: running maximum and sum; in the backward pass log-sum-exp and Σ do · o."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    z, slope = scale_scores(s, scale, softcap)
    if GRAD:
        p = tl.exp2(z - m[:, None])
        if MASK:
            p = tl.where(keep, p, 0.0)
        ds = p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - total[:, None])
        if softcap is not None:
            ds *= slope
        return m, total, tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)
    # m starts at a finite number, so that fully masked first blocks give no NaN.
    largest = tl.maximum(m, tl.max(tl.where(keep, z, float("-inf")) if MASK else z, 1))
    # Mask after the exponential, not before: the compiler fuses the scale into this difference, and a block must round
    # alike whether or not a tile masks the block.
    p = tl.exp2(z - largest[:, None])
    if MASK:
        p = tl.where(keep, p, 0.0)
    fade = tl.exp2(m - largest)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return largest, total * fade + tl.sum(p, 1), acc


# One program computes BLOCK_M rows of o and lse, or, if do is given, dq and delta = Σ do · o, for key head g.
# q, do: strides (t, h); k, v: strides (t, g); o, dq: dense (count, H, D). lse, delta: (G, count, N) fp32. count: number
# of tokens.
# tiles (·, 6) int32: start and stop, range of the own rows, range of the prefix. first, stop: each token's
# sequence range. Without first a tile's own rows are a single sequence without a prefix: a document. Its last two
# numbers then say whether the table was made of wrong offsets, whose result is NaN.
# sinks: (H,), a score per head without a key, only for documents. CAUSAL: False only for documents, without a window.
# SINGLES: 0 no suffix has a single token, 1 some, 2 all. ACROSS: suffixes see each other. N: query heads per key head.
@jit
@do_not_specialize("count")
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, do_ptr, delta_ptr, dq_ptr, tiles_ptr, first_ptr, stop_ptr, sinks_ptr, count,
    stride_qt, stride_qh, stride_kt, stride_kg, stride_vt, stride_vg, stride_dt, stride_dh, scale, softcap, window,
    G: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SINGLES: tl.constexpr, ACROSS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of queries, or compute the queries' gradient."""
    GRAD: tl.constexpr = do_ptr is not None
    WINDOW: tl.constexpr = window is not None
    DOCUMENT: tl.constexpr = first_ptr is None
    H: tl.constexpr = G * N
    entry = tiles_ptr + tl.program_id(0) // G * 6
    g = tl.program_id(0) % G
    start, stop = tl.load(entry), tl.load(entry + 1)
    own0, own1 = tl.load(entry + 2), tl.load(entry + 3)
    prefix0, prefix1 = tl.load(entry + 4), tl.load(entry + 5)
    if start >= stop:
        return
    rows = tl.arange(0, BLOCK_M)
    token = start + rows // N
    head = g * N + rows % N
    live = token < stop
    row = token.to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    j = tl.arange(0, BLOCK_N)
    of_head = row * H + head
    statistics = (tl.cast(g, tl.int64) * count + start) * N + rows
    first = own0 if DOCUMENT else tl.load(first_ptr + row, mask=live, other=0)
    q = load_block(q_ptr, row * stride_qt + head * stride_qh, live, D, BLOCK_D, True)
    if GRAD:
        do = load_block(do_ptr, row * stride_dt + head * stride_dh, live, D, BLOCK_D, True)
        o = load_block(o_ptr, of_head * D, live, D, BLOCK_D, True)
        m = tl.load(lse_ptr + statistics, mask=live, other=float("inf"))
        total = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        tl.store(delta_ptr + statistics, total, mask=live)
    else:
        do = q
        m = tl.full((BLOCK_M,), LOWEST, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
            m = tl.maximum(sink, LOWEST)
            total = tl.exp2(sink - m)  # 1, or 0 for a sink of -inf
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    k_ptr += g.to(tl.int64) * stride_kg
    v_ptr += g.to(tl.int64) * stride_vg

    if SINGLES > 0 and not ACROSS:
        single = live
        if SINGLES == 1:
            single = live & (tl.load(stop_ptr + row, mask=live, other=0) - first == 1)
        own_k = load_block(k_ptr, row * stride_kt, single, D, BLOCK_D, True).to(tl.float32)
        own_v = load_block(v_ptr, row * stride_vt, single, D, BLOCK_D, True).to(tl.float32)
        z, slope = scale_scores(tl.sum(q.to(tl.float32) * own_k, 1), scale, softcap)
        if GRAD:
            ds = tl.exp2(z - m) * (tl.sum(do.to(tl.float32) * own_v, 1) - total)
            if softcap is not None:
                ds *= slope
            acc = tl.where(single, ds, 0.0)[:, None] * own_k
        else:
            m = tl.where(single, z, m)
            total = tl.where(single, 1.0, total)
            acc = own_v

    k_at, v_at = j * stride_kt, j * stride_vt
    # ------------------------------------------------------------------------------------------------- the prefix
    if not DOCUMENT:
        length = prefix1 - prefix0
        low = prefix0
        position = length + token - first
        if window is not None:
            # Skip whole blocks before every row's window; the other blocks keep their boundaries.
            least = tl.min(tl.where(live, position, 2147483647), 0)
            low = prefix0 + tl.maximum(least - window + 1, 0) // BLOCK_N * BLOCK_N
        whole = prefix0 + length // BLOCK_N * BLOCK_N
        for n in range(low, whole, BLOCK_N):
            k = load_block(k_ptr + tl.cast(n, tl.int64) * stride_kt, k_at, j >= 0, D, BLOCK_D, False)
            v = load_block(v_ptr + tl.cast(n, tl.int64) * stride_vt, v_at, j >= 0, D, BLOCK_D, False)
            keep = (n - prefix0 + j)[None, :] > (position - (0 if window is None else window))[:, None]
            m, total, acc = _step(q, do, k, v, keep, m, total, acc, scale, softcap, GRAD, WINDOW, PRECISION)
        if (whole < prefix1) & (low <= whole):
            inside = whole + j < prefix1
            k = load_block(k_ptr + tl.cast(whole, tl.int64) * stride_kt, k_at, inside, D, BLOCK_D, True)
            v = load_block(v_ptr + tl.cast(whole, tl.int64) * stride_vt, v_at, inside, D, BLOCK_D, True)
            keep = inside[None, :]
            if window is not None:
                keep = keep & ((whole - prefix0 + j)[None, :] > (position - window)[:, None])
            m, total, acc = _step(q, do, k, v, keep, m, total, acc, scale, softcap, GRAD, True, PRECISION)

    # ------------------------------------------------------------------------------------------------ the suffixes
    if ACROSS:
        last = tl.load(stop_ptr + row, mask=live, other=0)
        for n in range(own0, own1, BLOCK_N):
            inside = n + j < own1
            k = load_block(k_ptr + tl.cast(n, tl.int64) * stride_kt, k_at, inside, D, BLOCK_D, True)
            v = load_block(v_ptr + tl.cast(n, tl.int64) * stride_vt, v_at, inside, D, BLOCK_D, True)
            keep = inside[None, :]
            if SINGLES < 2:  # all except later tokens in the own suffix
                keep = keep & (((n + j)[None, :] <= token[:, None]) | ((n + j)[None, :] >= last[:, None]))
            if window is not None:
                theirs = length + n + j - tl.load(first_ptr + n + j, mask=inside, other=0)
                keep = keep & (theirs[None, :] > (position - window)[:, None])
            m, total, acc = _step(q, do, k, v, keep, m, total, acc, scale, softcap, GRAD, True, PRECISION)
    elif SINGLES < 2:
        n = own0 if DOCUMENT else tl.load(first_ptr + start)
        alone = True if DOCUMENT else tl.load(first_ptr + stop - 1) == n
        if alone:  # a single suffix: all rows see its earlier blocks
            begin = n
            n += ((start if CAUSAL else own1) - begin) // BLOCK_N * BLOCK_N
            if window is not None:
                begin += tl.maximum(start - begin - window + 1, 0) // BLOCK_N * BLOCK_N
            for i in range(begin, n, BLOCK_N):
                k = load_block(k_ptr + tl.cast(i, tl.int64) * stride_kt, k_at, j >= 0, D, BLOCK_D, False)
                v = load_block(v_ptr + tl.cast(i, tl.int64) * stride_vt, v_at, j >= 0, D, BLOCK_D, False)
                keep = (i + j)[None, :] > (token - (0 if window is None else window))[:, None]
                m, total, acc = _step(q, do, k, v, keep, m, total, acc, scale, softcap, GRAD, WINDOW, PRECISION)
        if DOCUMENT:
            i = n
            end = stop if CAUSAL else own1
            while i < end:
                inside = i + j < end
                k = load_block(k_ptr + tl.cast(i, tl.int64) * stride_kt, k_at, inside, D, BLOCK_D, True)
                v = load_block(v_ptr + tl.cast(i, tl.int64) * stride_vt, v_at, inside, D, BLOCK_D, True)
                keep = (i + j)[None, :] <= token[:, None] if CAUSAL else inside[None, :]
                if window is not None:
                    keep = keep & ((i + j)[None, :] > (token - window)[:, None])
                m, total, acc = _step(q, do, k, v, keep, m, total, acc, scale, softcap, GRAD, True, PRECISION)
                i += BLOCK_N
        else:
            while n < stop:
                own = tl.load(first_ptr + n)
                end = tl.load(stop_ptr + n)
                if SINGLES == 0 or end - own > 1:
                    inside = n + j < tl.minimum(end, stop)
                    k = load_block(k_ptr + tl.cast(n, tl.int64) * stride_kt, k_at, inside, D, BLOCK_D, True)
                    v = load_block(v_ptr + tl.cast(n, tl.int64) * stride_vt, v_at, inside, D, BLOCK_D, True)
                    keep = inside[None, :] & (first == own)[:, None] & ((n + j)[None, :] <= token[:, None])
                    if window is not None:
                        keep = keep & ((n + j)[None, :] > (token - window)[:, None])
                    m, total, acc = _step(q, do, k, v, keep, m, total, acc, scale, softcap, GRAD, True, PRECISION)
                n = tl.minimum(n + BLOCK_N, end)

    stored = live[:, None] if D == BLOCK_D else live[:, None] & (d < D)[None, :]
    if GRAD:
        if softcap is None:
            acc *= scale
        tl.store(dq_ptr + (of_head * D)[:, None] + d[None, :], acc.to(dq_ptr.dtype.element_ty), mask=stored)
    else:
        if DOCUMENT:
            total = tl.where(prefix0 > 0, float("nan"), total)
        o = acc / total[:, None]
        tl.store(o_ptr + (of_head * D)[:, None] + d[None, :], o.to(o_ptr.dtype.element_ty), mask=stored)
        tl.store(lse_ptr + statistics, m + tl.log2(total), mask=live)


# One program computes delta for BLOCK (token, head) rows, only if dq is not wanted: `_attend_kernel` computes delta
# otherwise.
@jit
@do_not_specialize("count")
def _delta_kernel(
    do_ptr, o_ptr, delta_ptr, count, stride_dt, stride_dh,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """delta = Σ do · o per token and head."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    live = row < count * H
    token, head = row // H, row % H
    do = load_block(do_ptr, token * stride_dt + head * stride_dh, live, D, BLOCK_D, True)
    o = load_block(o_ptr, row * D, live, D, BLOCK_D, True)
    statistics = (head // N * count + token) * N + head % N
    tl.store(delta_ptr + statistics, tl.sum(o.to(tl.float32) * do.to(tl.float32), 1), mask=live)
