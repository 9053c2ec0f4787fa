"""Probes for rotary functions: running a function shows the formula, as probe.py does for modules.

Functions differ in the angles' form, in the head dimensions that they pair, and in their arguments. A
`Turn` is such a variant, and `Turn.apply` computes the rotation by `tigon.rope`, for the probe and for the model alike.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tigon.fusion.engine.bytecode import analyze_function
from tigon.fusion.engine.probe import CASES, Case, run, same_numbers, shield_probes
from tigon.fusion.engine.reasons import Reason
from tigon.ops.rope import DEFAULT, NEIGHBOURS, rope_reference

# A function's leading argument names; freqs are complex numbers, cos + i sin.
ARGUMENTS = ("q k cos sin", "x cos sin", "x sin cos", "q k freqs")
HEAD, WIDTHS = 16, (16, 8)  # the probe's head, and the rotated widths: the whole head, and half


@dataclass(frozen=True)
class Turn:
    """A way to write a rotation.

    angles: "whole" if cos has an entry for each rotated dimension; "half" if cos has an entry for each pair; "first
        half" if cos is as wide as in "whole" and the second half is ignored.
    pairs: "halves" pairs the first half of the dimensions with the second; "neighbours" pairs neighbours; "parted"
        pairs neighbours, rotates them and then sorts them into two halves.
    back: rotate by the negative angle. tail: the rotated dimensions are a head's last dimensions.
    """

    angles: str = "whole"
    pairs: str = "halves"
    back: bool = False
    tail: bool = False

    def spread(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin in the form that tigon.rope takes."""
        sin = -sin if self.back else sin
        if self.angles == "whole":
            return cos, sin
        if self.angles == "first half":
            cos, sin = cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]
        if self.pairs == "neighbours":
            return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)

    def apply(self, rope: Callable[..., Any], heads: tuple[Tensor, ...], cos: Tensor, sin: Tensor, dim: int) -> Any:
        """The heads (q and k, or either alone) rotated by the cos and sin that `spread` returned."""
        R = cos.shape[-1]
        passed = [x[..., :-R] for x in heads] if self.tail and heads[0].shape[-1] > R else None
        if passed is not None:
            heads = tuple(x[..., -R:] for x in heads)
        if self.pairs == "parted":
            heads = tuple(x.unflatten(-1, (R // 2, 2)).transpose(-1, -2).flatten(-2) for x in heads)
        q, k = heads if len(heads) == 2 else (heads[0], None)
        turned = rope(q, k, cos, sin, unsqueeze_dim=dim, config=NEIGHBOURS if self.pairs == "neighbours" else DEFAULT)
        turned = turned if isinstance(turned, tuple) else (turned,)
        if passed is not None:
            turned = tuple(torch.cat((x.to(y.dtype), y), dim=-1) for x, y in zip(passed, turned, strict=True))
        return turned

    def whole_heads(self, given: int, head: int) -> bool:
        """Whether `apply` hands the heads to `rope` unchanged. given: the width that the model's cos has."""
        rotated = 2 * given if self.angles == "half" else given
        return self.pairs != "parted" and not (self.tail and head > rotated)

    def fits(self, width: int, head: int) -> bool:
        return width % 2 == 0 and (width == head or (width < head and self.pairs != "parted"))

    def __str__(self) -> str:
        text = {"halves": "rotate halves", "neighbours": "rotate neighbours", "parted": "part and rotate halves"}
        return text[self.pairs] + (", backwards" if self.back else "")


@dataclass(frozen=True)
class Rotary:
    """A rotary function that `tigon.rope` can replace.

    names: the leading arguments. complex: the arguments are q, k and cos + i sin.
    full, partial: probes showed the formula for rotating the whole head, and part of the head.
    flat: probes showed the formula for q (T, H, D) and cos (T, R) too.
    keeps: results have q's and k's dtypes, whatever dtype cos has.
    unsqueeze: the function honours its parameter unsqueeze_dim.
    default: the head dimension's index without that parameter. alone: k may be None.
    shared: freqs are those of all rows, T × R/2 numbers in any shape, as in Llama 4's tower.
    """

    turn: Turn
    names: tuple[str, ...]
    complex: bool
    full: bool
    partial: bool
    flat: bool
    keeps: bool
    unsqueeze: bool
    default: int
    alone: bool
    shared: bool = False

    def __str__(self) -> str:
        width = "full or partial" if self.full and self.partial else "full" if self.full else "partial"
        return f"{self.turn}, {width}"

    @property
    def pair(self) -> bool:
        """Whether the function takes q and k."""
        return len(self.names) == 4 or self.complex

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any, Any, int] | None:
        """Heads, cos and sin, and the head dimension's index; None for a call that no probe covers."""
        if len(args) > len(self.names):
            return None
        # As most models call the function: no argument is looked up by name.
        if not kwargs and len(args) == len(self.names) == 4 and not self.complex and self.default in (1, 2):
            q, k, cos, sin = args
            if self.names[2].startswith("sin"):
                cos, sin = sin, cos
            return (q,) if k is None and self.alone else (q, k), cos, sin, self.default
        given = dict(zip(self.names, args, strict=False))
        dim = self.default
        for name, value in kwargs.items():
            if name in self.names:
                given[name] = value
            elif name == "unsqueeze_dim" and self.unsqueeze:
                dim = value
            elif value is not None:
                return None
        if dim not in (1, 2):
            return None
        heads: tuple[Any, ...] = (given.get(self.names[0]),)
        if self.pair:
            k = given.get(self.names[1])
            if k is not None or not self.alone:
                heads = (*heads, k)
        if self.complex:
            freqs = given.get(self.names[2])
            if not isinstance(freqs, Tensor) or freqs.dtype != torch.complex64:
                return None
            if self.shared:
                x = heads[0]
                if not isinstance(x, Tensor) or x.dim() != 4 or freqs.numel() != x.shape[3 - dim] * x.shape[3] // 2:
                    return None
                freqs = freqs.view(1, x.shape[3 - dim], x.shape[3] // 2)
            return heads, freqs.real, freqs.imag, dim
        cos, sin = self.names[-2:]
        if cos.startswith("sin"):
            cos, sin = sin, cos
        return heads, given.get(cos), given.get(sin), dim


def read_arguments(fn: Any) -> tuple[str, ...] | None:
    """A function's leading argument names if they suggest a rotary function, which is then probed."""
    try:
        parameters = list(_signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = tuple(p.name for p in positional)
    required = sum(p.default is p.empty for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    if names[:4] == ("q", "k", "cos", "sin") and required <= 4:
        return names[:4]
    if names[1:3] in (("cos", "sin"), ("sin", "cos")) and required <= 3:
        return names[:3]
    return names[:3] if len(names) >= 3 and names[2].startswith("freqs") and required == 3 else None


def _signature(fn: Any) -> inspect.Signature:
    # If Hugging Face kernels is installed, transformers turns the function into a module, whose `forward` has the
    # signature.
    return inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)


@shield_probes()
def recognize_rotary(fn: Callable[..., Any]) -> Rotary | Reason:
    names = read_arguments(fn)
    if names is None:
        return Reason(f"it takes other arguments than {', '.join(f'({a})' for a in ARGUMENTS)}")
    complex_ = len(names) == 3 and names[2].startswith("freqs")

    def probe(dim: int, width: int, **options: Any) -> bool | None:
        return _is_rope(fn, turn, names, dim, width, shared=shared, **options)

    # Heads at (B, H, T, D) or (B, T, H, D).
    for shared, default, turn in itertools.product((False, True)[: 1 + complex_], (1, 2), _turns(complex_)):
        shown = {width: keeps for width in WIDTHS[: 2 - shared] if (keeps := probe(default, width)) is not None}
        if (
            HEAD in shown and len(shown) == 1 and not shared
        ):  # rotating the whole head does not show which end a partial rotation affects
            tail = Turn(turn.angles, turn.pairs, turn.back, tail=True)
            if (keeps := _is_rope(fn, tail, names, default, WIDTHS[1])) is not None:
                turn, shown[WIDTHS[1]] = tail, keeps
        if shown:
            break
    else:
        return Reason("its results match no formula of tigon.rope")
    reading = analyze_function(fn)
    reason = reading if isinstance(reading, Reason) else reading.reason
    if reason is not None:
        return reason
    if not all(probe(default, width, case=case) is not None for width in shown for case in CASES):
        return Reason("its results match no formula of tigon.rope")
    if len(set(shown.values())) > 1:
        return Reason("its results have another dtype for partial than for full rotation")

    def holds(dim: int, **options: Any) -> bool:
        return all(probe(dim, width, **options) == keeps for width, keeps in shown.items())

    parameters = _signature(fn).parameters
    named = "unsqueeze_dim" in parameters and all(holds(dim, unsqueeze_dim=dim) for dim in (1, 2))
    alone = len(names) == 4 and parameters[names[1]].default is None and holds(default, alone=True)
    return Rotary(
        turn, names, complex_, HEAD in shown, WIDTHS[1] in shown, holds(2, flat=True), shown.popitem()[1], named,
        default, alone, shared,
    )  # fmt: skip


def _turns(complex_: bool) -> Iterator[Turn]:
    for back, pairs, angles in itertools.product(
        (False, True), ("halves", "neighbours", "parted"), ("whole", "first half", "half")
    ):
        if not complex_ or angles == "half":
            yield Turn(angles, pairs, back)


def _is_rope(
    fn: Callable[..., Any], turn: Turn, names: tuple[str, ...], dim: int, width: int, *, flat: bool = False,
    alone: bool = False, shared: bool = False, case: Case | None = None, **options: Any,
) -> bool | None:  # fmt: skip
    """Whether the heads keep their dtype beside an fp32 cos; None if the numbers differ."""
    if not turn.fits(width, HEAD):
        return None
    generator = torch.Generator().manual_seed(0)
    keeps = None
    complex_ = len(names) == 3 and names[2].startswith("freqs")
    dtypes = [
        (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)
    ]  # fmt: skip
    for x_dtype, cos_dtype in dtypes if case is None else [(case.dtype, case.dtype)]:
        if complex_ and cos_dtype != torch.float32:
            if case is None:
                continue
            cos_dtype = torch.float32
        batch, time = (1 if flat else 2), 5
        q, k = (
            torch.randn(batch, *((heads, time) if dim == 1 else (time, heads)), HEAD, generator=generator).to(x_dtype)
            for heads in (4, 3)
        )
        if case is not None:
            q, k = (case.input(heads, HEAD).detach() for heads in (4, 3))
            batch, time = q.shape[:2]
            q, k = (x.transpose(1, 2).contiguous() if dim == 1 else x for x in (q, k))
            q, k = (x.requires_grad_(case.gradients) for x in (q, k))
        given = width // 2 if turn.angles == "half" else width
        rows = 1 if shared else batch
        cos, sin = (torch.randn(rows, time, given, generator=generator).to(cos_dtype) for _ in range(2))
        angles = (torch.complex(cos, sin),) if complex_ else (sin, cos) if names[-1] == "cos" else (cos, sin)
        heads = (q,) if alone or names[1] in ("cos", "sin") else (q, k)
        inputs = (*heads, *angles)
        if flat:
            inputs = tuple(t[0] for t in inputs)
        if alone:
            inputs = (inputs[0], None, *inputs[1:])
        with torch.set_grad_enabled(case is not None and case.gradients):
            result = run(fn, *inputs, **options)
        if result is None and x_dtype == torch.float16:
            return True  # some torch functions lack fp16 on a CPU
        turned = (result,) if isinstance(result, Tensor) else result
        if not isinstance(turned, tuple) or len(turned) != len(heads) or not all(isinstance(t, Tensor) for t in turned):
            return None
        wide = turn.spread(cos, sin)
        with torch.set_grad_enabled(case is not None and case.gradients):
            rotated = turn.apply(rope_reference, heads, *wide, dim)
        for x, y, z in zip(heads, turned, rotated, strict=True):
            y = y[None] if flat else y
            if case is not None:
                size = _terms(turn, x.detach(), *(t.unsqueeze(dim) for t in wide))
                with torch.set_grad_enabled(case.gradients):
                    z = z.to(y.dtype)
                if not case.agrees(y, z, [x], roundings=3, size=size):
                    return None
                keeps = y.dtype == x.dtype
                continue
            if x_dtype == cos_dtype:
                if y.dtype != x.dtype:
                    return None
            else:
                kept = y.dtype == x.dtype
                if keeps not in (None, kept):
                    return None
                keeps = kept
                z = z.to(x.dtype) if kept else z
            # x·cos and rotated·sin may each be rounded before the sum: the error is relative to these terms.
            if not same_numbers(y, z, roundings=3, size=_terms(turn, x, *(t.unsqueeze(dim) for t in wide))):
                return None
    return keeps


def _terms(turn: Turn, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x, cos, sin = x.float().abs(), cos.float().abs(), sin.float().abs()
    R, D = cos.shape[-1], x.shape[-1]
    largest = x.amax(-1, keepdim=True) * (cos.amax(-1, keepdim=True) + sin.amax(-1, keepdim=True))
    largest = largest.expand(*x.shape[:-1], R)
    return torch.cat((x[..., : D - R], largest) if turn.tail else (largest, x[..., R:]), -1)
