"""RMS and layer norms: recognised by their numbers, run as one kernel."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from tigon.fusion.part import ModulePart, register
from tigon.fusion.patch import Patch, child_of, plain_forward, transformed
from tigon.fusion.probe import (
    CASES,
    Case,
    inputs_of,
    probe_of,
    recognition,
    run,
    same_numbers,
    shape_of,
    takes_one_argument,
    whole_numbers_of,
)
from tigon.fusion.reading import reading_of
from tigon.fusion.reasons import Reason
from tigon.logits.recipe import DTYPES
from tigon.ops.gated import fit_each_other, gated_reference, swiglu
from tigon.ops.layer_norm import layer_norm, layer_norm_reference
from tigon.ops.rms_norm import rms_norm, rms_norm_reference
from tigon.parts.head_norm import HeadNorm
from tigon.parts.rms_form import RMSForm
from tigon.parts.sharded_rows import is_dtensor, on_own_rows, rows_are_whole
from tigon.runtime import autocast_dtype


def norm_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    patch: Patch = self._tigon
    formula: Norm = patch.formula
    if (
        not patch.ledger.active
        or kwargs
        or len(args) != 1 + formula.gated
        or transformed()
        or not patch.still_holds(self)
    ):
        return plain_forward(self, *args, **kwargs)
    x = args[0]
    weight = None if formula.weight is None else child_of(self, formula.weight)
    bias = None if formula.bias is None else getattr(self, formula.bias)
    if not norm_fits(x, weight, formula) or (bias is not None and not norm_fits(x, bias, formula)):
        return plain_forward(self, *args)
    if formula.gated and not (isinstance(args[1], Tensor) and fit_each_other(args[1], x)):
        return plain_forward(self, *args)
    if patch.heads and weight is not None and x.dim() == 4 and patch.is_all_of(self):
        return HeadNorm(x, weight, formula.form(self), patch)
    split = is_dtensor(x) or is_dtensor(weight)
    if split and not (is_dtensor(x) and rows_are_whole(x, weight, bias)):
        return plain_forward(self, *args)
    patch.ledger.count("norm", patch.key)
    if formula.centered:
        if formula.offset and weight is not None:
            weight = weight + formula.offset
        norm: Callable[..., Tensor] = functools.partial(layer_norm, eps=formula.form(self).eps)
        inputs: tuple[Tensor | None, ...] = x, weight, bias
    else:
        norm = functools.partial(rms_norm, **formula.form(self).options)
        inputs = x, weight
    y = on_own_rows(norm, *inputs) if split else norm(*inputs)
    if not split and patch.is_all_of(self):  # hooks on the norm may gather its weight, and free it afterwards
        patch.ledger.recompute.note(y, norm, *inputs)
    return swiglu(args[1], y) if formula.gated else y


def norm_fits(x: Any, weight: Tensor | None, formula: Norm, dtype: torch.dtype | None = None) -> bool:
    """Whether probes showed the formula for inputs like x. dtype: taken instead of x's own."""
    if not isinstance(x, Tensor) or x.dim() not in formula.ranks or x.dtype not in DTYPES:
        return False
    if formula.native and autocast_dtype(x.device.type) is not None:
        return False
    if weight is None:
        return formula.width in (None, x.shape[-1])
    if weight.dtype != (dtype or x.dtype) and not (formula.mixed and weight.dtype == torch.float32):
        return False
    return weight.device == x.device and weight.shape == x.shape[-1:]


