"""The row for Mamba-2's scan."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

import tigon
from ops_table.chunked_scan import run_by_document, run_chunks
from ops_table.row import Bad, Case, Op, Replaced, randn, sample
from tigon.ops.mamba2_scan import mamba2_scan_reference


def _public(x, dt, A, B, C, D=None, dt_bias=None, initial_state=None, offsets=None, **options):
    """By position, so that they have gradients."""
    tensors = {"D": D, "dt_bias": dt_bias, "initial_state": initial_state, "offsets": offsets}
    return tigon.mamba2_scan(x, dt, A, B, C, **tensors, **options)


def _reference(x, dt, A, B, C, D=None, dt_bias=None, initial_state=None, offsets=None, **options):
    tensors = {"D": D, "dt_bias": dt_bias, "initial_state": initial_state, "offsets": offsets}
    return mamba2_scan_reference(x, dt, A, B, C, **tensors, **options)


def _make(
    shape, dtype, generator, G=1, H=2, N=16, P=16, batch=1, lengths=None, state=False, skip=True, bias=True
):  # fmt: skip
    """shape is (tokens in the first document or in each sequence,). lengths: further documents."""
    T = shape[0] + sum(lengths or ())
    x, dt = randn((batch, T, H, P), dtype, generator), randn((batch, T, H), dtype, generator)
    B, C = (randn((batch, T, G, N), dtype, generator) for _ in range(2))
    A, D, dt_bias = -randn((H,), torch.float32, generator).exp(), *(randn((H,), dtype, generator) for _ in range(2))
    offsets = None if lengths is None else torch.tensor([0, shape[0], *lengths]).cumsum(0).int()
    documents = batch if offsets is None else len(offsets) - 1
    initial = randn((documents, H, P, N), torch.float32, generator) if state else None
    return x, dt, A, B, C, D if skip else None, dt_bias if bias else None, initial, offsets


def _eager(
    x, dt, A, B, C, D=None, dt_bias=None, initial_state=None, offsets=None, dt_softplus=False,
    dt_limit=(0.0, math.inf), return_state=False,
):  # fmt: skip
    """By chunks as in transformers, with products in x's dtype, as attention in eager mode has them.

    transformers itself computes in fp32: test_mamba2_scan.py compares with its function.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if offsets is not None:
        options = {"dt_softplus": dt_softplus, "dt_limit": dt_limit, "return_state": True}
        y, S = run_by_document(
            lambda x, dt, B, C, S: _eager(x, dt, A, B, C, D, dt_bias, S, **options), (x, dt, B, C), offsets,
            initial_state,
        )  # fmt: skip
        return (y, S) if return_state else y
    steps = dt if dt_bias is None else dt + dt_bias
    steps = (F.softplus(steps) if dt_softplus else steps).clamp(*dt_limit).to(wide)
    g, steps = (steps * A.to(wide)).transpose(1, 2), steps.transpose(1, 2)
    k, q = (t.repeat_interleave(x.shape[2] // t.shape[2], 2).transpose(1, 2) for t in (B, C))
    S = None if initial_state is None else initial_state.transpose(-1, -2)
    y, S = run_chunks(q, k, x.transpose(1, 2), g, steps, S, corrects=False)
    y = y.transpose(1, 2)
    y = (y if D is None else y + x * D.to(x.dtype).unsqueeze(-1)).contiguous()
    return (y, S.transpose(-1, -2)) if return_state else y


def _bad(**changes):
    """Inputs of which some are replaced: x (1, 5, 4, 6), B, C (1, 5, 2, 8)."""
    B, numbers = torch.ones(1, 5, 2, 8), torch.ones(4)
    given = {
        "x": torch.ones(1, 5, 4, 6), "dt": torch.ones(1, 5, 4), "A": -numbers, "B": B, "C": B, "D": numbers,
        "dt_bias": numbers, "initial_state": None, "offsets": None,
    } | changes  # fmt: skip
    return lambda: tuple(given.values())


RIGHT = torch.tensor([0, 3, 5])

MAMBA2_SCAN = Op(
    name="mamba2_scan",
    public=_public,
    reference=_reference,
    eager=_eager,
    make=_make,
    cases=(
        Case("chunks and a state", (18,), {"dt_softplus": True, "return_state": True}, {"state": True}, draws=2),
        Case(
            "documents",
            (67,),
            {"dt_softplus": True, "dt_limit": (0.1, 1.0)},
            {"lengths": (0, 5), "N": 24, "P": 40, "H": 1},
        ),
        Case("sequences, parts of a group", (5,), {}, {"batch": 2, "H": 18, "skip": False, "bias": False}),
    ),
    empty=((0,),),
    bad=(
        Bad(
            _bad(x=torch.ones(1, 5, 24)), r"mamba2_scan: x must be \(batch, T, H, P\) with P from 1 to 256, got \(1, 5"
        ),
        Bad(
            _bad(B=torch.ones(1, 5, 3, 8)),
            r"B must be \(batch, T, G, N\) beside x .*, H a multiple of G .*, got \(1, 5",
        ),
        Bad(_bad(C=torch.ones(1, 5, 2, 6)), r"C must have B's shape \(1, 5, 2, 8\), got \(1, 5, 2, 6\)\."),
        Bad(_bad(C=torch.ones(1, 5, 2, 8).half()), r"C must have x's dtype torch.float32, got torch.float16\."),
        Bad(_bad(dt=torch.ones(1, 5, 4, 6)), r"dt must be \(1, 5, 4\), a step per head, got \(1, 5, 4, 6\)\."),
        Bad(_bad(A=torch.ones(4, 8)), r"A must be \(4,\), a number per head, got \(4, 8\)\."),
        Bad(_bad(D=torch.ones(4, 6)), r"D must be \(4,\), a number per head, got \(4, 6\)\."),
        Bad(_bad(dt_bias=torch.ones(4).int()), r"dt_bias must be floats on \S+, got torch.int32 on "),
        Bad(
            _bad(initial_state=torch.ones(2, 4, 6, 8)),
            r"initial_state must be \(1, 4, 6, 8\), a state of each",
        ),
        Bad(_bad(initial_state=torch.ones(1, 4, 6, 8), offsets=RIGHT), r"initial_state must be \(2, 4, 6, 8\), .*got"),
        Bad(
            _bad(), r"dt_limit must be the smallest step and the largest, got \(1.0, 0.0\)\.", {"dt_limit": (1.0, 0.0)}
        ),
        Bad(_bad(), r"dt_limit must be the smallest step and the largest, got 1.0\.", {"dt_limit": 1.0}),
        Bad(_bad(D=1.0), r"D must be a tensor, got float\."),
        Bad(_bad(offsets=RIGHT.float()), r"offsets must be \(B \+ 1,\) int32 or int64, .* got \(3,\) torch.float32\."),
        Bad(_bad(offsets=RIGHT[1:]), r"offsets must ascend from 0 to the tokens of x, 5, got \[3, 5\]\.", looks=True),
    ),
    needed=(0, 1),  # the gradient of dt_bias is a sum of dt's
    launches=("delta_chunks", "mamba2_scan_fwd", "mamba2_scan_bwd"),
    models=(
        Case("Bamba", (4096,), {"dt_softplus": True}, {"H": 128, "N": 128, "P": 64, "lengths": (4096,)}),
        Case("Falcon-H1", (4096,), {"dt_softplus": True}, {"H": 32, "N": 256, "P": 64}),
        Case("Zamba2", (4096,), {"dt_softplus": True}, {"H": 64, "G": 2, "N": 64, "P": 64}),
    ),
    # Steps, decays and the rows' factors are read a number at a time.
    wide_loads=False,
    spills=32,  # addresses, in the kernel for dC, on sm_100
    dtensor="refused",
    replaces=(
        Replaced(
            "mamba2_scan(x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=True)",
            "y",
            {
                "x": sample(2, 7, 4, 6),
                "dt": sample(2, 4, 7).transpose(1, 2),
                "A": -sample(4).abs(),
                "B": sample(2, 7, 2, 8),
                "C": sample(2, 7, 2, 8) + 1,
                "D": sample(1, 4)[0],
                "dt_bias": sample(4, 1)[:, 0],
            },
        ),
    ),
)
