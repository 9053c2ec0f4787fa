"""Gradients of weights of so few rows that one program has the whole sum: it stores the gradient, in one launch."""

import importlib
import sys

import pytest
import torch

import tigon
from tigon.kernels import launch_cache as runtime_launches

N = 96
# The module, and not the function of its name.
SUMS = importlib.import_module("tigon.ops.sum_rows")
MODULES = {
    name: importlib.import_module(f"tigon.ops.{module}")
    for name, module in (("layer_norm", "layer_norm.launches"), ("dyt", "dyt"), ("rms_norm", "rms_norm"))
}
MODULES["add_rms_norm"] = MODULES["rms_norm"]
CALLS = {
    "rms_norm": lambda x, w, b: tigon.rms_norm(x, w),
    "add_rms_norm": lambda x, w, b: tigon.add_rms_norm(x, x.detach(), w)[0],
    "layer_norm": tigon.layer_norm,
    "layer_norm without bias": lambda x, w, b: tigon.layer_norm(x, w),
    "dyt": lambda x, w, b: tigon.dyt(x, torch.full((1,), 0.7, dtype=w.dtype, device=x.device), w, b),
    "dyt without bias": lambda x, w, b: tigon.dyt(x, torch.full((1,), 0.7, dtype=w.dtype, device=x.device), w),
}


@pytest.fixture
def summed(monkeypatch):
    """The launches of `sum_rows`."""
    found, launch = [], SUMS.launch
    monkeypatch.setattr(SUMS, "launch", lambda *a: found.append(a[0]) or launch(*a))
    return found


def gradients(name, rows, width, dtypes, device, wanted=None):
    draw = torch.Generator().manual_seed(0)
    of = [
        torch.randn(s, generator=draw).to(device, d) for s, d in zip(((rows, width), width, width), dtypes, strict=True)
    ]
    leaves = [t.requires_grad_() for t in of]
    y = CALLS[name](*leaves)
    leaves = leaves if wanted is None else [leaves[i] for i in wanted]
    dy = torch.randn(rows, width, generator=draw).to(device, y.dtype)
    return torch.autograd.grad(y, leaves, dy, allow_unused=True)


HALF, WIDE = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtypes", [(HALF, HALF, HALF), (WIDE, WIDE, WIDE), (HALF, WIDE, HALF)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_one_program_stores_what_the_sum_of_one_row_would_be(name, dtypes, triton_backend, device, summed, monkeypatch):
    """To the bit."""
    found = gradients(name, 2, N, dtypes, device)
    assert not summed
    launches = MODULES[name.split()[0]]

    def shared(programs, *results):  # a row of fp32, as of several programs
        assert programs == 1
        return torch.empty(1, sum(t is not None for t in results), N, device=device), None

    monkeypatch.setattr(launches, "shares", shared)
    # Keys do not name what `shares` decides: what is launched with it is not to be found by others, nor theirs here.
    monkeypatch.setattr(runtime_launches, "_plans", {})
    before = gradients(name, 2, N, dtypes, device)
    assert len(summed) == 1
    for a, b in zip(found, before, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (torch.equal(a, b) and a.dtype == b.dtype and a.any())


@pytest.mark.parametrize("name", ["layer_norm", "dyt"])
@pytest.mark.parametrize("wanted", [(1,), (2,), (0,), (0, 2)])
def test_only_what_is_wanted_is_stored(name, wanted, triton_backend, device, summed):
    every = gradients(name, 2, N, (HALF, HALF, WIDE), device)
    some = gradients(name, 2, N, (HALF, HALF, WIDE), device, wanted)
    assert all(torch.equal(a, every[i]) for a, i in zip(some, wanted, strict=True))
    assert not summed


@pytest.mark.parametrize("name", CALLS)
def test_more_rows_are_shared_out_and_summed(name, triton_backend, device, summed):
    gradients(name, 800, N, (WIDE,) * 3, device)
    assert len(summed) == 1


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("width", [12300, 16400])
def test_a_single_wide_row(width, name, triton_backend, device, summed):
    """Of other kernels: a program holds one row, or sums have programs by columns."""
    found = gradients(name, 1, width, (HALF, HALF, WIDE), device)
    assert not summed
    with tigon.use_backend("torch"):
        truth = gradients(name, 1, width, (WIDE,) * 3, device)
    for a, b in zip(found[1:], truth[1:], strict=True):
        if a is not None:
            assert (a.float() - b).norm() < 0.01 * b.norm()


@pytest.mark.parametrize(("rows", "width"), [(40, N), (100, N), (17, 520)])
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm"])
def test_few_rows_are_spread_over_a_large_device(name, rows, width, triton_backend, device, monkeypatch):
    """To the sums of fewer, larger tiles; the tile says that they are others."""
    tiles, spread = [], SUMS.spread
    launches = MODULES[name]
    monkeypatch.setattr(launches, "spread", lambda *a: tiles.append(spread(*a)) or tiles[-1])
    monkeypatch.setattr(runtime_launches, "_plans", {})
    dtypes = WIDE, WIDE, WIDE
    wanted = (0, 1) if name != "layer_norm" else None
    grids = sys.modules["tigon.ops.rms_norm"]._bwd_grid
    monkeypatch.setattr(SUMS, "multiprocessors", lambda _: 1)
    grids.cache_clear()
    before = gradients(name, rows, width, dtypes, device, wanted)
    monkeypatch.setattr(SUMS, "multiprocessors", lambda _: 12)
    monkeypatch.setattr(runtime_launches, "_plans", {})
    grids.cache_clear()
    found = gradients(name, rows, width, dtypes, device, wanted)
    grids.cache_clear()
    assert tiles == [None, (4 if rows == 100 else 1, 2 if width == 520 else 1, 1)]
    for a, b in zip(found, before, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert a.any()


def test_rows_of_one_tile_and_rows_enough_for_a_device_are_not_spread(monkeypatch):
    monkeypatch.setattr(SUMS, "multiprocessors", lambda _: 132)
    cpu = torch.device("cpu")
    assert SUMS.spread(8, 8, 1024, cpu) is None
    assert SUMS.spread(9, 8, 1024, cpu) == (1, 2, 1)
    assert SUMS.spread(528, 8, 1024, cpu) == (4, 8, 1)
    assert SUMS.spread(529, 8, 1024, cpu) is None
    assert SUMS.spread(100, 1, 8192, cpu) is None
    assert SUMS.spread(2112, 64, 128, cpu) == (16, 4, 1)
