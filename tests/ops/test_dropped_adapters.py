"""Adapters with dropout: numbers and gradients for the masks that were drawn, which are the same in every pass."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from adapters_made import draw_layers
from numerics import check, evaluate

import tigon
from tigon.fusion.memory.recompute import Recompute
from tigon.ops.acts import ACTS
from tigon.ops.linear.adapters import gated_lora_linear, lora_linear
from tigon.ops.linear.lora import LoRA
from tigon.ops.linear.lora_mlp import lora_mlp
from tigon.ops.linear.opaque import Opaque, opaque_lora_linear
from tigon.ops.linear.tiled_lora_mlp import tiled_lora_mlp
from tigon.ops.lora_dropout import draw_masks, keep_mask

# Multiples of 2⁻¹⁶, so that the reference may divide by 1-p.
P = (0.25, 0.25, 0.5)
SCALES = (2.0, 0.5, 1.7)


def drawn(rows=(3, 5), H=64, widths=(48, 16, 16), ranks=(4, 4, 4), dtype=torch.float32, adapter=None):
    return draw_layers(rows, [(N, H) for N in widths], ranks, dtype, adapter)


def layers_of(tensors, p=P):
    return [
        LoRA(tensors[3 * i].detach(), *tensors[3 * i + 1 : 3 * i + 3], SCALES[i], None, p[i])
        for i in range(len(tensors) // 3)
    ]


def trained(tensors):
    return [i for i in range(len(tensors)) if i % 3 != 1]


def group(x, *tensors, p=P):
    torch.manual_seed(5)
    return lora_linear(x, layers_of(tensors, p))


def applied(x, layer, i, masks):
    """PEFT's formula, with a mask that is there."""
    weight, a, b, scale, _, p = layer
    keep = keep_mask(masks, i, x.shape[:-1].numel(), x.shape[-1]).view(x.shape)
    low = F.linear(F.linear((x * keep / (1 - p)).to(a.dtype), a), b)
    return (F.linear(x, weight) + low * scale).to(x.dtype)


def by_hand(x, *tensors, p=P):
    torch.manual_seed(5)
    layers = layers_of(tensors, p)
    masks = draw_masks([layer.dropout for layer in layers], x.device)
    return tuple(applied(x, layer, i, masks) for i, layer in enumerate(layers))


