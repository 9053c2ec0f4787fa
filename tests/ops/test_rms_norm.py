"""rms_norm against the modules it replaces."""

import pytest
import torch

import tigon
from tigon.ops.rms_norm import rms_norm_reference


class LlamaRMSNorm(torch.nn.Module):
    """As transformers writes it."""

    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


class GemmaRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_casts_are_those_of_the_families(dtype, device):
    """Bit for bit on the reference: fuse() recognises a norm by exactly this."""
    x = torch.randn(5, 300, device=device).to(dtype)
    w = (1 + 0.3 * torch.randn(300, device=device)).to(dtype)
    torch_norm = torch.nn.RMSNorm(300, eps=1e-5, device=device, dtype=dtype)
    with torch.no_grad():
        torch_norm.weight.copy_(w)
        assert torch.equal(rms_norm_reference(x, w, eps=1e-5), LlamaRMSNorm(w, 1e-5)(x))
        gemma = rms_norm_reference(x, w, eps=1e-5, offset=1.0, cast="gemma")
        assert torch.equal(gemma, GemmaRMSNorm(w, 1e-5)(x))
        once = rms_norm_reference(x, w, eps=1e-5, cast="gemma")
        torch.testing.assert_close(once, torch_norm(x))


def test_llama_rounds_before_it_scales_and_gemma_after(backend, device):
    """x·rstd = 1.001 is 1 in bf16: Llama's result is the weight itself, Gemma's is the rounded product."""
    x = torch.ones(1, 64, device=device, dtype=torch.bfloat16)
    x[0, ::2] = 1.0078125
    w = torch.full((64,), 255.0, device=device, dtype=torch.bfloat16)
    llama, gemma = (tigon.rms_norm(x, w, cast=cast) for cast in ("llama", "gemma"))
    assert not torch.equal(llama, gemma)
    assert torch.equal(llama, LlamaRMSNorm(w, 1e-6)(x))


@pytest.mark.parametrize(
    ("cast", "expected"), [("llama", torch.float32), ("gemma", torch.bfloat16), ("none", torch.float32)]
)
def test_result_dtype(cast, expected, backend, device):
    x, w = torch.randn(2, 64, device=device, dtype=torch.bfloat16), torch.ones(64, device=device)
    assert tigon.rms_norm(x, w, cast=cast).dtype == expected


def test_eps_keeps_a_row_of_zeros_finite(backend, device):
    x = torch.zeros(2, 64, device=device, requires_grad=True)
    y = tigon.rms_norm(x, torch.ones(64, device=device), eps=1e-6)
    y.sum().backward()
    assert y.abs().max() == 0
    torch.testing.assert_close(x.grad, torch.full_like(x, 1e3))


def test_rows_that_overlap(backend, device):
    """Of sliding windows torch.empty_like lays out another dimension densely than the one that the kernels write."""
    x = torch.randn(40, device=device).unfold(0, 8, 1)[:5].requires_grad_()
    y = tigon.rms_norm(x)
    expected = tigon.rms_norm(x.detach().clone())
    torch.testing.assert_close(y, expected)
    normed, total = tigon.add_rms_norm(x, x)
    assert torch.equal(total, x + x)
    torch.testing.assert_close(normed, tigon.rms_norm(x + x))
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    dense = x.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad(tigon.rms_norm(dense).square().sum(), dense)
    torch.testing.assert_close(dx, expected)
