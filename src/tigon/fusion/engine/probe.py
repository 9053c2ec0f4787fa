"""Probes: running a module shows the formula by numbers, whatever the module is called.

A probe is a copy of the module with small random weights on the CPU. The probe runs in fp32 and in bf16, beside every
formula that Tigon has. A formula is accepted when it agrees

    in fp32   to a few units in the last place: both sides round, in summation orders that may differ;
    in bf16   rounding for rounding, or, where Tigon rounds once and the module more often, within those roundings;
    and the same holds in the other CASES: for one token and for many, large and small numbers, in fp16, with
    non-finite numbers, and for the gradients with respect to the input and every parameter.

Probing does not touch the module itself, so modules on the meta device can be probed as well.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tigon.fusion.engine.bytecode import analyze_forward
from tigon.fusion.engine.reasons import Reason

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
# The entries that fuse adds to a module's `__dict__`.
INSTALLED = ("_tigon", "forward", "_replicate_for_data_parallel", "__getstate__")

ULPS = 8  # in fp32: a sum of N squares in another order differs by about log2(N) roundings, and the root halves that


@dataclass(frozen=True)
class Case:
    """Inputs for a probe, besides the inputs that tell formulas apart.

    shape: sequences and tokens. powers: the first and the last token's sizes, as powers of ten. gradients:
    autograd records, as in training, and the gradients are compared. broken: some numbers are infinite or NaN.
    """

    dtype: torch.dtype = torch.float32
    shape: tuple[int, int] = (2, 8)
    powers: tuple[float, float] = (-1.0, 1.0)
    training: bool = True
    gradients: bool = False
    broken: bool = False

    def __str__(self) -> str:
        sizes = f"{self.shape[0]} × {self.shape[1]} tokens, {str(self.dtype)[6:]}"
        training = "" if self.training else ", not training"
        return (
            sizes
            + (", gradients too" if self.gradients else "")
            + (", infinite and NaN" if self.broken else "")
            + training
        )

    def input(self, *widths: int) -> Tensor:
        """Random numbers of shape (sequences, tokens, *widths)."""
        generator = torch.Generator().manual_seed(2)
        sequences, tokens = self.shape[0], min(self.shape[1], max(1, LARGEST // math.prod(widths)))
        x = torch.randn(sequences, tokens, *widths, generator=generator)
        x = (x * torch.logspace(*self.powers, tokens).view(-1, *(1,) * len(widths))).to(self.dtype)
        if self.broken:
            for token, value in enumerate((math.nan, math.inf, -math.inf)):
                x[:, token].view(sequences, -1)[:, 1] = value
        return x.requires_grad_(self.gradients)

    def agrees(
        self, y: Any, expected: Tensor, leaves: Sequence[Tensor] = (), *, roundings: int = 0, size: Tensor | None = None
    ) -> bool:
        """Whether y is the expected result in this case. leaves: the tensors whose gradients are compared."""
        if self.broken:
            if not isinstance(y, Tensor) or y.shape != expected.shape:
                return False
            return torch.equal(*(torch.isfinite(t).all(-1) for t in (y, expected)))
        with torch.no_grad():
            # The first inputs have told the formula from others. Among so many more numbers some are further off: in
            # fp32 by roundings relative to their row's largest number.
            size = expected.float().abs() if size is None else size
            if expected.dtype == torch.float32:
                size = size.amax(-1, keepdim=True).expand_as(size)
            if not same_numbers(y, expected, roundings=roundings, size=size):
                return False
        return not self.gradients or same_gradients(y, expected, leaves)


LARGEST = 2**19  # elements in a long input
CASES = (
    Case(gradients=True), Case(gradients=True, training=False, powers=(-6.0, 6.0)),
    Case(gradients=True, dtype=torch.bfloat16), Case(shape=(1, 1), powers=(0.0, 0.0)), Case(shape=(1, 4099)),
    Case(dtype=torch.float16, powers=(-1.0, 0.5)), Case(broken=True),
)  # fmt: skip


def recognition(recognize: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a recognition shielded, and accepts a formula only if the module's code is safe to replace.

    Safe code leaves no state behind after a call, and branches on the module's own attributes alone.
    """

    @functools.wraps(recognize)
    def recognize_safely(module: nn.Module) -> Any:
        with shield_probes():
            formula = recognize(module)
        if formula is None or isinstance(formula, Reason):
            return formula
        act = getattr(formula, "act_module", None)
        for owner in (module, *(() if act is None else getattr(module, act).modules())):
            code = analyze_forward(owner)
            reason = code if isinstance(code, Reason) else code.reason
            if reason is None and getattr(code, "asks_rank", False) and not hasattr(formula, "ranks"):
                reason = Reason("its forward depends on how many dimensions its input has")
            if reason is None and getattr(code, "asks_device", False) and not hasattr(formula, "devices"):
                reason = Reason("its forward depends on whether its input is on a GPU")
            if reason is not None:
                return reason
        return formula

    return recognize_safely


