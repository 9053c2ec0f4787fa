"""The product of rows with a vector: values and gradients of fp64, whatever lies behind the columns that count."""

from __future__ import annotations

import pytest
import torch
from test_kernels_compile import compiled

from tigon.kernels import HAS_TRITON
from tigon.rank.kernels.row_dot import row_dot


def drawn(rows, wide, columns, dtype, device):
    draw = torch.Generator().manual_seed(rows * wide)
    x, weight = torch.randn(rows, wide, generator=draw), torch.randn(columns, generator=draw)
    return x.to(device, dtype), weight.to(device), torch.randn(rows, generator=draw).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "wide", "columns"), [(1, 1, 1), (5, 16, 12), (37, 520, 515), (300, 130, 130)])
def test_as_in_fp64(rows, wide, columns, dtype, backend, device):
    x, weight, dz = drawn(rows, wide, columns, dtype, device)
    x.requires_grad_()
    weight.requires_grad_()
    z = row_dot(x, weight)
    dx, dw = torch.autograd.grad(z, (x, weight), dz)
    exact = [t.detach().double() for t in (x[:, :columns], weight, dz)]
    assert (z.dtype, dx.dtype, dw.dtype) == (torch.float32, dtype, torch.float32)
    # Numbers of 16 bits are exact in fp32: what is summed is as exact as in fp32.
    assert torch.allclose(z.double(), exact[0] @ exact[1], rtol=1e-5, atol=1e-4)
    assert torch.allclose(dw.double(), exact[2] @ exact[0], rtol=1e-5, atol=1e-4)
    want = torch.outer(exact[2], exact[1])
    assert torch.allclose(dx[:, :columns].double(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert not dx[:, columns:].any()


def test_what_lies_behind_does_not_count(backend, device):
    x, weight, dz = drawn(7, 20, 13, torch.float32, device)
    x[:, 13:] = float("nan")
    x.requires_grad_()
    weight.requires_grad_()
    z = row_dot(x, weight)
    dx, dw = torch.autograd.grad(z, (x, weight), dz)
    assert z.isfinite().all()
    assert dw.isfinite().all()
    assert not dx[:, 13:].any()


def test_gradients_that_are_not_wanted_rows_apart_and_no_rows(backend, device):
    x, weight, dz = drawn(6, 9, 9, torch.float32, device)
    apart = torch.stack((x, x), 1)[:, 0].requires_grad_()
    (dx,) = torch.autograd.grad(row_dot(apart, weight), apart, dz)
    assert torch.allclose(dx, torch.outer(dz, weight))
    leaf = weight.clone().requires_grad_()
    (dw,) = torch.autograd.grad(row_dot(x, leaf), leaf, dz)
    assert torch.allclose(dw, dz @ x, atol=1e-5)
    row_dot(x[:0], leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))
    with pytest.raises(
        ValueError, match=r"row_dot: x must be \(M, K\), and weight \(N,\) with N up to K, got \(6, 9\)"
    ):
        row_dot(x, torch.ones(10, device=device))


def test_an_infinite_gradient_stays_in_the_columns_that_count(backend, device):
    x, weight, dz = drawn(3, 8, 5, torch.float32, device)
    dz[1] = float("inf")
    x.requires_grad_()
    (dx,) = torch.autograd.grad(row_dot(x, weight), x, dz)
    assert dx[1, :5].isinf().all()
    assert torch.equal(dx[:, 5:], torch.zeros_like(dx[:, 5:]))


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.xdist_group("compile cuda:90")
def test_rows_are_read_16_bytes_at_a_time():
    """Of the kernels of LiRank's step that share rows out alike: 1000 columns, of which 996 count for a head."""
    ours = compiled("cuda:90", "crossed_sum", "relu_gradient", "row_dot")["launches"]
    wide = [x for x in ours if x["shape"] == [65536, 1000] and x["dtype"] == "bfloat16"]
    wide = [x for x in wide if not x["kernel"].endswith("_sum_rows_kernel")]
    # Beside them a bias, a weight or the logits' gradients: numbers of columns that need not be a multiple of 8.
    tensors = {
        "_crossed_sum_fwd_kernel": 3, "_crossed_sum_bwd_kernel": 4, "_relu_gradient_kernel": 2,
        "_row_dot_fwd_kernel": 1, "_row_dot_bwd_kernel": 1,
    }  # fmt: skip
    assert {x["kernel"].rpartition(".")[2] for x in wide} == set(tensors)
    for x in wide:
        assert x["wide_loads"] >= tensors[x["kernel"].rpartition(".")[2]], x
        assert x["stack"] == 0
