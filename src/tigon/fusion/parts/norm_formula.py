"""Recognises RMS and layer norms by their numbers, whatever they are called and wherever their eps is."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from tigon.fusion.engine.bytecode import analyze_forward
from tigon.fusion.engine.probe import (
    CASES,
    Case,
    build_probe,
    get_full_shape,
    list_integers,
    record_attempt,
    run,
    same_numbers,
    takes_one_argument,
)
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.parts.norm_eps import Look, list_epsilons, look_at
from tigon.ops.gated import gated_reference
from tigon.ops.gated_rms_norm import gated_rms_norm_reference
from tigon.ops.layer_norm import layer_norm_reference
from tigon.ops.rms_norm import rms_norm_reference


class RMSForm(NamedTuple):
    """The `tigon.rms_norm` options that tell norms apart, as a single value that every operator takes whole."""

    eps: float
    offset: float
    cast: str

    @property
    def options(self) -> dict[str, Any]:
        return {"eps": self.eps, "offset": self.offset, "cast": self.cast}  # five times faster than _asdict


class Gate(NamedTuple):
    """How a second input gates a norm: by act(gate), after the norm or before it."""

    act: str = "silu"
    norm_before_gate: bool = True


@dataclass(frozen=True)
class Norm:
    """y = x / sqrt(mean(x²) + eps) · (offset + weight), as `tigon.rms_norm` computes it. If `centered`: the same for
    x − mean(x), plus bias, as `tigon.layer_norm` computes it. With `gate`: as `tigon.gated_rms_norm` computes it from x
    and a second input; if `centered`, the result times silu(gate).

    group_size: how many numbers of a row are normed together; None for the whole row.

    weight, bias, eps: the module's attribute names; None for a norm without them. eps is a number if no attribute
        holds eps.
    mixed: the formula also holds for an fp32 weight beside a narrower x.
    wide: also for an fp32 x beside a narrower weight and gate.
    native: the module calls operations that autocast runs in fp32, so that under autocast the result is fp32.
    width: the only width that a norm without weight accepts.
    ranks: the numbers of dimensions of x for which probes showed the formula.
    stepwise: the module rounds every step's result to x's dtype. Tigon's result, rounded once, is nearer to the
        formula's, and differs from the module's by these roundings.
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
    gate: Gate | None = None
    group_size: int | None = None
    wide: bool = False
    ranks: tuple[int, ...] = ()
    stepwise: bool = False
    # How many results with the model's width each call gives to `Recompute.note`.
    noted_widths: ClassVar[int] = 1

    def get_width(self, module: nn.Module) -> int | None:
        """The width that a module with this formula has; None if any width is accepted."""
        return self.width if self.weight is None else get_full_shape(getattr(module, self.weight)).numel()

    def form(self, module: Any) -> RMSForm:
        """A module's RMSForm, with the present eps."""
        eps = getattr(module, self.eps) if isinstance(self.eps, str) else self.eps
        return RMSForm(eps, self.offset, self.cast)

    @property
    def gating(self) -> dict[str, Any]:
        """The options of `tigon.gated_rms_norm` beside those of `form`."""
        gate = self.gate or Gate()
        return {"act": gate.act, "norm_before_gate": gate.norm_before_gate, "group_size": self.group_size}

    @property
    def live(self) -> tuple[str | float | None, ...]:
        """Attributes that the fused forward reads at each call."""
        return (self.eps,)

    def __str__(self) -> str:
        if self.stepwise:
            return f"{self.equation()}, rounded once instead of at every step"
        if self.centered:
            return f"{self.equation()}, rounded once"
        rounds = {"llama": "rounded before w", "gemma": "rounded once", "none": "not rounded to x's dtype"}[self.cast]
        return f"{self.equation()}, {rounds}"

    def equation(self) -> str:
        weight = "" if self.weight is None else " · (1 + w)" if self.offset else " · w"
        bias = "" if self.bias is None else " + b"
        normed = "(x − mean) / std" if self.centered else "x / rms(x)"
        groups = "" if self.group_size is None else f" in groups of {self.group_size}"
        if self.gate is None:
            return f"{normed}{weight}{bias}{groups}"
        if self.gate.norm_before_gate:
            return f"{normed}{weight}{bias} · {self.gate.act}(gate){groups}"
        return f"h / rms(h){weight}, h = x · {self.gate.act}(gate){groups}"


# Ranks to probe. A norm over a dimension other than the last, or counted from the first, differs in some rank.
RANKS = (2, 3, 4)
FREE_WIDTH = 96  # the probe's width for a norm without a weight
# Square, mean, sum with eps, root, product, weight and bias, and the subtraction of the mean.
STEPS = 8

