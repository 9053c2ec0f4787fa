"""The step along the gradient, of many tensors at once, against its formula in fp64; and back to the same bits."""

import pytest
import torch
from numerics import unit_roundoff

import tigon
from tigon.training import perturb as perturbation
from tigon.training.perturb import perturb, restore, squared_norm

RHO = 3.0  # as long as the weights: what moves nothing, or moves to the wrong place, is far off
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def bits(t):
    return t.contiguous().view(INTEGERS[t.dtype])


def tensors(device, dtype):
    """Least, masked, one that fills its blocks, several blocks and a rest, another order of dimensions, empty."""
    shapes = [(1,), (3, 5), (4096,), (3, 4100), (0, 7)]
    params = [torch.randn(s, device=device, dtype=dtype) * 0.02 for s in shapes]
    params.append(torch.randn(40, 30, device=device, dtype=dtype).mul_(0.02).t())
    params.append(torch.randn(2, 8, 3, 3, device=device, dtype=dtype).to(memory_format=torch.channels_last))
    params.append(torch.randn(70, device=device, dtype=dtype)[1:])  # 16 does not divide its address
    return params, [torch.randn_like(p) for p in params]


def exact(params, grads, rho, adaptive, eta):
    wide = [(p.double(), g.double()) for p, g in zip(params, grads, strict=True)]
    scale = [(p.abs() + eta) if adaptive else torch.ones_like(p) for p, _ in wide]
    squares = sum((s * g).square().sum() for s, (_, g) in zip(scale, wide, strict=True))
    steps = [r * s**2 * g / squares.sqrt() for r, s, (_, g) in zip(rho, scale, wide, strict=True)]
    return squares, [p + e for (p, _), e in zip(wide, steps, strict=True)], steps


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moves_along_the_gradient_and_back_to_the_bits(dtype, adaptive, backend, device):
    params, grads = tensors(device, dtype)
    rho = [RHO * (1 + i) for i in range(len(params))]
    before = [p.clone() for p in params]
    squares, moved, steps = exact(params, grads, rho, adaptive, 0.01)
    found = squared_norm(params, grads, adaptive=adaptive, eta=0.01)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), squares, rtol=1e-6, atol=0)
    places = [g.data_ptr() for g in grads[:4]]
    kept = perturb(params, grads, found, rho, adaptive=adaptive, eta=0.01)
    for p, right, step in zip(params, moved, steps, strict=True):
        # The sum in fp32 and its rounding; the factor of the step has some roundings of its own.
        slack = 1.01 * unit_roundoff(dtype) * right.abs() + 8 * 2.0**-24 * (step.abs() + right.abs())
        floor = 2.0**-25 if dtype == torch.float16 else 0.0  # half of fp16's least step, below its normal numbers
        assert bool(((p.double() - right).abs() <= slack + floor).all())
    assert [k.data_ptr() for k in kept[:4]] == places, "the old weights take the gradients' memory"
    restore(params, kept)
    assert all(torch.equal(bits(p), bits(b)) for p, b in zip(params, before, strict=True))


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 4, 8)])
def test_what_lies_between_the_elements_of_a_parameter_stays(shape, backend, device):
    wide = torch.randn(shape, device=device)
    p, between = wide[..., ::2], wide[..., 1::2].clone()
    g = torch.randn(p.shape, device=device)
    _, (moved,), _ = exact([p], [g], [RHO], False, 0.0)
    kept = perturb([p], [g], squared_norm([p], [g]), [RHO])
    torch.testing.assert_close(p.double(), moved, rtol=1e-5, atol=1e-6)
    assert torch.equal(wide[..., 1::2], between)
    restore([p], kept)
    assert torch.equal(wide[..., 1::2], between)


def test_bits_that_arithmetic_would_change(backend, device):
    odd = torch.tensor([0x7FC00123, 0x00000001, -0x80000000, 0x7F800000, 0x3F800001], dtype=torch.int64)
    p = odd.to(torch.int32).view(torch.float32).to(device)  # a NaN with a payload, a denormal, -0, infinity, 1 + 2⁻²³
    before = bits(p).clone()
    g = torch.ones_like(p)
    kept = perturb([p], [g], squared_norm([p], [g]), [1.0])
    assert not torch.equal(bits(p), before)
    restore([p], kept)
    assert torch.equal(bits(p), before)


def test_gradients_that_share_memory_are_not_written_into(backend, device):
    a, b = torch.nn.Parameter(torch.randn(6, device=device)), torch.nn.Parameter(torch.randn(6, device=device))
    ((a.view(2, 3) + b.view(2, 3)) * torch.randn(2, 3, device=device)).sum().backward()
    params, own = [a.detach(), b.detach()], [a.grad, b.grad]
    if a.grad.data_ptr() != b.grad.data_ptr():  # autograd may copy
        own = [a.grad, a.grad.view(6)]
    before = [p.clone() for p in params]
    _, moved, _ = exact(params, own, [1.0, 1.0], False, 0.0)
    kept = perturb(params, own, squared_norm(params, own), [1.0, 1.0])
    for p, right in zip(params, moved, strict=True):
        torch.testing.assert_close(p.double(), right, rtol=1e-6, atol=1e-6)
    restore(params, kept)
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))


