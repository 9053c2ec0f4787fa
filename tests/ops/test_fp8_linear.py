"""Linear layers in FP8: errors against fp64, saved tensors, frozen weights, copies of weights, and autograd."""

import copy
import gc
import itertools
import math
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from fp8_recipe import Product, assert_mean_errors_vanish, bf16, error, run_checkpointed, same
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

import tigon
from tigon.ops.fp8 import columns, constants, products
from tigon.ops.fp8 import multiply as node
from tigon.ops.fp8 import store as store_module
from tigon.ops.fp8.multiply import Products, multiply
from tigon.ops.fp8.normed import norm_to_rows
from tigon.ops.fp8.store import JointWeight

pytestmark = pytest.mark.usefixtures("backend")
SIZES = (48, 16, 16)  # of q, k and v
K = 64
OPTIONS = [Products(), Products(dw="bf16"), Products(is_exact=True)]


def draw(*shape, device, dtype=torch.bfloat16, size=1.0):
    return (torch.randn(*shape) * size).to(dtype).to(device)


def draw_layers(device, dtype=torch.bfloat16, biased=True):
    weights = [Parameter(draw(n, K, device=device, dtype=dtype, size=0.1)) for n in SIZES]
    return weights, [Parameter(draw(n, device=device, dtype=dtype)) if biased else None for n in SIZES]


def emulate(x, weights, biases, dys, norm=None, dw="fp8", rounds=True):
    """Results and gradients in fp64: of the recipe, or exact ones. norm: x → norm(x), differentiable."""
    x, *tensors = [None if t is None else t.detach().double().requires_grad_() for t in (x, *weights, *biases)]
    ws, bs = tensors[: len(weights)], tensors[len(weights) :]
    n = (norm(x) if norm else x).reshape(-1, x.shape[-1])
    joint = torch.cat(ws)
    y = Product.apply(n, joint, False, dw) if rounds else n @ joint.t()
    y = y + torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(ws, bs, strict=True)])
    if rounds:
        y = y + (bf16(y) - y).detach()
    ys = [part.reshape(*x.shape[:-1], -1) for part in y.split([len(w) for w in ws], 1)]
    grads = torch.autograd.grad(ys, [x, *ws, *(b for b in bs if b is not None)], [dy.double() for dy in dys])
    return [*ys, *grads]


def run(x, weights, biases, dys, options=OPTIONS[0], store=None, norm=None):
    inputs = [x, *weights, *(b for b in biases if b is not None)]
    for t in inputs:
        t.grad = None
    source = norm(x) if norm else x
    ys = multiply(source, store or JointWeight(), weights, biases, options)
    torch.autograd.backward(ys, dys)
    return [*(y.detach() for y in ys), *(t.grad for t in inputs)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(2, 19, K), (1, K), (K,)])  # masked tokens of a batch, a single token, a vector
def test_errors_are_the_recipes(shape, options, dtype, device):
    x = draw(*shape, device=device).requires_grad_()
    weights, biases = draw_layers(device, dtype)
    dys = [draw(*shape[:-1], n, device=device) for n in SIZES]
    ours = run(x, weights, biases, dys, options)
    exact = emulate(x, weights, biases, dys, rounds=False)
    theirs = emulate(x, weights, biases, dys, dw=options.dw)
    assert [t.dtype for t in ours] == [torch.bfloat16] * 4 + [dtype] * 6
    for i, (a, b, e) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert a.shape == e.shape
        assert error(a, e) <= 1.02 * error(b, e) + 2e-3, i
        assert error(a, b) <= 0.01, i
    assert error(ours[0], exact[0]) > 0.005  # otherwise bf16 would pass


