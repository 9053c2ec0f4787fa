"""softmax and sparsemax where scores are extreme, masked, tied, or not there at all."""

import pytest
import torch
from numerics import check

import tigon
from tigon.ops.softmax import launches as softmax_launches
from tigon.ops.softmax import softmax_reference
from tigon.ops.softmax.launches import PART, _mask_layout, _parts

WIDTHS = [24, 20000, 40000]  # rows that share a tile, one tile, beyond one


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_without_a_finite_score_are_nan_and_spoil_no_other(width, backend, device):
    x = torch.randn(4, width, device=device)
    x[1] = -torch.inf
    x[2, 3] = torch.inf
    x[3, 1] = torch.nan
    y = tigon.softmax(x, -1)
    assert y[1:].isnan().all()
    torch.testing.assert_close(y[0], torch.softmax(x[0], -1))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_of_the_least_numbers_is_even(width, backend, device):
    """transformers masks with finfo.min instead of -inf, for such rows to be numbers."""
    mask = torch.full((width,), torch.finfo(torch.float32).min, device=device)
    y = tigon.softmax(torch.zeros(2, width, device=device), -1, mask=mask)
    torch.testing.assert_close(y, torch.full_like(y, 1 / width))


@pytest.mark.parametrize("width", WIDTHS)
def test_what_causality_hides_is_not_used(width, backend, device):
    """A NaN there changes nothing, forward or backward; the query before all keys is NaN, and has no gradient."""
    T, options = 3, {"scale": 0.5, "causal": True}
    clean = torch.randn(T, width, device=device)
    hidden = torch.arange(width, device=device) > (torch.arange(T, device=device) + width - T).unsqueeze(-1)
    dy = torch.randn(T, width, device=device)

    def run(x, upstream):
        x = x.clone().requires_grad_()
        y = tigon.softmax(x, -1, **options)
        y.backward(upstream)
        return y.detach(), x.grad

    y, dx = run(clean, dy)
    unread = torch.nan if backend == "triton" else 0.0  # torch multiplies the gradient of what is hidden by 0
    poisoned_y, poisoned_dx = run(clean.masked_fill(hidden, torch.nan), dy.masked_fill(hidden, unread))
    assert torch.equal(y, poisoned_y)
    assert torch.equal(dx, poisoned_dx)
    assert (y[hidden] == 0).all()
    assert (dx[hidden] == 0).all()


def test_more_queries_than_keys(backend, device):
    """The first queries see nothing: NaN, as of a row that is -inf."""
    x = torch.randn(2, 5, 3, device=device)
    y = tigon.softmax(x, -1, causal=True)
    assert y[:, :2].isnan().all()
    torch.testing.assert_close(y[:, 2:], tigon.softmax(x[:, 2:], -1, causal=True))


@pytest.mark.parametrize(
    "shape",
    [(), (7,), (1, 7), (3, 1), (2, 1, 3, 7), (1, 4, 1, 7), (2, 4, 3, 7), (5, 1, 1, 3, 7), (5, 1, 4, 1, 7)],
    ids=str,
)
def test_masks_broadcast(shape, backend, device):
    x = torch.randn(5, 2, 4, 3, 7, device=device)
    mask = torch.randn(shape, device=device)
    torch.testing.assert_close(tigon.softmax(x, -1, mask=mask), torch.softmax(x + mask, -1))
    torch.testing.assert_close(tigon.softmax(x, 2, mask=mask), torch.softmax(x + mask, 2))


@pytest.fixture
def parts(monkeypatch):
    """Wide rows are cut into parts, as few of them are on a large device."""
    monkeypatch.setattr(softmax_launches, "multiprocessors", lambda _: 12)


