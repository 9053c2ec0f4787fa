"""Attention of packed batches, and of rows under eager attention or in windows, in decoders of transformers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from tigon.fusion.engine.part import Part, Site, Stage, register
from tigon.fusion.engine.patch import Patch
from tigon.fusion.engine.reasons import REPLACED, Reason

WHAT = "attention of packed batches by tigon.varlen_attention"
IN_WINDOWS = "attention of packed batches, and in windows, by tigon.varlen_attention"
NOT_EAGER = "attention of packed batches, and in place of eager attention, by tigon.varlen_attention"
READS_TYPE = Reason("it changes its mask by the mask's type, so packed batches have a dense mask")
NO_REGISTRY = Reason("no causal attention in it uses transformers' registry, so packed batches have a dense mask")


class DocumentsPart(Part):
    """Rewrites decoders, so that they make no dense mask for packed batches, and their attention."""

    kind, stage = "documents", Stage.LAST
    idle = "the batch was not packed"

    def fuse(self, site: Site, module: nn.Module) -> None:
        if "transformers" not in sys.modules:
            return
        # Imported only here, and only for models of transformers.
        from tigon.fusion.documents.leaks import find_leaks
        from tigon.fusion.documents.masks import DENSE, PackedForward, get_implementation, make_globals, makes_masks
        from tigon.fusion.documents.recognize import list_attention, takes_offsets
        from tigon.fusion.recurrence.mixer import keeps_apart

        decoders = [m for m in site.modules() if makes_masks(type(m).forward)]
        for decoder in reversed(decoders):  # a decoder before the models around it
            if getattr(getattr(decoder, "config", None), "is_encoder_decoder", False):
                continue
            rewritten = site.get_rewritten(type(decoder).forward, self.kind, make_globals)
            reason = rewritten if isinstance(rewritten, Reason) else site.why_not(decoder)
            if reason is not None:
                site.record_skipped(self, decoder, reason)
                continue
            inside = [m for m in decoders if m is not decoder and any(m is inner for inner in decoder.modules())]
            layers: list[Any] = [] if inside else list_attention(decoder)
            named = [get_implementation(layer.config) for layer in layers]
            if not {*named} <= {*DENSE}:
                for layer, name in zip(layers, named, strict=True):
                    site.record_skipped(self, layer, Reason(f"{name} reads packed batches itself"))
                continue
            keys = [type(layer).__name__ for layer in layers if self._fuse_attention(site, layer)]
            if not layers and not inside:
                site.record_skipped(self, decoder, NO_REGISTRY)
            all_read = bool(layers) and len(keys) == len(layers)
            names = tuple(dict.fromkeys(keys))
            site.packed[decoder] = PackedForward(
                rewritten, names, all_read, find_leaks, any(m in site.packed for m in inside),
                takes_offsets(rewritten) and any(keeps_apart(m) for m in decoder.modules()),
            )  # fmt: skip

    def _fuse_attention(self, site: Site, layer: Any) -> bool:
        """Rewrite an attention module's forward, as other parts installed it, or add a row with the reason why not."""
        from tigon.fusion.documents import attention
        from tigon.fusion.documents.masks import get_implementation
        from tigon.fusion.documents.recognize import reads_type_of_mask, why_other_eager
        from tigon.fusion.shared_prefix.attention import REGISTRY, find_registry

        patch = site.find_patch(layer)
        forward = type(layer).forward if patch is None else vars(layer)["forward"].__func__
        names = inspect.unwrap(forward).__code__.co_names
        reason = site.why_not(layer) if patch is None else None
        if reason is None and REGISTRY not in names:
            reason = REPLACED
        elif reason is None and reads_type_of_mask(forward):
            reason = READS_TYPE
        is_eager = get_implementation(layer.config) in (None, "eager")
        other = why_other_eager(find_registry(type(layer))[1]) if reason is None and is_eager else None
        reason = Reason(f"{other}, so packed batches have a dense mask") if other else reason
        made = site.get_rewritten(forward, self.kind, attention.make_globals) if reason is None else reason
        if isinstance(made, Reason):
            site.record_skipped(self, layer, made)
            return False
        if patch is None:
            site.install(layer, made, Patch(self, site.ledger))
        else:
            site.rewrite(self, layer, made)
        what = IN_WINDOWS if getattr(layer, "sliding_window", None) else WHAT
        what = NOT_EAGER if is_eager else what
        site.record_fused(self, layer, what, key=type(layer).__name__)
        return True

    def forward_of_copy(self, site: Site, module: nn.Module) -> Callable[..., Any] | None:
        if vars(module)["_tigon"].part is self:
            return None  # the rewritten forward holds no state that belongs to a single model
        from tigon.fusion.documents import attention

        made: Callable[..., Any] = site.get_rewritten(
            vars(module)["forward"].__func__, self.kind, attention.make_globals
        )
        return made


register(DocumentsPart())
