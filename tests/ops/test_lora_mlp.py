"""A gated MLP with adapters as one unit: numbers against fp64, what is kept, and what a checkpoint computes again."""

from __future__ import annotations

import pytest
import torch
from adapters_made import draw_layers
from numerics import check
from torch.nn import functional as F

import tigon
from tigon.ops.adapted_sum import adapted_sum, adapted_sum_reference
from tigon.ops.gated_lora import Added, gated_lora_forward, gated_lora_reference
from tigon.ops.linear.lora_mlp import lora_mlp

H, N, SCALES = 48, 72, (2.0, 0.5, 1.5)


def drawn(generator, rows, dtype, device, ranks=(8, 8, 8), bias=False, adapters=None):
    tensors = draw_layers((rows,), ((N, H), (N, H), (H, N)), ranks, dtype, adapters, b=0.5)(generator, device)
    return (*tensors, *([torch.randn(H, generator=generator).to(device, dtype)] if bias else []))


def layers_of(tensors, frozen=True):
    bias = tensors[9] if len(tensors) > 9 else None
    made = []
    for i, scale in enumerate(SCALES):
        w, a, b = tensors[3 * i : 3 * i + 3]
        made.append(tigon.LoRA(w.detach() if frozen else w, a, b, scale, bias if i == 2 else None))
    return tuple(made)


def ours(x, *tensors, act="silu"):
    return lora_mlp(x, layers_of(tensors), act=act)


def eager(x, *tensors, act="silu"):
    def run(x, layer):
        low = F.linear(F.linear(x.to(layer.a.dtype), layer.a), layer.b)
        return (F.linear(x, layer.weight, layer.bias) + low * layer.scale).to(x.dtype)

    gate, up, down = layers_of(tensors)
    g = run(x, gate)
    return run((F.silu(g) if act == "silu" else F.gelu(g, approximate="tanh")) * run(x, up), down)


TRAINED = [0, 2, 3, 5, 6, 8, 9]  # x, and A and B of each layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "options", "act"),
    [
        (7, {}, "silu"),
        (70, {"ranks": (16, 4, 24)}, "gelu_tanh"),  # several programs; ranks of their own, beyond one tile of 16
        (5, {"bias": True}, "silu"),
        (5, {"ranks": (8, 40, 8)}, "silu"),  # beyond what the unit's own pass takes: layer by layer
        (3, {"ranks": (1, 1, 1)}, "silu"),
    ],
)
def test_forward_and_gradients(rows, options, act, dtype, triton_backend, device):
    grad = TRAINED + ([10] if options.get("bias") else [])
    check(
        ours, eager, lambda g: drawn(g, rows, dtype, device, **options), eager=eager, grad=grad,
        draws=4, act=act,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (7, {}),
        (70, {"ranks": (16, 4, 24)}),
        (5, {"bias": True}),
        (5, {"ranks": (8, 8, 130)}),
        (5, {"ranks": (8, 200, 8)}),
    ],
)
def test_added_to_a_stream(rows, options, triton_backend, device):
    def tensors(generator):
        x, *others = drawn(generator, rows, torch.bfloat16, device, **options)
        return (4 * torch.randn(rows, H, generator=generator).bfloat16().to(device), x, *others)

    def joined(stream, x, *others, act="silu"):
        return lora_mlp(x, layers_of(others), act=act, residual=stream)

    def apart(stream, *others, act="silu"):
        return stream + eager(*others, act=act)

    grad = [0, *(i + 1 for i in TRAINED), *([11] if options.get("bias") else [])]
    check(joined, apart, tensors, eager=apart, grad=grad, draws=4)


@pytest.mark.parametrize(("width", "rank"), [(72, 8), (130, 70), (7, 1)])
def test_a_sum_with_a_stream_is_rounded_once(width, rank, triton_backend, device):
    g = torch.Generator().manual_seed(0)
    stream, y = (torch.randn(70, width, generator=g).bfloat16().to(device) for _ in range(2))
    t = torch.randn(70, 2 * rank, generator=g).bfloat16().to(device)[:, rank:]
    b = torch.randn(width, rank, generator=g).bfloat16().to(device)
    exact = adapted_sum_reference(stream.double(), y.double(), t.double(), b.double(), 0.5)
    got = adapted_sum(stream, y.clone(), t, b, 0.5)
    assert (got.double() - exact).abs().le(exact.abs() * 2**-8 + 1e-5).all()
    turned = adapted_sum(stream, y.t().contiguous().t(), t, b, 0.5)
    torch.testing.assert_close(turned, got)


def test_a_stream_of_another_dtype_or_shape_is_added_by_torch(triton_backend, device):
    x, *tensors = drawn(torch.Generator().manual_seed(0), 6, torch.bfloat16, device)
    layers = layers_of(tensors)
    y = lora_mlp(x, layers)
    for stream in (torch.ones(6, H, device=device), torch.ones(H, device=device, dtype=torch.bfloat16)):
        assert torch.equal(lora_mlp(x, layers, residual=stream), stream + y)


