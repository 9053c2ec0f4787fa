"""Losses of ragged groups against loops written from the definitions."""

import math
from itertools import pairwise

import pytest
import torch

from tigon.rank import losses

SIZES = [5, 1, 0, 7, 3, 4]  # one row, none, more than a block of the small ones below
OFFSETS = torch.tensor([0, *SIZES]).cumsum(0)
GROUPED = [losses.softmax, losses.pairwise, losses.approx_ndcg, losses.lambda_loss]
ALL = [losses.bce, *GROUPED]


def drawn(dtype=torch.float64, grades=4):
    """Group 4 has no positive, so it counts for nothing; group 5 has one label only."""
    scores = torch.randn(sum(SIZES), dtype=torch.float64).to(dtype)
    labels = torch.randint(0, grades, (sum(SIZES),))
    labels[13:16], labels[16:] = 0, 1
    labels[0], labels[1], labels[6], labels[7] = grades - 1, 0, 0, grades - 1
    return scores, labels, torch.rand(sum(SIZES), dtype=torch.float64) + 0.5


def softplus(x):
    return max(x, 0) + math.log1p(math.exp(-abs(x)))


def best_dcg(gains):
    return sum(gain / math.log2(r + 1) for r, gain in enumerate(sorted(gains, reverse=True), 1))


def slow_softmax(s, y, w, normalize=False):
    total = sum(map(math.exp, s))
    mass = sum(a * b for a, b in zip(w, y, strict=True))
    if not mass:
        return None
    loss = -sum(b * a * math.log(math.exp(x) / total) for x, a, b in zip(s, y, w, strict=True))
    return loss / mass if normalize else loss


def slow_pairwise(s, y, w):
    pairs = [w[i] * softplus(s[j] - s[i]) for i in range(len(s)) for j in range(len(s)) if y[i] > y[j]]
    return sum(pairs) / len(pairs) if pairs else None


def slow_approx_ndcg(s, y, w, temperature=1.0):
    gains = [b * (2**a - 1) for a, b in zip(y, w, strict=True)]
    if not sum(gains):
        return None
    dcg = 0
    for i, gain in enumerate(gains):
        rank = 1 + sum(1 / (1 + math.exp((s[i] - x) / temperature)) for j, x in enumerate(s) if j != i)
        dcg += gain / math.log2(1 + rank)
    return 1 - dcg / best_dcg(gains)


def slow_lambda_loss(s, y, w, mu=10.0):
    rank = {i: r for r, i in enumerate(sorted(range(len(s)), key=lambda i: -s[i]), 1)}
    gain = [2**a - 1 for a in y]

    def discount(r):
        return 1 / math.log2(1 + r)

    total, pairs = 0.0, 0
    for i in range(len(s)):
        for j in range(len(s)):
            if y[i] > y[j]:
                d = abs(rank[i] - rank[j])
                worth = abs(discount(rank[i]) - discount(rank[j])) + mu * (discount(d) - discount(d + 1))
                total += w[i] * (gain[i] - gain[j]) * worth * softplus(s[j] - s[i])
                pairs += 1
    return total / best_dcg(gain) if pairs else None


SLOW = dict(zip(GROUPED, (slow_softmax, slow_pairwise, slow_approx_ndcg, slow_lambda_loss), strict=True))


def slow(loss, scores, labels, weights, offsets, **options):
    """The value of each group, None where it does not count."""
    found = []
    for a, b in pairwise(offsets.tolist()):
        rows = [x[a:b].tolist() for x in (scores, labels, weights)]
        found.append(SLOW[loss](*rows, **options) if b > a else None)
    return found


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        *((loss, {}) for loss in GROUPED),
        (losses.softmax, {"normalize": True}),
        (losses.approx_ndcg, {"temperature": 0.1}),
        (losses.lambda_loss, {"mu": 0.0}),
    ],
)
def test_a_loss_of_groups_is_that_of_a_loop(loss, options, weighted):
    scores, labels, weights = drawn()
    given = weights if weighted else None
    used = weights if weighted else torch.ones_like(weights)
    expected = slow(loss, scores, labels, used, OFFSETS, **options)
    counted = [value for value in expected if value is not None]
    assert 2 <= len(counted) < len(expected)
    values = torch.tensor([value or 0.0 for value in expected], dtype=torch.float64)
    got = loss(scores, labels, OFFSETS, weights=given, reduction="none", **options)
    torch.testing.assert_close(got, values, rtol=1e-12, atol=1e-12)
    total = loss(scores, labels, OFFSETS, weights=given, reduction="sum", **options)
    assert float(total) == pytest.approx(sum(counted), rel=1e-12)
    mean = loss(scores, labels, OFFSETS, weights=given, **options)
    assert float(mean) == pytest.approx(sum(counted) / len(counted), rel=1e-12)
    alone = loss(scores[:5], labels[:5], weights=None if given is None else given[:5], **options)
    assert float(alone) == pytest.approx(expected[0], rel=1e-12)


