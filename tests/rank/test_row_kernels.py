"""crossed_sum, relu_gradient and row_dot: values and gradients of the formulas in fp64, whichever are wanted."""

from __future__ import annotations

import pytest
import torch
from test_kernels_compile import compiled

from tigon.kernels import HAS_TRITON
from tigon.ops.sum_rows import cut
from tigon.rank.kernels.crossed_sum import crossed_sum
from tigon.rank.kernels.relu_gradient import relu_gradient
from tigon.rank.kernels.row_dot import row_dot

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# The least, aligned, masked, and several blocks of rows.
SHAPES = [(1, 1), (3, 128), (37, 130), (300, 40)]


def close(got, want, tolerance):
    return ((got.double() - want).abs() <= tolerance * (1 + want.abs())).all()


# ---------------------------------------------------------------------------------------------------- crossed_sum


def draw_cross(rows, columns, dtype, device):
    draw = torch.Generator().manual_seed(rows * columns)
    x0, u, x, dy, ds = (torch.randn(rows, columns, generator=draw).to(device, dtype) for _ in range(5))
    return [x0, u, x, torch.randn(columns, generator=draw).to(device)], dy, ds


def exact_cross(given, dy, ds):
    x0, u, x, bias = (t.double().requires_grad_() for t in given)
    y = x + x0 * (u + bias)
    loss = (y * dy.double()).sum() + (0 if ds is None else (x0 * ds.double()).sum())
    return [y.detach(), *torch.autograd.grad(loss, (x0, u, x, bias))]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("goes_on", [False, True])
def test_crossed_sum_is_the_formula(rows, columns, dtype, goes_on, backend, device):
    given, dy, ds = draw_cross(rows, columns, dtype, device)
    ds = ds if goes_on else None
    leaves = [t.clone().requires_grad_() for t in given]
    y, x0 = crossed_sum(*leaves)
    assert torch.equal(x0, given[0])
    results, gradients = ((y, x0), (dy, ds)) if goes_on else ((y,), (dy,))
    found = [y, *torch.autograd.grad(results, leaves, gradients)]
    for got, want, of in zip(found, exact_cross(given, dy, ds), (given[2], *given), strict=True):
        assert got.dtype == of.dtype
        # A sum of fp32 over the rows, each of whose terms may be rounded where torch adds them.
        assert close(got, want, (rows if want.dim() == 1 else 2) * TOLERANCE[dtype])


def test_crossed_sum_gradients_that_are_not_wanted_are_not_computed(backend, device):
    given, dy, ds = draw_cross(5, 7, torch.float32, device)
    want = exact_cross(given, dy, ds)
    for wanted in ([0], [1], [3], [0, 2]):
        leaves = [t.clone().requires_grad_(n in wanted) for n, t in enumerate(given)]
        y, x0 = crossed_sum(*leaves)
        assert x0.requires_grad == (0 in wanted)  # a frozen x₀ stays frozen for the next layer
        results = [(y, dy), (x0, ds)] if 0 in wanted else [(y, dy)]
        torch.autograd.backward([of for of, _ in results], [gradient for _, gradient in results])
        for n, leaf in enumerate(leaves):
            assert (leaf.grad is not None) == (n in wanted)
            assert leaf.grad is None or close(leaf.grad, want[1 + n], 1e-5)


def test_crossed_sum_of_one_tensor_twice_of_strided_rows_and_of_none(backend, device):
    """The first layer's x is x₀; and where nobody uses the sum, x₀'s gradient passes on."""
    given, dy, ds = draw_cross(9, 12, torch.float32, device)
    leaf = given[0].clone().requires_grad_()
    (got,) = torch.autograd.grad(crossed_sum(leaf, given[1], leaf, given[3]), leaf, (dy, ds))
    want = exact_cross([given[0], given[1], given[0], given[3]], dy, ds)
    assert close(got, want[1] + want[3], 1e-6)
    _, x0 = crossed_sum(leaf, given[1], leaf, given[3])
    assert torch.equal(torch.autograd.grad(x0, leaf, ds)[0], ds)
    apart = [torch.stack((t, t), 1)[:, 0].requires_grad_() for t in given[:3]]
    assert apart[0].stride() == (24, 1)
    y, _ = crossed_sum(*apart, given[3])
    found = [y, *torch.autograd.grad(y, apart, dy.t().contiguous().t())]
    assert all(close(got, want, 1e-6) for got, want in zip(found, exact_cross(given, dy, None), strict=False))
    bias = given[3].clone().requires_grad_()
    crossed_sum(*(t[:0] for t in given[:3]), bias)[0].sum().backward()
    assert torch.equal(bias.grad, torch.zeros_like(bias))


def test_crossed_sum_has_the_same_bits_on_every_run(backend, device):
    given, dy, ds = draw_cross(500, 200, torch.bfloat16, device)

    def bits():
        leaves = [t.clone().requires_grad_() for t in given]
        return torch.autograd.grad(crossed_sum(*leaves), leaves, (dy, ds))

    assert all(torch.equal(a, b) for a, b in zip(bits(), bits(), strict=True))


