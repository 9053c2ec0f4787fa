"""The modules through which a document in a packed batch would read another one."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from tigon.fusion.documents.masks import makes_masks
from tigon.fusion.shared_prefix.attention import find_registry
from tigon.fusion.shared_prefix.recognize import CAPACITY, MIXERS, OWN_POSITIONS

# Arguments of modules in which tokens meet: attention, recurrences, and convolutions over tokens.
STATES = {
    "past_key_values", "past_key_value", "layer_past", "cache_params", "cache", "state", "attention_mask", "seq_idx",
    "position_bias", "alibi",
}  # fmt: skip


def find_leaks(model: nn.Module) -> list[str]:
    """The modules through which documents in a packed batch would read one another, each as "name (class)".

    Attention in transformers' decoders reads the batch's documents alone, once `tigon.fuse` has fused the part
    "documents". Nothing tells a recurrence, a convolution over tokens or an encoder where a document begins.

    Args:
        model: plain or fused, also inside PEFT or a wrapper.
    Returns: an empty list for a model that can train on packed batches.
    """
    names = {module: name for name, module in model.named_modules()}
    whole = [m for m in names if getattr(getattr(m, "config", None), "is_encoder_decoder", False)]
    decoders = [m for m in names if makes_masks(type(m).forward)]
    if whole or not decoders:
        return [_describe(names, (whole or [model])[0])]
    leaks: list[nn.Module] = []
    for decoder in decoders:
        code = inspect.unwrap(type(decoder).forward).__code__
        if "position_ids" not in code.co_varnames or any("bidirectional" in name for name in code.co_names):
            leaks.append(decoder)
            continue
        for module in decoder.modules():
            if module is not decoder and module not in leaks and _mixes_tokens(module):
                leaks.append(_find_owner(decoder, module))
    inside = {child for leak in leaks for child in leak.modules() if child is not leak}
    return [_describe(names, leak) for leak in dict.fromkeys(leaks) if leak not in inside]


def _describe(names: dict[nn.Module, str], module: nn.Module) -> str:
    return f"{names[module] or 'the model'} ({type(module).__name__})"


def _mixes_tokens(module: Any) -> bool:
    """Whether tokens meet in this module itself, in another way than in causal attention that documents bound."""
    if isinstance(module, MIXERS) or any(getattr(module, attribute, None) for attribute in CAPACITY):
        return True
    if hasattr(type(module), OWN_POSITIONS):
        return True
    if find_registry(type(module))[0] is not None:
        return not getattr(module, "is_causal", True) or bool(getattr(module, "is_cross_attention", False))
    try:
        parameters = inspect.signature(type(module).forward).parameters
    except (TypeError, ValueError):
        return False
    # A layer around attention takes these arguments, too.
    return not STATES.isdisjoint(parameters) and all(find_registry(type(m))[0] is None for m in module.modules())


def _find_owner(decoder: nn.Module, module: nn.Module) -> nn.Module:
    """The module that holds a convolution or another module of torch; the module itself if it is of a model's own."""
    if not type(module).__module__.startswith("torch."):
        return module
    return next(m for m in decoder.modules() if any(child is module for child in m.children()))
