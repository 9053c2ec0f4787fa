"""The attention modules of a model that can share prefixes, or the named reason why a model cannot."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from tigon.fusion.shared_prefix.attention import find_registry
from tigon.ops.prefix_attention.checks import WIDEST

CAUSAL = {"full_attention", "sliding_attention"}  # `layer_types` values in a configuration
STATEFUL = {
    "linear_attention",
    "conv",
    "hybrid",
}  # the same for layers that carry a state, which `_check_layers` looks at
MIXERS = (nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
# Keyword arguments to attention functions that change the result, and that shared attention lacks.
EXTRAS = {"s_aux": "attention sinks", "position_bias": "a bias of positions"}
# Methods by which a model counts positions from a different first number, as RoBERTa does.
OWN_POSITIONS = "create_position_ids_from_input_ids"
CAPACITY = ("expert_capacity", "capacity_factor")  # a token's expert then depends on the tokens before it


def shared_attention(model: nn.Module, carries: Callable[[nn.Module], bool] = lambda module: False) -> list[nn.Module]:
    """The attention modules that share prefixes: all in a decoder.

    carries: whether a module that mixes tokens by a state carries a prefix's state into several suffixes.
    Raises: ValueError if the model's tokens meet elsewhere than in causal attention and in such states, or otherwise.
    """
    name = type(model).__name__
    asking = [module for module in model.modules() if find_registry(type(module))[0] is not None]
    attentions = [m for m in asking if getattr(m, "is_causal", True) and not getattr(m, "is_cross_attention", False)]
    for module in model.modules():
        if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
            _refuse(f"{type(module).__name__} is an encoder-decoder; its tokens also read encoder tokens.")
    if not attentions:
        if asking:
            _refuse(f"{name} is an encoder: {_names(asking)} read tokens in both directions.")
        _refuse(f"no attention in {name} uses transformers' attention registry, where Tigon could replace it.")
    for layers in _lists_of_layers(model, set(attentions)):
        _check_layers(layers, set(attentions), {m for m in layers.modules() if carries(m)})
        for module in {*attentions, *layers} & {*layers.modules()}:
            _check_forward(module)
    for module in attentions:
        _check_attention(module)
    for module in model.modules():
        if any(getattr(module, attribute, None) for attribute in CAPACITY):
            _refuse(f"{type(module).__name__} limits the tokens per expert, so tokens interact in the routing.")
        if hasattr(type(module), OWN_POSITIONS):
            _refuse(
                f"{type(module).__name__} counts positions itself, but suffixes continue the positions of their prefix."
            )
    decoder = _around(model, attentions)
    if "position_ids" not in inspect.signature(type(decoder).forward).parameters:
        _refuse(f"{type(decoder).__name__} takes no position_ids, but suffixes continue the positions of their prefix.")
    return attentions


def _check_layers(layers: nn.ModuleList, attentions: set[nn.Module], carrying: set[nn.Module]) -> None:
    """Raise unless every layer has attention or carries a state, and no other module in which tokens meet."""
    with_attention = [layer for layer in layers if any(m in attentions for m in layer.modules())]
    usual = {type(child) for layer in with_attention for child in layer.modules()}
    for layer in layers:
        if layer not in with_attention:
            others = [child for child in layer.children() if type(child) not in usual and child not in carrying]
            if others or not any(child in carrying for child in layer.modules()):
                _refuse_state(others or [layer])
        for child in layer.modules():
            if isinstance(child, MIXERS):
                parents = [m for m in layer.modules() if any(c is child for c in m.children())]
                if not (parents and carrying.issuperset(parents)):
                    _refuse_state(parents or [child])


def _check_forward(module: nn.Module) -> None:
    """Raise for a layer, or its attention, that takes no further keyword arguments, or never reads them."""
    code = inspect.unwrap(type(module).forward).__code__
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    name = code.co_varnames[count] if code.co_flags & inspect.CO_VARKEYWORDS else None
    # Since Python 3.13 an instruction may load two variables.
    loads = (i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD"))
    if name is None or not any(name in (loaded if isinstance(loaded, tuple) else (loaded,)) for loaded in loads):
        _refuse(f"{type(module).__name__} does not pass the model's keyword arguments on, such as the layout.")


def _check_attention(module: Any) -> None:
    kind = type(module).__name__
    config = module.config
    types = set(getattr(config, "layer_types", None) or ())
    if others := types - CAUSAL - STATEFUL:
        _refuse(f"{kind} layers use {', '.join(sorted(others))}, which cannot share a prefix.")
    if getattr(config, "alibi", False):
        _refuse(f"{kind} has a position bias (ALiBi), which shared attention does not support.")
    if not getattr(config, "is_causal", True):
        _refuse(f"{kind} reads tokens in both directions.")
    width = getattr(module, "head_dim", None)
    if isinstance(width, int) and width > WIDEST:
        _refuse(f"{kind} has heads of width {width}; shared attention supports at most {WIDEST}.")
    code = inspect.unwrap(type(module).forward).__code__
    keywords = {name for constant in code.co_consts if isinstance(constant, tuple) for name in constant}
    for extra, what in EXTRAS.items():
        if extra in keywords:
            _refuse(f"{kind} has {what}, which shared attention does not support.")


def _lists_of_layers(model: nn.Module, attentions: set[nn.Module]) -> list[nn.ModuleList]:
    """The outermost lists of layers with attention."""
    lists: list[nn.ModuleList] = []
    for module in model.modules():
        inside = any(module in outer.modules() for outer in lists)
        if isinstance(module, nn.ModuleList) and not inside and any(m in attentions for m in module.modules()):
            lists.append(module)
    return lists


def _around(model: nn.Module, attentions: list[nn.Module]) -> nn.Module:
    """The innermost transformers model that holds all this attention: the decoder, without its head."""
    inside = set(attentions)
    decoder = model
    for module in model.modules():  # a module before the modules inside it
        if hasattr(module, "get_input_embeddings") and inside <= set(module.modules()):
            decoder = module
    return decoder


def _refuse_state(modules: list[nn.Module]) -> NoReturn:
    _refuse(f"{_names(modules)} layers carry a state past the prefix, so they cannot share the prefix.")


def _names(modules: list[nn.Module]) -> str:
    return ", ".join(sorted({type(module).__name__ for module in modules}))


def _refuse(reason: str) -> NoReturn:
    raise ValueError(f"shared_prefix: {reason}")
