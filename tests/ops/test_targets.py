"""Targets of any integer dtype and any ignore_index mean the same classes in every operator and loss."""

import flat
import pytest
import torch
from flat import cross_entropy, distill, distill_topk, linear_cross_entropy, linear_logprob
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tigon
from tigon.ops.targets import as_labels

S, T, H, V = 4, 3, 8, 300
ADVANTAGES = torch.tensor([0.5, -1.0, 2.0, 0.3])
LABEL = torch.tensor([True, False, True, False])


def drawn(largest, seed=0):
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(0, largest, (S, T), generator=g)
    target[0, 0] = 44 % largest  # what 300 is in eight bits
    target[1, 1] = 156 % largest  # what -100 is
    return torch.randn(S, T, H, generator=g), torch.randn(V, H, generator=g), target


def logits_of(x, w):
    return (x @ w.t()).flatten(0, 1)


REFERENCE = {"ref_logps": torch.full((S,), -30.0), "kl": 0.1}
PAIRS = {"ref_chosen_logps": torch.full((2,), -30.0), "ref_rejected_logps": torch.full((2,), -30.0)}
TEACHER = torch.zeros(S * T, 1).long(), -torch.ones(S * T, 1)


def on(x, options):
    return {name: value.to(x.device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}


OPERATORS = {
    "cross_entropy": lambda x, w, t, **o: cross_entropy(logits_of(x, w), t.flatten(), **o),
    "logprob": lambda x, w, t, **o: tigon.logprob(logits_of(x, w), t.flatten(), **o).logprob.sum(),
    "linear_cross_entropy": linear_cross_entropy,
    "linear_logprob": lambda x, w, t, **o: linear_logprob(x, w, t, **o).logprob.sum(),
    "dpo": lambda x, w, t, **o: flat.dpo(x, w, t, **on(x, PAIRS), **o)[0],
    "orpo": lambda x, w, t, **o: flat.orpo(x, w, t, **o)[0],
    "cpo": lambda x, w, t, **o: flat.cpo(x, w, t, **o)[0],
    "simpo": lambda x, w, t, **o: flat.simpo(x, w, t, **o)[0],
    "kto": lambda x, w, t, **o: flat.kto(x, w, t, LABEL.to(x.device), **on(x, REFERENCE), **o)[0],
    "grpo": lambda x, w, t, **o: flat.grpo(x, w, t, advantages=ADVANTAGES.to(x.device), **o)[0],
    "rloo": lambda x, w, t, **o: flat.rloo(x, w, t, advantages=ADVANTAGES.to(x.device), **o)[0],
    "distill": lambda x, w, t, **o: distill(
        x.flatten(0, 1), w, 2 * x.flatten(0, 1).detach(), w.detach(), t.flatten(), hard_weight=0.5, **o
    )[0],
    "distill_topk": lambda x, w, t, **o: distill_topk(
        x.flatten(0, 1), w, *(k.to(x.device) for k in TEACHER), t.flatten(), hard_weight=0.5, **o
    )[0],
}
EVERY = pytest.mark.parametrize("name", OPERATORS)
LARGEST = {torch.int8: 128, torch.int16: V, torch.uint8: 256, torch.uint16: V, torch.int32: V}


def results(name, x, w, target, **options):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    loss = OPERATORS[name](x, w, target, **options)
    return loss.detach(), *torch.autograd.grad(loss, (x, w))


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@EVERY
def test_every_integer_dtype_means_the_same_classes(name, dtype, backend, device):
    if backend == "triton" and device.type == "cpu" and dtype not in (torch.uint8, torch.int32):
        pytest.skip("time in the interpreter is dear: one dtype that kernels read, and the one that holds the least")
    x, w, target = (t.to(device) for t in drawn(LARGEST[dtype]))
    for ours, expected in zip(results(name, x, w, target.to(dtype)), results(name, x, w, target), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("ignore_index", [2**40, -(2**40), -(2**31) - 100], ids=str)
@EVERY
def test_an_ignore_index_beyond_the_dtype_ignores_nothing(name, ignore_index, backend, device):
    x, w, target = (t.to(device) for t in drawn(V))
    target[2] = 0  # what 2⁴⁰ is in 32 bits
    expected = results(name, x, w, target)
    for ours, theirs in zip(results(name, x, w, target.int(), ignore_index=ignore_index), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_the_dtypes_that_kernels_read_are_not_copied():
    for dtype in (torch.int32, torch.int64):
        target = torch.zeros(3, dtype=dtype)
        assert as_labels(target, -100) is target
    assert as_labels(torch.zeros(3, dtype=torch.int32), 2**31).dtype == torch.int64


TRACED = {**OPERATORS, "embedding": lambda x, w, t, **o: tigon.embedding(t, w).sum() + x.sum()}


@pytest.mark.parametrize("name", TRACED)
def test_fake_tensors(name):
    with FakeTensorMode():
        x, w = torch.randn(S, T, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
        rest = {"advantages": torch.randn(S)}
        with pytest.MonkeyPatch.context() as patched:
            made = {
                "ADVANTAGES": rest["advantages"], "LABEL": torch.ones(S, dtype=torch.bool),
                "REFERENCE": {"ref_logps": torch.zeros(S), "kl": 0.1},
                "PAIRS": {"ref_chosen_logps": torch.zeros(2), "ref_rejected_logps": torch.zeros(2)},
                "TEACHER": (torch.zeros(S * T, 1).long(), torch.zeros(S * T, 1)),
            }  # fmt: skip
            for k, v in made.items():
                patched.setitem(globals(), k, v)
            loss = TRACED[name](x, w, torch.zeros(S, T, dtype=torch.long))
        assert loss.shape == ()
        assert [g.shape for g in torch.autograd.grad(loss, (x, w))] == [x.shape, w.shape]


@pytest.mark.parametrize("name", ["cross_entropy", "logprob", "linear_cross_entropy", "linear_logprob", "embedding"])
def test_make_fx(name):
    x, w, target = drawn(V)

    def step(x, w, target):
        return TRACED[name](x, w, target)

    graph = make_fx(step)(x, w, target)
    _, _, other = drawn(V, seed=1)
    torch.testing.assert_close(graph(x, w, other), step(x, w, other))
