"""Recognise feed-forward layers in any model from the activations at its linear layers.

    down's input = act(up's output)                        two matrices: BERT, GPT-2, OPT, ViT
    down's input = act(gate's output) · up's output        three: Llama, Qwen, Gemma; or two, with gate and up packed

A forward pass records a few rows from every linear layer's input and output. The match does not depend on which module
contains the code between the layers (a separate module, the decoder layer or two siblings), so that it covers more than
the parts of `tigon.fuse`. It requires that each inner activation depends on a single neuron, which the equation
verifies.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tigon.compress.layers import SplitLinear
from tigon.compress.report import Skipped
from tigon.fusion.engine.patch import is_hooked
from tigon.fusion.engine.probe import linear_widths
from tigon.ops.acts import ACTS

ROWS = 16  # recorded rows per input and output, used to identify the formula
WINDOW = 8  # maximum calls between gate and down


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


def read_weight(module: Any) -> Tensor:
    """The weight (out, in) of a layer that `find_feed_forwards` returned."""
    weight: Tensor = module.weight.detach()
    return weight.t() if is_conv1d(module) else weight


def find_feed_forwards(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[list[FeedForward], list[Skipped]]:
    """Find the supported feed-forward layers in call order, and the skipped layers.

    batch: the model's keyword arguments.

    Raises: ValueError if a layer's input is not finite, since no formula can then be identified.
    """
    linears: dict[str, nn.Module] = {}  # for nested layers, such as adapters, the outermost
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in linears)
        if not inside and (linear_widths(module) is not None or is_conv1d(module)):
            linears[name] = module
    hooked = {name for name, module in linears.items() if is_hooked(module)}
    calls = _record_calls(model, batch, linears)
    bad = next((call.name for call in calls if not bool(torch.isfinite(call.x).all())), None)
    if bad is not None:
        raise ValueError(
            f"feed_forward: the calibration produces values that are not finite (NaN or infinity) at {bad}; check the "
            "weights before this layer, and the dtype."
        )
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name.rpartition(".")[0])
    counts = Counter(call.name for call in calls)
    shared = {name for names in owners.values() if len(names) > 1 for name in names}
    shared |= {name for name, count in counts.items() if count > 1}

    matches, skipped = _match_calls(calls)
    found: list[FeedForward] = []
    for match in matches:
        reasons = [_find_obstacle(linears[name], name in shared, name in hooked) for name in match.layers]
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is None:
            found.append(match)
        else:
            skipped[match.name] = reason
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3 and "down" in key and len(parameter) > 1:
                skipped[name] = f"the layer holds {len(parameter)} experts, and each sees too few tokens"
    return found, list(itertools.starmap(Skipped, skipped.items()))


def _record_calls(model: nn.Module, batch: Mapping[str, Tensor], linears: Mapping[str, nn.Module]) -> list[_Call]:
    calls: list[_Call] = []

    def record(name: str) -> Any:
        def hook(_: Any, args: tuple[Any, ...], y: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(y, Tensor) and args[0].dim() and y.dim():
                rows = (t.detach().reshape(-1, t.shape[-1])[:ROWS].float() for t in (args[0], y))
                calls.append(_Call(name, *rows))

        return hook

    handles = [module.register_forward_hook(record(name)) for name, module in linears.items()]
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _match_calls(calls: list[_Call]) -> tuple[list[FeedForward], dict[str, str]]:
    """The layers that match a formula, and the reasons why layers of their shape do not."""
    found: dict[str, FeedForward] = {}
    skipped = {}
    for place, down in enumerate(calls):
        before = calls[max(0, place - WINDOW) : place]
        matches = sorted(_list_matches(before, down), key=lambda match: match[0]) if bool(down.x.any()) else []
        if matches:  # the two gelu forms are close: the nearer one
            found.setdefault(down.name, matches[0][1])
        # As wide as a feed-forward layer at the same model width: users will look for this layer in the report.
        elif any(c.widths == down.widths[::-1] and c.widths[0] < c.widths[1] for c in before):
            acts = ", ".join(ACTS)
            skipped[down.name] = f"the input is not an activation of earlier layers ({acts}), nor a product with one"
    return list(found.values()), skipped


def _list_matches(before: list[_Call], down: _Call) -> Iterator[tuple[float, FeedForward]]:
    """The formulas that give down's input, with their distances from it."""
    inner = down.widths[0]
    for first in reversed(before):
        if len(first.y) != len(down.x):
            continue
        for act, row in ACTS.items():
            candidates: list[tuple[Tensor, FeedForward]] = []
            if first.widths[1] == inner:
                value = row.value(first.y)
                candidates.append((value, FeedForward(None, first.name, down.name, act)))
                others = (c for c in before if c is not first and c.widths == first.widths and len(c.y) == len(first.y))
                candidates += [(value * c.y, FeedForward(first.name, c.name, down.name, act)) for c in others]
            elif first.widths[1] == 2 * inner:
                gate, up = first.y.chunk(2, -1)
                packed = FeedForward(None, first.name, down.name, act, packed=True)
                candidates.append((row.value(gate) * up, packed))
            for value, match in candidates:
                # A few bf16 roundings at the largest value. Tens of thousands of values do not agree by chance.
                error, size = (value - down.x).abs(), down.x.abs()
                if bool((error <= 2**-6 * size + 2**-9 * size.amax(-1, keepdim=True)).all()):
                    yield float(error.sum()), match


def _find_obstacle(module: nn.Module, is_shared: bool, has_hooks: bool) -> str | None:
    kind = type(module).__name__
    if isinstance(module, SplitLinear):
        return "the layer is already compressed"
    if hasattr(module, "base_layer"):
        return f"the {kind} has an adapter; merge the adapter first"
    if type(module) is not nn.Linear and not is_conv1d(module):
        return f"the layers are {kind}, which may be quantised or sharded"
    weight: Any = module._parameters.get("weight")
    if type(weight) not in (Tensor, nn.Parameter):
        return f"the weights are {type(weight).__name__}: quantised or sharded"
    if not weight.is_floating_point():
        return f"the weights are {str(weight.dtype).removeprefix('torch.')}: quantised"
    if is_shared:
        return "the weights are shared with another layer, or tied"
    return "the layer has hooks" if has_hooks or "forward" in vars(module) else None
