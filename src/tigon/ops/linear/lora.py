"""A frozen linear layer with a low-rank adapter, in any form of the weight, and what operators ask of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tigon.kernels import autocast_dtype, use_triton
from tigon.kernels.dispatch import DTYPES, torch_is_forced


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


class Known(LoRA):
    """A layer of which the caller knows that its tensors fit each other and x: it passes `checked_layers` unread.

    fuse makes these. It reads each layer at each call to find out whether the operators serve it, and a second reading
    took a tenth of the host's time for a layer.
    """

    __slots__ = ()


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
    if all(type(layer) is Known for layer in layers):
        return cast or x.dtype, cast is not None
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
