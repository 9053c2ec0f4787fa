"""Numbers on a device, made once."""

from __future__ import annotations

import torch
from torch import Tensor

_made: dict[tuple[float | str, torch.dtype, torch.device], Tensor] = {}


def read_constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 0-d tensor that holds value. Shared: never to be written."""
    key = (value if value == value else "nan", dtype, device)
    number = _made.get(key)
    if number is None:
        with torch.inference_mode(False):  # autograd refuses tensors made in inference mode, also later
            number = torch.full((), value, dtype=dtype, device=device)
        # A number from a capture would hold its value only after the first replay, in the graph's own memory.
        if type(number) is Tensor and not (number.is_cuda and torch.cuda.is_current_stream_capturing()):
            _made[key] = number
    return number
