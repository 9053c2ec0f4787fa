"""LoRA adapters on stacked experts, as PEFT's `target_parameters` add them: run inside the products of `moe_mlp`.

PEFT puts a `ParamWrapper` around the experts' module for each adapted parameter, one inside the other. In every call
its own forward registers a parametrization, which adds all experts' B A to the stacked weights. Here the outermost
wrapper reads the adapters of all, and calls the fused experts with both. As for linear layers no state is kept between
calls: where adapters are switched off, merged or of kinds that Tigon has no rule for, PEFT's forward runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tigon.fusion.engine.part import Part, Site, Stage, register
from tigon.fusion.engine.patch import Patch, is_functorch_active, is_hooked, plain_forward
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.logits.recipe import DTYPES
from tigon.fusion.parts.adapters import AdapterNames, adapter_names
from tigon.fusion.parts.experts import EXPERTS, Experts, run_experts
from tigon.fusion.parts.lora_layers import NO_ADAPTER, SHARDED, SWITCHED_OFF, adapts_parameter, read_adapter
from tigon.fusion.parts.sharded_rows import is_alone_in_shards
from tigon.fusion.parts.stacks import read_shape
from tigon.ops.experts.adapter import ExpertAdapter

NOT_EXPERTS = Reason("its adapter is on a parameter that is not a stack of experts")
OTHER_SHAPE = Reason("its adapter's shapes are not those of a stack of experts")
OUTSIDE = Reason("a wrapper inside it has hooks or a replaced forward")
NOT_FUSED = Reason("fuse was told to leave the experts under its adapter")
BASE_RUNS = Reason("its experts ran their own code")


def expert_adapter_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    patch: Patch = self._tigon
    if not patch.ledger.active or torch.compiler.is_compiling() or is_functorch_active():
        return plain_forward(self, *args, **kwargs)
    y = _run(self, args, kwargs)
    if isinstance(y, Reason):
        if y not in (NO_ADAPTER, SWITCHED_OFF):
            _check_gathered(self)
        patch.ledger.count_fallback("adapters", None, y.text)  # reported together with those of linear layers
        return plain_forward(self, *args, **kwargs)
    patch.ledger.count(PART.kind, patch.key)
    return y


def _run(wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | Reason:
    wrappers, experts = _unwrap(wrapper)
    patch = vars(experts).get("_tigon")
    if patch is None or patch.part is not EXPERTS or not patch.is_entire_call(experts):
        return BASE_RUNS
    formula: Experts = patch.formula
    adapters: dict[str, ExpertAdapter] = {}
    for layer in wrappers:
        if layer is not wrapper and ("forward" in vars(layer) or is_hooked(layer)):
            return OUTSIDE
        name = layer.parameter_name
        if name not in (formula.gate_up, formula.down) or name in adapters:
            return NOT_EXPERTS
        adapter = _read(layer, formula)
        if isinstance(adapter, ExpertAdapter):
            adapters[name] = adapter
        elif adapter != NO_ADAPTER:
            return adapter
    if not adapters:
        return NO_ADAPTER
    y = run_experts(experts, args, kwargs, adapters.get(formula.gate_up), adapters.get(formula.down))
    return BASE_RUNS if y is None else y


def _check_gathered(wrapper: Any) -> None:
    """Raise a ValueError for what FSDP has not gathered, where PEFT is about to read it."""
    wrappers, experts = _unwrap(wrapper)
    sides = {f"lora_{side}": getattr(w, f"lora_{side}").values() for w in wrappers for side in "AB"}
    for what, modules in (sides | {"the stacks of experts": [experts]}).items():
        if any(is_alone_in_shards(module) for module in modules):
            raise ValueError(
                f"fuse: {what} under PEFT's target_parameters must be gathered with the decoder layer, and have an "
                "FSDP group of their own, which is gathered for their own calls alone. PEFT reads them outside of such "
                "calls: apply fully_shard, or FSDP1's wrapper, to whole decoder layers."
            )


def _unwrap(wrapper: nn.Module) -> tuple[list[Any], Any]:
    """The wrappers from the outermost on, and the module that they wrap."""
    wrappers, module = [], wrapper
    while adapts_parameter(module):
        wrappers.append(module)
        module = module._modules["base_layer"]  # type: ignore[assignment]
    return wrappers, module


def _read(layer: Any, formula: Experts) -> ExpertAdapter | Reason:
    """A wrapper's adapter as of now, for the weight as `moe_mlp` has it: (E, out, in)."""
    adapter = read_adapter(layer)
    if isinstance(adapter, Reason):
        return adapter
    first, second, scale, _ = adapter
    a, b = first.weight, second.weight
    if any(type(t) not in (Tensor, nn.Parameter) for t in (a, b)):
        return SHARDED
    E, rows, columns = read_shape(layer.get_base_layer(), layer.parameter_name)
    is_swapped = getattr(layer, "_did_swap_in_out_features", False)
    width, height = (columns, rows) if is_swapped else (rows, columns)
    if a.dtype not in DTYPES or a.shape[0] % E or tuple(b.shape) != (height, a.shape[0]) or a.shape[1] != width:
        return OTHER_SHAPE
    if E == 1 and not is_swapped:  # PEFT then adds B A untransposed
        return OTHER_SHAPE
    # PEFT's layout: A stacks the experts, each with its ranks; B's columns have the experts innermost.
    a, b = a.view(E, -1, width), b.view(height, -1, E).permute(2, 0, 1)
    # The stored weight gains B A where PEFT reads it as (E, out, in), else Aᵀ Bᵀ; `moe_mlp` may read it transposed.
    return (
        ExpertAdapter(a, b, scale)
        if is_swapped != formula.by_columns
        else ExpertAdapter(b.transpose(1, 2), a.transpose(1, 2), scale)
    )


