"""Run the replaced code in each docstring, which must agree with the operator."""

from __future__ import annotations

import inspect
import math
import re
import textwrap

import pytest
import torch
import torch.nn.functional as F
from ops_table import OPS
from ops_table.row import Replaced, sample

import tigon
from tigon.lazy import find_homes
from tigon.ops.gated_linear import gated_linear
from tigon.ops.linear.adapters import gated_lora_linear
from tigon.retrieve.training.over_items import item_softmax

ROOMS = ("tigon.ops.", "tigon.losses.", "tigon.rank.kernels.", "tigon.retrieve.scan")
HOMES = {n: home for n, home in find_homes("tigon").items() if home.startswith(ROOMS)}
FUNCTIONS = {name: getattr(tigon, name) for name in HOMES if not inspect.isclass(getattr(tigon, name))}
OPERATORS = {
    **FUNCTIONS,
    "gated_linear": gated_linear,
    "gated_lora_linear": gated_lora_linear,
    "item_softmax": item_softmax,
}


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


ADAPTED = {"x": sample(3, 8), "weight": sample(5, 8), "bias": sample(5), "a": sample(2, 8), "b": sample(5, 2),
           "scale": 0.5}  # fmt: skip
CODES = {"packed": torch.arange(256, dtype=torch.uint8)[:64], "absmax": sample(4).abs(), "table": sample(16),
         "shape": (4, 32), "blocksize": 32, "FourBit": tigon.FourBit}  # fmt: skip
WITHOUT_A_ROW = (
    Replaced("lora_linear(x, [tigon.LoRA(weight, a, b, scale, bias)])[0]", "y", ADAPTED),
    Replaced("gated_lora_linear(gate, up, tigon.LoRA(weight, a, b, scale, bias))", "y",
             {**ADAPTED, "gate": sample(3, 8), "up": sample(2, 3, 8)[1]}),
    Replaced("dequantize_4bit(FourBit(packed, absmax, table, shape, blocksize=blocksize))", "w", CODES),
    Replaced("quantize_rows(weight)[0]", "codes", {"weight": torch.tensor([[0.0, 3, 255], [-100, 7, 155]])}),
    Replaced(
        "quantized_embedding(codes, scale_offset, values, mode=mode)", "y",
        {"codes": torch.arange(40, dtype=torch.uint8).view(5, 8), "scale_offset": sample(5, 2).half(),
         "values": torch.tensor([[0, 4], [2, 2]]), "mode": "mean"},
    ),
    Replaced(
        "filtered_topk(query, items, k, attributes=attributes, where=where)", "scores, rows",
        {"query": sample(2, 8), "items": sample(40, 8), "k": 3, "attributes": torch.arange(40)[None],
         "where": tigon.RowFilter([[tigon.RowFilter.Literal(0, 5)]])},
    ),
    Replaced("encode_items(rows)[1:3]", "codes, scales", {"rows": sample(40, 8)}),
)  # fmt: skip
REPLACED = (*(replaced for op in OPS for replaced in op.replaces), *WITHOUT_A_ROW)
GIVEN = {
    "Head": tigon.Head,
    "F": F,
    "tigon": tigon,
    "torch": torch,
    "math": math,
    "rotate_half": rotate_half,
    "apply_rotary_pos_emb": apply_rotary_pos_emb,
}


def blocks(name: str) -> list[str]:
    """The replaced code in a docstring."""
    replaced = (inspect.getdoc(OPERATORS[name]) or "").partition("\nReplaces")[2]
    return [textwrap.dedent(code) for code in re.findall(r"::\n\n((?:    .*\n?|\n)+)", replaced)]


def operator(replaced: Replaced) -> str:
    return replaced.call.split("(")[0]


@pytest.mark.parametrize("replaced", REPLACED, ids=str)
def test_an_operator_agrees_with_the_code_it_replaces(replaced):
    names = {**GIVEN, **OPERATORS, **replaced.names}
    ours = eval(replaced.call, dict(names))
    parts = blocks(operator(replaced))
    for i in replaced.blocks:
        exec(parts[i], names)
    theirs = eval(replaced.results, names)
    for our, their in zip(*(r if isinstance(r, tuple) else (r,) for r in (ours, theirs)), strict=True):
        torch.testing.assert_close(our, their)


def test_all_the_code_in_docstrings_is_run():
    run = {(operator(r), i) for r in REPLACED for i in r.blocks}
    assert run == {(name, i) for name in OPERATORS for i in range(len(blocks(name)))}
    assert {name for name, _ in run} == set(OPERATORS)
