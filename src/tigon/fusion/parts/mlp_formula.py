"""Recognition of gated feed-forward units, act(gate(x)) · up(x) through down, by their numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.fusion.engine.bytecode import analyze_forward
from tigon.fusion.engine.probe import (
    CASES,
    Case,
    build_probe,
    linear_widths,
    list_arguments,
    recognition,
    record_attempt,
    run,
    same_gradients,
    same_numbers,
    takes_one_argument,
)
from tigon.fusion.engine.reasons import Reason
from tigon.ops.acts import ACTS, Act
from tigon.ops.gated import gated_reference


@dataclass(frozen=True)
class Gated:
    """y = down(act(gate(x)) · up(x)).

    gate, up, down: child module names; up is None where gate holds both matrices, side by side.
    act: a name in `tigon.ops.acts`. act_module: the child that computes the activation.
    up_first: the module calls up before gate. Random numbers and hooks can tell the order. Where gate holds both
        matrices: up's is the first.
    between, after: children that the product and the result go through: dropout, a norm.
    gate_scale, scale: attributes that multiply gate(x) and the result.
    dropout: an attribute, the probability that a result element is dropped in training.
    held: attributes that may have an effect the formula lacks, with the values for which they have none.
    same_dtypes: the formula holds only while all layers have one dtype, since the module's code compares dtypes.
    """

    gate: str
    up: str | None
    down: str
    act: Act
    act_module: str | None
    up_first: bool = False
    between: str | None = None
    after: str | None = None
    gate_scale: str | None = None
    scale: str | None = None
    dropout: str | None = None
    held: tuple[tuple[str, float], ...] = ()
    same_dtypes: bool = False

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of gate, of up where up is a layer, and of down."""
        return (self.gate, self.down) if self.up is None else (self.gate, self.up, self.down)

    @property
    def live(self) -> tuple[str | None, ...]:
        """Attributes that the fused forward reads at each call."""
        return self.gate_scale, self.scale, self.dropout

    @property
    def is_bare(self) -> bool:
        """Whether only the product lies between the layers, with gate first where one layer holds both."""
        packed_otherwise = self.up is None and self.up_first
        return self.between is None and self.gate_scale is None and not packed_otherwise

    def __str__(self) -> str:
        gate = "gate" if self.gate_scale is None else "s · gate"
        packed = ", one projection" + (", up first" if self.up_first else "")
        return f"{self.act}({gate}) · up" + (packed if self.up is None else "")


@recognition
def recognize_mlp(module: nn.Module) -> Gated | Reason | None:
    """A gated MLP's formula; a Reason if a module has this structure but another result; else None."""
    children = dict(module.named_children())
    widths = {k: w for k, c in children.items() if (w := linear_widths(c)) is not None}
    others = [k for k in children if k not in widths]
    roles = list(_roles(widths)) if len(widths) in (2, 3) else []
    if not roles or "attention_mask" in list_arguments(module):
        return None
    # Every attention has three square layers too, so the report does not mention such modules.
    silent = all(before == after for before, after in widths.values())
    mixer = silent or len(widths) == 2  # attentions and state spaces also have two layers whose widths fit
    if module._parameters or module._buffers:
        return None if mixer else Reason("it has additional parameters")
    if len(others) > 3:
        return None if mixer else Reason(f"it has other modules: {', '.join(others)}")
    if not takes_one_argument(module):
        return None if mixer else Reason("its forward takes more than one input")
    same_dtypes = getattr(analyze_forward(module), "compares_dtypes", False)
    none: list[str | None] = [None]
    acts: list[str | None] = [
        k for k in others if not isinstance(children[k], nn.Dropout) and not has_state(children[k])
    ]
    for act_module in acts or none:
        rest = [k for k in others if k != act_module]
        for gate, up, down in roles:
            for act, up_first in itertools.product(ACTS, (False, True) if up is None else (False,)):
                formula = Gated(gate, up, down, act, act_module, up_first, same_dtypes=same_dtypes)  # type: ignore[arg-type]
                # A number among the attributes may be a scale, or may change the module's result.
                numbers = {k: v for k, v in vars(module).items() if type(v) is float}
                gated = _place_children(module, formula, rest, list(numbers))
                if gated is not None:
                    return gated
                # A probability of 0 or a factor of 1 needs no place in the formula, which holds while both stay.
                gated = _place_children(module, formula, rest, []) if numbers else None
                if gated is not None:
                    return replace(gated, held=tuple(numbers.items()))
    if silent:
        return None
    names = getattr(analyze_forward(module), "names", None) or ()
    for name, between in BETWEEN.items():
        if name in names and all(_is_known(children[k]) for k in acts if k):
            return Reason(f"it {between} between its layers, and only its activation can run fused")
    if len(others) > 1:
        return Reason(f"it has other modules: {', '.join(others)}")
    name = type(children[others[0]]).__name__ if others else "its own activation"
    # Two layers whose widths fit are often no gated unit.
    advice = "" if len(widths) == 2 else f"down(act(gate(x)) · up(x)) is fused, act being one of {', '.join(ACTS)}"
    return Reason(f"its results match neither swiglu, geglu nor reglu ({name})", advice)


