"""Kernels for the gradients of q, k, g and beta: all chunks at once, from the states and their gradients.

With x, the gradient dx of x, the state S at the chunk's start and the gradient dS of the state at its end (names as in
chunks.py), the matrices and the rows have the gradients

    dP_ij = do_i · x_j        dB_ij = −dx_i · x_j
    dq_i = scale · exp(a_i) S do_i + Σ_j dP_ij P_ij / (q_i · k_j) k_j
    dk_i = exp(a_C − a_i) β_i dS x_i − exp(a_i) S dx_i + likewise from P's columns, B's rows and B's columns

and each product's gradient times the product goes to da_i, with the sign that a_i has in the product's exponent.
"""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.ops.gated_delta_rule.chunks import EPS, find_chunk, load_square, load_tile


@jit
def _invert_norms(ptr, at, live, K: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, NORMALIZE: tl.constexpr):
    if not NORMALIZE:
        return tl.full((CHUNK,), 1.0, tl.float32)
    x = load_tile(ptr, at, live, 0, K, BLOCK_K).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + EPS)


# One program takes a chunk of head h. q, k: strides (t, g). do: strides (t, h), or None. x, dv (the gradient of x):
# dense (tokens, H, V). beta: strides (t, h). from_p, from_b (slots, H, CHUNK, CHUNK) in q's dtype: what multiplies k in
# dq, and transposed q in dk; what multiplies k in dk. sums (2, H, tokens) fp32: the chunk's share of da and of dbeta,
# from unrounded products: a pair's two terms in da cancel in the sums for g.
@jit
@do_not_specialize("D", "T", "tokens")
def _pairs_kernel(
    q_ptr, k_ptr, beta_ptr, do_ptr, x_ptr, dv_ptr, factors_ptr, table_ptr, from_p_ptr, from_b_ptr, sums_ptr,
    D, T, tokens, stride_qt, stride_qg, stride_kt, stride_kg, stride_bt, stride_bh, stride_dt, stride_dh, scale,
    H: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr, NORMALIZE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of P and B."""
    slot, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, stop = find_chunk(table_ptr, slot, D, T, CHUNK)
    if start >= stop:
        return
    i = tl.arange(0, CHUNK)
    live = start + i < stop
    token = (start + i).to(tl.int64)
    values = (token * H + h) * V
    dp = tl.zeros((CHUNK, CHUNK), tl.float32)
    db = tl.zeros((CHUNK, CHUNK), tl.float32)
    for first in range(0, V, BLOCK_V):
        x = load_tile(x_ptr, values, live, first, V, BLOCK_V)
        dx = load_tile(dv_ptr, values, live, first, V, BLOCK_V)
        db = tl.dot(dx, tl.trans(x), db, input_precision=PRECISION)
        if do_ptr is not None:
            do = load_tile(do_ptr, token * stride_dt + h * stride_dh, live, first, V, BLOCK_V)
            dp = tl.dot(do, tl.trans(x), dp, input_precision=PRECISION)
    factors_ptr += tl.cast(h, tl.int64) * tokens + token
    stride = tl.cast(tokens, tl.int64) * H
    a = tl.load(factors_ptr + 3 * stride, mask=live, other=0.0)
    beta = tl.load(beta_ptr + token * stride_bt + h * stride_bh, mask=live, other=0.0).to(tl.float32)
    k = load_tile(k_ptr, token * stride_kt + h // N * stride_kg, live, 0, K, BLOCK_K)
    k_norm = _invert_norms(k_ptr, token * stride_kt + h // N * stride_kg, live, K, CHUNK, BLOCK_K, NORMALIZE)
    # Dead tokens have a = 0 here: their rows and columns are zero in both products.
    decay = tl.exp(tl.where((i[:, None] >= i[None, :]) & live[:, None], a[:, None] - a[None, :], float("-inf")))
    decay *= k_norm[None, :]
    db = tl.where(i[:, None] > i[None, :], db * -decay * k_norm[:, None], 0.0)
    shared = db * tl.dot(k, tl.trans(k), input_precision=PRECISION)
    if do_ptr is not None:
        q = load_tile(q_ptr, token * stride_qt + h // N * stride_qg, live, 0, K, BLOCK_K)
        q_norm = _invert_norms(q_ptr, token * stride_qt + h // N * stride_qg, live, K, CHUNK, BLOCK_K, NORMALIZE)
        dp *= decay * (q_norm * scale)[:, None]
        shared += dp * tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dbeta = tl.sum(shared, 0)
    da = tl.sum(shared * beta[None, :], 1) - dbeta * beta
    sums_ptr += tl.cast(h, tl.int64) * tokens + token
    tl.store(sums_ptr, da, mask=live)
    tl.store(sums_ptr + stride, dbeta, mask=live)
    db *= beta[None, :]
    at = (slot.to(tl.int64) * H + h) * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :]
    tl.store(from_b_ptr + at, (db + tl.trans(db)).to(from_b_ptr.dtype.element_ty))
    if do_ptr is not None:
        tl.store(from_p_ptr + at, (dp * beta[None, :]).to(from_p_ptr.dtype.element_ty))


# One program owns a chunk of key head `group`, and walks through the head's N value heads in their order.
# Arguments as above. states, dstates (slots, H, K, V): S at the chunk's start and the gradient of S at its end.
# dq, dk: dense (tokens, G, K). dg, dbeta: dense (tokens, H). Gradients that nobody wants are None.
@jit
@do_not_specialize("D", "T", "tokens")
def _gradients_kernel(
    q_ptr, k_ptr, beta_ptr, do_ptr, x_ptr, dv_ptr, factors_ptr, table_ptr, from_p_ptr, from_b_ptr, sums_ptr, states_ptr,
    dstates_ptr, dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, D, T, tokens, stride_qt, stride_qg, stride_kt, stride_kg, stride_bt,
    stride_bh, stride_dt, stride_dh,
    G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr, NORMALIZE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk, dg and dbeta."""
    H: tl.constexpr = G * N
    slot, group = tl.program_id(0) // G, tl.program_id(0) % G
    start, stop = find_chunk(table_ptr, slot, D, T, CHUNK)
    if start >= stop:
        return
    i = tl.arange(0, CHUNK)
    live = start + i < stop
    token = (start + i).to(tl.int64)
    q_at = token * stride_qt + group * stride_qg
    k_at = token * stride_kt + group * stride_kg
    q_norm = _invert_norms(q_ptr, q_at, live, K, CHUNK, BLOCK_K, NORMALIZE)
    k_norm = _invert_norms(k_ptr, k_at, live, K, CHUNK, BLOCK_K, NORMALIZE)
    # With normalize the gradients of the normalised rows, divided by their norms.
    dq = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    dk = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    stride = tl.cast(tokens, tl.int64) * H
    row = tl.arange(0, BLOCK_K)
    for head in range(N):
        h = group * N + head
        own = tl.cast(h, tl.int64) * tokens + token
        values = (token * H + h) * V
        a = tl.load(factors_ptr + 3 * stride + own, mask=live, other=0.0)
        last = tl.load(factors_ptr + tl.cast(h, tl.int64) * tokens + 3 * stride + stop - 1)
        beta = tl.load(beta_ptr + token * stride_bt + h * stride_bh, mask=live, other=0.0).to(tl.float32)
        da = tl.load(sums_ptr + own, mask=live, other=0.0)
        dbeta = tl.load(sums_ptr + stride + own, mask=live, other=0.0)
        asked = tl.zeros((CHUNK, BLOCK_K), tl.float32)
        read = tl.zeros((CHUNK, BLOCK_K), tl.float32)
        written = tl.zeros((CHUNK, BLOCK_K), tl.float32)
        both = 0.0
        for first in range(0, V, BLOCK_V):
            at_state = (slot.to(tl.int64) * H + h) * (K * V) + row * V
            S = load_tile(states_ptr, at_state, row < K, first, V, BLOCK_V)
            dS = load_tile(dstates_ptr, at_state, row < K, first, V, BLOCK_V)
            both += tl.sum(tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1), 0)
            x = load_tile(x_ptr, values, live, first, V, BLOCK_V)
            dx = load_tile(dv_ptr, values, live, first, V, BLOCK_V)
            written = tl.dot(x, tl.trans(dS), written, input_precision=PRECISION)
            read = tl.dot(dx, tl.trans(S), read, input_precision=PRECISION)
            if do_ptr is not None:
                do = load_tile(do_ptr, token * stride_dt + h * stride_dh, live, first, V, BLOCK_V)
                asked = tl.dot(do, tl.trans(S), asked, input_precision=PRECISION)
        k = load_tile(k_ptr, k_at, live, 0, K, BLOCK_K)
        if do_ptr is not None:
            asked *= tl.load(factors_ptr + 2 * stride + own, mask=live, other=0.0)[:, None]
            q = load_tile(q_ptr, q_at, live, 0, K, BLOCK_K)
            da += tl.sum(asked * q.to(tl.float32), 1)
            from_p = load_square(from_p_ptr, slot, H, h, CHUNK)
            dq = tl.dot(from_p, k, dq + asked, input_precision=PRECISION)
            dk = tl.dot(tl.trans(from_p), q, dk, input_precision=PRECISION)
        read *= tl.load(factors_ptr + own, mask=live, other=0.0)[:, None]
        da -= tl.sum(read * k.to(tl.float32), 1)
        written *= tl.where(live, tl.exp(last - a) * k_norm, 0.0)[:, None]
        change = tl.sum(written * k.to(tl.float32), 1)
        dbeta += change
        change *= beta
        da -= change
        # g_t is in the sums of all tokens from t on, and in the sum at the chunk's end.
        dg = tl.sum(tl.where(i[:, None] >= i[None, :], da[:, None], 0.0), 0) + tl.sum(change, 0) + both * tl.exp(last)
        from_b = load_square(from_b_ptr, slot, H, h, CHUNK)
        dk = tl.dot(from_b, k, dk + (written * beta[:, None] - read), input_precision=PRECISION)
        if dg_ptr is not None:
            tl.store(dg_ptr + token * H + h, dg.to(dg_ptr.dtype.element_ty), mask=live)
        if dbeta_ptr is not None:
            tl.store(dbeta_ptr + token * H + h, dbeta.to(dbeta_ptr.dtype.element_ty), mask=live)

    at = ((token * G + group) * K)[:, None] + row[None, :]
    stored = live[:, None] & (row < K)[None, :]
    if dq_ptr is not None:
        if NORMALIZE:
            wide = load_tile(q_ptr, q_at, live, 0, K, BLOCK_K).to(tl.float32)
            dq -= wide * (q_norm * q_norm * tl.sum(wide * dq, 1))[:, None]
        tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), mask=stored)
    if dk_ptr is not None:
        if NORMALIZE:
            wide = load_tile(k_ptr, k_at, live, 0, K, BLOCK_K).to(tl.float32)
            dk -= wide * (k_norm * k_norm * tl.sum(wide * dk, 1))[:, None]
        tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=stored)
