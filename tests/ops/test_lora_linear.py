"""tigon.lora_linear and its gated form: numbers, what is kept, what is asked for, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from adapters_made import draw_layers
from numerics import check, evaluate
from test_invariants import Work

from tigon.ops.acts import ACTS
from tigon.ops.linear.adapter_products import rounded_product
from tigon.ops.linear.adapters import gated_lora_linear, lora_linear, lora_linear_reference
from tigon.ops.linear.lora import LoRA

EACH = ("weight", "a", "b", "bias")


def unflat(tensors, scales):
    """[x, then weight, a, b, bias of each layer] → x and the layers."""
    x, *rest = tensors
    layers = [LoRA(*rest[4 * i : 4 * i + 3], scale, rest[4 * i + 3]) for i, scale in enumerate(scales)]
    return x, layers


def group(*tensors, scales):
    return lora_linear(*unflat(tensors, scales))


def reference(*tensors, scales):
    return lora_linear_reference(*unflat(tensors, scales))


def as_peft(*tensors, scales):
    """What PEFT computes: x widened to the adapter's dtype, and the sum narrowed to the base layer's."""
    x, layers = unflat(tensors, scales)
    results = []
    for weight, a, b, scale, bias, _ in layers:
        y = F.linear(x, weight, bias)
        low = F.linear(F.linear(x.to(a.dtype), a), b) * scale
        results.append((y + low).to(y.dtype))
    return tuple(results)


def made(rows=(3, 5), H=64, widths=(48, 16, 16), ranks=(4, 4, 4), dtype=torch.bfloat16, adapter=None, bias=False):
    return draw_layers(rows, [(N, H) for N in widths], ranks, dtype, adapter, bias=float(bias))


def wanted(tensors):
    """All but the frozen weights."""
    return [i for i, t in enumerate(tensors) if t is not None and i % 4 != 1]


CASES = {
    "q, k, v": {},
    "one layer": {"widths": (20,), "ranks": (3,)},
    "ranks that differ, biases": {"ranks": (1, 8, 3), "bias": True},
    "least": {"rows": (1,), "H": 8, "widths": (1,), "ranks": (1,)},
    "one dimension": {"rows": (), "widths": (8, 9), "ranks": (2, 3)},
    "beyond a block": {"rows": (300,), "H": 130, "widths": (200, 70), "ranks": (16, 64)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradients(case, dtype, backend, device):
    make = made(**CASES[case], dtype=dtype)
    scales = (2.0, 0.5, 1.7)[: len(CASES[case].get("widths", (1, 1, 1)))]
    grad = wanted(make(torch.Generator()))
    draws = 8 if case == "least" else 2
    check(group, reference, lambda g: make(g, device), eager=as_peft, grad=grad, scales=scales, draws=draws)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_in_fp32_without_autocast(dtype, backend, device):
    """PEFT widens x; so do the numbers here, although no copy of x in fp32 exists."""
    make = made(rows=(40,), dtype=dtype, adapter=torch.float32)
    check(
        group, reference, lambda g: make(g, device), eager=as_peft, grad=wanted(make(torch.Generator())),
        scales=(2.0, 0.5, 1.7), draws=4, roundings=2**8 if dtype == torch.bfloat16 else 4,
    )  # fmt: skip


def test_adapters_of_other_dtypes(backend, device):
    """One layer's adapter in fp32, another's in bf16: each gradient has its parameter's dtype."""
    g = torch.Generator().manual_seed(0)
    x, w1, a1, b1, _, w2, a2, b2, _ = made(widths=(8, 8), ranks=(2, 3))(g, device)
    leaves = [t.requires_grad_() for t in (x, a1.float(), b1.float(), a2, b2)]
    results = lora_linear(leaves[0], [LoRA(w1, leaves[1], leaves[2]), LoRA(w2, leaves[3], leaves[4], 2.0)])
    grads = torch.autograd.grad(results, leaves, [torch.ones_like(y) for y in results])
    assert [t.dtype for t in (*results, *grads)] == [torch.bfloat16] * 3 + [torch.float32] * 2 + [torch.bfloat16] * 2


