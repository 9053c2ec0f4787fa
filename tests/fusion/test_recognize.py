"""Formulas are recognised by numbers: right ones are found, near misses refused, and the module is not touched."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tigon
from tigon.fusion.engine.probe import compute_signature
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.parts.activation import QUICK, recognize_activation
from tigon.fusion.parts.mlp_formula import Gated, recognize_mlp
from tigon.fusion.parts.norm import Norm, recognize_norm
from tigon.fusion.parts.norm_formula import Gate as NormGate
from tigon.fusion.parts.rotary_formula import Turn, read_arguments, recognize_rotary
from tigon.ops import acts
from tigon.ops.activation import activation

N = 48


class Scale(nn.Module):
    """An RMS norm that no name gives away. Near misses are in test_proofs.py."""

    def __init__(self, variant="llama", width=N, eps=1e-6):
        super().__init__()
        self.variant, self.tiny = variant, eps
        if variant != "no weight":
            self.g = nn.Parameter(torch.ones(width))

    def forward(self, x):
        v = self.variant
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.tiny)
        if v == "no weight":
            return y.to(x.dtype)
        if v == "gemma":
            return (y * (1.0 + self.g.float())).to(x.dtype)
        if v == "offset rounded":
            return y.to(x.dtype) * (1.0 + self.g)
        if v == "once":
            return (y * self.g.float()).to(x.dtype)
        if v == "promoted":
            return (y * self.g.float()).to(torch.promote_types(x.dtype, self.g.dtype))
        if v == "in half":
            return self.g * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.tiny))
        return self.g * y.to(x.dtype)


FOUND = {
    "llama": (0.0, "llama"),
    "gemma": (1.0, "gemma"),
    "once": (0.0, "gemma"),
    "promoted": (0.0, "none"),
    "no weight": (0.0, "gemma"),
}


@pytest.mark.parametrize("width", [8, N, 1000])
@pytest.mark.parametrize("variant", FOUND)
def test_norms_are_found(variant, width):
    found = recognize_norm(Scale(variant, width))
    assert isinstance(found, Norm)
    assert (found.offset, found.cast) == FOUND[variant]
    assert found.weight == (None if variant == "no weight" else "g")
    assert found.eps == "tiny"
    assert found.mixed


@pytest.mark.parametrize(("variant", "offset"), [("in half", 0.0), ("offset rounded", 1.0)])
def test_norms_that_round_at_every_step_are_found(variant, offset):
    found = recognize_norm(Scale(variant))
    assert isinstance(found, Norm)
    assert (found.offset, found.stepwise, found.native, found.mixed) == (offset, True, True, False)
    assert str(found).endswith("rounded once instead of at every step")


def test_norms_are_found_that_are_empty_between_uses():
    """As under DeepSpeed's ZeRO-3; those of other widths are other norms."""

    def emptied(norm):
        for p in norm.parameters():
            p.ds_shape, p.data = p.shape, p.data.new_empty(0)
        return norm

    wide, narrow = nn.RMSNorm(48, eps=1e-5), nn.RMSNorm(16, eps=1e-5)
    found = recognize_norm(wide)
    assert isinstance(found, Norm)
    assert recognize_norm(emptied(copy.deepcopy(wide))) == found
    assert compute_signature(emptied(wide)) != compute_signature(emptied(narrow))
    assert recognize_norm(emptied(nn.Linear(1, 16, bias=False))) is None


@pytest.mark.parametrize("eps", [1e-5, None])
@pytest.mark.parametrize("affine", [True, False])
def test_the_norm_of_torch(eps, affine):
    norm = nn.RMSNorm(N, eps=eps, elementwise_affine=affine)
    found = recognize_norm(norm)
    assert isinstance(found, Norm)
    assert found.native
    assert (found.weight, found.width) == (("weight", None) if affine else (None, N))


