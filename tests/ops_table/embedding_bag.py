"""The embedding-bag row."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ops_table.row import Bad, Case, Op, Replaced, randn, sample
from tigon.ops.embedding_bag import embedding_bag, embedding_bag_reference

FIELDS = 3


def _make_embedding_bag(shape, dtype, generator, ragged=False, weighted=True, fields=False, frequent=False):
    """shape is (B, L, V, D). Inputs with a gradient come first: the weight, and a factor for each value."""
    B, L, V, D = shape
    # On the host, even when tensors are made on the meta device: the number of values depends on the lengths.
    here = {"generator": generator, "device": "cpu"}
    first = torch.tensor([0, V // 2, V // 2 + 1, V], device="cpu") if fields else None
    bags = B * FIELDS if fields else B
    if ragged:
        lengths = torch.randint(0, L + 1, (bags,), **here)
        offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        size: tuple[int, ...] = (int(offsets[-1]),)
        field = torch.arange(bags, device="cpu").repeat_interleave(lengths) % FIELDS
    else:
        offsets, size = None, (B, FIELDS, L) if fields else (B, L)
        field = torch.arange(FIELDS, device="cpu")[:, None]
    most = torch.tensor(V, device="cpu") if first is None else first.diff()[field]
    values = torch.minimum((torch.rand(size, **here) * most).long(), most - 1)
    if frequent:
        values = torch.where(torch.rand(size, **here) < 0.6, 0, values)
    factors = randn(size, dtype, generator) if weighted else None
    return randn((V, D), dtype, generator), factors, values, offsets, first


def _call(fn):
    def called(weight, factors, values, offsets, first, **options):
        options = {"mode": "sum", "include_last_offset": True} | options
        return fn(values, weight, offsets, per_sample_weights=factors, field_offsets=first, **options)

    return called


def _eager(weight, factors, values, offsets, first, mode="sum", padding_idx=None):
    """User code: torch's function, called for each field's table separately."""
    if not weight.shape[1] or not values.numel():
        return _call(embedding_bag_reference)(weight, factors, values, offsets, first, mode=mode)
    options = {"mode": mode, "padding_idx": padding_idx}
    narrow = weight.dtype == torch.bfloat16 and weight.is_cuda
    if (weight.dtype == torch.float32 or narrow) and first is None and offsets is None and factors is not None:
        # Not torch's function, which has no second derivative, needed by a test, and on CUDA no bf16 gradient.
        return (F.embedding(values, weight, padding_idx) * factors[..., None]).sum(-2)
    if first is None:
        ragged = {} if offsets is None else {"include_last_offset": True}
        return F.embedding_bag(values, weight, offsets, per_sample_weights=factors, **ragged, **options)
    if offsets is not None:
        return _call(embedding_bag_reference)(weight, factors, values, offsets, first, **options)
    tables = [weight[a:b] for a, b in zip(first[:-1].tolist(), first[1:].tolist(), strict=True)]
    each = [
        F.embedding_bag(values[:, f], t, per_sample_weights=None if factors is None else factors[:, f], **options)
        for f, t in enumerate(tables)
    ]
    return torch.stack(each, 1)


def _bad(**given):
    arguments = {"weight": torch.ones(5, 4), "factors": None, "values": torch.zeros(2, 3).long(), "offsets": None}
    return lambda: tuple((arguments | {"first": None} | given).values())


FLAT = torch.zeros(6).long()
_BAGS = {
    "weight": sample(5, 8),
    "values": torch.tensor([0, 4, 2]),
    "offsets": torch.tensor([0, 2, 2]),
    "mode": "mean",
    "padding_idx": 4,
}
EMBEDDING_BAG = Op(
    name="embedding_bag",
    public=_call(embedding_bag),
    reference=_call(embedding_bag_reference),
    eager=_eager,
    make=_make_embedding_bag,
    cases=(
        Case("fixed, masked", (5, 7, 11, 100)),
        Case("least", (1, 1, 1, 1), draws=64),
        Case("beyond one block", (3, 3, 5, 1100), {"mode": "mean"}, {"weighted": False}),
        Case("long runs", (40, 9, 5, 24), {"padding_idx": 2}, {"frequent": True}, draws=4),
        Case("ragged mean", (70, 6, 9, 24), {"mode": "mean", "padding_idx": -3}, {"ragged": True, "weighted": False}),
        Case("ragged fields", (20, 5, 12, 16), {}, {"ragged": True, "fields": True}),
        Case("an id a field", (40, 1, 12, 16), {}, {"fields": True, "weighted": False}, draws=4),
    ),
    empty=((0, 3, 5, 8), (3, 0, 5, 8), (3, 4, 5, 0)),
    bad=(
        Bad(_bad(weight=torch.ones(5)), r"embedding_bag: weight must be \(V, D\) floats, got \(5,\) torch.float32"),
        Bad(_bad(values=torch.ones(2, 3)), r"embedding_bag: values must hold integer ids, got torch.float32"),
        Bad(_bad(values=FLAT), r"embedding_bag: values must be \(B, L\), or \(M,\) with offsets, got \(6,\)"),
        Bad(_bad(offsets=FLAT), r"embedding_bag: values must be \(M,\) where offsets are given, got \(2, 3\)"),
        Bad(_bad(values=FLAT, offsets=FLAT.int()), r"embedding_bag: offsets must be 1-d int64.*int32"),
        Bad(_bad(first=torch.tensor([0, 2, 5])), r"values must be \(B, 2\) or \(B, 2, L\).*got \(2, 3\)"),
        Bad(_bad(first=torch.tensor([0])), r"field_offsets must have one entry more than there are fields, got"),
        Bad(
            _bad(values=FLAT, offsets=torch.arange(6), first=torch.tensor([0, 2, 5])),
            r"offsets must have B · 2 \+ 1 entries, 2 bags per sample, got 6",
        ),
        Bad(_bad(), r"embedding_bag: mode must be 'sum' or 'mean', got 'max'", {"mode": "max"}),
        Bad(_bad(), r"embedding_bag: grad must be 'dense' or 'rows', got 'sparse'", {"grad": "sparse"}),
        Bad(
            _bad(factors=torch.ones(2, 3)), r"mode must be 'sum' with per_sample_weights, got 'mean'", {"mode": "mean"}
        ),
        Bad(_bad(factors=torch.ones(3)), r"per_sample_weights must be floats with values' shape \(2, 3\), got"),
        Bad(_bad(), r"embedding_bag: padding_idx must lie in \[-5, 5\) or be None, got 5", {"padding_idx": 5}),
        Bad(
            _bad(values=torch.tensor([[0, 5]])), r"embedding_bag: values must lie in \[0, 5\), got 5", {}, True
        ),
        Bad(
            _bad(values=torch.tensor([[0, 2]]), first=torch.tensor([0, 3, 5])),
            r"embedding_bag: values must lie in \[0, 2\), the rows of its field's table, got 2", {}, True,
        ),
        Bad(
            _bad(values=FLAT, offsets=torch.tensor([0, 4, 2, 6])), r"offsets must ascend from 0 to 6, got", {}, True
        ),
    ),
    launches=("embedding_bag_fwd", "embedding_bag_bwd", "embedding_bag_factors"),
    models=(
        Case("Criteo, weighted", (16384, 8, 1000000, 16), {}, {"ragged": False}),
        Case("40 fields", (65536 // FIELDS, 1, 1000000, 16), {}, {"fields": True, "weighted": False}),
        Case("ragged fields", (2048, 20, 1000000, 64), {"mode": "mean"}, {"ragged": True, "fields": True,
             "weighted": False}),
        Case("wide", (1024, 4, 100000, 1024), {"mode": "mean"}, {"weighted": False}),
    ),
    dtensor="refused",
    # Ids and run bounds are looked up individually; test_embedding_bag.py checks the rows.
    wide_loads=False,
    large=(Case("fixed", (1000, 300, 300, 16)), Case("several rows a program", (1000, 1, 20000, 4096))),
    replaces=(
        Replaced(
            "embedding_bag(values=values, weight=weight, offsets=offsets, mode=mode, padding_idx=padding_idx)",
            "y",
            _BAGS,
        ),
        Replaced(
            "embedding_bag(values, weight, mode='sum', field_offsets=field_offsets)",
            "y",
            {**_BAGS, "values": torch.tensor([[[0, 1], [2, 0]]]), "field_offsets": torch.tensor([0, 2, 5])},
            (1,),
        ),
    ),
)  # fmt: skip
