"""Cross entropy of given logits. With z = softcap(scale · logits), lse = log Σ exp z, ε the smoothing, V classes and
class weights w (1 unless given):

    loss = (1 − ε) · w[target] · (lse − z[target]) + ε/V · Σ w · (lse − z) + z_loss · lse²

Sources: label smoothing, Szegedy et al. 2015, https://arxiv.org/abs/1512.00567; z-loss, Chowdhery et al. 2022,
https://arxiv.org/abs/2204.02311; soft-capping, Gemma 2, https://arxiv.org/abs/2408.00118.

This file has the public function; reference.py, kernels.py and launches.py follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, get_args, overload

import torch
from torch import Tensor

from tigon.kernels import check_tensors, unknown_keyword, use_triton
from tigon.ops.cross_entropy.launches import cross_entropy_rows
from tigon.ops.cross_entropy.launches import loss_and_details as _loss_and_details
from tigon.ops.cross_entropy.launches import loss_of_logits as _loss_of_logits
from tigon.ops.cross_entropy.reference import cross_entropy_reference, loss_and_z_reference
from tigon.ops.example import LOGITS, Example, make_ids
from tigon.ops.targets import checked_target

__all__ = [
    "CrossEntropy",
    "CrossEntropyDetails",
    "check_options",
    "cross_entropy",
    "cross_entropy_reference",
    "cross_entropy_rows",
    "inverse_divisor",
]

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = get_args(Reduction)


class CrossEntropyDetails(NamedTuple):
    """Result of `cross_entropy(..., details=True)`. Only the loss has a gradient.

    loss: as without details.
    z_loss: the z-loss term of the loss, with the same reduction.
    accuracy: 0-d fp32, the fraction of rows, ignored rows excluded, whose largest logit is the target's; NaN if all
        rows are ignored.
    predicted: (...) int64, the class with each row's largest logit, the first among equals; −1 for ignored rows, which
        are not read.
    """

    loss: Tensor
    z_loss: Tensor
    accuracy: Tensor
    predicted: Tensor


def check_options(
    name: str, reduction: str, label_smoothing: float, softcap: float | None, scale: float,
    divisor: Tensor | float | None,
) -> None:  # fmt: skip
    """Raise a ValueError for invalid options, shared by all cross entropies."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction must be one of {REDUCTIONS}, got {reduction!r}.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{name}: label_smoothing must lie in [0, 1], got {label_smoothing}.")
    # Running maxima are taken before the scaling: a negative scale would make the least logit the likeliest.
    if scale <= 0:
        raise ValueError(f"{name}: scale must be positive, got {scale}.")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"{name}: softcap must be positive or None, got {softcap}.")
    if divisor is not None and reduction != "mean":
        raise ValueError(f"{name}: divisor goes with reduction='mean', got reduction={reduction!r}.")
    if isinstance(divisor, Tensor) and divisor.dim() != 0:
        raise ValueError(f"{name}: divisor must be a number or a 0-d tensor, got shape {tuple(divisor.shape)}.")


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """Options of `cross_entropy` and `linear_cross_entropy`.

    Args:
        ignore_index: rows with this target have loss 0 and gradient 0.
        reduction: "mean" over the rows that are not ignored (with class weights, the weighted loss is divided by the
            sum of the targets' weights), "sum", or "none" for a loss per row. The mean over no rows is 0 with a
            gradient of 0, where PyTorch gives NaN: a rank or a micro-batch may be empty.
        label_smoothing: ε in [0, 1], spread evenly over the classes.
        z_loss: coefficient of lse², which keeps the logits from drifting.
        divisor: with "mean", divides the summed loss instead of the number of valid rows or their weight; a number or
            a 0-d tensor (the token count of a whole gradient-accumulation step), without gradient.
        softcap: c > 0 for z = c · tanh(scale · logits / c); None for none. `linear_cross_entropy` takes the head's.
        scale: multiplies the logits, before the softcap; positive. `linear_cross_entropy` takes the head's.
    Raises: ValueError for invalid options.
    """

    ignore_index: int = -100
    reduction: Reduction = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    divisor: Tensor | float | None = None
    softcap: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_options("CrossEntropy", self.reduction, self.label_smoothing, self.softcap, self.scale, self.divisor)