# The comparisons that recognitions make inside `collect_attempts`.
_ATTEMPTS: contextvars.ContextVar[list[Attempt] | None] = contextvars.ContextVar("attempts", default=None)


@dataclass(frozen=True)
class Attempt:
    """A comparison between a module and a formula. error: the largest difference, in units of the dtype's rounding."""

    formula: str
    inputs: str
    agrees: bool
    error: float


def record_attempt(formula: Any, inputs: Case | str, y: Any, expected: Tensor, agrees: bool) -> None:
    """Report a comparison to `collect_attempts`."""
    listener = _ATTEMPTS.get()
    if listener is not None:
        eps = getattr(formula, "eps", None)
        name = str(formula) if eps is None else f"{formula}, eps {eps}"
        listener.append(Attempt(name, str(inputs), agrees, _error(y, expected)))


@contextlib.contextmanager
def collect_attempts() -> Iterator[list[Attempt]]:
    """Inside, the list gets every comparison that a recognition makes."""
    listener: list[Attempt] = []
    token = _ATTEMPTS.set(listener)
    try:
        yield listener
    finally:
        _ATTEMPTS.reset(token)


def _error(y: Any, expected: Tensor) -> float:
    if not isinstance(y, Tensor) or y.shape != expected.shape:
        return math.inf
    with torch.no_grad():
        size = expected.double().abs().amax(-1, keepdim=True).clamp_min(1e-30)
        ratio = (y.double() - expected.double()).abs() / size / torch.finfo(expected.dtype).eps
        finite = ratio[torch.isfinite(ratio)]
        return float(finite.max()) if finite.numel() else 0.0


@contextlib.contextmanager
def shield_probes() -> Iterator[None]:
    """Shields probes from autocast or a default device around fuse(), and the global generator from probes."""
    with (
        torch.no_grad(),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def list_integers(module: nn.Module) -> list[int]:
    """The integers among a module's attributes, alone or in tuples: any may be the width."""
    values = [n for v in vars(module).values() for n in (v if isinstance(v, tuple) else (v,))]
    return sorted({n for n in values if type(n) is int and 2 <= n <= 2**16})


# The attributes that every module has, and that no forward computes with.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) | {
    "_tigon",
    "_tigon_fusion",
    "forward",
    "_replicate_for_data_parallel",
    "__getstate__",
}
_SIMPLE = (bool, int, float, str, type(None), torch.dtype)


def _read_attributes(module: nn.Module, names: frozenset[str] | None) -> dict[str, Any]:
    """A module's attributes with these names, without torch's; every attribute if `names` is None."""
    state = vars(module).items()
    return {k: v for k, v in state if k not in _MODULE_ATTRIBUTES and (names is None or k in names)}


def list_settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The numbers, strings and tuples that a module's forward reads, with their values now."""
    analysis = analyze_forward(module)
    names = None if isinstance(analysis, Reason) else analysis.names
    settings = _read_attributes(module, names).items()
    return tuple((k, v) for k, v in settings if isinstance(v, (*_SIMPLE, tuple)) and v == v)


def compute_signature(module: nn.Module, read_by_parent: frozenset[str] = frozenset()) -> tuple[Any, ...]:
    """A key that is equal for modules that share a probe.

    Such modules have the same class, children with the same shapes, and the same values for the attributes, private
    ones too, that their forward's code can read. A `layer_idx` that the code does not name does not enter.
    read_by_parent: names that the code around the module reads.
    """
    analysis = analyze_forward(module)
    names = None if isinstance(analysis, Reason) or analysis.names is None else analysis.names | read_by_parent
    settings = tuple((k, _value(v)) for k, v in sorted(_read_attributes(module, names).items()))
    parameters = tuple(
        (k, None if p is None else (len(get_full_shape(p)), get_full_shape(p)[-1:]))
        for k, p in module._parameters.items()
    )
    children = tuple(
        (k, type(c), linear_widths(c), None if linear_widths(c) else compute_signature(c, names or frozenset()))
        for k, c in module._modules.items()
        if c is not None
    )
    return type(module), settings, parameters, children


def _value(v: Any) -> Any:
    """A setting's key: equal for equal settings; objects are equal only to themselves."""
    if isinstance(v, (tuple, list)):
        return type(v), tuple(map(_value, v))
    if isinstance(v, dict):
        return dict, tuple((_value(k), _value(x)) for k, x in v.items())
    if isinstance(v, functools.partial):
        return functools.partial, _value(v.func), _value(v.args), _value(v.keywords)
    return (type(v), repr(v)) if isinstance(v, _SIMPLE) else id(v)  # repr, since nan does not equal itself


