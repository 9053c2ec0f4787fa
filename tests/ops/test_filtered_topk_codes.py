"""Codes of rows: what encode_items promises, and searches with codes against searches without."""

from __future__ import annotations

import pytest
import torch

import tigon
from tigon.ops.filtered_topk import codes


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def odd_rows(D=40):
    """One large component, tiny and huge scales, zeros, integers, NaN and infinities."""
    rows = normal(30, D)
    rows[3, 7] = 1e4
    rows[4:9] *= torch.tensor([1e-5, 1e5, 1e-10, 1e-30, 1e-38])[:, None]
    rows[9] = 0
    rows[10] = torch.arange(D).float()
    rows[11, 2], rows[12, 3], rows[13] = torch.nan, torch.inf, 3e38
    return rows


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_codes_are_within_their_error(dtype, device, monkeypatch):
    monkeypatch.setattr(codes, "PIECE", 7 * 40)
    rows = odd_rows().to(dtype).to(device)
    coded = tigon.encode_items(rows)
    assert coded.rows is rows
    assert coded.codes.dtype == torch.int8
    wide = rows.double() if dtype != torch.float8_e4m3fn else rows.float().double()
    ordinary = (wide.abs().amax(1) <= 2.0**50) & ~wide.isnan().any(1)
    assert torch.equal(coded.scales == torch.inf, ~ordinary)
    ratio = wide[ordinary] / coded.scales[ordinary].double()[:, None]
    code = coded.codes[ordinary].double()
    assert ((ratio - code).norm(dim=1) <= coded.error[0]).all()
    assert (code.norm(dim=1) <= coded.error[1]).all()
    # No more than rounding to the nearest costs, and half of a unit in every component.
    assert coded.error[0] <= 0.5 * 40**0.5 * 1.001
    assert coded.error[1] <= code.norm(dim=1).max() * 1.001
    assert not coded.codes[~ordinary].any()


def test_no_rows():
    coded = tigon.encode_items(torch.ones(0, 4))
    assert coded.codes.shape == (0, 4)
    assert coded.scales.shape == (0,)
    assert coded.error.tolist() == [0, 0]


Q, X = torch.ones(2, 4), tigon.encode_items(torch.ones(5, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tigon.encode_items([1]), r"encode_items: rows must be a tensor, got list"),
        (lambda: tigon.encode_items(Q[0]), r"encode_items: rows must be \(N, D\) fp16, .*, got \(4,\) torch.float32"),
        (lambda: tigon.encode_items(Q.long()), r"encode_items: rows must be \(N, D\) .* got \(2, 4\) torch.int64"),
        (lambda: tigon.encode_items(Q, "int4"), r"encode_items: codes must be one of 'int8'.*, got 'int4'"),
        (lambda: tigon.filtered_topk(Q, X._replace(codes=Q), 1), r"filtered_topk: codes of items must be \(5, 4\)"),
        (lambda: tigon.filtered_topk(Q, X._replace(scales=None), 1), r"filtered_topk: scales of items .* got NoneT"),
        (
            lambda: tigon.filtered_topk(Q, X._replace(error=X.error.double()), 1),
            r"filtered_topk: error of items must be \(2,\) float32 on cpu, .* got \(2,\) torch.float64 on cpu",
        ),
        (lambda: tigon.filtered_topk(Q, X._replace(rows=3), 1), r"filtered_topk: items must be a tensor, got int"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()