def test_bce_is_that_of_torch():
    scores, _, weights = drawn()
    soft = torch.rand_like(scores)
    for labels in (soft, soft > 0.5, (soft > 0.5).int()):
        for reduction in ("mean", "sum", "none"):
            expected = torch.nn.functional.binary_cross_entropy_with_logits(
                scores, labels.double(), weights, reduction=reduction
            )
            got = losses.bce(scores, labels, OFFSETS, weights=weights, reduction=reduction)
            torch.testing.assert_close(got, expected)
    assert float(losses.bce(torch.tensor([1e4, -1e4]), torch.tensor([True, False]))) == 0


def test_values_that_rax_prints():
    """From the docstrings of rax, whose pairs are summed: [2, 1, 3] with the first row right has two."""
    scores, labels = torch.tensor([2.0, 1.0, 3.0]), torch.tensor([1, 0, 0])
    assert float(2 * losses.pairwise(scores, labels)) == pytest.approx(1.6265235)
    assert float(losses.bce(scores, labels, reduction="sum")) == pytest.approx(4.488777)
    two = torch.tensor([2.0, 1.0, 3.0, 1.0, 0.5, 1.5]), torch.tensor([1, 0, 0, 0, 0, 1]), torch.tensor([0, 3, 6])
    assert (2 * losses.pairwise(*two, reduction="none")).tolist() == pytest.approx([1.6265235, 0.7873387])


@pytest.mark.parametrize("block", [None, 20])  # pairs at once: all; two rows, and again in the backward pass
@pytest.mark.parametrize("loss", ALL)
def test_gradients(loss, block, monkeypatch):
    if block:
        monkeypatch.setattr(losses, "PAIRS", block)
    scores, labels, weights = drawn()
    labels = labels > 0 if loss is losses.bce else labels
    for offsets, reduction in ((OFFSETS, "mean"),) if block else ((OFFSETS, "none"), (OFFSETS, "mean"), (None, "sum")):
        assert torch.autograd.gradcheck(
            lambda s, o=offsets, r=reduction: loss(s, labels, o, weights=weights, reduction=r), scores.requires_grad_()
        )


@pytest.mark.parametrize("loss", GROUPED[1:])
def test_blocks_of_rows_change_nothing(loss, monkeypatch):
    scores, labels, weights = drawn()
    whole = loss(scores, labels, OFFSETS, weights=weights)
    for block in (1, 7, 20, 49, 70):  # one pair, a row, some rows, a group, some groups
        monkeypatch.setattr(losses, "PAIRS", block)
        torch.testing.assert_close(loss(scores, labels, OFFSETS, weights=weights), whole, rtol=1e-14, atol=0)


@pytest.mark.parametrize("loss", GROUPED)
def test_groups_that_do_not_count_have_no_part(loss):
    """Not in the loss, not in the gradient, and not by their NaN."""
    scores, labels, _ = drawn()
    whole = loss(scores, labels, OFFSETS)
    broken = scores.clone()
    broken[13:16] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    broken.requires_grad_()
    got = loss(broken, labels, OFFSETS)
    got.backward()
    assert torch.equal(got, whole)
    assert broken.grad[13:16].tolist() == [0, 0, 0]
    assert broken.grad[:5].abs().sum() > 0
    nothing = scores[13:16].clone().requires_grad_()
    none = loss(nothing, labels[13:16])
    none.backward()
    assert (none.item(), nothing.grad.tolist()) == (0, [0, 0, 0])


@pytest.mark.parametrize("loss", ALL)
def test_nan_scores_stay_visible(loss):
    scores, labels, _ = drawn()
    labels = (labels > 0) if loss is losses.bce else labels
    scores[2] = torch.nan
    assert loss(scores, labels, OFFSETS).isnan()
    if loss is not losses.bce:
        assert loss(scores, labels, OFFSETS, reduction="none").isnan().tolist() == [True, *[False] * 5]


