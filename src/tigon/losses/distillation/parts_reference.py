"""Rows of distillation whose classes lie on several devices, in plain PyTorch: what the kernels compute, elsewhere.

Logarithms are natural here, and to the base 2 in the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.losses.distillation.reference import _rest_of, _terms_and_slopes
from tigon.ops.shard_statistics import IGNORED, LEAST, OUTSIDE


def _statistics_reference(
    z: Tensor, t: Tensor, labels: Tensor | None, kind: str, mode: int, temperature: float
) -> Tensor:
    """(M, columns), in the order in which the kernels write them."""
    top = z.amax(-1).clamp(min=LEAST)
    power = z - top.unsqueeze(-1)
    if kind == "cosine":
        found = [z.square().sum(-1), (z * t).sum(-1), t.square().sum(-1)]
    else:
        top_t = t.amax(-1).clamp(min=LEAST)
        found = [top, (power / temperature).exp().sum(-1), top_t]
        found.append(((t - top_t.unsqueeze(-1)) / temperature).exp().sum(-1))
    if mode and labels is not None:
        found.append(_of_target(z, labels))
    if mode and kind == "cosine":
        found.append(top)
    if mode == 2 or (mode and kind == "cosine"):
        found.append(power.exp().sum(-1))
    return torch.stack(found, -1)


def _of_target(z: Tensor, labels: Tensor) -> Tensor:
    here = labels >= 0
    return torch.where(here, z.gather(-1, torch.where(here, labels, 0).unsqueeze(-1)).squeeze(-1), 0.0)


def _merge_reference(
    parts: Tensor, labels: Tensor | None, kind: str, mode: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """The hard losses, and (M, MERGED)."""
    columns = parts.unbind(-1)
    hard = log_h = zero = torch.zeros_like(columns[0][0])
    if kind == "cosine":
        aa, ab, bb = (part.sum(0) for part in columns[:3])
        over_a, over_b = (1 / v.sqrt().clamp(min=1e-8) for v in (aa, bb))
        merged = [over_a, over_b, ab * over_a * over_b]
        top = zero
        if mode:
            top, log_h = _log_sum(columns[4], columns[5], 1.0)
    else:
        top, log_a = _log_sum(columns[0], columns[1], temperature)
        merged = [top, log_a, *_log_sum(columns[2], columns[3], temperature)]
        if mode:
            log_h = _log_sum(columns[0], columns[5], 1.0)[1] if mode == 2 else log_a
    if mode and labels is not None:
        log_h = torch.where(labels == OUTSIDE, float("nan"), log_h)
        hard = torch.where(labels == IGNORED, 0.0, (top - columns[3 if kind == "cosine" else 4].sum(0)) + log_h)
    return hard, torch.stack([*merged, top, log_h] if kind == "cosine" else [*merged, log_h], -1)


def _log_sum(tops: Tensor, sums: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Of all devices the maximum, and the logarithm of the sum, given those of each."""
    top = tops.amax(0)
    return top, (sums * ((tops - top) / temperature).exp()).sum(0).log()


