"""The kernels of the divergences: of a row, and of its gradient.

Kernels take logarithms to the base 2, as the hardware has them: lq and lp are log2 of q and p, and k = log2(e) /
temperature turns logits into log2. The slope of the loss with respect to lq is a multiple of u.
"""

from __future__ import annotations

from tigon.kernels import jit, tl
from tigon.kernels.tiles.constants import LN2, LOWEST
from tigon.kernels.tiles.divergence import half_sign, sides
from tigon.kernels.tiles.edges import aligned, edges, split
from tigon.kernels.tiles.fold import fold
from tigon.ops.divergence.signs import store_signs

# KL's sums are taken in units of 2⁴⁰, which changes no digit: a lane that has seen nothing but a mask of the least fp32
# number adds several of them, and ∞ would still be there, as 0 · ∞, when a greater logit leaves the mask no weight.
LITTLE = tl.constexpr(2.0**-40)


@jit
def _split(top, log, k):
    """A row's log-sum-exp, top + log, as two fp32: rounded to one it would put every probability of the row off."""
    # fp64: a log-sum-exp of 1e4 has three digits behind the point left in fp32, and a probability needs them.
    # A few fp64 instructions a row and none an element.
    lse = top.to(tl.float64) + log.to(tl.float64) / k
    high = lse.to(tl.float32)
    # high + low has twice fp32's digits. The backward pass subtracts one after the other from a logit.
    low = (lse - high.to(tl.float64)).to(tl.float32)
    # Beyond 1e9 fp64 too has no digits left for log, and the sum is left undone. An infinite top stays NaN.
    far = (tl.abs(top) > 1e9) & (tl.abs(top) < float("inf"))
    return tl.where(far, top, high), tl.where(far, log / k, low)


@jit
def _fold_both(a, b, top_a, sum_a, top_b, sum_b, value, shift, k, KIND: tl.constexpr):
    """Fold tiles (DEPTH, lanes) of both sides' logits into the running maxima and sums of every lane."""
    # a is the student, b the teacher: only the teacher's exponentials weigh the difference.
    top_a, sum_a, _, _ = fold(a, top_a, sum_a, k)
    top_b, sum_b, shrink, e = fold(b, top_b, sum_b, k)
    if KIND == "kl":
        # Σ e · (b − a), relative to the teacher's maximum as sum_b is: both are rescaled by the same factor.
        difference = tl.fma(b - a, LITTLE, shift * -LITTLE)
        # In masked columns b − a is -inf − (-inf). e is 0 there, as for classes that the teacher excludes, and the
        # select drops the NaN.
        value = value * shrink + tl.sum(tl.where(e == 0.0, 0.0, e * difference), 0)
    return top_a, sum_a, top_b, sum_b, value


@jit
def _terms(a, b, beta, k, KIND: tl.constexpr, FORM: tl.constexpr):
    """The terms of a divergence of probabilities or log-probabilities."""
    if KIND == "tvd":
        # Of probabilities: no exponential, and no unit to convert.
        terms = 0.5 * tl.abs(b - a)
    elif FORM == "probabilities":
        # By a select: 0 · log 0 is 0 here, and NaN in arithmetic.
        terms = tl.where(b == 0.0, 0.0, b * (tl.log2(b) - a * k))
    else:
        # The temperature is 1 here: k is log₂ e, from nats to bits.
        terms, _, _ = sides(a * k, b * k, beta, KIND)
    return terms


@jit
def _both_edges(input_ptr, target_ptr, first, width, V, other: tl.constexpr):
    """Both sides' edges of a row, as tiles (1, lanes)."""
    edge, real = edges(input_ptr, first, width, V)
    # `other` has no share in the form at hand: -inf for logits and logarithms, 0 for probabilities.
    a = tl.load(input_ptr + edge, mask=real, other=other).to(tl.float32)
    b = tl.load(target_ptr + edge, mask=real, other=other).to(tl.float32)
    return a[None, :], b[None, :]


