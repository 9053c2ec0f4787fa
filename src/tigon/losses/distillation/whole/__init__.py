"""Heads of which this device has all classes: a chunk's rows take one launch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tigon.losses.distillation.formula import Formula
from tigon.losses.distillation.rows import Rows, TopK
from tigon.losses.distillation.whole import heads, topk


class Whole(NamedTuple):
    """`Classes` of a head of V = total classes."""

    total: int

    @property
    def widest(self) -> int:
        return self.total

    # A row needs no other device, so one launch reads the logits, writes the losses and overwrites the logits.
    def from_head(self, rows: Rows, teacher: Tensor, formula: Formula) -> None:
        heads.write_rows(rows, teacher, formula)

    def from_topk(self, rows: Rows, teacher: TopK, formula: Formula) -> None:
        # The kernel marks the given classes in the logits, so the buffer is overwritten even where no gradient is
        # wanted. The walk computes the next chunk's logits over it in any case.
        topk.write_rows(rows, teacher, formula)

    def over_all(self, soft: Tensor, formula: Formula) -> Tensor:
        # The kernels have summed over all classes already; `Split` adds up the devices' parts here.
        return soft
