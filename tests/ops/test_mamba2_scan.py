"""mamba2_scan: the definition, transformers' function, states, hard inputs."""

import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from test_gated_delta_rule import count_up

import tigon
from tigon.ops.gated_delta_rule import reference
from tigon.ops.mamba2_scan import mamba2_scan_reference
from tigon.ops.mamba2_scan.launches import choose_split

NAMES = "y", "dx", "ddt", "dA", "dB", "dC", "dD", "ddt_bias"


def draw(T, batch=1, G=1, H=2, N=16, P=16, dtype=torch.float32, device="cpu", seed=0):
    """x, dt, A, B, C, D, dt_bias and an upstream gradient."""
    generator = torch.Generator().manual_seed(seed)
    groups, heads = (batch, T, G, N), (batch, T, H, P)
    shapes = heads, (batch, T, H), (H,), groups, groups, (H,), (H,), heads
    x, dt, A, B, C, D, bias, dy = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    x, dt, B, C, dy = (t.to(dtype) for t in (x, dt, B, C, dy))
    return [x, dt, -A.exp(), B, C, D, bias, dy]


def compute(tensors, fn=tigon.mamba2_scan, **options):
    """y and the gradients of x, dt, A, B, C, D and dt_bias."""
    leaves = [t.clone().requires_grad_() for t in tensors[:7]]
    y = fn(*leaves[:5], D=leaves[5], dt_bias=leaves[6], dt_softplus=True, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, tensors[7].to(y.dtype))]


def compute_exactly(tensors):
    with tigon.use_backend("torch"):
        return compute([t.double() for t in tensors])


def scan(x, dt, A, B, C, D, dt_bias, S):
    """The definition, a token at a time."""
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
    dt, y = F.softplus(dt + dt_bias), []
    for t in range(x.shape[1]):
        S = S * (dt[:, t] * A).exp()[..., None, None]
        S = S + torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], B[:, t])
        y.append(torch.einsum("bhpn,bhn->bhp", S, C[:, t]) + D[:, None] * x[:, t])
    return torch.stack(y, 1) if y else x, S


def scan_by_transformers(*tensors, **options):
    wrapper = pytest.importorskip("transformers.models.mamba2.modeling_mamba2").mamba2_chunk_scan
    return inspect.getclosurevars(wrapper).nonlocals["torch_function"](*tensors, chunk_size=32, **options)


def test_the_reference_is_the_recurrence(monkeypatch):
    *tensors, _ = (t.double() for t in draw(70, batch=2, G=2, H=4, N=8, P=12))
    state = torch.randn(2, 4, 12, 8, dtype=torch.float64)

    def refer(tensors, **options):
        *five, D, bias = tensors
        return mamba2_scan_reference(*five, D=D, dt_bias=bias, dt_softplus=True, return_state=True, **options)

    torch.testing.assert_close(refer(tensors, initial_state=state), scan(*tensors, state))
    one = [t if t.dim() == 1 else t[:1] for t in tensors]
    options = {"initial_state": torch.randn(3, 4, 12, 8, dtype=torch.float64), "offsets": count_up([5, 0, 65])}
    y, states = refer(one, **options)
    for d, (start, stop) in enumerate(itertools.pairwise(options["offsets"].tolist())):
        document = [t if t.dim() == 1 else t[:, start:stop] for t in one]
        alone = scan(*document, options["initial_state"][d : d + 1])
        torch.testing.assert_close((y[:, start:stop], states[d : d + 1]), alone)
    # Traced, all tokens at once, since a graph cannot depend on the offsets.
    monkeypatch.setattr(reference, "is_concrete", lambda t: False)
    torch.testing.assert_close(refer(one, **options), (y, states))


