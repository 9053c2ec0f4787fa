"""Gated feed-forward units, act(gate(x)) · up(x) through down, run fused. `mlp_formula` recognises these units."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from tigon.fusion.engine.part import ModulePart, register
from tigon.fusion.engine.patch import Patch, is_functorch_active, is_hooked, plain_forward
from tigon.fusion.fp8.layers import run_unit_in_fp8, why_not_in_fp8
from tigon.fusion.logits.deferred import as_tensor
from tigon.fusion.parts.adapters import adapter_here, count_here, may_be_adapted
from tigon.fusion.parts.mlp_formula import Gated, recognize_mlp
from tigon.fusion.parts.plain_linear import plain_layers
from tigon.kernels import autocast_dtype, use_triton
from tigon.ops.acts import ACTS
from tigon.ops.gated import fit_each_other, gated_unit
from tigon.ops.gated_linear import gated_linear_saved_by
from tigon.ops.linear.adapters import gated_lora_linear, lora_linear
from tigon.ops.linear.dense_mlp import dense_mlp
from tigon.ops.linear.gated_mlp import gated_mlp, is_one_tile
from tigon.ops.linear.lora_mlp import lora_mlp
from tigon.ops.linear.tiled_lora_mlp import tiled_lora_mlp


def mlp_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    patch: Patch = self._tigon
    formula: Gated = patch.formula
    if not patch.ledger.active or kwargs or len(args) != 1 or is_functorch_active() or not patch.still_holds(self):
        return plain_forward(self, *args, **kwargs)
    x = args[0]
    if patch.fp8 is not None:
        y = _fp8_mlp(self, patch, x)
        if y is not None:
            return _after_mlp(self, formula, y)
    x = as_tensor(x)
    if (formula.between is not None or formula.same_dtypes) and not _same_dtype(
        getattr(self, formula.gate), getattr(self, formula.down)
    ):
        return plain_forward(self, x)  # T5 in fp16 keeps the last layer in fp32, and casts the product
    recompute = patch.ledger.recompute
    if recompute.mlp and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        tiled = _tiled_mlp(self, patch, x)
        if tiled is None:
            tiled = _adapted_mlp(self, patch, x, tiled=True)
        if tiled is not None:
            return _after_mlp(self, formula, tiled)
        if recompute.is_running():  # a layer with an adapter or a hook: recipes replace the saved tensors, too
            run = functools.partial(_mlp, self, patch)
            return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
    return _mlp(self, patch, x)


def _fp8_mlp(self: Any, patch: Patch, x: Any) -> Tensor | None:
    """The whole unit in FP8; None where the unit runs in bf16."""
    formula, key = patch.formula, ("unit", type(self))
    layers = [getattr(self, name) for name in formula.layers]
    recompute = patch.ledger.recompute

    def run(x: Any) -> Tensor | None:
        return run_unit_in_fp8(patch.fp8, layers, x, patch.ledger)

    is_run_again = recompute.mlp and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if is_run_again and recompute.is_running():
        y: Tensor | None = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
    else:
        y = run(x)
    if y is None:
        patch.ledger.count_fallback("fp8", key, why_not_in_fp8(x, patch.ledger))
        return None
    patch.ledger.count("fp8", key)
    patch.ledger.count("mlp", patch.key)
    return y


def add_mlp(module: Any, residual: Any, x: Any) -> Tensor | None:
    """residual + module(x), where all three MLP layers have adapters and one pass adds; None elsewhere."""
    patch: Patch = module._tigon
    formula: Gated = patch.formula
    if torch.compiler.is_compiling() or not _may_be_adapted(module, formula):
        return None
    if not patch.ledger.active or is_functorch_active():
        return None
    # Hooks on the module see a result that is not computed here.
    if not isinstance(residual, Tensor) or not patch.is_entire_call(module) or not patch.still_holds(module):
        return None
    if formula.same_dtypes or any(f is not None for f in (formula.scale, formula.dropout, formula.after)):
        return None
    if patch.ledger.recompute.mlp and torch.is_grad_enabled():
        return None  # in tiles
    return _adapted_mlp(module, patch, x, residual=residual)


def _tiled_mlp(self: Any, patch: Patch, x: Tensor) -> Tensor | None:
    formula: Gated = patch.formula
    gate, *ups, down = layers = [getattr(self, name) for name in formula.layers]
    if not formula.is_bare or not isinstance(x, Tensor) or not all(_is_plain_linear(layer, x) for layer in layers):
        return None
    if patch.ledger.recompute.is_elsewhere() and is_one_tile(x, down.in_features):
        return None  # a checkpoint recomputes the whole unit anyway; only a unit too wide for that is cut into tiles
    patch.ledger.count("mlp", patch.key)
    return gated_mlp(x, gate, ups[0] if ups else None, down, act=formula.act)


def _mlp(self: Any, patch: Patch, x: Tensor) -> Any:
    formula: Gated = patch.formula
    ours = None
    if formula.is_bare:
        dense = _dense_mlp(self, patch, x)
        if dense is not None:
            return _after_mlp(self, formula, dense)
    # torch.compile's partitioner decides which tensors adapted layers keep, and they are called as they are.
    adapters = not torch.compiler.is_compiling() and _may_be_adapted(self, formula)
    if adapters:
        whole = _adapted_mlp(self, patch, x)
        if whole is not None:
            return _after_mlp(self, formula, whole)
        ours = _adapted_gate_and_up(self, patch, x)
    # Other layers are called as modules, so that hooks and quantisation on them keep working.
    if ours is not None:
        gate, up = ours
    elif formula.up is None:
        gate, up = getattr(self, formula.gate)(x), None
        if formula.up_first:
            up, gate = gate.chunk(2, dim=-1)
    elif formula.up_first:
        up, gate = getattr(self, formula.up)(x), getattr(self, formula.gate)(x)
    else:
        gate, up = getattr(self, formula.gate)(x), getattr(self, formula.up)(x)
    down = getattr(self, formula.down)
    plain = formula.between is None and formula.gate_scale is None
    recompute = patch.ledger.recompute
    adapted = None
    if adapters and plain and recompute.product and fit_each_other(gate, up):
        # Without kernels the product is not recomputed by an operator, and a recipe replaces it.
        adapted = adapter_here(down, gate) if use_triton(gate, up) else None
    if adapted is not None:
        patch.ledger.count("mlp", patch.key)
        count_here(down)
        y = gated_lora_linear(
            gate, up, adapted, act=formula.act, inplace=ours is not None, saved_by=recompute.checkpoint_hooks()
        )
    elif plain and recompute.product and fit_each_other(gate, up) and _is_plain_linear(down, gate):
        patch.ledger.count("mlp", patch.key)
        # No other code sees two plain layers' results, so the backward pass may overwrite them.
        makers = (getattr(self, name) for name in formula.layers[:-1])
        # The kernel does not overwrite two halves that share one result.
        unseen = ours is not None or (isinstance(x, Tensor) and all(_is_plain_linear(layer, x) for layer in makers))
        unseen = unseen and not (formula.up is None and formula.up_first)
        hooks = recompute.checkpoint_hooks()
        y = gated_linear_saved_by(hooks, gate, up, down.weight, down.bias, formula.act, unseen)
    else:
        product = _gated_product(self, patch, gate, up)
        if formula.between is not None:
            product = getattr(self, formula.between)(product)
        y = down(product)
    return _after_mlp(self, formula, y)


def _dense_mlp(self: Any, patch: Patch, x: Any) -> Tensor | None:
    """The whole unit for plain layers; None if any layer is not plain."""
    formula: Gated = patch.formula
    recompute = patch.ledger.recompute
    # Offloading cannot tell which tensors inside a Function are activations.
    if torch.compiler.is_compiling() or recompute.offload is not None:
        return None
    operands = plain_layers([self._modules.get(name) for name in formula.layers], x)
    if operands is None or not use_triton(operands.x, *operands.weights):
        return None
    x, (gate, *ups, down), biases = operands
    up = ups[0] if ups else None
    if up is None:
        biases.insert(1, None)
    inner = down.shape[1]
    fits = gate.shape[0] == 2 * inner if up is None else gate.shape == up.shape and gate.shape[0] == inner
    if not fits:
        return None
    patch.ledger.count("mlp", patch.key)
    hooks = recompute.checkpoint_hooks()
    return dense_mlp(x, (gate, up, down), tuple(biases), act=formula.act, product=recompute.product, saved_by=hooks)


def _may_be_adapted(self: Any, formula: Gated) -> bool:
    """Whether a layer in the unit may have an adapter; most units have none, and this check is all they cost."""
    for name in formula.layers:
        layer = self._modules.get(name)
        if layer is not None and may_be_adapted(layer):
            return True
    return False


def _adapted_mlp(self: Any, patch: Patch, x: Any, tiled: bool = False, residual: Tensor | None = None) -> Tensor | None:
    """The whole unit for three layers with adapters, in tiles or at once; None if any layer is another kind.

    residual: the tensor that the unit's result is added to, not in tiles.
    """
    formula: Gated = patch.formula
    recompute = patch.ledger.recompute
    plain = formula.is_bare and recompute.product
    # Without kernels the product is not recomputed by an operator, and a recipe replaces it.
    if not plain or formula.up is None or torch.compiler.is_compiling() or not isinstance(x, Tensor):
        return None
    if not use_triton(x):
        return None
    layers = [getattr(self, name) for name in formula.layers]
    gate, up = (adapter_here(layer, x) for layer in layers[:2])
    if gate is None or up is None or gate.b.shape[0] != up.b.shape[0]:
        return None
    dtype = autocast_dtype(x.device.type) or x.dtype
    product = x.new_empty((), dtype=dtype).expand(*x.shape[:-1], gate.b.shape[0])  # stands for the unit's
    down = adapter_here(layers[2], product)
    if down is None:
        return None
    if not tiled:
        y = lora_mlp(x, (gate, up, down), act=formula.act, saved_by=recompute.checkpoint_hooks(), residual=residual)
    else:
        if recompute.is_elsewhere() and is_one_tile(x, gate.b.shape[0]):
            return None  # a checkpoint recomputes the whole unit anyway
        tiled_y = tiled_lora_mlp(x, (gate, up, down), act=formula.act)
        if tiled_y is None:
            return None
        y = tiled_y
    patch.ledger.count("mlp", patch.key)
    for layer in layers:
        count_here(layer)
    return y


def _adapted_gate_and_up(self: Any, patch: Patch, x: Any) -> tuple[Tensor, Tensor | None] | None:
    """Gate and up for layers with adapters, in one call; None if either is another kind of layer."""
    if torch.compiler.is_compiling() or not isinstance(x, Tensor):
        return None
    layers = [getattr(self, name) for name in patch.formula.layers[:-1]]
    loras = [lora for layer in layers if (lora := adapter_here(layer, x)) is not None]
    if len(loras) != len(layers):
        return None
    gate, *up = lora_linear(x, loras, saved_by=patch.ledger.recompute.checkpoint_hooks())
    for layer in layers:
        count_here(layer)
    return gate, up[0] if up else None


def _after_mlp(self: Any, formula: Gated, y: Tensor) -> Any:
    if formula.scale is not None:
        y = y * getattr(self, formula.scale)
    if formula.dropout is not None:
        y = F.dropout(y, getattr(self, formula.dropout), self.training)
    return y if formula.after is None else getattr(self, formula.after)(y)


def _is_plain_linear(layer: Any, x: Tensor) -> bool:
    """Whether calling the layer does no more than F.linear, so that the backward pass need not keep the layer's input.

    An adapter, a hook, another forward or a sharded weight needs the module's call. So does torch.compile, whose
    partitioner decides which tensors are kept.
    """
    if type(layer) is not nn.Linear or torch.compiler.is_compiling() or torch.nn.modules.module._has_any_global_hook():
        return False
    state = vars(layer)
    if "forward" in state or is_hooked(layer):
        return False
    weight = layer.weight
    plain = type(weight) in (Tensor, nn.Parameter) and weight.device == x.device
    return plain and (weight.dtype == x.dtype or autocast_dtype(x.device.type) is not None)


def _same_dtype(one: Any, other: Any) -> bool:
    return getattr(getattr(one, "weight", None), "dtype", None) == getattr(
        getattr(other, "weight", None), "dtype", None
    )


def _gated_product(self: Any, patch: Patch, gate: Tensor, up: Tensor | None) -> Tensor:
    formula: Gated = patch.formula
    scale = 1.0 if formula.gate_scale is None else getattr(self, formula.gate_scale)
    if fit_each_other(gate, up):
        patch.ledger.count("mlp", patch.key)
        unit = functools.partial(gated_unit, act=formula.act, gate_multiplier=scale)
        product = unit(gate, up)
        patch.ledger.recompute.note(product, unit, gate, up)
        return product
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return ACTS[formula.act].value(gate if scale == 1.0 else gate * scale) * up


register(ModulePart("mlp", recognize_mlp, mlp_forward, owns_activation=True, add=add_mlp))