# What an MLP's code calls, and what that does, where no formula has it.
BETWEEN = {
    "clamp": "clamps gate and up to a limit", "std": "leaves out the smaller gates by a row's mean and deviation",
}  # fmt: skip


def _is_known(act: nn.Module) -> bool:
    x = torch.linspace(-4, 4, 64)
    y = run(act, x)
    return isinstance(y, Tensor) and any(torch.allclose(y, row.value(x), atol=1e-5) for row in ACTS.values())


def has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def _roles(widths: dict[str, tuple[int, int]]) -> Iterator[tuple[str, str | None, str]]:
    """(gate, up, down) whose widths fit; up is None for two layers where the first is twice as wide."""
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
    """A linear layer that records inputs, and when each call happened."""

    name: str
    seen: list[Tensor]
    order: list[str]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        self.order.append(self.name)
        return F.linear(x, self.weight, self.bias)


class _Mark(nn.Module):
    """Stands in for a dropout or a norm. Multiplies by a power of two, which shows the place without rounding."""

    factor: float

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _place_children(module: nn.Module, formula: Gated, rest: list[str], attributes: list[str]) -> Gated | None:
    """The formula with the other children's and the scales' places filled in; None if the numbers differ."""
    factors = {k: 4.0 ** (i + 1) for i, k in enumerate(rest)}
    scales = {k: 0.5 ** (i + 1) for i, k in enumerate(attributes)}
    formulas: set[Gated] = set()
    dropouts: set[str | None] = set()
    generator = torch.Generator().manual_seed(0)
    up, down = formula.up, formula.down
    for dtype in (torch.float32, torch.bfloat16):
        for training in (True, False):
            probe, layers, order = _probe(module, formula, factors, scales, dtype, training, generator)
            # Small and large numbers, so that a limit on gate or up shows.
            x = torch.randn(16, NARROW, generator=generator) * torch.logspace(-2, 2, 16)[:, None]
            x = x.view(2, 8, NARROW).to(dtype)
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
                return None  # the module does more after the last layer
            dropouts |= {dropout} if training else set()
            g, u = _gate_and_up(formula, layers, x)
            here = None
            for between, gate_scale in itertools.product(("", *rest), ("", *scales)):
                expected = gated_reference(g, u, formula.act, scales.get(gate_scale, 1.0))
                # gelu is a difference between numbers as large as gate, so fp32 rounding is relative to gate; so is
                # bf16 rounding where the module writes gelu out. Modules round act(gate) and the product, Tigon only
                # the product.
                written_out = dtype == torch.bfloat16 and formula.act == "gelu_tanh"
                share = 0.5 if dtype == torch.float32 or written_out else 2**-15
                terms, roundings = expected.abs() + share * rounded_product(g, u), 6 if written_out else 2
                product = inputs[0] / factors.get(between, 1.0)
                agrees = same_numbers(product, expected, roundings=roundings, size=terms)
                record_attempt(formula, f"{str(dtype)[6:]}, the input of {down}", product, expected, agrees)
                if agrees:
                    here = between or None, gate_scale or None
                    break
            if here is None:
                return None
            places = here[0], after if after in factors else None, here[1], after if after in scales else None
            up_first = formula.up_first if up is None else order[0] == up
            formulas.add(replace(formula, up_first=up_first, **dict(zip(_PLACES, places, strict=True))))  # type: ignore[arg-type]
    placed = {k for f in formulas for k in (f.between, f.after) if k is not None}
    if len(formulas) != 1 or len(dropouts) != 1 or placed != set(rest):
        return None
    whole = replace(formulas.pop(), dropout=dropouts.pop())
    return whole if all(_holds(module, whole, factors, scales, case) for case in CASES) else None