ADVICE = "x · rsqrt(mean(x²) + eps) · w of x.float(), rounded to x's dtype, is fused; so is torch.nn.RMSNorm"
NO_FORMULA = Reason("its results match no formula of tigon.rms_norm or tigon.layer_norm", ADVICE)
ANOTHER_IN_16_BITS = Reason(
    "in fp32 it computes {formula}, but something else with other inputs or gradients",
    "compute the norm on x.float(), and round the result once with .to(x.dtype)",
)
GATE_FORMULA = Reason(
    "its second input gates the rows by another formula than those of tigon.gated_rms_norm",
    "x / rms(x) · w · act(gate), and the norm of x · act(gate), for silu and sigmoid, are fused",
)


def find_formula(module: nn.Module) -> Norm | Reason | None:
    """The formula of a norm over the last dimension.

    Returns a Reason if a module normalises and Tigon lacks the formula, and None for any other module. A module that
    no probe can run gets a Reason if the class is called a norm.
    """
    named = "norm" in type(module).__name__.lower()  # decides whether a module that cannot be probed has a row
    if next(module.children(), None) is not None:
        small = sum(1 for _ in module.modules()) <= 3  # larger modules are layers that contain a norm
        return Reason("it has additional modules or buffers") if named and small else None
    parameters = {k: p for k, p in module._parameters.items() if p is not None}
    if hasattr(module, "quant_state"):  # packed into a vector; bitsandbytes' layers change their state when called
        return None
    shapes = [get_full_shape(p) for p in parameters.values()]
    if any(n.numel() > max(n, default=1) for n in shapes):  # matrices
        return Reason("its weight is not a vector") if named else None
    gated = _takes_two_arguments(module)
    if not gated and not takes_one_argument(module):
        return Reason("it is not a norm over a single input") if named else None
    # A norm without a weight may still accept only a single width.
    buffers = tuple(module.buffers()) if _reads_buffers(module) else ()
    vectors = [n for t in (*parameters.values(), *buffers) if (n := get_full_shape(t).numel()) > 1]
    widths = sorted(set(vectors)) or [FREE_WIDTH, *list_integers(module)]
    looks = ((width, look) for width in widths if (look := look_at(module, width, gated=gated)) is not None)
    width, look = next(looks, (0, None))
    if look is None and gated and takes_one_argument(module):
        gated, look = False, look_at(module, widths[0])
        width = widths[0]
    if look is None:
        return _explain_no_norm(module, widths[0], gated) if named else None
    if buffers:
        return Reason("it has additional buffers", "make its weight a parameter, and its eps a number")
    if len(shapes) > 2:
        return Reason("it has more parameters than a weight and a bias")
    if any(len(n) != 1 or n[0] < 2 for n in shapes) or not all(p.is_floating_point() for p in parameters.values()):
        return Reason("its weight is not a vector", "use a 1-d weight with the size of a row")
    return _select_formula(module, look, list(parameters), width, gated)


def _explain_no_norm(module: nn.Module, width: int, gated: bool) -> Reason:
    if next(module.buffers(), None) is not None:
        return Reason("it has additional modules or buffers")
    x = torch.randn(1, 2, width, generator=torch.Generator().manual_seed(0))
    y = run(build_probe(module, {}), x, x) if gated else run(build_probe(module, {}), x)
    if isinstance(y, tuple):
        return Reason("it norms several inputs at once")
    if isinstance(y, Tensor) and y.shape == (1, 2, 1):
        return Reason("it gives 1 / rms(x) alone, which other code multiplies its rows by")
    return Reason("it does not norm each row by itself")


def _reads_buffers(module: nn.Module) -> bool:
    """Whether the forward may read a buffer; a dummy weight, which imitates another class, is not read."""
    if not module._buffers:
        return False
    names = getattr(analyze_forward(module), "names", None)
    return any(names is None or name in names for name in module._buffers)


def _takes_two_arguments(module: nn.Module) -> bool:
    try:
        forward = inspect.signature(type(module).forward)
        forward.bind(module, None, None)
    except (TypeError, ValueError):
        return False
    return len(forward.parameters) == 3


