"""Head losses with all options as keywords, for test tables that mix them.

Users group them: a `tigon.Head`, a frozen object of the family's options, a `tigon.losses.ChunkOptions`. A case
table lists only deviations from the defaults, from any group; this module assigns them to their groups.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tigon
from tigon import losses
from tigon.losses.distillation import distill_reference as _distill_reference
from tigon.losses.distillation import distill_topk_reference as _distill_topk_reference
from tigon.losses.family import FAMILIES
from tigon.losses.head.chunk_options import ChunkOptions
from tigon.losses.policy import grpo_reference as _grpo_reference
from tigon.losses.preference import reference as _preference_reference
from tigon.losses.token_loss import token_loss as _token_loss

HEAD = ("bias", "softcap", "scale", "group", "lora")
# Field names per class, looked up here since torch.compile does not trace dataclasses.fields.
KINDS = ("GRPO", "RLOO", "DPO", "ORPO", "CPO", "SimPO", "KTO", "Distill", "DistillTopK")
FIELDS = {kind: tuple(f.name for f in dataclasses.fields(getattr(losses, kind))) for kind in KINDS}
FIELDS["CrossEntropy"] = tuple(f.name for f in dataclasses.fields(tigon.CrossEntropy))


def taken(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Pop and return the options with these names."""
    return {name: options.pop(name) for name in names if name in options}


def head_of(weight, options):
    return tigon.Head(weight, **taken(options, *HEAD))


def chunk_options_of(options):
    found = taken(options, "chunk_bytes", "accumulate", "logits_dtype", "keep_bytes", "valid_tokens", "fp8")
    for name in ("num_valid", "lengths"):
        if name in options:
            found["valid_tokens"] = options.pop(name)
    return ChunkOptions(**found)


def config_of(kind, options):
    return kind(**taken(options, *FIELDS[kind.__name__]))


def ref_of(options):
    """A reference's head, as ref_x, ref_weight and ref_bias."""
    if options.get("ref_x") is None:
        taken(options, "ref_x", "ref_weight", "ref_bias")
        return None
    return losses.Hidden(options.pop("ref_x"), tigon.Head(options.pop("ref_weight"), options.pop("ref_bias", None)))


def cross_entropy(logits, target, weight=None, **options):
    return tigon.cross_entropy(logits, target, weight, config=config_of(tigon.CrossEntropy, options), **options)


def linear_cross_entropy(x, weight, target, **options):
    head, chunks, config = head_of(weight, options), chunk_options_of(options), config_of(tigon.CrossEntropy, options)
    if "main_grad" in options:
        options["main_grad"] = losses.MainGrad(options["main_grad"], options.pop("main_grad_scale", 1.0))
    return tigon.linear_cross_entropy(x, head, target, config=config, chunks=chunks, **options)


def linear_logprob(x, weight, target, **options):
    head, chunks = head_of(weight, options), chunk_options_of(options)
    return tigon.linear_logprob(x, head, target, chunks=chunks, **options)


def _grpo(function, x, weight, target, *, advantages, **options):
    head, config = head_of(weight, options), config_of(losses.GRPO, options)
    ref = ref_of(options)
    if ref is None:
        ref = options.pop("ref_logprob", None)
    old = options.pop("old_logprob", None)
    sampler = losses.Sampler(options.pop("sampler_logprob", None), options.pop("importance_sampling_ratio", None))
    rollout = losses.Rollout(advantages, old, ref, sampler)
    return function(x, head, target, rollout, config=config, **options)


def grpo(x, weight, target, **options):
    chunks = chunk_options_of(options)
    return _grpo(losses.grpo, x, weight, target, chunks=chunks, **options)


def grpo_reference(x, weight, target, **options):
    return _grpo(_grpo_reference, x, weight, target, **options)


def rloo(x, weight, target, *, advantages, **options):
    head, config, chunks = head_of(weight, options), config_of(losses.RLOO, options), chunk_options_of(options)
    rollout = losses.Rollout(advantages, options.pop("old_logprob", None))
    return losses.rloo(x, head, target, rollout, config=config, chunks=chunks, **options)


def dpo(x, weight, target, **options):
    head, config, chunks = head_of(weight, options), config_of(losses.DPO, options), chunk_options_of(options)
    ref = ref_of(options)
    if "ref_chosen_logps" in options:
        ref = options.pop("ref_chosen_logps"), options.pop("ref_rejected_logps")
    return losses.dpo(x, head, target, ref, config=config, chunks=chunks, **options)


