"""Cross entropy kernels: loss and statistics of each row, the reduction over rows, and two gradient kernels.

    logits      (M, V), row stride m, unit stride along V; dx has row stride dm
    target      (M,) class indices; rows with ignore_index are not read
    weight      (V,) class weights, or None
    loss, z     (M,) each row's loss and z-loss; z may be None
    predicted   (M,) int64 argmax, −1 for ignored rows; may be None
    stats       HEAD fp32 numbers from the reduction, then STATS per row: maximum, log₂ Σ exp(z − max) and, with
                weights, the target distribution's mass
    EDGES       rows begin or end between 16-byte boundaries, as described in `tigon.kernels.tiles.edges`

Unused options cost nothing: their branches (a None pointer, a constexpr) are compiled out. Row offsets are int64.
"""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl
from tigon.kernels.tiles.cap import cap
from tigon.kernels.tiles.constants import LN2, LOG2E, LOWEST
from tigon.kernels.tiles.edges import align, edges, split
from tigon.kernels.tiles.loss import row_loss

NOWHERE = tl.constexpr(2**31 - 1)  # a column beyond every row
# fp32 numbers at the head of the statistics, which the reduction writes for the backward pass. 16 bytes keep the rows
# that follow aligned.
HEAD = tl.constexpr(4)


@jit
def _slope(x, top, log2_sum, mass, taken, factor, z_loss, softcap, scale, SOFTCAP: tl.constexpr):
    """factor · d(loss)/d(logits) = factor · dz/dx · (p · (mass + 2 · z_loss · lse) − taken).

    taken: the target distribution at these columns, None for zero. mass: its sum over the classes. The row maximum and
    log₂ Σ exp(z − max) stay separate: the rounding of a combined log-sum-exp would enter every probability of a
    confident row.
    """
    if SOFTCAP:
        z, slope = cap(x, scale, softcap)
        k = LOG2E
        lse = top + log2_sum * LN2
        factor = factor * slope
    else:
        z = x
        k = scale * LOG2E
        lse = top * scale + log2_sum * LN2
        factor = factor * scale
    # p = exp(logit − lse) = 2^((z − top) k − log₂ Σ). A logit of -inf gives p = 0 and a gradient of 0. Subtract top
    # first: the difference of close numbers is exact, while either number times k would be rounded.
    p = tl.exp2((z - top) * k - log2_sum)
    mass += 2.0 * z_loss * lse
    if taken is None:
        # Without smoothing only the target has mass, and the caller writes the target's element. The brackets leave a
        # single product per element without a softcap: mass · factor belongs to the row.
        dx = p * (mass * factor)
    else:
        dx = (p * mass - taken) * factor
    return dx


@jit
def _fold_tile(
    z, start, tile, mask, weight_ptr, top, total, sum_z, sum_w, peak, best, softcap, scale,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, PREDICT: tl.constexpr,
):  # fmt: skip
    """Fold a tile (DEPTH, lanes) of logits, those of the columns start + tile, into the running sums of `row_sums`."""
    k = LOG2E if SOFTCAP else scale * LOG2E
    if PREDICT:  # raw logits: a softcap rounds different large logits to equal ones
        high = tl.max(z, 0)
        first = tl.min(tl.where(z == high[None, :], start + tile, NOWHERE), 0)
        # Strictly larger only, so that the earlier of two equal columns stays.
        best = tl.where(high > peak, first, best)
        peak = tl.maximum(peak, high)
    if SOFTCAP:
        z, _ = cap(z, scale, softcap)
        z = tl.where(mask, z, float("-inf"))
    if SMOOTHING:
        if weight_ptr is not None:
            w = tl.load(weight_ptr + start + tile, mask=mask, other=0.0).to(tl.float32)
            # Masked logits are -inf, and -inf · 0 is NaN: hence a select and not the weight's 0.
            sum_z += tl.sum(tl.where(mask, z * w, 0.0), 0)
            sum_w += tl.sum(w, 0)
        else:
            sum_z += tl.sum(tl.where(mask, z, 0.0), 0)
    new = tl.maximum(top, tl.max(z, 0))
    total = total * tl.exp2((top - new) * k) + tl.sum(tl.exp2((z - new[None, :]) * k), 0)
    return new, total, sum_z, sum_w, peak, best


