"""logprob: the results that have no gradient, and logits that are -inf, inf or NaN."""

import pytest
import torch

import tigon
from tigon.ops.logprob import logprob_reference

BROKEN = float("nan"), float("inf"), -float("inf")


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "scale": 0.5, "temperature": 1.5}], ids=str)
def test_results_without_gradient(options, backend, device):
    logits = torch.randn(50, 9, device=device).requires_grad_()
    target = torch.randint(0, 9, (50,), device=device)
    result = tigon.logprob(logits, target, **options)
    z = logits.detach().double() * options.get("scale", 1.0)
    if "softcap" in options:
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    lse = (z / options.get("temperature", 1.0)).logsumexp(-1)
    torch.testing.assert_close(result.logsumexp.double(), lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.mean_logit.double(), z.mean(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(result.is_top1, z.argmax(-1) == target)
    assert not any(t.requires_grad for t in result[2:])


@pytest.mark.parametrize("softcap", [30.0, 50.0])
def test_logits_far_below_the_softcap(softcap, triton_backend, device):
    """tanh of what is small, from exponentials, would be off by an ulp of 1."""
    logits, target = 0.3 * torch.randn(50, 500, device=device), torch.randint(0, 500, (50,), device=device)
    exact = logprob_reference(logits.double(), target, -100, 1.0, softcap, 1.0).logprob
    eager = logprob_reference(logits, target, -100, 1.0, softcap, 1.0).logprob
    found = tigon.logprob(logits, target, softcap=softcap).logprob
    assert (found - exact).abs().mean() <= 2 * (eager - exact).abs().mean()


def test_classes_that_are_masked_out(backend, device):
    """Logits of -inf have no probability, and take nothing from the gradient of the others."""
    logits, target = torch.randn(4, 9, device=device), torch.tensor([0, 1, 2, 3], device=device)
    masked = logits.clone()
    masked[:, 5:] = -float("inf")
    masked, left = masked.requires_grad_(), logits[:, :5].clone().requires_grad_()
    found, expected = (tigon.logprob(t, target) for t in (masked, left))
    for got, right in zip(found[:4], expected[:4], strict=True):
        torch.testing.assert_close(got, right)
    dmasked, dleft = (
        torch.autograd.grad((r.logprob + 0.7 * r.entropy).sum(), t) for r, t in ((found, masked), (expected, left))
    )
    torch.testing.assert_close(dmasked[0][:, :5], dleft[0])
    assert not dmasked[0][:, 5:].any()


@pytest.mark.parametrize("name", ["logprob", "linear_logprob", "linear_cross_entropy"])
def test_bytes_are_classes(name, backend, device):
    """In uint8, -100 is 156."""
    target = torch.tensor([3, 156], device=device)
    given = (torch.randn(2, 256, device=device),)
    if name != "logprob":
        given = torch.randn(2, 4, device=device), torch.randn(256, 4, device=device)
    found, expected = (getattr(tigon, name)(*given, t) for t in (target.byte(), target))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("value", BROKEN)
def test_ignored_rows_are_not_read(value, backend, device):
    logits = torch.randn(3, 9, device=device)
    logits[1] = value
    logits.requires_grad_()
    result = tigon.logprob(logits, torch.tensor([0, -100, 2], device=device))
    assert all(t[1] == 0 for t in result)
    (dlogits,) = torch.autograd.grad((result.logprob + result.entropy).sum(), logits)
    assert not dlogits[1].any()
    assert dlogits[::2].isfinite().all()


def test_of_no_classes_every_target_is_out_of_range(device, triton_backend):
    target = torch.tensor([-100, -100], device=device)
    result = tigon.logprob(torch.ones(2, 0, device=device), target)
    assert not result.logprob.any()
    if device.type == "cuda":
        assert tigon.logprob(torch.ones(2, 0, device=device), target.clamp(min=0)).logprob.isnan().all()
