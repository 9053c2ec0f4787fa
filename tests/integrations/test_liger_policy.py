"""Liger's GRPO and its relatives: loss, gradients and the two numbers beside them are those of plain PyTorch."""

from __future__ import annotations

import plain
import pytest
import torch
from numerics import check
from sequences import TARGET, S, T, V, batch, cases

from tigon.integrations import liger


def policy(seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(V, (S, T), generator=g)
    mask = (TARGET != -100).long()
    advantages = torch.tensor([1.0, -0.5, 0.3, -1.2, 0.0, 0.8])
    x, weight, bias = batch()
    logp = plain.log_softmax(x, weight, bias)[1].gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    old, ref = (logp + 0.4 * torch.randn(S, T, generator=g) for _ in range(2))
    return ids, mask, advantages, ref, old


GRPO = {
    "dapo": {},
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo", "delta": 1.3},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 20},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.0},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.05},
    "without KL": {"beta": 0.0},
    "KL, corrected": {"use_bias_correction_kl": True, "epsilon_high": 0.3, "temperature": 0.8},
}


def of_grpo(options):
    names = {
        "epsilon_low": "low", "epsilon_high": "high", "max_completion_length": "longest",
        "importance_sampling_level": "level", "use_bias_correction_kl": "correct",
    }  # fmt: skip
    return {names.get(k, k): v for k, v in options.items()}


def on_policy(result):
    """Beside the loss: KL unless beta is 0, and what was clipped."""
    loss, metrics = result
    assert isinstance(metrics, tuple)
    return loss, *metrics


@pytest.mark.parametrize(("options", "dtype"), cases(GRPO))
def test_grpo(options, dtype):
    ids, mask, advantages, ref, old = policy()
    loss = liger.LigerFusedLinearGRPOLoss(**options)

    def near(g):
        """Policies that old and ref are old and reference of."""
        return [(t + 0.1 * torch.randn(t.shape, generator=g)).to(dtype) for t in batch()]

    def given(t, like):
        return t.to(torch.promote_types(like.dtype, torch.float32))

    check(
        lambda x, w, b: on_policy(
            loss(x, w, ids, mask, advantages, b, ref_per_token_logps=ref, old_per_token_logps=old)
        ),
        lambda x, w, b: plain.grpo(x, w, ids, mask, advantages, b, given(ref, x), given(old, x), **of_grpo(options)),
        near, draws=48 if dtype == torch.bfloat16 else 4, roundings=16,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(S,), (S, 1), (S, T)])
@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_grpo_with_a_ratio_of_the_sampler(shape, loss_type):
    ids, mask, advantages, ref, old = policy()
    ratio = torch.rand(shape, generator=torch.Generator().manual_seed(9)) + 0.5
    if shape == (S, T):
        ratio = torch.where(mask.bool(), ratio, 1.0)
    loss = liger.LigerFusedLinearGRPOLoss(loss_type=loss_type)
    check(
        lambda x, w, b: on_policy(loss(x, w, ids, mask, advantages, b, ref, old, vllm_is_ratio=ratio)),
        lambda x, w, b: plain.grpo(
            x, w, ids, mask, advantages, b, ref.to(x.dtype), old.to(x.dtype), ratio, loss_type=loss_type
        ),
        *batch(), roundings=16,
    )  # fmt: skip


def test_grpo_with_a_reference_head():
    ids, mask, advantages, _, old = policy()
    theirs = batch(seed=1)

    def expected(x, w, b, *head):
        ref = plain.log_softmax(*head)[1].gather(-1, ids.unsqueeze(-1)).squeeze(-1).detach()
        return plain.grpo(x, w, ids, mask, advantages, b, ref, old.to(x.dtype))

    check(
        lambda x, w, b, *head: on_policy(
            liger.LigerFusedLinearGRPOLoss()(x, w, ids, mask, advantages, b, None, old, *head)
        ),
        expected, *batch(), *theirs, grad=[0, 1, 2], roundings=16,
    )  # fmt: skip


def test_grpo_without_a_reference_has_a_kl_of_zero():
    """The policy is its own reference then, whose gradient is zero too."""
    ids, mask, advantages, _, _ = policy()
    loss = liger.LigerFusedLinearGRPOLoss(use_ref_model=False)
    check(
        lambda x, w, b: on_policy(loss(x, w, ids, mask, advantages, b)),
        lambda x, w, b: plain.grpo(x, w, ids, mask, advantages, b), *batch(), roundings=16,
    )  # fmt: skip
    x, weight, bias = batch()
    assert on_policy(loss(x, weight, ids, mask, advantages, bias))[1] == 0


@pytest.mark.parametrize("items", [40, torch.tensor(40)])
def test_grpo_divides_by_the_tokens_of_the_step(items):
    ids, mask, advantages, ref, old = policy()
    x, weight, bias = batch()
    loss = liger.LigerFusedLinearGRPOLoss()
    own = loss(x, weight, ids, mask, advantages, bias, ref, old)[0]
    step = loss(x, weight, ids, mask, advantages, bias, ref, old, num_items_in_batch=items)[0]
    torch.testing.assert_close(step * 40, own * mask.sum())


@pytest.mark.parametrize(
    ("options", "given", "sentence"),
    [
        ({"loss_type": "luspo"}, 4, "loss_type='luspo' must have importance_sampling_level='sequence'"),
        (
            {"loss_type": "sapo", "importance_sampling_level": "sequence"},
            4,
            "importance_sampling_level must be 'token'",
        ),
        ({}, 3, "must come with ref_per_token_logps"),
        ({"delta": 0.0}, 4, "delta must be positive"),
        ({"sapo_temperature_neg": -1.0}, 4, "sapo_temperature_neg must be positive"),
    ],
)
def test_what_cannot_be_is_refused(options, given, sentence):
    x, weight, _ = batch()
    ids, mask, advantages, ref, _ = policy()
    with pytest.raises(ValueError, match=sentence):
        liger.LigerFusedLinearGRPOLoss(**options)(x, weight, ids, mask, advantages, None, *(ref,) * (given - 3))