@pytest.mark.parametrize("cast", ["llama", "gemma"])
@pytest.mark.parametrize("dw", ["fp8", "bf16"])
def test_a_norm_as_the_input(dw, cast, device):
    x, r = (draw(2, 19, K, device=device).requires_grad_() for _ in range(2))
    weight = Parameter(draw(K, device=device))
    weights, biases = draw_layers(device)
    dys, dtotal = [draw(2, 19, n, device=device) for n in SIZES], draw(2, 19, K, device=device)
    options = {"eps": 1e-5, "offset": 1.0, "cast": cast}
    total, normed = norm_to_rows(x, r, weight, **options)
    assert normed.handle.untyped_storage().nbytes() == 2
    assert normed.handle.shape == x.shape
    ys = multiply(normed, JointWeight(), weights, biases, Products(dw=dw))
    torch.autograd.backward([*ys, total], [*dys, dtotal])
    ours = [*ys, x.grad, r.grad, weight.grad, *(w.grad for w in weights), *(b.grad for b in biases)]

    def differentiate(rounds):
        xs = [t.detach().double().requires_grad_() for t in (x, r, weight, *weights, *biases)]
        sum_ = xs[0] + xs[1]
        sum_ = sum_ + (bf16(sum_) - sum_).detach()
        n = tigon.ops.rms_norm.rms_norm_reference(sum_, xs[2], **options)
        n = n + (bf16(n) - n).detach()
        joint = torch.cat(xs[3:6])
        flat = n.view(-1, K)
        y = Product.apply(flat, joint, False, dw) if rounds else flat @ joint.t()
        parts = [p.view(2, 19, -1) for p in (y + torch.cat(xs[6:])).split(SIZES, 1)]
        grads = torch.autograd.grad([*parts, sum_], xs, [d.double() for d in (*dys, dtotal)])
        return [*parts, *grads]

    exact, theirs = differentiate(rounds=False), differentiate(rounds=True)
    for i, (a, b, e) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert error(a, e) <= 1.02 * error(b, e) + 4e-3, i
    assert torch.equal(total, x + r)


def test_a_norm_adds_the_streams_gradient(device):
    x = draw(3, 5, K, device=device).requires_grad_()
    weight = Parameter(draw(K, device=device))
    stream, normed = norm_to_rows(x, None, weight, eps=1e-5, offset=0.0, cast="llama", forked=True)
    upstream, dnorm = draw(3, 5, K, device=device), draw(3, 5, K, device=device)
    torch.autograd.backward([stream, normed.handle], [upstream, dnorm])
    ours = x.grad, weight.grad
    x.grad = weight.grad = None
    torch.autograd.backward([tigon.rms_norm(x, weight, eps=1e-5), x], [dnorm, upstream])
    torch.testing.assert_close(ours, (x.grad, weight.grad), rtol=0.02, atol=0.05)
    assert torch.equal(stream, x)
    none, normed = norm_to_rows(x, None, weight, eps=1e-5, offset=0.0, cast="llama")
    assert none is None
    assert normed.total is x


def test_a_stream_in_fp32(device):
    x, r = draw(3, K, device=device).requires_grad_(), draw(3, K, device=device, dtype=torch.float32).requires_grad_()
    weight = Parameter(draw(K, device=device, dtype=torch.float32))
    total, normed = norm_to_rows(x, r, weight, eps=1e-5, offset=0.0, cast="llama")
    assert total.dtype == torch.float32
    torch.autograd.backward([total, normed.handle], [torch.ones_like(total), draw(3, K, device=device)])
    assert [t.grad.dtype for t in (x, r, weight)] == [torch.bfloat16, torch.float32, torch.float32]


def test_mean_errors_vanish(device):
    def measure():
        x = draw(8, K, device=device).requires_grad_()
        weights, biases = draw_layers(device, biased=False)
        dys = [draw(8, n, device=device) for n in SIZES]
        return run(x, weights, biases, dys), emulate(x, weights, biases, dys, rounds=False)

    assert_mean_errors_vanish(measure)


