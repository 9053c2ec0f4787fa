"""Whether a CUDA graph is being captured, or a call rehearses a capture: the code must not depend on values then.

A capture cannot read a value on the device, so its code visits every row and keeps nothing for later calls. The calls
before a capture compile and load the same kernels, so they have to take the same paths: they are rehearsals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.kernels.dispatch import Mode


class rehearsal(Mode):
    """Inside a `with` block tensors on a GPU are treated as in a capture, in every thread of the process."""


def is_captured(t: Tensor) -> bool:
    """Whether operations on t become part of a CUDA graph now, or rehearse one."""
    return t.is_cuda and (rehearsal.active or torch.cuda.is_current_stream_capturing())
