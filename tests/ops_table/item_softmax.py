"""The row for the softmax over all items."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ops_table.row import Bad, Case, Op, Replaced, randn, sample
from tigon.retrieve.training.over_items import item_softmax, item_softmax_reference


def _make(shape, dtype, generator, bias=False):
    """shape is (..., D, N). Every fourth query is ignored, from the second on."""
    *rows, D, N = shape
    query, items = randn((*rows, D), dtype, generator), randn((N, D), dtype, generator)
    target = torch.randint(0, N, rows, generator=generator)
    target = torch.where((torch.arange(target.numel()) % 4 == 1).view(rows), -100, target)
    return query, items, target, torch.randn(N, generator=generator) if bias else None


def _eager(query, items, target, bias=None, *, scale=1.0, ignore_index=-100, reduction="mean"):
    z = query @ items.mT
    z = z.to(torch.promote_types(z.dtype, torch.float32)) * scale
    z = z if bias is None else z + bias
    options = {"ignore_index": ignore_index, "reduction": reduction}
    if reduction == "mean":
        count = (target != ignore_index).sum().clamp(min=1)
        return F.cross_entropy(z.flatten(0, -2), target.flatten(), ignore_index=ignore_index, reduction="sum") / count
    loss = F.cross_entropy(z.flatten(0, -2), target.flatten(), **options)
    return loss.view(target.shape) if reduction == "none" else loss


def _bad(**replaced):
    made = {"query": torch.ones(3, 4), "items": torch.ones(7, 4), "target": torch.zeros(3, dtype=torch.long)}
    return tuple((made | {"bias": None} | replaced).values())


ITEM_SOFTMAX = Op(
    name="item_softmax",
    public=item_softmax,
    reference=item_softmax_reference,
    eager=_eager,
    make=_make,
    cases=(
        Case("masked", (7, 24, 100), {"scale": 0.5}, draws=8),
        Case("least", (2, 1, 2), draws=256),
        Case("beyond one tile of queries", (2, 70, 16, 300), {"scale": 0.5}),
        Case("one loss a query, bias", (3, 5, 32, 140), {"reduction": "none", "scale": 0.4}, {"bias": True}, draws=4),
        Case("summed", (9, 40, 70), {"reduction": "sum", "scale": 0.3}, draws=8),
        Case("wider than the kernels", (9, 260, 50), {"scale": 0.1}, {"bias": True}, draws=8),
    ),
    empty=((0, 8, 12),),
    bad=(
        Bad(_bad, r"item_softmax: reduction must be one of .*got 'avg'", {"reduction": "avg"}),
        Bad(_bad, r"item_softmax: scale must be positive, got 0.0", {"scale": 0.0}),
        Bad(lambda: _bad(items=torch.ones(7, 5)), r"item_softmax: items must be \(N, 4\).*got \(7, 5\) torch.float32"),
        Bad(lambda: _bad(items=torch.ones(7, 4).half()), r"items must have query's dtype torch.float32, got .*float16"),
        Bad(lambda: _bad(bias=torch.ones(6)), r"item_softmax: bias must be \(7,\) floats .*, got \(6,\)"),
        Bad(
            lambda: _bad(target=torch.zeros(4, dtype=torch.long)),
            r"item_softmax: target must have shape \(3,\).*got \(4,\)",
        ),
        Bad(
            lambda: _bad(target=torch.tensor([0, 9, 1])),
            r"item_softmax: target must lie in \[0, 7\) or be ignore_index=-100, got 9",
            {},
            True,
        ),
    ),
    launches=("item_softmax_fwd", "item_softmax_bwd", "linear_cross_entropy_fwd"),
    models=(
        Case("Gowalla", (256, 64, 40981), {"scale": 10.0}),
        Case("a million items", (8192, 128, 1000000)),
        Case("odd", (2048, 96, 100003), {"reduction": "none"}, {"bias": True}),
        Case("widest", (4096, 256, 200000), {"reduction": "none"}, {"bias": True}),
    ),
    fixed=(3,),
    # Statistics, targets and biases are read a number at a time.
    wide_loads=False,
    # For fp32, which takes three products.
    spills=32,
    dtensor="refused",
    products=True,
    large=(Case("queries", (3000, 64, 40), {"reduction": "none", "scale": 0.5}),),
    replaces=(
        Replaced(
            "item_softmax(query, items, target, bias, scale=scale)",
            "loss",
            {
                "query": sample(5, 8),
                "items": sample(30, 8),
                "target": torch.arange(5),
                "bias": sample(30),
                "scale": 0.5,
            },
        ),
    ),
)