@pytest.mark.parametrize("loss", ALL)
def test_no_rows_have_no_loss(loss):
    for offsets, groups in ((None, 1), (torch.tensor([0]), 0), (torch.tensor([0, 0, 0]), 2)):
        scores = torch.zeros(0, requires_grad=True)
        got = loss(scores, torch.zeros(0), offsets)
        got.backward()
        assert got.item() == 0
        none = loss(scores, torch.zeros(0), offsets, reduction="none")
        assert none.shape == ((0,) if loss is losses.bce else (groups,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("loss", ALL)
def test_small_scores_are_widened(loss, dtype):
    scores, labels, _ = drawn(dtype, grades=2)
    got = loss(scores.requires_grad_(), labels.bool(), OFFSETS.int())
    got.backward()
    assert (got.dtype, scores.grad.dtype) == (torch.float32, dtype)
    exact = loss(scores.detach().double(), labels, OFFSETS)
    assert got.item() == pytest.approx(float(exact), rel=1e-6)


def test_softmax_takes_large_scores_and_rows_that_are_masked():
    scores = torch.tensor([1e4, 1e4 - 1, -torch.inf], requires_grad=True)
    loss = losses.softmax(scores, torch.tensor([0, 1, 0]))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(1 + math.e), rel=1e-6)
    share = math.e / (1 + math.e)
    assert scores.grad.tolist() == pytest.approx([share, -share, 0])


@pytest.mark.parametrize("loss", ALL)
def test_bad_input_gets_a_sentence(loss):
    name = f"rank.losses.{loss.__name__}"
    s, y = torch.zeros(4), torch.tensor([0, 1, 0, 1])
    bad = [
        ((s.view(2, 2), y), {}, r"scores must be \(n,\) floats, got \(2, 2\)"),
        ((s.int(), y), {}, r"scores must be \(n,\) floats, got \(4,\) torch.int32"),
        ((s, y[:3]), {}, r"labels must be \(4,\), one per score, on cpu, got \(3,\)"),
        ((s, y.tolist()), {}, "labels must be a tensor, got list"),
        ((s, y - 1), {}, r"labels must .*, got -1 in row 0"),
        ((s, torch.tensor([0, 1, torch.nan, 1])), {}, r"labels must .*, got nan in row 2"),
        ((s, y, torch.tensor([0.0, 4.0])), {}, r"offsets must be \(groups \+ 1,\) int32 or int64"),
        ((s, y, torch.tensor([0])), {}, r"offsets must be \(groups \+ 1,\) int32 or int64.*got \(1,\)"),
        ((s, y, torch.tensor([0, 3])), {}, "offsets must rise from 0 to 4, the number of scores, got 0 to 3"),
        ((s, y, torch.tensor([0, 3, 2, 4])), {}, "offsets must rise from 0 to 4, .*got 0 to 4, falling between"),
        ((s, y), {"weights": s[:1]}, r"weights must be \(4,\)"),
        ((s, y), {"weights": s - 1}, "weights must not be negative, got -1 in row 0"),
        ((s, y), {"reduction": "avg"}, "reduction must be one of mean, sum, none, got 'avg'"),
    ]
    for arguments, options, said in bad:
        with pytest.raises(ValueError, match=rf"^{name}: {said}"):
            loss(*arguments, **options)


def test_bad_options_get_a_sentence():
    s, y = torch.zeros(2), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="bce: labels must lie between 0 and 1, got 2 in row 1"):
        losses.bce(s, 2 * y)
    with pytest.raises(ValueError, match="approx_ndcg: temperature must be positive, got 0"):
        losses.approx_ndcg(s, y, temperature=0)
    with pytest.raises(ValueError, match="lambda_loss: mu must not be negative, got -1"):
        losses.lambda_loss(s, y, mu=-1)


@pytest.mark.gpu
@pytest.mark.parametrize("loss", ALL)
def test_nothing_waits_for_the_gpu(loss):
    scores, labels, weights = (x.cuda() for x in drawn(grades=2))
    loss(scores, labels, OFFSETS, weights=weights)
    rows_alone = loss in (losses.bce, losses.softmax)
    on_gpu = OFFSETS.cuda()
    scores.requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss(scores, labels, OFFSETS, weights=weights).backward()
        if rows_alone:
            loss(scores, labels, on_gpu, weights=weights).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = loss(scores.detach().cpu(), labels.cpu(), OFFSETS, weights=weights.cpu())
    assert float(loss(scores, labels, on_gpu, weights=weights)) == pytest.approx(float(expected), rel=1e-12)
    wrong = torch.tensor([-3, 4, 2, 90], device="cuda")  # not looked at, and nothing is read beyond the rows
    loss(scores, labels, wrong).backward()
    torch.cuda.synchronize()


@pytest.mark.parametrize("loss", GROUPED[1:])
def test_what_is_kept_is_not_the_pairs(loss, monkeypatch):
    """Of 300 rows in one group there are 90,000 pairs, and in its blocks 3,000 at a time."""
    monkeypatch.setattr(losses, "PAIRS", 3000)
    kept = []
    scores, labels = torch.randn(300, requires_grad=True), torch.arange(300) % 3
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        value = loss(scores, labels)
    assert sum(kept) < 30_000
    value.backward()
    assert scores.grad.abs().min() > 0


@pytest.mark.parametrize(("loss", "whole"), [(losses.softmax, True), (losses.pairwise, False)])
def test_it_compiles(loss, whole):
    """Without pairs as one graph; pairs are a part that runs as it stands."""
    scores, labels, weights = drawn(grades=2)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=whole, dynamic=True)
    for offsets in (OFFSETS, OFFSETS[[0, 2, 6]]):
        got = compiled(scores, labels, offsets, weights=weights)
        torch.testing.assert_close(got, loss(scores, labels, offsets, weights=weights))
