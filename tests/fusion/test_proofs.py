"""What agrees with a formula in some numbers and is another thing: each of these modules must run its own code."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tigon
from tigon.fusion.engine.bytecode import analyze_forward
from tigon.fusion.engine.probe import compute_signature
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.parts.activation import recognize_activation
from tigon.fusion.parts.experts import recognize_experts
from tigon.fusion.parts.mlp_formula import recognize_mlp
from tigon.fusion.parts.norm import Norm, recognize_norm
from tigon.fusion.parts.rotary_formula import recognize_rotary

N = 48


class Slowed(torch.autograd.Function):
    """The identity, with a smaller gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g * 0.9


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-5, 5)


def half_detached(x):
    return x * 0.5 + (x * 0.5).detach()


def normed(x, weight, eps=1e-6, statistics=lambda x: x):
    wide = x.float()
    y = wide * torch.rsqrt(statistics(wide).square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def hooked(x):
    if x.requires_grad:
        x.register_hook(lambda g: g * 0.5)
    return x


STORED = []
SHARE = 1.0


def into_a_list(x):
    STORED.append(x)
    return x


def counted_globally(x):
    global SHARE
    SHARE = 2.0
    return x


# Each takes (module, x) to what is normed or multiplied, and is nothing in the numbers of one plain forward.
UNSEEN = {
    "statistics detached": lambda m, x: normed(x, m.weight, statistics=torch.Tensor.detach),
    "weight detached": lambda m, x: normed(x, m.weight.detach()),
    "gradient scaled": lambda m, x: normed(Slowed.apply(x), m.weight),
    "gradient clipped": lambda m, x: normed(Clipped.apply(x), m.weight),
    "half detached": lambda m, x: normed(half_detached(x), m.weight),
    "no gradient": lambda m, x: normed(x, m.weight).detach(),
    "hook on the input": lambda m, x: normed(hooked(x), m.weight),
    "limit": lambda m, x: normed(x.clamp(-1000, 1000), m.weight),
    "numbers mended": lambda m, x: normed(x.nan_to_num(), m.weight),
    "numbers mended behind": lambda m, x: normed(x, m.weight).nan_to_num(),
    "fp16": lambda m, x: normed(x, m.weight) * (1 + (x.dtype == torch.float16)),
    "fp16 by a branch": lambda m, x: normed(x, m.weight) if x.dtype != torch.float16 else x,
    "one sequence": lambda m, x: normed(x, m.weight) * (1 + (x.shape[0] == 1)),
    "one sequence by a branch": lambda m, x: normed(x, m.weight) if x.shape[0] > 1 else x,
    "long": lambda m, x: normed(x, m.weight) * (1 + (x.shape[1] > 600)),
    "very long by a branch": lambda m, x: normed(x, m.weight) if x.shape[1] < 100_000 else x,
    "later tokens": lambda m, x: normed(x, m.weight) * (torch.arange(x.shape[-2])[:, None] < 100),
    "without gradients": lambda m, x: normed(x, m.weight) * (2 - torch.is_grad_enabled()),
    "without gradients by a branch": lambda m, x: normed(x, m.weight) if torch.is_grad_enabled() else x,
    "large by a branch": lambda m, x: normed(x, m.weight) if x.abs().max() < 1e9 else x,
    "into a list": lambda m, x: normed(into_a_list(x), m.weight),
    "into a global": lambda m, x: normed(counted_globally(x), m.weight),
    "into a list of its own": lambda m, x: (m.kept.append(x), normed(x, m.weight))[1],
    "into a dictionary of its own": lambda m, x: (m.table.update(last=x), normed(x, m.weight))[1],
}


def module_of(base, forward, **attributes):
    module = type("MyNorm", (base,), {"forward": forward})()
    vars(module).update(attributes)
    return module


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(N))
        self.kept, self.table, self.last = [], {}, None


