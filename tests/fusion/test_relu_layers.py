"""Linear layers, their relu and a dropout in one node: any code around them, and what is in the way."""

import copy

import pytest
import torch
import torch.nn.functional as F
from graph_nodes import nodes_of
from numerics import check
from torch import nn

import tigon
from tigon.fusion.parts.relu_layers import read_units
from tigon.ops.linear.relu_linear import relu_linear


class Unit(nn.Module):
    def __init__(self, dropout=0.0, bias=True, act=None):
        super().__init__()
        self.wi, self.wo = nn.Linear(16, 40, bias=bias), nn.Linear(40, 16, bias=bias)
        self.act, self.dropout = nn.ReLU() if act is None else act, nn.Dropout(dropout)


class Statements(Unit):
    def forward(self, hidden):
        hidden = self.wi(hidden)
        hidden = self.act(hidden)
        hidden = self.dropout(hidden)
        if hidden.dtype != self.wo.weight.dtype:
            hidden = hidden.to(self.wo.weight.dtype)
        return self.wo(hidden)


class Nested(Unit):
    def forward(this, x):
        x = this.act(this.wi(x))
        x = this.dropout(x)
        return this.wo(x)


class Expression(Unit):
    """One statement, with a unit inside another's input."""

    def forward(self, x):
        return self.wo(self.dropout(self.act(self.wi(self.wo(self.act(self.wi(x)))))))


class Between(Unit):
    """The linear layer's result is read again, or something else follows."""

    def forward(self, x):
        z = self.wi(x)
        y = self.act(z)
        x = self.wi(x) + 1
        x = self.act(x) + y + z
        x = self.dropout(self.act(self.dropout(x)))
        return self.wo(x)


def make_sequence(dropout=0.0, bias=True):
    unit = Unit(dropout, bias)
    return nn.Sequential(unit.wi, unit.act, *([unit.dropout] if dropout else []), unit.wo)


def count(model, y):
    return nodes_of(y).count("ReluLinearBackward")


def draw(device, *shape):
    return torch.randn(*shape, 16, generator=torch.Generator().manual_seed(1)).to(device)


def step(model, x):
    torch.manual_seed(3)
    x = x.detach().requires_grad_()
    y = model(x)
    return y, torch.autograd.grad((y * torch.linspace(-1, 2, 16, device=x.device)).sum(), [x, *model.parameters()])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("make", "nodes"), [(Statements, 1), (Nested, 1), (Expression, 2), (Between, 0), (make_sequence, 1)]
)
def test_units_of_any_code(make, nodes, bias, dropout, triton_backend, device):
    torch.manual_seed(0)
    model, x = make(dropout, bias).to(device), draw(device, 2, 7)
    plain = step(model, x)
    with tigon.fuse(model, parts={"mlp"}) as fusion:
        fused = step(model, x)
        assert count(model, fused[0]) == nodes
        assert fusion.report().calls.get("mlp", 0) == nodes
        model.eval()
        assert count(model, model(x.requires_grad_())) == nodes
        model.train()
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)
    again = step(model, x)
    assert all(torch.equal(a, b) for a, b in zip((again[0], *again[1]), (plain[0], *plain[1]), strict=True))
    assert "forward" not in vars(model)


def test_a_sequence_that_ends_behind_a_unit_stays():
    for dropout in ([], [nn.Dropout(0.1)]):
        model = nn.Sequential(nn.Sequential(nn.Linear(16, 40), nn.ReLU(), *dropout), nn.Linear(40, 16))
        with tigon.fuse(model, parts={"mlp"}) as fusion:
            assert not fusion.report().fused_rows
            assert model(draw("cpu", 2)).shape == (2, 16)


def test_the_longest_unit_that_a_forward_can_call_is_read():
    units = read_units(Statements.forward)
    assert ("wi", "act", "dropout") in units
    assert ("wi", "act", None) in units
    assert ("wi", "act", None) not in read_units(Between.forward)


