"""xIELU in a model: recognised by its numbers, wherever its code keeps them."""

import pytest
import torch
import torch.nn.functional as F
from numerics import check
from ops_table.xielu import eager_xielu
from torch import nn

import tigon
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.parts.activation import recognize_activation
from tigon.fusion.parts.xielu import Xielu, recognize_xielu
from tigon.ops.xielu import xielu, xielu_reference


class Own(nn.Module):
    """Other names and another order than in transformers."""

    def __init__(self, variant=""):
        super().__init__()
        self.variant, self.other = variant, None
        self.low, self.high = nn.Parameter(torch.tensor([-0.6])), nn.Parameter(torch.tensor([0.3]))
        self.register_buffer("edge", torch.tensor(-1e-6))
        self.register_buffer("slope", torch.tensor(0.5))

    def forward(self, x):
        if self.other is not None and x.is_cuda:
            return self.other(x)
        p, n = F.softplus(self.high), self.slope + F.softplus(self.low)
        if self.variant == "no softplus":
            p = self.high
        if self.variant == "detached":
            n = n.detach()
        square = x * x if self.variant != "no square" else x
        below = torch.expm1(torch.min(x, self.edge)) - x
        return torch.where(x > 0, p * square + self.slope * x, below * n + self.slope * x)


def test_numbers_find_their_roles():
    found = recognize_xielu(Own())
    assert (found.alpha_p, found.alpha_n, found.beta, found.eps) == ("high", "low", "slope", "edge")


@pytest.mark.parametrize("variant", ["no softplus", "no square", "detached"])
def test_a_near_miss_is_refused(variant):
    assert recognize_xielu(Own(variant)) is None


def test_code_that_differs_on_a_gpu_is_refused():
    def forward(self, x):
        return self.plain(x) if not x.is_cuda else self.plain(x) * 2

    kind = type("Doubled", (Own,), {"plain": Own.forward, "forward": forward})
    assert not isinstance(recognize_xielu(kind()), Xielu)
    module = Own()
    module.other = torch.tanh
    assert recognize_xielu(module) is None


def test_a_formula_that_was_not_probed_for_a_gpu_is_refused():
    def forward(self, x):
        return x.tanh() if x.is_cuda else F.relu(x).square()

    found = recognize_activation(type("Squared", (nn.Module,), {"forward": forward})())
    assert found == Reason("its forward depends on whether its input is on a GPU")


def test_an_mlp_with_xielu(device):
    pytest.importorskip("transformers")
    from transformers.activations import XIELUActivation

    torch.manual_seed(0)
    act = XIELUActivation(dtype=torch.float32)
    model = nn.Sequential(nn.Linear(16, 40), act, nn.Linear(40, 16)).to(device)
    x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()

    def step(model):
        y = model(x)
        return y, torch.autograd.grad(y.square().sum(), [x, *model.parameters()])

    plain = step(model)
    with tigon.fuse(model) as fusion:
        fused = step(model)
        assert fusion.report().calls == {"mlp": 1}
        act.beta.fill_(0.8)  # read at each call
        changed = step(model)
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(changed, step(model), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(changed[0], plain[0])


def test_an_input_narrower_than_the_parameters(backend, device):
    """As under autocast: the result has the parameters' dtype."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 33, generator=generator).to(device, torch.bfloat16)
    numbers = [torch.tensor(value, device=device) for value in (0.3, -0.6, 0.5, -0.05)]
    numbers[:2] = [t[None] for t in numbers[:2]]
    assert xielu(x, *numbers).dtype == eager_xielu(x, *numbers).dtype == torch.float32
    check(xielu, xielu_reference, x, *numbers, eager=eager_xielu, grad=(0, 1, 2))


def test_an_activation_with_one_parameter_is_none_of_it():
    assert recognize_xielu(nn.PReLU()) is None
    assert not isinstance(recognize_xielu(nn.BatchNorm1d(1)), Reason)