@dataclass(frozen=True)
class Norm:
    """y = x / sqrt(mean(x²) + eps) · (offset + weight), as `tigon.rms_norm` computes it. If `centered`: the same for
    x − mean(x), plus bias, as `tigon.layer_norm` computes it. If `gated`: the result times silu(gate), a second input.

    weight, bias, eps: names of the module's attributes; None for a norm without them. eps is a number if no attribute
        holds it.
    mixed: the formula also holds for an fp32 weight beside a narrower x.
    native: the module calls torch's own norm, which autocast runs in fp32.
    width: the only width that a norm without weight accepts.
    ranks: the numbers of dimensions of x that probes showed the formula for.
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
    # How many results of the model's width `Recompute.note` hears of at each call.
    noted_widths: ClassVar[int] = 1

    def width_of(self, module: nn.Module) -> int | None:
        """The width of a module with this formula; None if it accepts any."""
        return self.width if self.weight is None else shape_of(getattr(module, self.weight)).numel()

    def form(self, module: Any) -> RMSForm:
        """The RMSForm of a module, with its eps as it is now."""
        eps = getattr(module, self.eps) if isinstance(self.eps, str) else self.eps
        return RMSForm(eps, self.offset, self.cast)

    @property
    def live(self) -> tuple[str | float | None, ...]:
        """Attributes that the fused forward reads at each call."""
        return (self.eps,)

    def __str__(self) -> str:
        weight = "" if self.weight is None else " · (1 + w)" if self.offset else " · w"
        weight += " · silu(gate)" if self.gated else ""
        if self.centered:
            return f"(x − mean) / std{weight}{'' if self.bias is None else ' + b'}, rounded once"
        rounds = {"llama": "rounded before w", "gemma": "rounded once", "none": "not rounded to x's dtype"}[self.cast]
        return f"x / rms(x){weight}, {rounds}"


# Tried where no attribute holds eps, and the code has it as a number.
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12)
# Ranks of x to probe. A norm over another dimension than the last, or one counted from the first, differs in one rank.
RANKS = (2, 3, 4)
FREE_WIDTH = 96  # the probe's width for a norm without a weight


@recognition
def recognize_norm(module: nn.Module) -> Norm | Reason | None:
    """The formula of a norm over the last dimension.

    Returns a Reason if a module is called a norm and Tigon lacks its formula, and None for any other module.
    """
    named = "norm" in type(module).__name__.lower()  # decides what the report mentions, not what is replaced
    if next(module.children(), None) is not None or next(module.buffers(), None) is not None:
        small = sum(1 for _ in module.modules()) <= 3  # larger ones are layers that contain a norm
        return Reason("it has modules or buffers of its own") if named and small else None
    vectors = {k: p for k, p in module._parameters.items() if p is not None}
    if len(vectors) > 2:
        return Reason("it has more parameters than a weight and a bias") if named else None
    shapes = [shape_of(p) for p in vectors.values()]
    if any(len(n) != 1 or n[0] < 2 for n in shapes) or not all(p.is_floating_point() for p in vectors.values()):
        return Reason("its weight is not a vector") if named else None
    epsilons: list[str | float] = [k for k, v in vars(module).items() if isinstance(v, float) and 0.0 <= v < 0.1]
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        epsilons = [torch.finfo(torch.float32).eps]
    gated = named and inputs_of(module)[1:] == ["gate"]
    if not (epsilons or named) or not (gated or takes_one_argument(module)):
        return Reason("it is no norm over one input") if named else None
    # A norm without a weight may still accept only one width.
    widths = sorted({n[0] for n in shapes}) or [FREE_WIDTH, *whole_numbers_of(module)]
    best = None
    for eps, width in itertools.product([*epsilons, *EPSILONS], widths):
        for formula in _norms_of(module, list(vectors), eps, None if vectors or width == FREE_WIDTH else width):
            formula = replace(formula, gated=gated)
            if not _is_norm(module, formula, width):
                continue
            others = {rank: _is_norm(module, formula, width, rank=rank) for rank in RANKS if rank != 3}
            if False in others.values():
                continue
            formula = replace(formula, ranks=tuple(rank for rank in RANKS if others.get(rank, True)))
            if not all(_is_norm(module, formula, width, case=case) for case in CASES):
                continue
            # On a GPU torch's layer norm refuses an fp32 weight beside a narrower x, and swiglu refuses an fp32 factor.
            one_dtype = gated or (formula.centered and formula.native)
            mixed = not one_dtype and (not vectors or bool(_is_norm(module, formula, width, mixed=True)))
            best = replace(formula, mixed=mixed)
            if mixed or formula.centered or gated:  # "gemma" and "none" differ only for unlike dtypes
                return best
    if best is not None:
        return best
    return Reason("its numbers fit no formula of tigon.rms_norm or tigon.layer_norm") if named else None


def _norms_of(module: nn.Module, vectors: list[str], eps: str | float, width: int | None) -> Iterator[Norm]:
    """All formulas that fit these parameters."""
    called = getattr(getattr(inspect.unwrap(type(module).forward), "__code__", None), "co_names", ())
    reading = reading_of(module)
    native = "rms_norm" in called or "layer_norm" in called or getattr(reading, "asks_autocast", False)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        native = native or "forward" in called  # calls its base class's forward, by super()
    if len(vectors) < 2:
        weight = vectors[0] if vectors else None
        for offset in (0.0, 1.0) if vectors else (0.0,):
            for cast in ("llama", "gemma", "none") if vectors else ("gemma",):
                yield Norm(weight, eps, offset, cast, False, native, width)
    choices: list[tuple[str | None, ...]] = [(*vectors, None, None)[:2], (None, None, *vectors)[-2:]]
    for weight, bias in dict.fromkeys([*choices, *(c[::-1] for c in choices if len(vectors) == 2)]):
        for offset in (0.0, 1.0) if weight is not None else (0.0,):
            yield Norm(weight, eps, offset, "gemma", False, native, width, centered=True, bias=bias)


def _is_norm(
    module: nn.Module, formula: Norm, width: int, *, mixed: bool = False, rank: int = 3, case: Case | None = None
) -> bool | None:
    """Whether the module computes this formula for inputs of this rank; None if it refuses such inputs."""
    generator = torch.Generator().manual_seed(0)
    rows = 4 * max(2, 512 // width)  # many numbers: formulas differ in how often their bf16 roundings differ
    x = torch.randn(rows, width, generator=generator) + 0.5
    # Some rows are as small as any eps.
    x = (x * torch.logspace(-6, 2, rows)[:, None]).view(*(2,) * (rank - 2), -1, width)
    w, b = torch.randn(2, width, generator=generator) * 0.5 + 0.3
    eps = formula.eps
    dtypes = [(torch.bfloat16, torch.float32)] if mixed else [(torch.float32,) * 2, (torch.bfloat16,) * 2]
    # A second value of eps shows that the forward adds this attribute to the mean square, and reads it at each call.
    values = (None, 0.05) if isinstance(eps, str) else (None,)
    trainings: tuple[bool, ...] = (True, False)
    if case is not None:
        dtypes, values, trainings, x = [(case.dtype, case.dtype)], (None,), (case.training,), case.input(width)
    for (x_dtype, w_dtype), value, training in itertools.product(dtypes, values, trainings):
        typed = x.to(x_dtype)
        weight, bias = (None if n is None else v.to(w_dtype) for n, v in ((formula.weight, w), (formula.bias, b)))
        weights = {n: v for n, v in ((formula.weight, weight), (formula.bias, bias)) if n is not None and v is not None}
        probe = probe_of(module, weights)
        if case is not None:  # module and formula are differentiated by the same tensors
            weight, bias = (None if n is None else probe._parameters[n] for n in (formula.weight, formula.bias))
        probe.training = training
        if value is not None and isinstance(eps, str):
            vars(probe)[eps] = value
        added = vars(probe)[eps] if isinstance(eps, str) else eps
        gate = torch.randn(typed.shape, generator=torch.Generator().manual_seed(1)).to(x_dtype)
        gate.requires_grad_(typed.requires_grad)
        with torch.set_grad_enabled(case is not None and case.gradients):
            y = run(probe, typed, gate) if formula.gated else run(probe, typed)
        if y is None:
            return x_dtype == torch.float16 or None  # some torch functions lack fp16 on a CPU
        with torch.set_grad_enabled(case is not None and case.gradients):
            expected, size = _expected(formula, typed, weight, bias, added)
            if formula.gated:
                expected = gated_reference(gate, expected, "silu")
        # Without a weight there is one formula, and the module may round 1 / rms(x) first. Other dtypes have told the
        # formula by its roundings already; in fp16 the size of the difference decides.
        roundings = 0 if weights and x_dtype != torch.float16 else 2
        if case is None and not same_numbers(y, expected, roundings=roundings, size=size):
            return False
        leaves = [t for t in (typed, weight, bias, *((gate,) if formula.gated else ())) if t is not None]
        if case is not None and not case.agrees(y, expected, leaves, roundings=roundings, size=size):
            return False
    return True


def _expected(
    formula: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """The formula's result, and the numbers that its roundings are relative to (None: the result itself)."""
    if not formula.centered:
        return rms_norm_reference(x, weight, eps=eps, offset=formula.offset, cast=formula.cast), None
    scale = weight if weight is None or not formula.offset else weight + formula.offset
    with torch.no_grad():
        # The mean is subtracted and the bias added: their roundings are relative to the largest of these terms.
        wide = x.float()
        size = wide.abs() + wide.mean(-1, keepdim=True).abs()
        size = size * torch.rsqrt(wide.var(-1, unbiased=False, keepdim=True) + eps)
        size = size * (1.0 if scale is None else scale.float().abs()) + (0.0 if bias is None else bias.float().abs())
    return layer_norm_reference(x, scale, bias, eps=eps), size


def is_rms_norm(norm: Any) -> bool:
    """Whether a module's attribute is a fused RMS norm, one that `add_rms_norm` and `qk_norm_rope` can compute."""
    patch = vars(norm).get("_tigon") if isinstance(norm, nn.Module) else None
    formula = getattr(patch, "formula", None)
    return isinstance(formula, Norm) and not formula.centered and not formula.gated


register(ModulePart("norm", "norms", recognize_norm, norm_forward))
