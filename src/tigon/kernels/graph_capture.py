"""Whether a CUDA graph is being captured, or a capture is being rehearsed: code must not depend on values then.

A capture cannot read device values, so captured code visits every row and caches nothing for later calls. Warm-up calls
before a capture compile and load the same kernels, so they must take the same paths: they are rehearsals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.kernels.dispatch import Mode


class rehearsal(Mode):
    """Inside a `with` block GPU tensors are treated as in a capture, in every thread of the process."""


def is_captured(t: Tensor) -> bool:
    """Whether operations on t are being captured into a CUDA graph, or rehearsed."""
    return t.is_cuda and (rehearsal.active or torch.cuda.is_current_stream_capturing())
