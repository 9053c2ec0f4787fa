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
from tigon.ops.gated_delta_rule.chunks import find_chunk, load_square, load_tile


@jit
def _load_norms(factors_ptr, plane, own, stride, live, CHUNK: tl.constexpr, NORMALIZE: tl.constexpr):
    """Load 1/norm of the keys, plane 4, or of the queries, plane 5; ones without normalisation."""
    norms = tl.full((CHUNK,), 1.0, tl.float32)
    if NORMALIZE:
        norms = tl.load(factors_ptr + plane * stride + own, mask=live, other=1.0)
    return norms


# One program owns a chunk and N value heads of a key head, in their order. Each key head has SPLIT such groups, whose
# sums are separate: G is the number of groups.
# q, k: strides (t, g). do: strides (t, h), or None. x, dv (the gradient of x): dense (tokens, H, V). states (slots, H,
# K, V): S at the chunk's start. beta: strides (t, h). dq: dense (tokens, G, K), or None.
# from_p, from_b (slots, H, CHUNK, CHUNK) in q's dtype: what multiplies k in dq, and transposed q in dk; what multiplies
# k in dk, or None without a correction. sums (2 or 3, H, tokens) fp32: shares of da and dbeta; without a correction of
# dg, too. The share of pairs is taken from unrounded products: a pair's two terms in da cancel in the sums for g.
# dskip (H, tokens) fp32: do · x, or None.
@jit
@do_not_specialize("D", "T", "tokens")
def _queries_kernel(
    q_ptr, k_ptr, beta_ptr, do_ptr, x_ptr, dv_ptr, factors_ptr, table_ptr, states_ptr, from_p_ptr, from_b_ptr, sums_ptr,
    dskip_ptr, dq_ptr, D, T, tokens, stride_qt, stride_qg, stride_kt, stride_kg, stride_bt, stride_bh, stride_dt,
    stride_dh, scale,
    G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SPLIT: tl.constexpr, NORMALIZE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq, and the gradients of P and B."""
    H: tl.constexpr = G * N
    slot, group = tl.program_id(0) // G, tl.program_id(0) % G
    start, stop = find_chunk(table_ptr, slot, D, T, CHUNK)
    if start >= stop:
        return
    i = tl.arange(0, CHUNK)
    live = start + i < stop
    token = (start + i).to(tl.int64)
    row = tl.arange(0, BLOCK_K)
    q_at = token * stride_qt + group // SPLIT * stride_qg
    k_at = token * stride_kt + group // SPLIT * stride_kg
    stride = tl.cast(tokens, tl.int64) * H
    # With normalize the gradient of the normalised rows, divided by their norms; dk likewise.
    dq = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    for head in tl.range(N, disable_licm=True):
        h = group * N + head
        values = (token * H + h) * V
        own = tl.cast(h, tl.int64) * tokens + token
        da = tl.zeros((CHUNK,), tl.float32)
        if do_ptr is not None:
            asked = tl.zeros((CHUNK, BLOCK_K), tl.float32)
            for first in range(0, V, BLOCK_V):
                at_state = (slot.to(tl.int64) * H + h) * (K * V) + row * V
                S = load_tile(states_ptr, at_state, row < K, first, V, BLOCK_V)
                do = load_tile(do_ptr, token * stride_dt + h * stride_dh, live, first, V, BLOCK_V)
                asked = tl.dot(do, tl.trans(S), asked, input_precision=PRECISION)
            asked *= tl.load(factors_ptr + 2 * stride + own, mask=live, other=0.0)[:, None]
            q = load_tile(q_ptr, q_at, live, 0, K, BLOCK_K)
            da = tl.sum(asked * q.to(tl.float32), 1)
            dq += asked
        # A loop of its own: with the sums above, registers would spill.
        dp = tl.zeros((CHUNK, CHUNK), tl.float32)
        if from_b_ptr is not None:
            db = tl.zeros((CHUNK, CHUNK), tl.float32)
        for first in range(0, V, BLOCK_V):
            x = load_tile(x_ptr, values, live, first, V, BLOCK_V)
            if from_b_ptr is not None:
                dx = load_tile(dv_ptr, values, live, first, V, BLOCK_V)
                db = tl.dot(dx, tl.trans(x), db, input_precision=PRECISION)
            if do_ptr is not None:
                do = load_tile(do_ptr, token * stride_dt + h * stride_dh, live, first, V, BLOCK_V)
                dp = tl.dot(do, tl.trans(x), dp, input_precision=PRECISION)
        a = tl.load(factors_ptr + 3 * stride + own, mask=live, other=0.0)
        beta = tl.load(beta_ptr + token * stride_bt + h * stride_bh, mask=live, other=0.0).to(tl.float32)
        k_norm = _load_norms(factors_ptr, 4, own, stride, live, CHUNK, NORMALIZE)
        # Dead tokens have a = 0 here: their rows and columns are zero in both products.
        decay = tl.exp(tl.where((i[:, None] >= i[None, :]) & live[:, None], a[:, None] - a[None, :], float("-inf")))
        decay *= k_norm[None, :]
        if from_b_ptr is not None:
            db = tl.where(i[:, None] > i[None, :], db * -decay * k_norm[:, None], 0.0)
        k = load_tile(k_ptr, k_at, live, 0, K, BLOCK_K)
        at = (slot.to(tl.int64) * H + h) * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :]
        if from_b_ptr is not None:
            shared = db * tl.dot(k, tl.trans(k), input_precision=PRECISION)
            db *= beta[None, :]
            tl.store(from_b_ptr + at, (db + tl.trans(db)).to(from_b_ptr.dtype.element_ty))
        else:
            shared = tl.zeros((CHUNK, CHUNK), tl.float32)
        if do_ptr is not None:
            if dskip_ptr is not None:
                tl.store(dskip_ptr + own, tl.sum(tl.where(i[:, None] == i[None, :], dp, 0.0), 1), mask=live)
            q_norm = _load_norms(factors_ptr, 5, own, stride, live, CHUNK, NORMALIZE)
            dp *= decay * (q_norm * scale)[:, None]
            shared += dp * tl.dot(q, tl.trans(k), input_precision=PRECISION)
            narrow = (dp * beta[None, :]).to(k.dtype)
            tl.store(from_p_ptr + at, narrow)
            dq = tl.dot(narrow, k, dq, input_precision=PRECISION)
        dbeta = tl.sum(shared, 0)
        if from_b_ptr is not None:
            da += tl.sum(shared * beta[None, :], 1) - dbeta * beta
        else:
            # g_t is in the decays of pairs on both sides of t, no others: for fast decays those that cancel are larger.
            shared = tl.where(i[:, None] > i[None, :], shared * beta[None, :], 0.0)
            across = tl.cumsum(shared, 0, reverse=True)
            dg = tl.sum(tl.where(i[:, None] > i[None, :], across, 0.0), 1)
            tl.store(sums_ptr + 2 * stride + own, dg, mask=live)
        tl.store(sums_ptr + own, da, mask=live)
        tl.store(sums_ptr + stride + own, dbeta, mask=live)
    if dq_ptr is not None:
        if NORMALIZE:
            own = tl.cast(group * N, tl.int64) * tokens + token
            q_norm = _load_norms(factors_ptr, 5, own, stride, live, CHUNK, NORMALIZE)
            q = load_tile(q_ptr, q_at, live, 0, K, BLOCK_K).to(tl.float32)
            dq -= q * (q_norm * q_norm * tl.sum(q * dq, 1))[:, None]
        at = ((token * G + group) * K)[:, None] + row[None, :]
        tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), mask=live[:, None] & (row < K)[None, :])


# One program owns a chunk and N value heads of a key head, as above. dstates (slots, H, K, V): the gradient of S at the
# chunk's end. dk: dense (tokens, G, K). dg, dbeta: dense (tokens, H). Gradients that nobody wants are None.
@jit
@do_not_specialize("D", "T", "tokens")
def _keys_kernel(
    q_ptr, k_ptr, beta_ptr, do_ptr, x_ptr, dv_ptr, factors_ptr, table_ptr, states_ptr, from_p_ptr, from_b_ptr, sums_ptr,
    dstates_ptr, dk_ptr, dg_ptr, dbeta_ptr, D, T, tokens, stride_qt, stride_qg, stride_kt, stride_kg, stride_bt,
    stride_bh,
    G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SPLIT: tl.constexpr, NORMALIZE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk, dg and dbeta."""
    H: tl.constexpr = G * N
    slot, group = tl.program_id(0) // G, tl.program_id(0) % G
    start, stop = find_chunk(table_ptr, slot, D, T, CHUNK)
    if start >= stop:
        return
    i = tl.arange(0, CHUNK)
    live = start + i < stop
    token = (start + i).to(tl.int64)
    row = tl.arange(0, BLOCK_K)
    q_at = token * stride_qt + group // SPLIT * stride_qg
    k_at = token * stride_kt + group // SPLIT * stride_kg
    stride = tl.cast(tokens, tl.int64) * H
    dk = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    for head in tl.range(N, disable_licm=True):
        h = group * N + head
        values = (token * H + h) * V
        read = tl.zeros((CHUNK, BLOCK_K), tl.float32)
        written = tl.zeros((CHUNK, BLOCK_K), tl.float32)
        both = tl.zeros((BLOCK_K,), tl.float32)
        for first in range(0, V, BLOCK_V):
            at_state = (slot.to(tl.int64) * H + h) * (K * V) + row * V
            S = load_tile(states_ptr, at_state, row < K, first, V, BLOCK_V)
            dS = load_tile(dstates_ptr, at_state, row < K, first, V, BLOCK_V)
            x = load_tile(x_ptr, values, live, first, V, BLOCK_V)
            if from_b_ptr is not None:
                dx = load_tile(dv_ptr, values, live, first, V, BLOCK_V)
            written = tl.dot(x, tl.trans(dS), written, input_precision=PRECISION)
            if from_b_ptr is not None:
                read = tl.dot(dx, tl.trans(S), read, input_precision=PRECISION)
        if dg_ptr is not None:
            # A separate loop: Triton 3.6 and 3.7 overwrite a tile too early that products and registers both use.
            for first in range(0, V, BLOCK_V):
                at_state = (slot.to(tl.int64) * H + h) * (K * V) + row * V
                S = load_tile(states_ptr, at_state, row < K, first, V, BLOCK_V)
                dS = load_tile(dstates_ptr, at_state, row < K, first, V, BLOCK_V)
                both += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        own = tl.cast(h, tl.int64) * tokens + token
        a = tl.load(factors_ptr + 3 * stride + own, mask=live, other=0.0)
        last = tl.load(factors_ptr + tl.cast(h, tl.int64) * tokens + 3 * stride + stop - 1)
        beta = tl.load(beta_ptr + token * stride_bt + h * stride_bh, mask=live, other=0.0).to(tl.float32)
        k_norm = _load_norms(factors_ptr, 4, own, stride, live, CHUNK, NORMALIZE)
        da = tl.load(sums_ptr + own, mask=live, other=0.0)
        dbeta = tl.load(sums_ptr + stride + own, mask=live, other=0.0)
        k = load_tile(k_ptr, k_at, live, 0, K, BLOCK_K)
        if from_b_ptr is not None:
            read *= tl.load(factors_ptr + own, mask=live, other=0.0)[:, None]
            da -= tl.sum(read * k.to(tl.float32), 1)
            dk -= read
        written *= tl.where(live, tl.exp(last - a) * k_norm, 0.0)[:, None]
        change = tl.sum(written * k.to(tl.float32), 1)
        dbeta += change
        change *= beta
        if from_b_ptr is not None:
            da -= change
        if from_b_ptr is not None:
            from_b = load_square(from_b_ptr, slot, H, h, CHUNK)
        dk += written * beta[:, None]
        # Not a chain of products: Triton would let all warps compute the same sums.
        if from_b_ptr is not None:
            rest = tl.dot(from_b, k, input_precision=PRECISION)
        if do_ptr is not None:
            q = load_tile(q_ptr, q_at, live, 0, K, BLOCK_K)
            from_p = load_square(from_p_ptr, slot, H, h, CHUNK)
            dk = tl.dot(tl.trans(from_p), q, dk, input_precision=PRECISION)
        if from_b_ptr is not None:
            dk += rest
        if dg_ptr is not None:
            # g_t is in the sums of all tokens from t on, and in the sum at the chunk's end. A sum over `change` alone
            # does not compile for sm_100.
            if from_b_ptr is not None:
                dg = tl.sum(tl.where(i[:, None] >= i[None, :], da[:, None], 0.0) + change[:, None], 0)
            else:
                dg = tl.sum(tl.where(i[:, None] >= i[None, :], da[:, None], change[:, None]), 0)
                dg += tl.load(sums_ptr + 2 * stride + own, mask=live, other=0.0)
            dg += tl.sum(both, 0) * tl.exp(last)
            tl.store(dg_ptr + token * H + h, dg.to(dg_ptr.dtype.element_ty), mask=live)
        if dbeta_ptr is not None:
            tl.store(dbeta_ptr + token * H + h, dbeta.to(dbeta_ptr.dtype.element_ty), mask=live)
    if dk_ptr is not None:
        if NORMALIZE:
            own = tl.cast(group * N, tl.int64) * tokens + token
            k_norm = _load_norms(factors_ptr, 4, own, stride, live, CHUNK, NORMALIZE)
            k = load_tile(k_ptr, k_at, live, 0, K, BLOCK_K).to(tl.float32)
            dk -= k * (k_norm * k_norm * tl.sum(k * dk, 1))[:, None]
        at = ((token * G + group) * K)[:, None] + row[None, :]
        tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=live[:, None] & (row < K)[None, :])
