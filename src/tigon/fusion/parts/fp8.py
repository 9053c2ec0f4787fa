"""Linear layers inside decoder layers in FP8, with the norms in front of them.

The part comes last: it looks at the norms, gated units and joined projections that other parts have fused, and tells
them to run in FP8. The forward of a linear layer outside these, such as attention's output projection, is replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from tigon.fusion.engine.part import Part, Site, Stage, register
from tigon.fusion.engine.patch import Patch, plain_forward
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.fp8.adapters import FP8Bases, install_bases, why_base_unfit, why_not_released
from tigon.fusion.fp8.gather import WeightGather
from tigon.fusion.fp8.layers import (
    FP8Experts,
    FP8Group,
    FP8Norm,
    FP8Unit,
    count_least_tokens,
    multiply_in_fp8,
    why_experts_unfit,
    why_layer_unfit,
    why_not_in_fp8,
)
from tigon.fusion.fp8.options import FP8
from tigon.fusion.parts.adapters import ADAPTERS
from tigon.fusion.parts.experts import Experts
from tigon.fusion.parts.lora_layers import lasting_reason
from tigon.fusion.parts.mlp_formula import Gated
from tigon.fusion.parts.norm import is_rms_norm
from tigon.fusion.parts.projections import find_groups


class FP8Part(Part):
    """The linear layers inside the model's decoder layers, but for the first and last."""

    kind, stage, argument = "fp8", Stage.LAST, "fp8"
    compiled = "fp8: under torch.compile weights are rounded at each use, and norms in front of FP8 layers run in bf16."

    def fuse(self, site: Site, module: nn.Module) -> None:
        options: FP8 | None = site.options.fp8
        if options is None:
            return
        site.ledger.fp8_head = options.head
        site.ledger.fp8_gather = WeightGather() if options.all_gather == "fp8" else None
        names = {id(m): name for name, m in module.named_modules()}
        lists = list(list_decoder_layers(module))
        if not lists:
            site.record_skipped(self, module, Reason("no list of layers in it has a torch.nn.Linear"))
        site.ledger.fp8_least_tokens = count_least_tokens([layer for layers in lists for layer in layers])
        for layers in lists:
            until = len(layers) - options.last
            for i, layer in enumerate(layers):
                if options.first <= i < until:
                    self._fuse_layer(site, layer, options, names)
                else:
                    end = f"first {options.first}" if i < options.first else f"last {options.last}"
                    site.record_skipped(
                        self, layer, Reason(f"it is among the {end} decoder layers", "FP8(first=, last=)")
                    )

    def _fuse_layer(self, site: Site, layer: nn.Module, options: FP8, names: dict[int, str]) -> None:
        def is_spared(*modules: nn.Module) -> bool:
            return any(word in names.get(id(m), "") for m in modules for word in options.skip)

        joined: set[int] = set()
        adapted = [m for m in layer.modules() if "base_layer" in m._modules]
        for module in adapted:
            joined |= {id(m) for m in module.modules()}
        self._fuse_bases(site, layer, options, is_spared)
        for module in list(layer.modules()):
            patch = site.find_patch(module)
            formula = None if patch is None else patch.formula
            if patch is not None and isinstance(formula, Gated) and formula.is_bare:
                layers = [
                    getattr(module, name) for name in (formula.gate, formula.up, formula.down) if name is not None
                ]
                if any(m in adapted for m in layers):
                    continue  # each layer by itself
                joined |= {id(m) for m in layers}
                if is_spared(module, *layers):
                    continue
                why = why_layer_unfit(layers[:-1]) or why_layer_unfit(layers[-1:])
                if why:
                    site.record_skipped(self, module, Reason(why))
                    continue
                patch.fp8 = FP8Unit(options, formula.act)
                site.record_fused(self, module, "gate and up in one, down", key=("unit", type(module)))
            elif patch is not None and isinstance(formula, Experts):
                if options.experts and not is_spared(module):
                    self._fuse_experts(site, module, patch, options, any(module in m.children() for m in adapted))
            elif patch is not None:
                for group in _list_groups(patch, module):
                    layers = [getattr(module, name) for name in group]
                    if any(m in adapted for m in layers):
                        continue
                    joined |= {id(m) for m in layers}
                    if is_spared(module, *layers):
                        continue
                    if why := why_layer_unfit(layers):
                        site.record_skipped(self, module, Reason(why))
                        continue
                    patch.fp8 = {**(patch.fp8 or {}), group: FP8Group(options)}
                    site.record_fused(self, module, f"{', '.join(group)} in one", key=(type(module), group))
        for module in list(layer.modules()):
            if type(module) is nn.Linear and id(module) not in joined and not is_spared(module):
                self._fuse_linear(site, module, options)
            elif isinstance(module, nn.Linear) and type(module) is not nn.Linear and id(module) not in joined:
                site.record_skipped(
                    self, module, Reason("its class is a subclass of torch.nn.Linear, as of quantised layers")
                )
        if adapted or not any(getattr(vars(m).get("_tigon"), "fp8", None) is not None for m in layer.modules()):
            return  # nothing reads rows, or adapters read the norm in bf16
        for module in list(layer.modules()):
            patch = site.find_patch(module)
            if patch is not None and is_rms_norm(module) and not patch.is_head_norm:
                patch.fp8 = FP8Norm()

    def _fuse_bases(self, site: Site, layer: nn.Module, options: FP8, is_spared: Callable[..., bool]) -> None:
        """The frozen layers under adapters, those with one input together."""
        shared = site.get_cached(_SharedWeights).read(site.model)
        for parent in list(layer.modules()):
            groups = []
            for module in parent.children():
                patch = site.find_patch(module)
                if patch is not None and patch.part is ADAPTERS:
                    groups.append(patch.formula)
                elif "base_layer" in module._modules and not is_spared(module):
                    reason = lasting_reason(module) if hasattr(module, "lora_A") else None
                    site.record_skipped(self, module, reason or Reason("it has an adapter that PEFT's own code runs"))
            for siblings in dict.fromkeys(groups):
                layers: list[Any] = [parent._modules[name] for name in siblings.names]
                names = []
                for name, child in zip(siblings.names, layers, strict=True):
                    if is_spared(child):
                        continue
                    if why := why_base_unfit(child, layers):
                        site.record_skipped(self, child, Reason(why))
                    else:
                        names.append(name)
                if names:
                    self._install_bases(site, FP8Bases(options, tuple(names)), parent, shared)

    def _install_bases(self, site: Site, state: FP8Bases, parent: Any, shared: set[int]) -> None:
        layers = [parent._modules[name] for name in state.names]
        kept = why_not_released([m.base_layer for m in layers], shared)
        install_bases(state, layers, is_released=state.may_release and not kept)
        for base in (m.base_layer for m in layers if state.replaced is not None):
            site.track(base)
        what = f"{', '.join(state.names)}: frozen under adapters"
        if state.may_release:
            what += f"; kept, since {kept}" if kept else "; released: remove() gives the weights as rounded to FP8"
        for module in layers:
            site.record_fused(self, module, what, key=state.key)

    def _fuse_experts(self, site: Site, module: nn.Module, patch: Patch, options: FP8, is_adapted: bool) -> None:
        formula: Experts = patch.formula
        gate_up, down, *biases = formula.weights(module)
        why = "it has adapters, which join the experts' products in bf16" if is_adapted else ""
        why = why or ("" if formula.is_bare else "its activation is no plain gated unit")
        why = why or ("it has biases" if any(b is not None for b in biases) else "")
        if why := why or why_experts_unfit(gate_up, down, options):
            site.record_skipped(self, module, Reason(why))
            return
        patch.fp8 = FP8Experts(options, formula.act)
        site.record_fused(self, module, "experts, grouped", key=("experts", type(module)))

    def _fuse_linear(self, site: Site, module: nn.Linear, options: FP8) -> None:
        why = why_layer_unfit([module])
        reason = Reason(why) if why else site.why_not(module)
        if reason is not None:
            site.record_skipped(self, module, reason)
            return
        patch = Patch(self, site.ledger)
        patch.fp8 = FP8Group(options)
        patch.key = "single layer"
        site.install(module, linear_forward, patch)
        site.record_fused(self, module, "single layer", key=patch.key)


