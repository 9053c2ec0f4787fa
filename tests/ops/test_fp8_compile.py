"""FP8 layers inside compiled graphs: one graph, dynamic shapes, the bits of eager mode."""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

import tigon
from tigon import nn
from tigon.nn import fp8 as nn_fp8
from tigon.ops.fp8 import compiled as traced
from tigon.ops.fp8.compiled import multiply_gated_traced, multiply_traced
from tigon.ops.fp8.mlp import Stores, Unit, multiply_gated
from tigon.ops.fp8.multiply import Products, multiply
from tigon.ops.fp8.store import JointWeight

K, H, N = 64, 32, 48


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def draw(*shape, device, dtype=torch.bfloat16, size=1.0):
    return (torch.randn(*shape) * size).to(dtype).to(device)


def make_parameters(*shapes, device, dtype=torch.bfloat16):
    return [Parameter(draw(*shape, device=device, dtype=dtype, size=0.1)) for shape in shapes]


def run_step(call, x, parameters):
    """Results, and the gradients of x and the parameters; None for a tensor without one."""
    leaves = [x, *parameters]
    for t in leaves:
        t.grad = None
    results = call(x)
    results = results if isinstance(results, tuple) else (results,)
    upstream = [torch.linspace(-2, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype) for y in results]
    torch.autograd.backward(results, upstream)
    return [*(y.detach() for y in results), *(t.grad for t in leaves)]


def assert_same_bits(found, expected):
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a is None) == (b is None), i
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b)), i


def list_calls(device):
    """Each layer as (its name, its call, its parameters)."""
    q, k, v, b, d = make_parameters((N, K), (16, K), (16, K), (N,), (16,), device=device)
    wide = make_parameters((N, K), (N,), device=device, dtype=torch.float32)
    gate, up, down, *biases = make_parameters((H, K), (H, K), (K, H), (H,), (H,), (K,), device=device)
    packed = make_parameters((2 * H, K), (K, H), device=device)
    fp8 = tigon.fp8
    yield "linear", lambda x: fp8.linear(x, q, b), [q, b]
    yield "linear in fp32", lambda x: fp8.linear(x, *wide), wide
    yield "projections", lambda x: fp8.projections(x, [q, k, v], [b, None, d]), [q, k, v, b, d]
    yield "gated_mlp", lambda x: fp8.gated_mlp(x, gate, up, down), [gate, up, down]
    layers = zip((gate, up, down), biases, strict=True)
    pairs = list(layers)
    call = lambda x: fp8.gated_mlp(x, *pairs, act="gelu_tanh", keep="fp8")  # noqa: E731
    yield "gated_mlp with biases", call, [gate, up, down, *biases]
    yield "gated_mlp, packed", lambda x: fp8.gated_mlp(x, packed[0], None, packed[1]), packed


def compile_whole(call, device, **options):
    counter = CompileCounterWithBackend("inductor" if device.type == "cuda" else "aot_eager")
    return torch.compile(call, fullgraph=True, backend=counter, **options), counter


@pytest.mark.parametrize("number", range(6))
def test_one_dynamic_graph_with_the_bits_of_eager_mode(number, backend, device):
    name, call, parameters = next(itertools.islice(list_calls(device), number, None))
    compiled, counter = compile_whole(call, device, dynamic=True)
    for tokens in (5, 18):
        x = draw(2, tokens, K, device=device).requires_grad_()
        expected = run_step(call, x, parameters)
        assert_same_bits(run_step(compiled, x, parameters), expected)
    assert counter.frame_count == 1, name
    assert all(t.any() for t in expected)


@pytest.mark.parametrize("options", [Products(dw="bf16"), Products(is_exact=True)], ids=str)
@pytest.mark.parametrize("keep", ["bf16", "fp8"])
def test_every_choice(keep, options, backend, device):
    q, k = make_parameters((N, K), (16, K), device=device)
    gate, up, down = make_parameters((H, K), (H, K), (K, H), device=device)
    biases = make_parameters((H,), (H,), (K,), device=device)
    stores, unit = Stores(JointWeight("use"), JointWeight("use")), Unit("silu", keep, options)

    def call(x):
        mlp = multiply_gated(x, stores, (gate, up, down), tuple(biases), unit)
        return *multiply(x, JointWeight("use"), [q, k], [None, None], options), mlp

    def call_traced(x):
        mlp = multiply_gated_traced(x, (gate, up, down), tuple(biases), "silu", keep, options)
        return *multiply_traced(x, [q, k], [None, None], options), mlp

    x = draw(19, K, device=device).requires_grad_()
    parameters = [q, k, gate, up, down, *biases]
    compiled, _ = compile_whole(call_traced, device)
    assert_same_bits(run_step(compiled, x, parameters), run_step(call, x, parameters))


@pytest.mark.parametrize("number", range(6))
def test_only_wanted_gradients(number, device):
    _, call, parameters = next(itertools.islice(list_calls(device), number, None))
    x = draw(19, K, device=device)
    compiled, _ = compile_whole(call, device)
    for i in range(len(parameters) + 1):
        leaves = [x, *parameters]
        for j, t in enumerate(leaves):
            t.requires_grad_(j == i)
        assert_same_bits(run_step(compiled, x, parameters), run_step(call, x, parameters))


def test_no_gradient_makes_no_rows_for_one(device, monkeypatch):
    kept = []
    whole = traced.gated_rows
    monkeypatch.setattr(traced, "gated_rows", lambda g, act, keep: kept.append(keep) or whole(g, act, keep))
    gate, up, down = make_parameters((H, K), (H, K), (K, H), device=device)
    call = lambda x: tigon.fp8.gated_mlp(x, gate, up, down, keep="fp8")  # noqa: E731
    compiled, _ = compile_whole(call, device)
    x = draw(19, K, device=device)
    with torch.no_grad():
        y = compiled(x)
    assert not y.requires_grad
    assert torch.equal(y, compiled(x).detach())
    assert kept == [False, True]


