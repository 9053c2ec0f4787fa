"""measure_weights, quantize_weight and quantize_transposed: the kernels' bytes are the reference's."""

import pytest
import torch

from tigon.ops.fp8.recipe import E4M3
from tigon.ops.fp8.reference import compute_scale, quantize_weight_reference
from tigon.ops.fp8.weight import measure_weights, quantize_transposed, quantize_weight


def draw(sizes, K, device, *dtypes):
    dtypes = dtypes or (torch.bfloat16,)
    return [torch.randn(n, K, device=device).to(dtypes[i % len(dtypes)]) for i, n in enumerate(sizes)]


def check(parts, amax):
    wanted = quantize_weight_reference(parts, amax)
    K = parts[0].shape[1]
    found, transposed = quantize_weight(parts, amax), quantize_transposed(parts, amax)
    for weight, data, count in ((found, wanted.data, len(wanted.data)), (transposed, wanted.data.t(), K)):
        assert weight.data.dtype == E4M3
        assert weight.data.is_contiguous()
        q, r = weight.data.float(), data.float()
        assert torch.equal(q.nan_to_num(nan=500), r.nan_to_num(nan=500))
        assert torch.equal(q.signbit() & ~q.isnan(), r.signbit() & ~r.isnan())
        assert weight.scale.is_contiguous()
        assert torch.equal(weight.scale.nan_to_num(nan=-1), wanted.scale[:1].expand(count).nan_to_num(nan=-1))


@pytest.mark.parametrize("sizes", [(16,), (160, 48), (144, 16, 16), (17,), (5, 11)])  # 17, 5, 11: no product takes them
@pytest.mark.parametrize("K", [16, 48, 100, 129, 272])
def test_weights(K, sizes, triton_backend, device):
    parts = draw(sizes, K, device)
    check(parts, measure_weights(parts))


def test_more_numbers_than_a_program_has(triton_backend, device):
    parts = draw((16, 32), 2064, device)
    check(parts, measure_weights(parts))


def test_dtypes_and_strides(triton_backend, device):
    parts = draw((16, 32, 16), 48, device, torch.float32, torch.bfloat16, torch.float16)
    check(parts, measure_weights(parts))
    parts = [torch.randn(48, 32, device=device).t(), torch.randn(16, 64, device=device)[:, :48]]
    check(parts, measure_weights(parts))
    check([torch.nn.Parameter(part) for part in parts], measure_weights(parts))


def test_zeros_and_numbers_that_are_not_finite(triton_backend, device):
    parts = draw((16, 32), 48, device)
    for value in (torch.inf, torch.nan, 0.0):
        parts[1][3, 5] = value
        check(parts, measure_weights(parts))
    parts = [torch.zeros_like(part) for part in parts]
    check(parts, measure_weights(parts))


def test_larger_numbers_than_measured_saturate(triton_backend, device):
    parts = draw((16, 32), 48, device)
    amax = measure_weights(parts) / 4
    check(parts, amax)
    assert quantize_weight(parts, amax).data.float().abs().amax() == 448


def test_the_largest_magnitude(backend, device):
    parts = draw((3, 5, 0), 7, device, torch.float32, torch.bfloat16)
    parts[1][2, 4] = -77
    amax = measure_weights(parts)
    assert amax.dtype == torch.float32
    assert amax.shape == ()
    assert amax.device == parts[0].device
    assert amax == 77
    parts[0][1, 1] = torch.nan
    assert measure_weights(parts).isnan()
    assert measure_weights(parts[2:]) == 0
    assert measure_weights([torch.nn.Parameter(parts[1])]).requires_grad is False


def test_the_scale_reaches_the_largest_number(backend, device):
    parts = draw((16,), 48, device)
    amax = measure_weights(parts)
    weight = quantize_weight(parts, amax)
    assert weight.scale[0] == compute_scale(amax)
    assert 224 < weight.data.float().abs().amax() <= 448


@pytest.mark.gpu
def test_the_host_does_not_wait(triton_backend, device):
    parts = draw((16, 32), 48, device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        amax = measure_weights(parts)
        quantize_weight(parts, amax)
        quantize_transposed(parts, amax)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_operators_are_registered(triton_backend, device):
    parts = draw((16, 32), 48, device)
    for op in (torch.ops.tigon.fp8_weight.default, torch.ops.tigon.fp8_transposed.default):
        torch.library.opcheck(op, (measure_weights(parts), parts), test_utils=("test_schema", "test_faketensor"))
    amax = torch.ops.tigon.fp8_amax.default
    torch.library.opcheck(amax, (parts[0], parts[1:]), test_utils=("test_schema", "test_faketensor"))