@overload
def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, *, config: CrossEntropy = CrossEntropy(),
    inplace: bool = False, details: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, *, config: CrossEntropy = CrossEntropy(),
    inplace: bool = False, details: Literal[True],
) -> CrossEntropyDetails: ...  # fmt: skip
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    config: CrossEntropy = CrossEntropy(),
    inplace: bool = False,
    details: bool = False,
    **unknown: NoReturn,
) -> Tensor | CrossEntropyDetails:
    """Cross entropy that reads the logits once in the forward pass, and once to write their gradient.

    Args:
        logits: (..., V), any float dtype; not modified unless inplace. The classes are the last dimension, where torch
            has the second.
        target: (...), integer class indices.
        weight: (V,) floats, one per class, as in `torch.nn.functional.cross_entropy`; no gradient. z-loss is not
            weighted.
        config: a `tigon.CrossEntropy`: reduction, smoothing, z-loss, divisor, softcap.
        inplace: the backward pass overwrites the logits with the gradient, which saves a tensor as large as the logits.
            The logits are then lost, even if they are a leaf, and a second backward pass raises PyTorch's error.
            Ignored under torch.compile, without Triton, and for logits whose rows overlap or have gaps between columns.
        details: also return z-loss, accuracy and predicted classes, from the same pass over the logits.
    Returns: 0-d, or (...) for reduction="none", in fp32 (fp64 for fp64 logits); `CrossEntropyDetails` with `details`.
    Raises: ValueError for invalid shapes, dtypes or options. A target outside [0, V) gives a NaN loss on the GPU, and a
        ValueError on the CPU or with TIGON_CHECKS=1.

    Replaces::

        loss = F.cross_entropy(logits.float(), target)
    """
    if unknown:
        homes = {field: f"config=tigon.CrossEntropy({field}=…)" for field in CrossEntropy.__dataclass_fields__}
        raise unknown_keyword("cross_entropy", unknown, homes)
    ignore_index, reduction, divisor = config.ignore_index, config.reduction, config.divisor
    if not logits.dtype.is_floating_point or logits.dim() == 0:
        raise ValueError(f"cross_entropy: logits must be (..., V) floats, got {tuple(logits.shape)} {logits.dtype}.")
    _check_classes(logits, target)
    target = checked_target("cross_entropy", target, logits.shape[:-1], logits.shape[-1], ignore_index, logits.device)
    if weight is not None:
        _check_weight(weight, logits)
    # From here on 0.0 means no softcap: an operator's schema has floats, and the kernel a branch.
    options = (ignore_index, config.label_smoothing, config.z_loss, config.softcap or 0.0, config.scale)
    if not use_triton(logits, weight):
        return _compose(logits, target, weight, reduction, divisor, details, *options)
    if divisor is not None:
        if isinstance(divisor, Tensor):
            divisor = divisor.detach().to(logits.device)
        else:
            divisor = torch.full((), divisor, dtype=torch.float32, device=logits.device)
    if not details:
        return _loss_of_logits(logits, target, weight, divisor, reduction, inplace, *options)
    loss, *others = _loss_and_details(logits, target, weight, divisor, reduction, inplace, *options)
    return CrossEntropyDetails(loss, *(t.detach() for t in others))


def _compose(
    logits: Tensor, target: Tensor, weight: Tensor | None, reduction: str, divisor: Tensor | float | None,
    details: bool, *options: Any,
) -> Tensor | CrossEntropyDetails:  # fmt: skip
    """Compute the loss in plain PyTorch."""
    target = target.long()
    rows, z_rows = loss_and_z_reference(logits, target, weight, *options)
    valid = target != options[0]
    # With class weights the loss is divided by their sum, but z-loss by the row count.
    over: Tensor | float = 1.0
    z_over: Tensor | float = 1.0
    if reduction == "mean":
        over = z_over = valid.sum().clamp(min=1) if divisor is None else divisor
        if weight is not None and divisor is None:
            mass = torch.where(valid, weight[torch.where(valid, target, 0).long()], 0.0).sum()
            # The mean over no rows is 0. Weights that sum to 0 over valid rows stay 0 / 0, as in PyTorch.
            over = torch.where(valid.any(), mass, 1.0)
        if isinstance(over, Tensor):
            over = over.detach().to(rows.device, rows.dtype)
    if reduction == "none":
        loss = rows if z_rows is None else rows + z_rows
    else:
        loss = rows.sum() / over if over is not z_over or z_rows is None else (rows + z_rows).sum() / over
        if over is not z_over and z_rows is not None:
            loss = loss + z_rows.sum() / z_over
    if not details:
        return loss
    with torch.no_grad():
        z = torch.zeros_like(rows) if z_rows is None else z_rows.detach()
        z = z if reduction == "none" else z.sum() / z_over
        largest = logits.argmax(-1) if logits.numel() else target.long()
        predicted = torch.where(valid, largest, -1)
        # 0 / 0 is NaN if every row is ignored.
        accuracy = ((predicted == target) & valid).sum().float() / valid.sum()
    return CrossEntropyDetails(loss, z, accuracy, predicted)


def _check_classes(logits: Tensor, target: Tensor) -> None:
    """Raise a ValueError if torch would take the second dimension for the classes."""
    if logits.dim() > 2 and target.shape == (logits.shape[0], *logits.shape[2:]):
        either = " or the last" if target.shape == logits.shape[:-1] else ""
        raise ValueError(
            f"cross_entropy: logits must have their classes in the last dimension, got {tuple(logits.shape)} for "
            f"target {tuple(target.shape)}, where they may be the second{either}: pass logits.movedim(1, -1) for the "
            "second, or flatten rows to (M, V) and (M,)."
        )


def _check_weight(weight: Tensor, logits: Tensor) -> None:
    check_tensors("cross_entropy", weight=weight)
    if weight.shape != logits.shape[-1:] or not weight.dtype.is_floating_point:
        raise ValueError(
            f"cross_entropy: weight must have shape {tuple(logits.shape[-1:])}, one float per class, got "
            f"{tuple(weight.shape)} {weight.dtype}."
        )
    if weight.requires_grad:
        raise ValueError(
            "cross_entropy: weight must not require a gradient, as it gets none, got one that does: detach it."
        )


def inverse_divisor(
    target: Tensor, ignore_index: int, reduction: str, divisor: Tensor | float | None, dtype: torch.dtype
) -> Tensor | None:
    """Reciprocal of the summed loss's divisor, a 0-d tensor on the target's device; None for "sum" and "none".

    Does not synchronise with the device. Zero valid rows count as 1, so that the mean over no rows is 0.
    """
    if reduction != "mean":
        return None
    if divisor is None:
        # On the device: `.item()` would wait for all queued work.
        divisor = (target != ignore_index).sum().clamp(min=1)
    elif not isinstance(divisor, Tensor):
        return torch.full((), 1.0 / divisor if divisor else float("inf"), dtype=dtype, device=target.device)
    return divisor.to(device=target.device, dtype=dtype).reciprocal()


EXAMPLES = {
    "cross_entropy": Example("Losses", (LOGITS,), lambda x: cross_entropy(x, make_ids(x, 256))),
}
