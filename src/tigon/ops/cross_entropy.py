"""Cross entropy of given logits. With z = softcap(scale · logits), lse = log Σ exp z, ε the smoothing, V classes:

    loss = lse − (1 − ε) · z[target] − ε/V · Σ z + z_loss · lse²

Sources: label smoothing, Szegedy et al. 2015, https://arxiv.org/abs/1512.00567; z-loss, Chowdhery et al. 2022,
https://arxiv.org/abs/2204.02311; soft-capping, Gemma 2, https://arxiv.org/abs/2408.00118.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.backend import cdiv, differentiable, launch, launcher, next_power_of_2, rows_of, tl, triton, use_triton

REDUCTIONS = ("mean", "sum", "none")
CHECKS = os.environ.get("TIGON_CHECKS", "0") == "1"


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    divisor: Tensor | float | None = None,
) -> Tensor:
    """Cross entropy that reads the logits once forward, and once more to write their gradient. They stay untouched.

    Args:
        logits: (..., V), any float dtype.
        target: (...), integer class indices.
        ignore_index: rows with this target have loss 0 and gradient 0.
        reduction: "mean" over the rows that are not ignored, "sum", or "none" for one loss a row.
        label_smoothing: ε in [0, 1], spread evenly over the classes.
        z_loss: coefficient of lse², which keeps the logits from drifting.
        softcap: c > 0 for z = c · tanh(scale · logits / c); None for none.
        scale: multiplies the logits, before the softcap; positive.
        divisor: with "mean", what the summed loss is divided by in place of the number of valid rows; a number or a
            0-d tensor (the token count of a whole gradient-accumulation step).
    Returns: 0-d, or (...) for reduction="none", in fp32 (fp64 for fp64 logits).
    Raises: ValueError for shapes, dtypes or options that do not fit. A target outside [0, V) gives a NaN loss on the
        GPU, and a ValueError on the CPU or with TIGON_CHECKS=1.

    Replaces::

        loss = F.cross_entropy(logits.float(), target)
    """
    check_options("cross_entropy", reduction, label_smoothing, softcap, scale, divisor)
    if not logits.dtype.is_floating_point or logits.dim() == 0:
        raise ValueError(f"cross_entropy: logits must be (..., V) floats, got {tuple(logits.shape)} {logits.dtype}.")
    check_target("cross_entropy", target, logits.shape[:-1], logits.shape[-1], ignore_index)
    options = (ignore_index, label_smoothing, z_loss, softcap or 0.0, scale)
    if not use_triton(logits):
        rows = cross_entropy_reference(logits, target, *options)
        inverse = inverse_divisor(target, ignore_index, reduction, divisor, rows.dtype)
        return rows if reduction == "none" else rows.sum() if inverse is None else rows.sum() * inverse
    rows = _cross_entropy(logits, target, *options)
    if reduction == "none":
        return rows
    inverse = inverse_divisor(target, ignore_index, reduction, divisor, rows.dtype)
    return rows.sum() if inverse is None else rows.sum() * inverse


def cross_entropy_reference(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    """One loss a row, (...)."""
    z, _ = _cap_reference(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap, scale)
    rows, labels = z.reshape(-1, z.shape[-1]), target.reshape(-1).long()
    loss = F.cross_entropy(
        rows, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    ).view(target.shape)
    if z_loss:
        loss = loss + z_loss * torch.where(target != ignore_index, torch.logsumexp(z, dim=-1).square(), 0.0)
    return loss


def _cap_reference(logits: Tensor, softcap: float, scale: float) -> tuple[Tensor, Tensor | float]:
    """z = softcap(scale · logits) and dz/dlogits."""
    z = logits * scale if scale != 1.0 else logits
    if not softcap:
        return z, scale
    t = torch.tanh(z / softcap)
    return softcap * t, scale * (1 - t * t)


def _rows_reference(
    logits: Tensor, target: Tensor, factor: Tensor | None, gradient: bool,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, scale: float,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Loss and factor · d(loss)/d(logits) of (M, V) rows: the kernels' work on other devices, without autograd."""
    z, slope = _cap_reference(logits, softcap, scale)
    valid = target != ignore_index
    at = torch.where(valid, target, 0).long().unsqueeze(-1)
    logp = torch.log_softmax(z, dim=-1)
    lse = (z.gather(-1, at) - logp.gather(-1, at)).squeeze(-1)
    loss = (label_smoothing - 1) * logp.gather(-1, at).squeeze(-1)
    if label_smoothing:
        loss -= label_smoothing * logp.mean(-1)
    if z_loss:
        loss += z_loss * lse.square()
    loss = torch.where(valid, loss, 0.0)
    if not gradient:
        return loss, None
    dz = logp.exp_()
    if z_loss:
        dz *= (1 + 2 * z_loss * lse).unsqueeze(-1)
    dz.scatter_add_(-1, at, dz.new_full((), label_smoothing - 1).expand(at.shape))
    if label_smoothing:
        dz -= label_smoothing / z.shape[-1]
    if softcap or scale != 1.0:
        dz *= slope
    return loss, dz.mul_(torch.where(valid, 1.0 if factor is None else factor, 0.0).to(dz.dtype).unsqueeze(-1))


