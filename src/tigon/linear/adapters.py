"""Low-rank adapters on frozen linear layers, all layers of one input together: yᵢ = x Wᵢᵀ + bᵢ + sᵢ (x Aᵢᵀ) Bᵢᵀ.

An adapter's products cost nothing in FLOPs and much in memory traffic: written out, every layer reads x and y several
times more than its frozen product does. Here x is read once for all adapters, and y is written by the adapter and then
added to by the frozen product itself, in its epilogue.

    forward     t = x [A…]ᵀ;  yᵢ = sᵢ tᵢ Bᵢᵀ;  yᵢ += x Wᵢᵀ
    backward    uᵢ = sᵢ dyᵢ Bᵢ;  dx = [u…] [A…];  dx += Σ dyᵢ Wᵢ;  d[A…] = [u…]ᵀ x;  dBᵢ = sᵢ dyᵢᵀ tᵢ
    kept        x and t, r numbers a token

The frozen weights get no gradient. A weight in a form of its own, 4-bit say, is made dense in the forward pass, and
again in the backward pass.

Adapters in fp32 beside x in bf16, outside of autocast, compute as if x were widened: each skinny factor stands as the
sum of two bf16 numbers, 16 bits together, and no copy of x is made.

With dropout each adapter has an x of its own, mᵢ ⊙ x / (1-p). The three products of A then go through the kernels of
tigon.ops.lora_dropout, which compute the masks mᵢ again where they read x, and 1/(1-p) is part of sᵢ.

Source: Hu et al. 2021, LoRA, https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.acts import Act, checked_act
from tigon.ops.cast_together import cast_together
from tigon.ops.gated import _gated_fwd, gated_backward, gated_unit
from tigon.ops.lora_dropout import (
    Masks,
    draw_masks,
    dropped_gradient,
    dropped_outer,
    dropped_product,
    keep_mask,
    kept_share,
)
from tigon.runtime import autocast_device, autocast_dtype, first_order, graph_is_kept, keep, kept, use_triton, way_back
from tigon.runtime.dispatch import DTYPES, torch_is_forced


class Frozen(Protocol):
    """A frozen weight (N, H) in a form of its own, such as the 4-bit numbers of `tigon.FourBit`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def device(self) -> torch.device: ...

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight as a plain tensor (N, H); called in the forward pass and again in the backward pass."""


class LoRA(NamedTuple):
    """A frozen linear layer and its adapter: x ↦ x Wᵀ + bias + scale · (dropped(x) Aᵀ) Bᵀ.

    Args:
        weight: W (N, H), x's dtype, without a gradient; or a `tigon.FourBit`, or any object with `shape`,
            `device` and `dense(dtype)`.
        a: A (r, H) in x's dtype, a narrower one or fp32. b: B (N, r), the same.
        scale: of the adapter, such as alpha / r.
        bias: (N,), x's dtype, or None.
        dropout: the probability p with which an element of the adapter's input is dropped, the others being divided by
            1-p; in [0, 1), and rounded to a multiple of 2⁻¹⁶. It holds at every call: pass 0 in evaluation. Each layer
            and each call has a mask of its own, from a seed that torch's generator of x's device draws. The masks are
            not those of `torch.nn.Dropout`.
    """

    weight: Tensor | Frozen
    a: Tensor
    b: Tensor
    scale: float = 1.0
    bias: Tensor | None = None
    dropout: float = 0  # an int: torch.compile makes a number of a float, and would look at the function twice


def lora_linear(
    x: Tensor, layers: Sequence[LoRA], *, saved_by: tuple[Any, Any] | None = None
) -> tuple[Tensor, ...]:  # fmt: skip
    """x Wᵢᵀ + biasᵢ + scaleᵢ · (x Aᵢᵀ) Bᵢᵀ for each layer, keeping x and x Aᵢᵀ for the backward pass.

    Args:
        x: (..., H).
        layers: the layers that x goes through, one or more `tigon.LoRA`: those of queries, keys and values, say. Ranks,
            scales and the dtypes of adapters may differ. Under autocast x, weights and adapters are cast as `F.linear`
            casts them.
        saved_by: a checkpoint's hooks (pack, unpack), to save by before the wide products: a checkpoint computes again
            up to the last tensor that was saved.
    Returns: a tuple of (..., Nᵢ) in x's dtype. Gradients go to x, the adapters and the biases; a gradient has its
        parameter's dtype and is rounded once.
    Raises: ValueError for shapes, dtypes or devices that do not fit, and for a weight that wants a gradient.

    Replaces, for each layer::

        y = F.linear(x, weight, bias) + scale * F.linear(F.linear(x, a), b)

    With a dropout of p, `F.dropout(x, p)` stands before a, with masks of another generator.
    """
    # An iterator is read once here and several times below.
    layers = tuple(layers)
    dtype, autocast = checked_layers("lora_linear", x, layers)
    # The reference takes x as it came: it narrows under autocast itself, and draws masks of its own.
    if not runs_by_hand(dtype, autocast, layers, x):
        return lora_linear_reference(x, layers)
    # Outside of the Function: the recipes of tigon.memory.recompute know casts of what they can compute again.
    x = x if x.dtype == dtype else x.to(dtype)
    # Without gradients nothing is saved, by a checkpoint's hooks neither.
    saved_by = saved_by if torch.is_grad_enabled() else None
    plan = Group(layers, dtype, wide=not autocast)
    # Tensors go in flat, since autograd looks for them among the arguments and not inside of tuples. What is no tensor
    # travels in the plan.
    result = _LoraLinear.apply(x, plan, saved_by, *plan.tensors(layers))
    # Behind the results there may be the empty tensor of `way_back`, which is nobody's result.
    return result[: len(layers)]  # type: ignore[no-any-return]


def gated_lora_linear(
    gate: Tensor, up: Tensor | None, layer: LoRA, *, act: Act = "silu", inplace: bool = False,
    saved_by: tuple[Any, Any] | None = None,
) -> Tensor:  # fmt: skip
    """The adapted layer of act(gate) · up, keeping gate and up alone for the backward pass: `gated_linear` with LoRA.

    Args:
        gate: (..., N), or (..., 2N) holding gate and up side by side when up is None.
        up: (..., N), gate's dtype, or None.
        layer: the layer that takes the product; see `lora_linear`.
        act: a name in `tigon.ops.acts`: "silu", "gelu_tanh", "gelu", "relu" or "relu2" (the square of relu).
        inplace: the backward pass writes the gradients over gate and up, which nobody else may then read. Not where
            the graph is kept (`retain_graph=True`), nor under torch.compile.
        saved_by: as in `lora_linear`; nothing but gate and up is then kept.
    Returns: (..., M) in gate's dtype.
    Raises: ValueError for shapes, dtypes or an act that do not fit.

    Replaces::

        h = F.silu(gate) * up
        y = F.linear(h, weight, bias) + scale * F.linear(F.linear(h, a), b)
    """
    checked_act("gated_lora_linear", act)
    device = gate.device.type
    # A Function is no operation that autocast knows, so what F.linear would cast is cast here. fp64 stays, as with
    # F.linear.
    cast = autocast_dtype(device)
    if cast is not None and gate.dtype != torch.float64:
        gate, up = gate.to(cast), None if up is None else up.to(cast)
    if up is not None and (up.shape != gate.shape or up.dtype != gate.dtype):
        raise ValueError(
            f"gated_lora_linear: up must match gate, {tuple(gate.shape)} {gate.dtype}, got {tuple(up.shape)} "
            f"{up.dtype}."
        )
    if gate.dim() == 0 or (up is None and gate.shape[-1] % 2):
        raise ValueError(f"gated_lora_linear: gate must be (..., 2N) where up is None, got {tuple(gate.shape)}.")
    # The layer's input in shape and dtype: the checks want x, and the product does not exist yet.
    hidden = gate if up is not None else gate[..., : gate.shape[-1] // 2]
    dtype, autocast = checked_layers("gated_lora_linear", hidden, (layer,))
    parameters = tuple(t for t in (layer.a, layer.b, layer.bias, layer.weight) if isinstance(t, Tensor))
    # The backward pass takes the gated unit's kernel, which has no torch path: it writes over its own inputs.
    if not runs_by_hand(dtype, autocast, (layer,), gate) or not use_triton(gate, up, *parameters):
        return lora_linear(gated_unit(gate, up, act=act), (layer,), saved_by=saved_by)[0]
    saved_by = saved_by if torch.is_grad_enabled() else None
    plan = Group((layer,), dtype, wide=not autocast)
    return _GatedLoraLinear.apply(gate, up, plan, act, inplace, saved_by, *plan.tensors((layer,)))[0]  # type: ignore[no-any-return]


def lora_linear_reference(x: Tensor, layers: Sequence[LoRA]) -> tuple[Tensor, ...]:
    """Each layer for itself, in torch's operations: adapters in their dtype where that is wider than x's."""
    device, dtype = x.device.type, autocast_dtype(x.device.type)
    if dtype is not None and x.dtype != torch.float64:
        x = x.to(dtype)
        # Off inside: the operands are cast by now, and the call below has to take the branch without autocast.
        with torch.autocast(autocast_device(device), enabled=False):
            cast = [
                layer._replace(
                    a=layer.a.to(dtype), b=layer.b.to(dtype), bias=None if layer.bias is None else layer.bias.to(dtype)
                )
                for layer in layers
            ]
            return lora_linear_reference(x, cast)
    results = []
    # One draw for all layers, as in the other path: the same seed of torch's generator then gives the same masks here.
    masks = draw_masks([layer.dropout for layer in layers], x.device)
    for i, layer in enumerate(layers):
        # Only a weight that can be made dense goes through F.linear. A layer with a product of its own keeps its
        # rounding.
        if multiplier(layer.weight) is None:
            y = F.linear(x, dense(layer.weight, x.dtype), layer.bias)
        else:
            y = layer.weight.product(x)  # type: ignore[union-attr]
        # fp32 adapters compute in fp32, as PEFT does. The sum is rounded once, to x's dtype.
        wide = torch.promote_types(x.dtype, torch.promote_types(layer.a.dtype, layer.b.dtype))
        results.append((y + adapter_reference(x, i, layer, masks, wide)).to(x.dtype))
    return tuple(results)


def adapter_reference(x: Tensor, i: int, layer: LoRA, masks: Masks | None, dtype: torch.dtype) -> Tensor:
    """scale · (dropped(x) Aᵀ) Bᵀ, in torch's operations in dtype; i: the layer's place in its group."""
    scale = layer.scale
    if masks is not None:
        # A select and not a product: an infinite x that is dropped gives 0, while 0 · inf would be NaN.
        x = torch.where(keep_mask(masks, i, x.shape[:-1].numel(), x.shape[-1]).view(x.shape), x, 0.0)
        # The share of kept elements is that of the rounded p, so that the mean stays right to the last of the 16 bits.
        scale = scale / kept_share(layer.dropout)
    return F.linear(F.linear(x.to(dtype), layer.a.to(dtype)), layer.b.to(dtype)) * scale


def multiplier(weight: Any) -> Callable[[Tensor], Tensor] | None:
    """The forward product of a frozen weight that multiplies rows in a way of its own, bias included; else None."""
    return getattr(weight, "own_product", None)


def dense(weight: Tensor | Frozen, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dense(dtype)


# ----------------------------------------------------------------------------------------------------------- checks


def checked_layers(name: str, x: Tensor, layers: tuple[LoRA, ...], at: int = 0) -> tuple[torch.dtype, bool]:
    """The dtype of the products, and whether autocast chose it; a ValueError for what does not fit.

    at: the place of the first of these layers among those that the caller was given.
    """
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point or x.dim() == 0:
        what = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name}: x must be (..., H) floats, got {what}.")
    if not layers:
        raise ValueError(f"{name}: layers must hold at least one tigon.LoRA, got none.")
    # Under autocast dtypes may differ, since all operands are cast. Without it a mixture is an error in F.linear as
    # well.
    cast = autocast_dtype(x.device.type) if x.dtype != torch.float64 else None
    H = x.shape[-1]
    for i, layer in enumerate(layers, at):
        where = "layer" if name.startswith("gated") else f"layers[{i}]"
        if not isinstance(layer, LoRA):
            raise ValueError(f"{name}: {where} must be a tigon.LoRA, got {type(layer).__name__}.")
        for field in ("a", "b", "bias"):
            t = getattr(layer, field)
            if not isinstance(t, Tensor) and not (t is None and field == "bias"):
                raise ValueError(f"{name}: {where}.{field} must be a tensor, got {type(t).__name__}.")
        weight, a, b, _, bias, dropout = layer
        # `Frozen` is a protocol: anything with a shape may be one. A module is the likeliest mistake, and gets its own
        # advice.
        if isinstance(weight, torch.nn.Module) or not hasattr(weight, "shape"):
            advice = ": pass its weight" if isinstance(getattr(weight, "weight", None), Tensor) else ""
            raise ValueError(
                f"{name}: {where}.weight must be a tensor or a Frozen, got {type(weight).__name__}{advice}."
            )
        shape = tuple(weight.shape)
        if len(shape) != 2 or shape[1] != H:
            raise ValueError(f"{name}: {where}.weight must be (N, {H}) to fit x {tuple(x.shape)}, got {shape}.")
        if a.dim() != 2 or a.shape[1] != H or not a.shape[0]:
            raise ValueError(f"{name}: {where}.a must be (r, {H}) with a rank r above 0, got {tuple(a.shape)}.")
        for field, t, wanted in (("b", b, (shape[0], a.shape[0])), ("bias", bias, shape[:1])):
            if t is not None and tuple(t.shape) != wanted:
                raise ValueError(f"{name}: {where}.{field} must be {wanted}, got {tuple(t.shape)}.")
        for field, t in (("weight", weight), ("a", a), ("b", b), ("bias", bias)):
            if t is not None and t.device != x.device:
                raise ValueError(f"{name}: {where}.{field} must be on x's device {x.device}, got {t.device}.")
        # The backward pass makes no gradient of W at all: a trainable weight would silently get none.
        if isinstance(weight, Tensor) and weight.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: {where}.weight must be frozen, got one that requires a gradient.")
        for field, t in (("weight", weight), ("bias", bias)):
            if isinstance(t, Tensor) and t.dtype != x.dtype and cast is None:
                raise ValueError(f"{name}: {where}.{field} must have x's dtype {x.dtype}, got {t.dtype}.")
        for field, t in (("a", a), ("b", b)):
            if not t.dtype.is_floating_point:
                raise ValueError(f"{name}: {where}.{field} must have a float dtype, got {t.dtype}.")
        # p = 1 is out: 1 / (1 − p) would be infinite.
        if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            raise ValueError(f"{name}: {where}.dropout must be a number, at least 0 and below 1, got {dropout!r}.")
    return cast or x.dtype, cast is not None


def runs_by_hand(dtype: torch.dtype, autocast: bool, layers: tuple[LoRA, ...], x: Tensor) -> bool:
    """Whether the products below serve this call. They are torch's own, so they run on any device."""
    if torch.compiler.is_compiling():
        return False  # Inductor fuses the casts and sums itself, and its partitioner decides what is kept
    # Tensor subclasses, meta tensors and sparse ones go to the reference, whose operations they know how to take.
    tensors = [t for layer in layers for t in (layer.a, layer.b, layer.bias, layer.weight) if isinstance(t, Tensor)]
    if not use_triton(x, *tensors) and (torch_is_forced() or not all(map(_is_plain, (x, *tensors)))):
        return False
    widest = widest_dtype(layers, dtype)
    # Two halves of fp16 lack the range of fp32: small gradients would be lost.
    return dtype in DTYPES and (autocast or widest == dtype or (dtype, widest) == (torch.bfloat16, torch.float32))


