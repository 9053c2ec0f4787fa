"""xIELU, an activation with two trained numbers: with p = softplus(alpha_p) and n = beta + softplus(alpha_n),

    y = p x² + beta x                              where x > 0
    y = n (exp(min(x, eps)) - 1 - x) + beta x      elsewhere

Source: Huang & Schlag 2024, Deriving Activation Functions Using Integration, https://arxiv.org/abs/2411.13010

For `tigon.fuse`: a module writes xIELU out in a dozen torch operations, each of which reads and keeps the widest tensor
of the MLP. The operator reads x once, and keeps nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import Plan, cdiv, differentiable, jit, launch, launcher, multiprocessors, tl, use_triton


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """xIELU, computed in fp32 and rounded once.

    Args:
        x: floats of any shape.
        alpha_p, alpha_n, beta, eps: one float each, on x's device; beta and eps get no gradient. eps is negative.
    Returns: x's shape, in the dtype that x and the two alphas have in common.
    """
    if not use_triton(x, alpha_p, alpha_n):
        return xielu_reference(x, alpha_p, alpha_n, beta, eps)
    return _xielu(x, alpha_p, alpha_n, beta, eps)


def xielu_reference(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    dtype = _common_dtype(x, alpha_p, alpha_n)
    wide, p, n, b, e = (t.to(torch.promote_types(dtype, torch.float32)) for t in (x, alpha_p, alpha_n, beta, eps))
    p, n, b, e = F.softplus(p).view(()), F.softplus(n).view(()), b.detach().view(()), e.detach().view(())
    below = (torch.expm1(torch.min(wide, e)) - wide) * (b + n)
    return (torch.where(wide > 0, p * wide * wide, below) + b * wide).to(dtype).contiguous()


def _common_dtype(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, alpha_p.dtype), alpha_n.dtype)


# ---------------------------------------------------------------------------------------------------------- kernels


@jit
def _softplus(a):
    """log(1 + exp(a)) of a number, and its derivative, sigmoid(a)."""
    e = tl.exp(-tl.abs(a))
    r = 1.0 / (1.0 + e)
    return tl.where(a > 0, a, 0.0) + tl.log(1.0 + e), tl.where(a >= 0, r, e * r)


@jit
def _expm1(z):
    """exp(z) - 1 for z ≤ 0, to a few roundings of its value: near zero by its series."""
    near = 1 / 120 + z * (1 / 720 + z * (1 / 5040 + z * (1 / 40320)))
    near = z + z * z * (0.5 + z * (1 / 6 + z * (1 / 24 + z * near)))
    return tl.where(z > -0.5, near, tl.exp(z) - 1.0)


# One program computes BLOCK of the S elements of y (dense, as x). alpha_p, alpha_n, beta, eps: one number each.
@jit
def _xielu_fwd_kernel(x_ptr, ap_ptr, an_ptr, beta_ptr, eps_ptr, y_ptr, S, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < S
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    beta, eps = tl.load(beta_ptr).to(tl.float32), tl.load(eps_ptr).to(tl.float32)
    p, _ = _softplus(tl.load(ap_ptr).to(tl.float32))
    n, _ = _softplus(tl.load(an_ptr).to(tl.float32))
    below = (_expm1(tl.where(x > eps, eps, x)) - x) * (beta + n)
    y = tl.where(x > 0, p * x * x, below) + beta * x
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


# Persistent grid: a program takes every num_programs-th block of S elements. dy, x: dense; dx as x, or None.
# partial (programs, DP + DN) fp32: each program's sums for alpha_p and alpha_n, as far as they are needed. Added by
# torch's sum: no atomics.
@jit
def _xielu_bwd_kernel(
    dy_ptr, x_ptr, ap_ptr, an_ptr, beta_ptr, eps_ptr, dx_ptr, partial_ptr, S,
    DP: tl.constexpr, DN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    beta, eps = tl.load(beta_ptr).to(tl.float32), tl.load(eps_ptr).to(tl.float32)
    p, slope_p = _softplus(tl.load(ap_ptr).to(tl.float32))
    n, slope_n = _softplus(tl.load(an_ptr).to(tl.float32))
    of_p = tl.zeros((BLOCK,), tl.float32)
    of_n = tl.zeros((BLOCK,), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(S, BLOCK), tl.num_programs(0)):
        at = (block + tl.full((), 0, tl.int64)) * BLOCK + tl.arange(0, BLOCK)
        mask = at < S
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        low = _expm1(tl.where(x > eps, eps, x))
        of_p += tl.where(x > 0, dy * x * x, 0.0)
        of_n += tl.where(x > 0, 0.0, dy * (low - x))
        if dx_ptr is not None:
            # exp(x) is expm1(x) + 1; min(x, eps) has no slope above eps.
            slope = tl.where(x > 0, 2.0 * p * x, tl.where(x > eps, -1.0, low) * (beta + n)) + beta
            tl.store(dx_ptr + at, (dy * slope).to(dx_ptr.dtype.element_ty), mask=mask)
    partial_ptr += tl.program_id(0) * (DP + DN)
    if DP:
        tl.store(partial_ptr, tl.sum(of_p, 0) * slope_p)
    if DN:
        tl.store(partial_ptr + DP, tl.sum(of_n, 0) * slope_n)


# --------------------------------------------------------------------------------------------------------- launches


def _tile() -> tuple[int, int]:
    """Elements per program and warps: 8 numbers of 16 bits per thread, a 16-byte load."""
    return 1024, 4


def _xielu_fwd_fake(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=_common_dtype(x, alpha_p, alpha_n))


@launcher(_xielu_fwd_fake)
def _xielu_fwd(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    y = _xielu_fwd_fake(x, alpha_p, alpha_n)
    S, (block, warps) = y.numel(), _tile()
    if S:
        numbers = alpha_p, alpha_n, beta, eps
        key = (S, x.dtype, *(t.dtype for t in numbers))
        plan = cdiv(S, block), (S, block), {"num_warps": warps}
        launch(_xielu_fwd_kernel, key, (x.contiguous(), *numbers, y), lambda: plan)
    return y


def _xielu_bwd_fake(
    dy: Tensor, x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor, need_dx: bool, need_dp: bool,
    need_dn: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape if need_dx else 0), x.new_empty(need_dp + need_dn, dtype=torch.float32)


@launcher(_xielu_bwd_fake)
def _xielu_bwd(
    dy: Tensor, x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor, need_dx: bool, need_dp: bool,
    need_dn: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx, and the gradients of alpha_p and alpha_n side by side, as far as they are needed."""
    dx = x.new_empty(x.shape if need_dx else 0)
    S, (block, warps) = x.numel(), _tile()
    if not S:
        return dx, x.new_zeros(need_dp + need_dn, dtype=torch.float32)
    programs = min(cdiv(S, block), 8 * multiprocessors(x.device))
    partial = x.new_empty((programs, need_dp + need_dn), dtype=torch.float32)
    numbers = alpha_p, alpha_n, beta, eps

    def plan() -> Plan:
        return programs, (S, need_dp, need_dn, block), {"num_warps": warps}

    key = (S, dy.dtype, x.dtype, *(t.dtype for t in numbers), need_dx, need_dp, need_dn)
    tensors = dy.contiguous(), x.contiguous(), *numbers, dx if need_dx else None, partial
    launch(_xielu_bwd_kernel, key, tensors, plan)
    return dx, partial.sum(0)


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, alpha_p, alpha_n, beta, eps = ctx.saved_tensors
    need_dx, need_dp, need_dn, _, _ = ctx.needs_input_grad
    dx, sums = _xielu_bwd(dy, x, alpha_p, alpha_n, beta, eps, need_dx, need_dp, need_dn)
    dp = sums[0].to(alpha_p.dtype).view(alpha_p.shape) if need_dp else None
    dn = sums[-1].to(alpha_n.dtype).view(alpha_n.shape) if need_dn else None
    return dx if need_dx else None, dp, dn


_xielu = differentiable(_xielu_fwd, _setup_context, _backward)
