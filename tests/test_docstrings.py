"""Run the replaced code in each docstring, which must agree with the operator."""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

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


class Replaced(NamedTuple):
    """A call, its result names, and the docstring's equivalent code blocks, in order."""

    call: str
    results: str
    names: dict[str, Any]
    blocks: tuple[int, ...] = (0,)

    def __str__(self) -> str:
        return self.call


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


TARGET = torch.tensor([0, 4, -100])
ROW = {"x": randn(3, 8), "residual": randn(8, 3).t(), "weight": randn(8), "bias": randn(1, 8)[0], "eps": 1e-5}
GATES = {"gate": randn(3, 8), "up": randn(2, 3, 8)[1], "gate_up": randn(3, 16)}
MLP = {"x": randn(3, 8), "gate": randn(6, 8), "up": randn(2, 6, 8)[1], "down": randn(5, 6)}
ADAPTED = {"x": randn(3, 8), "weight": randn(5, 8), "bias": randn(5), "a": randn(2, 8), "b": randn(5, 2), "scale": 0.5}
FACTORS = {"gate_multiplier": 0.5, "multiplier": 3.0}
HEADS = {"q": randn(2, 4, 5, 8), "k": randn(2, 2, 5, 8), "cos": randn(2, 5, 8), "sin": randn(1, 2, 5, 8)[0]}
SCORES = {"x": randn(2, 5, 7), "mask": randn(5, 7), "scale": 0.3, "dim": -1, "T": 5, "S": 7}
LOGITS = {"input": randn(3, 8), "target": randn(1, 3, 8)[0], "temperature": 2.0, "beta": 0.3}
LOGS = {"log_q": randn(3, 8).log_softmax(-1), "log_p": randn(1, 3, 8)[0].log_softmax(-1), "beta": 0.3}

BAGS = {"weight": randn(5, 8), "values": torch.tensor([0, 4, 2]), "offsets": torch.tensor([0, 2, 2]),
        "mode": "mean", "padding_idx": 4}  # fmt: skip
CODES = {"packed": torch.arange(256, dtype=torch.uint8)[:64], "absmax": randn(4).abs(), "table": randn(16),
         "shape": (4, 32), "blocksize": 32, "FourBit": tigon.FourBit}  # fmt: skip

