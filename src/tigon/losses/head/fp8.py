"""A head's three products in FP8, for the walk over chunks. `tigon.ops.fp8.recipe` explains the scales.

    logits   rows of x in e4m3, by W           → bf16, in the chunk's buffer
    dlogits  the loss's pass over the buffer   → rows in e4m3, without the targets' numbers
    dx       these rows, by Wᵀ                 → bf16, and a row of W for each target
    dW       these rows transposed, by x with the rows' scales folded in, in e4m3, and a row of x for each target

A row's largest gradient is the target's, p − 1 times a factor. Where p is small and all factors are equal, e4m3 would
round these numbers alike, by up to 6 %; they would also set the scale, below which most of 128,000 classes vanish. So
the target's number stays in bf16: it multiplies a row of W and a row of x, which costs no product.

A gradient in e4m3 takes half the memory of its logits. Chunks are therefore a quarter of those in bf16, and the
gradients of several chunks are held for the products of dx and dW. In the memory of a chunk in bf16 this covers half as
many rows again, so dW is summed less often. W and Wᵀ in e4m3 come on top, for the length of the walk.

The products need numbers of classes divisible by 16: classes with zero weights follow the head's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import use_triton
from tigon.losses.head.chunks import Chunk, Chunks, Gradients
from tigon.losses.head.head import Projection
from tigon.losses.head.vocabulary_parallel import Shards
from tigon.ops.embedding import sorted_ids, sums_of_runs
from tigon.ops.fp8.columns import fold_scales, to_columns, transpose_rows
from tigon.ops.fp8.products import multiply_columns, multiply_rows, why_unsupported
from tigon.ops.fp8.recipe import ALIGNMENT, E4M3, Rows, Weight, round_up
from tigon.ops.fp8.rows import quantize_rows
from tigon.ops.fp8.weight import measure_weights, quantize_transposed, quantize_weight
from tigon.ops.linear.padded_product import empty_logits

# Bytes of transposed gradients, or of an fp32 share of dW, at a time.
BLOCK_BYTES = 2**26


def check_fp8(name: str, weight: Tensor, compute: torch.dtype, shards: Shards | None) -> None:
    """Raise a ValueError where a head cannot multiply in FP8."""
    why = f"all classes on each device, got {shards.describe()}." if shards is not None else why_unfit(weight, compute)
    if why:
        raise ValueError(f"{name}: fp8 goes with {why}")


def why_unfit(weight: Tensor, compute: torch.dtype) -> str:
    """What a head with this weight lacks for FP8 products, behind "fp8 goes with"; "" for nothing."""
    if compute != torch.bfloat16:
        return f"x in bf16, or under autocast to bf16, got {compute}."
    if weight.shape[1] % ALIGNMENT or not weight.numel():
        return f"a width H divisible by {ALIGNMENT}, got weight {tuple(weight.shape)}."
    reason = why_unsupported(weight.device) if weight.is_cuda else ""
    return f"a device that multiplies e4m3, got {weight.device}: {reason}" if reason else ""


@dataclass(kw_only=True)
class Fp8Projection(Projection):
    """A head in e4m3. rows: the weight (V padded to 16, H). columns: the transposed weight, for dx, or None.

    The weight itself may have any dtype. bias: bf16, padded as rows.
    """

    rows: Weight
    columns: Weight | None
    parts: ClassVar[int] = 4

    @classmethod
    def quantize(cls, x: Tensor, weight: Tensor, bias: Tensor | None, need_dx: bool) -> Fp8Projection:
        zeros = round_up(weight.shape[0]) - weight.shape[0]
        bias = None if bias is None else F.pad(bias.bfloat16(), (0, zeros))
        weight, amax = weight.contiguous(), measure_weights([weight])
        parts = [weight]
        if zeros:  # the last classes are padded apart: a copy of the weight would be large
            whole = weight.shape[0] // ALIGNMENT * ALIGNMENT
            parts = [weight[:whole], F.pad(weight[whole:], (0, 0, 0, zeros))]
        columns = quantize_transposed(parts, amax) if need_dx else None
        return cls(x.bfloat16(), weight, bias, rows=quantize_weight(parts, amax), columns=columns)

    @property
    def classes(self) -> int:
        """V, padded."""
        return self.rows.data.shape[0]

    def empty_logits(self, rows: int, dtype: torch.dtype) -> Tensor:
        return empty_logits(rows, self.classes, self.x, dtype)[:, : self.weight.shape[0]]

    def widen(self, logits: Tensor) -> Tensor:
        """The rows in a buffer of `empty_logits`, with the padding."""
        return logits.as_strided((logits.shape[0], self.classes), (self.classes, 1))

    def logits(self, x: Tensor, out: Tensor) -> Tensor:
        multiply_rows(quantize_rows(x), self.rows, self.bias, out=self.widen(out))
        return out


class Fp8Gradients(Gradients):
    """`Gradients` in FP8, for a walk over an `Fp8Projection`: two products for all rows whose gradients are held."""

    def __init__(
        self, walk: Chunks, dx: Tensor | None, dw: Sequence[Tensor] | None, db: Tensor | None, add: bool = False
    ) -> None:
        super().__init__(walk, dx, dw, db, add)
        assert isinstance(walk.head, Fp8Projection)
        self._walk, self._head, self._overwrites = walk, walk.head, not add
        x, held = walk.head.x, 0 if dx is None and dw is None else min(walk.visited, walk.held)
        # dlogits of walk rows from `_start` on, and the targets' numbers.
        self._rows = Rows(x.new_empty(held, walk.head.classes, dtype=E4M3), x.new_empty(held, 1, dtype=torch.float32))
        self._targets = x.new_empty(held, 1)
        self._start = 0

    def add(self, chunk: Chunk, more: tuple[Tensor, Tensor, float] | None = None) -> None:
        if len(self._targets):
            self._hold(chunk)
        if self.db is not None:
            self.db += chunk.logits.sum(0, dtype=self.db.dtype)
        self._first = False

    def _hold(self, chunk: Chunk) -> None:
        rows, targets = self._select(chunk.start, chunk.stop)
        logits, ids = chunk.logits, self._find_ids(chunk.target)[:, None]
        torch.gather(logits, 1, ids, out=targets)
        logits.scatter_(1, ids, 0.0)
        # A NaN in x reaches the padding, but a row that does not count has no gradient.
        wide = self._head.widen(logits)
        wide[:, logits.shape[1] :].zero_()
        quantize_rows(wide, out=rows)
        if self.db is not None:
            logits.scatter_(1, ids, targets)
        after = min(chunk.stop + self._walk.size, self._walk.visited)
        if chunk.stop == after or after - self._start > len(self._targets):
            self._multiply(chunk.stop)
            self._start = chunk.stop

    def _select(self, start: int, stop: int) -> tuple[Rows, Tensor]:
        rows = slice(start - self._start, stop - self._start)
        return Rows(self._rows.data[rows], self._rows.scale[rows]), self._targets[rows]

    def _find_ids(self, target: Tensor) -> Tensor:
        """The targets, and any class for those that do not count, whose rows are zero."""
        return target.long().clamp(0, self._head.weight.shape[0] - 1)

    def _multiply(self, stop: int) -> None:
        """Add the held rows, up to `stop`, to dx and dW."""
        rows, targets = self._select(self._start, stop)
        at = self._walk.row_indices(self._start, stop)
        x, target = self._walk.select(self._start, stop, self._head.x, self._walk.target)
        ids = self._find_ids(target)
        if self.dx is not None:
            assert self._head.columns is not None
            own = self.dx[at] if isinstance(at, slice) else torch.empty_like(x)
            multiply_rows(rows, self._head.columns, out=own)
            own.addcmul_(targets, self._head.weight.index_select(0, ids).to(own.dtype))
            if isinstance(at, Tensor):
                self.dx.index_copy_(0, at, own)
        if self.dw is not None:
            self._add_weight_gradient(self.dw, rows, x)
            add_by_id(self.dw, x, targets.view(-1), ids)

    def _add_weight_gradient(self, dw: Sequence[Tensor], rows: Rows, x: Tensor) -> None:
        factor, c = fold_scales(rows.scale, quantize_rows(x).scale)
        columns = to_columns(x, factor)
        # Blocks of classes, so that neither the transposed gradient nor dW exists a second time.
        step = max(128, BLOCK_BYTES // max(len(x), 4 * x.shape[1]) // 128 * 128)
        first, begin = self._overwrites and self._start == 0, 0
        for total in dw:
            for at in range(0, total.shape[0], step):
                out = total[at : at + step]
                gradient = transpose_rows(rows.data[:, begin + at : begin + at + out.shape[0]])
                if first:
                    multiply_columns(gradient, columns, c, out.dtype, out=out)
                else:
                    out += multiply_columns(gradient, columns, c, out.dtype)
            begin += total.shape[0]


def add_by_id(sums: Sequence[Tensor], x: Tensor, factor: Tensor, ids: Tensor) -> None:
    """Add factor · x (M, H) to row ids[m] of `sums`, which hold consecutive rows. Equal ids are summed first, in fp32.

    The same bits on every run.
    """
    keys, order = sorted_ids(ids, sum(map(len, sums)), -1) if use_triton(x) else torch.sort(ids, stable=True)
    # Places count distinct ids from 0 on. The host does not know how many there are: beyond them are sums of nothing.
    place = torch.zeros_like(keys)
    torch.cumsum(keys[1:] != keys[:-1], 0, dtype=keys.dtype, out=place[1:])
    found = torch.arange(len(ids), device=ids.device).scatter_(0, place.long(), keys.long())
    for total in sums:
        share = x.new_empty(x.shape, dtype=total.dtype)
        if use_triton(x):
            sums_of_runs(x, place, order, share, scale=factor)
        else:
            products = (x.float() * factor.float()[:, None]).index_select(0, order)
            share.copy_(torch.zeros_like(products).index_add_(0, place, products))
        if len(sums) > 1:
            share.masked_fill_(((found < 0) | (found >= len(total)))[:, None], 0.0)
        # Places beyond the last id, and ids of another part, add zeros to any row.
        total.index_add_(0, found.remainder(len(total)), share)
        found = found - len(total)
