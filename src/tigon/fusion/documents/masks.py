"""Masks for packed batches, not built unless read; and the decoder's forward that hands these masks to its layers.

transformers' decoders make their masks by two functions, and the rewritten forward sees others under the same names. In a
packed call these return a `PackedMask`, which knows the documents and the window. Layers pass the mask on like any mask,
through checkpoints too. Attention that Tigon rewrote reads the documents from the mask. All other code gets the dense
mask.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tigon.fusion.documents.packs import Documents, read_documents
from tigon.fusion.engine.ledger import Ledger
from tigon.fusion.logits.deferred import Deferred
from tigon.fusion.shared_prefix.attention import Shared

MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask")
# Attention that takes a dense mask. Flash attention reads packed batches itself.
DENSE = (None, "eager", "sdpa", "flex_attention")
# Arguments that change which keys a token sees.
CHANGES = ("or_mask_function", "and_mask_function", "block_sequence_ids")


class PackedMask(Deferred):
    """The (B, 1, T, T) mask of a packed batch, not built yet. window: as in `tigon.varlen_attention`."""

    fields = ("call", "window", "make", "dense")

    def __init__(self, call: PackedCall, window: int | None, make: Callable[[], Any]) -> None:
        self.call, self.window, self.make = call, window, make
        self.dense: Any = None

    def build(self, why: str = "the model itself reads the mask") -> Any:
        self.call.count_fallback(why if " " in why else "the model itself reads the mask")
        if self.dense is None:
            self.dense = self.make()
        return self.dense


@dataclass(frozen=True, eq=False)
class PackedForward:
    """Runs a decoder's packed calls.

    forward: the decoder's forward, rewritten by `make_globals`. keys: the ledger's keys for the decoder's attention.
    defers: whether all attention in the decoder reads a `PackedMask`; else the masks are built, and keep documents apart.
    """

    forward: Callable[..., Any]
    keys: tuple[str, ...]
    defers: bool

    def __call__(self, ledger: Ledger, module: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        code = inspect.unwrap(self.forward).__code__
        names = code.co_varnames[1 : code.co_argcount]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        documents = read_documents(arguments) if len(args) <= len(names) else None
        outer, _running.call = _running.call, None
        try:
            if isinstance(documents, Documents):
                _running.call = PackedCall(documents, self, ledger)
                arguments["attention_mask"] = None
                if arguments.get("position_ids") is None:
                    arguments["position_ids"] = documents.positions
                return self.forward(module, **arguments)
            if documents is not None:
                PackedCall(None, self, ledger).count_fallback(documents)
            return run(*args, **kwargs)
        finally:
            _running.call = outer


@dataclass(frozen=True, eq=False)
class PackedCall:
    """A decoder's call with documents."""

    documents: Any
    forward: PackedForward
    ledger: Ledger

    def count_fallback(self, why: str) -> None:
        for key in self.forward.keys:
            self.ledger.count_fallback("documents", key, why)


class _Running(threading.local):
    call: PackedCall | None = None


_running = _Running()


def make_globals(fn: types.FunctionType) -> dict[str, Any]:
    """The functions that the rewritten forward of a decoder sees."""
    return {name: _make_maker(fn.__globals__[name], name) for name in _list_makers(fn)}


def makes_masks(forward: Any) -> bool:
    """Whether a forward makes its masks by transformers' functions for causal attention."""
    inner = inspect.unwrap(forward) if callable(forward) else None
    return isinstance(inner, types.FunctionType) and bool(_list_makers(inner))


def _list_makers(fn: types.FunctionType) -> list[str]:
    makers = [name for name in MAKERS if name in list_names(fn.__code__)]
    return [n for n in makers if getattr(fn.__globals__.get(n), "__module__", "") == "transformers.masking_utils"]


def list_names(code: types.CodeType) -> set[str]:
    """The names that code reads, also in functions inside."""
    inside = (list_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inside)


def get_implementation(config: Any) -> str | None:
    """The attention that a configuration names, also where prefixes can be shared."""
    name = config._attn_implementation
    return name.previous if isinstance(name, Shared) else name  # type: ignore[no-any-return]


def _make_maker(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        call = _running.call
        if call is None:
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        config, x = given["config"], given.get("inputs_embeds", given.get("input_embeds"))
        mask = given.get("attention_mask")  # two dimensions: ones, which the model itself made, as the call has none
        if (
            (mask is not None and mask.dim() != 2)
            or not getattr(config, "is_causal", True)
            or get_implementation(config) not in DENSE
            or x is None
            or tuple(x.shape[:2]) != call.documents.shape
        ):
            return original(*args, **kwargs)
        # Beside a mask or a cache, which is empty, transformers would not look for documents.
        given |= {"position_ids": call.documents.positions, "past_key_values": None, "attention_mask": None}
        if "allow_is_causal_skip" in signature.parameters:
            given["allow_is_causal_skip"] = False
        dense = functools.partial(original, **given)
        if not call.forward.defers:
            return dense()
        if any(given.get(change) is not None for change in CHANGES):
            call.count_fallback("the model's mask is more than causal")
            return dense()
        return PackedMask(call, config.sliding_window if "sliding" in name else None, dense)

    return make
