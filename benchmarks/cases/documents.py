"""Attention of documents that are packed into a row."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cases.attention import load_flex, make_square_product, memoize
from cases.inputs import Draw, Expected, Inputs, Shape
from cases.row import Implementation, Op, tigon

NAMES = ("documents", "longest", "query heads", "key heads", "head width")


def draw_lengths(shape: Shape) -> list[int]:
    """Lengths from a 32nd of the longest to the longest, all as likely."""
    documents, longest, *_ = shape
    draw = torch.Generator().manual_seed(1)
    lengths: list[int] = torch.randint(max(1, longest // 32), longest + 1, (documents,), generator=draw).tolist()
    return lengths


def _make(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    H, G, D = shape[2:]
    offsets = torch.tensor([0, *accumulate(draw_lengths(shape))], dtype=torch.int32, device=device)
    N, draw = sum(draw_lengths(shape)), Draw(device, dtype)
    q, k, v = (draw.normal(N, heads, D).requires_grad_() for heads in (H, G, G))
    arguments = {"q": q, "k": k, "v": v, "offsets": offsets}
    return Inputs(arguments, ("q", "k", "v"), ("o",), (draw.normal(N, H, D),))


def _make_spans(offsets: Tensor) -> list[slice]:
    return [slice(*span) for span in pairwise(offsets.tolist())]


def _make_mask(offsets: Tensor) -> Tensor:
    n = int(offsets[-1])
    visible = torch.zeros(n, n, dtype=torch.bool, device=offsets.device)
    for own in _make_spans(offsets):
        visible[own, own] = True
    return visible.tril_()


def _run_dense(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """As transformers does for position_ids that restart, key heads repeated."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    heads = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    return F.scaled_dot_product_attention(*heads, attn_mask=memoize(offsets, _make_mask))[0].transpose(0, 1)


def _run_one_by_one(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    outputs = []
    for own in memoize(offsets, _make_spans):
        heads = (t[own].transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        o = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        outputs.append(o[0].transpose(0, 1))
    return torch.cat(outputs)


def _load_flash() -> Callable[..., Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}

    def attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        longest = max(own.stop - own.start for own in memoize(offsets, _make_spans))
        shared = {"enable_gqa": q.shape[1] != k.shape[1]} if "enable_gqa" in known else {}
        o: Tensor = varlen_attn(q, k, v, offsets, offsets, longest, longest, **options, **shared)
        return o

    return attention


def _make_block_mask(offsets: Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    n = int(offsets[-1])
    document = torch.bucketize(torch.arange(n, device=offsets.device, dtype=offsets.dtype), offsets[1:], right=True)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (j <= i)

    return create_block_mask(visible, None, None, n, n, device=offsets.device, _compile=True)


def _expect(inputs: Inputs) -> Expected:
    """The exact results of one key head in the first document, and of one in the last."""
    a = inputs.arguments
    (do,) = inputs.grads or ()
    N, G = a["q"].shape[1] // a["k"].shape[1], a["k"].shape[1]
    expected: Expected = {"o": [], "dq": [], "dk": [], "dv": []}
    spans = _make_spans(a["offsets"])
    for rows, g in ((spans[0], 0), (spans[-1], G - 1)):
        own = slice(g * N, (g + 1) * N)
        q, upstream = (t.detach()[rows, own].double() for t in (a["q"], do))
        k, v = (a[name].detach()[rows, g].double() for name in ("k", "v"))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        z = torch.einsum("ihd,jd->hij", q, k) / math.sqrt(q.shape[-1])
        seen = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
        o = torch.einsum("hij,jd->ihd", z.masked_fill(~seen, -torch.inf).softmax(-1), v)
        found = (o.detach(), *torch.autograd.grad(o, leaves, upstream))
        for name, value, heads in zip(expected, found, (own, own, g, g), strict=True):
            expected[name].append(((rows, heads), value))
    return expected


def _count_pairs(shape: Shape) -> int:
    """Pairs of a query and a key that it sees."""
    return sum(n * (n + 1) // 2 for n in draw_lengths(shape))


def _count_flops(s: Shape) -> tuple[int, int]:
    forward = 4 * s[2] * s[4] * _count_pairs(s)
    return forward, forward * 5 // 2


def _count_bytes(s: Shape, b: int) -> tuple[int, int]:
    of_q, of_k = (sum(draw_lengths(s)) * heads * s[4] * b for heads in s[2:4])
    return 2 * of_q + 2 * of_k, 4 * of_q + 4 * of_k


def _make_products(inputs: Inputs) -> list[tuple[Callable[[], Any], ...]]:
    spans = _make_spans(inputs.arguments["offsets"])
    lengths = (own.stop - own.start for own in spans)
    return make_square_product(inputs.arguments["q"], sum(n * (n + 1) // 2 for n in lengths))


OPS = (
    Op(
        name="varlen_attention",
        shape_names=NAMES,
        shapes=((16, 4096, 32, 8, 128),),
        extra=((64, 1024, 16, 8, 128), (16, 4096, 32, 8, 64)),
        small=((4, 64, 4, 2, 32),),
        tiny=(3, 16, 4, 2, 16),
        make=_make,
        expect=_expect,
        nbytes=_count_bytes,
        counted=("4·H·D FLOP for each pair of a query and a key that it sees", "10·H·D FLOP for each pair"),
        flops=_count_flops,
        floor=_make_products,
        implementations={
            "tigon": Implementation(tigon("varlen_attention")),
            "eager": Implementation(lambda: _run_dense, note="SDPA with a dense mask, as in transformers"),
            "torch": Implementation(lambda: _run_one_by_one, note="SDPA, one call for each document"),
            "flex": Implementation(
                functools.partial(load_flex, _make_block_mask),
                note="FlexAttention; its mask made once a batch",
                gpu_only=True,
            ),
            "flash": Implementation(_load_flash, note="torch's varlen_attn", gpu_only=True, where_installed=True),
        },
    ),
)
