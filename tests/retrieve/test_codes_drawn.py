"""Searches with codes in drawn cases: 8-bit codes change no bit, and signs find what their reference finds."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from scans import assert_equal

import tigon
from tigon.retrieve.scan import coded, plan, sign
from tigon.retrieve.scan.filters import stack_tables

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as st  # noqa: E402

Literal = tigon.RowFilter.Literal
FILTERS = (
    None, tigon.RowFilter([[Literal(0, 1)]]), tigon.RowFilter([[Literal(0, 6, "all"), Literal(1, 8)], [Literal(0, 3)]]),
    tigon.RowFilter([[]]),
)  # fmt: skip
# Kernels are made anew for every width: a few, of which one is cut off by a step of a sum.
WIDTHS, COUNTS, RESULTS = (1, 8, 40), (1, 31, 64, 65, 300, 517), (1, 3, 8)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# What rows are multiplied by, and what single numbers are set to.
SCALES, OUTLIERS = (0.0, 1e-30, 1e-3, 1.0, 1e3), (0.0, 1e4, -6e4, 1e18, torch.inf, -torch.inf, torch.nan)
drawn = functools.partial(hypothesis.settings, deadline=None, database=None, derandomize=True)


@st.composite
def cases(draw: Any, numbers: tuple[float, ...] = OUTLIERS) -> dict[str, Any]:
    """A search. kind: of its rows, normal ones, whole numbers full of ties, or all near one another."""
    N, D = draw(st.sampled_from(COUNTS)), draw(st.sampled_from(WIDTHS))
    return {
        "B": draw(st.sampled_from((1, 2, 17))), "N": N, "D": D, "k": draw(st.sampled_from(RESULTS)),
        "kind": draw(st.sampled_from(("normal", "whole", "near"))), "seed": draw(st.integers(0, 2**20)),
        "dtype": draw(st.sampled_from(DTYPES)), "query": draw(st.sampled_from(DTYPES)),
        "scales": draw(st.lists(st.sampled_from(SCALES), min_size=1, max_size=4)),
        "outliers": draw(st.lists(st.tuples(st.integers(0, N - 1), st.integers(0, D - 1), st.sampled_from(numbers)),
                                  max_size=6)),
        "where": draw(st.sampled_from(FILTERS)), "live": draw(st.booleans()), "bias": draw(st.booleans()),
        "plan": draw(st.sampled_from(("auto", "dense", "compact"))),
    }  # fmt: skip


def made(case: dict[str, Any], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The query, the rows, and the options of both searches."""
    draw = torch.Generator().manual_seed(case["seed"])
    B, N, D = case["B"], case["N"], case["D"]
    rows, query = torch.randn(N, D, generator=draw), torch.randn(B, D, generator=draw)
    if case["kind"] == "whole":
        rows, query = rows.round(), query.round()
    elif case["kind"] == "near":
        rows = rows[:1] + 1e-3 * rows
    rows *= torch.tensor(case["scales"]).repeat(N)[:N, None]
    for row, column, number in case["outliers"]:
        rows[row, column] = number
    options: dict[str, Any] = {}
    if case["where"] is not None:
        options["attributes"] = torch.randint(0, 2**20, (2, N), generator=draw).to(device)
        options["where"] = case["where"]
    if case["live"]:
        options["live"] = torch.randint(-(2**31), 2**31, (-(-N // 32),), generator=draw).to(device, torch.int32)
    if case["bias"]:
        options["bias"] = torch.randint(-9, 9, (N,), generator=draw).float().to(device)
    return query.to(device, case["query"]), rows.to(device, case["dtype"]), options


def test_eight_bits_change_nothing(small_trees, triton_backend, device):
    """Groups of 4 rows, of which 8 are picked, so that many answers are proven and many are not."""
    small_trees(8, 8)
    proven: list[torch.Tensor] = []

    @drawn(max_examples=10)
    @hypothesis.given(cases())
    def compare(case: dict[str, Any]) -> None:
        query, rows, options = made(case, device)
        items = tigon.encode_items(rows)
        kind = plan.choose_kind(case["where"] is not None, None, case["plan"])
        filters, tables = stack_tables(case["where"], kind, device, len(query))
        attributes, live, bias = (options.get(name) for name in ("attributes", "live", "bias"))
        *got, sure = coded._coded_topk(
            query, *items[:4], case["k"], attributes, *tables, filters, live, bias, kind, None
        )
        assert_equal(got, tigon.filtered_topk(query, rows, case["k"], plan=case["plan"], **options))
        proven.append(sure)

    compare()
    assert 0.2 < torch.cat(proven).float().mean() < 0.98  # both ways were taken


def test_signs_are_those_of_the_reference(triton_backend, device):
    @drawn(max_examples=12)
    @hypothesis.given(cases((0.0, 7.0, -500.0, torch.inf, torch.nan)), st.sampled_from((64, 512)), st.integers(8, 40))
    def compare(case: dict[str, Any], bits: int, candidates: int) -> None:
        # Whole numbers, whose exact scores are the same in any order of a sum.
        case |= {"kind": "whole", "scales": [1.0 if scale < 1 else scale for scale in case["scales"]]}
        query, rows, options = made(case, device)
        items = tigon.encode_items(rows, "sign", bits=bits, seed=case["seed"])._replace(candidates=candidates)
        want = sign.signs_reference(rows, items.projection, scaled=True)
        assert torch.equal(items.codes, want.codes)
        assert torch.equal(items.scales, want.scales)
        wanted = sign.sign_topk_reference(query, items, case["k"], **options)
        assert_equal(tigon.filtered_topk(query, items, case["k"], plan="codes", **options), wanted)

    compare()