def test_masked_tokens_and_large_ones(device):
    """Gradients over 12 orders of magnitude, half of them zero: dW as good as the recipe's on even tokens."""
    x = draw(64, K, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    size = torch.logspace(-9, 3, 64)[:, None].to(device) * (torch.arange(64) % 2).to(device)[:, None]
    dys = [(draw(64, n, device=device).float() * size).to(torch.bfloat16) for n in SIZES]
    ours = run(x, weights, biases, dys)
    exact = emulate(x, weights, biases, dys, rounds=False)
    for a, e in zip(ours, exact, strict=True):
        assert a.isfinite().all()
        assert error(a, e) < 0.07
    assert not ours[3][::2].any()
    nothing = run(x, weights, biases, [torch.zeros_like(dy) for dy in dys])[3:]
    assert all(not t.any() for t in nothing)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_token_is_seen(value, device):
    x = draw(4, K, device=device)
    x[2, 3] = value
    weights, biases = draw_layers(device)
    dys = [draw(4, n, device=device) for n in SIZES]
    q, k, v, dx, *dws = run(x.requires_grad_(), weights, biases, dys)
    for y in (q, k, v):
        assert y[2].isnan().all()
        assert y[[0, 1, 3]].isfinite().all()
    assert dx.isfinite().all()
    assert all(dw.isnan().any() for dw in dws[:3])
    dys[0][1, 0] = value
    dx = run(draw(4, K, device=device).requires_grad_(), weights, biases, dys)[3]
    assert dx[1].isnan().all()
    assert dx[[0, 2, 3]].isfinite().all()


def record_saved(call, *known):
    """A call's result, and the bytes of the tensors that it saves, apart from known ones; each memory once."""
    saved = {}

    def pack(t):
        storage = t.untyped_storage()
        saved[storage.data_ptr() if storage.nbytes() else None] = storage.nbytes()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        result = call()
    for t in known:
        saved.pop(t.untyped_storage().data_ptr(), None)
    return result, sum(saved.values())


@pytest.mark.parametrize("normed", [False, True])
def test_frozen_weights_save_nothing(normed, device, monkeypatch):
    x = draw(32, K, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    for p in (*weights, *biases):
        p.requires_grad_(False)
    norm_weight = Parameter(draw(K, device=device), requires_grad=False)

    def source():
        return norm_to_rows(x, None, norm_weight, eps=1e-5, offset=0.0, cast="llama")[1] if normed else x

    def refuse(*_):
        raise AssertionError("work for a weight's gradient")

    for name in ("to_columns", "transpose_rows", "fold_scales", "multiply_columns"):
        monkeypatch.setattr(node, name, refuse)
    given, store = source(), JointWeight()
    ys, kept = record_saved(lambda: multiply(given, store, weights, biases, Products()), *weights)
    assert kept == 0
    torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    assert x.grad is not None
    assert store.nbytes == 2 * K * sum(SIZES) + 4 * (K + sum(SIZES))


def test_only_wanted_gradients_are_computed(device, monkeypatch):
    x = draw(32, K, device=device)
    weights, biases = draw_layers(device)
    weights[1].requires_grad_(False)
    dys = [draw(32, n, device=device) for n in SIZES]
    monkeypatch.setattr(store_module, "quantize_transposed", None)  # x needs no gradient
    shapes = []

    def multiply_columns(a, *others, **options):
        shapes.append(len(a))
        return products.multiply_columns(a, *others, **options)

    monkeypatch.setattr(node, "multiply_columns", multiply_columns)
    some = run(x, weights, biases, dys)
    assert shapes == [48, 16]
    assert some[3] is None
    assert some[5] is None
    weights[1].requires_grad_()
    every = run(x, weights, biases, dys)
    for i in (4, 6):  # on a GPU products of other sizes add up in another order
        assert error(some[i], every[i].double()) <= (0.005 if device.type == "cuda" else 0)


def test_results_without_a_gradient_take_no_part(device):
    x = draw(32, K, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    ys = multiply(x, JointWeight(), weights, biases, Products())
    dy = draw(32, 16, device=device)
    ys[1].backward(dy)
    assert weights[0].grad is None
    assert biases[2].grad is None
    exact = emulate(x, weights, biases, [torch.zeros_like(ys[0]), dy, torch.zeros_like(ys[2])], rounds=False)
    for got, e in ((x.grad, exact[3]), (weights[1].grad, exact[5]), (biases[1].grad, exact[8])):
        assert error(got, e) < 0.06


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_give_the_same_bits(reentrant, device):
    x = draw(2, 19, K, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    dys = [draw(2, 19, n, device=device) for n in SIZES]
    norm_weight = Parameter(draw(K, device=device))

    def layer(x):
        total, normed = norm_to_rows(x, x, norm_weight, eps=1e-5, offset=0.0, cast="llama")
        return (*multiply(normed, JointWeight(), weights, biases, Products()), total)

    assert same(*run_checkpointed(layer, x, [norm_weight, *weights, *biases], [*dys, torch.ones_like(x)], reentrant))


def test_a_checkpoints_hooks_see_what_is_saved(device):
    x = draw(19, K, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    dys = [draw(19, n, device=device) for n in SIZES]
    plain = run(x, weights, biases, dys)
    packed = []

    def pack(t):
        packed.append(t)
        return len(packed) - 1

    x.grad = None
    ys = multiply(x, JointWeight(), weights, biases, Products(), (pack, lambda i: packed[i]))
    assert len(packed) == 2 + len(SIZES)  # x, its scales, and the weights
    torch.autograd.backward(ys, dys)
    assert torch.equal(x.grad, plain[3])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.backward(ys, dys)


def test_policies_give_the_same_bits(device):
    x = draw(19, K, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    dys = [draw(19, n, device=device) for n in SIZES]
    stores = {policy: JointWeight(policy) for policy in ("use", "step", "auto")}
    found = {policy: [run(x, weights, biases, dys, store=store) for _ in range(2)] for policy, store in stores.items()}
    first = found["use"][0]
    assert all(same(first, other) for others in found.values() for other in others)
    copies = 2 * K * sum(SIZES) + 4 * (K + sum(SIZES))
    assert {policy: store.nbytes for policy, store in stores.items()} == {"use": 0, "step": copies, "auto": 0}
    with pytest.raises(ValueError, match="policy must be one of"):
        JointWeight("never")


@pytest.mark.parametrize("policy", ["use", "step"])
def test_micro_batches_measure_once(policy, device, monkeypatch):
    calls = []
    measure = store_module.measure_weights
    monkeypatch.setattr(store_module, "measure_weights", lambda parts: calls.append(1) or measure(parts))
    weights, biases = draw_layers(device)
    xs = [draw(16, K, device=device) for _ in range(4)]
    dys = [draw(16, n, device=device) for n in SIZES]
    store = JointWeight(policy)
    for x in xs:
        torch.autograd.backward(multiply(x, store, weights, biases, Products()), dys)
    assert len(calls) == 1
    total = [w.grad.clone() for w in weights]
    for w in weights:
        w.grad = None
    for x in xs:  # each with its own copies
        torch.autograd.backward(multiply(x, JointWeight(), weights, biases, Products()), dys)
    assert same(total, [w.grad for w in weights])
    unversioned = JointWeight(policy, is_versioned=False)
    calls.clear()
    for x in xs:
        torch.autograd.backward(multiply(x, unversioned, weights, biases, Products()), dys)
    assert len(calls) == 4
    assert unversioned.nbytes == 0


@pytest.mark.parametrize("checkpointed", [False, True])
def test_copies_are_kept_where_gradients_accumulate(checkpointed, device, monkeypatch):
    """From the second step with several micro-batches on; a checkpoint's second forward pass is no micro-batch."""
    calls = []
    quantize = store_module.quantize_weight
    monkeypatch.setattr(store_module, "quantize_weight", lambda *args: calls.append(1) or quantize(*args))
    xs = [draw(16, K, device=device).requires_grad_() for _ in range(4)]

    def run_steps(policy, counts):
        weight, store, found = Parameter(start.clone()), JointWeight(policy), []
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for micro_batches in counts:
            calls.clear()
            for x in xs[:micro_batches]:
                run = lambda x: multiply(x, store, [weight], [None], Products())[0]  # noqa: E731
                y = checkpoint(run, x, use_reentrant=False) if checkpointed else run(x)
                y.sum().backward()
            found.append(weight.grad.clone())
            quantised.append((len(calls), store.nbytes > 0))
            optimizer.step()
            optimizer.zero_grad()
        return found

    start, again = draw(32, K, device=device), 2 if checkpointed else 1
    quantised = []
    auto = run_steps("auto", (1, 1, 4, 4, 4, 1, 1))
    each = (again, False)
    four = (4 * again, False)
    assert quantised == [each, each, four, (1, True), (1, True), (1, True), each]
    assert same(auto, run_steps("use", (1, 1, 4, 4, 4, 1, 1)))
    quantised.clear()
    monkeypatch.setattr(store_module, "_has_room", lambda device: False)
    assert same(auto[2:4], run_steps("auto", (1, 1, 4, 4))[2:])
    assert quantised == [each, each, four, four]


@pytest.mark.parametrize(("free", "has_room"), [(40, True), (39, False)])
def test_copies_need_half_of_the_reserved_memory(free, has_room, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 140))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 80)
    assert store_module._has_room(torch.device("cuda", 0)) is has_room
    assert store_module._has_room(torch.device("cpu"))


def write_in_place(layer):
    with torch.no_grad():
        layer.weight.mul_(-3)


def load(layer):
    layer.load_state_dict({k: -3 * v for k, v in layer.state_dict().items()})


def step(layer):
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.AdamW([layer.weight], lr=1.0).step()


def step_without_version(layer):
    before = layer.weight._version
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.AdamW([layer.weight], lr=1.0, fused=True).step()
    assert layer.weight._version == before


def replace_parameter(layer):
    layer.weight = Parameter(-3 * layer.weight.detach())


def replace_data(layer):
    layer.weight.data = -3 * layer.weight.data


@pytest.mark.parametrize("policy", ["use", "step", "auto"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("change", [write_in_place, load, step, step_without_version, replace_parameter, replace_data])
def test_a_changed_weight_is_seen(change, frozen, policy, device):
    if frozen and change is step_without_version:
        pytest.skip("optimizers change no frozen weight")
    layer = torch.nn.Linear(K, 32, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(not frozen)
    x, store = draw(4, K, device=device).requires_grad_(), JointWeight(policy)

    def call(store):
        (y,) = multiply(x, store, [layer.weight], [None], Products())
        return y, torch.autograd.grad(y.sum(), x)[0]

    before = call(store)
    change(layer)
    layer.requires_grad_(not frozen)
    after = call(store)
    assert not same(before, after)
    assert same(after, call(JointWeight("use")))


def test_copies_hold_nothing_and_are_not_copied(device):
    weight = Parameter(draw(32, K, device=device))
    store = JointWeight("step")
    x = draw(4, K, device=device).requires_grad_()
    multiply(x, store, [weight], [None], Products())[0].sum().backward()
    assert store.nbytes
    for other in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert other.nbytes == 0
        assert other.policy == "step"
    gc.disable()
    try:
        alive = weakref.ref(weight)
        del weight
        assert alive() is None
    finally:
        gc.enable()
    store.clear()
    assert store.nbytes == 0


def test_no_copy_outlives_a_step_or_is_made_without_one(device):
    x = draw(4, K, device=device)
    weight = Parameter(draw(32, K, device=device))
    with torch.no_grad():
        (y,) = multiply(x, JointWeight(), [weight], [None], Products())
    assert not y.requires_grad
    frozen = Parameter(weight.detach(), requires_grad=False)
    (y,) = multiply(x, JointWeight(), [frozen], [None], Products())
    assert not y.requires_grad


def test_backward_twice(device):
    x = draw(4, K, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    ys = multiply(x, JointWeight(), weights, biases, Products())
    dys = [draw(4, n, device=device) for n in SIZES]
    torch.autograd.backward(ys, dys, retain_graph=True)
    once = [t.grad.clone() for t in (x, *weights, *biases)]
    for t in (x, *weights, *biases):
        t.grad = None
    torch.autograd.backward(ys, dys)
    assert same(once, [t.grad for t in (x, *weights, *biases)])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.backward(ys, dys)


@pytest.mark.parametrize("trained", [True, False])
def test_a_gradient_of_a_gradient_raises(trained, device):
    leaf = draw(4, K, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    for w in weights:
        w.requires_grad_(trained)
    _, normed = norm_to_rows(leaf * 2, None, None, eps=1e-5, offset=0.0, cast="llama")
    for source in (leaf * 2, normed):
        ys = multiply(source, JointWeight(), weights, biases, Products())
        (dx,) = torch.autograd.grad(sum(y.float().square().sum() for y in ys), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            torch.autograd.grad(dx.float().square().sum(), leaf)


def test_strides(device):
    weights, biases = draw_layers(device)
    dys = [draw(19, n, device=device) for n in SIZES]
    wide = draw(19, 2 * K, device=device)
    x = wide[:, :K].detach().requires_grad_()
    ours = run(x, weights, biases, [dy.t().contiguous().t() for dy in dys])
    assert same(ours, run(x.detach().clone().requires_grad_(), weights, biases, dys))
    y = multiply(x, JointWeight(), weights, biases, Products())[0]
    y.sum().backward()  # an expanded gradient
    assert x.grad.isfinite().all()


def test_many_layers(device):
    x, count = draw(4, K, device=device).requires_grad_(), 5
    weights = [Parameter(draw(16, K, device=device)) for _ in range(count)]
    dys = [draw(4, 16, device=device) for _ in range(count)]
    ours = run(x, weights, [None] * count, dys)
    for a, e in zip(ours, emulate(x, weights, [None] * count, dys, rounds=False), strict=True):
        assert error(a, e) < 0.06


def test_results_may_be_written_to(device):
    x = draw(2, 3, K, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    for y in multiply(x, JointWeight(), weights, biases, Products()):
        y.add_(1.0).sum().backward(retain_graph=True)


def test_evaluation_before_training(device, monkeypatch):
    """Nothing that is kept for later is an inference tensor's."""
    monkeypatch.setattr(constants, "_made", {})
    x, norm_weight, store = (
        draw(4, K, device=device).requires_grad_(),
        Parameter(draw(K, device=device)),
        JointWeight("step"),
    )
    weights, biases = draw_layers(device)

    def call():
        _, normed = norm_to_rows(x, None, norm_weight, eps=1e-5, offset=0.0, cast="llama")
        return multiply(normed, store, weights, biases, Products())

    with torch.inference_mode():
        before = call()
    after = call()
    torch.autograd.backward(after, [torch.ones_like(y) for y in after])
    assert same(before, after)
    assert norm_weight.grad is not None


@pytest.mark.parametrize("policy", ["use", "step", "auto"])
@pytest.mark.parametrize("frozen", [False, True])
def test_copies_in_a_capture(frozen, policy, device, monkeypatch):
    """A graph quantises trainable weights itself, and holds the copies of frozen ones that it reads."""
    layer = torch.nn.Linear(K, 32, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(not frozen)
    x, store, measured = draw(4, K, device=device).requires_grad_(), JointWeight(policy), []

    def call():
        multiply(x, store, [layer.weight], [None], Products())[0].sum().backward()
        return store._kept

    before, kept, measure = call(), store.nbytes, store_module.measure_weights
    monkeypatch.setattr(store_module, "is_captured", lambda _: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(store_module, "measure_weights", lambda parts: measured.append(parts) or measure(parts))
    assert call() is before  # in a rehearsal
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert call() is before
    assert len(measured) == (0 if frozen else 2)
    assert store._captured == ([before] if frozen else [])
    monkeypatch.undo()
    write_in_place(layer)
    assert call() is not before
    assert store.nbytes == (2 * kept if frozen else 0)  # a replay could change the trainable weight once more
    store.clear()
    assert store.nbytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["use", "step"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_cuda_graph_sees_new_weights(frozen, policy, device):
    x = draw(32, K, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    for w in weights:
        w.requires_grad_(not frozen)
    dys, store = [draw(32, n, device=device) for n in SIZES], JointWeight(policy)
    inputs = [t for t in (x, *weights, *biases) if t.requires_grad]

    def call(store):
        ys = multiply(x, store, weights, biases, Products())
        return [*ys, *torch.autograd.grad(ys, inputs, dys)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(store)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(store)
    with torch.no_grad():
        x.mul_(2)
        for w in weights:
            if not frozen:  # a replay does not see edits of frozen weights
                w.mul_(-3)
    graph.replay()
    assert same(found, call(JointWeight("use")))
    assert same(found, call(store))


def test_no_tokens(device):
    x = draw(0, K, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    ours = run(x, weights, biases, [draw(0, n, device=device) for n in SIZES])
    assert ours[0].shape == (0, 48)
    assert all(not t.any() for t in ours[4:])


# ----------------------------------------------------------------------------------------------------- public functions


def test_linear_and_projections(device):
    x = draw(2, 19, K, device=device).requires_grad_()
    weights, biases = draw_layers(device)
    y = tigon.fp8.linear(x, weights[0], biases[0])
    assert error(y, F.linear(x.double(), weights[0].double(), biases[0].double())) < 0.05
    assert same(tigon.fp8.projections(x, weights, biases), multiply(x, JointWeight(), weights, biases, Products()))
    assert same(tigon.fp8.projections(x, weights), multiply(x, JointWeight(), weights, [None] * 3, Products()))
    q, s = tigon.fp8.quantize_rows(x[0])
    assert error(q.double() * s, x[0].double()) < 0.04
    q, s = tigon.fp8.quantize_weight(*weights)
    assert error(q.double() * s[0], torch.cat([*weights]).double()) < 0.04
    assert columns.transpose_rows(q).shape == (K, 80)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype, device):
    x, w = draw(4, K, device=device, dtype=dtype), Parameter(draw(32, K, device=device, dtype=torch.float32))
    b = draw(32, device=device)
    x.requires_grad_()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = tigon.fp8.linear(x, w, b)
        y.sum().backward()
    assert torch.equal(y, tigon.fp8.linear(x.to(torch.bfloat16), w, b))
    assert (y.dtype, x.grad.dtype, w.grad.dtype) == (torch.bfloat16, dtype, torch.float32)


X, W = torch.zeros(2, 16, dtype=torch.bfloat16), torch.zeros(16, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: tigon.fp8.linear(X.half(), W), r"linear: x must be \(..., K\) torch.bfloat16, got \(2, 16\) torch.fl"),
        (lambda: tigon.fp8.linear(X[:, :15], W[:, :15]), r"linear: x must have a width that is a multiple of 16, got"),
        (lambda: tigon.fp8.linear(X, W[:15]), r"linear: weight must have a multiple of 16 rows, got \(15, 16\)"),
        (lambda: tigon.fp8.linear(X, W.half()), r"linear: weight must be \(N, 16\), bf16 or fp32, on cpu, got"),
        (lambda: tigon.fp8.linear(X, W.repeat(1, 2)), r"linear: weight must be \(N, 16\), .*got \(16, 32\)"),
        (lambda: tigon.fp8.linear(X, W, W[0, :8]), r"linear: the bias of weight must be \(16,\), .* got \(8,\)"),
        (lambda: tigon.fp8.linear(X, torch.nn.Linear(16, 16)), r"linear: weight must be a tensor, got Linear: pass"),
        (lambda: tigon.fp8.linear(X, W.to("meta")), r"on cpu, got \(16, 16\) torch.bfloat16 on meta"),
        (lambda: tigon.fp8.projections(X, []), r"projections: weights and biases must be as many, at least one"),
        (lambda: tigon.fp8.projections(X, [W], [None, None]), r"projections: weights and biases must be .* 1 and 2"),
        (lambda: tigon.fp8.quantize_rows(X[0]), r"quantize_rows: x must be a matrix in bf16, fp16 or fp32, got"),
        (lambda: tigon.fp8.quantize_weight(W, W[:, :8]), r"quantize_weight: weights must have one width K, got"),
        (lambda: Products(dw="fp4"), r"Products: dw must be \"fp8\" or \"bf16\", got 'fp4'"),
    ],
)  # fmt: skip
def test_a_bad_call_gets_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_devices_without_fp8_products(monkeypatch):
    why = products._find_obstacle.__wrapped__
    assert not tigon.fp8.is_supported("cpu")
    assert "compute capability 9.0, not a device of type 'cpu'" in why(torch.device("cpu"))
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why(gpu) == "FP8 products need an NVIDIA GPU: torch finds none."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = []
    for capability, cuda, hip in itertools.product([(8, 9), (9, 0)], ["12.8", "13.0"], [None, "7.0"]):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        found.append(why(gpu))
    assert [bool(sentence) for sentence in found] == [True] * 6 + [False, True]
    assert "got 8.9" in found[0]
    assert "CUDA 12.9 or later" in found[4]


def test_parts_of_a_larger_buffer_are_quantised_anew(device):
    """Some optimizers write to a buffer of all parameters: versions and addresses of its parts stay."""
    buffer = torch.randn(2 * 64 * 64, device=device).to(torch.bfloat16)
    weight = Parameter(torch.empty(0, dtype=torch.bfloat16, device=device))
    weight.data = buffer[: 64 * 64].view(64, 64)
    store, x = JointWeight("step"), draw(17, 64, device=device)
    before = multiply(x, store, [weight], [None], Products())[0]
    buffer.mul_(2)
    assert torch.equal(multiply(x, store, [weight], [None], Products())[0], 2 * before)


def test_parameters_can_be_swapped(device):
    weight, other = (Parameter(draw(64, 64, device=device)) for _ in range(2))
    store, x = JointWeight("step"), draw(17, 64, device=device)
    before = multiply(x, store, [weight], [None], Products())[0]
    torch.utils.swap_tensors(weight, other)
    assert not torch.equal(multiply(x, store, [weight], [None], Products())[0], before)
