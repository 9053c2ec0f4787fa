"""Shared prefixes by torch's flash kernel: each suffix with its prefix, and with itself, joined by the log-sum-exp.

Each half of a softmax has the gradient that its kernel gives when it is handed the joint result and log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.ops.prefix_attention import PrefixLayout

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


def two_flash_calls(q: Tensor, k: Tensor, v: Tensor, layout: PrefixLayout) -> Tensor:
    """The prefixes over themselves, too: three calls in all."""
    o: Tensor = _Joined.apply(q, k, v, layout)
    return o


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: PrefixLayout) -> Tensor:
        P = layout.prefix_rows
        runs = torch.tensor([0, *(sum(own) for own in layout.suffix_lengths)]).cumsum(0).int().to(q.device)
        longest = max(layout.prefix_lengths), max(map(max, layout.suffix_lengths))
        most = max(map(sum, layout.suffix_lengths))
        cu_p, cu_s = layout.cu_prefix, layout.cu_suffix
        # Offsets of queries and of keys, the longest of each, and whether it is causal.
        calls = (
            (slice(0, P), slice(0, P), cu_p, cu_p, longest[0], longest[0], True),
            (slice(P, None), slice(0, P), runs, cu_p, most, longest[0], False),
            (slice(P, None), slice(P, None), cu_s, cu_s, longest[1], longest[1], True),
        )
        results = [
            _forward(q[a], k[b], v[b], cq, ck, mq, mk, 0.0, causal, False) for a, b, cq, ck, mq, mk, causal in calls
        ]
        own, first, second = ((r[0], _packed(r[1], call[2])) for r, call in zip(results, calls, strict=True))
        lse = torch.logaddexp(first[1], second[1])
        weights = ((part[1] - lse).exp().unsqueeze(-1) for part in (first, second))
        o = sum(part[0] * w for part, w in zip((first, second), weights, strict=True)).to(q.dtype)
        o = torch.cat((own[0], o))
        ctx.save_for_backward(q, k, v, o, lse, own[1])
        ctx.calls = [(*call, r[1], r[2], r[3]) for call, r in zip(calls, results, strict=True)]
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, o, joint, own = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
        for (a, b, cq, ck, mq, mk, causal, form, seed, unused), lse in zip(ctx.calls, (own, joint, joint), strict=True):
            gradients = _backward(
                do[a], q[a], k[b], v[b], o[a], _as(lse, form, cq), cq, ck, mq, mk, 0.0, causal, seed, unused
            )
            for total, part, rows in zip((dq, dk, dv), gradients, (a, b, b), strict=True):
                total[rows] += part
        return dq, dk, dv, None


def _packed(lse: Tensor, cu: Tensor) -> Tensor:
    """(rows, H) of what the kernel gives: (H, rows), or padded (sequences, H, longest)."""
    if lse.dim() == 2:
        return lse.t()
    row, place = _of_rows(cu)
    return lse[row, :, place]


def _as(lse: Tensor, form: Tensor, cu: Tensor) -> Tensor:
    if form.dim() == 2:
        return lse.t().contiguous()
    padded = torch.full_like(form, torch.inf)
    row, place = _of_rows(cu)
    padded[row, :, place] = lse
    return padded


def _of_rows(cu: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row its sequence and its place there."""
    lengths = (cu[1:] - cu[:-1]).long()
    row = torch.repeat_interleave(torch.arange(len(lengths), device=cu.device), lengths)
    return row, torch.arange(len(row), device=cu.device) - cu[:-1].long()[row]
