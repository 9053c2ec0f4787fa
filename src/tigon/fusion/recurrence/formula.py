"""Probes for functions that carry a state over tokens: running a function shows the formula, as probe.py does.

Models call such functions by global names. transformers wraps each: the wrapper runs an installed package's kernel, or
else a function in torch. The function in torch is probed, on the CPU; transformers takes the package's
for equal to it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tigon.fusion.engine.bytecode import analyze_function
from tigon.fusion.engine.probe import run, shield_probes
from tigon.fusion.engine.reasons import Reason
from tigon.ops.causal_conv1d import causal_conv1d_reference
from tigon.ops.gated_delta_rule import gated_delta_rule_reference
from tigon.ops.mamba2_scan import mamba2_scan_reference

ACTS = {"silu": "silu", "swish": "silu", None: None}
# Arguments by which a function takes a state, or returns one.
STATES = {"initial_state", "initial_states", "output_final_state", "return_final_states", "return_last_state"}
# The libraries behind transformers' wrappers, as pip calls them.
DISTRIBUTIONS = {"fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"}
WRAPPERS = "transformers.integrations.hub_kernels"
NO_MATCH = Reason("its results match no formula of tigon.gated_delta_rule or tigon.mamba2_scan")

_CONV_NAMES = ({"hidden_states", "x", "input"}, {"weight"}, {"bias"})
_RULE_NAMES = ({"query", "q"}, {"key", "k"}, {"value", "v"}, {"g"}, {"beta"})
_SCAN_NAMES = ({"hidden_states", "x"}, {"dt"}, {"A"}, {"B"}, {"C"})
_SCAN_OPTIONS = {"D", "dt_bias", "dt_softplus", "dt_limit", "initial_states", "return_final_states"}


@dataclass(frozen=True)
class Convolution:
    """A causal depthwise convolution, (B, C, T) → (B, C, T), that `tigon.causal_conv1d` can replace.

    names: the leading arguments. options: the names of all arguments that the function reads. acts: the activations
    that probes showed. library: the installed package that serves the function now; empty for torch.
    """

    names: tuple[str, ...]
    options: frozenset[str]
    acts: frozenset[str | None]
    library: str = ""
    kind = "conv"

    def __str__(self) -> str:
        return "causal convolution" + (f", in place of {self.library}" if self.library else "")


@dataclass(frozen=True)
class DeltaRule:
    """The gated delta rule, over (B, T, G, K) heads, that `tigon.gated_delta_rule` can replace.

    grouped: the function takes fewer heads of queries and keys than of values. normalizes: it honours
    use_qk_l2norm_in_kernel. The rest as in `Convolution`.
    """

    names: tuple[str, ...]
    options: frozenset[str]
    grouped: bool
    normalizes: bool
    library: str = ""
    kind = "recurrence"

    def __str__(self) -> str:
        return "gated delta rule" + (f", in place of {self.library}" if self.library else "")


@dataclass(frozen=True)
class Scan:
    """Mamba-2's scan, over (B, T, H, P) heads, that `tigon.mamba2_scan` can replace. As in `Convolution`."""

    names: tuple[str, ...]
    options: frozenset[str]
    library: str = ""
    kind = "recurrence"

    def __str__(self) -> str:
        return "Mamba-2 scan" + (f", in place of {self.library}" if self.library else "")


@dataclass(frozen=True)
class Shortcut:
    """What a package computes of a whole mixer in training. Without the package the result is None, and so here:
    the mixer then calls its convolution and its scan.
    """

    names: tuple[str, ...] = ()
    kind = "recurrence"

    def __str__(self) -> str:
        return ""


Formula = Convolution | DeltaRule | Scan | Shortcut


class Function(NamedTuple):
    """A function behind transformers' wrapper. torch: the function to probe. library: the package that runs instead."""

    torch: Callable[..., Any]
    options: frozenset[str]
    package: str
    library: str


def read_function(fn: Any) -> Function:
    """The function in torch behind a global name, and the package that serves the name now."""
    inner = fn.forward if isinstance(fn, nn.Module) else fn  # as transformers makes it where `kernels` is installed
    inner = getattr(inner, "__func__", inner)
    wraps = inspect.isfunction(inner) and inner.__globals__.get("__name__") == WRAPPERS
    held = inspect.getclosurevars(inner).nonlocals if wraps else {}
    plain, package = held.get("torch_function"), str(held.get("package", ""))
    if plain is None:
        return Function(fn, _list_options(inner), "", "")
    serving = held.get("implementation", plain)
    return Function(
        plain, _list_options(serving), package, "" if serving is plain else DISTRIBUTIONS.get(package, package)
    )