CASES = {
    "q, k, v": {},
    "least": {"rows": (1,), "H": 8, "widths": (1,), "ranks": (1,)},
    "ranks that differ": {"ranks": (1, 8, 3)},
    "several tiles": {"rows": (70,), "H": 140, "widths": (48, 16), "ranks": (16, 40)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradients(case, dtype, backend, device):
    make = drawn(**CASES[case], dtype=dtype)
    grad = trained(make(torch.Generator()))
    check(group, by_hand, lambda g: make(g, device), grad=grad, draws=8 if case == "least" else 2)


def test_layers_with_and_without_dropout_together(backend, device):
    make = drawn()
    check(group, by_hand, lambda g: make(g, device), grad=trained(make(torch.Generator())), p=(0.0, 0.5, 0.0))


def test_gradients_are_those_of_the_forward_pass():
    """By finite differences in fp64, through the same seed."""
    x, *tensors = drawn(rows=(3,), H=9, widths=(4, 5), ranks=(2, 3), dtype=torch.float64)(torch.Generator())
    leaves = [t.requires_grad_(i % 3 != 0) for i, t in enumerate(tensors)]
    assert torch.autograd.gradcheck(lambda x, *t: group(x, *t), (x.requires_grad_(), *leaves))


def test_the_adapter_s_mean_is_its_value_without_dropout(backend, device):
    """Over 400 calls, within six standard deviations: the masks are new each time, and 1/(1-p) is right."""
    x, weight, a, b = drawn(rows=(2,), H=24, widths=(3,), ranks=(2,))(torch.Generator().manual_seed(0), device)
    torch.manual_seed(0)
    results = torch.stack([lora_linear(x, [LoRA(weight, a, b, 2.0, None, 0.3)])[0] for _ in range(400)])
    expected = lora_linear(x, [LoRA(weight, a, b, 2.0)])[0]
    spread = results.std(0)
    assert (spread > 0).all()
    assert ((results.mean(0) - expected).abs() < 6 * spread / math.sqrt(400)).all()


def generator_state(device):
    return torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()


def test_without_dropout_nothing_is_drawn_and_nothing_changes(backend, device):
    inputs = drawn(dtype=torch.bfloat16)(torch.Generator().manual_seed(0), device)
    state = generator_state(device)
    plain = lora_linear(inputs[0], [layer._replace(dropout=0.0) for layer in layers_of(inputs[1:])])
    assert torch.equal(generator_state(device), state)
    bare = lora_linear(inputs[0], [LoRA(*layer[:4]) for layer in layers_of(inputs[1:])])
    assert all(torch.equal(one, other) for one, other in zip(plain, bare, strict=True))


def test_seeds_decide_the_bits(backend, device):
    inputs = drawn(dtype=torch.bfloat16)(torch.Generator().manual_seed(0), device)
    first, again = (evaluate(group, inputs, {}, grad=trained(inputs)) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = lora_linear(inputs[0], layers_of(inputs[1:]))  # the generator has moved on
    assert not any(torch.equal(y, first[f"output {i}"]) for i, y in enumerate(other))


def test_every_device_and_backend_drops_the_same(triton_backend, device):
    inputs = drawn()(torch.Generator().manual_seed(0), device)
    got = group(*inputs)
    with tigon.use_backend("torch"):
        expected = group(*inputs)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_layers_that_multiply_by_themselves(dtype, fresh, backend, device):
    def opaque(x, *tensors):
        torch.manual_seed(5)
        layers = []
        for layer in layers_of(tensors):
            product = functools.partial(F.linear, weight=layer.weight)
            layers.append(layer._replace(weight=Opaque(product, layer.weight.shape, x.device, fresh=fresh)))
        return opaque_lora_linear(1.0 * x, layers)

    make = drawn(dtype=dtype)
    check(opaque, by_hand, lambda g: make(g, device), grad=trained(make(torch.Generator())), draws=2)


# ------------------------------------------------------------------------------------------------------------- gated


def gated(gate, up, *tensors, act="silu"):
    torch.manual_seed(5)
    return gated_lora_linear(gate, up, layers_of(tensors)[0], act=act)


def gated_by_hand(gate, up, *tensors, act="silu"):
    torch.manual_seed(5)
    (layer,) = layers_of(tensors)
    return applied(ACTS[act].value(gate) * up, layer, 0, draw_masks([layer.dropout], gate.device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gated_layer(dtype, backend, device):
    make = drawn(rows=(70,), H=40, widths=(24,), ranks=(4,), dtype=dtype)

    def inputs(generator):
        gate, *rest = make(generator, device)
        return [gate, torch.randn(gate.shape, generator=generator).to(gate), *rest]

    check(gated, gated_by_hand, inputs, grad=[0, 1, 3, 4], draws=2)


H, N = 48, 72
SIZES = ((N, H), (N, H), (H, N))


def drawn_mlp(rows, dtype=torch.bfloat16, ranks=(8, 8, 8), adapter=None):
    return draw_layers((rows,), SIZES, ranks, dtype, adapter, b=0.5)


def mlp(x, *tensors, p=P):
    torch.manual_seed(5)
    return lora_mlp(x, tuple(layers_of(tensors, p)))


def tiled(x, *tensors, p=P):
    torch.manual_seed(5)
    return tiled_lora_mlp(x, tuple(layers_of(tensors, p)), tile_bytes=1)


def mlp_by_hand(x, *tensors, p=P):
    """Gate and up are one group with one seed, down another."""
    torch.manual_seed(5)
    gate, up, down = layers_of(tensors, p)
    first, last = draw_masks([gate.dropout, up.dropout], x.device), draw_masks([down.dropout], x.device)
    h = F.silu(applied(x, gate, 0, first)) * applied(x, up, 1, first)
    return (
        applied(h, down, 0, last)
        if last is not None
        else F.linear(h, down.weight) + down.scale * F.linear(F.linear(h, down.a), down.b)
    )


@pytest.mark.parametrize("p", [P, (0.25, 0.25, 0.0)], ids=["all", "gate and up"])
@pytest.mark.parametrize("unit", [mlp, tiled], ids=["at once", "in tiles"])
def test_the_whole_mlp(unit, p, triton_backend, device):
    make = drawn_mlp(140)
    check(unit, mlp_by_hand, lambda g: make(g, device), grad=trained(range(10)), draws=2, p=p)


def test_the_whole_mlp_layer_by_layer(triton_backend, device):
    """Beyond the ranks that the unit's own pass takes; no group draws twice."""
    make = drawn_mlp(20, ranks=(8, 40, 8))
    check(mlp, mlp_by_hand, lambda g: make(g, device), grad=trained(range(10)), draws=4)


# --------------------------------------------------------------------------------------------- passes, and what is kept


@pytest.mark.parametrize("saved_first", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("fn", ["group", "gated", "mlp"])
def test_checkpoints_draw_the_same_masks(fn, reentrant, saved_first, triton_backend, device):
    if fn == "mlp":
        inputs = drawn_mlp(20)(torch.Generator().manual_seed(0), device)
    elif fn == "group":
        inputs = drawn(dtype=torch.bfloat16)(torch.Generator().manual_seed(0), device)
    else:
        gate, *rest = drawn(widths=(24,), ranks=(4,))(torch.Generator().manual_seed(0), device)
        inputs = [gate, gate.flip(0), *rest]
    grad = [0, 1, 3, 4] if fn == "gated" else trained(inputs)

    def run(*tensors):
        saved_by = Recompute.checkpoint_hooks() if saved_first else None
        if fn == "mlp":
            return lora_mlp(tensors[0], tuple(layers_of(tensors[1:])), saved_by=saved_by)
        if fn == "group":
            return lora_linear(tensors[0], layers_of(tensors[1:]), saved_by=saved_by)
        return gated_lora_linear(*tensors[:2], layers_of(tensors[2:])[0], saved_by=saved_by)

    found = []
    for checkpointed in (False, True):
        leaves = [t.detach().clone().requires_grad_(i in grad) for i, t in enumerate(inputs)]
        torch.manual_seed(5)
        if checkpointed:
            results = torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=reentrant)
        else:
            results = run(*leaves)
        torch.manual_seed(6)  # what comes between forward and backward draws numbers as well
        results = results if isinstance(results, tuple) else (results,)
        sum(y.square().sum() for y in results).backward()
        found.append([*results, *(leaves[i].grad for i in grad)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_what_is_kept(triton_backend, device):
    """x and r numbers a token for each adapter: no mask, and no dropped copy."""
    inputs = drawn(rows=(50,), dtype=torch.bfloat16)(torch.Generator().manual_seed(0), device)
    leaves = [t.requires_grad_(i % 3 != 1) for i, t in enumerate(inputs)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        lora_linear(leaves[0], layers_of(leaves[1:]))
    parameters = {t.data_ptr() for t in leaves}
    assert [tuple(t.shape) for t in saved if t.data_ptr() not in parameters] == [(50, 12)]


def test_compiles_whole(device):
    torch._dynamo.reset()
    inputs = drawn(H=20, widths=(6, 7), ranks=(2, 3))(torch.Generator().manual_seed(0), device)
    compiled = torch.compile(
        lambda *t: lora_linear(t[0], layers_of(t[1:])), fullgraph=True,
        backend="inductor" if device.type == "cuda" else "aot_eager",
    )  # fmt: skip
    leaves = [t.requires_grad_(i % 3 != 1) for i, t in enumerate(inputs)]
    first, other = compiled(*leaves), compiled(*leaves)
    assert not torch.equal(first[0], other[0])
    sum(y.sum() for y in first).backward()
    assert all(t.grad is not None for i, t in enumerate(leaves) if i % 3 != 1)
    torch._dynamo.reset()


@pytest.mark.gpu
def test_no_host_synchronisation_and_new_masks_in_a_replayed_graph(device):
    inputs = drawn(rows=(64,), dtype=torch.bfloat16)(torch.Generator().manual_seed(0), device)
    leaves = [t.requires_grad_(i % 3 != 1) for i, t in enumerate(inputs)]
    layers = layers_of(leaves[1:])

    def step():
        results = lora_linear(leaves[0], layers)
        torch.autograd.backward(results, [torch.ones_like(y) for y in results])
        return results[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(y, first)


@pytest.mark.parametrize("p", [1.0, -0.1, float("nan"), "a half"])
def test_bad_probabilities_get_a_sentence(p):
    layer = LoRA(torch.ones(6, 4), torch.ones(2, 4), torch.ones(6, 2), dropout=p)
    with pytest.raises(
        ValueError, match=r"lora_linear: layers\[0\].dropout must be a number, at least 0 and below 1, got"
    ):
        lora_linear(torch.ones(3, 4), [layer])
