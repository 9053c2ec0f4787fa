"""Embedding: y = weight[input]. A weight row's gradient is the sum of dy over all tokens that looked the row up.

No atomics: tokens are sorted by id, and each weight row is written once, as the sum over the run of equal ids in token
order. Runs may be long (padding, frequent tokens): a run with more than PIECE tokens is first summed in pieces.

Source: torch.nn.functional.embedding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import (
    Plan,
    SymInt,
    cdiv,
    check_tensors,
    differentiable,
    do_not_specialize,
    is_concrete,
    jit,
    launch,
    launcher,
    next_power_of_2,
    tl,
    use_triton,
    view_rows,
)
from tigon.kernels.tiles.ids import key_of_id
from tigon.ops.example import HEAD, Example, make_ids
from tigon.ops.targets import CHECKS

# Bounds a program's runtime per dW row: longer runs are cut into pieces of this size.
PIECE = 64  # tokens
# Up to this many tokens: counting sort, M² comparisons in a single launch. Above: radix sort, M in a dozen launches.
RANKED = 8192
# Most tokens in a single sort: torch.sort takes fewer than 2³¹, and the kernels use int32 positions.
SORTED = 2**30


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Look up rows of the weight.

    Args:
        input: integer ids in [0, V), any shape.
        weight: (V, H), any float dtype.
        padding_idx: this row gets no gradient; in [−V, V), negative values count from the end.
    Returns: (*input.shape, H) in the weight's dtype.
    Raises: ValueError for invalid shapes, dtypes or padding_idx. An id outside [0, V) gives a row of NaN and no
        gradient on the GPU, and a ValueError on the CPU or with TIGON_CHECKS=1.

    The gradient is summed in fp32 and rounded once; the bits are the same on every run.

    Replaces::

        y = F.embedding(input, weight, padding_idx)
    """
    check_tensors("embedding", input=input, weight=weight)
    if weight.dim() != 2 or not weight.dtype.is_floating_point:
        raise ValueError(f"embedding: weight must be (V, H) floats, got {tuple(weight.shape)} {weight.dtype}.")
    if input.dtype.is_floating_point or input.dtype == torch.bool or input.dtype.is_complex:
        raise ValueError(f"embedding: input must hold integer ids, got {input.dtype}.")
    if input.device != weight.device:
        raise ValueError(f"embedding: input must be on the weight's device {weight.device}, got {input.device}.")
    V = weight.shape[0]
    if padding_idx is not None and not -V <= padding_idx < V:
        raise ValueError(f"embedding: padding_idx must lie in [{-V}, {V}) or be None, got {padding_idx}.")
    # Reading values stalls a GPU, so GPUs check only with TIGON_CHECKS=1; otherwise the kernels return NaN.
    looks = input.device.type == "cpu" or CHECKS
    if looks and is_concrete(input):
        ids = input.long()  # in uint8, PyTorch would compare with V modulo 256
        wrong = (ids < 0) | (ids >= V)
        if wrong.any():
            raise ValueError(f"embedding: input must lie in [0, {V}), got {int(ids[wrong].flatten()[0])}.")
    if not use_triton(weight):
        return embedding_reference(input, weight, padding_idx=padding_idx)
    return _embedding(weight, input, -1 if padding_idx is None else padding_idx % V)


