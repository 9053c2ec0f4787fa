"""Attention of packed batches, in decoders of transformers that make causal masks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from tigon.fusion.engine.part import Part, Site, Stage, register
from tigon.fusion.engine.patch import Patch
from tigon.fusion.engine.reasons import REPLACED, Reason


class DocumentsPart(Part):
    """Rewrites decoders, so that they make no dense mask for packed batches, and their attention."""

    kind, stage = "documents", Stage.LAST
    idle = "the batch was not packed"
    compiled = "Packed batches have a dense mask, and attention as configured, under torch.compile."

    def fuse(self, site: Site, module: nn.Module) -> None:
        if "transformers" not in sys.modules:
            return
        # Imported only here, and only for models of transformers.
        from tigon.fusion.documents import attention, masks
        from tigon.fusion.shared_prefix.attention import REGISTRY, find_registry

        seen: set[nn.Module] = set()
        for decoder in site.modules():
            if not masks.makes_masks(type(decoder).forward):
                continue
            if getattr(getattr(decoder, "config", None), "is_encoder_decoder", False):
                continue
            rewritten = site.get_rewritten(type(decoder).forward, self.kind, masks.make_globals)
            reason = rewritten if isinstance(rewritten, Reason) else site.why_not(decoder)
            if reason is not None:
                site.record_skipped(self, decoder, reason)
                continue
            keys = []
            for layer in decoder.modules():
                if layer in seen or find_registry(type(layer))[0] is None or not getattr(layer, "is_causal", True):
                    continue
                seen.add(layer)
                what = self._rewrite_attention(site, layer, attention.make_globals, REGISTRY)
                implementation = masks.get_implementation(layer.config)
                if implementation not in masks.DENSE:
                    what = Reason(f"{implementation} reads packed batches itself")
                if isinstance(what, Reason):
                    site.record_skipped(self, layer, what)
                    continue
                if site.find_patch(layer) is None:
                    site.install(layer, what, Patch(self, site.ledger))
                else:
                    site.rewrite(self, layer, what)
                keys.append(type(layer).__name__)
                site.record_fused(
                    self, layer, "attention of packed batches by tigon.varlen_attention", key=type(layer).__name__
                )
            if keys:
                site.packed[decoder] = masks.PackedForward(rewritten, tuple(dict.fromkeys(keys)))

    def _rewrite_attention(self, site: Site, layer: Any, make_globals: Any, name: str) -> Any:
        """The forward for an attention module, from the forward that other parts installed; or why there is none."""
        patch = site.find_patch(layer)
        reason = site.why_not(layer) if patch is None else None
        if reason is not None:
            return reason
        forward = type(layer).forward if patch is None else vars(layer)["forward"].__func__
        if name not in inspect.unwrap(forward).__code__.co_names:
            return REPLACED
        return site.get_rewritten(forward, self.kind, make_globals)

    def forward_of_copy(self, site: Site, module: nn.Module) -> Callable[..., Any] | None:
        if vars(module)["_tigon"].part is self:
            return None  # the rewritten forward holds no state that belongs to a single model
        from tigon.fusion.documents import attention

        made: Callable[..., Any] = site.get_rewritten(
            vars(module)["forward"].__func__, self.kind, attention.make_globals
        )
        return made


register(DocumentsPart())
