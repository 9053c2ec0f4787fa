"""LoRA adapters on linear layers, as PEFT adds them: layers that share an input run together by `tigon.lora_linear`.

Attention calls the projections that share an input one after the other. The first computes for all, and the others
find their results ready. The groups are read from the source of the calling forward: calls with the same local name as
argument, `self.q_proj(hidden_states)` and so on, that all happen at every call. At run time the input has to be the
same tensor, else each layer computes for itself. No state is learnt from calls: a checkpoint has to save the same
tensors when recomputing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tigon.fusion.engine.part import Part, Site, Stage, register
from tigon.fusion.engine.patch import Patch, is_functorch_active, plain_forward, restore
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.engine.rewrite import read_groups
from tigon.fusion.fp8.adapters import count_base
from tigon.fusion.fp8.layers import drop_copies
from tigon.fusion.logits.deferred import as_tensor
from tigon.fusion.parts.head import get_head
from tigon.fusion.parts.lora_layers import (
    adapts_parameter,
    find_source,
    has_plain_base,
    is_adapted,
    lasting_reason,
    multiplies_itself,
    read_lora,
)
from tigon.kernels import autocast_dtype
from tigon.ops.linear.adapters import lora_linear
from tigon.ops.linear.lora import LoRA
from tigon.ops.linear.opaque import Opaque, opaque_lora_linear


def adapter_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    patch: Patch = self._tigon
    ledger = patch.ledger
    # PEFT passes keyword arguments where a batch mixes adapters.
    if not ledger.active or kwargs or len(args) != 1 or torch.compiler.is_compiling() or is_functorch_active():
        if ledger.active and kwargs:
            ledger.count_fallback("adapters", None, "it was called with " + ", ".join(kwargs))
        return plain_forward(self, *args, **kwargs)
    x = as_tensor(args[0])
    own = read_lora(self, x)
    if isinstance(own, Reason):
        ledger.count_fallback("adapters", None, own.text)
        return plain_forward(self, x)
    siblings: Siblings = patch.formula
    held = ledger.waiting.get(siblings)
    if held is not None:
        y = held.take(self, x, own)
        if not held.results:
            del ledger.waiting[siblings]
        if y is not None:
            _count(patch)
            return y
    layers, loras = [self], [own]
    for sibling in siblings.behind(self):
        lora = read_lora(sibling, x)
        if isinstance(lora, LoRA):
            layers.append(sibling)
            loras.append(lora)
    ys = run(x, loras, ledger.recompute.checkpoint_hooks())
    if len(ys) > 1:
        ledger.waiting[siblings] = _Held(x, zip(layers[1:], loras[1:], ys[1:], strict=True))
    _count(patch)
    return ys[0]


def _count(patch: Patch) -> None:
    patch.ledger.count("adapters", patch.key)
    count_base(patch)


def run(x: Tensor, layers: list[LoRA], saved_by: Any) -> tuple[Tensor, ...]:
    apart = [_is_apart(x, layer) for layer in layers]
    own = [layer for layer, alone in zip(layers, apart, strict=True) if alone]
    joined = [layer for layer, alone in zip(layers, apart, strict=True) if not alone]
    beside = iter(opaque_lora_linear(x, own, saved_by=saved_by) if own else ())
    ys = iter(lora_linear(x, joined, saved_by=saved_by) if joined else ())
    return tuple(
        next(beside) if alone else _as_came(x, layer, next(ys)) for layer, alone in zip(layers, apart, strict=True)
    )


def _is_apart(x: Tensor, layer: LoRA) -> bool:
    """Whether the base layer runs under autograd, and `lora_linear` cannot take the layer."""
    if not isinstance(layer.weight, Opaque):
        return False
    # A layer that gets x in another dtype than the adapters multiply in makes separate casts.
    return layer.weight.own_product is None or (autocast_dtype(x.device.type) or x.dtype) != x.dtype


def _as_came(x: Tensor, layer: LoRA, y: Tensor) -> Tensor:
    """bitsandbytes layers return the input's dtype, also where autocast chose another."""
    return y if has_plain_base(layer) else y.to(x.dtype)


def adapter_here(layer: Any, x: Tensor) -> LoRA | None:
    """For a fused MLP: the layer as `tigon.LoRA`, where calling it would do no more than `adapter_forward` does."""
    patch = vars(layer).get("_tigon")
    if patch is None or patch.part is not ADAPTERS or not patch.ledger.active or not patch.is_entire_call(layer):
        return None
    lora = read_lora(layer, x)
    if isinstance(lora, Reason) or _is_apart(x, lora):
        return None
    # Results that bitsandbytes would widen again are left to the module.
    return lora if has_plain_base(lora) or (autocast_dtype(x.device.type) or x.dtype) == x.dtype else None


def may_be_adapted(layer: Any) -> bool:
    """Whether `adapter_here` has anything to look at: every MLP asks, and most have no adapters."""
    patch = vars(layer).get("_tigon")
    return patch is not None and patch.part is ADAPTERS


def count_here(layer: Any) -> None:
    _count(vars(layer)["_tigon"])


