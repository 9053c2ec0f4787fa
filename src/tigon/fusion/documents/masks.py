"""Masks for packed batches, not built unless read; and the decoder's forward that hands these masks to its layers.

transformers' decoders make their masks by functions. The rewritten forward sees others under the same names, which
return a `PackedMask` in a packed call: the documents and the window. Layers pass this mask on like any mask, through
checkpoints too. Attention that Tigon rewrote reads the documents from the mask. All other code gets the dense mask.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tigon.fusion.documents.packs import CACHES, Documents, find_cache, find_tokens, read_documents, read_rows
from tigon.fusion.engine.bytecode import list_names
from tigon.fusion.engine.ledger import Ledger
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.engine.rewrite import rewrite_forward
from tigon.fusion.logits.deferred import Deferred
from tigon.fusion.shared_prefix.attention import Shared
from tigon.kernels import use_triton

CHUNKED = "create_chunked_causal_mask"
# Makes the masks of a text model in the model around it, as Gemma 3 with images does.
OUTSIDE = "create_masks_for_generate"
MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask", CHUNKED, OUTSIDE)
# Attention that takes a dense mask. Flash attention reads packed batches itself.
DENSE = (None, "eager", "sdpa", "flex_attention")
# Arguments that change which keys a token sees.
FUNCTIONS = ("or_mask_function", "and_mask_function")
NO_OFFSETS = (
    "fuse: a compiled or captured packed batch of a model with recurrences must come with cu_seq_lens_q beside "
    "position_ids that restart; a batch that is not packed, with an attention_mask, or without position_ids."
)
NO_CACHE = (
    "fuse: a packed batch of a model with recurrences must come without a cache, which would hold the state of several "
    "documents: leave past_key_values out."
)
CHANGES = (*FUNCTIONS, "block_sequence_ids")


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

    def to(self, *args: Any, **options: Any) -> Any:
        """Hooks that move a layer's inputs to the layer's device move whatever has `to`. Offsets follow the queries."""
        where = args[0] if args else options.get("device")
        if len(args) < 2 and "dtype" not in options and isinstance(where, (str, int, torch.device)):
            return self
        return self.build("to").to(*args, **options)


class PackedForward:
    """Runs a decoder's packed calls.

    forward: the decoder's forward, rewritten by `make_globals`. keys: the ledger's keys for the decoder's attention.
    defers: whether all attention in the decoder reads a `PackedMask`; else the dense masks keep documents apart.
    find_leaks: names the modules that do not; called once, at the first packed call. has_decoder: whether a decoder
        inside runs packed calls, too. has_state: whether mixers in the decoder take the documents' offsets.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        keys: tuple[str, ...],
        defers: bool,
        find_leaks: Callable[[Any], list[str]],
        has_decoder: bool = False,
        has_state: bool = False,
    ) -> None:
        self.forward, self.keys, self.defers = forward, keys, defers
        self.has_decoder, self.has_state = has_decoder, has_state
        self.find_leaks: Callable[[Any], list[str]] | None = find_leaks
        code = inspect.unwrap(forward).__code__
        self.names = code.co_varnames[1 : code.co_argcount]

    def __call__(self, ledger: Ledger, module: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Raises: ValueError for a packed batch with a cache, if mixers have a state."""
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        documents = read_documents(arguments) if len(args) <= len(self.names) else None
        if documents is None and self.defers and not self.has_decoder and len(args) <= len(self.names):
            documents = self._read_rows(module.config, arguments)
        are_rows = isinstance(documents, Documents) and (documents.are_rows or documents.offsets is None)
        if self.has_state and documents is not None and not are_rows and find_cache(arguments) is not None:
            raise ValueError(NO_CACHE)
        outer, _running.call = _running.call, None
        try:
            if isinstance(documents, Documents) and documents.offsets is None and self.has_state:
                # A capture and a compiler cannot count documents; that there is only one they can check.
                torch._assert_async(documents.are_rows_whole(), NO_OFFSETS)
                return run(*args, **kwargs)
            if isinstance(documents, Documents):
                _running.call = PackedCall(documents, self, ledger)
                shown = arguments.get("output_attentions")
                if getattr(module.config, "output_attentions", None) if shown is None else shown:
                    _running.call.build("attention weights were asked for")
                if documents.are_rows:
                    return self.forward(module, **arguments)
                arguments["attention_mask"] = None
                if arguments.get("position_ids") is None:
                    arguments["position_ids"] = documents.get_positions()
                if self.has_state:
                    # Layers hand them on. A cache would hold the states of several documents.
                    arguments["cu_seq_lens_q"], arguments["use_cache"] = documents.offsets, False
                if documents.offsets is not None and not torch.compiler.is_compiling():
                    self._warn_of_leaks(module)
                return self.forward(module, **arguments)
            if documents is not None:
                PackedCall(None, self, ledger).count_fallback(documents)
            return run(*args, **kwargs)
        finally:
            _running.call = outer

    def _read_rows(self, config: Any, arguments: dict[str, Any]) -> Documents | None:
        """The rows of a batch that is not packed, where transformers would build scores or a dense mask for them.

        Eager attention builds all scores, and a window takes a dense mask under SDPA. Without kernels both stay.
        """
        name, x = get_implementation(config), find_tokens(arguments)
        if x is None or not use_triton(x.new_empty((), dtype=torch.float32)):
            return None
        is_eager = name in (None, "eager")
        has_window = name == "sdpa" and (getattr(config, "sliding_window", None) or x.shape[1]) < x.shape[1]
        return read_rows(arguments, padded=is_eager) if is_eager or has_window else None

    def _warn_of_leaks(self, module: Any) -> None:
        find, self.find_leaks = self.find_leaks, None
        leaks = [] if find is None else find(module)
        if leaks:
            warnings.warn(
                f"fuse: a packed batch came to {type(module).__name__}, whose documents may read one another: nothing "
                f"tells {', '.join(leaks[:3])}{' and others' * (len(leaks) > 3)} where a document begins.",
                stacklevel=2,
            )


class PackedCall:
    """A decoder's call with documents. defers: whether its masks are built only when read."""

    def __init__(self, documents: Any, forward: PackedForward, ledger: Ledger) -> None:
        self.documents, self.forward, self.ledger = documents, forward, ledger
        self.defers = forward.defers and documents is not None and documents.offsets is not None

    def build(self, why: str) -> None:
        self.defers = False
        self.count_fallback(why)

    def count_fallback(self, why: str) -> None:
        for key in self.forward.keys:
            self.ledger.count_fallback("documents", key, why)


class _Running(threading.local):
    # Set in each thread, not on the class: torch.compile guards whether the thread has the attribute, and a forward
    # that sets it would fail its own guard.
    def __init__(self) -> None:
        self.call: PackedCall | None = None


_running = _Running()


def make_globals(fn: types.FunctionType) -> dict[str, Any]:
    """The functions that the rewritten forward of a decoder sees."""
    helpers = {name: rewrite_forward(helper, _make_makers) for name, helper in list_helpers(fn).items()}
    return {name: made for name, made in helpers.items() if not isinstance(made, Reason)} | _make_makers(fn)


def list_helpers(fn: types.FunctionType) -> dict[str, Any]:
    """The functions in a forward's own file that make masks for it, such as those of images read in both directions."""
    named = {name: fn.__globals__.get(name) for name in list_names(fn.__code__)}
    return {n: f for n, f in named.items() if getattr(f, "__module__", "") == fn.__module__ and makes_masks(f)}


def _make_makers(fn: types.FunctionType) -> dict[str, Any]:
    return {name: _make_maker(fn.__globals__[name], name) for name in _list_makers(fn)}


def makes_masks(forward: Any) -> bool:
    """Whether a forward makes its masks by transformers' functions for causal attention."""
    inner = inspect.unwrap(forward) if callable(forward) else None
    return isinstance(inner, types.FunctionType) and bool(_list_makers(inner))


def _list_makers(fn: types.FunctionType) -> list[str]:
    makers = [name for name in MAKERS if name in list_names(fn.__code__)]
    return [n for n in makers if getattr(fn.__globals__.get(n), "__module__", "") == "transformers.masking_utils"]


def get_implementation(config: Any) -> str | None:
    """The attention that a configuration names, also where prefixes can be shared."""
    name = config._attn_implementation
    return name.previous if isinstance(name, Shared) else name


def _make_maker(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    signature = inspect.signature(original)
    has_skip = "allow_is_causal_skip" in signature.parameters
    cache = next((cache for cache in CACHES if cache in signature.parameters), CACHES[0])

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        call = _running.call
        if call is None:
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments if args else kwargs
        config, x = given["config"], given.get("inputs_embeds", given.get("input_embeds"))
        mask = given.get("attention_mask")  # in a packed call ones that the model made, as the call has none
        if (
            (mask is not None and getattr(mask, "ndim", 0) != 2)
            or not getattr(config, "is_causal", True)
            or get_implementation(config) not in DENSE
            or x is None
            or tuple(x.shape[:2]) != call.documents.shape
            or not call.documents.agrees(mask)
        ):
            return original(*args, **kwargs)

        are_rows = call.documents.are_rows
        if are_rows and "sliding" not in name and get_implementation(config) == "sdpa":
            return original(*args, **kwargs)  # needs no mask

        def build() -> Any:
            if are_rows:
                return original(*args, **kwargs)
            # Beside a mask or a cache, which is empty, transformers would not look for documents.
            kept = {name: value for name, value in given.items() if name not in CACHES}
            changes = {"position_ids": call.documents.get_positions(), cache: None, "attention_mask": None}
            if name != CHUNKED and any(given.get(function) is not None for function in FUNCTIONS):
                from transformers.masking_utils import and_masks, packed_sequence_mask_function

                # transformers would hand these functions positions in a document for places in a row.
                bounds = [packed_sequence_mask_function(call.documents.get_numbers()), given.get("and_mask_function")]
                changes |= {"position_ids": None, "and_mask_function": and_masks(*filter(None, bounds))}
            return original(**{**kept, **changes, **({"allow_is_causal_skip": False} if has_skip else {})})

        is_changed = any(given.get(change) is not None for change in CHANGES)
        if name == OUTSIDE and call.forward.has_decoder and not is_changed:
            return None  # the decoder inside makes its own
        if not call.defers or name == OUTSIDE:
            return build()
        if is_changed or name == CHUNKED:
            call.count_fallback("the model's mask is more than causal")
            return build()
        return PackedMask(call, config.sliding_window if "sliding" in name else None, build)

    return make
