"""The embedding row."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ops_table.row import Bad, Case, Op, Replaced, randn, sample
from tigon.ops.embedding import embedding, embedding_reference


def _make_embedding(shape, dtype, generator, ids=torch.int64, frequent=False):
    """shape is (..., V, H). The weight, which has the gradient, comes first."""
    *tokens, V, H = shape
    input = torch.randint(0, V, tuple(tokens), generator=generator).to(ids)
    if frequent:  # two thirds of the tokens are equal, a sixth another
        which = torch.randint(0, 6, tuple(tokens), generator=generator)
        input = torch.where(which < 4, 1, torch.where(which == 4, V - 1, input))
    return randn((V, H), dtype, generator), input


def _eager(weight, input, **options):
    # For rows without elements, torch's own backward reads out of bounds on CUDA.
    return (F.embedding if weight.shape[1] else embedding_reference)(input, weight, **options)


def _bad(input=None, weight=None):
    return lambda: (
        torch.ones(5, 4) if weight is None else weight,
        torch.zeros(3, dtype=torch.long) if input is None else input,
    )


EMBEDDING = Op(
    name="embedding",
    public=lambda weight, input, **options: embedding(input, weight, **options),
    reference=lambda weight, input, **options: embedding_reference(input, weight, **options),
    eager=_eager,
    make=_make_embedding,
    cases=(
        Case("masked", (2, 9, 11, 100)),
        Case("least", (1, 1, 1), draws=64),
        Case("aligned", (16, 8, 128), draws=4),
        Case("beyond one block", (9, 5, 1100)),
        Case("long runs", (300, 5, 24), {"padding_idx": 2}, {"frequent": True}, draws=4),
        Case("int32, padding from the end", (40, 7, 30), {"padding_idx": -3}, {"ids": torch.int32}, draws=4),
    ),
    empty=((0, 5, 8), (3, 5, 0)),
    bad=(
        Bad(_bad(weight=torch.ones(5)), r"embedding: weight must be \(V, H\) floats, got \(5,\) torch.float32"),
        Bad(_bad(input=torch.ones(3)), r"embedding: input must hold integer ids, got torch.float32"),
        Bad(_bad(), r"embedding: padding_idx must lie in \[-5, 5\) or be None, got 5", {"padding_idx": 5}),
        Bad(_bad(input=torch.tensor([0, 5, 1])), r"embedding: input must lie in \[0, 5\), got 5", {}, True),
        Bad(_bad(input=torch.tensor([0, -1, 1])), r"embedding: input must lie in \[0, 5\), got -1", {}, True),
    ),
    launches=("embedding_fwd", "embedding_bwd"),
    models=(
        Case("Llama-3-8B", (8, 4096, 128256, 4096)),
        Case("Qwen3-1.7B", (8192, 151936, 2048)),
        Case("heads, int32", (8192, 32000, 128), {}, {"ids": torch.int32}),
    ),
    # Sorted ids and run bounds are looked up individually; test_embedding.py checks the rows.
    wide_loads=False,
    large=(Case("long runs", (1000, 300, 4096)), Case("several rows a program", (1000, 20000, 64))),
    replaces=(
        Replaced(
            "embedding(input, weight, padding_idx=padding_idx)",
            "y",
            {"input": torch.tensor([[0, 4, 2]]), "weight": sample(5, 8), "padding_idx": 2},
        ),
    ),
)
