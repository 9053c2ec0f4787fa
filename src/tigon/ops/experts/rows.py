"""Move rows between tokens and experts: gather by expert, and sum by token in a fixed order."""

from __future__ import annotations

from torch import Tensor

from tigon.kernels import cdiv, do_not_specialize, jit, launch, next_power_of_2, tl
from tigon.ops.experts.routing import Routing

# ---------------------------------------------------------------------------------------------------------- kernels


# One program copies BLOCK_M rows × BLOCK_N columns. rows (T, N): tokens' rows with stride_rows. order, offsets:
# `Routing`. y (S, N): sorted by expert.
# The grid covers S rows. Rows beyond offsets[E] stay unwritten: the products compute on them and store none of the
# results.
# The copy costs a pass over memory; the products can then load full tiles through a descriptor. Each token's row is
# read K times by different programs, mostly from L2.
@jit
@do_not_specialize("E")
def _take_kernel(
    rows_ptr, order_ptr, offsets_ptr, y_ptr, E, N, stride_rows,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[i] = the token's row for the i-th choice in expert order."""
    blocks = tl.cdiv(N, BLOCK_N)
    i = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = i < tl.load(offsets_ptr + E)
    token = (tl.load(order_ptr + i, mask=exists, other=0) // TOP_K).to(tl.int64)
    mask = exists[:, None] & (cols < N)[None, :]
    row = tl.load(rows_ptr + token[:, None] * stride_rows + cols[None, :], mask=mask, other=0.0)
    tl.store(y_ptr + i[:, None] * N + cols[None, :], row, mask=mask)


# One program sums the K rows for BLOCK_T tokens × BLOCK_N columns in the order of k, in fp32, rounded once; adding into
# y by expert would need atomics and be nondeterministic.
# rows (S, N): sorted by expert. place (S,): −1 for choices outside [0, E). weights (T, K), or None in the backward
# pass, where the rows already include the weight.
@jit
@do_not_specialize("T")
def _token_sum_kernel(
    rows_ptr, place_ptr, weights_ptr, y_ptr, T, N, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """y[t] = Σ_k weight · rows[place], over the choices that have a place."""
    blocks = tl.cdiv(N, BLOCK_N)
    token = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (token < T)[:, None] & (cols < N)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for k in tl.static_range(TOP_K):
        place = tl.load(place_ptr + token * TOP_K + k, mask=token < T, other=-1).to(tl.int64)
        known = mask & (place >= 0)[:, None]
        row = tl.load(rows_ptr + place[:, None] * N + cols[None, :], mask=known, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            row *= tl.load(weights_ptr + token * TOP_K + k, mask=token < T, other=0.0).to(tl.float32)[:, None]
        total += tl.where(known, row, 0.0)  # 0 · weight is NaN if an unplaced choice has weight inf or NaN
    tl.store(y_ptr + token[:, None] * N + cols[None, :], total.to(y_ptr.dtype.element_ty), mask=mask)


# One program sums all rows of an expert × BLOCK_N columns, in order and in fp32: in bf16 a sum over thousands of rows
# would swallow its terms. An expert without rows gets zeros.
# rows: (S, N) sorted by expert; with weights (T, K), tokens' rows (T, N), addressed through `order` without a copy.
@jit
def _expert_sum_kernel(
    rows_ptr, order_ptr, weights_ptr, offsets_ptr, y_ptr, N, stride_rows,
    TOP_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[e] = Σ over the expert's rows, or Σ weight · token's row: a bias's gradient."""
    blocks = tl.cdiv(N, BLOCK_N)
    expert = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    total = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for r in range(start, end, BLOCK_R):
        rows = r + tl.arange(0, BLOCK_R)
        inside = rows < end
        mask = inside[:, None] & (cols < N)[None, :]
        if weights_ptr is not None:
            slot = tl.load(order_ptr + rows, mask=inside, other=0)
            rows = slot // TOP_K
            weight = tl.load(weights_ptr + slot, mask=inside, other=0.0).to(tl.float32)
        row = tl.load(rows_ptr + rows.to(tl.int64)[:, None] * stride_rows + cols[None, :], mask=mask, other=0.0)
        row = row.to(tl.float32)
        total += row * weight[:, None] if weights_ptr is not None else row
    tl.store(y_ptr + expert.to(tl.int64) * N + cols, tl.sum(total, 0).to(y_ptr.dtype.element_ty), mask=cols < N)


# One program writes BLOCK_S routing weights' gradients, gathered by `place` from expert order; choices without a place
# get 0.
# dots (S,): h · dh, sorted by expert. With a bias (E, D), dots lacks the bias's share, dy · bias, and dy (T, D) is read
# again for each choice; models without biases skip this.
@jit
@do_not_specialize("S")
def _weight_sum_kernel(
    dots_ptr, place_ptr, index_ptr, dy_ptr, bias_ptr, dweights_ptr, S, D, stride_dy,
    TOP_K: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dweights = h · dh per slot, plus dy · down_bias of the slot's expert."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    place = tl.load(place_ptr + slot, mask=slot < S, other=-1).to(tl.int64)
    known = place >= 0
    total = tl.load(dots_ptr + place, mask=known, other=0.0)
    if bias_ptr is not None:
        expert = tl.load(index_ptr + slot, mask=known, other=0).to(tl.int64)
        dot = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
        for first in range(0, D, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)
            mask = known[:, None] & (d < D)[None, :]
            dy = tl.load(dy_ptr + (slot // TOP_K)[:, None] * stride_dy + d[None, :], mask=mask, other=0.0)
            bias = tl.load(bias_ptr + expert[:, None] * D + d[None, :], mask=mask, other=0.0)
            dot += dy.to(tl.float32) * bias.to(tl.float32)
        total += tl.sum(dot, 1)
    tl.store(dweights_ptr + slot, total.to(dweights_ptr.dtype.element_ty), mask=slot < S)


# --------------------------------------------------------------------------------------------------------- launches


def _token_tile(N: int) -> tuple[int, int, dict[str, int]]:
    """Return tokens and columns per program, and Triton options: a thread loads 16 bytes from each of K rows."""
    block = min(1024, next_power_of_2(N))
    return 1024 // block, block, {"num_warps": 4}


def _take_tile(N: int) -> tuple[int, int, dict[str, int]]:
    """Return rows and columns per program, and Triton options: 64 bytes per thread."""
    block = min(1024, next_power_of_2(N))
    return 4096 // block, block, {"num_warps": 4}


def _expert_tile() -> tuple[int, int, dict[str, int]]:
    """Return rows per step, columns per program, and Triton options."""
    return 32, 64, {"num_warps": 4}


def _weight_tile(bias: Tensor | None) -> tuple[int, int, dict[str, int]]:
    """Return slots per program, columns of dy and the bias per step, and Triton options."""
    return (256, 16, {"num_warps": 4}) if bias is None else (16, 256, {"num_warps": 4})


def take(rows: Tensor, routing: Routing, y: Tensor, K: int) -> None:
    """Write the tokens' rows (T, N), a row for each choice sorted by expert, to y (S, N)."""
    S, N = y.shape
    if not y.numel():
        return
    block_m, block_n, options = _take_tile(N)
    E = routing.offsets.shape[0] - 1
    key = (S, E, N, K, rows.stride(0), rows.dtype)
    plan = cdiv(S, block_m) * cdiv(N, block_n), (E, N, rows.stride(0), K, block_m, block_n), options
    launch(_take_kernel, key, (rows, routing.order, routing.offsets, y), lambda: plan)


def token_sum(rows: Tensor, routing: Routing, weights: Tensor | None, y: Tensor, K: int) -> None:
    """Sum each token's rows (S, N) into y (T, N)."""
    T, N = y.shape
    if not y.numel():
        return
    block_t, block_n, options = _token_tile(N)
    key = (T, N, K, rows.dtype, None if weights is None else weights.dtype)
    plan = cdiv(T, block_t) * cdiv(N, block_n), (T, N, K, block_t, block_n), options
    launch(_token_sum_kernel, key, (rows, routing.place, weights, y), lambda: plan)


def expert_sum(rows: Tensor, routing: Routing, weights: Tensor | None, y: Tensor, K: int) -> None:
    """Sum each expert's rows into y (E, N): rows (S, N), or tokens' rows (T, N) times their weights."""
    E, N = y.shape
    if not y.numel():
        return
    block_r, block_n, options = _expert_tile()
    key = (E, N, K, rows.stride(0), rows.dtype, None if weights is None else weights.dtype)
    plan = E * cdiv(N, block_n), (N, rows.stride(0), K, block_r, block_n), options
    launch(_expert_sum_kernel, key, (rows, routing.order, weights, routing.offsets, y), lambda: plan)


def weight_sum(dots: Tensor, routing: Routing, index: Tensor, dy: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write the routing weights' gradient to out (T, K), given h · dh (S,) per sorted slot."""
    S, D = dots.shape[0], dy.shape[1]
    if not S:
        return
    block_s, block_d, options = _weight_tile(bias)
    key = (S, D, out.shape[1], dy.stride(0), dy.dtype, index.dtype, out.dtype, bias is None)
    arguments = (S, D, dy.stride(0), out.shape[1], block_s, block_d)
    plan = cdiv(S, block_s), arguments, options
    launch(_weight_sum_kernel, key, (dots, routing.place, index, dy, bias, out), lambda: plan)
