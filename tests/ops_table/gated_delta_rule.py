"""The row for the gated delta rule."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import tigon
from ops_table.chunked_scan import run_by_document, run_chunks
from ops_table.row import Bad, Case, Op, Replaced, randn, sample
from tigon.ops.gated_delta_rule import gated_delta_rule_reference


def _public(q, k, v, g, beta, initial_state=None, offsets=None, **options):
    """initial_state by position, so that it has a gradient."""
    return tigon.gated_delta_rule(q, k, v, g, beta, initial_state=initial_state, offsets=offsets, **options)


def _reference(q, k, v, g, beta, initial_state=None, offsets=None, **options):
    return gated_delta_rule_reference(q, k, v, g, beta, initial_state=initial_state, offsets=offsets, **options)


def _make(shape, dtype, generator, G=1, H=2, K=16, V=16, B=1, lengths=None, state=False):
    """shape is (tokens in the first document or in each sequence,). lengths: further documents."""
    T = shape[0] + sum(lengths or ())
    q, k = (randn((B, T, G, K), dtype, generator) for _ in range(2))
    k = F.normalize(k.float(), dim=-1).to(dtype)  # longer keys make the state grow without bound
    v = randn((B, T, H, V), dtype, generator)
    g, beta = (randn((B, T, H), torch.float32, generator) for _ in range(2))
    offsets = None if lengths is None else torch.tensor([0, shape[0], *lengths]).cumsum(0).int()
    documents = B if offsets is None else len(offsets) - 1
    initial = randn((documents, H, K, V), torch.float32, generator) if state else None
    return q, k, v, F.logsigmoid(g + 2), beta.sigmoid().to(dtype), initial, offsets


def _eager(q, k, v, g, beta, initial_state=None, offsets=None, scale=None, normalize=False, return_state=False):
    """By chunks as in transformers, with products in q's dtype, as attention in eager mode has them.

    transformers itself computes in fp32: test_gated_delta_rule.py compares with its functions.
    """
    wide, narrow = torch.promote_types(q.dtype, torch.float32), q.dtype
    if offsets is not None:
        o, S = run_by_document(
            lambda *own: _eager(*own, None, scale, normalize, True), (q, k, v, g, beta), offsets, initial_state
        )
        return (o, S) if return_state else o
    if normalize:
        q, k = ((t.to(wide) * (t.to(wide).square().sum(-1, keepdim=True) + 1e-6).rsqrt()) for t in (q, k))
    q, k = (t.to(narrow).repeat_interleave(v.shape[2] // t.shape[2], 2).transpose(1, 2) for t in (q, k))
    v, g, beta = v.transpose(1, 2), g.transpose(1, 2).to(wide), beta.transpose(1, 2).to(wide)
    o, S = run_chunks(q, k, v, g, beta, initial_state)
    o = (o * (q.shape[-1] ** -0.5 if scale is None else scale)).transpose(1, 2).contiguous()
    return (o, S) if return_state else o


def _bad(**changes):
    """Inputs of which some are replaced: q, k (1, 5, 2, 8), v (1, 5, 4, 6)."""
    q, v, g = torch.ones(1, 5, 2, 8), torch.ones(1, 5, 4, 6), torch.zeros(1, 5, 4)
    given = {"q": q, "k": q, "v": v, "g": g, "beta": g, "initial_state": None, "offsets": None} | changes
    return lambda: tuple(given.values())


RIGHT = torch.tensor([0, 3, 5])

GATED_DELTA_RULE = Op(
    name="gated_delta_rule",
    public=_public,
    reference=_reference,
    eager=_eager,
    make=_make,
    cases=(
        Case("chunks and a state", (18,), {"normalize": True, "return_state": True}, {"state": True}, draws=2),
        Case("documents", (67,), {"scale": 0.3}, {"lengths": (0, 5), "K": 24, "V": 40, "H": 1}),
        Case("sequences", (5,), {"normalize": True}, {"B": 2, "H": 1}, draws=4),
    ),
    empty=((0,),),
    bad=(
        Bad(_bad(q=torch.ones(1, 5, 16)), r"gated_delta_rule: q must be \(B, T, G, K\) with K from 1 to 256, got \(1"),
        Bad(_bad(k=torch.ones(1, 5, 2, 6)), r"k must have q's shape \(1, 5, 2, 8\), got \(1, 5, 2, 6\)\."),
        Bad(
            _bad(v=torch.ones(1, 5, 3, 6)), r"v must be \(B, T, H, V\) beside q .*, H a multiple of G .*, got \(1, 5, 3"
        ),
        Bad(_bad(v=torch.ones(1, 5, 4, 6).half()), r"v must have q's dtype torch.float32, got torch.float16\."),
        Bad(_bad(g=torch.ones(1, 5, 4, 8)), r"g must be \(1, 5, 4\), a number per head, got \(1, 5, 4, 8\)\."),
        Bad(_bad(beta=torch.ones(1, 4, 4)), r"beta must be \(1, 5, 4\), a number per head, got \(1, 4, 4\)\."),
        Bad(_bad(beta=torch.ones(1, 5, 4).int()), r"beta must be floats on \S+, got torch.int32 on "),
        Bad(
            _bad(initial_state=torch.ones(2, 4, 8, 6)),
            r"initial_state must be \(1, 4, 8, 6\), a state of each",
        ),
        Bad(_bad(initial_state=torch.ones(1, 4, 8, 6), offsets=RIGHT), r"initial_state must be \(2, 4, 8, 6\), .*got"),
        Bad(_bad(), r"scale must be positive, got 0.0\.", {"scale": 0.0}),
        Bad(
            _bad(offsets=[0, 5]), r"offsets must be a tensor on .*, got list: a copy from the host in each layer would"
        ),
        Bad(_bad(offsets=RIGHT.float()), r"offsets must be \(B \+ 1,\) int32 or int64, .* got \(3,\) torch.float32\."),
        Bad(_bad(offsets=RIGHT[1:]), r"offsets must ascend from 0 to the tokens of q, 5, got \[3, 5\]\.", looks=True),
        Bad(_bad(offsets=torch.tensor([0, 4, 3, 5])), r"offsets must ascend .*, got \[0, 4, 3, 5\]\.", looks=True),
    ),
    needed=(2,),
    launches=("delta_chunks", "gated_delta_rule_fwd", "gated_delta_rule_bwd"),
    models=(
        Case(
            "Qwen3-Next, narrow",
            (4096,),
            {"normalize": True},
            {"G": 16, "H": 32, "K": 64, "V": 64, "lengths": (4096,)},
        ),
        Case("Qwen3-Next", (8192,), {"normalize": True}, {"G": 16, "H": 32, "K": 128, "V": 128}),
    ),
    # g, beta and the rows' factors are read a number at a time.
    wide_loads=False,
    spills=8,  # an address, in the kernel for dq
    dtensor="refused",
    replaces=(
        Replaced(
            "gated_delta_rule(q, k, v, g, beta)",
            "o",
            {
                "q": sample(2, 7, 1, 8),
                "k": F.normalize(sample(2, 7, 1, 8) + 1, dim=-1),
                "v": sample(2, 7, 2, 6),
                "g": -sample(2, 7, 2).abs(),
                "beta": sample(2, 2, 7).sigmoid().transpose(1, 2),
            },
        ),
    ),
)