@pytest.mark.parametrize("options", [{}, {"scale": -0.5}, {"causal": True}, {"scale": 2.0, "causal": True}], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_few_wide_rows_in_parts(options, masked, parts, triton_backend, device):
    """Causal, the first query sees nothing of its last part; the mask hides all of its first."""
    x = torch.randn(1, 5, 8 * PART + 3, device=device)
    x[..., ::PART] += 20.0  # a part's own maximum differs from the row's
    mask = None
    if masked:
        mask = torch.randn(x.shape[-1], device=device)
        mask[:PART] = -torch.inf
    assert _parts(5, x.shape[-1], x.device).number > 4
    check(
        lambda x: tigon.softmax(x, -1, mask=mask, **options),
        lambda x: softmax_reference(x, mask=mask, **options),
        x, eager=lambda x: softmax_reference(x, mask=mask, **options),
    )  # fmt: skip


def test_rows_in_parts_without_a_finite_score_are_nan_and_spoil_no_other(parts, triton_backend, device):
    x = torch.randn(5, 40000, device=device)
    x[1] = -torch.inf
    x[2, 3] = torch.inf
    x[3, -1] = torch.nan
    x[4, : 2 * PART] = -torch.inf
    y = tigon.softmax(x, -1)
    assert y[1:4].isnan().all()
    torch.testing.assert_close(y[[0, 4]], torch.softmax(x[[0, 4]], -1))


@pytest.mark.parametrize("columns", [32769, 40960, 128256, 1000000])
def test_parts_hold_every_column_once_and_are_none_where_rows_suffice(columns, parts):
    assert _parts(12, columns, torch.device("cpu")) is None
    for rows in range(1, 12):
        count, width, most = _parts(rows, columns, torch.device("cpu"))
        assert count > 1
        assert width % PART == 0
        assert (count - 1) * width < columns <= count * width
        assert count <= most


@pytest.mark.parametrize("shape", [(4, 1, 6, 24), (6, 24), (4, 3, 1, 24), (1, 3, 6, 1), (4, 3, 6, 24)], ids=str)
def test_a_mask_is_walked_where_it_lies(shape):
    mask = torch.randn(shape)
    walked, (d1, d2, s0, s1, s2, column) = _mask_layout(mask, torch.Size((4, 3, 6, 24)))
    assert walked.data_ptr() == mask.data_ptr()
    rows = torch.arange(4 * 3 * 6).unsqueeze(-1)
    at = rows // d2 // d1 * s0 + rows // d2 % d1 * s1 + rows % d2 * s2 + torch.arange(24) * column
    assert torch.equal(mask.flatten()[at], mask.expand(4, 3, 6, 24).reshape(-1, 24))


def test_a_learned_mask_is_refused_only_where_it_would_learn(backend, device):
    x, mask = torch.randn(2, 7, device=device), torch.randn(7, device=device).requires_grad_()
    with pytest.raises(ValueError, match="mask must not require a gradient"):
        tigon.softmax(x, -1, mask=mask)
    with torch.no_grad():
        torch.testing.assert_close(tigon.softmax(x, -1, mask=mask), softmax_reference(x, mask=mask))


# -------------------------------------------------------------------------------------------------------- sparsemax


@pytest.mark.parametrize("width", WIDTHS)
def test_sparsemax_is_the_projection_onto_the_simplex(width, backend, device):
    """Non-negative, sums to one, and x − y is the same τ on the support and at most τ elsewhere: the KKT conditions."""
    x = 0.1 * torch.randn(3, width, device=device)
    y = tigon.sparsemax(x)
    assert (y >= 0).all()
    torch.testing.assert_close(y.sum(-1), torch.ones(3, device=device))
    gap = x - y
    tau = gap.where(y > 0, -torch.inf).amax(-1, keepdim=True)
    torch.testing.assert_close(gap.where(y > 0, tau), tau.expand_as(x), rtol=0, atol=1e-6)
    assert (gap.where(y == 0, -torch.inf) <= tau + 1e-6).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_sparsemax_of_ties_and_clear_winners_is_exact(width, backend, device):
    x = torch.zeros(4, width, device=device)
    x[0, 5] = 3.0  # a winner
    x[1, [2, 7]] = 9.0  # two of them
    x[2] = 0.75  # = τ, and so outside
    x[2, :4] = 1.0
    x[3] = 7.0  # all alike
    y = tigon.sparsemax(x)
    expected = torch.zeros_like(x)
    expected[0, 5] = 1.0
    expected[1, [2, 7]] = 0.5
    expected[2, :4] = 0.25
    expected[3] = 1 / width
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=0)
    assert torch.equal(y[:3], expected[:3])


@pytest.mark.parametrize("width", WIDTHS)
def test_sparsemax_takes_minus_infinity_and_answers_nan_with_nan(width, backend, device):
    x = torch.randn(4, width, device=device)
    x[0, 6:] = -torch.inf
    x[1] = -torch.inf
    x[2, 3] = torch.inf
    x[3, 1] = torch.nan
    y = tigon.sparsemax(x)
    torch.testing.assert_close(y[0, :6], tigon.sparsemax(x[0, :6]))
    assert (y[0, 6:] == 0).all()
    assert y[1:].isnan().all()
