"""Documents that lie behind one another in a row, given by their offsets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import is_concrete
from tigon.ops.targets import CHECKS


def check_offsets(name: str, offsets: Any, x: Tensor, count: int, what: str) -> None:
    """Raise a ValueError unless offsets are (B + 1,) int32 or int64 on x's device, ascending from 0 to count.

    what: the name of count in the sentence, such as "the rows of q". Values are read on the CPU or with
    TIGON_CHECKS=1 only: reading stalls a GPU.
    """
    if not isinstance(offsets, Tensor):
        raise ValueError(
            f"{name}: offsets must be a tensor on {x.device}, made once a batch, got "
            f"{type(offsets).__name__}: a copy from the host in each layer would stall the GPU."
        )
    if offsets.dim() != 1 or offsets.shape[0] < 2 or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name}: offsets must be (B + 1,) int32 or int64, the start of each document and N, got "
            f"{tuple(offsets.shape)} {offsets.dtype}."
        )
    if offsets.device != x.device:
        raise ValueError(
            f"{name}: offsets must be on {what.rpartition(' ')[2]}'s device {x.device}, got {offsets.device}."
        )
    if (CHECKS or x.device.type == "cpu") and is_concrete(offsets):
        ends = int(offsets[0]), int(offsets[-1])
        if ends != (0, count) or bool((offsets.diff() < 0).any()):
            raise ValueError(f"{name}: offsets must ascend from 0 to {what}, {count}, got {offsets.tolist()[:8]}.")


def find_documents(offsets: Tensor, count: int) -> Tensor:
    """The document of each of count tokens, (count,) int32; the number of documents for a token behind the last."""
    token = torch.arange(count, dtype=offsets.dtype, device=offsets.device)
    # The number of documents that end at or before a token: empty documents are passed over.
    return torch.searchsorted(offsets[1:].contiguous(), token, right=True, out_int32=True)
