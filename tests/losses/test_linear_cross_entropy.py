"""linear_cross_entropy: what it costs, and what its options may not change."""

import pytest
import torch
import torch.nn.functional as F
from flat import linear_cross_entropy
from modes import NothingWaits, Watch

from tigon.losses import inputs
from tigon.losses.head.chunks import ValidCount
from tigon.ops.linear import chunk_size


def head(device, rows=300, H=16, V=60, dtype=torch.float32, ignored=0.25):
    x, weight = torch.randn(rows, H, device=device), torch.randn(V, H, device=device)
    target = torch.randint(0, V, (rows,), device=device)
    target[torch.rand(rows, device=device) < ignored] = -100
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target


def grads(loss, *inputs):
    return torch.autograd.grad(loss, inputs)


def test_logits_are_never_whole(backend, device):
    x, weight, target = head(device, rows=512, H=4, V=200)
    with Watch() as sizes:
        linear_cross_entropy(x, weight, target, chunk_bytes=1).backward()
    assert sizes.largest == 128 * 200
    with Watch() as sizes:
        F.cross_entropy(F.linear(x, weight), target).backward()
    assert sizes.largest == 512 * 200


def test_logits_take_the_place_of_an_fp32_sum(device, monkeypatch):
    """Two chunks and an fp32 dW are as large as one chunk and dW in bf16, which rounds once as well."""
    x, weight, target = head(device, rows=384, H=128, V=600, dtype=torch.bfloat16, ignored=0.0)
    for default in ("CHUNK_BYTES", "CPU_CHUNK_BYTES"):
        monkeypatch.setattr(chunk_size, default, 256 * 600 * 2)
    with Watch() as sizes:
        loss = linear_cross_entropy(x, weight, target)
    assert sizes.largest == 384 * 600
    whole = linear_cross_entropy(x, weight, target, chunk_bytes=10**9)
    assert torch.equal(*(torch.autograd.grad(each, weight)[0] for each in (loss, whole)))
    with Watch() as sizes:  # what is asked for is kept to
        linear_cross_entropy(x, weight, target, chunk_bytes=256 * 600 * 2)
    assert sizes.largest == 256 * 600
    with Watch() as sizes:  # beyond the trade
        linear_cross_entropy(torch.cat([x] * 2), weight, torch.cat([target] * 2))
    assert sizes.largest == 256 * 600
    sums = torch.zeros(600, 128, device=device)
    with Watch() as sizes:  # the sum is the caller's: nothing is spared
        linear_cross_entropy(x, weight, target, main_grad=sums)
    assert sizes.largest == 256 * 600
    monkeypatch.setenv("TIGON_CHUNK_BYTES", str(256 * 600 * 2))
    with Watch() as sizes:
        linear_cross_entropy(x, weight, target)
    assert sizes.largest == 256 * 600


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
    with Watch() as sizes:
        linear_cross_entropy(x, weight, target, num_valid=ValidCount(target)).backward()
    assert sizes.rows < 3 * 1024 / 4


def test_too_small_a_count_is_loud(backend, device):
    x, weight, target = head(device)
    assert linear_cross_entropy(x, weight, target, num_valid=5).isnan()


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


def test_main_grad_scale_does_not_wait(device, monkeypatch):
    monkeypatch.setattr(inputs, "checked_target", lambda name, target, *_: target)  # on a CPU it looks at the targets
    x, weight, target = head(device)
    with NothingWaits():
        linear_cross_entropy(
            x, weight, target, main_grad=torch.zeros_like(weight), main_grad_scale=0.5, num_valid=len(target)
        )


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
