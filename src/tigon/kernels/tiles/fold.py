"""A running softmax statistic kept per lane: lanes are combined once, after the row has been read.

Source: Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867
"""

from __future__ import annotations

from tigon.kernels import jit, tl


@jit
def fold(x, top, total, k):
    """Fold blocks of logits x (DEPTH, BLOCK) into each lane's maximum and Σ exp2((x − maximum) · k), both (BLOCK,).

    Also returns the factor for the old sum, for other sums relative to the maximum, and the exponentials. top starts
    at LOWEST, which is finite; x may be -inf. k > 0: maxima are taken before scaling by k.
    """
    new = tl.maximum(top, tl.max(x, 0))
    shrink = tl.exp2((top - new) * k)
    # Relative to the new maximum: no exponential exceeds 1, and a logit of -inf adds 0. The old sum is rescaled once
    # for all DEPTH values in a lane.
    e = tl.exp2((x - new[None, :]) * k)
    return new, total * shrink + tl.sum(e, 0), shrink, e
