"""Plain linear layers of one input in a model: joined where nothing is in the way, and else as the model calls them."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tigon

pytest.importorskip("transformers")
from graph_nodes import nodes_of
from test_families import assert_close, step
from zoo import batch, build

from tigon.fusion.engine.rewrite import group_calls, parse_function
from tigon.fusion.parts import mlp as mlp_part


class Mixer(nn.Module):
    """Three layers of one input, as attention has."""

    def __init__(self, width=16, bias=False):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=bias) for _ in range(3))

    def forward(self, x):
        shape = x.shape
        q = self.q(x).view(shape)
        k = self.k(x).view(shape)
        v = self.v(x).view(shape)
        return q.tanh() * k.sigmoid() + v


class Unit(nn.Module):
    """A gated MLP."""

    def __init__(self, width=16):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, 24), nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer, self.unit = Mixer(), Unit()

    def forward(self, x):
        return self.unit(self.mixer(x))


@pytest.fixture
def both(device):
    torch.manual_seed(0)
    return Both().to(device)


@pytest.fixture
def x(device):
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()


def joined(t):
    """How many groups of projections and whole MLPs are behind t, by themselves or in a whole decoder layer."""
    names = nodes_of(t)
    groups = names.count("ProjectionsBackward") + names.count("EnterAttentionBackward")
    return groups, names.count("DenseMlpBackward") + names.count("LeaveAttentionBackward")


def gradients(model, x):
    model.zero_grad()
    y = model(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    y.square().sum().backward()
    return y, {"x": dx, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


# -------------------------------------------------------------------------------------------------------------- models


FAMILIES = {"llama": ("none", "product", "cheap", "mlp"), "phi3": ("none", "cheap")}
FAMILIES |= dict.fromkeys(("qwen2", "qwen3"), ("auto",))


@pytest.mark.parametrize(("family", "recompute"), [(f, level) for f, levels in FAMILIES.items() for level in levels])
def test_families(family, recompute, device, triton_backend, monkeypatch):
    """Loss to the bit, and gradients, as with the layers one by one; phi3 has one layer for q, k and v."""
    model = build(family).to(device)
    inputs = {k: v.to(device) for k, v in batch(family).items()}
    with monkeypatch.context() as apart, tigon.fuse(model, recompute=recompute, parts=tigon.PARTS - {"linear"}):
        apart.setattr(mlp_part, "_dense_mlp", lambda *_: None)
        plain, plain_gradients = step(model, inputs)
        assert joined(plain.loss) == (0, 0)
    with tigon.fuse(model, recompute=recompute) as fusion:
        fused, fused_gradients = step(model, inputs)
        names = joined(fused.loss)
        groups = 0 if family == "phi3" else 2
        assert names == (groups, 0 if recompute == "mlp" else 2)
        rows = [(row.kind, row.count, row.calls) for row in fusion.report().fused_rows if row.kind == "linear"]
        assert rows == [("linear", 2, 2)] * bool(groups)
    assert torch.equal(fused.loss, plain.loss)
    assert_close(fused_gradients, plain_gradients)


@pytest.mark.parametrize(("level", "reentrant"), [("none", False), ("product", True), ("cheap", False), ("mlp", False)])
def test_checkpoints(level, reentrant, device, triton_backend):
    def run(checkpointing):
        model = build("llama").to(device)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        with tigon.fuse(model, recompute=level):
            return step(model, {k: v.to(device) for k, v in batch("llama").items()})

    (kept, kept_gradients), (again, again_gradients) = run(False), run(True)
    assert torch.equal(kept.loss, again.loss)
    if level != "mlp":  # which cuts what no checkpoint recomputes into tiles
        assert all(torch.equal(again_gradients[n], g) for n, g in kept_gradients.items())
    assert_close(again_gradients, kept_gradients)


def test_a_part_of_the_layers_frozen(both, x, triton_backend):
    both.mixer.k.weight.requires_grad_(False)
    both.unit.up.requires_grad_(False)
    _, plain = gradients(both, x)
    with tigon.fuse(both):
        y, fused = gradients(both, x)
        assert joined(y) == (1, 1)
    assert "mixer.k.weight" not in fused
    assert_close(fused, plain)


def test_one_gradient_of_each_weight_however_often_it_is_used(both, x, triton_backend):
    both.mixer.k.weight = both.mixer.q.weight
    _, plain = gradients(both, x)
    with tigon.fuse(both):
        y, fused = gradients(both, x)
        assert joined(y) == (1, 1)
    assert_close(fused, plain)


# ----------------------------------------------------------------------------------------------------------- obstacles


class Quantised(torch.Tensor):
    """A weight that computes in its own way."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not F.linear:
            return super().__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {})) / 2


