"""kl_div, jsd and tvd: their identities, probabilities of 0, rows that do not count, logits that are large."""

import math

import pytest
import torch
import torch.nn.functional as F

import tigon


def kl_div(input, target, **options):
    """As jsd has it: of log-probabilities, and the mean over rows."""
    return tigon.kl_div(
        input, target, **{"reduction": "batchmean", "log_target": options.get("temperature") is None} | options
    )


EVERY = [kl_div, tigon.jsd, tigon.tvd]
OF_LOGITS = pytest.mark.parametrize("op", EVERY, ids=lambda op: op.__name__)
WIDTHS = [50, 9000]  # within one block, beyond


def pair(device, rows=6, classes=50):
    a, b = 2 * torch.randn(rows, classes, device=device), 2 * torch.randn(rows, classes, device=device)
    return a.requires_grad_(), b


@pytest.mark.parametrize("log_target", [True, False])
@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum"])
def test_same_as_torch(reduction, log_target, backend, device):
    a, b = (t.detach().log_softmax(-1) for t in pair(device))
    b = b if log_target else b.exp()
    options = {"reduction": reduction, "log_target": log_target}
    torch.testing.assert_close(tigon.kl_div(a, b, **options), F.kl_div(a, b, **options))


@OF_LOGITS
@pytest.mark.parametrize("classes", WIDTHS)
def test_logits_are_their_own_distributions(op, classes, backend, device):
    """Given logits or what they mean: the same loss; and a row's gradient along logits sums to zero."""
    a, b = pair(device, classes=classes)
    loss = op(a, b, temperature=2.0)
    as_given = F.softmax if op is tigon.tvd else F.log_softmax
    torch.testing.assert_close(loss, op(as_given(a / 2, -1), as_given(b / 2, -1)), rtol=1e-5, atol=1e-6)
    loss.backward()
    torch.testing.assert_close(a.grad.sum(-1), torch.zeros(6, device=device), rtol=0, atol=1e-6)


def test_beta_goes_from_one_kl_to_the_other(backend, device):
    a, b = (t.detach().log_softmax(-1) for t in pair(device))
    torch.testing.assert_close(tigon.jsd(a, b, beta=0.0), kl_div(a, b))
    torch.testing.assert_close(tigon.jsd(a, b, beta=1.0), kl_div(b, a))
    torch.testing.assert_close(tigon.jsd(a, b, beta=0.3), tigon.jsd(b, a, beta=0.7))


def test_as_far_apart_as_can_be(backend, device):
    """Disjoint supports: infinite KL, log 2 of JSD, 1 of TVD. Nothing is NaN, though most probabilities are 0."""
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0]], device=device)
    q = torch.tensor([[0.0, 0.0, 0.25, 0.75, 0.0]], device=device)
    assert tigon.kl_div(q.log(), p.log(), log_target=True) == torch.inf
    assert tigon.kl_div(q.log(), p) == torch.inf
    torch.testing.assert_close(tigon.jsd(q.log(), p.log()).item(), math.log(2))
    torch.testing.assert_close(tigon.tvd(q, p).item(), 1.0)


@OF_LOGITS
def test_classes_of_probability_zero_contribute_nothing(op, backend, device):
    """Logits of -inf on both sides are the same as no such class."""
    a, b = pair(device)
    hidden = torch.arange(50, device=device) >= 40
    masked = a.detach().masked_fill(hidden, -torch.inf).requires_grad_()
    loss = op(masked, b.masked_fill(hidden, -torch.inf), temperature=1.0)
    loss.backward()
    expected = op(a[:, :40], b[:, :40], temperature=1.0)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(masked.grad[:, :40], a.grad[:, :40])
    assert (masked.grad[:, 40:] == 0).all()


def test_log_probabilities_of_minus_infinity_contribute_nothing(backend, device):
    a, b = (t.detach() for t in pair(device))
    a[:, 40:] = b[:, 40:] = -torch.inf
    a, b = a.log_softmax(-1), b.log_softmax(-1)
    for op in (kl_div, lambda *x: tigon.jsd(*x, beta=0.4), lambda *x: tigon.jsd(*x, beta=1.0)):
        leaf = a.clone().requires_grad_()
        loss = op(leaf, b)
        loss.backward()
        torch.testing.assert_close(loss, op(a[:, :40], b[:, :40]))
        assert (leaf.grad[:, 40:] == 0).all()


