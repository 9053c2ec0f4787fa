"""A rank or a micro-batch may hold no token that counts: its means are 0, and so are its gradients, never NaN.

One NaN of one rank poisons the sum over all of them, and every guard that asks `isfinite`.
"""

import pytest
import torch
import torch.nn.functional as F
from flat import cpo, cross_entropy, distill, distill_topk, dpo, grpo, kto, linear_cross_entropy, orpo, rloo, simpo

import tigon
from tigon.integrations import liger
from tigon.losses.policy import LOSS_TYPES
from tigon.losses.preference.families import CPO_TYPES, DPO_LOSSES

S, T, H, V = 4, 6, 8, 19


def logits(x, weight):
    return x @ weight.t()


def teacher():
    g = torch.Generator().manual_seed(5)
    return torch.randn(S, T, 5, generator=g), torch.randn(V, 5, generator=g)


def topk():
    logprobs, ids = (torch.randn(S, T, V, generator=torch.Generator().manual_seed(6))).log_softmax(-1).topk(3)
    return ids, logprobs


def class_weights():
    return torch.rand(V, generator=torch.Generator().manual_seed(7)) + 0.1


def other():
    return torch.randn(S, T, V, generator=torch.Generator().manual_seed(8))


def rows_of(t):
    return t.reshape(-1, t.shape[-1])


# Each takes x, weight and target, and gives a mean over tokens.
MEANS = {
    "cross_entropy": lambda x, w, t: cross_entropy(logits(x, w), t),
    "cross_entropy, weights": lambda x, w, t: cross_entropy(logits(x, w), t, weight=class_weights()),
    "cross_entropy, weights, smoothing, z-loss": lambda x, w, t: cross_entropy(
        logits(x, w), t, weight=class_weights(), label_smoothing=0.1, z_loss=1e-2
    ),
    "cross_entropy, softcap": lambda x, w, t: cross_entropy(logits(x, w), t, softcap=5.0, z_loss=1e-2),
    "cross_entropy, details": lambda x, w, t: sum(
        cross_entropy(logits(x, w), t, weight=class_weights(), z_loss=1e-2, details=True)[:2]
    ),
    "linear_cross_entropy": linear_cross_entropy,
    "linear_cross_entropy, smoothing, z-loss": lambda x, w, t: linear_cross_entropy(
        x, w, t, label_smoothing=0.1, z_loss=1e-2, softcap=5.0
    ),
    "linear_cross_entropy, num_valid": lambda x, w, t: linear_cross_entropy(
        x, w, t, num_valid=tigon.losses.ValidCount(t)
    ),
    "kl_div": lambda x, w, t: tigon.kl_div(logits(x, w), other(), temperature=1.0, mask=t != -100),
    "kl_div, batchmean": lambda x, w, t: tigon.kl_div(
        rows_of(logits(x, w)), rows_of(other()), temperature=1.0, mask=(t != -100).flatten(), reduction="batchmean"
    ),
    "jsd": lambda x, w, t: tigon.jsd(logits(x, w), other(), temperature=1.0, mask=t != -100),
    "tvd": lambda x, w, t: tigon.tvd(logits(x, w), other(), temperature=1.0, mask=t != -100),
    **{
        f"distill, {kind}": lambda x, w, t, kind=kind: distill(x, w, *teacher(), t, loss_type=kind, hard_weight=0.5)[0]
        for kind in ("kl", "reverse_kl", "jsd", "tvd", "cosine")
    },
    "distill, mean": lambda x, w, t: distill(x, w, *teacher(), t, reduction="mean")[0],
    **{
        f"distill_topk, {rest}": lambda x, w, t, rest=rest: distill_topk(x, w, *topk(), t, rest=rest, hard_weight=0.5)[
            0
        ]
        for rest in ("tail", "renormalize", "drop")
    },
    **{
        f"grpo, {kind}": lambda x, w, t, kind=kind: grpo(
            x, w, t, advantages=torch.ones(S), loss_type=kind, max_completion_length=9, entropy_coefficient=0.1
        )[0]
        for kind in LOSS_TYPES
    },
    "dpo, sft": lambda x, w, t: dpo(x, w, t, loss_type="sft", reference_free=True)[0],
    "LigerCrossEntropyLoss": lambda x, w, t: liger.LigerCrossEntropyLoss(weight=class_weights())(
        rows_of(logits(x, w)), t.view(-1)
    ),
    "LigerFusedLinearCrossEntropyLoss": lambda x, w, t: liger.LigerFusedLinearCrossEntropyLoss(
        ce_weight=class_weights(), lse_square_scale=1e-2
    )(w, rows_of(x), t.view(-1)),
    "LigerJSD": lambda x, w, t: liger.LigerJSD()(
        rows_of(logits(x, w)).log_softmax(-1), rows_of(other()).log_softmax(-1), t.view(-1)
    ),
    "LigerTVDLoss": lambda x, w, t: liger.LigerTVDLoss()(
        rows_of(logits(x, w)).softmax(-1), rows_of(other()).softmax(-1), t.view(-1)
    ),
    "LigerFusedLinearJSD": lambda x, w, t: liger.LigerFusedLinearJSD()(
        rows_of(x), w, rows_of(teacher()[0]), teacher()[1], t.view(-1)
    ),
}
PAIRS = {"reference_free": True, "label_smoothing": 0.1}
# Means over pairs or sequences: what they are of no token is a constant.
CONSTANT = {
    **{
        f"dpo, {kind}": lambda x, w, t, kind=kind: dpo(x, w, t, loss_type=kind, **PAIRS)[0]
        for kind in DPO_LOSSES if kind != "sft"
    },
    "orpo": lambda x, w, t: orpo(x, w, t)[0],
    **{f"cpo, {kind}": lambda x, w, t, kind=kind: cpo(x, w, t, loss_type=kind)[0] for kind in CPO_TYPES},
    "simpo": lambda x, w, t: simpo(x, w, t)[0],
    "kto": lambda x, w, t: kto(x, w, t, torch.arange(S) % 2 == 0, ref_logps=torch.zeros(S), kl=0.0)[0],
    "rloo": lambda x, w, t: rloo(x, w, t, advantages=torch.ones(S), entropy_coefficient=0.1)[0],
}  # fmt: skip