def _sides_reference(
    z: Tensor, t: Tensor, merged: Tensor, kind: str, beta: float, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The terms of the divergence, q and the slopes along lq."""
    row_a, log_a, row_b, log_b, _ = (v.unsqueeze(-1) for v in merged.unbind(-1))
    lq, lp = (z - row_a) / temperature - log_a, (t - row_b) / temperature - log_b
    terms, slopes = _terms_and_slopes(kind, lq, lp, beta)
    return terms, lq.exp(), slopes


def _gradient_reference(
    z: Tensor, t: Tensor, slope: Tensor | float, labels: Tensor | None, merged: Tensor, total: Tensor | float,
    weights: tuple[float, float], kind: str, beta: float, temperature: float, mode: int,
) -> Tensor:  # fmt: skip
    """total: Σ of the slopes over all classes, (M,)."""
    if kind == "cosine":
        over_a, over_b, cosine, top, log_h = (v.unsqueeze(-1) for v in merged.unbind(-1))
        dz = (z * over_a * cosine - t * over_b) * over_a
    else:
        _, q, slopes = _sides_reference(z, t, merged, kind, beta, temperature)
        dz = slopes - q * (total.unsqueeze(-1) if isinstance(total, Tensor) else total)
        top, log_h = merged[:, :1], merged[:, 4:]
    dz = dz * weights[0]
    if mode and labels is not None:
        dz = dz + weights[1] * ((z - top - log_h).exp() - _one_hot(labels, z))
    return _of_valid(dz * slope, labels)


def _one_hot(labels: Tensor, z: Tensor) -> Tensor:
    return (torch.arange(z.shape[1], device=z.device) == labels.unsqueeze(-1)).to(z.dtype)


def _of_valid(values: Tensor, labels: Tensor | None) -> Tensor:
    if labels is None:
        return values
    return torch.where((labels != IGNORED).view(-1, *[1] * (values.dim() - 1)), values, 0.0)


def _local_ids(ids: Tensor, logprobs: Tensor, V: int, first: int) -> tuple[Tensor, Tensor]:
    """Which places hold a class of this device, and its index there, else 0."""
    ids = ids.long() - first
    here = (logprobs != -torch.inf) & (ids >= 0) & (ids < V)
    return here, torch.where(here, ids, 0)


def _others(z: Tensor, here: Tensor, at: Tensor) -> Tensor:
    """(M, V): the classes that were not given."""
    return torch.zeros_like(z).scatter_add_(-1, at, here.to(z.dtype)) == 0


def _topk_statistics_reference(
    z: Tensor, here: Tensor, at: Tensor, labels: Tensor | None, mode: int, temperature: float
) -> Tensor:
    rest = torch.where(_others(z, here, at), z, -torch.inf)
    top = rest.amax(-1).clamp(min=LEAST)
    power = rest - top.unsqueeze(-1)
    of_target = _of_target(z, labels) if mode and labels is not None else torch.zeros_like(top)
    found = [top, (power / temperature).exp().sum(-1), of_target, power.exp().sum(-1)]
    return torch.cat([torch.stack(found, -1), torch.where(here, z.gather(-1, at), 0.0)], -1)


def _topk_reference(
    z: Tensor, slope: Tensor | float, here: Tensor, at: Tensor, logprobs: Tensor, parts: Tensor, labels: Tensor | None,
    weights: tuple[float, float], kind: str, rest: str, beta: float, temperature: float, mode: int, classes: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Soft and hard losses, and the gradient of this device's logits."""
    given = logprobs != -torch.inf
    z_k = torch.where(given, parts[..., 4:].sum(0), -torch.inf)
    top_rest, log_rest = _log_sum(parts[..., 0], parts[..., 1], temperature)
    log_one = _log_sum(parts[..., 0], parts[..., 3], 1.0)[1]
    top = torch.maximum(top_rest, z_k.amax(-1).clamp(min=LEAST)).unsqueeze(-1)
    top_rest, log_rest, log_one = (v.unsqueeze(-1) for v in (top_rest, log_rest, log_one))
    log_tail = (top_rest - top) / temperature + log_rest
    lq, lp = (z_k - top) / temperature, logprobs.to(z.dtype)
    whole = torch.logsumexp(torch.cat([lq, log_tail], -1), -1, keepdim=True)
    lq, log_tail = lq - whole, log_tail - whole
    if rest == "renormalize":
        lq, lp = lq - torch.logsumexp(lq, -1, keepdim=True), lp - torch.logsumexp(lp, -1, keepdim=True)
    elif rest == "tail":
        others = given.sum(-1, keepdim=True) < classes
        lq, lp = torch.cat([lq, log_tail], -1), torch.cat([lp, _rest_of(lp.exp(), log_tail.exp(), others).log()], -1)
    terms, slopes = _terms_and_slopes(kind, lq, lp, beta)
    if kind == "reverse" and rest == "drop":
        slopes = slopes + lq.exp()
    total = slopes.sum(-1, keepdim=True)
    d = slopes - lq.exp() * total
    of_rest = d[..., -1:] if rest == "tail" else -log_tail.exp() * total if rest == "drop" else 0.0
    z_rest = torch.where(_others(z, here, at), z, -torch.inf)
    dz = torch.where(z_rest == -torch.inf, 0.0, ((z_rest - top_rest) / temperature - log_rest).exp()) * of_rest
    dz = dz.scatter_add(-1, at, torch.where(here, d[..., : z_k.shape[1]], 0.0)) * weights[0]
    hard = torch.zeros_like(terms[..., 0])
    if mode and labels is not None:
        log_h = torch.logsumexp(torch.cat([z_k - top, top_rest - top + log_one], -1), -1, keepdim=True)
        log_h = torch.where((labels == OUTSIDE).unsqueeze(-1), float("nan"), log_h)
        hard = (top - parts[..., 2].sum(0).unsqueeze(-1) + log_h).squeeze(-1)
        dz = dz + weights[1] * ((z - top - log_h).exp() - _one_hot(labels, z))
    return _of_valid(terms.sum(-1), labels), _of_valid(hard, labels), _of_valid(dz * slope, labels)