def test_gradients_of_another_dtype_layout_or_storage(backend, device):
    params = [torch.randn(4, 6, device=device, dtype=torch.bfloat16), torch.randn(4, 6, device=device),
              torch.randn(9, device=device)]  # fmt: skip
    grads = [
        torch.randn(4, 6, device=device),
        torch.randn(6, 4, device=device).t(),
        torch.randn(20, device=device)[7:16],
    ]
    before = [p.clone() for p in params]
    _, moved, _ = exact(params, grads, [2.0] * 3, True, 0.0)
    kept = perturb(params, grads, squared_norm(params, grads, adaptive=True), [2.0] * 3, adaptive=True)
    for p, right in zip(params, moved, strict=True):
        torch.testing.assert_close(p.double(), right, rtol=2 * unit_roundoff(p.dtype), atol=1e-6)
    restore(params, kept)
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_nothing_moves_along_a_gradient_without_direction(value, backend, device):
    p = torch.randn(5000, device=device)
    before = p.clone()
    g = torch.zeros_like(p)
    g[17] = value
    kept = perturb([p], [g], squared_norm([p], [g]), [1.0])
    assert torch.equal(p, before)
    assert torch.equal(kept[0], before)


def test_rho_of_zero_moves_nothing(backend, device):
    p, q = torch.randn(10, device=device), torch.randn(10, device=device)
    before = p.clone(), q.clone()
    grads = [torch.ones_like(p), torch.ones_like(q)]
    perturb([p, q], grads, squared_norm([p, q], grads), [0.0, 1.0])
    assert torch.equal(p, before[0])
    torch.testing.assert_close(q, before[1] + 20**-0.5)


def test_the_same_bits_on_every_run(backend, device):
    p, g = torch.randn(3, 50000, device=device), torch.randn(3, 50000, device=device)
    found = [squared_norm([p, p[0]], [g, g[1]], adaptive=True).item() for _ in range(3)]
    assert len(set(found)) == 1


def test_fp64(device):
    params = [torch.randn(50, device=device, dtype=torch.float64), torch.randn(50, device=device)]
    grads = [torch.randn_like(p) for p in params]
    squares, moved, _ = exact(params, grads, [1.0, 1.0], False, 0.0)
    found = squared_norm(params, grads)
    assert found.dtype == torch.float64
    perturb(params, grads, found, [1.0, 1.0])
    torch.testing.assert_close(found, squares, rtol=1e-7, atol=0)
    torch.testing.assert_close(params[0], moved[0], rtol=1e-7, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.xdist_group("2**31 elements")
def test_more_than_two_to_the_31_elements(device, triton_backend):
    p = torch.zeros(2**31 + 4100, device=device, dtype=torch.bfloat16)
    g = torch.zeros_like(p)
    g[-1] = 3.0
    kept = perturb([p], [g], squared_norm([p], [g]), [2.0])
    assert p[-1].item() == 2.0
    restore([p], kept)
    assert p[-1].item() == 0.0


@pytest.mark.gpu
def test_the_host_does_not_wait(device, triton_backend):
    p, g = torch.randn(10000, device=device), torch.randn(10000, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept = perturb([p], [g], squared_norm([p], [g]), [2.0])
        restore([p], kept)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_weights_are_back_where_moving_them_failed(monkeypatch):
    """Memory may run out at the second of three tensors."""
    params = [torch.randn(5) for _ in range(3)]
    before = [p.clone() for p in params]
    grads = [torch.randn(5) for _ in range(3)]
    size, sizes = perturbation._size, []

    def fails(p, eta):
        sizes.append(p)
        if len(sizes) == 2:
            raise torch.OutOfMemoryError
        return size(p, eta)

    squares = perturbation.squared_norm(params, grads)
    monkeypatch.setattr(perturbation, "_size", fails)
    with tigon.use_backend("torch"), pytest.raises(torch.OutOfMemoryError):
        perturbation.perturb(params, grads, squares, [0.1] * 3, adaptive=True)
    assert len(sizes) == 2
    for p, old in zip(params, before, strict=True):
        assert torch.equal(p, old)


def test_memory_may_run_out_between_two_launches(monkeypatch, triton_backend, device):
    """Tensors of two dtypes take two launches."""
    params = [torch.randn(5, device=device), torch.randn(5, device=device).bfloat16()]
    before = [p.clone() for p in params]
    grads = [torch.randn_like(p) for p in params]
    run, launches = perturbation._run, []

    def fails(kernel, *rest):
        launches.append(kernel)
        if len(launches) == 2:
            raise torch.OutOfMemoryError
        return run(kernel, *rest)

    squares = perturbation.squared_norm(params, grads)
    monkeypatch.setattr(perturbation, "_run", fails)
    with pytest.raises(torch.OutOfMemoryError):
        perturbation.perturb(params, grads, squares, [0.1] * 2)
    assert len(launches) == 2
    for p, old in zip(params, before, strict=True):
        assert torch.equal(p, old)