def check_options(
    name: str, reduction: str, label_smoothing: float, softcap: float | None, scale: float,
    divisor: Tensor | float | None,
) -> None:  # fmt: skip
    """Sentences for the options that every cross entropy shares."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction must be one of {REDUCTIONS}, got {reduction!r}.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{name}: label_smoothing must lie in [0, 1], got {label_smoothing}.")
    if scale <= 0:
        raise ValueError(f"{name}: scale must be positive, got {scale}.")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"{name}: softcap must be positive, or None for none, got {softcap}.")
    if divisor is not None and reduction != "mean":
        raise ValueError(f"{name}: divisor goes with reduction='mean', got reduction={reduction!r}.")
    if isinstance(divisor, Tensor) and divisor.dim() != 0:
        raise ValueError(f"{name}: divisor must be a number or a 0-d tensor, got shape {tuple(divisor.shape)}.")


def check_target(name: str, target: Tensor, shape: torch.Size, classes: int, ignore_index: int) -> None:
    if target.shape != shape:
        raise ValueError(f"{name}: target must have shape {tuple(shape)}, one class a row, got {tuple(target.shape)}.")
    if target.dtype.is_floating_point or target.dtype == torch.bool:
        raise ValueError(f"{name}: target must hold integer class indices, got {target.dtype}.")
    # Looking at values stalls a GPU, so there it is for the checked mode; the kernels answer NaN instead.
    if (CHECKS or target.device.type == "cpu") and not torch.compiler.is_compiling() and target.numel():
        wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
        if wrong.any():
            value = int(target[wrong].flatten()[0])
            raise ValueError(
                f"{name}: target must lie in [0, {classes}) or be ignore_index={ignore_index}, got {value}."
            )


def inverse_divisor(
    target: Tensor, ignore_index: int, reduction: str, divisor: Tensor | float | None, dtype: torch.dtype
) -> Tensor | None:
    """1 / what the summed loss is divided by, as a 0-d tensor on the target's device; None for "sum" and "none".

    Nothing here waits for the device. No valid row at all gives inf, and 0 · inf the NaN that torch gives.
    """
    if reduction != "mean":
        return None
    if divisor is None:
        divisor = (target != ignore_index).sum()
    elif not isinstance(divisor, Tensor):
        return torch.full((), 1.0 / divisor if divisor else float("inf"), dtype=dtype, device=target.device)
    return divisor.to(device=target.device, dtype=dtype).reciprocal()


# ---------------------------------------------------------------------------------------------------------- kernels


LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _cap(x, scale, softcap):
    """z = softcap · tanh(scale · x / softcap) and dz/dx, from exp(-2|u|), which neither overflows nor cancels."""
    z = x * scale
    e = tl.exp(-2.0 * tl.abs(z / softcap))
    t = tl.where(z >= 0, 1.0, -1.0) * (1.0 - e) / (1.0 + e)
    return softcap * t, scale * (1.0 - t * t)


@triton.jit
def _slope(
    x, top, log2_sum, is_target, factor, V, smoothing, z_loss, softcap, scale,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """factor · d(loss)/d(logits), from the row's maximum and log₂ Σ exp(z − max).

    The two are kept apart: one number for the log-sum-exp would be rounded at its own size, and every probability of a
    confident row with it.
    """
    if SOFTCAP:
        z, slope = _cap(x, scale, softcap)
        k = LOG2E
        lse = top + log2_sum * LN2
        factor = factor * slope
    else:
        z = x
        k = scale * LOG2E
        lse = top * scale + log2_sum * LN2
        factor = factor * scale
    p = tl.exp2((z - top) * k - log2_sum)
    dz = p * (1.0 + 2.0 * z_loss * lse) - tl.where(is_target, 1.0 - smoothing, 0.0)
    if SMOOTHING:
        dz -= smoothing / V
    return dz * factor


@triton.jit(do_not_specialize=["ignore_index"])
def _cross_entropy_fwd_kernel(
    logits_ptr, target_ptr, loss_ptr, stats_ptr, factor_ptr, V, stride_m, stride_factor,
    ignore_index, smoothing, z_loss, softcap, scale,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss and statistics of a row. With GRADIENT the row, a scratch buffer of our own, becomes d(loss)/d(logits)."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    target = tl.load(target_ptr + row)
    lane = tl.arange(0, BLOCK)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        if stats_ptr is not None:
            tl.store(stats_ptr + 2 * row, 0.0)
            tl.store(stats_ptr + 2 * row + 1, 0.0)
        if GRADIENT:
            for start in range(0, V, BLOCK):
                zero = tl.zeros((BLOCK,), logits_ptr.dtype.element_ty)
                tl.store(logits_ptr + start + lane, zero, mask=start + lane < V)
        return

    # One pass with a running maximum a lane. DEPTH values are folded at a time within a thread, so that rescaling the
    # sum costs 1/DEPTH of an exponential: the pass would otherwise be bound by exponentials, not by memory.
    tile = tl.arange(0, DEPTH)[:, None] * BLOCK + lane[None, :]
    # A finite start: a lane that has seen only -inf must not compute inf - inf.
    top = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    sum_z = tl.zeros((BLOCK,), tl.float32)
    # Differences first, which are exact where they matter; then powers of two, the exponential of the hardware.
    k = LOG2E if SOFTCAP else scale * LOG2E
    for start in range(0, V, DEPTH * BLOCK):
        mask = start + tile < V
        z = tl.load(logits_ptr + start + tile, mask=mask, other=float("-inf")).to(tl.float32)
        if SOFTCAP:
            z, _ = _cap(z, scale, softcap)
            z = tl.where(mask, z, float("-inf"))
        if SMOOTHING:
            sum_z += tl.sum(tl.where(mask, z, 0.0), 0)
        new = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp2((top - new) * k) + tl.sum(tl.exp2((z - new[None, :]) * k), 0)
        top = new
    row_top = tl.max(top, 0)
    log2_sum = tl.log2(tl.sum(total * tl.exp2((top - row_top) * k), 0))

    # A target out of range reads nothing and turns loss and gradient of its row into NaN.
    valid = (target >= 0) & (target < V)
    log2_sum = tl.where(valid, log2_sum, float("nan"))
    z_target = tl.load(logits_ptr + target, mask=valid, other=0.0).to(tl.float32)
    unit = scale  # of z, in logits
    if SOFTCAP:
        z_target, _ = _cap(z_target, scale, softcap)
        unit = 1.0
    loss = (row_top - z_target) * unit + log2_sum * LN2
    if SMOOTHING:
        loss += smoothing * (z_target - tl.sum(sum_z, 0) / V) * unit
    lse = row_top * unit + log2_sum * LN2
    tl.store(loss_ptr + row, loss + z_loss * lse * lse)
    if stats_ptr is not None:
        tl.store(stats_ptr + 2 * row, row_top)
        tl.store(stats_ptr + 2 * row + 1, log2_sum)

    if GRADIENT:
        # The target's logit is read above by every thread and overwritten below by one.
        tl.debug_barrier()
        factor = 1.0
        if factor_ptr is not None:
            factor = tl.load(factor_ptr + row * stride_factor)
        for start in range(0, V, DEPTH * BLOCK):
            mask = start + tile < V
            x = tl.load(logits_ptr + start + tile, mask=mask, other=0.0).to(tl.float32)
            hit = start + tile == target
            dx = _slope(x, row_top, log2_sum, hit, factor, V, smoothing, z_loss, softcap, scale, SMOOTHING, SOFTCAP)
            tl.store(logits_ptr + start + tile, dx.to(logits_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["ignore_index"])
def _cross_entropy_bwd_kernel(
    dloss_ptr, logits_ptr, target_ptr, stats_ptr, dlogits_ptr, V, stride_g, stride_m, stride_dm,
    ignore_index, smoothing, z_loss, softcap, scale,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(V, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row)
    top = tl.load(stats_ptr + 2 * row)
    log2_sum = tl.load(stats_ptr + 2 * row + 1)
    factor = tl.load(dloss_ptr + row * stride_g)
    mask = cols < V
    x = tl.load(logits_ptr + row * stride_m + cols, mask=mask & (target != ignore_index), other=0.0).to(tl.float32)
    hit = cols == target
    dx = _slope(x, top, log2_sum, hit, factor, V, smoothing, z_loss, softcap, scale, SMOOTHING, SOFTCAP)
    dx = tl.where(target == ignore_index, 0.0, dx)
    tl.store(dlogits_ptr + row * stride_dm + cols, dx.to(dlogits_ptr.dtype.element_ty), mask=mask)


# --------------------------------------------------------------------------------------------------------- launches


def cross_entropy_rows(
    logits: Tensor, target: Tensor, loss: Tensor, stats: Tensor | None, factor: Tensor | None, gradient: bool,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, scale: float,
) -> None:  # fmt: skip
    """Write each row's loss. With `gradient` overwrite the logits by d(loss)/d(logits), times `factor`.

    logits: (M, V) with unit stride along V, scratch of the caller's own if `gradient`; target, loss: (M,), dense.
    stats: (M, 2) for what the kernel of the backward pass needs, or None; Triton only.
    factor: None, 0-d, or (M,) with one factor a row.
    """
    M, V = logits.shape
    if not use_triton(logits):
        options = (ignore_index, label_smoothing, z_loss, softcap, scale)
        for part in _cache_sized(logits):
            here = factor[part] if factor is not None and factor.dim() else factor
            loss[part], dlogits = _rows_reference(logits[part].to(loss.dtype), target[part], here, gradient, *options)
            if dlogits is not None:
                logits[part] = dlogits
        return
    if gradient:
        # Few rows in flight: the shorter they wait for their second reading, the more of it the L2 cache serves.
        warps, depth = 32 if V > 65536 else 16 if V > 8192 else 4, 2
    else:
        warps, depth = 4, 8 if softcap == 0.0 and label_smoothing == 0.0 else 4  # as deep as registers allow
    block = min(next_power_of_2(V), warps * 32 * 8)
    depth = max(1, min(depth, next_power_of_2(V) // block))
    stride_factor = 0 if factor is None or factor.dim() == 0 else factor.stride(0)
    arguments = (
        V, logits.stride(0), stride_factor, ignore_index, label_smoothing, z_loss, softcap, scale,
        label_smoothing != 0.0, softcap != 0.0, gradient, depth, block,
    )  # fmt: skip
    tensors = (logits, target, loss, stats, factor)
    key = (M, arguments, logits.dtype, target.dtype, stats is None, factor is None)
    launch(_cross_entropy_fwd_kernel, key, tensors, lambda: (M, arguments, {"num_warps": warps}))


def _cache_sized(logits: Tensor) -> list[slice]:
    """A few rows at a time: the temporaries of the torch path then stay in a CPU's caches and out of the peak."""
    step = max(1, 2**20 // max(1, logits.shape[1]))
    return [slice(i, i + step) for i in range(0, logits.shape[0], step)]


def _cross_entropy_fwd_fake(logits, target, ignore_index, label_smoothing, z_loss, softcap, scale):
    loss = logits.new_empty(target.shape, dtype=torch.float32)
    return loss, logits.new_empty((target.numel(), 2), dtype=torch.float32)


@launcher(
    "(Tensor logits, Tensor target, int ignore_index, float label_smoothing, float z_loss, float softcap, float scale)"
    " -> (Tensor, Tensor)",
    _cross_entropy_fwd_fake,
)
def _cross_entropy_fwd(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    options = (ignore_index, label_smoothing, z_loss, softcap, scale)
    loss, stats = _cross_entropy_fwd_fake(logits, target, *options)
    if logits.numel():
        cross_entropy_rows(rows_of(logits), target.contiguous(), loss, stats, None, False, *options)
    return loss, stats


def _cross_entropy_bwd_fake(dloss, logits, target, stats, ignore_index, label_smoothing, z_loss, softcap, scale):
    return logits.new_empty(logits.shape)


@launcher(
    "(Tensor dloss, Tensor logits, Tensor target, Tensor stats, int ignore_index, float label_smoothing, float z_loss,"
    " float softcap, float scale) -> Tensor",
    _cross_entropy_bwd_fake,
)
def _cross_entropy_bwd(
    dloss: Tensor, logits: Tensor, target: Tensor, stats: Tensor, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float, scale: float,
) -> Tensor:  # fmt: skip
    options = (ignore_index, label_smoothing, z_loss, softcap, scale)
    dlogits = _cross_entropy_bwd_fake(dloss, logits, target, stats, *options)
    if logits.numel():
        # A summed loss hands every row the same gradient, as a tensor of stride 0: it is read as it comes.
        summed = dloss.numel() > 1 and not any(dloss.stride())
        rows = dloss.as_strided((dloss.numel(),), (0,)) if summed else dloss.reshape(-1)
        x, dx = rows_of(logits), dlogits.view(-1, logits.shape[-1])
        M, V = x.shape
        block = min(2048, next_power_of_2(V))
        arguments = (
            V, rows.stride(0), x.stride(0), dx.stride(0), *options, label_smoothing != 0.0, softcap != 0.0, block,
        )  # fmt: skip
        plan = M * cdiv(V, block), arguments, {"num_warps": 4}
        key = (M, arguments, rows.dtype, x.dtype, target.dtype)
        launch(_cross_entropy_bwd_kernel, key, (rows, x, target.contiguous(), stats, dx), lambda: plan)
    return dlogits


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    logits, target, *ctx.options = inputs
    ctx.save_for_backward(logits, target, output[1])


def _backward(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    dlogits = None
    if dloss is not None:
        dlogits = _cross_entropy_bwd(dloss, *ctx.saved_tensors, *ctx.options)
    return dlogits, None, *(None for _ in ctx.options)


_cross_entropy = differentiable(_cross_entropy_fwd, _setup_context, _backward)
