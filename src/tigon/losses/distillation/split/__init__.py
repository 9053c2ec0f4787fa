"""Heads whose classes lie on several devices, teacher's and student's alike.

    1  each device sends its maxima and sums of both sides (cosine: products), 3 to 6 numbers a row
    2  from all of these it computes its part of the divergence and, except for kl and cosine, of Σ q · u, which it
       sends: 1 number a row
    3  from the total of Σ q · u it computes the gradient of its own logits

With a teacher's K classes step 1 sends the student's K logits too, and step 2 is left out: all devices then compute the
same losses. The devices sum the rows' divergences at the end of the walk. Every device adds up parts in the order of
the devices, so that all devices get the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.losses.distillation.formula import Formula
from tigon.losses.distillation.rows import Rows, TopK
from tigon.losses.distillation.split import gradients, statistics, topk
from tigon.losses.head.vocabulary_parallel import Shards


class Split(NamedTuple):
    """`Classes` of heads that are split as `shards` say."""

    shards: Shards

    @property
    def total(self) -> int:
        return self.shards.classes

    @property
    def widest(self) -> int:
        return self.shards.widest

    def from_head(self, rows: Rows, teacher: Tensor, formula: Formula) -> None:
        own = statistics.of_rows(rows, teacher, formula)
        # The wait stands directly behind the exchange. A second buffer of logits would let the numbers travel beside
        # the next chunk's product, in chunks half as large, which add to dW twice as often.
        merged = statistics.merge(self.shards.gather(own).wait(), rows, formula)
        means = None
        if formula.kind == "cosine":
            cosine = merged.select(-1, statistics.COSINE)
            # Every device has the whole cosine, from the same bits: nothing is left to sum at the end of the walk.
            rows.soft.copy_(statistics.of_valid(1.0 - cosine, rows.labels))
        elif formula.kind != "kl" or not formula.gradient:
            # For forward KL the pass that writes the gradient gives the value as well, and Σ q · u is not asked.
            mean = gradients.write_values(rows, teacher, merged, formula)
            if formula.kind != "kl" and formula.gradient:
                # Without a gradient nothing needs Σ q · u, and the second exchange is left out. All ranks take the same
                # branch, since the formula is the same on all of them.
                means = self.shards.gather(mean).wait()
        if formula.gradient:
            gradients.write_gradients(rows, teacher, merged, means, formula)

    def from_topk(self, rows: Rows, teacher: TopK, formula: Formula) -> None:
        # One exchange: it carries the K given logits, from which every device computes the whole loss and Σ q · u by
        # itself.
        own = topk.of_rows(rows, teacher, formula, self.shards)
        topk.write_rows(rows, teacher, self.shards.gather(own).wait(), formula, self.shards)

    def over_all(self, soft: Tensor, formula: Formula) -> Tensor:
        if formula.rest or formula.kind == "cosine" or not soft.numel():
            return soft  # whole on every device
        # One exchange at the end of the walk adds up all rows at once.
        # A gather and a sum here, in place of an all-reduce: the order of the devices is then the same on all of them.
        return torch.sum(self.shards.gather(soft).wait(), 0)
