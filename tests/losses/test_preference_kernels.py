"""The kernels of losses of pairs, beside the families in fp64, and that a batch of one part goes to them."""

import pytest
import torch
from modes import Watch
from test_preference import KINDS, LOSSES, B, arguments, batch

import tigon
from tigon.kernels import dispatch
from tigon.losses import token_loss as walk
from tigon.losses.family import NoTensors, Part, Term, Whole
from tigon.losses.preference import families, kernels
from tigon.losses.preference.families import (
    Beta,
    CPOFamily,
    CPOOptions,
    DPOFamily,
    DPOOptions,
    DPOTensors,
    ORPOFamily,
    ORPOTensors,
)

BY_KERNELS = [
    *((name, options, "none") for name, options in KINDS if name in ("orpo", "simpo")),
    *(
        (name, options, "none")
        for name, options in KINDS
        if name == "cpo" and "alpha" not in options and options.get("loss_type") != "alphapo"
    ),
    *(("dpo", {"beta": 0.3}, source) for source in ("given", "head", "free")),
    ("dpo", {"loss_type": ["sigmoid"], "loss_weights": [0.7]}, "given"),
]


@pytest.mark.parametrize("known", [True, False])  # whether rows that do not count are left out
@pytest.mark.parametrize(("name", "options", "source"), BY_KERNELS, ids=str)
def test_one_part_goes_to_the_kernels(name, options, source, known, triton_backend, device, monkeypatch):
    calls = []
    pair_slopes = families.write_pair_slopes
    monkeypatch.setattr(families, "write_pair_slopes", lambda *of: (calls.append(of), pair_slopes(*of)))

    def run(dtype):
        x, weight, bias, target = batch(device, dtype)
        if name != "orpo":  # where the odds of a probability of 1 depend on the dtype
            target[B] = -100  # a completion without tokens
        leaves = [t.requires_grad_() for t in (x, weight, bias)]
        extra, _ = arguments(name, options, source, device, dtype)
        lengths = (target != -100).sum(1).tolist() if known else [target.shape[1]] * len(target)
        loss, found = LOSSES[name](*leaves[:2], target, bias=leaves[2], lengths=lengths, **extra)
        return loss, found, torch.autograd.grad(3 * loss, leaves)

    with tigon.use_backend("torch"):
        exact = run(torch.float64)
    assert not calls
    loss, found, grads = run(torch.float32)
    assert len(calls) == 1
    torch.testing.assert_close(loss.double(), exact[0], rtol=1e-5, atol=1e-6)
    assert list(found) == list(exact[1])
    for metric, value in exact[1].items():
        torch.testing.assert_close(found[metric].double(), value, rtol=1e-4, atol=1e-5)
    for g, e in zip(grads, exact[2], strict=True):
        torch.testing.assert_close(g.double(), e, rtol=1e-3, atol=1e-5)


SIGMOID = (Term("sigmoid", 1.0),)


def dpo_options(divergence="reverse_kl", terms=SIGMOID):
    return DPOOptions(0.1, 0.0, divergence, 1.0, 0.05, terms)


def make_pairs(name, S, T, mask, device):
    """A family, its tensors."""
    if name == "orpo":
        tensors = ORPOTensors(mask & (torch.rand(S, T, device=device) < 0.8))
        return ORPOFamily.for_tensors(Beta(0.3), tensors), tensors
    if name == "dpo":
        tensors = DPOTensors(torch.randn(S, device=device))
        return DPOFamily.for_tensors(dpo_options(terms=(Term("sigmoid", 0.7),)), tensors), tensors
    return CPOFamily.for_tensors(CPOOptions(name, True, 2.0, 0.25, 0.1, 0.4), NoTensors()), NoTensors()


