"""Recognise feed-forward layers in any model from the activations at its linear layers.

    down's input = act(up's output)                        two matrices: BERT, GPT-2, OPT, ViT
    down's input = act(gate's output) · up's output        three: Llama, Qwen, Gemma; or two, with gate and up packed

A forward pass records a few rows from every linear layer's input and output. The match does not depend on which module
contains the code between the layers (a separate module, the decoder layer or two siblings). It requires that each inner
activation depends on a single neuron, which the equation verifies.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tigon.compress.layers import SplitLinear
from tigon.fusion.engine.patch import is_hooked
from tigon.fusion.engine.probe import linear_widths
from tigon.ops.acts import ACTS

ROWS = 16  # recorded rows per input and output, used to identify the formula
WINDOW = 8  # maximum calls between gate and down
_PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward layer, as names of linear layers in the model.

    gate: None without a gate: down(act(up(x))).
    up: contains gate's rows above up's if `packed`.
    act: a name in `tigon.ops.acts`.
    """

    gate: str | None
    up: str
    down: str
    act: str
    packed: bool = False

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(name for name in (self.gate, self.up, self.down) if name is not None)

    @property
    def name(self) -> str:
        """The common prefix in the layers' names: the module that contains them."""
        words = zip(*(name.split(".") for name in self.layers), strict=False)
        same = itertools.takewhile(lambda row: len(set(row)) == 1, words)
        return ".".join(row[0] for row in same) or self.down

    def __str__(self) -> str:
        product = f"{self.act}(gate) · up" if self.gate is not None or self.packed else f"{self.act}(up)"
        return f"down({product})"


@dataclass(frozen=True)
class Left:
    """A skipped layer and the reason."""

    name: str
    reason: str


@dataclass
class _Call:
    name: str
    x: Tensor
    y: Tensor

    @property
    def widths(self) -> tuple[int, int]:
        return self.x.shape[1], self.y.shape[1]


def is_conv1d(module: nn.Module) -> bool:
    """Whether the module is transformers' Conv1D: a linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def weight_of(module: Any) -> Tensor:
    """The weight (out, in) for a layer that `find` returned."""
    weight: Tensor = module.weight.detach()
    return weight.t() if is_conv1d(module) else weight


def _linears(model: nn.Module) -> dict[str, nn.Module]:
    """All linear layers by name; for nested layers, such as adapters, the outermost."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and (linear_widths(module) is not None or is_conv1d(module)):
            found[name] = module
    return found


def find(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[list[FeedForward], list[Left]]:
    """Find the supported feed-forward layers in call order, and the skipped layers.

    batch: the model's keyword arguments.

    Raises: ValueError if a layer's input is not finite, since no formula can then be identified.
    """
    linears = _linears(model)
    calls: list[_Call] = []

    def record(name: str) -> Any:
        def hook(_: Any, args: tuple[Any, ...], y: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(y, Tensor) and args[0].dim() and y.dim():
                x = args[0]
                rows = (t.detach().reshape(-1, t.shape[-1])[:ROWS].float() for t in (x, y))
                calls.append(_Call(name, *rows))

        return hook

    hooked = {name for name, module in linears.items() if is_hooked(module)}
    handles = [module.register_forward_hook(record(name)) for name, module in linears.items()]
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    broken = next((call.name for call in calls if not bool(torch.isfinite(call.x).all())), None)
    if broken is not None:
        raise ValueError(
            f"feed_forward: the calibration gives numbers that are not finite (NaN or infinite) at {broken}; check the "
            "weights before it, and the dtype."
        )
    found, odd = _matched(calls)
    counts = Counter(call.name for call in calls)
    shared = _shared(model)
    kept: list[FeedForward] = []
    left = {name: Left(name, reason) for name, reason in odd}
    for feed_forward in found:
        own = [_why_not(name, linears[name], counts, shared, hooked) for name in feed_forward.layers]
        reason = next((r for r in own if r is not None), None)
        if reason is None:
            kept.append(feed_forward)
        else:
            left[feed_forward.name] = Left(feed_forward.name, reason)
    left |= {name: Left(name, reason) for name, reason in _experts(model)}
    return kept, list(left.values())


def _matched(calls: list[_Call]) -> tuple[list[FeedForward], list[tuple[str, str]]]:
    found: dict[str, FeedForward] = {}
    odd = []
    for place, down in enumerate(calls):
        before = calls[max(0, place - WINDOW) : place]
        match = _match(before, down)
        if match is not None:
            found.setdefault(match.down, match)
        # As wide as a feed-forward layer at the same model width: users will look for this layer in the report.
        elif any(c.widths == down.widths[::-1] and c.widths[0] < c.widths[1] for c in before):
            acts = ", ".join(ACTS)
            odd.append((down.name, f"its input is no {acts} of the layers before it, nor a product of these"))
    return list(found.values()), odd


def _match(before: list[_Call], down: _Call) -> FeedForward | None:
    inner = down.widths[0]
    if not bool(down.x.any()):
        return None
    best: list[tuple[float, FeedForward]] = []
    for first in reversed(before):
        if len(first.y) != len(down.x):
            continue
        for act, row in ACTS.items():
            if first.widths[1] == inner:
                value = row.value(first.y)
                best += _fit(value, down.x, FeedForward(None, first.name, down.name, act))
                for other in before:
                    if other is not first and other.widths == first.widths and len(other.y) == len(first.y):
                        best += _fit(value * other.y, down.x, FeedForward(first.name, other.name, down.name, act))
            elif first.widths[1] == 2 * inner:
                gate, up = first.y.chunk(2, -1)
                best += _fit(row.value(gate) * up, down.x, FeedForward(None, first.name, down.name, act, packed=True))
    # The two gelu forms are close; choose the nearer.
    return min(best, key=lambda pair: pair[0])[1] if best else None


def _fit(value: Tensor, x: Tensor, found: FeedForward) -> list[tuple[float, FeedForward]]:
    """The layer and its distance if the activations match.

    The tolerance is a few bf16 roundings at the largest value. Tens of thousands of values do not agree by chance.
    """
    off, size = (value - x).abs(), x.abs().amax(-1, keepdim=True)
    same = bool((off <= 2**-6 * x.abs() + 2**-9 * size).all())
    return [(float(off.sum()), found)] if same else []


def _shared(model: nn.Module) -> set[str]:
    """Names of modules with a parameter shared with another module."""
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return {name for names in places.values() if len(names) > 1 for name in names}


def _why_not(
    name: str, module: nn.Module, counts: Counter[str], shared: set[str], hooked: set[str]
) -> str | None:  # fmt: skip
    kind = type(module).__name__
    if isinstance(module, SplitLinear):
        return "it was compressed before"
    if hasattr(module, "base_layer"):
        return f"its {kind} has an adapter; merge it first"
    if type(module) is not nn.Linear and not is_conv1d(module):
        return f"its layers are {kind}, which may be quantised or sharded"
    weight: Any = module._parameters.get("weight")
    if type(weight) not in _PLAIN:
        return f"its weights are {type(weight).__name__}: quantised or sharded"
    if not weight.is_floating_point():
        return f"its weights are {str(weight.dtype).removeprefix('torch.')}: quantised"
    if name in shared or counts[name] > 1:
        return "its weights are shared with another layer, or tied"
    return "it has hooks" if name in hooked or "forward" in vars(module) else None


def _experts(model: nn.Module) -> list[tuple[str, str]]:
    """Modules with a stacked expert weight."""
    return [
        (name, f"it holds {len(parameter)} experts, which see too few tokens each")
        for name, module in model.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and "down" in key and len(parameter) > 1
    ]
