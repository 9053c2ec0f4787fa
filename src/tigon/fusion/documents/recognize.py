"""The attention of a decoder, and the modules through which a document in a packed batch would read another one."""

from __future__ import annotations

import dis
import inspect
from typing import Any

from torch import nn

from tigon.fusion.documents.masks import list_names, makes_masks
from tigon.fusion.shared_prefix.attention import find_registry
from tigon.fusion.shared_prefix.recognize import CAPACITY, MIXERS, OWN_POSITIONS

# Arguments of modules in which tokens meet: attention, recurrences, and convolutions over tokens.
STATES = {
    "past_key_values", "past_key_value", "layer_past", "cache_params", "cache", "state", "attention_mask", "seq_idx",
    "position_bias", "alibi",
}  # fmt: skip
# What attention calls, and a recurrence does not.
SOFTMAX = {"softmax", "scaled_dot_product_attention"}


def list_attention(decoder: nn.Module) -> list[nn.Module]:
    """The causal attention modules in a decoder's layers that use transformers' attention registry."""
    asking = (m for m in _list_inside(decoder) if find_registry(type(m))[0] is not None)
    return [m for m in asking if getattr(m, "is_causal", True) and not getattr(m, "is_cross_attention", False)]


def find_leaks(model: nn.Module) -> list[str]:
    """The modules through which documents in a packed batch would read one another, each as "name (class)".

    Attention in transformers' decoders reads the token's own document alone, once `tigon.fuse` has fused the part
    "documents". A recurrence, a convolution over tokens or an encoder does not know where a document begins.

    Args:
        model: plain or fused, also inside PEFT or a wrapper.
    Returns: an empty list for a model that can train on packed batches.
    """
    names = {module: name for name, module in model.named_modules()}
    whole = [m for m in names if getattr(getattr(m, "config", None), "is_encoder_decoder", False)]
    decoders = [m for m in names if makes_masks(type(m).forward)]
    found = whole[:1] or ([] if decoders else [model])
    for decoder in decoders if not found else []:
        code, config = inspect.unwrap(type(decoder).forward).__code__, getattr(decoder, "config", None)
        is_causal = getattr(config, "is_causal", True) and ("is_decoder" not in code.co_names or config.is_decoder)
        if "position_ids" not in code.co_varnames or not is_causal:
            found.append(decoder)
            continue
        mixing = [_find_owner(decoder, m) for m in _list_inside(decoder) if _mixes_tokens(m)]
        mixing += [m for m in decoder.modules() if hasattr(type(m), OWN_POSITIONS)]
        # Layers take the arguments of what they hold, and are found as well.
        held = {*mixing, *(m for m in decoder.modules() if _attends(m))}
        layers = {type(m) for m in decoder.modules() if any(inner in held for inner in m.modules() if inner is not m)}
        found += [m for m in mixing if type(m) not in layers] or [m for m in mixing if m not in found][:1]
    return [f"{names[m] or 'the model'} ({type(m).__name__})" for m in dict.fromkeys(found)]


def _list_inside(decoder: nn.Module) -> list[nn.Module]:
    """The modules in a decoder's layers, without those of a tower for images or sound inside the decoder."""
    lists: list[nn.Module] = []
    for holder in decoder.modules():  # the decoder itself comes first
        own = [child for child in holder.children() if isinstance(child, nn.ModuleList)]
        if any(_attends(m) and getattr(m, "is_causal", True) for layers in own for m in layers.modules()):
            lists += own
            if holder is decoder:
                break
    return list(dict.fromkeys(m for layers in lists or [decoder] for m in layers.modules() if m is not decoder))


def reads_type_of_mask(forward: Any) -> bool:
    """Whether a forward asks for its mask's type, and so would take a mask that is not built for none."""
    loads = [i.argval for i in dis.get_instructions(inspect.unwrap(forward)) if i.opname.startswith("LOAD")]
    after = [loads[at + 1 : at + 2] for at, name in enumerate(loads) if name == "isinstance"]
    # Since Python 3.13 an instruction may load two variables.
    return any("attention_mask" in (name if isinstance(name, tuple) else (name,)) for names in after for name in names)


def _attends(module: nn.Module) -> bool:
    """Whether a module is attention that takes a mask."""
    kind = type(module)
    if find_registry(kind)[0] is not None:
        return True
    if not kind.__module__.startswith("torch.") and "attention_mask" in _list_parameters(kind):
        codes = (getattr(method, "__code__", None) for method in vars(kind).values())
        return any(code is not None and not SOFTMAX.isdisjoint(list_names(code)) for code in codes)
    return False


def _mixes_tokens(module: Any) -> bool:
    """Whether tokens meet in this module, in another way than in causal attention that a mask bounds."""
    if isinstance(module, MIXERS) or any(getattr(module, attribute, None) for attribute in CAPACITY):
        return True
    if _attends(module):
        return not getattr(module, "is_causal", True) or bool(getattr(module, "is_cross_attention", False))
    if isinstance(module, nn.Embedding) or STATES.isdisjoint(_list_parameters(type(module))):
        return False
    return not any(_attends(inner) for inner in module.modules())


def _list_parameters(kind: type) -> set[str]:
    code = getattr(inspect.unwrap(getattr(kind, "forward", None)), "__code__", None)  # type: ignore[arg-type]
    return set() if code is None else set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def _find_owner(decoder: nn.Module, module: nn.Module) -> nn.Module:
    """The module that holds a convolution or another module of torch; any other module itself."""
    if not type(module).__module__.startswith("torch."):
        return module
    return next(m for m in decoder.modules() if any(child is module for child in m.children()))
