"""Divergence kernels: row values and their gradient.

    input, a    student's side, (M, V) with row stride im; target, b: teacher's side with row stride tm
    KIND        "kl", "reverse" (KL(Q ‖ P)), "jsd", "tvd"
    FORM        "logits", "log" (log-probabilities), "probabilities"
    mask        (M,), 0 for ignored rows, or None
    rows        (M,) fp32 values
    stats       (M, 5) fp32 for logits: both log-sum-exps, each as high and low half, and Σ q · u. For an ignored row
                the first is +inf, which no log-sum-exp is (an infinite logit's is NaN): the backward needs no mask
    signs       TVD's slopes (signs.py) or None; plane: columns in a quarter row, whose quarters are then read together
    EDGES       rows begin or end between 16-byte boundaries, as described in `tigon.kernels.tiles.edges`

Kernels take logarithms in base 2, as the hardware does: lq and lp are log2 of q and p, and k = log2(e) / temperature
turns logits into log2. The loss's slope with respect to lq is a multiple of u. Row offsets are int64, columns int32.
"""

from __future__ import annotations

from tigon.kernels import jit, tl
from tigon.kernels.tiles.constants import LN2, LOWEST
from tigon.kernels.tiles.divergence import half_sign, sides
from tigon.kernels.tiles.edges import align, edges, split
from tigon.kernels.tiles.fold import fold
from tigon.ops.divergence.signs import store_signs

# KL's unit is 2⁴⁰, which changes no digit. A lane that has seen only a mask with the least fp32 number adds
# several of them; an ∞ would remain, as 0 · ∞, when a greater logit gives the mask no weight.
LITTLE = tl.constexpr(2.0**-40)


@jit
def _split(top, log, k):
    """Split a row's log-sum-exp, top + log, into two fp32: a single fp32 would shift every probability of the row."""
    # fp64: a log-sum-exp of 1e4 has three decimal places in fp32, and a probability needs more. A few fp64 instructions
    # per row, none per element.
    lse = top.to(tl.float64) + log.to(tl.float64) / k
    high = lse.to(tl.float32)
    low = (lse - high.to(tl.float64)).to(tl.float32)
    # Beyond 1e9 fp64 too has no digits left for log, so the parts stay apart. An infinite top stays NaN.
    far = (tl.abs(top) > 1e9) & (tl.abs(top) < float("inf"))
    return tl.where(far, top, high), tl.where(far, log / k, low)


@jit
def _fold_both(a, b, top_a, sum_a, top_b, sum_b, value, shift, k, KIND: tl.constexpr):
    """Fold tiles (DEPTH, lanes) of both sides' logits into the running maxima and sums of every lane."""
    top_a, sum_a, _, _ = fold(a, top_a, sum_a, k)
    top_b, sum_b, shrink, e = fold(b, top_b, sum_b, k)
    if KIND == "kl":
        difference = tl.fma(b - a, LITTLE, shift * -LITTLE)
        # In masked columns b − a is -inf − (-inf). There e is 0, as for classes that the teacher excludes, and the
        # select drops the NaN.
        value = value * shrink + tl.sum(tl.where(e == 0.0, 0.0, e * difference), 0)
    return top_a, sum_a, top_b, sum_b, value


@jit
def _terms(a, b, beta, k, KIND: tl.constexpr, FORM: tl.constexpr):
    """Divergence terms for probabilities or log-probabilities."""
    if KIND == "tvd":
        terms = 0.5 * tl.abs(b - a)
    elif FORM == "probabilities":
        terms = tl.where(b == 0.0, 0.0, b * (tl.log2(b) - a * k))
    else:
        terms, _, _ = sides(a * k, b * k, beta, KIND)
    return terms


@jit
def _both_edges(input_ptr, target_ptr, first, width, V, other: tl.constexpr):
    """Load both sides' row edges as tiles (1, lanes)."""
    edge, real = edges(input_ptr, first, width, V)
    a = tl.load(input_ptr + edge, mask=real, other=other).to(tl.float32)
    b = tl.load(target_ptr + edge, mask=real, other=other).to(tl.float32)
    return a[None, :], b[None, :]


