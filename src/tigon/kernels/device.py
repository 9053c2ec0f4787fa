"""Device properties that launches depend on."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tigon.kernels.language import TensorDescriptor


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The device's streaming multiprocessors (compute units); persistent grids are sized by this count."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 2 if device.type == "cpu" else 132  # cpu: the interpreter runs programs sequentially


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Shared memory per program in bytes; bounds the tiles in flight."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 65536))
    return 232448  # Hopper's


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device is Hopper (H100 family), for options tested on Hopper only."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[:1] == (9,)


@functools.cache
def has_copy_engine(device: torch.device) -> bool:
    """Whether the device can copy tiles into shared memory asynchronously: NVIDIA GPUs from Hopper on."""
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    return True


@functools.cache
def limits_registers(device: torch.device) -> bool:
    """Whether Triton's compiler for the device accepts a register limit: NVIDIA's does."""
    return device.type != "cuda" or torch.version.hip is None


def register_limit(device: torch.device, count: int) -> dict[str, int]:
    """Triton's option that limits registers per thread, so that more programs fit on a multiprocessor."""
    return {"maxnreg": count} if limits_registers(device) else {}


def can_describe(*tensors: Tensor) -> bool:
    """Whether tensors can be passed to a kernel as descriptors, so that the copy engine loads tiles."""
    return (
        TensorDescriptor is not None
        and has_copy_engine(tensors[0].device)
        and all(
            t.stride(-1) == 1
            and t.numel() > 0
            and t.data_ptr() % 16 == 0
            and all(stride > 0 and stride * t.element_size() % 16 == 0 for stride in t.stride()[:-1])
            for t in tensors
        )
    )


def describe(t: Tensor, block: tuple[int, ...]) -> Any:
    """Return a descriptor for a tensor that `can_describe` accepts, with tile shape `block`."""
    return TensorDescriptor(t, list(t.shape), list(t.stride()), list(block))
