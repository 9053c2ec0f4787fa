"""cross_entropy where rows are ignored, logits are extreme and targets are wrong."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import tigon
import tigon.ops.cross_entropy


def logits_and_target(device, rows=6, classes=50):
    logits = 3 * torch.randn(rows, classes, device=device)
    target = torch.randint(0, classes, (rows,), device=device)
    target[1::3] = -100
    return logits.requires_grad_(), target


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_same_as_torch(reduction, backend, device):
    logits, target = logits_and_target(device)
    torch.testing.assert_close(
        tigon.cross_entropy(logits, target, reduction=reduction), F.cross_entropy(logits, target, reduction=reduction)
    )


def test_ignored_rows_have_no_loss_and_no_gradient_and_keep_their_logits(backend, device):
    """Other libraries zero those rows of the caller's logits."""
    logits, target = logits_and_target(device)
    before = logits.detach().clone()
    loss = tigon.cross_entropy(logits, target, reduction="none")
    loss.sum().backward()
    assert loss[1] == loss[4] == 0
    assert logits.grad[[1, 4]].abs().max() == 0
    assert torch.equal(logits.detach(), before)


def test_nothing_valid(backend, device):
    """As torch: 0 / 0 for the mean, 0 for the sum, and no gradient in either."""
    logits, target = logits_and_target(device)
    target.fill_(-100)
    assert tigon.cross_entropy(logits, target).isnan()
    total = tigon.cross_entropy(logits, target, reduction="sum")
    total.backward()
    assert total == 0
    assert logits.grad.abs().max() == 0


def test_gradient_of_a_row_sums_to_zero(backend, device):
    logits, target = logits_and_target(device)
    tigon.cross_entropy(logits, target).backward()
    torch.testing.assert_close(logits.grad.sum(-1), torch.zeros(6, device=device), rtol=0, atol=1e-6)


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_a_constant_changes_nothing(offset, backend, device):
    """exp(1e4) is infinite: the maximum has to come off first."""
    logits, target = logits_and_target(device)
    torch.testing.assert_close(
        tigon.cross_entropy(logits + offset, target), tigon.cross_entropy(logits, target), rtol=1e-3, atol=1e-3
    )


def test_minus_infinity_masks_a_class(backend, device):
    logits, target = logits_and_target(device)
    masked = logits.detach().clone()
    masked[:, 7:] = -torch.inf
    target = torch.where(target == -100, target, target % 7)
    masked.requires_grad_()
    loss = tigon.cross_entropy(masked, target)
    loss.backward()
    torch.testing.assert_close(loss, F.cross_entropy(masked[:, :7], target))
    assert masked.grad[:, 7:].abs().max() == 0


def test_certainty_costs_nothing_and_error_costs_the_gap(backend, device):
    logits = torch.zeros(2, 10, device=device)
    logits[:, 3] = 100.0
    loss = tigon.cross_entropy(logits, torch.tensor([3, 4], device=device), reduction="none")
    torch.testing.assert_close(loss, torch.tensor([0.0, 100.0], device=device))


def test_softcap_bounds_the_logits(backend, device):
    """With every logit in (−c, c) a loss of V classes is below log V + 2c."""
    logits, target = 1e4 * torch.randn(5, 20, device=device), torch.zeros(5, dtype=torch.long, device=device)
    loss = tigon.cross_entropy(logits, target, reduction="none", softcap=2.0)
    assert loss.max() <= torch.tensor(20.0).log() + 4 + 1e-4


def test_divisor_may_be_a_tensor_on_the_device(backend, device):
    logits, target = logits_and_target(device)
    total = tigon.cross_entropy(logits, target, reduction="sum")
    for divisor in (16, torch.tensor(16, device=device), torch.tensor(16.0)):
        torch.testing.assert_close(tigon.cross_entropy(logits, target, divisor=divisor), total / 16)


@pytest.mark.parametrize("wrong", [50, 2**40, -1])
def test_the_kernel_answers_a_wrong_target_with_nan(wrong, device, triton_backend):
    """Nothing out of bounds is read or written: the row's loss and gradient are NaN, the others are right."""
    logits, target = logits_and_target(device)
    good = F.cross_entropy(logits, target, reduction="none").detach()
    target[2] = wrong
    options = (-100, 0.0, 0.0, 0.0, 1.0)
    loss, lse = torch.ops.tigon.cross_entropy_fwd(logits.detach(), target, *options)
    grad = torch.ops.tigon.cross_entropy_bwd(torch.ones_like(loss), logits.detach(), target, lse, *options)
    others = [0, 1, 3, 4, 5]
    assert loss[2].isnan()
    assert grad[2].isnan().all()
    torch.testing.assert_close(loss[others], good[others])
    assert grad[others].isfinite().all()


def test_the_checked_mode_raises(device):
    """TIGON_CHECKS=1 looks at the targets, also where that stalls the device."""
    code = (
        "import torch, tigon\n"
        f"logits, target = torch.randn(3, 5, device='{device}'), torch.tensor([0, 5, 1], device='{device}')\n"
        "tigon.cross_entropy(logits, target)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TIGON_CHECKS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "cross_entropy: target must lie in [0, 5) or be ignore_index=-100, got 5." in done.stderr


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device, triton_backend):
    logits = torch.randn(17000, 131072, device=device, dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(0, 131072, (17000,), device=device)
    tigon.cross_entropy(logits, target, reduction="sum").backward()
    last = logits[-2:].detach().clone().requires_grad_()
    tigon.cross_entropy(last, target[-2:], reduction="sum").backward()
    assert torch.equal(logits.grad[-2:], last.grad)
