"""Attention of suffixes that share a prefix: prompts with their completions, histories with their candidates."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from cases.attention_peers import FlashCalls, two_flash_calls
from cases.inputs import Draw, Expected, Inputs, Shape
from cases.row import Implementation, Op, tigon
from tigon.ops.prefix_attention import PrefixLayout

NAMES = ("requests", "prefix", "suffixes", "suffix", "query heads", "key heads", "head width")


def _draw_lengths(shape: Shape, ragged: bool) -> tuple[list[int], list[list[int]]]:
    R, prefix, suffixes, length, *_ = shape
    if not ragged:
        return [prefix] * R, [[length] * suffixes] * R
    draw = torch.Generator().manual_seed(1)

    def between(most: int) -> list[int]:
        return torch.randint(max(1, most // 16), most + 1, (R,), generator=draw).tolist()

    prefixes, counts = between(prefix), between(suffixes)
    return prefixes, [[length] * n for n in counts]


def _make(ragged: bool) -> Callable[..., Inputs]:
    def make(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
        H, G, D = shape[4:]
        layout = PrefixLayout(*_draw_lengths(shape, ragged), device=device)
        draw = Draw(device, dtype)
        q, k, v = (draw.normal(layout.rows, heads, D).requires_grad_() for heads in (H, G, G))
        arguments = {"q": q, "k": k, "v": v, "layout": layout}
        return Inputs(arguments, ("q", "k", "v"), ("o",), (draw.normal(layout.rows, H, D),))

    return make


# ------------------------------------------------------------------------------------------------ sequences and masks


class _Batch(NamedTuple):
    """Sequences of one length: the rows of each (B, n), and what each row sees (n, n); None for what lies before it."""

    rows: Tensor
    visible: Tensor | None


L = TypeVar("L")
# By layouts, or documents' offsets: what a data loader would make once a batch. No key is hashed by what it holds.
_made: WeakIdKeyDictionary = WeakIdKeyDictionary()


def memoize(layout: L, make: Callable[[L], Any]) -> Any:
    made = _made.setdefault(layout, {})
    if make not in made:
        made[make] = make(layout)
    return made[make]


def _split_spans(layout: PrefixLayout) -> list[tuple[range, list[range]]]:
    """The rows of each prefix and of its suffixes."""
    spans, p, s = [], 0, layout.prefix_rows
    for length, own in zip(layout.prefix_lengths, layout.suffix_lengths, strict=True):
        suffixes = []
        for n in own:
            suffixes.append(range(s, s + n))
            s += n
        spans.append((range(p, p + length), suffixes))
        p += length
    return spans


def _make_dense_batches(layout: PrefixLayout) -> tuple[list[_Batch], Tensor]:
    """A sequence [prefix | suffixes] for each request, with a dense mask; equal ones together."""
    groups: dict[tuple[int, tuple[int, ...]], list[list[int]]] = {}
    for r, (rows_of_prefix, suffixes) in enumerate(_split_spans(layout)):
        kind = layout.prefix_lengths[r], layout.suffix_lengths[r]
        groups.setdefault(kind, []).append([*rows_of_prefix, *(i for rows in suffixes for i in rows)])
    batches = [
        _Batch(_to_tensor(rows, layout), _make_mask(prefix, own, layout.device))
        for (prefix, own), rows in groups.items()
    ]
    return batches, _locate_results(batches, layout)


def _make_repeated_batches(layout: PrefixLayout) -> tuple[list[_Batch], Tensor]:
    """A sequence with a prefix of its own for each suffix; those of one length together."""
    groups: dict[int, list[list[int]]] = {}
    for prefix, suffixes in _split_spans(layout):
        for own in suffixes:
            groups.setdefault(len(prefix) + len(own), []).append([*prefix, *own])
    batches = [_Batch(_to_tensor(rows, layout), None) for rows in groups.values()]
    return batches, _locate_results(batches, layout)


def _to_tensor(rows: list[list[int]], layout: PrefixLayout) -> Tensor:
    return torch.tensor(rows, device=layout.device)


def _locate_results(batches: list[_Batch], layout: PrefixLayout) -> Tensor:
    """Where the result of each row stands among those of all sequences; of a repeated one the last."""
    rows = torch.cat([batch.rows.flatten() for batch in batches])
    places = rows.new_empty(layout.rows)
    places[rows] = torch.arange(len(rows), device=rows.device)
    return places


def _make_mask(prefix: int, suffixes: tuple[int, ...], device: torch.device) -> Tensor:
    n = prefix + sum(suffixes)
    visible = torch.zeros(n, n, dtype=torch.bool, device=device)
    visible[:, :prefix] = True
    start = prefix
    for length in suffixes:
        visible[start : start + length, start : start + length] = True
        start += length
    return visible.tril_()


def _make_sdpa(batches: Callable[[PrefixLayout], Any]) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor, layout: PrefixLayout) -> Tensor:
        made, places = memoize(layout, batches)
        outputs = []
        for rows, visible in made:
            queries, keys, values = (t[rows].transpose(1, 2) for t in (q, k, v))
            o = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=visible, is_causal=visible is None, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(o.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[places]

    return attention


def _run_flash(q: Tensor, k: Tensor, v: Tensor, layout: PrefixLayout) -> Tensor:
    return two_flash_calls(q, k, v, memoize(layout, FlashCalls.from_layout))


# --------------------------------------------------------------------------------------------------------------- flex


def _make_block_mask(layout: PrefixLayout) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    of = torch.empty(2, layout.rows, dtype=torch.int64)  # the sequence and the request of each row
    sequence = 0
    for r, (prefix, suffixes) in enumerate(_split_spans(layout)):
        for rows in (prefix, *suffixes):
            of[0, rows.start : rows.stop], of[1, rows.start : rows.stop] = sequence, r
            sequence += 1
    sequences, requests = of.to(layout.device)
    P = layout.prefix_rows

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        own = (sequences[i] == sequences[j]) & (j <= i)
        return torch.logical_or(own, (requests[i] == requests[j]) & (i >= P) & (j < P))

    return create_block_mask(visible, None, None, layout.rows, layout.rows, device=layout.device, _compile=True)


@functools.cache
def load_flex(make_mask: Callable[[Any], Any]) -> Callable[..., Any]:
    """FlexAttention with the mask that make_mask gives for a layout, or for documents' offsets."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=True)

    def attention(q: Tensor, k: Tensor, v: Tensor, layout: Any) -> Tensor:
        heads = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        mask = memoize(layout, make_mask)
        o: Tensor = compiled(*heads, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        return o[0].transpose(0, 1)

    return attention


# --------------------------------------------------------------------------------------------------- what is expected


def _expect(inputs: Inputs) -> Expected:
    """Of the first and the last request, one head of keys each."""
    a = inputs.arguments
    (do,) = inputs.grads or ()
    N, G = a["q"].shape[1] // a["k"].shape[1], a["k"].shape[1]
    expected: Expected = {"o": [], "dq": [], "dk": [], "dv": []}
    spans, layout = _split_spans(a["layout"]), a["layout"]
    for r, g in {(0, 0), (len(spans) - 1, G - 1)}:
        prefix, suffixes = spans[r]
        parts = [slice(prefix.start, prefix.stop), slice(suffixes[0].start, suffixes[-1].stop)]
        own = slice(g * N, (g + 1) * N)
        q, upstream = (torch.cat([t.detach()[rows, own] for rows in parts]).double() for t in (a["q"], do))
        k, v = (torch.cat([a[name].detach()[rows, g] for rows in parts]).double() for name in ("k", "v"))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        z = torch.einsum("ihd,jd->hij", q, k) / math.sqrt(q.shape[-1])
        visible = _make_mask(layout.prefix_lengths[r], layout.suffix_lengths[r], q.device)
        o = torch.einsum("hij,jd->ihd", z.masked_fill(~visible, -torch.inf).softmax(-1), v)
        found = {"o": o.detach()}
        found |= zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, upstream), strict=True)
        for name, value in found.items():
            heads = g if name in ("dk", "dv") else own
            split = value.split([len(prefix), len(value) - len(prefix)])
            expected[name] += [((rows, heads), part) for rows, part in zip(parts, split, strict=True) if len(part)]
    return expected


