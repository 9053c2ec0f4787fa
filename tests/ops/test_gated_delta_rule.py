"""gated_delta_rule: the definition, transformers' functions, states, hard inputs."""

import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F

import tigon
from tigon.ops.gated_delta_rule import gated_delta_rule_reference, recurrent_gated_delta_rule, reference
from tigon.ops.gated_delta_rule.launches import _delta_chunks

LENGTHS = [5, 0, 17, 1, 40]
NAMES = "o", "dq", "dk", "dv", "dg", "dbeta"


def draw(T, B=1, G=1, H=2, K=16, V=16, dtype=torch.float32, device="cpu", seed=0):
    """q, k, v, g, beta and an upstream gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, T, G, K), (B, T, G, K), (B, T, H, V), (B, T, H), (B, T, H), (B, T, H, V)
    q, k, v, g, beta, do = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    return [q.to(dtype), k.to(dtype), v.to(dtype), F.logsigmoid(g + 2), beta.sigmoid().to(dtype), do.to(dtype)]


def count_up(lengths, device="cpu"):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def compute(tensors, **options):
    """o and the gradients of q, k, v, g and beta."""
    leaves = [t.clone().requires_grad_() for t in tensors[:5]]
    o = tigon.gated_delta_rule(*leaves, normalize=True, **options)
    return [o.detach(), *torch.autograd.grad(o, leaves, tensors[5])]


def compute_exactly(tensors):
    with tigon.use_backend("torch"):
        return compute([t.double() for t in tensors])


def test_the_reference_is_the_recurrence(monkeypatch):
    q, k, v, g, beta, _ = draw(70, B=2, G=2, H=4, K=8, V=12, dtype=torch.float64)
    g = g.double()
    state = torch.randn(2, 4, 8, 12, dtype=torch.float64)
    expected = recurrent_gated_delta_rule(q, k, v, g, beta, normalize=True, initial_state=state)
    options = {"normalize": True, "initial_state": state, "return_state": True}
    torch.testing.assert_close(gated_delta_rule_reference(q, k, v, g, beta, **options), expected)
    one = [t[:1] for t in (q, k, v, g, beta)]
    offsets = count_up([5, 0, 65])
    options = {"initial_state": torch.randn(3, 4, 8, 12, dtype=torch.float64), "offsets": offsets, "return_state": True}
    o, states = gated_delta_rule_reference(*one, normalize=True, **options)
    for d, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
        document = [t[:, start:stop] for t in one]
        initial = options["initial_state"][d : d + 1]
        alone = recurrent_gated_delta_rule(*document, normalize=True, initial_state=initial)
        torch.testing.assert_close((o[:, start:stop], states[d : d + 1]), alone)
    # Traced, all tokens at once, since a graph cannot depend on the offsets.
    monkeypatch.setattr(reference, "is_concrete", lambda t: False)
    torch.testing.assert_close(gated_delta_rule_reference(*one, normalize=True, **options), (o, states))


def test_the_result_is_that_of_transformers(backend, device):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v, g, beta, _ = draw(37, B=2, G=1, H=2, device=device)
    state = torch.randn(2, 2, 16, 16, device=device)
    got = tigon.gated_delta_rule(q, k, v, g, beta, normalize=True, initial_state=state, return_state=True)
    plain = inspect.unwrap(modeling.torch_recurrent_gated_delta_rule)  # where installed, fla serves the wrapper
    expected = plain(q, k, v, g, beta, state, True, True)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_bf16_is_as_right_as_transformers_fp32(device, triton_backend):
    """transformers computes in fp32 and rounds once; products in bf16 take a few roundings more."""
    tensors = draw(70, K=32, V=32, dtype=torch.bfloat16, device=device)
    exact = compute_exactly(tensors)
    got = compute(tensors)
    with tigon.use_backend("torch"):
        eager = compute(tensors)
    for name, a, b, c in zip(NAMES, got, eager, exact, strict=True):
        if name != "dg":  # fp32, as g is
            assert (a - c).abs().mean() <= 2.5 * (b - c).abs().mean(), name
        else:
            assert (a - c).abs().mean() <= 0.01 * c.abs().mean()


@pytest.mark.gpu
@pytest.mark.parametrize("K", [16, 128])
def test_gradients_repeat_bit_for_bit_at_the_widths_of_models(K, device, triton_backend):
    """Copies in flight may overtake products in flight, if the compiler lets them."""
    tensors = draw(2000, G=16, H=32, K=K, V=128, dtype=torch.bfloat16, device=device)
    first = compute(tensors)
    for _ in range(10):
        assert all(torch.equal(one, other) for one, other in zip(compute(tensors), first, strict=True))


def test_a_sequence_in_two_calls_is_the_sequence(device, backend):
    """The state carries over, with its gradient: that of the first part's inputs."""
    tensors = draw(40, device=device)
    whole = [t.clone().requires_grad_() for t in tensors[:5]]
    parts = [t.clone().requires_grad_() for t in tensors[:5]]
    o = tigon.gated_delta_rule(*whole, normalize=True)
    first, state = tigon.gated_delta_rule(*(t[:, :23] for t in parts), normalize=True, return_state=True)
    second = tigon.gated_delta_rule(*(t[:, 23:] for t in parts), normalize=True, initial_state=state)
    torch.testing.assert_close(torch.cat((first, second), 1), o, rtol=1e-4, atol=1e-5)
    o.backward(tensors[5])
    torch.autograd.backward((first, second), tensors[5].split((23, 17), 1))
    for one, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    # A state whose output nobody uses still has a gradient.
    parts = [t.clone().requires_grad_() for t in tensors[:5]]
    tigon.gated_delta_rule(*parts, normalize=True, return_state=True)[1].sum().backward()
    assert parts[2].grad.abs().sum() > 0
    assert parts[0].grad is None or not parts[0].grad.any()


def test_alike_keys_and_strong_decays_stay_exact(device, triton_backend):
    """Powers of the inverted matrix would reach 10¹⁸ here, and cancel; decays of exp(-80) a token underflow."""
    q, k, v, g, beta, do = draw(64, device=device, dtype=torch.bfloat16)
    k = k[:, :1].expand_as(k).contiguous()
    for decay in (0.0, -80.0):
        tensors = [q, k, v, torch.full_like(g, decay), torch.full_like(beta, 0.9), do]
        for name, got, expected in zip(NAMES, compute(tensors), compute_exactly(tensors), strict=True):
            assert got.isfinite().all()
            # dg is the small difference of large numbers here, which bf16 does not resolve.
            assert name == "dg" or (got - expected).abs().max() <= 0.1 * expected.abs().max() + 1e-30, name


def test_zero_beta_has_a_gradient(device, triton_backend):
    tensors = draw(20, device=device)
    tensors[4] = torch.zeros_like(tensors[4])
    exact = compute_exactly(tensors)
    for got, expected in zip(compute(tensors), exact, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    assert exact[5].abs().max() > 0


def test_the_table_has_each_documents_chunks(device, triton_backend):
    offsets = count_up(LENGTHS, device)
    table = _delta_chunks(offsets, 63, 16).tolist()
    documents, slots = table[:5], table[5:]
    assert [row[:3] for row in documents] == [[a, b, 0] for a, b in itertools.pairwise(offsets.tolist())]
    chunks = [row[:2] for row in slots if row[0] < row[1]]
    assert chunks == [[0, 5], [5, 21], [21, 22], [22, 23], [23, 39], [39, 55], [55, 63]]
    for d, (start, stop, *_) in enumerate(documents):
        first = slots[start // 16 + d] if start < stop else None
        assert first is None or first[0] == start