@pytest.mark.parametrize("counted", [0, 2**24])  # the chosen's tokens: once for all programs, or by each
@pytest.mark.parametrize("size", [1e-9, 1e-7, 1e-3, 1.0, 20.0])  # certain policies, and unlikely sequences
@pytest.mark.parametrize("name", ["orpo", "dpo", "sigmoid", "hinge", "ipo"])
def test_slopes_without_logits(name, size, counted, triton_backend, device, monkeypatch):
    """Sequences beyond one block, a boost, log-probabilities of every size."""
    monkeypatch.setattr(kernels, "COUNTED_ANEW", counted)
    S, T = 6, 1100
    target = torch.where(torch.rand(S, T) < 0.7, 1, -100).to(device)
    if name != "orpo" or size < 1e-6:
        target[4] = -100
    mask = target != -100
    logprob, entropy, mean = (torch.where(mask, f * torch.rand(S, T, device=device), 0.0) for f in (-size, 1.0, 3.0))
    top1 = mask & (torch.rand(S, T, device=device) < 0.5)
    family, tensors = make_pairs(name, S, T, mask, device)
    assert family.has_kernels()
    loss, metrics = torch.empty((), device=device), torch.empty(len(family.metrics), device=device)
    slope = torch.empty_like(logprob)
    whole = Whole(logprob, entropy, mean, None, top1, target, -100, tensors, S * T)
    family.launch(whole, loss, metrics, [slope, None], 64.0)
    family.launch(whole._replace(visited=S * T // 4), short := loss.clone(), metrics.clone(), [None, None], 64.0)
    assert short.isnan()

    # The families in fp64; but what is certain in fp32 is bounded as fp32 has it, by `log1mexp`.
    dtype = torch.float32 if name == "orpo" and size < 1e-6 else torch.float64
    numbers = [t.to(dtype) for t in (logprob, entropy, mean)]
    prepared = family.prepare(tensors, mask, dtype)
    own = prepared._make(t.unsqueeze(1) if t is not None and t.dim() == 1 else t for t in prepared)
    part = Part(None, *numbers, None, mask, own, top1)
    expected, found, (expected_slope, _) = walk._evaluate_with_slopes(family, part, 64.0)
    torch.testing.assert_close(loss.to(dtype), expected, rtol=2e-6, atol=1e-7)
    scale = expected_slope.abs().max()
    torch.testing.assert_close(slope.to(dtype) / scale, expected_slope / scale, rtol=1e-5, atol=1e-6)
    values = torch.stack([found[metric].to(dtype) for metric in family.sums])
    torch.testing.assert_close(metrics.to(dtype), values, rtol=1e-5, atol=1e-6)


def test_pairs_that_are_far_apart(triton_backend, device):
    """The loss of a pair that is learned already is small, and not 0."""
    tensors = DPOTensors(torch.tensor([-180.0, 0.0], device=device))
    family = DPOFamily.for_tensors(dpo_options(), tensors)
    zero, target = torch.zeros(2, 3, device=device), torch.ones(2, 3, dtype=torch.long, device=device)
    loss, metrics, slope = torch.empty((), device=device), torch.empty(10, device=device), torch.empty_like(zero)
    family.launch(
        Whole(zero, zero, zero, None, target == 1, target, -100, tensors, 6), loss, metrics, [slope, None], 1.0
    )
    torch.testing.assert_close(loss, torch.exp(torch.tensor(-18.0, device=device)), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(slope[1], 0.1 * loss.expand(3), rtol=1e-5, atol=0.0)


def test_what_has_no_kernel():
    weighted, two = DPOTensors(token_weights=torch.ones(2, 3)), (Term("sigmoid", 1.0), Term("sft", 1.0))
    assert DPOFamily.for_tensors(dpo_options(), DPOTensors()).has_kernels()
    assert not DPOFamily.for_tensors(dpo_options(), weighted).has_kernels()
    assert not DPOFamily.for_tensors(dpo_options("forward_kl"), DPOTensors()).has_kernels()
    assert not DPOFamily.for_tensors(dpo_options(terms=two), DPOTensors()).has_kernels()
    assert not CPOFamily.for_tensors(CPOOptions("simpo", True, 1.0, 0.0, 0.0, 0.0, 0.25), NoTensors()).has_kernels()


@pytest.mark.parametrize("name", ["orpo", "simpo", "cpo", "dpo"])
def test_the_host_makes_few_calls(name, monkeypatch):
    """Of few tokens the host's time is the loss's: as on a GPU, without one."""
    monkeypatch.setattr(dispatch, "why_not_triton", lambda *_: None)
    x = torch.empty(16, 4, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(1000, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    target = torch.empty(16, 4, dtype=torch.long, device="meta")
    extra = [(torch.empty(8, device="meta"),) * 2] if name == "dpo" else []
    with tigon.use_backend("triton"), dispatch.meta_as_gpu(), Watch() as seen:
        loss, _ = getattr(tigon.losses, name)(x, weight, target, *extra)
        torch.autograd.grad(loss, (x, weight))
    assert 20 < seen.calls < 65


def test_tensors_elsewhere_are_refused():
    x, weight, target = torch.zeros(2, 3, 4), torch.zeros(5, 4), torch.zeros(2, 3, dtype=torch.long)
    elsewhere = torch.zeros(1, device="meta")
    with pytest.raises(ValueError, match="dpo: reference must be on x's device cpu, got meta"):
        tigon.losses.dpo(x, weight, target, (elsewhere, elsewhere))
    with pytest.raises(ValueError, match="orpo: completion must be on x's device cpu, got meta"):
        tigon.losses.orpo(x, weight, target, torch.ones(2, 3, dtype=torch.bool, device="meta"))
