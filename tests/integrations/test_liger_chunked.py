"""Liger's chunked losses: parts of a batch, and refusals. Their numbers are compared in test_liger_itself.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from numerics import check

from tigon.integrations import liger
from tigon.integrations.liger import chunked_loss

B, T, H, V = 3, 9, 12, 29
S = 2 * B
LABEL = torch.tensor([True, False, False, True, True, False])
# Completions of different lengths behind prompts of different lengths.
TARGET = torch.randint(V, (S, T), generator=torch.Generator().manual_seed(0))
for row, (prompt, length) in enumerate([(2, 6), (0, 9), (3, 2), (1, 4), (4, 5), (0, 7)]):
    TARGET[row, :prompt] = TARGET[row, prompt + length :] = -100


def batch(seed=0):
    g = torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(s, generator=g) for s in ((S, T, H), (V, H), (V,)))
    return x, 0.5 * weight, 0.5 * bias


# ------------------------------------------------------------------------------------------------------ preferences


def test_orpo_whose_targets_contradict_each_other_is_nan():
    x, weight, _ = batch()
    assert liger.LigerFusedLinearORPOLoss()(weight, x, TARGET, nll_target=(TARGET + 1) % V)[0].isnan()


def test_preferences_in_parts(monkeypatch):
    """A part of the batch holds 128 rows at least: longer sequences, so that there are several."""
    monkeypatch.setenv("TIGON_CHUNK_BYTES", "1")
    x, weight, bias = batch()
    x, target = x.repeat(1, 10, 1), TARGET.repeat(1, 10)

    def expected(x, weight, bias):
        logp = F.linear(x, weight, bias).log_softmax(-1)
        tokens = logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (target != -100)
        chosen, rejected = tokens.sum(1).split(B)
        nll = F.nll_loss(logp[:B].flatten(0, 1), target[:B].flatten())
        return (nll - F.logsigmoid(0.1 * (chosen - rejected))).mean()

    loss = liger.LigerFusedLinearCPOLoss()
    check(lambda x, w, b: loss(w, x, target, b)[0], expected, x, weight, bias, roundings=8)


def test_the_loss_is_scaled_from_above():
    """As by gradient accumulation."""
    x, weight, _ = (t.requires_grad_() for t in batch())
    loss = liger.LigerFusedLinearDPOLoss(use_ref_model=False)(weight, x, TARGET)[0]
    (once,) = torch.autograd.grad(loss, x, retain_graph=True)
    (quarter,) = torch.autograd.grad(loss / 4, x)
    torch.testing.assert_close(quarter, once / 4)


# ----------------------------------------------------------------------------------------------------- distillation


def test_distillation_gives_one_loss_unless_asked():
    x, weight, _ = batch()
    for module in (liger.LigerFusedLinearJSDLoss, liger.LigerFusedLinearCosineSimilarityLoss):
        alone = module()(x.flatten(0, 1), weight, x.flatten(0, 1), weight.flip(0), TARGET.flatten())
        parts = module(return_soft_hard_loss=True)(
            x.flatten(0, 1), weight, x.flatten(0, 1), weight.flip(0), TARGET.flatten()
        )
        assert alone.shape == ()
        torch.testing.assert_close(alone, parts[0])
        torch.testing.assert_close(alone, 0.5 * (parts[1] + parts[2]))


# --------------------------------------------------------------------------------------------------------- policies


def sampled():
    """Ids, mask, advantages, and log-probabilities of a reference and of the old policy."""
    g = torch.Generator().manual_seed(0)
    ref, old = (-3.5 + 0.4 * torch.randn(S, T, generator=g) for _ in range(2))
    return torch.randint(V, (S, T), generator=g), (TARGET != -100).long(), torch.randn(S, generator=g), ref, old


def test_grpo_without_a_reference_has_a_kl_of_zero():
    """The policy is its own reference then."""
    ids, mask, advantages, _, _ = sampled()
    x, weight, bias = batch()
    loss = liger.LigerFusedLinearGRPOLoss(use_ref_model=False)
    assert loss(x, weight, ids, mask, advantages, bias)[1][0] == 0


@pytest.mark.parametrize("items", [40, torch.tensor(40)])
def test_grpo_divides_by_the_tokens_of_the_step(items):
    ids, mask, advantages, ref, old = sampled()
    x, weight, bias = batch()
    loss = liger.LigerFusedLinearGRPOLoss()
    own = loss(x, weight, ids, mask, advantages, bias, ref, old)[0]
    step = loss(x, weight, ids, mask, advantages, bias, ref, old, num_items_in_batch=items)[0]
    torch.testing.assert_close(step * 40, own * mask.sum())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"loss_type": "luspo"}, "loss_type='luspo' must have importance_sampling_level='sequence'"),
        ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "importance_sampling_level must be 'token'"),
        ({}, "must come with ref_per_token_logps"),
        ({"delta": 0.0}, "delta must be positive"),
        ({"sapo_temperature_neg": -1.0}, "sapo_temperature_neg must be positive"),
    ],
)
def test_policies_that_cannot_be_are_refused(options, sentence):
    x, weight, _ = batch()
    ids, mask, advantages, ref, _ = sampled()
    with pytest.raises(ValueError, match=sentence):
        liger.LigerFusedLinearGRPOLoss(**options)(x, weight, ids, mask, advantages, None, *([ref] if options else []))


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x, w: liger.LigerFusedLinearDPOLoss(loss_type="ipo"), "loss_type must be one of .* got 'ipo'"),
        (lambda x, w: liger.LigerFusedLinearDPOLoss(loss_type="exo_pair"), "label_smoothing must be above 0"),
        (lambda x, w: liger.LigerFusedLinearDPOLoss(loss_type="robust", label_smoothing=0.5), "label_smoothing must"),
        (lambda x, w: liger.LigerFusedLinearDPOLoss()(w, x, TARGET), "must come with ref_input and ref_weight"),
        (lambda x, w: liger.LigerFusedLinearKTOLoss()(x, w, TARGET), "preference_labels must be"),
        (
            lambda x, w: liger.LigerFusedLinearKTOLoss()(x, w, TARGET, preference_labels=LABEL.long()),
            "preference_labels must be",
        ),
        (lambda x, w: liger.LigerFusedLinearCPOLoss()(w, x[:5], TARGET[:5]), r"x must be \(2B, T, H\)"),
        (lambda x, w: liger.LigerFusedLinearJSDLoss(temperature=0), "temperature must not be 0"),
        (
            lambda x, w: liger.LigerFusedLinearJSDLoss()(x, w, x, torch.cat((w, w)), TARGET),
            "teacher.head's weight",
        ),
    ],
)
def test_what_cannot_be_is_refused(call, sentence):
    x, weight, _ = batch()
    with pytest.raises(ValueError, match=sentence):
        call(x, weight)


def test_a_chunk_size_has_no_effect_and_says_so():
    x, weight, _ = batch()
    with pytest.warns(UserWarning, match="chunk_size=4 has no effect here"):
        liger.LigerFusedLinearCPOLoss(chunk_size=4)(weight, x, TARGET)


def test_two_functions_of_one_name():
    """liger_fused_linear_jsd of transformers.functional and of chunked_loss.functional are two."""
    assert chunked_loss.liger_fused_linear_jsd is not liger.liger_fused_linear_jsd
    assert liger.functional.liger_fused_linear_jsd is liger.liger_fused_linear_jsd
