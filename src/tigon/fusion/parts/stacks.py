"""The stacked weights of an experts module: parameters, or 4-bit weights that stand for parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tigon.ops.experts.quantized import QuantizedExperts


def read_stack(module: nn.Module, name: str) -> Tensor | QuantizedExperts:
    """The weights (E, N, K) in 4 bits, or the tensor in the module's layout."""
    return find_quantized(module, name) or getattr(module, name)


def find_quantized(module: nn.Module, name: str) -> QuantizedExperts | None:
    """The 4-bit weights behind an attribute, if nothing else changes them, as an active adapter of PEFT does."""
    lists = module._modules.get("parametrizations")
    changes = lists._modules.get(name) if isinstance(lists, nn.ModuleDict) else None
    if not isinstance(changes, nn.ModuleList) or len(changes) != 1:
        return None
    only = changes[0]
    return only if isinstance(only, QuantizedExperts) else None


def list_quantized(module: nn.Module) -> dict[str, QuantizedExperts]:
    lists = module._modules.get("parametrizations")
    found = {k: find_quantized(module, k) for k in (lists._modules if isinstance(lists, nn.ModuleDict) else ())}
    return {k: q for k, q in found.items() if q is not None}


def view_as_dense(module: nn.Module) -> nn.Module:
    """The module with plain parameters, on the meta device, in place of its 4-bit weights: what a probe copies."""
    quantized = list_quantized(module)
    if not quantized:
        return module
    plain = object.__new__(type(module).__bases__[0])  # the class from which torch's parametrize has derived
    parameters, modules = dict(module._parameters), dict(module._modules)
    del modules["parametrizations"]
    for name, q in quantized.items():
        E, N, K = q.shape
        shape = (E, K, N) if q.by_columns else (E, N, K)
        dtype = module.parametrizations[name].original.dtype  # type: ignore[index,union-attr]
        parameters[name] = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    vars(plain).update(vars(module), _parameters=parameters, _modules=modules)
    return plain
