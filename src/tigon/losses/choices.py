"""Choice among a few classes, such as the answers "yes" and "no": the head's other classes are never computed.

    z_k  = softcap · tanh(scale · (x · w_k + bias_k) / softcap)     k in choices, K of the V classes
    loss = −log softmax(z)[target], or −Σ_k target_k log softmax(z)_k

A head with 151,936 classes takes a product over all of them to get two numbers; this takes a product over K rows, in
fp32, whatever the dtypes of x and the weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import check_tensors, is_concrete
from tigon.losses.head.head import Head, check_head, parse_head
from tigon.ops.cross_entropy import Reduction, check_options
from tigon.ops.targets import CHECKS, checked_target

# The target that marks an ignored row, as in torch.
IGNORED = -100


def choice(
    x: Tensor, head: Head | Tensor | torch.nn.Linear, choices: Tensor | Sequence[int], target: Tensor, *,
    weights: Tensor | None = None, reduction: Reduction = "mean",
) -> Tensor:  # fmt: skip
    """Cross entropy over a few given classes.

    Args:
        x: (..., H), bf16, fp16, fp32 or fp64: hidden states that enter the head.
        head: the weight (V, H), a `torch.nn.Linear`, or a `tigon.Head` with a bias, softcap or scale.
        choices: (K,) integer class indices, all distinct.
        target: (...), integers in [0, K), the index into `choices`; −100 for ignored rows. Or (..., K) floats, a
            probability for each choice, such as a teacher's. No gradient.
        weights: (...), factors on row losses. No gradient.
        reduction: "mean" over valid rows, regardless of weights (0 if there are none); "sum"; "none".
    Returns: 0-d, or (...) for reduction="none", in fp32 (fp64 for fp64 inputs).
    Raises: ValueError for shapes, dtypes or options that do not fit, and for classes outside the head (on a GPU
        only with TIGON_CHECKS=1).

    Only K rows of the weight get a gradient. If the weight is a parameter, the backward pass writes a (V, H) tensor of
    zeros in the weight's dtype and adds the K rows. A frozen weight costs nothing.

    Replaces::

        z = F.linear(x, weight, bias).float()[..., choices]
        loss = F.cross_entropy(z, target)
    """
    name = "choice"
    check_options(name, reduction, 0.0, None, 1.0, None)
    z = _logits(name, x, head, choices)
    K = z.shape[-1]
    check_tensors(name, target=target, weights=weights)
    if target.dtype.is_floating_point:
        if target.shape != z.shape or target.device != z.device:
            raise ValueError(
                f"{name}: target of floats must be {tuple(z.shape)} on {z.device}, a probability for each choice, got "
                f"{tuple(target.shape)} on {target.device}."
            )
        counted = None
        losses = -(target.detach().to(z.dtype) * z.log_softmax(-1)).sum(-1)
    else:
        target = checked_target(name, target, z.shape[:-1], K, IGNORED, z.device)
        counted = target != IGNORED
        flat = F.cross_entropy(z.reshape(-1, K), target.reshape(-1).long(), ignore_index=IGNORED, reduction="none")
        losses = flat.view(target.shape)
    if weights is not None:
        if weights.shape != losses.shape or weights.device != losses.device:
            raise ValueError(
                f"{name}: weights must be {tuple(losses.shape)} on {losses.device}, one per row, got "
                f"{tuple(weights.shape)} on {weights.device}."
            )
        losses = losses * weights.detach().to(losses.dtype)
        # An ignored row counts for nothing, even if its weight is NaN.
        losses = losses if counted is None else torch.where(counted, losses, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    count = max(losses.numel(), 1) if counted is None else counted.sum().clamp(min=1)
    return losses.sum() / count


def choice_logits(
    x: Tensor, head: Head | Tensor | torch.nn.Linear, choices: Tensor | Sequence[int]
) -> Tensor:  # fmt: skip
    """Logits for a few classes, with gradients; a softmax over them gives the choice probabilities.

    Args:
        x, head, choices: as in `choice`.
    Returns: (..., K) in fp32 (fp64 for fp64 inputs).
    Raises: ValueError as `choice`.

    Replaces::

        z = F.linear(x, weight, bias).float()[..., choices]
    """
    return _logits("choice_logits", x, head, choices)


def choice_reference(
    x: Tensor, weight: Tensor, choices: Tensor, target: Tensor, bias: Tensor | None = None,
    softcap: float | None = None, scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """The specification: row losses, (...), from all logits."""
    z = F.linear(x, weight, bias)
    z = z.to(torch.promote_types(z.dtype, torch.float32)) * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    logp = z[..., choices].log_softmax(-1)
    if target.dtype.is_floating_point:
        return -(target * logp).sum(-1)
    at = torch.where(target == IGNORED, 0, target)
    return torch.where(target == IGNORED, 0.0, -logp.gather(-1, at.unsqueeze(-1)).squeeze(-1))


def _logits(name: str, x: Tensor, head: Head | Tensor | torch.nn.Linear, choices: Tensor | Sequence[int]) -> Tensor:
    weight, bias, softcap, scale, group, _ = parse_head(name, head)
    check_options(name, "none", 0.0, softcap, scale, None)
    if group is not None:
        raise ValueError(f"{name}: head.group must be None: the rows of a few classes are gathered on one device.")
    check_head(name, x, weight, bias)
    chosen = _parse_choices(name, choices, weight)
    wide = torch.promote_types(x.dtype, torch.float32)
    # Autocast would narrow this small product.
    with torch.autocast(x.device.type, enabled=False):
        z = x.to(wide) @ weight.index_select(0, chosen).to(wide).mT
        if bias is not None:
            z = z + bias.index_select(0, chosen).to(wide)
        z = z if scale == 1.0 else z * scale
        return z if softcap is None else softcap * torch.tanh(z / softcap)


def _parse_choices(name: str, choices: Tensor | Sequence[int], weight: Tensor) -> Tensor:
    """choices as int64 on the weight's device."""
    if not isinstance(choices, Tensor):
        choices = torch.tensor(choices, dtype=torch.int64) if len(choices) else torch.empty(0)
    if choices.dim() != 1 or choices.dtype.is_floating_point or choices.dtype == torch.bool or not choices.numel():
        raise ValueError(
            f"{name}: choices must be (K,) integer class indices, at least one, got {tuple(choices.shape)} "
            f"{choices.dtype}."
        )
    if (CHECKS or choices.device.type == "cpu") and is_concrete(choices):
        given, V = choices.tolist(), weight.shape[0]
        wrong = [k for k in given if not 0 <= k < V]
        if wrong:
            raise ValueError(f"{name}: choices must lie in [0, {V}), the head's classes, got {wrong[0]}.")
        if len(set(given)) < len(given):
            raise ValueError(f"{name}: choices must hold each class once, got {given}.")
    return choices.to(weight.device, torch.int64, non_blocking=True)