def _count_pairs(prefixes: Iterable[int], suffixes: Iterable[Iterable[int]]) -> int:
    """Pairs of a query and a key that it sees."""
    return sum(
        p * (p + 1) // 2 + sum(p * n + n * (n + 1) // 2 for n in own) for p, own in zip(prefixes, suffixes, strict=True)
    )


def _count_flops(ragged: bool) -> Callable[[Shape], tuple[int, int]]:
    def flops(s: Shape) -> tuple[int, int]:
        forward = 4 * s[4] * s[6] * _count_pairs(*_draw_lengths(s, ragged))
        return forward, forward * 5 // 2

    return flops


def _count_bytes(ragged: bool) -> Callable[[Shape, int], tuple[int, int]]:
    def nbytes(s: Shape, b: int) -> tuple[int, int]:
        prefixes, suffixes = _draw_lengths(s, ragged)
        rows = sum(prefixes) + sum(map(sum, suffixes))
        of_q, of_k = rows * s[4] * s[6] * b, rows * s[5] * s[6] * b
        return 2 * of_q + 2 * of_k, 4 * of_q + 4 * of_k

    return nbytes


def _make_products(inputs: Inputs) -> list[tuple[Callable[[], Any], ...]]:
    layout = inputs.arguments["layout"]
    return make_square_product(inputs.arguments["q"], _count_pairs(layout.prefix_lengths, layout.suffix_lengths))


