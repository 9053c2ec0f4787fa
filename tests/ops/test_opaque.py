"""Adapters beside layers that multiply by themselves: numbers, what is written, saved and asked for."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from adapters_made import draw_layers
from numerics import check, evaluate
from torch.utils._python_dispatch import TorchDispatchMode

from tigon.kernels.dispatch import meta_as_gpu
from tigon.ops.linear.adapters import lora_linear, lora_linear_reference
from tigon.ops.linear.lora import LoRA
from tigon.ops.linear.lora_mlp import lora_mlp
from tigon.ops.linear.opaque import Opaque, opaque_lora_linear
from tigon.ops.linear.tiled_lora_mlp import tiled_lora_mlp


class Reshaped(torch.autograd.Function):
    """As the int8 product of bitsandbytes: rows inside, and the result reshaped, a view made inside a Function."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        y = F.linear(x.reshape(-1, x.shape[-1]), weight)
        return y.reshape(*x.shape[:-1], -1) if x.dim() != 2 else y

    @staticmethod
    def backward(ctx, dy):
        (weight,) = ctx.saved_tensors
        return dy @ weight, None


class Hoarding(torch.autograd.Function):
    """As the int8 product of bitsandbytes: keeps its input where no hook sees it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.kept = x
        ctx.save_for_backward(weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        (weight,) = ctx.saved_tensors
        return dy @ weight, None


def plain(x, weight):
    return F.linear(x, weight)


def viewed(x, weight):
    return torch.mm(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], weight.shape[0])


def exponential(x, weight):
    """Its backward pass reads its result, so it may not be called fresh."""
    return F.linear(x, weight).exp()


def shared(x, weight):
    """Gives out a tensor that somebody else holds."""
    y = F.linear(x, weight)
    shared.held = y
    return y


# The product, whether it is fresh, takes rows, and has its weight dense.
KINDS = {
    "plain": (plain, False, False),
    "plain, fresh": (plain, True, False),
    "plain, fresh, rows": (plain, True, True),
    "a view": (viewed, False, False),
    "a view, fresh": (viewed, True, False),
    "a view of a Function, fresh": (Reshaped.apply, True, False),
    "rows of a Function, fresh": (Reshaped.apply, True, True),
    "reads its result": (exponential, False, False),
    "with a dense weight": (Hoarding.apply, False, False, True),
    "rows with a dense weight, fresh": (Hoarding.apply, True, True, True),
}


def unflat(tensors, scales, kind):
    """[x, then weight, a, b of each layer] → x, the layers, and the products of the base layers."""
    product, fresh, flat, *dense = KINDS[kind]
    x, *rest = tensors
    layers = []
    for i, scale in enumerate(scales):
        weight, a, b = rest[3 * i : 3 * i + 3]
        own = Opaque(
            lambda x, w=weight: product(x, w), tuple(weight.shape), weight.device, fresh, flat,
            weight=weight.to if dense else None,
        )  # fmt: skip
        layers.append(LoRA(own, a, b, scale))
    return x, layers


def group(*tensors, scales, kind):
    return opaque_lora_linear(*unflat(tensors, scales, kind))


def as_peft(*tensors, scales, kind):
    x, layers = unflat(tensors, scales, kind)
    results = []
    for own, a, b, scale, *_ in layers:
        y = own.layer(x)
        results.append((y + F.linear(F.linear(x.to(a.dtype), a), b) * scale).to(y.dtype))
    return tuple(results)


def made(rows=(3, 5), H=64, widths=(48, 16, 16), ranks=(4, 1, 3), dtype=torch.bfloat16, adapter=None):
    return draw_layers(rows, [(N, H) for N in widths], ranks, dtype, adapter, weight=0.3)


WANTED = [i for i in range(10) if i % 3 != 1]  # all but the frozen weights
SCALES = (2.0, 0.5, 1.7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_gradients(kind, dtype, device):
    make = made(dtype=dtype)
    check(group, as_peft, lambda g: make(g, device), grad=WANTED, scales=SCALES, kind=kind, draws=4)


@pytest.mark.parametrize("rows", [(), (1,), (300,)])
def test_sizes(rows, device):
    make = made(rows=rows)
    for kind in ("plain", "plain, fresh, rows"):
        check(group, as_peft, lambda g: make(g, device), grad=WANTED, scales=SCALES, kind=kind, draws=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "rows of a Function, fresh"])
def test_adapters_in_fp32_without_autocast(kind, dtype, device):
    """PEFT widens x. In bf16 no such copy is made, and the numbers are as right; fp16 runs as PEFT does."""
    make = made(rows=(40,), dtype=dtype, adapter=torch.float32)
    check(
        group, as_peft, lambda g: make(g, device), grad=WANTED, scales=SCALES, kind=kind, draws=4,
        roundings=2**8 if dtype == torch.bfloat16 else 4,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adapter", [None, torch.float32])
def test_lora_linear_takes_layers_with_a_dense_weight(dtype, adapter, backend, device):
    """Their own product forward, the weight backward; in fp32 beside an ordinary layer."""

    def joined(*tensors, scales, kind):
        x, layers = unflat(tensors, scales, kind)
        if dtype == torch.float32:
            layers[1] = layers[1]._replace(weight=tensors[4])
        return lora_linear(x, layers)

    make = made(rows=(40,), dtype=dtype, adapter=adapter)
    check(
        joined, as_peft, lambda g: make(g, device), grad=WANTED, scales=SCALES, draws=4,
        # dx is rounded once for each layer that adds to it.
        kind="rows with a dense weight, fresh", roundings=2**12 if dtype == torch.bfloat16 and adapter else 4,
    )  # fmt: skip


@pytest.mark.parametrize("op", [opaque_lora_linear, lora_linear])
@pytest.mark.parametrize("kind", ["plain", "plain, fresh, rows", "rows with a dense weight, fresh"])
def test_dropout(kind, op, device):
    """The masks are those of ordinary layers, and one layer has none."""
    if op is lora_linear and len(KINDS[kind]) == 3:
        pytest.skip("no dense weight")
    tensors = made(rows=(40,), dtype=torch.float32)(torch.Generator().manual_seed(0), device)
    leaves = [t.requires_grad_(i in WANTED) for i, t in enumerate(tensors)]
    x, layers = unflat(leaves, SCALES, kind)
    layers = [layer._replace(dropout=p) for layer, p in zip(layers, (0.5, 0.0, 0.25), strict=True)]
    whole = [layer._replace(weight=leaves[1 + 3 * i]) for i, layer in enumerate(layers)]
    found = []
    for run, given in ((op, layers), (lora_linear_reference, whole)):
        torch.manual_seed(3)
        ys = run(x, given)
        found.append([*ys, *torch.autograd.grad([y.square().sum() for y in ys], [leaves[i] for i in WANTED])])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    torch.manual_seed(4)
    others = op(x, layers)
    assert not torch.allclose(others[0], found[0][0], atol=1e-2)
    assert torch.equal(others[1], found[0][1])


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("narrows", [True, False])
def test_a_result_in_another_dtype(narrows, flat, device):
    """A layer may compute in another dtype than x's. The sum has the layer's, or as torch promotes the two."""
    g = torch.Generator().manual_seed(0)
    x, w, a, b = made(widths=(8,), ranks=(2,), dtype=torch.float32)(g, device)
    leaves = [t.requires_grad_() for t in (x, a, b)]
    own = Opaque(lambda x: F.linear(x, w).half(), (8, 64), x.device, flat=flat, narrows=narrows)
    (y,) = opaque_lora_linear(x, [LoRA(own, a, b, 2.0)])
    expected = F.linear(x, w).half() + F.linear(F.linear(x, a), b) * 2.0
    assert y.dtype == (torch.float16 if narrows else torch.float32)
    torch.testing.assert_close(y.float(), expected, rtol=2e-3, atol=2e-3)
    for got, wanted in zip(*(torch.autograd.grad(t.float().sum(), leaves) for t in (y, expected)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_layer_without_a_gradient_of_its_own(device):
    """torchao's products with quantised inputs have none: the adapter's is then all there is, as with PEFT."""
    x, w, a, b = made(widths=(8,), ranks=(2,), dtype=torch.float32)(torch.Generator().manual_seed(0), device)
    leaves = [t.requires_grad_() for t in (x, a, b)]
    own = Opaque(lambda x: F.linear(x, w).detach(), (8, 64), x.device)
    (y,) = opaque_lora_linear(x, [LoRA(own, a, b, 2.0)])
    expected = F.linear(x, w).detach() + F.linear(F.linear(x, a), b) * 2.0
    for got, wanted in zip(*(torch.autograd.grad(t.sum(), leaves) for t in (y, expected)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------ what is done, counted


class Calls(TorchDispatchMode):
    """The shapes of products, and of tensors that are cast."""

    def __init__(self):
        super().__init__()
        self.products, self.casts = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_", "bmm", "linear"):
            self.products.append(tuple(out.shape))
        elif name in ("_to_copy", "copy_") and out.dtype != args[-1 if name == "copy_" else 0].dtype:
            self.casts.append(tuple(out.shape))
        return out


def counted(call, tensors, **options):
    leaves = [t.clone().requires_grad_(i in WANTED) for i, t in enumerate(tensors)]
    leaves = [leaves[0] * 1, *leaves[1:]]
    with Calls() as calls:
        results = call(*leaves, **options)
        torch.autograd.backward(results, [torch.ones_like(y) for y in results])
    return calls, leaves


@pytest.mark.parametrize("kind", ["plain", "plain, fresh, rows"])
@pytest.mark.parametrize("autocast", [False, True])
def test_x_is_read_once_and_never_widened(kind, autocast):
    """On the meta device, as on a GPU: on the CPU torch has no product of narrow factors with a wide result."""
    tensors = [t.to("meta") for t in made(rows=(50,), adapter=torch.float32)(torch.Generator())]
    with meta_as_gpu(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, leaves = counted(group, tensors, scales=SCALES, kind=kind)
        theirs, _ = counted(as_peft, tensors, scales=SCALES, kind=kind)
    assert not [shape for shape in ours.casts if 50 in shape and 64 in shape], "a copy of x or of its gradient"
    assert not [shape for shape in ours.casts if 50 in shape and (48 in shape or 16 in shape)], "a copy of y"
    assert len([shape for shape in theirs.casts if shape == (50, 64)]) >= 3, "PEFT makes copies, or this counts nothing"
    # Three products of the layers forward, three backward, and none of a weight's shape.
    frozen = {tuple(t.shape) for i, t in enumerate(leaves) if i and i not in WANTED}
    assert not frozen & set(ours.products)
    skinny = [shape for shape in ours.products if 50 in shape and not {64, 48, 16} & set(shape)]
    assert len(skinny) <= 4  # x [A…]ᵀ in one, and a product upstream for each


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_a_step(kind, device):
    tensors = [t.to(device) for t in made(rows=(50,), dtype=torch.float32)(torch.Generator())]
    ours, leaves = counted(group, tensors, scales=SCALES, kind=kind)
    frozen = {tuple(t.shape) for i, t in enumerate(leaves) if i and i not in WANTED}
    assert not frozen & set(ours.products)
    # Forward: t in one, then two a layer. Backward: u, dB and the layer's own for each; dA and dx in one each.
    assert len(ours.products) == 1 + 2 * 3 + 3 * 3 + 2
    assert all(t.grad is None for i, t in enumerate(leaves) if i and i not in WANTED)


def test_fresh_results_are_written_to_and_others_are_not(device):
    x, w, a, b = made(rows=(50,), widths=(48,), ranks=(4,))(torch.Generator(), device)
    for fresh in (False, True):
        own = Opaque(lambda x: shared(x, w), tuple(w.shape), w.device, fresh=fresh)
        with torch.no_grad():
            (y,) = opaque_lora_linear(x, [LoRA(own, a, b)])
        assert (y.data_ptr() == shared.held.data_ptr()) == fresh
        if not fresh:
            assert torch.equal(shared.held, F.linear(x, w))


def test_gradients_of_layers_that_are_not_fresh_are_not_written_to(device):
    """A layer may hand on a gradient that it holds."""
    held = []

    class Holding(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            held.append((dy, dy.clone()))
            return dy

    x, _, a, b = made(rows=(50,), widths=(64,), ranks=(4,), dtype=torch.float32)(torch.Generator(), device)
    x, a, b = (t.requires_grad_() for t in (x, a, b))
    (y,) = opaque_lora_linear(x, [LoRA(Opaque(Holding.apply, (64, 64), x.device), a, b)])
    y.square().sum().backward()
    assert torch.equal(*held[0])


@pytest.mark.parametrize("kind", ["plain", "rows of a Function, fresh"])
def test_what_is_kept(kind, device):
    """x once, and r numbers a token, beside what the layers keep: their weights."""
    tensors = made(rows=(50,), adapter=torch.float32)(torch.Generator(), device)
    leaves = [t.requires_grad_(i in WANTED) for i, t in enumerate(tensors)]
    own, saved = {t.untyped_storage().data_ptr() for t in leaves}, {}
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.update({t.untyped_storage().data_ptr(): t}) or t, lambda t: t
    )
    with hooks:
        group(*leaves, scales=SCALES, kind=kind)
    kept = {pointer: t for pointer, t in saved.items() if pointer not in own and t.shape[0] == 50}
    assert sum(t.untyped_storage().nbytes() for t in kept.values()) == 50 * (4 + 1 + 3) * 4


def test_with_a_dense_weight_nothing_is_kept_out_of_sight(device):
    """A checkpoint's hooks drop x; a Function that keeps x for itself would keep it all the same."""
    tensors = made(rows=(50,), dtype=torch.float32)(torch.Generator().manual_seed(0), device)
    alive = {}
    for call in (group, as_peft):
        leaves = [t.clone().requires_grad_(i in WANTED) for i, t in enumerate(tensors)]
        x = leaves[0] * 1.0
        storage = weakref.ref(x.untyped_storage())
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.shape, lambda shape: torch.zeros(shape)):
            ys = call(x, *leaves[1:], scales=SCALES, kind="with a dense weight")
        del x
        alive[call] = storage() is not None
        del ys
    assert alive == {group: False, as_peft: True}


