"""Losses with sampled negatives: against slow loops, against the whole softmax. Over ranks: distributed/."""

from __future__ import annotations

import math

import pytest
import torch

from tigon.retrieve import FrequencyEstimator, in_batch_softmax, item_softmax, sampled_softmax


def slow_in_batch(query, positive, ids, log_q, scale):
    total = 0.0
    for i in range(len(ids)):
        scores = [scale * query[i] @ positive[j] - log_q[j] for j in range(len(ids)) if j == i or ids[j] != ids[i]]
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
    else:
        with pytest.raises(ValueError, match=r"sampled_softmax: target must lie in \[0, 20\) .*got 20"):
            sampled_softmax(query, positive, torch.full((20,), 20), ids)
        with pytest.raises(ValueError, match=r"sampled_softmax: target must lie in .*got -1"):
            sampled_softmax(query, positive, torch.arange(20), torch.tensor([-1]))
        with pytest.raises(ValueError, match=r"sampled_softmax: items must be \(N, 16\), as wide as query"):
            sampled_softmax(query, positive[:, :8], torch.arange(20), ids)


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
