"""cross_entropy where rows are ignored, logits are extreme and targets are wrong."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from flat import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import tigon
import tigon.ops.cross_entropy
import tigon.ops.cross_entropy.launches as launches_module
from tigon.ops.cross_entropy.reference import rows_reference


def logits_and_target(device, rows=6, classes=50):
    logits = 3 * torch.randn(rows, classes, device=device)
    target = torch.randint(0, classes, (rows,), device=device)
    target[1::3] = -100
    return logits.requires_grad_(), target


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_infinity_in_an_ignored_row_stays_there(smoothing, triton_backend, device):
    """Not so in eager's gradient, where an ignored row's 0 is multiplied by NaN."""
    logits, target = logits_and_target(device)
    with torch.no_grad():
        logits[1, 7] = torch.inf
        logits[4] = -torch.inf
    loss = cross_entropy(logits, target, label_smoothing=smoothing, z_loss=0.1)
    (gradient,) = torch.autograd.grad(loss, logits)
    kept = target != -100
    clean = logits[kept].detach().requires_grad_()
    expected = cross_entropy(clean, target[kept], label_smoothing=smoothing, z_loss=0.1)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient[kept], torch.autograd.grad(expected, clean)[0])
    assert not gradient[~kept].any()
    # What the losses of a head run where there are no kernels.
    _, rows = rows_reference(logits.detach(), target, None, True, -100, smoothing, 0.1, 0.0, 1.0)
    assert not rows[~kept].any()
    torch.testing.assert_close(rows[kept] / kept.sum(), gradient[kept])


def test_z_loss_is_not_weighted(backend, device):
    """Its mean is over rows, whatever the classes weigh, as in Liger-Kernel."""
    logits, target = logits_and_target(device)
    weight = 5 * torch.rand(50, device=device)
    valid = target != -100
    z = 0.1 * torch.logsumexp(logits, -1).square()[valid].mean()
    expected = F.cross_entropy(logits, target, weight) + z
    got = cross_entropy(logits, target, weight=weight, z_loss=0.1)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (got, expected)))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("classes", [50, 5000])  # rows that share a tile, rows beyond one
def test_details(classes, reduction, backend, device):
    logits, target = logits_and_target(device, 7, classes)
    with torch.no_grad():
        logits[2, 3 :: classes // 5 + 24] = 99.0  # the first of equals counts, in a tile (4096) and beyond
        logits[3] = -torch.inf
        logits[3, 5] = 0.0
        target[2], target[3] = 3, 6
    options = {"reduction": reduction, "z_loss": 0.1}
    got = cross_entropy(logits, target, details=True, **options)
    valid = target != -100
    right = logits.argmax(-1) == target
    assert torch.equal(got.predicted, torch.where(valid, logits.argmax(-1), -1))
    torch.testing.assert_close(got.accuracy, right[valid].float().mean())
    assert got.accuracy > 0
    loss = cross_entropy(logits, target, **options)
    z = torch.where(valid, 0.1 * torch.logsumexp(logits, -1).square(), 0.0).detach()
    torch.testing.assert_close(got.z_loss, {"none": z, "sum": z.sum(), "mean": z.sum() / valid.sum()}[reduction])
    assert torch.equal(got.loss, loss)
    assert [t.requires_grad for t in got] == [True, False, False, False]
    assert torch.equal(*(torch.autograd.grad(x.sum(), logits)[0] for x in (got.loss, loss)))


def test_details_of_nothing_valid_and_of_masked_rows(backend, device):
    logits, target = logits_and_target(device)
    got = cross_entropy(logits, torch.full_like(target, -100), details=True, reduction="sum")
    assert got.loss == 0
    assert got.accuracy.isnan()
    assert (got.predicted == -1).all()
    nothing = cross_entropy(torch.full((1, 9), -torch.inf, device=device), target[:1] * 0, details=True)
    assert nothing.predicted == 0


def test_predicted_is_of_the_logits_and_not_of_their_softcap(backend, device):
    """tanh of large numbers is 1 for each of them."""
    logits, target = torch.zeros(1, 600, device=device), torch.zeros(1, dtype=torch.long, device=device)
    logits[0, 11], logits[0, 500] = 1e4, 2e4
    assert cross_entropy(logits, target, softcap=1.0, details=True).predicted == 500
    assert cross_entropy(logits[:, 490:], target, softcap=1.0, details=True).predicted == 10


class TestInplace:
    """inplace=True: the gradient lies where the logits lay."""

    def logits(self, device, make=lambda t: t):
        logits, target = logits_and_target(device)
        (expected,) = torch.autograd.grad(cross_entropy(logits, target, z_loss=0.1), logits)
        return make(logits.detach()).requires_grad_(), target, expected

    @pytest.mark.parametrize("layout", ["contiguous", "padded"])
    def test_gradient_over_the_logits(self, layout, device, triton_backend):
        def padded(t):
            return torch.cat((t, torch.full_like(t, 77)), 1)[:, :50]

        leaf, target, expected = self.logits(device, padded if layout == "padded" else torch.clone)
        logits = leaf * 1.0
        logits.retain_grad()
        loss = cross_entropy(logits, target, z_loss=0.1, inplace=True)
        loss.backward(retain_graph=True)
        assert torch.equal(logits.grad, expected)
        assert torch.equal(logits.detach(), expected)
        assert torch.equal(leaf.grad, expected)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_whoever_else_saved_the_logits_hears_of_it(self, device, triton_backend):
        leaf, target, _ = self.logits(device)
        logits = leaf * 1.0
        other = logits.square().sum()
        cross_entropy(logits, target, inplace=True).backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward()

    def test_not_where_rows_overlap_or_are_apart(self, device, triton_backend):
        row, target = torch.randn(1, 50, device=device), torch.randint(0, 50, (6,), device=device)
        for logits in (row.expand(6, 50), torch.randn(50, 6, device=device).t()):
            before, leaf = logits.clone(), logits.detach().requires_grad_()
            cross_entropy(leaf, target, inplace=True).backward()
            assert torch.equal(leaf.detach(), before)

    def test_forward_alone_touches_nothing(self, backend, device):
        leaf, target, _ = self.logits(device)
        before = leaf.detach().clone()
        loss = cross_entropy(leaf, target, inplace=True)
        assert torch.equal(leaf.detach(), before)
        if backend == "torch":
            loss.backward()
            assert torch.equal(leaf.detach(), before)

    def test_ignored_under_compile(self, device, triton_backend):
        leaf, target, expected = self.logits(device)
        before = leaf.detach().clone()
        compiled = torch.compile(
            lambda x, t: cross_entropy(x, t, z_loss=0.1, inplace=True), fullgraph=True, backend="aot_eager"
        )
        compiled(leaf, target).backward()
        torch.testing.assert_close(leaf.grad, expected)
        assert torch.equal(leaf.detach(), before)
        torch._dynamo.reset()


def test_two_launches_forward_and_one_backward(device, triton_backend, monkeypatch):
    """Every torch operator in between would cost a small call a launch; memory and views are all that is left."""
    logits, target = logits_and_target(device)
    upstream = torch.ones((), device=device)
    launches, operators = [], []
    # Counted, not made: the interpreter runs torch operators of its own.
    monkeypatch.setattr(launches_module, "launch", lambda kernel, *_: launches.append(kernel))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not func.is_view and func.overloadpacket not in (torch.ops.aten.new_empty, torch.ops.aten.empty):
                operators.append(func)
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(
        tigon.ops.cross_entropy, "checked_target", lambda name, target, *_: target
    )  # on a GPU it looks at nothing
    with Operators():
        loss = cross_entropy(logits, target)
        assert len(launches) == 2
        torch.autograd.grad(loss, logits, upstream)
    assert len(launches) == 3
    assert operators == []


def test_many_rows_are_reduced_in_two_steps(device, triton_backend):
    rows = launches_module.ONE_PROGRAM + 4001
    logits, target = logits_and_target(device, rows, 3)
    weight = torch.tensor([0.2, 1.0, 0.7], device=device)
    for options in ({"weight": weight}, {"weight": weight, "label_smoothing": 0.1}, {}):
        got = cross_entropy(logits, target, details=True, **options)
        torch.testing.assert_close(got.loss, F.cross_entropy(logits, target, **options))
    right = (logits.argmax(-1) == target).sum() / (target != -100).sum()
    torch.testing.assert_close(got.accuracy, right)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("programs", [0, 1])  # a multiprocessor; 0: one a row
def test_gradient_over_scratch_rows(programs, backwards, device, triton_backend, monkeypatch):
    """What linear losses do to a chunk of logits, where a row is longer than a tile and a program has several."""
    warps, depth, block, *_ = launches_module._grad_tile(5000, 0.0, 0.0)
    assert depth * block < 5000
    tile = (warps, depth, block, programs, "evict_last", "evict_first", backwards)
    monkeypatch.setattr(launches_module, "_grad_tile", lambda *_: tile)
    logits, target = logits_and_target(device, 7, 5000)
    expected = cross_entropy(logits, target, reduction="none", z_loss=0.1, label_smoothing=0.1)
    (gradient,) = torch.autograd.grad(expected.sum() / 2, logits)
    scratch, loss, half = logits.detach().clone(), torch.empty(7, device=device), torch.tensor(0.5, device=device)
    tigon.ops.cross_entropy.cross_entropy_rows(scratch, target, loss, None, half, True, -100, 0.1, 0.1, 0.0, 1.0)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(scratch, gradient)


def test_nothing_valid(backend, device):
    """0 for the mean, where torch has NaN, and for the sum, and no gradient in either."""
    logits, target = logits_and_target(device)
    target.fill_(-100)
    for reduction in ("mean", "sum"):
        logits.grad = None
        total = cross_entropy(logits, target, reduction=reduction)
        total.backward()
        assert total == 0
        assert logits.grad.abs().max() == 0


def test_minus_infinity_masks_a_class(backend, device):
    logits, target = logits_and_target(device)
    masked = logits.detach().clone()
    masked[:, 7:] = -torch.inf
    target = torch.where(target == -100, target, target % 7)
    masked.requires_grad_()
    loss = cross_entropy(masked, target)
    loss.backward()
    torch.testing.assert_close(loss, F.cross_entropy(masked[:, :7], target))
    assert masked.grad[:, 7:].abs().max() == 0


def test_divisor_may_be_a_tensor_on_the_device(backend, device):
    logits, target = logits_and_target(device)
    total = cross_entropy(logits, target, reduction="sum")
    for divisor in (16, torch.tensor(16, device=device), torch.tensor(16.0)):
        torch.testing.assert_close(cross_entropy(logits, target, divisor=divisor), total / 16)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("classes", [50, 2500])
@pytest.mark.parametrize("wrong", [2500, 2**40, -1])
def test_the_kernel_answers_a_wrong_target_with_nan(wrong, classes, weighted, device, triton_backend):
    """Nothing out of bounds is read or written: the row's loss and gradient are NaN, the others are right."""
    logits, target = logits_and_target(device, classes=classes)
    good = F.cross_entropy(logits, target, reduction="none").detach()
    target[2] = wrong
    options, weight = (-100, 0.0, 0.0, 0.0, 1.0), torch.ones(classes, device=device) if weighted else None
    loss, stats = torch.ops.tigon.cross_entropy_fwd(logits.detach(), target, weight, None, "none", False, *options)
    grad = torch.ops.tigon.cross_entropy_bwd(
        torch.ones_like(loss), logits.detach(), target, weight, stats, False, *options
    )
    others = [0, 1, 3, 4, 5]
    assert loss[2].isnan()
    assert grad[2].isnan().all()
    torch.testing.assert_close(loss[others], good[others])
    assert grad[others].isfinite().all()


