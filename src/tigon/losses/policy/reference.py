"""Policy losses on whole logits: the specification, in plain PyTorch and as the papers write the formulas."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.losses.head.head import Head, Hidden, parse_head
from tigon.losses.policy.options import GRPO, Rollout, Sampler, parse_rollout
from tigon.ops.logprob import logprob_reference


def grpo_reference(
    x: Tensor, head: Head | Tensor, target: Tensor, rollout: Rollout | Tensor, *, config: GRPO = GRPO(),
    level: str | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """`grpo` on whole logits, by autograd. level "total" is `rloo`, with loss_type "grpo"."""
    c, ignore_index, level = config, config.ignore_index, level or config.importance_sampling_level
    weight, bias, softcap, scale, _, _ = parse_head("grpo_reference", head)
    advantages, old, ref, sampler = parse_rollout("grpo_reference", rollout)
    sampled, ratio = sampler if isinstance(sampler, Sampler) else Sampler(sampler)
    mode, beta = c.importance_sampling_mode, c.beta
    S = target.shape[0]
    options = (ignore_index, c.temperature, softcap or 0.0, scale)
    mask = target != ignore_index
    counts = mask.sum(1, keepdim=True).clamp(min=1)
    logprob, entropy, *_ = logprob_reference(F.linear(x, weight, bias), target, *options)
    A = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)

    def of_tokens(t: Tensor) -> Tensor:
        return torch.where(mask, t, 0.0)

    old = logprob.detach() if old is None else of_tokens(old)
    log_ratio = logprob - old
    log_weight = log_ratio
    if level != "token":
        log_weight = log_ratio.sum(1, keepdim=True)
    if level == "sequence":
        log_weight = log_weight / counts
    r = log_weight.exp()

    by_ratio = None if ratio is None else ratio.view(S, -1)
    if sampled is not None and by_ratio is None and mode is not None:
        difference = torch.nan_to_num(old - of_tokens(sampled), nan=0.0)
        by, what = mode.split("_")
        by_ratio = (difference.sum(1, keepdim=True) if by == "sequence" else difference).exp()
        low, high = c.importance_sampling_clip_min, c.importance_sampling_clip_max
        if what == "truncate":
            by_ratio = by_ratio.clamp(low, high)
        else:
            by_ratio = torch.where((by_ratio > (high or math.inf)) | (by_ratio < (low or 0.0)), 0.0, by_ratio)

    epsilon, high = c.epsilon, c.epsilon if c.epsilon_high is None else c.epsilon_high
    loss_type = c.loss_type
    if loss_type == "cispo":
        loss = -r.clamp(max=high).detach() * A * logprob
    elif loss_type == "sapo":
        tau = torch.where(A > 0, torch.full_like(A, c.sapo_temperature_pos), c.sapo_temperature_neg)
        loss = -A * torch.sigmoid(tau * (r - 1)) * 4 / tau
    elif loss_type == "vespo":
        log_w = of_tokens(log_ratio.detach().clamp(-20.0, 20.0))
        if by_ratio is not None:
            log_w = log_w + of_tokens(by_ratio.log().clamp(math.log(1e-8), 20.0))
        log_w = log_w.sum(1, keepdim=True).clamp(math.log(1e-8), 20.0)
        k = torch.where(A >= 0, torch.full_like(A, c.vespo_k_pos), c.vespo_k_neg)
        lam = torch.where(A >= 0, torch.full_like(A, c.vespo_lambda_pos), c.vespo_lambda_neg).clamp(min=1e-4)
        phi = (lam + k * log_w - lam * log_w.exp()).exp()
        loss = -phi * A * logprob
    elif loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        loss = -torch.minimum(r.clamp(max=c.delta) * A if c.delta else r * A, r.clamp(1 - epsilon, 1 + high) * A)
    else:
        raise NotImplementedError(f"grpo_reference: {loss_type!r} has no formula.")

    if c.off_policy_mask_threshold is not None:
        theirs = old if sampled is None else of_tokens(sampled)
        drift = torch.nan_to_num(theirs - logprob.detach(), nan=0.0).sum(1, keepdim=True) / counts
        loss = loss * ((A >= 0) | (drift <= c.off_policy_mask_threshold))
    top = mask
    if c.top_entropy_quantile < 1.0 and mask.any():
        top = mask & (entropy >= torch.quantile(entropy[mask].detach(), 1 - c.top_entropy_quantile))
        loss = loss * top
    if by_ratio is not None and loss_type != "vespo":
        loss = loss * by_ratio
    metrics = {"logprob": logprob.detach(), "entropy": of_tokens(entropy).sum() / mask.sum()}
    if isinstance(ref, Hidden):
        other = parse_head("grpo_reference", ref.head)
        ref = logprob_reference(F.linear(ref.x, other.weight, other.bias), target, *options)[0]
    if ref is not None:
        d = of_tokens(ref) - logprob
        kl = d.exp() - d - 1
        kl = kl * r if c.use_bias_correction_kl else kl
        loss = loss + beta * kl
        metrics["kl"] = of_tokens(kl).sum() / mask.sum()

    loss = of_tokens(loss)
    if loss_type in ("grpo", "sapo"):
        total = (loss.sum(1, keepdim=True) / counts).mean()
        if level == "total" and S:
            # The mean also counts completions without tokens, whose ratio is 1.
            total = total - torch.where(mask.any(1), 0.0, A[:, 0]).mean()
    elif loss_type == "dr_grpo":
        total = loss.sum() / (S * (c.max_completion_length or 1))
    elif loss_type == "luspo":
        total = loss.sum(1).mean()
    else:
        own = loss_type == "bnpo" or c.num_items_in_batch is None
        total = loss.sum() / torch.as_tensor(mask.sum() if own else c.num_items_in_batch).clamp(min=1)
    bonus = torch.where(top, entropy, 0.0).sum() / top.sum().clamp(min=1)
    return total - c.entropy_coefficient * bonus, metrics