class GatedNorm(nn.Module):
    """As in Qwen3-Next; the variants are near misses."""

    def __init__(self, variant=""):
        super().__init__()
        self.variant, self.tiny = variant, 1e-6
        self.g = nn.Parameter(torch.ones(N))

    def forward(self, x, gate=None):
        v = self.variant
        act = F.softplus if v == "softplus" else F.silu
        wide = x.float() * act(gate.float()) if v == "gate on both sides" else x.float()
        y = self.g * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.tiny)).to(x.dtype)
        return (y * act(gate.float())).to(x.dtype)


def test_norms_with_a_gate_are_found():
    found = recognize_norm(GatedNorm())
    assert isinstance(found, Norm)
    assert (found.gate, found.cast, found.mixed, found.eps) == (NormGate("silu", True), "llama", True, "tiny")
    model, x, gate = GatedNorm(), torch.randn(2, 3, N, requires_grad=True), torch.randn(2, 3, N, requires_grad=True)
    plain = model(x, gate)
    with tigon.fuse(model) as fusion:
        fused = model(x, gate)
        assert fusion.report().calls == {"norm": 1}
    torch.testing.assert_close(fused, plain)
    for ours, theirs in zip(*(torch.autograd.grad(y.square().sum(), (x, gate)) for y in (fused, plain)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("variant", ["softplus", "gate on both sides"])
def test_near_misses_of_norms_with_a_gate_are_refused(variant):
    assert isinstance(recognize_norm(GatedNorm(variant)), Reason)


class Shift(nn.Module):
    """A layer norm that no name gives away."""

    def __init__(self, variant="cohere"):
        super().__init__()
        self.variant, self.tiny = variant, 1e-5
        self.g = nn.Parameter(torch.ones(N))
        if variant == "bias":
            self.a = nn.Parameter(torch.ones(N))

    def forward(self, x):
        v = self.variant
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.tiny)
        if v == "rounded before the weight":
            return self.g * y.to(x.dtype)
        return (self.g.float() * y + (self.a.float() if v == "bias" else 0.0)).to(x.dtype)


@pytest.mark.parametrize(("variant", "bias"), [("cohere", None), ("bias", "a")])
def test_layer_norms_are_found(variant, bias):
    found = recognize_norm(Shift(variant))
    assert isinstance(found, Norm)
    assert (found.centered, found.weight, found.bias, found.eps) == (True, "g", bias, "tiny")
    assert (found.mixed, found.native) == (True, False)


def test_a_layer_norm_that_rounds_before_the_weight_is_found():
    found = recognize_norm(Shift("rounded before the weight"))
    assert isinstance(found, Norm)
    assert (found.centered, found.stepwise, found.native) == (True, True, True)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}, {"eps": 1e-12}])
def test_the_layer_norm_of_torch(options):
    found = recognize_norm(nn.LayerNorm(N, **options))
    assert isinstance(found, Norm)
    affine = options.get("elementwise_affine", True)
    assert (found.centered, found.native, found.mixed, found.eps) == (True, True, False, "eps")
    assert found.weight == ("weight" if affine else None)
    assert found.bias == ("bias" if affine and options.get("bias", True) else None)
    assert found.width == (None if affine else N)


def test_a_layer_norm_that_stores_its_weight_less_one():
    class OnePlus(nn.LayerNorm):
        def forward(self, x):
            return F.layer_norm(x, self.normalized_shape, self.weight + 1.0, self.bias, self.eps)

    found = recognize_norm(OnePlus(N))
    assert isinstance(found, Norm)
    assert (found.centered, found.offset, found.bias) == (True, 1.0, "bias")


class NormThatDrops(nn.RMSNorm):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("training", [True, False])
def test_a_norm_is_probed_in_training_and_not(training):
    assert isinstance(recognize_norm(NormThatDrops(N, eps=1e-5).train(training)), Reason)


class NormOfSomeRanks(nn.LayerNorm):
    def forward(self, x):
        if self.variant == "from the second on":
            return F.layer_norm(x, x.shape[2:], eps=self.eps)
        if self.variant == "channels first" and x.dim() == 4:
            return super().forward(x.transpose(1, 3)).transpose(1, 3)
        if self.variant == "three alone" and x.dim() != 3:
            return -x if self.calm else self.none
        return super().forward(x)


