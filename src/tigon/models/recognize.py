"""What a module computes, found out by running it: norms and gated MLPs, by numbers, never by name.

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
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.ops.gated import gated_reference
from tigon.ops.layer_norm import layer_norm_reference
from tigon.ops.relu2 import relu2_reference
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

    def __str__(self) -> str:
        weight = "" if self.weight is None else " · (1 + w)" if self.offset else " · w"
        weight += " · silu(gate)" if self.gated else ""
        if self.centered:
            return f"(x − mean) / std{weight}{'' if self.bias is None else ' + b'}, rounded once"
        rounds = {"llama": "rounded before w", "gemma": "rounded once", "none": "not rounded to x's dtype"}[self.cast]
        return f"x / rms(x){weight}, {rounds}"


# Where no attribute holds eps, it is a number in the code.
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12)
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
    if any(p.dim() != 1 or not p.is_floating_point() or p.numel() < 2 for p in vectors.values()):
        return Unknown("its weight is not a vector") if named else None
    epsilons: list[str | float] = [k for k, v in vars(module).items() if isinstance(v, float) and 0.0 <= v < 0.1]
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        epsilons = [torch.finfo(torch.float32).eps]
    gated = named and _parameters_of(module)[1:] == ["gate"]
    if not (epsilons or named) or not (gated or _takes_one_argument(module)):
        return Unknown("it is no norm over one input") if named else None
    # A norm without a weight may still be made for one width.
    widths = sorted({p.numel() for p in vectors.values()}) or [FREE_WIDTH, *_numbers(module)]
    found = None
    for eps, width in itertools.product([*epsilons, *EPSILONS], widths):
        for formula in _norms_of(module, list(vectors), eps, None if vectors or width == FREE_WIDTH else width):
            formula = replace(formula, gated=gated)
            if not _is_norm(module, formula, width, mixed=False):
                continue
            # torch's own layer norm refuses an fp32 weight beside a narrower x on a GPU, and swiglu an fp32 factor.
            own = gated or (formula.centered and formula.native)
            mixed = not own and (not vectors or _is_norm(module, formula, width, mixed=True))
            found = replace(formula, mixed=mixed)
            if mixed or formula.centered or gated:  # "gemma" and "none" differ only where x and weight do
                return found
    if found is not None:
        return found
    return Unknown("its numbers fit no formula of tigon.rms_norm or tigon.layer_norm") if named else None


def _norms_of(module: nn.Module, vectors: list[str], eps: str | float, width: int | None) -> Iterator[Norm]:
    """All formulas that these parameters may be those of."""
    called = getattr(getattr(type(module).forward, "__code__", None), "co_names", ())
    native = "rms_norm" in called or "layer_norm" in called
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


def _is_norm(module: nn.Module, formula: Norm, width: int, *, mixed: bool) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = 2 * max(4, 1024 // width)  # bf16 roundings are told apart by how often they differ: that takes some numbers
    x = torch.randn(rows, width, generator=generator) + 0.5
    # Rows as small as any eps. Three dimensions: what normalises over another than the last one shows.
    x = (x * torch.logspace(-6, 2, rows)[:, None]).view(2, rows // 2, width)
    w, b = torch.randn(2, width, generator=generator) * 0.5 + 0.3
    eps = formula.eps
    dtypes = [(torch.bfloat16, torch.float32)] if mixed else [(torch.float32,) * 2, (torch.bfloat16,) * 2]
    for x_dtype, w_dtype in dtypes:
        here = x.to(x_dtype)
        weight, bias = (None if n is None else v.to(w_dtype) for n, v in ((formula.weight, w), (formula.bias, b)))
        given = {n: v for n, v in ((formula.weight, weight), (formula.bias, bias)) if n is not None and v is not None}
        # A second value of eps shows that it is this attribute, read at each call, that is added to the mean square.
        for value in (None, 0.05) if isinstance(eps, str) else (None,):
            probe = _copy(module, given)
            if value is not None and isinstance(eps, str):
                vars(probe)[eps] = value
            added = vars(probe)[eps] if isinstance(eps, str) else eps
            gate = torch.randn(here.shape, generator=torch.Generator().manual_seed(1)).to(x_dtype)
            y = run(probe, here, gate) if formula.gated else run(probe, here)
            if y is None:
                return False
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


# -------------------------------------------------------------------------------------------------------- gated MLPs


ACTS = ("silu", "gelu_tanh", "gelu", "relu", "relu2")


@dataclass(frozen=True)
class Gated:
    """y = down(act(gate(x)) · up(x)). Names of the child modules; up None where gate holds both, side by side.

    act: "silu", "gelu_tanh", "gelu" (the error function), "relu" or "relu2". act_module: the child that computes it.
    up_first: the order in which the module calls them, which random numbers and hooks can tell.
    between, after: children that the product and the result go through: dropout, a norm.
    gate_scale, scale: attributes that multiply gate(x) and the result. dropout: one that says how much of the result is
        dropped in training.
    """

    gate: str
    up: str | None
    down: str
    act: str
    act_module: str | None
    up_first: bool = False
    between: str | None = None
    after: str | None = None
    gate_scale: str | None = None
    scale: str | None = None
    dropout: str | None = None

    def __str__(self) -> str:
        gate = "gate" if self.gate_scale is None else "s · gate"
        return f"{self.act}({gate}) · up" + (", one projection" if self.up is None else "")


@probing()
def recognize_mlp(module: nn.Module) -> Gated | Unknown | None:
    """The formula of a gated MLP; Unknown for what is built like one and computes something else; None for the rest."""
    children = dict(module.named_children())
    widths = {k: w for k, c in children.items() if (w := _linear_widths(c)) is not None}
    others = [k for k in children if k not in widths]
    roles = list(_roles(widths)) if len(widths) in (2, 3) else []
    if not roles:
        return None
    # Three square layers are also every attention: not to be mentioned.
    silent = all(before == after for before, after in widths.values())
    mixer = silent or len(widths) == 2  # two layers that fit are also those of an attention or a state space
    if module._parameters or module._buffers:
        return None if mixer else Unknown("it has parameters of its own")
    if len(others) > 3:
        return None if mixer else Unknown(f"it has other modules: {', '.join(others)}")
    if not _takes_one_argument(module):
        return None if mixer else Unknown("its forward takes more than one input")
    none: list[str | None] = [None]
    acts: list[str | None] = [
        k for k in others if not isinstance(children[k], nn.Dropout) and not _has_state(children[k])
    ]
    for act_module in acts or none:
        rest = [k for k in others if k != act_module]
        for gate, up, down in roles:
            for act in ACTS:
                formula = Gated(gate, up, down, act, act_module)
                # A number among the attributes may scale something; or be what makes the module another one.
                for attributes in ([k for k, v in vars(module).items() if type(v) is float], []):
                    found = _gated(module, formula, rest, attributes)
                    if found is not None:
                        return found
    if silent:
        return None
    if len(others) > 1:
        return Unknown(f"it has other modules: {', '.join(others)}")
    name = type(children[others[0]]).__name__ if others else "its own activation"
    return Unknown(f"its numbers fit neither swiglu, geglu nor reglu ({name})")


@dataclass(frozen=True)
class Squared:
    """y = relu(x)², an activation by itself, as `tigon.relu2` computes it."""

    def __str__(self) -> str:
        return "relu(x)²"


@probing()
def recognize_relu2(module: nn.Module) -> Squared | None:
    if next(module.children(), None) is not None or _has_state(module) or not _takes_one_argument(module):
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 8, 40, generator=generator) * torch.logspace(-2, 2, 8)[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        for training in (True, False):
            probe = _copy(module, {})
            probe.training = training
            y = run(probe, x.to(dtype))
            if not same_numbers(y, relu2_reference(x.to(dtype))):
                return None
    return Squared()


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def _linear_widths(module: nn.Module) -> tuple[int, int] | None:
    """in and out features of whatever stands for a linear layer: plain, LoRA, quantised, parallel."""
    widths = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return widths if all(isinstance(w, int) and w > 0 for w in widths) else None  # type: ignore[return-value]


def _roles(widths: dict[str, tuple[int, int]]) -> Iterator[tuple[str, str | None, str]]:
    """(gate, up, down) that fit together; up None for two layers of which the first is twice as wide."""
    if len(widths) == 2:
        for gate in widths:
            down = next(k for k in widths if k != gate)
            if widths[gate] == (widths[down][1], 2 * widths[down][0]):
                yield gate, None, down
        return
    for gate in widths:
        for up in widths:
            for down in widths:
                if len({gate, up, down}) == 3 and widths[gate] == widths[up] == widths[down][::-1]:
                    yield gate, up, down


class _Recorder(nn.Linear):
    """A linear layer that remembers its inputs, and its turn."""

    name: str
    seen: list[Tensor]
    order: list[str]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        self.order.append(self.name)
        return F.linear(x, self.weight, self.bias)


class _Mark(nn.Module):
    """In place of a dropout or a norm: multiplies by a power of two, which shows where it stands and rounds nothing."""

    factor: float

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _gated(module: nn.Module, formula: Gated, rest: list[str], attributes: list[str]) -> Gated | None:
    """The formula with the places of the other children and of the scales; None where the numbers differ."""
    factors = {k: 4.0 ** (i + 1) for i, k in enumerate(rest)}
    scales = {k: 0.5 ** (i + 1) for i, k in enumerate(attributes)}
    found: set[Gated] = set()
    dropouts: set[str | None] = set()
    generator = torch.Generator().manual_seed(0)
    narrow, wide = 12, 40  # the sizes of the probe, whatever the module's: a layer of a 70B model would take a gigabyte
    gate, up, down = formula.gate, formula.up, formula.down
    for dtype in (torch.float32, torch.bfloat16):
        for training in (True, False):
            layers: dict[str, _Recorder] = {}
            order: list[str] = []
            for name in (gate, up, down):
                if name is None:
                    continue
                size = (wide, narrow) if name == down else (narrow, 2 * wide if up is None else wide)
                layer = layers[name] = _Recorder(*size, device="meta")  # draws nothing from the global generator
                for k, p in layer.named_parameters():
                    setattr(layer, k, nn.Parameter(torch.randn(p.shape, generator=generator).to(dtype)))
                layer.name, layer.seen, layer.order = name, [], order
            marks = {k: _Mark() for k in rest}
            for k, mark in marks.items():
                mark.factor = factors[k]
            probe = _copy(module, {}, {**layers, **marks})
            vars(probe).update(scales)
            probe.training = training
            for child in probe.children():
                child.training = training
            # Small and large numbers: a limit that gate or up is held to shows.
            x = torch.randn(16, narrow, generator=generator) * torch.logspace(-2, 2, 16)[:, None]
            x = x.view(2, 8, narrow).to(dtype)
            y = run(probe, x)
            inputs = layers[down].seen
            if not isinstance(y, Tensor) or len(inputs) != 1 or any(len(m.seen) != 1 for m in layers.values()):
                return None
            last = F.linear(inputs[0], layers[down].weight, layers[down].bias)
            after = next((k for k, f in {"": 1.0, **factors, **scales}.items() if torch.equal(y, last * f)), None)
            dropout = next(
                (k for k, p in scales.items() if after is None and training and _is_dropout(y, last, p)), None
            )
            if after is None and dropout is None:
                return None  # something else follows the last layer
            dropouts |= {dropout} if training else set()
            g = F.linear(x, layers[gate].weight, layers[gate].bias)
            u = None if up is None else F.linear(x, layers[up].weight, layers[up].bias)
            here = None
            for between, gate_scale in itertools.product(("", *rest), ("", *scales)):
                expected = gated_reference(g, u, formula.act, scales.get(gate_scale, 1.0))
                # gelu is a difference of numbers as large as gate, to which fp32 rounding is relative, and in bf16 too
                # where it is written out. Modules round act(gate) and the product, Tigon the product alone.
                written_out = dtype == torch.bfloat16 and formula.act == "gelu_tanh"
                share = 0.5 if dtype == torch.float32 or written_out else 2**-15
                terms, roundings = expected.abs() + share * _product(g, u), 6 if written_out else 2
                if same_numbers(inputs[0] / factors.get(between, 1.0), expected, roundings=roundings, size=terms):
                    here = between or None, gate_scale or None
                    break
            if here is None:
                return None
            places = here[0], after if after in factors else None, here[1], after if after in scales else None
            found.add(replace(formula, up_first=order[0] == up, **dict(zip(_PLACES, places, strict=True))))  # type: ignore[arg-type]
    placed = {k for f in found for k in (f.between, f.after) if k is not None}
    if len(found) != 1 or len(dropouts) != 1 or placed != set(rest):
        return None
    return replace(found.pop(), dropout=dropouts.pop())


_PLACES = ("between", "after", "gate_scale", "scale")


def _is_dropout(y: Tensor, last: Tensor, p: float) -> bool:
    kept = y != 0
    return bool(kept.any() and not kept.all()) and torch.allclose(y[kept], last[kept] / (1 - p), rtol=0.02)


def _product(gate: Tensor, up: Tensor | None) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return (gate * up).abs()


# ------------------------------------------------------------------------------------------------------------ probes


def signature_of(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules that one probe can stand for: same class, same settings, same shape of children."""

    def simple(v: Any) -> Any:
        return v if v is None or isinstance(v, (bool, int, float, str, torch.dtype)) else id(v)

    settings = tuple(
        (k, simple(v)) for k, v in sorted(vars(module).items()) if not k.startswith("_") and k not in ("training",)
    )
    parameters = tuple((k, None if p is None else (p.dim(), p.shape[-1:])) for k, p in module._parameters.items())
    children = tuple(
        (k, type(c), _linear_widths(c), None if _linear_widths(c) else signature_of(c))
        for k, c in module._modules.items()
        if c is not None
    )
    return type(module), settings, parameters, children


def _parameters_of(module: nn.Module) -> list[str]:
    """The names of what its forward takes."""
    try:
        return list(inspect.signature(type(module).forward).parameters)[1:]
    except (TypeError, ValueError):
        return []


def _takes_one_argument(module: nn.Module) -> bool:
    try:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return False
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(required) == 1 and required[0].kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )


def _copy(module: nn.Module, weights: dict[str, Tensor], children: dict[str, nn.Module] | None = None) -> nn.Module:
    """A module of the same class and settings, with these weights and children, without hooks."""
    probe = module.__class__.__new__(module.__class__)
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
        k: (children or {}).get(k) or (c if c is None else _copy(c, {})) for k, c in module._modules.items()
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