class ExpertAdapters(Part):
    """The experts with adapters in a model. They may come after fuse, and more of them later."""

    kind, stage = "expert_adapters", Stage.MODEL
    compiled = "Under torch.compile adapters on experts run in PEFT's own code."

    def fuse(self, site: Site, module: nn.Module) -> None:
        site.get_cached(_Names).seen = adapter_names(site.model)
        for layer in _list_outermost(site):
            patch = site.find_patch(layer)
            is_ours = patch is not None and patch.part is self and patch.is_installed_on(layer)
            reason = _why_not(site, layer) or (None if is_ours else site.why_not(layer))
            if reason is not None:
                site.record_skipped(self, layer, reason)
                continue
            if not is_ours:
                patch = Patch(self, site.ledger)
                site.install(layer, expert_adapter_forward, patch)
            names = ", ".join(reversed([w.parameter_name for w in _unwrap(layer)[0]]))
            site.record_fused(self, layer, f"LoRA on experts: {names}", patch)  # type: ignore[arg-type]

    def is_stale(self, site: Site) -> bool:
        return site.get_cached(_Names).seen != adapter_names(site.model)


def _list_outermost(site: Site) -> Iterator[nn.Module]:
    inner = {id(m._modules["base_layer"]) for m in site.modules() if adapts_parameter(m)}
    return (m for m in site.modules() if adapts_parameter(m) and id(m) not in inner)


def _why_not(site: Site, layer: Any) -> Reason | None:
    """Why a wrapper's adapters are left to PEFT whatever the input; None if calls decide."""
    wrappers, experts = _unwrap(layer)
    if EXPERTS.kind not in site.options.kinds:
        return NOT_FUSED
    patch = site.find_patch(experts)
    formula = patch.formula if patch is not None else site.recognize(EXPERTS, experts) or NOT_EXPERTS
    reason = formula if isinstance(formula, Reason) else None if patch is not None else site.why_not(experts)
    if reason is not None:
        return reason if reason is NOT_EXPERTS else Reason(f"the experts under its adapter: {reason.text}")
    names = [w.parameter_name for w in wrappers]
    if not isinstance(formula, Experts) or not set(names) <= {formula.gate_up, formula.down}:
        return NOT_EXPERTS
    return None


class _Names(AdapterNames):
    """The names that this part has seen; the part `Adapters` keeps a separate set."""


PART = register(ExpertAdapters())
