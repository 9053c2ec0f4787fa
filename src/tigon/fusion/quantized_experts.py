"""Stacked experts of a model in 4 bits: replaced in place, one stack at a time, and put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tigon.fusion.engine.probe import compute_signature
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.parts.experts import Experts, recognize_experts
from tigon.fusion.parts.lora_layers import adapts_parameter
from tigon.fusion.parts.sharded_rows import list_inside_fsdp
from tigon.fusion.parts.stacks import find_quantized, list_quantized, refuse_to_merge, replace_stack
from tigon.fusion.stored_mxfp4 import take_over_mxfp4
from tigon.ops.experts.quantized import Format, QuantizedExperts, find_layout

TUNER_CHECK = "_check_merge_allowed"


def quantize_experts(
    model: nn.Module, format: Format = "nf4", *, device: torch.device | str | None = None
) -> list[str]:
    """Store the frozen stacked experts of a model in 4 bits, for LoRA around or on them.

    Args:
        model: any model with stacked experts that `tigon.fuse` recognises: gpt-oss, Qwen3-MoE, Mixtral, … Call this
            before `tigon.fuse`.
        format: "nf4", 4.5 bits a weight; "mxfp4", 4.25 bits, the format of gpt-oss's checkpoints: what transformers has
            dequantized from such a checkpoint becomes exactly the checkpoint's numbers again. Layers that transformers
            keeps in MXFP4 (`Mxfp4GptOssMLP`), which cannot train, are replaced by layers with the same bytes.
        device: where the stacks are quantized, one at a time; by default where they are. The 4-bit weights return to
            the stack's device: a model that does not fit on a GPU can be loaded on the CPU, quantized with
            device="cuda", and moved.
    Returns: the names of the modules whose stacks are in 4 bits now. Modules that already were are left alone.
    Raises: ValueError for another format, for a fused model, for stacks with gradients, for sharded stacks, also where
        FSDP has gathered them, for layers in MXFP4 with hooks or a part of the experts, and for a model without stacked
        experts of a known formula.

    The attributes stay: `experts.gate_up_proj` is a parametrization of `torch.nn.utils.parametrize`, and gives the
    dense weight to any code that asks. In `state_dict()`, `gate_up_proj` becomes
    `parametrizations.gate_up_proj.0.packed`, `….0.scales` and `….original`, a number that holds the dense weight's
    dtype. After `tigon.fuse`, `moe_mlp` dequantizes tile by tile. `dequantize_experts` undoes all this.

    Add PEFT's adapters on the stacks (`target_parameters`) before: on a parametrized module PEFT matches whole names
    only, and nests the adapters in another order, by which its checkpoints name them.
    """
    find_layout(format)
    names, reasons = take_over_mxfp4(model, format), []
    inside = list_inside_fsdp(model)
    for name, module, formula in list(_find_experts(model)):
        if isinstance(formula, Reason):
            reasons.append(f"{name}: {formula}")
            continue
        if "_tigon" in vars(module):
            raise ValueError(
                "quantize_experts: model must not be fused: call tigon.quantize_experts before tigon.fuse."
            )
        for stack in (formula.gate_up, formula.down):
            if module in inside or _is_sharded(module._parameters[stack]):
                raise ValueError(
                    f"quantize_experts: {name}.{stack} must be whole, and is sharded: quantize before sharding."
                )
            _quantize_stack(module, stack, f"{name}.{stack}", formula.by_columns, format, device)
        names.append(name)
    for module, name in _list_merges(model):
        setattr(module, name, refuse_to_merge)
    if not names and not any(map(list_quantized, model.modules())):
        why = f" ({reasons[0]})" if reasons else ""
        raise ValueError(f"quantize_experts: {type(model).__name__} must have stacked experts, and has none{why}.")
    return names


def find_stacks(model: nn.Module) -> list[Tensor]:
    """The dense stacks (E, N, K) that `quantize_experts` would store in 4 bits."""
    return [w for _, m, f in _find_experts(model) if isinstance(f, Experts) for w in f.weights(m)[:2]]


def _find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, Experts | Reason]]:
    """Name, module and formula of the modules with dense stacked experts; equal modules are recognised once."""
    known: dict[Any, Any] = {}
    for name, module in model.named_modules():
        if all(p is None or p.dim() != 3 for p in module._parameters.values()):
            continue
        key = compute_signature(module)
        if key not in known:
            known[key] = recognize_experts(module)
        if known[key] is not None:
            yield name, module, known[key]


def _quantize_stack(
    module: nn.Module, name: str, path: str, by_columns: bool, format: Format, device: torch.device | str | None
) -> None:
    weight: Any = module._parameters[name]
    if weight.grad is not None:
        raise ValueError(f"quantize_experts: {path} must be frozen, and has a gradient.")
    logical: Tensor = weight.detach().transpose(1, 2) if by_columns else weight.detach()
    quantized = QuantizedExperts.quantize(logical.to(device), format, by_columns=by_columns).to(weight.device)
    replace_stack(module, name, quantized, weight.dtype)


def _is_sharded(weight: Any) -> bool:
    return hasattr(weight, "device_mesh") or hasattr(weight, "ds_id")


def _list_merges(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The methods that merge an adapter into a 4-bit stack: of PEFT's wrappers, and the check of the tuner around them,
    which comes before any layer is merged."""
    adapted: list[Any] = [m for m in model.modules() if adapts_parameter(m)]
    wrappers = [m for m in adapted if find_quantized(m.get_base_layer(), m.parameter_name) is not None]
    tuners = [m for m in model.modules() if hasattr(type(m), TUNER_CHECK) and not set(wrappers).isdisjoint(m.modules())]
    return [*((wrapper, "merge") for wrapper in wrappers), *((tuner, TUNER_CHECK) for tuner in tuners)]


def dequantize_experts(model: nn.Module) -> list[str]:
    """Put dense weights, in the dtype that they had, in the place of all 4-bit experts; return the modules' names.

    Raises: ValueError for a fused model, for sharded stacks, also where FSDP has gathered them, and for a stack that
        other parametrizations change.
    """
    names, inside = [], list_inside_fsdp(model)
    merges = _list_merges(model)
    for name, module in model.named_modules():
        quantized = list_quantized(module)
        if not quantized:
            continue
        if "_tigon" in vars(module):
            raise ValueError("dequantize_experts: model must not be fused: call fusion.remove() first.")
        if len(quantized) != len(module.parametrizations):
            raise ValueError(
                f"dequantize_experts: {name} must have no parametrizations but 4-bit stacks, and has others."
            )
        sharded = next((stack for stack, q in quantized.items() if module in inside or _is_sharded(q.packed)), None)
        if sharded is not None:  # gathered, too: FSDP would not know of the dense weights
            raise ValueError(
                f"dequantize_experts: {name}.{sharded} must be whole, and is sharded: dequantize before sharding."
            )
        dense = {stack: getattr(module, stack).contiguous() for stack in quantized}
        # torch's remove_parametrizations would delete the attributes of the class, which copies of the module share.
        del module._modules["parametrizations"]
        module.__class__ = type(module).__bases__[0]
        module._parameters.update({k: nn.Parameter(w, requires_grad=False) for k, w in dense.items()})
        names.append(name)
    for module, method in merges:
        vars(module).pop(method, None)
    return names