@jit
def _tile(DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    # DEPTH blocks are folded together: a running maximum then costs 1/DEPTH of an exponential.
    return tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@jit
def _reach(width, plane, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """End and step for the loop over a row's tiles."""
    stop, step = width, DEPTH * BLOCK
    if plane is not None:
        stop, step = plane, BLOCK
    return stop, step


@jit
def _columns(start, width, plane, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """A tile's columns (DEPTH, BLOCK), and the mask for those inside the row."""
    if plane is None:
        cols = start + _tile(DEPTH, BLOCK)
        mask = cols < width
    else:
        lane = start + tl.arange(0, BLOCK)
        cols = tl.arange(0, DEPTH)[:, None] * plane + lane[None, :]
        mask = (lane < plane)[None, :] & (cols < width)
    return cols, mask


@jit
def first_difference(input_ptr, target_ptr):
    """Difference between the two sides' first logits, subtracted before it can cost digits."""
    shift = tl.load(target_ptr).to(tl.float32) - tl.load(input_ptr).to(tl.float32)
    # No such constant if the first logits are a mask's -inf.
    return tl.where(tl.abs(shift) < 1e30, shift, 0.0)


@jit
def sum_statistics(
    input_ptr, target_ptr, V, shift, k, plane,
    KIND: tl.constexpr, EDGES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Statistics over V logits: both maxima, both Σ exp, their log₂, and KL's Σ e · (b − a − shift) · LITTLE.

    e are the teacher's exponentials. Exponentials are relative to their side's maximum.
    """
    width = V
    input_body, target_body = input_ptr, target_ptr
    if EDGES:
        first, width = split(input_ptr, V)
        input_body, target_body = align(input_ptr, first), align(target_ptr, first)
    value = tl.zeros((BLOCK,), tl.float32)
    # A finite start: a lane with only -inf must not compute inf − inf.
    top_a = tl.full((BLOCK,), LOWEST, tl.float32)
    top_b = tl.full((BLOCK,), LOWEST, tl.float32)
    sum_a = tl.zeros((BLOCK,), tl.float32)
    sum_b = tl.zeros((BLOCK,), tl.float32)
    stop, step = _reach(width, plane, DEPTH, BLOCK)
    for start in range(0, stop, step):
        cols, mask = _columns(start, width, plane, DEPTH, BLOCK)
        a = tl.load(input_body + cols, mask=mask, other=float("-inf")).to(tl.float32)
        b = tl.load(target_body + cols, mask=mask, other=float("-inf")).to(tl.float32)
        top_a, sum_a, top_b, sum_b, value = _fold_both(a, b, top_a, sum_a, top_b, sum_b, value, shift, k, KIND)
    row_a = tl.max(top_a, 0)
    row_b = tl.max(top_b, 0)
    if EDGES:
        a_edge, b_edge = _both_edges(input_ptr, target_ptr, first, width, V, float("-inf"))
        nothing = tl.zeros((a_edge.shape[1],), tl.float32)
        least = nothing + LOWEST
        edge_a, edge_sum_a, edge_b, edge_sum_b, edge_value = _fold_both(
            a_edge, b_edge, least, nothing, least, nothing, nothing, shift, k, KIND
        )
        row_a = tl.maximum(row_a, tl.max(edge_a, 0))
        row_b = tl.maximum(row_b, tl.max(edge_b, 0))
    # From each lane's maximum to the row's. A lane without a logit has sum 0 and a finite weight.
    weight = tl.exp2((top_b - row_b) * k)
    whole_a = tl.sum(sum_a * tl.exp2((top_a - row_a) * k), 0)
    if EDGES:
        whole_a += tl.sum(edge_sum_a * tl.exp2((edge_a - row_a) * k), 0)
    log_a = tl.log2(whole_a)
    whole_b = tl.sum(sum_b * weight, 0)
    if EDGES:
        edge_weight = tl.exp2((edge_b - row_b) * k)
        whole_b += tl.sum(edge_sum_b * edge_weight, 0)
    log_b = tl.log2(whole_b)
    part = 0.0
    if KIND == "kl":
        part = tl.sum(value * weight, 0)
        if EDGES:
            part += tl.sum(edge_value * edge_weight, 0)
    return row_a, whole_a, log_a, row_b, whole_b, log_b, part


@jit
def store_log_sums(stats_ptr, row, row_a, log_a, row_b, log_b, k):
    """Store a row's first four statistics: both log-sum-exps, in halves."""
    high_a, low_a = _split(row_a, log_a, k)
    high_b, low_b = _split(row_b, log_b, k)
    tl.store(stats_ptr + 5 * row, high_a)
    tl.store(stats_ptr + 5 * row + 1, low_a)
    tl.store(stats_ptr + 5 * row + 2, high_b)
    tl.store(stats_ptr + 5 * row + 3, low_b)


@jit
def finish_kl(row_a, log_a, row_b, whole_b, log_b, part, shift, k):
    """A row's KL from its statistics: E_p[b − a] − (lse_b − lse_a), in a single reading."""
    # Back from the unit 2⁴⁰, with the shift added again. Subtract the maxima, the log-sum-exps' large parts, first.
    gap = tl.fma(part / whole_b, 1.0 / LITTLE, shift - (row_b - row_a))
    return (gap * k - (log_b - log_a)) * LN2


@jit
def second_reading(
    input_ptr, target_ptr, V, row_a, log_a, row_b, log_b, beta, k, plane, signs_ptr,
    KIND: tl.constexpr, EDGES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the terms, in bits, and Σ q · u over a row's V logits, whose log-sum-exps are known."""
    width = V
    input_body, target_body = input_ptr, target_ptr
    if EDGES:
        first, width = split(input_ptr, V)
        input_body, target_body = align(input_ptr, first), align(target_ptr, first)
    value = tl.zeros((BLOCK,), tl.float32)
    mean_u = tl.zeros((BLOCK,), tl.float32)
    stop, step = _reach(width, plane, DEPTH, BLOCK)
    blocks = tl.cdiv(stop, step)
    for i in range(blocks):
        # From the end, which the first reading read last and which is still cached.
        start = (blocks - 1 - i) * step
        cols, mask = _columns(start, width, plane, DEPTH, BLOCK)
        a = tl.load(input_body + cols, mask=mask, other=float("-inf")).to(tl.float32)
        b = tl.load(target_body + cols, mask=mask, other=float("-inf")).to(tl.float32)
        terms, q, u = sides((a - row_a) * k - log_a, (b - row_b) * k - log_b, beta, KIND)
        value += tl.sum(terms, 0)
        mean_u += tl.sum(q * u, 0)
        if signs_ptr is not None:
            store_signs(signs_ptr, start, plane, u, DEPTH, BLOCK)
    all_terms = tl.sum(value, 0)
    if EDGES:
        a, b = _both_edges(input_ptr, target_ptr, first, width, V, float("-inf"))
        terms, q, u = sides((a - row_a) * k - log_a, (b - row_b) * k - log_b, beta, KIND)
        all_terms += tl.sum(tl.sum(terms, 0), 0)
    all_u = tl.sum(mean_u, 0)
    if EDGES:
        all_u += tl.sum(tl.sum(q * u, 0), 0)
    return all_terms, all_u


@jit
def sum_terms(
    input_ptr, target_ptr, V, beta, k, plane, signs_ptr,
    KIND: tl.constexpr, FORM: tl.constexpr, EDGES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the terms over a row's V probabilities or log-probabilities, in bits for logarithms."""
    width = V
    input_body, target_body = input_ptr, target_ptr
    if EDGES:
        first, width = split(input_ptr, V)
        input_body, target_body = align(input_ptr, first), align(target_ptr, first)
    value = tl.zeros((BLOCK,), tl.float32)
    other: tl.constexpr = 0.0 if FORM == "probabilities" else float("-inf")
    stop, step = _reach(width, plane, DEPTH, BLOCK)
    for start in range(0, stop, step):
        cols, mask = _columns(start, width, plane, DEPTH, BLOCK)
        a = tl.load(input_body + cols, mask=mask, other=other).to(tl.float32)
        b = tl.load(target_body + cols, mask=mask, other=other).to(tl.float32)
        value += tl.sum(_terms(a, b, beta, k, KIND, FORM), 0)
        if signs_ptr is not None:
            store_signs(signs_ptr, start, plane, half_sign(a, b), DEPTH, BLOCK)
    all_terms = tl.sum(value, 0)
    if EDGES:
        a, b = _both_edges(input_ptr, target_ptr, first, width, V, other)
        all_terms += tl.sum(tl.sum(_terms(a, b, beta, k, KIND, FORM), 0), 0)
    return all_terms


@jit
def store_terms(rows_ptr, row, terms, KIND: tl.constexpr):
    tl.store(rows_ptr + row, terms * (1.0 if KIND == "tvd" else LN2))


@jit
def store_ignored(rows_ptr, stats_ptr, row, FORM: tl.constexpr):
    """Write an ignored row's value and statistics."""
    tl.store(rows_ptr + row, 0.0)
    if FORM == "logits":
        tl.store(stats_ptr + 5 * row, float("inf"))


# A program: one row. Ignored rows are not read. KL and given (log-)probabilities take a single reading;
# with logits, JSD, TVD and reverse KL need both log-sum-exps before the first term, so they read the rows twice.
@jit
def _divergence_fwd_kernel(
    input_ptr, target_ptr, mask_ptr, rows_ptr, stats_ptr, signs_ptr, V, stride_im, stride_tm, beta, k, plane,
    KIND: tl.constexpr, FORM: tl.constexpr, EDGES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row's value and statistics."""
    row = tl.program_id(0).to(tl.int64)
    if mask_ptr is not None:
        counts = tl.load(mask_ptr + row)
        if counts == 0:
            store_ignored(rows_ptr, stats_ptr, row, FORM)
            return
    input_ptr += row * stride_im
    target_ptr += row * stride_tm
    if signs_ptr is not None:
        signs_ptr += row * plane
    if FORM == "logits":
        shift = first_difference(input_ptr, target_ptr)
        row_a, _, log_a, row_b, whole_b, log_b, part = sum_statistics(
            input_ptr, target_ptr, V, shift, k, plane, KIND, EDGES, DEPTH, BLOCK
        )
        store_log_sums(stats_ptr, row, row_a, log_a, row_b, log_b, k)
        if KIND == "kl":
            tl.store(rows_ptr + row, finish_kl(row_a, log_a, row_b, whole_b, log_b, part, shift, k))
        else:
            terms, mean_u = second_reading(
                input_ptr, target_ptr, V, row_a, log_a, row_b, log_b, beta, k, plane, signs_ptr, KIND, EDGES, DEPTH,
                BLOCK,
            )  # fmt: skip
            store_terms(rows_ptr, row, terms, KIND)
            tl.store(stats_ptr + 5 * row + 4, mean_u)
    else:
        terms = sum_terms(input_ptr, target_ptr, V, beta, k, plane, signs_ptr, KIND, FORM, EDGES, DEPTH, BLOCK)
        store_terms(rows_ptr, row, terms, KIND)


@jit
def _write_gradient(
    drows_ptr, input_ptr, target_ptr, stats_ptr, dinput_ptr, row, cols, here, valid, high_a, low_a,
    stride_g, stride_im, stride_tm, stride_dm, beta, k, KIND: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Write a row's gradient for some columns. here: columns inside the row. high_a, low_a: None unless logits."""
    mask = here & valid
    b = tl.load(target_ptr + row * stride_tm + cols, mask=mask, other=0.0).to(tl.float32)
    # None for KL between (log-)probabilities, whose gradient −p needs only the target: half the traffic.
    if input_ptr is not None:
        a = tl.load(input_ptr + row * stride_im + cols, mask=mask, other=0.0).to(tl.float32)
    if FORM == "logits":
        # Subtract the high half first, where the difference is exact; the low half is a correction.
        high_b = tl.load(stats_ptr + 5 * row + 2)
        low_b = tl.load(stats_ptr + 5 * row + 3)
        lq = ((a - high_a) - low_a) * k
        lp = ((b - high_b) - low_b) * k
        if KIND == "kl":
            dx = tl.exp2(lq) - tl.exp2(lp)
        else:
            _, q, u = sides(lq, lp, beta, KIND)
            # The softmax's Jacobian applied to q · u: dz = q · (u − Σ q · u).
            dx = q * (u - tl.load(stats_ptr + 5 * row + 4)) * (1.0 if KIND == "tvd" else LN2)
        dx = dx * (k * LN2)
    elif KIND == "tvd":
        dx = half_sign(a, b)
    elif KIND == "kl":
        dx = -b if FORM == "probabilities" else -tl.exp2(b * k)
    else:
        _, q, u = sides(a * k, b * k, beta, KIND)
        # With respect to log q: reverse KL, Σ q (log q − log p), has q · (u + 1). In JSD the 1 cancels against
        # log M's slope.
        dx = q * (u * LN2 + (1.0 if KIND == "reverse" else 0.0))
    # A select, since an ignored row's upstream gradient may be NaN. stride_g is 0 for a shared upstream gradient.
    dx = tl.where(valid, dx * tl.load(drows_ptr + row * stride_g), 0.0)
    tl.store(dinput_ptr + row * stride_dm + cols, dx.to(dinput_ptr.dtype.element_ty), mask=here)


# A program: a row's BLOCK columns. The grid is flat, since elements share only their row's statistics.
#   drows     (M,) fp32 upstream gradient with stride g, 0 if all rows share the same number
#   dinput    dense
@jit
def _divergence_bwd_kernel(
    drows_ptr, input_ptr, target_ptr, mask_ptr, stats_ptr, dinput_ptr, V, stride_g, stride_im, stride_tm, beta, k,
    KIND: tl.constexpr, FORM: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # With EDGES a body is at most V // 4 · 4 wide for any dtype. The grid needs a bound for all rows, but a body
    # depends on the row's address.
    blocks = tl.cdiv(V // 4 * 4 if EDGES else V, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    valid = True
    high_a, low_a = None, None
    if FORM == "logits":
        high_a = tl.load(stats_ptr + 5 * row)
        low_a = tl.load(stats_ptr + 5 * row + 1)
        valid = tl.where(high_a == float("inf"), 0, 1) == 1  # integers: the interpreter has no mask of float scalars
    elif mask_ptr is not None:
        valid = tl.load(mask_ptr + row) != 0
    width, stride_dm = V, V
    if EDGES:
        target_ptr += row * stride_tm
        if input_ptr is not None:
            input_ptr += row * stride_im
        dinput_ptr += row * V
        first, width = split(target_ptr, V)
        if tl.program_id(0) % blocks == 0:
            edge, real = edges(target_ptr, first, width, V)
            _write_gradient(
                drows_ptr, input_ptr, target_ptr, stats_ptr, dinput_ptr, row, edge, real, valid, high_a, low_a,
                stride_g, 0, 0, 0, beta, k, KIND, FORM,
            )  # fmt: skip
        target_ptr, dinput_ptr = align(target_ptr, first), align(dinput_ptr, first)
        if input_ptr is not None:
            input_ptr = align(input_ptr, first)
        stride_im, stride_tm, stride_dm = 0, 0, 0
    _write_gradient(
        drows_ptr, input_ptr, target_ptr, stats_ptr, dinput_ptr, row, cols, cols < width, valid, high_a, low_a,
        stride_g, stride_im, stride_tm, stride_dm, beta, k, KIND, FORM,
    )  # fmt: skip
