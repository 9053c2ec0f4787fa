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
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tigon.ops.gated import gated_reference
from tigon.ops.layer_norm import layer_norm_reference
from tigon.ops.rms_norm import rms_norm_reference

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
ULPS = 8  # of fp32: a sum of N squares in another order differs by about log2(N) roundings, and the root halves that


@dataclass(frozen=True)
class Unknown:
    """Not recognised, and why."""

    reason: str


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


# ------------------------------------------------------------------------------------------------------------- norms


@dataclass(frozen=True)
class Norm:
    """y = x / sqrt(mean(x²) + eps) · (offset + weight), as `tigon.rms_norm` computes it; where `centered`, the same of
    x − mean(x), plus bias, as `tigon.layer_norm` does; where `gated`, the result times silu(gate), its second input.

    weight, bias, eps: names of the module's attributes; None for a norm without them; eps a number if it has no name.
    mixed: holds also for an fp32 weight beside a narrower x.
    native: it calls torch's own norm, which autocast runs in fp32. width: the only one it takes, without weight.
    ranks: how many dimensions x may have: those that it was shown for.
    """

    weight: str | None
    eps: str | float
    offset: float
    cast: str
    mixed: bool
    native: bool
    width: int | None = None
    centered: bool = False
    bias: str | None = None
    gated: bool = False
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        weight = "" if self.weight is None else " · (1 + w)" if self.offset else " · w"
        weight += " · silu(gate)" if self.gated else ""
        if self.centered:
            return f"(x − mean) / std{weight}{'' if self.bias is None else ' + b'}, rounded once"
        rounds = {"llama": "rounded before w", "gemma": "rounded once", "none": "not rounded to x's dtype"}[self.cast]
        return f"x / rms(x){weight}, {rounds}"


# Where no attribute holds eps, it is a number in the code.
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12)
# Of x: a norm over another dimension than the last one, or one that counts them from the first, shows in one of these.
RANKS = (2, 3, 4)
FREE_WIDTH = 96  # of the probe of a norm without a weight


@probing()
def recognize_norm(module: nn.Module) -> Norm | Unknown | None:
    """The formula of a norm over the last dimension; Unknown for what is called a norm and is none that Tigon has;
    None for the rest."""
    named = "norm" in type(module).__name__.lower()  # decides what the report mentions, not what is replaced
    if next(module.children(), None) is not None or next(module.buffers(), None) is not None:
        small = sum(1 for _ in module.modules()) <= 3  # larger ones are layers that contain a norm
        return Unknown("it has modules or buffers of its own") if named and small else None
    vectors = {k: p for k, p in module._parameters.items() if p is not None}
    if len(vectors) > 2:
        return Unknown("it has more parameters than a weight and a bias") if named else None
    shapes = [shape_of(p) for p in vectors.values()]
    if any(len(n) != 1 or n[0] < 2 for n in shapes) or not all(p.is_floating_point() for p in vectors.values()):
        return Unknown("its weight is not a vector") if named else None
    epsilons: list[str | float] = [k for k, v in vars(module).items() if isinstance(v, float) and 0.0 <= v < 0.1]
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        epsilons = [torch.finfo(torch.float32).eps]
    gated = named and _parameters_of(module)[1:] == ["gate"]
    if not (epsilons or named) or not (gated or takes_one_argument(module)):
        return Unknown("it is no norm over one input") if named else None
    # A norm without a weight may still be made for one width.
    widths = sorted({n[0] for n in shapes}) or [FREE_WIDTH, *_numbers(module)]
    found = None
    for eps, width in itertools.product([*epsilons, *EPSILONS], widths):
        for formula in _norms_of(module, list(vectors), eps, None if vectors or width == FREE_WIDTH else width):
            formula = replace(formula, gated=gated)
            if not _is_norm(module, formula, width):
                continue
            others = {rank: _is_norm(module, formula, width, rank=rank) for rank in RANKS if rank != 3}
            if False in others.values():
                continue
            formula = replace(formula, ranks=tuple(rank for rank in RANKS if others.get(rank, True)))
            # torch's own layer norm refuses an fp32 weight beside a narrower x on a GPU, and swiglu an fp32 factor.
            own = gated or (formula.centered and formula.native)
            mixed = not own and (not vectors or bool(_is_norm(module, formula, width, mixed=True)))
            found = replace(formula, mixed=mixed)
            if mixed or formula.centered or gated:  # "gemma" and "none" differ only where x and weight do
                return found
    if found is not None:
        return found
    return Unknown("its numbers fit no formula of tigon.rms_norm or tigon.layer_norm") if named else None


