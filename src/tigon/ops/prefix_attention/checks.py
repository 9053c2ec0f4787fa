"""What attention operators share before their launches: checks, and the dtype under autocast."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tigon.kernels import autocast_device, autocast_dtype, check_tensors

# Largest head dimension that fits the kernels' tiles.
WIDEST = 256


def check_attention(
    name: str, q: Tensor, k: Tensor, v: Tensor, scale: float | None, softcap: float | None, window: int | None
) -> None:  # fmt: skip
    """Raise a ValueError unless q is (N, H, D), k and v are (N, G, D) beside q, and the options are valid."""
    check_tensors(name, q=q, k=k, v=v)
    for argument, t in (("q", q), ("k", k), ("v", v)):
        if hasattr(t, "device_mesh"):
            raise ValueError(
                f"{name}: {argument} must be a plain tensor, got a DTensor: pass to_local(), with the local rows' "
                "layout or offsets."
            )
    if q.dim() != 3 or not q.dtype.is_floating_point:
        raise ValueError(f"{name}: q must be (N, H, D) floats, got {tuple(q.shape)} {q.dtype}.")
    N, H, D = q.shape
    if not 1 <= D <= WIDEST:
        raise ValueError(f"{name}: q must have heads of 1 to {WIDEST} numbers, got {D}.")
    if k.dim() != 3 or k.shape[0] != N or k.shape[2] != D or k.shape[1] < 1 or H % k.shape[1] or H < 1:
        raise ValueError(
            f"{name}: k must be (N, G, D) beside q {tuple(q.shape)}, H a multiple of G, got {tuple(k.shape)}."
        )
    if v.shape != k.shape:
        raise ValueError(f"{name}: v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}.")
    for argument, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype or t.device != q.device:
            raise ValueError(
                f"{name}: {argument} must be {q.dtype} on {q.device}, as q is, got {t.dtype} on {t.device}."
            )
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"{name}: scale must be positive, got {scale}.")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"{name}: softcap must be positive or None, got {softcap}.")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"{name}: window must be a positive int or None, got {window}.")


def attend_in_autocast(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    """attend(q, k, v, *options), with q, k and v in autocast's dtype where autocast is on, but for fp64."""
    dtype = autocast_dtype(q.device.type)
    if dtype is None or q.dtype == torch.float64:
        return attend(q, k, v, *options)
    with torch.autocast(autocast_device(q.device.type), enabled=False):
        return attend(q.to(dtype), k.to(dtype), v.to(dtype), *options)