@pytest.fixture
def on_cpu(device):
    if device.type != "cpu":
        pytest.skip("the batches are the host's")


def inputs():
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=g).requires_grad_() for shape in ((S, T, H), (V, H)))


@pytest.mark.parametrize("name", [*MEANS, *CONSTANT])
def test_a_batch_of_ignored_tokens_has_no_nan(name, backend, on_cpu):
    x, weight = inputs()
    loss = {**MEANS, **CONSTANT}[name](x, weight, torch.full((S, T), -100))
    assert loss.isfinite()
    if name in MEANS:
        assert loss == 0
    gradients = torch.autograd.grad(loss, (x, weight), allow_unused=True)
    assert all(g is None or g.abs().max() == 0 for g in gradients)


@pytest.mark.parametrize("name", MEANS)
def test_the_table_is_of_losses_that_are_not_zero_otherwise(name):
    x, weight = inputs()
    loss = MEANS[name](x, weight, torch.arange(S * T).view(S, T) % V)
    assert loss != 0
    assert all(g.abs().max() > 0 for g in torch.autograd.grad(loss, (x, weight)))


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy", "distill, jsd"])
def test_a_batch_without_rows_is_zero(name, backend, on_cpu):
    x, weight = inputs()
    empty = torch.zeros(0, dtype=torch.long)
    if name.startswith("distill"):
        theirs = teacher()
        loss = distill(x[:0, 0], weight, theirs[0][:0, 0], theirs[1], empty)[0]
    else:
        loss = MEANS[name](x[:0, 0], weight, empty)
    assert loss == 0


def test_a_completion_without_tokens_counts_in_rloo_as_in_trl(backend, on_cpu):
    """Its ratio is exp(0 − 0) = 1, and the mean is over all completions."""
    x, weight = inputs()
    target = torch.arange(S * T).view(S, T) % V
    target[1] = -100
    advantages = torch.tensor([0.3, -2.0, 1.1, 0.4])
    loss, _ = rloo(x, weight, target, advantages=advantages, chunk_bytes=1)
    torch.testing.assert_close(loss, -advantages.mean())
    logp = F.linear(x, weight).log_softmax(-1).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    answer = -(advantages * (logp * (target != -100)).sum(1)).sum() / S
    for got, expected in zip(*(torch.autograd.grad(r, (x, weight)) for r in (loss, answer)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