@pytest.mark.parametrize("what", UNSEEN)
def test_norms_that_do_something_else_unseen(what):
    assert isinstance(recognize_norm(module_of(Weighted, lambda self, x: normed(x, self.weight))), Norm)
    assert isinstance(recognize_norm(module_of(Weighted, UNSEEN[what])), Reason)


def over_rms(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def with_closed_eps(eps):
    def forward(self, x):
        return self.weight * over_rms(x.float(), eps).to(x.dtype)

    return forward


EPS = 3e-7
# Bodies of norms, in classes whose names say nothing, with the formula and the eps that fuse finds.
HANDWRITTEN = {
    "literal": (lambda m, x: F.layer_norm(x, m.weight.shape, m.weight, None, 1e-5), 1e-5, "(x − mean) / std · w"),
    "closure": (with_closed_eps(2e-6), 2e-6, "x / rms(x) · w"),
    "global": (lambda m, x: m.weight * over_rms(x.float(), EPS).to(x.dtype), EPS, "x / rms(x) · w"),
    "class attribute": (lambda m, x: m.weight * over_rms(x.float(), m.tiny).to(x.dtype), "tiny", "x / rms(x) · w"),
    "object": (lambda m, x: m.weight * over_rms(x.float(), m.config.eps).to(x.dtype), 4e-6, "x / rms(x) · w"),
    "uncommon": (lambda m, x: m.weight * over_rms(x.float(), 1.2345e-5).to(x.dtype), 1.2345e-5, "x / rms(x) · w"),
    "of the machine": (
        lambda m, x: m.weight * over_rms(x.float(), torch.finfo(torch.float32).eps).to(x.dtype),
        torch.finfo(torch.float32).eps, "x / rms(x) · w",
    ),
    "no cast": (lambda m, x: over_rms(x, 1e-6) * m.weight, 1e-6, "x / rms(x) · w"),
    "by the norm": (
        lambda m, x: (x.float() / x.float().norm(dim=-1, keepdim=True) * N**0.5).to(x.dtype) * m.weight,
        0.0, "x / rms(x) · w",
    ),
    "bias": (lambda m, x: m.weight * over_rms(x.float(), 1e-6).to(x.dtype) + m.bias, 1e-6, "x / rms(x) · w + b"),
    "bias, no cast": (lambda m, x: over_rms(x, 1e-6) * m.weight + m.bias, 1e-6, "x / rms(x) · w + b"),
    "layer norm, no cast": (
        lambda m, x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt() * m.weight
        + m.bias,
        1e-5, "(x − mean) / std · w + b",
    ),
}  # fmt: skip


def plain_class(forward, **attributes):
    """An instance of a class whose name says nothing."""
    biased = "bias" in getattr(forward, "__code__", forward).co_names
    module = type("A", (Weighted,), {"forward": forward, "tiny": 5e-6, **attributes})()
    module.config = type("Config", (), {"eps": 4e-6})()
    if biased:
        module.bias = nn.Parameter(torch.randn(N))
    return module


@pytest.mark.parametrize("what", HANDWRITTEN)
def test_a_norm_is_recognised_whatever_its_name_and_wherever_its_eps(what):
    forward, eps, formula = HANDWRITTEN[what]
    found = recognize_norm(plain_class(forward))
    assert isinstance(found, Norm)
    assert found.eps == eps
    assert str(found).startswith(formula)
    model = nn.Sequential(plain_class(forward))
    for dtype, rtol in ((torch.float32, 2e-6), (torch.bfloat16, 3e-2)):
        model.to(dtype)
        x = (torch.randn(5, 7, N) * torch.logspace(-3, 2, 7)[:, None]).to(dtype).requires_grad_()
        plain = model(x)
        with tigon.fuse(model) as fusion:
            fused = model(x)
            assert fusion.report().calls == {"norm": 1}
        torch.testing.assert_close(fused, plain, rtol=rtol, atol=rtol)
        upstream = torch.randn(x.shape)
        grads = [torch.autograd.grad((y.float() * upstream).mean(), x)[0].float() for y in (fused, plain)]
        torch.testing.assert_close(*grads, rtol=20 * rtol, atol=20 * rtol * float(grads[1].abs().max()))


@pytest.mark.parametrize("what", ["no cast", "layer norm, no cast", "bias, no cast"])
def test_rounding_once_is_nearer_to_the_exact_norm(what):
    model = nn.Sequential(plain_class(HANDWRITTEN[what][0]))
    x = torch.randn(64, N)
    exact = model.double()(x.bfloat16().double())
    model.bfloat16()
    plain = model(x.bfloat16())
    with tigon.fuse(model):
        fused = model(x.bfloat16())
    ours, theirs = ((y.double() - exact).abs().mean() for y in (fused, plain))
    assert ours < theirs


def test_under_autocast_a_norm_without_a_cast_gives_what_it_gave():
    """Autocast runs powers in fp32, so the result is fp32 for a narrow x."""
    model = nn.Sequential(plain_class(HANDWRITTEN["no cast"][0]))
    for x in (torch.randn(3, N), torch.randn(3, N).bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            plain = model(x)
            with tigon.fuse(model) as fusion:
                fused = model(x)
                assert fusion.report().calls == ({"norm": 1} if x.dtype == torch.float32 else {})
        assert fused.dtype == plain.dtype == torch.float32
        torch.testing.assert_close(fused, plain)


# Each norms its rows by another formula than Tigon's.
NEAR_MISSES = {
    "eps of x's dtype": lambda m, x: m.weight * over_rms(x.float(), torch.finfo(x.dtype).eps).to(x.dtype),
    "eps outside the root": lambda m, x: m.weight * (x / (x.norm(dim=-1, keepdim=True) * N**-0.5 + 1e-8)),
    "a tiny eps outside the root": lambda m, x: m.weight * (x / (x.norm(dim=-1, keepdim=True) * N**-0.5 + 1e-13)),
    "the larger of eps and the mean": lambda m, x: (
        m.weight * (x / x.square().mean(-1, keepdim=True).clamp_min(1e-6).sqrt())
    ),
    "l2 with a limit": lambda m, x: F.normalize(x, dim=-1) * m.weight,
    "l2 with a limit, by the width": lambda m, x: F.normalize(x.float(), dim=-1).to(x.dtype) * N**0.5 * m.weight,
    "l2 without the width": lambda m, x: (x.float() / x.float().norm(dim=-1, keepdim=True)).to(x.dtype) * m.weight,
    "l1": lambda m, x: x / (x.abs().mean(-1, keepdim=True) + 1e-6) * m.weight,
    "largest": lambda m, x: x / (x.abs().amax(-1, keepdim=True) + 1e-6) * m.weight,
    "std with correction": lambda m, x: (
        (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt() * m.weight
    ),
    "std and eps": lambda m, x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) * m.weight + m.bias,
    "bias rounded along": lambda m, x: (over_rms(x.float(), 1e-6) * m.weight.float() + m.bias.float()).to(x.dtype),
    "scaled": lambda m, x: 1.001 * m.weight * over_rms(x.float(), 1e-6).to(x.dtype),
    "sum": lambda m, x: m.weight * (x.float() * torch.rsqrt(x.float().pow(2).sum(-1, keepdim=True) + 1e-6)).to(x.dtype),
    "layer norm, bias first": lambda m, x: F.layer_norm(x, m.weight.shape) * m.weight + m.weight * m.bias,
    "two norms": lambda m, x: over_rms(over_rms(x.float(), 1e-6), 1e-3).to(x.dtype) * m.weight,
}  # fmt: skip


@pytest.mark.parametrize("what", NEAR_MISSES)
def test_near_misses_of_norms_have_a_row_with_advice_whatever_their_name(what):
    model = nn.Sequential(plain_class(NEAR_MISSES[what]))
    found = recognize_norm(model[0])
    assert isinstance(found, Reason)
    assert found.advice
    with tigon.fuse(model) as fusion:
        rows = [row for row in fusion.report().skipped_rows if row.kind == "norm"]
    assert [(row.name, row.what, row.advice) for row in rows] == [("A", found.text, found.advice)]


def test_what_normalises_no_row_has_no_row():
    for module in (
        nn.Softmax(-1),
        nn.LogSoftmax(-1),
        nn.Tanh(),
        nn.Identity(),
        nn.GELU(),
        nn.Hardtanh(),
        nn.Softsign(),
    ):
        assert recognize_norm(module) is None
    for forward in (
        lambda m, x: x.sign() * m.weight,
        lambda m, x: x - x.mean(-1, keepdim=True),
        lambda m, x: x * m.weight,
    ):
        assert recognize_norm(plain_class(forward)) is None


class Stores(Weighted):
    def forward(self, x):
        self.last = x
        return normed(x, self.weight)


class StoresAnItem(Weighted):
    def forward(self, x):
        self.table["last"] = x
        return normed(x, self.weight)


class StoresInAMethod(Weighted):
    def keep(self, x):
        self.last = x.square().mean()
        return x

    def forward(self, x):
        return normed(self.keep(x), self.weight)


@pytest.mark.parametrize("kind", [Stores, StoresAnItem, StoresInAMethod])
def test_what_a_forward_stores_is_still_stored(kind):
    found = recognize_norm(type("MyNorm", (kind,), {})())
    assert isinstance(found, Reason)
    assert found.text.startswith("its forward has side effects: ")
    assert "test_proofs.py:" in found.text
    model, x = nn.Sequential(kind()), torch.randn(2, 3, N)
    with tigon.fuse(model):
        model(x)
    assert model[0].last is not None or model[0].table


class Gate(nn.Module):
    def __init__(self, wrap=lambda x: x, inside=lambda x: x, around=lambda x: x):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)
        self.wrap, self.inside, self.around = wrap, inside, around
        self.limit = 2

    def forward(self, x):
        return self.around(self.down(self.inside(F.silu(self.gate(self.wrap(x)))) * self.up(x)))


@pytest.mark.parametrize("place", ["wrap", "inside", "around"])
@pytest.mark.parametrize(
    "step",
    [
        torch.detach, Slowed.apply, Clipped.apply, half_detached, hooked,
        lambda x: x.clamp(-1e5, 1e5), lambda x: x * (1 + (x.shape[0] == 1)), lambda x: x * (1 + (x.shape[1] > 600)),
        lambda x: x * (1 + (x.dtype == torch.float16)),
    ],
    ids=["detached", "slowed", "clipped", "half detached", "hook", "limit", "one", "long", "fp16"],
)  # fmt: skip
def test_mlps_that_do_something_else_unseen(step, place):
    assert not isinstance(recognize_mlp(Gate()), Reason)
    assert isinstance(recognize_mlp(Gate(**{place: step})), Reason)


def test_an_mlp_that_mends_its_result():
    assert isinstance(recognize_mlp(Gate(around=torch.nan_to_num)), Reason)


def test_an_mlp_that_branches_on_its_input():
    class Branches(Gate):
        def forward(self, x):
            y = self.down(F.silu(self.gate(x)) * self.up(x))
            if x.numel() > 10_000_000:
                y = y * 2
            return y

    class Settled(Gate):
        def forward(self, x):
            limit = self.limit
            if limit > 1 and isinstance(self.gate, nn.Module) and self.training is not None:
                return self.down(F.silu(self.gate(x)) * self.up(x))
            if x.shape[-1] != 16:
                raise ValueError("width")
            return x

    assert "a branch that probes do not determine, at test_proofs.py:" in recognize_mlp(Branches()).text
    assert not isinstance(recognize_mlp(Settled()), Reason)


@pytest.mark.parametrize("step", [torch.detach, Slowed.apply, half_detached, torch.nan_to_num])
def test_squares_of_relu_that_do_something_else_unseen(step):
    module = type("MySquare", (nn.Module,), {"forward": lambda self, x: F.relu(step(x)).square()})()
    assert not isinstance(recognize_activation(module), nn.Module)
    assert recognize_activation(module) is None


def rotated(q, k, cos, sin, step):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = (torch.stack(x.chunk(2, dim=-1)) for x in (q, k))
    return tuple(step(x) * cos + torch.cat((-h[1], h[0]), -1) * sin for x, h in ((q, first), (k, second)))


@pytest.mark.parametrize(
    "step",
    [torch.detach, Slowed.apply, half_detached, torch.nan_to_num, lambda x: x * (1 + (x.shape[2] > 600))],
    ids=["detached", "slowed", "half detached", "mended", "long"],
)
def test_rotations_that_do_something_else_unseen(step):
    assert not isinstance(recognize_rotary(lambda q, k, cos, sin: rotated(q, k, cos, sin, lambda x: x)), Reason)
    assert isinstance(recognize_rotary(lambda q, k, cos, sin: rotated(step(q), step(k), cos, sin, lambda x: x)), Reason)


def branching(q, k, cos, sin):
    if q.shape[2] > 100_000:
        return q, k
    return rotated(q, k, cos, sin, lambda x: x)


def test_a_rotation_that_branches_on_its_input():
    assert "a branch that probes do not determine" in recognize_rotary(branching).text


class Experts(nn.Module):
    def __init__(self, step=lambda x: x, weigh=lambda w: w):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4, 48, 16)), nn.Parameter(torch.randn(4, 16, 24))
        self.step, self.weigh = step, weigh

    def forward(self, x, index, weights):
        y = torch.zeros_like(x)
        for expert in range(self.first.shape[0]):
            token, choice = torch.where(index == expert)
            gate, up = F.linear(self.step(x[token]), self.first[expert]).chunk(2, dim=-1)
            out = F.linear(F.silu(gate) * up, self.second[expert])
            y = y.index_add(0, token, (out * self.weigh(weights)[token, choice, None]).to(x.dtype))
        return y


