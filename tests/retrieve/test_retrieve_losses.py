"""Losses with sampled negatives: against slow loops, against the whole softmax. Over ranks: distributed/."""

from __future__ import annotations

import math

import pytest
import torch
from numerics import check

from tigon.retrieve import (
    FrequencyEstimator,
    Negatives,
    in_batch_softmax,
    item_softmax,
    sampled_softmax,
    similarity_softmax,
)  # fmt: skip
from tigon.retrieve.training.over_items import per_query_negatives


def slow_in_batch(query, positive, ids, log_q, scale, allowed=None):
    total = 0.0
    for i in range(len(ids)):
        others = [j for j in range(len(ids)) if ids[j] != ids[i] and (allowed is None or allowed[i, j])]
        scores = [scale * query[i] @ positive[j] - log_q[j] for j in [i, *others]]
        total = total + torch.logsumexp(torch.stack(scores), 0) - (scale * query[i] @ positive[i] - log_q[i])
    return total / len(ids)


def slow_among(query, items, target, shared, bias, allowed, mined, mined_bias, scale):
    """Each query among what it is allowed of the shared negatives, and its own."""
    total, count = 0.0, 0
    for i, t in enumerate(target.tolist()):
        if t == -100:
            continue
        scores = [right := scale * query[i] @ items[t]]
        for place, j in enumerate(shared.tolist()):
            if j != t and allowed[i, place]:
                scores.append(scale * query[i] @ items[j] + bias[place])
        for place, j in enumerate(mined[i].tolist()):
            if j not in (t, -1):
                scores.append(scale * query[i] @ items[j] + mined_bias[i, place])
        total, count = total + torch.logsumexp(torch.stack(scores), 0) - right, count + 1
    return total / count


def gradients(loss, *inputs):
    return loss.detach(), *torch.autograd.grad(loss, inputs)


def pairs(B=20, D=16, items=9):
    generator = torch.Generator().manual_seed(0)
    query, positive = (torch.randn(B, D, generator=generator) for _ in range(2))
    ids = torch.randint(0, items, (B,), generator=generator)
    return query, positive, ids, torch.rand(B, generator=generator).log()


def drawn(device, dtype=torch.float32):
    """Queries, items, targets, shared negatives, what is allowed of them, and own negatives with hits and gaps."""
    query, items = torch.randn(20, 16, dtype=dtype), torch.randn(30, 16, dtype=dtype)
    target, shared, mined = torch.arange(20), torch.randint(0, 30, (25,)), torch.randint(-1, 30, (20, 7))
    target[3] = -100
    mined[:5, 2], mined[7] = target[:5].clamp(min=0), -1
    allowed = torch.rand(20, 25) < 0.6
    allowed[9] = False
    made = query.requires_grad_(), items.requires_grad_(), target, shared, allowed, mined
    return [t.detach().to(device).requires_grad_(t.requires_grad) for t in made]


NONE = torch.zeros(0, dtype=torch.long)


@pytest.mark.parametrize("corrected", [False, True])
def test_negatives_of_each_query(device, backend, corrected, monkeypatch):
    monkeypatch.setattr(per_query_negatives, "PIECE_BYTES", 4 * 7 * 16 * 3)  # three queries at once
    query, items, target, _, allowed, mined = drawn(device)
    log_q = torch.rand(30, device=device).log() if corrected else None
    bias = -log_q[mined] if corrected else torch.zeros(20, 7)
    ours = gradients(sampled_softmax(query, items, target, mined, log_q, scale=0.7), query, items)
    slow = slow_among(query, items, target, NONE, NONE, allowed, mined, bias, 0.7)
    torch.testing.assert_close(ours, gradients(slow, query, items), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["shared", "allowed", "allowed and own"])