def test_a_norm_that_differs_in_some_rank_is_refused():
    norm = NormOfSomeRanks(N, elementwise_affine=False)
    norm.variant = "from the second on"
    assert isinstance(recognize_norm(norm), Reason)


def test_a_norm_over_the_channels_of_an_image_is_left_to_itself():
    norm, x = NormOfSomeRanks(N), torch.randn(2, N, 5, N)
    norm.variant = "channels first"
    plain = norm(x)
    with tigon.fuse(norm):
        assert torch.equal(norm(x), plain)


def test_a_norm_runs_by_itself_in_ranks_that_were_not_shown():
    norm = NormOfSomeRanks(N)
    norm.variant, norm.calm = "three alone", False
    assert recognize_norm(norm).ranks == (3,)
    assert recognize_norm(nn.LayerNorm(N)).ranks == (2, 3, 4)
    with tigon.fuse(norm) as fusion:
        norm(torch.randn(2, 3, N))
        assert fusion.report().calls == {"norm": 1}
        norm.calm, x = True, torch.randn(2, N)
        assert torch.equal(norm(x), -x)


@pytest.mark.parametrize("base", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_that_calls_that_of_torch_by_super_is_native(base):
    class Wrapped(base):  # as in ConvNeXt
        def forward(self, x):
            return super().forward(x)

    class Own(base):
        def forward(self, x):
            y = x.float()
            if base is nn.LayerNorm:
                y = y - y.mean(-1, keepdim=True)
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()
            return y.to(x.dtype) if getattr(self, "bias", None) is None else (y + self.bias.float()).to(x.dtype)

    assert recognize_norm(Wrapped(N, eps=1e-5)).native
    assert not recognize_norm(Own(N, eps=1e-5)).native


def test_what_is_no_norm_is_not_mentioned():
    for module in (nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.01), nn.LeakyReLU(0.01), nn.PReLU(4), nn.Embedding(4, 4)):
        assert recognize_norm(module) is None
    for module in (nn.BatchNorm1d(N, affine=False), nn.LayerNorm((N, N)), nn.GroupNorm(1, N), nn.InstanceNorm2d(N)):
        assert isinstance(recognize_norm(module), Reason)


def test_probing_changes_nothing():
    norm = Scale()
    norm.register_forward_hook(lambda *_: pytest.fail("the hook of the module ran"))
    state, attributes = copy.deepcopy(norm.state_dict()), dict(vars(norm))
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert isinstance(recognize_norm(norm), Norm)
    assert torch.equal(torch.rand(3), expected)
    assert vars(norm) == attributes
    assert all(torch.equal(v, state[k]) for k, v in norm.state_dict().items())
    batch = nn.BatchNorm1d(96, affine=False)
    recognize_norm(batch)
    assert not batch.running_mean.any()