@pytest.mark.parametrize(
    "obstacle", ["hook", "hook on relu", "other relu", "adapter", "p = 1", "evaluation", "removed"]
)
def test_what_is_in_the_way(obstacle, triton_backend, device):
    torch.manual_seed(0)
    model, x = Statements(0.3).to(device), draw(device, 2, 7).requires_grad_()
    plain, seen = copy.deepcopy(model), []
    fusion = tigon.fuse(model, parts={"mlp"})
    for changed in (model, plain):
        if obstacle == "hook":
            changed.wi.register_forward_hook(lambda module, args, output: seen.append(output.min() < 0))
        elif obstacle == "hook on relu":
            changed.act.register_forward_hook(lambda module, args, output: seen.append(args[0].min() < 0))
        elif obstacle == "other relu":
            changed.act = nn.LeakyReLU()
        elif obstacle == "adapter":
            changed.wi = nn.Sequential(changed.wi, nn.Identity())
        elif obstacle == "p = 1":
            changed.dropout.p = 1.0
    if obstacle == "removed":
        fusion.remove()
    with torch.set_grad_enabled(obstacle != "evaluation"):
        torch.manual_seed(0)
        y = model(x)
        assert obstacle == "evaluation" or count(model, y) == 0
        torch.manual_seed(0)
        assert torch.equal(y, plain(x))
    assert len(seen) == (2 if "hook" in obstacle else 0)
    assert all(seen)


@pytest.mark.parametrize("act", [nn.GELU(), nn.LeakyReLU(), nn.ReLU6(), type("Own", (nn.ReLU,), {})()])
def test_other_activations_are_no_unit(act, device):
    with tigon.fuse(Statements(act=act).to(device), parts={"mlp"}) as fusion:
        assert not any("relu of" in row.what for row in fusion.report().fused_rows)


def test_autocast_checkpoints_and_copies(triton_backend, device):
    torch.manual_seed(0)
    model, x = Statements().to(device), draw(device, 2, 7).requires_grad_()
    tigon.fuse(model)
    other = copy.deepcopy(model)
    other.wi.weight.data.zero_()
    assert count(other, other(x)) == count(model, model(x)) == 1
    assert not torch.equal(other(x), model(x))
    y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    assert torch.equal(*(torch.autograd.grad(t.sum(), x)[0] for t in (y, model(x))))
    with torch.autocast(device.type, torch.bfloat16):
        y = model(x)
        assert (y.dtype, count(model, y)) == (torch.bfloat16, 1)
    assert torch.autograd.grad(y.float().sum(), x)[0].dtype == torch.float32


@pytest.mark.parametrize("make", [Statements, Expression, make_sequence])
def test_under_compile(make, device):
    model, x = make(0.3).to(device).eval(), draw(device, 2, 7)
    plain = model(x)
    with tigon.fuse(model):
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), plain)


def test_frozen_weights_keep_no_input(triton_backend, device):
    model, x = Statements().to(device).requires_grad_(False), draw(device, 2, 7)
    tigon.fuse(model)
    assert not model(x).requires_grad
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        model(x.requires_grad_())
    assert kept.count((2, 7, 16)) == 0


def linear_relu(x, weight, bias=None):
    return F.relu(F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 16), (2, 9, 16), (0, 16)])  # one row, masked, empty
@pytest.mark.parametrize("biased", [True, False])
def test_against_fp64(biased, shape, dtype, device):
    def draw(generator):
        tensors = [torch.randn(s, generator=generator) for s in (shape, (40, 16), (40,))]
        return [t.to(device, dtype) for t in tensors[: 2 + biased]]

    op = relu_linear if biased else lambda x, weight: relu_linear(x, weight, None)
    check(op, linear_relu, draw, draws=4)


def test_a_dropped_result_against_fp64(device):
    x, weight, bias = (draw(device, n) if n else draw(device) for n in (9, 40, 0))
    bias = torch.linspace(-1, 1, 40, device=device)

    def dropped(x, weight, bias):
        torch.manual_seed(2)
        return relu_linear(x, weight, bias, dropout=0.25)

    torch.manual_seed(2)
    mask = F.dropout(torch.ones(9, 40, device=device), 0.25) != 0
    assert 0.6 < mask.float().mean() < 0.9
    check(dropped, lambda x, weight, bias: linear_relu(x, weight, bias) * mask / 0.75, x, weight, bias)


def test_what_is_kept_and_what_is_refused(device):
    x, weight = draw(device, 9).requires_grad_(), draw(device, 40).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        y = relu_linear(x, weight, None, dropout=0.5)
    assert sorted(kept) == sorted((x.numel(), weight.numel(), y.numel())), "neither relu's result nor a mask"
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()
    y = relu_linear(x.new_full((1, 16), torch.nan).requires_grad_(), weight, None)
    assert y.isnan().all()
