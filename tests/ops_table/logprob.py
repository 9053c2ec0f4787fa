"""Log-probability rows: from given logits, from a head, and for a sequence loss computed from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from flat import grpo, grpo_reference, linear_logprob

import tigon
from ops_table.cross_entropy import _targets, _valid
from ops_table.row import Bad, Case, Op, Replaced, randn, sample
from tigon.ops.logprob import logprob_reference


def _make(shape, dtype, generator, ignore_index=-100):
    return (3 * torch.randn(shape, generator=generator)).to(dtype), _targets(
        shape[:-1], shape[-1], generator, ignore_index
    )


def _public(logits, target, **options):
    """The differentiable results; test_logprob.py checks the others."""
    return tuple(tigon.logprob(logits, target, **options)[:2])


def _reference(logits, target, *, ignore_index=-100, temperature=1.0, softcap=None, scale=1.0):
    return tuple(logprob_reference(logits, target, ignore_index, temperature, softcap or 0.0, scale)[:2])


def _eager(logits, target, *, ignore_index=-100, temperature=1.0, softcap=None, scale=1.0):
    z = (logits.float() if logits.dtype != torch.float64 else logits) * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    logp = F.log_softmax(z / temperature, -1)
    valid = target != ignore_index
    of_target = logp.gather(-1, torch.where(valid, target, 0).long().unsqueeze(-1)).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return tuple(torch.where(valid, r, torch.zeros_like(r)) for r in (of_target, entropy))


def _bad(target=None, logits=None):
    return lambda: (
        torch.ones(3, 7) if logits is None else logits,
        torch.zeros(3, dtype=torch.long) if target is None else target,
    )


LOGPROB = Op(
    name="logprob",
    public=_public,
    reference=_reference,
    eager=_eager,
    make=_make,
    cases=(
        Case("masked", (9, 300)),
        Case("least", (1, 2), draws=64),
        Case("aligned", (2, 3, 1024), draws=2),
        Case("beyond one block", (7, 5000), {"temperature": 0.7, "scale": 1.3}),
        Case("softcap", (7, 2100), {"softcap": 5.0, "scale": 0.7, "temperature": 2.0}),
        Case("another ignore_index", (7, 100), {"ignore_index": 3}, {"ignore_index": 3}),
    ),
    empty=((0, 8), (2, 0, 8)),
    bad=(
        Bad(_bad(), r"logprob: temperature must be positive, got 0", {"temperature": 0.0}),
        Bad(_bad(), r"logprob: softcap must be positive, got -1", {"softcap": -1.0}),
        Bad(_bad(), r"logprob: scale must be positive, got -2", {"scale": -2.0}),
        Bad(_bad(logits=torch.ones(3, 7).long()), r"logprob: logits must be \(..., V\) floats, got .*torch.int64"),
        Bad(_bad(target=torch.zeros(4, dtype=torch.long)), r"logprob: target must have shape \(3,\).*got \(4,\)"),
        Bad(_bad(target=torch.tensor([0, 9, 1])), r"logprob: target must lie in \[0, 7\).*got 9", {}, True),
    ),
    launches=("logprob_fwd", "logprob_bwd"),
    models=(
        Case("Llama-3-8B", (8192, 128256)),
        Case("Llama-2-7B", (32768, 32000), {"temperature": 0.9}),
        Case("Gemma-2-2B", (8192, 256000), {"softcap": 30.0}),
        Case("few rows", (8, 151936)),
        Case("odd width, few rows", (8, 50257), {"softcap": 30.0}),
    ),
    large=(Case("a row a program", (2000, 40000)),),
    replaces=(
        Replaced(
            "logprob(logits, target, temperature=temperature)[:2]",
            "logprob, entropy",
            {"logits": sample(2, 8), "target": torch.tensor([0, 4]), "temperature": 2.0},
        ),
    ),
)


# --------------------------------------------------------------------------------------------------------- of a head


def _make_head(shape, dtype, generator, bias=True, lora=True, ignore_index=-100):
    """shape is (..., H, V)."""
    *rows, H, V = shape
    x = randn((*rows, H), dtype, generator)
    weight = (2 * torch.randn((V, H), generator=generator) / H**0.5).to(dtype)
    b = randn((V,), dtype, generator) if bias else None
    a = (torch.randn((3, H), generator=generator) / H**0.5).to(dtype) if lora else None
    up = randn((V, 3), dtype, generator) if lora else None
    return x, weight, b, a, up, _targets(tuple(rows), V, generator, ignore_index)


def _public_head(x, weight, bias, a, b, target, **options):
    lora = None if a is None else (a, b, 0.5)
    return tuple(linear_logprob(x, weight, target, bias=bias, lora=lora, **options)[:2])


def _of_logits(of: Callable[..., Any]) -> Callable[..., Any]:
    def whole(x, weight, bias, a, b, target, **options):
        logits = F.linear(x, weight, bias)
        if a is not None:
            logits = logits + 0.5 * F.linear(F.linear(x, a), b)
        return of(logits, target, **{k: v for k, v in options.items() if k not in _WAYS})

    return whole


def _bad_head(**replaced):
    made = {
        "x": torch.ones(3, 4), "weight": torch.ones(7, 4), "bias": None, "a": None, "b": None,
        "target": torch.zeros(3, dtype=torch.long),
    }  # fmt: skip
    return lambda: tuple((made | replaced).values())


# Options that change the computation but not the result.
_WAYS = ("num_valid", "chunk_bytes", "keep_bytes", "accumulate")
_SMALL = {"chunk_bytes": 1}  # the smallest budget: chunks of 128 rows
LINEAR_LOGPROB = Op(
    name="linear_logprob",
    public=_public_head,
    reference=_of_logits(_reference),
    eager=_of_logits(_eager),
    make=_make_head,
    cases=(
        Case("masked", (11, 24, 100), draws=8),
        Case("least", (1, 1, 2), {}, {"lora": False}, draws=64),
        Case("no bias", (3, 5, 32, 128), {}, {"bias": False, "lora": False}, draws=4),
        Case("two chunks", (140, 16, 60), _SMALL),
        Case("two chunks kept", (2, 70, 16, 60), {**_SMALL, "keep_bytes": 10**9}),
        Case("valid rows alone", (180, 16, 60), {**_SMALL, "num_valid": _valid(180), "accumulate": "weight"}),
        Case("every option", (11, 24, 300), {"softcap": 5.0, "scale": 0.7, "temperature": 2.0}, draws=8),
    ),
    empty=((0, 8, 12),),
    bad=(
        Bad(_bad_head(), r"linear_logprob: temperature must be positive, got 0", {"temperature": 0.0}),
        Bad(_bad_head(), r"ChunkOptions: accumulate must be .*got 'fp16'", {"accumulate": "fp16"}),
        Bad(_bad_head(x=torch.ones(3, 5)), r"linear_logprob: x must be .*got \(3, 5\) and \(7, 4\)"),
        Bad(_bad_head(bias=torch.ones(6)), r"linear_logprob: bias must have shape \(7,\), got \(6,\)"),
        Bad(_bad_head(target=torch.tensor([0, 9, 1])), r"linear_logprob: target must lie in \[0, 7\).*got 9", {}, True),
    ),
    launches=("linear_logprob_fwd", "linear_logprob_bwd"),
    models=(
        Case("Llama-3-8B", (8192, 4096, 128256), {}, {"bias": False, "lora": False}),
        Case("adapted", (8192, 2048, 32000), {"temperature": 0.9}, {"bias": False}),
    ),
    dtensor="refused",  # split by rows; tests/distributed/test_vocabulary_parallel.py: by classes
    products=True,
    large=(Case("several chunks", (1000, 1024, 60), {"chunk_bytes": 2**26}, {"bias": False, "lora": False}),),
    replaces=(
        Replaced(
            "linear_logprob(x, Head(weight, bias), target, temperature=temperature)[:2]",
            "logprob, entropy",
            {
                "x": sample(2, 8),
                "weight": sample(5, 8),
                "bias": sample(5),
                "target": torch.tensor([0, 4]),
                "temperature": 2.0,
            },
        ),
    ),
)


# -------------------------------------------------------------- of sequences: one loss stands for all of its kind


def _make_grpo(shape, dtype, generator):
    """shape is (S, T, H, V). Ratios are near 1: at large ratios, rounding of the logits dominates the error."""
    S, T = shape[:2]
    x, weight, bias, *_, target = _make_head(shape, dtype, generator)
    advantages, old = torch.randn(S, generator=generator), 0.1 * torch.randn((S, T), generator=generator)
    if not x.is_meta:
        logp = F.log_softmax(F.linear(x.float(), weight.float(), bias.float()), -1)
        old += logp.gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return x, weight, bias, target, advantages, old


def _grpo(x, weight, bias, target, advantages, old, **options):
    return grpo(x, weight, target, bias=bias, advantages=advantages, old_logprob=old, **options)[0]


def _whole_grpo(x, weight, bias, target, advantages, old, **options):
    options = {k: v for k, v in options.items() if k not in (*_WAYS, "lengths")}
    return grpo_reference(x, weight, target, bias=bias, advantages=advantages, old_logprob=old, **options)[0]


def _bad_grpo(**replaced):
    made = {
        "x": torch.ones(2, 3, 4), "weight": torch.ones(7, 4), "bias": None, "target": torch.zeros(2, 3).long(),
        "advantages": torch.ones(2), "old": torch.zeros(2, 3),
    }  # fmt: skip
    return lambda: tuple((made | replaced).values())


GRPO = Op(
    name="grpo",
    public=_grpo,
    reference=_whole_grpo,
    eager=_whole_grpo,
    make=_make_grpo,
    cases=(
        Case("masked", (5, 7, 24, 100), {"loss_type": "grpo", "entropy_coefficient": 0.1}, draws=8),
        Case("two chunks", (4, 40, 16, 60), {**_SMALL, "loss_type": "bnpo"}, draws=4),
        Case("of sequences", (4, 40, 16, 60), {**_SMALL, "importance_sampling_level": "sequence", "loss_type": "grpo"}),
    ),
    empty=((2, 0, 8, 12),),  # without sequences the loss is 0, the formula's mean NaN: test_policy.py
    bad=(
        Bad(_bad_grpo(), r"grpo: loss_type must be one of .*got 'ppo'", {"loss_type": "ppo"}),
        Bad(_bad_grpo(x=torch.ones(2, 3, 5)), r"grpo: x must be \(S, T, H\) and weight .*got \(2, 3, 5\) and \(7, 4\)"),
        Bad(_bad_grpo(bias=torch.ones(6)), r"grpo: bias must have shape \(7,\), got \(6,\)"),
        Bad(_bad_grpo(target=torch.full((2, 3), 9)), r"grpo: target must lie in \[0, 7\).*got 9", {}, True),
    ),
    launches=("token_loss_fwd",),
    models=(
        Case("Llama-3-8B", (16, 1024, 4096, 128256), {"loss_type": "grpo"}),
        Case("short completions", (16, 4, 2048, 151936)),
        Case(
            "long completions", (2, 2000, 2048, 151936), {"loss_type": "bnpo", "entropy_coefficient": 0.1, "delta": 2.0}
        ),
        Case("of sequences", (64, 16, 2048, 151936), {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
        Case("vespo", (64, 16, 2048, 151936), {"loss_type": "vespo", "off_policy_mask_threshold": 0.1}),
    ),
    wide_loads=False,  # its own kernels read per-token and per-row numbers; logprob's kernels read the logits
    roundings=32,  # advantages with both signs cancel in the sum: eager's error is luck
    fixed=(4, 5),
    dtensor="refused",
    products=True,
)
