"""Embedding: y = weight[input]. The gradient of a row of the weight is the sum of the gradients where it was looked up.

No atomics: the tokens are sorted by their id, and each row of the weight is written once, as the sum of its run in that
order. A run may be long (a padding or a frequent token): one of more than PIECE tokens is summed in pieces first.

Source: torch.nn.functional.embedding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import (
    Plan,
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
from tigon.ops.targets import CHECKS

# It bounds how long the program of one row of dW runs: longer runs are cut into pieces of it.
PIECE = 64  # tokens
# Up to so many tokens are sorted by counting, M² comparisons in one launch; more by radix, M in a dozen launches.
RANKED = 8192
# Up to so many tokens are sorted together: torch.sort takes fewer than 2³¹, and kernels count the sorted in int32.
SORTED = 2**30


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Look up rows of the weight.

    Args:
        input: integers of any shape in [0, V): the ids.
        weight: (V, H), any float dtype.
        padding_idx: this row gets no gradient; in [−V, V), negative ones count from the end.
    Returns: (*input.shape, H) in the weight's dtype.
    Raises: ValueError for shapes, dtypes or a padding_idx that do not fit. An id outside [0, V) gives a row of NaN and
        no gradient on the GPU, and a ValueError on the CPU or with TIGON_CHECKS=1.

    The gradient is summed in fp32, rounded once, and the same bits on every run.

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
    # Looking at values stalls a GPU, so on GPUs only the checked mode looks; otherwise the kernels answer NaN.
    looks = input.device.type == "cpu" or CHECKS
    if looks and is_concrete(input):
        ids = input.long()  # in uint8, PyTorch would compare with V modulo 256
        wrong = (ids < 0) | (ids >= V)
        if wrong.any():
            raise ValueError(f"embedding: input must lie in [0, {V}), got {int(ids[wrong].flatten()[0])}.")
    # Ids may be of any integer dtype: the weight alone decides, and the kernels convert.
    if not use_triton(weight):
        return embedding_reference(input, weight, padding_idx=padding_idx)
    return _embedding(weight, input, -1 if padding_idx is None else padding_idx % V)


def embedding_reference(input: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    if not weight.shape[1]:  # torch's own backward reads beyond its memory there, on CUDA
        return weight.sum(0).expand(*input.shape, 0)
    return F.embedding(input.long(), weight, padding_idx)


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
@do_not_specialize("M")
def _embedding_fwd_kernel(
    ids_ptr, w_ptr, y_ptr, M, V, H, stride_w, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    # Rows of the weight lie anywhere: many loads in flight hide their latency, hence a flat grid over rows and columns.
    blocks = tl.cdiv(H, BLOCK_N)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Columns are the fast index: a row of the weight is read by neighbouring programs.
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    # H is not padded in memory: the last block of columns is masked, rows are dense in y.
    mask = (rows < M)[:, None] & (cols < H)[None, :]
    ids = tl.load(ids_ptr + rows, mask=rows < M, other=0).to(tl.int64)
    # An id out of range gives a row of NaN: raising would make the host wait for the device.
    known = (ids >= 0) & (ids < V)
    # int64, as `ids` is: V · H exceeds 2**31 for 128k ids of width 16384.
    w_ptr += ids[:, None] * stride_w + cols[None, :]
    w = tl.load(w_ptr, mask=mask & known[:, None], other=float("nan"))
    # Copied as it is: there is no arithmetic, and so no conversion.
    tl.store(y_ptr + rows[:, None] * H + cols[None, :], w, mask=mask)


@jit
@do_not_specialize("M", "padding_idx")
def _embedding_keys_kernel(ids_ptr, keys_ptr, M, V, padding_idx, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Beyond M nothing is stored: the sort sees M keys.
    tl.store(keys_ptr + at, key_of_id(ids_ptr, at, M, V, padding_idx), mask=at < M)


@jit
@do_not_specialize("M", "padding_idx")
def _embedding_rank_kernel(
    ids_ptr, keys_ptr, order_ptr, M, V, padding_idx, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The sorted keys, and the tokens in that order: a token's place is the number of tokens that come before it.

    BLOCK_N is a multiple of BLOCK_M.
    """
    first = tl.program_id(0) * BLOCK_M
    at = first + tl.arange(0, BLOCK_M)
    # This block's keys are compared with all keys, its own included: BLOCK_M × M comparisons, of ids that come from L2.
    keys = key_of_id(ids_ptr, at, M, V, padding_idx)
    # int32 suffices: this kernel takes at most RANKED tokens, as it compares every pair.
    # Counts by lane, added once at the end: a reduction in each step would exchange between warps.
    before = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, M, BLOCK_N):
        other = start + tl.arange(0, BLOCK_N)
        # Beyond M: after every key, so that no place counts them.
        others = tl.where(other < M, key_of_id(ids_ptr, other, M, V, padding_idx), 2147483647)[None, :]
        # Of equal keys the earlier token comes first. Only the block that holds these tokens has to compare positions:
        # every other block is earlier or later as a whole.
        if first // BLOCK_N * BLOCK_N == start:
            before += (others < keys[:, None] + (other[None, :] < at[:, None]).to(tl.int32)).to(tl.int32)
        else:
            before += (others < (keys + (start < first).to(tl.int32))[:, None]).to(tl.int32)
    # Places are distinct, as equal keys are ordered by position: no two threads write to one.
    place = tl.sum(before, 1)
    tl.store(keys_ptr + place, keys, mask=at < M)
    # int64, as torch.sort gives its indices: the kernels behind take either.
    tl.store(order_ptr + place, at.to(tl.int64), mask=at < M)


