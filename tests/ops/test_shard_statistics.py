"""Rows cut into parts: each part's statistics, put together, say what the whole row says, and so does the gradient."""

import pytest
import torch

from tigon.ops.cross_entropy.launches import gradient_rows
from tigon.ops.cross_entropy.reference import rows_reference
from tigon.ops.logprob import _gradient_reference, logprob_gradient_rows, logprob_reference
from tigon.ops.shard_statistics import (
    IGNORED,
    OUTSIDE,
    columns,
    local_labels,
    merge_cross_entropy,
    merge_logprob,
    shard_statistics,
)

# Beyond a block of columns, one that is not full, one column, none; the maximum is now in one part, now in another.
SIZES = (1500, 37, 1, 0, 262)
V, M = sum(SIZES), 9


@pytest.fixture
def rows(device):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(M, V, generator=generator)
    logits[0, 5] = logits[1, 1510] = logits[2, V - 1] = 30.0  # of which nothing is left elsewhere
    logits[3, 1500:] = -torch.inf  # parts without any probability
    target = torch.randint(0, V, (M,), generator=generator)
    target[:4] = torch.tensor([5, 7, V - 1, 3])
    target[4] = -100
    return logits.to(device), target.to(device)


def parts_of(logits, target, temperature, softcap, scale, along, total, ignore_index=-100):
    """Statistics of each part, (parts, M, columns), and each part's labels and logits."""
    found, labels, first = [], [], 0
    for part in logits.split(SIZES, 1):
        part, own = part.contiguous(), logits.new_empty(M, columns(along, total))
        labels.append(local_labels(target, ignore_index, first, part.shape[1], V))
        shard_statistics(part, labels[-1], own, temperature, softcap, scale, along=along, total=total)
        found.append(own)
        first += part.shape[1]
    return torch.stack(found), labels, [part.contiguous() for part in logits.split(SIZES, 1)]


@pytest.mark.parametrize("options", [(0.0, 0.0, 0.0, 1.0), (0.1, 1e-2, 0.0, 0.7), (0.1, 1e-2, 5.0, 0.7)])
def test_cross_entropy(options, rows, backend):
    logits, target = rows
    if options[0]:
        logits[3, 1500:] = -7.0  # smoothing spreads over all classes: the loss of one without probability is infinite
    parts, labels, pieces = parts_of(logits, target, 1.0, *options[2:], False, options[0] != 0)
    loss, stats = logits.new_empty(M), logits.new_empty(4 + 2 * M)
    merge_cross_entropy(parts, labels[0], loss, stats, V, *options)
    factor = torch.rand(M, device=logits.device)
    for part, label in zip(pieces, labels, strict=True):
        gradient_rows(part, label, stats, factor, V, IGNORED, *options)
    right, slope = rows_reference(logits.double(), target, factor.double(), True, -100, *options)
    torch.testing.assert_close(loss.double(), right, rtol=1e-6, atol=3e-6)
    torch.testing.assert_close(torch.cat(pieces, 1).double(), slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [(1.0, 0.0, 1.0), (2.0, 0.0, 0.7), (0.7, 5.0, 1.3)])
def test_logprob(options, rows, backend):
    logits, target = rows
    logits[3, 1500:] = -40.0  # the mean logit would be infinite
    parts, labels, pieces = parts_of(logits, target, *options, True, True)
    found = [logits.new_empty(M, dtype=torch.bool if i == 3 else torch.float32) for i in range(5)]
    stats = logits.new_empty(M, 3)
    merge_logprob(parts, labels[0], tuple(found), stats, V, *options)
    for mine, right in zip(found, logprob_reference(logits.double(), target, -100, *options), strict=True):
        torch.testing.assert_close(mine.to(right.dtype), right, rtol=1e-6, atol=3e-6)
    up = torch.randn(2, M, device=logits.device)
    for part, label in zip(pieces, labels, strict=True):
        logprob_gradient_rows(part, label, stats, up[0], up[1], part, IGNORED, *options, merged=True)
    slope = _gradient_reference(logits.double(), target, *up.double(), -100, *options)
    torch.testing.assert_close(torch.cat(pieces, 1).double(), slope, rtol=1e-4, atol=1e-6)


def test_parts_without_probability_add_nothing(rows, backend):
    logits, target = rows
    parts, labels, _ = parts_of(logits, target, 1.0, 0.0, 1.0, True, False)
    found = [logits.new_empty(M, dtype=torch.bool if i == 3 else torch.float32) for i in range(4)]
    merge_logprob(parts, labels[0], (*found, None), logits.new_empty(M, 3), V, 1.0, 0.0, 1.0)
    expected = logprob_reference(logits.double(), target, -100, 1.0, 0.0, 1.0)
    for mine, right in zip(found, expected, strict=False):
        assert mine[3].isfinite()
        torch.testing.assert_close(mine[3].to(right.dtype), right[3], rtol=1e-6, atol=3e-6)


def test_a_target_of_no_part_is_loud(rows, backend):
    """Its row alone, in loss and gradient, on every device."""
    logits, target = rows
    target[5], target[6] = V, -1
    parts, labels, pieces = parts_of(logits, target, 1.0, 0.0, 1.0, False, False)
    assert all(label[5] == label[6] == OUTSIDE for label in labels)
    loss, stats = logits.new_empty(M), logits.new_empty(4 + 2 * M)
    merge_cross_entropy(parts, labels[0], loss, stats, V, 0.0, 0.0, 0.0, 1.0)
    assert loss.isnan().tolist() == [i in (5, 6) for i in range(M)]
    gradient_rows(pieces[0], labels[0], stats, loss.new_ones(()), V, IGNORED, 0.0, 0.0, 0.0, 1.0)
    assert pieces[0].isnan().all(1).tolist() == [i in (5, 6) for i in range(M)]


def test_labels_of_a_part():
    """A class of another part may be at the distance of the ignore_index, and the ignore_index may be a class."""
    target = torch.tensor([0, 100, 104, 105, 199, 200, -100, 103])
    assert local_labels(target, -100, 100, 5, 200).tolist() == [-1, 0, 4, -1, -1, -3, -2, 3]
    assert local_labels(target, 103, 100, 5, 200).tolist() == [-1, 0, 4, -1, -1, -3, -3, -2]
    assert local_labels(torch.tensor([255, 3], dtype=torch.uint8), -100, 0, 300, 300).tolist() == [255, 3]