@OF_LOGITS
@pytest.mark.parametrize("logits", [True, False])
def test_ignored_rows_are_not_read_and_do_not_count(op, logits, backend, device):
    a, b = pair(device)
    a, b = (a, b) if logits else (a.softmax(-1).log(), b.softmax(-1).log())
    a, b = (a, b) if logits or op is not tigon.tvd else (a.exp(), b.exp())
    options = {"temperature": 1.0 if logits else None}
    valid = torch.tensor([3, -100, 5, 1, -100, 0], device=device) != -100
    a = a.detach().masked_fill(~valid.unsqueeze(-1), torch.nan if backend == "triton" else 0.0).requires_grad_()
    kept = a.detach()[valid].requires_grad_()
    for reduction in ("batchmean", "mean", "sum"):
        loss = op(a, b, mask=valid, reduction=reduction, **options)
        expected = op(kept, b[valid], reduction=reduction, **options)
        torch.testing.assert_close(loss, expected)
    (grad,) = torch.autograd.grad(loss, a)
    torch.testing.assert_close(grad[valid], *torch.autograd.grad(expected, kept))
    assert (grad[~valid] == 0).all()
    rows = op(a, b, mask=valid, reduction="rows", **options)
    assert (rows[~valid] == 0).all()


@OF_LOGITS
def test_no_valid_row(op, backend, device):
    """0 for the means, where torch has NaN, and for the sum, and no gradient."""
    a, b = pair(device)
    options = {"temperature": 1.0, "mask": torch.zeros(6, dtype=torch.bool, device=device)}
    for reduction in ("batchmean", "mean", "sum"):
        a.grad = None
        total = op(a, b, reduction=reduction, **options)
        total.backward()
        assert total == 0
        assert a.grad.abs().max() == 0


@OF_LOGITS
@pytest.mark.parametrize("classes", WIDTHS)
def test_nan_is_seen(op, classes, backend, device):
    for side in (0, 1):
        both = [t.detach().clone() for t in pair(device, classes=classes)]
        both[side][2, 7] = torch.nan
        a = both[0].requires_grad_()
        rows = op(a, both[1], temperature=1.0, reduction="rows")
        rows.sum().backward()
        others = [0, 1, 3, 4, 5]
        assert rows[2].isnan()
        assert rows[others].isfinite().all()
        assert a.grad[2].isnan().any() or op is tigon.tvd  # whose slope is a sign, that of NaN 0 as in torch
        assert a.grad[others].isfinite().all()


def test_kl_of_log_probabilities_keeps_the_target_alone(device, triton_backend):
    """Its gradient is −p: the student's log-probabilities need not outlive the forward."""
    a, b = (t.detach().log_softmax(-1) for t in pair(device))
    a.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        loss = tigon.kl_div(a, b, reduction="sum", log_target=True)
    assert b.data_ptr() in saved
    assert a.data_ptr() not in saved
    loss.backward()
    torch.testing.assert_close(a.grad, -b.exp())


def test_a_teacher_that_would_learn_is_refused_only_where_it_would(backend, device):
    a, b = pair(device)
    b.requires_grad_()
    with pytest.raises(ValueError, match="target must not require a gradient"):
        tigon.jsd(a, b, temperature=1.0)
    with torch.no_grad():
        tigon.jsd(a, b, temperature=1.0)
    tigon.jsd(a, b.detach(), temperature=1.0).backward()


def test_a_mask_elsewhere_gets_a_sentence(device):
    x = torch.randn(3, 5, device=device)
    with pytest.raises(ValueError, match="kl_div: mask must be booleans on"):
        tigon.kl_div(x, x, mask=torch.ones(3, dtype=torch.bool, device="meta"))