def test_results_without_a_gradient(device):
    """The graph's split gives the weights of an unused result gradients of zero."""
    q, k = make_parameters((N, K), (16, K), device=device)
    x = draw(19, K, device=device).requires_grad_()
    compiled, _ = compile_whole(lambda x: tigon.fp8.projections(x, [q, k])[0], device)
    _, dx, dq, dk = run_step(compiled, x, [q, k])
    _, *expected = run_step(lambda x: tigon.fp8.linear(x, q), x, [q])
    assert not dk.any()
    assert torch.equal(dq, expected[1])
    assert torch.allclose(dx, expected[0], rtol=0.1, atol=0.02)  # one scale for both weights


@pytest.mark.parametrize("number", [2, 4])
def test_checkpoints_in_a_graph(number, device):
    _, call, parameters = next(itertools.islice(list_calls(device), number, None))
    x = draw(19, K, device=device).requires_grad_()
    compiled, _ = compile_whole(lambda x: checkpoint(call, x, use_reentrant=False), device)
    assert_same_bits(run_step(compiled, x, parameters), run_step(call, x, parameters))


def test_autocast(device):
    weight, bias = make_parameters((N, K), (N,), device=device, dtype=torch.float32)
    x = draw(19, K, device=device, dtype=torch.float32).requires_grad_()

    def call(x):
        with torch.autocast(device.type, torch.bfloat16):
            return tigon.fp8.linear(x, weight, bias)

    compiled, _ = compile_whole(call, device)
    assert_same_bits(run_step(compiled, x, [weight, bias]), run_step(call, x, [weight, bias]))


def test_no_tokens(device):
    _, call, parameters = next(itertools.islice(list_calls(device), 4, None))
    x = draw(0, K, device=device).requires_grad_()
    compiled, _ = compile_whole(call, device)
    found = run_step(compiled, x, parameters)
    assert_same_bits(found, run_step(call, x, parameters))
    assert not any(t.any() for t in found)


def test_another_backend_compiles_again(device, triton_backend):
    (weight,) = make_parameters((N, K), device=device)
    compiled, counter = compile_whole(lambda x: tigon.fp8.linear(x, weight), device)
    x = draw(19, K, device=device)
    compiled(x)
    with tigon.use_backend("torch"):
        compiled(x)
    assert counter.frame_count == 2


def test_edited_weights_are_seen(device):
    (weight,) = make_parameters((N, K), device=device)
    compiled, _ = compile_whole(lambda x: tigon.fp8.linear(x, weight), device)
    x = draw(19, K, device=device)
    before = compiled(x).detach()
    weight.data.mul_(-2)
    assert torch.equal(compiled(x), -2 * before)


def test_a_module_compiles_whole(device, monkeypatch):
    monkeypatch.setattr(nn_fp8, "why_unsupported", lambda _: "")
    layer = nn.FP8Linear(K, N, device=device, dtype=torch.bfloat16)
    x = draw(19, K, device=device).requires_grad_()
    compiled, _ = compile_whole(layer, device)
    assert_same_bits(run_step(compiled, x, [*layer.parameters()]), run_step(layer, x, [*layer.parameters()]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs")
@pytest.mark.parametrize("number", [0, 4])
def test_replayed_from_a_cuda_graph(number, device):
    _, call, parameters = next(itertools.islice(list_calls(device), number, None))
    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        x = draw(19, K, device=device).requires_grad_()
        torch.compiler.cudagraph_mark_step_begin()
        found = [t.clone() for t in run_step(compiled, x, parameters)]
        assert_same_bits(found, run_step(call, x, parameters))


def test_the_operators_pass_torchs_checks(backend, device):
    x = draw(3, 5, K, device=device).requires_grad_()
    weights = make_parameters((N, K), (16, K), device=device)
    gate, up, down = make_parameters((H, K), (H, K), (K, H), device=device)
    (bias,) = make_parameters((N + 16,), device=device)
    torch.library.opcheck(traced._fp8_linear_fwd.op, (x, weights, bias, "fp8", False))
    # Another check computes with all results, and torch has no arithmetic for e4m3.
    for keep, checks in (("bf16", {}), ("fp8", {"test_utils": ("test_faketensor", "test_autograd_registration")})):
        inputs = x, [gate, up], down, None, None, "silu", keep, "fp8", False
        torch.library.opcheck(traced._fp8_mlp_fwd.op, inputs, **checks)
    x, down, weights = x.detach(), down.detach(), [w.detach() for w in weights]
    _, scale, amax = traced._fp8_linear_fwd(x, weights, None, "fp8", False)
    dy = draw(3, 5, N + 16, device=device)
    fake = {"test_utils": "test_faketensor"}
    for needs in ([True, True, True], [False, False, True], [True, False, False]):
        for dw in ("fp8", "bf16"):
            given = dy, None, x, scale, amax, weights, needs, torch.bfloat16, dw, False
            torch.library.opcheck(traced._fp8_linear_bwd.op, given, **fake)
    _, gate_up, _, _, scale, _, amax = traced._fp8_mlp_fwd(
        x, [gate.detach(), up.detach()], down, None, None, "silu", "bf16", "fp8", False
    )
    # The reference differentiates activations by autograd, which these checks switch off.
    choices = itertools.product((True, False), ("fp8", "bf16")) if backend == "triton" else ()
    for need, dw in choices:
        given = torch.ones_like(x), gate_up, None, scale, down, amax, need, "silu", dw, False
        torch.library.opcheck(traced._fp8_mlp_bwd.op, given, **fake)