def test_fp64_runs_through_the_reference(device):
    inputs = [None if t is None else t.double() for t in made(bias=True)(torch.Generator().manual_seed(0), device)]
    scales, grad = (2.0, 0.5, 1.7), wanted(inputs)
    got, expected = (evaluate(f, inputs, {"scales": scales}, grad=grad) for f in (group, as_peft))
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["transposed", "every other", "unaligned"])
def test_strided_inputs(layout, backend, device):
    def strided(t):
        if t is None or t.dim() < 2:
            return t
        if layout == "transposed":
            return t.transpose(0, -1).contiguous().transpose(0, -1)
        if layout == "every other":
            wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), 77)
            wide[..., ::2] = t
            return wide[..., ::2]
        shifted = t.new_full((t.numel() + 1,), 77)
        shifted[1:] = t.flatten()
        return shifted[1:].view(t.shape)

    make = made(dtype=torch.float32)
    inputs = make(torch.Generator().manual_seed(0), device)
    check(group, reference, *map(strided, inputs), eager=as_peft, grad=wanted(inputs), scales=(2.0, 0.5, 1.7))


# ------------------------------------------------------------------------------------- nothing is touched, or too much


def leaves_of(inputs, grad):
    return [t if t is None else t.detach().clone().requires_grad_(i in grad) for i, t in enumerate(inputs)]


