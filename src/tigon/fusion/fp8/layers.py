"""FP8 layers at run time: what each fused module holds, and when its call runs in FP8.

A norm in front of FP8 layers returns `NormedRows`: the norm's result in e4m3, which projections and gated units
multiply by as it is. Any other use of a NormedRows computes the norm in the model's dtype.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tigon.fusion.engine.ledger import Ledger
from tigon.fusion.engine.patch import Patch, get_child, is_functorch_active, is_hooked
from tigon.fusion.fp8.options import FP8
from tigon.fusion.logits.deferred import Deferred, as_tensor
from tigon.kernels import autocast_dtype, is_captured
from tigon.kernels.autograd import is_exporting, is_traced
from tigon.ops.fp8.compiled import multiply_gated_traced, multiply_traced
from tigon.ops.fp8.experts import multiply_by_experts
from tigon.ops.fp8.gathered import GatheredWeight
from tigon.ops.fp8.mlp import Stores, Unit, multiply_gated
from tigon.ops.fp8.multiply import Products, multiply
from tigon.ops.fp8.normed import Normed, norm_to_rows
from tigon.ops.fp8.products import why_unsupported
from tigon.ops.fp8.recipe import ALIGNMENT
from tigon.ops.fp8.store import JointWeight
from tigon.ops.rms_norm import rms_norm

# Below these the quantisation takes more time than the products save.
LEAST_TOKENS = 4096
# Tokens times weights of a decoder layer's linear layers. The host of an H200 machine takes about 4 ms to launch them
# in FP8, forward and backward; below this the products in bf16 are done before (benchmarks/studies/fp8_sizes.py).
LEAST_WORK = 6e11
LEAST_WIDTH = 2048  # of the larger of a product's two widths
LEAST_INNER = 1024  # of the smaller
MOST_EXPERTS = 1024  # CUTLASS prepares the groups of a product in one block of threads
_sizes_count = True  # not a context variable: checkpoints run layers again in a thread of autograd


@contextlib.contextmanager
def ignore_sizes() -> Iterator[None]:
    """Inside, small layers and calls with few tokens run in FP8, too: to measure numbers, not speed."""
    global _sizes_count
    before, _sizes_count = _sizes_count, False
    try:
        yield
    finally:
        _sizes_count = before


_PLAIN = (Tensor, nn.Parameter)


class NormedRows(Deferred):
    """The result of an RMS norm in e4m3 rows, in place of the tensor.

    It lives within one decoder layer's forward, from the norm to the layers that read it.
    """

    fields = ("form", "hooks", "normed", "patch", "tensor", "trains")

    def __init__(self, normed: Normed, form: Any, patch: Patch) -> None:
        self.normed, self.form, self.patch = normed, form, patch
        self.tensor: Tensor | None = None
        self.trains, self.hooks = torch.is_grad_enabled(), patch.ledger.recompute.checkpoint_hooks()

    def check_gradient(self) -> None:
        """Raise where a reentrant checkpoint got this object: it knows tensors alone, and would drop the gradient."""
        if not self.trains or torch.is_grad_enabled():
            return
        frame: Any = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name == "forward" and frame.f_code.co_filename == torch.utils.checkpoint.__file__:
                raise RuntimeError(
                    "fuse: a decoder layer hands the result of a norm in FP8 to a reentrant checkpoint inside the "
                    "layer, which would drop the gradient. Checkpoint with use_reentrant=False, or the whole layer."
                )
            frame = frame.f_back

    def build(self, why: str = "") -> Tensor:
        self.check_gradient()
        if self.tensor is None:
            state = self.patch.fp8
            state.is_read = state.is_used  # rows that nothing multiplies by are not made again
            norm: Any = functools.partial(rms_norm, **self.form.options)
            with torch.set_grad_enabled(self.trains):  # as the norm's module would have run
                tensor: Tensor = norm(self.normed.total, self.normed.norm.weight)
            self.patch.ledger.recompute.note(tensor, norm, self.normed.total, self.normed.norm.weight)
            # A checkpoint around code that reads the norm computes it again in its second forward pass.
            if self.patch.ledger.recompute.checkpoint_hooks() is not self.hooks:
                return tensor
            self.tensor = tensor
        return self.tensor

    @property
    def shape(self) -> Any:
        return self.normed.handle.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor, which `build` computes."""
        x, weight = self.normed.total.dtype, self.normed.norm.weight
        return x if self.form.cast == "gemma" or weight is None else torch.promote_types(x, weight.dtype)

    @property
    def device(self) -> Any:
        return self.normed.handle.device

    @property
    def ndim(self) -> int:
        return self.normed.handle.dim()

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.build().__reduce_ex__(protocol)  # a saved input is the tensor

    def __repr__(self) -> str:
        return f"NormedRows(shape={tuple(self.shape)}, dtype={self.dtype})"