REPLACED = [
    Replaced("rms_norm(x, weight, eps=eps)", "y", ROW),
    Replaced("add_rms_norm(x, residual, weight)", "y, residual", ROW),
    Replaced("layer_norm(x, weight, bias, eps=eps)", "y", ROW),
    Replaced(
        "group_norm(x, num_groups, weight, bias, eps=eps)", "y", {**ROW, "x": randn(2, 8, 3), "num_groups": 4}
    ),
    Replaced("dyt(x, alpha, weight, bias)", "y", {**ROW, "alpha": randn(1)}),
    Replaced("poly_norm(x, weight, bias)", "y", {"x": randn(3, 8), "weight": randn(3), "bias": randn(1), "eps": 1e-6}),
    Replaced("swiglu(gate, up)", "y", GATES),
    Replaced("swiglu(gate_up)", "y", GATES, (1, 0)),
    Replaced(
        "swiglu(gate, up, gate_multiplier=gate_multiplier, multiplier=multiplier)", "y", {**GATES, **FACTORS}, (2,)
    ),
    Replaced("geglu(gate, up)", "y", GATES),
    Replaced("reglu(gate, up)", "y", GATES),
    Replaced("reglu(gate, up, squared=True)", "y", GATES, (1,)),
    Replaced("relu2(x)", "y", ROW),
    Replaced("gated_residual(x, gate, f)", "y", {"x": randn(3, 8), "gate": randn(3, 8), "f": randn(3, 8)}),
    Replaced("gated_linear(gate, up, weight, bias)", "y", {**GATES, "weight": randn(5, 8), "bias": randn(5)}),
    Replaced(
        "moe_mlp(x, top_k_index, top_k_weights, gate_up, down)", "y",
        {"x": randn(3, 8), "top_k_index": torch.tensor([[0, 2], [2, 3], [3, 0]]), "top_k_weights": randn(3, 2),
         "gate_up": randn(4, 12, 8), "down": randn(4, 8, 6)},
    ),
    Replaced("gated_mlp(x, gate, up, down)", "y", MLP),
    Replaced("lora_linear(x, [tigon.LoRA(weight, a, b, scale, bias)])[0]", "y", ADAPTED),
    Replaced("gated_lora_linear(gate, up, tigon.LoRA(weight, a, b, scale, bias))", "y", {**GATES, **ADAPTED}),
    Replaced("dequantize_4bit(FourBit(packed, absmax, table, shape, blocksize=blocksize))", "w", CODES),
    Replaced("rope(q, k, cos, sin)", "q, k", {**HEADS, "unsqueeze_dim": 1}),
    Replaced(
        "rope(q, k, cos, sin, unsqueeze_dim=2)", "q, k", {**HEADS, "k": randn(2, 4, 3, 8), "cos": randn(2, 4, 8),
        "sin": randn(1, 2, 4, 8)[0], "unsqueeze_dim": 2},
    ),
    Replaced(
        "rope(q, k, cos, sin, config=tigon.Rope(mrope_section=mrope_section))", "q, k", {**HEADS, "unsqueeze_dim": 1,
        "mrope_section": [1, 1, 2], "cos": randn(3, 2, 5, 8), "sin": randn(1, 3, 2, 5, 8)[0]}, (1, 0),
    ),
    Replaced("qk_norm_rope(q, k, q_weight, k_weight, cos, sin)", "q, k", {**HEADS, "q_weight": randn(8),
        "k_weight": randn(1, 8)[0], "q_norm": lambda q: tigon.rms_norm(q, randn(8)),
        "k_norm": lambda k: tigon.rms_norm(k, randn(1, 8)[0])}),
    Replaced("softmax(x, dim, scale=scale, mask=mask)", "y", SCORES),
    Replaced("softmax(x, dim, scale=scale, mask=mask)", "y", {**SCORES, "dim": 1}),
    Replaced("softmax(x, -1, scale=scale, mask=mask, causal=True)", "y", SCORES, (1,)),
    Replaced("sparsemax(x)", "y", {"x": 2 * randn(3, 8)}),
    Replaced("outer_softmax(qkv, temperature)", "y", {"qkv": randn(3, 12), "temperature": 0.5}),
    Replaced("cross_entropy(logits, target)", "loss", {"logits": randn(3, 8), "target": TARGET}),
    Replaced(
        "linear_cross_entropy(x, Head(weight, bias), target)", "loss",
        {"x": randn(3, 8), "weight": randn(5, 8), "bias": randn(5), "target": TARGET},
    ),
    Replaced(
        "logprob(logits, target, temperature=temperature)[:2]", "logprob, entropy",
        {"logits": randn(2, 8), "target": TARGET[:2], "temperature": 2.0},
    ),
    Replaced(
        "linear_logprob(x, Head(weight, bias), target, temperature=temperature)[:2]", "logprob, entropy",
        {"x": randn(2, 8), "weight": randn(5, 8), "bias": randn(5), "target": TARGET[:2], "temperature": 2.0},
    ),
    Replaced("kl_div(input, target, reduction='batchmean', temperature=temperature)", "loss", LOGITS),
    Replaced("jsd(log_q, log_p, beta=beta)", "loss", LOGS),
    Replaced("tvd(input, target)", "loss", {"input": randn(3, 8).softmax(-1), "target": randn(2, 3, 8)[1].softmax(-1)}),
    Replaced(
        "embedding(input, weight, padding_idx=padding_idx)", "y",
        {"input": torch.tensor([[0, 4, 2]]), "weight": randn(5, 8), "padding_idx": 2},
    ),
    Replaced(
        "embedding_bag(values=values, weight=weight, offsets=offsets, mode=mode, padding_idx=padding_idx)", "y", BAGS
    ),
    Replaced(
        "embedding_bag(values, weight, mode='sum', field_offsets=field_offsets)", "y",
        {**BAGS, "values": torch.tensor([[[0, 1], [2, 0]]]), "field_offsets": torch.tensor([0, 2, 5])}, (1,),
    ),
    Replaced("quantize_rows(weight)[0]", "codes", {"weight": torch.tensor([[0.0, 3, 255], [-100, 7, 155]])}),
    Replaced(
        "quantized_embedding(codes, scale_offset, values, mode=mode)", "y",
        {"codes": torch.arange(40, dtype=torch.uint8).view(5, 8), "scale_offset": randn(5, 2).half(),
         "values": torch.tensor([[0, 4], [2, 2]]), "mode": "mean"},
    ),
    Replaced(
        "filtered_topk(query, items, k, attributes=attributes, where=where)", "scores, rows",
        {"query": randn(2, 8), "items": randn(40, 8), "k": 3, "attributes": torch.arange(40)[None],
         "where": tigon.RowFilter([[tigon.RowFilter.Literal(0, 5)]])},
    ),
    Replaced("encode_items(rows)[1:3]", "codes, scales", {"rows": randn(40, 8)}),
    Replaced(
        "prefix_attention(q, k, v, tigon.PrefixLayout(prefix_lengths, suffix_lengths))", "o",
        {"q": randn(12, 4, 8), "k": randn(12, 2, 8), "v": randn(1, 12, 2, 8)[0], "prefix_lengths": [3, 2],
         "suffix_lengths": [[1, 2], [3, 1]]},
    ),
    Replaced(
        "item_softmax(query, items, target, bias, scale=scale)",
        "loss",
        {"query": randn(5, 8), "items": randn(30, 8), "target": torch.arange(5), "bias": randn(30), "scale": 0.5},
    ),
]  # fmt: skip
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
