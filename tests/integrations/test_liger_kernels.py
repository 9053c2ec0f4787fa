"""What Liger's names do around Tigon's kernels is the same on them as on the references: on a GPU, or interpreted."""

from __future__ import annotations

import pytest
import torch

from tigon import use_backend
from tigon.integrations import liger

S, T, H, V = 4, 6, 16, 40


def drawn(*shapes, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g) for shape in shapes]


TARGET = torch.randint(V, (S, T), generator=torch.Generator().manual_seed(1))
TARGET[:, 0] = -100
TARGET[1, 4:] = -100
LABEL = torch.tensor([True, False, True, False])


def cross_entropy(x, weight, target):
    options = {
        "use_token_scaling": True,
        "return_z_loss": True,
        "lse_square_scale": 1e-2,
        "return_predicted_tokens": True,
    }
    found = liger.liger_fused_linear_cross_entropy(x, weight, target, **options)
    return found.loss, found.z_loss, found.predicted_tokens


def of_policy(x, weight, target):
    mask, ids = target != -100, target.clamp(min=0)
    old = torch.full(target.shape, -3.5, device=x.device)
    advantages = LABEL.to(x) - 0.5
    loss = liger.LigerFusedLinearGRPOLoss(use_ref_model=False)
    return (found := loss(x, weight, ids, mask, advantages, old_per_token_logps=old))[0], *found[1]


def flat(result):
    return result[0], *result[1]


CASES = {
    "cross entropy with more": (lambda x, w, t: cross_entropy(x.flatten(0, 1), w, t.flatten()), [(S, T, H), (V, H)]),
    "a causal model's loss": (lambda x, w, t: liger.LigerForCausalLMLoss(x, w, t, H, 17), [(S, T, H), (V, H)]),
    "KL of a head": (
        lambda x, w, t: liger.LigerFusedLinearKLDivLoss(temperature=2.0)(
            x.flatten(0, 1), w, torch.full((S * T, V), 1 / V, device=x.device), t.flatten()
        ),
        [(S, T, H), (V, H)],
    ),
    "cross entropy and distance": (
        lambda a, b, t: liger.LigerFusedCETVDLoss()(a, b, t.flatten()), [(S * T, V), (S * T, V)]
    ),
    "ORPO": (
        lambda x, w, t: flat(liger.LigerFusedLinearORPOLoss()(w, x, t, nll_target=t.clamp(min=0))),
        [(S, T, H), (V, H)],
    ),
    "DPO": (
        lambda x, w, r, t: flat(liger.LigerFusedLinearDPOLoss(compute_nll_loss=True)(w, x, t, None, r, w)),
        [(S, T, H), (V, H), (S, T, H)],
    ),
    "KTO": (
        lambda x, w, b, t: flat(
            liger.LigerFusedLinearKTOLoss()(x, w, t, b, LABEL.to(x.device), kl=torch.tensor(0.3, device=x.device))
        ),
        [(S, T, H), (V, H), (V,)],
    ),
    "GRPO": (of_policy, [(S, T, H), (V, H)]),
    "distillation": (
        lambda x, w, y, t: liger.LigerFusedLinearJSDLoss(2.0, 1.0, return_soft_hard_loss=True)(
            x.flatten(0, 1), w, y.flatten(0, 1), w, t.flatten()
        ),
        [(S, T, H), (V, H), (S, T, H)],
    ),
    "modulated norm": (
        lambda x, w, a, b, t: liger.liger_modulated_rms_norm(x, w, a, b), [(S, T, H), (H,), (S, H), (S, H)]
    ),
    "multi-token attention": (
        lambda s, w, t: liger.liger_multi_token_attention(s, w, padding=1), [(2, 3, T, T), (3, 3, 3, 3)]
    ),
    "complex rotary": (
        lambda q, k, a, t: liger.liger_llama4_text_rotary_pos_emb(q, k, torch.polar(torch.ones_like(a), a.detach())),
        [(2, T, 4, 16), (2, T, 2, 16), (T, 8)],
    ),
}  # fmt: skip


def results(call, shapes, device):
    leaves = [t.to(device).requires_grad_() for t in drawn(*shapes)]
    found = call(*leaves, TARGET.to(device))
    found = found if isinstance(found, tuple) else (found,)
    active = [t for t in found if t.requires_grad]
    upstream = [t.to(device) for t in drawn(*(t.shape for t in active), seed=2)]
    grads = torch.autograd.grad(active, leaves, upstream, allow_unused=True)
    return [None if t is None else t.detach().cpu() for t in (*found, *grads)]


@pytest.mark.parametrize(("call", "shapes"), CASES.values(), ids=CASES.keys())
def test_kernels_and_references_agree(call, shapes, device, triton_backend):
    got = results(call, shapes, device)
    with use_backend("torch"):
        expected = results(call, shapes, torch.device("cpu"))
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["cross entropy with more", "a causal model's loss", "ORPO", "GRPO", "distillation", "modulated norm"]
)
def test_no_break_in_a_compiled_graph(name):
    call, shapes = CASES[name]
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    got, expected = (results(op, shapes, torch.device("cpu")) for op in (compiled, call))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
