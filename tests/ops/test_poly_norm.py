"""poly_norm at the ends of the number range, for rows of any width, and without what autograd keeps for eager code."""

import pytest
import torch
from numerics import check

import tigon
from tigon.ops.poly_norm import poly_norm_reference


def parameters(device, dtype=torch.float32):
    return torch.tensor([0.5, -0.7, 1.2], device=device, dtype=dtype), torch.tensor([0.3], device=device, dtype=dtype)


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1e3, 4e5])
def test_sizes(size, backend, device):
    """As the docstring promises; and the sixth powers of small numbers vanish beside eps."""
    x = (size * torch.rand(2, 40, device=device).add(0.5) / 1.5).requires_grad_()
    y = tigon.poly_norm(x, *parameters(device))
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    exact = x.detach().double().requires_grad_()
    expected = poly_norm_reference(exact, *parameters(device, torch.float64))
    (dexact,) = torch.autograd.grad(expected.square().sum(), exact)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    if backend == "torch" and size > 1e4:
        return  # autograd cubes the reciprocal of a root of x⁶, and fp32 has no such small numbers; the kernels do not
    torch.testing.assert_close(dx.double(), dexact, rtol=1e-4, atol=1e-5 * dexact.abs().max().item())


@pytest.mark.parametrize(("size", "lost"), [(1e9, 1), (1e12, 2)])
def test_powers_beyond_fp32_vanish_one_by_one(size, lost, backend, device):
    """Beyond the docstring's range, as in eager code: the higher powers and their weights' gradients are 0."""
    x = size * torch.rand(2, 40, device=device).add(0.5)
    weight, bias = (p.requires_grad_() for p in parameters(device))
    y = tigon.poly_norm(x, weight, bias)
    lower = torch.arange(3, device=device) >= lost
    torch.testing.assert_close(y, tigon.poly_norm(x, weight * lower, bias))
    (dw,) = torch.autograd.grad(y.sum(), weight)
    assert torch.equal(dw != 0, lower)
    assert dw.isfinite().all()


def test_numbers_without_a_cube_have_gradients_of_nan(backend, device):
    x = torch.full((2, 40), 1e15, device=device, requires_grad=True)
    weight, bias = (p.requires_grad_() for p in parameters(device))
    dx, dw = torch.autograd.grad(tigon.poly_norm(x, weight, bias).sum(), (x, weight))
    assert dx.isnan().all()
    assert dw[0].isnan()


def test_the_largest_fp16(backend, device):
    x = torch.tensor([[65504.0, -65504.0, 1.0, 0.0]], device=device, dtype=torch.float16)
    y = tigon.poly_norm(x, *parameters(device, torch.float16))
    expected = poly_norm_reference(x.double(), *(p.half().double() for p in parameters(device)))
    torch.testing.assert_close(y, expected.half())


@pytest.mark.parametrize("shape", [(2, 8193), (1, 65537), (3, 300), (40, 3)])  # the wide kernels, and shared tiles
def test_any_width(shape, device, triton_backend):
    def inputs(generator):
        x = torch.randn(shape, generator=generator)
        return tuple(t.to(device) for t in (x, *parameters("cpu")))

    check(tigon.poly_norm, poly_norm_reference, inputs, roundings=8, draws=4)


def test_only_the_inputs_are_kept(device, triton_backend):
    """Eager code keeps three powers, their normalised forms and more: eight times x."""
    x = torch.randn(6, 40, device=device, requires_grad=True)
    weight, bias = (p.requires_grad_() for p in parameters(device))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        tigon.poly_norm(x, weight, bias)
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), weight.data_ptr()}
