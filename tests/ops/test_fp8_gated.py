"""A gated unit in e4m3 rows: the kernels against the reference, number by number."""

import pytest
import torch

from tigon import use_backend
from tigon.kernels import launch_cache, shared_memory
from tigon.ops.acts import ACTS
from tigon.ops.fp8 import gated_gradient as gradient_file
from tigon.ops.fp8 import gated_rows as rows_file
from tigon.ops.fp8.gated_gradient import gated_gradient
from tigon.ops.fp8.gated_rows import gated_rows
from tigon.ops.fp8.recipe import E4M3, LARGEST, Rows
from tigon.ops.fp8.reference import gated_gradient_reference, gated_rows_reference

# Multiples of 16 and other widths, within and beyond a power of two; tokens around 16.
WIDTHS = (16, 48, 100, 1000, 2064)
SHAPES = [(0, 48), (1, 16), (15, 100), (16, 1000), (17, 48), (33, 2064), (2, 16400)]


def equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two scales are equal, or of e4m3 numbers all but 1 in 1,000, which are neighbours; NaN equals NaN."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    one, other = a.float(), b.float()
    if a.dtype != E4M3:
        return torch.equal(one.nan_to_num(-1.0), other.nan_to_num(-1.0))
    if not torch.equal(one.isnan(), other.isnan()):
        return False
    order = [
        torch.where(x < 0, -y, y) for x, y in ((n, n.abs().to(E4M3).view(torch.uint8).int()) for n in (one, other))
    ]
    apart = torch.where(one.isnan(), 0, order[0] - order[1]).abs()
    return int(apart.sum()) <= max(2, a.numel() // 1000) and int(apart.max() if apart.numel() else 0) <= 1


def equal_rows(a: Rows | None, b: Rows | None) -> bool:
    return a is b if a is None or b is None else equal(a.data, b.data) and equal(a.scale, b.scale)


def draw(M: int, N: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """dy (M, N), and gate and up (M, 2N), with rows of different sizes."""
    size = torch.exp(2 * torch.randn(M, 1))
    dy, gate_up = torch.randn(M, N) * size * 1e-4, torch.randn(M, 2 * N) * size
    return dy.to(device, dtype), gate_up.to(device, dtype)


def damage(gate_up: torch.Tensor) -> torch.Tensor:
    """Rows of zeros, with a huge number, with infinities and with NaN; the other rows stay."""
    gate_up = gate_up.clone()
    gate_up[0] = 0
    gate_up[1, 3] = 3e38
    gate_up[2, 0], gate_up[3, 1], gate_up[4, -1] = torch.inf, -torch.inf, -torch.inf
    gate_up[5, 2], gate_up[6, -2] = torch.nan, torch.nan
    gate_up[7] *= 1e-30
    return gate_up


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_the_reference(backend, device, shape, keep):
    _, gate_up = draw(*shape, device)
    rows, kept = gated_rows(gate_up, "silu", keep)
    expected, expected_kept = gated_rows_reference(gate_up, "silu", keep)
    assert equal_rows(rows, expected)
    assert equal_rows(kept, expected_kept)
    assert rows.data.is_contiguous()


@pytest.mark.parametrize("product", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_the_reference(backend, device, shape, product):
    dy, gate_up = draw(*shape, device)
    rows, kept = gated_rows_reference(gate_up, "silu", True)
    scale = rows.scale if product else None
    for inputs in ((gate_up, None), kept):
        found, expected = (f(dy, *inputs, "silu", scale) for f in (gated_gradient, gated_gradient_reference))
        assert equal_rows(found[0], expected[0])
        assert equal(found[1], expected[1])
    if product and shape[0]:  # rounded once: the forward pass's bytes
        assert equal(gated_gradient(dy, gate_up, None, "silu", scale)[1], rows.data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("act", ACTS)
def test_every_activation_and_dtype(triton_backend, device, act, dtype):
    dy, gate_up = draw(20, 80, device, dtype)
    gate_up = gate_up.clamp(-50, 50)
    rows, _ = gated_rows(gate_up, act)
    assert equal_rows(rows, gated_rows_reference(gate_up, act, False)[0])
    found, expected = (f(dy, gate_up, None, act, rows.scale) for f in (gated_gradient, gated_gradient_reference))
    assert equal_rows(found[0], expected[0])
    assert equal(found[1], expected[1])


@pytest.mark.parametrize("N", WIDTHS)
def test_zeros_huge_numbers_and_nan(triton_backend, device, N):
    dy, gate_up = draw(12, N, device)
    gate_up = damage(gate_up)
    dy[8, 0], dy[9] = torch.nan, 0
    dy[10, -1] = torch.inf
    rows, kept = gated_rows(gate_up, "silu", True)
    expected, expected_kept = gated_rows_reference(gate_up, "silu", True)
    assert equal_rows(rows, expected)
    assert equal_rows(kept, expected_kept)
    for inputs in ((gate_up, None), kept):
        found, expected = (f(dy, *inputs, "silu", rows.scale) for f in (gated_gradient, gated_gradient_reference))
        assert equal_rows(found[0], expected[0])
        assert equal(found[1], expected[1])
    # A damaged row is not finite in any product of the row; its neighbours are.
    values = rows.data.float() * rows.scale
    assert not values[2:7].sum(1).isfinite().any()
    assert values[[0, *range(7, 12)]].isfinite().all()
    assert (values[0] == 0).all()


def test_a_product_beyond_the_scale_saturates(triton_backend, device):
    dy, gate_up = draw(3, 64, device)
    rows, _ = gated_rows(gate_up, "silu")
    _, product = gated_gradient(dy, gate_up, None, "silu", rows.scale / 1024)
    assert product is not None
    assert product.float().abs().amax() == LARGEST
    kept = rows.data.float() != 0
    assert torch.equal(product.float().sign()[kept], rows.data.float().sign()[kept])


def test_rows_wider_than_registers(triton_backend, device, monkeypatch):
    """Two passes, in blocks of 256 columns."""
    monkeypatch.setattr(launch_cache, "_plans", {})
    monkeypatch.setattr(rows_file, "_tile", lambda *_: rows_file.Tile(256, 1, whole=False))
    monkeypatch.setattr(gradient_file, "_tile", lambda *_: rows_file.Tile(256, 1, whole=False))
    dy, gate_up = draw(10, 700, device)
    gate_up = damage(gate_up)
    rows, kept = gated_rows(gate_up, "gelu_tanh", True)
    expected, expected_kept = gated_rows_reference(gate_up, "gelu_tanh", True)
    assert equal_rows(rows, expected)
    assert equal_rows(kept, expected_kept)
    for inputs, scale in (((gate_up, None), rows.scale), (kept, None)):
        found, expected = (f(dy, *inputs, "gelu_tanh", scale) for f in (gated_gradient, gated_gradient_reference))
        assert equal_rows(found[0], expected[0])
        assert equal(found[1], expected[1])


@pytest.mark.parametrize("itemsize", [4, 6, 12])
def test_tiles(device, itemsize):
    """Rows wider than registers have two passes; what is prefetched fits into shared memory."""
    for n in (1, 1000, 8192, 14336, 53248):
        tile = rows_file.choose_tile(n, itemsize, True, device)
        assert tile.whole == (n <= 16384)
        assert (tile.stages - 1) * tile.block * itemsize < shared_memory(device)
        assert not tile.whole or n <= tile.block < max(2 * n, 2)
    assert rows_file.choose_tile(14336, itemsize, True, device).stages > 1


@pytest.mark.parametrize("resident", [1, None])
def test_any_number_of_programs(triton_backend, device, monkeypatch, resident):
    """Fewer programs than rows, or one for each."""
    tile = rows_file.Tile(128, 1, stages=2, resident=resident)
    monkeypatch.setattr(launch_cache, "_plans", {})
    monkeypatch.setattr(rows_file, "_tile", lambda *_: tile)
    monkeypatch.setattr(gradient_file, "_tile", lambda *_: tile)
    monkeypatch.setattr(rows_file, "multiprocessors", lambda device: 3)
    dy, gate_up = draw(11, 112, device)
    rows, kept = gated_rows(gate_up, "silu", True)
    expected, expected_kept = gated_rows_reference(gate_up, "silu", True)
    assert equal_rows(rows, expected)
    assert equal_rows(kept, expected_kept)
    found, expected = (f(dy, *kept, "silu", rows.scale) for f in (gated_gradient, gated_gradient_reference))
    assert equal_rows(found[0], expected[0])
    assert equal(found[1], expected[1])


def test_rows_are_read_in_place(triton_backend, device):
    """Rows with a stride, and inputs unchanged."""
    dy, gate_up = draw(9, 48, device)
    dy_room, room = torch.randn(9, 64).to(dy), torch.randn(9, 112).to(gate_up)
    dy_room[:, 8:56], room[:, 16:] = dy, gate_up
    before = dy_room.clone(), room.clone()
    rows, _ = gated_rows(room[:, 16:], "silu")
    assert equal_rows(rows, gated_rows(gate_up, "silu")[0])
    found = gated_gradient(dy_room[:, 8:56], room[:, 16:], None, "silu", rows.scale)
    expected = gated_gradient(dy, gate_up, None, "silu", rows.scale)
    assert equal_rows(found[0], expected[0])
    assert equal(found[1], expected[1])
    assert torch.equal(dy_room, before[0])
    assert torch.equal(room, before[1])


def test_the_same_bits_twice(triton_backend, device):
    dy, gate_up = draw(33, 1000, device)
    runs = []
    for _ in range(2):
        rows, kept = gated_rows(gate_up, "silu", True)
        gradient, product = gated_gradient(dy, *kept, "silu", rows.scale)
        runs.append([t.view(torch.uint8) for t in (*rows, *kept, *gradient, product)])
    assert all(map(torch.equal, *runs))


def test_traced_calls_have_the_same_bits(triton_backend, device):
    def run(dy, gate_up):
        rows, kept = gated_rows(gate_up, "silu", True)
        gradient, product = gated_gradient(dy, *kept, "silu", rows.scale)
        plain, _ = gated_gradient(dy, gate_up, None, "silu", None)
        return [t.view(torch.uint8) for t in (*rows, *kept, *gradient, product, *plain)]

    inputs = draw(9, 64, device)
    assert all(map(torch.equal, torch.compile(run, fullgraph=True, backend="eager")(*inputs), run(*inputs)))


def test_fake_tensors_have_the_shapes(device):
    """As torch.compile sees them."""
    dy, gate_up = draw(5, 32, device)
    real = []
    with use_backend("triton" if device.type == "cuda" else "torch"):
        rows, kept = gated_rows(gate_up, "silu", True)
        real += [*rows, *kept]
        gradient, product = gated_gradient(dy, gate_up, None, "silu", rows.scale)
        real += [*gradient, product]
    fake = [*rows_file._fp8_gated_rows_fake(gate_up, "silu", True)]
    fake += gradient_file._fp8_gated_gradient_fake(dy, gate_up, None, "silu", rows.scale)
    assert [(t.shape, t.dtype, t.stride()) for t in fake] == [(t.shape, t.dtype, t.stride()) for t in real]