def hooked(layer, kind):
    if kind == "pre":
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    elif kind == "forward":
        layer.register_forward_hook(lambda module, args, y: y * 0.5)
    else:
        layer.register_full_backward_hook(lambda module, dx, dy: (dx[0] * 0.5,))


def other_forward(layer):
    layer.forward = lambda x: F.linear(x, layer.weight) * 2


def another_class(layer):
    layer.__class__ = type("Doubled", (nn.Linear,), {"forward": lambda self, x: 2 * F.linear(x, self.weight)})


def quantised(layer):
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantised), requires_grad=False)


def parametrised(layer):
    torch.nn.utils.parametrizations.weight_norm(layer)


def without_its_parameter(layer):
    """As FSDP with flat parameters leaves it: a view in the parameter's place."""
    flat = nn.Parameter(layer.weight.detach().flatten().clone())
    shape = layer.weight.shape
    del layer.weight
    layer.flat = flat
    layer.weight = flat.view(shape)


OBSTACLES = {
    "pre": lambda layer: hooked(layer, "pre"), "forward": lambda layer: hooked(layer, "forward"),
    "backward": lambda layer: hooked(layer, "backward"), "other forward": other_forward, "class": another_class,
    "tensor class": quantised, "parametrised": parametrised, "flat": without_its_parameter,
}  # fmt: skip


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_a_layer_that_is_more_than_its_product_is_called(obstacle, when, both, x, triton_backend):
    plain = copy.deepcopy(both)
    for layer in (plain.mixer.k, plain.unit.down):
        OBSTACLES[obstacle](layer)
    expected = plain(x)
    fused = copy.deepcopy(both)
    if when == "after":
        tigon.fuse(fused)
        assert joined(fused(x)) == (1, 1)
    for layer in (fused.mixer.k, fused.unit.down):
        OBSTACLES[obstacle](layer)
    if when == "before":
        tigon.fuse(fused)
    y = fused(x)
    groups, units = joined(y)
    assert units == 0
    assert groups == (1 if when == "before" and obstacle in ("class", "parametrised") else 0)  # q and v are two
    torch.testing.assert_close(y, expected)
    (dx,), (plain_dx,) = (torch.autograd.grad(t.square().sum(), x) for t in (y, expected))
    torch.testing.assert_close(dx, plain_dx, rtol=1e-4, atol=1e-5)


def test_hooks_of_all_modules_are_called(both, x, triton_backend):
    seen = []
    with tigon.fuse(both):
        handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, y: seen.append(module))
        try:
            y = both(x)
        finally:
            handle.remove()
        assert joined(y) == (0, 0)
        assert {both.mixer.q, both.mixer.k, both.mixer.v, both.unit.gate, both.unit.down} <= set(seen)
        assert joined(both(x)) == (1, 1)


def test_without_gradients_the_layers_are_called(both, x, triton_backend):
    expected = both(x)
    with tigon.fuse(both):
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                y = both(x)
                assert y.grad_fn is None
                torch.testing.assert_close(y, expected)


def test_autocast_casts_as_it_does(both, x, device, triton_backend):
    with torch.autocast(device.type, torch.bfloat16):
        expected = both(x)
    with tigon.fuse(both):
        with torch.autocast(device.type, torch.bfloat16):
            y = both(x)
        assert joined(y) == (1, 1)
    assert y.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("family", ["gemma3", "olmo2"])
