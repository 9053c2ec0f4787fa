"""Frozen base layers under LoRA adapters in FP8: the state of layers with one input, and what a call reads of it.

PEFT merges an adapter by writing to the base layer's weight without a new version, so the adapted layers' `merge` and
`unmerge` drop the copies first.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from tigon.fusion.engine.ledger import Ledger
from tigon.fusion.engine.patch import BoundForward, Patch
from tigon.fusion.fp8.layers import has_versions, why_layer_unfit, why_not_here
from tigon.fusion.fp8.options import FP8
from tigon.ops.fp8.frozen import FrozenStack, ReplacedWeight, ReplacedWeights
from tigon.ops.fp8.products import why_unsupported
from tigon.ops.fp8.store import JointWeight

WRITERS = ("merge", "unmerge")  # PEFT's methods that write to the base layer's weight


class FP8Bases:
    """The base layers of adapted layers with one input, in FP8.

    names: of the adapted layers in their parent, in the order in which they are stacked. replaced: the copies in place
    of the weights, if they are released. why: why the last call ran in bf16, as a clause for the report; "" for FP8.
    """

    def __init__(self, options: FP8, names: tuple[str, ...]) -> None:
        self.names, self.is_exact = names, options.sums == "exact"
        self.store = JointWeight(options.weights)
        self.may_release = options.base == "release"
        self.replaced: ReplacedWeights | None = None
        self.bases: list[nn.Module] = []  # those whose weights are replaced
        self.why = ""
        self._stack: FrozenStack | None = None  # of the last call; all layers of a call must have the same
        self.key = ("adapters", names, options.base)  # under which calls are counted

    def release(self, bases: Sequence[nn.Linear]) -> None:
        """Replace the base layers' weights by one FP8 copy."""
        parameters: list[Any] = [base._parameters["weight"] for base in bases]
        self.replaced = ReplacedWeights(parameters)
        self.bases = list(bases)
        for i, base in enumerate(bases):
            base._parameters["weight"] = self.replaced.stand_in(i)

    def restore_weights(self) -> None:
        """Give the base layers their weights, as rounded if they were released, and drop all copies."""
        self.store.clear()
        self._stack = None
        if self.replaced is None:
            return
        for base, parameter, index in zip(self.bases, self.replaced.give_back(), range(len(self.bases)), strict=True):
            own = base._parameters.get("weight")
            if isinstance(own, ReplacedWeight) and (own.source, own.position) == (self.replaced, index):
                base._parameters["weight"] = parameter
        self.replaced, self.bases = None, []

    def give_back(self, layer: nn.Module) -> None:
        """Undo everything on an adapted layer."""
        self.restore_weights()
        for name in WRITERS:
            if isinstance(vars(layer).get(name), _Writer):
                del vars(layer)[name]

    def read(self, layer: nn.Module, parent: nn.Module | None, ledger: Ledger) -> tuple[FrozenStack, int] | None:
        """The stack of all the layers' weights, and this layer's index; None where a layer has changed."""
        parameters, index = [], None
        for i, name in enumerate(self.names):
            adapted = None if parent is None else parent._modules.get(name)
            base = None if adapted is None else adapted._modules.get("base_layer")
            weight = None if base is None else base._parameters.get("weight")
            if type(weight) not in (nn.Parameter, ReplacedWeight) or weight is None:
                return None
            index = i if adapted is layer else index
            parameters.append(weight)
        if index is None:
            return None
        if self.replaced is not None:
            is_ours = all(isinstance(p, ReplacedWeight) and p.source is self.replaced for p in parameters)
            return (self._stack_for(self.replaced, parameters), index) if is_ours else None
        if any(type(p) is ReplacedWeight or p.requires_grad for p in parameters):
            return None
        self.store.is_versioned = has_versions(ledger)
        return self._stack_for(self.store.read(parameters), parameters), index

    def _stack_for(self, copies: Any, parameters: list[Any]) -> FrozenStack:
        last = self._stack
        if last is None or last.copies is not copies or any(map(operator.is_not, last.parameters, parameters)):
            last = self._stack = FrozenStack(copies, parameters, is_exact=self.is_exact)
        return last

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_stack": None}  # copies are a cache, of other parameters than those of a copied model


class _Writer(BoundForward):
    """An adapted layer's `merge` or `unmerge`, which first gives the base layer its weight, and drops the copies."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Writer:
        return _Writer(self.__func__, copy.deepcopy(self.__self__, memo))

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, self.__func__.__name__)


def merge(self: Any, *args: Any, **kwargs: Any) -> Any:
    _restore_base(self)
    return type(self).merge(self, *args, **kwargs)


def unmerge(self: Any, *args: Any, **kwargs: Any) -> Any:
    _restore_base(self)
    return type(self).unmerge(self, *args, **kwargs)


def _restore_base(layer: Any) -> None:
    patch = vars(layer).get("_tigon")
    state = None if patch is None else patch.fp8
    if isinstance(state, FP8Bases):
        state.restore_weights()


def install_bases(state: FP8Bases, layers: Sequence[Any], *, is_released: bool) -> None:
    """Let adapted layers with one input multiply by their bases in FP8."""
    for layer in layers:
        layer._tigon.fp8 = state
        for function in (merge, unmerge):
            vars(layer)[function.__name__] = _Writer(function, layer)
    if is_released:
        state.release([layer.base_layer for layer in layers])


def why_base_unfit(layer: Any, together: Sequence[Any]) -> str:
    """Why an adapted layer's base stays as it is, as a clause for the report; "" where it may run in FP8.

    together: the adapted layers with the same input.
    """
    base = layer.base_layer
    if type(base) is not nn.Linear:
        return f"its base layer is a {type(base).__name__}, whose product is that layer's own code"
    if base.weight.requires_grad:
        return "its base layer's weight is trained"
    if type(base.weight) is ReplacedWeight:
        return ""  # fused before
    return why_layer_unfit([base], sum(getattr(m.base_layer, "out_features", 0) for m in together))


def why_not_released(bases: Sequence[nn.Linear], shared: set[int]) -> str:
    """Why the weights of base layers are kept, as a clause for the report; "" where they may be released."""
    if any(id(base.weight) in shared for base in bases):
        return "another layer has the same weight"
    device = bases[0].weight.device
    return why_unsupported(device) if device.type != "cpu" else ""


def read_base(layer: Any, x: Tensor, weight: Tensor) -> Any:
    """The weight under an adapter for an input x: in FP8 where that pays, else as it is.

    weight: the base layer's.
    """
    patch: Patch | None = vars(layer).get("_tigon")
    state = None if patch is None else patch.fp8
    if patch is None or not isinstance(state, FP8Bases) or not patch.ledger.active:
        return weight
    state.why = why_not_here(x, patch.ledger)
    found = None if state.why else state.read(layer, patch.formula.parent(), patch.ledger)
    if found is None:
        state.why = state.why or "a layer beside it had no adapter, or its weight was replaced"
        return weight
    stack, index = found
    return stack.layer(index)


def count_base(patch: Patch) -> None:
    """Count a call of an adapted layer whose base may run in FP8."""
    state = patch.fp8
    if isinstance(state, FP8Bases):
        if state.why:
            patch.ledger.count_fallback("fp8", state.key, state.why)
        else:
            patch.ledger.count("fp8", state.key)
