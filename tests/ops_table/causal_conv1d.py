"""The row for the causal convolution."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import tigon
from ops_table.row import Bad, Case, Op, Replaced, randn, sample
from tigon.ops.causal_conv1d import causal_conv1d_reference


def _public(x, weight, bias=None, initial_state=None, offsets=None, **options):
    """initial_state by position, so that it has a gradient."""
    return tigon.causal_conv1d(x, weight, bias, initial_state=initial_state, offsets=offsets, **options)


def _reference(x, weight, bias=None, initial_state=None, offsets=None, **options):
    return causal_conv1d_reference(x, weight, bias, initial_state=initial_state, offsets=offsets, **options)


def _make(shape, dtype, generator, bias=True, state=False, lengths=None, first=False):
    """shape is (tokens, B, C, W); the tokens are those of the first document if there are `lengths` of others. first:
    channels first in memory."""
    T, B, C, W = shape
    offsets = None if lengths is None else torch.tensor([0, T, *lengths]).cumsum(0)
    T += sum(lengths or ())
    x = randn((B, C, T), dtype, generator).transpose(1, 2) if first else randn((B, T, C), dtype, generator)
    D = B if offsets is None else len(offsets) - 1
    return (
        x,
        randn((C, W), dtype, generator),
        randn((C,), dtype, generator) if bias else None,
        randn((D, C, W - 1), dtype, generator) if state else None,
        offsets,
    )


def _eager(x, weight, bias=None, initial_state=None, offsets=None, activation=None, return_state=False):
    """torch's convolution of each sequence or document, as transformers' torch code calls it."""
    C, W = weight.shape
    if offsets is not None:
        rows = x[0].split(offsets.diff().tolist())
    else:
        rows = x.unbind(0)
    ys, states = [], []
    for i, row in enumerate(rows):
        before = x.new_zeros(C, W - 1) if initial_state is None else initial_state[i]
        row = torch.cat((before, row.transpose(0, 1)), 1)
        if row.shape[1] >= W:
            ys.append(F.conv1d(row, weight.unsqueeze(1), bias, groups=C).transpose(0, 1))
        states.append(row[:, row.shape[1] - (W - 1) :])
    y = torch.cat(ys)[None] if offsets is not None else torch.stack(ys)
    y = F.silu(y) if activation == "silu" else y
    return (y, torch.stack(states)) if return_state else y


def _bad(x=(2, 5, 6), weight=(6, 4), bias=(6,), state=None, offsets=None, dtype=torch.float32):
    tensors = (None if shape is None else torch.ones(shape) for shape in (weight, bias, state))
    return lambda: (torch.ones(x, dtype=dtype), *tensors, offsets)


_SILU, _STATES = {"activation": "silu"}, {"activation": "silu", "return_state": True}
_ROW = {"x": sample(2, 9, 6), "weight": sample(6, 4), "bias": sample(1, 6)[0], "W": 4, "C": 6, "F": F}

CAUSAL_CONV1D = Op(
    name="causal_conv1d",
    public=_public,
    reference=_reference,
    eager=_eager,
    make=_make,
    cases=(
        Case("masked", (6, 2, 37, 4), _SILU),
        Case("least", (1, 1, 1, 2), draws=16),
        Case("documents and states", (5, 1, 5, 3), _STATES, {"lengths": (0, 1, 2, 9, 0), "state": True}, draws=2),
        Case(
            "documents in blocks of channels",
            (9, 1, 520, 4),
            {"return_state": True},
            {"lengths": (2, 7), "bias": False},
        ),
        Case("states and channels first", (7, 2, 16, 8), _STATES, {"state": True, "bias": False, "first": True}),
    ),
    empty=((0, 2, 6, 4), (3, 0, 6, 4), (3, 2, 0, 4)),
    bad=(
        Bad(_bad(x=(5, 6)), r"causal_conv1d: x must be \(B, T, C\) floats, got \(5, 6\) torch.float32\."),
        Bad(_bad(dtype=torch.int32), r"causal_conv1d: x must be \(B, T, C\) floats, got .* torch.int32\."),
        Bad(_bad(weight=(6, 1, 4)), r"weight must be \(6, W\), a row per channel of x .*, got \(6, 1, 4\)\."),
        Bad(_bad(weight=(6, 9)), r"with W from 2 to 8, got \(6, 9\)\."),
        Bad(_bad(bias=(5,)), r"bias must be \(6,\), a number per channel, got \(5,\)\."),
        Bad(_bad(state=(2, 6, 4)), r"initial_state must be \(2, 6, 3\), a state of each .*, got \(2, 6, 4\)\."),
        Bad(_bad(), r"activation must be 'silu' or None, got 'gelu'\.", {"activation": "gelu"}),
        Bad(_bad(offsets=torch.tensor([0, 5])), r"x must have a batch of 1 beside offsets, .* got \(2, 5, 6\)\."),
        Bad(_bad(x=(1, 5, 6), offsets=[0, 5]), r"causal_conv1d: offsets must be a tensor on .*, got list: a copy"),
        Bad(_bad(x=(1, 5, 6), offsets=torch.tensor([0, 4])), r"ascend from 0 to the tokens of x, 5, got", looks=True),
    ),
    launches=("causal_conv1d_fwd", "causal_conv1d_bwd"),
    models=(
        Case("Qwen3-Next", (8192, 1, 8192, 4), _SILU, {"bias": False}),
        Case("documents and states", (8192, 1, 8192, 4), _STATES, {"lengths": (4096, 4096), "state": True}),
    ),
    # The backward reads 8 bytes per thread, whose registers hold the sums of all taps.
    wide_loads=False,
    dtensor="refused",
    replaces=(
        Replaced("causal_conv1d(x, weight, bias)", "y", _ROW),
        Replaced('causal_conv1d(x, weight, bias, activation="silu")', "y", _ROW, (0, 1)),
    ),
)
