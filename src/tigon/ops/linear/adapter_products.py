"""Matrix products for a group of adapted layers that share an input, forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.kernels import use_triton
from tigon.ops.cast_together import cast_together
from tigon.ops.fp8.blocks import quantize_blocks
from tigon.ops.fp8.recipe import BLOCK, Rows
from tigon.ops.fp8.rows import quantize_rows
from tigon.ops.linear.lora import FrozenFP8, LoRA, dense, is_fp8, multiplier, widest_dtype
from tigon.ops.lora_dropout import draw_masks, dropped_gradient, dropped_outer, dropped_product, kept_share

# How the factors of FP8 products are rounded, by the `block` of the frozen weight.
QUANTIZERS: dict[int | None, Callable[[Tensor], Rows]] = {None: quantize_rows, BLOCK: quantize_blocks}
BESIDE = 3  # tensors that `quantize_rows` reads side by side


def rounded_product(
    left: Tensor, right: Tensor, dtype: torch.dtype, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """scale · left right, rounded to dtype, which may be fp32 with half-precision factors."""
    if out is None:
        out = left.new_empty(left.shape[0], right.shape[1], dtype=dtype)
    if dtype not in (left.dtype, torch.float32):  # cuBLAS widens results, but does not narrow them
        return out.copy_(rounded_product(left, right, torch.promote_types(left.dtype, dtype), scale))
    # The scale is applied in the product's epilogue: a separate pass over (M, r) or (M, N) would cost a launch and a
    # read.
    if dtype == left.dtype:
        return torch.mm(left, right, out=out) if scale == 1.0 else out.addmm_(left, right, beta=0, alpha=scale)
    if left.is_meta:
        return out  # before torch 2.13 there is no meta kernel for a product with an out_dtype
    if left.is_cuda:
        return torch.addmm(out, left, right, out_dtype=dtype, beta=0, alpha=scale, out=out)
    return out.addmm_(left.to(dtype), right.to(dtype), beta=0, alpha=scale)


def _halves(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two narrow tensors whose sum is t up to a relative error of 2⁻¹⁷."""
    high = t.to(dtype)
    return high, (t - high).to(dtype)


