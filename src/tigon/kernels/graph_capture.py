"""Whether a CUDA graph is being captured, or a capture is being rehearsed: code must not depend on values then.

A capture cannot read device values, so captured code visits every row and caches nothing beyond the capture. Warm-up
calls before a capture compile and load the same kernels, so they must take the same paths: they are rehearsals.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from tigon.kernels.dispatch import Mode


class rehearsal(Mode):
    """Inside a `with` block GPU tensors are treated as in a capture, in every thread of the process."""


def is_captured(t: Tensor) -> bool:
    """Whether operations on t are being captured into a CUDA graph, or rehearsed."""
    return t.is_cuda and (rehearsal.active or torch.cuda.is_current_stream_capturing())


def find_capture(t: Tensor) -> int | None:
    """Return the running capture's number, which no other capture of the process has.

    Returns: 0 if operations on t are not being captured, None if the number cannot be known.
    """
    if not t.is_cuda or not torch.cuda.is_current_stream_capturing():
        return 0
    runtime = _load_runtime()
    if runtime is None:
        return None
    error, _, number, *_ = runtime.cudaStreamGetCaptureInfo(torch._C._cuda_getCurrentRawStream(t.get_device()))
    return None if int(error) else int(number)


@functools.cache
def _load_runtime() -> Any:
    """Load the CUDA runtime's functions, from a package that torch's CUDA wheels bring along."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return None
