"""The modules through which a document in a packed batch would read another one."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from tigon.fusion.documents.masks import makes_masks
from tigon.fusion.documents.recognize import attends, list_inside, list_parameters, takes_offsets
from tigon.fusion.recurrence.mixer import keeps_apart
from tigon.fusion.shared_prefix.recognize import CAPACITY, MIXERS, OWN_POSITIONS

# Arguments of modules in which tokens meet: attention, recurrences, and convolutions over tokens.
STATES = {
    "past_key_values", "past_key_value", "layer_past", "cache_params", "cache", "state", "attention_mask", "seq_idx",
    "position_bias", "alibi",
}  # fmt: skip


def find_leaks(model: nn.Module) -> list[str]:
    """The modules through which documents in a packed batch would read one another, each as "name (class)".

    Attention in transformers' decoders reads the token's own document alone, once `tigon.fuse` has fused the part
    "documents"; so do delta rules, Mamba-2's scans and their convolutions, with "recurrence" and "conv" fused. Another
    recurrence, a convolution over tokens or an encoder does not know where a document begins.

    Args:
        model: plain or fused, also inside PEFT or a wrapper.
    Returns: an empty list for a model that can train on packed batches.
    """
    names = {module: name for name, module in model.named_modules()}
    whole = [m for m in names if getattr(getattr(m, "config", None), "is_encoder_decoder", False)]
    decoders = [m for m in names if makes_masks(type(m).forward)]
    found = whole[:1] or ([] if decoders else [model])
    for decoder in decoders if not found else []:
        code = inspect.unwrap(type(decoder).forward).__code__
        config: Any = getattr(decoder, "config", None)
        is_causal = getattr(config, "is_causal", True) and ("is_decoder" not in code.co_names or config.is_decoder)
        if "position_ids" not in code.co_varnames or not is_causal:
            found.append(decoder)
            continue
        mixing = [_find_owner(decoder, m) for m in list_inside(decoder) if _mixes_tokens(m)]
        # A layer hands its arguments on to the mixer inside.
        kept = {m for m in decoder.modules() if keeps_apart(m)} if takes_offsets(type(decoder).forward) else set()
        mixing = [m for m in mixing if kept.isdisjoint(m.modules())]
        # A layer of the same class without a mixer holds an MLP or experts alone, and only hands a cache on.
        around = {type(m) for m in decoder.modules() if m not in kept and not kept.isdisjoint(m.modules())}
        mixing = [m for m in mixing if type(m) not in around or any(_mixes_tokens(inner) for inner in m.children())]
        mixing += [m for m in decoder.modules() if hasattr(type(m), OWN_POSITIONS)]
        # Layers take the arguments of what they hold, and are found as well.
        held = {*mixing, *(m for m in decoder.modules() if attends(m))}
        layers = {type(m) for m in decoder.modules() if any(inner in held for inner in m.modules() if inner is not m)}
        found += [m for m in mixing if type(m) not in layers] or [m for m in mixing if m not in found][:1]
    return [f"{names[m] or 'the model'} ({type(m).__name__})" for m in dict.fromkeys(found)]


def _mixes_tokens(module: Any) -> bool:
    """Whether tokens meet in this module, in another way than in causal attention that a mask bounds."""
    if isinstance(module, MIXERS) or any(getattr(module, attribute, None) for attribute in CAPACITY):
        return True
    if attends(module):
        return not getattr(module, "is_causal", True) or bool(getattr(module, "is_cross_attention", False))
    if isinstance(module, nn.Embedding) or STATES.isdisjoint(list_parameters(type(module))):
        return False
    return not any(attends(inner) for inner in module.modules())


def _find_owner(decoder: nn.Module, module: nn.Module) -> nn.Module:
    """The module that holds a convolution or another module of torch; any other module itself."""
    if not type(module).__module__.startswith("torch."):
        return module
    return next(m for m in decoder.modules() if any(child is module for child in m.children()))
