"""batch_norm_relu beside nn.BatchNorm1d: running statistics, evaluation, extreme batches, and its bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from numerics import check

from tigon.kernels import use_backend
from tigon.rank.kernels.batch_norm_relu import _cut, batch_norm_relu, batch_norm_relu_reference


def drawn(C, N, W, dtype=torch.float32, device="cpu", mean=0.0):
    generator = torch.Generator().manual_seed(C + N)
    h = F.pad(mean + torch.randn(C, N, generator=generator), (0, W - N)).to(dtype)
    weight, bias = 1 + 0.5 * torch.randn(N, generator=generator), torch.randn(N, generator=generator)
    return tuple(t.to(device) for t in (h, weight, bias))


def in_evaluation(h, weight, bias, mean, variance, *, eps=1e-5):
    return batch_norm_relu(h, weight, bias, (mean, variance), training=False, eps=eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("N", "W"), [(12, 16), (13, 13), (130, 136)])
@pytest.mark.parametrize("C", [1, 90])
def test_in_evaluation_it_goes_by_the_running_statistics(C, N, W, dtype, backend, device):
    h, weight, bias = drawn(C, N, W, dtype, device)
    mean, variance = torch.randn(N).to(device), (0.1 + torch.rand(N)).to(device)
    kept = mean.clone(), variance.clone()

    def eager(h, weight, bias, mean, variance, *, eps=1e-5):
        return F.pad(F.relu(F.batch_norm(h[:, :N], mean, variance, weight, bias, False, 0.1, eps)), (0, W - N))

    def reference(h, weight, bias, mean, variance, *, eps=1e-5):
        return batch_norm_relu_reference(h, weight, bias, (mean, variance), training=False, eps=eps)

    check(in_evaluation, reference, h, weight, bias, mean, variance, eager=eager, grad=(0, 1, 2))
    assert torch.equal(mean, kept[0])
    assert torch.equal(variance, kept[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("C", "N", "W"), [(2, 12, 16), (3, 13, 13), (1000, 140, 144)])
def test_running_statistics_are_those_of_torch(C, N, W, dtype, backend, device):
    h, weight, bias = drawn(C, N, W, dtype, device, mean=3.0)
    norm = torch.nn.BatchNorm1d(N, momentum=0.3, device=device)
    mean, variance = norm.running_mean.clone(), norm.running_var.clone()
    pointers = mean.data_ptr(), variance.data_ptr()
    for scale in (1.0, 0.5):
        norm(scale * h[:, :N].float())
        h.requires_grad_()
        batch_norm_relu(scale * h, weight, bias, (mean, variance), momentum=0.3).sum().backward()
    torch.testing.assert_close(mean, norm.running_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(variance, norm.running_var, rtol=3e-6, atol=1e-6)
    assert (mean.data_ptr(), variance.data_ptr()) == pointers


def test_running_statistics_change_neither_result_nor_gradients(triton_backend, device):
    inputs = drawn(200, 20, 24, device=device)
    found = []
    for running in (None, (torch.zeros(20, device=device), torch.ones(20, device=device))):
        leaves = [t.clone().requires_grad_() for t in inputs]
        y = batch_norm_relu(*leaves, running)
        found.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert found[0][0].any()


@pytest.mark.parametrize("C", [2, 3000])
def test_a_mean_far_beyond_the_deviation_costs_no_digits_of_the_variance(C, backend, device):
    """Sums of squares of 1e3 with a deviation of 1 have no digit of it left in fp32 from 10 rows on."""
    h, weight, bias = drawn(C, 20, 24, device=device, mean=1e3)
    mean, variance = torch.zeros(20, device=device), torch.ones(20, device=device)
    batch_norm_relu(h, weight, bias, (mean, variance), momentum=1.0)
    exact = h[:, :20].double()
    torch.testing.assert_close(variance.double(), exact.var(0), rtol=2e-6, atol=0)
    torch.testing.assert_close(mean.double(), exact.mean(0), rtol=2e-7, atol=0)


def test_chunks_of_other_means_are_folded_exactly(triton_backend, device):
    """Rows in the order of what they hold, as a batch sorted by time: each chunk has a mean of its own."""
    cut = _cut(3000, 256, 4, 1, torch.device("cpu"))
    assert cut.chunks > 3
    h, weight, bias = drawn(3000, 256, 256, device=device)
    h += torch.linspace(-500, 800, 3000, device=device)[:, None]
    mean, variance = torch.zeros(256, device=device), torch.ones(256, device=device)
    batch_norm_relu(h, weight, bias, (mean, variance), momentum=1.0)
    torch.testing.assert_close(variance.double(), h.double().var(0), rtol=2e-6, atol=0)
    torch.testing.assert_close(mean.double(), h.double().mean(0), rtol=1e-5, atol=1e-4)


def test_columns_behind_stay_zeros_whatever_their_gradient(triton_backend, device):
    h, weight, bias = drawn(70, 12, 16, device=device)
    h.requires_grad_()
    y = batch_norm_relu(h, weight, bias + 5)
    y.backward(torch.full_like(y, 3.0))
    assert y[:, :12].any()
    assert h.grad[:, :12].any()
    assert not y[:, 12:].any()
    assert not h.grad[:, 12:].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(value, backend, device):
    h, weight, bias = drawn(70, 12, 12, device=device)
    h[3, 5] = value
    mean, variance = torch.zeros(12, device=device), torch.ones(12, device=device)
    y = batch_norm_relu(h, weight, bias, (mean, variance))
    assert y[:, 5].isnan().all()
    assert variance[5].isnan()
    assert y[:, torch.arange(12, device=device) != 5].isfinite().all()


def test_double_backward_is_refused_with_running_statistics_too(triton_backend, device):
    h, weight, bias = drawn(70, 12, 16, device=device)
    h.requires_grad_()
    y = batch_norm_relu(h, weight, bias, (torch.zeros(12, device=device), torch.ones(12, device=device)))
    (dh,) = torch.autograd.grad(y.square().sum(), h, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dh.sum().backward()


def test_traced_it_moves_the_running_statistics(device):
    h, weight, bias = drawn(40, 12, 16, device=device)
    found = []
    for name in ("triton", "torch"):
        mean, variance = torch.zeros(12, device=device), torch.ones(12, device=device)
        with use_backend(name):
            call = torch.compile(batch_norm_relu, fullgraph=True, backend="eager")
            found.append((call(h, weight, bias, (mean, variance)), mean, variance))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    assert found[0][1].any()


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_that_are_not_dense(training, backend, device):
    h, weight, bias = drawn(40, 12, 16, device=device)
    dense = torch.rand(2, 12, device=device)
    strided = dense.t().contiguous().t()
    y = batch_norm_relu(h, weight, bias, tuple(dense), training=training)
    torch.testing.assert_close(batch_norm_relu(h, weight, bias, tuple(strided), training=training), y)
    torch.testing.assert_close(strided, dense)


def test_empty_batches_leave_the_running_statistics(backend, device):
    h, weight, bias = drawn(0, 12, 16, device=device)
    mean, variance = torch.zeros(12, device=device), torch.ones(12, device=device)
    assert batch_norm_relu(h, weight, bias, (mean, variance)).shape == (0, 16)
    assert not mean.any()
    assert (variance == 1).all()


def test_beyond_32_bits_of_offsets(triton_backend, device):
    """A batch of 1000 rows repeated until it has 2³¹ numbers; on a CPU, for the test's own sake, until 50,000."""
    limit = 2**31 if device.type == "cuda" else 50_000
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 12 * limit:
        pytest.skip("needs 24 GiB of free device memory")
    h, weight, bias = drawn(1000, 20, 24, torch.bfloat16, device)
    upstream = torch.randn(h.shape, generator=torch.Generator().manual_seed(0)).to(h)
    times = limit // h.numel() + 2

    def found(times):
        leaves = [h.repeat(times, 1).requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        y = batch_norm_relu(*leaves)
        dh, *sums = torch.autograd.grad(y, leaves, upstream.repeat(times, 1))
        return y.detach()[-1000:], dh[-1000:], *(g / times for g in sums)

    for one, many in zip(found(1), found(times), strict=True):
        torch.testing.assert_close(many, one, rtol=2e-2 if one.dim() == 2 else 1e-4, atol=1e-3)
