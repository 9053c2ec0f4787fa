"""Liger's scaled cross entropy of a head, and its log-probabilities of given logits, beside plain PyTorch in fp64."""

import pytest
import torch
import torch.distributed as dist

from tigon.integrations import liger

M, H, V, TEMPERATURE = 7, 16, 61, 0.7


def head():
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, H, generator=draw, requires_grad=True) for size in (M, V))
    target = torch.randint(V, (M,), generator=draw)
    target[2] = -100
    return x, weight, target


def plain(x, weight, target):
    logp = torch.log_softmax(x.double() @ weight.double().t() / TEMPERATURE, -1)
    valid = target != -100
    nll = -logp[range(M), target.clamp(min=0)] * valid
    return nll, -(logp.exp() * logp).sum(-1) * valid


def check(found, leaves, expected):
    for one, right in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, right.float())
    up = torch.linspace(-1, 1, M)
    ours = torch.autograd.grad(sum((f * up).sum() for f in found), leaves)
    theirs = torch.autograd.grad(sum((e * up).sum() for e in expected), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_of_a_head():
    x, weight, target = head()
    apply = liger.LigerFusedLinearScaledCrossEntropyFunction.apply
    check(apply(x, weight, target, TEMPERATURE, return_entropy=True), (x, weight), plain(x, weight, target))
    torch.testing.assert_close(apply(x, weight, target, TEMPERATURE), plain(x, weight, target)[0].float())
    with pytest.raises(ValueError, match="selected_token_ids must be None"):
        apply(x, weight, target, selected_token_ids=torch.tensor([1]))


def test_of_a_head_over_one_rank(tmp_path):
    x, weight, target = head()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        call = liger.liger_fused_linear_scaled_cross_entropy_tp
        found = call(x, weight, target, dist.group.WORLD, TEMPERATURE, return_entropy=True)
        check(found, (x, weight), plain(x, weight, target))
    finally:
        dist.destroy_process_group()


def test_of_given_logits():
    draw = torch.Generator().manual_seed(1)
    logits, ids = torch.randn(2, 6, V, generator=draw), torch.randint(V, (2, 9), generator=draw)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 6:] = False
    found = liger.fused_selective_log_softmax(logits, ids, TEMPERATURE, mask)
    right = torch.log_softmax(logits[:, :5].double() / TEMPERATURE, -1).gather(-1, ids[:, -5:, None]).squeeze(-1)
    torch.testing.assert_close(found, (right * mask[:, -5:]).float())


@pytest.mark.parametrize("extra", [{}, {"return_token_accuracy": True}, {"use_token_scaling": True}])
def test_an_unknown_reduction_is_refused_whatever_else_is_asked(extra):
    x, weight, target = head()
    with pytest.raises(ValueError, match=r"reduction must be .*, got 'foo'"):
        liger.LigerFusedLinearCrossEntropyLoss(reduction="foo", **extra)(weight, x, target)
