"""The products of a group of adapted layers that share an input, forward and backward, for tigon.ops.linear.adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.kernels import use_triton
from tigon.ops.cast_together import cast_together
from tigon.ops.linear.lora import LoRA, dense, multiplier, widest_dtype
from tigon.ops.lora_dropout import draw_masks, dropped_gradient, dropped_outer, dropped_product, kept_share


def rounded_product(
    left: Tensor, right: Tensor, dtype: torch.dtype, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """scale · left right, rounded to dtype, which may be fp32 beside half-precision factors."""
    # Uninitialised: each branch below writes all of it. beta = 0 does not read it either, so garbage NaN stays out.
    if out is None:
        out = left.new_empty(left.shape[0], right.shape[1], dtype=dtype)
    if dtype not in (left.dtype, torch.float32):  # cuBLAS widens results, and narrows none
        return out.copy_(rounded_product(left, right, torch.promote_types(left.dtype, dtype), scale))
    # The scale rides in the product's epilogue. A pass over (M, r) or (M, N) for it would be a launch and a reading
    # more.
    if dtype == left.dtype:
        return torch.mm(left, right, out=out) if scale == 1.0 else out.addmm_(left, right, beta=0, alpha=scale)
    if left.is_meta:
        return out  # before torch 2.13 there is no meta kernel of a product with an out_dtype
    # cuBLAS writes its fp32 sums as they are. Casting the factors first would copy x, the widest operand.
    if left.is_cuda:
        return torch.addmm(out, left, right, out_dtype=dtype, beta=0, alpha=scale, out=out)
    return out.addmm_(left.to(dtype), right.to(dtype), beta=0, alpha=scale)


def _halves(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two narrow tensors whose sum is t but for 2⁻¹⁷ of it."""
    # high has the upper 8 bits of the mantissa, and low the next 8. t − high is exact in fp32.
    high = t.to(dtype)
    return high, (t - high).to(dtype)


