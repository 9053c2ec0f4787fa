"""A gradient of a fused loss may be taken with create_graph, and is not lost in silence where it is differentiated."""

import functools
import types

import pytest
import torch
from flat import dpo, linear_cross_entropy

import tigon

S, T, H, V = 4, 5, 8, 33


@functools.cache
def on(device):
    target = torch.randint(0, V, (S, T), generator=torch.Generator().manual_seed(0))
    return types.SimpleNamespace(target=target.to(device), logps=torch.tensor([-3.0, -2.0], device=device))


def of(x):
    return on(x.device)


def accumulated(x, w):
    return tigon.linear_cross_entropy(x, w, of(x).target, main_grad=torch.zeros(V, H, device=x.device))


# Calls without a row in tests/ops_table, whose losses tests/test_invariants.py differentiates twice.
LOSSES = {
    "of each token": lambda x, w: linear_cross_entropy(x, w, of(x).target, reduction="none").sum(),
    "main_grad": accumulated,
    "dpo": lambda x, w: dpo(x, w, of(x).target, ref_chosen_logps=of(x).logps, ref_rejected_logps=of(x).logps)[0],
}


@pytest.mark.parametrize("frozen", [False, True], ids=["learned", "frozen head"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_penalty_on_the_gradient_is_refused(name, frozen, backend, device):
    """Also where no other way leads from the penalty to the parameter than through the loss."""
    w = torch.randn(V, H, device=device).requires_grad_(not frozen)
    before = torch.randn(H, H, device=device, requires_grad=True)
    h = torch.randn(S, T, H, device=device) @ before
    x = torch.tanh(h)
    loss = LOSSES[name](x, w)
    assert loss.grad_fn is not None
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    penalised = loss + 10 * g.square().sum()
    for to in (before, h, x, *(() if frozen or name == "main_grad" else (w,))):
        with pytest.raises(RuntimeError, match="trying to differentiate twice"):
            torch.autograd.grad(penalised, to, retain_graph=True)
    with pytest.raises(RuntimeError, match="trying to differentiate twice"):
        penalised.backward()


@pytest.mark.parametrize("name", LOSSES)
def test_create_graph_gives_the_same_gradient(name, backend, device):
    w = torch.randn(V, H, device=device, requires_grad=True)
    x = torch.randn(S, T, H, device=device, requires_grad=True)
    loss = LOSSES[name](2 * x, w)
    (plain,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss += 1.0  # a loss may be written to: what leads back from it is another tensor
    (same,) = torch.autograd.grad(loss, x, create_graph=True)
    assert torch.equal(plain, same)