class FP8Norm:
    """The state of a norm in front of FP8 layers.

    is_used: whether a layer has multiplied by the rows of the last call. is_read: whether rows are made.
    """

    def __init__(self) -> None:
        self.is_used = False
        self.is_read = True


class FP8Group:
    """Linear layers with one input that are multiplied in FP8 as one product.

    store: their quantised copies.
    """

    def __init__(self, options: FP8) -> None:
        self.store = JointWeight(options.weights)
        self.products = Products(options.dw, options.sums == "exact")


class FP8Unit:
    """A gated unit in FP8: gate and up as one product, and down."""

    def __init__(self, options: FP8, act: str) -> None:
        self.stores = Stores(JointWeight(options.weights), JointWeight(options.weights))
        self.unit = Unit(act, options.keep, Products(options.dw, options.sums == "exact"))


def drop_copies(patch: Patch | None) -> None:
    """Drop the copies of the linear layers that a patched module multiplies by in FP8."""
    held = None if patch is None else patch.fp8
    for state in held.values() if isinstance(held, dict) else (held,):
        for store in (
            state.stores if isinstance(state, FP8Unit) else [state.store] if isinstance(state, FP8Group) else ()
        ):
            store.clear()


class FP8Experts:
    """A mixture's stacked experts in FP8."""

    def __init__(self, options: FP8, act: str) -> None:
        self.unit = Unit(act, options.keep, Products(is_exact=options.sums == "exact"))


# ------------------------------------------------------------------------------------------------------------- calls


def norm_in_rows(
    norm: Any, patch: Patch, x: Tensor, residual: Tensor | None, is_forked: bool
) -> tuple[Tensor | None, NormedRows] | None:
    """(the residual stream, NormedRows) for a norm in front of FP8 layers; None where the norm runs in bf16."""
    state: FP8Norm | None = patch.fp8
    if state is None or torch.compiler.is_compiling() or not patch.is_entire_call(norm):
        return None
    if why_not_here(x, patch.ledger):
        return None
    _look_at_shards(patch.ledger)
    if patch.ledger.is_split:
        return None
    # A checkpoint's second forward pass must save what the first one saved.
    if not state.is_read and not patch.ledger.recompute.is_elsewhere():
        return None
    formula = patch.formula
    weight = None if formula.weight is None else get_child(norm, formula.weight)
    if weight is not None and type(weight) not in _PLAIN:
        return None
    form = formula.form(norm)
    stream, normed = norm_to_rows(x, residual, weight, forked=is_forked, **form.options)
    state.is_used = False
    return stream, NormedRows(normed, form, patch)


def multiply_in_fp8(group: FP8Group, modules: Sequence[Any], x: Any, ledger: Ledger) -> tuple[Tensor, ...] | None:
    """The results of linear layers for x, a tensor or NormedRows; None where they run in bf16."""
    source, operands = _read_operands(x, modules, ledger)
    if source is None:
        return None
    weights, biases = operands
    if torch.compiler.is_compiling():
        return multiply_traced(source, weights, biases, group.products)
    group.store.is_versioned = has_versions(ledger)
    return multiply(source, group.store, weights, biases, group.products, ledger.recompute.checkpoint_hooks())


def run_unit_in_fp8(unit: FP8Unit, modules: Sequence[Any], x: Any, ledger: Ledger) -> Tensor | None:
    """A gated unit's result; None where the unit runs in bf16. modules: gate, up unless packed in gate, and down."""
    source, operands = _read_operands(x, modules, ledger)
    if source is None:
        return None
    weights, biases = operands
    if len(modules) == 2:
        weights.insert(1, None)
        biases.insert(1, None)
    if torch.compiler.is_compiling():
        own = unit.unit
        return multiply_gated_traced(source, tuple(weights), tuple(biases), own.act, own.keep, own.products)
    for store in unit.stores:
        store.is_versioned = has_versions(ledger)
    hooks = ledger.recompute.checkpoint_hooks()
    return multiply_gated(source, unit.stores, tuple(weights), tuple(biases), unit.unit, hooks)