def _select_formula(module: nn.Module, look: Look, names: list[str], width: int, gated: bool) -> Norm | Reason:
    """The first formula that agrees with the module in all cases, or the Reason why there is none."""
    best = fits_fp32 = None
    fixed = None if names or width == FREE_WIDTH else width
    native = _calls_torch_norm(module)
    for eps in list_epsilons(module, look):
        candidates = _list_norms(names, eps, fixed, look.centered, native)
        for formula in _list_gated(candidates, look.group_size, gated):
            if not _is_norm(module, formula, width, dtypes=FP32):
                continue
            fits_fp32 = fits_fp32 or formula
            if not _is_norm(module, formula, width, dtypes=BF16):
                continue
            others = {rank: _is_norm(module, formula, width, rank=rank) for rank in RANKS if rank != 3}
            if False in others.values():
                continue
            formula = replace(formula, ranks=tuple(rank for rank in RANKS if others.get(rank, True)))
            if not all(_is_norm(module, formula, width, case=case) for case in CASES):
                continue
            # On a GPU torch's layer norm refuses an fp32 weight beside a narrower x, and swiglu refuses an fp32 factor.
            one_dtype = formula.stepwise or (formula.centered and (gated or formula.native))
            mixed = not one_dtype and (not names or bool(_is_norm(module, formula, width, dtypes=MIXED)))
            wide = gated and not one_dtype and bool(_is_norm(module, formula, width, dtypes=WIDE))
            best = replace(formula, mixed=mixed, wide=wide)
            # "gemma" and "none" differ only for unlike dtypes.
            if mixed or formula.centered or formula.stepwise:
                return best
        if best is not None:
            return best
    if gated and fits_fp32 is None:
        if takes_one_argument(module) and _ignores_nothing_else(module, width):
            look_alone = look_at(module, width)
            if look_alone is not None:
                return _select_formula(module, look_alone, names, width, gated=False)
        return GATE_FORMULA
    if fits_fp32 is None:
        return NO_FORMULA
    return replace(ANOTHER_IN_16_BITS, text=ANOTHER_IN_16_BITS.text.format(formula=fits_fp32.equation()))


def _ignores_nothing_else(module: nn.Module, width: int) -> bool:
    """Whether a second input of zeros changes nothing: a residual, which is added, and no gate, which multiplies."""
    x = torch.randn(1, 4, width, generator=torch.Generator().manual_seed(0))
    probe = build_probe(
        module, {k: torch.ones(get_full_shape(p)) for k, p in module._parameters.items() if p is not None}
    )
    alone, beside = run(probe, x), run(probe, x, torch.zeros_like(x))
    return isinstance(alone, Tensor) and isinstance(beside, Tensor) and torch.equal(alone, beside)


def _calls_torch_norm(module: nn.Module) -> bool:
    """Whether the module calls torch's norm, which autocast runs in fp32, or asks about autocast itself."""
    called = getattr(getattr(inspect.unwrap(type(module).forward), "__code__", None), "co_names", ())
    if "rms_norm" in called or "layer_norm" in called or getattr(analyze_forward(module), "asks_autocast", False):
        return True
    return isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and "forward" in called  # by super()


def _list_norms(
    vectors: list[str], eps: str | float, width: int | None, centered: bool, native: bool
) -> Iterator[Norm]:
    """All formulas that fit these parameters: the exact formulas, then those that the module rounds at every step."""
    for stepwise in (False, True):
        if len(vectors) == 2:
            pairs: list[tuple[str | None, str | None]] = [(vectors[0], vectors[1]), (vectors[1], vectors[0])]
        elif vectors:
            pairs = [(vectors[0], None), *([(None, vectors[0])] if centered else [])]
        else:
            pairs = [(None, None)]
        casts = ("llama", "gemma", "none") if vectors and not centered else ("gemma",)
        for (weight, bias), offset, cast in itertools.product(pairs, (0.0, 1.0), ("gemma",) if stepwise else casts):
            if offset and weight is None:
                continue
            yield Norm(weight, eps, offset, cast, False, native or stepwise, width, centered, bias, stepwise=stepwise)


GATES = tuple(itertools.starmap(Gate, itertools.product(("silu", "sigmoid"), (True, False))))


def _list_gated(norms: Iterator[Norm], group_size: int | None, gated: bool) -> Iterator[Norm]:
    """Each norm in groups, with each gate that Tigon computes."""
    for norm in norms:
        if group_size is None and not gated:
            yield norm
        elif norm.centered and group_size is None:
            yield replace(norm, gate=Gate())
        elif not norm.centered and norm.bias is None:
            for gate in GATES if gated else (None,):
                yield replace(norm, gate=gate, group_size=group_size)


FP32, BF16 = (torch.float32,) * 2, (torch.bfloat16,) * 2  # dtypes for x, and for weight and bias
MIXED, WIDE = (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)