def orpo(x, weight, target, **options):
    head, config, chunks = head_of(weight, options), config_of(losses.ORPO, options), chunk_options_of(options)
    return losses.orpo(x, head, target, config=config, chunks=chunks, **options)


def cpo(x, weight, target, **options):
    head, config, chunks = head_of(weight, options), config_of(losses.CPO, options), chunk_options_of(options)
    return losses.cpo(x, head, target, config=config, chunks=chunks, **options)


def simpo(x, weight, target, **options):
    head, config, chunks = head_of(weight, options), config_of(losses.SimPO, options), chunk_options_of(options)
    return losses.simpo(x, head, target, config=config, chunks=chunks, **options)


def preference_reference(kind, logits, target, **options):
    """The reference of a preference loss, by its options' class."""
    config, ref = config_of(getattr(losses, kind), options), options.pop("ref_logits", None)
    if "ref_chosen_logps" in options:
        ref = options.pop("ref_chosen_logps"), options.pop("ref_rejected_logps")
    own = (ref,) if kind == "DPO" else ()
    if kind == "KTO":
        own = options.pop("label"), options.pop("ref_logps", ref), options.pop("kl", 0.0)
    function = getattr(_preference_reference, f"{kind.lower()}_reference")
    return function(logits, target, *own, config=config, **options)


def kto(x, weight, target, label, **options):
    head, config, chunks = head_of(weight, options), config_of(losses.KTO, options), chunk_options_of(options)
    kl, other = options.pop("kl", None), losses.Hidden(None, None)
    if "ref_weight" in options:
        other = losses.Hidden(None, tigon.Head(options["ref_weight"], options.get("ref_bias")))
    ref = ref_of(options) if "ref_x" in options else options.pop("ref_logps")
    if "kl_logps" in options:
        kl = options.pop("kl_logps"), options.pop("ref_kl_logps")
    elif "kl_x" in options:
        theirs = other._replace(x=options.pop("ref_kl_x")) if "ref_kl_x" in options else options.pop("ref_kl_logps")
        kl = losses.Mismatched(options.pop("kl_x"), options.pop("kl_target"), theirs, options.pop("kl_lengths", None))
    taken(options, "ref_weight", "ref_bias")
    return losses.kto(x, head, target, losses.Unpaired(label, ref, kl), config=config, chunks=chunks, **options)


def _distill(function, x, weight, teacher_x, teacher_weight, target=None, **options):
    head, config = head_of(weight, options), config_of(losses.Distill, options)
    theirs = {name: options.pop(f"teacher_{name}") for name in HEAD if f"teacher_{name}" in options}
    teacher = losses.Hidden(teacher_x, tigon.Head(teacher_weight, **theirs))
    return function(x, head, teacher, target, config=config, **options)


def distill(x, weight, teacher_x, teacher_weight, target=None, **options):
    chunks = chunk_options_of(options)
    return _distill(losses.distill, x, weight, teacher_x, teacher_weight, target, chunks=chunks, **options)


def distill_reference(*inputs, **options):
    return _distill(_distill_reference, *inputs, **options)


def _distill_topk(function, x, weight, ids, logprobs, target=None, **options):
    head, config = head_of(weight, options), config_of(losses.DistillTopK, options)
    return function(x, head, losses.TopK(ids, logprobs), target, config=config, **options)


def distill_topk(x, weight, ids, logprobs, target=None, **options):
    chunks = chunk_options_of(options)
    return _distill_topk(losses.distill_topk, x, weight, ids, logprobs, target, chunks=chunks, **options)


def distill_topk_reference(*inputs, **options):
    return _distill_topk(_distill_topk_reference, *inputs, **options)


def token_loss(
    key, family_options, x, weight, target, bias=None, *, reference=(None, None, None), tensors=(), **options
):
    options["bias"] = bias
    head, chunks = head_of(weight, options), chunk_options_of(options)
    ref_x, ref_weight, ref_bias = reference
    ref = None if ref_x is None else losses.Hidden(ref_x, tigon.Head(ref_weight, ref_bias))
    kind = FAMILIES[key]
    own = kind.Tensors(*tensors)
    family = kind.for_tensors(kind.Options(*family_options), own)
    return _token_loss(family, own, x, head, target, reference=ref, chunks=chunks, **options)