@pytest.mark.parametrize("place", ["step", "weigh"])
@pytest.mark.parametrize("step", [torch.detach, Slowed.apply, half_detached], ids=["detached", "slowed", "half"])
def test_experts_that_do_something_else_unseen(step, place):
    def recognized(**steps):
        return recognize_experts(type("MyExperts", (Experts,), {})(**steps))

    assert not isinstance(recognized(), Reason)
    assert isinstance(recognized(**{place: step}), Reason)


# --------------------------------------------------------------------------------------- which modules are the same


class Private(nn.Module):
    """Its settings are private; `layer_idx` is its own, and the code does not read it."""

    def __init__(self, offset=0.0, layer_idx=0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N))
        self._offset, self.layer_idx, self._eps = offset, layer_idx, 1e-6

    def forward(self, x):
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return (y * (self._offset + self.weight.float())).to(x.dtype)


def test_private_settings_tell_modules_apart():
    model, x = nn.Sequential(Private(0.0), Private(1.0)), torch.randn(2, 3, N)
    plain = model(x)
    assert compute_signature(model[0]) != compute_signature(model[1])
    with tigon.fuse(model) as fusion:
        torch.testing.assert_close(model(x), plain)
        assert fusion.report().calls == {"norm": 2}


def test_what_the_code_does_not_read_does_not_tell_modules_apart():
    assert "layer_idx" not in analyze_forward(Private()).names
    assert compute_signature(Private(layer_idx=1)) == compute_signature(Private(layer_idx=2))
    assert compute_signature(nn.LayerNorm(N)) == compute_signature(nn.LayerNorm(N)), "equal tuples are one setting"
    assert compute_signature(nn.LayerNorm(N)) != compute_signature(nn.LayerNorm(N, eps=1e-3))

    class Reads(Private):
        def forward(self, x):
            return super().forward(x) * (1.0 if self.layer_idx < 2 else 2.0)

    class ReadsAnything(Private):
        def forward(self, x):
            return super().forward(x) * getattr(self, "layer" + "_idx")

    for kind in (Reads, ReadsAnything):
        assert compute_signature(kind(layer_idx=1)) != compute_signature(kind(layer_idx=2))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_many_layers_are_probed_once(family, monkeypatch):
    """A layer of its own index costs no probe: 24 layers take as many as two."""
    transformers = pytest.importorskip("transformers")
    from tigon.fusion.engine import probe

    runs, run = [], probe.run
    for name in ("norm_formula", "norm_eps", "mlp_formula", "activation", "experts", "rotary_formula"):
        monkeypatch.setattr(
            f"tigon.fusion.parts.{name}.run", lambda *args, **options: runs.append(1) or run(*args, **options)
        )
    counts = []
    for layers in (2, 24):
        sizes = {"vocab_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2, "hidden_size": 32}
        config = {
            "llama": lambda s: transformers.LlamaConfig(**s, intermediate_size=48),
            "gpt2": lambda s: transformers.GPT2Config(**s),
        }[family](sizes)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        runs.clear()
        with tigon.fuse(model) as fusion:
            assert sum(row.count for row in fusion.report().fused_rows) > layers
        counts.append(len(runs))
    assert counts[0] == counts[1] > 0


# ---------------------------------------------------------------------------------------------- changes after fuse


def test_an_attribute_that_changes_after_fuse_is_obeyed():
    model, x = nn.Sequential(Private()), torch.randn(2, 3, N)
    with tigon.fuse(model) as fusion:
        model(x)
        assert fusion.report().calls == {"norm": 1}
        model[0]._offset = 1.0
        after = model(x)
        assert fusion.report().calls == {}
    assert torch.equal(after, model(x))


def test_an_activation_that_changes_after_fuse_is_obeyed():
    class Act(nn.Module):
        slope = 1.0

        def __init__(self):
            super().__init__()
            self.slope = 1.0

        def forward(self, x):
            return F.silu(x) * self.slope

    class WithAct(Gate):
        def __init__(self):
            super().__init__()
            self.act = Act()

        def forward(self, x):
            return self.down(self.act(self.gate(x)) * self.up(x))

    model, x = WithAct(), torch.randn(3, 16)
    with tigon.fuse(model) as fusion:
        model(x)
        model.act.slope = 2.0
        after = model(x)
        assert fusion.report().calls == {"mlp": 1}
    assert torch.equal(after, model(x))


class Rotates(nn.Module):
    def forward(self, q, k, cos, sin):
        return turned(q, k, cos, sin)


def turned(q, k, cos, sin):
    return rotated(q, k, cos, sin, lambda x: x)


def test_a_rotary_function_that_is_replaced_after_fuse_is_obeyed(monkeypatch):
    model, (q, k) = Rotates(), (torch.randn(2, 4, 5, 16) for _ in range(2))
    cos, sin = (torch.randn(2, 5, 16) for _ in range(2))
    with tigon.fuse(model) as fusion:
        model(q, k, cos, sin)
        monkeypatch.setitem(globals(), "turned", lambda q, k, cos, sin: (k, q))
        swapped = model(q, k, cos, sin)
        assert fusion.report().calls == {"rotary": 1}
    assert swapped[0] is k


class CountsGlobally(nn.Module):
    def forward(self, q, k, cos, sin):
        global SHARE
        SHARE = SHARE + 1.0
        return turned(q, k, cos, sin)


def test_a_forward_that_assigns_globals_is_not_copied():
    model, (q, k) = CountsGlobally(), (torch.randn(2, 4, 5, 16) for _ in range(2))
    cos, sin = (torch.randn(2, 5, 16) for _ in range(2))
    before = SHARE
    with tigon.fuse(model) as fusion:
        model(q, k, cos, sin)
        assert any("assigns globals" in row.what for row in fusion.report().skipped_rows)
    assert before + 1.0 == SHARE


def test_fuse_stays_quick():
    """Recognition of a whole model takes seconds, on a machine that does other things too."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(num_hidden_layers=80)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    began = time.process_time()
    with tigon.fuse(model):
        assert time.process_time() - began < 10
