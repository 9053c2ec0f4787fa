"""dW's sum in fp32 that shares the memory of the narrow result."""

import flat
import pytest
import torch

from tigon.ops.linear import chunk_size, weight_gradient
from tigon.ops.linear.weight_gradient import narrow_sum, parts, places

DTYPES = [torch.bfloat16, torch.float16]


def weight_of(V, H, dtype, device):
    return torch.empty(V, H, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(
    ("V", "H"), [(128, 1), (129, 3), (300, 129), (1000, 64)]
)  # less than, and many times, a first step
def test_narrow_sum_is_the_sum_rounded_once(V, H, ours, dtype, backend, device):
    dw, more = places(weight_of(V, H, dtype, device), dtype, True, 1, True)
    sums = parts(dw, more)
    assert [s.dtype for s in sums] == [torch.float32] * 2
    assert sum(s.shape[0] for s in sums) == V
    truth, factor = torch.randn(V, H, device=device), torch.tensor(0.3, device=device)
    sums[0].copy_(truth[: sums[0].shape[0]])
    sums[1].copy_(truth[sums[0].shape[0] :])
    kept = dw.clone()
    result = narrow_sum(dw, more, factor, ours)
    assert result.shape == (V, H)
    assert result.dtype == dtype
    assert result.is_contiguous()
    assert torch.equal(result, (truth * factor).to(dtype))
    if ours and backend == "triton":
        assert result.data_ptr() == dw.data_ptr()
    if not ours:
        assert torch.equal(dw.view(torch.int16), kept.view(torch.int16))


def test_memory_is_that_of_one_sum(device):
    V, H = 640, 32
    weight = weight_of(V, H, torch.bfloat16, device)
    dw, more = places(weight, torch.bfloat16, True, V * H * 2 - 1, True)
    assert dw.nbytes + more.nbytes == V * H * 4
    # A result that a chunk of logits makes room for is narrow_sum to a tensor of its own.
    dw, more = places(weight, torch.bfloat16, True, V * H * 2, True)
    assert dw.dtype == torch.float32
    assert not more.numel()
    for one in (weight.float(), weight.double()):
        dw, more = places(one, one.dtype, True, 1, True)
        assert dw.shape == (V, H)
        assert not more.numel()


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("loss", ["cross entropy", "none", "logprob", "grpo", "distill"])
def test_sharing_changes_no_bit(loss, kept, backend, device, monkeypatch):
    """Also where the graph is kept, and the sums with it."""
    S, T, H, V = 4, 34, 24, 300  # two chunks
    x = torch.randn(S, T, H, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(V, H, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, V, (S, T), device=device)

    def call():
        if loss == "cross entropy":
            return 0.7 * flat.linear_cross_entropy(x, weight, target, chunk_bytes=1)
        if loss == "none":
            return flat.linear_cross_entropy(x, weight, target, reduction="none", chunk_bytes=1).square().sum()
        if loss == "logprob":
            return flat.linear_logprob(x, weight, target, chunk_bytes=1).logprob.square().sum()
        if loss == "grpo":
            advantages = torch.arange(S, device=device) - 1.0
            return 0.7 * flat.grpo(x, weight, target, advantages=advantages, chunk_bytes=1)[0]
        return 0.7 * flat.distill(x, weight, x.detach() * 1.1, weight.detach(), chunk_bytes=1)[0]

    def gradients():
        value = call()
        results = [torch.autograd.grad(value, (x, weight), retain_graph=kept) for _ in range(1 + kept)]
        assert all(torch.equal(a, b) for a, b in zip(results[0], results[-1], strict=True))
        return results[0]

    made = []
    original = weight_gradient.places
    monkeypatch.setattr(weight_gradient, "places", lambda *a: made.append(original(*a)) or made[-1])
    shared = gradients()
    assert any(more.numel() for _, more in made)
    monkeypatch.setattr(weight_gradient, "_front_rows", lambda V: 0)
    apart = gradients()
    assert torch.equal(shared[0], apart[0])
    torch.testing.assert_close(shared[1], apart[1], rtol=0 if device.type == "cpu" else 1e-2, atol=0)


@pytest.mark.parametrize("loss", ["grpo", "distill"])
def test_logits_take_the_place_of_an_fp32_sum(loss, device, monkeypatch):
    """Two chunks and an fp32 sum are as large as one chunk without; that rounds once as well."""
    S, T, H, V = 3, 128, 256, 300
    x = torch.randn(S, T, H, device=device, dtype=torch.bfloat16)
    weight = torch.randn(V, H, device=device, dtype=torch.bfloat16, requires_grad=True)
    target, advantages = torch.randint(0, V, (S, T), device=device), torch.arange(S, device=device) - 1.0
    sides = 2 if loss == "distill" else 1
    for default in ("CHUNK_BYTES", "CPU_CHUNK_BYTES"):
        monkeypatch.setattr(chunk_size, default, sides * (S - 1) * T * V * 2)

    def wide(**options):
        made = []
        monkeypatch.setattr(weight_gradient, "places", lambda *a: made.append(places(*a)) or made[-1])
        if loss == "grpo":
            flat.grpo(x, weight, target, advantages=advantages, **options)
        else:
            flat.distill(x, weight, x * 1.1, weight.detach(), **options)
        return made[-1][0].dtype == torch.float32 or bool(made[-1][1].numel())

    assert not wide()
    assert wide(chunk_bytes=chunk_size.CHUNK_BYTES)  # what is asked for is kept to
    assert not wide(chunk_bytes=chunk_size.CHUNK_BYTES, accumulate="weight")


def test_no_step_writes_what_it_has_yet_to_read(device, triton_backend, monkeypatch):
    """Programs run at once on a GPU, and one after another in the interpreter, which would not show it."""
    dw, more = places(weight_of(1000, 129, torch.bfloat16, device), torch.bfloat16, True, 1, True)
    steps = []
    monkeypatch.setattr(weight_gradient, "_narrow", lambda x, y, factor, start, stop: steps.append((start, stop)))
    narrow_sum(dw, more)
    *front, rest = steps
    blocks = -(-parts(dw, more)[0].numel() // weight_gradient.BLOCK)
    assert len(front) > 3
    assert front[0] == (0, 1)  # one program, which reads all before it writes
    assert [start for start, _ in front[1:]] == [stop for _, stop in front[:-1]]
    assert front[-1][1] == blocks
    # Block b is read as fp32 at 2 b and 2 b + 1 in units of the bf16 that it is written as, at b.
    assert all(stop <= 2 * start for start, stop in front[1:])
    assert rest == (0, -(-more.numel() // weight_gradient.BLOCK))