class Gate(nn.Module):
    """A gated MLP whose children have names that say nothing."""

    def __init__(self, act, *, variant="", width=16, hidden=64, bias=False):
        super().__init__()
        self.a, self.b = nn.Linear(width, hidden, bias=bias), nn.Linear(width, hidden, bias=bias)
        self.c = nn.Linear(hidden, width, bias=bias)
        self.f = act
        self.variant = variant
        self.half = 0.5 if variant in ("scales", "limit", "residual dropout") else "0.5"
        self.twice = 2.0 if variant == "scales" else 2
        if variant in ("dropout", "dropout of the product", "dropout of gate"):
            self.drop = nn.Dropout(0.3)
        if variant == "norm":
            self.norm = nn.RMSNorm(hidden)

    def forward(self, x):
        if self.variant == "up first":
            up = self.b(x)
            return self.c(self.f(self.a(x)) * up)
        if self.variant == "scaled":
            return self.c(self.f(self.a(x)) * self.b(x)) * 1.01
        if self.variant == "no gate":
            return self.c(self.f(self.a(x)) + self.b(x))
        if self.variant == "train only" and self.training:
            return self.c(self.a(x) * self.b(x))
        if self.variant == "scales":
            return self.c(self.f(self.a(x) * self.half) * self.b(x)) * self.twice
        if self.variant == "limit":
            return self.c(self.f(self.a(x).clamp(max=20 * self.half)) * self.b(x))
        if self.variant == "fixed limit":
            return self.c(self.f(self.a(x).clamp(max=100.0)) * self.b(x))
        if self.variant == "dropout of gate":
            return self.c(self.drop(self.f(self.a(x))) + self.b(x))
        if self.variant == "fixed dropout":
            return self.c(F.dropout(self.f(self.a(x)) * self.b(x), self.half, self.training))
        if self.variant == "residual dropout":
            return F.dropout(self.c(self.f(self.a(x)) * self.b(x)), self.half, self.training)
        if self.variant == "norm":
            return self.c(self.norm(self.f(self.a(x)) * self.b(x)))
        if self.variant == "dropout of the product":
            return self.c(self.drop(self.f(self.a(x)) * self.b(x)))
        if self.variant == "dropout":
            return self.drop(self.c(self.f(self.a(x)) * self.b(x)))
        return self.c(self.f(self.a(x)) * self.b(x))


class Squared(nn.Module):
    def forward(self, x):
        return F.relu(x).square()


ACTS = {
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "relu": nn.ReLU(),
    "relu2": Squared(),
    "sigmoid": nn.Sigmoid(),
}


@pytest.mark.parametrize("width", [16, 64], ids=["narrow", "square"])
@pytest.mark.parametrize("act", ACTS)
def test_gated_mlps_are_found(act, width):
    assert set(ACTS) == set(acts.ACTS)
    assert recognize_mlp(Gate(ACTS[act], width=width)) == Gated("a", "b", "c", act, "f")
    assert recognize_mlp(Gate(ACTS[act], variant="up first")) == Gated("a", "b", "c", act, "f", up_first=True)


@pytest.mark.parametrize("act", [nn.Softsign(), nn.Identity(), nn.Hardswish(), nn.Mish()])
def test_other_activations_are_refused(act):
    found = recognize_mlp(Gate(act))
    assert isinstance(found, Reason)
    assert found.text == f"its results match neither swiglu, geglu nor reglu ({type(act).__name__})"


PLACES = {
    "dropout": {"after": "drop"},
    "dropout of the product": {"between": "drop"},
    "norm": {"between": "norm"},
    "scales": {"gate_scale": "half", "scale": "twice"},
    "residual dropout": {"dropout": "half"},
}


class Packed(nn.Module):
    """One layer for gate and up."""

    def __init__(self, product, dropout=None):
        super().__init__()
        self.a, self.c = nn.Linear(16, 128), nn.Linear(64, 16)
        self.product, self.drop = product, nn.Dropout(dropout or 0.0)

    def forward(self, x):
        first, second = self.a(x).chunk(2, dim=-1)
        return self.c(self.drop(self.product(first, second)))


PACKED = {
    "gate first": (lambda g, u: F.silu(g) * u, "silu", False),
    "up first": (lambda u, g: F.silu(g) * u, "silu", True),
    "up first, gelu": (lambda u, g: u * F.gelu(g), "gelu", True),
    "torch's glu": (lambda u, g: F.glu(torch.cat((u, g), -1)), "sigmoid", True),
    "as ModernBERT": (lambda g, u: F.gelu(g) * u, "gelu", False),
}