def embedding_reference(input: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    if not weight.shape[1]:  # torch's CUDA backward reads out of bounds for H = 0
        return weight.sum(0).expand(*input.shape, 0)
    return F.embedding(input.long(), weight, padding_idx)


# ---------------------------------------------------------------------------------------------------------- kernels


# A program copies BLOCK_M rows × BLOCK_N columns to y (M, H), dense. ids (M,); w (V, H) with stride_w.
# Weight rows are scattered: a flat grid keeps many loads in flight, and columns are the fast index, so that concurrent
# programs read the same rows. An id out of range gives a row of NaN, since raising would synchronize.
@jit
@do_not_specialize("M")
def _embedding_fwd_kernel(
    ids_ptr, w_ptr, y_ptr, M, V, H, stride_w, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(H, BLOCK_N)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < H)[None, :]
    ids = tl.load(ids_ptr + rows, mask=rows < M, other=0).to(tl.int64)
    known = (ids >= 0) & (ids < V)
    w_ptr += ids[:, None] * stride_w + cols[None, :]
    w = tl.load(w_ptr, mask=mask & known[:, None], other=float("nan"))
    tl.store(y_ptr + rows[:, None] * H + cols[None, :], w, mask=mask)


# A program converts BLOCK ids to int32 sort keys (`key_of_id`).
@jit
@do_not_specialize("M", "padding_idx")
def _embedding_keys_kernel(ids_ptr, keys_ptr, M, V, padding_idx, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(keys_ptr + at, key_of_id(ids_ptr, at, M, V, padding_idx), mask=at < M)


# A program places BLOCK_M tokens by comparing their keys with all M keys from L2, BLOCK_N at a time; BLOCK_N is a
# multiple of BLOCK_M. At most RANKED tokens, so int32 suffices.
# keys (M,) int32: sorted. order (M,) int64, as in torch.sort: the token of each key. Equal keys keep token order.
@jit
@do_not_specialize("M", "padding_idx")
def _embedding_rank_kernel(
    ids_ptr, keys_ptr, order_ptr, M, V, padding_idx, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Sort keys and tokens: a token's position is the number of tokens that come before it."""
    first = tl.program_id(0) * BLOCK_M
    at = first + tl.arange(0, BLOCK_M)
    keys = key_of_id(ids_ptr, at, M, V, padding_idx)
    # Counts per lane, reduced once at the end: a reduction per step would exchange data between warps.
    before = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, M, BLOCK_N):
        other = start + tl.arange(0, BLOCK_N)
        # Beyond M: greater than every key, so never counted.
        others = tl.where(other < M, key_of_id(ids_ptr, other, M, V, padding_idx), 2147483647)[None, :]
        # Among equal keys the earlier token comes first. Only the block with these tokens compares positions: every
        # other block is entirely earlier or later.
        if first // BLOCK_N * BLOCK_N == start:
            before += (others < keys[:, None] + (other[None, :] < at[:, None]).to(tl.int32)).to(tl.int32)
        else:
            before += (others < (keys + (start < first).to(tl.int32))[:, None]).to(tl.int32)
    place = tl.sum(before, 1)
    tl.store(keys_ptr + place, keys, mask=at < M)
    tl.store(order_ptr + place, at.to(tl.int64), mask=at < M)


# A program computes BLOCK entries of starts (V + 1,) by bisection over keys (M,), STEPS steps; starts[V] is the end
# of the last run, and ids without a gradient lie beyond.
@jit
@do_not_specialize("M", "STEPS")
def _embedding_starts_kernel(keys_ptr, starts_ptr, M, V, STEPS, BLOCK: tl.constexpr):
    """starts[v] = the number of sorted keys below v, for v up to V."""
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int32)
    high = low + M
    for _ in range(STEPS):
        # low + high would exceed 2³¹ at 2³⁰ keys.
        middle = low + (high - low) // 2
        open_ = low < high
        below = tl.load(keys_ptr + middle, mask=open_, other=0) < v
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & ~below, middle, high)
    tl.store(starts_ptr + v, low, mask=v <= V)


@jit
def _upstream(dy_ptr, bag_ptr, scale_ptr, tokens, inside, cols, mask, stride_dy, L, BY_BAG: tl.constexpr):
    """Load the tokens' gradients in fp32: their bags' gradients, times a factor per token or per bag."""
    if bag_ptr is None:
        rows = tokens // L
    else:
        rows = tl.load(bag_ptr + tokens, mask=inside, other=0).to(tl.int64)
    inside_both = inside[:, None] & mask[None, :]
    dy = tl.load(dy_ptr + rows[:, None] * stride_dy + cols[None, :], mask=inside_both, other=0.0).to(tl.float32)
    if scale_ptr is not None:
        at = rows if BY_BAG else tokens
        dy *= tl.load(scale_ptr + at, mask=inside, other=0.0).to(tl.float32)[:, None]
    return dy