def test_what_is_kept(device):
    """x and r numbers a token for each adapter: nothing of a result's width, and no copy of x in another dtype."""
    x, *rest = made(rows=(50,), dtype=torch.bfloat16, adapter=torch.float32)(torch.Generator().manual_seed(0), device)
    leaves = leaves_of([x, *rest], wanted([x, *rest]))
    saved = []

    def keep(t):
        saved.append(t)
        return t

    with torch.autocast(device.type, torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        results = group(*leaves, scales=(2.0,) * 3)
    parameters = {t.data_ptr() for t in leaves[1:] if t is not None}
    kept = {t.data_ptr(): t for t in saved if t.data_ptr() not in parameters}
    assert kept.pop(leaves[0].data_ptr()).dtype == torch.bfloat16
    (t,) = kept.values()
    assert (t.shape, t.dtype) == ((50, 12), torch.bfloat16)
    assert all(y.dtype == torch.bfloat16 for y in results)


def test_nothing_that_a_caller_sees_is_written_to(backend, device):
    inputs = made(bias=True)(torch.Generator().manual_seed(0), device)
    leaves, kept = leaves_of(inputs, wanted(inputs)), []

    def keep(t):
        kept.append((t, t.detach().clone(), t._version))
        return t

    for t in leaves:
        if t is not None:
            keep(t)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        results = group(*leaves, scales=(2.0, 0.5, 1.0))
    upstream = [keep(torch.randn_like(y)) for y in results]
    for y in results:
        keep(y)
    torch.autograd.backward(results, upstream, retain_graph=True)
    for t, before, version in kept:
        assert torch.equal(t, before)
        assert t._version == version


def test_only_what_is_asked_is_computed(device):
    inputs = made(dtype=torch.float32, bias=True)(torch.Generator().manual_seed(0), device)
    every = wanted(inputs)

    def run(grad):
        leaves = leaves_of(inputs, grad)
        with Work() as work:
            results = group(*leaves, scales=(2.0, 0.5, 1.7))
            torch.autograd.backward(results, [torch.ones_like(y) for y in results])
        return leaves, work.elements

    full, full_work = run(every)
    for frozen in every:
        leaves, work = run([i for i in every if i != frozen])
        for i, (t, other) in enumerate(zip(leaves, full, strict=True)):
            if t is not None:
                assert (t.grad is None) == (i == frozen or i not in every)
                assert t.grad is None or torch.equal(t.grad, other.grad)
        assert work < full_work
    assert all(full[i].grad is None for i in range(1, len(inputs), 4)), "a frozen weight has no gradient"


@pytest.mark.parametrize("frozen", ["every A", "every B"])
def test_half_an_adapter_frozen_keeps_half(frozen, device):
    """LoRA-FA trains B alone, and keeps no x; training A alone keeps no t."""
    inputs = made()(torch.Generator().manual_seed(0), device)
    which = 2 if frozen == "every A" else 3
    grad = [i for i in wanted(inputs) if i % 4 != which]
    leaves, saved = leaves_of(inputs, grad), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        results = group(*leaves, scales=(2.0,) * 3)
    tokens = [t.shape for t in saved if t.dim() and t.shape[0] in (3, 15)]
    assert tokens == ([(15, 12)] if frozen == "every A" else [(3, 5, 64)])
    torch.autograd.backward(results, [torch.ones_like(y) for y in results])
    expected = leaves_of(inputs, grad)
    torch.autograd.backward(reference(*expected, scales=(2.0,) * 3), [torch.ones_like(y) for y in results])
    for t, other in zip(leaves, expected, strict=True):
        if t is not None and other.grad is not None:
            torch.testing.assert_close(t.grad, other.grad, rtol=0.03, atol=0.1)


def test_no_grad_makes_no_graph(backend, device):
    inputs = made()(torch.Generator().manual_seed(0), device)

    def refuse(_):
        raise AssertionError("a tensor was saved for a backward pass that cannot come")

    for no_graph in (torch.no_grad(), torch.inference_mode()):
        leaves = leaves_of(inputs, wanted(inputs))
        with no_graph, torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
            results = group(*leaves, scales=(2.0,) * 3)
            saving = lora_linear(*unflat(leaves, (2.0,) * 3), saved_by=(refuse, refuse))
        assert not any(y.requires_grad for y in (*results, *saving))


# --------------------------------------------------------------------------------------------------- graph and bits


@pytest.mark.parametrize("saved_first", [False, True])
def test_checkpoints_stop_before_the_wide_product(saved_first, device, monkeypatch):
    """What a checkpoint saves comes first, so that it need not compute the wide products of its last layer again."""
    from tigon.fusion.memory.recompute import Recompute
    from tigon.ops.linear import adapter_products as products_of

    products = []
    dense = products_of.dense
    monkeypatch.setattr(products_of, "dense", lambda weight, dtype: products.append(1) or dense(weight, dtype))
    inputs = made(dtype=torch.float32)(torch.Generator().manual_seed(0), device)

    def run(*tensors):
        x, layers = unflat(tensors, (2.0, 0.5, 1.7))
        return lora_linear(x, layers, saved_by=Recompute.checkpoint_hooks() if saved_first else None)

    def checkpointed(*tensors):
        return torch.utils.checkpoint.checkpoint(run, *tensors, use_reentrant=False)

    expected = evaluate(run, inputs, {}, grad=wanted(inputs))
    products.clear()
    got = evaluate(checkpointed, inputs, {}, grad=wanted(inputs))
    assert len(products) == (6 if saved_first else 9)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def test_saved_by_hooks_frees_what_it_saved(device):
    inputs = made(dtype=torch.float32, widths=(8,), ranks=(2,))(torch.Generator().manual_seed(0), device)
    leaves = leaves_of(inputs, wanted(inputs))
    (y,) = lora_linear(*unflat(leaves, (2.0,)), saved_by=(lambda t: t, lambda t: t))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="a second time"):
        y.sum().backward()


def test_a_weight_written_to_before_backward_is_noticed(device):
    inputs = made(dtype=torch.float32, widths=(8,), ranks=(2,))(torch.Generator().manual_seed(0), device)
    leaves = leaves_of(inputs, wanted(inputs))
    (y,) = group(*leaves, scales=(2.0,))
    leaves[1].mul_(2)  # as merging does
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Packed:
    """A frozen weight that is not there but when it is asked for."""

    def __init__(self, weight):
        self.weight, self.shape, self.device, self.calls = weight, weight.shape, weight.device, 0

    def dense(self, dtype):
        self.calls += 1
        return self.weight.to(dtype)


def test_a_weight_in_a_form_of_its_own(backend, device):
    inputs = made(dtype=torch.float32, widths=(8,), ranks=(2,))(torch.Generator().manual_seed(0), device)
    packed = Packed(inputs[1])
    expected = evaluate(group, inputs, {"scales": (2.0,)}, grad=[0, 2, 3])
    inputs[1], got = None, None

    def own(x, _, a, b, bias):
        return lora_linear(x, [LoRA(packed, a, b, 2.0, bias)])

    got = evaluate(own, inputs, {}, grad=[0, 2, 3])
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
    assert backend == "torch" or packed.calls == 2, "once forward, once backward"


