"""Rows that begin or end between 16-byte boundaries: the same results, from memory that belongs to the rows alone."""

import pytest
import torch
from flat import cross_entropy
from torch import Tensor

import tigon
from tigon.kernels import HAS_TRITON, INTERPRET, jit, tl, uneven
from tigon.kernels import rows as row_module
from tigon.kernels.tiles.edges import align, edges, split
from tigon.ops.cross_entropy.launches import cross_entropy_rows
from tigon.ops.cross_entropy.reference import rows_reference
from tigon.ops.shard_statistics import columns, shard_statistics

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")

# Every remainder of 8, of 4, and 16 bytes that are no multiple of 16 numbers.
WIDTHS = [1001, 1006, 1016, 2055]
# Where the first row begins, and how many numbers lie between two rows.
PLACES = [(0, 0), (1, 0), (3, 1), (8, 8), (7, 6)]


@pytest.fixture(autouse=True)
def _apart(monkeypatch):
    """Rows of these widths are left whole where that is faster. Wider rows would tell no more, and take longer."""
    monkeypatch.setattr(row_module, "WHOLE", 512)


def _placed(rows: Tensor, offset: int, gap: int) -> tuple[Tensor, Tensor]:
    """The rows in the midst of a larger storage, and that storage, which holds 7 everywhere else."""
    M, N = rows.shape
    storage = torch.full((offset + M * (N + gap) + 32,), 7.0, dtype=rows.dtype, device=rows.device)
    placed = storage.as_strided((M, N), (N + gap, 1), offset)
    placed.copy_(rows)
    return placed, storage


def _outside(rows: Tensor, storage: Tensor) -> Tensor:
    free = torch.ones_like(storage, dtype=torch.bool)
    free.as_strided(rows.shape, rows.stride(), rows.storage_offset()).fill_(False)
    return storage[free]


def _rounded(dtype: torch.dtype) -> dict[str, float]:
    """One rounding of a result, beside the last digits of its sums in fp32."""
    return {"rtol": {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6}[dtype], "atol": 1e-7}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("offset", "gap"), PLACES)
def test_every_column_is_in_the_body_or_at_an_edge_and_none_beyond(dtype, offset, gap, device):
    @jit
    def count_kernel(x_ptr, N, stride, BLOCK: tl.constexpr):
        row_ptr = x_ptr + tl.program_id(0) * stride
        head, body = split(row_ptr, N)
        at = align(row_ptr, head) + tl.arange(0, BLOCK)
        inside = tl.arange(0, BLOCK) < body
        count = tl.load(at, mask=inside, other=0.0).to(tl.float32) + 1.0
        tl.store(at, count.to(x_ptr.dtype.element_ty), mask=inside)
        columns, real = edges(row_ptr, head, body, N)
        count = tl.load(row_ptr + columns, mask=real, other=0.0).to(tl.float32) + 1.0
        tl.store(row_ptr + columns, count.to(x_ptr.dtype.element_ty), mask=real)

    for N in (1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 33, 40):
        rows, storage = _placed(torch.zeros(9, N, dtype=dtype, device=device), offset, gap)
        count_kernel[(9,)](rows, N, rows.stride(0), 64)
        assert (rows == 1).all(), N
        assert (_outside(rows, storage) == 7).all(), N


def test_which_rows_are_uneven(monkeypatch):
    def at(N: int, offset: int = 0, gap: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return _placed(torch.zeros(3, N, dtype=dtype), offset, gap)[0]

    even = [at(640), at(640, gap=16), at(640, offset=8)]
    assert not any(uneven(x) for x in even)
    odd = [at(641), at(648), at(640, gap=1), at(640, offset=1), at(641, gap=15), at(642, dtype=torch.float32)]
    assert all(uneven(x) for x in odd)
    # All rows that are moved together must lie alike.
    assert uneven(at(641), at(641), at(641, 8))
    assert uneven(at(641, 1), at(641, 9))
    assert not any(uneven(at(641), x) for x in (at(641, 1), at(641, gap=15), at(641).float()))
    # Narrow rows are left whole.
    assert not any(uneven(x) for x in (at(511), at(511, gap=1)))
    monkeypatch.undo()
    assert uneven(at(4097))
    assert uneven(at(641, gap=15))
    assert not uneven(at(4095))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("offset", "gap"), PLACES)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "softcap": 5.0}], ids=["plain", "options"])