def _list_options(fn: Any) -> frozenset[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))


def _match_names(fn: Any, wanted: tuple[set[str], ...]) -> tuple[str, ...] | None:
    """The function's leading argument names, if they are among those wanted."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None
    names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    fits = len(names) >= len(wanted) and all(n in w for n, w in zip(names, wanted, strict=False))
    return names[: len(wanted)] if fits else None


def carries_state(fn: Any) -> bool:
    """Whether a function's arguments say that it carries a state over many tokens."""
    return not isinstance(fn, type) and callable(fn) and not STATES.isdisjoint(_list_options(read_function(fn).torch))


@shield_probes()
def recognize_function(fn: Any) -> Formula | Reason | None:
    """The formula of a function that a forward calls; a Reason for another recurrence; None for other functions."""
    if isinstance(fn, type) or not callable(fn):
        return None
    found = read_function(fn)
    formula: Formula | None = None
    if (names := _match_names(found.torch, _CONV_NAMES)) is not None:
        formula = _probe_convolution(found, names)
    elif (names := _match_names(found.torch, _RULE_NAMES)) is not None:
        formula = _probe_rule(found, names)
    elif (names := _match_names(found.torch, _SCAN_NAMES)) is not None:
        formula = _probe_scan(found, names)
    elif carries_state(fn) and _returns_nothing(found.torch):
        formula = Shortcut()
    if formula is None:
        return NO_MATCH if carries_state(fn) else None
    analysis = analyze_function(found.torch)
    if isinstance(analysis, Reason):
        return analysis
    return Reason(f"its function has side effects: {analysis.stores}") if analysis.stores else formula


# --------------------------------------------------------------------------------------------------------- the probes


def _probe_convolution(found: Function, names: tuple[str, ...]) -> Convolution | None:
    acts = frozenset(act for act in (None, "silu", "swish") if _convolves(found.torch, names, act))
    return Convolution(names, found.options, acts, found.library) if acts else None


def _convolves(fn: Callable[..., Any], names: tuple[str, ...], act: str | None) -> bool:
    generator = torch.Generator().manual_seed(0)
    for dtype, T, W, biased in _list_convolutions():
        x = (torch.randn(2, 5, T, generator=generator) * 3).to(dtype)
        weight = torch.randn(5, W, generator=generator).to(dtype)
        bias = torch.randn(5, generator=generator).to(dtype) if biased else None
        leaves = [t.requires_grad_(dtype == torch.float32) for t in (x, weight, bias) if t is not None]
        options = {} if act is None else {"activation": act}
        with torch.set_grad_enabled(dtype == torch.float32):
            y = run(fn, **dict(zip(names, (x, weight, bias), strict=True)), **options)
            z = causal_conv1d_reference(x.transpose(1, 2), weight, bias, activation=ACTS[act])
            assert isinstance(z, Tensor)
            if not _agree([y], [z.transpose(1, 2)], leaves):
                return False
    return True


def _list_convolutions() -> Iterator[tuple[torch.dtype, int, int, bool]]:
    for T, W, biased in ((9, 4, True), (9, 3, False), (1, 4, False), (70, 2, True)):
        yield torch.float32, T, W, biased
    yield torch.bfloat16, 9, 4, True


def _probe_rule(found: Function, names: tuple[str, ...]) -> DeltaRule | None:
    fn = found.torch
    if not _list_options(fn) >= {"initial_state", "output_final_state"} or not _is_delta_rule(fn, names, heads=2):
        return None
    normalizes = "use_qk_l2norm_in_kernel" in _list_options(fn) and _is_delta_rule(fn, names, heads=2, normalize=True)
    return DeltaRule(names, found.options, _is_delta_rule(fn, names, heads=4), normalizes, found.library)


def _is_delta_rule(fn: Callable[..., Any], names: tuple[str, ...], *, heads: int, normalize: bool = False) -> bool:
    generator = torch.Generator().manual_seed(0)
    for dtype, T, with_state in ((torch.float32, 66, True), (torch.float32, 5, False), (torch.bfloat16, 5, False)):
        q, k = (torch.randn(2, T, 2, 4, generator=generator) for _ in range(2))
        if normalize:  # tokens so small that eps counts
            q, k = (t * torch.logspace(-4, 1, T)[:, None, None] for t in (q, k))
        else:  # a longer key makes the state grow
            q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
        v = torch.randn(2, T, heads, 6, generator=generator)
        g = -torch.rand(2, T, heads, generator=generator)
        beta = torch.rand(2, T, heads, generator=generator)
        state = torch.randn(2, heads, 4, 6, generator=generator) if with_state else None
        q, k, v, beta = (t.to(dtype) for t in (q, k, v, beta))
        leaves = [t for t in (q, k, v, g, beta, state) if t is not None]
        options = {"use_qk_l2norm_in_kernel": True} if normalize else {}
        with torch.set_grad_enabled(dtype == torch.float32):
            for t in leaves:
                t.requires_grad_(dtype == torch.float32)
            made = run(
                fn, **dict(zip(names, (q, k, v, g, beta), strict=True)), initial_state=state,
                output_final_state=with_state, **options,
            )  # fmt: skip
            o, last = gated_delta_rule_reference(
                q, k, v, g, beta, normalize=normalize, initial_state=state, return_state=True
            )
        if not isinstance(made, tuple) or len(made) != 2 or (made[1] is not None) != with_state:
            return False
        results = 1 + with_state
        if not _agree(list(made[:results]), [o, last][:results], leaves):
            return False
    return True