@pytest.mark.parametrize("wanted", [(0,), (2, 3), (0, 2), (3,), (0, 3), ()])
def test_only_what_is_asked_is_computed(wanted, device):
    make = made(dtype=torch.float32, widths=(48,), ranks=(4,))
    tensors = make(torch.Generator().manual_seed(0), device)
    for kind in ("plain", "plain, fresh, rows"):
        options = {"scales": (2.0,), "kind": kind}
        got, expected = (evaluate(f, tensors, options, grad=wanted) for f in (group, as_peft))
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5)
    if wanted == (2, 3):  # an input that needs no gradient costs the layers no product
        x, layers = unflat([t.requires_grad_(i in wanted) for i, t in enumerate(tensors)], (2.0,), "plain")
        with Calls() as calls:
            opaque_lora_linear(x, layers)[0].sum().backward()
        assert (15, 64) not in calls.products


# ----------------------------------------------------------------------------------------------------------- autograd


@pytest.mark.parametrize("hooks", [False, True])
def test_checkpoints_stop_before_the_layer(hooks, device):
    """Computed again: x [A…]ᵀ, and no layer, where the checkpoint's hooks are given and the layer saves nothing."""
    from tigon.fusion.memory.recompute import Recompute

    runs = []

    class Silent(torch.autograd.Function):  # as bitsandbytes: what it keeps, no hook sees
        @staticmethod
        def forward(ctx, x, weight):
            runs.append(1)
            ctx.weight = weight
            return F.linear(x, weight)

        @staticmethod
        def backward(ctx, dy):
            return dy @ ctx.weight, None

    x, w, a, b = made(rows=(50,), widths=(48,), ranks=(4,), dtype=torch.float32)(torch.Generator(), device)
    leaves = [t.requires_grad_() for t in (x, a, b)]
    own = Opaque(lambda x: Silent.apply(x, w), tuple(w.shape), w.device, fresh=True, flat=True)

    def block(x):
        saved_by = Recompute.checkpoint_hooks() if hooks else None
        return opaque_lora_linear(x * 1.0, [LoRA(own, a, b)], saved_by=saved_by)[0]

    y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    got = torch.autograd.grad(y.square().sum(), leaves)
    expected = torch.autograd.grad(block(x).square().sum(), leaves)
    assert len(runs) == (2 if hooks else 3)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def test_bad_input_gets_a_sentence():
    x, w, a, b = made(widths=(8,), ranks=(2,))(torch.Generator())
    own = Opaque(lambda x: F.linear(x, w), (8, 64), x.device)
    for layer, message in (
        (LoRA(own, a[:0], b[:, :0]), r"layers\[0\].a must be \(r, 64\) with a rank r above 0"),
        (LoRA(own, a, b.to("meta")), r"layers\[0\].b must be on x's device cpu, got meta"),
        (LoRA(own, a.int(), b), r"layers\[0\].a must have a float dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            opaque_lora_linear(x, [layer])


@pytest.mark.parametrize("saved_first", [False, True])
def test_a_gated_mlp_of_layers_with_a_dense_weight(saved_first, device, triton_backend):
    """One unit, as with weights that are tensors; each layer multiplies once."""
    generator, runs = torch.Generator().manual_seed(0), []
    draw = made(rows=(2, 20), widths=(48, 48), ranks=(4, 3), H=32)(generator, device)
    down = made(rows=(1,), widths=(32,), ranks=(2,), H=48)(generator, device)[1:]
    x, *weights = (t.requires_grad_(i == 0 or i % 3 != 1) for i, t in enumerate([*draw, *down]))

    def layers(own):
        for i in range(0, 9, 3):
            w, a, b = weights[i : i + 3]
            weight = Opaque(
                lambda x, w=w: runs.append(x.shape) or F.linear(x, w), tuple(w.shape), w.device, True, True, weight=w.to
            )  # fmt: skip
            yield LoRA(weight if own else w, a, b, 1.5)

    results = []
    for own in (False, True):
        kept = (lambda t: t, lambda t: t) if saved_first else None
        y = lora_mlp(x, tuple(layers(own)), saved_by=kept)
        leaves = [t for t in (x, *weights) if t.requires_grad]
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
        assert len(runs) == (3 if own else 0)
    for one, other in zip(*results, strict=True):
        assert (one - other).float().norm() <= 0.01 * other.float().norm()
    assert tiled_lora_mlp(x, tuple(layers(True))) is None
