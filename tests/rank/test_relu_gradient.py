"""The gradient of relu(h + b) from its result, and the sums of its columns: those of autograd."""

from __future__ import annotations

import pytest
import torch

from tigon.rank.kernels.relu_gradient import relu_gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (4, 128), (37, 130), (300, 40)])
def test_as_autograd(rows, columns, dtype, backend, device):
    draw = torch.Generator().manual_seed(rows * columns)
    h, dy = (torch.randn(rows, columns, generator=draw).to(device, dtype) for _ in range(2))
    leaf = h.requires_grad_()
    y = torch.relu(leaf)
    (want,) = torch.autograd.grad(y, leaf, dy)
    dh, db = relu_gradient(dy, y.detach())
    assert torch.equal(dh, want)
    assert dh.dtype == db.dtype == dtype
    sums = want.double().sum(0)
    # torch's own sum is of fp32 too, and rounded once.
    assert torch.allclose(db.double(), sums, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_nan_rows_apart_and_no_rows(backend, device):
    y = torch.tensor([[float("nan"), 0.0, -0.0, 2.0]] * 2, device=device)
    dy = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], device=device).t()
    dh, db = relu_gradient(dy, y)
    assert dh.tolist() == [[1, 0, 0, 7], [2, 0, 0, 8]]
    assert db.tolist() == [3, 0, 0, 15]
    with pytest.raises(ValueError, match=r"relu_gradient: dy and y must be \(M, N\), got \(1, 4\) and \(2, 4\)"):
        relu_gradient(dy[:1], y)
    dh, db = relu_gradient(dy[:0], y[:0])
    assert (dh.shape, db.tolist()) == ((0, 4), [0, 0, 0, 0])