@pytest.mark.parametrize("classes", [50, 2500])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_targets_of_a_dtype_that_does_not_hold_ignore_index(dtype, classes, device, triton_backend):
    """Where a tile of targets ends beyond the rows, what is filled in would count as a target."""
    logits = torch.randn(3, classes, device=device, requires_grad=True)
    target = torch.tensor([1, 2, 3], dtype=dtype, device=device)
    loss, expected = cross_entropy(logits, target, ignore_index=-1000), F.cross_entropy(logits, target.long())
    torch.testing.assert_close(loss, expected)
    (grad,), (wanted,) = torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits)
    torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("classes", [50, 2500])
def test_a_row_of_the_least_number_is_uniform(classes, backend, device):
    logits = torch.full((2, classes), torch.finfo(torch.float32).min, device=device, requires_grad=True)
    target = torch.zeros(2, dtype=torch.long, device=device)
    loss, expected = cross_entropy(logits, target), F.cross_entropy(logits, target)
    torch.testing.assert_close(loss, expected)
    (grad,), (wanted,) = torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits)
    torch.testing.assert_close(grad, wanted)


def test_a_target_elsewhere_gets_a_sentence(device):
    """A kernel that is launched without Triton's checks would read its address."""
    target = torch.zeros(3, dtype=torch.long, device="meta")
    with pytest.raises(ValueError, match="cross_entropy: target must be on the logits' device"):
        cross_entropy(torch.randn(3, 5, device=device), target)
    with pytest.raises(ValueError, match="linear_cross_entropy: target must be on the logits' device"):
        tigon.linear_cross_entropy(torch.randn(3, 4, device=device), torch.randn(5, 4, device=device), target)


def test_the_checked_mode_raises(device):
    """TIGON_CHECKS=1 looks at the targets, also where that stalls the device."""
    code = (
        "import torch, tigon\n"
        f"logits, target = torch.randn(3, 5, device='{device}'), torch.tensor([0, 5, 1], device='{device}')\n"
        "tigon.cross_entropy(logits, target)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TIGON_CHECKS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "cross_entropy: target must lie in [0, 5) or be ignore_index=-100, got 5." in done.stderr


def test_no_classes_at_all_and_a_head_without_columns(device):
    """Plain code takes them: an empty rank of an empty vocabulary, a head over no features."""
    nothing, none = torch.zeros(0, 0, device=device), torch.zeros(0, dtype=torch.long, device=device)
    assert cross_entropy(nothing, none) == 0
    assert tigon.logprob(nothing, none).logprob.shape == (0,)
    x, weight = (torch.zeros(n, 0, device=device, requires_grad=True) for n in (3, 5))
    target = torch.arange(3, device=device)
    loss = tigon.linear_cross_entropy(x, weight, target)
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(x, weight), target))
    loss.backward()
    assert x.grad.shape == (3, 0)