@jit
def row_sums(
    logits_ptr, weight_ptr, V, softcap, scale,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, PREDICT: tl.constexpr, KEEP: tl.constexpr, EDGES: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's max z, Σ exp(z − max), its log₂, Σ w·z, Σ w, the largest logit and its first column, in a single reading.

    Each lane has a running maximum. A thread folds DEPTH values at a time, so that rescaling the sum costs 1/DEPTH of
    an exponential per value. At depth 1 exponentials, not memory, would limit the pass.
    """
    lane = tl.arange(0, BLOCK)
    tile = tl.arange(0, DEPTH)[:, None] * BLOCK + lane[None, :]
    # A finite start, so that a lane with only -inf does not compute inf − inf; the least fp32 number, because many
    # masks use that number, and a larger start would become such a lane's maximum.
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    sum_z = tl.zeros((BLOCK,), tl.float32)
    sum_w = tl.zeros((BLOCK,), tl.float32)
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    best = tl.full((BLOCK,), NOWHERE, tl.int32)
    k = LOG2E if SOFTCAP else scale * LOG2E
    first = 0
    width = V
    body_ptr = logits_ptr
    if EDGES:
        first, width = split(logits_ptr, V)
        body_ptr = align(logits_ptr, first)
    for start in range(0, width, DEPTH * BLOCK):
        mask = start + tile < width
        # -inf in masked lanes wins no maximum, and has an exponential of 0.
        z = tl.load(body_ptr + start + tile, mask=mask, other=float("-inf"), eviction_policy=KEEP).to(tl.float32)
        top, total, sum_z, sum_w, peak, best = _fold_tile(
            z, first + start, tile, mask, weight_ptr, top, total, sum_z, sum_w, peak, best, softcap, scale,
            SMOOTHING, SOFTCAP, PREDICT,
        )  # fmt: skip
    row_top = tl.max(top, 0)
    if EDGES:
        edge, real = edges(logits_ptr, first, width, V)
        z_edge = tl.load(logits_ptr + edge, mask=real, other=float("-inf"), eviction_policy=KEEP).to(tl.float32)
        nothing = tl.zeros(edge.shape, tl.float32)
        edge_top, edge_total, edge_z, edge_w, edge_peak, edge_best = _fold_tile(
            z_edge[None, :], 0, edge[None, :], real[None, :], weight_ptr, nothing + LOWEST, nothing, nothing, nothing,
            nothing + float("-inf"), tl.full(edge.shape, NOWHERE, tl.int32), softcap, scale,
            SMOOTHING, SOFTCAP, PREDICT,
        )  # fmt: skip
        row_top = tl.maximum(row_top, tl.max(edge_top, 0))
    row_total = tl.sum(total * tl.exp2((top - row_top) * k), 0)
    if EDGES:
        row_total += tl.sum(edge_total * tl.exp2((edge_top - row_top) * k), 0)
    log2_sum = tl.log2(row_total)
    all_z = 0.0
    all_w = V * 1.0
    if SMOOTHING:
        all_z = tl.sum(sum_z, 0)
        if EDGES:
            all_z += tl.sum(edge_z, 0)
        if weight_ptr is not None:
            all_w = tl.sum(sum_w, 0)
            if EDGES:
                all_w += tl.sum(edge_w, 0)
    column = 0
    row_peak = float("-inf")
    if PREDICT:
        row_peak = tl.max(peak, 0)
        if EDGES:
            row_peak = tl.maximum(row_peak, tl.max(edge_peak, 0))
        column = tl.min(tl.where(peak == row_peak, best, NOWHERE), 0)
        if EDGES:
            column = tl.minimum(column, tl.min(tl.where(edge_peak == row_peak, edge_best, NOWHERE), 0))
        column = tl.where(column < V, column, 0)  # no logit above -inf: column 0, as torch.argmax
    return row_top, row_total, log2_sum, all_z, all_w, row_peak, column


@jit
def store_ignored(loss_ptr, stats_ptr, z_ptr, predicted_ptr, row, STATS: tl.constexpr):
    """Write zeros for an ignored row."""
    tl.store(loss_ptr + row, 0.0)
    if stats_ptr is not None:
        # The backward pass reads statistics of every row, so an ignored row must not keep uninitialised memory.
        for i in tl.static_range(STATS):
            tl.store(stats_ptr + HEAD + STATS * row + i, 0.0)
    if z_ptr is not None:
        tl.store(z_ptr + row, 0.0)
    if predicted_ptr is not None:
        tl.store(predicted_ptr + row, -1)


@jit
def store_row(
    logits_ptr, target, weight_ptr, loss_ptr, stats_ptr, z_ptr, predicted_ptr, row, V,
    top, log2_sum, sum_z, sum_w, column, smoothing, z_loss, softcap, scale,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """Write a row's loss and statistics from its sums. logits_ptr: the row's first element."""
    # A target out of range reads nothing and turns the row's loss and gradient into NaN.
    valid = (target >= 0) & (target < V)
    log2_sum = tl.where(valid, log2_sum, float("nan"))
    # Loaded again: a comparison in the loop would cost every element.
    z_target = tl.load(logits_ptr + target, mask=valid, other=0.0).to(tl.float32)
    if SOFTCAP:
        z_target, _ = cap(z_target, scale, softcap)
    w_target = 1.0
    if weight_ptr is not None:
        w_target = tl.load(weight_ptr + target, mask=valid, other=0.0).to(tl.float32)
    WEIGHTED: tl.constexpr = weight_ptr is not None
    loss, z, mass = row_loss(
        z_target, w_target, top, log2_sum, sum_z, sum_w, V, smoothing, z_loss, scale, WEIGHTED, SMOOTHING, SOFTCAP
    )
    tl.store(loss_ptr + row, loss)
    if stats_ptr is not None:
        stats_ptr += HEAD + STATS * row
        tl.store(stats_ptr, top)
        tl.store(stats_ptr + 1, log2_sum)
        if STATS == 3:
            tl.store(stats_ptr + 2, mass)
    if z_ptr is not None:
        tl.store(z_ptr + row, z)
    if predicted_ptr is not None:
        tl.store(predicted_ptr + row, column)


# A program: one row. The sums of an ignored row are skipped by a branch of the whole program.
@jit
@do_not_specialize("ignore_index")
def _cross_entropy_fwd_kernel(
    logits_ptr, target_ptr, weight_ptr, loss_ptr, stats_ptr, z_ptr, predicted_ptr,
    V, stride_m, ignore_index, smoothing, z_loss, softcap, scale,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, STATS: tl.constexpr, EDGES: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the loss and statistics of a row."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    target = tl.load(target_ptr + row)
    if target == ignore_index:
        store_ignored(loss_ptr, stats_ptr, z_ptr, predicted_ptr, row, STATS)
        return

    PREDICT: tl.constexpr = predicted_ptr is not None
    top, _, log2_sum, sum_z, sum_w, _, column = row_sums(
        logits_ptr, weight_ptr, V, softcap, scale, SMOOTHING, SOFTCAP, PREDICT, "", EDGES, DEPTH, BLOCK
    )
    store_row(
        logits_ptr, target, weight_ptr, loss_ptr, stats_ptr, z_ptr, predicted_ptr, row, V,
        top, log2_sum, sum_z, sum_w, column, smoothing, z_loss, softcap, scale, SMOOTHING, SOFTCAP, STATS,
    )  # fmt: skip


@jit
@do_not_specialize("M", "ignore_index")
def _cross_entropy_narrow_fwd_kernel(
    logits_ptr, target_ptr, weight_ptr, loss_ptr, stats_ptr, z_ptr, predicted_ptr,
    M, V, stride_m, ignore_index, smoothing, z_loss, softcap, scale,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, STATS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write loss and statistics of several rows with few classes."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    inside = rows < M
    target = tl.load(target_ptr + rows, mask=inside, other=ignore_index)
    counts = inside & (target != ignore_index)  # `inside` too: ignore_index may not fit the targets' dtype as `other`
    mask = counts[:, None] & (cols < V)[None, :]
    x = tl.load(logits_ptr + rows[:, None] * stride_m + cols[None, :], mask=mask, other=float("-inf")).to(tl.float32)
    z = x
    k = scale * LOG2E
    if SOFTCAP:
        z, _ = cap(x, scale, softcap)
        z = tl.where(mask, z, float("-inf"))
        k = LOG2E
    # A row with only -inf, and rows beyond M, would compute inf − inf.
    top = tl.maximum(tl.max(z, 1), LOWEST)
    log2_sum = tl.log2(tl.sum(tl.exp2((z - top[:, None]) * k), 1))
    valid = (target >= 0) & (target < V)
    z_target = tl.load(logits_ptr + rows * stride_m + target, mask=counts & valid, other=0.0).to(tl.float32)
    if SOFTCAP:
        z_target, _ = cap(z_target, scale, softcap)
    log2_sum = tl.where(valid, log2_sum, float("nan"))
    w_target = 1.0
    sum_z = 0.0
    sum_w = V * 1.0
    if weight_ptr is not None:
        w_target = tl.load(weight_ptr + target, mask=counts & valid, other=0.0).to(tl.float32)
    if SMOOTHING:
        if weight_ptr is not None:
            w = tl.load(weight_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)
            sum_z = tl.sum(tl.where(mask, z * w[None, :], 0.0), 1)
            sum_w = tl.sum(w, 0)
        else:
            sum_z = tl.sum(tl.where(mask, z, 0.0), 1)
    WEIGHTED: tl.constexpr = weight_ptr is not None
    loss, zl, mass = row_loss(
        z_target, w_target, top, log2_sum, sum_z, sum_w, V, smoothing, z_loss, scale, WEIGHTED, SMOOTHING, SOFTCAP
    )
    tl.store(loss_ptr + rows, tl.where(counts, loss, 0.0), mask=inside)
    if stats_ptr is not None:
        at = stats_ptr + HEAD + STATS * rows
        tl.store(at, tl.where(counts, top, 0.0), mask=inside)
        tl.store(at + 1, tl.where(counts, log2_sum, 0.0), mask=inside)
        if STATS == 3:
            tl.store(at + 2, tl.where(counts, mass, 0.0), mask=inside)
    if z_ptr is not None:
        tl.store(z_ptr + rows, tl.where(counts, zl, 0.0), mask=inside)
    if predicted_ptr is not None:
        # x, not z: a softcap rounds different large logits to equal ones.
        column = tl.min(tl.where(x == tl.max(x, 1)[:, None], cols[None, :], NOWHERE), 1)
        column = tl.where(column < V, column, 0)
        tl.store(predicted_ptr + rows, tl.where(counts, column, -1), mask=inside)


# Reduce the rows' losses in a single step by one program (FIRST and LAST), or in two steps with partial sums (5, P) in
# between. FIRST reads rows: programs take tiles in turns, in a fixed order, without atomics, so results are
# reproducible. LAST writes results: out, z_out, accuracy, and for the backward pass stats[0] = 1 / divisor and, with
# class weights, stats[1] = divisor / row count, since the mean of z-loss is over rows and not over weights.
@jit
@do_not_specialize("M", "P", "ignore_index")
def _reduce_kernel(
    loss_ptr, z_ptr, target_ptr, weight_ptr, predicted_ptr, divisor_ptr, partial_ptr,
    out_ptr, z_out_ptr, accuracy_ptr, stats_ptr, M, P, V, ignore_index,
    MEAN: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce the losses, z-losses, weights, counts and hits of the rows."""
    COUNT: tl.constexpr = (MEAN and divisor_ptr is None) or predicted_ptr is not None
    at = tl.arange(0, BLOCK)
    if FIRST:
        loss = tl.zeros((BLOCK,), tl.float32)
        z = tl.zeros((BLOCK,), tl.float32)
        w = tl.zeros((BLOCK,), tl.float32)
        count = tl.zeros((BLOCK,), tl.int32)
        hits = tl.zeros((BLOCK,), tl.int32)
        for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK), tl.num_programs(0)):
            rows = (tile * BLOCK + at).to(tl.int64)
            mask = rows < M
            if out_ptr is not None:
                loss += tl.load(loss_ptr + rows, mask=mask, other=0.0)
            if z_ptr is not None:
                z += tl.load(z_ptr + rows, mask=mask, other=0.0)
            if COUNT:
                target = tl.load(target_ptr + rows, mask=mask, other=ignore_index)
                counts = mask & (target != ignore_index)
                count += counts.to(tl.int32)
                if weight_ptr is not None:
                    valid = counts & (target >= 0) & (target < V)
                    w += tl.load(weight_ptr + target, mask=valid, other=0.0).to(tl.float32)
                if predicted_ptr is not None:
                    predicted = tl.load(predicted_ptr + rows, mask=mask, other=-1)
                    hits += (counts & (predicted == target)).to(tl.int32)
        sum_loss, sum_z, sum_w = tl.sum(loss, 0), tl.sum(z, 0), tl.sum(w, 0)
        # Counts are exact in fp32 below 2**24; above, they are rounded once, after the integer sum.
        sum_count, sum_hits = tl.sum(count, 0).to(tl.float32), tl.sum(hits, 0).to(tl.float32)
    else:
        mask = at < P
        sum_loss = tl.sum(tl.load(partial_ptr + at, mask=mask, other=0.0), 0)
        sum_z = tl.sum(tl.load(partial_ptr + P + at, mask=mask, other=0.0), 0)
        sum_w = tl.sum(tl.load(partial_ptr + 2 * P + at, mask=mask, other=0.0), 0)
        sum_count = tl.sum(tl.load(partial_ptr + 3 * P + at, mask=mask, other=0.0), 0)
        sum_hits = tl.sum(tl.load(partial_ptr + 4 * P + at, mask=mask, other=0.0), 0)
    if LAST:
        divisor = 1.0
        z_divisor = 1.0
        if MEAN:
            # The mean over no rows is 0, not 0 / 0: a rank without targets must not turn the sum over all ranks into
            # NaN.
            z_divisor = tl.maximum(sum_count, 1.0)
            divisor = z_divisor
            if weight_ptr is not None:
                # Weights that sum to 0 over valid rows give NaN, as in PyTorch.
                divisor = tl.where(sum_count == 0.0, 1.0, sum_w)
            if divisor_ptr is not None:
                divisor = tl.load(divisor_ptr).to(tl.float32)
                z_divisor = divisor
            tl.store(stats_ptr, 1.0 / divisor)
        if out_ptr is not None:
            result = sum_loss / divisor
            if MEAN and weight_ptr is not None:
                # The backward pass multiplies z_loss by this quotient, which replaces 1 / divisor with z-loss's
                # divisor.
                tl.store(stats_ptr + 1, divisor / z_divisor)
                if z_ptr is not None:
                    result = (sum_loss - sum_z) / divisor + sum_z / z_divisor
            tl.store(out_ptr, result)
        if z_out_ptr is not None:
            tl.store(z_out_ptr, sum_z / z_divisor)
        if accuracy_ptr is not None:
            tl.store(accuracy_ptr, sum_hits / sum_count)
    else:
        part = partial_ptr + tl.program_id(0)
        tl.store(part, sum_loss)
        tl.store(part + P, sum_z)
        tl.store(part + 2 * P, sum_w)
        tl.store(part + 3 * P, sum_count)
        tl.store(part + 4 * P, sum_hits)