@jit
def _tile(DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    # DEPTH blocks at a time are folded into one: a running maximum then costs 1/DEPTH of an exponential.
    return tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@jit
def _reach(width, plane, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """How far a walk over tiles of a row goes, and by what steps."""
    # In planes the four quarters of a row are walked side by side.
    stop, step = width, DEPTH * BLOCK
    if plane is not None:
        stop, step = plane, BLOCK
    return stop, step


@jit
def _columns(start, width, plane, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """The columns of a tile (DEPTH, BLOCK), and which of them there are."""
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
    """A constant between two sides' logits, that of their first; it is taken out before it can cost digits."""
    # Only differences of logits count.
    shift = tl.load(target_ptr).to(tl.float32) - tl.load(input_ptr).to(tl.float32)
    # Where the first logits are a mask's -inf there is no such constant.
    return tl.where(tl.abs(shift) < 1e30, shift, 0.0)


@jit
def statistics_of(
    input_ptr, target_ptr, V, shift, k, plane,
    KIND: tl.constexpr, EDGES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of V logits of a row: both maxima, both Σ exp, their log₂, and KL's Σ e · (b − a − shift) · LITTLE.

    a is the student's side, b the teacher's, and so is e. Exponentials are relative to the maximum of their side.
    """
    width = V
    input_body, target_body = input_ptr, target_ptr
    if EDGES:
        # Both sides' rows lie alike, as `uneven` was asked: one head and one body serve both.
        first, width = split(input_ptr, V)
        input_body, target_body = aligned(input_ptr, first), aligned(target_ptr, first)
    # A sum for every lane: lanes meet once, at the end of the row.
    value = tl.zeros((BLOCK,), tl.float32)
    # A finite start: a lane that has seen only -inf must not compute inf - inf.
    # Both sides are read together: KL needs logits in pairs, and both loads are on their way together.
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
    # Lanes meet here, once for each statistic.
    row_a = tl.max(top_a, 0)
    row_b = tl.max(top_b, 0)
    if EDGES:
        a_edge, b_edge = _both_edges(input_ptr, target_ptr, first, width, V, float("-inf"))
        nothing = tl.zeros((a_edge.shape[1],), tl.float32)
        # The edges have sums of their own, from neutral starts: at most 16 lanes do not fit the body's tile.
        least = nothing + LOWEST
        edge_a, edge_sum_a, edge_b, edge_sum_b, edge_value = _fold_both(
            a_edge, b_edge, least, nothing, least, nothing, nothing, shift, k, KIND
        )
        row_a = tl.maximum(row_a, tl.max(edge_a, 0))
        row_b = tl.maximum(row_b, tl.max(edge_b, 0))
    # From each lane's maximum to the row's. A lane without a logit has a sum of 0, and a finite weight.
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
    """Four of a row's five numbers: both log-sum-exps, in halves."""
    high_a, low_a = _split(row_a, log_a, k)
    high_b, low_b = _split(row_b, log_b, k)
    tl.store(stats_ptr + 5 * row, high_a)
    tl.store(stats_ptr + 5 * row + 1, low_a)
    tl.store(stats_ptr + 5 * row + 2, high_b)
    tl.store(stats_ptr + 5 * row + 3, low_b)


@jit
def kl_of(row_a, log_a, row_b, whole_b, log_b, part, shift, k):
    """KL of a row, from its statistics: E_p[b − a] − (lse_b − lse_a), from one reading."""
    # Back from units of 2⁴⁰, with the shift that was taken out before. The maxima, the large part of both
    # log-sum-exps, are subtracted from each other first.
    gap = tl.fma(part / whole_b, 1.0 / LITTLE, shift - (row_b - row_a))
    return (gap * k - (log_b - log_a)) * LN2


@jit
def second_reading(
    input_ptr, target_ptr, V, row_a, log_a, row_b, log_b, beta, k, plane, signs_ptr,
    KIND: tl.constexpr, EDGES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of V logits of a row whose log-sum-exps are known: the sum of the terms, in bits, and Σ q · u."""
    # Σ q · u goes with the values: with it the gradient needs one more reading, and no sum of its own.
    width = V
    input_body, target_body = input_ptr, target_ptr
    if EDGES:
        first, width = split(input_ptr, V)
        input_body, target_body = aligned(input_ptr, first), aligned(target_ptr, first)
    value = tl.zeros((BLOCK,), tl.float32)
    mean_u = tl.zeros((BLOCK,), tl.float32)
    stop, step = _reach(width, plane, DEPTH, BLOCK)
    blocks = tl.cdiv(stop, step)
    for i in range(blocks):
        # From the end, which the first reading read last and the cache still holds.
        start = (blocks - 1 - i) * step
        cols, mask = _columns(start, width, plane, DEPTH, BLOCK)
        a = tl.load(input_body + cols, mask=mask, other=float("-inf")).to(tl.float32)
        b = tl.load(target_body + cols, mask=mask, other=float("-inf")).to(tl.float32)
        # lq = (a − max) k − log₂ Σ, by the difference first. In masked columns q and p are 0: no kind adds
        # anything there.
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
def terms_of(
    input_ptr, target_ptr, V, beta, k, plane, signs_ptr,
    KIND: tl.constexpr, FORM: tl.constexpr, EDGES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of V probabilities or log-probabilities of a row: the sum of the terms, in bits where they are logarithms."""
    width = V
    input_body, target_body = input_ptr, target_ptr
    if EDGES:
        first, width = split(input_ptr, V)
        input_body, target_body = aligned(input_ptr, first), aligned(target_ptr, first)
    value = tl.zeros((BLOCK,), tl.float32)
    # What masked columns hold has no probability in either form: 0, or its logarithm.
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
    # From bits to nats. TVD's terms are probabilities already.
    tl.store(rows_ptr + row, terms * (1.0 if KIND == "tvd" else LN2))


@jit
def store_ignored(rows_ptr, stats_ptr, row, FORM: tl.constexpr):
    """What an ignored row gets."""
    tl.store(rows_ptr + row, 0.0)
    if FORM == "logits":
        # +inf tells the backward pass that the row is ignored: no log-sum-exp is +inf (an infinite logit's is NaN), and
        # the backward then needs no mask.
        tl.store(stats_ptr + 5 * row, float("inf"))


@jit
def _divergence_fwd_kernel(
    input_ptr, target_ptr, mask_ptr, rows_ptr, stats_ptr, signs_ptr, V, stride_im, stride_tm, beta, k, plane,
    KIND: tl.constexpr, FORM: tl.constexpr, EDGES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row. EDGES: rows begin or end between 16-byte boundaries, as `tigon.kernels.tiles.edges` has it."""
    row = tl.program_id(0).to(tl.int64)
    if mask_ptr is not None:
        # One branch for the whole program, before either row is touched.
        counts = tl.load(mask_ptr + row)
        if counts == 0:
            # Neither side of an ignored row is read: a prompt costs no traffic.
            store_ignored(rows_ptr, stats_ptr, row, FORM)
            return
    # Row offsets are int64, columns int32: a row has fewer than 2**31 numbers.
    input_ptr += row * stride_im
    target_ptr += row * stride_tm
    if signs_ptr is not None:
        signs_ptr += row * plane
    if FORM == "logits":
        shift = first_difference(input_ptr, target_ptr)
        row_a, _, log_a, row_b, whole_b, log_b, part = statistics_of(
            input_ptr, target_ptr, V, shift, k, plane, KIND, EDGES, DEPTH, BLOCK
        )
        # KL leaves the fifth number unwritten, since its gradient q − p needs none.
        store_log_sums(stats_ptr, row, row_a, log_a, row_b, log_b, k)
        if KIND == "kl":
            tl.store(rows_ptr + row, kl_of(row_a, log_a, row_b, whole_b, log_b, part, shift, k))
        else:
            # JSD, TVD and the reverse KL need both log-sum-exps before their first term: the rows are read a second
            # time.
            terms, mean_u = second_reading(
                input_ptr, target_ptr, V, row_a, log_a, row_b, log_b, beta, k, plane, signs_ptr, KIND, EDGES, DEPTH,
                BLOCK,
            )  # fmt: skip
            store_terms(rows_ptr, row, terms, KIND)
            # In u's unit, bits where it is a logarithm: the backward pass converts u and its mean together.
            tl.store(stats_ptr + 5 * row + 4, mean_u)
    else:
        # Given probabilities or logarithms need no statistics: one reading, and the backward pass has the inputs alone.
        terms = terms_of(input_ptr, target_ptr, V, beta, k, plane, signs_ptr, KIND, FORM, EDGES, DEPTH, BLOCK)
        store_terms(rows_ptr, row, terms, KIND)


@jit
def _write_gradient(
    drows_ptr, input_ptr, target_ptr, stats_ptr, dinput_ptr, row, cols, here, valid, high_a, low_a,
    stride_g, stride_im, stride_tm, stride_dm, beta, k, KIND: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The gradient of some columns of a row. here: columns of the row. high_a, low_a: of logits, None for others."""
    mask = here & valid
    # Ignored rows are not read: their mask is empty.
    b = tl.load(target_ptr + row * stride_tm + cols, mask=mask, other=0.0).to(tl.float32)
    # None for the KL of log-probabilities, whose gradient −p is the target's alone: half of the reading falls away.
    if input_ptr is not None:
        a = tl.load(input_ptr + row * stride_im + cols, mask=mask, other=0.0).to(tl.float32)
    if FORM == "logits":
        # Differences with the high half first, where they are exact; the low half then corrects them.
        # The row's numbers are loaded by each of its programs, from the cache after the first.
        high_b = tl.load(stats_ptr + 5 * row + 2)
        low_b = tl.load(stats_ptr + 5 * row + 3)
        lq = ((a - high_a) - low_a) * k
        lp = ((b - high_b) - low_b) * k
        if KIND == "kl":
            # q − p, with neither the loss nor Σ q · u.
            # Two exponentials an element, and no select: neither probability multiplies a logarithm.
            dx = tl.exp2(lq) - tl.exp2(lp)
        else:
            _, q, u = sides(lq, lp, beta, KIND)
            # The Jacobian of the softmax, applied to q · u: dz = q · (u − Σ q · u).
            dx = q * (u - tl.load(stats_ptr + 5 * row + 4)) * (1.0 if KIND == "tvd" else LN2)
        # k · log 2 is 1 / temperature: from z, which the softmax sees, to the logits.
        dx = dx * (k * LN2)
    elif KIND == "tvd":
        # d(½ |p − q|)/dq, without a softmax in between: input and target are probabilities.
        dx = half_sign(a, b)
    elif KIND == "kl":
        # KL is linear in log q: the slope is −p, and q is not needed.
        dx = -b if FORM == "probabilities" else -tl.exp2(b * k)
    else:
        _, q, u = sides(a * k, b * k, beta, KIND)
        # With respect to log q: the reverse KL, Σ q (log q − log p), has q · (u + 1). In JSD that 1 cancels against the
        # slope of log M.
        dx = q * (u * LN2 + (1.0 if KIND == "reverse" else 0.0))
    # A select, since an ignored row's upstream gradient may be NaN.
    # drows_ptr is fp32, as the rows are; stride_g is 0 where all rows share one upstream gradient.
    dx = tl.where(valid, dx * tl.load(drows_ptr + row * stride_g), 0.0)
    tl.store(dinput_ptr + row * stride_dm + cols, dx.to(dinput_ptr.dtype.element_ty), mask=here)


@jit
def _divergence_bwd_kernel(
    drows_ptr, input_ptr, target_ptr, mask_ptr, stats_ptr, dinput_ptr, V, stride_g, stride_im, stride_tm, beta, k,
    KIND: tl.constexpr, FORM: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # EDGES: a body is at most V // 4 · 4 wide, whatever the dtype. The grid needs one bound for all rows, while a body
    # depends on its row's address.
    blocks = tl.cdiv(V // 4 * 4 if EDGES else V, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    # A flat grid: with the row's statistics known an element depends on nothing else in its row.
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    valid = True
    high_a, low_a = None, None
    if FORM == "logits":
        high_a = tl.load(stats_ptr + 5 * row)
        low_a = tl.load(stats_ptr + 5 * row + 1)
        # The forward pass has left +inf for an ignored row: the mask is not read again, nor are that row's other
        # statistics used.
        valid = tl.where(high_a == float("inf"), 0, 1) == 1  # of integers: the interpreter has no mask of float scalars
    elif mask_ptr is not None:
        valid = tl.load(mask_ptr + row) != 0
    # dinput is dense.
    width, stride_dm = V, V
    if EDGES:
        target_ptr += row * stride_tm
        if input_ptr is not None:
            input_ptr += row * stride_im
        dinput_ptr += row * V
        # By the target, since there may be no input.
        first, width = split(target_ptr, V)
        if tl.program_id(0) % blocks == 0:
            # The first program of a row has its edges, too.
            edge, real = edges(target_ptr, first, width, V)
            _write_gradient(
                drows_ptr, input_ptr, target_ptr, stats_ptr, dinput_ptr, row, edge, real, valid, high_a, low_a,
                stride_g, 0, 0, 0, beta, k, KIND, FORM,
            )  # fmt: skip
        target_ptr, dinput_ptr = aligned(target_ptr, first), aligned(dinput_ptr, first)
        if input_ptr is not None:
            input_ptr = aligned(input_ptr, first)
        # The pointers are the row's already.
        stride_im, stride_tm, stride_dm = 0, 0, 0
    _write_gradient(
        drows_ptr, input_ptr, target_ptr, stats_ptr, dinput_ptr, row, cols, cols < width, valid, high_a, low_a,
        stride_g, stride_im, stride_tm, stride_dm, beta, k, KIND, FORM,
    )  # fmt: skip
