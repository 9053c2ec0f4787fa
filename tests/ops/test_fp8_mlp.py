"""The gated MLP in FP8: errors against fp64, saved bytes, and the memory of a whole decoder layer."""

import pytest
import torch
from fp8_recipe import Product, Shift, assert_mean_errors_vanish, bf16, error, narrow, run_checkpointed, same, scale
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

import tigon
from tigon.ops.acts import ACTS
from tigon.ops.fp8 import mlp, multiply
from tigon.ops.fp8.gated_rows import gated_rows
from tigon.ops.fp8.mlp import Stores, Unit, multiply_gated
from tigon.ops.fp8.multiply import Products
from tigon.ops.fp8.normed import norm_to_rows
from tigon.ops.fp8.store import JointWeight

pytestmark = pytest.mark.usefixtures("backend")
H, N, M = 64, 96, 48
UNITS = [
    Unit(),
    Unit(keep="fp8"),
    Unit(products=Products(dw="bf16")),
    Unit(keep="fp8", products=Products(dw="bf16", is_exact=True)),
]


def draw(*shape, device, dtype=torch.bfloat16, size=1.0):
    return (torch.randn(*shape) * size).to(dtype).to(device)


def draw_layers(device, dtype=torch.bfloat16, biased=True):
    shapes = (N, H), (N, H), (M, N)
    weights = tuple(Parameter(draw(*shape, device=device, dtype=dtype, size=0.2)) for shape in shapes)
    biases = tuple(Parameter(draw(n, device=device, dtype=dtype)) if biased else None for n, _ in shapes)
    return weights, biases


def stores(policy="use"):
    return Stores(JointWeight(policy), JointWeight(policy))


class Halves(torch.autograd.Function):
    """act(gate) · up in fp64, and as the backward pass computes it: from gate and up in e4m3 if they are kept so."""

    @staticmethod
    def forward(ctx, gate, up, act, keep):
        kept = gate, up
        if keep == "fp8":
            kept = tuple(narrow(t, s) * s for t in kept for s in [scale(t.abs().amax(1, keepdim=True))])
        ctx.save_for_backward(*kept)
        ctx.act = act
        again = ACTS[act].value(kept[0]) * kept[1]
        ctx.mark_non_differentiable(again)
        return ACTS[act].value(gate) * up, again

    @staticmethod
    def backward(ctx, d, _):
        with torch.enable_grad():
            halves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            product = ACTS[ctx.act].value(halves[0]) * halves[1]
        return *torch.autograd.grad(product, halves, d), None, None


def emulate(x, weights, biases, dy, unit, rounds):
    """The result, and gradients of x, the weights and the biases, in fp64: of the recipe, or exact ones."""
    inputs = [t.detach().double().requires_grad_() for t in (x, *weights, *(b for b in biases if b is not None))]
    flat, (wg, wu, wd) = inputs[0].reshape(-1, H), inputs[1:4]
    bg, bu, bd = inputs[4:] or [w.new_zeros(len(w)) for w in (wg, wu, wd)]
    joint, bias, dw = torch.cat([wg, wu]), torch.cat([bg, bu]), unit.products.dw
    if not rounds:
        g = (flat @ joint.t() + bias).split(N, 1)
        y = (ACTS[unit.act].value(g[0]) * g[1]) @ wd.t() + bd
    else:
        g = Shift.apply(Product.apply(flat, joint, False, dw), bias, dw)
        g = g + (bf16(g) - g).detach()
        p, again = Halves.apply(*g.split(N, 1), unit.act, unit.keep)
        y = Product.apply(p, wd, True, dw, again) + bd
        y = y + (bf16(y) - y).detach()
    y = y.reshape(*x.shape[:-1], M)
    return [y, *torch.autograd.grad(y, inputs, dy.double())]


