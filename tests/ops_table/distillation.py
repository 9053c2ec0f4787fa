"""Distillation rows: from a teacher's head, and from a teacher's likeliest classes."""

from __future__ import annotations

from typing import Any

import torch
from flat import distill, distill_reference, distill_topk, distill_topk_reference
from torch import Tensor

from ops_table.cross_entropy import _targets, _valid
from ops_table.row import Bad, Case, Op, randn


def _head(shape: tuple[int, ...], H: int, V: int, dtype: torch.dtype, generator: torch.Generator):
    return randn((*shape, H), dtype, generator), (2 * torch.randn((V, H), generator=generator) / H**0.5).to(dtype)


def _make(shape, dtype, generator, bias=True, targets=True):
    """shape is (..., H, V). The teacher is half again as wide as the student."""
    *rows, H, V = shape
    rows = tuple(rows)
    x, weight = _head(rows, H, V, dtype, generator)
    teacher = _head(rows, H + H // 2, V, dtype, generator)
    target = _targets(rows, V, generator) if targets else None
    biases = (randn((V,), dtype, generator), randn((V,), dtype, generator)) if bias else (None, None)
    return x, weight, *biases, *teacher, target


def _make_topk(shape, dtype, generator, bias=True, targets=True, K=5):
    """shape is (..., H, V). Every third row lacks a class."""
    *rows, H, V = shape
    rows = tuple(rows)
    x, weight = _head(rows, H, V, dtype, generator)
    if x.is_meta:
        logprobs, ids = torch.empty((*rows, K), dtype=torch.float32), torch.empty((*rows, K), dtype=torch.long)
    else:
        logprobs, ids = (2 * torch.randn((*rows, V), generator=generator)).log_softmax(-1).topk(K)
        missing = (torch.arange(x[..., 0].numel()) % 3 == 0).view(rows)
        logprobs[..., -1] = torch.where(missing, -torch.inf, logprobs[..., -1])
        ids[..., -1] = torch.where(missing, ids[..., 0], ids[..., -1])
    b = randn((V,), dtype, generator) if bias else None
    return x, weight, b, ids, logprobs, _targets(rows, V, generator) if targets else None


def _public(x, weight, bias, teacher_bias, teacher_x, teacher_weight, target, **options):
    """The loss, which has a gradient; test_distillation.py checks the metrics."""
    return distill(x, weight, teacher_x, teacher_weight, target, bias=bias, teacher_bias=teacher_bias, **options)[0]


def _public_topk(x, weight, bias, ids, logprobs, target, **options):
    return distill_topk(x, weight, ids, logprobs, target, bias=bias, **options)[0]


# Options that change the computation but not the result.
_WAYS = ("num_valid", "chunk_bytes", "accumulate")


def _reference(x, weight, bias, teacher_bias, teacher_x, teacher_weight, target, **options):
    options = {k: v for k, v in options.items() if k not in _WAYS}
    biases = {"bias": bias, "teacher_bias": teacher_bias}
    return distill_reference(x, weight, teacher_x, teacher_weight, target, **biases, **options)[0]


def _reference_topk(x, weight, bias, ids, logprobs, target, **options):
    options = {k: v for k, v in options.items() if k not in _WAYS}
    return distill_topk_reference(x, weight, ids, logprobs, target, bias=bias, **options)[0]


def _bad(replaced: dict[str, Any] | None = None) -> Any:
    made = {
        "x": torch.ones(3, 4), "weight": torch.ones(7, 4), "bias": None, "teacher_bias": None,
        "teacher_x": torch.ones(3, 5), "teacher_weight": torch.ones(7, 5), "target": torch.zeros(3, dtype=torch.long),
    }  # fmt: skip
    return lambda: tuple((made | (replaced or {})).values())


def _bad_topk(**replaced: Tensor) -> Any:
    made = {
        "x": torch.ones(3, 4), "weight": torch.ones(7, 4), "bias": None, "ids": torch.zeros(3, 2, dtype=torch.long),
        "logprobs": -torch.ones(3, 2), "target": torch.zeros(3, dtype=torch.long),
    }  # fmt: skip
    return lambda: tuple((made | replaced).values())


def _bad_options(name: str, inputs: Any, none: Any) -> tuple[Bad, ...]:
    """Calls that both refuse. none: a call without a target."""
    return (
        Bad(inputs(), rf"{name}: loss_type must be one of .*'reverse_kl'.*got 'ce'", {"loss_type": "ce"}),
        Bad(inputs(), rf"{name}: reduction must be one of .*got 'none'", {"reduction": "none"}),
        Bad(inputs(), r"ChunkOptions: accumulate must be one of .*got 'fp16'", {"accumulate": "fp16"}),
        Bad(inputs(), rf"{name}: beta must lie in \[0, 1\], got 2", {"beta": 2}),
        Bad(inputs(), rf"{name}: hard_weight must lie in \[0, 1\], got -1", {"hard_weight": -1}),
        Bad(inputs(), rf"{name}: temperature must be positive, got 0", {"temperature": 0}),
        Bad(inputs(), rf"{name}: softcap must be positive, got -1", {"softcap": -1.0}),
        Bad(inputs(), rf"{name}: divisor goes with reduction='batchmean'", {"divisor": 3, "reduction": "sum"}),
        Bad(inputs(), rf"{name}: divisor must be a number or a 0-d tensor", {"divisor": torch.ones(2)}),
        Bad(none, rf"{name}: hard_weight goes with a target, got None", {"hard_weight": 0.5}),
        Bad(none, rf"{name}: chunks.valid_tokens goes with a target, got None", {"num_valid": 2}),
        Bad(inputs(), r"ChunkOptions: chunk_bytes must be positive, got -5", {"chunk_bytes": -5}),
    )


# The smallest budget: chunks of 128 rows.
_SMALL = {"chunk_bytes": 1}
_EVERY_OPTION = {
    "hard_weight": 0.4, "temperature": 2.0, "temperature_squared": True, "softcap": 5.0, "scale": 0.7,
}  # fmt: skip
_TEACHER = {"teacher_softcap": 6.0, "teacher_scale": 0.9}
DISTILL = Op(
    name="distill",
    public=_public,
    reference=_reference,
    eager=_reference,
    make=_make,
    cases=(
        Case("jsd", (11, 24, 100), {"beta": 0.3}, draws=8),
        Case("kl", (11, 24, 100), {"loss_type": "kl"}, {"bias": False, "targets": False}, draws=8),
        Case("reverse kl summed", (2, 70, 16, 60), {**_SMALL, "loss_type": "reverse_kl", "reduction": "sum"}),
        # The slope jumps where p = q: rounded logits land on either side by luck.
        Case("tvd, valid rows alone", (180, 16, 60), {**_SMALL, "loss_type": "tvd", "num_valid": _valid(180)}, draws=4),
        Case("cosine", (11, 24, 100), {"loss_type": "cosine", "hard_weight": 0.5}, draws=8),
        Case("beyond one block", (7, 16, 5000), {"hard_weight": 0.5, "divisor": torch.tensor(5)}, draws=2),
        Case("every option", (11, 24, 300), {**_EVERY_OPTION, **_TEACHER, "divisor": 5.0}, draws=32),
    ),
    empty=((0, 8, 12),),
    bad=(
        *_bad_options("distill", _bad, _bad({"target": None})),
        Bad(_bad(), r"distill: temperature must be 1 for .*got 2", {"temperature": 2.0, "loss_type": "cosine"}),
        Bad(_bad(), r"distill: teacher.head.scale must be positive, got 0", {"teacher_scale": 0}),
        Bad(_bad({"x": torch.ones(3, 5)}), r"distill: x must be .*got \(3, 5\) and \(7, 4\)"),
        Bad(_bad({"teacher_x": torch.ones(4, 5)}), r"distill: teacher.x must be .*got \(4, 5\) and \(7, 5\)"),
        Bad(_bad({"teacher_weight": torch.ones(8, 5)}), r"distill: teacher.x must be .*got \(3, 5\) and \(8, 5\)"),
        Bad(_bad({"teacher_bias": torch.ones(6)}), r"distill: teacher.bias must have shape \(7,\), got \(6,\)"),
        Bad(_bad({"weight": torch.ones(7, 4).half()}), r"distill: weight must have x's dtype torch.float32, got .*16"),
        Bad(_bad({"target": torch.zeros(4).long()}), r"distill: target must have shape \(3,\).*got \(4,\)"),
        Bad(_bad({"target": torch.tensor([0, 9, 1])}), r"distill: target must lie in \[0, 7\).*got 9", {}, True),
    ),
    launches=("distill_fwd",),
    models=(
        Case("Llama-3-8B", (4096, 4096, 128256), {}, {"bias": False}),
        Case("forward KL", (4096, 4096, 128256), {"loss_type": "kl"}, {"bias": False}),
        Case("reverse KL", (4096, 2048, 151936), {"loss_type": "reverse_kl"}, {"bias": False}),
        Case("TVD", (4096, 2048, 32000), {"loss_type": "tvd"}),
        Case("cosine", (4096, 2048, 128256), {"loss_type": "cosine", "hard_weight": 0.5}),
        Case("cosine, capped", (4096, 2048, 32000), {"loss_type": "cosine", "softcap": 30.0, **_TEACHER}),
        Case("Hinton", (4096, 4096, 128256), {"loss_type": "kl", "temperature": 2.0, "hard_weight": 0.5}),
        Case("hard too", (4096, 4096, 128256), {"hard_weight": 0.5}),
        Case("every option", (4096, 2048, 256000), {**_EVERY_OPTION, **_TEACHER}),
    ),
    fixed=(3, 4, 5),
    dtensor="refused",  # split by rows; tests/distributed/test_vocabulary_parallel.py: by classes
    products=True,
    roundings=8,  # a difference between nearly equal terms: eager's error is luck
)
DISTILL_TOPK = Op(
    name="distill_topk",
    public=_public_topk,
    reference=_reference_topk,
    eager=_reference_topk,
    make=_make_topk,
    cases=(
        Case("kl", (11, 24, 100), draws=8),
        Case("jsd renormalized", (11, 24, 100), {"rest": "renormalize", "loss_type": "jsd"}, draws=8),
        Case("reverse kl dropped", (140, 16, 60), {**_SMALL, "rest": "drop", "loss_type": "reverse_kl"}),
        Case("beyond one block", (7, 16, 5000), {"hard_weight": 0.5, "loss_type": "jsd"}, {"K": 40}, draws=2),
        Case("every option", (11, 24, 300), {**_EVERY_OPTION, "rest": "renormalize"}, draws=8),
    ),
    empty=((0, 8, 12),),
    bad=(
        *_bad_options("distill_topk", _bad_topk, _bad_topk(target=None)),
        Bad(_bad_topk(), r"distill_topk: rest must be one of .*got 'head'", {"rest": "head"}),
        Bad(_bad_topk(), r"distill_topk: loss_type must be one of .*got 'cosine'", {"loss_type": "cosine"}),
        Bad(_bad_topk(logprobs=torch.ones(3, 3)), r"distill_topk: teacher.ids and .*got \(3, 2\) and \(3, 3\)"),
        Bad(_bad_topk(ids=torch.ones(3, 2)), r"distill_topk: teacher.ids must be integers .*got torch.float32"),
        Bad(_bad_topk(ids=torch.full((3, 2), 7)), r"distill_topk: teacher.ids must lie in \[0, 7\), got 7", {}, True),
    ),
    launches=("distill_fwd",),
    models=(
        Case("Llama-3-8B", (4096, 4096, 128256), {}, {"bias": False, "K": 64}),
        Case("JSD", (4096, 2048, 151936), {"loss_type": "jsd", "hard_weight": 0.5}, {"K": 20}),
        Case("renormalized", (4096, 2048, 128256), {"rest": "renormalize", "hard_weight": 0.5}, {"K": 128}),
        Case("every option", (4096, 2048, 256000), {**_EVERY_OPTION, "rest": "drop"}, {"K": 64}),
    ),
    fixed=(4,),
    dtensor="refused",
    products=True,
    roundings=8,
    wide_loads=False,  # besides the row, the teacher's classes are read: a few numbers per thread, and gathers
)
