"""The row for attention of packed documents."""

from __future__ import annotations

import torch

import tigon
from ops_table.row import Bad, Case, Op, Replaced, randn, sample
from tigon.ops.varlen_attention import varlen_attention_reference


def _public(q, k, v, offsets, sinks=None, **options):
    """sinks by position, so that they have a gradient."""
    return tigon.varlen_attention(q, k, v, offsets, sinks=sinks, **options)


def _reference(q, k, v, offsets, sinks=None, **options):
    return varlen_attention_reference(q, k, v, offsets, sinks=sinks, **options)


def _make(shape, dtype, generator, lengths=(1, 0, 23), padding=2, sinks=False):
    """shape is (tokens in the first document, H, G, D)."""
    T, H, G, D = shape
    offsets = torch.tensor([0, T, *lengths, *[0] * padding]).cumsum(0).int()
    N = T + sum(lengths)
    tensors = (*(randn((N, heads, D), dtype, generator) for heads in (H, G, G)), offsets)
    return (*tensors, randn((H,), dtype, generator)) if sinks else tensors


def _eager(q, k, v, offsets, sinks=None, scale=None, window=None, softcap=None, causal=True):
    """Attention as in transformers, with a dense mask over all rows."""
    n = torch.arange(len(q), device=q.device)
    document = torch.bucketize(n, offsets[1:].long(), right=True)
    seen = document[:, None] == document
    if causal:
        seen &= n <= n[:, None]
    if window is not None:
        seen &= n > n[:, None] - window
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(len(q) // len(k), 0) for t in (k, v))
    z = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        z = torch.cat((z, sinks.view(-1, 1, 1).expand(*z.shape[:2], 1)), -1)
    p = torch.softmax(z, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return (p[..., : len(n)] @ v).transpose(0, 1)


def _bad(offsets, heads=None):
    sinks = None if heads is None else torch.ones(heads)
    return lambda: (*(torch.ones(7, h, 8) for h in (4, 2, 2)), offsets, sinks)


RIGHT = torch.tensor([0, 3, 7])

VARLEN_ATTENTION = Op(
    name="varlen_attention",
    public=_public,
    reference=_reference,
    eager=_eager,
    make=_make,
    cases=(
        Case("ragged", (37, 4, 2, 16), {"scale": 0.3, "softcap": 3.0}),
        Case("sinks and a window", (70, 6, 2, 24), {"window": 33}, {"lengths": (5, 3), "sinks": True}, draws=6),
        Case("beyond one block", (135, 3, 1, 16), {"softcap": 2.0}, {"lengths": (66,)}),
        Case("in both directions", (70, 2, 2, 24), {"causal": False}, {"lengths": (5, 1)}),
    ),
    empty=((0, 2, 1, 16),),
    bad=(
        Bad(_bad([0, 3, 7]), r"varlen_attention: offsets must be a tensor on .*, got list: a copy from the host"),
        Bad(_bad(torch.tensor([0.0, 7.0])), r"offsets must be \(B \+ 1,\) int32 or int64, .* got \(2,\) torch.float32"),
        Bad(_bad(RIGHT[None]), r"offsets must be \(B \+ 1,\) int32 or int64, .*, got \(1, 3\) torch.int64\."),
        Bad(_bad(RIGHT[:1]), r"offsets must be \(B \+ 1,\) int32 or int64, .*, got \(1,\) torch.int64\."),
        Bad(_bad(RIGHT[1:]), r"offsets must ascend from 0 to the rows of q, 7, got \[3, 7\]\.", looks=True),
        Bad(_bad(RIGHT[:2]), r"offsets must ascend from 0 to the rows of q, 7, got \[0, 3\]\.", looks=True),
        Bad(_bad(torch.tensor([0, 5, 3, 7])), r"offsets must ascend .*, got \[0, 5, 3, 7\]\.", looks=True),
        Bad(_bad(RIGHT, 3), r"sinks must be \(4,\) floats, a logit per head of q, got \(3,\) torch.float32\."),
        Bad(_bad(RIGHT), r"scale must be positive, got 0.0\.", {"scale": 0.0}),
        Bad(_bad(RIGHT), r"softcap must be positive or None, got -1.0\.", {"softcap": -1.0}),
        Bad(_bad(RIGHT), r"causal must be .*, got False and window 3\.", {"causal": False, "window": 3}),
        Bad(_bad(RIGHT), r"window must be a positive int or None, got 0\.", {"window": 0}),
    ),
    launches=("varlen_tiles", "varlen_attention_fwd", "varlen_attention_bwd"),
    models=(
        Case("Pythia-70M", (2048, 8, 8, 64), {}, {"lengths": (2048,)}),
        Case("Qwen3-8B", (4096, 32, 8, 128), {}, {"lengths": (4096,)}),
        Case("Qwen3-VL-4B, images", (3072, 16, 16, 64), {"causal": False}, {"lengths": (3072,) * 3}),
        Case("gpt-oss-20b", (4096, 64, 8, 64), {"window": 128}, {"sinks": True}),
    ),
    # The rows' statistics and the tables of tiles are read a number at a time.
    wide_loads=False,
    dtensor="refused",
    products=True,
    replaces=(
        Replaced(
            "varlen_attention(q, k, v, offsets)",
            "o",
            {
                "q": sample(12, 4, 8),
                "k": sample(12, 2, 8),
                "v": sample(1, 12, 2, 8)[0],
                "offsets": torch.tensor([0, 5, 5, 12]),
            },
        ),
    ),
)
