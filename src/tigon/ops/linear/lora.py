"""A frozen linear layer with a low-rank adapter, for any weight representation, and checks shared by the operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from tigon.kernels import autocast_dtype, use_triton
from tigon.kernels.dispatch import DTYPES, torch_is_forced

if TYPE_CHECKING:
    from tigon.ops.fp8.recipe import Rows


class Frozen(Protocol):
    """A frozen weight (N, H) in another representation, such as 4-bit numbers in `tigon.FourBit`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def device(self) -> torch.device: ...

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as a plain tensor (N, H); called in the forward pass and again in the backward pass."""


class FrozenFP8(Frozen, Protocol):
    """A frozen weight whose products with activations run in FP8, for the result and for the input's gradient.

    Only bf16 activations are multiplied so; others are multiplied by the dense weight.
    """

    block: int | None
    """None: a factor has a scale for each row (token); 128: for each 128 numbers of a row."""

    def multiply(self, rows: Rows) -> Tensor:
        """x Wᵀ: (M, H) rows -> (M, N) bf16, contiguous, without bias."""

    def multiply_transposed(self, rows: Rows) -> Tensor:
        """dy W: (M, N) rows -> (M, H) bf16, contiguous."""


def is_fp8(weight: Any) -> TypeGuard[FrozenFP8]:
    """Whether a frozen weight is a `FrozenFP8`."""
    return not isinstance(weight, Tensor) and hasattr(weight, "multiply_transposed")


class LoRA(NamedTuple):
    """A frozen linear layer and its adapter: x ↦ x Wᵀ + bias + scale · (dropped(x) Aᵀ) Bᵀ.

    Args:
        weight: W (N, H), x's dtype, without a gradient; or a `tigon.FourBit`, or any object with `shape`,
            `device` and `dense(dtype)`.
        a: A (r, H) in x's dtype, a narrower dtype or fp32.
        b: B (N, r), likewise.
        scale: the adapter's scale, such as alpha / r.
        bias: (N,), x's dtype, or None.
        dropout: the probability p that an element of the adapter's input is dropped, with the others divided by
            1-p; in [0, 1), and rounded to a multiple of 2⁻¹⁶. Applied on every call: pass 0 in evaluation. Each layer
            and call has a separate mask, seeded from torch's generator on x's device. The masks differ from those of
            `torch.nn.Dropout`.
    """

    weight: Tensor | Frozen
    a: Tensor
    b: Tensor
    scale: float = 1.0
    bias: Tensor | None = None
    dropout: float = 0  # an int: torch.compile makes a float symbolic, and would trace the function twice


class Known(LoRA):
    """A layer whose tensors the caller has already checked against each other and x: `checked_layers` skips the checks.

    Made by fuse, which inspects each layer on each call to decide whether the operators support it; checking a second
    time took a tenth of the host time per layer.
    """

    __slots__ = ()


def multiplier(weight: Any) -> Callable[[Tensor], Tensor] | None:
    """A frozen weight's own forward product over rows, bias included; None if the weight has none."""
    return getattr(weight, "own_product", None)


def dense(weight: Tensor | Frozen, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dense(dtype)


# ----------------------------------------------------------------------------------------------------------- checks


def checked_layers(name: str, x: Tensor, layers: tuple[LoRA, ...], at: int = 0) -> tuple[torch.dtype, bool]:
    """Return the products' dtype, and whether autocast chose it; raise a ValueError for mismatched arguments.

    at: index of the first layer here among the layers that the caller received.
    """
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point or x.dim() == 0:
        what = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name}: x must be (..., H) floats, got {what}.")
    if not layers:
        raise ValueError(f"{name}: layers must hold at least one tigon.LoRA, got none.")
    # Autocast casts all operands, so dtypes may differ. Without autocast a mixture is an error in F.linear too.
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
        # `Frozen` is a protocol: anything with a shape may qualify. A module is the likeliest mistake and gets
        # specific advice.
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
        # The backward pass makes no gradient for W: a trainable weight would silently get none.
        if isinstance(weight, Tensor) and weight.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: {where}.weight must be frozen, got one that requires a gradient.")
        for field, t in (("weight", weight), ("bias", bias)):
            if isinstance(t, Tensor) and t.dtype != x.dtype and cast is None:
                raise ValueError(f"{name}: {where}.{field} must have x's dtype {x.dtype}, got {t.dtype}.")
        for field, t in (("a", a), ("b", b)):
            if not t.dtype.is_floating_point:
                raise ValueError(f"{name}: {where}.{field} must have a float dtype, got {t.dtype}.")
        # p = 1 is excluded: 1 / (1 − p) would be infinite.
        if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            raise ValueError(f"{name}: {where}.dropout must be a number, at least 0 and below 1, got {dropout!r}.")
    return cast or x.dtype, cast is not None


def check_mlp(x: Tensor, layers: tuple[LoRA, LoRA, LoRA]) -> tuple[torch.dtype, bool]:
    """`checked_layers` for the layers gate, up and down of an MLP."""
    gate, up, down = layers
    found = checked_layers("lora_mlp", x, (gate, up))
    if tuple(gate.weight.shape) != tuple(up.weight.shape) or down.weight.shape[1] != gate.weight.shape[0]:
        sizes = ", ".join(str(tuple(layer.weight.shape)) for layer in layers)
        raise ValueError(f"lora_mlp: layers must be gate and up (N, H) and down (M, N), got {sizes}.")
    checked_layers("lora_mlp", x.new_empty((0, gate.weight.shape[0])), (down,), at=2)
    return found


def list_tensors(layers: Sequence[LoRA]) -> list[Tensor]:
    return [t for layer in layers for t in (layer.a, layer.b, layer.bias, layer.weight) if isinstance(t, Tensor)]


def runs_by_hand(dtype: torch.dtype, autocast: bool, layers: tuple[LoRA, ...], x: Tensor) -> bool:
    """Whether the hand-written products serve this call. They use torch's products, so they run on any device."""
    if torch.compiler.is_compiling():
        return False  # Inductor fuses the casts and sums itself, and its partitioner decides which tensors are saved
    tensors = list_tensors(layers)
    if not use_triton(x, *tensors) and (torch_is_forced() or not all(map(_is_plain, (x, *tensors)))):
        return False
    widest = widest_dtype(layers, dtype)
    # Two fp16 halves lack fp32's range: small gradients would be lost.
    return dtype in DTYPES and (autocast or widest == dtype or (dtype, widest) == (torch.bfloat16, torch.float32))


def _is_plain(t: Tensor) -> bool:
    # type(), not isinstance: a Tensor subclass, such as DTensor, may redefine `addmm_`.
    plain = type(t) in (Tensor, torch.nn.Parameter)
    return plain and t.layout is torch.strided and t.dtype in DTYPES and not t.is_meta


def widest_dtype(layers: Sequence[LoRA], dtype: torch.dtype) -> torch.dtype:
    for layer in layers:
        dtype = torch.promote_types(dtype, torch.promote_types(layer.a.dtype, layer.b.dtype))
    return dtype
