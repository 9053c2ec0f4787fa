"""Attention that computes a prefix shared by several continuations once, where a call brings a prefix layout."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from tigon.fusion.engine.part import Part, Site, Stage, register
from tigon.fusion.recurrence.part import can_carry


class SharedPrefix(Part):
    """Sets the attention function's name in the configurations that a decoder's attention reads."""

    kind, stage, argument = "prefix", Stage.MODEL, "shared_prefix"

    def fuse(self, site: Site, module: nn.Module) -> None:
        # Imported only here: sharing needs transformers, which importing tigon.fuse does not import.
        from tigon.fusion.shared_prefix import attention
        from tigon.fusion.shared_prefix.recognize import shared_attention

        layers: list[Any] = list(shared_attention(module, functools.partial(can_carry, site)))
        attention.register()
        for layer in layers:
            name = layer.config._attn_implementation
            if not isinstance(name, attention.Shared):
                site.set(layer.config, "_attn_implementation_internal", attention.Shared(name))
            before = layer.config._attn_implementation.previous
            kind = type(layer).__name__
            site.record_fused(self, layer, f"once for all suffixes of a prefix; {before} without a layout", key=kind)
        site.ledger.around = attention.Around(list({id(m.config): m.config for m in layers}.values()))
        if not site.entrances:  # no head is fused, where a call begins
            site.entrances.append(_outermost(module))


def _outermost(model: nn.Module) -> nn.Module:
    """The transformers model inside a wrapper, or the model itself."""
    return next((m for m in model.modules() if hasattr(m, "get_input_embeddings") and hasattr(m, "config")), model)


register(SharedPrefix())
