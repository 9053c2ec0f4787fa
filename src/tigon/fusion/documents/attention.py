"""Attention of packed batches by `tigon.varlen_attention`, in the modules that use transformers' attention registry.

The rewritten forward of such a module sees a `Registry` in transformers' place. Where the module's mask is a
`PackedMask`, attention runs on the documents; any other call runs the function that the configuration names.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.fusion.documents.masks import PackedMask
from tigon.fusion.documents.recognize import why_other_eager
from tigon.fusion.shared_prefix.attention import HARMLESS, REGISTRY, find_eager
from tigon.kernels import autocast_dtype
from tigon.ops.prefix_attention.checks import WIDEST
from tigon.ops.varlen_attention import varlen_attention

SINKS = "s_aux"  # transformers' name for the logits of attention sinks


class Registry:
    """transformers' attention functions, which also take the mask of a packed batch.

    why_not_eager: why the module's own eager attention cannot, or None. A configuration may name eager attention
        after fusing.
    """

    def __init__(self, registry: Any, why_not_eager: str | None = None) -> None:
        self.registry, self.why_not_eager = registry, why_not_eager

    def get_interface(self, name: Any, default: Callable[..., Any]) -> Callable[..., Any]:
        function = self.registry.get_interface(name, default)
        return functools.partial(attend, function, self.why_not_eager if function is default else None)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return functools.partial(attend, self.registry[name], None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.registry, name)


def make_globals(fn: types.FunctionType) -> dict[str, Any]:
    """What the rewritten forward of an attention module sees in place of transformers' registry."""
    return {REGISTRY: Registry(fn.__globals__[REGISTRY], why_other_eager(find_eager(fn)))}


def attend(
    function: Callable[..., Any], why_not: str | None, module: Any, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Any = None, *args: Any, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(B, H, T, D) heads → (B, T, H, D), by documents if the mask is a packed batch's, else by the function given.

    why_not: why the documents' attention would not be the function's; None otherwise.
    """
    if not isinstance(attention_mask, PackedMask):
        return function(module, query, key, value, attention_mask, *args, **options)  # type: ignore[no-any-return]
    call = attention_mask.call
    autocast = autocast_dtype(query.device.type)
    if autocast is not None and query.dtype != torch.float64:
        query, key, value = (t.to(autocast) for t in (query, key, value))  # rotated heads may be wider than values
    why = why_not or _why_dense(module, query, key, value, call.documents.shape, options)
    if why:
        mask = attention_mask.build(why)
        mask = mask.to(query.device) if isinstance(mask, Tensor) else mask
        return function(module, query, key, value, mask, *args, **options)  # type: ignore[no-any-return]
    width = value.shape[-1]
    if width < query.shape[-1]:  # multi-head latent attention: values are narrower than keys
        value = F.pad(value, (0, query.shape[-1] - width))
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    o = varlen_attention(
        q, k, v, call.documents.offsets.to(q.device), scale=options.get("scaling"), window=attention_mask.window,
        softcap=options.get("softcap"), sinks=options.get(SINKS),
    )  # fmt: skip
    call.ledger.count("documents", type(module).__name__)
    return o.unflatten(0, call.documents.shape)[..., :width], None


def _why_dense(
    module: Any, q: Tensor, k: Tensor, v: Tensor, shape: tuple[int, int], options: dict[str, Any]
) -> str | None:
    """Why packed attention needs the configured function and the dense mask; None otherwise."""
    if options.get("dropout"):
        return f"attention has dropout {options['dropout']}"
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        return "attention reads in both directions"
    for option, given in options.items():
        if isinstance(given, Tensor) and option not in HARMLESS and option != SINKS:
            return f"attention takes {option}"
    if any(hasattr(t, "device_mesh") for t in (q, k, v, options.get(SINKS))):
        return "attention takes DTensors"
    if q.shape[-1] > WIDEST or v.shape[-1] > k.shape[-1]:
        return f"heads of {q.shape[-1]} and {v.shape[-1]} numbers do not fit"
    if not q.dtype == k.dtype == v.dtype:
        return f"queries are {q.dtype}, keys {k.dtype}, values {v.dtype}"
    if any((t.shape[0], t.shape[2]) != shape for t in (q, k, v)) or q.shape[1] % k.shape[1]:
        return "keys come from elsewhere"
    return None
