"""Attention of a vision tower that has several images in one row: one call of `tigon.varlen_attention` for all of them.

Such a tower asks for flash attention by name, and then attends once, by the images' offsets. Otherwise it splits
queries, keys and values on the host and attends to one image, or one window, after another:

    if is_flash_attention_requested(self.config):
        attn_output, _ = attention_interface(self, q, k, v, attention_mask=None, cu_seq_lens_q=cu_seqlens, …)
    else:
        splits = [torch.split(tensor, lengths.tolist(), dim=2) for tensor in (q, k, v)]
        …

The rewritten forward takes the first way, with an attention function that runs on the offsets. Pixtral's tower chooses
once for its layers, between the offsets and a dense mask over all images.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.fusion.engine.bytecode import list_names
from tigon.fusion.engine.ledger import Ledger
from tigon.fusion.engine.part import Part, Site, Stage, register
from tigon.fusion.engine.patch import Patch, is_functorch_active
from tigon.fusion.engine.reasons import REPLACED, Reason
from tigon.kernels import autocast_dtype
from tigon.ops.prefix_attention.checks import WIDEST
from tigon.ops.varlen_attention import varlen_attention

REGISTRY, FLASH = "ALL_ATTENTION_FUNCTIONS", "is_flash_attention_requested"
OFFSETS = "cu_seq_lens_q", "cu_seq_lens_k"
# Options that change attention; and tensors that do not.
CHANGES = ("softcap", "sliding_window")
HARMLESS = {*OFFSETS, "max_length_q", "max_length_k", "position_ids"}
WHAT = "attention of all images in a row by tigon.varlen_attention"


class ImagesPart(Part):
    """Rewrites the attention of a tower, and the tower where that makes the mask, so that all images attend at once."""

    kind, stage = "images", Stage.AROUND
    idle = "the batch had no images"

    def fuse(self, site: Site, module: nn.Module) -> None:
        forward = type(module).forward
        attention = [module] if attends_by_image(forward) else []
        if not attention and passes_offsets(forward):
            attention = [m for m in module.modules() if m is not module and REGISTRY in read_names(type(m).forward)]
        made: dict[nn.Module, Any] = {}
        for m in dict.fromkeys((*attention, module)) if attention else ():
            reason = site.why_not(m) if site.find_patch(m) is None else None
            made[m] = _rewrite(site, m) if reason is None else reason
        wrong = next((reason for reason in made.values() if isinstance(reason, Reason)), None)
        for m, rewritten in made.items() if wrong is None else ():
            if site.find_patch(m) is None:
                site.install(m, rewritten, Patch(self, site.ledger))
            else:
                site.rewrite(self, m, rewritten)
        for m in attention:
            if wrong is None:
                site.record_fused(self, m, WHAT, key=type(m).__name__)
            else:
                site.record_skipped(self, m, wrong)

    def forward_of_copy(self, site: Site, module: nn.Module) -> Callable[..., Any] | None:
        made: Callable[..., Any] = _rewrite(site, module)
        return made


def read_names(forward: Any) -> set[str]:
    """The global names and attributes that a forward itself reads."""
    code = getattr(inspect.unwrap(forward), "__code__", None) if callable(forward) else None
    return set() if code is None else {*code.co_names}


def passes_offsets(forward: Any) -> bool:
    """Whether a forward passes the images' offsets to attention if that is flash attention."""
    if FLASH not in read_names(forward):
        return False
    # The names of keyword arguments stand alone, or together in one constant.
    constants = [n for c in inspect.unwrap(forward).__code__.co_consts for n in (c if isinstance(c, tuple) else (c,))]
    return all(name in constants for name in OFFSETS)


def attends_by_image(forward: Any) -> bool:
    """Whether a forward has both ways: one call with offsets, and one per image."""
    if REGISTRY not in read_names(forward) or not passes_offsets(forward):
        return False
    return "split" in list_names(inspect.unwrap(forward).__code__)


def _rewrite(site: Site, module: nn.Module) -> Any:
    """The module's forward, as other parts installed it, with other attention functions; or the Reason why not."""
    forward = vars(module)["forward"].__func__ if site.find_patch(module) is not None else type(module).forward
    names = read_names(forward) & {FLASH, REGISTRY}
    if not names:
        return REPLACED
    # transformers' own functions, also in a copied model, whose forward may have those of the first model's ledger.
    own = inspect.unwrap(type(module).forward).__globals__
    return site.get_rewritten(forward, "images", lambda _: {n: MAKE[n](own[n], site.ledger) for n in names})


