"""Autocast: which dtype it casts to, and entering it as it stood at another time."""

from __future__ import annotations

from typing import Any

import torch


class autocast_as:
    """Autocast as it stood when the head ran; enters nothing where it stands so already."""

    def __init__(self, device: str, dtype: torch.dtype | None) -> None:
        self.context = None
        if autocast_dtype(device) != dtype:
            self.context = torch.autocast(device, dtype=dtype, enabled=dtype is not None)

    def __enter__(self) -> None:
        if self.context is not None:
            self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.context is not None:
            self.context.__exit__(*error)


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype that autocast casts to on this type of device; None where it is off, and on meta, which has none."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
