"""Rows between tokens and experts: copied out by expert, and summed back by token in a fixed order."""

from __future__ import annotations

from torch import Tensor

from tigon.kernels import cdiv, do_not_specialize, jit, launch, next_power_of_2, tl
from tigon.ops.experts.routing import Routing

# ---------------------------------------------------------------------------------------------------------- kernels


@jit
@do_not_specialize("E")
def _take_kernel(
    rows_ptr, order_ptr, offsets_ptr, y_ptr, E, N, stride_rows,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[i] = the row of the token whose choice is the i-th, in the order of experts."""
    blocks = tl.cdiv(N, BLOCK_N)
    # int64: S · D exceeds 2**31 at 512k slots of width 4096.
    i = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    # Sized for S slots; choices without an expert have no place, and only the device knows their number.
    exists = i < tl.load(offsets_ptr + E)
    # A slot is token · K + choice.
    token = (tl.load(order_ptr + i, mask=exists, other=0) // TOP_K).to(tl.int64)
    # Rows beyond the last expert's stay unwritten: the products compute with whatever lies there, and store none of it.
    mask = exists[:, None] & (cols < N)[None, :]
    # Each token's row is read K times, by different programs: from memory once or a few times, else from L2.
    row = tl.load(rows_ptr + token[:, None] * stride_rows + cols[None, :], mask=mask, other=0.0)
    # The copy costs a pass over memory; the products then read whole tiles, which a descriptor can load.
    tl.store(y_ptr + i[:, None] * N + cols[None, :], row, mask=mask)


@jit
@do_not_specialize("T")
def _token_sum_kernel(
    rows_ptr, place_ptr, weights_ptr, y_ptr, T, N, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """y[t] = Σ_k weight · rows[place], over the choices that have a place."""
    blocks = tl.cdiv(N, BLOCK_N)
    # Tokens of a program are neighbours, but their K rows lie in K experts' parts of the workspace: BLOCK_T · K
    # independent loads hide their latency.
    token = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (token < T)[:, None] & (cols < N)[None, :]
    # K rows in the order of k, in fp32: adding into y would take atomics, and give other bits on every run.
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    # Unrolled, so that the loads of all K rows can be on their way together.
    for k in tl.static_range(TOP_K):
        # -1: a choice outside [0, E), which no expert takes.
        place = tl.load(place_ptr + token * TOP_K + k, mask=token < T, other=-1).to(tl.int64)
        # The mask also keeps -1 from being used as a row.
        known = mask & (place >= 0)[:, None]
        row = tl.load(rows_ptr + place[:, None] * N + cols[None, :], mask=known, other=0.0).to(tl.float32)
        # None in the backward pass: dz had the weight, and so have its rows.
        if weights_ptr is not None:
            row *= tl.load(weights_ptr + token * TOP_K + k, mask=token < T, other=0.0).to(tl.float32)[:, None]
        total += tl.where(known, row, 0.0)  # 0 · weight would keep an inf or NaN weight of a choice without a place
    # Rounded once, after the last of the K rows.
    tl.store(y_ptr + token[:, None] * N + cols[None, :], total.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _expert_sum_kernel(
    rows_ptr, order_ptr, weights_ptr, offsets_ptr, y_ptr, N, stride_rows,
    TOP_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[e] = Σ over the expert's rows; with weights, Σ weight · token's row. The gradient of a bias."""
    blocks = tl.cdiv(N, BLOCK_N)
    # One program walks all rows of an expert: their number is known on the device alone, and the order stays fixed.
    expert = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    # An expert without rows has start = end, and stores zeros.
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    # BLOCK_R sums for each column: rows are loaded many at a time, and added to each other once, at the end.
    total = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for r in range(start, end, BLOCK_R):
        rows = r + tl.arange(0, BLOCK_R)
        inside = rows < end
        # The tile's last rows may be the next expert's: they are masked, not just out of range.
        mask = inside[:, None] & (cols < N)[None, :]
        if weights_ptr is not None:
            # Tokens' rows are found through the order, without a copy of them by expert.
            slot = tl.load(order_ptr + rows, mask=inside, other=0)
            # The bias of `down` is added to the expert's output before the routing weight: its gradient is Σ weight ·
            # dy.
            rows = slot // TOP_K
            weight = tl.load(weights_ptr + slot, mask=inside, other=0.0).to(tl.float32)
        row = tl.load(rows_ptr + rows.to(tl.int64)[:, None] * stride_rows + cols[None, :], mask=mask, other=0.0)
        row = row.to(tl.float32)
        # In fp32: a bias's gradient sums thousands of rows, and in bf16 a long sum would swallow its terms.
        total += row * weight[:, None] if weights_ptr is not None else row
    tl.store(y_ptr + expert.to(tl.int64) * N + cols, tl.sum(total, 0).to(y_ptr.dtype.element_ty), mask=cols < N)


@jit
@do_not_specialize("S")
def _weight_sum_kernel(
    dots_ptr, place_ptr, index_ptr, dy_ptr, bias_ptr, dweights_ptr, S, D, stride_dy,
    TOP_K: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradient of each routing weight: h · dh of its slot, plus dy · down_bias of its expert."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    place = tl.load(place_ptr + slot, mask=slot < S, other=-1).to(tl.int64)
    known = place >= 0
    # An unknown place gives a gradient of 0, as that choice added nothing.
    # A gather by place turns the experts' order into the tokens': every slot is written once, by its own program.
    total = tl.load(dots_ptr + place, mask=known, other=0.0)
    if bias_ptr is not None:
        expert = tl.load(index_ptr + slot, mask=known, other=0).to(tl.int64)
        # The bias is added after the product and weighted with it, but h · dh, taken before it, lacks its share.
        # dy is read once more, for every choice of its token. Models without biases, which are most, do not pay for it.
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
    """Tokens and columns a program: a thread loads 16 bytes of each of K rows."""
    block = min(1024, next_power_of_2(N))
    # 8 numbers a thread, so that the K rows in flight fit into registers.
    return 1024 // block, block, {"num_warps": 4}


def _take_tile(N: int) -> tuple[int, int, dict[str, int]]:
    """Rows and columns a program: 64 bytes a thread."""
    block = min(1024, next_power_of_2(N))
    return 4096 // block, block, {"num_warps": 4}


def _expert_tile() -> tuple[int, int, dict[str, int]]:
    """Rows that are loaded at a time, and columns of a program."""
    # Narrow blocks of columns: there are only E · N / 64 programs, each of which walks a long column.
    return 32, 64, {"num_warps": 4}


def _weight_tile(bias: Tensor | None) -> tuple[int, int, dict[str, int]]:
    """Slots a program, and columns of dy and the bias at a time."""
    # Without a bias a slot is one gather; with one, it is a row of D numbers.
    return (256, 16, {"num_warps": 4}) if bias is None else (16, 256, {"num_warps": 4})


def take(rows: Tensor, routing: Routing, y: Tensor, K: int) -> None:
    """Write the rows of tokens (T, N), one for each choice and sorted by expert, to y (S, N)."""
    S, N = y.shape
    if not y.numel():
        return
    block_m, block_n, options = _take_tile(N)
    E = routing.offsets.shape[0] - 1
    key = (S, E, N, K, rows.stride(0), rows.dtype)
    plan = cdiv(S, block_m) * cdiv(N, block_n), (E, N, rows.stride(0), K, block_m, block_n), options
    launch(_take_kernel, key, (rows, routing.order, routing.offsets, y), lambda: plan)


def token_sum(rows: Tensor, routing: Routing, weights: Tensor | None, y: Tensor, K: int) -> None:
    """Write the sum of each token's rows (S, N) to y (T, N)."""
    T, N = y.shape
    if not y.numel():
        return
    block_t, block_n, options = _token_tile(N)
    key = (T, N, K, rows.dtype, None if weights is None else weights.dtype)
    plan = cdiv(T, block_t) * cdiv(N, block_n), (T, N, K, block_t, block_n), options
    launch(_token_sum_kernel, key, (rows, routing.place, weights, y), lambda: plan)


def expert_sum(rows: Tensor, routing: Routing, weights: Tensor | None, y: Tensor, K: int) -> None:
    """Write the sum of each expert's rows to y (E, N): rows (S, N), or tokens' rows (T, N) times their weights."""
    E, N = y.shape
    if not y.numel():
        return
    block_r, block_n, options = _expert_tile()
    key = (E, N, K, rows.stride(0), rows.dtype, None if weights is None else weights.dtype)
    plan = E * cdiv(N, block_n), (N, rows.stride(0), K, block_r, block_n), options
    launch(_expert_sum_kernel, key, (rows, routing.order, weights, routing.offsets, y), lambda: plan)


def weight_sum(dots: Tensor, routing: Routing, index: Tensor, dy: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write the gradient of the routing weights, from h · dh (S,) of sorted slots, to out (T, K)."""
    S, D = dots.shape[0], dy.shape[1]
    if not S:
        return
    block_s, block_d, options = _weight_tile(bias)
    key = (S, D, out.shape[1], dy.stride(0), dy.dtype, index.dtype, out.dtype, bias is None)
    arguments = (S, D, dy.stride(0), out.shape[1], block_s, block_d)
    plan = cdiv(S, block_s), arguments, options
    launch(_weight_sum_kernel, key, (dots, routing.place, index, dy, bias, out), lambda: plan)
