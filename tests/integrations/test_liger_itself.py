"""Liger's chunked losses are PyTorch where they are not compiled, and run on a CPU: they and ours give the same."""

from __future__ import annotations

import importlib

import pytest
import torch

from tigon.integrations import liger as ours

theirs = pytest.importorskip("liger_kernel.chunked_loss")

B, T, H, V = 2, 7, 12, 23
S = 2 * B


def draw(seed=0, width=H):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g) * scale for s, scale in (((S, T, width), 1), ((V, width), 0.5), ((V,), 0.5))]


def targets():
    target = torch.randint(V, (S, T), generator=torch.Generator().manual_seed(1))
    for row, (prompt, length) in enumerate([(2, 4), (0, 7), (3, 2), (1, 4)]):
        target[row, :prompt] = -100
        target[row, prompt + length :] = -100
    return target


TARGET, LABEL = targets(), torch.tensor([True, False, False, True])
MASK = (TARGET != -100).float()
IDS = TARGET.clamp(min=0)
ADVANTAGES = torch.tensor([1.0, -0.7, 0.4, -1.1])


def logps(seed):
    x, weight, bias = draw()
    noise = 0.3 * torch.randn(S, T, generator=torch.Generator().manual_seed(seed))
    return (x @ weight.t() + bias).log_softmax(-1).gather(-1, IDS.unsqueeze(-1)).squeeze(-1) + noise


def of_pairs(loss, x, weight, bias):
    return loss(weight, x, TARGET, bias)


def of_pairs_and_reference(loss, x, weight, bias):
    return loss(weight, x, TARGET, bias, *draw(5))


def with_nll_target(loss, x, weight, bias):
    nll_target = torch.where(TARGET == -100, (IDS + 3) % V, TARGET)
    return loss(weight, x, TARGET, bias, nll_target=nll_target)


def of_sequences(loss, x, weight, bias, kl=None, reference=()):
    return loss(x, weight, TARGET, bias, LABEL, *reference, kl=kl)


def of_policy(loss, x, weight, bias):
    return loss(x, weight, IDS, MASK, ADVANTAGES, bias, ref_per_token_logps=logps(2), old_per_token_logps=logps(3))


def with_ratio(loss, x, weight, bias):
    ratio = torch.tensor([[0.8], [1.2], [0.5], [1.5]])
    return loss(x, weight, IDS, MASK, ADVANTAGES, bias, logps(2), logps(3), vllm_is_ratio=ratio, num_items_in_batch=19)


def with_reference_head(loss, x, weight, bias):
    reference, head, its_bias = draw(5)
    return loss(
        x, weight, IDS, MASK, ADVANTAGES, bias, ref_input=reference, ref_weight=head, ref_bias=its_bias,
        old_per_token_logps=logps(3),
    )  # fmt: skip


def of_students(loss, x, weight, bias):
    teacher, head, its_bias = draw(5, width=16)
    return loss(x.flatten(0, 1), weight, teacher.flatten(0, 1), head, TARGET.flatten(), bias, its_bias)


