"""Experts of a mixture in fused models: recognised by numbers, with everything that surrounds them the model's own."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tigon

pytest.importorskip("transformers")
import transformers
from test_families import assert_close, step
from tiny import tiny_inputs, tiny_model
from zoo import BASE, MOE, batch, build

from tigon.fusion.engine.reasons import Reason
from tigon.fusion.parts.experts import Experts, recognize_experts

E, D, INNER = 4, 16, 24


class Softcap(nn.Module):
    def __init__(self, bound):
        super().__init__()
        self.bound = bound

    def forward(self, x):
        return torch.tanh(x / self.bound) * self.bound


class Softcaps(nn.Module):
    def __init__(self, variant):
        super().__init__()
        self.of_silu = variant == "softcaps of silu"
        self.one, self.other = Softcap(1.5), Softcap(2.5)

    def forward(self, gate, up):
        if self.of_silu:
            return self.one(F.silu(gate)) * self.other(up)
        return self.one(gate) * torch.sigmoid(gate) * self.other(up)


class Stacked(nn.Module):
    """Stacked experts that no name gives away; the variants are near misses, and other ways to the same."""

    def __init__(self, variant="silu", by_columns=False, bias=False):
        super().__init__()
        self.variant, self.by_columns = variant, by_columns
        self.bound, self.slope, self.other = 1.5, 1.7, 0.0
        gated = variant != "no gate"
        shapes = {"first": (E, 2 * INNER if gated else INNER, D), "second": (E, D, INNER)}
        for name, (n, rows, columns) in shapes.items():
            shape = (n, columns, rows) if by_columns else (n, rows, columns)
            setattr(self, name, nn.Parameter(torch.randn(shape) / 4))
            if bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(n, rows)))
        self.bias = bias
        if variant.startswith("softcaps"):
            self.act = Softcaps(variant)

    def linear(self, name, x, e):
        w, bias = getattr(self, name)[e], getattr(self, f"{name}_bias")[e] if self.bias else 0.0
        return (x @ w if self.by_columns else x @ w.t()) + bias

    def unit(self, z):
        v = self.variant
        if v == "no gate":
            return F.relu(z).square()
        gate, up = (z[..., ::2], z[..., 1::2]) if v in ("interleaved", "gpt-oss") else z.chunk(2, -1)
        if v in ("limit", "gpt-oss"):
            gate, up = gate.clamp(max=self.bound), up.clamp(-self.bound, self.bound)
        if v == "limit of one side":
            gate, up = gate.clamp(max=self.bound), up.clamp(max=self.bound)
        if v == "gpt-oss":
            return (up + 1) * gate * torch.sigmoid(gate * self.slope)
        if v in ("softcaps", "softcaps of silu"):
            gate, up = gate.float(), up.float()
            return self.act(gate, up).to(z.dtype)
        if v == "up first":
            return F.silu(up) * gate
        if v == "scaled":
            return F.silu(gate) * up * (1.0 + self.other)
        return (F.gelu(gate) if v == "gelu" else F.tanh(gate) if v == "tanh" else F.silu(gate)) * up

    def forward(self, states, chosen, share):
        out = torch.zeros_like(states, dtype=torch.float32 if self.variant == "in fp32" else states.dtype)
        for e in range(len(self.first)):
            token, k = torch.where(chosen == e)
            x, w = states[token], share[token, k, None]
            if self.variant == "weighted before":
                out.index_add_(0, token, self.linear("second", self.unit(self.linear("first", x * w, e)), e))
            elif self.variant == "in fp32":
                h = self.unit(x.float() @ self.first[e].float().t())
                out.index_add_(0, token, h @ self.second[e].float().t() * w.float())
            else:
                y = self.linear("second", self.unit(self.linear("first", x, e)), e) * w
                out.index_add_(0, token, y.to(out.dtype))
        return out.to(states.dtype)


FOUND = {
    "silu": {},
    "gelu": {"act": "gelu"},
    "interleaved": {"interleaved": True},
    "limit": {"limit": "bound"},
    "gpt-oss": {"interleaved": True, "limit": "bound", "alpha": "slope", "up_offset": 1.0},
    "no gate": {"act": "relu2", "gated": False},
    "softcaps": {"softcaps": ("act.one.bound", "act.other.bound")},
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("variant", FOUND)
def test_a_formula_is_found_by_its_numbers(variant, by_columns, bias):
    module = Stacked(variant, by_columns, bias)
    state = copy.deepcopy(module.state_dict())
    found = recognize_experts(module)
    assert isinstance(found, Experts)
    expected = {"act": "silu", "gated": True, "interleaved": False, "limit": None, "alpha": None, "up_offset": 0.0}
    expected["softcaps"] = ()
    assert {k: getattr(found, k) for k in expected} == expected | FOUND[variant]
    assert (found.gate_up, found.down, found.by_columns) == ("first", "second", by_columns)
    assert found.gate_up_bias == ("first_bias" if bias else None)
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())


@pytest.mark.parametrize(
    "variant", ["limit of one side", "up first", "tanh", "weighted before", "in fp32", "softcaps of silu"]
)
def test_a_near_miss_is_refused(variant):
    """The last computes the same, and rounds less than Tigon would."""
    assert recognize_experts(Stacked(variant)) is None
    Named = type("MyExperts", (Stacked,), {})
    assert recognize_experts(Named(variant)) == Reason("its results match no formula of moe_mlp")


def test_an_attribute_that_does_nothing_at_its_value_is_watched():
    module = Stacked("scaled")
    found = recognize_experts(module)
    assert isinstance(found, Experts)
    assert dict(found.held)["other"] == 0.0
    x, index, weights = torch.randn(6, D), torch.arange(6)[:, None] % E, torch.rand(6, 1)
    with tigon.fuse(module) as fusion:
        module(x, index, weights)
        assert fusion.report().calls == {"experts": 1}
        module.other = 0.5
        twice = module(x, index, weights)
    torch.testing.assert_close(twice, module(x, index, weights), rtol=0, atol=0)


@pytest.mark.parametrize("change", ["bound", "another module", "hook"])
def test_a_softcap_that_changes_after_fuse(change):
    module = Stacked("softcaps")
    x, index, weights = torch.randn(6, D) * 4, torch.arange(6)[:, None] % E, torch.rand(6, 1)
    with tigon.fuse(module) as fusion:
        before = module(x, index, weights)
        if change == "bound":
            module.act.one.bound = 0.5
        elif change == "another module":
            module.act.one = nn.Tanh()
        else:
            module.act.one.register_forward_hook(lambda module, args, output: output / 2)
        after = module(x, index, weights)
        assert fusion.report().calls == {"experts": 2 if change == "bound" else 1}
    torch.testing.assert_close(after, module(x, index, weights))
    assert not torch.allclose(after, before)


def named(**changes):
    module = type("MyExperts", (Stacked,), {})()
    for name, value in changes.items():
        setattr(module, name, value)
    return module


LEFT = {
    "quantised": (lambda: named(first=nn.Parameter(torch.ones(E, 2, 3).char(), requires_grad=False)), "quantised"),
    "a norm inside": (lambda: named(norm=nn.LayerNorm(D)), "it has other modules: norm"),
    "more parameters": (lambda: named(scale=nn.Parameter(torch.ones(3))), "not two stacked matrices"),
    "another implementation": (
        lambda: named(config=type("Config", (), {"_experts_implementation": "mine"})()), "its experts run by 'mine'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_has_a_reason(case):
    make, reason = LEFT[case]
    found = recognize_experts(make())
    assert isinstance(found, Reason)
    assert reason in found.text


# ------------------------------------------------------------------------------------------------------ in models


CLASSES = ["OlmoeForCausalLM", "JambaForCausalLM"]


@pytest.mark.parametrize("name", CLASSES)
def test_further_families(name):
    """Of those in test_families.py: Mixtral, Qwen3-MoE, gpt-oss, Granite MoE."""
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    model = tiny_model(getattr(transformers, name))
    inputs = tiny_inputs(model)
    plain, plain_grads = step(model, inputs)
    with tigon.fuse(model, parts={"experts"}) as fusion:
        fused, fused_grads = step(model, inputs)
        calls = fusion.report().calls
    experts = sum(type(m).__name__.endswith("Experts") for m in model.modules())
    assert calls == {"experts": experts}
    assert experts > 0
    torch.testing.assert_close(fused.loss, plain.loss, rtol=2e-6, atol=0)
    assert_close(fused_grads, plain_grads)
    again, again_grads = step(model, inputs)
    assert torch.equal(again.loss, plain.loss)
    assert all(torch.equal(again_grads[n], g) for n, g in plain_grads.items())


MANY = {
    "mixtral": ("Mixtral", {"num_local_experts": 40}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 40, "moe_intermediate_size": 16}),
    "gpt_oss": ("GptOss", {"num_local_experts": 40}),
}


@pytest.mark.parametrize("family", MANY)
def test_experts_without_tokens_and_the_auxiliary_loss(family):
    name, options = MANY[family]
    model_class, config_class = (getattr(transformers, f"{name}{kind}") for kind in ("ForCausalLM", "Config"))
    torch.manual_seed(0)
    model, inputs = model_class(config_class(**BASE, **MOE, **options)), batch(family)
    routers = [m for m in model.modules() if type(m).__name__.endswith("Router")]
    assert routers
    for router in routers:
        nn.init.normal_(router.weight)
    used = []
    hooks = [m.register_forward_hook(lambda m, a, out: used.append(out[-1])) for m in routers]
    plain, plain_grads = step(model, inputs)
    for hook in hooks:
        hook.remove()
    assert all(len(index.unique()) < 40 for index in used), "every expert got a token: not what is tested here"
    with tigon.fuse(model) as fusion:
        fused, fused_grads = step(model, inputs)
        assert fusion.report().calls["experts"] == 2
    torch.testing.assert_close(fused.loss, plain.loss, rtol=2e-6, atol=0)
    torch.testing.assert_close(fused.aux_loss, plain.aux_loss, rtol=1e-5, atol=0)
    assert_close(fused_grads, plain_grads)


def test_the_registry_of_transformers_is_as_it_was():
    from transformers.integrations import moe

    before = dict(moe.ALL_EXPERTS_FUNCTIONS._global_mapping), dict(moe.ALL_EXPERTS_FUNCTIONS._local_mapping)
    model = build("qwen3_moe")
    set_to = model.config._experts_implementation
    with tigon.fuse(model):
        step(model, batch("qwen3_moe"))
        assert model.config._experts_implementation == set_to
        now = dict(moe.ALL_EXPERTS_FUNCTIONS._global_mapping), dict(moe.ALL_EXPERTS_FUNCTIONS._local_mapping)
        assert now == before


def test_an_expert_parallel_forward_is_left():
    model = build("mixtral")
    experts = next(m for m in model.modules() if type(m).__name__ == "MixtralExperts")
    before = experts.forward
    experts.forward = lambda *args, **kwargs: before(*args, **kwargs)  # as transformers' plans install theirs
    with tigon.fuse(model) as fusion:
        left = [row for row in fusion.report().skipped_rows if row.kind == "experts"]
        assert len(left) == 1
        assert "already replaced" in left[0].what
        step(model, batch("mixtral"))
        assert fusion.report().calls["experts"] == 1


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_narrow_numbers_are_no_worse(autocast):
    model, inputs = build("mixtral"), batch("mixtral")
    model.set_experts_implementation("eager")  # the others take no fp64
    exact = model.double()(**inputs).loss.item()
    model.float() if autocast else model.bfloat16()

    def error():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return abs(model(**inputs).loss.item() - exact)

    plain = error()
    with tigon.fuse(model, parts=tigon.PARTS - {"head", "norm", "mlp", "rotary", "linear"}) as fusion:
        assert error() <= 2 * plain + 2e-3
        assert fusion.report().calls == {"experts": 2}


def test_an_implementation_that_is_set_after_fuse_is_obeyed():
    model, inputs = build("mixtral"), batch("mixtral")
    before = model.config._experts_implementation
    other = "eager" if before != "eager" else "batched_mm"
    with tigon.fuse(model) as fusion:
        step(model, inputs)
        assert fusion.report().calls["experts"] == 2
        model.set_experts_implementation(other)
        step(model, inputs)
        assert "experts" not in fusion.report().calls
        model.set_experts_implementation(before)
        step(model, inputs)
        assert fusion.report().calls["experts"] == 2