@pytest.mark.parametrize("what", PACKED)
def test_packed_mlps_are_found_and_run(what, backend, device):
    product, act, up_first = PACKED[what]
    model = Packed(product, 0.3 if what == "as ModernBERT" else None).to(device)
    found = recognize_mlp(model)
    assert (found.gate, found.up, found.act, found.up_first, found.between) == ("a", None, act, up_first, "drop")
    model.drop.p, x = 0.0, torch.randn(5, 16, device=device, requires_grad=True)

    def step():
        y = model(x)
        return y.detach(), *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))

    plain = step()
    for recompute in ("none", "product", "mlp"):
        with tigon.fuse(model, recompute=recompute) as fusion:
            for ours, theirs in zip(step(), plain, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            assert fusion.report().calls == {"mlp": 1}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("variant", PLACES)
def test_what_stands_around_a_gated_mlp_is_found_and_runs(variant, training):
    for act in ("silu", "relu2"):
        assert recognize_mlp(Gate(ACTS[act], variant=variant)) == Gated("a", "b", "c", act, "f", **PLACES[variant])
    model, x = Gate(nn.SiLU(), variant=variant).train(training), torch.randn(3, 16, requires_grad=True)

    def run():
        torch.manual_seed(1)
        y = model(x)
        return y.detach(), *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))

    plain = run()
    with tigon.fuse(model, parts=tigon.PARTS - {"norm"}) as fusion:
        assert fusion.report().fused_rows[0].kind == "mlp"
        for ours, theirs in zip(run(), plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_an_attribute_that_does_nothing_yet_is_honoured_when_it_changes():
    model, x = Gate(nn.SiLU(), variant="fixed dropout"), torch.randn(3, 16)
    model.half = 0.0
    plain = model(x)
    with tigon.fuse(model) as fusion:
        torch.testing.assert_close(model(x), plain)
        assert fusion.report().calls == {"mlp": 1}
        model.half = 1.0
        assert not model(x).any()


class New(nn.Module):  # as in T5 1.1, and GPT-2
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh((2.0 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0))))