def make_square_product(q: Tensor, pairs: int) -> list[tuple[Callable[[], Any], ...]]:
    """As many FLOPs in one square product by cuBLAS, forward and backward."""
    side = 8192
    rows = max(1, 14 * q.shape[1] * q.shape[2] * pairs // (2 * side * side))
    x, w = (torch.randn(n, side, dtype=q.dtype, device=q.device) for n in (rows, side))
    y = torch.empty(rows, side, dtype=q.dtype, device=q.device)
    return [(lambda: torch.mm(x, w, out=y),)]


def _make_op(name: str, ragged: bool, shapes: tuple[Shape, ...], extra: tuple[Shape, ...] = ()) -> Op:
    return Op(
        name=name,
        shape_names=NAMES,
        shapes=shapes,
        extra=extra,
        small=((2, 64, 4, 8, 4, 2, 32),),
        tiny=(2, 16, 3, 5, 4, 2, 16),
        make=_make(ragged),
        expect=_expect,
        nbytes=_count_bytes(ragged),
        counted=("4·H·D FLOP for each pair of a query and a key that it sees", "10·H·D FLOP for each pair"),
        flops=_count_flops(ragged),
        floor=_make_products,
        implementations={
            "tigon": Implementation(tigon("prefix_attention")),
            "eager": Implementation(lambda: _make_sdpa(_make_dense_batches), note="SDPA with a dense mask"),
            "torch": Implementation(
                lambda: _make_sdpa(_make_repeated_batches), note="SDPA, one sequence for each suffix"
            ),
            "flex": Implementation(
                functools.partial(load_flex, _make_block_mask),
                note="FlexAttention; its mask made once a batch",
                gpu_only=True,
            ),
            "flash": Implementation(
                lambda: _run_flash, note="torch's flash kernel over prefixes and suffixes, joined", gpu_only=True
            ),
        },
    )


OPS = (
    _make_op(
        "prefix_attention", False, ((4, 4096, 32, 128, 32, 8, 128),),
        # The last shares nothing.
        ((16, 1024, 64, 32, 32, 8, 64), (64, 512, 512, 1, 8, 8, 64), (16, 512, 1, 512, 16, 8, 128)),
    ),
    _make_op("prefix_attention-ragged", True, ((64, 1024, 64, 1, 8, 8, 64),)),
)  # fmt: skip