def test_compiles_whole_and_dynamic(device):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor" if device.type == "cuda" else "aot_eager")
    scales = (2.0, 0.5, 1.7)
    compiled = torch.compile(lambda *t: group(*t, scales=scales), fullgraph=True, dynamic=True, backend=counter)
    for rows in (5, 8, 13):
        inputs = made(rows=(rows,), dtype=torch.float32)(torch.Generator().manual_seed(0), device)
        check(lambda *t, scales: compiled(*t), reference, *inputs, grad=wanted(inputs), scales=scales)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.gpu
def test_no_host_synchronisation(device):
    inputs = made(adapter=torch.float32)(torch.Generator().manual_seed(0), device)
    leaves = leaves_of(inputs, wanted(inputs))

    def step():
        results = group(*leaves, scales=(2.0,) * 3)
        torch.autograd.backward(results, [torch.ones_like(y) for y in results])

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        with torch.autocast("cuda", torch.bfloat16):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --------------------------------------------------------------------------------------------------------- the gated


def gated(gate, up, weight, a, b, bias, *, act="silu", inplace=False):
    return gated_lora_linear(gate, up, LoRA(weight, a, b, 2.0, bias), act=act, inplace=inplace)


def gated_as_peft(gate, up, weight, a, b, bias, *, act="silu", inplace=False):
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return as_peft(ACTS[act].value(gate) * up, weight, a, b, bias, scales=(2.0,))[0]


def gated_reference(gate, up, weight, a, b, bias, *, act="silu", inplace=False):
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return reference(ACTS[act].value(gate) * up, weight, a, b, bias, scales=(2.0,))[0]


def made_gated(rows=(3, 5), N=40, M=24, r=4, packed=False, bias=False, dtype=torch.bfloat16, adapter=None):
    def make(generator, device="cpu"):
        x = made(rows, 2 * N if packed else N, (8,), (1,), dtype)
        gate, up = x(generator, device)[0], None if packed else x(generator, device)[0]
        _, *layer = made(rows, N, (M,), (r,), dtype, adapter, bias)(generator, device)
        return [gate, up, *layer]

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        ({}, {}), ({"bias": True}, {"act": "gelu_tanh"}), ({"packed": True}, {"act": "relu2"}),
        ({"rows": (70,), "N": 300}, {"inplace": True}), ({"packed": True, "bias": True}, {"inplace": True}),
    ],
)  # fmt: skip
def test_gated_forward_and_gradients(inputs, options, dtype, backend, device):
    make = made_gated(**inputs, dtype=dtype)
    grad = [i for i, t in enumerate(make(torch.Generator())) if t is not None and i != 2]

    def fresh(gate, up, *rest, **options):  # inplace writes over gate and up: no leaf may be among them
        return gated(gate.clone(), up if up is None else up.clone(), *rest, **options)

    check(fresh, gated_reference, lambda g: make(g, device), eager=gated_as_peft, grad=grad, draws=2, **options)


@pytest.mark.parametrize("saved_first", [False, True])
def test_the_gated_layer_keeps_gate_and_up(saved_first, device, triton_backend):
    inputs = made_gated(rows=(50,))(torch.Generator().manual_seed(0), device)
    leaves = leaves_of(inputs, [0, 1, 3, 4])
    saved = []
    hooks = (lambda t: saved.append(t) or t), lambda t: t
    layer = LoRA(leaves[2], leaves[3], leaves[4], 2.0)
    if saved_first:
        y = gated_lora_linear(leaves[0], leaves[1], layer, saved_by=hooks)
    else:
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            y = gated_lora_linear(leaves[0], leaves[1], layer)
    parameters = {leaves[i].data_ptr() for i in (2, 3, 4)}
    shapes = [tuple(t.shape) for t in saved if t.data_ptr() not in parameters]
    assert shapes == [(50, 40), (50, 40)] + [] if saved_first else [(50, 40), (50, 40), (50, 4)]
    y.float().square().sum().backward()
    expected = leaves_of(inputs, [0, 1, 3, 4])
    gated(*expected).float().square().sum().backward()
    for i in (0, 1, 3, 4):
        assert torch.equal(leaves[i].grad, expected[i].grad)