def _probe_scan(found: Function, names: tuple[str, ...]) -> Scan | None:
    fits = _list_options(found.torch) >= _SCAN_OPTIONS and _is_scan(found.torch, names)
    return Scan(names, found.options, found.library) if fits else None


def _is_scan(fn: Callable[..., Any], names: tuple[str, ...]) -> bool:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    sized = {"chunk_size": 32} if "chunk_size" in _list_options(fn) else {}
    for dtype, T, is_weighted, limits in (
        (torch.float32, 66, True, (0.2, 1.5)), (torch.float32, 5, False, (0.0, math.inf)),
        (torch.bfloat16, 5, True, (0.0, math.inf)),
    ):  # fmt: skip
        x, dt, B, C = (t.to(dtype) for t in (draw(2, T, 4, 6), draw(2, T, 4), draw(2, T, 2, 5), draw(2, T, 2, 5)))
        A, weights = -draw(4).exp(), {"D": draw(4), "dt_bias": draw(4)} if is_weighted else {}
        # Without a state the first token's C · B may be near zero, and with it the whole row.
        state = draw(2, 4, 6, 5) if dtype == torch.float32 else None
        leaves = [x, dt, A, B, C, *weights.values(), *(() if state is None else (state,))]
        options: dict[str, Any] = {**weights, "dt_softplus": is_weighted, "dt_limit": limits}
        with torch.set_grad_enabled(dtype == torch.float32):
            for t in leaves:
                t.requires_grad_(dtype == torch.float32)
            made = run(
                fn, **dict(zip(names, (x, dt, A, B, C), strict=True)), **options, **sized, initial_states=state,
                return_final_states=state is not None,
            )  # fmt: skip
            y, last = mamba2_scan_reference(x, dt, A, B, C, **options, initial_state=state, return_state=True)
        ys = list(made) if state is not None and isinstance(made, tuple) else [made]
        expected = [y] if state is None else [y, last]
        if len(ys) != len(expected) or not isinstance(ys[0], Tensor):
            return False
        # In torch the result is fp32, and steps are rounded to dt's dtype; packages return x's dtype.
        if not _agree([ys[0].to(dtype), *ys[1:]], expected, leaves):
            return False
    return True


def _returns_nothing(fn: Callable[..., Any]) -> bool:
    parameters = inspect.signature(fn).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    try:
        return fn(**{p.name: torch.ones(2, 3) for p in needed}) is None
    except Exception:  # the function reads its arguments, and these do not fit
        return False


def _agree(ys: list[Any], expected: list[Any], leaves: list[Tensor]) -> bool:
    """Whether ys equal the expected results, in gradients too; sums may have run in another order."""
    for y, z in zip(ys, expected, strict=True):
        if not isinstance(y, Tensor) or y.shape != z.shape or y.dtype != z.dtype:
            return False
        # Near misses are far off for some token. In bf16 a function may round twice.
        if not is_near(y, z, 1e-4 if y.dtype == torch.float32 else 3 * torch.finfo(y.dtype).eps):
            return False
    if not leaves[0].requires_grad:
        return True
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(z.shape, generator=generator) for z in expected]
    try:
        theirs, ours = (torch.autograd.grad(t, leaves, upstream) for t in (ys, expected))
    except RuntimeError:  # the results do not depend on an input
        return False
    return all(is_near(a, b, 1e-3) for a, b in zip(theirs, ours, strict=True))


def is_near(y: Tensor, expected: Tensor, share: float) -> bool:
    """Whether no element is further off than this share of its row's largest, or of a thousandth of the largest."""
    with torch.no_grad():
        y, expected = y.float(), expected.float()
        size = expected.abs()
        row = size.amax(-1, keepdim=True) if size.dim() else size
        return bool(((y - expected).abs() <= share * torch.maximum(row, size.max() * 1e-3) + 1e-30).all())
