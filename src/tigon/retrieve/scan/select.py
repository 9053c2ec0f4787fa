"""Selection: from maxima the groups that hold the k best rows, and from their exact scores the k best, in order."""

from __future__ import annotations

from tigon.kernels import do_not_specialize, jit, tl


@jit
def order_key(x):
    """fp32 as an order-preserving unsigned integer. NaN is 0, below all; zeros with either sign are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(x == x, tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000), 0)


@jit
def largest(u, K):
    """Mask the K largest unsigned numbers in u, the earlier first among equals.

    Radix search for the K-th largest from the highest bit down, two bits per step: a single sum counts the numbers that
    reach each of three candidates. Bits that all numbers share are skipped, and the search stops once exactly K numbers
    reach the current threshold.
    """
    top = tl.max(u, 0)
    differing = top ^ tl.min(u, 0)
    width = tl.full([], 0, tl.int32)  # the number of low bits in which the numbers differ, rounded up to whole steps
    for place in tl.static_range(0, 32, 2):
        width = tl.where((differing >> place) != 0, place + 2, width)
    least = tl.where(width >= 32, 0, (top >> (width & 31)) << (width & 31)).to(tl.uint32)
    reach = tl.full([], u.shape[0], tl.int32)  # how many numbers are at least `least`
    place = width - 2
    while (place >= 0) & (reach != K):
        one = (tl.full([], 1, tl.uint32) << place.to(tl.uint32)).to(tl.uint32)
        a, b, c = least | one, least | (one << 1), least | (one << 1) | one
        # Three counts below 2²⁰ in a single sum.
        counts = tl.sum((u >= a).to(tl.int64) + ((u >= b).to(tl.int64) << 20) + ((u >= c).to(tl.int64) << 40), 0)
        of_a, of_b, of_c = counts & 0xFFFFF, (counts >> 20) & 0xFFFFF, counts >> 40
        least = tl.where(of_c >= K, c, tl.where(of_b >= K, b, tl.where(of_a >= K, a, least)))
        reach = tl.where(of_c >= K, of_c, tl.where(of_b >= K, of_b, tl.where(of_a >= K, of_a, reach))).to(tl.int32)
        place -= 2
    chosen = u >= least
    if reach != K:  # several numbers equal the K-th: choose the earlier
        above, equal = (u > least).to(tl.int32), (u == least).to(tl.int32)
        chosen = (above != 0) | ((equal != 0) & (tl.cumsum(equal, 0) - equal < K - tl.sum(above, 0)))
    return chosen


@jit
def store_chosen(chosen, value, room_ptr, SIZE: tl.constexpr):
    """Write the chosen values in order, at most SIZE, then -1, to memory that no other program uses."""
    place = tl.arange(0, SIZE)
    at = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.debug_barrier()
    tl.store(room_ptr + place, tl.full([SIZE], -1, tl.int32))
    tl.debug_barrier()
    tl.store(room_ptr + at, value, mask=chosen)
    tl.debug_barrier()


@jit
def keys_at(maxima_ptr, at, there):
    """Keys in the maxima's order. Integer maxima, from signs, are keys themselves, 0 below all."""
    if maxima_ptr.dtype.element_ty == tl.int32:
        key = tl.load(maxima_ptr + at, mask=there, other=0).to(tl.uint32, bitcast=True)
    else:
        key = order_key(tl.load(maxima_ptr + at, mask=there, other=float("nan")))
    return key


