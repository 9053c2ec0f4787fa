"""The stacked weights of an experts module: parameters, or 4-bit weights that stand for parameters."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tigon.fusion.parts.sharded_rows import find_class
from tigon.ops.experts.quantized import QuantizedExperts


class StackParametrizations(parametrize.ParametrizationList):
    """The parametrizations of a 4-bit stack: the stack itself, and during a call PEFT's adapter.

    PEFT (0.21) adds an adapter's proxy before a call. After the call it looks for its `_LoraParameterProxy` only,
    though a single adapter has a proxy of another class, which would stay and be added again by each call.
    PEFT calls the module inside `parametrize.cached()`, where torch keeps what was read before the proxy.
    """

    def append(self, module: Any) -> Any:
        expected: Any = getattr(sys.modules[type(module).__module__], "_LoraParameterProxy", None)
        if expected is not None and not isinstance(module, expected):
            kind = type("FactorsProxy", (expected,), {"forward": lambda self, w: self.delta_weight(w)})
            module = kind(module)
        parametrize._cache.clear()
        return super().append(module)

    def forward(self) -> Tensor:
        if not torch.compiler.is_compiling():
            _check_reader()
        return super().forward()


def _check_reader() -> None:
    """Raise a ValueError where PEFT reads a stack to merge an adapter into it, also one that was added later."""
    frame: Any = sys._getframe(2)
    for _ in range(6):  # torch's calls of a module, and the property
        if frame is None:
            break
        if frame.f_code.co_name in ("merge", "unmerge") and frame.f_globals.get("__name__", "").startswith("peft."):
            refuse_to_merge()
        frame = frame.f_back


def refuse_to_merge(*_: Any, **__: Any) -> NoReturn:
    """Stand for `merge`, which would add to the dense weight that a read makes, and lose the adapter."""
    raise ValueError(
        "quantize_experts: adapters cannot be merged into experts in 4 bits: call fusion.remove() and "
        "tigon.dequantize_experts(model) first."
    )


def replace_stack(module: nn.Module, name: str, quantized: QuantizedExperts, dtype: torch.dtype) -> None:
    """Let 4-bit weights stand for a parameter with a dtype."""
    # A number of the dense dtype, which follows `.to(dtype)` and FSDP2's mixed precision: the dense weight has the
    # dtype that it would have. FSDP2 takes no scalars.
    carrier = torch.zeros(1, dtype=dtype, device=quantized.device)
    module._parameters[name] = nn.Parameter(carrier, requires_grad=False)
    parametrize.register_parametrization(module, name, quantized, unsafe=True)
    changes: Any = module.parametrizations
    changes[name].__class__ = StackParametrizations


def is_kept_in_mxfp4(module: Any) -> bool:
    """Whether a module holds gpt-oss's experts in the form that transformers' MXFP4 kernels read."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.integrations.mxfp4", "Mxfp4GptOssExperts")


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


def read_shape(module: nn.Module, name: str) -> tuple[int, ...]:
    """The shape of a stack in the module's layout, without dequantizing it."""
    quantized = find_quantized(module, name)
    if quantized is None:
        return tuple(getattr(module, name).shape)
    E, N, K = quantized.shape
    return (E, K, N) if quantized.by_columns else (E, N, K)


def list_quantized(module: nn.Module) -> dict[str, QuantizedExperts]:
    lists = module._modules.get("parametrizations")
    found = {k: find_quantized(module, k) for k in (lists._modules if isinstance(lists, nn.ModuleDict) else ())}
    return {k: q for k, q in found.items() if q is not None}


def view_as_dense(module: nn.Module) -> nn.Module:
    """The module with plain parameters, on the meta device, in place of its 4-bit weights: what a probe copies."""
    quantized = list_quantized(module)
    if not quantized:
        return module
    plain: nn.Module = object.__new__(find_class(module).__bases__[0])  # from which torch's parametrize has derived
    parameters, modules = dict(module._parameters), dict(module._modules)
    del modules["parametrizations"]
    for name in quantized:
        shape = read_shape(module, name)
        dtype = module.parametrizations[name].original.dtype  # type: ignore[index,union-attr]
        parameters[name] = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    vars(plain).update(vars(module), _parameters=parameters, _modules=modules)
    return plain
