"""The row for attention over shared prefixes."""

from __future__ import annotations

import torch

import tigon
from ops_table.row import Bad, Case, Op, Replaced, randn, sample
from tigon.ops.prefix_attention import prefix_attention_reference

# For a second and a third request.
PREFIXES, SUFFIXES = (0, 5), ((3, 1, 40), (2, 4), (1,))


def _make(shape, dtype, generator, prefixes=PREFIXES, suffixes=SUFFIXES):
    """shape is (tokens in the first prefix, H, G, D)."""
    P, H, G, D = shape
    layout = tigon.PrefixLayout([P, *prefixes], [list(s) for s in suffixes])
    return *(randn((layout.rows, heads, D), dtype, generator) for heads in (H, G, G)), layout


def _eager(q, k, v, layout, across="none", scale=None, softcap=None, window=None):
    """Attention as in transformers, with a dense mask over all rows."""
    n = torch.arange(len(q), device=q.device)
    cu = [*layout.cu_prefix.tolist(), *(layout.cu_suffix[1:] + layout.prefix_rows).tolist()]
    sequence = torch.bucketize(n, torch.tensor(cu[1:], device=q.device), right=True)
    request = torch.cat((torch.arange(layout.requests, device=q.device), layout.request))[sequence]
    suffix = n >= layout.prefix_rows
    same = sequence[:, None] == sequence
    others = ~suffix | ~same if across == "suffixes" else ~suffix
    seen = (same & (n <= n[:, None])) | (suffix[:, None] & others)
    seen &= request[:, None] == request
    if window is not None:
        seen &= layout.positions > layout.positions[:, None] - window
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(len(q) // len(k), 0) for t in (k, v))
    z = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z.masked_fill(~seen, -torch.inf)
    p = torch.softmax(z, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return (p @ v).transpose(0, 1)


def _model(why, prefix, suffixes, requests, heads, **options):
    """Equal requests: every prefix has shape[0] tokens, including the first."""
    made = {"prefixes": (prefix,) * (requests - 1), "suffixes": (suffixes,) * requests}
    return Case(why, (prefix, *heads), options, made)


PREFIX_ATTENTION = Op(
    name="prefix_attention",
    public=tigon.prefix_attention,
    reference=prefix_attention_reference,
    eager=_eager,
    make=_make,
    cases=(
        Case("ragged", (37, 4, 2, 16), {"scale": 0.3}),
        Case("suffixes of one token", (70, 2, 2, 24), {}, {"prefixes": (0, 3), "suffixes": ((1,) * 20, (1,), (1, 1))}),
        Case("beyond one block", (140, 3, 1, 16), {"softcap": 2.0}, {"prefixes": (), "suffixes": ((150, 30),)}),
        Case("window", (90, 2, 1, 16), {"window": 75}, {"prefixes": (), "suffixes": ((80, 1, 3),)}),
        Case("across", (37, 2, 1, 16), {"across": "suffixes"}),
        Case(
            "one token each across",
            (33, 2, 2, 16),
            {"across": "suffixes"},
            {"prefixes": (3,), "suffixes": ((1,) * 70, (1,) * 3)},
        ),
        Case("window across", (40, 2, 1, 16), {"across": "suffixes", "window": 20}),
    ),
    empty=(),
    bad=(
        Bad(lambda: _swapped(layout=[3]), r"prefix_attention: layout must be a tigon.PrefixLayout, got list\."),
        Bad(lambda: _swapped(rows=6), r"prefix_attention: layout must count the rows of q, 6, got one of 7 rows\."),
        Bad(lambda: _swapped(), r"across must be 'none' or 'suffixes', got 'all'\.", {"across": "all"}),
        Bad(lambda: _swapped(), r"scale must be positive, got 0.0\.", {"scale": 0.0}),
        Bad(lambda: _swapped(), r"softcap must be positive or None, got -1.0\.", {"softcap": -1.0}),
        Bad(lambda: _swapped(), r"window must be a positive int or None, got 0\.", {"window": 0}),
    ),
    launches=("prefix_attention_fwd", "prefix_attention_bwd"),
    models=(
        _model("a ranker of width 512", 512, (1,) * 512, 2, (8, 8, 64)),
        _model("its last layer", 512, (1,) * 512, 2, (8, 8, 64), across="suffixes"),
        _model("Qwen3-8B, completions", 4096, (512,) * 8, 2, (32, 8, 128)),
        _model("gpt-oss-20b with a softcap", 4096, (512, 1, 300), 2, (64, 8, 64), softcap=50.0, window=128),
        _model("a ranker of few candidates", 512, (1,) * 30, 2, (8, 8, 64)),
        _model("Qwen3-8B, short answers", 4096, (1, 3, 2), 2, (32, 8, 128)),
    ),
    # The rows' statistics and the tables of tiles are read a number at a time.
    wide_loads=False,
    dtensor="refused",
    products=True,
    replaces=(
        Replaced(
            "prefix_attention(q, k, v, tigon.PrefixLayout(prefix_lengths, suffix_lengths))",
            "o",
            {
                "q": sample(12, 4, 8),
                "k": sample(12, 2, 8),
                "v": sample(1, 12, 2, 8)[0],
                "prefix_lengths": [3, 2],
                "suffix_lengths": [[1, 2], [3, 1]],
            },
        ),
    ),
)


def _swapped(rows=7, layout=None):
    q, k, v = (torch.ones(rows, heads, 8) for heads in (4, 2, 2))
    return q, k, v, tigon.PrefixLayout([3], [[1, 3]]) if layout is None else layout