class _Held:
    """Results that wait for the layers that they belong to, and the state under which they were computed."""

    def __init__(self, x: Tensor, results: Any) -> None:
        self.x, self.version, self.state = x, _version(x), _state_of_torch(x)
        self.results: dict[int, tuple[LoRA, Tensor]] = {id(layer): (lora, y) for layer, lora, y in results}

    def take(self, layer: Any, x: Any, lora: LoRA) -> Tensor | None:
        if x is not self.x or _version(x) != self.version or _state_of_torch(x) != self.state:
            return None
        result = self.results.pop(id(layer), None)
        return result[1] if result is not None and _same(result[0], lora) else None


def _same(one: LoRA, other: LoRA) -> bool:
    parameters = one.a is other.a and one.b is other.b and one.bias is other.bias
    numbers = (one.scale, one.dropout) == (other.scale, other.dropout)
    return parameters and numbers and find_source(one.weight) is find_source(other.weight)


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


def _state_of_torch(x: Tensor) -> tuple[Any, ...]:
    return torch.is_grad_enabled(), autocast_dtype(x.device.type)


# ---------------------------------------------------------------------------------------------------------- finding


class Siblings:
    """Layers of one module that get the same input, in call order."""

    def __init__(self, parent: nn.Module, names: tuple[str, ...]) -> None:
        self.parent, self.names = weakref.ref(parent), names

    def __str__(self) -> str:
        return "LoRA: " + (f"{', '.join(self.names)} in one" if len(self.names) > 1 else self.names[0])

    def copy_for(self, memo: dict[int, Any]) -> Siblings:
        """The siblings in a copy of the model; a layer copied alone has none."""
        if id(self) not in memo:
            parent = memo.get(id(self.parent()))
            memo[id(self)] = (
                Siblings(parent, self.names) if parent is not None else Siblings(nn.Module(), self.names[:1])
            )
        siblings: Siblings = memo[id(self)]
        return siblings

    def behind(self, layer: nn.Module) -> Iterator[nn.Module]:
        """The layers that are called after the first, if `layer` is the first and the group is unchanged."""
        parent = self.parent()
        if parent is None or len(self.names) == 1 or parent._modules.get(self.names[0]) is not layer:
            return
        for name in self.names[1:]:
            sibling = parent._modules.get(name)
            patch = None if sibling is None else vars(sibling).get("_tigon")
            if sibling is not None and patch is not None and patch.formula is self and patch.is_entire_call(sibling):
                yield sibling


class Adapters(Part):
    """The layers with adapters in a model. They may come after fuse, and more of them later."""

    kind, stage = "adapters", Stage.MODEL
    compiled = "Under torch.compile adapters run in PEFT's own code."

    def fuse(self, site: Site, module: nn.Module) -> None:
        site.get_cached(AdapterNames).seen = adapter_names(site.model)
        modules = site.modules()
        # A model around a fused model: the inner Fusion takes the adapters.
        if any(p is not None and p.ledger.active and p.ledger is not site.ledger for p in map(_get_patch, modules)):
            return
        heads = {id(head) for m in modules if (head := get_head(m)) is not None}
        for parent in modules:
            children = {n: m for n, m in parent.named_children() if is_adapted(m) and id(m) not in heads}
            children = {n: m for n, m in children.items() if not adapts_parameter(m)}  # see expert_adapters.py
            if children:
                self._fuse_children(site, parent, children)

    def _fuse_children(self, site: Site, parent: nn.Module, children: dict[str, nn.Module]) -> None:
        # FP8 copies of plain layers would outlive a merge, which gives the weights no new version.
        drop_copies(site.find_patch(parent))
        ours = []
        for name, layer in children.items():
            patch = site.find_patch(layer)
            there = patch is not None and patch.part is self and patch.is_installed_on(layer)  # on a repeated pass
            base: Any = layer.base_layer
            own = site.find_patch(base)
            if own is not None and own.part is not None and own.part.kind == "fp8":
                restore(base)  # with the copies
            reason = lasting_reason(layer) or (None if there else site.why_not(layer))
            if reason is None or there:
                ours.append(name)
            else:
                site.record_skipped(self, layer, reason)
        for names in _groups(parent, ours):
            siblings = Siblings(parent, names)
            for name in names:
                layer = children[name]
                patch = site.find_patch(layer)
                if patch is None:
                    patch = Patch(self, site.ledger, siblings)
                    site.install(layer, adapter_forward, patch)
                patch.formula = siblings  # shared by the group, also where fuse looks at the layer again
                site.record_fused(self, layer, _what(layer, siblings), patch)

    def is_stale(self, site: Site) -> bool:
        return site.get_cached(AdapterNames).seen != adapter_names(site.model)


def _what(layer: Any, siblings: Siblings) -> str:
    base = layer.base_layer
    if not multiplies_itself(base):
        return str(siblings)
    kind = type(base.weight) if type(base) is nn.Linear else type(base)
    return f"{siblings}, beside the product of {kind.__name__}"


class AdapterNames:
    """The adapter names that a model had when fuse looked."""

    seen: tuple[str, ...] = ()


def adapter_names(model: Any) -> tuple[str, ...]:
    return tuple(getattr(model, "peft_config", None) or ())


def _get_patch(module: nn.Module) -> Patch | None:
    return vars(module).get("_tigon")


def _groups(parent: nn.Module, names: list[str]) -> list[tuple[str, ...]]:
    """The names, in groups with the same input."""
    groups = [g for group in read_groups(type(parent).forward) if (g := tuple(n for n in group if n in names))]
    return groups + [(n,) for n in names if not any(n in g for g in groups)]


ADAPTERS = register(Adapters())