@jit
@do_not_specialize("M", "STEPS")
def _embedding_starts_kernel(keys_ptr, starts_ptr, M, V, STEPS, BLOCK: tl.constexpr):
    """starts[v]: how many sorted keys are below v, by bisection, for v up to V."""
    # Reads of neighbouring ids end at neighbouring keys: the last steps of a bisection hit the cache.
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int32)
    high = low + M
    # The steps that M needs, for every lane: a loop that ends by itself would wait for the slowest lane all the same.
    for _ in range(STEPS):
        # By the difference: low + high passes 2³¹ at 2³⁰ keys.
        middle = low + (high - low) // 2
        open_ = low < high
        below = tl.load(keys_ptr + middle, mask=open_, other=0) < v
        # A lane that has finished has low = high, and stays: the loop needs no exit.
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & ~below, middle, high)
    # v = V too: the end of the last run, behind which ids without a gradient lie.
    tl.store(starts_ptr + v, low, mask=v <= V)


@jit
def _upstream(dy_ptr, bag_ptr, scale_ptr, tokens, inside, cols, mask, stride_dy, L, BY_BAG: tl.constexpr):
    """The gradients of these tokens in fp32: those of their bags, times a factor of token or bag."""
    # Bags of L tokens, or of any number, which bag_ptr tells apart. A token of `embedding` is a bag of its own: L = 1.
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
    """Σ of the gradients of the tokens order[first:last], in fp32. BLOCK_M tokens are loaded at a time."""
    # Rows are added in the order of tokens, BLOCK_M at a time, however they fall on programs: the same bits on every
    # run.
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_M):
        at = start + tl.arange(0, BLOCK_M)
        # Two dependent loads: the place of a row is known only when the order has arrived. Hence several rows at a
        # time.
        tokens = tl.load(order_ptr + at, mask=at < last, other=0)
        total += _upstream(dy_ptr, bag_ptr, scale_ptr, tokens, at < last, cols, mask, stride_dy, L, BY_BAG)
    return tl.sum(total, 0)


