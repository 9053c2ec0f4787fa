"""Tigon's layers for Hugging Face `kernels`: kernelize(), and transformers' model.set_use_kernels(), without the Hub.

This directory is laid out as a `kernels` repository, with a variant per backend beside the code (layers.py). `kernels`
loads the repository from the installed Tigon, and fetches nothing.

`kernels` swaps layers by a name that their classes carry, and several formulas share one name: "RMSNorm" is Llama's
formula in 129 transformers classes. In 13 others the formula is OLMo's and Nemotron's, which round elsewhere. So Tigon
chooses the layer for a name per model, by the numbers that the model's modules compute.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from tigon.fusion.engine.probe import compute_signature
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.parts.mlp_formula import Gated, recognize_mlp
from tigon.fusion.parts.norm import recognize_norm
from tigon.fusion.parts.norm_formula import Gate, Norm
from tigon.fusion.parts.rotary_formula import Rotary, Turn, recognize_rotary
from tigon.install import install
from tigon.integrations.hub.layers import LAYERS, NORMS, ROTARY

REPOSITORY = Path(__file__).parent


def layers_for(model: nn.Module, *, rotary: bool = False) -> dict[str, str]:
    """Choose this repository's replacement for each layer name that `kernels` knows in a model.

    Args:
        model: any module, with classes marked by `use_kernel_forward_from_hub`; transformers marks classes if
            `kernels` was installed before transformers was imported.
        rotary: also rotary functions. `kernels` holds these once for all models in a family: they are then replaced in
            all of them, permanently.
    Returns: {"RMSNorm": "RMSNorm", …}; without names whose formula Tigon has no layer for. A name with two formulas in
        one model is left out, with a warning.
    Raises: TypeError if model is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"layers_for: model must be a torch.nn.Module, got {type(model).__name__}.")
    known: dict[Any, str | None] = {}
    found: dict[str, set[str | None]] = {}
    for module in model.modules():
        name = getattr(type(module), "kernel_layer_name", None)
        if name is not None:
            key = compute_signature(module)
            if key not in known:
                known[key] = _layer_for(module)
            found.setdefault(str(name), set()).add(known[key])
        for function in _functions(module) if rotary else ():
            if id(function) not in known:
                known[id(function)] = _rotary_for(function)
            found.setdefault(type(function).kernel_layer_name, set()).add(known[id(function)])
    for name, layers in found.items():
        if len(layers) > 1:
            warnings.warn(
                f"tigon: the layers called {name!r} in {type(model).__name__} compute different functions, but "
                "kernels has a single layer for all: these layers stay unchanged.",
                stacklevel=2,
            )
    return {name: layer for name, layers in found.items() if len(layers) == 1 and (layer := next(iter(layers)))}


def mapping(model: nn.Module, *, rotary: bool = False) -> dict[str, dict[str, Any]]:
    """The argument for `kernels.use_kernel_mapping`, for a model.

    Args: as in `layers_for`. Returns: {name: {device type: repository}}, for the model's device, in training, inference
        and under torch.compile.
    Raises: ImportError without `kernels`; ValueError for a model without replaceable layers.

    ::

        with kernels.use_kernel_mapping(hub.mapping(model), inherit_mapping=False):
            kernels.kernelize(model, mode=kernels.Mode.TRAINING)
    """
    try:
        from kernels import LocalLayerRepository
    except ImportError as error:
        raise ImportError(f"tigon.integrations.hub needs kernels, pip install kernels: {error}.") from None
    device = _device(model)
    layers = _some_layers("mapping", model, rotary)
    return {
        name: {device: LocalLayerRepository(repo_path=REPOSITORY, layer_name=layer)} for name, layer in layers.items()
    }


def kernel_config(model: nn.Module, *, rotary: bool = False) -> Any:
    """The argument for transformers' `model.set_use_kernels(True, kernel_config=…)`, for a model on a GPU.

    Args: as in `layers_for`. Returns: a transformers.KernelConfig.
    Raises: ImportError without transformers; ValueError for a model without layers that `kernels` could replace.

    transformers registers the layers for the model's mode at that call. Layers registered in training mode also work in
    evaluation, but not the other way round: call model.train() first.
    """
    try:
        from transformers import KernelConfig
    except ImportError as error:
        raise ImportError(f"kernel_config needs transformers, {install('hf')}: {error}.") from None
    layers = _some_layers("kernel_config", model, rotary)
    return KernelConfig({name: f"{REPOSITORY}:{layer}" for name, layer in layers.items()}, use_local_kernel=True)


def _some_layers(caller: str, model: nn.Module, rotary: bool) -> dict[str, str]:
    layers = layers_for(model, rotary=rotary)
    if not layers:
        raise ValueError(
            f"{caller}: model must have layers that kernels can exchange and Tigon has, got none in "
            f"{type(model).__name__}; transformers marks its layers only if a supported version of kernels is "
            "installed before its import. tigon.fuse(model) needs neither."
        )
    return layers


def _layer_for(module: nn.Module) -> str | None:
    norm = recognize_norm(module)
    if isinstance(norm, Norm):
        eps = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"  # as layers.py reads it
        if norm.centered or norm.weight != "weight" or norm.eps != eps or norm.native:
            return None
        if norm.group_size is not None or norm.gate not in (None, Gate()):
            return None
        return NORMS.get((norm.offset, norm.cast, norm.gate is not None))
    mlp = recognize_mlp(module) if norm is None or isinstance(norm, Reason) else None
    if isinstance(mlp, Gated):
        plain = Gated("gate_proj", "up_proj", "down_proj", mlp.act, mlp.act_module)
        return LAYERS[mlp.act][0] if mlp == plain else None
    return None


def _functions(module: nn.Module) -> Iterator[Any]:
    yield from vars(module).get("_kernel_funcs", {}).values()


def _rotary_for(function: Any) -> str | None:
    # The class's forward: the instance may have another forward by now.
    found = recognize_rotary(functools.partial(type(function).forward, function))
    if not isinstance(found, Rotary) or found.turn != Turn() or found.names != ("q", "k", "cos", "sin"):
        return None
    return ROTARY[found.keeps] if found.full and found.unsqueeze and found.default == 1 else None


def _device(model: nn.Module) -> str:
    import torch

    parameter = next(model.parameters(), None)
    device = "cpu" if parameter is None else parameter.device.type
    return "rocm" if device == "cuda" and torch.version.hip is not None else device
