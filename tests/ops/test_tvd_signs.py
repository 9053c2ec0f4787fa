"""tvd of many rows: what its backward keeps is two bits a class, in place of the inputs."""

import pytest
import torch
from ops_table import Case
from ops_table.divergence import TVD
from test_large import check_repeated

import tigon
from tigon.ops.divergence import divergence_reference, launches

FORMS = pytest.mark.parametrize("temperature", [None, 2.0], ids=["probabilities", "logits"])


@pytest.fixture(autouse=True)
def signs_of_small_inputs(monkeypatch):
    monkeypatch.setattr(launches, "SIGNED_ROWS", 4)
    monkeypatch.setattr(launches, "SIGNED_CLASSES", 16)


def pair(temperature, device, classes, dtype=torch.float32, rows=(2, 3)):
    a, b = (torch.randn(*rows, classes, device=device) for _ in "ab")
    if temperature is None:
        a, b = a.softmax(-1), b.softmax(-1)
        b[..., ::5] = a[..., ::5]  # a gradient of 0
    return a.to(dtype).requires_grad_(), b.to(dtype)


def expected(a, b, mask, temperature, upstream):
    x = a.detach().double().requires_grad_()
    form = "probabilities" if temperature is None else "logits"
    rows = divergence_reference(x, b.double(), mask, "tvd", form, 0.0, temperature or 1.0)
    rows.backward(upstream.double())
    return rows.detach(), x.grad


@FORMS
@pytest.mark.parametrize("classes", [16, 80, 2064])  # a quarter that is least, padded, beyond a block
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_from_signs(temperature, classes, dtype, device, triton_backend):
    a, b = pair(temperature, device, classes, dtype)
    mask = torch.tensor([[True, False, True], [True, True, True]], device=device)
    upstream = torch.randn(2, 3, device=device)
    rows = tigon.tvd(a, b, temperature=temperature, mask=mask, reduction="rows")
    (da,) = torch.autograd.grad(rows, a, upstream, retain_graph=True)
    assert torch.equal(da, torch.autograd.grad(rows, a, upstream)[0])
    want, dwant = expected(a, b, mask, temperature, upstream)
    torch.testing.assert_close(rows.double(), want, rtol=1e-5, atol=1e-6)
    unit = max(torch.finfo(dtype).eps, 2e-6)  # some roundings of fp32, and one of dtype
    torch.testing.assert_close(da.double(), dwant, rtol=unit, atol=unit * dwant.abs().max().item())
    assert torch.equal(da[0, 1], torch.zeros_like(da[0, 1]))
    if temperature is None:
        assert not da[..., ::5].any()
    with torch.no_grad():
        assert torch.equal(rows, tigon.tvd(a, b, temperature=temperature, mask=mask, reduction="rows"))


@FORMS
@pytest.mark.parametrize("gaps", [False, True], ids=["dense", "gaps"])
def test_a_row_has_the_same_bits_wherever_it_lies(temperature, gaps, device, triton_backend):
    inputs = {"forms": ("logits", "logits") if temperature else ("probabilities", "probabilities"), "masked": True}
    case = Case("small", (5, 80), {"temperature": temperature, "reduction": "rows"}, inputs)
    check_repeated(TVD, case, device, limit=2000, gaps=gaps)


@FORMS
def test_either_order_of_the_sums_is_right(temperature, device, triton_backend, monkeypatch):
    """Fewer rows are summed in another order: other bits, as near to the sum in fp64."""
    a, b = pair(temperature, device, 2064)
    want, _ = expected(a, b, None, temperature, torch.ones(2, 3, device=device))
    for least in (4, 7):
        monkeypatch.setattr(launches, "SIGNED_ROWS", least)
        rows = tigon.tvd(a, b, temperature=temperature, reduction="rows")
        torch.testing.assert_close(rows.double(), want, rtol=1e-6, atol=0.0)


@FORMS
def test_what_is_kept(temperature, device, triton_backend):
    """Neither the teacher nor, of probabilities, the student; a byte for four classes."""
    a, b = pair(temperature, device, 256)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        tigon.tvd(a, b, temperature=temperature)
    assert sorted(t.shape for t in kept if t.dtype == torch.uint8) == [(6, 64)]
    assert [t.data_ptr() for t in kept if t.shape == a.shape] == ([] if temperature is None else [a.data_ptr()])


@FORMS
@pytest.mark.parametrize("reduction", tigon.ops.divergence.REDUCTIONS)
def test_all_reductions_and_one_upstream_gradient(temperature, reduction, device, triton_backend, monkeypatch):
    a, b = pair(temperature, device, 48)
    y = tigon.tvd(a, b, temperature=temperature, reduction=reduction)
    (from_signs,) = torch.autograd.grad(y.sum(), a)
    monkeypatch.setattr(launches, "SIGNED_ROWS", 1 << 40)
    y = tigon.tvd(a, b, temperature=temperature, reduction=reduction)
    torch.testing.assert_close(from_signs, torch.autograd.grad(y.sum(), a)[0], rtol=1e-5, atol=1e-7)


def test_rows_that_lie_elsewhere_keep_the_inputs(device, triton_backend):
    """Rows that begin between boundaries go the other way, and those of a wider tensor at boundaries do not."""
    a, b = pair(None, device, 64, rows=(6,))
    wide = torch.cat((a.detach(), a.detach()), 1).requires_grad_()
    for x, kept in ((wide[:, :48], True), (wide[:, 1:49], False), (wide[:, :47], False)):
        target = b[:, : x.shape[1]]
        rows = tigon.tvd(x, target, reduction="rows")
        assert (any(t is not None and t.dtype == torch.uint8 for t in rows.grad_fn.saved_tensors)) == kept
        upstream = torch.randn(6, device=device)
        (dx,) = torch.autograd.grad(rows, x, upstream)
        torch.testing.assert_close(dx.double(), expected(x, target, None, None, upstream)[1])


@FORMS
def test_compiles(temperature, device, triton_backend):
    a, b = pair(temperature, device, 48, rows=(6,))
    compiled = torch.compile(tigon.tvd, fullgraph=True, dynamic=True, backend="aot_eager")
    (da,) = torch.autograd.grad(compiled(a, b, temperature=temperature), a)
    assert torch.equal(da, torch.autograd.grad(tigon.tvd(a, b, temperature=temperature), a)[0])