def test_cross_entropy(options, offset, gap, dtype, device):
    for N in WIDTHS:
        target = torch.tensor([0, N - 1, N // 2, -100, 5], device=device)
        x, _ = _placed(torch.randn(5, N, device=device).to(dtype) * 3, offset, gap)
        exact = x.double().requires_grad_()
        with tigon.use_backend("torch"):
            wanted = cross_entropy(exact, target, reduction="none", **options)
        wanted.sum().backward()
        x = x.detach().requires_grad_()
        with tigon.use_backend("triton"):
            loss, _, _, predicted = cross_entropy(x, target, reduction="none", details=True, **options)
            (dx,) = torch.autograd.grad(loss.sum(), x)
        torch.testing.assert_close(loss.double(), wanted.detach(), rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(dx.double(), exact.grad, **_rounded(dtype))
        assert (predicted == torch.where(target == -100, -1, x.argmax(-1))).all()


@pytest.mark.parametrize(("offset", "gap"), PLACES)
@pytest.mark.parametrize("inplace", [True, False], ids=["inplace", "chunk"])
def test_cross_entropy_in_place_writes_to_its_rows_alone(inplace, offset, gap, device):
    """Both kernels that write the gradient over the logits: `inplace=True`, and the chunks of a fused head."""
    for N in WIDTHS:
        target = torch.tensor([0, N - 1, -100, 3, N - 9, 8, 1], device=device)
        logits = torch.randn(7, N, device=device).bfloat16()
        x, storage = _placed(logits, offset, gap)
        loss, wanted = rows_reference(logits.double(), target, None, True, -100, 0.0, 0.0, 0.0, 1.0)
        with tigon.use_backend("triton"):
            if inplace:
                x.requires_grad_()
                found = cross_entropy(x, target, reduction="none", inplace=True)
                found.sum().backward()
            else:
                found = torch.empty(7, device=device)
                cross_entropy_rows(x, target, found, None, None, True, -100, 0.0, 0.0, 0.0, 1.0)
        torch.testing.assert_close(found.double(), loss, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(x.detach().double(), wanted, **_rounded(torch.bfloat16))
        assert (_outside(x.detach(), storage) == 7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("offset", "gap"), PLACES)
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "temperature": 0.7}], ids=["plain", "options"])
def test_logprob(options, offset, gap, dtype, device):
    for N in WIDTHS:
        target = torch.tensor([0, N - 1, N // 2, -100, 5], device=device)
        x, _ = _placed(torch.randn(5, N, device=device).to(dtype) * 3, offset, gap)
        exact = x.double().requires_grad_()
        with tigon.use_backend("torch"):
            wanted = tigon.logprob(exact, target, **options)
        upstream = torch.randn(2, 5, device=device)
        (wanted.logprob * upstream[0] + wanted.entropy * upstream[1]).sum().backward()
        x = x.detach().requires_grad_()
        with tigon.use_backend("triton"):
            found = tigon.logprob(x, target, **options)
            (dx,) = torch.autograd.grad((found.logprob * upstream[0] + found.entropy * upstream[1]).sum(), x)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a.detach().double(), b.detach().double(), rtol=1e-5, atol=2e-5)
        # Its terms may cancel: then their digits in fp32 count.
        torch.testing.assert_close(dx.double(), exact.grad, rtol=_rounded(dtype)["rtol"], atol=3e-6)


DIVERGENCES = [
    (tigon.kl_div, {"temperature": 0.8}),
    (tigon.jsd, {"temperature": 0.8, "beta": 0.3}),
    (tigon.tvd, {"temperature": 2.0}),
    (tigon.kl_div, {"log_target": True}),
    (tigon.kl_div, {"log_target": False}),
    (tigon.jsd, {"beta": 1.0}),
    (tigon.tvd, {}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("offset", "gap"), PLACES)
def test_divergences(offset, gap, dtype, device):
    for op, options in DIVERGENCES:
        for N in WIDTHS[::2]:
            a, b = torch.randn(2, 5, N, device=device) * 3
            if "temperature" not in options:
                a, b = (z.log_softmax(-1) for z in (a, b))
                a = a.exp() if op is tigon.tvd else a
                b = b.exp() if op is tigon.tvd or options.get("log_target") is False else b
            a, b = (_placed(z.to(dtype), offset, gap)[0] for z in (a, b))
            exact = a.double().requires_grad_()
            with tigon.use_backend("torch"):
                wanted = op(exact, b.double(), reduction="rows", **options)
            upstream = torch.randn(5, device=device)
            (wanted * upstream).sum().backward()
            a = a.detach().requires_grad_()
            with tigon.use_backend("triton"):
                found = op(a, b, reduction="rows", **options)
                (da,) = torch.autograd.grad((found * upstream).sum(), a)
            torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(da.double(), exact.grad, rtol=_rounded(dtype)["rtol"], atol=3e-6)


@pytest.mark.parametrize(("offset", "gap"), PLACES)
def test_statistics_of_a_shard(offset, gap, device):
    for N in WIDTHS:
        labels = torch.tensor([0, N - 1, N // 2], device=device)
        x, _ = _placed(torch.randn(3, N, device=device).bfloat16() * 3, offset, gap)
        found = []
        for backend in ("torch", "triton"):
            found.append(torch.empty(3, columns(True, True), device=device))
            with tigon.use_backend(backend):
                shard_statistics(x, labels, found[-1], 1.0, 0.0, 1.0, along=True, total=True)
        torch.testing.assert_close(found[1], found[0], rtol=2e-5, atol=1e-4)


def test_cross_entropy_in_place_by_programs_that_take_several_rows(device):
    """Rows beyond 64 KiB, more of them than programs in the interpreter."""
    N = 32775
    target = torch.tensor([0, N - 1, -100, 3, 8, 5, N - 9], device=device)
    logits = torch.randn(7, N, device=device).bfloat16()
    wanted_loss, wanted = rows_reference(logits.double(), target, None, True, -100, 0.0, 0.0, 0.0, 1.0)
    loss = torch.empty(7, device=device)
    with tigon.use_backend("triton"):
        cross_entropy_rows(logits, target, loss, None, None, True, -100, 0.0, 0.0, 0.0, 1.0)
    torch.testing.assert_close(loss.double(), wanted_loss, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(logits.double(), wanted, **_rounded(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("offset", "gap"), PLACES)
@pytest.mark.parametrize("options", [{}, {"scale": 0.5, "causal": True}], ids=["plain", "causal"])
def test_softmax(options, offset, gap, dtype, device):
    for N in WIDTHS:
        x, _ = _placed(torch.randn(5, N, device=device).to(dtype) * 3, offset, gap)
        dy, _ = _placed(torch.randn(5, N, device=device).to(dtype), offset, gap)
        with tigon.use_backend("torch"):
            wanted = tigon.softmax(x.double(), -1, **options)
        x = x.detach().requires_grad_()
        with tigon.use_backend("triton"):
            y = tigon.softmax(x, -1, **options)
            (dx,) = torch.autograd.grad(y, x, dy)
        torch.testing.assert_close(y.detach().double(), wanted, **_rounded(dtype))
        # From the result as it was stored: its rounding is not the gradient's.
        y, dy = y.detach().double(), dy.double()
        exact = options.get("scale", 1.0) * y * (dy - (y * dy).sum(-1, keepdim=True))
        torch.testing.assert_close(dx.double(), exact, **_rounded(dtype))


def test_softmax_of_few_wide_rows(device):
    """Rows in parts: the edges belong to the first part, and the last may be left without a column of the body."""
    for N in (32771, 36867):
        x = torch.randn(2, N, device=device).bfloat16().requires_grad_()
        dy = torch.randn(2, N, device=device).bfloat16()
        with tigon.use_backend("triton"):
            y = tigon.softmax(x, -1)
            (dx,) = torch.autograd.grad(y, x, dy)
        torch.testing.assert_close(y.detach().double(), torch.softmax(x.detach().double(), -1), **_rounded(x.dtype))
        y, dy = y.detach().double(), dy.double()
        torch.testing.assert_close(dx.double(), y * (dy - (y * dy).sum(-1, keepdim=True)), **_rounded(x.dtype))


@pytest.mark.parametrize("column", [0, 4, 5, 1000])
def test_extreme_numbers_at_the_edges(column, device):
    """The greatest number of a row, and a row of -inf but for one number, where the kernels take a row apart."""
    x = torch.randn(8, 1001, device=device).bfloat16()
    x[:, column] = 60.0
    x[3] = -torch.inf
    x[3, column] = -1e30
    x[5] = -torch.inf
    with tigon.use_backend("triton"):
        y = tigon.softmax(x, -1)
        target = torch.full((8,), column, device=device)
        loss, _, _, predicted = cross_entropy(x, target, reduction="none", details=True)
    kept = [0, 1, 2, 3, 4, 6, 7]
    torch.testing.assert_close(y[kept], torch.softmax(x[kept].float(), -1).bfloat16())
    assert y[5].isnan().all()
    assert not loss[5].isfinite()
    torch.testing.assert_close(loss[kept], torch.zeros(7, device=device), atol=1e-6, rtol=0)
    assert (predicted[kept] == column).all()
    assert predicted[5] == 0


@pytest.mark.skipif(not INTERPRET, reason="compared with kernels that a GPU would compile otherwise")
def test_rows_that_lie_alike_are_taken_apart(monkeypatch):
    """The kernels are given EDGES: without it no test above would see them."""
    from tigon.ops import cross_entropy, softmax

    asked = []
    for module in (cross_entropy.launches, softmax.launches):
        ask = module.uneven
        monkeypatch.setattr(module, "uneven", lambda *t, ask=ask: asked.append(ask(*t)) or asked[-1])
    x = torch.randn(3, 1001).bfloat16().requires_grad_()
    with tigon.use_backend("triton"):
        tigon.softmax(x, -1).sum().backward()
        tigon.cross_entropy(x, torch.zeros(3).long()).backward()
    assert asked == [True] * 3 or asked == [True] * 4
