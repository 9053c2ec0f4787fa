"""Attention forwards that call tigon.rope: the original code, with globals that name a wrapper around tigon.rope."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tigon.fusion.engine.bytecode import list_names
from tigon.fusion.engine.ledger import Ledger
from tigon.fusion.engine.part import ForwardCache, Part, Site, register
from tigon.fusion.engine.patch import is_functorch_active
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.engine.rewrite import name_forward, rewrite_forward
from tigon.fusion.logits.deferred import as_tensor
from tigon.fusion.logits.recipe import DTYPES, get_version
from tigon.fusion.parts.head_norm import fuse_rope, strip_norm
from tigon.fusion.parts.rotary_formula import Rotary, read_arguments, recognize_rotary
from tigon.kernels.graph_capture import is_captured
from tigon.ops.rope import rope


class RotaryPart(Part):
    """Modules whose forward calls a rotary function by a global name: attention."""

    kind = "rotary"

    def fuse(self, site: Site, module: nn.Module) -> None:
        forward = type(module).forward
        for name, formula in find_rotary(site, forward).items():
            if isinstance(formula, Reason):
                site.record_skipped(self, module, replace(formula, text=f"{name}: {formula}"))
            elif site.find_patch(module) is None:  # one rewritten forward serves all its rotary functions
                rewritten = _rewrite(site, forward)
                site.replace(self, module, rewritten, formula, str(formula), key=name_forward(forward))

    def forward_of_copy(self, site: Site, module: nn.Module) -> Callable[..., Any] | None:
        rewritten: Callable[..., Any] = _rewrite(site, type(module).forward)
        return rewritten


@dataclass(frozen=True)
class Through:
    """A function that rotates parts of a head, each by a rotary function: rotations in several dimensions."""

    inner: tuple[tuple[str, Rotary], ...]

    def __str__(self) -> str:
        return f"parts of a head: {', '.join(str(formula) for _, formula in self.inner)}"


class _Formulas(ForwardCache):
    """A function → the rotary functions called there, with their formulas. Their module may get others later."""


def _rewrite(site: Site, forward: Any) -> Any:
    return site.get_rewritten(forward, "rotary", functools.partial(_make_globals, site))


def _make_globals(site: Site, fn: types.FunctionType) -> dict[str, Any]:
    key, made = name_forward(fn), {}
    for name, formula in find_rotary(site, fn).items():
        if isinstance(formula, Rotary):
            made[name] = _make_rotary(fn.__globals__, name, formula, site.ledger, key)
        elif isinstance(formula, Through):
            inner = functools.partial(_make_inner, formula, site.ledger, key)
            made[name] = rewrite_forward(fn.__globals__[name], inner)
    return made


def _make_inner(formula: Through, ledger: Ledger, key: str, fn: types.FunctionType) -> dict[str, Any]:
    return {name: _make_rotary(fn.__globals__, name, inner, ledger, key) for name, inner in formula.inner}


def find_rotary(site: Site, forward: Any) -> dict[str, Rotary | Through | Reason]:
    """The rotary functions that a forward calls by a global name."""
    inner, cache = inspect.unwrap(forward) if callable(forward) else None, site.get_cached(_Formulas)
    if inner not in cache:
        cache[inner] = {}  # meanwhile: functions may call each other
        code = getattr(inner, "__code__", None)
        names = () if code is None else (*code.co_names, *sorted(list_names(code).difference(code.co_names)))
        candidates = {n: g for n in names if callable(g := getattr(inner, "__globals__", {}).get(n))}
        # The name decides whether the report mentions a function, never whether the function is replaced.
        rotary = {n: g for n, g in candidates.items() if read_arguments(g) or _sounds_rotary(g)}
        cache[inner] = {n: _recognize(site, g) for n, g in rotary.items() if g is not inner}
    formulas: dict[str, Rotary | Through | Reason] = cache[inner]
    return formulas


def _recognize(site: Site, fn: Any) -> Rotary | Through | Reason:
    found = recognize_rotary(fn)
    # A copy of the function around rotary functions computes the same by construction.
    if isinstance(found, Reason) and not isinstance(rewrite_forward(fn, lambda _: {}), Reason):
        inner = tuple((n, formula) for n, formula in find_rotary(site, fn).items() if isinstance(formula, Rotary))
        return Through(inner) if inner else found
    return found


def list_names_before(site: Site, forward: Any) -> tuple[str, ...]:
    """The names that a forward reads before calling the rotary function."""
    names: tuple[str, ...] = inspect.unwrap(forward).__code__.co_names  # in the order in which they are first used
    functions = find_rotary(site, forward).items()
    return names[: min((names.index(n) for n, f in functions if isinstance(f, Rotary)), default=0)]


def _sounds_rotary(fn: Any) -> bool:
    name = getattr(fn, "__name__", "").lower()
    return not isinstance(fn, type) and ("rotary" in name or "rope" in name.split("_"))


def _make_rotary(scope: dict[str, Any], name: str, formula: Rotary, ledger: Ledger, key: str) -> Callable[..., Any]:
    """The function that a rewritten forward sees under this name. key: the ledger's key for the calls."""
    recognised = scope[name]
    turn = formula.turn
    # All layers in a model get the same cos and sin, so they are spread once.
    spread: MutableMapping[Tensor, Any] = WeakTensorKeyDictionary()

    def spread_once(cos: Tensor, sin: Tensor, freqs: Tensor | None) -> tuple[Tensor, Tensor]:
        if turn.angles == "whole" and not turn.back:
            return cos, sin
        # From complex angles each call makes new views cos and sin: the complex tensor itself is the key.
        first, second = (cos, sin) if freqs is None else (freqs, freqs)
        if not _may_keep(first, second):
            return turn.spread(cos, sin)
        known = spread.get(first)
        if known is None or known[0]() is not second or known[1] != (get_version(first), get_version(second)):
            # A value that holds the entry's key would keep the key alive, so unchanged tensors are left out.
            made = tuple(None if t is s else t for t, s in zip(turn.spread(cos, sin), (cos, sin), strict=True))
            known = ref(second), (get_version(first), get_version(second)), made
            spread[first] = known
        wide_cos, wide_sin = known[2]
        return cos if wide_cos is None else wide_cos, sin if wide_sin is None else wide_sin

    def plain_rope(*tensors: Tensor, **options: Any) -> Any:
        run = functools.partial(rope, **options)
        turned = run(*tensors)
        # `rope` keeps only the angles, but heads that a norm made can be recomputed.
        ledger.recompute.note(turned, run, *tensors, where_known=True)
        return turned

    def apply(*args: Any, **kwargs: Any) -> Any:
        plain = recognised if torch.compiler.is_compiling() else scope.get(name, recognised)
        fits = plain is recognised and ledger.active and not is_functorch_active()  # else replaced since
        bound = formula.bind(args, kwargs) if fits else None
        heads = () if bound is None else tuple([strip_norm(x) for x in bound[0]])
        if bound is None or not _tensors_fit(*heads, *bound[1:3]):
            return plain(*as_tensor(args), **{k: as_tensor(v) for k, v in kwargs.items()})
        waiting, cos, sin, dim = bound
        flat = formula.flat and cos.dim() == 2 and "unsqueeze_dim" not in kwargs and all(x.dim() == 3 for x in heads)
        four, angles = heads, (cos, sin)
        if flat:
            four, angles, dim = tuple(x[None] for x in heads), (cos[None], sin[None]), 2
        if not _shapes_fit(four, *angles, dim, formula):
            return plain(*as_tensor(args), **{k: as_tensor(v) for k, v in kwargs.items()})
        rotate = (
            fuse_rope(*waiting) if len(waiting) == 2 and turn.whole_heads(cos.shape[-1], heads[0].shape[-1]) else None
        )
        ledger.count("rotary", key)
        if rotate is not None:
            ledger.count("qk_norm", key)
        if rotate is None and any(x is not y for x, y in zip(heads, waiting, strict=True)):
            heads = as_tensor(waiting)
            four = tuple(x[None] for x in heads) if flat else heads
        freqs = (args[2] if len(args) > 2 else kwargs.get(formula.names[2])) if formula.complex else None
        wide = spread_once(cos, sin, freqs)
        if flat:
            wide = wide[0][None], wide[1][None]
        # Not `rotate or`: Dynamo before torch 2.13 takes no truth value from a function.
        turned = turn.apply(plain_rope if rotate is None else rotate, four, *wide, dim)
        if flat:
            turned = tuple(y[0] for y in turned)
        if formula.keeps:
            turned = tuple([y if y.dtype == x.dtype else y.to(x.dtype) for x, y in zip(waiting, turned, strict=True)])
        return turned if len(heads) == 2 else turned[0]

    return apply


