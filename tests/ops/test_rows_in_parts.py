"""Few wide rows in parts, one for each of several programs: what whole rows give, whatever a part holds."""

import pytest
import torch
from flat import cross_entropy
from numerics import check
from ops_table.divergence import JSD, KL_DIV, TVD

import tigon
from tigon.kernels import find_sum_parts
from tigon.kernels import row_parts as parts_module
from tigon.kernels import rows as row_module
from tigon.ops.cross_entropy import cross_entropy_rows
from tigon.ops.cross_entropy import launches as of_cross_entropy
from tigon.ops.cross_entropy.reference import rows_reference
from tigon.ops.logprob import logprob_reference

PART, ROWS = 256, 4
INF, NAN, LEAST = float("inf"), float("nan"), torch.finfo(torch.float32).min
# Whole parts; a last one that is not, of rows that begin anywhere.
WIDTHS = [1024, 1001]


@pytest.fixture(autouse=True)
def _small(monkeypatch, triton_backend):
    """Narrow rows in narrow parts, for a device of 12 multiprocessors."""
    monkeypatch.setattr(parts_module, "PART", PART)
    monkeypatch.setattr(parts_module, "WIDE", 256)
    monkeypatch.setattr(parts_module, "multiprocessors", lambda _: 12)
    monkeypatch.setattr(of_cross_entropy, "multiprocessors", lambda _: 12)
    monkeypatch.setattr(row_module, "WHOLE", 512)
    for width in WIDTHS:
        assert find_sum_parts(ROWS, width, torch.device("cpu")).number == 4


@pytest.mark.parametrize("columns", [513, 1000, 1024, 4099])
def test_parts_hold_every_column_once(columns):
    for rows in range(1, 25):
        number, width, most = find_sum_parts(rows, columns, torch.device("cpu"))
        assert 1 < number <= most
        assert width % PART == 0
        assert (number - 1) * width < columns <= number * width
    assert find_sum_parts(25, columns, torch.device("cpu")) is None


def test_narrow_rows_are_left_whole():
    assert find_sum_parts(1, 256, torch.device("cpu")) is None
    assert find_sum_parts(1, 512, torch.device("cpu"), 2) is None
    assert find_sum_parts(1, 513, torch.device("cpu"), 2) is not None


def test_what_bounds_the_parts_does_not_follow_from_the_rows():
    """It is a constant of the kernels."""
    assert {find_sum_parts(rows, 1024, torch.device("cpu")).most for rows in range(1, 25)} == {4}


# ------------------------------------------------------------------------------------------------------- divergences

KINDS = {
    "kl": (KL_DIV, {}), "kl to probabilities": (KL_DIV, {"log_target": False}), "forward": (JSD, {"beta": 0.0}),
    "reverse": (JSD, {"beta": 1.0}), "jsd": (JSD, {"beta": 0.3}), "tvd": (TVD, {}),
}  # fmt: skip
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
OF_LOGITS = pytest.mark.parametrize("kind", [k for k in KINDS if k != "kl to probabilities"])


def given(kind, logits, z):
    """A side of a divergence from its logits."""
    if logits:
        return z
    return z.softmax(-1) if kind == "tvd" else z.log_softmax(-1)


