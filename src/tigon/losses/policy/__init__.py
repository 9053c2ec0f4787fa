"""Policy gradients for language models: GRPO, its relatives and RLOO, without logits.

    r = exp(logprob − old)                        per token; per sequence, exp of the mean over tokens (GSPO)
    clipped(r) = −min(min(r, δ) · A, clip(r, 1 − ε, 1 + ε_high) · A)

    grpo     mean over sequences of the mean over tokens of clipped(r)       https://arxiv.org/abs/2402.03300
    bnpo     Σ clipped(r) / valid tokens in this batch
    dr_grpo  Σ clipped(r) / (S · max_completion_length)                      https://arxiv.org/abs/2503.20783
    dapo     Σ clipped(r) / num_items_in_batch                               https://arxiv.org/abs/2503.14476
    luspo    mean over sequences of Σ clipped(r)                             https://arxiv.org/abs/2602.05261
    cispo    Σ −sg(min(r, ε_high)) · A · logprob / num_items_in_batch        https://arxiv.org/abs/2506.13585
    sapo     as grpo, with −A · σ(τ (r − 1)) · 4 / τ, τ by the sign of A     https://arxiv.org/abs/2511.20347
    vespo    Σ −sg(φ(w)) · A · logprob / num_items_in_batch,                 https://arxiv.org/abs/2602.10693
             φ(w) = e^λ · w^k · e^(−λ w), w = Π r over the sequence, k and λ by the sign of A

    + β · kl, kl = (e^d − d − 1) [· r], d = reference − logprob              https://arxiv.org/abs/2512.02556
    − entropy_coefficient · mean entropy

Sources: beside each formula. Formulas and names follow TRL 1.16, which trains with them. GSPO:
https://arxiv.org/abs/2507.18071. RLOO: https://arxiv.org/abs/2402.14740. δ: https://arxiv.org/abs/2505.07291.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from tigon.losses.head.chunk_options import ChunkOptions
from tigon.losses.head.head import Head
from tigon.losses.linear_logprob import linear_logprob
from tigon.losses.options import make_keyword_error
from tigon.losses.policy.batch import make_options, policy_loss
from tigon.losses.policy.options import GRPO, LOSS_TYPES, MODES, RLOO, Rollout, Sampler, parse_rollout
from tigon.losses.policy.reference import grpo_reference
from tigon.ops.example import HEAD, SEQUENCES, Example, make_ids

__all__ = ["GRPO", "LOSS_TYPES", "MODES", "RLOO", "Rollout", "Sampler", "grpo", "grpo_reference", "rloo"]


def grpo(
    x: Tensor,
    head: Head | Tensor | torch.nn.Linear,
    target: Tensor,
    rollout: Rollout | Tensor,
    *,
    config: GRPO = GRPO(),
    chunks: ChunkOptions = ChunkOptions(),
    **unknown: NoReturn,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss for sampled completions whose tokens have advantages, and metrics to log.

    Without `rollout.old`, right after the sampling, every ratio is 1 and the gradient is the policy's own: REINFORCE.
    With token advantages, as from a critic, loss_type "bnpo" is PPO's. GSPO is loss_type "grpo" with
    importance_sampling_level "sequence".

    Args:
        x: (S, T, H), hidden states for S completions; x[s, t] predicts target[s, t].
        head: the weight (V, H), a `torch.nn.Linear`, or a `tigon.Head`.
        target: (S, T) the sampled tokens; ignore_index where a token does not count (prompt, padding, tool output).
        rollout: a `tigon.losses.Rollout` with advantages and, as far as you have them, log-probabilities under the old
            policy, the reference and the sampler; or the advantages alone.
        config: the loss type and its parameters.
        chunks: `valid_tokens` holds the valid-token counts; other tokens then cost nothing.
    Returns: the 0-d loss, and detached: "logprob" (S, T), 0 where masked; and 0-d, means over valid tokens: "entropy";
        "kl" with a reference; "clip_ratio/low_mean", "/high_mean", "/region_mean", "/low_min", "/high_max" with the
        clipped types (over sequences, if each sequence has one ratio); "cispo_clip_ratio"; "vespo/phi_seq_mean";
        "policy_loss", without the entropy bonus, if there is a bonus; "sampling/importance_sampling_ratio/min", "/mean"
        and "/max" with a sampler.
    Raises: ValueError for options that do not go together, and shapes that do not fit.

    Replaces, of the default loss_type::

        logits = F.linear(x, weight, bias).float()
        logprob = -F.cross_entropy(logits.transpose(1, 2), target, reduction="none")  # 0 where target is -100
        ratio = (logprob - old).exp()
        A, mask = advantages.unsqueeze(1), target != -100
        loss = -torch.min(ratio * A, ratio.clamp(1 - epsilon, 1 + epsilon) * A)
        loss = (loss * mask).sum() / mask.sum()
    """
    if unknown:
        raise make_keyword_error("grpo", unknown, GRPO, rollout=Rollout)
    rollout = parse_rollout("grpo", rollout)
    return policy_loss("grpo", x, head, target, rollout, config, make_options(config, rollout), chunks)


def rloo(
    x: Tensor,
    head: Head | Tensor | torch.nn.Linear,
    target: Tensor,
    rollout: Rollout | Tensor,
    *,
    config: RLOO = RLOO(),
    chunks: ChunkOptions = ChunkOptions(),
    **unknown: NoReturn,
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with a completion as the action: mean over sequences of clipped(r), r = exp(Σ logprob − Σ old).

    Args:
        x: (S, T, H), hidden states for S completions.
        head: as in `grpo`.
        target: (S, T), ignore_index where a token does not count. A completion without tokens has a ratio of 1.
        rollout: a `tigon.losses.Rollout` with advantages (S,) and, if the policy has changed since the sampling, `old`;
            or the advantages alone.
        config: the ratio's bounds.
        chunks: as in `grpo`.
    Returns: the 0-d loss, and detached "logprob" (S, T), "entropy" and "clip_ratio/…" as in `grpo`.
    Raises: ValueError for shapes that do not fit.
    """
    if unknown:
        raise make_keyword_error("rloo", unknown, RLOO, rollout=Rollout)
    rollout = parse_rollout("rloo", rollout)
    for field in ("ref", "sampler"):
        if getattr(rollout, field) is not None:
            raise ValueError(f"rloo: rollout.{field} must be left out: RLOO has no use for it, got one.")
    clipped: GRPO = config.clipped  # type: ignore[attr-defined]
    return policy_loss("rloo", x, head, target, rollout, clipped, make_options(clipped, rollout, "total"), chunks)


def _take_grpo_step(x: Tensor, head: Tensor, old: Tensor, reference: Tensor) -> Tensor:
    logprob = linear_logprob(x.detach(), head.detach(), make_ids(x, 4, 32)).logprob
    advantages = torch.tensor([1.0, -0.5, 0.5, -1.0], dtype=logprob.dtype, device=x.device)
    rollout = Rollout(advantages, logprob + 0.1 * old.detach(), logprob + 0.1 * reference.detach())
    return grpo(x, head, make_ids(x, 4, 32), rollout, config=GRPO(beta=0.04))[0]


EXAMPLES = {
    "grpo": Example(None, (SEQUENCES, HEAD, (4, 32), (4, 32)), _take_grpo_step),
}
