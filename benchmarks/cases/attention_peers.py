"""Shared prefixes by torch's flash kernel: each suffix with its prefix, and with itself, joined by the log-sum-exp.

Each half of a softmax has the gradient that its kernel gives when it is handed the joint result and log-sum-exp.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.prefix_attention import PrefixLayout

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


class FlashCall(NamedTuple):
    """One call of the kernel: which rows are queries and which keys, how they lie, and whether it is causal."""

    queries: slice
    keys: slice
    cu_q: Tensor
    cu_k: Tensor
    most_q: int
    most_k: int
    causal: bool
    # Of each query its sequence and its place there, (rows,) each, for a log-sum-exp that is padded.
    sequence: Tensor
    place: Tensor


class FlashCalls(NamedTuple):
    """The calls of a layout: prefixes over themselves, suffixes over prefixes, and suffixes over themselves."""

    own: FlashCall
    prefix: FlashCall
    suffix: FlashCall

    @classmethod
    def from_layout(cls, layout: PrefixLayout) -> FlashCalls:
        P, cu_p, cu_s = layout.prefix_rows, layout.cu_prefix, layout.cu_suffix
        runs = torch.tensor([0, *(sum(own) for own in layout.suffix_lengths)]).cumsum(0).int().to(cu_p.device)
        prefix, suffix = max(layout.prefix_lengths), max(map(max, layout.suffix_lengths))
        most = max(map(sum, layout.suffix_lengths))
        prefixes, suffixes = slice(0, P), slice(P, None)
        return cls(
            FlashCall(prefixes, prefixes, cu_p, cu_p, prefix, prefix, True, *_locate_rows(cu_p)),
            FlashCall(suffixes, prefixes, runs, cu_p, most, prefix, False, *_locate_rows(runs)),
            FlashCall(suffixes, suffixes, cu_s, cu_s, suffix, suffix, True, *_locate_rows(cu_s)),
        )


def two_flash_calls(q: Tensor, k: Tensor, v: Tensor, calls: FlashCalls) -> Tensor:
    """The prefixes over themselves, too: three calls in all."""
    o: Tensor = _Joined.apply(q, k, v, calls)
    return o


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: FlashCalls) -> Tensor:
        results = [
            _forward(
                q[c.queries], k[c.keys], v[c.keys], c.cu_q, c.cu_k, c.most_q, c.most_k, 0.0, c.causal, False
            ) for c in calls
        ]  # fmt: skip
        own, first, second = ((r[0], _pack_lse(r[1], call)) for r, call in zip(results, calls, strict=True))
        lse = torch.logaddexp(first[1], second[1])
        weights = ((part[1] - lse).exp().unsqueeze(-1) for part in (first, second))
        o = sum(part[0] * w for part, w in zip((first, second), weights, strict=True)).to(q.dtype)
        o = torch.cat((own[0], o))
        ctx.save_for_backward(q, k, v, o, lse, own[1])
        ctx.calls, ctx.kept = calls, [r[1:4] for r in results]
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, o, joint, own = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
        for c, (form, seed, unused), lse in zip(ctx.calls, ctx.kept, (own, joint, joint), strict=True):
            gradients = _backward(
                do[c.queries], q[c.queries], k[c.keys], v[c.keys], o[c.queries], _unpack_lse(lse, form, c), c.cu_q,
                c.cu_k, c.most_q, c.most_k, 0.0, c.causal, seed, unused,
            )  # fmt: skip
            for total, part, rows in zip((dq, dk, dv), gradients, (c.queries, c.keys, c.keys), strict=True):
                total[rows] += part
        return dq, dk, dv, None


def _pack_lse(lse: Tensor, call: FlashCall) -> Tensor:
    """(rows, H) of what the kernel gives: (H, rows), or padded (sequences, H, longest)."""
    return lse.t() if lse.dim() == 2 else lse[call.sequence, :, call.place]


def _unpack_lse(lse: Tensor, form: Tensor, call: FlashCall) -> Tensor:
    if form.dim() == 2:
        return lse.t().contiguous()
    padded = torch.full_like(form, torch.inf)
    padded[call.sequence, :, call.place] = lse
    return padded


def _locate_rows(cu: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row its sequence and its place there."""
    lengths = (cu[1:] - cu[:-1]).long()
    row = torch.repeat_interleave(torch.arange(len(lengths), device=cu.device), lengths)
    return row, torch.arange(len(row), device=cu.device) - cu[:-1].long()[row]