def _is_plain(t: Tensor) -> bool:
    # type() and not isinstance: a subclass of Tensor, such as a DTensor, may give `addmm_` another meaning.
    plain = type(t) in (Tensor, torch.nn.Parameter)
    return plain and t.layout is torch.strided and t.dtype in DTYPES and not t.is_meta


def widest_dtype(layers: Sequence[LoRA], dtype: torch.dtype) -> torch.dtype:
    for layer in layers:
        dtype = torch.promote_types(dtype, torch.promote_types(layer.a.dtype, layer.b.dtype))
    return dtype


# --------------------------------------------------------------------------------------------------------- products


def _product(left: Tensor, right: Tensor, dtype: torch.dtype, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
    """scale · left right, rounded to dtype, which may be fp32 beside half-precision factors."""
    # Uninitialised: each branch below writes all of it. beta = 0 does not read it either, so garbage NaN stays out.
    if out is None:
        out = left.new_empty(left.shape[0], right.shape[1], dtype=dtype)
    if dtype not in (left.dtype, torch.float32):  # cuBLAS widens results, and narrows none
        return out.copy_(_product(left, right, torch.promote_types(left.dtype, dtype), scale))
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


def _skinny(wide: Tensor, narrow: Tensor, dtype: torch.dtype, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
    """scale · wide narrow, where `wide` has the tokens' numbers and `narrow` r columns, which may be in fp32."""
    # The common case: adapters in x's dtype, or narrowed under autocast.
    if narrow.dtype == wide.dtype:
        return _product(wide, narrow, dtype, scale, out)
    # Both halves side by side as 2r columns: `wide`, the large operand, is read from DRAM once. The halves of r columns
    # are small.
    both = _product(wide, torch.cat(_halves(narrow, wide.dtype), 1), narrow.dtype, scale)
    r = narrow.shape[1]
    # In fp32, and rounded after the sum: the low half would vanish in a result that is rounded before.
    total = (both[:, :r] + both[:, r:]).to(dtype)
    return total if out is None else out.copy_(total)


def _outer(left: Tensor, right: Tensor, dtype: torch.dtype, scale: float = 1.0, bias: Tensor | None = None) -> Tensor:
    """scale · left right + bias over r inner numbers, in dtype; the factors may be in fp32."""
    if left.dtype != dtype:
        # (high + low)(upper + lower) without low · lower, which is below the error of the others. Three products stand
        # in one of 3r inner numbers, whose result is written once.
        (high, low), (upper, lower) = _halves(left, dtype), _halves(right, dtype)
        left, right = torch.cat((high, high, low), 1), torch.cat((upper, lower, upper), 0)
    # The bias enters here, with the adapter's part: the frozen product that follows adds to both, and no pass is made
    # for it.
    if bias is not None:
        return torch.addmm(bias.to(dtype), left, right, alpha=scale)
    return _product(left, right, dtype, scale)


def _plus(
    out: Tensor, left: Tensor, right: Tensor, scale: float = 1.0, over: bool = False
) -> Tensor:  # fmt: skip
    """out + scale · left right over r inner numbers, written to out or not; the factors may be in fp32."""
    if left.dtype != out.dtype:
        # As in `_outer`: three products of halves in one of 3r inner numbers.
        (high, low), (upper, lower) = _halves(left, out.dtype), _halves(right, out.dtype)
        left, right = torch.cat((high, high, low), 1), torch.cat((upper, lower, upper), 0)
    # Either way `out` is read in the product's epilogue, and not in a pass of its own. `over` saves memory, not
    # traffic.
    return out.addmm_(left, right, alpha=scale) if over else torch.addmm(out, left, right, alpha=scale)


def stacked(dtype: torch.dtype, *stacks: Sequence[Tensor]) -> list[Tensor]:
    """Each stack of matrices as one, in this dtype; all that is copied for it is copied by one launch."""
    # A single factor in the right dtype is multiplied where it lies.
    copied = [stack for stack in stacks if len(stack) > 1 or stack[0].dtype != dtype]
    if not copied:
        return [stack[0] for stack in stacks]
    parts = [t for stack in copied for t in stack]
    # One buffer and one launch for all factors of the group: they are small, and a launch each costs more than its
    # copy.
    flat = cast_together(parts, dtype)
    # The matrices of a stack lie one behind the other, so a view joins them: [A…] is (Σr, H) without another copy.
    wholes = iter(flat.split([sum(t.numel() for t in stack) for stack in copied]))
    return [
        next(wholes).view(-1, stack[0].shape[1]) if len(stack) > 1 or stack[0].dtype != dtype else stack[0]
        for stack in stacks
    ]


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
        return _skinny(rows, a.t(), self.thin)

    def results(
        self, rows: Tensor, t: Tensor, b: Sequence[Tensor], biases: Sequence[Tensor | None],
        weights: Sequence[Tensor | None],
    ) -> list[Tensor]:  # fmt: skip
        """The adapter's part comes first: the wide product adds to it, and nothing of y's size is written twice."""
        results = []
        # `own` is a view with the row stride Σr, which the products take as it is.
        for i, own in enumerate(t.split(self.ranks, 1)):
            factors = own, b[i].t()
            if multiplier(self.frozen[i]) is None:
                # The outer product writes y, the wide product reads it as its addend: one pass less over y than adding
                # afterwards.
                y = _outer(*factors, self.dtype, self.scales[i], biases[i])
                results.append(y.addmm_(rows, self.weight(i, weights).t()))
            else:
                # A layer that multiplies by itself has no epilogue to add in. Its result is fresh (`own_product`), so
                # the adapter's part is added to it in place.
                results.append(_plus(self.product(i, rows, weights), *factors, self.scales[i], over=True))
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
            return _skinny(dys[i], b[i], self.thin, self.scales[i])  # type: ignore[arg-type]
        ranks = [self.ranks[i] for i in present]
        # Each layer's product writes its columns of one tensor, so that dx and d[A…] are then one product each, not one
        # a layer.
        u = b[0].new_empty(dys[present[0]].shape[0], sum(ranks))  # type: ignore[union-attr]
        for i, own in zip(present, u.split(ranks, 1), strict=True):
            _skinny(dys[i], b[i], self.thin, self.scales[i], own)  # type: ignore[arg-type]
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
        dx = _outer(u, joined, self.dtype) if self.masks is None else self.dropped_outer(u, joined, present, first)
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
        parts = dict(zip(among, joined.split([self.ranks[i] for i in among], dim), strict=True))
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
            da = _product(u.t(), rows, widest)
        else:
            # x is not widened: u's halves are 2r rows of one product, which reads x once, and their two results are
            # added in fp32.
            both = _product(torch.cat(_halves(u, rows.dtype), 1).t(), rows, u.dtype)
            da = both[: u.shape[1]] + both[u.shape[1] :]
        for i, own in zip(wanted, da.split([self.ranks[i] for i in wanted]), strict=True):
            # Where dtypes agree this is a view of da: Σr rows of H numbers, so nothing is worth a copy.
            found[i] = own.to(a[i].dtype)
        return found

    def b_gradients(
        self, dys: Sequence[Tensor | None], t: Tensor, b: Sequence[Tensor], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """dBᵢ = sᵢ dyᵢᵀ tᵢ."""
        # dy is read a second time here, after `upstream`: two skinny products, each bound by the bytes of dy.
        return [
            None if dy is None or not need else _skinny(dy.t(), own, like.dtype, scale)
            for dy, own, like, scale, need in zip(dys, t.split(self.ranks, 1), b, self.scales, needs, strict=True)
        ]


# --------------------------------------------------------------------------------------------------------- autograd


def _rows(dy: Tensor | None) -> Tensor | None:
    # A view where the rows of dy lie at even distances, else a copy, which all products of dy then share.
    return None if dy is None else dy.reshape(-1, dy.shape[-1])


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Group, saved_by: Any, *tensors: Any) -> tuple[Tensor, ...]:
        # A result that nobody used brings None, and not a tensor of zeros that products would read.
        ctx.set_materialize_grads(False)
        ctx.hides, ctx.plan = True, plan
        a, b, biases, weights = plan.split(tensors)
        # x, plan and saved_by come first: needs_input_grad has a place for every argument, tensor or not.
        need_a, need_b = plan.split(ctx.needs_input_grad[3:])[:2]
        rows = x.reshape(-1, x.shape[-1])
        joined, thin = plan.factors(a, b)
        t = plan.thin_products(rows, joined)
        # x serves the gradients of A alone: where A is frozen, dx needs only the weights.
        own_x = x if any(need_a) else None
        # Before the wide products: a checkpoint that computes again stops at the last tensor saved, and skips them.
        keep(ctx, saved_by, own_x, t if any(need_b) else None, *a, *b, *weights)
        ys = [y.view(*x.shape[:-1], y.shape[1]) for y in plan.results(rows, t, thin, biases, weights)]
        # Of the inputs, x where it is not kept and the biases are not saved; see way_back.
        unsaved = [0] * (own_x is None) + [3 + 2 * plan.count + i for i, bias in enumerate(biases) if bias is not None]
        way = (
            () if saved_by is not None or not unsaved else way_back(ctx, (x, plan, saved_by, *tensors), tuple(unsaved))
        )
        if way:
            ctx.save_for_backward(*ctx.to_save, *way)
        return (*ys, *way)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return first_order(_lora_linear_backward, ctx, *dys)


def _lora_linear_backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
    plan: Group = ctx.plan
    n = plan.count
    # Before the first return: `kept` also lets go of what a checkpoint's hooks have packed.
    x, t, *rest = kept(ctx)
    dys = [_rows(dy) for dy in given[:n]]
    a, b, weights = (rest[i : i + n] for i in range(0, 3 * n, n))
    need_x, needs = ctx.needs_input_grad[0], plan.split(ctx.needs_input_grad[3:])
    # Possible where only the empty tensor of `way_back` was reached.
    if all(dy is None for dy in dys):
        return (None,) * len(ctx.needs_input_grad)
    dx: Tensor | None = None
    da: list[Tensor | None] = [None] * n
    if need_x or any(needs[0]):
        # Cast again and not kept: the narrow copies are small, and one launch makes all of them.
        joined, thin = plan.factors(a, b)
        u = plan.upstream(dys, thin)
        if need_x:
            dx = plan.input_gradient(dys, u, joined, weights)
            # x's shape comes from a gradient: x itself may not have been kept.
            dx = dx.view(*next(dy for dy in given if dy is not None).shape[:-1], dx.shape[1])
        if any(needs[0]):
            # u serves dx and d[A…] both, and is computed once.
            da = plan.a_gradients(dys, u, x.reshape(-1, x.shape[-1]), a, needs[0])
    db = plan.b_gradients(dys, t, b, needs[1]) if any(needs[1]) else [None] * n
    return dx, None, None, *da, *db, *_bias_gradients(dys, needs[2], plan.dtype), *[None] * n


def _bias_gradients(dys: Sequence[Tensor | None], needs: Sequence[bool], dtype: torch.dtype) -> list[Tensor | None]:
    # torch sums half precision in fp32, and rounds the result once.
    return [None if dy is None or not need else dy.sum(0) for dy, need in zip(dys, needs, strict=True)]


class _GatedLoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor | None, plan: Group, act: str, inplace: bool, saved_by: Any, *tensors: Any
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.hides, ctx.plan, ctx.act, ctx.inplace = True, plan, act, inplace
        a, b, biases, weights = plan.split(tensors)
        # Of gate, up, plan, act, inplace, saved_by, A, B, bias, weight.
        need_b = ctx.needs_input_grad[7]
        if saved_by is not None:
            # A checkpoint computes no further than here: t takes the product, which the backward pass makes anyway.
            keep(ctx, saved_by, gate, up, None, *a, *b, *weights)
        # Never saved: the backward pass's kernel reads gate and up for their gradients, and writes the product on the
        # way.
        product = _gated_fwd(gate, up, act, 1.0, 1.0).view(-1, a[0].shape[1])
        joined, thin = plan.factors(a, b)
        t = plan.thin_products(product, joined)
        if saved_by is None:
            keep(ctx, saved_by, gate, up, t if need_b else None, *a, *b, *weights)
        y = plan.results(product, t, thin, biases, weights)[0]
        y = y.view(*gate.shape[:-1], y.shape[1])
        way: tuple[Tensor, ...] = ()
        # The bias is the one differentiable input that nothing saved leads to.
        if saved_by is None and biases[0] is not None:
            way = way_back(ctx, (gate, up, plan, act, inplace, saved_by, *tensors), (8,))
            if way:
                ctx.save_for_backward(*ctx.to_save, *way)
        return (y, *way)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return first_order(_gated_lora_linear_backward, ctx, *gradients)


def _gated_lora_linear_backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    plan: Group = ctx.plan
    gate, up, t, *rest = kept(ctx)
    if dy is None:
        return (None,) * 10
    a, b, weights = (rest[i : i + 1] for i in range(3))
    need_gate, need_up, *_, need_a, need_b, need_bias, _ = ctx.needs_input_grad
    rows = dy.reshape(-1, dy.shape[-1])
    joined, thin = plan.factors(a, b)
    u = plan.upstream([rows], thin)
    dgate = dup = da = db = None
    # t was not kept under a checkpoint's hooks. The product gives it back in one thin product.
    recomputed = need_a or (need_b and t is None)
    if need_gate or need_up:
        # scratch is first the product's gradient. The kernel overwrites it by the product, which dA needs.
        scratch = plan.input_gradient([rows], u, joined, weights)
        # With a kept graph the next backward pass reads gate and up again.
        over = ctx.inplace and not graph_is_kept()
        if need_gate:
            dgate = gate.detach() if over else torch.empty_like(gate, memory_format=torch.contiguous_format)
        if need_up and up is not None:
            dup = up.detach() if over else torch.empty_like(up, memory_format=torch.contiguous_format)
        gated_backward(scratch, gate, up, ctx.act, 1.0, 1.0, dgate, dup, scratch if recomputed else None)
        if over:
            for written in (dgate, dup):
                if written is not None:  # PyTorch then raises where another backward pass saved it
                    torch.autograd.graph.increment_version(written)
    # Neither gate nor up wants a gradient, so no kernel makes the product on its way.
    elif recomputed:
        scratch = _gated_fwd(gate, up, ctx.act, 1.0, 1.0).view(-1, a[0].shape[1])
    if need_b:
        # From the product, not from dgate: scratch holds the product since the kernel above.
        db = plan.b_gradients([rows], plan.thin_products(scratch, joined) if t is None else t, b, [True])[0]
    if need_a:
        da = plan.a_gradients([rows], u, scratch, a, [True])[0]
    return dgate, dup, None, None, None, None, da, db, rows.sum(0) if need_bias else None, None
