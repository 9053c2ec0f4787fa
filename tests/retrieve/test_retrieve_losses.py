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


def slow_sampled(query, items, target, negatives, log_q, scale):
    total, count = 0.0, 0
    for i, t in enumerate(target.tolist()):
        if t == -100:
            continue
        right = scale * query[i] @ items[t]
        scores = [scale * query[i] @ items[j] - log_q[j] for j in negatives.tolist() if j != t]
        total, count = total + torch.logsumexp(torch.stack([right, *scores]), 0) - right, count + 1
    return total / count


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


def test_in_batch_softmax(device, backend):
    query, positive, ids, log_q = (t.to(device) for t in pairs())
    query.requires_grad_()
    positive.requires_grad_()
    ours = gradients(in_batch_softmax(query, positive, ids, log_q, scale=2.0), query, positive)
    theirs = gradients(slow_in_batch(query, positive, ids, log_q, 2.0), query, positive)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_sampled_softmax(device, backend):
    query, _, _, _ = pairs()
    items, log_q = torch.randn(30, 16), torch.rand(30).log()
    target, negatives = torch.arange(20), torch.randint(0, 30, (25,))
    target[3] = -100
    query, items, target, negatives, log_q = (t.to(device) for t in (query, items, target, negatives, log_q))
    query.requires_grad_()
    items.requires_grad_()
    ours = gradients(sampled_softmax(query, items, target, negatives, log_q, scale=0.7), query, items)
    theirs = gradients(slow_sampled(query, items, target, negatives, log_q, 0.7), query, items)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("with_own", [False, True])
def test_shared_negatives_that_are_allowed_and_own_ones(device, backend, with_own):
    query, items, target, shared, allowed, mined = drawn(device)
    log_q = torch.rand(30, device=device).log()
    mined = mined if with_own else mined[:, :0]
    given = Negatives(shared, mined if with_own else None, allowed)
    slow = slow_among(query, items, target, shared, -log_q[shared], allowed, mined, torch.zeros(20, 7), 0.7)
    want = gradients(slow, query, items)
    ours = gradients(sampled_softmax(query, items, target, given, log_q, scale=0.7), query, items)
    torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-5)

    def similarity(q, x):
        assert x.shape[0] in (1, 20)  # the shared ones once
        return 0.7 * (q.unsqueeze(1) * x).sum(-1)

    ours = gradients(similarity_softmax(similarity, query, items, target, given, log_q), query, items)
    torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-5)


def test_in_batch_softmax_of_what_is_allowed(device, backend):
    query, positive, ids, log_q = (t.to(device) for t in pairs())
    query.requires_grad_()
    positive.requires_grad_()
    allowed = torch.rand(20, 20, device=device) < 0.5
    allowed[3] = False  # among nothing: a loss of 0
    given = Negatives(ids, allowed=allowed)
    ours = gradients(in_batch_softmax(query, positive, given, log_q, scale=2.0), query, positive)
    theirs = gradients(slow_in_batch(query, positive, ids, log_q, 2.0, allowed), query, positive)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    given = Negatives(ids, allowed=allowed[0])  # for all queries
    ours = in_batch_softmax(query, positive, given, log_q, scale=2.0)
    torch.testing.assert_close(ours, slow_in_batch(query, positive, ids, log_q, 2.0, allowed[:1].expand(20, -1)))


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


def test_with_all_items_for_own_negatives_it_is_the_whole_softmax():
    query, items, target = torch.randn(9, 16), torch.randn(30, 16), torch.arange(9)
    every = torch.arange(30).expand(9, -1)
    torch.testing.assert_close(sampled_softmax(query, items, target, every), item_softmax(query, items, target))
    one = sampled_softmax(query, items, target, every[:, :0])
    assert one == 0  # among no one


def test_own_negatives_give_the_same_bits_and_no_second_gradient(device):
    query, items, target, shared, _, mined = drawn(device)
    given = Negatives(shared, mined)
    first, again = (gradients(sampled_softmax(query, items, target, given), query, items) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    (dq,) = torch.autograd.grad(sampled_softmax(query, items, target, mined), query, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dq.sum().backward()


def test_with_every_item_drawn_once_it_is_the_whole_softmax():
    query, items, target = torch.randn(9, 16), torch.randn(30, 16), torch.arange(9)
    loss = sampled_softmax(query, items, target, torch.arange(30), torch.zeros(30))
    torch.testing.assert_close(loss, item_softmax(query, items, target))


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


@pytest.mark.parametrize("loss", ["in_batch", "sampled"])
def test_bad_input_gets_a_sentence(loss):
    query, positive, ids, _ = pairs()
    if loss == "in_batch":
        with pytest.raises(ValueError, match=r"in_batch_softmax: positive must have query's shape \(20, 16\)"):
            in_batch_softmax(query, positive[:3], ids)
        with pytest.raises(ValueError, match=r"in_batch_softmax: ids must be a vector of integers .*got \(3,\)"):
            in_batch_softmax(query, positive, ids[:3])
        with pytest.raises(ValueError, match=r"in_batch_softmax: log_q must be \(20,\) floats .*got \(2,\)"):
            in_batch_softmax(query, positive, ids, torch.zeros(2))
        with pytest.raises(ValueError, match=r"in_batch_softmax: ids must be those of the batch"):
            in_batch_softmax(query, positive, Negatives(ids, ids[:, None]))
    else:
        with pytest.raises(ValueError, match=r"sampled_softmax: target must lie in \[0, 20\) .*got 20"):
            sampled_softmax(query, positive, torch.full((20,), 20), ids)
        with pytest.raises(ValueError, match=r"sampled_softmax: target must lie in .*got -1"):
            sampled_softmax(query, positive, torch.arange(20), torch.tensor([-1]))
        with pytest.raises(ValueError, match=r"sampled_softmax: items must be \(N, 16\), as wide as query"):
            sampled_softmax(query, positive[:, :8], torch.arange(20), ids)
        every, mined, allowed = torch.arange(20), ids[:, None], torch.ones(20, 3, dtype=torch.bool)
        for given, words in (
            (ids[:3, None], r"negatives of each query must be \(20, K\) integers, got \(3, 1\)"),
            (mined + 20, r"target must lie in \[0, 20\) or be ignore_index=-1"),
            (Negatives(None), "negatives must be shared ones, own ones or both, got none"),
            (Negatives(ids, allowed=allowed), r"allowed must be \(20, 20\) or \(20,\) bool on cpu, got \(20, 3\)"),
            (Negatives(None, mined, allowed), "allowed must be None without shared negatives"),
            ([1], "negatives must be a tensor of rows or Negatives, got list"),
        ):
            with pytest.raises(ValueError, match=f"sampled_softmax: {words}"):
                sampled_softmax(query, positive, every, given)
        with pytest.raises(ValueError, match=r"similarity must return float scores \(20, 1\), got \(20, 16\)"):
            similarity_softmax(lambda q, x: q, query, positive, every, ids)
        with pytest.raises(ValueError, match=r"similarity must be a module or a function, got int"):
            similarity_softmax(3, query, positive, every, ids)


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
