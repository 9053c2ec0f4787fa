"""The isotonic layer: the sum over all buckets that it replaces, the identity at first, and what it learns of rows."""

import torch

from tigon import rank
from tigon.rank.models.lirank.calibrate import fit_isotonic
from tigon.rank.models.lirank.isotonic import HIGH, LOW, STEP, Isotonic, isotonic

BUCKETS = 501


def drawn(segments, seed=0):
    draw = torch.Generator().manual_seed(seed)
    weight = 1 + torch.randn(segments, BUCKETS, generator=draw, dtype=torch.float64)
    return weight.requires_grad_(), torch.randn(segments, generator=draw, dtype=torch.float64).requires_grad_()


def over_all_buckets(x, weight, bias, segment):
    """As it is published: each row sums its buckets below, and a share of its own. O(501) a row."""
    edges = LOW + STEP * torch.arange(BUCKETS, dtype=torch.float64)
    k = ((x[:, None] >= edges).sum(1) - 1).clamp(0, BUCKETS - 1)
    number = torch.arange(BUCKETS)
    share = STEP * (number < k[:, None]).double()
    share = torch.where(number == k[:, None], (x - edges[k])[:, None], share)
    return LOW + (weight.relu()[segment] * share).sum(1) + bias[segment]


def test_a_prefix_sum_and_a_gather_are_the_sum_over_all_buckets():
    x = torch.cat((torch.linspace(-19, 10, 400, dtype=torch.float64), torch.tensor([LOW, 0.0, HIGH])))
    x.requires_grad_()
    segment = torch.arange(len(x)) % 3
    weight, bias = drawn(3)
    found, expected = isotonic(x, weight, bias, segment), over_all_buckets(x, weight, bias, segment)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    dy = torch.randn(len(x), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for got, wanted in zip(
        torch.autograd.grad(found, (x, weight, bias), dy), torch.autograd.grad(expected, (x, weight, bias), dy),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        rising = isotonic(x[:-3].detach(), weight[:1], bias[:1])
        assert (rising.diff() >= -1e-12).all()
        assert (rising.diff() > 0.01).any()


def test_it_is_the_identity_at_first_to_the_last_bit():
    x = torch.cat((torch.randn(1000) * 9, torch.tensor([-torch.inf, torch.inf])))
    assert torch.equal(Isotonic(2)(x[:1000], torch.ones(1000, dtype=torch.int64)), x[:1000])
    assert Isotonic()(torch.tensor([torch.nan, 1.0])).isnan().tolist() == [True, False]


def test_it_learns_the_log_odds_of_each_segment():
    draw = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(6_000, generator=draw)
    segment = torch.randint(0, 3, (len(x),), generator=draw)
    shift = torch.tensor([-1.0, 0.0, 1.5])
    truth = 0.5 * x + shift[segment]  # the model is twice too sure, and each segment has a rate of its own
    y = (torch.rand(len(x), generator=draw) < truth.sigmoid()).float()
    # Of the last segment there is a handful of rows: it keeps near what is true of all.
    kept = (segment < 2) | (torch.arange(len(x)) < 30)
    weight, bias = fit_isotonic(x[kept], y[kept], None, segment[kept], 3, 1.0)
    at = torch.linspace(-2, 2, 9, dtype=torch.float64)
    for number in (0, 1):
        found = isotonic(at, weight, bias, torch.full((9,), number))
        assert (found - (0.5 * at + shift[number])).abs().max() < 0.25
    shared = fit_isotonic(x[kept], y[kept], None, None, 1, 1.0)
    few = isotonic(at, weight, bias, torch.full((9,), 2))
    assert (few - isotonic(at, *shared)).abs().max() < 1.5
    before, after = (rank.metrics.ece(z.sigmoid(), y[kept]) for z in (x[kept], isotonic(x[kept].double(), *shared)))
    assert after < 0.2 * before
    # Rows of weight 0 are as good as absent.
    weights = kept.float()
    again = fit_isotonic(x, y, weights * len(x) / kept.sum() * kept.sum() / len(x), None, 1, 1.0)
    torch.testing.assert_close(isotonic(at, *again), isotonic(at, *shared), atol=1e-2, rtol=0)