def skinny_product(
    wide: Tensor, narrow: Tensor, dtype: torch.dtype, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """scale · wide narrow: `wide` holds token activations, `narrow` has r columns and may be fp32."""
    if narrow.dtype == wide.dtype:
        return rounded_product(wide, narrow, dtype, scale, out)
    # Both halves side by side as 2r columns: `wide`, the large operand, is read from DRAM once.
    both = rounded_product(wide, torch.cat(_halves(narrow, wide.dtype), 1), narrow.dtype, scale)
    r = narrow.shape[1]
    total = (both[:, :r] + both[:, r:]).to(dtype)
    return total if out is None else out.copy_(total)


def _narrow_factors(left: Tensor, right: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors in dtype with the same product; wider factors are split into halves, which triples the inner size."""
    if left.dtype == dtype:
        return left, right
    # (high + low)(upper + lower) without low · lower, which is below the others' error. Three products fused into a
    # single product with inner size 3r, whose result is written once.
    (high, low), (upper, lower) = _halves(left, dtype), _halves(right, dtype)
    return torch.cat((high, high, low), 1), torch.cat((upper, lower, upper), 0)


def outer_product(
    left: Tensor, right: Tensor, dtype: torch.dtype, scale: float = 1.0, bias: Tensor | None = None
) -> Tensor:
    """scale · left right + bias with inner size r, in dtype; the factors may be fp32."""
    left, right = _narrow_factors(left, right, dtype)
    if bias is not None:
        return torch.addmm(bias.to(dtype), left, right, alpha=scale)
    return rounded_product(left, right, dtype, scale)


def add_outer_product(
    out: Tensor, left: Tensor, right: Tensor, scale: float = 1.0, over: bool = False
) -> Tensor:  # fmt: skip
    """out + scale · left right with inner size r, in place if `over`; the factors may be fp32."""
    left, right = _narrow_factors(left, right, out.dtype)
    return out.addmm_(left, right, alpha=scale) if over else torch.addmm(out, left, right, alpha=scale)


def stack_factors(dtype: torch.dtype, *stacks: Sequence[Tensor]) -> list[Tensor]:
    """Concatenate each stack of matrices in this dtype; a single launch makes all copies."""
    wholes = [stack[0] for stack in stacks]
    copied = [i for i, stack in enumerate(stacks) if len(stack) > 1 or stack[0].dtype != dtype]
    if not copied:
        return wholes
    flat = cast_together([t for i in copied for t in stacks[i]], dtype)
    for i, part in zip(copied, flat.split_with_sizes([sum(t.numel() for t in stacks[i]) for i in copied]), strict=True):
        wholes[i] = part.view(-1, wholes[i].shape[1])
    return wholes


def multiply_frozen(rows: Tensor, weight: FrozenFP8) -> Tensor:
    """rows (M, H) Wᵀ."""
    return weight.multiply(QUANTIZERS[weight.block](rows))


def multiply_frozen_transposed(dy: Tensor, weight: FrozenFP8) -> Tensor:
    """dy (M, N) W."""
    fold: Tensor | None = getattr(weight, "fold", None)  # scales of the weight's rows, which no product could apply
    return weight.multiply_transposed(QUANTIZERS[weight.block](dy if fold is None else dy * fold))


class _Rounded:
    """Rows (M, H), and the same in e4m3, made at the first use."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self._made: dict[int | None, Rows] = {}

    def get(self, block: int | None) -> Rows:
        if block not in self._made:
            self._made[block] = QUANTIZERS[block](self.rows)
        return self._made[block]


def _join(layers: Sequence[FrozenFP8]) -> FrozenFP8 | None:
    """The layers as one, whose gradients stand side by side; None where they share no scale."""
    join: Callable[[Sequence[FrozenFP8]], FrozenFP8 | None] | None = getattr(next(iter(layers), None), "join", None)
    return None if join is None else join(layers)


class Group:
    """Everything about a group of adapted layers that is not a tensor.

    dtype: x, the wide products and the results. thin: t, u and the adapters as multiplied: fp32 for fp32 adapters
    outside autocast, else dtype.
    """

    def __init__(self, layers: tuple[LoRA, ...], dtype: torch.dtype, wide: bool) -> None:
        self.dtype, self.count = dtype, len(layers)
        # Autocast narrows factors as F.linear does, hence wide = False there.
        self.thin = widest_dtype(layers, dtype) if wide else dtype
        self.scales = [float(layer.scale) / kept_share(layer.dropout) for layer in layers]
        self.ranks = [layer.a.shape[0] for layer in layers]
        # Held by the plan, not saved by autograd, which takes only tensors: checkpoint and offloading hooks do not see
        # them.
        self.frozen = [None if isinstance(layer.weight, Tensor) else layer.weight for layer in layers]
        # FP8 products give bf16. In other dtypes a frozen weight is dense.
        self.fp8: list[FrozenFP8 | None] = [
            frozen if is_fp8(frozen) and dtype is torch.bfloat16 else None for frozen in self.frozen
        ]
        self.masks = None
        if any(layer.dropout for layer in layers):
            like = layers[0].a
            # Decided once, in the forward pass: forward and backward must compute the same masks with the same code.
            kernels = use_triton(like.new_empty(0, dtype=dtype))
            self.masks = draw_masks([layer.dropout for layer in layers], like.device, kernels)

    def tensors(self, layers: tuple[LoRA, ...]) -> list[Tensor | None]:
        """A…, B…, biases…, weights…"""
        weights = [layer.weight if isinstance(layer.weight, Tensor) else None for layer in layers]
        return [*(x.a for x in layers), *(x.b for x in layers), *(x.bias for x in layers), *weights]

    def split(self, tensors: Sequence[Any]) -> list[list[Any]]:
        return [list(tensors[i : i + self.count]) for i in range(0, 4 * self.count, self.count)]

    def columns(self, t: Tensor) -> Sequence[Tensor]:
        """Each layer's columns in t (M, Σr)."""
        # Tensor.split is Python code and takes three times as long.
        return t.split_with_sizes(self.ranks, 1) if self.count > 1 else (t,)

    def weight(self, i: int, weights: Sequence[Tensor | None]) -> Tensor:
        own = weights[i]
        frozen = self.frozen[i]
        found = own if own is not None else frozen
        assert found is not None
        return dense(found, self.dtype)

    def dense_weights(self, weights: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Each layer's weight as a plain tensor; None where the products run in FP8."""
        return [None if self.fp8[i] is not None else self.weight(i, weights) for i in range(self.count)]

    @contextlib.contextmanager
    def held_weights(self) -> Iterator[None]:
        """Inside, FP8 weights are quantised or transposed once at most, and kept until the end."""
        with contextlib.ExitStack() as stack:
            for frozen in self.fp8:
                hold = getattr(frozen, "hold", None)
                if hold is not None:
                    stack.enter_context(hold())
            yield

    def factors(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """[A…] (Σr, H) and every B, in the dtype they are multiplied in."""
        joined, *each = stack_factors(self.thin, a, *((own,) for own in b))
        return joined, each

    # ------------------------------------------------------------------------------------------------------ forward

    def thin_products(self, rows: Tensor, a: Tensor, first: int = 0) -> Tensor:
        """t (M, Σr) = x [A…]ᵀ for a tile of rows that starts at row `first`."""
        if self.masks is not None:
            return dropped_product(rows, a, self.ranks, self.masks.select(range(self.count), first), self.thin)
        return skinny_product(rows, a.t(), self.thin)

    def results(
        self, rows: Tensor, t: Tensor, b: Sequence[Tensor], biases: Sequence[Tensor | None],
        weights: Sequence[Tensor | None],
    ) -> list[Tensor]:  # fmt: skip
        """Each layer's result. The adapter's part comes first and the wide product adds to y, so y is written once."""
        results = []
        rounded = _Rounded(rows)
        with self.held_weights():
            for i, own in enumerate(self.columns(t)):
                factors = own, b[i].t()
                if self.fp8[i] is None and multiplier(self.frozen[i]) is None:
                    # The outer product writes y and the wide product accumulates onto y: a pass less over y than adding
                    # later.
                    y = outer_product(*factors, self.dtype, self.scales[i], biases[i])
                    results.append(y.addmm_(rows, self.weight(i, weights).t()))
                    continue
                y = self._product(i, rounded, weights)
                bias = None if self.fp8[i] is None else biases[i]  # other layers' own products have added theirs
                if bias is not None:
                    y.add_(bias.to(y.dtype))
                results.append(add_outer_product(y, *factors, self.scales[i], over=True))
        return results

    def products(self, rows: Tensor, weights: Sequence[Tensor | None]) -> list[Tensor]:
        """The frozen layers' parts only; without biases, unless a layer multiplies by itself."""
        rounded = _Rounded(rows)
        with self.held_weights():
            return [self._product(i, rounded, weights) for i in range(self.count)]

    def _product(self, i: int, rounded: _Rounded, weights: Sequence[Tensor | None]) -> Tensor:
        frozen, multiply = self.fp8[i], multiplier(self.frozen[i])
        if frozen is not None:
            return frozen.multiply(rounded.get(frozen.block))
        return torch.mm(rounded.rows, self.weight(i, weights).t()) if multiply is None else multiply(rounded.rows)

    # ----------------------------------------------------------------------------------------------------- backward

    def upstream(self, dys: Sequence[Tensor | None], b: Sequence[Tensor]) -> Tensor:
        """u (M, Σr) = [sᵢ dyᵢ Bᵢ…], the columns of layers that have a gradient."""
        present = [i for i, dy in enumerate(dys) if dy is not None]
        if len(present) == 1:
            (i,) = present
            return skinny_product(dys[i], b[i], self.thin, self.scales[i])  # type: ignore[arg-type]
        ranks = [self.ranks[i] for i in present]
        u = b[0].new_empty(dys[present[0]].shape[0], sum(ranks))  # type: ignore[union-attr]
        for i, own in zip(present, u.split_with_sizes(ranks, 1), strict=True):
            skinny_product(dys[i], b[i], self.thin, self.scales[i], own)  # type: ignore[arg-type]
        return u

    def input_gradient(
        self, dys: Sequence[Tensor | None], u: Tensor, a: Tensor, weights: Sequence[Tensor | None], first: int = 0
    ) -> Tensor:
        """dx = u [A…] + Σ dyᵢ Wᵢ, over the layers that have a gradient."""
        present = [i for i, dy in enumerate(dys) if dy is not None]
        joined = self._select(present, a, 0)
        if any(self.fp8[i] is not None for i in present):
            # An FP8 product writes dx, and does not add to what stands there.
            dx = self.frozen_gradient(dys, weights)
            if self.masks is None:
                return add_outer_product(dx, u, joined, over=True)
            return dx.add_(self.dropped_outer(u, joined, present, first))
        dx = (
            outer_product(u, joined, self.dtype)
            if self.masks is None
            else self.dropped_outer(u, joined, present, first)
        )
        for i in present:
            dx.addmm_(dys[i], self.weight(i, weights))  # type: ignore[arg-type]
        return dx

    def frozen_gradient(self, dys: Sequence[Tensor | None], weights: Sequence[Tensor | None]) -> Tensor:
        """Σ dyᵢ Wᵢ, over the layers that have a gradient: the frozen layers' part of dx."""
        given = [(i, dy) for i, dy in enumerate(dys) if dy is not None]
        fp8 = [(frozen, dy) for i, dy in given if (frozen := self.fp8[i]) is not None]
        dx: Tensor | None = None
        joint = _join([frozen for frozen, _ in fp8])
        if joint is not None:
            parts = [dy for _, dy in fp8]
            rows = quantize_rows(*parts) if len(parts) <= BESIDE else quantize_rows(torch.cat(parts, 1))
            dx = joint.multiply_transposed(rows)
        else:
            for frozen, dy in fp8:
                part = multiply_frozen_transposed(dy, frozen)
                dx = part if dx is None else dx.add_(part)
        for i, dy in given:
            if self.fp8[i] is None:
                weight = self.weight(i, weights)
                dx = torch.mm(dy, weight) if dx is None else dx.addmm_(dy, weight)
        assert dx is not None
        return dx

    def dropped_outer(self, u: Tensor, a: Tensor, present: Sequence[int], first: int = 0) -> Tensor:
        """Σ mᵢ ⊙ (uᵢ Aᵢ) for these layers' u (M, Σr) and A (Σr, H)."""
        assert self.masks is not None
        ranks = [self.ranks[i] for i in present]
        return dropped_outer(u, a, ranks, self.masks.select(present, first), self.dtype)

    def _select(self, layers: Sequence[int], joined: Tensor, dim: int, among: Sequence[int] | None = None) -> Tensor:
        """Select some layers' parts in a tensor that joins the parts for `among`, by default all layers."""
        among = range(self.count) if among is None else among
        if len(layers) == len(among):
            return joined
        parts = dict(zip(among, joined.split_with_sizes([self.ranks[i] for i in among], dim), strict=True))
        return torch.cat([parts[i] for i in layers], dim)

    def a_gradients(
        self,
        dys: Sequence[Tensor | None],
        u: Tensor,
        rows: Tensor,
        a: Sequence[Tensor],
        needs: Sequence[bool],
        first: int = 0,
    ) -> list[Tensor | None]:
        """d[A…] = [u…]ᵀ x, in one product."""
        present = [i for i, dy in enumerate(dys) if dy is not None]
        wanted = [i for i in present if needs[i]]
        found: list[Tensor | None] = [None] * self.count
        if not wanted:
            return found
        u = self._select(wanted, u, 1, present)
        # The product is rounded to the widest parameter dtype, and each part is narrowed from there: a second rounding
        # only where dtypes differ.
        widest = a[wanted[0]].dtype
        for i in wanted:
            widest = torch.promote_types(widest, a[i].dtype)
        if self.masks is not None:
            da = dropped_gradient(u, rows, [self.ranks[i] for i in wanted], self.masks.select(wanted, first), widest)
        elif u.dtype == rows.dtype:
            da = rounded_product(u.t(), rows, widest)
        else:
            both = rounded_product(torch.cat(_halves(u, rows.dtype), 1).t(), rows, u.dtype)
            da = both[: u.shape[1]] + both[u.shape[1] :]
        for i, own in zip(wanted, da.split_with_sizes([self.ranks[i] for i in wanted]), strict=True):
            found[i] = own.to(a[i].dtype)
        return found

    def b_gradients(
        self, dys: Sequence[Tensor | None], t: Tensor, b: Sequence[Tensor], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """dBᵢ = sᵢ dyᵢᵀ tᵢ."""
        return [
            None if dy is None or not need else skinny_product(dy.t(), own, like.dtype, scale)
            for dy, own, like, scale, need in zip(dys, self.columns(t), b, self.scales, needs, strict=True)
        ]