@jit
@do_not_specialize("M")
def _embedding_pieces_kernel(
    dy_ptr, keys_ptr, order_ptr, starts_ptr, partial_ptr, bag_ptr, scale_ptr, M, V, H, stride_dy, L,
    BY_BAG: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sums of long runs within one piece of PIECE sorted tokens: of the run at its start, and of the run at its end.

    No other run in a piece can be long: it would lie within the piece. Without pieces, one program would sum all of a
    frequent id's gradients.
    """
    blocks = tl.cdiv(H, BLOCK_N)
    piece = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < H
    # Pieces are cut by position, not by run: their number is known to the host, that of the runs is not.
    start = piece * PIECE
    stop = tl.minimum(start + PIECE, M)
    # Two fp32 rows a piece, for the run at its start and the run at its end.
    out_ptr = partial_ptr + piece.to(tl.int64) * 2 * H + cols
    # The keys at both ends tell which runs reach beyond the piece. A run strictly inside has at most PIECE - 2 tokens.
    head = tl.load(keys_ptr + start)
    tail = tl.load(keys_ptr + stop - 1)
    # V is the key of ids without a gradient. They sort last, so a piece of them alone has nothing to do.
    if head < V:
        last = tl.load(starts_ptr + head + 1)
        if last - tl.load(starts_ptr + head) > PIECE:
            # A longer run goes on in the next pieces, each of which sums its own share.
            last = tl.minimum(last, stop)
            total = _piece_sum(
                order_ptr, dy_ptr, bag_ptr, scale_ptr, start, last, cols, mask, stride_dy, L, BY_BAG, BLOCK_M, BLOCK_N
            )
            tl.store(out_ptr, total, mask=mask)
    # A run that fills the piece has been summed above.
    if (tail < V) & (tail != head):
        first = tl.load(starts_ptr + tail)
        if tl.load(starts_ptr + tail + 1) - first > PIECE:
            # The run begins in this piece, at `first`, and goes on in the next.
            total = _piece_sum(
                order_ptr, dy_ptr, bag_ptr, scale_ptr, first, stop, cols, mask, stride_dy, L, BY_BAG, BLOCK_M, BLOCK_N
            )
            tl.store(out_ptr + H, total, mask=mask)


@jit
@do_not_specialize("M")
def _embedding_long_kernel(
    partial_ptr, keys_ptr, starts_ptr, dw_ptr, M, V, H,
    PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dW of the id whose long run begins in this piece, if there is one: the sum over the run's pieces."""
    blocks = tl.cdiv(H, BLOCK_N)
    piece = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < H
    # A long run reaches beyond the piece in which it begins: it is the run at that piece's end.
    # Every piece asks. Most find that no long run begins here, and exit after three loads of one number.
    row = tl.load(keys_ptr + tl.minimum((piece + 1) * PIECE, M) - 1)
    if row < V:
        first, last = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
        if (first >= piece * PIECE) & (last - first > PIECE):
            # Pieces in their order, in fp32, rounded once.
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            # The piece of the run's last token, and one more: the end of the range.
            pieces = (last - 1) // PIECE + 1
            for start in range(piece, pieces, BLOCK_M):
                at = start + tl.arange(0, BLOCK_M)
                # A run that begins inside a piece has that piece's second sum, and the first sum of later pieces.
                # slot 2 · piece is the run at the piece's start, slot 2 · piece + 1 the run at its end.
                slot = at.to(tl.int64) * 2 + (at * PIECE < first).to(tl.int64)
                inside = (at < pieces)[:, None] & mask[None, :]
                total += tl.load(partial_ptr + slot[:, None] * H + cols[None, :], mask=inside, other=0.0)
            dw = tl.sum(total, 0).to(dw_ptr.dtype.element_ty)
            tl.store(dw_ptr + row.to(tl.int64) * H + cols, dw, mask=mask)


@jit
def _embedding_bwd_kernel(
    dy_ptr, order_ptr, starts_ptr, dw_ptr, bag_ptr, scale_ptr, V, H, stride_dy, L,
    BY_BAG: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows of dW, each zero or the sum of a short run. A program takes several rows, so that their loads overlap."""
    blocks = tl.cdiv(H, BLOCK_N)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows that no token has are written as well, as zeros: dW needs no pass that clears it.
    # starts has V + 1 entries: the difference of neighbours is a run's length.
    first = tl.load(starts_ptr + rows, mask=rows < V, other=0)
    length = tl.load(starts_ptr + rows + 1, mask=rows < V, other=0) - first
    short = length <= PIECE
    # Long runs are summed in pieces, and _embedding_long_kernel writes their rows.
    length = tl.where(short, length, 0)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # As long as the longest run of these rows; PIECE bounds it.
    # Rows of one program wait for the longest among them; short runs are masked meanwhile.
    for i in range(tl.max(length, 0)):
        # In the order of tokens, since the sort is stable: the same bits on every run.
        token = tl.load(order_ptr + first + i, mask=i < length, other=0)
        dw += _upstream(dy_ptr, bag_ptr, scale_ptr, token, i < length, cols, cols < H, stride_dy, L, BY_BAG)
    # Every row of dW is written by one program, here or in the kernel of long runs: no atomics.
    mask = (short & (rows < V))[:, None] & (cols < H)[None, :]
    tl.store(dw_ptr + rows[:, None] * H + cols[None, :], dw.to(dw_ptr.dtype.element_ty), mask=mask)


# --------------------------------------------------------------------------------------------------------- launches


def _fwd_tile(H: int) -> tuple[int, int, int]:
    """Rows, columns and warps."""
    # Two 16-byte loads of 16-bit numbers a thread: rows share a program where they are narrow.
    block_n = min(1024, next_power_of_2(H))
    return 2048 // block_n, block_n, 4


def _bwd_tile(H: int) -> tuple[int, int, int]:
    """Rows of the weight, columns and warps."""
    # Wider blocks than in the forward pass: many rows of dW are zeros, which only have to be written.
    block_n = min(2048, next_power_of_2(H))
    return max(1, 2048 // block_n), block_n, 4


def _rank_tile() -> tuple[int, int, int]:
    """Tokens that are placed, tokens that they are compared with at a time, and warps."""
    # 16 × 256 comparisons on 128 threads: 32 counts a thread.
    return 16, 256, 4


def _piece_tile(H: int) -> tuple[int, int, int]:
    """Rows on their way at a time, columns and warps, of tokens and of partial sums."""
    # Eight rows in flight, since their places are known only when the order has been read.
    block_n = min(512, next_power_of_2(H))
    return 8, block_n, 4


def _embedding_fwd_fake(weight: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


@launcher("(Tensor weight, Tensor ids, int padding_idx) -> Tensor", _embedding_fwd_fake)
def _embedding_fwd(weight: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    y = _embedding_fwd_fake(weight, ids, padding_idx)
    if y.numel():
        # A weight that is a slice keeps its row stride; only the ids have to be dense.
        w, ids = view_rows(weight), ids.contiguous()
        M, (V, H), stride = ids.numel(), w.shape, w.stride(0)

        def plan() -> Plan:
            block_m, block_n, warps = _fwd_tile(H)
            grid = cdiv(M, block_m) * cdiv(H, block_n)
            return grid, (M, V, H, stride, block_m, block_n), {"num_warps": warps}

        launch(_embedding_fwd_kernel, (M, V, H, stride, ids.dtype, w.dtype), (ids, w, y), plan)
    return y


def sorted_ids(ids: Tensor, V: int, padding_idx: int) -> tuple[Tensor, Tensor]:
    """The keys of all tokens in ascending order, int32, and the tokens that have them, int64, also ascending."""
    M = ids.numel()
    keys = ids.new_empty(M, dtype=torch.int32)
    sizes = M, V, padding_idx
    # Counting needs M² comparisons and one launch, radix sort about a dozen launches of M.
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
    # Stable: the order of equal ids is that of their tokens, and so the order of every sum is fixed.
    return torch.sort(keys, stable=True)


def _embedding_bwd_fake(dy: Tensor, ids: Tensor, classes: int, padding_idx: int) -> Tensor:
    return dy.new_empty((classes, dy.shape[-1]))


@launcher("(Tensor dy, Tensor ids, SymInt classes, int padding_idx) -> Tensor", _embedding_bwd_fake)
def _embedding_bwd(dy: Tensor, ids: Tensor, classes: int, padding_idx: int) -> Tensor:
    dw = _embedding_bwd_fake(dy, ids, classes, padding_idx)
    # Without ids no kernel writes dW.
    if not dw.numel() or not ids.numel():
        return dw.zero_()
    sum_by_id(dy, ids.contiguous(), padding_idx, dw)
    return dw


def sum_by_id(dy: Tensor, ids: Tensor, padding_idx: int, dw: Tensor, **bags: Any) -> None:
    """dw[v] = Σ of the gradients of the tokens whose id is v. ids: dense, at least one. bags: as for `sums_of_runs`."""
    ids, classes = ids.view(-1), dw.shape[0]
    if ids.numel() <= SORTED:
        sums_of_runs(dy, *sorted_ids(ids, classes, padding_idx), dw, **bags)
        return
    # Parts of the tokens, whose sums are added in fp32 in their order, and rounded once.
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
    """dw[v] = Σ of the gradients of the tokens whose key is v, in fp32 and in the order of tokens, rounded once.

    Args:
        dy: (…, H), a row for each bag.
        keys, order: those of `sorted_ids`, of at least one token. Keys are in [0, V]; V gets no gradient.
        dw: (V, H), dense. All of it is written.
        bag: (M,) int32, the bag of each token; None: bags are `length` neighbouring tokens.
        scale: what the gradient is multiplied by, for each token, or with by_bag for each bag.
    Returns: (V + 1,) int32, where each key's run begins.
    """
    dy = view_rows(dy)
    M, (V, H), stride = keys.numel(), dw.shape, dy.stride(0)
    starts = keys.new_empty(V + 1)
    # Bisection over M keys leaves M / 2^steps < 1.
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

    # V rows, whatever M is: every row of dW has to be written, zeros too.
    launch(_embedding_bwd_kernel, key, (dy, order, starts, dw, bag, scale), plan)
    if M > PIECE:  # otherwise no run is long
        pieces = cdiv(M, PIECE)
        # Not cleared: a slot is read only where the pieces kernel has written it, which the same test on run lengths
        # ensures.
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
    # The ids alone: dW needs neither the weight nor y.
    ctx.save_for_backward(ids)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    dw = None
    if dy is not None and ctx.needs_input_grad[0]:
        dw = _embedding_bwd(dy, *ctx.saved_tensors, ctx.classes, ctx.padding_idx)
    return dw, None, None


_embedding = differentiable(_embedding_fwd, _setup_context, _backward)