def test_shared_negatives_that_are_allowed_and_own_ones(device, backend, kind):
    query, items, target, shared, allowed, mined = drawn(device)
    log_q = torch.rand(30, device=device).log()
    given = Negatives(shared, mined if "own" in kind else None, allowed if "allowed" in kind else None)
    mined, allowed = mined if "own" in kind else mined[:, :0], allowed if "allowed" in kind else allowed | True
    slow = slow_among(query, items, target, shared, -log_q[shared], allowed, mined, torch.zeros(20, 7), 0.7)
    want = gradients(slow, query, items)
    given = shared if kind == "shared" else given
    ours = gradients(sampled_softmax(query, items, target, given, log_q, scale=0.7), query, items)
    torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-5)

    def similarity(q, x):
        assert x.shape[0] in (1, 20)  # the shared ones once
        return 0.7 * (q.unsqueeze(1) * x).sum(-1)

    ours = gradients(similarity_softmax(similarity, query, items, target, given, log_q), query, items)
    torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-5)


def test_in_batch_softmax(device, backend):
    query, positive, ids, log_q = (t.to(device) for t in pairs())
    query.requires_grad_()
    positive.requires_grad_()
    allowed = torch.rand(20, 20, device=device) < 0.5
    allowed[3] = False  # among nothing: a loss of 0
    for given, mask in (
        (ids, None), (Negatives(ids, allowed=allowed), allowed),
        (Negatives(ids, allowed=allowed[0]), allowed[:1].expand(20, -1)),  # for all queries
    ):  # fmt: skip
        ours = gradients(in_batch_softmax(query, positive, given, log_q, scale=2.0), query, positive)
        theirs = gradients(slow_in_batch(query, positive, ids, log_q, 2.0, mask), query, positive)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_own_negatives_are_as_accurate_as_eager_code(dtype, device):
    query, items, target, _, _, mined = drawn(device, dtype)
    q, x = query.detach(), items.detach()
    arguments = (q, x, x[target.clamp(min=0)], mined, None, 1.0)
    check(per_query_negatives.own_contrast, per_query_negatives.own_contrast_reference, *arguments)


def test_more_own_negatives_than_are_sorted_at_once(device, monkeypatch):
    leaf = torch.randn(30, 16, device=device, requires_grad=True)
    query, negatives = torch.randn(20, 16, device=device), torch.randint(-1, 30, (20, 7), device=device)

    def gradient() -> torch.Tensor:
        loss = per_query_negatives.own_contrast(query, leaf, leaf.detach()[:20], negatives, None, 0.5)
        return torch.autograd.grad(loss.square().sum(), leaf)[0]

    whole = gradient()
    monkeypatch.setattr(per_query_negatives, "SORTED", 7 * 6)
    torch.testing.assert_close(gradient(), whole)