def skinny_product(
    wide: Tensor, narrow: Tensor, dtype: torch.dtype, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """scale · wide narrow, where `wide` has the tokens' numbers and `narrow` r columns, which may be in fp32."""
    # The common case: adapters in x's dtype, or narrowed under autocast.
    if narrow.dtype == wide.dtype:
        return rounded_product(wide, narrow, dtype, scale, out)
    # Both halves side by side as 2r columns: `wide`, the large operand, is read from DRAM once. The halves of r columns
    # are small.
    both = rounded_product(wide, torch.cat(_halves(narrow, wide.dtype), 1), narrow.dtype, scale)
    r = narrow.shape[1]
    # In fp32, and rounded after the sum: the low half would vanish in a result that is rounded before.
    total = (both[:, :r] + both[:, r:]).to(dtype)
    return total if out is None else out.copy_(total)


def _narrow_factors(left: Tensor, right: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors in dtype with the same product; of wider ones the halves, as three times as many inner numbers."""
    if left.dtype == dtype:
        return left, right
    # (high + low)(upper + lower) without low · lower, which is below the error of the others. Three products stand
    # in one of 3r inner numbers, whose result is written once.
    (high, low), (upper, lower) = _halves(left, dtype), _halves(right, dtype)
    return torch.cat((high, high, low), 1), torch.cat((upper, lower, upper), 0)


def outer_product(
    left: Tensor, right: Tensor, dtype: torch.dtype, scale: float = 1.0, bias: Tensor | None = None
) -> Tensor:
    """scale · left right + bias over r inner numbers, in dtype; the factors may be in fp32."""
    left, right = _narrow_factors(left, right, dtype)
    # The bias enters here, with the adapter's part: the frozen product that follows adds to both, and no pass is made
    # for it.
    if bias is not None:
        return torch.addmm(bias.to(dtype), left, right, alpha=scale)
    return rounded_product(left, right, dtype, scale)


def add_outer_product(
    out: Tensor, left: Tensor, right: Tensor, scale: float = 1.0, over: bool = False
) -> Tensor:  # fmt: skip
    """out + scale · left right over r inner numbers, written to out or not; the factors may be in fp32."""
    left, right = _narrow_factors(left, right, out.dtype)
    # Either way `out` is read in the product's epilogue, and not in a pass of its own. `over` saves memory, not
    # traffic.
    return out.addmm_(left, right, alpha=scale) if over else torch.addmm(out, left, right, alpha=scale)


def stacked(dtype: torch.dtype, *stacks: Sequence[Tensor]) -> list[Tensor]:
    """Each stack of matrices as one, in this dtype; all that is copied for it is copied by one launch."""
    wholes = [stack[0] for stack in stacks]
    # A single factor in the right dtype is multiplied where it lies.
    copied = [i for i, stack in enumerate(stacks) if len(stack) > 1 or stack[0].dtype != dtype]
    if not copied:
        return wholes
    # One buffer and one launch for all factors of the group: they are small, and a launch each costs more than its
    # copy.
    flat = cast_together([t for i in copied for t in stacks[i]], dtype)
    # The matrices of a stack lie one behind the other, so a view joins them: [A…] is (Σr, H) without another copy.
    for i, part in zip(copied, flat.split_with_sizes([sum(t.numel() for t in stacks[i]) for i in copied]), strict=True):
        wholes[i] = part.view(-1, wholes[i].shape[1])
    return wholes


class Group:
    """What is not a tensor of a group of adapted layers.

    dtype: of x, of the wide products and of the results. thin: of t, u and the adapters as they are multiplied: fp32
    where adapters are, outside of autocast, else dtype.
    """

    def __init__(self, layers: tuple[LoRA, ...], dtype: torch.dtype, wide: bool) -> None:
        self.dtype, self.count = dtype, len(layers)
        # Under autocast factors are narrowed as F.linear narrows them, hence wide = False there.
        self.thin = widest_dtype(layers, dtype) if wide else dtype
        # 1/(1-p) is part of the scale, so the kernels multiply x as it is and only leave elements out.
        self.scales = [float(layer.scale) / kept_share(layer.dropout) for layer in layers]
        self.ranks = [layer.a.shape[0] for layer in layers]
        # Held by the plan and not saved by autograd, which takes tensors alone. So no hook of a checkpoint or of
        # offloading sees them.
        self.frozen = [None if isinstance(layer.weight, Tensor) else layer.weight for layer in layers]
        self.masks = None
        if any(layer.dropout for layer in layers):
            like = layers[0].a
            # Decided once, in the forward pass: forward and backward have to compute the same masks by the same code.
            kernels = use_triton(like.new_empty(0, dtype=dtype))
            self.masks = draw_masks([layer.dropout for layer in layers], like.device, kernels)

    def tensors(self, layers: tuple[LoRA, ...]) -> list[Tensor | None]:
        """A…, B…, biases…, weights…"""
        weights = [layer.weight if isinstance(layer.weight, Tensor) else None for layer in layers]
        # Four runs of `count`, None where a layer has no bias or no plain weight: `split` undoes this, for gradients
        # and needs alike.
        return [*(x.a for x in layers), *(x.b for x in layers), *(x.bias for x in layers), *weights]

    def split(self, tensors: Sequence[Any]) -> list[list[Any]]:
        return [list(tensors[i : i + self.count]) for i in range(0, 4 * self.count, self.count)]

    def columns(self, t: Tensor) -> Sequence[Tensor]:
        """Each layer's columns of t (M, Σr)."""
        # Tensor.split is Python, and takes three times as long.
        return t.split_with_sizes(self.ranks, 1) if self.count > 1 else (t,)

    def weight(self, i: int, weights: Sequence[Tensor | None]) -> Tensor:
        own = weights[i]
        frozen = self.frozen[i]
        found = own if own is not None else frozen
        assert found is not None
        # Made for one product, and freed by the reference count behind it. Two dense weights never wait for each other.
        return dense(found, self.dtype)

    def factors(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """[A…] (Σr, H) and every B, as they are multiplied."""
        # A joined and every B by itself: x meets all A in one product, while each B has a tensor y of its own.
        joined, *each = stacked(self.thin, a, *((own,) for own in b))
        return joined, each

    # ------------------------------------------------------------------------------------------------------ forward

    def thin_products(self, rows: Tensor, a: Tensor, first: int = 0) -> Tensor:
        """t (M, Σr) = x [A…]ᵀ of a tile of rows that begins at the row `first`."""
        # Each layer drops other elements, so torch would write a dropped copy of x for each. The kernel computes the
        # masks where it has loaded x.
        if self.masks is not None:
            return dropped_product(rows, a, self.ranks, self.masks.of(range(self.count), first), self.thin)
        return skinny_product(rows, a.t(), self.thin)

    def results(
        self, rows: Tensor, t: Tensor, b: Sequence[Tensor], biases: Sequence[Tensor | None],
        weights: Sequence[Tensor | None],
    ) -> list[Tensor]:  # fmt: skip
        """The adapter's part comes first: the wide product adds to it, and nothing of y's size is written twice."""
        results = []
        # `own` is a view with the row stride Σr, which the products take as it is.
        for i, own in enumerate(self.columns(t)):
            factors = own, b[i].t()
            if multiplier(self.frozen[i]) is None:
                # The outer product writes y, the wide product reads it as its addend: one pass less over y than adding
                # afterwards.
                y = outer_product(*factors, self.dtype, self.scales[i], biases[i])
                results.append(y.addmm_(rows, self.weight(i, weights).t()))
            else:
                # A layer that multiplies by itself has no epilogue to add in. Its result is fresh (`own_product`), so
                # the adapter's part is added to it in place.
                results.append(add_outer_product(self.product(i, rows, weights), *factors, self.scales[i], over=True))
        return results

    def product(self, i: int, rows: Tensor, weights: Sequence[Tensor | None]) -> Tensor:
        """The frozen layer's part alone."""
        multiply = multiplier(self.frozen[i])
        # W is (N, H), and .t() is a view: the library multiplies by the transpose where it lies.
        return torch.mm(rows, self.weight(i, weights).t()) if multiply is None else multiply(rows)

    # ----------------------------------------------------------------------------------------------------- backward

    def upstream(self, dys: Sequence[Tensor | None], b: Sequence[Tensor]) -> Tensor:
        """u (M, Σr) = [sᵢ dyᵢ Bᵢ…], the columns of layers that have a gradient."""
        present = [i for i, dy in enumerate(dys) if dy is not None]
        # One layer: its u is the whole, and needs no columns of a wider tensor.
        if len(present) == 1:
            (i,) = present
            return skinny_product(dys[i], b[i], self.thin, self.scales[i])  # type: ignore[arg-type]
        ranks = [self.ranks[i] for i in present]
        # Each layer's product writes its columns of one tensor, so that dx and d[A…] are then one product each, not one
        # a layer.
        u = b[0].new_empty(dys[present[0]].shape[0], sum(ranks))  # type: ignore[union-attr]
        for i, own in zip(present, u.split_with_sizes(ranks, 1), strict=True):
            skinny_product(dys[i], b[i], self.thin, self.scales[i], own)  # type: ignore[arg-type]
        return u

    def input_gradient(
        self, dys: Sequence[Tensor | None], u: Tensor, a: Tensor, weights: Sequence[Tensor | None], first: int = 0
    ) -> Tensor:
        """dx = u [A…] + Σ dyᵢ Wᵢ, over the layers that have a gradient."""
        present = [i for i, dy in enumerate(dys) if dy is not None]
        # A result that nobody used has no gradient, and its A must not meet another layer's u.
        joined = self._of(present, a, 0)
        # The adapters' part first: small, and rounded once, before the frozen products are added to it in their
        # epilogues.
        dx = (
            outer_product(u, joined, self.dtype)
            if self.masks is None
            else self.dropped_outer(u, joined, present, first)
        )
        for i in present:
            # W is made dense again here, and was not kept: a dense copy of a 4-bit weight is four times its size.
            dx.addmm_(dys[i], self.weight(i, weights))  # type: ignore[arg-type]
        return dx

    def dropped_outer(self, u: Tensor, a: Tensor, present: Sequence[int], first: int = 0) -> Tensor:
        """Σ mᵢ ⊙ (uᵢ Aᵢ) of these layers' u (M, Σr) and A (Σr, H)."""
        assert self.masks is not None
        ranks = [self.ranks[i] for i in present]
        return dropped_outer(u, a, ranks, self.masks.of(present, first), self.dtype)

    def _of(self, layers: Sequence[int], joined: Tensor, dim: int, among: Sequence[int] | None = None) -> Tensor:
        """The parts of some layers in a tensor that joins those of `among`, by default all."""
        among = range(self.count) if among is None else among
        # All of them, in the same order: no copy.
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
        # A frozen A wants no gradient, although its u has served dx.
        u = self._of(wanted, u, 1, present)
        # The one product is rounded to the widest parameter's dtype. Each part is narrowed from there, which rounds
        # once more only where dtypes differ.
        widest = a[wanted[0]].dtype
        for i in wanted:
            widest = torch.promote_types(widest, a[i].dtype)
        if self.masks is not None:
            da = dropped_gradient(u, rows, [self.ranks[i] for i in wanted], self.masks.of(wanted, first), widest)
        elif u.dtype == rows.dtype:
            da = rounded_product(u.t(), rows, widest)
        else:
            # x is not widened: u's halves are 2r rows of one product, which reads x once, and their two results are
            # added in fp32.
            both = rounded_product(torch.cat(_halves(u, rows.dtype), 1).t(), rows, u.dtype)
            da = both[: u.shape[1]] + both[u.shape[1] :]
        for i, own in zip(wanted, da.split_with_sizes([self.ranks[i] for i in wanted]), strict=True):
            # Where dtypes agree this is a view of da: Σr rows of H numbers, so nothing is worth a copy.
            found[i] = own.to(a[i].dtype)
        return found

    def b_gradients(
        self, dys: Sequence[Tensor | None], t: Tensor, b: Sequence[Tensor], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """dBᵢ = sᵢ dyᵢᵀ tᵢ."""
        # dy is read a second time here, after `upstream`: two skinny products, each bound by the bytes of dy.
        return [
            None if dy is None or not need else skinny_product(dy.t(), own, like.dtype, scale)
            for dy, own, like, scale, need in zip(dys, self.columns(t), b, self.scales, needs, strict=True)
        ]
