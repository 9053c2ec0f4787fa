"""Answers of several devices, merged: a full sort of all items by (score, row), and each item's id and words."""

from __future__ import annotations

import pytest
import torch

from tigon.ops.filtered_topk.merge import merge_answers, pack_answer


# Least; more than one block of a query's candidates, with words; fewer rows than k; rows that no filter lets through.
@pytest.mark.parametrize(
    ("B", "k", "devices", "W", "rows"), [(1, 1, 1, 0, 3), (2, 100, 4, 2, 160), (3, 40, 3, 1, 7), (2, 5, 8, 0, 0)]
)
def test_merged_answers_are_those_of_all_items(B, k, devices, W, rows, device, backend):
    g = torch.Generator().manual_seed(k)
    scores = torch.randint(-3, 4, (B, rows, devices), generator=g) / 2
    scores[:, 1::3] = -torch.inf
    scores[scores == 0.5] = -0.0
    ids, words = (torch.randint(-(2**60), 2**60, (n, rows, devices), generator=g) for n in (1, W))
    packed = []
    for own in range(devices):
        padded = torch.cat((scores[..., own], torch.full((B, k), -torch.inf)), 1)
        best = padded.sort(dim=1, descending=True, stable=True)
        score = torch.where(best.values == 0, 0.0, best.values)[:, :k].contiguous()
        at = best.indices[:, :k].masked_fill(score == -torch.inf, -1).contiguous()
        beside = ids[0, :, own].contiguous(), words[..., own].contiguous() if W else None
        if not rows:  # so that there is an address
            beside = torch.zeros(1, dtype=torch.int64), None
        given = (t if t is None else t.to(device) for t in (score, at, *beside))
        packed.append(pack_answer(*given, own, devices))
    found, at, of_items, with_words = (t.cpu() for t in merge_answers(torch.stack(packed)))

    whole = torch.cat((scores.reshape(B, -1), torch.full((B, k), -torch.inf)), 1)
    best = whole.sort(dim=1, descending=True, stable=True)
    want = best.values[:, :k]
    want_rows = best.indices[:, :k].masked_fill(want == -torch.inf, -1)
    assert torch.equal(found, want)
    assert torch.equal(at, want_rows)
    there = want_rows >= 0
    assert there.any() == bool(rows)
    assert torch.equal(of_items[there], ids.reshape(-1)[want_rows[there]])
    assert bool((of_items[~there] == -1).all())
    assert torch.equal(with_words[:, there], words.reshape(W, rows * devices)[:, want_rows[there]])
