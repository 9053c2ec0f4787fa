"""Choice among a few classes of a head: beside the softmax over all logits, cut to these classes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from numerics import check

import tigon
from tigon.losses import choice, choice_logits
from tigon.losses.choices import choice_reference

CHOICES = torch.tensor([17, 3, 40])


def made(generator, dtype, *rows, bias=False):
    x = torch.randn(*rows, 24, generator=generator)
    weight = torch.randn(50, 24, generator=generator) / 3
    b = torch.randn(50, generator=generator).to(dtype) if bias else None
    return x.to(dtype), weight.to(dtype), b


def labels(*rows):
    return torch.where(torch.arange(sum(rows) * 7)[: torch.Size(rows).numel()] % 4 == 1, -100, 1).view(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0}, {"scale": 0.25}, {"softcap": 3.0, "scale": 2.0}], ids=["", "cap", "scale", "both"]
)
@pytest.mark.parametrize("bias", [False, True])
def test_losses_and_gradients_are_those_of_all_logits(dtype, options, bias):
    target = labels(3, 5)

    def ours(x, weight, b):
        return choice(x, tigon.Head(weight, b, **options), CHOICES, target, reduction="none")

    def reference(x, weight, b):
        return choice_reference(x, weight, CHOICES, target, b, **options)

    check(ours, reference, lambda g: made(g, dtype, 3, 5, bias=bias), draws=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_targets(dtype):
    teacher = torch.randn(6, 3, generator=torch.Generator().manual_seed(5)).softmax(-1)

    def ours(x, weight, b):
        return choice(x, weight, CHOICES, teacher.to(x.dtype), reduction="none")

    def reference(x, weight, b):
        return choice_reference(x, weight, CHOICES, teacher.to(x.dtype), b)

    check(ours, reference, lambda g: made(g, dtype, 6), draws=8)
    x, weight, _ = made(torch.Generator().manual_seed(0), torch.float64, 6)
    hard = torch.tensor([0, 1, 2, 2, 1, 0])
    one_hot = choice(x, weight, CHOICES, F.one_hot(hard, 3).double())
    torch.testing.assert_close(one_hot, choice(x, weight, CHOICES, hard), rtol=1e-13, atol=1e-13)


def test_only_the_rows_of_the_choices_get_a_gradient():
    x, weight, bias = made(torch.Generator().manual_seed(0), torch.float64, 7, bias=True)
    weight.requires_grad_()
    bias.requires_grad_()
    choice(x, tigon.Head(weight, bias), CHOICES, torch.arange(7) % 3).backward()
    others = torch.ones(50, dtype=torch.bool).index_fill_(0, CHOICES, False)
    assert weight.grad[others].eq(0).all()
    assert bias.grad[others].eq(0).all()
    assert weight.grad[CHOICES].ne(0).all()
    z = F.linear(x, weight, bias)[:, CHOICES]
    expected = torch.autograd.grad(F.cross_entropy(z, torch.arange(7) % 3), (weight, bias))
    torch.testing.assert_close((weight.grad, bias.grad), expected, rtol=1e-12, atol=1e-14)


def test_reductions_and_weights():
    x, weight, _ = made(torch.Generator().manual_seed(0), torch.float64, 4)
    target = torch.tensor([0, -100, 2, 1])
    rows = choice(x, weight, CHOICES, target, reduction="none")
    assert rows[1] == 0
    torch.testing.assert_close(choice(x, weight, CHOICES, target), rows.sum() / 3)
    weights = torch.tensor([1.0, torch.nan, 0.5, 2.0])
    weighed = choice(x, weight, CHOICES, target, weights=weights, reduction="sum")
    torch.testing.assert_close(weighed, rows[0] + 0.5 * rows[2] + 2 * rows[3])
    assert choice(x, weight, CHOICES, torch.full((4,), -100)) == 0
    assert choice(x[:0], weight, CHOICES, target[:0]) == 0


def test_the_products_stay_wide_under_autocast():
    x, weight, _ = made(torch.Generator().manual_seed(0), torch.float32, 4)
    plain = choice_logits(x, weight, CHOICES)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(choice_logits(x, weight, CHOICES), plain)
        mixed = choice_logits(x.bfloat16(), weight, CHOICES)
    assert mixed.dtype == torch.float32


def test_it_compiles():
    x, weight, _ = made(torch.Generator().manual_seed(0), torch.float32, 4)
    target = torch.tensor([0, -100, 2, 1])
    compiled = torch.compile(choice, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight, CHOICES, target), choice(x, weight, CHOICES, target))


X, W, T = torch.ones(2, 4), torch.ones(9, 4), torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: choice(X, W, [1, 9], T), r"choice: choices must lie in \[0, 9\), the head's classes, got 9\."),
        (lambda: choice(X, W, [1, 1], T), r"choice: choices must hold each class once, got \[1, 1\]\."),
        (lambda: choice(X, W, [], T), r"choice: choices must be \(K,\) integer .* at least one, got \(0,\)"),
        (lambda: choice(X, W, torch.ones(2), T), r"choice: choices must be \(K,\) integer .* \(2,\) torch.float32"),
        (lambda: choice(X, W, [1, 2], T + 2), r"choice: target must lie in \[0, 2\) or be ignore_index=-100, got 2"),
        (lambda: choice(X, W, [1, 2], T[:1]), r"choice: target must have shape \(2,\), one class per row, got \(1,\)"),
        (lambda: choice(X, W, [1, 2], X), r"choice: target of floats must be \(2, 2\) on cpu, .* got \(2, 4\) on cpu"),
        (lambda: choice(X, W, [1, 2], T, weights=X), r"choice: weights must be \(2,\) on cpu, one per row, got"),
        (lambda: choice(X, W, [1, 2], T, reduction="avg"), r"choice: reduction must be one of .*got 'avg'"),
        (lambda: choice(X, tigon.Head(W, group=object()), [1], T), r"choice: head.group must be None"),
        (lambda: choice(X, W.double(), [1], T), r"choice: weight must have x's dtype torch.float32, got torch.float64"),
        (lambda: choice_logits(X, 3, [1]), r"choice_logits: head must be a weight \(V, H\), .*got int"),
    ],
)  # fmt: skip
def test_what_does_not_fit_gets_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