@jit
def best_children(
    maxima_ptr, count_ptr, room_ptr, b, B, N, K, at,
    SIZE: tl.constexpr, ARITY: tl.constexpr, STRIP: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Replace the nodes in room with the K children that have the largest maxima, in order. SIZE: rows per child."""
    n = tl.arange(0, PLACES * ARITY)
    node = tl.load(room_ptr + n // ARITY)
    child = node * ARITY + n % ARITY
    if SIZE >= STRIP:
        there = (node >= 0) & (child.to(tl.int64) * SIZE < N)
    else:
        # Children past a strip's rows, at the end of a list or of the items, were never written.
        IN_STRIP: tl.constexpr = STRIP // SIZE
        strip = node // (IN_STRIP // ARITY)
        if count_ptr is not None:
            have = tl.load(count_ptr + strip, mask=node >= 0, other=0)
        else:
            have = tl.minimum(N - strip * STRIP, STRIP)
        there = (node >= 0) & (child % IN_STRIP * SIZE < have)
    chosen = largest(keys_at(maxima_ptr, (child.to(tl.int64) + at) * B + b, there), K)
    # Recomputed to save registers. A key of 0 is a NaN, or a missing child.
    node = tl.load(room_ptr + n // ARITY)
    store_chosen(chosen & there, node * ARITY + n % ARITY, room_ptr, PLACES)


@jit
@do_not_specialize("parents", "children", "B", "parents_at", "children_at")
def _fold_kernel(
    maxima_ptr, parents, children, B, parents_at, children_at, ARITY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute the maxima for a level above the strips, with ARITY children per node."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    parent, b = at // B, at % B
    LEAST: tl.constexpr = 0 if maxima_ptr.dtype.element_ty == tl.int32 else float("-inf")
    best = tl.full([BLOCK], LEAST, maxima_ptr.dtype.element_ty)
    for n in range(ARITY):
        child = parent * ARITY + n
        x = tl.load(maxima_ptr + (child + children_at) * B + b, mask=child < children, other=LEAST)
        best = tl.maximum(best, x)
    tl.store(maxima_ptr + (parent + parents_at) * B + b, best, mask=parent < parents)


@jit
@do_not_specialize("B", "N", "K", "nodes", "at_0", "at_1", "at_2", "at_3", "at_4")
def _pick_kernel(
    maxima_ptr, count_ptr, pick_ptr, certified_ptr, B, N, K, nodes, at_0, at_1, at_2, at_3, at_4, NODES: tl.constexpr,
    SIZE_1: tl.constexpr, SIZE_2: tl.constexpr, SIZE_3: tl.constexpr, SIZE_4: tl.constexpr, ARITY_1: tl.constexpr,
    ARITY_2: tl.constexpr, ARITY_3: tl.constexpr, ARITY_4: tl.constexpr, STRIP: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """A query: the K groups with the largest maxima, in row order; -1 if there are fewer.

    From the top: the K best nodes on a level, then among their children, at most four times. SIZE and ARITY are 0 for
    missing levels. certified_ptr: per query, whether the result is known; then nothing is picked.
    """
    b = tl.program_id(0)
    if certified_ptr is not None:  # noqa: SIM102 - what is None has no address to load from
        if tl.load(certified_ptr + b) != 0:
            return
    room_ptr = pick_ptr + b.to(tl.int64) * PLACES
    node = tl.arange(0, NODES)
    key = keys_at(maxima_ptr, (node.to(tl.int64) + at_0) * B + b, node < nodes)
    store_chosen(largest(key, K) & (node < nodes), node, room_ptr, PLACES)
    best_children(maxima_ptr, count_ptr, room_ptr, b, B, N, K, at_1, SIZE_1, ARITY_1, STRIP, PLACES)
    if ARITY_2 > 0:
        best_children(maxima_ptr, count_ptr, room_ptr, b, B, N, K, at_2, SIZE_2, ARITY_2, STRIP, PLACES)
    if ARITY_3 > 0:
        best_children(maxima_ptr, count_ptr, room_ptr, b, B, N, K, at_3, SIZE_3, ARITY_3, STRIP, PLACES)
    if ARITY_4 > 0:
        best_children(maxima_ptr, count_ptr, room_ptr, b, B, N, K, at_4, SIZE_4, ARITY_4, STRIP, PLACES)


@jit
def locate_candidate(group_ptr, m, G: tl.constexpr):
    """The m-th candidate's offset, -1 if missing: among the chosen groups' candidates or, without groups, among all."""
    if group_ptr is not None:
        group = tl.load(group_ptr + m // G, mask=m >= 0, other=-1)
        at = tl.where(group >= 0, group * G + m % G, -1)
    else:
        at = m
    return at


@jit
def choose_best(
    candidate_ptr, row_ptr, group_ptr, room_ptr, scores_ptr, rows_ptr, b, count, k,
    M: tl.constexpr, OUT: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """The k best candidates of a query, sorted by (score, row). Returns scores, of which the first k count."""
    m = tl.arange(0, M)
    from_at = locate_candidate(group_ptr, m, G)
    there = (from_at >= 0) & (from_at < count)
    keys = order_key(tl.load(candidate_ptr + b * count + from_at, mask=there, other=float("nan")))
    chosen = largest(keys, k)
    place = tl.arange(0, OUT)
    room_ptr += b * OUT
    store_chosen(chosen, m, room_ptr, OUT)
    at = tl.load(room_ptr + place)
    from_at = locate_candidate(group_ptr, at, G)
    there = (from_at >= 0) & (from_at < count)
    keys = order_key(tl.load(candidate_ptr + b * count + from_at, mask=there, other=float("nan")))
    at = tl.maximum(at, 0)
    # As a signed number: the key above, the inverted position below, so that the earlier is larger.
    signed = (keys ^ 0x80000000).to(tl.int32, bitcast=True).to(tl.int64)
    both = tl.sort((signed << 32) | (0x7FFFFFFF - at).to(tl.int64), descending=True)
    at = 0x7FFFFFFF - (both & 0xFFFFFFFF).to(tl.int32)
    keys = (both >> 32).to(tl.int32).to(tl.uint32, bitcast=True) ^ 0x80000000
    found = (place < k) & (keys > 0x007FFFFF)  # the key for -inf
    score = tl.where(keys >= 0x80000000, keys ^ 0x80000000, keys ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)
    score = tl.where(found, score, float("-inf"))
    row = tl.load(row_ptr + b * count + locate_candidate(group_ptr, at, G), mask=found, other=-1)
    tl.store(rows_ptr + b * k + place, row.to(tl.int64), mask=place < k)
    tl.store(scores_ptr + b * k + place, score, mask=place < k)
    return score


@jit
@do_not_specialize("count", "k")
def _choose_kernel(
    candidate_ptr, row_ptr, room_ptr, scores_ptr, rows_ptr, count, k, M: tl.constexpr, OUT: tl.constexpr
):  # fmt: skip
    """A query: the k best candidates, sorted by (score, row). Candidates are in row order."""
    b = tl.program_id(0).to(tl.int64)
    choose_best(candidate_ptr, row_ptr, None, room_ptr, scores_ptr, rows_ptr, b, count, k, M, OUT, 1)


@jit
@do_not_specialize("B", "K", "k")
def _choose_among_groups_kernel(
    candidate_ptr, row_ptr, best_ptr, pick_ptr, maxima_ptr, group_ptr, room_ptr, scores_ptr, rows_ptr, certified_ptr,
    certain_ptr, B, K, k, PLACES: tl.constexpr, M: tl.constexpr, OUT: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """A query: like `_choose_kernel`, for the k groups with the best rows; and whether the result is certain.

    maxima_ptr holds a bound for each group's scores, and the K groups with the largest bounds were picked: no other
    group has a larger bound than the smallest among those. If that is below the k-th score, no other row is among the k
    best. Groups with bound -inf have no row that counts, and with fewer groups than K all were picked.
    """
    b = tl.program_id(0).to(tl.int64)
    if tl.load(certified_ptr + b) != 0:
        return
    r = tl.arange(0, PLACES)
    best = tl.load(best_ptr + b * K + r, mask=r < K, other=float("nan"))
    store_chosen(largest(order_key(best), k) & (r < K), r, group_ptr + b * OUT, OUT)
    score = choose_best(
        candidate_ptr, row_ptr, group_ptr + b * OUT, room_ptr, scores_ptr, rows_ptr, b, K * G, k, M, OUT, G
    )  # fmt: skip
    last = tl.min(tl.where(tl.arange(0, OUT) < k, score, float("inf")), 0)
    group = tl.load(pick_ptr + b * PLACES + r, mask=r < K, other=0)
    bound = tl.load(maxima_ptr + group.to(tl.int64) * B + b, mask=(r < K) & (group >= 0), other=float("inf"))
    least = tl.min(bound, 0)
    certain = (tl.min(group, 0) < 0) | (least < last) | (least == float("-inf"))
    tl.store(certain_ptr + b, certain.to(tl.int32))
