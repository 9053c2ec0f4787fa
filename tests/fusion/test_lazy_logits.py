"""Lazy logits behave as logits: the loss leaves them unbuilt, everything else finds real ones, gradients included."""

import contextlib
import copy
import functools
import io
import pickle
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tigon.fusion.engine.ledger import Ledger
from tigon.fusion.logits import labels as labels_module
from tigon.fusion.logits.compiled import CompiledLogits
from tigon.fusion.logits.lazy import LazyLogits
from tigon.fusion.logits.recipe import Recipe
from tigon.fusion.logits.sharded_head import Regather, find_regather

B, T, H, V = 2, 5, 12, 23


class Case:
    """The same head twice: real logits, and lazy ones."""

    def __init__(self, dtype=torch.float32, bias=True, carrier=LazyLogits):
        generator = torch.Generator().manual_seed(0)
        self.dtype, self.carrier = dtype, carrier
        self.leaves = [
            torch.randn(shape, generator=generator).to(dtype).requires_grad_()
            for shape in ((B, T, H), (V, H), (V,))[: 3 if bias else 2]
        ]
        self.target = torch.randint(0, V, (B, T), generator=generator)
        self.target[0, :2] = -100
        self.owner = nn.Module()
        self.ledger = Ledger(self.owner)

    def real(self):
        return F.linear(*self.leaves)

    def lazy(self):
        hidden, weight, *bias = self.leaves
        recipe = Recipe.build(hidden, weight, bias[0] if bias else None, self.ledger)
        return LazyLogits.build_lazy(recipe) if self.carrier is LazyLogits else CompiledLogits(recipe)

    def grads(self, loss):
        return torch.autograd.grad(loss, self.leaves, allow_unused=True)

    def compare(self, fn):
        """fn(logits, target) → a number, on both; returns how often the fused loss ran."""
        self.ledger.new_step()
        plain, fused = fn(self.real(), self.target), fn(self.lazy(), self.target)
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(self.grads(fused), self.grads(plain), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        return self.ledger.calls["head", None]


def flat(logits, target):
    return logits.view(-1, V), target.view(-1)


def shifted(logits, target):
    return logits[..., :-1, :].contiguous().view(-1, V), target[..., 1:].contiguous().view(-1)


WORDS = torch.linspace(-2.0, 2.0, V)

FUSED = {
    "view": lambda z, t: F.cross_entropy(*flat(z, t)),
    "module": lambda z, t: nn.CrossEntropyLoss()(*flat(z, t)),
    "float": lambda z, t: F.cross_entropy(*flat(z.float(), t)),
    "to": lambda z, t: F.cross_entropy(*flat(z.to(torch.float32).to(z.device), t)),
    "reshape": lambda z, t: F.cross_entropy(z.reshape(-1, V), t.reshape(-1)),
    "reshape, full": lambda z, t: F.cross_entropy(z.reshape((B * T, V)), t.reshape(-1)),
    "scale": lambda z, t: F.cross_entropy(*flat(0.25 * z * 3, t)),
    "divide": lambda z, t: F.cross_entropy(*flat(z / 3.0, t)),
    "softcap": lambda z, t: F.cross_entropy(*flat(torch.tanh(z / 2.0) * 2.0, t)),
    "softcap, scaled": lambda z, t: F.cross_entropy(*flat((z * 0.5 / 1.5).tanh().mul(1.5).div(2), t)),
    "sum": lambda z, t: F.cross_entropy(*flat(z, t), reduction="sum") / 7,
    "none": lambda z, t: (F.cross_entropy(*flat(z, t), reduction="none") * torch.arange(B * T)).sum(),
    "smoothing": lambda z, t: F.cross_entropy(*flat(z, t), label_smoothing=0.1),
    "ignore": lambda z, t: F.cross_entropy(*flat(z, t.clamp(min=0)), ignore_index=3),
    "plus a vector": lambda z, t: F.cross_entropy(*flat(z + WORDS[None], t)),
    "plus a vector, softcap": lambda z, t: F.cross_entropy(*flat(torch.tanh(z.add(WORDS) / 3.0) * 3.0, t)),
}
FUSED_EAGERLY = {
    "shifted": lambda z, t: F.cross_entropy(*shifted(z, t)),
    "shifted, two slices": lambda z, t: F.cross_entropy(z[:, :-1].reshape(-1, V), t[:, 1:].reshape(-1)),
    "flatten": lambda z, t: F.cross_entropy(z.flatten(0, 1), t.flatten()),
    "first words": lambda z, t: F.cross_entropy(z[..., :20].reshape(-1, 20), t.clamp(max=19).reshape(-1)),
    "plus a vector, first words": lambda z, t: F.cross_entropy(
        (z + WORDS)[..., :20].reshape(-1, 20), t.clamp(max=19).reshape(-1)
    ),
    "masked": lambda z, t: F.cross_entropy(z[t != -100], t[t != -100]),
    "nll": lambda z, t: F.nll_loss(F.log_softmax(z, -1).view(-1, V), t.view(-1)),
    "nll of turned rows": lambda z, t: F.nll_loss(
        F.log_softmax(z.transpose(0, 1).contiguous().view(-1, V), dim=-1, dtype=torch.float32),
        t.t().reshape(-1),
        reduction="sum",
    ),
    "nll, scaled before": lambda z, t: F.nll_loss((z / 2).log_softmax(-1)[:, 1:].reshape(-1, V), t[:, 1:].reshape(-1)),
    "one sequence": lambda z, t: F.cross_entropy(z[1], t[1]) + 0 * z.shape[0],
    "last positions": lambda z, t: F.cross_entropy(z[:, -2:, :].reshape(-1, V), t[:, -2:].reshape(-1)),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("use", [*FUSED, *FUSED_EAGERLY])
def test_the_loss_does_not_build_the_logits(use, bias):
    case = Case(bias=bias)
    assert case.compare({**FUSED, **FUSED_EAGERLY}[use]) == 1
    assert not case.ledger.built_by


@pytest.mark.parametrize("use", FUSED)
def test_the_plain_carrier_fuses_the_same(use):
    case = Case(carrier=CompiledLogits)
    assert case.compare(FUSED[use]) == 1
    assert not case.ledger.built_by


def suppressed(logits):
    """As Chameleon does: words that may not be said, overwritten."""
    logits[..., 5] = -1e9
    return logits


BUILT = {
    "class weights": lambda z, t: F.cross_entropy(*flat(z, t), weight=torch.arange(1.0, V + 1)),
    "probabilities": lambda z, t: F.cross_entropy(z.view(-1, V), torch.full((B * T, V), 1 / V)),
    "classes second": lambda z, t: F.cross_entropy(z.transpose(1, 2), t),
    "classes second, unmoved": lambda z, t: F.cross_entropy(z, torch.ones(B, V, dtype=torch.long) % T),
    "one row": lambda z, t: F.cross_entropy(z[0, 3], t[0, 3]),
    "tensor scale": lambda z, t: F.cross_entropy(*flat(z * torch.tensor(0.5), t)),
    "tanh twice": lambda z, t: F.cross_entropy(*flat(torch.tanh(torch.tanh(z)), t)),
    "negative softcap": lambda z, t: F.cross_entropy(*flat(torch.tanh(z) * -2.0, t)),
    "zero": lambda z, t: F.cross_entropy(*flat(z * 0.0, t)),
    "nll, class weights": lambda z, t: F.nll_loss(
        F.log_softmax(z, -1).view(-1, V), t.view(-1), weight=torch.arange(1.0, V + 1)
    ),
    "cross entropy of log_softmax": lambda z, t: F.cross_entropy(*flat(F.log_softmax(z, -1), t)),
    "first words' share": lambda z, t: F.cross_entropy(*flat(z.log_softmax(-1)[..., :V], t)),
    "log_softmax in another dimension": lambda z, t: F.nll_loss(*flat(z.log_softmax(1), t)),
    "plus": lambda z, t: F.cross_entropy(*flat(z + 1.0, t)),
    "plus a vector, twice": lambda z, t: F.cross_entropy(*flat(z + WORDS + WORDS, t)),
    "plus a vector, scaled before": lambda z, t: F.cross_entropy(*flat(z * 2.0 + WORDS, t)),
    "plus rows": lambda z, t: F.cross_entropy(*flat(z + torch.arange(float(T))[:, None], t)),
    "plus a wider vector": lambda z, t: F.cross_entropy(*flat(z + WORDS.double(), t)),
    "clamp": lambda z, t: F.cross_entropy(*flat(z.clamp(max=1.0), t)),
    "masked words": lambda z, t: F.cross_entropy(*flat(z.masked_fill(torch.arange(V) == 4, -1e9), t.clamp(max=3))),
    "other words": lambda z, t: F.cross_entropy(z[..., 3:].reshape(-1, V - 3), t.clamp(max=3).reshape(-1)),
    "in place": lambda z, t: F.cross_entropy(*flat(z.mul_(2.0), t)),
    "word suppressed": lambda z, t: F.cross_entropy(*flat(suppressed(z), t.clamp(max=3))),
    "other names for it": lambda z, t: F.cross_entropy(suppressed(z.view(-1, V)), t.view(-1).clamp(max=3)),
    "concatenated": lambda z, t: F.cross_entropy(torch.cat([z, z]).view(-1, V), torch.cat([t, t]).view(-1)),
}


@pytest.mark.parametrize("carrier", [LazyLogits, CompiledLogits])
@pytest.mark.parametrize("use", BUILT)
def test_other_losses_find_real_logits(use, carrier):
    case = Case(carrier=carrier)
    assert case.compare(BUILT[use]) == 0
    assert sum(case.ledger.built_by.values()) == 1, "built once, and remembered"


LOOKS = {
    "argmax": lambda z: z.argmax(-1),
    "max": lambda z: z.max(-1).values,
    "softmax": lambda z: z.softmax(-1),
    "compare": lambda z: z > 0.5,
    "equal": lambda z: torch.equal(z, z.clone()),
    "row": lambda z: z[0, -1],
    "gather": lambda z: z.gather(-1, torch.zeros(B, T, 1, dtype=torch.long)),
    "topk": lambda z: torch.topk(z, 3, -1).indices,
    "bf16": lambda z: z.to(torch.bfloat16),
    "half": lambda z: z.half(),
    "double": lambda z: z.double().sum(),
    "detach": lambda z: z.detach(),
    "cpu": lambda z: z.cpu(),
    "clone": lambda z: z.clone(),
    "list": lambda z: z.tolist(),
    "item": lambda z: z[0, 0, 0].item(),
    "numpy": lambda z: z.detach().numpy(),
    "asarray": lambda z: np.asarray(z.detach()),
    "iterate": lambda z: [row.sum() for row in z],
    "einsum": lambda z: torch.einsum("btv,btv->bt", z, z),
    "operators": lambda z: (-z + 1 - z * z) / (z.abs() + 1) ** 2 @ torch.ones(V),
    "shape": lambda z: (z.shape, z.dtype, z.device, z.dim(), z.size(-1), z.numel(), len(z), z.stride(), z.ndim),
    "layout": lambda z: (z.is_contiguous(), z[:, :-1].is_contiguous(), z.is_floating_point(), z.layout),
    "gradient": lambda z: (z.requires_grad, z.is_leaf, z.grad_fn is not None),
    "stack": lambda z: torch.stack([z, torch.ones(B, T, V)]),
    "log_softmax": lambda z: torch.log_softmax(z, -1) + 0,
    "transpose": lambda z: z.transpose(-1, 1),
    "where": lambda z: torch.where(torch.ones(B, T, V, dtype=torch.bool), z, 0.0),
    "format": lambda z: f"{z[0, 0, 0].item():.3f}",
    "in": lambda z: z.max().item() in z.detach(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_sees_logits(look):
    case = Case()
    real, lazy = LOOKS[look](case.real()), LOOKS[look](case.lazy())
    assert type(lazy) is type(real)
    torch.testing.assert_close(lazy, real, rtol=0, atol=0) if isinstance(real, torch.Tensor) else None
    assert str(lazy) == str(real)


def stack_heads(carrier=LazyLogits):
    cases = [Case(bias=False, carrier=carrier) for _ in range(3)]
    for at, case in enumerate(cases):
        case.leaves = [cases[0].leaves[0], (cases[0].leaves[1] * (at + 1)).detach().requires_grad_()]
        case.ledger = cases[0].ledger
    leaves = [cases[0].leaves[0], *(case.leaves[1] for case in cases)]
    real, lazy = (torch.stack([make(case) for case in cases], 1) for make in (Case.real, Case.lazy))
    return cases, real, lazy, leaves


def codebook_losses(stack, target):
    """As Musicgen: a loss for each head."""
    logits = stack[:, :, -3:]
    losses = [F.cross_entropy(logits[:, at].contiguous().view(-1, V), target[:, -3:].reshape(-1)) for at in range(3)]
    return sum(losses)


def test_a_stack_of_heads_is_not_built_by_their_losses():
    cases, real, lazy, leaves = stack_heads()
    ledger, target = cases[0].ledger, cases[0].target
    plain, fused = codebook_losses(real, target), codebook_losses(lazy, target)
    assert ledger.calls["head", None] == 3
    torch.testing.assert_close(fused, plain)
    gradients = (torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (fused, plain))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    assert (lazy.shape, lazy.dim(), lazy.size(-1), lazy.dtype) == (real.shape, 4, V, real.dtype)
    flattened = lazy.reshape(-1, *lazy.shape[2:])
    assert "not built" in repr(flattened)
    assert not ledger.built_by
    torch.testing.assert_close(flattened.detach(), real.detach().reshape(-1, T, V))
    torch.testing.assert_close(codebook_losses(lazy, target), plain)
    assert sum(ledger.built_by.values()) == 3


STACKS = {
    "sum": lambda z: z.sum(),
    "exp": lambda z: torch.exp(z).mean(),
    "two of three": lambda z: z[:, 1:].square().sum(),
    "one token": lambda z: z[0, 1, -1].square().sum(),
    "mask": lambda z: z[torch.ones(z.shape[:3], dtype=torch.bool)].square().sum(),
    "ellipsis": lambda z: z[..., 2].square().sum(),
    "flat": lambda z: z.reshape(-1, V)[3:].square().sum(),
    "second dimension": lambda z: z.reshape(B, 3 * T, V)[:, 1].square().sum(),
}


@pytest.mark.parametrize("use", STACKS)
def test_other_uses_of_a_stack_find_real_logits(use):
    _, real, lazy, leaves = stack_heads()
    plain, ours = STACKS[use](real), STACKS[use](lazy)
    torch.testing.assert_close(ours, plain)
    gradients = (torch.autograd.grad(loss, leaves, allow_unused=True) for loss in (ours, plain))
    torch.testing.assert_close(*gradients)


def test_a_stack_that_is_first_read_without_gradients_has_them():
    _, real, lazy, leaves = stack_heads()
    with torch.no_grad():
        assert torch.equal(lazy.argmax(-1), real.argmax(-1))
    gradients = (torch.autograd.grad(z.logsumexp(-1).sum(), leaves) for z in (lazy, real))
    torch.testing.assert_close(*gradients)


def test_arrays_find_heads_in_a_stack():
    _, real, lazy, _ = stack_heads()
    torch.testing.assert_close(lazy[:, np.array([2, 0])], real[:, [2, 0]])


def test_stacks_that_are_tensors():
    cases, *_ = stack_heads()
    with torch.no_grad():
        assert type(torch.stack([case.lazy() for case in cases])) is torch.Tensor, "evaluation gathers tensors"
    assert type(torch.stack([cases[0].lazy(), cases[1].lazy()], -1)) is torch.Tensor
    assert type(torch.stack([cases[0].lazy(), cases[1].lazy()[:, :1]][:1] * 2, 0)) is not torch.Tensor
    copied = pickle.loads(pickle.dumps(torch.stack([case.lazy().detach() for case in cases])))
    assert type(copied) is torch.Tensor


def test_saved_pickled_and_copied_logits_are_plain_tensors(tmp_path):
    case = Case()
    with torch.no_grad():
        real, lazy = case.real(), case.lazy()
        torch.save({"logits": lazy}, tmp_path / "logits.pt")
        loaded = torch.load(tmp_path / "logits.pt", weights_only=True)["logits"]
        for copied in (loaded, pickle.loads(pickle.dumps(case.lazy())), copy.deepcopy(case.lazy())):
            assert type(copied) is torch.Tensor
            assert torch.equal(copied, real)


def test_printing_builds_nothing():
    case = Case()
    lazy = case.lazy()
    assert "not built" in repr(lazy)
    assert "not built" in f"{lazy}"
    assert not case.ledger.built_by
    lazy.sum()
    assert repr(lazy) == repr(case.real())


# ------------------------------------------------------------------------------------------- views, and writes to them


ALIASES = {
    "view of it": lambda z: (z, z.view(-1, V)),
    "it, written through a view": lambda z: (z.view(-1, V), z),
    "rows": lambda z: (z[:, 1:], z),
    "rows of it": lambda z: (z, z[:, 1:]),
    "a copy of rows": lambda z: (z, z[:, 1:].contiguous()),
    "a copy of it": lambda z: (z, z.float() * 1.0),
    "it, behind log_softmax": lambda z: (z, z.log_softmax(-1)),
    "rows of it, behind log_softmax": lambda z: (z[:, 1:], F.log_softmax(z, -1)),
    "log_softmax of it": lambda z: (z.log_softmax(-1), z),
    "two views": lambda z: (z.view(-1, V), z.view(B * T, V)),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_a_write_is_seen_where_a_tensor_would_show_it(alias):
    case = Case()

    def use(logits):
        written, seen = ALIASES[alias](logits)
        written.mul_(3.0)
        return F.cross_entropy(seen.reshape(-1, V), torch.ones(seen.numel() // V, dtype=torch.long))

    plain, fused = use(case.real()), use(case.lazy())
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(case.grads(fused), case.grads(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------ too late to be built


def adamw(fused):
    def step(leaves):
        for p in leaves:
            p.grad = torch.ones_like(p)
        torch.optim.AdamW(leaves, lr=1e-2, fused=fused).step()

    return step


CHANGES = {
    "weight in place": lambda leaves: leaves[1].add_(1.0),
    "bias in place": lambda leaves: leaves[2].zero_(),
    "hidden states in place": lambda leaves: leaves[0].zero_(),
    "optimizer": lambda leaves: adamw(False)(leaves[1:2]),
    "fused optimizer": lambda leaves: adamw(True)(leaves[1:2]),  # does not bump version counters
    "through data": lambda leaves: leaves[1].data.add_(1e-3),
    "released": lambda leaves: leaves[1].untyped_storage().resize_(0),
}


@pytest.mark.parametrize("carrier", [LazyLogits, CompiledLogits])
@pytest.mark.parametrize("change", CHANGES)
def test_stale_logits_are_an_error_and_never_wrong_numbers(change, carrier):
    case = Case(carrier=carrier)
    lazy = case.lazy()
    early = case.lazy()
    expected = early.detach().clone()
    with torch.no_grad():
        CHANGES[change](case.leaves)
    with pytest.raises(RuntimeError, match=r"never built.*Read outputs\.logits before optimizer\.step"):
        lazy.argmax(-1)
    assert torch.equal(early.detach(), expected), "what was built in time stays"


def test_under_autocast_a_vector_may_be_wider_than_the_logits():
    case = Case()
    with torch.autocast("cpu", torch.bfloat16):
        lazy, real = case.lazy() + WORDS[None], case.real() + WORDS[None]
        assert lazy.dtype == real.dtype == torch.float32
        fused, plain = (F.cross_entropy(*flat(z, case.target)) for z in (lazy, real))
    assert case.ledger.calls["head", None] == 1
    torch.testing.assert_close(fused, plain, rtol=0.01, atol=0)
    assert torch.equal(lazy.detach(), real.detach()), "built, they are the plain ones"


def test_a_vector_that_was_added_counts_as_a_part_of_them():
    case, vector = Case(), torch.ones(V)
    lazy = case.lazy() + vector
    vector.zero_()
    with pytest.raises(RuntimeError, match="second bias changed in place"):
        lazy.argmax(-1)


# --------------------------------------------------------------------------------------- modes of the forward are kept


def test_gradients_follow_the_mode_of_the_forward():
    case = Case()
    with torch.no_grad():
        frozen = case.lazy()
    assert not frozen.requires_grad
    assert not (frozen * 2).exp().requires_grad
    assert not F.cross_entropy(*flat(frozen, case.target)).requires_grad
    lazy = case.lazy()
    with torch.no_grad():
        guess = lazy.argmax(-1)  # builds, without gradients
        assert not F.cross_entropy(*flat(case.lazy(), case.target)).requires_grad
    assert torch.equal(guess, case.real().argmax(-1))
    expected = case.grads(case.real().square().sum())
    for ours, theirs in zip(case.grads(lazy.square().sum()), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_frozen_leaves_get_no_gradient():
    case = Case()
    case.leaves[1].requires_grad_(False)
    hidden, weight, bias = case.leaves
    F.cross_entropy(*flat(case.lazy(), case.target)).backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert bias.grad is not None


def test_under_inference_mode():
    case = Case()
    with torch.inference_mode():
        hidden, weight, bias = (t.clone() for t in case.leaves)
        lazy = LazyLogits.build_lazy(Recipe.build(hidden, weight, bias, case.ledger))
        torch.testing.assert_close(
            F.cross_entropy(*flat(lazy, case.target)), F.cross_entropy(*flat(case.real(), case.target))
        )
        assert torch.equal(lazy.argmax(-1), case.real().argmax(-1))


@pytest.mark.parametrize("inside", [True, False], ids=["loss inside autocast", "loss after autocast"])
def test_autocast_of_the_forward_is_kept(inside):
    case = Case()
    with torch.autocast("cpu", torch.bfloat16):
        real, lazy = case.real(), case.lazy()
        assert lazy.dtype == real.dtype == torch.bfloat16
        if inside:
            plain, fused = (F.cross_entropy(*flat(z, case.target)) for z in (real, lazy))
    if not inside:
        plain, fused = (F.cross_entropy(*flat(z.float(), case.target)) for z in (real, lazy))
    assert fused.dtype == plain.dtype == torch.float32
    torch.testing.assert_close(fused, plain, rtol=2e-2, atol=0)
    assert torch.equal(lazy, real)
    with torch.autocast("cpu", torch.bfloat16):
        assert case.lazy().dtype == torch.bfloat16
        wide = Case()
    lazy = wide.lazy()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(lazy.detach(), F.linear(*(t.detach() for t in wide.leaves)).detach()) is False
        assert lazy.detach().dtype == torch.float32


def test_bf16_loss_has_the_dtype_of_the_logits():
    case = Case(dtype=torch.bfloat16)
    for widen in (True, False):
        real, lazy = case.real(), case.lazy()
        plain, fused = (F.cross_entropy(*flat(z.float() if widen else z, case.target)) for z in (real, lazy))
        assert fused.dtype == plain.dtype
        torch.testing.assert_close(fused, plain, rtol=2e-2, atol=0)


# ------------------------------------------------------------------------- code that goes around __torch_function__


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z.square().sum()

    @staticmethod
    def backward(ctx, g):
        (z,) = ctx.saved_tensors
        return 2 * z * g


@pytest.mark.parametrize("steps", [lambda z: z, lambda z: torch.tanh(z / 2) * 2], ids=["plain", "softcap"])
def test_a_custom_autograd_function_gets_values_and_gives_gradients(steps):
    case = Case()
    expected = case.grads(steps(case.real()).square().sum())
    loss = Square.apply(steps(case.lazy()))
    for ours, theirs in zip(case.grads(loss), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_head(reentrant):
    case = Case()
    plain = F.cross_entropy(*flat(case.real(), case.target))

    def head(hidden):
        return LazyLogits.build_lazy(Recipe.build(hidden, *case.leaves[1:], case.ledger))

    logits = torch.utils.checkpoint.checkpoint(head, case.leaves[0], use_reentrant=reentrant)
    loss = F.cross_entropy(*flat(logits, case.target))
    torch.testing.assert_close(loss, plain)
    loss.backward()
    for leaf, theirs in zip(case.leaves, case.grads(plain), strict=True):
        torch.testing.assert_close(leaf.grad, theirs)


@pytest.mark.parametrize("steps", [lambda z: z, lambda z: torch.tanh(z / 2) * 2, lambda z: z[:, 1:]])
def test_a_custom_autograd_function_has_a_second_derivative(steps):
    def penalized(case, logits):
        loss = Square.apply(steps(logits))
        found = torch.autograd.grad(loss, case.leaves, retain_graph=True)
        again = torch.autograd.grad(loss, case.leaves, create_graph=True)
        for a, g in zip(again, found, strict=True):
            assert torch.equal(a, g)
        return case.grads(loss + sum(g.square().sum() for g in again))

    case = Case()
    for ours, theirs in zip(penalized(case, case.lazy()), penalized(case, case.real()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)  # of numbers up to 1e3


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("second", [False, True])
def test_a_loss_of_the_logits_in_a_checkpoint(reentrant, second):
    """The function runs twice on the same logits. They are built once, and save nothing the second time."""
    if reentrant and second:
        pytest.skip("torch refuses autograd.grad of a reentrant checkpoint")

    def loss_of(logits):
        return torch.utils.checkpoint.checkpoint(
            lambda z: z.logsumexp(-1).square().mean(), logits, use_reentrant=reentrant
        )

    def gradients(case, logits):
        if reentrant:
            loss_of(logits).backward()
            return [leaf.grad for leaf in case.leaves]
        first = torch.autograd.grad(loss_of(logits), case.leaves, create_graph=second)
        return case.grads(sum(g.square().sum() for g in first)) if second else first

    ours, theirs = Case(), Case()
    for a, b in zip(gradients(ours, ours.lazy()), gradients(theirs, theirs.real()), strict=True):
        torch.testing.assert_close(a, b)


def test_operators_called_below_python():
    case = Case()
    lazy = case.lazy()
    out = torch.ops.aten.add.Tensor(lazy, 1.0)
    torch.testing.assert_close(out, case.real() + 1.0)
    for ours, theirs in zip(case.grads(out.square().sum()), case.grads((case.real() + 1).square().sum()), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_hooks_on_logits_that_were_never_built_are_an_error_not_a_silence():
    case = Case()
    lazy = case.lazy()
    F.cross_entropy(*flat(lazy, case.target))
    with pytest.raises(RuntimeError, match="register_hook on logits that the loss never builds"):
        lazy.register_hook(lambda g: g)
    with pytest.raises(RuntimeError, match="retain_grad on logits that the loss never builds"):
        lazy.retain_grad()


def test_a_hook_that_is_there_before_the_loss_sees_the_gradient_of_the_logits():
    """And may change it: the loss is then taken of logits that are computed."""
    found = []
    for lazily in (False, True):
        case, seen = Case(), []
        logits = case.lazy() if lazily else case.real()
        logits.register_hook(lambda g, seen=seen: seen.append(g) or 2 * g)
        found.append((case.grads(F.cross_entropy(*flat(logits * 1.5, case.target))), seen))
    assert not case.ledger.calls
    (plain, plain_seen), (fused, fused_seen) = found
    assert len(fused_seen) == 1
    for ours, theirs in zip((*fused, *fused_seen), (*plain, *plain_seen), strict=True):
        torch.testing.assert_close(ours, theirs)
    kept = []
    for logits in (case.real(), case.lazy()):
        logits.retain_grad()
        F.cross_entropy(*flat(logits, case.target)).backward()
        kept.append(logits.grad)
    torch.testing.assert_close(kept[1], kept[0])


@pytest.mark.parametrize("mode", ["all", "any"])
def test_hooks_of_several_tensors_come_from_whoever_wrote_them(mode):
    found = []
    for logits in (Case().real(), (case := Case()).lazy()):
        seen = []
        register = torch.autograd.graph.register_multi_grad_hook
        register((logits,), lambda g, seen=seen: seen.append(g[0] if type(g) is list else g), mode=mode)
        F.cross_entropy(*flat(logits, case.target)).backward()
        found.append(seen)
    assert len(found[1]) == 1
    torch.testing.assert_close(found[1], found[0])


def test_the_gradient_of_logits_that_the_loss_left_out_is_an_error_not_none():
    case = Case()
    lazy = case.lazy()
    loss = F.cross_entropy(*flat(lazy, case.target))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"autograd\.grad on logits that the loss never builds"):
            torch.autograd.grad(loss, lazy, allow_unused=True, retain_graph=True)
        lazy.exp()  # built
    other = case.lazy()
    (gradient,) = torch.autograd.grad(other.square().sum(), other)
    assert torch.equal(gradient, 2 * case.real())
    assert torch.autograd.grad(case.real().sum(), case.lazy(), allow_unused=True) == (None,), "as of any other tensor"


@pytest.mark.parametrize("engine", ["torch.distributed.fsdp._fully_shard._fsdp_state", "deepspeed.runtime.utils"])
def test_hooks_of_engines_wait_without_building(engine):
    """They put one on every output of the model, and wait for its gradient: a loss that is taken later brings it."""
    case = Case()
    lazy, came = case.lazy(), []

    def pre_backward(grad):
        came.append(grad)

    pre_backward.__module__ = engine
    lazy.register_hook(functools.partial(pre_backward))
    loss = F.cross_entropy(*flat(lazy, case.target))
    assert not case.ledger.built_by
    assert not came
    loss.backward()
    assert [g.item() for g in came] == [1.0]


def test_wrong_targets_get_the_message_of_pytorch():
    case = Case()
    for target in (case.target.view(-1)[:3], case.target.view(-1).float(), case.target.view(-1).int()):
        with pytest.raises((ValueError, RuntimeError, IndexError)) as plain:
            F.cross_entropy(case.real().view(-1, V), target)
        with pytest.raises(plain.type) as lazy:
            F.cross_entropy(case.lazy().view(-1, V), target)
        assert str(lazy.value) == str(plain.value)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        case.lazy()[:, :-1].view(-1, V)


# ------------------------------------------------------------------------------------- how many of the labels count


@pytest.fixture
def counted_labels(monkeypatch):
    """As on a GPU: labels are counted when the model is called, and the count travels ahead of the loss."""
    monkeypatch.setattr(labels_module, "is_far", lambda labels: True)
    return labels_module.count_labels


KEEPS = {
    "transformers' shift": lambda t: F.pad(t, (0, 1), value=-100)[..., 1:].contiguous().view(-1),
    "slice": lambda t: t[..., 1:].reshape(-1).to(t.device),
    "mask": lambda t: t[t != 3].flatten(),
    "filled": lambda t: t.masked_fill(t == 3, -100).view(-1),
    "written": lambda t: written(t).view(-1),
}
LOSES = {
    "prompt too": lambda t: torch.where(t == -100, 1, t).view(-1),
    "twice": lambda t: torch.cat([t, t])[:B].view(-1),
    "clamped": lambda t: t.clamp(min=0).view(-1),
    "padded with a class": lambda t: F.pad(t, (1, 0), value=1)[:, :-1].reshape(-1),
    "one word many times": lambda t: t[:, [2] * T].reshape(-1),
    "spread": lambda t: t[:1].masked_fill(torch.zeros(B, T, dtype=torch.bool), -100).view(-1),
    "filled with a class": lambda t: t.masked_fill(t == -100, 1).view(-1),
    "written with a class": lambda t: written(t, 1).view(-1),
    "written from outside": lambda t: torch.Tensor.fill_(t, 1).view(-1),
}


def written(labels, value=-100):
    labels = labels.clone()
    labels[:, 2] = value
    return labels


@pytest.mark.parametrize("taken", KEEPS)
def test_the_count_of_the_labels_follows_what_takes_some_of_them(taken, counted_labels):
    case = Case()
    plain = KEEPS[taken](case.target.clone())
    target = KEEPS[taken](counted_labels(case.target.clone()))
    assert torch.equal(target, plain)
    count = labels_module.valid_count(target, -100)
    assert int(count) == int((case.target != -100).sum()) >= int((plain != -100).sum())
    assert labels_module.valid_count(target, 0) is None, "another ignore_index"
    rows = target.numel()
    expected = F.cross_entropy(case.real().view(-1, V)[:rows], plain)
    torch.testing.assert_close(F.cross_entropy(case.lazy().view(-1, V)[:rows], target), expected)
    assert case.ledger.calls["head", None] == 1


@pytest.mark.parametrize("taken", LOSES)
def test_a_loss_with_targets_of_its_own_never_relies_on_the_count_of_the_labels(taken, counted_labels):
    case = Case()
    plain, target = LOSES[taken](case.target.clone()), LOSES[taken](counted_labels(case.target.clone()))
    assert labels_module.valid_count(target, -100) is None
    expected = F.cross_entropy(case.real().view(-1, V), plain)
    torch.testing.assert_close(F.cross_entropy(case.lazy().view(-1, V), target), expected)


def test_counted_labels_are_labels(counted_labels):
    labels = torch.tensor([[1, -100, 3]])
    counted = counted_labels(labels)
    assert repr(counted) == repr(labels)
    for made in (pickle.loads(pickle.dumps(counted)), copy.deepcopy(counted), counted + 0, counted.clamp(min=0)):
        assert type(made) is torch.Tensor
    assert F.cross_entropy(torch.zeros(3, 5), counted.view(-1)).item() == pytest.approx(np.log(5))
    assert torch.compile(lambda t: t.view(-1) + 1, backend="eager", fullgraph=True)(counted).tolist() == [2, -99, 4]


@pytest.mark.gpu
def test_on_a_gpu_ignored_rows_are_left_out(monkeypatch):
    from zoo import batch, build

    import tigon

    model = build("llama").cuda()
    inputs = {k: v.cuda() for k, v in batch("llama").items()}
    plain = model(**inputs).loss
    seen = []
    bound = labels_module.valid_count
    monkeypatch.setattr("tigon.fusion.logits.recipe.valid_count", lambda *a: seen.append(bound(*a)) or seen[-1])
    with tigon.fuse(model):
        torch.testing.assert_close(model(**inputs).loss, plain, rtol=1e-5, atol=0)
    assert [int(count) for count in seen] == [int((inputs["labels"] != -100).sum())]


def test_targets_that_are_all_ignored_give_what_pytorch_gives():
    case = Case()
    case.target.fill_(-100)
    for reduction in ("mean", "sum", "none"):
        plain = F.cross_entropy(*flat(case.real(), case.target), reduction=reduction)
        fused = F.cross_entropy(*flat(case.lazy(), case.target), reduction=reduction)
        torch.testing.assert_close(fused, plain, equal_nan=True)


def test_what_is_no_plain_head_has_no_recipe():
    ledger = Ledger(nn.Module())
    x, w = torch.randn(2, 3), torch.randn(5, 3)
    assert Recipe.build(x, w, None, ledger) is not None
    assert Recipe.build(x.bfloat16(), w, None, ledger) is None, "F.linear refuses that, and is to say so itself"
    assert Recipe.build(x.double(), w.double(), None, ledger) is None
    assert Recipe.build(x, torch.randn(5, 4), None, ledger) is None
    shard = nn.Parameter(torch.randn(5, 3))
    shard.ds_id, shard.ds_status = 0, types.SimpleNamespace(name="NOT_AVAILABLE")  # ZeRO-3, outside the head's forward
    assert Recipe.build(x, shard, None, ledger) is None


ZERO3 = """
import torch

class PreBackward(torch.autograd.Function):
    @staticmethod
    def forward(outputs):
        return outputs.detach()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.module, ctx.pre_backward_function = head, before

    @staticmethod
    def backward(ctx, *gradients):
        ctx.pre_backward_function(ctx.module)
        return gradients
"""


@pytest.mark.parametrize("reduction", ["mean", "none"])  # none: the backward pass needs the weight again
def test_a_head_under_zero3(monkeypatch, reduction):
    """The steps of DeepSpeed's ZeRO-3 around a head, without DeepSpeed, which tests/distributed runs if it is there."""
    head, events = nn.Linear(4, 7, bias=False), []
    weight, values = head.weight, head.weight.detach().clone()
    weight.ds_id, weight.ds_shape = 0, weight.shape

    def set_gathered(now):
        weight.data = values.clone() if now else values.new_empty(0)
        weight.ds_status = types.SimpleNamespace(name="AVAILABLE" if now else "NOT_AVAILABLE")

    @contextlib.contextmanager
    def gathered_parameters(parameters):
        assert parameters == [weight]
        set_gathered(True)
        yield
        set_gathered(False)
        events.append("loss")

    def before(module):
        assert module is head
        set_gathered(True)
        events.append("backward")

    zero = types.SimpleNamespace(GatheredParameters=gathered_parameters)
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.zero", zero)
    offload = {"__name__": "deepspeed.runtime.zero.parameter_offload", "head": head, "before": before}
    exec(ZERO3, offload)
    x, target = torch.randn(2, 3, 4, requires_grad=True), torch.randint(7, (2, 3))
    expected = F.cross_entropy(F.linear(x, values.requires_grad_()).view(-1, 7), target.view(-1))
    right = torch.autograd.grad(expected, (x, values))
    values.requires_grad_(False)

    set_gathered(True)
    ledger = Ledger(nn.Module())
    logits = LazyLogits.build_lazy(Recipe.build(x, weight, None, ledger, find_regather(head)))
    logits = offload["PreBackward"].apply(logits)
    set_gathered(False)  # the head's forward has ended
    assert isinstance(logits, LazyLogits)
    assert logits.pending()
    loss = F.cross_entropy(logits.float().view(-1, 7), target.view(-1), reduction=reduction).mean()
    assert events == ["loss"]
    loss.backward()
    assert events == ["loss", "backward"]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(x.grad, right[0])
    torch.testing.assert_close(weight.grad, right[1])
    assert not ledger.built_by


def test_fewer_words_of_a_weight_that_is_released():
    """As FSDP1 has it: the weight is a view of a flat parameter without memory, and views of it can't be made then."""
    flat = torch.randn(7 * 4, requires_grad=True)
    weight, memory, values = flat.view(7, 4), flat.untyped_storage(), flat.detach().clone()

    class Gathered(Regather):
        def _unshard(self):
            memory.resize_(values.nbytes)
            flat.data.copy_(values)  # of no new version

        def _reshard(self):
            memory.resize_(0)

    x, target = torch.randn(6, 4, requires_grad=True), torch.randint(5, (6,))
    ledger = Ledger(nn.Module())
    regather = Gathered(nn.Identity())
    logits = LazyLogits.build_lazy(Recipe.build(x, weight, None, ledger, regather))
    regather._reshard()
    loss = F.cross_entropy(logits[:, :5], target)
    assert not ledger.built_by
    torch.testing.assert_close(loss, F.cross_entropy(x @ values.view(7, 4)[:5].T, target))


def test_outputs_of_a_compiled_step_behave_as_logits():
    case = Case(carrier=CompiledLogits)
    real, made = case.real(), case.lazy()
    assert made.shape == real.shape
    assert (len(made), made.dim(), made.size(-1), made.dtype) == (B, 3, V, torch.float32)
    assert "not built" in repr(made)
    assert torch.equal(made.argmax(-1), real.argmax(-1))
    assert torch.equal(made[0], real[0])
    assert torch.equal((2 - made) * 3 > 1, (2 - real) * 3 > 1)
    assert torch.equal(torch.softmax(case.lazy(), -1), torch.softmax(real, -1))
    buffer = io.BytesIO()
    with torch.no_grad():
        torch.save(case.lazy(), buffer)
        assert torch.equal(copy.deepcopy(case.lazy()), case.real())
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=True), real)
