"""Rows of distillation cut into parts, as devices hold them: together they say, and give, what the whole row does."""

from __future__ import annotations

import pytest
import torch

from tigon import use_backend
from tigon.losses.distillation import parts as module
from tigon.losses.distillation.reference import rows_reference, topk_rows_reference
from tigon.ops.shard_statistics import IGNORED, OUTSIDE, local_labels

# Beyond all columns that a kernel reads at a time, one column, none, and a block that is not full.
SIZES = (2100, 1, 0, 62)
V, M, K = sum(SIZES), 4, 5
WEIGHTS = (0.6, 0.4)
PLAIN, CAPPED = (0.0, 1.0, 0.0, 1.0), (5.0, 0.7, 6.0, 0.9)


@pytest.fixture
def rows(device):
    """Both sides' logits and the targets. The maximum is now in one part, now in another; a row does not count."""
    logits, teacher = 2 * torch.randn(2, M, V, generator=torch.Generator().manual_seed(0))
    logits[0, 5] = logits[1, 2105] = teacher[1, 2095] = teacher[2, V - 1] = 15.0
    target = torch.tensor([5, V - 1, 2100, -100])
    return logits.to(device), teacher.to(device), target.to(device)


def cut(t):
    return [part.contiguous() for part in t.split(SIZES, 1)]


def numbers(logits):
    return logits.new_empty(M, dtype=torch.float32)


def labels_of(target):
    starts = [sum(SIZES[:i]) for i in range(len(SIZES))]
    return [local_labels(target, -100, first, size, V) for first, size in zip(starts, SIZES, strict=True)]


def of_parts(logits, teacher, target, kind, beta, temperature, transforms, hard, gradient=True):
    """Soft and hard losses, and the logits that became gradients, as `distill_part` goes about it."""
    mode = 0 if not hard else 1 if temperature == 1.0 else 2
    pieces = list(zip(cut(logits), cut(teacher), labels_of(target), strict=True))
    said = [module.distill_statistics(*p, torch.float32, kind, mode, temperature, *transforms) for p in pieces]
    place = numbers(logits) if hard else None
    softs, means, merged = [numbers(logits) for _ in SIZES], None, None
    for labels in (pieces[0][2], pieces[2][2]):  # one that has classes, and one that has none
        merged = module.merge_distill(torch.stack(said), labels, place, kind, mode, temperature)
    if kind not in ("cosine", "kl") or not gradient:
        options = kind, beta, temperature, *transforms
        means = [module.distill_values(*p, merged, s, *options) for p, s in zip(pieces, softs, strict=True)]
        means = torch.stack(means) if kind != "kl" else None
    factor = logits.new_full((), 0.5, dtype=torch.float32)
    for piece, soft in zip(pieces, softs, strict=True) if gradient else ():
        given = merged, means, soft, factor, WEIGHTS, kind, mode, beta, temperature, *transforms
        module.distill_gradients(*piece, *given)
    whole = 1 - merged[:, 2] if kind == "cosine" else torch.stack(softs).sum(0)
    return torch.where(target == -100, 0.0, whole), place, torch.cat([p[0] for p in pieces], 1)


def close(found, right, factor=0.5):
    for mine, exact, scale in zip(found, right, (1, 1, factor), strict=True):
        if mine is not None:
            rtol = 2e-5 if mine.dtype == torch.float32 else 4e-3  # a rounding to bf16
            torch.testing.assert_close(mine.double(), exact * scale, rtol=rtol, atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "temperature", "transforms", "hard", "dtype"),
    [
        ("kl", 1.0, PLAIN, True, torch.float32), ("kl", 2.0, CAPPED, False, torch.float32),
        ("reverse", 2.0, CAPPED, True, torch.float32), ("tvd", 1.0, PLAIN, True, torch.float32),
        ("jsd", 1.0, PLAIN, False, torch.float32), ("jsd", 2.0, CAPPED, True, torch.bfloat16),
        ("cosine", 1.0, PLAIN, False, torch.float32), ("cosine", 1.0, CAPPED, True, torch.float32),
    ],
)  # fmt: skip
def test_parts_of_two_heads(kind, temperature, transforms, hard, dtype, rows, backend):
    """Gradients alone are rounded to bf16: statistics, and what goes between the devices, are not."""
    logits, teacher, target = rows
    logits, teacher = logits.to(dtype), teacher.to(dtype)
    found = of_parts(logits, teacher, target, kind, 0.3, temperature, transforms, hard)
    weights = WEIGHTS if hard else (WEIGHTS[0], 0.0)
    exact = logits.double(), teacher.double(), target, weights, True
    close(found, rows_reference(*exact, kind, 0.3, temperature, -100, *transforms))
    assert (found[2][3] == 0).all()