def _is_norm(
    module: nn.Module,
    formula: Norm,
    width: int,
    *,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
    rank: int = 3,
    case: Case | None = None,
) -> bool | None:
    """Whether the module computes this formula for inputs of this rank; None if the module refuses such inputs."""
    generator = torch.Generator().manual_seed(0)
    rows = 4 * max(2, 512 // width)  # many numbers: formulas differ in how often their bf16 roundings differ
    x = torch.randn(rows, width, generator=generator) + 0.5
    eps = formula.eps
    added = getattr(module, eps) if isinstance(eps, str) else eps
    # Some rows are so small that eps dominates under the root.
    least = min(-6.0, math.log10(added) / 2 - 1 if added > 0 else -6.0)
    x = (x * torch.logspace(least, 2, rows)[:, None]).view(*(2,) * (rank - 2), -1, width)
    w, b = torch.randn(2, width, generator=generator) * 0.5 + 0.3
    pairs = [FP32, BF16] if dtypes is None else [dtypes]
    # A second eps value shows that the forward adds this attribute to the mean square, and reads it at each call.
    values = (None, 0.05) if isinstance(eps, str) else (None,)
    trainings: tuple[bool, ...] = (True, False)
    if case is not None:
        pairs, values, trainings, x = [(case.dtype, case.dtype)], (None,), (case.training,), case.input(width)
        if case.broken and not added:
            x[:, 3] = 0.0  # without eps a row of zeros is 0 / 0, where a limit on the root would give zeros
    for (x_dtype, w_dtype), value, training in itertools.product(pairs, values, trainings):
        typed = x.to(x_dtype)
        weight, bias = (None if n is None else v.to(w_dtype) for n, v in ((formula.weight, w), (formula.bias, b)))
        weights = {n: v for n, v in ((formula.weight, weight), (formula.bias, bias)) if n is not None and v is not None}
        probe = build_probe(module, weights)
        if case is not None:  # module and formula are differentiated by the same tensors
            weight, bias = (None if n is None else probe._parameters[n] for n in (formula.weight, formula.bias))
        probe.training = training
        if value is not None and isinstance(eps, str):
            vars(probe)[eps] = value
        added = getattr(probe, eps) if isinstance(eps, str) else eps
        gate = None
        if formula.gate is not None:
            gate = torch.randn(typed.shape, generator=torch.Generator().manual_seed(1))
            gate = gate.to(min(x_dtype, w_dtype, key=lambda dtype: dtype.itemsize)).requires_grad_(typed.requires_grad)
        with torch.set_grad_enabled(case is not None and case.gradients):
            y = run(probe, typed) if gate is None else run(probe, typed, gate)
        if y is None:
            return x_dtype == torch.float16 or None  # some torch functions lack fp16 on a CPU
        with torch.set_grad_enabled(case is not None and case.gradients):
            expected, size = _evaluate(formula, typed, weight, bias, added, gate)
        # Without a weight there is a single formula, and the module may round 1 / rms(x) first. Other dtypes have told
        # the formula by roundings already; in fp16 the difference's magnitude decides.
        roundings = 0 if weights and x_dtype != torch.float16 else 2
        roundings = STEPS if formula.stepwise else roundings
        leaves = [t for t in (typed, weight, bias, gate) if t is not None]
        if case is None:
            agrees = same_numbers(y, expected, roundings=roundings, size=size)
            agrees = agrees and (
                not formula.stepwise or _is_no_worse(formula, y, expected, (typed, weight, bias, gate), added)
            )
        else:
            agrees = case.agrees(y, expected, leaves, roundings=roundings, size=size)
        record_attempt(formula, case or f"{str(x_dtype)[6:]}, {rank} dimensions", y, expected, agrees)
        if not agrees:
            return False
    return True


def _is_no_worse(formula: Norm, y: Tensor, expected: Tensor, inputs: tuple[Tensor | None, ...], eps: float) -> bool:
    """Whether Tigon's result is as near to the exact result as y, which the module has rounded at every step."""
    if y.dtype == torch.float32:
        return True
    x, weight, bias, gate = (t if t is None else t.float() for t in inputs)
    exact = _evaluate(formula, x, weight, bias, eps, gate)[0]  # type: ignore[arg-type]  # x is there
    theirs, ours = (float((t.float() - exact).abs().div(exact.abs() + 1e-30).mean()) for t in (y, expected))
    return ours <= theirs


def _evaluate(
    formula: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, gate: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The formula's result, and the numbers that the roundings are relative to (None: the result itself)."""
    if not formula.centered and (formula.gate is not None or formula.group_size is not None):
        form = RMSForm(eps, formula.offset, formula.cast)
        return gated_rms_norm_reference(x, gate, weight, **form.options, **formula.gating), None
    if not formula.centered:
        y = rms_norm_reference(x, weight, eps=eps, offset=formula.offset, cast=formula.cast)
        if bias is None:
            return y, None
        with torch.no_grad():
            size = y.float().abs() + bias.float().abs()
        return y + bias, size
    scale = weight if weight is None or not formula.offset else weight + formula.offset
    with torch.no_grad():
        # The mean is subtracted and the bias added: their roundings are relative to the largest of these terms.
        wide = x.float()
        size = wide.abs() + wide.mean(-1, keepdim=True).abs()
        size = size * torch.rsqrt(wide.var(-1, unbiased=False, keepdim=True) + eps)
        size = size * (1.0 if scale is None else scale.float().abs()) + (0.0 if bias is None else bias.float().abs())
    y = layer_norm_reference(x, scale, bias, eps=eps)
    return y if gate is None else gated_reference(gate, y, "silu"), size
