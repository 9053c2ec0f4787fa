"""Frozen weights in FP8 under adapters: results and input gradients beside the trained path, and weights released."""

import copy
import io
import pickle

import pytest
import torch
from fp8_recipe import bf16, error, narrow, scale
from torch.nn import Parameter

import tigon
from tigon.ops.fp8.frozen import FrozenStack, ReplacedWeight, ReplacedWeights
from tigon.ops.fp8.multiply import Products, multiply
from tigon.ops.fp8.rows import quantize_rows
from tigon.ops.fp8.store import JointWeight
from tigon.ops.linear import adapter_products
from tigon.ops.linear.adapters import gated_lora_linear, lora_linear
from tigon.ops.linear.lora_mlp import lora_mlp
from tigon.ops.linear.tiled_lora_mlp import tiled_lora_mlp

pytestmark = pytest.mark.usefixtures("backend")
SIZES = (48, 16, 32)  # of q, k and v
K, M = 64, 33


def draw(*shape, device, dtype=torch.bfloat16, size=1.0):
    return (torch.randn(*shape) * size).to(dtype).to(device)


def draw_weights(device, sizes=SIZES, width=K, dtype=torch.bfloat16):
    return [Parameter(draw(n, width, device=device, dtype=dtype, size=0.1), requires_grad=False) for n in sizes]


def make_stack(weights, released=False):
    if not released:
        return FrozenStack(JointWeight("auto").read(weights), weights)
    replaced = ReplacedWeights([Parameter(w.clone(), requires_grad=False) for w in weights])
    return FrozenStack(replaced, [replaced.stand_in(i) for i in range(len(weights))])


def make_adapters(stack, device, rank=4, zero=False, biased=False, dropout=0.0, dtype=torch.bfloat16):
    """An adapter on each layer of a stack. zero: B is zero, so that nothing but the frozen product is left."""
    layers = []
    for i, w in enumerate(stack.parameters):
        n, width = w.shape
        a = Parameter(draw(rank, width, device=device, dtype=dtype, size=width**-0.5))
        b = Parameter(draw(n, rank, device=device, dtype=dtype, size=0.0 if zero else 0.3))
        bias = draw(n, device=device) if biased else None
        layers.append(tigon.LoRA(stack.layer(i), a, b, 0.5, bias, dropout))
    return layers


@pytest.mark.parametrize("released", [False, True])
def test_results_and_input_gradients_are_those_of_the_trained_path(device, released, backend):
    weights = draw_weights(device)
    x = draw(M, K, device=device).requires_grad_()
    trained = [Parameter(w.clone()) for w in weights]
    ys = multiply(x, JointWeight("use"), trained, [None] * 3, Products())
    dys = [draw(M, n, device=device) for n in SIZES]
    (dx,) = torch.autograd.grad(ys, x, dys)
    layers = make_adapters(make_stack(weights, released), device, zero=True)
    found = lora_linear(x, layers)
    assert all(torch.equal(y, wanted) for y, wanted in zip(found, ys, strict=True))
    # The reference multiplies the layers' gradients one by one, and sums in bf16.
    (own,) = torch.autograd.grad(found, x, dys)
    assert torch.equal(own, dx) if backend == "triton" else error(own, dx.double()) < 5e-3


@pytest.mark.parametrize("given", [(0,), (1,), (0, 2), (1, 2)])
def test_layers_without_a_gradient_take_no_part(device, given):
    weights = draw_weights(device)
    x = draw(M, K, device=device).requires_grad_()
    ys = lora_linear(x, make_adapters(make_stack(weights), device, zero=True))
    dys = [draw(M, SIZES[i], device=device) for i in given]
    (dx,) = torch.autograd.grad([ys[i] for i in given], x, dys)
    dy = torch.cat([dy.double() for dy in dys], 1)
    sd, sw = scale(dy.abs().amax(1, keepdim=True)), scale(torch.cat(weights).abs().amax())
    w = torch.cat([weights[i] for i in given])
    wanted = bf16((narrow(dy, sd) @ narrow(w, sw)) * (sd * sw))
    assert error(dx, wanted) < 4e-3


