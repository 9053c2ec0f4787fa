"""dW of few rows in fp16: the forward pass keeps the factors of its product, and the backward pass computes it."""

import flat
import pytest
import torch

import tigon
from tigon.fusion.memory.estimate import AllocationTracker
from tigon.kernels.dispatch import meta_as_gpu
from tigon.ops.linear import weight_gradient
from tigon.ops.linear.weight_gradient import Late, late, parts, places

# 67 classes: rows of logits are padded.
ROWS, H, V = 24, 32, 67


def inputs(device, dtype=torch.float16):
    draw = torch.Generator().manual_seed(5)
    normal = lambda *shape, scale=1.0: (torch.randn(*shape, generator=draw) * scale).to(device, torch.float16)  # noqa: E731
    x, weight = normal(ROWS, H), normal(V, H, scale=H**-0.5)
    others = normal(ROWS, H), normal(V, H, scale=H**-0.5)
    target = torch.randint(V, (ROWS,), generator=draw)
    target[::5] = -100
    return [x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()], target.to(device), others


def loss_of(name, leaves, target, others, chunks):
    x, weight = leaves
    of_sequences = x.view(4, ROWS // 4, H), weight, target.view(4, -1)
    lengths = (target.view(4, -1) != -100).sum(1).tolist()
    acc = torch.promote_types(x.dtype, torch.float32)
    if name == "mean":
        return tigon.linear_cross_entropy(x, weight, target, chunks=chunks)
    if name == "sum":
        return (
            tigon.linear_cross_entropy(x, weight, target, config=tigon.CrossEntropy(reduction="sum"), chunks=chunks)
            / 1000
        )
    if name == "compact":
        return tigon.linear_cross_entropy(
            x, weight, target, chunks=tigon.losses.ChunkOptions(valid_tokens=sum(lengths))
        )
    if name == "distill":
        return flat.distill(x, weight, *(t.to(x.dtype) for t in others), loss_type="jsd")[0]
    if name == "orpo":
        return flat.orpo(*of_sequences, beta=0.3, num_valid=lengths)[0]
    if name == "dpo":
        ref = [t.to(x.dtype) for t in others]
        return flat.dpo(*of_sequences, ref_x=ref[0].view(4, -1, H), ref_weight=ref[1], beta=0.3)[0]
    advantages = torch.linspace(-1, 1, 4, device=x.device).to(acc)
    return flat.grpo(*of_sequences, advantages=advantages, num_valid=lengths)[0]


LOSSES = ["mean", "sum", "compact", "distill", "orpo", "dpo", "grpo"]


@pytest.fixture
def made(monkeypatch):
    found = []
    monkeypatch.setattr(weight_gradient, "places", lambda *a: found.append(places(*a)) or found[-1])
    return found


@pytest.mark.parametrize(
    ("name", "upstream"), [*((name, -(2.0**12)) for name in LOSSES), ("mean", 1.0), ("grpo", 2.0**12), ("dpo", 2.0**-6)]
)
def test_gradients_are_as_exact_as_eager_codes(name, upstream, backend, device, made):
    """In fp16 with an upstream gradient of the size that a loss scale has, and in fp64 by the references."""
    walk = tigon.losses.ChunkOptions()
    leaves, target, others = inputs(device)
    loss = loss_of(name, leaves, target, others, walk)
    assert any(late(*pair) for pair in made), "the forward pass keeps the factors"
    found = torch.autograd.grad(loss, leaves, torch.full_like(loss, upstream))
    assert [g.dtype for g in found] == [torch.float16] * 2
    exact, target, others = inputs(device, torch.float64)
    with tigon.use_backend("torch"):
        loss = loss_of(name, exact, target, others, walk)
        truth = torch.autograd.grad(loss, exact, torch.full_like(loss, upstream))
    for a, b in zip(found, truth, strict=True):
        assert (a.double() - b).norm() < 2.5e-3 * b.norm() + 2.0**-25 * b.numel() ** 0.5
    assert truth[1].norm() > 0


@pytest.mark.parametrize("name", LOSSES)
def test_a_kept_graph_goes_backward_again(name, backend, device, made):
    leaves, target, others = inputs(device)
    loss = loss_of(name, leaves, target, others, tigon.losses.ChunkOptions())
    assert any(late(*pair) for pair in made)
    once = torch.autograd.grad(loss, leaves, torch.full_like(loss, 2.0**9), retain_graph=True)
    again = torch.autograd.grad(loss, leaves, torch.full_like(loss, 2.0**9), retain_graph=True)
    last = torch.autograd.grad(loss, leaves, torch.full_like(loss, 2.0**9))
    for a, b, c in zip(once, again, last, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("upstream", [float("nan"), 0.0])
def test_what_is_not_finite_stays_so(upstream, backend, device):
    leaves, target, others = inputs(device)
    loss = loss_of("mean", leaves, target, others, tigon.losses.ChunkOptions())
    _, dw = torch.autograd.grad(loss, leaves, torch.full_like(loss, upstream))
    assert bool(dw.isnan().all()) if upstream != 0.0 else not dw.any()


def test_where_nothing_counts_the_gradient_is_zero(backend, device):
    leaves, target, others = inputs(device)
    loss = loss_of("mean", leaves, torch.full_like(target, -100), others, tigon.losses.ChunkOptions())
    _, dw = torch.autograd.grad(loss, leaves)
    assert not dw.any()


def test_only_few_rows_of_one_chunk_in_fp16_are_late(device):
    def found(dtype, rows):
        dw, more = places(torch.empty(V, H, dtype=dtype, device=device), dtype, True, 1 << 20, True, rows)
        return late(dw, more), parts(dw, more)

    factors, sums = found(torch.float16, 2 * H)
    assert isinstance(sums, Late)
    assert [t.shape for t in factors] == [(2 * H, V), (2 * H, H)]
    for dtype, rows in ((torch.float16, 2 * H + 1), (torch.float16, 0), (torch.bfloat16, 4), (torch.float32, 4)):
        factors, sums = found(dtype, rows)
        assert factors is None
        assert [t.shape for t in sums] == [(V, H)]


def test_the_peak_is_that_of_the_result():
    """Without a GPU, on the shape of a policy's step: 64 tokens of a head of 594 MiB."""
    S, T, H, V = 16, 4, 2048, 151936
    x = torch.empty(S, T, H, device="meta", dtype=torch.float16, requires_grad=True)
    weight = torch.empty(V, H, device="meta", dtype=torch.float16, requires_grad=True)
    target = torch.empty(S, T, device="meta", dtype=torch.int64)
    with meta_as_gpu(), AllocationTracker() as books:
        loss, _ = flat.grpo(x, weight, target, advantages=torch.empty(S, device="meta"), num_valid=[T] * S)
        torch.autograd.grad(loss, (x, weight))
    dlogits, dw = S * T * V * 2, V * H * 2
    assert dw + dlogits <= books.peak.total <= dw + dlogits + 2**21