def run(x, weights, biases, dy, unit=UNITS[0], given=None, saved_by=None):
    inputs = [x, *(t for t in (*weights, *biases) if t is not None)]
    for t in inputs:
        t.grad = None
    y = multiply_gated(x, given or stores(), weights, biases, unit, saved_by)
    y.backward(dy)
    return [y.detach(), *(t.grad for t in inputs)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("unit", UNITS, ids=str)
@pytest.mark.parametrize("shape", [(3, 21, H), (1, H), (H,)])
def test_errors_are_the_recipes(shape, unit, dtype, device):
    x = draw(*shape, device=device).requires_grad_()
    weights, biases = draw_layers(device, dtype)
    dy = draw(*shape[:-1], M, device=device)
    ours = run(x, weights, biases, dy, unit)
    exact, theirs = (emulate(x, weights, biases, dy, unit, rounds) for rounds in (False, True))
    assert [t.dtype for t in ours] == [torch.bfloat16] * 2 + [dtype] * 6
    tokens = x.numel() // H
    for i, (a, b, e) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert a.shape == e.shape
        # Few tokens: an element on the other side of a rounding is a visible part of the error.
        assert error(a, e) <= (1.02 if tokens > 1 else 1.3) * error(b, e) + 3e-3, (i, error(b, e))


@pytest.mark.parametrize("act", ACTS)
def test_activations(act, device):
    x = draw(21, H, device=device).requires_grad_()
    weights, biases = draw_layers(device, biased=False)
    dy, unit = draw(21, M, device=device), Unit(act)
    ours = run(x, weights, biases, dy, unit)
    exact, theirs = (emulate(x, weights, biases, dy, unit, rounds) for rounds in (False, True))
    for a, b, e in zip(ours, theirs, exact, strict=True):
        assert error(a, e) <= 1.02 * error(b, e) + 3e-3


def test_gate_and_up_as_one_weight(device):
    x = draw(21, H, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    dy = draw(21, M, device=device)
    y, dx, dg, du, dd, bg, bu, bd = run(x, weights, biases, dy)
    packed = Parameter(torch.cat(weights[:2]).detach()), None, weights[2]
    one = run(x, packed, (Parameter(torch.cat(biases[:2]).detach()), None, biases[2]), dy)
    assert same(one, [y, dx, torch.cat([dg, du]), dd, torch.cat([bg, bu]), bd])


def test_mean_errors_vanish(device):
    def measure():
        x = draw(8, H, device=device).requires_grad_()
        weights, biases = draw_layers(device, biased=False)
        dy = draw(8, M, device=device)
        return run(x, weights, biases, dy), emulate(x, weights, biases, dy, UNITS[0], rounds=False)

    assert_mean_errors_vanish(measure)


def list_saved(call):
    """A call's result, and the shapes of the tensors that it saves."""
    saved = []

    def pack(t):
        saved.append(tuple(t.shape))
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        result = call()
    return result, saved


def test_frozen_weights_cost_no_gradient_and_save_no_input(device, monkeypatch):
    x = draw(21, H, device=device).requires_grad_()
    weights, biases = draw_layers(device, biased=False)
    dy = draw(21, M, device=device)
    y, dx, *_ = run(x, weights, biases, dy)
    for w in weights:
        w.requires_grad_(False)

    def refuse(*_, **__):
        raise AssertionError("work for a weight's gradient")

    for name in ("to_columns", "transpose_rows", "fold_scales", "multiply_columns", "differentiate_weights"):
        monkeypatch.setattr(mlp, name, refuse)
    products = []
    monkeypatch.setattr(mlp, "gated_gradient", lambda *a, f=mlp.gated_gradient: products.append(a[4]) or f(*a))
    x.grad, kept = None, stores("auto")
    frozen, saved = list_saved(lambda: multiply_gated(x, kept, weights, biases, UNITS[0]))
    assert saved == [(21, 2 * N), (N, H), (N, H), (M, N)] + [(0,)] * (len(saved) - 4)
    frozen.backward(dy)
    assert products == [None]  # no product for dW of down
    assert same([frozen, x.grad], [y, dx])
    assert [store.nbytes for store in kept] == [4 * H * N + 4 * (2 * N + H), 2 * M * N + 4 * (M + N)]


@pytest.mark.parametrize("unit", UNITS, ids=str)
@pytest.mark.parametrize("wanted", range(7))
def test_each_gradient_alone(wanted, unit, device):
    """Whichever input alone needs a gradient, the gradient has the same bits."""
    x = draw(21, H, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    dy, inputs = draw(21, M, device=device), [x, *weights, *biases]
    every = run(x, weights, biases, dy, unit)
    for i, t in enumerate(inputs):
        t.requires_grad_(i == wanted)
    alone = run(x, weights, biases, dy, unit)
    # On a GPU products of other sizes add up in another order.
    bound = 0.005 if device.type == "cuda" else 0
    assert error(alone[1 + wanted], every[1 + wanted].double()) <= bound
    assert sum(t is not None for t in alone[1:]) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("unit", UNITS[:2], ids=str)
def test_a_bad_token_is_seen(unit, value, device):
    x = draw(4, H, device=device)
    x[2, 3] = value
    weights, biases = draw_layers(device)
    dy = draw(4, M, device=device)
    y, dx, *dws = run(x.requires_grad_(), weights, biases, dy, unit)
    assert y[2].isnan().all()
    assert dx[2].isnan().all()
    assert y[[0, 1, 3]].isfinite().all()
    assert dx[[0, 1, 3]].isfinite().all()
    assert all(dw.isnan().any() for dw in dws[:3])


def test_masked_tokens(device):
    x = draw(21, H, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    dy = draw(21, M, device=device)
    dy[::2] = 0
    for a, e in zip(run(x, weights, biases, dy), emulate(x, weights, biases, dy, UNITS[0], False), strict=True):
        assert error(a, e) < 0.12
    assert not x.grad[::2].any()
    zeros = run(x, weights, biases, torch.zeros_like(dy))[1:]
    assert all(not t.any() for t in zeros)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("unit", UNITS[:2], ids=str)
def test_checkpoints_give_the_same_bits(unit, reentrant, device):
    x = draw(2, 19, H, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    norm_weight, dy = Parameter(draw(H, device=device)), draw(2, 19, M, device=device)

    def layer(x):
        total, normed = norm_to_rows(x, x, norm_weight, eps=1e-5, offset=0.0, cast="llama")
        return multiply_gated(normed, stores(), weights, biases, unit), total

    assert same(*run_checkpointed(layer, x, [norm_weight, *weights, *biases], [dy, torch.ones_like(x)], reentrant))


def test_policies_hooks_and_retained_graphs_give_the_same_bits(device):
    x = draw(21, H, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    dy = draw(21, M, device=device)
    plain = run(x, weights, biases, dy)
    for policy in ("step", "auto"):
        given = stores(policy)
        assert same(plain, run(x, weights, biases, dy, given=given))
        assert same(plain, run(x, weights, biases, dy, given=given))
    packed = {}

    def pack(t):
        packed[len(packed)] = t
        return len(packed) - 1

    assert same(plain, run(x, weights, biases, dy, saved_by=(pack, packed.pop)))
    assert not packed
    inputs = [x, *weights, *biases]
    y = multiply_gated(x, stores(), weights, biases, UNITS[0])
    first = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    assert same(first, torch.autograd.grad(y, inputs, dy))
    assert same(first, plain[1:])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, inputs, dy)


def test_a_gradient_of_a_gradient_raises(device):
    leaf = draw(4, H, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    for w in weights:
        w.requires_grad_(False)
    y = multiply_gated(leaf * 2, stores(), weights, biases, UNITS[0])
    (dx,) = torch.autograd.grad(y.float().square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(dx.float().square().sum(), leaf)


@pytest.mark.parametrize("keep", ["bf16", "fp8"])
def test_a_layer_keeps_nothing_beside_its_bf16_activations(keep, device):
    """Bytes for the backward pass: two sums, attention's result, gate and up, and the scales."""
    tokens = 32
    x, stream = (draw(tokens, H, device=device).requires_grad_() for _ in range(2))
    (gate, up, down), _ = draw_layers(device, biased=False)
    down = Parameter(draw(H, N, device=device))
    qkv = [Parameter(draw(n, H, device=device)) for n in (H, 16, 16)]
    o = Parameter(draw(H, H, device=device))
    norms = [Parameter(draw(H, device=device)) for _ in range(2)]
    parameters = {p.untyped_storage().data_ptr() for p in (*qkv, o, gate, up, down, *norms)}
    saved = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
            held.append(t)
        return t

    held = []
    options = {"eps": 1e-5, "offset": 0.0, "cast": "llama"}
    with saved_tensors_hooks(pack, lambda t: t):
        stream, normed = norm_to_rows(x, stream, norms[0], **options)
        q, _, _ = multiply.multiply(normed, JointWeight(), qkv, [None] * 3, Products())
        with torch.no_grad():
            attended = q.float().softmax(1).to(q.dtype)
        (x,) = multiply.multiply(attended.requires_grad_(), JointWeight(), [o], [None], Products())
        stream, normed = norm_to_rows(x, stream, norms[1], **options)
        y = multiply_gated(normed, stores(), (gate, up, down), (None,) * 3, Unit(keep=keep))
    gate_up, numbers = (4 * N, 6) if keep == "bf16" else (2 * N, 8)
    assert sum(saved.values()) == tokens * (3 * 2 * H + gate_up + 4 * numbers)
    del normed
    torch.autograd.backward([y, stream], [torch.ones_like(y), torch.ones_like(stream)])


def test_gate_and_up_are_released_early(device, monkeypatch):
    x = draw(21, H, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    seen, kept = [], []

    def round_rows(gate_up, *a):
        kept.append(gate_up)
        return gated_rows(gate_up, *a)

    def differentiate(*a):
        seen.extend(t.untyped_storage().nbytes() for t in kept)
        return multiply.differentiate_weights(*a)

    monkeypatch.setattr(mlp, "differentiate_weights", differentiate)
    monkeypatch.setattr(mlp, "gated_rows", round_rows)
    y = multiply_gated(x, stores(), weights, biases, UNITS[0])
    y.backward(torch.ones_like(y), retain_graph=True)
    y.backward(torch.ones_like(y))
    assert seen == [21 * 2 * N * 2, 0]


def test_the_public_function(device):
    x = draw(2, 21, H, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    pairs = list(zip(weights, biases, strict=True))
    y = tigon.fp8.gated_mlp(x, *pairs, act="gelu", keep="fp8")
    assert same([y], [multiply_gated(x, stores(), weights, biases, Unit("gelu", "fp8"))])
    packed = tigon.fp8.gated_mlp(x, torch.cat(weights[:2]), None, weights[2])
    assert same([packed], [tigon.fp8.gated_mlp(x, *weights)])
    layers = [torch.nn.Linear(*reversed(w.shape), device=device, dtype=torch.float32) for w in weights]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        tigon.fp8.gated_mlp(x.float(), *layers, keep="fp8").sum().backward()
    assert all(layer.weight.grad.dtype == torch.float32 for layer in layers)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"act": "tanh"}, r"gated_mlp: act must be one of"),
        ({"keep": "int8"}, r"gated_mlp: keep must be one of \('bf16', 'fp8'\), got 'int8'"),
        ({"up": torch.zeros(80, H)}, r"gated_mlp: up must be \(96, 64\), bf16 or fp32, on cpu, got \(80, 64\)"),
        ({"up": None, "gate": torch.zeros(48, H)}, r"gated_mlp: gate must have a multiple of 32 rows where up is None"),
        ({"down": torch.zeros(M, H)}, r"gated_mlp: down must be \(N, 96\), .* got \(48, 64\)"),
        ({"gate": 3}, r"gated_mlp: gate must be a weight, a pair of weight and bias, or a torch.nn.Linear, got int"),
        ({"x": torch.zeros(2, H)}, r"gated_mlp: x must be \(..., K\) torch.bfloat16"),
    ],
)
def test_a_bad_call_gets_a_sentence(change, sentence):
    given = {"x": torch.zeros(2, H, dtype=torch.bfloat16), "gate": torch.zeros(N, H), "up": torch.zeros(N, H),
             "down": torch.zeros(M, N)}  # fmt: skip
    with pytest.raises(ValueError, match=sentence):
        tigon.fp8.gated_mlp(**given | change)
    with pytest.raises(TypeError, match="unexpected keyword argument 'tile_bytes'"):
        tigon.fp8.gated_mlp(**given, tile_bytes=3)


def test_memory_that_hooks_hold_stays(device):
    held = []
    with saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        weights, biases = draw_layers(device)
        y = multiply_gated(draw(17, H, device=device), stores(), weights, biases, Unit())
    y.sum().backward()
    assert held
    assert all(t.untyped_storage().nbytes() for t in held if t.numel())