def test_under_autocast_joined_layers_are_as_near_to_fp64(family, device, triton_backend):
    """Weights in fp32, as the Trainer's bf16=True leaves them: every part runs, with gradients in fp32."""
    model, inputs = build(family).to(device), {k: v.to(device) for k, v in batch(family).items()}

    def gradients():
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(**inputs).loss
        model.zero_grad()
        loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    with tigon.fuse(model) as fusion:
        fused, report = gradients(), fusion.report()
    assert report.calls["linear"] == 2
    assert report.calls.get("qk_norm", 2) == 2
    assert not [row for row in report.rows if row.idle and row.kind != "documents"]
    exact_model = copy.deepcopy(model).double()
    exact_model(**inputs).loss.backward()
    exact = {n: p.grad for n, p in exact_model.named_parameters() if p.grad is not None}

    def error(found):
        return sum(float((g.double() - exact[n]).square().sum()) for n, g in found.items()) ** 0.5

    assert {g.dtype for g in fused.values()} == {torch.float32}
    assert fused.keys() == plain.keys()
    assert error(fused) <= 2 * error(plain)


def test_dtypes_that_differ_are_torchs_error(both, x, triton_backend):
    both.mixer.k.to(torch.bfloat16)
    with tigon.fuse(both), pytest.raises(RuntimeError, match="dtype"):
        both(x)


def test_transforms_of_functions(both, x, triton_backend):
    mixer = both.mixer
    weights = {n: p.detach() for n, p in mixer.named_parameters()}

    def loss(weights, x):
        return torch.func.functional_call(mixer, weights, (x,)).square().sum()

    expected = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x.detach())
    with tigon.fuse(mixer):
        own = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x.detach())
        given = {n: p.clone().requires_grad_() for n, p in weights.items()}
        y = torch.func.functional_call(mixer, given, (x,))
        assert joined(y) == (1, 0), "other weights for a call are plain weights"
        (dw,) = torch.autograd.grad(y.square().sum(), given["k.weight"])
    for name in weights:
        torch.testing.assert_close(own[name], expected[name])
    torch.testing.assert_close(dw, expected["k.weight"].sum(0), rtol=1e-4, atol=1e-5)


def test_compiled_code_calls_the_layers(both, x, triton_backend):
    torch._dynamo.reset()
    expected = both.mixer(x)
    with tigon.fuse(both.mixer):
        run = torch.compile(both.mixer, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(run(x), expected)
        assert joined(both.mixer(x)) == (1, 0)
    torch._dynamo.reset()


def test_tensors_that_have_no_memory(both, device, triton_backend):
    with tigon.fuse(both.mixer), FakeTensorMode(allow_non_fake_inputs=True):
        assert both.mixer(torch.randn(2, 5, 16, device=device)).shape == (2, 5, 16)


def test_on_a_cpu_the_references_run(both, x):
    with tigon.use_backend("torch"), tigon.fuse(both) as fusion:
        y = both(x)
        assert joined(y) == (0, 0)
        assert fusion.report().calls["linear"] == 1
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        dx.square().sum().backward()
    assert all(p.grad is not None for p in both.parameters())


def test_adapters_go_first(x, device, triton_backend):
    peft = pytest.importorskip("peft")
    for first in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(Mixer()).to(device)
        plain = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["q", "v"]))
        expected = plain(x)
        if first:
            tigon.fuse(model)
            assert joined(model(x)) == (1, 0)
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q", "v"]))
        adapted.load_state_dict(plain.state_dict())
        fusion = tigon.fuse(adapted)
        y = adapted(x)
        assert joined(y) == (0, 0)
        torch.testing.assert_close(y, expected)
        assert fusion.report().calls == {"adapters": 2}


# ------------------------------------------------------------------------------------------------------------ lifecycle


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_copies_and_files(family, device, triton_backend):
    """A copy is fused by itself, with its own counts; a pickled model is plain, and its state the same."""
    inputs = {k: v.to(device) for k, v in batch(family).items()}
    model = build(family).to(device).eval()  # without dropout
    state = {n: t.clone() for n, t in model.state_dict().items()}
    fusion = tigon.fuse(model)
    twin = copy.deepcopy(model)
    fusion.remove()
    assert joined(model(**inputs).loss)[0] == 0
    outputs, _ = step(twin, inputs)
    assert joined(outputs.loss)[0] == 2
    assert twin._tigon_fusion.report().calls["linear"] == 2
    loaded = pickle.loads(pickle.dumps(twin))
    assert joined(loaded(**inputs).loss)[0] == 0
    assert all(torch.equal(t, state[n]) for n, t in loaded.state_dict().items())


