"""Autocast: the dtype it casts to, and restoring an earlier autocast state."""

from __future__ import annotations

from typing import Any

import torch

from tigon.kernels.dispatch import meta_as_gpu


class autocast_as:
    """Autocast with the dtype that was active when the head ran; no-op if that dtype is active now."""

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
    """Return autocast's dtype on this device type; None where autocast is off.

    The meta device has no autocast, except inside `meta_as_gpu`, where the CPU's setting applies.
    """
    if device == "meta":
        if not meta_as_gpu.active:
            return None
        device = autocast_device(device)
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def autocast_device(device: str) -> str:
    """The device type to pass to torch.autocast. The meta device has no autocast and uses the CPU's."""
    return "cpu" if device == "meta" else device
