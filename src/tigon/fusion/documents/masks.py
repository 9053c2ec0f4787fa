"""Masks for packed batches, not built unless read; and the decoder's forward that hands them to its layers.

transformers' decoders make their masks by two functions, which the rewritten forward sees under the same names. In a
packed call they return a `PackedMask`, which knows the documents and the window. Layers pass it on like any mask, through
checkpoints too. Attention that tigon rewrote reads the documents from it. All other code gets the dense mask.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable
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

    fields = ("documents", "window", "make", "built")

    def __init__(self, documents: Documents, window: int | None, make: Callable[[], Any]) -> None:
        self.documents, self.window, self.make = documents, window, make
        self.built: Any = None

    def build(self, why: str = "") -> Any:
        if self.built is None:
            self.built = self.make()
        return self.built


class _Running(threading.local):
    documents: Documents | None = None


_running = _Running()


class PackedForward:
    """Runs a decoder's packed calls. keys: the ledger's keys for the decoder's attention.

    forward: the decoder's forward, rewritten by `make_globals`.
    """

    def __init__(self, forward: Callable[..., Any], keys: tuple[str, ...]) -> None:
        self.forward, self.keys = forward, keys
        code = inspect.unwrap(forward).__code__
        self.names = code.co_varnames[1 : code.co_argcount]

    def __call__(self, ledger: Ledger, module: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = {**dict(zip(self.names, args, strict=False)), **kwargs}
        documents = read_documents(call) if len(args) <= len(self.names) else None
        if isinstance(documents, str):
            for key in self.keys:
                ledger.count_fallback("documents", key, documents)
        outer, _running.documents = _running.documents, documents if isinstance(documents, Documents) else None
        try:
            if _running.documents is None:
                return run(*args, **kwargs)
            call["attention_mask"] = None
            if call.get("position_ids") is None:
                call["position_ids"] = _running.documents.positions
            return self.forward(module, **call)
        finally:
            _running.documents = outer


def make_globals(fn: types.FunctionType) -> dict[str, Any]:
    """The functions that the rewritten forward of a decoder sees."""
    return {name: _make_maker(fn.__globals__[name], name) for name in MAKERS if name in fn.__code__.co_names}


def makes_masks(forward: Any) -> bool:
    """Whether a forward makes its masks by transformers' functions for causal attention."""
    inner = inspect.unwrap(forward) if callable(forward) else None
    names = getattr(getattr(inner, "__code__", None), "co_names", ())
    functions = (inner.__globals__.get(name) for name in MAKERS if name in names)  # type: ignore[union-attr]
    return any(getattr(f, "__module__", None) == "transformers.masking_utils" for f in functions)


def get_implementation(config: Any) -> str | None:
    """The attention that a configuration names, also where prefixes can be shared."""
    name = config._attn_implementation
    return name.previous if isinstance(name, Shared) else name  # type: ignore[no-any-return]


def _make_maker(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        documents = _running.documents
        if documents is None:
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        config, x = given["config"], given.get("inputs_embeds", given.get("input_embeds"))
        if (
            given.get("attention_mask") is not None
            or not getattr(config, "is_causal", True)
            or get_implementation(config) not in DENSE
            or x is None
            or tuple(x.shape[:2]) != documents.shape
        ):
            return original(*args, **kwargs)
        # Without the cache, in which transformers would not look for documents. It is empty.
        given |= {"position_ids": documents.positions, "past_key_values": None}
        if "allow_is_causal_skip" in signature.parameters:
            given["allow_is_causal_skip"] = False
        dense = functools.partial(original, **given)
        if any(given.get(change) is not None for change in CHANGES):
            return dense()
        return PackedMask(documents, config.sliding_window if "sliding" in name else None, dense)

    return make