def test_the_stream_is_not_differentiated_twice(triton_backend, device):
    x, *tensors = drawn(torch.Generator().manual_seed(0), 4, torch.bfloat16, device)
    stream = torch.randn(4, H, device=device).bfloat16().requires_grad_()
    y = lora_mlp(x, layers_of(tensors), residual=stream * 1)
    (g,) = torch.autograd.grad(y.square().sum(), stream, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        g.square().sum().backward()


def test_the_kernel_adds_what_the_reference_adds(triton_backend, device):
    g = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(70, 136, generator=g).bfloat16().to(device) for _ in range(2))
    t = torch.randn(70, 24, generator=g).bfloat16().to(device)
    b = [torch.randn(136, r, generator=g).bfloat16().float().to(device) for r in (16, 8)]  # exact in bf16
    added = Added(t[:, :16], b[0], 2.0), Added(t[:, 16:], b[1], 0.25)
    got = gated_lora_forward(gate, up, added, "silu")
    want = gated_lora_reference(gate.double(), up.double(), added, "silu")
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-3)


def test_adapters_in_fp32_under_autocast(triton_backend, device):
    g = torch.Generator().manual_seed(0)
    tensors = drawn(g, 9, torch.bfloat16, device, adapters=torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        leaves = [t.requires_grad_(i in TRAINED) for i, t in enumerate(tensors)]
        y = ours(*leaves)
    y.square().sum().backward()
    grads = {i: leaves[i].grad for i in TRAINED if i < len(leaves)}
    assert all(grads[i].dtype == tensors[i].dtype for i in grads)
    exact = [t.detach().double().requires_grad_(i in TRAINED) for i, t in enumerate(tensors)]
    eager(*exact).square().sum().backward()
    for i, grad in grads.items():
        off = (grad.double() - exact[i].grad).norm() / exact[i].grad.norm()
        assert off < 0.02, (i, off)


def test_what_is_kept(triton_backend, device):
    tensors = drawn(torch.Generator().manual_seed(0), 32, torch.bfloat16, device)
    leaves = [t.requires_grad_(i in TRAINED) for i, t in enumerate(tensors)]
    own, kept = {t.data_ptr() for t in leaves}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours(*leaves)
    numbers = sum(t.numel() for t in kept if t.data_ptr() not in own)
    assert numbers == 32 * (16 + 2 * N + 8)  # t, gate and up, and what goes through down's A


@pytest.mark.parametrize("hooks", [None, (lambda t: t, lambda t: t)], ids=["kept", "checkpoint"])
@pytest.mark.parametrize("ranks", [(8, 8, 8), (16, 24, 8)], ids=["summed along", "summed apart"])
@pytest.mark.parametrize("frozen", [(2,), (3, 6), (2, 3, 5, 6, 8), (0,), (8, 9)])
def test_only_what_is_asked_is_computed(frozen, ranks, hooks, triton_backend, device):
    """Gradients of the others keep their bits."""
    tensors = drawn(torch.Generator().manual_seed(0), 9, torch.bfloat16, device, ranks=ranks)

    def grads(left):
        leaves = [t.detach().requires_grad_(i in left) for i, t in enumerate(tensors)]
        lora_mlp(leaves[0], layers_of(leaves[1:]), saved_by=hooks).square().sum().backward()
        return {i: leaves[i].grad for i in left if i < len(leaves)}

    left = [i for i in TRAINED if i not in frozen]
    every, some = grads(TRAINED), grads(left)
    assert some.keys() == {i for i in every if i not in frozen}
    assert all(torch.equal(some[i], every[i]) for i in some)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g, u, d: (g, u._replace(weight=u.weight[:8], b=u.b[:8]), d), r"gate and up \(N, H\) and down"),
        (
            lambda g, u, d: (g, u, d._replace(weight=d.weight[:, :8], a=d.a[:, :8])),
            r"got \(72, 48\), \(72, 48\), \(48, 8\)",
        ),
        (lambda g, u, d: (g._replace(a=g.a[:0]), u, d), r"rank r above 0"),
        (lambda g, u, d: (g, u, d._replace(b=d.b[:8])), r"layers\[2\].b must be \(48, 8\), got \(8, 8\)"),
        (lambda g, u, d: (g, u, d._replace(weight=d.weight.clone().requires_grad_())), r"layers\[2\].weight must be"),
    ],
)
def test_what_is_refused(change, message):
    x, *tensors = drawn(torch.Generator().manual_seed(0), 4, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=f"lora_mlp: .*{message}"):
        lora_mlp(x, change(*layers_of(tensors)))