@EVERY_KIND
@pytest.mark.parametrize("logits", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_divergences(width, logits, kind, device):
    op, options = KINDS[kind]
    if logits:
        if kind == "kl to probabilities":
            return
        options = {**options, "temperature": 1.5}
    a, b = (2 * torch.randn(ROWS, width, device=device) for _ in range(2))
    a[:, ::PART] += 8.0  # a part's own maximum differs from the row's
    b[:, 1 :: 2 * PART] += 5.0
    a, b = given(kind, logits, a), given(kind, logits, b)
    b = b.exp() if kind == "kl to probabilities" else b
    mask = torch.arange(ROWS, device=device) != 1
    op_options = {"reduction": "rows", **options}
    check(op.public, op.reference, a, b, mask, eager=op.eager, grad=(0,), roundings=8, **op_options)


@OF_LOGITS
def test_a_part_without_a_class_adds_nothing(kind, device):
    """Its logits are all -inf, or all the least number, on one side or on both."""
    op, options = KINDS[kind]
    options = {"temperature": 1.0, "reduction": "rows", **options}
    a, b = torch.randn(ROWS, 1001, device=device), torch.randn(ROWS, 1001, device=device)
    for row, hidden in enumerate((-INF, LEAST, -INF, LEAST)):
        b[row, PART : 2 * PART] = hidden
        if row < 2 or kind not in ("kl", "forward"):
            a[row, PART : 2 * PART] = hidden
        a[row, 5:9], b[row, 5:9] = hidden, hidden
    with tigon.use_backend("torch"):
        wanted = op.public(a.double(), b.double(), None, **options)
    torch.testing.assert_close(op.public(a, b, None, **options).double(), wanted, rtol=2e-6, atol=1e-6)


@OF_LOGITS
@pytest.mark.parametrize("value", [NAN, INF])
def test_broken_rows_are_nan_and_spoil_no_other(value, kind, device):
    """In the row's first logit, in a later part's midst, in the row's edge."""
    op, options = KINDS[kind]
    for side in (0, 1):
        both = [torch.randn(ROWS, 1001, device=device) for _ in range(2)]
        for row, at in ((0, 0), (1, 700), (3, 1000)):
            both[side][row, at] = value
        rows = op.public(*both, None, temperature=1.0, reduction="rows", **options)
        assert rows.isnan().tolist() == [True, True, False, True]


@OF_LOGITS
@pytest.mark.parametrize("logits", [True, False])
def test_ignored_rows_are_not_read(logits, kind, device):
    op, options = KINDS[kind]
    options = {**options, "temperature": 1.0} if logits else options
    a, b = (given(kind, logits, torch.randn(ROWS, 1001, device=device)) for _ in range(2))
    mask = torch.tensor([True, False, True, False], device=device)
    a[~mask], b[~mask] = NAN, NAN
    a.requires_grad_()
    rows = op.public(a, b, mask, reduction="rows", **options)
    (da,) = torch.autograd.grad(rows.sum(), a)
    assert (rows[~mask] == 0).all()
    assert (da[~mask] == 0).all()
    assert rows[mask].isfinite().all()
    assert da[mask].isfinite().all()


@OF_LOGITS
def test_every_run_has_the_same_bits(kind, device):
    op, options = KINDS[kind]
    a, b = (torch.randn(ROWS * 1001 + 1, device=device)[1:].view(ROWS, 1001) for _ in range(2))
    runs = [op.public(a, b, None, temperature=1.0, reduction="rows", **options) for _ in range(2)]
    assert torch.equal(*runs)


# ----------------------------------------------------------------------------------------------------------- logprob


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "scale": 0.7, "temperature": 2.0}], ids=["plain", "options"])
@pytest.mark.parametrize("width", WIDTHS)
def test_logprob(width, options, device):
    x = 3 * torch.randn(ROWS, width, device=device)
    x[:, ::PART] += 4.0
    x[0, PART : 2 * PART], x[2, 2 * PART :] = -INF, LEAST
    target = torch.tensor([0, -100, 5, width - 1], device=device)
    x[3, width - 1] = 30.0
    x[1] = NAN
    names = {"ignore_index": -100, "temperature": 1.0, "softcap": 0.0, "scale": 1.0} | options
    exact = x.double().requires_grad_()
    wanted = logprob_reference(exact, target, *names.values())
    x.requires_grad_()
    found = tigon.logprob(x, target, **options)
    for name, ours, theirs in zip(found._fields, found, wanted, strict=True):
        if name == "mean_logit" and not options:  # LEAST and -inf are logits like others there
            ours, theirs = ours[3:], theirs[3:]
        torch.testing.assert_close(ours.double(), theirs.detach().double(), rtol=2e-6, atol=2e-6, msg=name)
    assert found.is_top1[3]
    ours, theirs = (
        torch.autograd.grad((r.logprob - 0.3 * r.entropy).sum(), t) for r, t in ((found, x), (wanted, exact))
    )
    torch.testing.assert_close(ours[0].double(), theirs[0], rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------------------------------- cross entropy

OPTIONS = {
    "plain": {}, "softcap": {"softcap": 5.0, "scale": 0.7},
    "every option": {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "scale": 0.7},
}  # fmt: skip
EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@EVERY_OPTION
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_cross_entropy(width, weighted, options, device):
    x = 3 * torch.randn(ROWS, width, device=device)
    x[:, ::PART] += 4.0
    x[3, [5, PART + 5, width - 1]] = 40.0  # of equal logits in several parts the first is predicted
    x[2, PART : 2 * PART] = -20.0 if "label_smoothing" in options else LEAST
    x[1] = NAN
    target = torch.tensor([0, -100, 5, width - 1], device=device)
    weight = torch.rand(width, device=device) + 0.5 if weighted else None
    exact = x.nan_to_num().double().requires_grad_()
    with tigon.use_backend("torch"):
        wanted = cross_entropy(exact, target, weight=None if weight is None else weight.double(), **options)
    x.requires_grad_()
    loss, _, _, predicted = cross_entropy(x, target, weight=weight, details=True, **options)
    torch.testing.assert_close(loss.double(), wanted.detach(), rtol=2e-6, atol=2e-6)
    assert torch.equal(predicted, torch.where(target == -100, -1, x.detach().nan_to_num().argmax(-1)))
    assert predicted[3] == 5
    ours, theirs = torch.autograd.grad(loss, x), torch.autograd.grad(wanted, exact)
    torch.testing.assert_close(ours[0].double(), theirs[0], rtol=1e-5, atol=1e-7)


def test_rows_that_cannot_be_are_nan(device):
    """Without a class, with a NaN, with a target out of range."""
    x = torch.randn(ROWS, 1001, device=device)
    x[0], x[1, 700] = -INF, NAN
    loss = torch.empty(ROWS, device=device)
    target = torch.tensor([0, 0, 1001, 1000], device=device)
    cross_entropy_rows(x, target, loss, None, None, False, -100, 0.0, 0.0, 0.0, 1.0)
    assert loss.isnan().tolist() == [True, True, True, False]
    _, _, _, predicted = cross_entropy(x, target.clamp(max=1000), details=True)
    assert predicted[0] == 0


@EVERY_OPTION
@pytest.mark.parametrize("factor", ["none", "one", "of rows"])
def test_the_gradient_over_the_logits(factor, options, device, monkeypatch):
    """As for the chunks of a fused head: statistics in parts, then a gradient of many programs."""
    launched, launch = [], of_cross_entropy.launch
    monkeypatch.setattr(of_cross_entropy, "launch", lambda kernel, *a: launched.append(kernel) or launch(kernel, *a))
    numbers = {"label_smoothing": 0.0, "z_loss": 0.0, "softcap": 0.0, "scale": 1.0} | options
    x = 3 * torch.randn(ROWS, 1001, device=device)
    target = torch.tensor([0, -100, 5, 1000], device=device)
    times = {"none": None, "one": torch.tensor(0.3), "of rows": torch.rand(ROWS)}[factor]
    times = None if times is None else times.to(device)
    wide = None if times is None else times.double()
    wanted, gradient = rows_reference(x.double(), target, wide, True, -100, *numbers.values())
    loss = torch.empty(ROWS, device=device)
    cross_entropy_rows(x, target, loss, None, times, True, -100, *numbers.values())
    torch.testing.assert_close(loss.double(), wanted, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(x.double(), gradient, rtol=1e-5, atol=1e-7)
    assert of_cross_entropy._cross_entropy_grad_kernel not in launched
    assert launched