def _norms_of(module: nn.Module, vectors: list[str], eps: str | float, width: int | None) -> Iterator[Norm]:
    """All formulas that these parameters may be those of."""
    called = getattr(getattr(inspect.unwrap(type(module).forward), "__code__", None), "co_names", ())
    native = "rms_norm" in called or "layer_norm" in called
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        native = native or "forward" in called  # that of its base class, by super()
    if len(vectors) < 2:
        weight = vectors[0] if vectors else None
        for offset in (0.0, 1.0) if vectors else (0.0,):
            for cast in ("llama", "gemma", "none") if vectors else ("gemma",):
                yield Norm(weight, eps, offset, cast, False, native, width)
    choices: list[tuple[str | None, ...]] = [(*vectors, None, None)[:2], (None, None, *vectors)[-2:]]
    for weight, bias in dict.fromkeys([*choices, *(c[::-1] for c in choices if len(vectors) == 2)]):
        for offset in (0.0, 1.0) if weight is not None else (0.0,):
            yield Norm(weight, eps, offset, "gemma", False, native, width, centered=True, bias=bias)


def _numbers(module: nn.Module) -> list[int]:
    """The whole numbers among a module's attributes, alone or in tuples: one may be its width."""
    values = [n for v in vars(module).values() for n in (v if isinstance(v, tuple) else (v,))]
    return sorted({n for n in values if type(n) is int and 2 <= n <= 2**16})


def _is_norm(module: nn.Module, formula: Norm, width: int, *, mixed: bool = False, rank: int = 3) -> bool | None:
    """Whether it computes this formula of inputs of this rank, in training and not; None if it refuses them."""
    generator = torch.Generator().manual_seed(0)
    rows = 4 * max(2, 512 // width)  # bf16 roundings are told apart by how often they differ: that takes some numbers
    x = torch.randn(rows, width, generator=generator) + 0.5
    # Rows as small as any eps.
    x = (x * torch.logspace(-6, 2, rows)[:, None]).view(*(2,) * (rank - 2), -1, width)
    w, b = torch.randn(2, width, generator=generator) * 0.5 + 0.3
    eps = formula.eps
    dtypes = [(torch.bfloat16, torch.float32)] if mixed else [(torch.float32,) * 2, (torch.bfloat16,) * 2]
    # A second value of eps shows that it is this attribute, read at each call, that is added to the mean square.
    values = (None, 0.05) if isinstance(eps, str) else (None,)
    for (x_dtype, w_dtype), value, training in itertools.product(dtypes, values, (True, False)):
        here = x.to(x_dtype)
        weight, bias = (None if n is None else v.to(w_dtype) for n, v in ((formula.weight, w), (formula.bias, b)))
        given = {n: v for n, v in ((formula.weight, weight), (formula.bias, bias)) if n is not None and v is not None}
        probe = probe_of(module, given)
        probe.training = training
        if value is not None and isinstance(eps, str):
            vars(probe)[eps] = value
        added = vars(probe)[eps] if isinstance(eps, str) else eps
        gate = torch.randn(here.shape, generator=torch.Generator().manual_seed(1)).to(x_dtype)
        y = run(probe, here, gate) if formula.gated else run(probe, here)
        if y is None:
            return None
        size = None
        if formula.centered:
            scale = weight if weight is None or not formula.offset else weight + formula.offset
            expected = layer_norm_reference(here, scale, bias, eps=added)
            # The mean is taken off and the bias added: a rounding of either is one of what they are taken off.
            wide = here.float()
            size = wide.abs() + wide.mean(-1, keepdim=True).abs()
            size = size * torch.rsqrt(wide.var(-1, unbiased=False, keepdim=True) + added)
            size = size * (1.0 if scale is None else scale.float().abs()) + (
                0.0 if bias is None else bias.float().abs()
            )
        else:
            expected = rms_norm_reference(here, weight, eps=added, offset=formula.offset, cast=formula.cast)
        if formula.gated:
            expected = gated_reference(gate, expected, "silu")
        # Without a weight there is one way to write the formula, which may round 1 / rms(x) first.
        if not same_numbers(y, expected, roundings=0 if given else 2, size=size):
            return False
    return True


# ------------------------------------------------------------------------------------------------------------ probes


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
    for name in ("forward", "_replicate_for_data_parallel", "_tigon"):
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
