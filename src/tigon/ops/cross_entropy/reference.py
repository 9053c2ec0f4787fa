"""Cross entropy in plain PyTorch: the specification, the fallback without kernels, and the tests' reference."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy_reference(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    scale: float = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    """A loss per row, (...), including z-loss."""
    loss, z_rows = loss_and_z_reference(logits, target, weight, ignore_index, label_smoothing, z_loss, softcap, scale)
    return loss if z_rows is None else loss + z_rows


def loss_and_z_reference(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float, scale: float,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Each row's cross entropy and z-loss (None without z-loss): both (...)."""
    z, _ = _cap_reference(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap, scale)
    labels = target.reshape(-1).long()
    rows = z.reshape(labels.numel(), z.shape[-1])
    # F.cross_entropy requires weights in the logits' dtype.
    weight = None if weight is None else weight.to(rows.dtype)
    loss = F.cross_entropy(
        rows, labels, weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    ).view(target.shape)
    if not z_loss:
        return loss, None
    # Separate from the loss: class weights do not apply to z-loss, so the two means have different divisors.
    return loss, z_loss * torch.where(target != ignore_index, torch.logsumexp(z, dim=-1).square(), 0.0)


def _cap_reference(logits: Tensor, softcap: float, scale: float) -> tuple[Tensor, Tensor | float]:
    """z = softcap(scale · logits) and dz/dlogits."""
    z = logits * scale if scale != 1.0 else logits
    if not softcap:
        return z, scale
    t = torch.tanh(z / softcap)
    return softcap * t, scale * (1 - t * t)


def rows_reference(
    logits: Tensor, target: Tensor, factor: Tensor | None, gradient: bool, *options: Any
) -> tuple[Tensor, Tensor | None]:
    """Loss and factor · d(loss)/d(logits) for (M, V) rows: the kernels' work on other devices, without autograd."""
    ignore_index, label_smoothing, z_loss, softcap, scale = options
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
    return loss, _slope_reference(logp, lse, slope, target, factor, z.shape[-1], *options)


def gradient_reference(
    logits: Tensor, labels: Tensor, stats: Tensor, factor: Tensor | None, classes: int, *options: Any
) -> Tensor:
    """The gradient of `rows_reference` for the logits of some classes, from statistics over all classes.

    stats: (M, 2), the maximum of z (without a softcap: of the logits) and log₂ Σ exp(z − max).
    """
    softcap, scale = options[3:]
    z, slope = _cap_reference(logits, softcap, scale)
    top, log_sum = stats[:, :1] * (1.0 if softcap else scale), stats[:, 1:] * math.log(2.0)
    lse = (top + log_sum).squeeze(-1)
    return _slope_reference((z - top) - log_sum, lse, slope, labels, factor, classes, *options)


def _slope_reference(
    logp: Tensor, lse: Tensor, slope: Tensor | float, target: Tensor, factor: Tensor | None, classes: int,
    *options: Any,
) -> Tensor:  # fmt: skip
    """factor · d(loss)/d(logits), in logp's memory. A target may be outside these classes."""
    ignore_index, label_smoothing, z_loss, softcap, scale = options
    dz = logp.exp_()
    if z_loss:
        dz *= (1 + 2 * z_loss * lse).unsqueeze(-1)
    valid = target != ignore_index
    here = valid & (target >= 0) & (target < dz.shape[-1])
    at = torch.where(here, target, 0).long().unsqueeze(-1)
    # dz's dtype: torch.where with two Python numbers gives fp32.
    dz.scatter_add_(-1, at, torch.where(here, dz.new_full((), label_smoothing - 1), 0.0).unsqueeze(-1))
    if label_smoothing:
        dz -= label_smoothing / classes
    if softcap or scale != 1.0:
        dz *= slope
    if factor is not None:
        dz *= factor.to(dz.dtype).unsqueeze(-1)
    # A select: 0 times NaN, from an ignored row with an infinity, is NaN.
    return dz.masked_fill_(~valid.unsqueeze(-1), 0.0)