def formula(x, layers, weights):
    """Results in fp64 with frozen products by the recipe."""
    sx, sw = scale(x.detach().abs().amax(1, keepdim=True)), scale(torch.cat(weights).abs().amax())
    ys = []
    for layer, w in zip(layers, weights, strict=True):
        frozen = (narrow(x.detach(), sx) @ narrow(w, sw).t()) * (sx * sw)
        bias = 0.0 if layer.bias is None else layer.bias.double()
        ys.append(frozen + bias + layer.scale * (x.double() @ layer.a.double().t()) @ layer.b.double().t())
    return ys


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adapters_and_biases_stand_beside_the_frozen_product(device, dtype):
    weights = draw_weights(device)
    x = draw(M, K, device=device).requires_grad_()
    layers = make_adapters(make_stack(weights), device, biased=True, dtype=dtype)
    ys = lora_linear(x, layers)
    wanted = formula(x, layers, weights)
    assert all(error(y, w) < 5e-3 for y, w in zip(ys, wanted, strict=True))
    dys = [draw(M, n, device=device) for n in SIZES]
    inputs = [x, *(t for layer in layers for t in (layer.a, layer.b))]
    dx, *thin = torch.autograd.grad(ys, inputs, dys)
    dense = [layer._replace(weight=w) for layer, w in zip(layers, weights, strict=True)]
    exact, *exact_thin = torch.autograd.grad(lora_linear(x, dense), inputs, dys)
    assert 1e-3 < error(dx, exact.double()) < 0.06
    assert all(torch.equal(d, e) for d, e in zip(thin, exact_thin, strict=True))  # no FP8 reaches them


def test_dropout_draws_masks_for_the_adapters_alone(device):
    weights = draw_weights(device)
    x = draw(M, K, device=device).requires_grad_()
    layers = make_adapters(make_stack(weights), device, dropout=0.25)
    dense = [layer._replace(weight=w) for layer, w in zip(layers, weights, strict=True)]
    dys = [draw(M, n, device=device) for n in SIZES]
    found = []
    for own in (layers, dense):
        torch.manual_seed(3)
        ys = lora_linear(x, own)
        found.append((*ys, *torch.autograd.grad(ys, x, dys)))
    assert all(1e-3 < error(one, other.double()) < 0.06 for one, other in zip(*found, strict=True))


def test_x_is_quantised_once_for_layers_that_share_it(device, monkeypatch, backend):
    if backend == "torch":
        pytest.skip("the reference computes layer by layer")
    calls = []

    def count(*tensors):
        calls.append(len(tensors))
        return quantize_rows(*tensors)

    monkeypatch.setitem(adapter_products.QUANTIZERS, None, count)
    lora_linear(draw(M, K, device=device), make_adapters(make_stack(draw_weights(device)), device))
    assert calls == [1]


def test_other_dtypes_take_the_dense_weight(device):
    weights = draw_weights(device, dtype=torch.float32)
    x = draw(M, K, device=device, dtype=torch.float32)
    layers = make_adapters(make_stack(weights), device, dtype=torch.float32)
    dense = [layer._replace(weight=w) for layer, w in zip(layers, weights, strict=True)]
    assert all(map(torch.equal, lora_linear(x, layers), lora_linear(x, dense)))


@pytest.mark.parametrize("run", [lora_mlp, tiled_lora_mlp, "apart"], ids=["lora_mlp", "tiled_lora_mlp", "apart"])
@pytest.mark.parametrize("released", [False, True])
def test_gated_units_are_as_their_layers_one_by_one(device, run, released, backend):
    if backend == "torch" and run is tiled_lora_mlp:
        pytest.skip("tiles need the kernels")
    up = draw_weights(device, (96, 96))
    down = draw_weights(device, (K,), 96)
    stacks = make_stack(up, released), make_stack(down, released)
    layers = (*make_adapters(stacks[0], device), *make_adapters(stacks[1], device))
    rows = 270 if run is tiled_lora_mlp else M  # three tiles
    x, dy = draw(rows, K, device=device).requires_grad_(), draw(rows, K, device=device)
    inputs = [x, *(t for layer in layers for t in (layer.a, layer.b))]

    def of(found):
        return [found, *torch.autograd.grad(found, inputs, dy)]

    def apart():
        g, u = lora_linear(x, layers[:2])
        return lora_linear(torch.nn.functional.silu(g) * u, layers[2:])[0]

    def whole():
        if run == "apart":
            g, u = lora_linear(x, layers[:2])
            return gated_lora_linear(g, u, layers[2])
        options = {"tile_bytes": 1} if run is tiled_lora_mlp else {}
        return run(x, layers, **options)

    dense = [layer._replace(weight=w) for layer, w in zip(layers, (*up, *down), strict=True)]
    g, u = lora_linear(x, dense[:2])
    exact = of(lora_linear(torch.nn.functional.silu(g) * u, dense[2:])[0])
    ours, beside = of(whole()), of(apart())
    for own, other, wanted in zip(ours, beside, exact, strict=True):
        noise = error(other, wanted.double())
        assert 1e-3 < noise < 0.12
        assert error(own, wanted.double()) < 1.3 * noise
        assert error(own, other.double()) < 0.8 * noise


