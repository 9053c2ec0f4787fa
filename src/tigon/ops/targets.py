"""Class indices from callers: validated, and converted to a dtype with correct comparisons."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from tigon.kernels import is_concrete

CHECKS = os.environ.get("TIGON_CHECKS", "0") == "1"


class TargetOutOfRange(ValueError, IndexError):
    """A class index outside the logits: an IndexError, as in torch's losses, and a ValueError, as in Tigon."""


def as_labels(target: Tensor, ignore_index: int) -> Tensor:
    """Return target in the operators' dtype: int64, or int32 if that can hold ignore_index.

    PyTorch compares a tensor with a number in the tensor's dtype. In uint8, 300 is 44 and −100 is class 156; in int32,
    2⁴⁰ is class 0.
    """
    if target.dtype == torch.int64 or (target.dtype == torch.int32 and -(2**31) <= ignore_index < 2**31):
        return target
    return target.long()


def checked_target(
    name: str, target: Tensor, shape: torch.Size, classes: int, ignore_index: int, device: torch.device
) -> Tensor:
    """Return target through `as_labels`. Raises: ValueError for an invalid target or a value that is no class."""
    if target.shape != shape:
        raise ValueError(
            f"{name}: target must have shape {tuple(shape)}, one class per row, got {tuple(target.shape)}."
        )
    if target.dtype.is_floating_point or target.dtype == torch.bool or target.dtype.is_complex:
        raise ValueError(f"{name}: target must hold integer class indices, got {target.dtype}.")
    if target.device != device:  # a kernel would read a host address
        raise ValueError(f"{name}: target must be on the logits' device {device}, got {target.device}.")
    target = as_labels(target, ignore_index)
    # Reading values stalls a GPU, so GPUs check only with TIGON_CHECKS=1; otherwise the kernels return NaN.
    if (CHECKS or target.device.type == "cpu") and is_concrete(target):
        wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
        if wrong.any():
            value = int(target[wrong].flatten()[0])
            raise TargetOutOfRange(
                f"{name}: target must lie in [0, {classes}) or be ignore_index={ignore_index}, got {value}."
            )
    return target
