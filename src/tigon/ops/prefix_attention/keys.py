"""Kernels that own a tile of keys: gradients of keys and values, summed over all queries that read the tile.

A program walks over the tokens in the tile's sequence, then, for a prefix tile, over the request's suffixes: both
contributions form a single sum, in a fixed order, rounded once.
"""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.ops.prefix_attention.queries import load_block, scale_scores


@jit
def _step(
    q, do, lse, delta, k, v, keep, dk, dv, scale, softcap,
    DK: tl.constexpr, DV: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Process a block of queries, transposed: keys are the tile's rows."""
    z, slope = scale_scores(tl.dot(k, tl.trans(q), input_precision=PRECISION), scale, softcap)
    # Rows outside the block have log-sum-exp inf, hence probability 0.
    p = tl.exp2(z - lse[None, :])
    if MASK:
        p = tl.where(keep, p, 0.0)
    if DV:
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    if DK:
        ds = p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
        if softcap is not None:
            ds *= slope
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@jit
def _queries_at(
    q_ptr, do_ptr, lse_ptr, delta_ptr, t, end, stride_qt, stride_qh, stride_dt, stride_dh,
    N: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load q, do, lse and delta for the tokens from t on, N heads per token."""
    rows = tl.arange(0, BLOCK_M)
    live = t + rows // N < end
    if BLOCK_M % N != 0:
        live = live & (rows < BLOCK_M // N * N)
    far = tl.cast(t, tl.int64)
    q = load_block(q_ptr + far * stride_qt, rows // N * stride_qt + rows % N * stride_qh, live, D, BLOCK_D, True)
    do = load_block(do_ptr + far * stride_dt, rows // N * stride_dt + rows % N * stride_dh, live, D, BLOCK_D, True)
    lse = tl.load(lse_ptr + far * N + rows, mask=live, other=float("inf"))
    delta = tl.load(delta_ptr + far * N + rows, mask=live, other=0.0)
    return q, do, lse, delta


# One program computes dk and dv for BLOCK_N keys and a single key head g; outputs that are None are skipped.
# q, do: strides (t, h); k, v: strides (t, g). lse, delta: (G, count, N) fp32. count: number of tokens.
# tiles (·, 6) int32: the tile's start and stop, its own sequence's range, and the other rows' range (a prefix's
# suffixes). first: each token's sequence start; without first no tile has other rows.
# SINGLES: 0 no suffix has a single token, 1 some, 2 all. ACROSS: suffixes see each other. N: query heads per key head.
# CAUSAL: False only for documents, without a window.
@jit
@do_not_specialize("count")
def _keys_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, tiles_ptr, first_ptr, count,
    stride_qt, stride_qh, stride_kt, stride_kg, stride_vt, stride_vg, stride_dt, stride_dh, scale, softcap, window,
    G: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SINGLES: tl.constexpr, ACROSS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    DK: tl.constexpr = dk_ptr is not None
    DV: tl.constexpr = dv_ptr is not None
    WINDOW: tl.constexpr = window is not None
    DOCUMENT: tl.constexpr = first_ptr is None
    T: tl.constexpr = BLOCK_M // N
    entry = tiles_ptr + tl.program_id(0) // G * 6
    g = tl.program_id(0) % G
    start, stop = tl.load(entry), tl.load(entry + 1)
    own0, own1 = tl.load(entry + 2), tl.load(entry + 3)
    other0, other1 = tl.load(entry + 4), tl.load(entry + 5)
    if start >= stop:
        return
    key = start + tl.arange(0, BLOCK_N)
    live = key < stop
    row = key.to(tl.int64)
    k = load_block(k_ptr + g.to(tl.int64) * stride_kg, row * stride_kt, live, D, BLOCK_D, True)
    v = load_block(v_ptr + g.to(tl.int64) * stride_vg, row * stride_vt, live, D, BLOCK_D, True)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    q_ptr += (g * N).to(tl.int64) * stride_qh
    do_ptr += (g * N).to(tl.int64) * stride_dh
    lse_ptr += tl.cast(g, tl.int64) * count * N
    delta_ptr += tl.cast(g, tl.int64) * count * N
    rows = tl.arange(0, BLOCK_M)
    token = rows // N

    if ACROSS:  # a suffix key: read by all suffixes of the request, except earlier tokens in its own suffix
        first = tl.load(first_ptr + row, mask=live, other=-1)
        for t in range(own0, own1, T):
            q, do, lse, delta = _queries_at(
                q_ptr, do_ptr, lse_ptr, delta_ptr, t, own1, stride_qt, stride_qh, stride_dt, stride_dh,
                N, D, BLOCK_M, BLOCK_D,
            )  # fmt: skip
            keep = live[:, None]
            if SINGLES < 2 or WINDOW:
                theirs = tl.load(first_ptr + t + token, mask=t + token < own1, other=-2)
                keep = rows[None, :] >= ((key - t) * N)[:, None]
                keep = keep | (first[:, None] != theirs[None, :])
                if window is not None:
                    keep = keep & ((t + token - theirs)[None, :] - (key - first)[:, None] < window)
            masked: tl.constexpr = SINGLES < 2 or WINDOW
            dk, dv = _step(q, do, lse, delta, k, v, keep, dk, dv, scale, softcap, DK, DV, masked, PRECISION)
    else:
        end = own1
        if window is not None:
            end = tl.minimum(end, stop - 1 + window)
            # A suffix's first token sees furthest back: if that token misses the tile's last key, all suffix tokens
            # miss the tile.
            other1 = tl.where(own1 - stop + 1 < window, other1, other0)
        # A single masked loop over the own sequence and the suffixes. With separate loops, or a separate loop for
        # unmasked blocks, ptxas serializes the tensor-core products or spills.
        begin = start if CAUSAL else own0
        rest = tl.cdiv(tl.maximum(end - begin, 0), T)
        others = 0 if DOCUMENT else tl.cdiv(other1 - other0, T)
        for i in range(rest + others):
            t = begin + i * T if DOCUMENT else tl.where(i < rest, start + i * T, other0 + (i - rest) * T)
            last = end if DOCUMENT else tl.where(i < rest, end, other1)
            q, do, lse, delta = _queries_at(
                q_ptr, do_ptr, lse_ptr, delta_ptr, t, last, stride_qt, stride_qh, stride_dt, stride_dh,
                N, D, BLOCK_M, BLOCK_D,
            )  # fmt: skip
            ahead = key - t if DOCUMENT else tl.where(i < rest, key - t, 0)
            keep = rows[None, :] >= (ahead * N)[:, None]
            if window is not None:
                position = t + token - own0
                if not DOCUMENT:
                    theirs = tl.load(first_ptr + t + token, mask=t + token < last, other=0)
                    position = t + token - theirs + tl.where(i < rest, 0, own1 - own0)
                keep = keep & (position[None, :] - (key - own0)[:, None] < window)
            # Without a mask: queries outside the document have probability 0, and keys outside are not stored.
            dk, dv = _step(q, do, lse, delta, k, v, keep, dk, dv, scale, softcap, DK, DV, CAUSAL, PRECISION)

    # Reload the range, so that it occupies no registers in the loops above.
    start, stop = tl.load(entry, volatile=True), tl.load(entry + 1, volatile=True)
    key = start + tl.arange(0, BLOCK_N)
    live = key < stop
    row = key.to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    stored = live[:, None] if D == BLOCK_D else live[:, None] & (d < D)[None, :]
    at = ((row * G + g) * D)[:, None] + d[None, :]
    if DK:
        if softcap is None:
            dk *= scale
        tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=stored)
    if DV:
        tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=stored)


# One program computes dk and dv for BLOCK_T suffixes with a single token, whose key only that token reads. Rows start
# to stop; stop is the total token count. Other arguments as in `_keys_kernel`.
@jit
@do_not_specialize("start", "stop")
def _single_keys_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, first_ptr, stop_ptr, start, stop,
    stride_qt, stride_qh, stride_kt, stride_kg, stride_vt, stride_vg, stride_dt, stride_dh, scale, softcap,
    G: tl.constexpr, N: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dk and dv for single-token suffixes."""
    g = tl.program_id(0) % G
    row = (start + tl.program_id(0) // G * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    live = row < stop
    length = tl.load(stop_ptr + row, mask=live, other=0) - tl.load(first_ptr + row, mask=live, other=0)
    live = length == 1
    k = load_block(k_ptr + g.to(tl.int64) * stride_kg, row * stride_kt, live, D, BLOCK_D, True).to(tl.float32)
    v = load_block(v_ptr + g.to(tl.int64) * stride_vg, row * stride_vt, live, D, BLOCK_D, True).to(tl.float32)
    dk = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for n in range(N):
        head = g * N + n
        q = load_block(q_ptr, row * stride_qt + head * stride_qh, live, D, BLOCK_D, True).to(tl.float32)
        do = load_block(do_ptr, row * stride_dt + head * stride_dh, live, D, BLOCK_D, True).to(tl.float32)
        statistics = (tl.cast(g, tl.int64) * stop + row) * N + n
        lse = tl.load(lse_ptr + statistics, mask=live, other=0.0)
        delta = tl.load(delta_ptr + statistics, mask=live, other=0.0)
        z, slope = scale_scores(tl.sum(q * k, 1), scale, softcap)
        p = tl.exp2(z - lse)
        ds = p * (tl.sum(do * v, 1) - delta)
        if softcap is not None:
            ds *= slope
        dk += ds[:, None] * q
        dv += p[:, None] * do
    d = tl.arange(0, BLOCK_D)
    at = ((row * G + g) * D)[:, None] + d[None, :]
    stored = live[:, None] if D == BLOCK_D else live[:, None] & (d < D)[None, :]
    if dk_ptr is not None:
        if softcap is None:
            dk *= scale
        tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=stored)
    if dv_ptr is not None:
        tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=stored)