# --------------------------------------------------------------------------------------------------------- bad input


def layer(**replaced):
    fields = {"weight": torch.ones(6, 4), "a": torch.ones(2, 4), "b": torch.ones(6, 2), "bias": None}
    return LoRA(**(fields | replaced))


X = torch.ones(3, 4)
BAD = [
    (torch.ones(3, 4).long(), [layer()], r"x must be \(\.\.\., H\) floats, got \(3, 4\) torch.int64"),
    ([1.0], [layer()], r"x must be \(\.\.\., H\) floats, got list"),
    (X, [], r"layers must hold at least one tigon.LoRA, got none"),
    (X, [torch.ones(6, 4)], r"layers\[0\] must be a tigon.LoRA, got Tensor"),
    (X, [layer(), layer(a=X[:0], b=torch.ones(6, 0))], r"layers\[1\].a must be \(r, 4\) .*above 0, got \(0, 4\)"),
    (X, [layer(a=torch.ones(2, 5))], r"layers\[0\].a must be \(r, 4\).*got \(2, 5\)"),
    (X, [layer(b=torch.ones(6, 3))], r"layers\[0\].b must be \(6, 2\), got \(6, 3\)"),
    (X, [layer(b=None)], r"layers\[0\].b must be a tensor, got NoneType"),
    (X, [layer(bias=torch.ones(5))], r"layers\[0\].bias must be \(6,\), got \(5,\)"),
    (X, [layer(weight=torch.ones(6, 5))], r"layers\[0\].weight must be \(N, 4\) to fit x \(3, 4\), got \(6, 5\)"),
    (X, [layer(weight=torch.nn.Linear(4, 6))], r"layers\[0\].weight must be a tensor .*got Linear: pass its weight"),
    (X, [layer(weight=torch.ones(6, 4).bfloat16())], r"layers\[0\].weight must have x's dtype .*got torch.bfloat16"),
    (X, [layer(a=torch.ones(2, 4).long())], r"layers\[0\].a must have a float dtype, got torch.int64"),
    (X, [layer(weight=torch.ones(6, 4, requires_grad=True))], r"layers\[0\].weight must be frozen, got one"),
    (X, [layer(a=torch.ones(2, 4, device="meta"))], r"layers\[0\].a must be on x's device cpu, got meta"),
]  # fmt: skip


@pytest.mark.parametrize(("x", "layers", "message"), BAD, ids=range(len(BAD)))
def test_bad_input_gets_a_sentence(x, layers, message):
    with pytest.raises(ValueError, match=rf"lora_linear: {message}"):
        lora_linear(x, layers)


def test_bad_input_to_the_gated_layer():
    with pytest.raises(ValueError, match=r"gated_lora_linear: up must match gate, \(3, 4\).*got \(3, 5\)"):
        gated_lora_linear(X, torch.ones(3, 5), layer())
    with pytest.raises(ValueError, match=r"gated_lora_linear: layer.a must be \(r, 4\)"):
        gated_lora_linear(X, X, layer(a=torch.ones(2, 5)))
    with pytest.raises(ValueError, match=r"gated_lora_linear: act must be one of .*got 'tanh'"):
        gated_lora_linear(X, X, layer(), act="tanh")
    with pytest.raises(ValueError, match=r"gated_lora_linear: gate must be \(\.\.\., 2N\)"):
        gated_lora_linear(torch.ones(3, 5), None, layer())


def test_a_narrow_result_of_wide_factors_is_rounded_once(device):
    """An adapter in bf16 beside one in fp32: its gradient is the product in fp32, rounded."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(*shape, generator=generator).to(device) for shape in ((9, 200), (200, 4)))
    got = rounded_product(left, right, torch.bfloat16, 0.5)
    torch.testing.assert_close(got, (left @ right * 0.5).bfloat16(), rtol=2**-8, atol=1e-6)
    exact = left.double() @ right.double() * 0.5
    assert (got.double() - exact).abs().max() <= 2**-8 * exact.abs().max()
    mixed = rounded_product(left.half(), right.half(), torch.bfloat16)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed, (left.half() @ right.half()).bfloat16(), rtol=2**-7, atol=1e-2)
