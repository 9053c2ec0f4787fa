"""A gradient of a fused loss may be taken with create_graph, and is not lost in silence where it is differentiated."""

import functools
import types

import pytest
import torch
from flat import distill, distill_topk, dpo, grpo, kto, linear_cross_entropy, rloo

import tigon
from tigon import losses

S, T, H, V = 4, 5, 8, 33


@functools.cache
def on(device):
    target = torch.randint(0, V, (S, T), generator=torch.Generator().manual_seed(0))
    label, logps = torch.tensor([True, False, True, False]), torch.tensor([-3.0, -2.0])
    given = {"target": target, "advantages": torch.tensor([0.5, -1.0, 2.0, 0.3]), "label": label, "logps": logps}
    given["ones"] = -torch.ones(S * T, 1)
    return types.SimpleNamespace(**{name: t.to(device) for name, t in given.items()})


def of(x):
    return on(x.device)


def rows(fn):
    return lambda x, w: fn(x.reshape(-1, H), w)


def accumulated(x, w):
    return tigon.linear_cross_entropy(x, w, of(x).target, main_grad=torch.zeros(V, H, device=x.device))


LOSSES = {
    "linear_cross_entropy": lambda x, w: tigon.linear_cross_entropy(x, w, of(x).target),
    "of each token": lambda x, w: linear_cross_entropy(x, w, of(x).target, reduction="none").sum(),
    "main_grad": accumulated,
    "linear_logprob": lambda x, w: tigon.linear_logprob(x, w, of(x).target).logprob.sum(),
    "dpo": lambda x, w: dpo(x, w, of(x).target, ref_chosen_logps=of(x).logps, ref_rejected_logps=of(x).logps)[0],
    "orpo": lambda x, w: losses.orpo(x, w, of(x).target)[0],
    "cpo": lambda x, w: losses.cpo(x, w, of(x).target)[0],
    "simpo": lambda x, w: losses.simpo(x, w, of(x).target)[0],
    "kto": lambda x, w: kto(x, w, of(x).target, of(x).label, ref_logps=of(x).logps.repeat(2), kl=0.1)[0],
    "grpo": lambda x, w: grpo(x, w, of(x).target, advantages=of(x).advantages)[0],
    "rloo": lambda x, w: rloo(x, w, of(x).target, advantages=of(x).advantages)[0],
    "distill": rows(lambda x, w: distill(x, w, 2 * x.detach(), w.detach(), of(x).target.flatten())[0]),
    "distill_topk": rows(
        lambda x, w: distill_topk(
            x,
            w,
            of(x).target.flatten()[:, None],
            of(x).ones,
            of(x).target.flatten(),
        )[0]
    ),
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