def _gate_and_up(formula: Gated, layers: dict[str, _Recorder], x: Tensor) -> tuple[Tensor, Tensor | None]:
    gate, *others = (F.linear(x, layers[n].weight, layers[n].bias) for n in formula.layers[:-1])
    if others:
        return gate, others[0]
    if formula.up_first:
        up, gate = gate.chunk(2, dim=-1)
        return gate, up
    return gate, None


def _probe(
    module: nn.Module, formula: Gated, factors: dict[str, float], scales: dict[str, float], dtype: torch.dtype,
    training: bool, generator: torch.Generator,
) -> tuple[nn.Module, dict[str, _Recorder], list[str]]:  # fmt: skip
    """A copy of the module with small layers that record their inputs, and the order in which they are called."""
    layers: dict[str, _Recorder] = {}
    order: list[str] = []
    for name in formula.layers:
        size = (WIDE, NARROW) if name == formula.down else (NARROW, 2 * WIDE if formula.up is None else WIDE)
        layer = layers[name] = _Recorder(*size, device="meta")  # "meta" draws no numbers from the global generator
        for k, p in layer.named_parameters():
            setattr(layer, k, nn.Parameter(torch.randn(p.shape, generator=generator).to(dtype)))
        layer.name, layer.seen, layer.order = name, [], order
    marks = {k: _Mark() for k in factors}
    for k, mark in marks.items():
        mark.factor = factors[k]
    probe = build_probe(module, {}, {**layers, **marks})
    vars(probe).update(scales)
    probe.training = training
    for child in probe.children():
        child.training = training
    return probe, layers, order


def _holds(module: nn.Module, formula: Gated, factors: dict[str, float], scales: dict[str, float], case: Case) -> bool:
    """Whether the module's formula holds in another case: the result for x, and the gradients."""
    training = case.training and formula.dropout is None  # a dropout gives another result at every call
    generator = torch.Generator().manual_seed(1)
    probe, layers, _ = _probe(module, formula, factors, scales, case.dtype, training, generator)
    x = case.input(NARROW)
    if case.dtype == torch.float16:
        x = x / 8  # the marks multiply a product of two layers, and fp16 holds no more than 65504
    numbers: dict[Any, float] = {None: 1.0, **factors, **scales}
    down = layers[formula.down]
    with torch.set_grad_enabled(case.gradients):
        y = run(probe, x)
        if y is None:
            return case.dtype == torch.float16  # which some torch operations lack on a CPU
        if len(down.seen) != 1:
            return False
        hidden = down.seen[0]
        g, u = _gate_and_up(formula, layers, x)
        expected = gated_reference(g, u, formula.act, numbers[formula.gate_scale])
        result = F.linear(expected * numbers[formula.between], down.weight, down.bias)
        result = result * numbers[formula.after] * numbers[formula.scale]
    with torch.no_grad():
        written_out = case.dtype != torch.float32 and formula.act == "gelu_tanh"
        share = 0.5 if case.dtype == torch.float32 or written_out else 2**-15
        terms = (expected.abs() + share * rounded_product(g, u)) * (4 if case.dtype == torch.float32 else 1)
        roundings = 6 if written_out else 2
        last = F.linear(hidden, down.weight, down.bias) * (numbers[formula.after] * numbers[formula.scale])
        if not case.broken:
            agrees = same_numbers(hidden / numbers[formula.between], expected, roundings=roundings, size=terms)
            agrees = agrees and torch.equal(y, last)
            if agrees and case.gradients:
                agrees = same_gradients(y, result, [x, *(p for m in layers.values() for p in m.parameters())])
        else:
            agrees = case.agrees(y, result)
    record_attempt(formula, case, y, result, agrees)
    return agrees


NARROW, WIDE = 12, 40  # the probe's sizes, not the module's: a layer of a 70B model would take a gigabyte
_PLACES = ("between", "after", "gate_scale", "scale")


def _is_dropout(y: Tensor, last: Tensor, p: float) -> bool:
    kept = y != 0
    return bool(kept.any() and not kept.all()) and torch.allclose(y[kept], last[kept] / (1 - p), rtol=0.02)


def rounded_product(gate: Tensor, up: Tensor | None) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return (gate * up).abs()
