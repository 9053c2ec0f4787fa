"""linear_cross_entropy: what it costs, and what its options may not change."""

import pytest
import torch
import torch.nn.functional as F
from flat import linear_cross_entropy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tigon.losses.head.chunks import ValidCount
from tigon.ops.linear import chunk_size


def head(device, rows=300, H=16, V=60, dtype=torch.float32, ignored=0.25):
    x, weight = torch.randn(rows, H, device=device), torch.randn(V, H, device=device)
    target = torch.randint(0, V, (rows,), device=device)
    target[torch.rand(rows, device=device) < ignored] = -100
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target


class Sizes(TorchDispatchMode):
    """The largest float tensor that is made, and the rows that matrix products are given."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor) and t.is_floating_point():
                self.largest = max(self.largest, t.numel())
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.rows += args[-2].shape[0]
        return out


def grads(loss, *inputs):
    return torch.autograd.grad(loss, inputs)


def test_logits_are_never_whole(backend, device):
    x, weight, target = head(device, rows=512, H=4, V=200)
    with Sizes() as sizes:
        linear_cross_entropy(x, weight, target, chunk_bytes=1).backward()
    assert sizes.largest == 128 * 200
    with Sizes() as sizes:
        F.cross_entropy(F.linear(x, weight), target).backward()
    assert sizes.largest == 512 * 200


def test_logits_take_the_place_of_an_fp32_sum(device, monkeypatch):
    """Two chunks and an fp32 dW are as large as one chunk and dW in bf16, which rounds once as well."""
    x, weight, target = head(device, rows=384, H=128, V=600, dtype=torch.bfloat16, ignored=0.0)
    for default in ("CHUNK_BYTES", "CPU_CHUNK_BYTES"):
        monkeypatch.setattr(chunk_size, default, 256 * 600 * 2)
    with Sizes() as sizes:
        loss = linear_cross_entropy(x, weight, target)
    assert sizes.largest == 384 * 600
    whole = linear_cross_entropy(x, weight, target, chunk_bytes=10**9)
    assert torch.equal(*(torch.autograd.grad(each, weight)[0] for each in (loss, whole)))
    with Sizes() as sizes:  # what is asked for is kept to
        linear_cross_entropy(x, weight, target, chunk_bytes=256 * 600 * 2)
    assert sizes.largest == 256 * 600
    with Sizes() as sizes:  # beyond the trade
        linear_cross_entropy(torch.cat([x] * 2), weight, torch.cat([target] * 2))
    assert sizes.largest == 256 * 600
    sums = torch.zeros(600, 128, device=device)
    with Sizes() as sizes:  # the sum is the caller's: nothing is spared
        linear_cross_entropy(x, weight, target, main_grad=sums)
    assert sizes.largest == 256 * 600
    monkeypatch.setenv("TIGON_CHUNK_BYTES", str(256 * 600 * 2))
    with Sizes() as sizes:
        linear_cross_entropy(x, weight, target)
    assert sizes.largest == 256 * 600


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunks_change_nothing(reduction, backend, device):
    x, weight, target = head(device)
    results = []
    for chunk_bytes in (1, None):
        loss = linear_cross_entropy(x, weight, target, reduction=reduction, chunk_bytes=chunk_bytes)
        results.append((loss, *grads(loss.sum(), x, weight)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_leaving_ignored_rows_out_changes_nothing(reduction, backend, device):
    x, weight, target = head(device, ignored=0.8)
    count = int((target != -100).sum())
    expected = F.cross_entropy(F.linear(x, weight), target, reduction=reduction)
    expected = (expected, *grads(expected.sum(), x, weight))
    for num_valid in (count, count + 7, ValidCount(target)):
        loss = linear_cross_entropy(x, weight, target, reduction=reduction, num_valid=num_valid, chunk_bytes=1)
        for a, b in zip((loss, *grads(loss.sum(), x, weight)), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_work_follows_the_valid_rows(backend, device):
    x, weight, target = head(device, rows=1024)
    target[100:] = -100
    with Sizes() as sizes:
        linear_cross_entropy(x, weight, target, num_valid=ValidCount(target)).backward()
    assert sizes.rows < 3 * 1024 / 4


def test_too_small_a_count_is_loud(backend, device):
    x, weight, target = head(device)
    assert linear_cross_entropy(x, weight, target, num_valid=5).isnan()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_valid(reduction, backend, device):
    x, weight, target = head(device)
    target.fill_(-100)
    for num_valid in (None, 0):
        loss = linear_cross_entropy(x, weight, target, reduction=reduction, num_valid=num_valid)
        assert loss == 0
        assert all(g.abs().max() == 0 for g in grads(loss, x, weight))


def test_the_environment_sets_the_budget(backend, device, monkeypatch):
    x, weight, target = head(device, rows=512, H=4, V=200)
    monkeypatch.setenv("TIGON_CHUNK_BYTES", "1")
    with Sizes() as sizes:
        linear_cross_entropy(x, weight, target)
    assert sizes.largest == 128 * 200


def test_fp32_accumulation_is_more_exact_over_many_chunks(backend, device):
    x, weight, target = head(device, rows=128 * 8, V=32, dtype=torch.bfloat16, ignored=0)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    (truth,) = grads(F.cross_entropy(F.linear(*exact), target), exact[1])
    error = {}
    for accumulate in ("fp32", "weight"):
        loss = linear_cross_entropy(x, weight, target, chunk_bytes=1, accumulate=accumulate)
        (dw,) = grads(loss, weight)
        assert dw.dtype == torch.bfloat16
        error[accumulate] = (dw.double() - truth).norm() / truth.norm()
    assert error["fp32"] < 0.75 * error["weight"]


def test_master_weights_under_autocast(backend, device):
    """fp32 leaves, bf16 products, fp32 gradients, as F.linear under autocast."""
    x, weight, target = head(device)
    with torch.autocast(device.type, torch.bfloat16):
        loss = linear_cross_entropy(x, weight, target)
        expected = F.cross_entropy(F.linear(x, weight).float(), target)
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-2)
    for a, b in zip(grads(loss, x, weight), grads(expected, x, weight), strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.02 * b.norm()


def test_a_weight_that_is_also_the_embedding(backend, device):
    """Tied weights: the gradients of both uses add up."""
    _, weight, target = head(device)
    tokens = torch.randint(0, 60, (300,), device=device)
    loss = linear_cross_entropy(F.embedding(tokens, weight), weight, target)
    expected = F.cross_entropy(F.linear(F.embedding(tokens, weight), weight), target)
    torch.testing.assert_close(grads(loss, weight), grads(expected, weight), rtol=1e-4, atol=1e-5)


def test_upstream_factors_reach_every_gradient(backend, device):
    x, weight, target = head(device)
    one = grads(linear_cross_entropy(x, weight, target), x, weight)
    scaled = grads(4 * linear_cross_entropy(x, weight, target), x, weight)
    for a, b in zip(one, scaled, strict=True):
        assert torch.equal(4 * a, b)
        assert a.abs().max() > 0


def test_a_gradient_is_the_callers(backend, device):
    """Gradients that are computed ahead of the backward pass are handed out once: writing to them harms nobody."""
    x, weight, target = head(device)
    loss = linear_cross_entropy(x, weight, target)
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.zero_()
    for a, b in zip(torch.autograd.grad(loss, (x, weight)), kept, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("upstream", [1.0, 0.25])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_weight_gradient_is_added_to_main_grad(reduction, upstream, backend, device):
    if backend == "triton" and device.type == "cpu" and (reduction == "mean") == (upstream == 1.0):
        pytest.skip("time in the interpreter is dear, and each of both is tried with another")
    x, weight, target = head(device)
    bias = torch.randn(60, device=device, requires_grad=True)
    expected = linear_cross_entropy(x, weight, target, bias=bias, reduction=reduction)
    dx, dw, db = grads(expected * upstream, x, weight, bias)
    kept = torch.randn_like(weight).detach()
    main_grad = kept.clone()
    for steps in (1, 2):
        loss = linear_cross_entropy(
            x, weight, target, bias=bias, reduction=reduction, chunk_bytes=1, main_grad=main_grad,
            main_grad_scale=upstream if steps == 1 else torch.tensor(upstream, device=device),
        )  # fmt: skip
        torch.testing.assert_close(loss, expected)
        found = torch.autograd.grad(loss * upstream, (x, weight, bias), allow_unused=True)
        assert found[1] is None
        torch.testing.assert_close(found[0], dx)
        torch.testing.assert_close(found[2], db)
        torch.testing.assert_close(main_grad, kept + steps * dw, rtol=1e-4, atol=1e-5)
    loss = linear_cross_entropy(x, weight, target, main_grad=main_grad)
    assert torch.autograd.grad(3 * loss, x)[0].isnan().all()


def test_main_grad_scale_may_be_rounded_another_way(device):
    x, weight, target = head(device)
    loss = linear_cross_entropy(x, weight, target, main_grad=torch.zeros_like(weight), main_grad_scale=0.3 / 7)
    assert torch.autograd.grad(0.3 * loss / 7, x)[0].isfinite().all()  # in fp32 the next number


def test_main_grad_of_a_head_that_is_trained_alone(device):
    x, weight, target = head(device)
    main_grad = torch.zeros_like(weight)
    linear_cross_entropy(x.detach(), weight, target, main_grad=main_grad).backward()
    assert weight.grad is None
    (dw,) = grads(linear_cross_entropy(x, weight, target), weight)
    torch.testing.assert_close(main_grad, dw)


class NothingFromTheHost(TorchDispatchMode):
    """Refuses tensors made of the host's numbers: on a GPU their copy waits for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ != "lift_fresh"
        return func(*args, **(kwargs or {}))