@pytest.mark.parametrize("kind", ["kl", "jsd"])
def test_without_a_gradient(kind, rows, backend):
    logits, teacher, target = rows
    soft, hard, same = of_parts(logits, teacher, target, kind, 0.3, 1.0, PLAIN, True, gradient=False)
    exact = rows_reference(logits.double(), teacher.double(), target, WEIGHTS, False, kind, 0.3, 1.0, -100, *PLAIN)
    close((soft, hard, None), (*exact[:2], 0))
    assert torch.equal(same, logits)


def of_topk_parts(logits, ids, logprobs, target, kind, rest, temperature, transforms, hard):
    mode = 0 if not hard else 1 if temperature == 1.0 else 2
    pieces = list(zip(cut(logits), labels_of(target), strict=True))
    starts = [sum(SIZES[:i]) for i in range(len(SIZES))]
    said = torch.stack([
        module.topk_statistics(z, ids, logprobs, own, torch.float32, rest, mode, first, V, temperature, *transforms)
        for (z, own), first in zip(pieces, starts, strict=True)
    ])  # fmt: skip
    factor, losses = logits.new_full((), 0.5, dtype=torch.float32), []
    for (z, own), first in zip(pieces, starts, strict=True):
        soft, place = numbers(logits), numbers(logits) if hard else None
        given = said, soft, place, factor, WEIGHTS, True, kind, rest, mode, first, V, 0.3, temperature, *transforms
        module.topk_gradients(z, ids, logprobs, own, *given)
        losses.append((soft, place))
    for soft, place in losses[1:]:  # also where there are no classes
        torch.testing.assert_close(soft, losses[0][0], rtol=0, atol=0, equal_nan=True)
        if hard:
            torch.testing.assert_close(place, losses[0][1], rtol=0, atol=0, equal_nan=True)
    return *losses[0], torch.cat([z for z, _ in pieces], 1)


@pytest.mark.parametrize(
    ("rest", "kind", "temperature", "transforms", "hard", "dtype"),
    [
        ("tail", "kl", 1.0, PLAIN, True, torch.float32), ("tail", "jsd", 2.0, CAPPED, True, torch.bfloat16),
        ("drop", "reverse", 1.0, PLAIN, False, torch.float32), ("renormalize", "tvd", 1.0, PLAIN, False, torch.float32),
        ("renormalize", "kl", 2.0, CAPPED, True, torch.float32),
    ],
)  # fmt: skip
def test_parts_of_given_classes(rest, kind, temperature, transforms, hard, dtype, rows, backend):
    logits, teacher, target = rows
    logits = logits.to(dtype)
    logprobs, ids = teacher.log_softmax(-1).topk(K)
    logprobs[0, -1], ids[0, -1] = -torch.inf, ids[0, 0]
    ids[2, 1] = target[2]  # the only class of a device, which is the target as well
    assert ids.unique(dim=-1).shape == ids.shape
    found = of_topk_parts(logits, ids, logprobs, target, kind, rest, temperature, transforms[:2], hard)
    weights = WEIGHTS if hard else (WEIGHTS[0], 0.0)
    exact = logits.double(), ids, logprobs.double(), target, weights, True
    close(found, topk_rows_reference(*exact, kind, rest, 0.3, temperature, -100, *transforms[:2]))


def test_a_target_of_no_part_is_loud(rows, backend):
    """Its row alone, on every device."""
    logits, teacher, target = rows
    target[1] = V
    assert all(own[1] == OUTSIDE and own[3] == IGNORED for own in labels_of(target))
    logprobs, ids = teacher.log_softmax(-1).topk(K)
    for _, hard, dz in (
        of_parts(logits, teacher, target, "jsd", 0.3, 1.0, PLAIN, True),
        of_topk_parts(logits, ids, logprobs, target, "kl", "tail", 1.0, PLAIN[:2], True),
    ):
        assert hard.isnan().tolist() == dz.isnan().any(1).tolist() == [i == 1 for i in range(M)]


def test_an_id_of_no_part_is_loud_with_the_kernels(rows):
    logits, teacher, target = rows
    logprobs, ids = teacher.log_softmax(-1).topk(K)
    ids[1, 2] = V
    with use_backend("triton"):
        soft, _, dz = of_topk_parts(logits, ids, logprobs, target, "kl", "tail", 1.0, PLAIN[:2], False)
    assert soft.isnan().tolist() == dz.isnan().any(1).tolist() == [i == 1 for i in range(M)]
