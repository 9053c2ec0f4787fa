"""Kernels of the causal convolution: a program walks over tokens and keeps the last inputs in registers.

Each input is read once, however many taps see it, and each gradient is written once. A tile of tokens and channels
would be read once per tap, and its backward once per pair of taps.

All kernels: channels are columns, BLOCK_C at a time. `x[t - lag]` meets the weight w[W - 1 - lag], so tuples of W
weights, and of W - 1 earlier inputs, go from the oldest tap to the latest.
  offsets (D + 1,), documents (T,)    the documents' starts, and the document of each token (D for none); None where
                                      each of B sequences is a document
  s (D, C, W - 1)                     the inputs before each document, with unit stride along C; None for zeros
"""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.ops.acts import silu


@jit
def _load_weights(w_ptr, cols, C, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """W vectors of the weight (C, W): one wide load, since a load for each tap would touch all its memory W times."""
    taps = tl.arange(0, BLOCK_W)
    mask = (cols < C)[:, None] & (taps < W)[None, :]
    tile = tl.load(w_ptr + cols[:, None] * W + taps[None, :], mask=mask, other=0.0).to(tl.float32)
    w = ()
    for tap in tl.static_range(W):
        w = w + (tl.sum(tl.where((taps == tap)[None, :], tile, 0.0), 1),)
    return w


@jit
def _find_position(offsets_ptr, documents_ptr, t, T, D, batch):
    """The document of token t, the token's position in it, the document's end, and whether t is in a document."""
    if documents_ptr is None:
        return batch, t, batch * 0 + T, t < T
    else:  # noqa: RET505
        document = tl.load(documents_ptr + t, mask=(t >= 0) & (t < T), other=D)
        start = tl.load(offsets_ptr + document, mask=document < D, other=0).to(tl.int64)
        end = tl.load(offsets_ptr + document + 1, mask=document < D, other=0).to(tl.int64)
        return document.to(tl.int64), t - start, end, (document < D) & (start <= t)


@jit
def _find_tap(earlier, s_ptr, documents_ptr, document, position, mask, stride_sw, LAG: tl.constexpr, W: tl.constexpr):
    """The input LAG tokens before one at this position: `earlier`, unless that belongs to another document.

    s_ptr: the address of each channel's state in document 0, and `document` the distance to this document's.
    """
    if documents_ptr is not None:
        earlier = tl.where(position >= LAG, earlier, 0.0)
    if s_ptr is not None:  # noqa: SIM102
        if position < LAG:
            at = s_ptr + document + (W - 1 + position - LAG) * stride_sw
            earlier = tl.load(at, mask=mask & (position >= 0), other=0.0).to(tl.float32)
    return earlier


# A program: ROWS tokens of one sequence. All loads come first and are independent of one another.
#   x, y        (B, T, C) with strides; y in x's dtype
#   w, b        (C, W) dense, (C,) or None
@jit
@do_not_specialize("T", "D")
def _causal_conv1d_fwd_kernel(
    x_ptr, w_ptr, b_ptr, s_ptr, offsets_ptr, documents_ptr, y_ptr, T, C, D,
    stride_xb, stride_xt, stride_xc, stride_sd, stride_sc, stride_sw, stride_yb, stride_yt, stride_yc,
    W: tl.constexpr, BLOCK_W: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, BLOCK_C)
    cols = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = cols < C
    spans = tl.cdiv(T, ROWS)
    span = tl.program_id(0) // blocks
    # int64: token · stride reaches 2**31 at 512k tokens of width 4096.
    batch = (span // spans).to(tl.int64)
    first = (span % spans).to(tl.int64) * ROWS
    x_ptr += batch * stride_xb + cols.to(tl.int64) * stride_xc
    y_ptr += batch * stride_yb + cols.to(tl.int64) * stride_yc
    if s_ptr is not None:
        s_ptr += cols.to(tl.int64) * stride_sc
    rows = ()
    for r in tl.static_range(1 - W, ROWS):
        t = first + r
        rows = rows + (tl.load(x_ptr + t * stride_xt, mask=mask & (t >= 0) & (t < T), other=0.0),)
    w = _load_weights(w_ptr, cols, C, W, BLOCK_W)
    if b_ptr is not None:
        b = tl.load(b_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    for r in tl.static_range(ROWS):
        t = first + r
        document, position, _, inside = _find_position(offsets_ptr, documents_ptr, t, T, D, batch)
        z = rows[r + W - 1].to(tl.float32) * w[W - 1]
        for lag in tl.static_range(1, W):
            earlier = rows[r + W - 1 - lag].to(tl.float32)
            tap = _find_tap(
                earlier, s_ptr, documents_ptr, document * stride_sd, position, mask & inside, stride_sw, lag, W
            )
            z += tap * w[W - 1 - lag]
        if b_ptr is not None:
            z += b
        if SILU:
            z, _ = silu(z)
        if documents_ptr is not None:
            z = tl.where(inside, z, float("nan"))
        tl.store(y_ptr + t * stride_yt, z.to(y_ptr.dtype.element_ty), mask=mask & (t < T))


# A program: `each` tokens of one sequence, ROWS at a time, and W - 1 further tokens, whose gradients reach back into
# its own. A token's dz is found once and added to the W gradients that it belongs to, of which the oldest is complete.
#   dy, x, dx       (B, T, C) with strides; dx None if not needed
#   ds              (D, W - 1, C) dense, gradient of the returned state; None without one
#   dw, db          (programs, C · W) and (programs, C) fp32 shares, added by sum_rows in a fixed order; a single
#                   program writes the gradients themselves. None if not needed
# dz = dy · act'(z), db = Σ dz; at lag l: dx_t = Σ_l dz_(t + l) · w[W - 1 - l], dw[W - 1 - l] = Σ_t dz_t · x_(t - l).
@jit
@do_not_specialize("T", "D", "each", "spans")
def _causal_conv1d_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, b_ptr, s_ptr, offsets_ptr, documents_ptr, ds_ptr, dx_ptr, dw_ptr, db_ptr, T, C, D, each,
    spans, stride_dyb, stride_dyt, stride_dyc, stride_xb, stride_xt, stride_xc, stride_sd, stride_sc, stride_sw,
    stride_dxb, stride_dxt, stride_dxc,
    W: tl.constexpr, BLOCK_W: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, BLOCK_C)
    cols = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = cols < C
    span = tl.program_id(0) // blocks
    batch = (span // spans).to(tl.int64)
    begin = (span % spans).to(tl.int64) * each
    stop = tl.minimum(begin + each, T)
    wide = cols.to(tl.int64)
    dy_ptr += batch * stride_dyb + wide * stride_dyc
    x_ptr += batch * stride_xb + wide * stride_xc
    if s_ptr is not None:
        s_ptr += wide * stride_sc
    if dx_ptr is not None:
        dx_ptr += batch * stride_dxb + wide * stride_dxc
    w = _load_weights(w_ptr, cols, C, W, BLOCK_W)
    if b_ptr is not None:
        b = tl.load(b_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    db = tl.zeros((BLOCK_C,), tl.float32)
    dw, earlier, open = (db,), (), ()  # open: the gradients of the last W - 1 tokens, still to be added to
    for r in tl.static_range(1 - W, 0):
        t = begin + r
        dw = dw + (db,)
        open = open + (db,)
        row = tl.load(x_ptr + t * stride_xt, mask=mask & (t >= 0) & (t < T), other=0.0)
        earlier = earlier + (row.to(tl.float32),)
    for chunk in range(begin, stop + W - 1, ROWS):
        rows, upstream = (), ()
        for r in tl.static_range(ROWS):
            t = chunk + r
            rows = rows + (tl.load(x_ptr + t * stride_xt, mask=mask & (t < T), other=0.0),)
            upstream = upstream + (tl.load(dy_ptr + t * stride_dyt, mask=mask & (t < T), other=0.0),)
        for r in tl.static_range(ROWS):
            t = chunk + r
            document, position, end, inside = _find_position(offsets_ptr, documents_ptr, t, T, D, batch)
            taps = ()
            for i in tl.static_range(W - 1):
                tap = _find_tap(
                    earlier[i], s_ptr, documents_ptr, document * stride_sd, position, mask & inside, stride_sw,
                    W - 1 - i, W,
                )  # fmt: skip
                taps = taps + (tap,)
            now = rows[r].to(tl.float32)
            taps = taps + (now,)
            earlier = earlier[1:] + (now,)
            dz = upstream[r].to(tl.float32)
            if SILU:
                z = now * w[W - 1]
                for i in tl.static_range(W - 1):
                    z += taps[i] * w[i]
                if b_ptr is not None:
                    z += b
                _, slope = silu(z)
                dz *= slope
            own = tl.where(t < stop, dz, 0.0)
            if dw_ptr is not None:
                sums = ()
                for i in tl.static_range(W):
                    sums = sums + (dw[i] + own * taps[i],)
                dw = sums
            if db_ptr is not None:
                db += own
            if dx_ptr is not None:
                last = dz * w[W - 1]
                if ds_ptr is not None:  # noqa: SIM102
                    if (end - t < W) & inside:
                        at = ds_ptr + (document * (W - 1) + (W - 1 - end + t)) * C + wide
                        last += tl.load(at, mask=mask & (end > t), other=0.0).to(tl.float32)
                added = ()
                for i in tl.static_range(W - 1):
                    part = dz * w[i]
                    if documents_ptr is not None:
                        part = tl.where(position >= W - 1 - i, part, 0.0)
                    added = added + (open[i] + part,)
                done = t - (W - 1)
                out = added[0].to(dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + done * stride_dxt, out, mask=mask & (done >= begin) & (done < stop))
                open = added[1:] + (last,)
    program = span.to(tl.int64)
    if dw_ptr is not None:
        for i in tl.static_range(W):
            at = dw_ptr + (program * C + wide) * W + i
            tl.store(at, dw[i].to(dw_ptr.dtype.element_ty), mask=mask)
    if db_ptr is not None:
        tl.store(db_ptr + program * C + wide, db.to(db_ptr.dtype.element_ty), mask=mask)


@jit
def _find_span(offsets_ptr, document, T):
    """A document's first token and length, and whether they lie within the T tokens."""
    if offsets_ptr is None:
        return document * 0, document * 0 + T, document >= 0
    else:  # noqa: RET505
        start = tl.load(offsets_ptr + document).to(tl.int64)
        length = tl.load(offsets_ptr + document + 1).to(tl.int64) - start
        return start, length, (start >= 0) & (length >= 0) & (start + length <= T)


# A program: the last W - 1 inputs of a document, BLOCK_C channels. out (D, C, W - 1) dense, in x's dtype.
@jit
@do_not_specialize("T")
def _state_fwd_kernel(
    x_ptr, s_ptr, offsets_ptr, out_ptr, T, C, stride_xb, stride_xt, stride_xc, stride_sd, stride_sc, stride_sw,
    W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, BLOCK_C)
    cols = (tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    mask = cols < C
    document = (tl.program_id(0) // blocks).to(tl.int64)
    start, length, right = _find_span(offsets_ptr, document, T)
    x_ptr += start * stride_xt + cols * stride_xc
    if offsets_ptr is None:
        x_ptr += document * stride_xb
    for i in tl.static_range(W - 1):
        position = length - (W - 1) + i
        value = tl.load(x_ptr + position * stride_xt, mask=mask & right & (position >= 0), other=0.0).to(tl.float32)
        if s_ptr is not None:
            at = s_ptr + document * stride_sd + cols * stride_sc + (W - 1 + position) * stride_sw
            before = tl.load(at, mask=mask & right & (position < 0), other=0.0)
            value = tl.where(position < 0, before.to(tl.float32), value)
        value = tl.where(right, value, float("nan"))
        tl.store(out_ptr + (document * C + cols) * (W - 1) + i, value.to(out_ptr.dtype.element_ty), mask=mask)


# A program: the gradient of a document's initial state, BLOCK_C channels. The state is seen by the first W - 1 tokens,
# whose dz is found again, and by the returned state of a shorter document.
#   ds, ds0     (D, W - 1, C) and (D, C, W - 1) dense: gradients of the returned state (or None), and of the initial one
@jit
@do_not_specialize("T")
def _state_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, b_ptr, s_ptr, offsets_ptr, ds_ptr, ds0_ptr, T, C, stride_dyb, stride_dyt, stride_dyc,
    stride_xb, stride_xt, stride_xc, stride_sd, stride_sc, stride_sw,
    W: tl.constexpr, BLOCK_W: tl.constexpr, SILU: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, BLOCK_C)
    cols = (tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    mask = cols < C
    document = (tl.program_id(0) // blocks).to(tl.int64)
    start, length, right = _find_span(offsets_ptr, document, T)
    x_ptr += start * stride_xt + cols * stride_xc
    dy_ptr += start * stride_dyt + cols * stride_dyc
    if offsets_ptr is None:
        x_ptr += document * stride_xb
        dy_ptr += document * stride_dyb
    s_ptr += document * stride_sd + cols * stride_sc
    w = _load_weights(w_ptr, cols, C, W, BLOCK_W)
    if b_ptr is not None:
        b = tl.load(b_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    # The state and the first tokens behind it, and the gradients of the former.
    inputs, grads = (), ()
    for i in tl.static_range(W - 1):
        inputs = inputs + (tl.load(s_ptr + i * stride_sw, mask=mask, other=0.0).to(tl.float32),)
        grad = tl.zeros((BLOCK_C,), tl.float32)
        if ds_ptr is not None:
            at = ds_ptr + (document * (W - 1) + (i - length)) * C + cols
            grad += tl.load(at, mask=mask & right & (i >= length), other=0.0).to(tl.float32)
        grads = grads + (grad,)
    for t in tl.static_range(W - 1):
        there = mask & right & (t < length)
        inputs = inputs + (tl.load(x_ptr + t * stride_xt, mask=there, other=0.0).to(tl.float32),)
        dz = tl.load(dy_ptr + t * stride_dyt, mask=there, other=0.0).to(tl.float32)
        if SILU:
            z = tl.zeros((BLOCK_C,), tl.float32)
            for i in tl.static_range(W):
                z += inputs[t + i] * w[i]
            if b_ptr is not None:
                z += b
            _, slope = silu(z)
            dz *= slope
        added = ()
        for i in tl.static_range(W - 1):
            if i >= t:  # token t sees the state's inputs t, …, W - 2
                added = added + (grads[i] + dz * w[i - t],)
            else:
                added = added + (grads[i],)
        grads = added
    for i in tl.static_range(W - 1):
        at = ds0_ptr + (document * C + cols) * (W - 1) + i
        tl.store(at, grads[i].to(ds0_ptr.dtype.element_ty), mask=mask)
