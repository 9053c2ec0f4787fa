"""Kernel for the gradients of q, k, g and beta: all chunks at once, from the states and their gradients.

With x, the gradient dx of x, the state S at the chunk's start and the gradient dS of the state at its end, the matrices
and the states give (names as in chunks.py, P and B without β where β's own gradient is taken)

    dP_ij = do_i · x_j        dB_ij = −dx_i · x_j
    dq_i = scale · exp(a_i) S do_i + Σ_j …        dk_i = exp(a_C − a_i) β_i dS x_i − exp(a_i) S dx_i + Σ_j …
    da_i: each product's gradient times the product, with the sign of a_i in its exponent
"""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.ops.gated_delta_rule.chunks import EPS, find_chunk, load_tile


# One program owns a chunk of key head g, and walks through the head's N value heads in their order.
# q, k: strides (t, g). do: strides (t, h), or None. x, dv (the gradient of x): dense (tokens, H, V). states, dstates
# (slots, H, K, V): S at the chunk's start and the gradient of S at its end. beta: strides (t, h).
# dq, dk: dense (tokens, G, K). dg, dbeta: dense (tokens, H). Gradients that nobody wants are None.
@jit
@do_not_specialize("D", "T", "tokens")
def _gradients_kernel(
    q_ptr, k_ptr, beta_ptr, do_ptr, x_ptr, dv_ptr, states_ptr, dstates_ptr, factors_ptr, table_ptr, dq_ptr, dk_ptr,
    dg_ptr, dbeta_ptr, D, T, tokens, stride_qt, stride_qg, stride_kt, stride_kg, stride_bt, stride_bh, stride_dt,
    stride_dh, scale,
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
    seen = i[:, None] >= i[None, :]
    q = load_tile(q_ptr, token * stride_qt + group * stride_qg, live, 0, K, BLOCK_K)
    k = load_tile(k_ptr, token * stride_kt + group * stride_kg, live, 0, K, BLOCK_K)
    if NORMALIZE:
        q_norm = tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1) + EPS)
        k_norm = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1) + EPS)
    else:
        q_norm = tl.full((CHUNK,), 1.0, tl.float32)
        k_norm = tl.full((CHUNK,), 1.0, tl.float32)
    # With normalize the gradients of the normalised rows, divided by their norms.
    dq = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    dk = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    stride = tl.cast(tokens, tl.int64) * H
    row = tl.arange(0, BLOCK_K)
    for head in range(N):
        h = group * N + head
        factors = factors_ptr + tl.cast(h, tl.int64) * tokens + token
        values = (token * H + h) * V
        a = tl.load(factors + 3 * stride, mask=live, other=0.0)
        last = tl.load(factors_ptr + tl.cast(h, tl.int64) * tokens + 3 * stride + stop - 1)
        beta = tl.load(beta_ptr + token * stride_bt + h * stride_bh, mask=live, other=0.0).to(tl.float32)

        # ------------------------------------------------------------------------------------- inside the chunk
        dp = tl.zeros((CHUNK, CHUNK), tl.float32)
        db = tl.zeros((CHUNK, CHUNK), tl.float32)
        for first in range(0, V, BLOCK_V):
            x = load_tile(x_ptr, values, live, first, V, BLOCK_V)
            dx = load_tile(dv_ptr, values, live, first, V, BLOCK_V)
            db = tl.dot(dx, tl.trans(x), db, input_precision=PRECISION)
            if do_ptr is not None:
                do = load_tile(do_ptr, token * stride_dt + h * stride_dh, live, first, V, BLOCK_V)
                dp = tl.dot(do, tl.trans(x), dp, input_precision=PRECISION)
        # Dead tokens have a = 0 here: their rows and columns are zero in both products.
        decay = tl.exp(tl.where(seen & live[:, None], a[:, None] - a[None, :], float("-inf")))
        dp *= decay * scale
        db = tl.where(i[:, None] > i[None, :], db * -decay, 0.0)
        dp *= q_norm[:, None] * k_norm[None, :]
        db *= k_norm[:, None] * k_norm[None, :]
        shared = db * tl.dot(k, tl.trans(k), input_precision=PRECISION)
        shared += dp * tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dbeta = tl.sum(shared, 0)
        da = tl.sum(shared * beta[None, :], 1) - dbeta * beta
        dp *= beta[None, :]
        db *= beta[None, :]
        dq = tl.dot(dp.to(k.dtype), k, dq, input_precision=PRECISION)
        dk = tl.dot(tl.trans(dp).to(k.dtype), q, dk, input_precision=PRECISION)
        dk = tl.dot((db + tl.trans(db)).to(k.dtype), k, dk, input_precision=PRECISION)

        # ---------------------------------------------------------------------------------- through the states
        asked = tl.zeros((CHUNK, BLOCK_K), tl.float32)
        read = tl.zeros((CHUNK, BLOCK_K), tl.float32)
        written = tl.zeros((CHUNK, BLOCK_K), tl.float32)
        both = tl.zeros((BLOCK_K,), tl.float32)
        for first in range(0, V, BLOCK_V):
            at_state = (slot.to(tl.int64) * H + h) * (K * V) + row * V
            S = load_tile(states_ptr, at_state, row < K, first, V, BLOCK_V)
            dS = load_tile(dstates_ptr, at_state, row < K, first, V, BLOCK_V)
            x = load_tile(x_ptr, values, live, first, V, BLOCK_V)
            dx = load_tile(dv_ptr, values, live, first, V, BLOCK_V)
            written = tl.dot(x, tl.trans(dS), written, input_precision=PRECISION)
            read = tl.dot(dx, tl.trans(S), read, input_precision=PRECISION)
            if do_ptr is not None:
                do = load_tile(do_ptr, token * stride_dt + h * stride_dh, live, first, V, BLOCK_V)
                asked = tl.dot(do, tl.trans(S), asked, input_precision=PRECISION)
            both += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        if do_ptr is not None:
            query = tl.load(factors + 2 * stride, mask=live, other=0.0)
            asked *= query[:, None]
            da += tl.sum(asked * q.to(tl.float32), 1)
            dq += asked
        reader = tl.load(factors, mask=live, other=0.0)
        read *= reader[:, None]
        da -= tl.sum(read * k.to(tl.float32), 1)
        written *= tl.where(live, tl.exp(last - a) * k_norm, 0.0)[:, None]
        change = tl.sum(written * k.to(tl.float32), 1)
        dbeta += change
        change *= beta
        da -= change
        end = tl.sum(change, 0) + tl.sum(both, 0) * tl.exp(last)
        dk += written * beta[:, None] - read
        # g_t is in the sums of all tokens from t on, and in the sum at the chunk's end.
        dg = tl.sum(tl.where(seen, da[:, None], 0.0), 0) + end
        if dg_ptr is not None:
            tl.store(dg_ptr + token * H + h, dg.to(dg_ptr.dtype.element_ty), mask=live)
        if dbeta_ptr is not None:
            tl.store(dbeta_ptr + token * H + h, dbeta.to(dbeta_ptr.dtype.element_ty), mask=live)

    at = ((token * G + group) * K)[:, None] + row[None, :]
    stored = live[:, None] & (row < K)[None, :]
    if dq_ptr is not None:
        if NORMALIZE:
            wide = q.to(tl.float32)
            dq -= wide * (q_norm * q_norm * tl.sum(wide * dq, 1))[:, None]
        tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), mask=stored)
    if dk_ptr is not None:
        if NORMALIZE:
            wide = k.to(tl.float32)
            dk -= wide * (k_norm * k_norm * tl.sum(wide * dk, 1))[:, None]
        tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=stored)
