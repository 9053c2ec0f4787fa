"""A running softmax statistic, of which every lane has its own: lanes meet once, when the row has been read.

Source: Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867
"""

from __future__ import annotations

from tigon.kernels import jit, tl


@jit
def fold(x, top, total, k):
    """Fold blocks of logits x (DEPTH, BLOCK) into each lane's maximum and Σ exp2((x − maximum) · k), both (BLOCK,).

    Also returns the old sum's factor, for other sums that are relative to the maximum, and the exponentials. top starts
    at LOWEST, which is finite; x may be -inf. k > 0: maxima are taken before it.
    """
    new = tl.maximum(top, tl.max(x, 0))
    # 1 where the maximum has not moved. From LOWEST to a first logit it is 0, and so was the sum.
    shrink = tl.exp2((top - new) * k)
    # Relative to the new maximum: no exponential exceeds 1, and a logit of -inf adds 0. One rescaling of the old sum
    # serves all DEPTH values of a lane.
    e = tl.exp2((x - new[None, :]) * k)
    return new, total * shrink + tl.sum(e, 0), shrink, e