@jit
def _write_gradient(
    x_ptr, dx_ptr, rows, stride_m, stride_dm, first, cols, here, inside, counts, target, weight_ptr,
    top, log2_sum, mass, on_target, factor, classes, smoothing, z_loss, softcap, scale,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Write a tile of the gradient, 0 in ignored rows. The class of a column is first + cols."""
    # The target distribution: (1 − ε) w[target] on the target and ε/V · w on every class; `classes` replaces V for a
    # shard.
    off_target = 0.0
    if SMOOTHING:
        off_target = smoothing / classes
        if weight_ptr is not None:
            w = tl.load(weight_ptr + first + cols, mask=here, other=0.0).to(tl.float32)
            off_target = off_target * w[None, :]
    inputs = counts[:, None] & here[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_m + cols[None, :], mask=inputs, other=0.0).to(tl.float32)
    on_target = tl.where((first + cols)[None, :] == target[:, None], on_target, 0.0)
    dx = _slope(x, top, log2_sum, mass, on_target + off_target, factor, z_loss, softcap, scale, SOFTCAP)
    # The gradient of an ignored row is 0 even if the upstream gradient is inf or NaN.
    dx = tl.where(counts[:, None], dx, 0.0).to(dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + rows[:, None] * stride_dm + cols[None, :], dx, mask=inside[:, None] & here[None, :])


# A program: BLOCK_M rows × BLOCK_N columns. The grid is flat, since elements share only their row's statistics.
#   dloss     (M,) upstream gradient with stride g, 0 for a reduced loss
#   classes   V, or the class count of all shards together
# dlogits may alias logits: the thread that writes an element has read that element.
@jit
@do_not_specialize("M", "ignore_index")
def _cross_entropy_bwd_kernel(
    dloss_ptr, logits_ptr, target_ptr, weight_ptr, stats_ptr, dlogits_ptr,
    M, V, classes, stride_g, stride_m, stride_dm, ignore_index, smoothing, z_loss, softcap, scale,
    MEAN: tl.constexpr, SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, STATS: tl.constexpr, EDGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write dlogits from the row statistics."""
    # With EDGES a body is whole groups of 4 (fp32) or 8 numbers, at most V // 4 · 4. The grid needs a bound for all
    # rows, but a body depends on the row's address.
    blocks = tl.cdiv(V // 4 * 4 if EDGES else V, BLOCK_N)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < M
    target = tl.load(target_ptr + rows, mask=inside, other=ignore_index)
    counts = inside & (target != ignore_index)
    at = stats_ptr + HEAD + STATS * rows
    top = tl.load(at, mask=inside, other=0.0)[:, None]
    log2_sum = tl.load(at + 1, mask=inside, other=0.0)[:, None]
    factor = tl.load(dloss_ptr + rows * stride_g, mask=inside, other=0.0).to(tl.float32)[:, None]
    if MEAN:
        factor = factor * tl.load(stats_ptr)
    mass = 1.0
    on_target = 1.0 - smoothing
    if weight_ptr is not None:
        valid = (target >= 0) & (target < V)
        w_target = tl.load(weight_ptr + target, mask=counts & valid, other=0.0).to(tl.float32)
        on_target = (1.0 - smoothing) * w_target[:, None]
        mass = tl.load(at + 2, mask=inside, other=0.0)[:, None]
        if MEAN:
            z_loss = z_loss * tl.load(stats_ptr + 1)
    first, width = 0, V
    if EDGES:
        row = (tl.program_id(0) // blocks).to(tl.int64)
        logits_ptr += row * stride_m
        dlogits_ptr += row * stride_dm
        rows = tl.zeros((1,), tl.int64)
        first, width = split(logits_ptr, V)
        if tl.program_id(0) % blocks == 0:
            edge, real = edges(logits_ptr, first, width, V)
            _write_gradient(
                logits_ptr, dlogits_ptr, rows, 0, 0, 0, edge, real, inside, counts, target, weight_ptr,
                top, log2_sum, mass, on_target, factor, classes, smoothing, z_loss, softcap, scale, SMOOTHING, SOFTCAP,
            )  # fmt: skip
        logits_ptr = align(logits_ptr, first)
        dlogits_ptr = align(dlogits_ptr, first)
    _write_gradient(
        logits_ptr, dlogits_ptr, rows, stride_m, stride_dm, first, cols, cols < width, inside, counts, target,
        weight_ptr, top, log2_sum, mass, on_target, factor, classes, smoothing, z_loss, softcap, scale,
        SMOOTHING, SOFTCAP,
    )  # fmt: skip


# A program: one row at a time. Writes the row's loss, then overwrites the row by factor · d(loss)/d(logits): the logits
# are a chunk's scratch buffer. Persistent grid: as many rows are in flight as there are programs.
#   factor      None, or (M,) with stride_factor, 0 for a common factor; applied in fp32, since later scaling would
#               round twice
#   BACK        the second reading starts at the row's end, which was read last and is still in the L2 cache
#   KEEP, DROP  eviction policies of the first reading and of the second
# The second reading recomputes exponentials, because a row does not fit into registers.
@jit
@do_not_specialize("M", "ignore_index")
def _cross_entropy_grad_kernel(
    logits_ptr, target_ptr, loss_ptr, factor_ptr,
    M, V, stride_m, stride_factor, ignore_index, smoothing, z_loss, softcap, scale,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, KEEP: tl.constexpr, DROP: tl.constexpr, BACK: tl.constexpr,
    EDGES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write each row's loss and overwrite the row by its gradient."""
    lane = tl.arange(0, BLOCK)
    tile = tl.arange(0, DEPTH)[:, None] * BLOCK + lane[None, :]
    blocks = tl.cdiv(V, DEPTH * BLOCK)
    for r in range(tl.program_id(0), M, tl.num_programs(0)):
        row = r + tl.full((), 0, tl.int64)
        row_ptr = logits_ptr + row * stride_m
        body_ptr = row_ptr
        width = V
        if EDGES:
            first, width = split(row_ptr, V)
            body_ptr = align(row_ptr, first)
            blocks = tl.cdiv(width, DEPTH * BLOCK)
        target = tl.load(target_ptr + row)
        if target == ignore_index:
            tl.store(loss_ptr + row, 0.0)
            for start in range(0, width, BLOCK):
                zeros = tl.zeros((BLOCK,), logits_ptr.dtype.element_ty)
                tl.store(body_ptr + start + lane, zeros, mask=start + lane < width)
            if EDGES:
                edge, real = edges(row_ptr, first, width, V)
                tl.store(row_ptr + edge, tl.zeros(edge.shape, logits_ptr.dtype.element_ty), mask=real)
        else:
            top, _, log2_sum, sum_z, sum_w, _, _ = row_sums(
                row_ptr, None, V, softcap, scale, SMOOTHING, SOFTCAP, False, KEEP, EDGES, DEPTH, BLOCK
            )
            valid = (target >= 0) & (target < V)
            log2_sum = tl.where(valid, log2_sum, float("nan"))
            x_target = tl.load(row_ptr + target, mask=valid, other=0.0).to(tl.float32)
            z_target = x_target
            if SOFTCAP:
                z_target, _ = cap(x_target, scale, softcap)
            loss, _, _ = row_loss(
                z_target, 1.0, top, log2_sum, sum_z, sum_w, V, smoothing, z_loss, scale, False, SMOOTHING, SOFTCAP
            )
            tl.store(loss_ptr + row, loss)
            factor = 1.0
            if factor_ptr is not None:
                factor = tl.load(factor_ptr + row * stride_factor)
            off_target = smoothing / V if SMOOTHING else None
            # Barrier: every thread has read the target's logit, which the loop overwrites as if it were any other
            # class, without a comparison per element. The target's gradient is written at the end.
            tl.debug_barrier()
            for i in range(blocks):
                at = ((blocks - 1 - i) if BACK else i) * (DEPTH * BLOCK) + tile
                mask = at < width
                x = tl.load(body_ptr + at, mask=mask, other=0.0, eviction_policy=DROP).to(tl.float32)
                dx = _slope(x, top, log2_sum, 1.0, off_target, factor, z_loss, softcap, scale, SOFTCAP)
                tl.store(body_ptr + at, dx.to(logits_ptr.dtype.element_ty), mask=mask, eviction_policy=DROP)
            if EDGES:
                edge, real = edges(row_ptr, first, width, V)
                x = tl.load(row_ptr + edge, mask=real, other=0.0).to(tl.float32)
                dx = _slope(x, top, log2_sum, 1.0, off_target, factor, z_loss, softcap, scale, SOFTCAP)
                tl.store(row_ptr + edge, dx.to(logits_ptr.dtype.element_ty), mask=real)
            tl.debug_barrier()
            taken = 1.0 - smoothing + smoothing / V
            dx = _slope(x_target, top, log2_sum, 1.0, taken, factor, z_loss, softcap, scale, SOFTCAP)
            tl.store(row_ptr + target, dx.to(logits_ptr.dtype.element_ty), mask=valid)