def run_experts_in_fp8(
    patch: Patch, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor | None:
    """The results of stacked experts for x (T, D); None where they run in bf16."""
    experts: FP8Experts = patch.fp8
    if torch.compiler.is_compiling() or why_not_here(x, patch.ledger):
        return None
    y = multiply_by_experts(x.to(torch.bfloat16), index, weights, gate_up, down, experts.unit)
    return y.to(x.dtype)


def has_versions(ledger: Ledger) -> bool:
    """Whether each write to a parameter gives it a new version; libraries that shard parameters write without."""
    _look_at_shards(ledger)
    return not ledger.is_sharded


def _look_at_shards(ledger: Ledger) -> None:
    if ledger.sharding_seen_at == ledger.steps:
        return
    ledger.sharding_seen_at, owner = ledger.steps, ledger.owner()
    modules = [] if owner is None else list(owner.modules())
    ledger.is_sharded = owner is not None and (
        any(isinstance(m, FSDPModule) for m in modules) or hasattr(next(owner.parameters(), None), "ds_id")
    )
    ledger.is_split = any(map(_is_split, modules))


def _is_split(module: nn.Module) -> bool:
    """Whether tensor parallelism splits a layer: a hook makes the layer's input a DTensor, and takes tensors alone."""
    has_hook = bool(module._forward_pre_hooks) and not isinstance(module, FSDPModule)
    return has_hook and isinstance(module._parameters.get("weight"), DTensor)


def _read_operands(x: Any, modules: Sequence[Any], ledger: Ledger) -> tuple[Any, Any]:
    """What to multiply, and the layers' weights and biases; (None, None) where a layer is not plain."""
    # A tensor that other code has written into differs from the rows.
    rows = x if isinstance(x, NormedRows) and (x.tensor is None or not _is_touched(x.tensor)) else None
    if torch.compiler.is_compiling():  # an eager norm in front of a compiled layer
        rows = None
    if rows is None:
        x = as_tensor(x)
    if why_not_here(rows.normed.handle if rows is not None else x, ledger):
        return None, None
    weights, biases = [], []
    for module in modules:
        if type(module) is not nn.Linear:
            return None, None
        state = vars(module)
        # FP8Part has replaced the forward of a single layer.
        if is_hooked(module) or ("forward" in state and getattr(state.get("_tigon"), "fp8", None) is None):
            return None, None
        weight, bias = state["_parameters"].get("weight"), state["_parameters"].get("bias")
        if (
            type(weight) not in (*_PLAIN, GatheredWeight)
            or (bias is not None and type(bias) not in _PLAIN)
            or weight.device != x.device
        ):
            return None, None
        weights.append(weight)
        biases.append(bias)
    if torch.nn.modules.module._has_any_global_hook():
        return None, None
    if rows is not None:
        rows.check_gradient()
        rows.patch.fp8.is_used = True
        return rows.normed, (weights, biases)
    narrow = autocast_dtype(x.device.type) or x.dtype
    return (None, None) if narrow is not torch.bfloat16 else (x.to(narrow), (weights, biases))


def _is_touched(x: Tensor) -> bool:
    """Whether code has written into a tensor, or waits for the tensor's gradient."""
    return x.is_inference() or bool(x._version or x._backward_hooks) or x.retains_grad


def why_not_in_fp8(x: Any, ledger: Ledger) -> str:
    """Why layers with the input x, a tensor or NormedRows, ran in bf16, as a clause for the report."""
    if torch.compiler.is_compiling():
        return ""  # nothing is counted
    why = why_not_here(x.normed.handle if isinstance(x, NormedRows) else x, ledger)
    return why or "a layer had a hook, another forward, or a weight that is no plain tensor on the input's device"


def why_not_here(x: Any, ledger: Ledger) -> str:
    """Why layers with the input x run in bf16 now, as a clause for the report; "" where they run in FP8."""
    if isinstance(x, DTensor):
        return "its input was a DTensor, as tensor parallelism makes"
    traces = is_exporting() if torch.compiler.is_compiling() else type(x) is not Tensor or is_traced(x)
    if traces or is_functorch_active():
        return "a trace or a transform ran the layer"
    if (autocast_dtype(x.device.type) or x.dtype) is not torch.bfloat16:
        return f"its input was {str(x.dtype).removeprefix('torch.')}, and FP8 products give bf16"
    tokens, least = x.numel() // max(x.shape[-1], 1), LEAST_TOKENS
    if _sizes_count and not torch.compiler.is_compiling() and not is_captured(x):  # graphs launch without the host
        least = max(least, ledger.fp8_least_tokens)
    if tokens < least and _sizes_count:
        return f"the call had fewer than {least:,} tokens, too few for FP8 to pay"
    return why_unsupported(x.device) if x.is_cuda else ""


def count_least_tokens(layers: Sequence[nn.Module]) -> int:
    """The fewest tokens for which the host launches decoder layers in FP8 faster than bf16 products run."""
    # By the widths: a parameter that ZeRO-3 partitions is empty, and one in 4 bits has half as many numbers.
    linear = [[m for m in layer.modules() if isinstance(m, nn.Linear)] for layer in layers]
    weights = [sum(m.in_features * m.out_features for m in own) for own in linear]
    # The products of a mixture's experts, in bf16 or FP8, take longer than the launches. Weights of convolutions have
    # three dimensions, too, but few numbers in the last.
    shapes = [getattr(p, "ds_shape", p.shape) for layer in layers for p in layer.parameters()]
    has_experts = any(len(shape) == 3 and shape[0] > 1 and min(shape[1:]) >= ALIGNMENT for shape in shapes)
    return 0 if has_experts else math.ceil(LEAST_WORK / max([1, *weights]))


def why_experts_unfit(gate_up: Any, down: Any, options: FP8) -> str:
    """Why stacked experts, gate and up (E, 2I, D) and down (E, D, I), stay in bf16; "" where they may run in FP8."""
    for weight in (gate_up, down):
        if not isinstance(weight, Tensor):
            return "its weights are in 4 bits"
        if weight.dtype not in (torch.bfloat16, torch.float32):
            return f"its weights are {str(weight.dtype).removeprefix('torch.')}, and FP8 takes bf16 or fp32"
        if not weight.is_contiguous():
            return "its weights are stored by columns, and FP8 takes rows"
        if any(n % ALIGNMENT for n in weight.shape[1:]):
            return f"its sizes are no multiples of {ALIGNMENT}"
    if len(down) > MOST_EXPERTS:
        return f"it has more than {MOST_EXPERTS:,} experts, and grouped products take no more"
    if options.dw != "fp8":
        return "its weight gradients would be in bf16, and grouped products of experts are in FP8 throughout"
    # Measured: 1.4 times as fast with widths of 4,096 and 14,336, 0.9 times with 2,048 and 768.
    if _sizes_count and (max(gate_up.shape[1:]) < LEAST_WIDTH or min(down.shape[1:]) < LEAST_INNER):
        return "its products are too small for FP8 to pay"
    return ""


def why_layer_unfit(layers: Sequence[nn.Linear], outer: int = 0) -> str:
    """Why linear layers with one input stay in bf16, as a clause for the report; "" where they may run in FP8.

    outer: the width of all results with that input, if these layers are not all.
    """
    for layer in layers:
        weight = layer._parameters.get("weight")
        if isinstance(weight, DTensor):
            return "its weight is a DTensor: with FSDP2, fuse the model before fully_shard"
        if type(layer) is not nn.Linear or type(weight) is not nn.Parameter:
            return "its weight is no plain parameter"
        if weight.dtype not in (torch.bfloat16, torch.float32):
            return f"its weight is {str(weight.dtype).removeprefix('torch.')}, and FP8 takes bf16 or fp32"
        if layer.in_features % ALIGNMENT or layer.out_features % ALIGNMENT:
            return f"its sizes are no multiples of {ALIGNMENT}"
    inner, outer = layers[0].in_features, max(outer, sum(layer.out_features for layer in layers))
    if _sizes_count and (max(inner, outer) < LEAST_WIDTH or min(inner, outer) < LEAST_INNER):
        return "its product is too small for FP8 to pay"
    return ""
