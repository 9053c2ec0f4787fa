"""Liger arguments that select an implementation. They are accepted; a non-default value warns."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

# The reason for each.
WITHOUT_EFFECT = {
    "backend": "TIGON_BACKEND and tigon.use_backend choose between Triton and PyTorch",
    "chunk_mem_const": "chunks follow a budget in bytes, TIGON_CHUNK_BYTES",
    "chunk_size": "chunks follow a budget in bytes, TIGON_CHUNK_BYTES",
    "eps": "classes of probability 0 contribute 0 anyway",
    "impl": "TIGON_BACKEND and tigon.use_backend choose between Triton and PyTorch",
    "in_place": "no tensor visible to the caller is overwritten",
    "mode": "each kernel has a single implementation",
    "position_ids": "cos and sin already encode the positions",
    "row_mode": "the rows per program follow from the shape",
}


def without_effect(name: str, **options: tuple[Any, Any]) -> None:
    """Warn about each option that is neither off nor at the default.

    Args:
        name: the function that takes the options. options: (value, default) each.
    """
    for option, (value, default) in options.items():
        if value is not None and value is not False and value != default:
            reason = WITHOUT_EFFECT[option]
            warnings.warn(f"{name}: {option}={value!r} has no effect here: {reason}.", stacklevel=3)


def accumulate(name: str, accum_dtype: torch.dtype | None, weight: Tensor) -> Literal["fp32", "weight"]:
    """Tigon's name for the dtype of the weight gradient's sum: fp32 unless the weight's dtype is requested."""
    if accum_dtype is None or accum_dtype == torch.float32:
        return "fp32"
    if accum_dtype == weight.dtype:
        return "weight"
    raise ValueError(f"{name}: accum_dtype must be torch.float32 or the weight's {weight.dtype}, got {accum_dtype}.")


class Options(nn.Module):
    """A module without parameters whose arguments are attributes with the same names, which may be set later."""

    def _keep(self, **options: Any) -> None:
        self._names = tuple(options)
        for name, value in options.items():
            setattr(self, name, value)

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


def make_loss_module(
    name: str, loss: Callable[..., Any], forward: str, options: str, *, check: Callable[..., None] | None = None,
    **defaults: Any,
) -> type[Options]:  # fmt: skip
    """Make a loss module: its constructor fixes the loss's options, and its forward takes the tensors.

    Args:
        loss: the function.
        forward: forward's arguments in Liger's order; `theirs=ours` where the loss uses another name.
        options: the constructor's arguments in Liger's order.
        check: called with the options when a module is made; raises ValueError.
        defaults: for options that differ from the loss's.
    """
    parameters = inspect.signature(loss).parameters
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    starts = {option: defaults.get(option, parameters[option].default) for option in options.split()}
    names = {item.partition("=")[0]: item.rpartition("=")[2] for item in forward.split()}
    tensors: list[inspect.Parameter] = []
    absent: dict[str, None] = {}  # arguments that the loss needs, after optional arguments
    for theirs, ours in names.items():
        default = parameters[ours].default
        if default is empty and tensors and tensors[-1].default is None:
            default = absent[ours] = None
        tensors.append(inspect.Parameter(theirs, kind, default=default))

    def initialize(self: Options, *args: Any, **kwargs: Any) -> None:
        super(module, self).__init__()  # torch.compile recognises this call to nn.Module's
        given = dict(zip(starts, args, strict=False)) | kwargs
        if len(args) > len(starts) or given.keys() - starts.keys():
            raise TypeError(f"{name}: its options are {', '.join(starts)}, got {len(args)} values and {list(kwargs)}.")
        if check is not None:
            check(name, **(starts | given))
        self._keep(**(starts | given))

    def apply(self: Options, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(names):
            raise TypeError(f"{name}: forward takes {len(names)} arguments, got {len(args)}.")
        given = dict(zip(names.values(), args, strict=False))
        given |= {names.get(theirs, theirs): value for theirs, value in kwargs.items()}
        return loss(**(absent | given), **self.options)

    apply.__signature__ = inspect.Signature(tensors)  # type: ignore[attr-defined]
    fixed = inspect.Signature([inspect.Parameter(option, kind, default=value) for option, value in starts.items()])
    text = f"`{loss.__name__}` with its options fixed: forward({', '.join(names)})."
    body = {"__init__": initialize, "forward": apply, "__doc__": text, "__module__": loss.__module__}
    module: type[Options] = type(name, (Options,), body | {"__signature__": fixed})
    return module
