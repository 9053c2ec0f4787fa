"""Divergences between a student's distribution Q (the input) and a teacher's P (the target), a number per row:

    kl_div   KL(P ‖ Q) = Σ p · log(p / q)
    jsd      β · KL(P ‖ M) + (1 − β) · KL(Q ‖ M), M = β · P + (1 − β) · Q;  KL(P ‖ Q) for β = 0, KL(Q ‖ P) for β = 1
    tvd      ½ · Σ |p − q|

Source: generalised JSD for distillation, Agarwal et al. 2023, https://arxiv.org/abs/2306.13649, with β as in TRL's
`GKDTrainer.generalized_jsd_loss` and Liger's `LigerJSD`.

Loss and gradient are computed from the inputs, and nothing else as wide as a row is saved. TVD's slope is a sign, and
wide rows save two bits per class instead of reading both sides again. For logits, log-probabilities are never stored: a
row saves five numbers.

This file has the public functions and the reference; kernels.py and launches.py follow.
"""

from __future__ import annotations

from typing import Literal, NoReturn, get_args

import torch
from torch import Tensor

from tigon.kernels import unknown_keyword, use_triton
from tigon.ops.divergence.launches import divergence_rows as _rows
from tigon.ops.divergence.launches import in_planes
from tigon.ops.example import LOGITS, Example

__all__ = ["HOMES", "REDUCTIONS", "divergence_reference", "jsd", "kl_div", "tvd"]

Reduction = Literal["batchmean", "mean", "sum", "rows"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)
HOMES = {
    "logits": "temperature=1.0, since with any temperature both sides are logits",
    "labels": "mask=labels != ignore_index",
    "ignore_index": "mask=labels != ignore_index",
}


def kl_div(
    input: Tensor, target: Tensor, *, reduction: Reduction = "mean", log_target: bool = False,
    temperature: float | None = None, mask: Tensor | None = None, **unknown: NoReturn,
) -> Tensor:  # fmt: skip
    """KL(P ‖ Q) per row, with P from the target and Q from the input.

    Args:
        input: (..., V) log-probabilities, or logits; any float dtype.
        target: (..., V), input's shape: probabilities; log-probabilities with log_target; logits with a temperature.
            Gets no gradient.
        reduction: "mean" divides the sum by the element count in valid rows, "batchmean", for input (M, V), by the
            valid row count, "sum" does not divide, "rows" gives a value per row.
        log_target: True for a target of log-probabilities.
        temperature: both sides are logits, divided by the temperature before the softmax (1.0: used as they are). The
            loss is not multiplied by the temperature's square. None: input holds log-probabilities.
        mask: (...), booleans, such as `labels != -100`: False for rows that give 0, have no gradient and do not count.
    Returns: 0-d, or (...) for reduction="rows", in fp32 (fp64 for fp64). A class with probability 0 contributes 0. The
        means over no rows are 0, with a gradient of 0.
    Raises: ValueError for invalid shapes, dtypes or options, and for a target that requires a gradient.

    Replaces (with reduction="batchmean" and a temperature)::

        log_q = F.log_softmax(input.float() / temperature, dim=-1)
        log_p = F.log_softmax(target.float() / temperature, dim=-1)
        loss = F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    """
    if unknown:
        raise unknown_keyword("kl_div", unknown, HOMES)
    if temperature is not None and log_target:
        raise ValueError("kl_div: log_target must be False with a temperature, which takes logits, got True.")
    if reduction == "batchmean" and input.dim() not in (0, 2):
        raise ValueError(
            "kl_div: input must be (M, V) with reduction='batchmean', which torch divides by the first dimension, got "
            f"{tuple(input.shape)}: flatten(0, -2) for the mean over all rows."
        )
    form = "logits" if temperature is not None else "log" if log_target else "probabilities"
    return _divergence("kl_div", "kl", form, input, target, reduction, 0.0, temperature, mask)


def jsd(
    input: Tensor, target: Tensor, *, beta: float = 0.5, reduction: Reduction = "batchmean",
    temperature: float | None = None, mask: Tensor | None = None, **unknown: NoReturn,
) -> Tensor:  # fmt: skip
    """Generalised Jensen-Shannon divergence per row, as in on-policy distillation.

    Args:
        input, target: (..., V) log-probabilities, or logits; any float dtypes. The target gets no gradient.
        beta: weight of the target in the mixture, in [0, 1]; 0 is KL(target ‖ input), 1 is KL(input ‖ target).
        reduction: as for `kl_div`, except that "batchmean" covers all rows of any shape.
        temperature, mask: as for `kl_div`.
    Returns: as `kl_div`.
    Raises: ValueError as `kl_div`, and for a beta outside [0, 1].

    Replaces (0 < beta < 1)::

        log_m = torch.logsumexp(torch.stack([log_q + math.log(1 - beta), log_p + math.log(beta)]), dim=0)
        to_p = F.kl_div(log_m, log_p, reduction="batchmean", log_target=True)
        to_q = F.kl_div(log_m, log_q, reduction="batchmean", log_target=True)
        loss = beta * to_p + (1 - beta) * to_q
    """
    if unknown:
        raise unknown_keyword("jsd", unknown, HOMES)
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"jsd: beta must lie in [0, 1], got {beta}.")
    kind = "kl" if beta == 0.0 else "reverse" if beta == 1.0 else "jsd"
    form = "log" if temperature is None else "logits"
    return _divergence("jsd", kind, form, input, target, reduction, beta, temperature, mask)


