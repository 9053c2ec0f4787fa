"""Kernels that walk through the chunks of a document: the state forward, and the state's gradient backward.

Only these walks are sequential. BLOCK_V columns of the state are independent of the others, and stay in registers.
The names are those of chunks.py.
"""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.ops.gated_delta_rule.chunks import find_document, load_square, load_tile


@jit
def _at_state(slot, h, first, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
              BLOCK_V: tl.constexpr):  # fmt: skip
    """Return offsets of a state's columns in (slots, H, K, V), and which lie inside."""
    row, column = tl.arange(0, BLOCK_K), first + tl.arange(0, BLOCK_V)
    at = (slot.to(tl.int64) * H + h) * (K * V) + row[:, None] * V + column[None, :]
    return at, (row < K)[:, None] & (column < V)[None, :]


# One program walks through document d for head h and BLOCK_V values.
# q, k: strides (t, g); v: strides (t, h). initial, final (D, H, K, V). o, x: dense (tokens, H, V). states (slots, H, K,
# V) in q's dtype: S at each chunk's start. skip (H,) or None: how much of v is in the outputs. Without o no
# outputs are computed.
@jit
@do_not_specialize("D", "T", "tokens")
def _states_kernel(
    q_ptr, k_ptr, v_ptr, solve_ptr, attend_ptr, factors_ptr, skip_ptr, table_ptr, initial_ptr, o_ptr, x_ptr,
    states_ptr, final_ptr, D, T, tokens, stride_qt, stride_qg, stride_kt, stride_kg, stride_vt, stride_vh,
    H: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk forward: x, the states and the outputs."""
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    first = tl.program_id(0) % BLOCKS * BLOCK_V
    h = tl.program_id(0) // BLOCKS % H
    d = tl.program_id(0) // (BLOCKS * H)
    start, stop, slot, wrong = find_document(table_ptr, d, T, CHUNK)
    S = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    at_d, inside = _at_state(d, h, first, H, K, V, BLOCK_K, BLOCK_V)
    if initial_ptr is not None:
        S += tl.load(initial_ptr + at_d, mask=inside, other=0.0).to(tl.float32)
    if table_ptr is not None:
        S = tl.where(wrong > 0, float("nan"), S)
    i = tl.arange(0, CHUNK)
    q_ptr += h // N * stride_qg
    k_ptr += h // N * stride_kg
    v_ptr += h * stride_vh
    stride = tl.cast(tokens, tl.int64) * H
    factors_ptr += tl.cast(h, tl.int64) * tokens
    for n in range(start, stop, CHUNK):
        live = n + i < stop
        token = (n + i).to(tl.int64)
        k = load_tile(k_ptr, token * stride_kt, live, 0, K, BLOCK_K)
        v = load_tile(v_ptr, token * stride_vt, live, first, V, BLOCK_V)
        if solve_ptr is not None:
            w = load_square(solve_ptr, slot, H, h, CHUNK)
        reader = tl.load(factors_ptr + token, mask=live, other=0.0)
        writer = tl.load(factors_ptr + stride + token, mask=live, other=0.0)
        fade = tl.exp(tl.load(factors_ptr + 3 * stride + tl.minimum(n + CHUNK, stop) - 1))
        narrow = S.to(k.dtype)
        if states_ptr is not None:
            at, _ = _at_state(slot, h, first, H, K, V, BLOCK_K, BLOCK_V)
            tl.store(states_ptr + at, narrow, mask=inside)
        x = v.to(tl.float32)
        if solve_ptr is not None:
            x -= tl.dot(k, narrow, input_precision=PRECISION) * reader[:, None]
            x = tl.dot(w, x.to(k.dtype), x, input_precision=PRECISION)
        column = first + tl.arange(0, BLOCK_V)
        at = ((token * H + h) * V)[:, None] + column[None, :]
        stored = live[:, None] & (column < V)[None, :]
        if x_ptr is not None:
            tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=stored)
        if o_ptr is not None:
            q = load_tile(q_ptr, token * stride_qt, live, 0, K, BLOCK_K)
            p = load_square(attend_ptr, slot, H, h, CHUNK)
            query = tl.load(factors_ptr + 2 * stride + token, mask=live, other=0.0)
            o = tl.dot(q, narrow, input_precision=PRECISION) * query[:, None]
            o = tl.dot(p, x.to(k.dtype), o, input_precision=PRECISION)
            if skip_ptr is not None:
                o += x * tl.load(skip_ptr + h).to(tl.float32)
            tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty), mask=stored)
        S = tl.dot(tl.trans(k), (x * writer[:, None]).to(k.dtype), S * fade, input_precision=PRECISION)
        slot += 1
    if final_ptr is not None:
        tl.store(final_ptr + at_d, S, mask=inside)


# One program walks back through document d for head h and BLOCK_V values.
# q, k: strides (t, g); do: strides (t, h), or None. dfinal, dinitial (D, H, K, V). dv: dense (tokens, H, V), which is
# the gradient of y and x. dstates (slots, H, K, V) in q's dtype: the gradient of S at each chunk's end.
@jit
@do_not_specialize("D", "T", "tokens")
def _reverse_kernel(
    q_ptr, k_ptr, do_ptr, solve_ptr, attend_ptr, factors_ptr, skip_ptr, table_ptr, dfinal_ptr, dv_ptr, dstates_ptr,
    dinitial_ptr, D, T, tokens, stride_qt, stride_qg, stride_kt, stride_kg, stride_dt, stride_dh,
    H: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk backward: dv, and the gradients of the states."""
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    first = tl.program_id(0) % BLOCKS * BLOCK_V
    h = tl.program_id(0) // BLOCKS % H
    d = tl.program_id(0) // (BLOCKS * H)
    start, stop, slot, wrong = find_document(table_ptr, d, T, CHUNK)
    chunks = tl.cdiv(stop - start, CHUNK)
    dS = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    at_d, inside = _at_state(d, h, first, H, K, V, BLOCK_K, BLOCK_V)
    if dfinal_ptr is not None:
        dS += tl.load(dfinal_ptr + at_d, mask=inside, other=0.0)
    if table_ptr is not None:
        dS = tl.where(wrong > 0, float("nan"), dS)
    i = tl.arange(0, CHUNK)
    column = first + tl.arange(0, BLOCK_V)
    q_ptr += h // N * stride_qg
    k_ptr += h // N * stride_kg
    if do_ptr is not None:
        do_ptr += h * stride_dh
    stride = tl.cast(tokens, tl.int64) * H
    factors_ptr += tl.cast(h, tl.int64) * tokens
    for back in range(chunks):
        n = start + (chunks - 1 - back) * CHUNK
        own = slot + (chunks - 1 - back)
        live = n + i < stop
        token = (n + i).to(tl.int64)
        k = load_tile(k_ptr, token * stride_kt, live, 0, K, BLOCK_K)
        if solve_ptr is not None:
            w = load_square(solve_ptr, own, H, h, CHUNK)
        reader = tl.load(factors_ptr + token, mask=live, other=0.0)
        writer = tl.load(factors_ptr + stride + token, mask=live, other=0.0)
        fade = tl.exp(tl.load(factors_ptr + 3 * stride + tl.minimum(n + CHUNK, stop) - 1))
        narrow = dS.to(k.dtype)
        if dstates_ptr is not None:
            at, _ = _at_state(own, h, first, H, K, V, BLOCK_K, BLOCK_V)
            tl.store(dstates_ptr + at, narrow, mask=inside)
        dx = tl.dot(k, narrow, input_precision=PRECISION) * writer[:, None]
        if do_ptr is not None:
            do = load_tile(do_ptr, token * stride_dt, live, first, V, BLOCK_V)
            p = load_square(attend_ptr, own, H, h, CHUNK)
            dx = tl.dot(tl.trans(p), do, dx, input_precision=PRECISION)
            if skip_ptr is not None:
                dx += do.to(tl.float32) * tl.load(skip_ptr + h).to(tl.float32)
        if solve_ptr is not None:
            dx = tl.dot(tl.trans(w), dx.to(k.dtype), dx, input_precision=PRECISION)
        at = ((token * H + h) * V)[:, None] + column[None, :]
        tl.store(dv_ptr + at, dx.to(dv_ptr.dtype.element_ty), mask=live[:, None] & (column < V)[None, :])
        dS *= fade
        if solve_ptr is not None:
            dS = tl.dot(tl.trans(k), (dx * -reader[:, None]).to(k.dtype), dS, input_precision=PRECISION)
        if do_ptr is not None:
            q = load_tile(q_ptr, token * stride_qt, live, 0, K, BLOCK_K)
            query = tl.load(factors_ptr + 2 * stride + token, mask=live, other=0.0)
            change = (do.to(tl.float32) * query[:, None]).to(k.dtype)
            dS = tl.dot(tl.trans(q), change, dS, input_precision=PRECISION)
    if dinitial_ptr is not None:
        tl.store(dinitial_ptr + at_d, dS.to(dinitial_ptr.dtype.element_ty), mask=inside)