def ask_for_offsets(asks_for_flash: Callable[..., bool], ledger: Ledger) -> Callable[..., bool]:
    """What a forward asks in place of `is_flash_attention_requested`."""

    def takes_offsets(config: Any = None, *args: Any, **kwargs: Any) -> bool:
        is_ours = ledger.active and not is_functorch_active() and _is_dense(config)
        return is_ours or asks_for_flash(config, *args, **kwargs)

    return takes_offsets


def _is_dense(config: Any) -> bool:
    """Whether a configuration names attention without offsets, whose weights nobody has asked for."""
    name = getattr(config, "_attn_implementation", "")
    return name in (None, "sdpa", "eager") and not getattr(config, "output_attentions", False)


class ImageRegistry:
    """transformers' attention functions, which run on offsets where the configured function takes none."""

    def __init__(self, registry: Any, ledger: Ledger) -> None:
        self.registry, self.ledger = registry, ledger

    def get_interface(self, name: Any, default: Callable[..., Any]) -> Callable[..., Any]:
        found: Callable[..., Any] = self.registry.get_interface(name, default)
        return functools.partial(attend_to_images, found, self.ledger) if name in (None, "sdpa", "eager") else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.registry, name)


MAKE: dict[str, Callable[..., Any]] = {FLASH: ask_for_offsets, REGISTRY: ImageRegistry}


def attend_to_images(
    function: Callable[..., Any], ledger: Ledger, module: Any, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Any = None, **options: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """(1, H, T, D) heads → (1, T, H, D), each image by itself. function: the configured attention."""
    offsets = options.get("cu_seq_lens_q")
    if offsets is None:
        return function(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    autocast, name = autocast_dtype(query.device.type), type(module).__name__
    if autocast is not None and query.dtype != torch.float64:
        query, key, value = (t.to(autocast) for t in (query, key, value))  # rotated heads may be wider than values
    causal = options.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if causal is None else causal
    why = "attention was causal" if is_causal else _why_apart(query, key, value, attention_mask, options)
    if why is not None:
        ledger.count_fallback("images", name, why)
        return _attend_one_by_one(function, module, query, key, value, attention_mask, **options)
    ledger.count("images", name)
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    o = varlen_attention(q, k, v, offsets.to(q.device), scale=options.get("scaling"), causal=False)
    return o[None], None


def _why_apart(q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> str | None:
    """Why each image needs a call of the configured function, a clause; None otherwise."""
    offsets, others = (options[name] for name in OFFSETS)
    if options.get("output_attentions"):
        return "its weights were asked for"
    if options.get("dropout"):
        return f"attention had dropout {options['dropout']}"
    if mask is not None:
        return "attention had a mask"
    for name, given in options.items():
        if (isinstance(given, Tensor) and name not in HARMLESS) or (name in CHANGES and given is not None):
            return f"attention took {name}"
    if others is not offsets or not q.dtype == k.dtype == v.dtype or any(hasattr(t, "device_mesh") for t in (q, k, v)):
        return "its keys were of other images, dtypes or devices than its queries"
    if q.shape[0] != 1 or k.shape != v.shape or q.shape[1] % k.shape[1] or q.shape[-1] > WIDEST:
        return f"heads of {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)} do not fit"
    return None


def _attend_one_by_one(
    function: Callable[..., Any], module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *,
    cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor, max_length_q: Any = None, max_length_k: Any = None, **options: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """What the tower itself does without flash attention."""
    lengths = cu_seq_lens_q.diff().tolist()
    images = zip(*(t.split(lengths, 2) for t in (query, key, value)), strict=True)
    found = [function(module, q, k, v, mask, **options) for q, k, v in images]
    o, own = torch.cat([o for o, _ in found], 1), [w for _, w in found]
    if any(w is None for w in own):
        return o, None
    weights = query.new_zeros((*query.shape[:3], query.shape[2]))  # as with a dense mask over all images
    for start, w in zip(cu_seq_lens_q.tolist(), own, strict=False):
        weights[..., start : start + w.shape[-1], start : start + w.shape[-1]] = w
    return o, weights


register(ImagesPart())