@pytest.mark.parametrize(
    "sizes", [{"T": 37, "batch": 2, "G": 2, "H": 4}, {"T": 65, "H": 18, "N": 64, "P": 32}, {"T": 1}], ids=str
)
def test_the_result_is_that_of_transformers(sizes, backend, device):
    tensors = draw(**sizes, device=device)
    for name, got, expected in zip(NAMES, compute(tensors), compute(tensors, scan_by_transformers), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
    state = torch.randn(tensors[0].shape[0], *tensors[0].shape[2:], tensors[3].shape[-1], device=device)
    got = tigon.mamba2_scan(*tensors[:5], initial_state=state, dt_limit=(0.1, 0.9), return_state=True)
    options = {"initial_states": state, "dt_limit": (0.1, 0.9), "return_final_states": True}
    torch.testing.assert_close(got, scan_by_transformers(*tensors[:5], **options), rtol=1e-4, atol=1e-4)


def test_bf16_is_as_right_as_transformers_fp32(device, triton_backend):
    """transformers computes in fp32, its steps in bf16; products in bf16 take a few roundings more."""
    tensors = draw(70, H=12, N=32, P=32, dtype=torch.bfloat16, device=device)
    exact = compute_exactly(tensors)
    got, eager = compute(tensors), compute(tensors, scan_by_transformers)
    for name, a, b, c in zip(NAMES, got, eager, exact, strict=True):
        b = b.to(tensors[0].dtype) if name == "y" else b
        # dD is a sum of exact products in both.
        assert (a - c).abs().mean() <= 2 * (b - c).abs().mean() + 1e-6 * c.abs().mean(), name


@pytest.mark.gpu
def test_gradients_repeat_bit_for_bit_at_the_widths_of_models(device, triton_backend):
    tensors = draw(2000, H=128, N=128, P=64, dtype=torch.bfloat16, device=device)
    first = compute(tensors)
    for _ in range(10):
        assert all(torch.equal(one, other) for one, other in zip(compute(tensors), first, strict=True))


def test_a_sequence_in_two_calls_is_the_sequence(device, backend):
    """The state carries over, with its gradient: that of the first part's inputs."""
    tensors = draw(40, device=device)
    whole, parts = ([t.clone().requires_grad_() for t in tensors[:5]] for _ in range(2))
    y = tigon.mamba2_scan(*whole, dt_softplus=True)

    def take(leaves, rows):
        return [t if t.dim() == 1 else t[:, rows] for t in leaves]

    options = {"dt_softplus": True, "return_state": True}
    first, state = tigon.mamba2_scan(*take(parts, slice(23)), **options)
    second = tigon.mamba2_scan(*take(parts, slice(23, None)), dt_softplus=True, initial_state=state)
    torch.testing.assert_close(torch.cat((first, second), 1), y, rtol=1e-4, atol=1e-5)
    y.backward(tensors[7])
    torch.autograd.backward((first, second), tensors[7].split((23, 17), 1))
    for one, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    # A state whose output nobody uses still has a gradient, but none for C.
    parts = [t.clone().requires_grad_() for t in tensors[:5]]
    tigon.mamba2_scan(*parts, **options)[1].sum().backward()
    assert all(parts[n].grad.abs().sum() > 0 for n in range(4))
    assert parts[4].grad is None or not parts[4].grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", [0.0, -2.0, -300.0])
def test_decays_of_any_speed_stay_finite_and_exact(decay, dtype, device, triton_backend):
    """A decay of exp(-300) a token underflows, and its inverse would overflow."""
    tensors = draw(70, device=device, dtype=dtype)
    tensors[2] = torch.full_like(tensors[2], decay)
    for name, got, expected in zip(NAMES, compute(tensors), compute_exactly(tensors), strict=True):
        assert got.isfinite().all()
        share = 2e-5 if dtype == torch.float32 else 0.02
        # dA is tiny beside the products that it comes from where the state forgets at once.
        floor = 1e-4 if name == "dA" and decay == -300.0 else 1e-30
        assert (got - expected).abs().max() <= share * expected.abs().max() + floor, name


def test_a_groups_heads_are_divided_evenly():
    for H, G in itertools.product(range(1, 130), (1, 2, 8)):
        if H % G == 0:
            heads, split = H // G, choose_split(H, G)
            assert heads % split == 0
            assert heads // split <= 8
    assert [choose_split(*sizes) for sizes in ((128, 1), (64, 2), (24, 1), (112, 8), (4, 4))] == [16, 4, 3, 2, 1]