# -------------------------------------------------------------------------------------------------- released weights


def test_released_weights_take_one_byte_and_come_back_as_rounded(device):
    weights = draw_weights(device)
    amax = torch.cat(weights).abs().amax()
    wanted = [bf16(narrow(w, scale(amax)) * scale(amax)) for w in weights]
    replaced = ReplacedWeights(weights)
    assert replaced.nbytes == sum(SIZES) * (K + 4)
    assert not any(w.numel() for w in weights)
    stand_ins = [replaced.stand_in(i) for i in range(3)]
    assert all(torch.equal(w + 0, exact.to(w.dtype)) for w, exact in zip(stand_ins, wanted, strict=True))
    assert replaced.give_back() == weights
    assert all(torch.equal(w.double(), exact) for w, exact in zip(weights, wanted, strict=True))


def test_a_stand_in_is_read_as_the_weight(device):
    replaced = ReplacedWeights(draw_weights(device))
    w = replaced.stand_in(1)
    exact = replaced.dequantize(1)
    assert (w.shape, w.dtype, w.device, w.requires_grad) == (exact.shape, exact.dtype, exact.device, False)
    assert isinstance(w, Parameter)
    assert w.untyped_storage().nbytes() <= 4
    assert w.to(w.device) is w
    assert type(w.detach()) is ReplacedWeight
    assert type(w.data) is ReplacedWeight
    x = draw(M, K, device=device)
    assert torch.equal(torch.nn.functional.linear(x, w), x @ exact.t())
    assert torch.equal(torch.stack([w, w])[0], exact)
    assert torch.equal(w.T, exact.T)
    assert torch.equal(w.float(), exact.float())
    for copied in (copy.deepcopy(w), pickle.loads(pickle.dumps(w)), torch.clone(w), w.cpu()):
        assert torch.equal(torch.as_tensor(copied.cpu() + 0), exact.cpu())
    file = io.BytesIO()
    torch.save({"w": w.detach()}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["w"], exact)
    empty = torch.empty_like(exact)
    assert torch.equal(empty.copy_(w), exact)


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.add_(1), lambda w: w.__iadd__(1), lambda w: w.data.__iadd__(1), lambda w: w.__setitem__(0, 1),
        lambda w: setattr(w, "data", torch.ones_like(w)), lambda w: torch.nn.init.normal_(w), lambda w: w.copy_(w + 1),
        lambda w: torch.add(w, 1, out=w), lambda w: w.requires_grad_(), lambda w: setattr(w, "requires_grad", True),
    ],
)  # fmt: skip
def test_a_write_to_a_stand_in_raises(device, write):
    w = ReplacedWeights(draw_weights(device)).stand_in(0)
    with torch.no_grad(), pytest.raises(RuntimeError, match="kept in FP8 alone"):
        write(w)


def test_weights_are_transposed_once_for_all_tiles(device, monkeypatch):
    calls = []
    monkeypatch.setattr(
        ReplacedWeights, "read_transposed",
        lambda self, parameters, read=ReplacedWeights.read_transposed: (calls.append(1), read(self, parameters))[1],
    )  # fmt: skip
    with tigon.use_backend("triton"):
        up, down = make_stack(draw_weights(device, (96, 96)), True), make_stack(draw_weights(device, (K,), 96), True)
        layers = (*make_adapters(up, device), *make_adapters(down, device))
        x = draw(270, K, device=device).requires_grad_()
        y = tiled_lora_mlp(x, layers, tile_bytes=1)  # three tiles
        y.backward(torch.ones_like(y))
    assert len(calls) == 2
