"""Documents that lie behind one another in a row, given by their offsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tigon.kernels import find_capture, is_concrete, is_traced
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


def check_documents(
    name: str, argument: str, x: Tensor, offsets: Any, initial_state: Tensor | None, state: tuple[int, ...]
) -> None:
    """Raise a ValueError unless offsets, if any, describe documents in the only row of x, which is (batch, T, …).

    argument: x's name. state: the shape of one state; initial_state, if any, has one for each document or sequence.
    """
    documents, tokens = x.shape[:2]
    if offsets is not None:
        if documents != 1:
            raise ValueError(
                f"{name}: {argument} must have a batch of 1 beside offsets, all documents in a row, got "
                f"{tuple(x.shape)}."
            )
        check_offsets(name, offsets, x, tokens, f"the tokens of {argument}")
        documents = offsets.shape[0] - 1
    if initial_state is not None and initial_state.shape != (documents, *state):
        raise ValueError(
            f"{name}: initial_state must be {(documents, *state)}, a state of each sequence or document, got "
            f"{tuple(initial_state.shape)}."
        )


# By offsets: (address, version, stream, capture), and the tables by their keys. A model's layers share them.
_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def share_table(offsets: Tensor, key: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
    """Return make(), a table on the device that depends on offsets and key alone.

    Tables are made once for offsets whose values do not change, and once more in each CUDA graph: tables from before a
    capture would hold the documents of then, and later calls would find tables that a replay overwrites. Outside a
    graph nothing is kept for offsets that a graph has used, since a replay may write them without a new version. A
    compiler merges equal calls in its graph.
    """
    if is_traced(offsets) or offsets.is_inference() or (capture := find_capture(offsets)) is None:
        return make()
    stream = torch._C._cuda_getCurrentRawStream(offsets.get_device()) if offsets.is_cuda else 0
    state = offsets.data_ptr(), offsets._version, stream, capture
    known, tables = _made.get(offsets, (None, {}))
    if known is not None and known[3] and not capture:
        return make()
    if known != state:
        tables = {}
        _made[offsets] = state, tables
    if key not in tables:
        tables[key] = make()
    found: Tensor = tables[key]
    return found


def find_documents(offsets: Tensor, count: int) -> Tensor:
    """The document of each of count tokens, (count,) int32; the number of documents for a token behind the last."""

    def make() -> Tensor:
        token = torch.arange(count, dtype=offsets.dtype, device=offsets.device)
        # The number of documents that end at or before a token: empty documents are passed over. The first offset is
        # counted too, since Inductor of torch 2.11 cannot search in a slice.
        ends = torch.searchsorted(offsets.contiguous(), token, right=True, out_int32=True)
        return (ends - 1).clamp(min=0)

    return share_table(offsets, ("documents", count), make)