DPO, KTO, GRPO = "LigerFusedLinearDPOLoss", "LigerFusedLinearKTOLoss", "LigerFusedLinearGRPOLoss"
CASES = [
    *(
        (DPO, {"loss_type": t, "label_smoothing": 0.1 if t in ("exo_pair", "robust") else 0.0}, of_pairs_and_reference)
        for t in sorted(theirs.LigerFusedLinearDPOLoss._SUPPORTED_LOSS_TYPES)
    ),
    (DPO, {"compute_nll_loss": True, "alpha": 0.4, "average_log_prob": True}, of_pairs_and_reference),
    (DPO, {"use_ref_model": False, "beta": 0.5}, of_pairs),
    ("LigerFusedLinearORPOLoss", {}, of_pairs),
    ("LigerFusedLinearORPOLoss", {"beta": 0.3}, with_nll_target),
    ("LigerFusedLinearORPOLoss", {"compute_nll_loss": False}, of_pairs),
    ("LigerFusedLinearCPOLoss", {"alpha": 0.7, "label_smoothing": 0.1}, of_pairs),
    ("LigerFusedLinearCPOLoss", {"compute_nll_loss": False, "average_log_prob": True}, of_pairs),
    ("LigerFusedLinearSimPOLoss", {"gamma": 0.3, "beta": 1.5}, of_pairs),
    ("LigerFusedLinearSimPOLoss", {"compute_nll_loss": False, "label_smoothing": 0.1}, of_pairs),
    (KTO, {}, of_sequences),
    (KTO, {"beta": 0.3}, lambda *a: of_sequences(*a, kl=torch.tensor(0.8))),
    (KTO, {"use_ref_model": True}, lambda *a: of_sequences(*a, kl=torch.tensor(-0.8), reference=draw(5))),
    (KTO, {"use_ref_model": True, "average_log_prob": True}, lambda *a: of_sequences(*a, reference=draw(5))),
    *((GRPO, {"loss_type": t}, of_policy) for t in ("dapo", "grpo", "bnpo", "sapo", "vespo")),
    *((GRPO, {"loss_type": t}, with_ratio) for t in ("dapo", "bnpo", "vespo", "cispo")),
    (GRPO, {"loss_type": "cispo", "epsilon_high": 1.1}, of_policy),
    (GRPO, {"loss_type": "dr_grpo", "max_completion_length": 11, "delta": 1.4}, of_policy),
    (GRPO, {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.0}, of_policy),
    (GRPO, {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.02}, of_policy),
    (GRPO, {"use_bias_correction_kl": True, "temperature": 0.7, "epsilon_high": 0.28}, of_policy),
    (GRPO, {"beta": 0.0, "use_ref_model": False}, of_policy),
    (GRPO, {}, with_reference_head),
    (GRPO, {"use_ref_model": False}, of_policy),
    *(
        (name, {"weight_hard_loss": hard, "weight_soft_loss": soft, "beta": beta, "return_soft_hard_loss": True, **t},
         of_students)
        for name, t in (("LigerFusedLinearJSDLoss", {"temperature": 2.0}), ("LigerFusedLinearCosineSimilarityLoss", {}))
        for hard, soft, beta in ((0.5, 0.5, 0.3), (0.0, 1.0, 0.9), (2.0, 0.5, 0.5))
    ),
]  # fmt: skip


def results(module, call, options):
    leaves = [t.requires_grad_() for t in draw()]
    found = call(module(compiled=False, **options), *leaves)
    loss, others = (found[0], found[1] if isinstance(found[1], tuple) else found[1:])
    (1.5 * loss).backward()
    return [loss.detach(), *(t.detach() for t in others), *(t.grad for t in leaves)]


@pytest.mark.parametrize(("name", "options", "call"), CASES)
def test_the_same_loss_and_gradients(name, options, call):
    expected = results(getattr(theirs, name), call, options)
    got = results(getattr(ours, name), call, options)
    assert len(got) == len(expected)
    for mine, its in zip(got, expected, strict=True):
        assert mine.shape == its.shape
        torch.testing.assert_close(mine, its, rtol=2e-4, atol=2e-6)


def test_the_functions_take_the_same_arguments_in_the_same_order():
    functions = importlib.import_module("liger_kernel.chunked_loss.functional")
    x, weight, bias = draw()
    flat, labels = x.flatten(0, 1), TARGET.flatten()
    for name, arguments in {
        "liger_fused_linear_dpo": (x, weight, TARGET, bias, *draw(5), -100, 0.2, True, False),
        "liger_fused_linear_orpo": (x, weight, TARGET, bias, -100, 0.2, True, None, False),
        "liger_fused_linear_cpo": (x, weight, TARGET, bias, -100, 0.2, 0.5, 0.1, True, False, True),
        "liger_fused_linear_simpo": (x, weight, TARGET, bias, -100, 0.2, 0.5, 0.1, True, False, 0.4),
        "liger_fused_linear_kto": (x, weight, TARGET, LABEL, bias, *draw(5), torch.tensor(0.1), -100, 0.2, False),
        "liger_fused_linear_jsd": (flat, weight, flat, weight.flip(0), labels, bias, bias, 0.3, 0.7, 0.4, -100, 2.0,
                                   False),
        "liger_fused_linear_cosine": (flat, weight, flat, weight.flip(0), labels, bias, bias, 0.3, 0.7, 0.4, -100, 1.0,
                                      False),
        "liger_fused_linear_grpo": (x, weight, IDS, MASK, ADVANTAGES, bias, logps(2), logps(3), None, None, None, 0.1,
                                    0.1, 0.3, "grpo", None, "token", 1.0, 1.05, 0.9, False),
    }.items():  # fmt: skip
        outputs = [getattr(module, name)(*arguments) for module in (functions, ours.chunked_loss)]
        losses = [found[0] if isinstance(found, tuple) else found for found in outputs]
        torch.testing.assert_close(*losses, rtol=2e-4, atol=2e-6)
