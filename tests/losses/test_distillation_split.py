"""Rows of distillation cut into parts, as devices hold them: together they say, and give, what the whole row does."""

from __future__ import annotations

import pytest
import torch

from tigon import use_backend
from tigon.losses import TopK
from tigon.losses.distillation import heads, statistics, topk
from tigon.losses.distillation.formula import Formula, Transform, Weights
from tigon.losses.distillation.rows import Rows
from tigon.ops.shard_statistics import IGNORED, OUTSIDE, local_labels

# Beyond all columns that a kernel reads at a time, one column, none, and a block that is not full.
SIZES = (2100, 1, 0, 62)
V, M, K = sum(SIZES), 4, 5
PLAIN, CAPPED = (Transform(), Transform()), (Transform(5.0, 0.7), Transform(6.0, 0.9))


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


def formula_of(kind, temperature, transforms, hard, rest="", gradient=True, ignore_index=-100):
    weights = Weights(0.6, 0.4 if hard else 0.0)
    return Formula(kind, rest, 0.3, temperature, weights, ignore_index, *transforms, gradient)


def rows_of(logits, labels, hard, factor=0.5):
    """Each device's rows, with places for their results."""
    scale = None if factor is None else logits.new_full((), factor, dtype=torch.float32)
    return Rows(logits, labels, numbers(logits), numbers(logits) if hard else None, scale)


def exact_of(logits, target, hard):
    """The whole rows in fp64, to be computed in plain PyTorch."""
    wide = logits.double()
    return Rows(wide.clone(), target, wide[:, 0].clone(), wide[:, 0].clone() if hard else None, None)


def of_parts(logits, teacher, target, formula):
    """Soft and hard losses, and the logits that became gradients, as `heads.write_rows` goes about it."""
    pieces = [
        (rows_of(z, own, formula.hard), t)
        for z, t, own in zip(cut(logits), cut(teacher), labels_of(target), strict=True)
    ]
    said = torch.stack([statistics.compute_statistics(*piece, formula) for piece in pieces])
    means, merged = None, None
    for rows, _ in (pieces[0], pieces[2]):  # one that has classes, and one that has none
        merged = statistics.merge(said, rows, formula)
    if formula.kind not in ("cosine", "kl") or not formula.gradient:
        means = torch.stack([heads.write_values(*piece, merged, formula) for piece in pieces])
        means = means if formula.kind != "kl" else None
    for piece in pieces if formula.gradient else ():
        heads.write_gradients(*piece, merged, means, formula)
    softs = torch.stack([rows.soft for rows, _ in pieces]).sum(0)
    soft = 1 - merged[:, statistics.COSINE.value] if formula.kind == "cosine" else softs
    return torch.where(target == -100, 0.0, soft), pieces[2][0].hard, torch.cat([rows.logits for rows, _ in pieces], 1)


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
    formula, exact = formula_of(kind, temperature, transforms, hard), exact_of(logits, target, hard)
    with use_backend("torch"):
        heads.write_rows(exact, teacher.double(), formula, None)
    found = of_parts(logits, teacher, target, formula)
    close(found, (exact.soft, exact.hard, exact.logits))
    assert (found[2][3] == 0).all()


@pytest.mark.parametrize("kind", ["kl", "jsd"])
def test_without_a_gradient(kind, rows, backend):
    logits, teacher, target = rows
    formula, exact = formula_of(kind, 1.0, PLAIN, True, gradient=False), exact_of(logits, target, True)
    with use_backend("torch"):
        heads.write_rows(exact, teacher.double(), formula, None)
    soft, hard, same = of_parts(logits, teacher, target, formula)
    close((soft, hard, None), (exact.soft, exact.hard, 0))
    assert torch.equal(same, logits)


def of_topk_parts(logits, teacher, target, formula):
    """As `topk.write_rows` goes about it."""
    starts = [sum(SIZES[:i]) for i in range(len(SIZES))]
    shards = [(first, V) for first in starts]
    pieces = [(rows_of(z, own, formula.hard), teacher) for z, own in zip(cut(logits), labels_of(target), strict=True)]
    said = torch.stack([
        topk.compute_statistics(*piece, formula, where) for piece, where in zip(pieces, shards, strict=True)
    ])  # fmt: skip
    for piece, where in zip(pieces, shards, strict=True):
        topk.write_merged(*piece, said, formula, where)
    first, *others = (rows for rows, _ in pieces)
    for rows in others:  # also where there are no classes
        torch.testing.assert_close(rows.soft, first.soft, rtol=0, atol=0, equal_nan=True)
        if formula.hard:
            torch.testing.assert_close(rows.hard, first.hard, rtol=0, atol=0, equal_nan=True)
    return first.soft, first.hard, torch.cat([rows.logits for rows, _ in pieces], 1)


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
    formula = formula_of(kind, temperature, (transforms[0], Transform()), hard, rest)
    exact = exact_of(logits, target, hard)
    with use_backend("torch"):
        topk.write_rows(exact, TopK(ids, logprobs.double()), formula, None)
    found = of_topk_parts(logits, TopK(ids, logprobs), target, formula)
    close(found, (exact.soft, exact.hard, exact.logits))


def test_a_target_of_no_part_is_loud(rows, backend):
    """Its row alone, on every device."""
    logits, teacher, target = rows
    target[1] = V
    assert all(own[1] == OUTSIDE and own[3] == IGNORED for own in labels_of(target))
    logprobs, ids = teacher.log_softmax(-1).topk(K)
    for _, hard, dz in (
        of_parts(logits, teacher, target, formula_of("jsd", 1.0, PLAIN, True)),
        of_topk_parts(logits, TopK(ids, logprobs), target, formula_of("kl", 1.0, PLAIN, True, "tail")),
    ):
        assert hard.isnan().tolist() == dz.isnan().any(1).tolist() == [i == 1 for i in range(M)]


def test_an_id_of_no_part_is_loud_with_the_kernels(rows):
    logits, teacher, target = rows
    logprobs, ids = teacher.log_softmax(-1).topk(K)
    ids[1, 2] = V
    with use_backend("triton"):
        soft, _, dz = of_topk_parts(logits, TopK(ids, logprobs), target, formula_of("kl", 1.0, PLAIN, False, "tail"))
    assert soft.isnan().tolist() == dz.isnan().any(1).tolist() == [i == 1 for i in range(M)]