def test_a_sure_model_keeps_small_gradients_of_own_negatives(device):
    query, items = torch.zeros(1, 16, device=device), torch.zeros(40, 16, device=device)
    query[0, 0], items[7, 0], items[3, 1] = 1.0, 1.0, 1.0
    items.requires_grad_()
    scale, rest = math.log(39 / 3e-10), [j for j in range(40) if j != 7]
    target, mined = torch.tensor([7], device=device), torch.tensor([rest], device=device)
    sampled_softmax(query, items, target, mined, scale=scale).backward()
    exact = 39 / (39 + math.exp(scale))
    torch.testing.assert_close(items.grad[7, 0].item(), -exact * scale, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(items.grad[3, 0].item(), exact * scale / 39, rtol=1e-4, atol=0.0)


def test_with_every_item_it_is_the_whole_softmax():
    query, items, target = torch.randn(9, 16), torch.randn(30, 16), torch.arange(9)
    whole, every = item_softmax(query, items, target), torch.arange(30).expand(9, -1)
    torch.testing.assert_close(sampled_softmax(query, items, target, every), whole)
    torch.testing.assert_close(sampled_softmax(query, items, target, every[0], torch.zeros(30)), whole)
    assert sampled_softmax(query, items, target, every[:, :0]) == 0  # among no one


def test_own_negatives_give_the_same_bits_and_no_second_gradient(device):
    query, items, target, shared, _, mined = drawn(device)
    given = Negatives(shared, mined)
    first, again = (gradients(sampled_softmax(query, items, target, given), query, items) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    (dq,) = torch.autograd.grad(sampled_softmax(query, items, target, mined), query, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dq.sum().backward()


def test_drawn_by_popularity_and_corrected_it_nears_the_whole_softmax():
    torch.manual_seed(0)
    share = torch.arange(1, 201).float().pow(-1.0)
    share /= share.sum()
    items = torch.randn(200, 8)
    items[:, 0] += share.log()
    query, target = torch.randn(50, 8), torch.randint(0, 200, (50,))
    negatives = torch.multinomial(share, 20_000, replacement=True)
    whole = item_softmax(query, items, target)
    corrected = sampled_softmax(query, items, target, negatives, (20_000 * share).log())
    assert abs(corrected - whole) < 0.02
    assert abs(sampled_softmax(query, items, target, negatives) - whole) > 0.2  # as if draws were uniform
    uniform = sampled_softmax(query, items, target, torch.randint(0, 200, (20_000,)))
    assert abs(uniform - whole) < 0.1


def test_bad_input_gets_a_sentence():
    query, positive, ids, _ = pairs()
    every, mined, allowed = torch.arange(20), ids[:, None], torch.ones(20, 3, dtype=torch.bool)

    def in_batch(*arguments):
        return lambda: in_batch_softmax(*arguments)

    def sampled(*arguments):
        return lambda: sampled_softmax(*arguments)

    for call, words in (
        (in_batch(query, positive[:3], ids), r"in_batch_softmax: positive must have query's shape \(20, 16\)"),
        (in_batch(query, positive, ids[:3]), r"in_batch_softmax: ids must be a vector of integers .*got \(3,\)"),
        (in_batch(query, positive, ids, torch.zeros(2)), r"in_batch_softmax: log_q must be \(20,\) .*got \(2,\)"),
        (in_batch(query, positive, Negatives(ids, mined)), r"in_batch_softmax: ids must be the batch's ids"),
        (sampled(query, positive, every + 1, ids), r"sampled_softmax: target must lie in \[0, 20\) .*got 20"),
        (sampled(query, positive, every, -ids[:1] - 1), r"sampled_softmax: target must lie in .*got -"),
        (sampled(query, positive[:, :8], every, ids), r"sampled_softmax: items must be \(N, 16\), as wide as query"),
        (sampled(query, positive, every, mined[:3]), r"per query must be \(20, K\) integers, got \(3, 1\)"),
        (sampled(query, positive, every, mined + 20), r"target must lie in \[0, 20\) or be ignore_index=-1"),
        (sampled(query, positive, every, Negatives(None)), "negatives must be shared, per query or both, got none"),
        (sampled(query, positive, every, Negatives(ids, allowed=allowed)), r"allowed must be \(20, 20\) or \(20,\)"),
        (sampled(query, positive, every, Negatives(None, mined, allowed)), "allowed must be None without shared"),
        (sampled(query, positive, every, [1]), "negatives must be a tensor of rows or Negatives, got list"),
        (lambda: similarity_softmax(lambda q, x: q, query, positive, every, ids), r"return float scores \(20, 1\)"),
        (lambda: similarity_softmax(3, query, positive, every, ids), "similarity must be a module or a function"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call()


def test_frequencies_are_learned_from_a_stream():
    estimator = FrequencyEstimator(1000, 3, rate=0.2)
    torch.manual_seed(0)
    every, tenth = torch.tensor([7]), torch.tensor([123456789])
    for step in range(400):
        ids = torch.cat([every, tenth]) if step % 10 == 0 else every
        said = estimator(ids)
        assert said.shape == ids.shape
    log_q = estimator.log_q(torch.tensor([7, 123456789, 55]))
    torch.testing.assert_close(log_q.exp()[:2], torch.tensor([1.0, 0.1]), rtol=0.02, atol=0.0)
    assert log_q[2] == -math.log(400)  # never seen: as of the rarest
    twin = FrequencyEstimator(1000, 3)
    twin.load_state_dict(estimator.state_dict())
    assert torch.equal(twin.log_q(every), estimator.log_q(every))
    with pytest.raises(ValueError, match=r"rate in \(0, 1\], got 5, 1, 0\."):
        FrequencyEstimator(5, 1, rate=0.0)


def test_a_collision_does_not_make_a_rare_item_frequent():
    estimator = FrequencyEstimator(64, 4, rate=0.1)
    for step in range(300):
        common = torch.arange(20)
        estimator(torch.cat([common, torch.tensor([999])]) if step % 30 == 0 else common)
    assert estimator.log_q(torch.tensor([999])).exp() < 0.1