@OF_LOGITS
def test_a_mask_is_read_where_it_lies(op, backend, device):
    """Every second element of a longer mask."""
    a, b = pair(device)
    mask = torch.tensor([True, False, True, True, False, True], device=device)
    longer = mask.repeat_interleave(2)
    longer[1::2] ^= True
    expected = op(a, b, temperature=1.0, mask=mask, reduction="rows")
    assert torch.equal(op(a, b, temperature=1.0, mask=longer[::2], reduction="rows"), expected)


def exact(op, a, b, temperature=1.0):
    """Rows and gradient in fp64, from whole log-probabilities."""
    a = a.double().requires_grad_()
    with tigon.use_backend("torch"):
        rows = op(a, b.double(), temperature=temperature, reduction="rows")
    return rows.detach(), *torch.autograd.grad(rows.sum(), a)


@OF_LOGITS
@pytest.mark.parametrize("classes", [50, 2500, 9000])  # one block, one fold of blocks, several
@pytest.mark.parametrize("sides", ["teacher", "both"])
def test_classes_masked_by_the_least_number_contribute_nothing(op, sides, classes, backend, device):
    """A finite mask, the larger part of a row, so that whole lanes have seen nothing else: their sums overflow."""
    a, b = (t.detach() for t in pair(device, classes=classes))
    least = torch.finfo(torch.float32).min
    b[:, : classes * 9 // 10] = least
    if sides == "both":
        a[:, : classes * 9 // 10] = least
    expected, gradient = exact(op, a, b)
    rows = op(a.requires_grad_(), b, temperature=1.0, reduction="rows")
    torch.testing.assert_close(rows.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(rows.sum(), a)[0].double(), gradient, rtol=1e-5, atol=1e-6)


HUGE = 3e38
EXTREMES = {
    "a student's logit": ({2: HUGE}, {}), "a student's mask": ({2: -HUGE}, {}), "a teacher's logit": ({}, {2: HUGE}),
    "a teacher's mask": ({}, {0: -HUGE}), "the same class": ({2: HUGE}, {2: HUGE}), "others": ({2: HUGE}, {3: HUGE}),
    "opposite signs": ({0: HUGE}, {0: -HUGE}), "both signs": ({2: HUGE, 3: -HUGE}, {}),
    "two alike": ({1: HUGE, 4: HUGE}, {}),
    "all large": (dict.fromkeys(range(6), HUGE), {}), "all masked": (dict.fromkeys(range(6), -HUGE), {}),
    "a large teacher": ({}, dict.fromkeys(range(6), HUGE)), "1e12 alike": (dict.fromkeys(range(6), 1e12), {}),
}  # fmt: skip


@OF_LOGITS
@pytest.mark.parametrize("extreme", EXTREMES)
def test_gradients_hold_up_to_the_end_of_fp32(op, extreme, backend, device):
    """So do the values of jsd and tvd. KL's is a difference of logits, and has the range that the limits page says."""
    a, b = torch.tensor([[0.5, -1.0, 2.0, 0.0, 1.0, -0.5], [1.0, 0.0, -0.5, 0.3, 2.0, -2.0]], device=device).split(1)
    a, b = a.clone(), b.clone()
    for side, numbers in zip((a, b), EXTREMES[extreme], strict=True):
        for column, number in numbers.items():
            side[0, column] = number
    for temperature in (1.0, 2.0):
        expected, gradient = exact(op, a, b, temperature)
        leaf = a.clone().requires_grad_()
        rows = op(leaf, b, temperature=temperature, reduction="rows")
        got = torch.autograd.grad(rows.sum(), leaf)[0].double()
        torch.testing.assert_close(got, gradient, rtol=1e-5, atol=1e-6)
        if op is not kl_div:
            torch.testing.assert_close(rows.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1e4, 1e6, 1e30, 2e38])
def test_the_range_of_a_kl_of_logits(size, backend, device):
    """A few roundings of the largest difference between both sides' logits: here a constant, or that of one class."""
    a, b = (t.detach() for t in pair(device))
    one = torch.where(torch.arange(50, device=device) == 3, size, a)
    for student in [one, a + size] if size < 1e30 else [one]:
        expected, _ = exact(kl_div, student, b)
        rows = tigon.kl_div(student, b, temperature=1.0, reduction="rows").double()
        assert bool(((rows - expected).abs() <= 2**-21 * size).all())
