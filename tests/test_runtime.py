"""Which implementation runs, and who may say so."""

from __future__ import annotations

import threading

import pytest
import torch

import tigon
from tigon import use_backend
from tigon.kernels import HAS_TRITON, INTERPRET, multiprocessors, use_triton, view_rows, why_not_triton
from tigon.kernels import dispatch as backend

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


def test_auto_takes_the_reference_on_a_cpu_and_triton_on_a_gpu(device):
    assert use_triton(torch.ones(2, device=device)) == (device.type == "cuda" and HAS_TRITON)
    assert not use_triton(torch.ones(2))


@needs_triton
def test_blocks_nest_and_restore(device):
    x = torch.ones(2, device=device)
    outside = use_triton(x)
    with use_backend("torch"):
        assert not use_triton(x)
        with use_backend("triton"):
            assert use_triton(x)
            with use_backend("auto"):
                assert use_triton(x) == outside
            assert use_triton(x)
        assert not use_triton(x)
    assert use_triton(x) == outside


def test_one_block_can_be_entered_again(device):
    block = use_backend("torch")
    with block, block:
        assert not use_triton(torch.ones(2, device=device))
    with block:
        assert backend._forced == "torch"
    assert backend._forced is None


def test_an_exception_restores_the_backend():
    with pytest.raises(KeyError), use_backend("torch"):
        raise KeyError
    assert backend._forced is None


def test_every_thread_sees_the_choice():
    """A backward pass runs in threads of its own."""
    seen = []
    with use_backend("torch"):
        thread = threading.Thread(target=lambda: seen.append(backend._forced))
        thread.start()
        thread.join()
    assert seen == ["torch"]


@pytest.mark.parametrize("name", ["cuda", "Torch", 3])
def test_a_wrong_name_gets_a_sentence(name):
    with pytest.raises(ValueError, match=r"use_backend: name must be 'triton', 'torch' or 'auto', got"):
        use_backend(name)


@needs_triton
def test_reasons(device):
    assert why_not_triton(torch.ones(2, device=device), None) is None
    assert "float64" in why_not_triton(torch.ones(2, device=device, dtype=torch.float64))
    assert "int64" in why_not_triton(torch.ones(2, device=device, dtype=torch.int64))
    assert "not on 'meta'" in why_not_triton(torch.ones(2, device="meta"))


@needs_triton
def test_forced_triton_raises_with_the_reason(device):
    for bad, reason in (
        (torch.ones(2, 4, dtype=torch.float64, device=device), "float64"),
        (torch.ones(2, 4, device="meta"), "meta"),
    ):
        with use_backend("triton"), pytest.raises(RuntimeError, match=rf"triton backend was forced, but .*{reason}"):
            tigon.rms_norm(bad)


@needs_triton
def test_the_two_backends_are_two_implementations(device):
    """Were one silently replaced by the other, every comparison between them would pass."""
    x = torch.randn(3, 100, device=device, requires_grad=True)
    names = []
    for name in ("torch", "triton"):
        with use_backend(name):
            names.append(type(tigon.rms_norm(x).grad_fn).__name__)
    assert names[0] != names[1]


@needs_triton
def test_backward_runs_on_the_backend_of_its_forward(device):
    x = torch.randn(3, 100, device=device, requires_grad=True)
    with use_backend("triton"):
        y = tigon.rms_norm(x)
        (expected,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    with use_backend("torch"):
        (got,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(got, expected)


@needs_triton
def test_nested_tensors_take_the_reference(device):
    rows = [torch.randn(n, 8, device=device) for n in (2, 3)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for row, got in zip(rows, tigon.rms_norm(nested).unbind(), strict=True):
        torch.testing.assert_close(got, tigon.rms_norm(row))
    with use_backend("triton"), pytest.raises(RuntimeError, match="plain tensors, not NestedTensor"):
        tigon.rms_norm(nested)


@needs_triton
def test_the_graph_names_the_operator(device):
    """What grad_fn prints and a profiler shows."""
    x = torch.randn(3, 8, device=device, requires_grad=True)
    with use_backend("triton"):
        assert tigon.rms_norm(x).grad_fn.name() == "RmsNormBackward"
        assert tigon.add_rms_norm(x, x)[1].grad_fn.name() == "AddRmsNormBackward"
        assert tigon.softmax(x, -1).grad_fn.name() == "SoftmaxBackward"


@pytest.mark.gpu
def test_a_cpu_tensor_among_cuda_ones_is_refused(device):
    with use_backend("triton"), pytest.raises(RuntimeError, match="devices"):
        tigon.rms_norm(torch.ones(2, 4, device=device), torch.ones(4))


@pytest.mark.parametrize(
    ("x", "copies"),
    [
        (torch.randn(6, 8), False),
        (torch.randn(2, 3, 8), False),
        (torch.randn(6, 16)[:, :8], False),  # one row stride
        (torch.randn(2, 3, 16)[..., :8], False),
        (torch.randn(3, 2, 8).transpose(0, 1), True),  # two row strides
        (torch.randn(6, 16)[:, ::2], True),  # no unit stride
        (torch.randn(8, 6).t(), True),
        (torch.randn(8).expand(6, 8), False),  # row stride 0
        (torch.randn(8), False),
        (torch.randn(6, 1), False),
        (torch.randn(0, 8), False),
    ],
)
def test_rows_of(x, copies):
    rows = view_rows(x)
    assert torch.equal(rows, x.reshape(-1, x.shape[-1]))
    assert rows.stride(-1) == 1 or rows.shape[-1] == 1
    if x.numel():
        assert (rows.data_ptr() != x.data_ptr()) == copies


def test_rows_of_nothing():
    for shape in ((3, 0), (2, 3, 0)):
        rows = view_rows(torch.randn(shape))
        assert rows.dim() == 2
        assert rows.numel() == 0


def test_multiprocessors_of_a_device_that_is_not_there():
    assert multiprocessors(torch.device("meta")) > 1


def test_the_interpreter_is_on_where_there_is_no_gpu(device):
    assert (device.type == "cpu") == INTERPRET