def tvd(
    input: Tensor, target: Tensor, *, reduction: Reduction = "batchmean", temperature: float | None = None,
    mask: Tensor | None = None, **unknown: NoReturn,
) -> Tensor:  # fmt: skip
    """Total variation distance per row, ½ · Σ |p − q|, in [0, 1]. The gradient is 0 where p = q.

    For many wide rows the backward pass saves 0.25 bytes per class and no probabilities; for logits the input
    is saved as well. The target is not saved. From 1,024 rows with 4,096 classes upwards, a row is summed in another
    order than in a smaller batch, so its last bits differ from there; the row's position in the batch has no effect.

    Args:
        input, target: (..., V) probabilities, or logits; any float dtypes. The target gets no gradient.
        reduction: as for `kl_div`, except that "batchmean" covers all rows of any shape.
        mask: as for `kl_div`.
        temperature: as for `kl_div`; None: both sides are probabilities.
    Returns: as `kl_div`.
    Raises: ValueError as `kl_div`.

    Replaces::

        loss = 0.5 * (input - target).abs().sum(-1).mean()
    """
    if unknown:
        raise unknown_keyword("tvd", unknown, HOMES)
    form = "probabilities" if temperature is None else "logits"
    return _divergence("tvd", "tvd", form, input, target, reduction, 0.0, temperature, mask)


def _divergence(
    name: str, kind: str, form: str, input: Tensor, target: Tensor, reduction: str, beta: float,
    temperature: float | None, mask: Tensor | None,
) -> Tensor:  # fmt: skip
    if reduction not in REDUCTIONS:
        more = " For one value per element use torch.nn.functional.kl_div." if reduction == "none" else ""
        raise ValueError(f"{name}: reduction must be one of {REDUCTIONS}, got {reduction!r}.{more}")
    if not input.dtype.is_floating_point or input.dim() == 0:
        raise ValueError(f"{name}: input must be (..., V) floats, got {tuple(input.shape)} {input.dtype}.")
    if target.shape != input.shape or not target.dtype.is_floating_point or target.device != input.device:
        raise ValueError(
            f"{name}: target must be floats of input's shape {tuple(input.shape)} on {input.device}, "
            f"got {tuple(target.shape)} {target.dtype} on {target.device}."
        )
    if target.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: target must not require a gradient, as it gets none, got one that does: detach it.")
    if temperature is None:
        temperature = 1.0
    elif not temperature > 0:
        raise ValueError(f"{name}: temperature must be positive or None, got {temperature}.")
    if mask is not None and (mask.shape != input.shape[:-1] or mask.dtype != torch.bool or mask.device != input.device):
        raise ValueError(
            f"{name}: mask must be booleans on {input.device}, one per row, {tuple(input.shape[:-1])}, "
            f"got {tuple(mask.shape)} {mask.dtype} on {mask.device}."
        )
    options = (kind, form, beta, temperature)
    if use_triton(input, target):
        signed = kind == "tvd" and input.requires_grad and torch.is_grad_enabled() and in_planes(input, target)
        rows = _rows(input, target, mask, *options, signed)
    else:
        rows = divergence_reference(input, target, mask, *options)
    if reduction == "rows":
        return rows
    if mask is None:
        # The mean over no rows would be NaN, but their sum is 0.
        total = rows.sum() if reduction == "sum" or not rows.numel() else rows.mean()
    else:
        total = rows.sum()
        if reduction != "sum":
            total = total / mask.sum().clamp(min=1)  # the mean over no rows is 0
    return total / max(1, input.shape[-1]) if reduction == "mean" else total


def divergence_reference(
    input: Tensor, target: Tensor, mask: Tensor | None, kind: str, form: str, beta: float, temperature: float
) -> Tensor:
    """A value per row, (...)."""
    # At least fp32, and fp64 if either side is.
    acc = torch.promote_types(torch.promote_types(input.dtype, target.dtype), torch.float32)
    a, b = input.to(acc), target.to(acc)
    if form == "logits":
        a, b = torch.log_softmax(a / temperature, -1), torch.log_softmax(b / temperature, -1)
    if kind == "tvd":
        q, p = (a.exp(), b.exp()) if form == "logits" else (a, b)
        terms = 0.5 * (p - q).abs()
    elif kind == "kl":
        p = b if form == "probabilities" else b.exp()
        log_p = torch.log(p) if form == "probabilities" else b
        terms = p * torch.where(p == 0, 0.0, log_p - a)
    elif kind == "reverse":
        q = a.exp()
        terms = q * torch.where(q == 0, 0.0, a - b)
    elif kind == "jsd":
        q, p = a.exp(), b.exp()
        m = beta * p + (1 - beta) * q
        log_m = torch.where(m == 0, 1.0, m).log()  # the gradient of log 0 would be NaN under any mask
        terms = beta * p * torch.where(p == 0, 0.0, b - log_m) + (1 - beta) * q * torch.where(q == 0, 0.0, a - log_m)
    else:
        raise NotImplementedError(f"divergence_reference: {kind!r} has no formula.")
    rows = terms.sum(-1)
    return rows if mask is None else torch.where(mask, rows, 0.0)


EXAMPLES = {
    "kl_div": Example(
        "Losses",
        (LOGITS, LOGITS),
        lambda x, y: kl_div(x, y.detach(), reduction="batchmean", temperature=1.0),
    ),
    "jsd": Example("Losses", (LOGITS, LOGITS), lambda x, y: jsd(x, y.detach(), temperature=1.0)),
    "tvd": Example("Losses", (LOGITS, LOGITS), lambda x, y: tvd(x, y.detach(), temperature=1.0)),
}