class _SharedWeights:
    """The parameters that several modules of a model hold."""

    def __init__(self) -> None:
        self.found: set[int] | None = None

    def read(self, model: nn.Module) -> set[int]:
        if self.found is None:
            held = Counter(id(p) for m in set(model.modules()) for p in m._parameters.values() if p is not None)
            self.found = {p for p, count in held.items() if count > 1}
        return self.found


def linear_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    patch: Patch = self._tigon
    if not patch.ledger.active or kwargs or len(args) != 1:
        return plain_forward(self, *args, **kwargs)
    ys = multiply_in_fp8(patch.fp8, [self], args[0], patch.ledger)
    if ys is None:
        patch.ledger.count_fallback("fp8", patch.key, why_not_in_fp8(args[0], patch.ledger))
        return plain_forward(self, *args)
    patch.ledger.count("fp8", patch.key)
    return ys[0]


def list_decoder_layers(model: nn.Module) -> Iterator[list[nn.Module]]:
    """The lists of like layers that a model runs one after another, the outermost only."""
    inside: set[int] = set()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict) or id(module) in inside:
            continue
        layers = list(module.children())
        if any(hasattr(m, "get_input_embeddings") for m in layers):
            continue  # whole models
        if layers and all(type(m) is not nn.Linear and has_linear(m) for m in layers):
            inside |= {id(m) for m in module.modules()}
            yield layers


def has_linear(module: nn.Module) -> bool:
    return any(type(m) is nn.Linear for m in module.modules())


def _list_groups(patch: Patch, module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The groups of linear layers that a module's rewritten forward joins."""
    is_joined = any(part is not None and part.kind == "linear" for part in (patch.part, *patch.rewritten_by))
    return find_groups(module) if is_joined else ()


register(FP8Part())