def test_main_grad_scale_does_not_wait(device):
    x, weight, target = head(device)
    with NothingFromTheHost():
        linear_cross_entropy(x, weight, target, main_grad=torch.zeros_like(weight), main_grad_scale=0.5)


def test_main_grad_is_left_alone_without_gradients(device):
    x, weight, target = head(device)
    main_grad = torch.zeros_like(weight)
    with torch.no_grad():
        linear_cross_entropy(x, weight, target, main_grad=main_grad)
    assert not main_grad.any()


@pytest.mark.parametrize(
    ("main_grad", "options", "message"),
    [
        (torch.zeros(60, 16).bfloat16(), {}, r"main_grad must be \(60, 16\) torch.float32 on cpu, got .*bfloat16"),
        (torch.zeros(16, 60).t(), {}, "main_grad must be contiguous"),
        (torch.zeros(60, 16), {"reduction": "none"}, "main_grad goes with reduction='mean' and 'sum'"),
    ],
)
def test_a_main_grad_that_does_not_fit_is_refused(main_grad, options, message):
    x, weight, target = head("cpu")
    with pytest.raises(ValueError, match=f"linear_cross_entropy: {message}"):
        linear_cross_entropy(x, weight, target, main_grad=main_grad, **options)


def test_compiled_code_leaves_out_what_talks_to_other_devices(device, process_group):
    """The graph breaks at the call, which then runs as it is; fullgraph=True says what the matter is."""
    x, weight, target = head(device)

    def loss_of(x, weight, group):
        return linear_cross_entropy(2 * x, weight, target, group=group) + 1

    torch._dynamo.reset()
    for group in (process_group.group.WORLD, None):
        compiled = torch.compile(loss_of, backend="eager")(x, weight, group)
        torch.testing.assert_close(compiled, loss_of(x, weight, None))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="collective operations are not traced"):
        torch.compile(loss_of, backend="eager", fullgraph=True)(x, weight, process_group.group.WORLD)