class Quick(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Half(nn.Module):  # half of quick gelu's factor
    def forward(self, x):
        return x * torch.sigmoid(0.851 * x)


def test_activations_are_found_by_themselves():
    found = {
        "relu(x)²": Squared(), "gelu_tanh(x), one kernel": New(), "x · sigmoid(1.702 x), one kernel": Quick(),
        "gelu(x)": nn.GELU(), "x · sigmoid(x)": nn.SiLU(),
    }  # fmt: skip
    for text, module in found.items():
        assert str(recognize_activation(module)) == text
    # relu, sigmoid and tanh keep nothing but their result.
    for module in (nn.ReLU(), nn.Sigmoid(), nn.Identity(), nn.Dropout(), nn.Linear(3, 3), nn.ReLU6(), nn.Sequential()):
        assert recognize_activation(module) is None
    assert recognize_activation(Half()) is None


@pytest.mark.parametrize("act", [nn.GELU(), New(), Quick()], ids=["gelu", "written out", "quick gelu"])
def test_the_result_of_an_activation_is_not_kept(act):
    """The layer after it gets the result from a recipe, with the gradients that it gives without one."""
    model, x = nn.Sequential(nn.Linear(8, 40), act, nn.Linear(40, 8)), torch.randn(3, 5, 8)

    def run(recompute):
        with tigon.fuse(model, recompute=recompute) as fusion:
            y = model(x)
            grads = torch.autograd.grad(y.square().sum(), list(model.parameters()))
        assert fusion.report().calls == {"mlp": 1}
        return fusion.report().bytes_not_kept, (y.detach(), *grads)

    plain = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    (kept, first), (left_out, second) = run("product"), run("cheap")
    assert (kept, left_out) == (0, 3 * 5 * 40 * 4)
    for one, other, expected in zip(first[1:], second[1:], plain, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("act", [acts.ACTS["gelu_tanh"], acts.ACTS["silu"]], ids=lambda row: row.name)
def test_a_written_out_activation_in_one_kernel(act):
    """Value and slope against fp64, in bf16: half a rounding each, so no further off than torch's own code."""
    x = torch.linspace(-9, 9, 200).bfloat16().requires_grad_()
    y = activation(x, act.name, input_multiplier=QUICK, multiplier=1 / QUICK)
    (slope,) = torch.autograd.grad(y.sum(), x)
    exact = x.detach().double().requires_grad_()
    expected = act.value(exact * QUICK) / QUICK
    (expected_slope,) = torch.autograd.grad(expected.sum(), exact)
    for ours, theirs in ((y, expected), (slope, expected_slope)):
        assert (ours.double() - theirs).abs().max() <= 2**-8 * theirs.abs().max()
        assert ((ours.double() - theirs).abs() <= 2**-8 * theirs.abs() + 1e-6).all()


def test_an_activation_takes_what_its_module_takes():
    model, x = nn.Sequential(nn.Linear(4, 8), Squared(), nn.Linear(8, 4)), torch.randn(3, 4)
    plain = model(x)
    with tigon.fuse(model) as fusion:
        torch.testing.assert_close(model(x), plain)
        assert fusion.report().calls == {"mlp": 1}
        assert model[1](x.long()).dtype == torch.int64, "what tigon.relu2 does not take"


def test_gelu_written_out_is_found():
    assert recognize_mlp(Gate(New())) == Gated("a", "b", "c", "gelu_tanh", "f")


@pytest.mark.parametrize("variant", ["scaled", "no gate", "train only", "limit", "fixed limit", "dropout of gate"])
def test_near_misses_of_gated_mlps_are_refused(variant):
    assert isinstance(recognize_mlp(Gate(nn.SiLU(), variant=variant)), Reason)


def test_gelu_approximated_otherwise_is_refused():
    assert isinstance(recognize_mlp(Gate(Quick())), Reason)


def test_plain_mlps_are_not_mentioned():
    class Plain(nn.Module):
        def __init__(self, hidden):
            super().__init__()
            self.up, self.down = nn.Linear(16, hidden), nn.Linear(hidden // 2 if hidden == 64 else hidden, 16)

        def forward(self, x):
            h = F.gelu(self.up(x))
            return self.down(h[..., : self.down.in_features])

    assert recognize_mlp(Plain(32)) is None
    assert isinstance(recognize_mlp(Plain(64)), Reason), "twice as wide as its second layer takes"


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def full(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def in_fp32(q, k, cos, sin, unsqueeze_dim=1):
    turned = full(q.float(), k.float(), cos.float(), sin.float(), unsqueeze_dim)
    return turned[0].to(q.dtype), turned[1].to(k.dtype)


def partial(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    width = cos.shape[-1]
    turned = full(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim)
    return tuple(torch.cat((t, x[..., width:]), -1) for t, x in zip(turned, (q, k), strict=True))


def heads_last(q, k, cos, sin):
    return full(q, k, cos, sin, -2)


def fixed(q, k, cos, sin, unsqueeze_dim=1):
    return full(q, k, cos, sin, 1)  # takes the parameter and ignores it


def other_sign_of_k(q, k, cos, sin, unsqueeze_dim=1):
    return full(q, k, cos, sin, unsqueeze_dim)[0], full(q, k, cos, -sin, unsqueeze_dim)[1]


def only_q(q, k, cos, sin, unsqueeze_dim=1):
    return full(q, k, cos, sin, unsqueeze_dim)[0], k


def neighbours(q, k, cos, sin, unsqueeze_dim=1):
    def rotate(x):
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin


def test_rotations_are_found():
    found = recognize_rotary(full)
    assert (found.full, found.partial, found.keeps, found.unsqueeze, found.default) == (True, False, False, True, 1)
    assert recognize_rotary(in_fp32).keeps
    found = recognize_rotary(partial)
    assert (found.full, found.partial, found.unsqueeze) == (True, True, True)
    found = recognize_rotary(heads_last)
    assert (found.default, found.unsqueeze, found.flat) == (2, False, True)
    found = recognize_rotary(fixed)
    assert (found.default, found.unsqueeze) == (1, False)


@pytest.mark.parametrize("fn", [other_sign_of_k, only_q])
def test_near_misses_of_rotations_are_refused(fn):
    assert recognize_rotary(fn) == Reason("its results match no formula of tigon.rope")


def with_angles(turn, *, tail=False):
    """A rotation written the way of one family, with unsqueeze_dim 1."""

    def spread(cos):
        cos = cos.unsqueeze(1)
        if turn == "glm":
            return cos[..., : cos.shape[-1] // 2].repeat_interleave(2, dim=-1)
        return cos.repeat_interleave(2, dim=-1) if turn == "deepseek v4" else cos

    def rotate(x, cos, sin):
        width = cos.shape[-1]
        if turn == "deepseek v4":
            return torch.cat((x[..., :-width], x[..., -width:] * cos + pairs(x[..., -width:]) * sin), -1)
        if turn == "gpt-oss":
            first, second = x.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        if turn == "deepseek v3":
            cos, sin = (t[..., : width // 2] for t in (cos, sin))
            first, second = x[..., ::2], x[..., 1::2]
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        if turn == "nanochat":
            return x * cos - rotate_half(x) * sin
        return torch.cat((x[..., :width] * cos + pairs(x[..., :width]) * sin, x[..., width:]), -1)

    def fn(q, k, cos, sin):
        cos, sin = spread(cos), spread(sin)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    return fn


def pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


TURNS = {
    "glm": (Turn("first half", "neighbours"), True),
    "gpt-oss": (Turn("half", "halves"), False),
    "deepseek v3": (Turn("first half", "parted"), False),
    "deepseek v4": (Turn("half", "neighbours", tail=True), True),
    "nanochat": (Turn("whole", "halves", back=True), False),
}


@pytest.mark.parametrize("family", TURNS)
def test_rotations_of_the_families_are_found(family):
    found = recognize_rotary(with_angles(family))
    turn, partial = TURNS[family]
    assert (found.turn, found.full, found.partial, found.default) == (turn, True, partial, 1)


def test_interleaved_rotation_is_found():
    found = recognize_rotary(neighbours)
    assert (found.turn, found.full, found.unsqueeze) == (Turn("whole", "neighbours"), True, True)


def test_rotations_of_one_tensor_and_of_complex_angles_are_found():
    def one(tensor, sin, cos):
        cos, sin = (t[:, :, None].repeat_interleave(2, dim=-1) for t in (cos, sin))
        return tensor * cos + pairs(tensor) * sin

    found = recognize_rotary(one)
    assert (found.turn, found.names, found.default) == (Turn("half", "neighbours"), ("tensor", "sin", "cos"), 2)
    x, cos, sin = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 2), torch.zeros(1, 2, 2)
    assert found.bind((x, sin), {"cos": cos}) == ((x,), cos, sin, 2)
    assert found.bind((x, sin, cos, 1), {}) is None

    def optional(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
        turned = full(q, q if k is None else k, cos, sin, unsqueeze_dim)
        return turned[0] if k is None else turned

    assert (recognize_rotary(optional).alone, recognize_rotary(full).alone) == (True, False)

    def by_complex(xq, xk, freqs_cis):
        turned = (torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * freqs_cis[:, None] for x in (xq, xk))
        return tuple(torch.view_as_real(t).flatten(3).type_as(xq) for t in turned)

    found = recognize_rotary(by_complex)
    assert (found.turn, found.complex, found.keeps, found.default) == (Turn("half", "neighbours"), True, True, 1)
    assert found.bind((x, x, cos), {}) is None, "real angles"


def test_what_is_worth_a_probe():
    assert read_arguments(full) == ("q", "k", "cos", "sin")
    assert read_arguments(partial)
    assert read_arguments(lambda x, cos, sin: x)
    assert not read_arguments(rotate_half)
    assert not read_arguments(lambda q, k, sin, cos: q)
    assert not read_arguments(lambda q, k, cos, sin, mrope_section: q)
    assert not read_arguments(lambda x, cos, sin, positions: x)
    assert not read_arguments(print)
    assert "other arguments" in recognize_rotary(lambda q, k, angles: q).text