# -------------------------------------------------------------------------------------------------- relu_gradient


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_relu_gradient_is_autograds(rows, columns, dtype, backend, device):
    draw = torch.Generator().manual_seed(rows * columns)
    h, dy = (torch.randn(rows, columns, generator=draw).to(device, dtype) for _ in range(2))
    y = torch.relu(h.requires_grad_())
    (want,) = torch.autograd.grad(y, h, dy)
    dh, db = relu_gradient(dy, y.detach())
    assert torch.equal(dh, want)
    assert dh.dtype == db.dtype == dtype
    # torch's own sum is of fp32 too, and rounded once.
    assert torch.allclose(db.double(), want.double().sum(0), rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_relu_gradient_of_nan_of_strided_rows_and_of_none(backend, device):
    y = torch.tensor([[float("nan"), 0.0, -0.0, 2.0]] * 2, device=device)
    dy = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], device=device).t()
    dh, db = relu_gradient(dy, y)
    assert dh.tolist() == [[1, 0, 0, 7], [2, 0, 0, 8]]
    assert db.tolist() == [3, 0, 0, 15]
    dh, db = relu_gradient(dy[:0], y[:0])
    assert (dh.shape, db.tolist()) == ((0, 4), [0, 0, 0, 0])


# -------------------------------------------------------------------------------------------------------- row_dot


def draw_product(rows, wide, columns, dtype, device):
    draw = torch.Generator().manual_seed(rows * wide)
    x, weight = torch.randn(rows, wide, generator=draw), torch.randn(columns, generator=draw)
    return x.to(device, dtype), weight.to(device), torch.randn(rows, generator=draw).to(device)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "wide", "columns"), [(1, 1, 1), (5, 16, 12), (37, 520, 515), (300, 130, 130)])
def test_row_dot_is_that_of_fp64_whatever_lies_behind(rows, wide, columns, dtype, backend, device):
    x, weight, dz = draw_product(rows, wide, columns, dtype, device)
    x[:, columns:] = float("nan")
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


def test_row_dot_of_frozen_tensors_of_strided_rows_and_of_none(backend, device):
    x, weight, dz = draw_product(6, 9, 9, torch.float32, device)
    apart = torch.stack((x, x), 1)[:, 0].requires_grad_()
    (dx,) = torch.autograd.grad(row_dot(apart, weight), apart, dz)
    assert torch.allclose(dx, torch.outer(dz, weight))
    leaf = weight.clone().requires_grad_()
    (dw,) = torch.autograd.grad(row_dot(x, leaf), leaf, dz)
    assert torch.allclose(dw, dz @ x, atol=1e-5)
    row_dot(x[:0], leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_row_dot_keeps_an_infinite_gradient_in_the_columns_that_count(backend, device):
    x, weight, dz = draw_product(3, 8, 5, torch.float32, device)
    dz[1] = float("inf")
    (dx,) = torch.autograd.grad(row_dot(x.requires_grad_(), weight), x, dz)
    assert dx[1, :5].isinf().all()
    assert torch.equal(dx[:, 5:], torch.zeros_like(dx[:, 5:]))


# ------------------------------------------------------------------------------------------------------------ all


@pytest.mark.parametrize(
    ("operator", "shapes", "sentence"),
    [
        (crossed_sum, [(2, 3, 4)] * 3 + [(4,)], r"x0, u and x must be \(B, N\) and bias \(N,\), got \(2, 3, 4\)"),
        (crossed_sum, [(2, 3), (2, 4), (2, 3), (3,)], r"x0, u and x must be \(B, N\) and bias \(N,\), got"),
        (crossed_sum, [(2, 3)] * 3 + [(4,)], r"x0, u and x must be \(B, N\) and bias \(N,\), got"),
        (relu_gradient, [(1, 4), (2, 4)], r"dy and y must be \(M, N\), got \(1, 4\) and \(2, 4\)"),
        (row_dot, [(6, 9), (10,)], r"x must be \(M, K\), and weight \(N,\) with N up to K, got \(6, 9\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(operator, shapes, sentence, backend, device):
    with pytest.raises(ValueError, match=rf"^{operator.__name__}: {sentence}"):
        operator(*(torch.ones(shape, device=device) for shape in shapes))


@pytest.mark.parametrize("rows", [1, 16, 17, 65_536])
@pytest.mark.parametrize("columns", [1, 3504, 10_000_000])
def test_every_row_is_of_one_part(rows, columns, device):
    how = cut(rows, columns, device)
    assert (how.parts - 1) * how.each < rows <= how.parts * how.each
    assert (how.blocks - 1) * how.columns < columns <= how.blocks * how.columns


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.xdist_group("compile cuda:90")
def test_rows_are_read_16_bytes_at_a_time():
    """Kernels with 1000 columns, of which 996 count for a head."""
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