def _may_keep(*angles: Tensor) -> bool:
    """Whether tensors made from these angles now may serve later calls."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False  # a backward pass cannot use an inference tensor
    if any(t.is_inference() for t in angles):
        return False  # inference tensors have no version counter
    return not is_captured(angles[0])  # a CUDA graph's replay must spread the angles for the step being replayed


def _tensors_fit(*tensors: Any) -> bool:
    for t in tensors:
        if not isinstance(t, Tensor) or t.dtype not in DTYPES:
            return False
    cos, sin = tensors[-2:]
    return not ((cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled())


def _shapes_fit(heads: tuple[Tensor, ...], cos: Tensor, sin: Tensor, dim: int, formula: Rotary) -> bool:
    q = heads[0]
    if q.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    shape = q.shape
    batch, time, width = shape[0], shape[3 - dim], shape[3]
    for x in heads[1:]:
        shape = x.shape
        if len(shape) != 4 or (shape[0], shape[3 - dim], shape[3]) != (batch, time, width):
            return False
    rotated = cos.shape[2] * (2 if formula.turn.angles == "half" else 1)
    if cos.shape[0] not in (1, batch) or cos.shape[1] != time or not formula.turn.fits(rotated, width):
        return False
    return formula.full if rotated == width else formula.partial


register(RotaryPart())