@jit
def _piece_sum(
    order_ptr, dy_ptr, bag_ptr, scale_ptr, first, last, cols, mask, stride_dy, L,
    BY_BAG: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of the tokens order[first:last] in fp32, in token order, BLOCK_M at a time."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_M):
        at = start + tl.arange(0, BLOCK_M)
        # Two dependent loads, hence several rows at a time.
        tokens = tl.load(order_ptr + at, mask=at < last, other=0)
        total += _upstream(dy_ptr, bag_ptr, scale_ptr, tokens, at < last, cols, mask, stride_dy, L, BY_BAG)
    return tl.sum(total, 0)


# A program sums BLOCK_N columns within a piece, PIECE sorted tokens: for the run at the piece's start and the run at
# its end, if these runs are long. No other run in a piece can be long. Pieces are cut by position, since the host does
# not know the runs.
# dy, bag, scale, L, BY_BAG: as in `_upstream`. keys, order (M,), starts (V + 1,): sorted tokens. partial (pieces, 2, H)
# fp32: sums for the start run and the end run.
# Without pieces a single program would sum all gradients for a frequent id.
@jit
@do_not_specialize("M")
def _embedding_pieces_kernel(
    dy_ptr, keys_ptr, order_ptr, starts_ptr, partial_ptr, bag_ptr, scale_ptr, M, V, H, stride_dy, L,
    BY_BAG: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Partial sums for long runs, two per piece."""
    blocks = tl.cdiv(H, BLOCK_N)
    piece = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < H
    start = piece * PIECE
    stop = tl.minimum(start + PIECE, M)
    out_ptr = partial_ptr + piece.to(tl.int64) * 2 * H + cols
    head = tl.load(keys_ptr + start)
    tail = tl.load(keys_ptr + stop - 1)
    if head < V:
        last = tl.load(starts_ptr + head + 1)
        if last - tl.load(starts_ptr + head) > PIECE:
            last = tl.minimum(last, stop)
            total = _piece_sum(
                order_ptr, dy_ptr, bag_ptr, scale_ptr, start, last, cols, mask, stride_dy, L, BY_BAG, BLOCK_M, BLOCK_N
            )
            tl.store(out_ptr, total, mask=mask)
    if (tail < V) & (tail != head):
        first = tl.load(starts_ptr + tail)
        if tl.load(starts_ptr + tail + 1) - first > PIECE:
            total = _piece_sum(
                order_ptr, dy_ptr, bag_ptr, scale_ptr, first, stop, cols, mask, stride_dy, L, BY_BAG, BLOCK_M, BLOCK_N
            )
            tl.store(out_ptr + H, total, mask=mask)


# A program writes BLOCK_N columns of dW for the long run that starts in a piece, if any: partial sums are added in
# piece order, in fp32, and rounded once. Most programs find no such run and exit after three scalar loads.
# partial, keys, starts: as in `_embedding_pieces_kernel`. dw (V, H): dense.
@jit
@do_not_specialize("M")
def _embedding_long_kernel(
    partial_ptr, keys_ptr, starts_ptr, dw_ptr, M, V, H,
    PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dW for long runs."""
    blocks = tl.cdiv(H, BLOCK_N)
    piece = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < H
    row = tl.load(keys_ptr + tl.minimum((piece + 1) * PIECE, M) - 1)
    if row < V:
        first, last = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
        if (first >= piece * PIECE) & (last - first > PIECE):
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            pieces = (last - 1) // PIECE + 1
            for start in range(piece, pieces, BLOCK_M):
                at = start + tl.arange(0, BLOCK_M)
                # A run that starts inside a piece uses that piece's second slot, and the first slot of later pieces.
                slot = at.to(tl.int64) * 2 + (at * PIECE < first).to(tl.int64)
                inside = (at < pieces)[:, None] & mask[None, :]
                total += tl.load(partial_ptr + slot[:, None] * H + cols[None, :], mask=inside, other=0.0)
            dw = tl.sum(total, 0).to(dw_ptr.dtype.element_ty)
            tl.store(dw_ptr + row.to(tl.int64) * H + cols, dw, mask=mask)


# A program writes BLOCK_M rows × BLOCK_N columns of dW, each the sum of a short run in token order, or zero; so dW
# needs no memset. `_embedding_long_kernel` writes the rows of long runs.
# dy, bag, scale, L, BY_BAG: as in `_upstream`. order (M,), starts (V + 1,): sorted tokens; starts[v + 1] − starts[v] is
# a run length.
@jit
def _embedding_bwd_kernel(
    dy_ptr, order_ptr, starts_ptr, dw_ptr, bag_ptr, scale_ptr, V, H, stride_dy, L,
    BY_BAG: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dW for short runs, and zeros for absent ids."""
    blocks = tl.cdiv(H, BLOCK_N)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.load(starts_ptr + rows, mask=rows < V, other=0)
    length = tl.load(starts_ptr + rows + 1, mask=rows < V, other=0) - first
    short = length <= PIECE
    length = tl.where(short, length, 0)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(tl.max(length, 0)):
        token = tl.load(order_ptr + first + i, mask=i < length, other=0)
        dw += _upstream(dy_ptr, bag_ptr, scale_ptr, token, i < length, cols, cols < H, stride_dy, L, BY_BAG)
    mask = (short & (rows < V))[:, None] & (cols < H)[None, :]
    tl.store(dw_ptr + rows[:, None] * H + cols[None, :], dw.to(dw_ptr.dtype.element_ty), mask=mask)


# --------------------------------------------------------------------------------------------------------- launches


def _fwd_tile(H: int) -> tuple[int, int, int]:
    """Return rows, columns and warps."""
    block_n = min(1024, next_power_of_2(H))
    return 2048 // block_n, block_n, 4


def _bwd_tile(H: int) -> tuple[int, int, int]:
    """Return weight rows, columns and warps."""
    block_n = min(2048, next_power_of_2(H))
    return max(1, 2048 // block_n), block_n, 4


def _rank_tile() -> tuple[int, int, int]:
    """Return tokens to place, tokens to compare with per step, and warps."""
    # 16 × 256 comparisons on 128 threads: 32 counts per thread.
    return 16, 256, 4


def _piece_tile(H: int) -> tuple[int, int, int]:
    """Return rows in flight, columns and warps, for tokens and for partial sums."""
    # Eight rows in flight, since their addresses depend on the loaded order.
    block_n = min(512, next_power_of_2(H))
    return 8, block_n, 4


def _embedding_fwd_fake(weight: Tensor, ids: Tensor, *_: Any) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


@launcher(_embedding_fwd_fake)
def _embedding_fwd(weight: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    y = _embedding_fwd_fake(weight, ids, padding_idx)
    if y.numel():
        w, ids = view_rows(weight), ids.contiguous()
        M, (V, H), stride = ids.numel(), w.shape, w.stride(0)

        def plan() -> Plan:
            block_m, block_n, warps = _fwd_tile(H)
            grid = cdiv(M, block_m) * cdiv(H, block_n)
            return grid, (M, V, H, stride, block_m, block_n), {"num_warps": warps}

        launch(_embedding_fwd_kernel, (M, V, H, stride, ids.dtype, w.dtype), (ids, w, y), plan)
    return y


def sorted_ids(ids: Tensor, V: int, padding_idx: int) -> tuple[Tensor, Tensor]:
    """Return all tokens' keys in ascending order, int32, and their tokens, int64, ascending among equal keys."""
    M = ids.numel()
    keys = ids.new_empty(M, dtype=torch.int32)
    sizes = M, V, padding_idx
    if M <= RANKED:
        order = ids.new_empty(M, dtype=torch.int64)

        def plan() -> Plan:
            block_m, block_n, warps = _rank_tile()
            return cdiv(M, block_m), (*sizes, block_m, block_n), {"num_warps": warps}

        launch(_embedding_rank_kernel, (*sizes, ids.dtype), (ids, keys, order), plan)
        return keys, order
    launch(
        _embedding_keys_kernel, (*sizes, ids.dtype), (ids, keys),
        lambda: (cdiv(M, 1024), (*sizes, 1024), {"num_warps": 4}),
    )  # fmt: skip
    # Stable: equal ids keep token order, which fixes the order of every sum.
    return torch.sort(keys, stable=True)


def _embedding_bwd_fake(dy: Tensor, ids: Tensor, classes: int, *_: Any) -> Tensor:
    return dy.new_empty((classes, dy.shape[-1]))


@launcher(_embedding_bwd_fake)
def _embedding_bwd(dy: Tensor, ids: Tensor, classes: SymInt, padding_idx: int) -> Tensor:
    dw = _embedding_bwd_fake(dy, ids, classes, padding_idx)
    if not dw.numel() or not ids.numel():
        return dw.zero_()
    sum_by_id(dy, ids.contiguous(), padding_idx, dw)
    return dw


def sum_by_id(dy: Tensor, ids: Tensor, padding_idx: int, dw: Tensor, **bags: Any) -> None:
    """dw[v] = sum of the gradients over tokens with id v. ids: dense, at least one. bags: as for `sums_of_runs`."""
    ids, classes = ids.view(-1), dw.shape[0]
    if ids.numel() <= SORTED:
        sums_of_runs(dy, *sorted_ids(ids, classes, padding_idx), dw, **bags)
        return
    total = torch.zeros_like(dw, dtype=torch.float32)
    for part, some in enumerate(ids.split(SORTED)):
        keys, order = sorted_ids(some, classes, padding_idx)
        share = torch.empty_like(total)
        sums_of_runs(dy, keys, order.add_(part * SORTED), share, **bags)
        total += share
    dw.copy_(total)


def sums_of_runs(
    dy: Tensor, keys: Tensor, order: Tensor, dw: Tensor, *, bag: Tensor | None = None, length: int = 1,
    scale: Tensor | None = None, by_bag: bool = False,
) -> Tensor:  # fmt: skip
    """dw[v] = sum of the gradients over tokens with key v, in fp32, in token order, rounded once.

    Args:
        dy: (…, H), a row per bag.
        keys, order: from `sorted_ids`, for at least one token. Keys are in [0, V]; V gets no gradient.
        dw: (V, H), dense, fully overwritten.
        bag: (M,) int32, each token's bag; None: bags are `length` consecutive tokens.
        scale: gradient factor per token, or with by_bag per bag.
    Returns: (V + 1,) int32, the start of each key's run.
    """
    dy = view_rows(dy)
    M, (V, H), stride = keys.numel(), dw.shape, dy.stride(0)
    starts = keys.new_empty(V + 1)
    steps = M.bit_length()
    launch(
        _embedding_starts_kernel, (M, V), (keys, starts),
        lambda: (cdiv(V + 1, 256), (M, V, steps, 256), {"num_warps": 4}),
    )  # fmt: skip
    extra = None if bag is None else bag.dtype, None if scale is None else scale.dtype, length, by_bag
    key = (M, V, H, stride, dy.dtype, dw.dtype, *extra)

    def plan() -> Plan:
        block_m, block_n, warps = _bwd_tile(H)
        grid = cdiv(V, block_m) * cdiv(H, block_n)
        return grid, (V, H, stride, length, by_bag, PIECE, block_m, block_n), {"num_warps": warps}

    launch(_embedding_bwd_kernel, key, (dy, order, starts, dw, bag, scale), plan)
    if M > PIECE:  # otherwise no run is long
        pieces = cdiv(M, PIECE)
        partial = dy.new_empty((pieces, 2, H), dtype=torch.float32)
        block_m, block_n, warps = _piece_tile(H)
        grid, tile, options = pieces * cdiv(H, block_n), (PIECE, block_m, block_n), {"num_warps": warps}
        launch(
            _embedding_pieces_kernel, key, (dy, keys, order, starts, partial, bag, scale),
            lambda: (grid, (M, V, H, stride, length, by_bag, *tile), options),
        )  # fmt: skip
        launch(_embedding_long_kernel, key, (partial, keys, starts, dw), lambda: (grid, (M, V, H, *tile), options))
    return starts


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, ids, ctx.padding_idx = inputs
    ctx.classes = weight.shape[0]
    ctx.save_for_backward(ids)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor]:
    return (_embedding_bwd(dy, *ctx.saved_tensors, ctx.classes, ctx.padding_idx),)


_embedding = differentiable(_embedding_fwd, _setup_context, _backward)


EXAMPLES = {
    "embedding": Example("Embedding", (HEAD,), lambda w: embedding(make_ids(w, 512), w)),
}
