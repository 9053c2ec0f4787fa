"""Attention over prefixes and suffixes in a transformers model, by transformers' registries for attention and masks.

transformers picks a model's attention function by a name in the configuration, and hands the model forward's
keyword arguments on to that function. So the layout travels beside the ids, through checkpointed layers too, and no
module is replaced: `fuse` sets the name, and `remove` puts the name back. A call without a layout runs the attention
and makes the mask that the configuration named before.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.fusion.documents.packs import find_cache
from tigon.fusion.engine.ledger import Ledger
from tigon.kernels import autocast_dtype
from tigon.ops.prefix_attention import PrefixLayout, prefix_attention

NAME = "tigon_shared_prefix"
ARGUMENT = "shared_prefix"
REGISTRY = "ALL_ATTENTION_FUNCTIONS"
# Tensors that models hand to every attention function, and that add no information to the layout.
HARMLESS = {
    "position_ids", "seq_idx", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    "num_items_in_batch", "logits_to_keep",
}  # fmt: skip


class Shared(str):
    """The attention function's name in a configuration, with the name that stood there before.

    A copied model stays fused, and so does the name in the configuration. Pickled, the configuration is plain again.
    """

    previous: str | None

    def __new__(cls, previous: str | None) -> Shared:
        self = super().__new__(cls, NAME)
        self.previous = previous
        return self

    def __deepcopy__(self, memo: Any) -> Shared:
        return self

    def __copy__(self) -> Shared:
        return self

    def __reduce__(self) -> Any:
        return (str, (self.previous,)) if self.previous is not None else (type(None), ())


class LayoutAsMask:
    """Stands where a shared batch's mask would, so that a model that was not fused raises before any result.

    The model's own attention would take the layout as just another keyword argument, and read all rows as one sequence.
    """

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            "SharedPrefixBatch: its inputs need a model fused by tigon.fuse(model, shared_prefix=True); this model is "
            "not, or no longer."
        )


class _Running(threading.local):
    """The shared model call that runs on this thread, for the masks that this call makes."""

    def __init__(self) -> None:
        self.layout: PrefixLayout | None = None
        self.ledger: Ledger | None = None


_running = _Running()


def register() -> None:
    """Add the attention and the mask function to transformers' registries. Existing entries stay."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, shared_prefix_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, shared_prefix_mask)


# --------------------------------------------------------------------------------------------------- the model's calls


