"""The head argument that fused-linear losses take, its checks, and its product with x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import autocast_dtype, check_tensors
from tigon.ops.linear.padded_product import class_blocks, empty_logits, needs_padding, product_into

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Head(NamedTuple):
    """The head that turns hidden states x into logits: softcap · tanh(scale · (x Wᵀ + bias) / softcap), W the weight.

    Every head loss takes a `Head`, the weight alone, or a `torch.nn.Linear`.

    Args:
        weight: (V, H), x's dtype; under autocast both are cast as `F.linear` casts them.
        bias: (V,) or None.
        softcap: c > 0 for logits c · tanh(z / c); None for none.
        scale: multiplies the logits, before the softcap; positive.
        group: the tensor-parallel group, or one-dimensional mesh, over which the classes are split. `weight` and `bias`
            are then this rank's rows, consecutive in rank order, any number per rank, also none; V is the sum. x and
            target (global indices) are the same on all ranks, and so are the loss and dx, which is summed over ranks.
            Leave group out for a DTensor weight, Shard(0) on such a mesh, with the bias alike: the gradients are then
            such DTensors too, and x may be a DTensor, Replicate or split by tokens (sequence parallel), with dx placed
            as x is. All ranks have to make the same calls. They also have to replace or resize a plain weight together:
            they exchange sizes when they first see a weight. torch.compile leaves the call out.
        lora: (A, B, s), an adapter on the head, A (r, H), B (V, r): adds s · (x Aᵀ) Bᵀ, with gradients for A and B.
            Only `tigon.linear_logprob` takes an adapter.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    group: ProcessGroup | DeviceMesh | None = None
    lora: tuple[Tensor, Tensor, float] | None = None


class Hidden(NamedTuple):
    """Another model's hidden states x (..., H'), aligned with the policy's or the student's, and that model's head.

    A reference or a teacher gets no gradient, and only a chunk of its logits exists at a time. Width and dtype may
    differ from the student's; the V classes are the same, so cut padding off the longer vocabulary.
    """

    x: Tensor
    head: Head | Tensor | torch.nn.Linear


def parse_head(name: str, head: Any, argument: str = "head", lora: bool = False) -> Head:
    """Parse any head argument to a Head; a ValueError if that fails, or for invalid numbers."""
    found: Head
    if isinstance(head, Head):
        found = head
    else:
        plain = isinstance(head, torch.nn.Linear) and type(head).forward is torch.nn.Linear.forward
        if not plain and not isinstance(head, Tensor):
            raise ValueError(
                f"{name}: {argument} must be a weight (V, H), a torch.nn.Linear or a tigon.Head, got "
                f"{type(head).__name__}."
            )
        found = Head(head.weight, head.bias) if plain else Head(head)
    if found.lora is not None and not lora:
        raise ValueError(f"{name}: {argument}.lora must be None: only linear_logprob takes an adapter on the head.")
    prefix = "" if argument == "head" else f"{argument}."
    # A negative scale would make the least logit the likeliest: running maxima are taken before the scale is applied.
    for field, value in (("softcap", found.softcap), ("scale", found.scale)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}: {prefix}{field} must be positive, got {value}.")
    return found


def check_head(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, *, prefix: str = "", sequences: bool = False,
    beside: tuple[tuple[str, Tensor | None], ...] = (),
) -> torch.dtype:  # fmt: skip
    """Raise a ValueError for tensors that do not fit, else return the products' dtype: x's, or autocast's.

    Args:
        name: the operator's name. prefix: prefix for x, weight and bias in argument names.
        x: (..., H), or (S, T, H) for a sequence loss. weight: (V, H). bias: (V,) or None.
        beside: other tensors in the products, as pairs: name and tensor.
    """
    check_tensors(name, **{f"{prefix}x": x, f"{prefix}weight": weight, f"{prefix}bias": bias})
    if weight.dim() != 2 or (x.dim() != 3 if sequences else x.dim() == 0) or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"{name}: {prefix}x must be ({'S, T' if sequences else '...'}, H) and {prefix}weight (V, H) with the same "
            f"H, got {tuple(x.shape)} and {tuple(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: {prefix}bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}.")
    if not x.dtype.is_floating_point:
        raise ValueError(f"{name}: {prefix}x must have a float dtype, got {x.dtype}.")
    autocast = autocast_dtype(x.device.type) if x.dtype != torch.float64 else None
    for argument, t in (("x", x), ("weight", weight), ("bias", bias), *beside):
        if t is None:
            continue
        if hasattr(t, "device_mesh"):
            raise ValueError(
                f"{name}: {prefix}{argument} must be a plain tensor, got a DTensor: gather it with full_tensor()."
            )
        if t.device != x.device:
            raise ValueError(f"{name}: {prefix}{argument} must be on {prefix}x's device {x.device}, got {t.device}.")
        if t.dtype != x.dtype and autocast is None:
            raise ValueError(f"{name}: {prefix}{argument} must have {prefix}x's dtype {x.dtype}, got {t.dtype}.")
    return autocast or x.dtype


