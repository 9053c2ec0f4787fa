"""Liger's chunked losses: loss, gradients and every result beside it are those of whole logits in plain PyTorch."""

from __future__ import annotations

import plain
import pytest
import torch
from numerics import check
from sequences import TARGET, B, H, S, V, batch, cases, drawn, targets

from tigon.integrations import liger
from tigon.integrations.liger import chunked_loss

LABEL = torch.tensor([True, False, False, True, True, False])
DPO = {
    "sigmoid": {},
    "hinge": {"loss_type": "hinge"},
    "exo_pair": {"loss_type": "exo_pair", "label_smoothing": 0.01},
    "nca_pair": {"loss_type": "nca_pair"},
    "robust": {"loss_type": "robust", "label_smoothing": 0.2},
    "bco_pair": {"loss_type": "bco_pair"},
    "sppo_hard": {"loss_type": "sppo_hard", "beta": 0.5},
    "apo_zero": {"loss_type": "apo_zero"},
    "apo_down": {"loss_type": "apo_down"},
    "discopop": {"loss_type": "discopop", "discopop_tau": 0.1},
    "with NLL": {"compute_nll_loss": True, "alpha": 0.3},
    "means": {"average_log_prob": True, "beta": 1.0},
}


def of_dpo(options):
    """The formula's options, by its own names."""
    names = {"loss_type": "kind", "discopop_tau": "tau", "average_log_prob": "average"}
    kept = {names.get(k, k): v for k, v in options.items() if k not in ("compute_nll_loss", "alpha")}
    return {**kept, "alpha": options.get("alpha", 1.0) if options.get("compute_nll_loss") else None}


def flat(result):
    loss, aux = result
    assert not any(t.requires_grad for t in aux)
    return loss, *aux


# ------------------------------------------------------------------------------------------------------ preferences


@pytest.mark.parametrize(("options", "dtype"), cases(DPO))
def test_dpo(options, dtype):
    loss = liger.LigerFusedLinearDPOLoss(**options)
    check(
        lambda x, w, b, *ref: flat(loss(w, x, TARGET, b, *ref)),
        lambda x, w, b, *ref: plain.pairs(x, w, TARGET, b, *ref, **of_dpo(options)),
        drawn(dtype, H, H), draws=48 if dtype == torch.bfloat16 else 1, grad=[0, 1, 2], roundings=8,
    )  # fmt: skip


def test_dpo_without_a_reference():
    loss = liger.LigerFusedLinearDPOLoss(use_ref_model=False)
    x, weight, _ = batch()
    check(
        lambda x, w: flat(loss(w, x, TARGET)), lambda x, w: plain.pairs(x, w, TARGET), x, weight, roundings=8
    )  # fmt: skip


@pytest.mark.parametrize(("nll", "dtype"), cases({"with NLL": True, "without": False}))
def test_orpo(nll, dtype):
    loss = liger.LigerFusedLinearORPOLoss(beta=0.2, compute_nll_loss=nll)
    check(
        lambda x, w, b: flat(loss(w, x, TARGET, b)),
        lambda x, w, b: plain.pairs(
            x, w, TARGET, b, kind="orpo", beta=0.2, alpha=1.0 if nll else None, average=True
        ),
        drawn(dtype, H), draws=48 if dtype == torch.bfloat16 else 1, roundings=8,
    )  # fmt: skip


def test_orpo_with_an_nll_over_the_prompt_too():
    """As TRL has it: the NLL is of prompt and completion, the odds of the completion."""
    everything = torch.where(TARGET == -100, targets(5).abs() % V, TARGET)
    everything[:, -1] = -100
    nll_target = torch.where(TARGET == -100, everything, TARGET)
    loss = liger.LigerFusedLinearORPOLoss()
    check(
        lambda x, w, b: flat(loss(w, x, TARGET, b, nll_target)),
        lambda x, w, b: plain.pairs(
            x, w, TARGET, b, nll_target=nll_target, kind="orpo", alpha=1.0, average=True
        ),
        *batch(), roundings=8,
    )  # fmt: skip
    assert not torch.equal(nll_target[:B] != -100, TARGET[:B] != -100)


def test_orpo_whose_targets_contradict_each_other_is_nan():
    x, weight, _ = batch()
    assert liger.LigerFusedLinearORPOLoss()(weight, x, TARGET, nll_target=(TARGET + 1) % V)[0].isnan()


CONTRAST = {
    "cpo": (liger.LigerFusedLinearCPOLoss, {}, {"alpha": 1.0}),
    "cpo, means": (liger.LigerFusedLinearCPOLoss, {"average_log_prob": True}, {"alpha": 1.0, "average": True}),
    "cpo, smoothed": (
        liger.LigerFusedLinearCPOLoss,
        {"label_smoothing": 0.1, "compute_nll_loss": False, "beta": 0.3},
        {"label_smoothing": 0.1, "beta": 0.3},
    ),
    "simpo": (liger.LigerFusedLinearSimPOLoss, {"gamma": 0.7}, {"alpha": 1.0, "average": True, "gamma": 0.7}),
    "simpo, smoothed": (
        liger.LigerFusedLinearSimPOLoss,
        {"compute_nll_loss": False, "label_smoothing": 0.1, "beta": 2.0},
        {"average": True, "gamma": 0.5, "label_smoothing": 0.1, "beta": 2.0},
    ),
}


