"""What a module computes, found out by running it, by numbers, never by name. Here: norms, and how probes are made.

A probe is a copy of the module with small random weights on the CPU. It runs in fp32 and in bf16, beside every formula
that Tigon has. A formula is accepted when it agrees

    in fp32   to a few units in the last place: both sides round, in orders of summation that may differ;
    in bf16   rounding for rounding, or, where Tigon rounds once and the module more often, within those roundings.

Nothing of the module itself is touched, and modules on the meta device can be probed like any other.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
# What fuse puts into the `__dict__` of a module.
INSTALLED = ("_tigon", "forward", "_replicate_for_data_parallel", "__getstate__")

ULPS = 8  # of fp32: a sum of N squares in another order differs by about log2(N) roundings, and the root halves that


@contextlib.contextmanager
def probing() -> Iterator[None]:
    """Shields probes from what surrounds fuse(), autocast or a default device, and the global generator from probes."""
    with (
        torch.no_grad(),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _numbers(module: nn.Module) -> list[int]:
    """The whole numbers among a module's attributes, alone or in tuples: one may be its width."""
    values = [n for v in vars(module).values() for n in (v if isinstance(v, tuple) else (v,))]
    return sorted({n for n in values if type(n) is int and 2 <= n <= 2**16})


def signature_of(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules that one probe can stand for: same class, same settings, same shape of children."""

    def simple(v: Any) -> Any:
        return v if v is None or isinstance(v, (bool, int, float, str, torch.dtype)) else id(v)

    settings = tuple(
        (k, simple(v)) for k, v in sorted(vars(module).items()) if not k.startswith("_") and k not in ("training",)
    )
    parameters = tuple(
        (k, None if p is None else (len(shape_of(p)), shape_of(p)[-1:])) for k, p in module._parameters.items()
    )
    children = tuple(
        (k, type(c), linear_widths(c), None if linear_widths(c) else signature_of(c))
        for k, c in module._modules.items()
        if c is not None
    )
    return type(module), settings, parameters, children


def shape_of(p: Tensor) -> torch.Size:
    """Its shape; of a parameter that DeepSpeed's ZeRO-3 keeps empty between uses, what it has in use."""
    return torch.Size(getattr(p, "ds_shape", p.shape))


def linear_widths(module: nn.Module) -> tuple[int, int] | None:
    """in and out features of whatever stands for a linear layer: plain, LoRA, quantised, parallel."""
    widths = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return widths if all(isinstance(w, int) and w > 0 for w in widths) else None  # type: ignore[return-value]


def _parameters_of(module: nn.Module) -> list[str]:
    """The names of what its forward takes."""
    try:
        return list(inspect.signature(type(module).forward).parameters)[1:]
    except (TypeError, ValueError):
        return []


def takes_one_argument(module: nn.Module) -> bool:
    try:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return False
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(required) == 1 and required[0].kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )


def probe_of(module: nn.Module, weights: dict[str, Tensor], children: dict[str, nn.Module] | None = None) -> nn.Module:
    """A module of the same class and settings, with these weights and children, without hooks."""
    probe = object.__new__(module.__class__)  # FSDP2's own __new__ makes a module of the class that it has wrapped
    state = dict(vars(module))
    for name in INSTALLED:
        state.pop(name, None)
    for name in HOOKS:
        if name in state:
            state[name] = type(state[name])()  # no hooks
    # A forward that appends to a list of its own must append to the probe's.
    state = {k: copy.copy(v) if type(v) in (list, dict, set) else v for k, v in state.items()}
    state["_parameters"] = {k: nn.Parameter(weights[k]) if k in weights else p for k, p in module._parameters.items()}
    state["_buffers"] = dict(module._buffers)
    state["_modules"] = {
        k: (children or {}).get(k) or (c if c is None else probe_of(c, {})) for k, c in module._modules.items()
    }
    vars(probe).update(state)
    return probe


def run(fn: Callable[..., Any], *args: Tensor, **options: Any) -> Any:
    try:
        return fn(*args, **options)
    except Exception:  # whatever a module does with an input that it was not made for, it is not the formula
        return None


def same_numbers(y: Any, expected: Tensor, *, roundings: int = 0, size: Tensor | None = None) -> bool:
    """Whether y is expected, to rounding.

    roundings: how many times y may have been rounded to a narrow dtype where `expected` was rounded once; with 0 it
        must be rounded alike, except where an fp32 difference falls on a tie: one element in a hundred at most.
    size: what the roundings are relative to; `expected` itself if not given.
    """
    if not isinstance(y, Tensor) or y.shape != expected.shape or y.dtype != expected.dtype:
        return False
    if not bool(torch.isfinite(y).all()):
        return False
    unit = torch.finfo(y.dtype).eps
    size = expected.float().abs() if size is None else size
    error = (y.float() - expected.float()).abs()
    if y.dtype == torch.float32:
        return bool((error <= ULPS * unit * size + 1e-30).all())
    if roundings:
        return bool((error <= (roundings + 1) * unit / 2 * size + 1e-30).all())
    return bool((error <= unit * size + 1e-30).all()) and float((error > 0).float().mean()) <= 0.01