def test_a_new_layer_is_seen(both, x, triton_backend):
    with tigon.fuse(both):
        both.mixer.k = nn.Linear(16, 16, bias=False).to(x.device)
        both.unit.up = nn.Linear(16, 24).to(x.device)
        y, fused = gradients(both, x)
        assert joined(y) == (1, 1)
    _, plain = gradients(both, x)
    assert_close(fused, plain)


def test_gradients_arrive_where_data_parallelism_waits_for_them(both, x, process_group, triton_backend):
    _, plain = gradients(both, x)
    with tigon.fuse(both):
        wrapped = nn.parallel.DistributedDataParallel(both, gradient_as_bucket_view=True)
        both.zero_grad()
        y = wrapped(x)
        assert joined(y) == (1, 1)
        y.square().sum().backward()
        assert_close({n: p.grad for n, p in both.named_parameters()}, {n: g for n, g in plain.items() if n != "x"})


def test_fully_sharded(both, x, process_group, triton_backend, device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _, plain = gradients(both, x)
    tigon.fuse(both)
    mesh = init_device_mesh(device.type, (1,))
    fully_shard(both.mixer, mesh=mesh)
    fully_shard(both.unit, mesh=mesh)
    fully_shard(both, mesh=mesh)
    y = both(x)
    assert joined(y) == (1, 1), "inside of their forward the weights are whole and plain"
    y.square().sum().backward()
    got = {n: p.grad.full_tensor() for n, p in both.named_parameters()}
    assert_close(got, {n: g for n, g in plain.items() if n != "x"})


# -------------------------------------------------------------------------------------------------------------- sources


class Groups(nn.Module):
    """Which calls are one group; the names say it."""

    def two_groups(self, x, y):
        a = self.a(x) + self.b(y)
        return a + self.c(x) * self.d(y)

    def assigned_between(self, x):
        a = self.a(x)
        x = a + 1
        return self.b(x)

    def not_always(self, x):
        a = self.a(x)
        return self.b(x) if x.shape[0] > 1 else a

    def after_a_return(self, x):
        a = self.a(x)
        if x.shape[0] > 1:
            return a
        return self.b(x)

    def called_twice(self, x):
        return self.a(self.a(x)) + self.b(x)

    def more_arguments(self, x):
        return self.a(x, 1) + self.b(x=x) + self.c(x)

    def inside_of_a_block(self, x):
        with torch.profiler.record_function("a"):
            a = self.a(x)
            b = self.b(x)
        return a + b * F.relu(a)


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("two_groups", [["a", "c"], ["b", "d"]]), ("assigned_between", []), ("not_always", []), ("after_a_return", []),
        ("called_twice", []), ("more_arguments", []), ("inside_of_a_block", [["a", "b"]]),
    ],
)  # fmt: skip
def test_which_calls_are_a_group(name, groups):
    function = parse_function(getattr(Groups, name))
    assert [[call.name for call in calls] for calls in group_calls(function)] == groups


@pytest.mark.parametrize("name", ["two_groups", "inside_of_a_block"])
def test_the_groups_of_other_sources(name, device, triton_backend):
    torch.manual_seed(0)
    module = type("Made", (Groups,), {"forward": getattr(Groups, name)})()
    for layer in "abcd":
        setattr(module, layer, nn.Linear(8, 8))
    module.to(device)
    given = [torch.randn(3, 8, device=device, requires_grad=True) for _ in range(2 if name == "two_groups" else 1)]
    plain = module(*given)
    with tigon.fuse(module):
        y = module(*given)
        assert joined(y) == (2 if name == "two_groups" else 1, 0)
    assert torch.equal(y, plain)
    for own, expected in zip(*(torch.autograd.grad(t.sum(), given) for t in (y, plain)), strict=True):
        torch.testing.assert_close(own, expected)
