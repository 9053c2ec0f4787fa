"""Row of the log-probabilities of given logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import tigon
from ops_table.cross_entropy import _targets
from ops_table.row import Bad, Case, Op
from tigon.ops.logprob import logprob_reference


def _make(shape, dtype, generator, ignore_index=-100):
    return (3 * torch.randn(shape, generator=generator)).to(dtype), _targets(
        shape[:-1], shape[-1], generator, ignore_index
    )


def _public(logits, target, **options):
    """What has a gradient; test_logprob.py looks at the rest."""
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
    ),
    large=(Case("a row a program", (1000, 128256)),),
)
