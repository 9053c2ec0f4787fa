"""A stand-in for the `kernels` package: its documented interface for layers, without the Hub and without devices.

Layers are marked by name, repositories name a layer in a directory of variants, a mapping says which repository serves
which name on which device in which mode, and kernelize() binds the layer's forward to each module of that name, after
the checks that `kernels` makes: no constructor, no members but two flags, a forward with parameters of the same kinds.

Source: kernels 0.17, https://huggingface.co/docs/kernels
"""

import contextlib
import contextvars
import importlib.util
import inspect
import json
import sys
import types
from dataclasses import dataclass
from enum import Flag, auto
from pathlib import Path
from typing import Any

from torch import nn

__version__ = "0.17.2"
_MAPPING: Any = contextvars.ContextVar("_MAPPING", default=types.MappingProxyType({}))
_LOADED: dict[Path, Any] = {}


class Mode(Flag):
    FALLBACK = auto()
    TRAINING = auto()
    INFERENCE = auto()
    TORCH_COMPILE = auto()


class KernelizeFallback(Flag):
    NONE = 0
    DEFAULT = auto()
    ALL = auto()


class CUDAProperties:
    def __init__(self, min_capability, max_capability):
        self.min_capability, self.max_capability = min_capability, max_capability


ROCMProperties = CUDAProperties


@dataclass(frozen=True)
class Device:
    type: str
    properties: Any = None


class LayerRepository:
    """A layer on the Hub."""

    def __init__(self, repo_id, *, layer_name, revision=None, version=None, trust_remote_code=False):
        self.repo_id, self.layer_name = repo_id, layer_name

    def load(self):
        raise FileNotFoundError(f"{self.repo_id} is on the Hub")


FuncRepository = LocalFuncRepository = LayerRepository


class LocalLayerRepository:
    def __init__(self, repo_path, *, layer_name):
        self.repo_path, self.layer_name = repo_path, layer_name

    def load(self):
        kernel = get_local_kernel(self.repo_path)
        layer = getattr(kernel.layers, self.layer_name, None)
        if layer is None:
            raise ValueError(f"Layer `{self.layer_name}` not found in {self.repo_path}.")
        return layer


def get_kernel(repo_id, **options):
    raise FileNotFoundError(f"{repo_id} is on the Hub")


def get_local_kernel(repo_path, *, backend="cpu"):
    variant = Path(repo_path) / f"torch-{backend}"
    if variant not in _LOADED:
        metadata = json.loads((variant / "metadata.json").read_text())
        missing = {"id", "name", "version", "license", "python-depends", "backend"} - metadata.keys()
        if missing:
            raise ValueError(f"Cannot parse metadata: missing {missing}")
        spec = importlib.util.spec_from_file_location(metadata["id"], variant / "__init__.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[metadata["id"]] = module
        spec.loader.exec_module(module)
        _LOADED[variant] = module
    return _LOADED[variant]


def replace_kernel_forward_from_hub(cls, layer_name, condition=None):
    cls.kernel_layer_name = layer_name
    cls.kernel_condition = staticmethod(condition or (lambda module: True))


def use_kernel_forward_from_hub(layer_name, condition=None):
    def decorator(target):
        if inspect.isclass(target):
            replace_kernel_forward_from_hub(target, layer_name, condition)
            return target

        class Func(nn.Module):  # a function becomes one module, which all that call it share
            def forward(self, *args, **kwargs):
                return target(*args, **kwargs)

        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        Func.forward.__signature__ = inspect.Signature([itself, *inspect.signature(target).parameters.values()])
        replace_kernel_forward_from_hub(Func, layer_name, condition)
        return Func()

    return decorator


use_kernel_func_from_hub = use_kernel_forward_from_hub


def use_kernelized_func(*functions):
    def decorator(cls):
        plain = cls.__init__

        def init(self, *args, **kwargs):
            plain(self, *args, **kwargs)
            held = vars(self).setdefault("_kernel_funcs", {})
            held.update({type(fn).kernel_layer_name: fn for fn in functions})

        cls.__init__ = init
        return cls

    return decorator


def register_kernel_mapping(mapping, inherit_mapping=True):
    merged = {k: dict(v) for k, v in _MAPPING.get().items()} if inherit_mapping else {}
    for name, devices in mapping.items():
        for device, repo in devices.items():
            device = device if isinstance(device, str) else device.type
            merged.setdefault(name, {})[device] = repo if isinstance(repo, dict) else {Mode.FALLBACK: repo}
    _MAPPING.set(merged)


@contextlib.contextmanager
def use_kernel_mapping(mapping, *, inherit_mapping=True):
    token = _MAPPING.set(_MAPPING.get())
    try:
        register_kernel_mapping(mapping, inherit_mapping)
        yield
    finally:
        _MAPPING.reset(token)


def kernelize(model, *, mode, device=None, use_fallback=True):
    device = device or next(model.parameters()).device.type
    device = device if isinstance(device, str) else device.type
    for module in model.modules():
        for layer in (*vars(module).get("_kernel_funcs", {}).values(), module):
            cls = type(layer)
            if hasattr(cls, "kernel_layer_name") and cls.kernel_condition(layer):
                _kernelize(layer, _MAPPING.get().get(cls.kernel_layer_name, {}).get(device, {}), mode)
    return model


def _kernelize(module, repos, mode):
    modes = [mode, mode | Mode.TORCH_COMPILE]
    if Mode.INFERENCE in mode:  # what serves in training serves without a gradient too; not the other way round
        modes += [Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE]
    repo = next((repos[m] for m in (*modes, Mode.FALLBACK) if m in repos), None)
    layer = type(module)
    if repo is not None:
        layer = repo.load()
        _validate(layer, type(module))
        if Mode.TRAINING in mode and not getattr(layer, "has_backward", True):
            layer = type(module)
        if Mode.TORCH_COMPILE in mode and not getattr(layer, "can_torch_compile", False):
            layer = type(module)
    module.forward = types.MethodType(layer.forward, module)


def _validate(layer, replaced):
    if not issubclass(layer, nn.Module) or layer.__init__ is not nn.Module.__init__:
        raise TypeError(f"{layer.__name__} must not override nn.Module constructor.")
    if not set(dir(layer)) - set(dir(nn.Module)) <= {"can_torch_compile", "has_backward"}:
        raise TypeError(f"{layer.__name__} must not contain additional members.")
    ours, theirs = (list(inspect.signature(c.forward).parameters.values()) for c in (layer, replaced))
    if [p.kind for p in ours] != [p.kind for p in theirs]:
        raise TypeError(f"Forward signature of {layer.__name__} does not match {replaced.__name__}.")