def choose_logits_dtype(compute: torch.dtype, logits_dtype: torch.dtype | None) -> torch.dtype:
    """The logits' dtype: the products' dtype, or the wider logits_dtype."""
    return compute if logits_dtype is None else torch.promote_types(compute, logits_dtype)


def logit_bytes(compute: torch.dtype, logits: torch.dtype) -> int:
    """Bytes per logit, plus the gradient's if that is narrower and has a separate buffer."""
    return logits.itemsize + (compute.itemsize if logits != compute else 0)


def select_rows(t: Tensor, rows: Tensor | slice) -> Tensor:
    """Select rows of t by a range or an index tensor."""
    return t[rows] if isinstance(rows, slice) else t.index_select(0, rows)


def append_bias(weight: Tensor, bias: Tensor) -> Tensor:
    """(V, H + 1), zero-padded to a multiple of 8: the bias is the weight for an extra column, in which x is 1."""
    V, H = weight.shape
    both = weight.new_zeros(V, (H // 8 + 1) * 8)
    both[:, :H] = weight
    both[:, H] = bias
    return both


@dataclass
class Projection:
    """x (N, H), weight (V, H) and bias (V,) or None, in the compute dtype. both: `append_bias`, where needed.

    parts: chunks are so many times smaller than their memory allows.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    both: Tensor | None = None
    parts: ClassVar[int] = 1

    @classmethod
    def cast(cls, x: Tensor, weight: Tensor, bias: Tensor | None, compute: torch.dtype) -> Projection:
        x, weight, bias = x.to(compute), weight.to(compute), bias if bias is None else bias.to(compute)
        both = None
        if bias is not None and x.is_cuda and compute.itemsize == 2 and needs_padding(weight.shape[0], compute):
            # Unless the result is contiguous, PyTorch rounds a GPU's product before adding the bias, and then again.
            both = append_bias(weight, bias)
        return cls(x, weight, bias, both)

    def empty_logits(self, rows: int, dtype: torch.dtype) -> Tensor:
        return empty_logits(rows, self.weight.shape[0], self.x, dtype)

    def logits(self, x: Tensor, out: Tensor) -> Tensor:
        """out (n, V) ← x Wᵀ (+ bias) for n rows; out may be fp32 with half-precision factors."""
        if out.dtype != x.dtype:
            for block in class_blocks(self.weight.shape[0], x.dtype):
                product_into(out[:, block], x, self.weight[block].t(), first=True)
            return out if self.bias is None else out.add_(self.bias)
        if self.both is not None:
            wide = x.new_zeros(x.shape[0], self.both.shape[1])
            wide[:, : x.shape[1]] = x
            wide[:, x.shape[1]] = 1
            x = wide
        for block in class_blocks(self.weight.shape[0], x.dtype):
            if self.both is not None:
                torch.mm(x, self.both[block].t(), out=out[:, block])
            elif self.bias is None:
                torch.mm(x, self.weight[block].t(), out=out[:, block])
            else:
                torch.addmm(self.bias[block], x, self.weight[block].t(), out=out[:, block])
        return out

    def input_gradient(self, dlogits: Tensor, out: Tensor) -> Tensor:
        """out (n, H) ← dlogits W; out may be fp32."""
        # A second block's few classes come first: their sum is small, and so is the rounding error.
        for i, block in enumerate(reversed(class_blocks(self.weight.shape[0], dlogits.dtype))):
            product_into(out, dlogits[:, block], self.weight[block], first=i == 0)
        return out