def get_full_shape(p: Tensor) -> torch.Size:
    """A parameter's shape in use: DeepSpeed's ZeRO-3 keeps parameters empty between uses."""
    return torch.Size(getattr(p, "ds_shape", p.shape))


def linear_widths(module: nn.Module) -> tuple[int, int] | None:
    """in and out features for any module that acts as a linear layer: plain, LoRA, quantised, parallel."""
    widths = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return widths if all(isinstance(w, int) and w > 0 for w in widths) else None  # type: ignore[return-value]


def list_arguments(module: nn.Module) -> list[str]:
    """The argument names in the module's forward."""
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


def build_probe(
    module: nn.Module, weights: dict[str, Tensor], children: dict[str, nn.Module] | None = None
) -> nn.Module:
    """A module with the same class and settings, with these weights and children, without hooks."""
    probe = object.__new__(module.__class__)  # FSDP2's __new__ would make a module with the class that FSDP2 wrapped
    state = dict(vars(module))
    for name in INSTALLED:
        state.pop(name, None)
    for name in HOOKS:
        if name in state:
            state[name] = type(state[name])()  # no hooks
    # A forward that appends to a module's list must append to the probe's list.
    state = {k: copy.copy(v) if type(v) in (list, dict, set) else v for k, v in state.items()}
    state["_parameters"] = {k: nn.Parameter(weights[k]) if k in weights else p for k, p in module._parameters.items()}
    state["_buffers"] = dict(module._buffers)
    state["_modules"] = {
        k: (children or {}).get(k) or (c if c is None else build_probe(c, {})) for k, c in module._modules.items()
    }
    vars(probe).update(state)
    return probe


def run(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    # Views: a hook that fn registers on an input must not stay on the leaf, whose gradient the formula needs too.
    args = tuple(x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in args)
    try:
        return fn(*args, **options)
    except Exception:  # a module may raise anything for an unexpected input; then the formula does not fit
        return None


def same_numbers(y: Any, expected: Tensor, *, roundings: int = 0, size: Tensor | None = None) -> bool:
    """Whether y equals `expected`, up to rounding.

    roundings: how many times y may have been rounded to a narrow dtype where `expected` was rounded once. With 0 both
        must be rounded alike, except where an fp32 difference falls on a tie: at most 1 % of the elements.
    size: the numbers that the roundings are relative to; `expected` by default.
    """
    if not isinstance(y, Tensor) or y.shape != expected.shape or y.dtype != expected.dtype:
        return False
    if not bool(torch.isfinite(y).all()):
        return False
    unit = torch.finfo(y.dtype).eps
    # fp16 roundings are absolute among the smallest numbers.
    least = max(1e-30, (roundings + 1) * unit * torch.finfo(y.dtype).smallest_normal)
    size = expected.float().abs() if size is None else size
    error = (y.float() - expected.float()).abs()
    if y.dtype == torch.float32:
        return bool((error <= ULPS * unit * size + least).all())
    if roundings:
        return bool((error <= (roundings + 1) * unit / 2 * size + least).all())
    return bool((error <= unit * size + least).all()) and float((error > 0).float().mean()) <= 0.01


def same_gradients(y: Any, expected: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Whether y and the expected result, computed from the same leaves, give each leaf the same gradient.

    A formula that holds in the forward pass may lack or scale a term in the backward pass, where the module detaches a
    tensor. Such terms exceed roundings. The threshold is a thousandth of the row's largest number, in bf16 a sixteenth.
    For a bf16 parameter it is a sixteenth of the largest number of all rows: a weight row whose unit is saturated gets
    little but the roundings of the module's slope.
    """
    generator = torch.Generator().manual_seed(3)
    upstream = torch.randn(expected.shape, generator=generator)
    upstream = (upstream * 10 ** (4 * torch.rand(expected.shape[:-1], generator=generator)[..., None] - 2)).to(y.dtype)
    try:
        theirs, ours = (torch.autograd.grad(t, leaves, upstream, allow_unused=True) for t in (y, expected))
    except RuntimeError:  # y requires no gradient
        return False
    share = 1e-3 if y.dtype == torch.float32 else 2**-4
    for g, e, leaf in zip(theirs, ours, leaves, strict=True):
        if g is None or e is None:
            if g is not e:
                return False
            continue
        by_row = leaf.dim() > 1 and (y.dtype == torch.float32 or leaf.shape[:-1] == expected.shape[:-1])
        row = e.float().abs().amax(-1, keepdim=True) if by_row else e.float().abs().max()
        if not bool(((g.float() - e.float()).abs() <= share * row + 1e-30).all()):
            return False
    return True
