"""The products of matrices of grouped rows: kernels that read the rows of tokens where they lie.

Two kinds. Rows of one expert by its weight: a program takes a tile of an expert's sorted rows, which routing.py lists,
and a block of columns. Rows of one expert by rows of the same, for the gradient of its weight: a program takes a block
of the weight and walks over all rows. Programs are numbered such that those that run at a time share tiles in L2.
"""

from __future__ import annotations

from tigon.backend import tl, triton
from tigon.ops.gated import _act


@triton.jit
def _tile(
    tiles_ptr, offsets_ptr, M_TILES, TILES, BLOCKS, E, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """This program's expert (E: none), its rows, which of them exist, and its block of columns."""
    pid = tl.program_id(0)
    first = pid // (GROUP * BLOCKS) * GROUP
    size = tl.minimum(M_TILES - first, GROUP)
    within = pid % (GROUP * BLOCKS)
    tile = first + within % size
    expert = tl.load(tiles_ptr + tile)
    start = tl.load(tiles_ptr + TILES + tile)
    end = tl.load(offsets_ptr + tl.minimum(expert + 1, E))
    rows = start + tl.arange(0, BLOCK_M)
    return expert, start, rows, rows < end, within // size


@triton.jit
def _dot_rows(
    a_ptrs, w_ptrs, w_mask, K, stride_wk, acc, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """acc + A · W over K, of BLOCK_K at a time. a_ptrs: (M, BLOCK_K), unit stride along K. w_ptrs: (BLOCK_K, N)."""
    ks = tl.arange(0, BLOCK_K)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs)
            w = tl.load(w_ptrs, mask=w_mask[None, :], other=0.0)
        else:
            a = tl.load(a_ptrs, mask=(ks < K - k)[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=(ks < K - k)[:, None] & w_mask[None, :], other=0.0)
        acc = tl.dot(a, w, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * stride_wk
    return acc


@triton.jit
def _halves(t):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(t, (t.shape[0], 2, t.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _parts(t, PARTS: tl.constexpr):
    """One, two or four parts of the columns, from left to right."""
    if PARTS == 1:
        parts = (t,)
    elif PARTS == 2:
        parts = _halves(t)
    else:
        left, right = _halves(t)
        parts = _halves(left) + _halves(right)
    return parts


@triton.jit
def _unit(
    gate, up, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr
):  # fmt: skip
    """h = act(α · gate) / α · (up + offset), gate and up held to the limit, and dh/dgate, dh/dup."""
    held_gate, held_up = gate, up
    if LIMIT is not None:  # comparisons, unlike minimum and maximum, let NaN through on every GPU
        held_gate = tl.where(gate > LIMIT, LIMIT, gate)
        held_up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if ALPHA == 1.0:
        a, da = _act(held_gate, ACT)
    else:
        a, da = _act(held_gate * ALPHA, ACT)
        a = a * (1.0 / ALPHA)
    dgate = (held_up + UP_OFFSET) * da
    dup = a
    if LIMIT is not None:
        dgate = tl.where(gate > LIMIT, 0.0, dgate)
        dup = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, dup)
    return a * (held_up + UP_OFFSET), dgate, dup


@triton.jit
def _unit_fwd(
    z, rows, inside, block, N, z_ptr, h_ptr, ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store z, where it is wanted, and h of BLOCK_N columns."""
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
    stored = inside[:, None] & (cols < N)[None, :]
    row = rows.to(tl.int64)[:, None] * N
    if GATED:
        if PAIRS:
            gate, up = tl.split(tl.reshape(z, (z.shape[0], BLOCK_N, 2)))
        else:
            gate, up = tl.split(tl.permute(tl.reshape(z, (z.shape[0], 2, BLOCK_N)), (0, 2, 1)))
        if z_ptr is not None:
            if INTERLEAVED:
                pair = 2 * block * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
                pairs = inside[:, None] & (pair < 2 * N)[None, :]
                tl.store(z_ptr + 2 * row + pair[None, :], z.to(z_ptr.dtype.element_ty), mask=pairs)
            else:
                tl.store(z_ptr + 2 * row + cols[None, :], gate.to(z_ptr.dtype.element_ty), mask=stored)
                tl.store(z_ptr + 2 * row + N + cols[None, :], up.to(z_ptr.dtype.element_ty), mask=stored)
        h, _, _ = _unit(gate, up, ACT, ALPHA, LIMIT, UP_OFFSET)
    else:
        if z_ptr is not None:
            tl.store(z_ptr + row + cols[None, :], z.to(z_ptr.dtype.element_ty), mask=stored)
        h, _ = _act(z, ACT)
    tl.store(h_ptr + row + cols[None, :], h.to(h_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["M_TILES", "TILES", "TOP_K"])
def _gate_up_fwd_kernel(
    x_ptr, w_ptr, bias_ptr, order_ptr, tiles_ptr, offsets_ptr, z_ptr, h_ptr,
    M_TILES, TILES, E, N, D, BLOCKS, TOP_K, stride_x, stride_we, stride_wn, stride_wk,
    ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, PAIRS: tl.constexpr, PARTS: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """z = x[token] · gate_upᵀ + bias, and h, of BLOCK_N of its columns: one product for gate and up together.

    PAIRS: gate and up alternate in the product's columns, as the two that a thread holds side by side: to take them
    apart moves nothing. Else, where the weight is contiguous along the columns, one half of them is gate, the other up.
    """
    expert, start, rows, inside, block = _tile(tiles_ptr, offsets_ptr, M_TILES, TILES, BLOCKS, E, GROUP, BLOCK_M)
    if expert >= E:
        return
    # Rows beyond the expert's last stand for its first: what they give is not stored.
    token = tl.load(order_ptr + tl.where(inside, rows, start)) // TOP_K
    ks = tl.arange(0, BLOCK_K)
    if GATED:
        pair = tl.arange(0, 2 * BLOCK_N)
        if INTERLEAVED:
            wide = 2 * block * BLOCK_N + pair
            mask = wide < 2 * N
        elif PAIRS:
            wide = block * BLOCK_N + pair // 2
            mask = wide < N
            wide += pair % 2 * N
        else:
            wide = block * BLOCK_N + pair % BLOCK_N
            mask = wide < N
            wide += pair // BLOCK_N * N
    else:
        wide = block * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = wide < N
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * stride_x + ks[None, :]
    w_ptr += expert.to(tl.int64) * stride_we
    w_ptrs = w_ptr + wide.to(tl.int64)[None, :] * stride_wn + ks[:, None] * stride_wk
    acc = tl.zeros((BLOCK_M, 2 * BLOCK_N if GATED else BLOCK_N), tl.float32)
    acc = _dot_rows(x_ptrs, w_ptrs, mask, D, stride_wk, acc, BLOCK_K, EVEN_K, PRECISION)
    if bias_ptr is not None:
        width = 2 * N if GATED else N
        acc += tl.load(bias_ptr + expert * width + wide, mask=mask, other=0.0).to(tl.float32)[None, :]
    parts = _parts(acc, PARTS)  # one after the other: the activation of all of them would not fit beside acc
    for i in tl.static_range(PARTS):
        _unit_fwd(
            parts[i], rows, inside, block * PARTS + i, N, z_ptr, h_ptr, ACT, GATED, INTERLEAVED, ALPHA, LIMIT,
            UP_OFFSET, PAIRS, BLOCK_N // PARTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M_TILES", "TILES"])
def _rows_kernel(
    a_ptr, w_ptr, bias_ptr, tiles_ptr, offsets_ptr, y_ptr,
    M_TILES, TILES, E, N, K, BLOCKS, stride_we, stride_wn, stride_wk,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y = a · wᵀ + bias, of sorted rows: the product with `down`, and with gate_up on the way back."""
    expert, start, rows, inside, block = _tile(tiles_ptr, offsets_ptr, M_TILES, TILES, BLOCKS, E, GROUP, BLOCK_M)
    if expert >= E:
        return
    ks = tl.arange(0, BLOCK_K)
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N
    a_ptrs = a_ptr + tl.where(inside, rows, start).to(tl.int64)[:, None] * K + ks[None, :]
    w_ptr += expert.to(tl.int64) * stride_we
    w_ptrs = w_ptr + cols.to(tl.int64)[None, :] * stride_wn + ks[:, None] * stride_wk
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = _dot_rows(a_ptrs, w_ptrs, mask, K, stride_wk, acc, BLOCK_K, EVEN_K, PRECISION)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * N + cols, mask=mask, other=0.0).to(tl.float32)[None, :]
    y_ptr += rows.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(y_ptr, acc.to(y_ptr.dtype.element_ty), mask=inside[:, None] & mask[None, :])


@triton.jit
def _unit_bwd(
    dh, weight, rows, inside, block, N, z_ptr, dz_ptr, h_ptr, ACT: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store dz and weight · h of BLOCK_N columns; return h · dh of each row."""
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N
    stored = inside[:, None] & mask[None, :]
    row = rows.to(tl.int64)[:, None] * N
    if GATED:
        pair = 2 * block * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
        pairs = inside[:, None] & (pair < 2 * N)[None, :]
        if INTERLEAVED:
            z = tl.load(z_ptr + 2 * row + pair[None, :], mask=pairs, other=0.0)
            gate, up = tl.split(tl.reshape(z, (dh.shape[0], BLOCK_N, 2)))  # still narrow: half the registers
            gate, up = gate.to(tl.float32), up.to(tl.float32)
        else:
            gate = tl.load(z_ptr + 2 * row + cols[None, :], mask=stored, other=0.0).to(tl.float32)
            up = tl.load(z_ptr + 2 * row + N + cols[None, :], mask=stored, other=0.0).to(tl.float32)
        h, dgate, dup = _unit(gate, up, ACT, ALPHA, LIMIT, UP_OFFSET)
    else:
        z = tl.load(z_ptr + row + cols[None, :], mask=stored, other=0.0).to(tl.float32)
        h, dgate = _act(z, ACT)
    dots = tl.sum(tl.where(mask[None, :], h * dh, 0.0), 1)
    if h_ptr is not None:
        tl.store(h_ptr + row + cols[None, :], (h * weight[:, None]).to(h_ptr.dtype.element_ty), mask=stored)
    if dz_ptr is not None:
        dh *= weight[:, None]
        if GATED:
            if INTERLEAVED:
                dtype = dz_ptr.dtype.element_ty
                dz = tl.join((dh * dgate).to(dtype), (dh * dup).to(dtype))
                dz = tl.reshape(dz, (dh.shape[0], 2 * BLOCK_N))
                tl.store(dz_ptr + 2 * row + pair[None, :], dz, mask=pairs)
            else:
                dz_ptr += 2 * row + cols[None, :]
                tl.store(dz_ptr, (dh * dgate).to(dz_ptr.dtype.element_ty), mask=stored)
                tl.store(dz_ptr + N, (dh * dup).to(dz_ptr.dtype.element_ty), mask=stored)
        else:
            tl.store(dz_ptr + row + cols[None, :], (dh * dgate).to(dz_ptr.dtype.element_ty), mask=stored)
    return dots


@triton.jit(do_not_specialize=["M_TILES", "TILES", "TOP_K"])
def _down_bwd_kernel(
    dy_ptr, w_ptr, z_ptr, weights_ptr, order_ptr, tiles_ptr, offsets_ptr, dz_ptr, h_ptr, dots_ptr,
    M_TILES, TILES, E, N, D, BLOCKS, TOP_K, stride_dy, stride_we, stride_wn, stride_wk,
    ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, PARTS: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """From dy[token] · down, with h computed again from z: dz; weight · h, whose product with dy is d down; and the
    share of these columns in h · (dy · down), the gradient of the routing weight. What is None is not wanted."""
    expert, start, rows, inside, block = _tile(tiles_ptr, offsets_ptr, M_TILES, TILES, BLOCKS, E, GROUP, BLOCK_M)
    if expert >= E:
        return
    slot = tl.load(order_ptr + tl.where(inside, rows, start))
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N
    dh = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if (dz_ptr is not None) or (dots_ptr is not None):
        ks = tl.arange(0, BLOCK_K)
        dy_ptrs = dy_ptr + (slot // TOP_K).to(tl.int64)[:, None] * stride_dy + ks[None, :]
        w_ptr += expert.to(tl.int64) * stride_we
        w_ptrs = w_ptr + cols.to(tl.int64)[None, :] * stride_wn + ks[:, None] * stride_wk
        dh = _dot_rows(dy_ptrs, w_ptrs, mask, D, stride_wk, dh, BLOCK_K, EVEN_K, PRECISION)
    weight = tl.load(weights_ptr + slot).to(tl.float32)
    # One part of the columns after the other: all of gate, up and their gradients do not fit beside dh into registers.
    parts = _parts(dh, PARTS)
    dots = tl.zeros((BLOCK_M,), tl.float32)
    for i in tl.static_range(PARTS):
        dots += _unit_bwd(
            parts[i], weight, rows, inside, block * PARTS + i, N, z_ptr, dz_ptr, h_ptr, ACT, GATED, INTERLEAVED, ALPHA,
            LIMIT, UP_OFFSET, BLOCK_N // PARTS,
        )  # fmt: skip
    if dots_ptr is not None:
        tl.store(dots_ptr + rows.to(tl.int64) * BLOCKS + block, dots, mask=inside)


@triton.jit
def _weight_bwd_kernel(
    a_ptr, b_ptr, order_ptr, offsets_ptr, dw_ptr, M, N, BLOCKS_M, BLOCKS_N, stride_a, stride_b, stride_we, stride_wm,
    TOP_K: tl.constexpr, TOKENS_A: tl.constexpr, TOKENS_B: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dw[expert] = Σ over its rows of aᵀ b. TOKENS_A, TOKENS_B: whose rows are those of tokens, not sorted ones."""
    pid = tl.program_id(0)
    expert = pid // (BLOCKS_M * BLOCKS_N)
    pid = pid % (BLOCKS_M * BLOCKS_N)
    first = pid // (GROUP * BLOCKS_N) * GROUP
    size = tl.minimum(BLOCKS_M - first, GROUP)
    within = pid % (GROUP * BLOCKS_N)
    ms = (first + within % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    ns = within // size * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for r in range(start, end, BLOCK_R):
        rows = r + tl.arange(0, BLOCK_R)
        inside = rows < end
        row_a, row_b = rows, rows
        if TOKENS_A or TOKENS_B:
            token = tl.load(order_ptr + rows, mask=inside, other=0) // TOP_K
            if TOKENS_A:
                row_a = token
            else:
                row_b = token
        a_ptrs = a_ptr + row_a.to(tl.int64)[:, None] * stride_a + ms[None, :]
        b_ptrs = b_ptr + row_b.to(tl.int64)[:, None] * stride_b + ns[None, :]
        a = tl.load(a_ptrs, mask=inside[:, None] & (ms < M)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=inside[:, None] & (ns < N)[None, :], other=0.0)
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
    dw_ptr += expert.to(tl.int64) * stride_we + ms.to(tl.int64)[:, None] * stride_wm + ns[None, :]
    tl.store(dw_ptr, acc.to(dw_ptr.dtype.element_ty), mask=(ms < M)[:, None] & (ns < N)[None, :])
