"""The one table of activations: what stands in it is what the rest of the library finds there."""

import typing

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tigon
from tigon.fusion.parts.experts import recognize_experts
from tigon.fusion.parts.mlp_formula import recognize_mlp
from tigon.kernels import HAS_TRITON, jit
from tigon.ops.acts import ACTS, Act, Activation, silu
from tigon.ops.gated import gated_unit
from tigon.ops.gated_linear import gated_linear
from tigon.ops.linear.gated_mlp import gated_mlp

FUNCTIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
}


@jit
def _twice_silu(g):
    value, slope = silu(g)
    return 2.0 * value, 2.0 * slope


@pytest.fixture
def trial(monkeypatch):
    """An activation that Tigon does not have, put into the table and nowhere else."""
    row = Activation("twice_silu", lambda x: 2.0 * F.silu(x), _twice_silu, "2 g · sigmoid(g)", ("two_swish",))
    monkeypatch.setitem(ACTS, row.name, row)
    return row


def test_the_type_names_every_row():
    assert typing.get_args(Act) == tuple(ACTS)
    assert {row.name for row in ACTS.values()} == set(ACTS) == set(FUNCTIONS)


@pytest.mark.parametrize("act", FUNCTIONS)
def test_rows_mean_what_they_are_called(act):
    x = torch.linspace(-9, 9, 400, dtype=torch.float64)
    torch.testing.assert_close(ACTS[act].value(x), FUNCTIONS[act](x))


@pytest.mark.parametrize("act", FUNCTIONS)
def test_aliases_are_what_transformers_calls_them(act):
    ACT2FN = pytest.importorskip("transformers.activations").ACT2FN
    x = torch.linspace(-9, 9, 400, dtype=torch.float64)
    assert ACTS[act].aliases
    for name in ACTS[act].aliases:
        torch.testing.assert_close(ACT2FN[name](x), FUNCTIONS[act](x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", ["gated_unit", "gated_linear", "gated_mlp", "moe_mlp"])
def test_another_name_is_refused_with_the_names_there_are(op):
    x, w = torch.ones(2, 4), torch.ones(4, 4)
    index, stacked = torch.zeros(2, 1).long(), torch.ones(1, 8, 4)
    calls = {
        "gated_unit": lambda act: gated_unit(x, x, act=act),
        "gated_linear": lambda act: gated_linear(x, x, w, act=act),
        "gated_mlp": lambda act: gated_mlp(x, w, w, w, act=act),
        "moe_mlp": lambda act: tigon.moe_mlp(
            x, index, torch.ones(2, 1), stacked, torch.ones(1, 4, 4), config=tigon.Expert(act=act)
        ),
    }
    with pytest.raises(ValueError, match=rf"{op}: act must be one of 'silu', .*got 'swish', which is called 'silu'"):
        calls[op]("swish")
    with pytest.raises(ValueError, match=rf"{op}: act must be one of .*got 'tanh'\.$"):
        calls[op]("tanh")


def gradients(fn, *tensors):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = fn(*leaves)
    return y.detach(), *torch.autograd.grad(y.square().sum(), leaves)


def test_a_trial_activation_runs_in_every_operator(trial, backend, device):
    g, u = torch.randn(5, 12, device=device), torch.randn(5, 12, device=device)
    x, w, down = (torch.randn(s, device=device) / 3 for s in ((5, 8), (12, 8), (8, 12)))
    stacked, stacked_down = torch.randn(3, 24, 8, device=device) / 3, torch.randn(3, 8, 12, device=device) / 3
    index = torch.tensor([[0], [2], [1], [0], [2]], device=device)
    weights = torch.rand(5, 1, device=device)

    def experts(x, stacked, stacked_down):
        rows = [
            F.linear(trial.value(z[:12]) * z[12:], stacked_down[e])
            for e, z in ((e, F.linear(row, stacked[e])) for e, row in zip(index[:, 0].tolist(), x, strict=True))
        ]
        return torch.stack(rows) * weights

    act = trial.name
    pairs = (
        (lambda g, u: gated_unit(g, u, act=act), lambda g, u: trial.value(g) * u, (g, u)),
        (
            lambda g, u, w: gated_linear(g, u, w, act=act),
            lambda g, u, w: F.linear(trial.value(g) * u, w),
            (g, u, down),
        ),
        (
            lambda x, a, b, c: gated_mlp(x, a, b, c, act=act),
            lambda x, a, b, c: F.linear(trial.value(F.linear(x, a)) * F.linear(x, b), c),
            (x, w, w.flip(0), down),
        ),
        (
            lambda x, a, b: tigon.moe_mlp(x, index, weights, a, b, config=tigon.Expert(act=act)),
            experts,
            (x, stacked, stacked_down),
        ),
    )
    for ours, plain, tensors in pairs:
        for got, expected in zip(gradients(ours, *tensors), gradients(plain, *tensors), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


class Trial(nn.Module):
    def forward(self, x):
        return 2.0 * F.silu(x)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)
        self.act = Trial()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class TrialExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(4, 48, 16) / 4)
        self.down = nn.Parameter(torch.randn(4, 16, 24) / 4)

    def forward(self, x, index, weights):
        y = torch.zeros_like(x)
        for e in range(4):
            token, choice = torch.where(index == e)
            gate, up = F.linear(x[token], self.gate_up[e]).chunk(2, -1)
            z = F.linear(2.0 * F.silu(gate) * up, self.down[e])
            y = y.index_add(0, token, z * weights[token, choice, None])
        return y


@pytest.mark.parametrize("recompute", ["none", "mlp"])
def test_a_trial_activation_is_found_and_run_by_fuse(trial, backend, recompute, device):
    model = MLP().to(device)
    assert recognize_mlp(model).act == trial.name
    x = torch.randn(3, 16, device=device, requires_grad=True)

    def step():
        y = model(x)
        return y.detach(), *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))

    plain = step()
    with tigon.fuse(model, recompute=recompute) as fusion:
        for ours, theirs in zip(step(), plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert fusion.report().calls == {"mlp": 1}
    assert recognize_experts(TrialExperts()).act == trial.name


@pytest.mark.skipif(not HAS_TRITON, reason="asks Triton")
def test_no_tile_function_is_taken_for_a_launched_kernel():
    import compile_launches

    names = [name for name in compile_launches.kernels() if ".tiles." in name and not name.endswith("_kernel")]
    assert not names
