"""RMS and layer norms: recognised by their numbers, run as a single kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from tigon.fusion.engine.part import ModulePart, register
from tigon.fusion.engine.patch import Patch, get_child, is_functorch_active, plain_forward
from tigon.fusion.engine.probe import recognition
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.logits.recipe import DTYPES
from tigon.fusion.parts.head_norm import HeadNorm
from tigon.fusion.parts.norm_formula import Norm, find_formula
from tigon.fusion.parts.sharded_rows import is_dtensor, on_own_rows, rows_are_whole
from tigon.kernels import autocast_dtype
from tigon.ops.gated import swiglu
from tigon.ops.gated_rms_norm import gated_rms_norm
from tigon.ops.layer_norm import layer_norm
from tigon.ops.rms_norm import rms_norm


@recognition
def recognize_norm(module: nn.Module) -> Norm | Reason | None:
    """The formula of a norm over the last dimension; a Reason if a module normalises and Tigon lacks the formula."""
    return find_formula(module)


def norm_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    patch: Patch = self._tigon
    formula: Norm = patch.formula
    if (
        not patch.ledger.active
        or kwargs
        or len(args) != 1 + (formula.gate is not None)
        or is_functorch_active()
        or not patch.still_holds(self)
    ):
        return plain_forward(self, *args, **kwargs)
    x = args[0]
    weight = None if formula.weight is None else get_child(self, formula.weight)
    bias = None if formula.bias is None else getattr(self, formula.bias)
    if not norm_fits(x, weight, formula) or (bias is not None and not norm_fits(x, bias, formula)):
        patch.ledger.count_fallback("norm", patch.key, _why_unfit(x, weight, formula))
        return plain_forward(self, *args)
    if formula.gate is not None and not _gate_fits(args[1], x, formula):
        return plain_forward(self, *args)
    if (
        patch.is_head_norm
        and weight is not None
        and len(args) == 1
        and formula.group_size is None
        and x.dim() == 4
        and patch.is_entire_call(self)
    ):
        return HeadNorm(x, weight, formula.form(self), patch)
    split = is_dtensor(x) or is_dtensor(weight)
    if split and not (is_dtensor(x) and len(args) == 1 and rows_are_whole(x, weight, bias)):
        return plain_forward(self, *args)
    patch.ledger.count("norm", patch.key)
    if formula.centered:
        if formula.offset and weight is not None:
            weight = weight + formula.offset
        norm: Callable[..., Tensor] = functools.partial(layer_norm, eps=formula.form(self).eps)
        inputs: tuple[Tensor | None, ...] = x, weight, bias
    elif formula.gate is not None:
        norm = functools.partial(gated_rms_norm, **formula.form(self).options, **formula.gating)
        inputs = x, args[1], weight
    elif formula.group_size is not None:
        norm = functools.partial(_norm_groups, **formula.form(self).options, **formula.gating)
        inputs = x, weight
    else:
        norm = functools.partial(rms_norm, **formula.form(self).options)
        inputs = x, weight
        if bias is not None:
            norm, inputs = functools.partial(_with_bias, norm), (x, weight, bias)
    y = on_own_rows(norm, *inputs) if split else norm(*inputs)
    if not split and patch.is_entire_call(self):  # hooks on the norm may gather and free the weight
        patch.ledger.recompute.note(y, norm, *inputs)
    return swiglu(args[1], y) if formula.centered and formula.gate is not None else y


def _norm_groups(x: Tensor, weight: Tensor | None, **options: Any) -> Tensor:
    return gated_rms_norm(x, None, weight, **options)


def _with_bias(norm: Callable[..., Tensor], x: Tensor, weight: Tensor | None, bias: Tensor) -> Tensor:
    return norm(x, weight) + bias


def _gate_fits(gate: Any, x: Tensor, formula: Norm) -> bool:
    if not isinstance(gate, Tensor) or gate.shape != x.shape or gate.device != x.device or is_dtensor(gate):
        return False
    return gate.dtype == x.dtype or (formula.wide and x.dtype == torch.float32 and gate.dtype in DTYPES)


def _why_unfit(x: Any, weight: Tensor | None, formula: Norm) -> str:
    if not isinstance(x, Tensor) or x.dtype not in DTYPES:
        return "its input was not an fp32, bf16 or fp16 tensor"
    dtypes = [str(t.dtype).removeprefix("torch.") for t in (x, weight) if t is not None]
    if formula.native and autocast_dtype(x.device.type) is not None:
        return f"autocast runs it in fp32 on {dtypes[0]} inputs"
    return f"its input and weight were {' and '.join(dtypes)}, with shapes or devices that no probe covered"


def norm_fits(x: Any, weight: Tensor | None, formula: Norm, dtype: torch.dtype | None = None) -> bool:
    """Whether probes showed the formula for inputs like x. dtype: replaces x's own."""
    if not isinstance(x, Tensor) or x.dim() not in formula.ranks or x.dtype not in DTYPES:
        return False
    if formula.native and x.dtype != torch.float32 and autocast_dtype(x.device.type) is not None:
        return False
    if weight is None:
        return formula.width in (None, x.shape[-1])
    if weight.dtype != (dtype or x.dtype):
        mixed = formula.mixed and weight.dtype == torch.float32
        if not mixed and not (formula.wide and x.dtype == torch.float32 and weight.dtype in DTYPES):
            return False
    return weight.device == x.device and weight.shape == x.shape[-1:]


def is_rms_norm(norm: Any) -> bool:
    """Whether a module's attribute is a fused RMS norm that `add_rms_norm` and `qk_norm_rope` can compute."""
    patch = vars(norm).get("_tigon") if isinstance(norm, nn.Module) else None
    formula = getattr(patch, "formula", None)
    if not isinstance(formula, Norm) or formula.centered or formula.bias is not None:
        return False
    if formula.gate is not None or formula.group_size is not None:
        return False
    return not formula.stepwise  # stepwise: under autocast the result is fp32


register(ModulePart("norm", recognize_norm, norm_forward))
