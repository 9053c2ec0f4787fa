"""The FP8 recipe in fp64, written apart from the package: what its results are measured by, and how."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def scale(amax: Tensor) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2((amax.double() / 448).clamp(min=2.0**-126))))


def narrow(x: Tensor, s: Tensor | float = 1.0) -> Tensor:
    """x / s in e4m3, as fp64."""
    return (x.double() / s).clamp(-448, 448).float().to(torch.float8_e4m3fn).double()


def bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).double()


class Product(torch.autograd.Function):
    """x Wᵀ whose three products have rounded factors and exact sums.

    is_wide: x is the wide factor of dW. again: x as the backward pass computes it, if differently.
    """

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, is_wide: bool, dw: str, again: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, w, x if again is None else again)
        ctx.is_wide, ctx.dw = is_wide, dw
        sx, sw = scale(x.abs().amax(1, keepdim=True)), scale(w.abs().amax())
        return bf16((narrow(x, sx) @ narrow(w, sw).t()) * (sx * sw))

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, again = ctx.saved_tensors
        sd, sx, sw = scale(dy.abs().amax(1, keepdim=True)), scale(x.abs().amax(1, keepdim=True)), scale(w.abs().amax())
        dx = bf16((narrow(dy, sd) @ narrow(w, sw)) * (sd * sw))
        c = (sd * sx).max().clamp(min=2.0**-120)
        if ctx.dw == "bf16":
            dw = dy.t() @ bf16(again)
        elif ctx.is_wide:
            dw = c * (narrow(dy * sx / c).t() @ narrow(again, sx))
        else:
            dw = c * (narrow(dy, sd).t() @ narrow(x * sd / c))
        return dx, bf16(dw), None, None, None


class Shift(torch.autograd.Function):
    """x + bias, where the bias's gradient is the sum of rounded rows, or of rows in bf16."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor, dw: str) -> Tensor:
        ctx.dw = dw
        return x + bias

    @staticmethod
    def backward(ctx, d: Tensor) -> tuple[Tensor | None, ...]:
        s = scale(d.abs().amax(1, keepdim=True))
        return d, (bf16(d) if ctx.dw == "bf16" else narrow(d, s) * s).sum(0), None


def error(got: Tensor, exact: Tensor) -> float:
    """‖got − exact‖ / ‖exact‖."""
    return ((got.double() - exact).norm() / exact.norm()).item()


def same(ours, theirs) -> bool:
    """Whether all results have the same bits."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def assert_mean_errors_vanish(measure) -> None:
    """Rounding is unbiased: the mean of 64 errors is an eighth of one. measure() → (results, exact results)."""
    errors = []
    for _ in range(64):
        ours, exact = measure()
        errors.append([a.double() - e for a, e in zip(ours, exact, strict=True)])
    for each in zip(*errors, strict=True):
        several = torch.stack(each)
        typical = several.square().sum((1, 2)).mean().sqrt()
        assert several.mean(0).norm() <= 1.25 * typical / 8


def run_checkpointed(layer, x: Tensor, weights: list[Tensor], dys: list[Tensor], reentrant: bool) -> list[list[Tensor]]:
    """Results of layer(x), and gradients of x and the weights: without a checkpoint, and with one."""
    found = []
    for call in (layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant)):
        for t in (x, *weights):
            t.grad = None
        ys = call(x)
        torch.autograd.backward(ys, dys)
        found.append([*ys, *(t.grad for t in (x, *weights))])
    return found