@pytest.mark.parametrize(("module", "options", "formula", "dtype"), cases(CONTRAST))
def test_cpo_and_simpo(module, options, formula, dtype):
    loss = module(**options)
    check(
        lambda x, w, b: flat(loss(w, x, TARGET, b)),
        lambda x, w, b: plain.pairs(x, w, TARGET, b, kind="contrast", **formula),
        drawn(dtype, H), draws=48 if dtype == torch.bfloat16 else 1, roundings=8,
    )  # fmt: skip


KTO = {
    "alone": ({}, None, False),
    "kl": ({}, torch.tensor(4.0), False),
    "kl below 0, which TRL clamps beforehand": ({"beta": 0.05}, torch.tensor([-4.0]), False),
    "kl of each": ({}, torch.linspace(-5, 5, S), False),
    "reference": ({"use_ref_model": True}, torch.tensor(0.3), True),
    "means": ({"use_ref_model": True, "average_log_prob": True, "beta": 2.0}, None, True),
}


@pytest.mark.parametrize(("options", "kl", "reference", "dtype"), cases(KTO))
def test_kto(options, kl, reference, dtype):
    loss = liger.LigerFusedLinearKTOLoss(**options)
    formula = {"beta": options.get("beta", 0.1), "average": options.get("average_log_prob", False)}
    check(
        lambda x, w, b, *ref: flat(loss(x, w, TARGET, b, LABEL, *ref, kl=kl)),
        lambda x, w, b, *ref: plain.kto(x, w, TARGET, LABEL, b, *(ref or (None,) * 3), kl=kl, **formula),
        drawn(dtype, H, *[H] * reference), draws=48 if dtype == torch.bfloat16 else 1, grad=[0, 1, 2], roundings=8,
    )  # fmt: skip


def test_preferences_in_parts(monkeypatch):
    """A part of the batch holds 128 rows at least: longer sequences, so that there are several."""
    monkeypatch.setenv("TIGON_CHUNK_BYTES", "1")
    x, weight, bias = batch()
    x, target = x.repeat(1, 10, 1), TARGET.repeat(1, 10)
    check(
        lambda x, w, b: flat(liger.LigerFusedLinearCPOLoss()(w, x, target, b)),
        lambda x, w, b: plain.pairs(x, w, target, b, kind="contrast", alpha=1.0), x, weight, bias, roundings=8,
    )  # fmt: skip


def test_the_loss_is_scaled_from_above():
    """As by gradient accumulation."""
    x, weight, _ = (t.requires_grad_() for t in batch())
    loss = liger.LigerFusedLinearDPOLoss(use_ref_model=False)(weight, x, TARGET)[0]
    (once,) = torch.autograd.grad(loss, x, retain_graph=True)
    (quarter,) = torch.autograd.grad(loss / 4, x)
    torch.testing.assert_close(quarter, once / 4)


# ----------------------------------------------------------------------------------------------------- distillation


DISTILL = {
    "jsd": ("jsd", 0.5, 0.5, 0.4),
    "jsd, forward": ("jsd", 2.0, 3.0, 0.0),
    "jsd, reverse": ("jsd", 1.0, 0.25, 1.0),
    "jsd, soft alone": ("jsd", 0.0, 1.0, 0.4),
    "cosine": ("cosine", 0.5, 0.5, 0.5),
    "cosine, soft alone": ("cosine", 0.0, 2.0, 1.0),
}


@pytest.mark.parametrize(("kind", "hard", "soft", "beta", "dtype"), cases(DISTILL))
def test_distillation(kind, hard, soft, beta, dtype):
    """Parts come back too, also one without a weight; the weights need not add up to one."""
    temperature = 2.0 if kind == "jsd" else 1.0
    options = {"beta": beta, "temperature": temperature, "return_soft_hard_loss": True}
    module = liger.LigerFusedLinearJSDLoss if kind == "jsd" else liger.LigerFusedLinearCosineSimilarityLoss
    loss = module(hard, soft, **options)
    target = TARGET.flatten()

    def inputs(g):
        return [t.flatten(0, 1) if t.dim() == 3 else t for t in drawn(dtype, H, 20)(g)]

    check(
        lambda x, w, b, tx, tw, tb: loss(x, w, tx, tw, target, b, tb),
        lambda x, w, b, tx, tw, tb: plain.distill(
            x, w, tx, tw, target, b, tb, kind=kind, hard=hard, soft=soft, beta=beta, temperature=temperature
        ),
        inputs, draws=48 if dtype == torch.bfloat16 else 1, grad=[0, 1, 2], roundings=16,
    )  # fmt: skip


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