class Around:
    """Calls a fused model's forward, with a layout or without.

    configs: the configurations that the model's shared attention reads, which name its function. They hold no reference
    to the model.
    """

    def __init__(self, configs: list[Any]) -> None:
        self.configs = configs

    def __call__(self, ledger: Ledger, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layout, mask = kwargs.get(ARGUMENT), kwargs.get("attention_mask")
        if layout is None:
            if isinstance(mask, LayoutAsMask):
                raise ValueError(
                    f"shared_prefix: the inputs of a SharedPrefixBatch go together; {ARGUMENT} is missing."
                )
            return run(*args, **kwargs)
        if layout is _running.layout:
            return run(*args, **kwargs)  # a model inside the model that was called
        if not isinstance(layout, PrefixLayout):
            raise ValueError(f"shared_prefix: {ARGUMENT} must be a tigon.PrefixLayout, got {type(layout).__name__}.")
        _check_call(layout, args, kwargs)
        kwargs["attention_mask"] = all_rows(layout)
        with self.calling(layout, ledger):
            return run(*args, **kwargs)

    @contextlib.contextmanager
    def calling(self, layout: PrefixLayout, ledger: Ledger | None) -> Iterator[None]:
        """A call with a layout, checked already. The masks for the model's layers are made in here."""
        for config in self.configs:
            name = config._attn_implementation
            if not isinstance(name, Shared):
                raise ValueError(f"shared_prefix: the model's attention was set to {name!r} after fusing.")
        outer = _running.layout, _running.ledger
        _running.layout, _running.ledger = layout, ledger
        try:
            yield
        finally:
            _running.layout, _running.ledger = outer


def all_rows(layout: PrefixLayout) -> Tensor:
    """A mask (1, N) that leaves no row out, for a model's forward.

    Without a mask transformers would ask the device whether the positions come from packed sequences, and wait.
    """
    return torch.ones(1, layout.rows, dtype=torch.bool, device=layout.device)


def _check_call(layout: PrefixLayout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    mask = kwargs.get("attention_mask")
    if len(args) > 1 or (mask is not None and not isinstance(mask, LayoutAsMask)):
        raise ValueError("shared_prefix: attention_mask must be left out: the layout decides what each token reads.")
    if kwargs.get("use_cache") or find_cache(kwargs) is not None:
        raise ValueError("shared_prefix: use_cache must be False, and no cache passed: a cache holds one continuation.")
    if kwargs.get("output_attentions"):
        raise ValueError(
            "shared_prefix: output_attentions must be False: attention weights are never fully materialized."
        )
    if kwargs.get("labels") is not None:
        raise ValueError(
            "shared_prefix: labels must be left out, as the last row of a prefix predicts the first token of all its "
            "suffixes; call batch.loss(model)."
        )
    if kwargs.get("position_ids") is None:
        raise ValueError("shared_prefix: position_ids must be passed: suffixes continue the positions of their prefix.")
    ids = next((t for t in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if t is not None), None)
    if isinstance(ids, Tensor) and tuple(ids.shape[:2]) != (1, layout.rows):
        raise ValueError(
            f"shared_prefix: the layout counts {layout.rows} rows, so the ids must be (1, {layout.rows}), got "
            f"{tuple(ids.shape)}."
        )


# --------------------------------------------------------------------------------------------------------- the masks


def shared_prefix_mask(*args: Any, config: Any, mask_function: Any = None, **options: Any) -> Any:
    """The mask for the attention that was named before; in a shared call none, except the window's width.

    The layers hand on the tensor that this function returns. An empty tensor (0, 1, 1, window) tells attention the
    window, in models too whose layers do not pass `sliding_window`.
    """
    if _running.layout is None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        function = ALL_MASK_ATTENTION_FUNCTIONS.get(_previous(config))
        if mask_function is not None:
            options["mask_function"] = mask_function
        return None if function is None else function(*args, config=config, **options)
    if not torch.compiler.is_compiling():
        window = _find_window(mask_function)
    elif options.get("use_vmap") or not options.get("allow_is_causal_skip", True):
        raise ValueError("shared_prefix: the model builds a mask that cannot be shared; run it without torch.compile.")
    else:  # Dynamo cannot look into functions; transformers passes the window beside them
        window = options.get("local_size")
    return None if window is None else torch.empty(0, 1, 1, window, dtype=torch.bool, device=options.get("device"))


def _find_window(mask_function: Any) -> int | None:
    """The window of a transformers causal mask function, None for no window; an error for any other mask."""
    from transformers import masking_utils as masks

    window, causal, waiting = None, False, [mask_function]
    while waiting:
        function = waiting.pop()
        cells = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
        maker = getattr(function, "__qualname__", "").partition(".")[0]
        known = getattr(function, "__module__", None) == masks.__name__
        if function is masks.causal_mask_function:
            causal = True
        elif known and maker == "sliding_window_overlay":
            window = min(cells["sliding_window"], window or cells["sliding_window"])
        elif known and maker == "and_masks":
            waiting += cells["mask_functions"]
        elif known and maker == "remap_positions_for_packed_sequence":
            waiting.append(cells["mask_function"])
        elif not known or maker != "packed_sequence_mask_function":  # suffixes look packed; the layout says how
            raise ValueError(
                f"shared_prefix: the model builds a mask by {maker or function!r}, which cannot be shared; only causal "
                "attention and sliding windows can."
            )
    if not causal:
        raise ValueError("shared_prefix: the model builds a mask that is not causal, which cannot be shared.")
    return window


# ----------------------------------------------------------------------------------------------------- the attention


def shared_prefix_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *args: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The attention function that the registry holds: (1, H, N, D) heads → (1, N, H, D)."""
    layout = options.pop(ARGUMENT, None)
    if layout is None:
        if _running.layout is not None:
            raise ValueError(
                f"shared_prefix: {type(module).__name__} did not receive the layout: an enclosing forward does not "
                "pass keyword arguments on."
            )
        return _plain_attention(module, query, key, value, attention_mask, *args, **options)
    name = type(module).__name__
    if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.shape[0] != 0):
        raise ValueError(f"shared_prefix: {name} got a mask besides the layout; call the model that was fused.")
    _check_options(name, module, options)
    window = None if attention_mask is None else attention_mask.shape[-1]
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if query.shape[0] != 1 or not q.shape[1] == k.shape[1] == v.shape[1] == layout.rows:
        raise ValueError(
            f"shared_prefix: the layout counts {layout.rows} rows, {name} has queries of {tuple(q.shape[:2])} rows and "
            f"keys of {tuple(k.shape[:2])}."
        )
    autocast = autocast_dtype(q.device.type)
    if autocast is not None and q.dtype != torch.float64:
        q, k, v = (t.to(autocast) for t in (q, k, v))  # rotated heads may be wider than values
    width = v.shape[-1]
    if width < q.shape[-1]:  # multi-head latent attention: values are narrower than keys
        v = F.pad(v, (0, q.shape[-1] - width))
    q, k, v = (t.squeeze(0) for t in (q, k, v))  # t[0] would copy the gradient into zeros
    o = prefix_attention(q, k, v, layout, scale=options.get("scaling"), softcap=options.get("softcap"), window=window)
    if _running.ledger is not None:  # None while a checkpoint recomputes
        _running.ledger.count("prefix", name)
    return o[..., :width].unsqueeze(0), None


def _check_options(name: str, module: Any, options: dict[str, Any]) -> None:
    if options.get("dropout"):
        raise ValueError(f"shared_prefix: {name} has dropout {options['dropout']}; set attention_dropout to 0.")
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError(f"shared_prefix: {name} is not causal, so its prefixes read their suffixes.")
    for option, value in options.items():
        if isinstance(value, Tensor) and option not in HARMLESS:
            raise ValueError(f"shared_prefix: {name} passes {option}, which shared attention does not support.")


def _plain_attention(module: Any, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """The attention that this module would run under the configuration's previous name."""
    registry, eager = find_registry(type(module))
    name = _previous(module.config)
    function = registry.get_interface(name or "eager", eager)
    if name not in (None, "eager", "sdpa"):  # flash attention functions choose a kernel by the name
        module = _Before(module, config=_Before(module.config, _attn_implementation=name))
    result: tuple[Tensor, Tensor | None] = function(module, *args, **options)
    return result


class _Before:
    """An object with other values for some attributes."""

    def __init__(self, held: Any, **changes: Any) -> None:
        vars(self).update(changes, _held=held)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_held"], name)


def find_registry(kind: type) -> tuple[Any, Any]:
    """The registry that a class's forward asks, and that module's eager attention; (None, None) if none."""
    forward = inspect.unwrap(getattr(kind, "forward", None))  # type: ignore[arg-type]
    if REGISTRY not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return None, None
    return forward.__globals__.get(REGISTRY), find_eager(forward)


def find_eager(forward: Any) -> Any:
    """The eager attention that a forward names, None if none."""
    names = (name for name in forward.__code__.co_names if name.startswith("eager"))
    return next((forward.__globals__.get(name) for name in names), None)


def _previous(config: Any) -> str | None:
    name = config._attn_implementation
    if isinstance(name, Shared):
        return name.previous
    if NAME in str(name):  # as in continuous batching's "paged|…"
        raise ValueError(f"shared_prefix: the model's attention was set to {name!r} after fusing.")
    return name  # type: ignore[no-any-return]
