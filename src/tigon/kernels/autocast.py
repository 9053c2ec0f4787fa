"""Autocast: the dtype of its casts, and autocast as at another time."""

from __future__ import annotations

from typing import Any

import torch

from tigon.kernels.dispatch import meta_as_gpu


class autocast_as:
    """Autocast with the dtype it had when the head ran; does nothing if autocast has that dtype now."""

    def __init__(self, device: str, dtype: torch.dtype | None) -> None:
        self.context = None
        if autocast_dtype(device) != dtype:
            self.context = torch.autocast(autocast_device(device), dtype=dtype, enabled=dtype is not None)

    def __enter__(self) -> None:
        if self.context is not None:
            self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.context is not None:
            self.context.__exit__(*error)


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype that autocast casts to on this type of device; None where it is off.

    The meta device has no autocast, except inside `meta_as_gpu`: there the CPU's holds.
    """
    if device == "meta":
        if not meta_as_gpu.active:
            return None
        device = autocast_device(device)
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def autocast_device(device: str) -> str:
    """The device type to pass to torch.autocast: the meta device has no autocast, and uses the CPU's."""
    return "cpu" if device == "meta" else device
