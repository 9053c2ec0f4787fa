"""Rows of a table by index: a gather forward, a sum over equal indices backward.

Bags of rows of bytes have no gradient. Their floor counts sectors of 32 bytes, the least that memory gives: for each id
those of its codes and the one of its scale and offset, however few bytes of them a row is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cases.inputs import Draw, Expected, Inputs, Shape
from cases.row import Implementation, Op, liger, plain, tigon, torch_own


def _eager_embedding(input: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(input, weight)


def _make(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    tokens, vocabulary, width = shape
    draw = Draw(device, dtype)
    weight = draw.normal(vocabulary, width).requires_grad_()
    # As frequent as words are (Zipf): index i with probability log((i + 2) / (i + 1)) / log(V + 1). The sum over one
    # common word is the hard part of the backward; uniform indices would leave it out.
    index = ((vocabulary + 1) ** draw.uniform(tokens).double() - 1).long().clamp_max(vocabulary - 1)
    # Scattered over the table: neighbours in frequency are no neighbours in memory.
    places = torch.randperm(vocabulary, generator=draw.generator, device=device)
    # Not centred: the sum over a common word would else be a small difference of large sums.
    dy = draw.normal(tokens, width).add_(1)
    return Inputs({"input": places[index], "weight": weight}, ("weight",), ("y",), (dy,))


def _eager_bag(values: Tensor, weight: Tensor) -> Tensor:
    return F.embedding_bag(values, weight, mode="sum")


def _make_bags(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    bags, length, rows, width = shape
    draw = Draw(device, dtype)
    weight = draw.normal(rows, width).requires_grad_()
    values = _draw_hashed_ids(draw, bags, length, rows)
    return Inputs({"values": values, "weight": weight}, ("weight",), ("y",), (draw.normal(bags, width).add_(1),))


def _draw_hashed_ids(draw: Draw, bags: int, length: int, rows: int) -> Tensor:
    """Hashed ids: any row as likely as another, and so nearly every load from another place."""
    return (draw.uniform(bags, length).double() * rows).long().clamp_max(rows - 1)


def _expect_bags(inputs: Inputs) -> Expected:
    values, weight = inputs.arguments["values"], inputs.arguments["weight"].detach()
    (dy,) = inputs.grads or ()
    n, length = values.shape
    some = [slice(0, min(n, 1024)), slice(max(0, n - 1024), n)]
    total = torch.zeros_like(weight, dtype=torch.float64)
    for place in range(length):
        total.index_add_(0, values[:, place], dy.double())
    return {"y": [(rows, weight[values[rows]].double().sum(1)) for rows in some], "dweight": [(slice(None), total)]}


SECTOR = 32  # bytes, the least that the memory of a GPU gives


def _eager_codes(codes: Tensor, scale_offset: Tensor, values: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    scale, offset = scale_offset[values].to(table.dtype).split(1, -1)
    y: Tensor = (codes[values].to(table.dtype) * scale + offset).sum(1)
    return y.to(dtype)


def _wide_table(codes: Tensor, scale_offset: Tensor, values: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    return F.embedding_bag(values, table, mode="sum").to(dtype)


def _tigon_codes() -> Callable[..., Any]:
    op = tigon("quantized_embedding", mode="sum")()
    return lambda table, **arguments: op(**arguments)


def _make_codes(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
    """dtype: of the bags. table: the same rows in fp32, for what has no rows of bytes."""
    bags, length, rows, width = shape
    draw = Draw(device, torch.float32)
    codes = (draw.uniform(rows, width) * 256).clamp_max_(255).to(torch.uint8)
    # Scales of several octaves: sums of products of one size would be exact in fp32, and show no order.
    scale_offset = torch.stack((draw.uniform(rows) / 32 + 1e-4, -draw.uniform(rows) - 1.5), 1).half()
    wide = scale_offset.to(torch.promote_types(dtype, torch.float32))
    arguments = {
        "codes": codes,
        "scale_offset": scale_offset,
        "values": _draw_hashed_ids(draw, bags, length, rows),
        "table": codes * wide[:, :1] + wide[:, 1:],
        "dtype": dtype,
    }
    return Inputs(arguments, (), ("y",))


def _expect_codes(inputs: Inputs) -> Expected:
    codes, scale_offset, values = (inputs.arguments[name] for name in ("codes", "scale_offset", "values"))
    n = values.shape[0]
    parts = []
    for some in (slice(0, min(n, 1024)), slice(max(0, n - 1024), n)):
        scale, offset = scale_offset[values[some]].double().split(1, -1)
        parts.append((some, (codes[values[some]].double() * scale + offset).sum(1)))
    return {"y": parts}


def _count_sectors(width: int) -> float:
    """Sectors of a row of so many bytes, on average over the rows, which lie one behind the other."""
    return sum((row * width % SECTOR + width + SECTOR - 1) // SECTOR for row in range(SECTOR)) / SECTOR


def _count_distinct_uniform(ids: int, rows: int) -> int:
    """How many different rows are expected among so many ids, any as likely as another."""
    return round(rows * -math.expm1(ids * math.log1p(-1 / rows))) if rows > 1 else min(ids, rows)


@functools.cache
def _count_distinct(tokens: int, vocabulary: int) -> int:
    """How many different indices are expected among these tokens."""
    i = torch.arange(vocabulary, dtype=torch.float64)
    chance = torch.log((i + 2) / (i + 1)) / torch.log(torch.tensor(vocabulary + 1.0, dtype=torch.float64))
    return int((1 - (1 - chance) ** tokens).sum().round())


def _expect(inputs: Inputs) -> Expected:
    """y of the first and the last rows; dweight column by column, so that it fits in fp64."""
    index, weight = inputs.arguments["input"], inputs.arguments["weight"].detach()
    (dy,) = inputs.grads or ()
    n = index.shape[0]
    some = [slice(0, min(n, 4096)), slice(max(0, n - 4096), n)]
    columns = [slice(c, c + 256) for c in {0, max(0, weight.shape[1] - 256)}]
    dweight = []
    for part in columns:
        total = torch.zeros_like(weight[:, part], dtype=torch.float64)
        dweight.append(((slice(None), part), total.index_add_(0, index, dy[:, part].double())))
    return {"y": [(rows, weight[index[rows]].double()) for rows in some], "dweight": dweight}


OPS = (
    Op(
        name="embedding",
        shape_names=("tokens", "vocabulary", "width"),
        shapes=((32768, 128256, 4096),),
        extra=((8192, 32000, 4096), (17, 128256, 4096), (10**6, 32000, 256)),
        small=((512, 1024, 128),),
        tiny=(8, 32, 16),
        make=_make,
        expect=_expect,
        # forward: every different row once.  backward: the whole gradient, rows that do not occur as zeros.
        nbytes=lambda s, b: (
            (_count_distinct(s[0], s[1]) + s[0]) * s[2] * b + 8 * s[0],
            (s[0] + s[1]) * s[2] * b + 8 * s[0],
        ),
        counted=("indices, the rows that occur → y", "indices, dy → dweight, all of it"),
        implementations={
            "tigon": Implementation(tigon("embedding")),
            **plain(_eager_embedding),
            "liger": Implementation(
                liger("LigerEmbeddingFunction", lambda input, weight: (weight, input)),
                note="sums by atomic additions in the weight's dtype",
                gpu_only=True,
            ),
        },
    ),
    Op(
        name="embedding_bag",
        shape_names=("bags", "length", "rows", "width"),
        shapes=((65536, 40, 1_000_000, 16),),
        small=((256, 8, 4096, 16),),
        tiny=(8, 4, 32, 16),
        make=_make_bags,
        expect=_expect_bags,
        # forward: every different row once.  backward: the whole gradient, rows that do not occur as zeros.
        nbytes=lambda s, b: (
            (_count_distinct_uniform(s[0] * s[1], s[2]) + s[0]) * s[3] * b + 8 * s[0] * s[1],
            (s[0] + s[2]) * s[3] * b + 8 * s[0] * s[1],
        ),
        counted=("indices, the rows that occur → y", "indices, dy → dweight, all of it"),
        implementations={"tigon": Implementation(tigon("embedding_bag", mode="sum")), **plain(_eager_bag)},
    ),
    Op(
        name="quantized_embedding",
        shape_names=("bags", "length", "rows", "width"),
        shapes=((65536, 40, 1_000_000, 16),),
        # A request of a server, and rows of two sectors.
        extra=((512, 40, 1_000_000, 16), (65536, 40, 1_000_000, 64)),
        small=((256, 8, 4096, 16),),
        tiny=(8, 4, 32, 16),
        make=_make_codes,
        expect=_expect_codes,
        # Every id, not every different row: the sectors of a row that comes twice are asked for twice. Not y, 2 % of
        # these bytes at 40 ids of 16 numbers: with it the floor would be higher.
        nbytes=lambda s, b: (round(s[0] * s[1] * (SECTOR * (_count_sectors(s[3]) + 1) + 8)), 0),
        counted=("indices, and for each the sectors of 32 bytes of its codes and of its scale and offset", "none"),
        implementations={
            "tigon": Implementation(_tigon_codes),
            **plain(_eager_codes),
            **torch_own(_wide_table, "embedding_bag of the table in fp32, four times the bytes"),
        },
    ),
)
