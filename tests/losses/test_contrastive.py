"""The in-batch softmax of embeddings, beside all scores, in every direction."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from numerics import check

from tigon.losses import contrastive, info_nce
from tigon.losses.contrastive import info_nce_reference

ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def embeddings(generator, dtype, B, D, count):
    return tuple(F.normalize(torch.randn(B, D, generator=generator), dim=1).to(dtype) for _ in range(count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 4])  # a pair; two hard negatives
@pytest.mark.parametrize(
    "options",
    [{}, {"directions": "symmetric"}, {"directions": ALL[::2]}, {"directions": ALL, "scale": 5.0},
     {"directions": ("query_to_doc", "doc_to_doc")}, {"directions": ("query_to_doc", "query_to_query")}],
    ids=["plain", "symmetric", "joint", "all", "documents", "queries"],
)  # fmt: skip
def test_losses_and_gradients_are_those_of_all_scores(dtype, count, options, monkeypatch):
    monkeypatch.setattr(contrastive, "SCORES", 2 * 13 * count * 5)  # chunks of 5 queries: 5, 5 and 3

    def ours(q, d, *negatives):
        return info_nce(q, d, negatives, **options)

    def reference(q, d, *negatives):
        return info_nce_reference(q, d, negatives, **options)

    check(ours, reference, lambda g: embeddings(g, dtype, 13, 24, count), draws=8)


@pytest.mark.parametrize("directions", [("query_to_doc",), ALL])
def test_the_least_batches(directions):
    alone = torch.ones(1, 3, requires_grad=True)
    loss = info_nce(alone, alone.detach(), directions=directions)
    loss.backward()
    # A single pair leaves the positive alone in the softmax, twice with the document's query.
    assert loss.item() == pytest.approx(0.0 if len(directions) == 1 else math.log(2), abs=1e-5)
    assert alone.grad.abs().max() <= 20
    with torch.no_grad():
        assert info_nce(alone, alone, directions=directions) == loss


def test_no_scores_of_the_whole_batch_are_stored():
    """The joint loss keeps one gradient for its rows, and no tensor of B × B."""
    kept = []
    rows = [torch.randn(64, 4, requires_grad=True) for _ in range(2)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        for options in ({}, {"directions": ALL}):
            info_nce(*rows, **options)
    assert kept
    assert max(kept) < 64 * 64


def test_an_upstream_gradient_multiplies():
    rows = [torch.randn(6, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for options in ({}, {"directions": ALL}):
        once = torch.autograd.grad(info_nce(*rows, **options), rows)
        thrice = torch.autograd.grad(3 * info_nce(*rows, **options), rows)
        torch.testing.assert_close(thrice, tuple(3 * g for g in once))


def test_wrong_inputs_are_sentences():
    q, d = torch.randn(4, 3), torch.randn(4, 3)
    for arguments, options, words in (
        ((q[0], d), {}, r"query must be \(B, D\)"),
        ((q, d[:3]), {}, "positive must have query's shape"),
        ((q, d, [d, d.double()]), {}, r"negatives\[1\] must have query's shape .* got .*float64"),
        ((q, d), {"scale": 0.0}, "scale must be positive"),
        ((q, d), {"directions": ("doc_to_query",)}, "directions must be 'symmetric', or 'query_to_doc' and"),
        ((q, d), {"directions": "query_to_doc"}, "directions must be"),
    ):
        with pytest.raises(ValueError, match=f"info_nce: {words}"):
            info_nce(*arguments, **options)
