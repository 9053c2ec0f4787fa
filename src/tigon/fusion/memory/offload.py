"""Saved activations in host memory: copied out during the forward pass, and back during the backward pass.

With gradient checkpointing the saved activations are the layers' inputs, each used once, in reverse order. So
handing out a tensor starts the copy for the tensor that was sent before it. The copies run on a separate stream,
from and to pinned memory.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from tigon.kernels.dispatch import stands_for_gpu
from tigon.kernels.graph_capture import is_captured

# A smaller tensor stays: launching the copy costs more than the memory is worth.
LEAST_BYTES = 2**20
# torch's names for the autograd nodes of views that keep the element order.
VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")


class Offload:
    """Sends one fused model's saved activations to host memory, in one trip for each forward pass."""

    def __init__(self) -> None:
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self._last: Trip | None = None

    @property
    def bytes(self) -> int:
        """How many bytes the last forward pass sent."""
        return 0 if self._last is None else self._last.bytes

    def begin(self) -> Trip:
        self._last = Trip(self.streams)
        return self._last


class Trip:
    """The tensors that one forward pass sent to host memory, in order."""

    def __init__(self, streams: dict[torch.device, torch.cuda.Stream]) -> None:
        self.bytes = 0
        self._streams = streams
        self._last: dict[torch.device, weakref.ref[Away]] = {}
        self._known: dict[Any, weakref.ref[Away]] = {}

    def send(self, t: Tensor) -> Away | None:
        """Start copying t to the host. None if t stays: parameters, small tensors, masks and angles (no gradient)."""
        if type(t) is not Tensor or t.layout is not torch.strided or t.is_leaf or is_weight(t):
            return None
        counted = stands_for_gpu(t)
        size = t.numel() * t.element_size()
        if size < LEAST_BYTES or not (counted or t.is_cuda):
            return None
        if not counted and is_captured(t):
            return None
        key = t.untyped_storage()._cdata, t._version, t.dtype, t.size(), t.stride(), t.storage_offset()
        known = self._known.get(key)
        away = None if known is None else known()
        if away is None or away.origin() is None:  # the first tensor is gone, and t may have reused the memory
            if counted:
                away = CountedAway(t, self._last.get(t.device))
            else:
                if t.device not in self._streams:
                    self._streams[t.device] = torch.cuda.Stream(t.device)
                away = Away(t, self._streams[t.device], self._last.get(t.device))
            self._known[key] = self._last[t.device] = weakref.ref(away)
            self.bytes += size
        away.wanted += 1
        return away


def is_weight(t: Tensor) -> bool:
    """Whether t is a parameter, a view of a parameter, or autocast's copy of a parameter.

    Such tensors are in device memory in the backward pass anyway, or are soon made again.
    """
    node = t.grad_fn
    while node is not None and node.name() in (*VIEWS, "TBackward0", "TransposeBackward0", "ToCopyBackward0"):
        node = node.next_functions[0][0]
    return isinstance(t._base, nn.Parameter) or (node is not None and node.name().endswith("AccumulateGrad"))


def check_unwritten(t: Tensor, version: int) -> None:
    """Raise torch's error for a saved tensor that was written into. torch skips this check under saved-tensor hooks."""
    if t._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{t.type()} {list(t.shape)}] is at version {t._version}; expected version {version} instead."
        )


class Away:
    """A tensor in host memory. before: the tensor sent just before, which backward wants just after."""

    def __init__(self, t: Tensor, stream: torch.cuda.Stream, before: weakref.ref[Away] | None) -> None:
        self.device, self.stream, self.before = t.device, stream, before
        self.origin, self.version = weakref.ref(t), t._version
        self.wanted = self.given = 0
        self.here: Any = None
        t = t.detach()
        self.host = torch.empty_like(t, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(t, non_blocking=True)
        t.record_stream(stream)  # the allocator may reuse t's memory only after the copy

    def fetch(self) -> Any:
        """The tensor on its device, and the event after which it is there; None where no copy is made."""
        if self.here is None:
            # The copy waits for the work queued on the current stream, which may still use the memory that `back` got.
            back = torch.empty_like(self.host, device=self.device)
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            back.record_stream(self.stream)  # if no node asks for `back`, the memory must outlive the copy
            with torch.cuda.stream(self.stream):
                back.copy_(self.host, non_blocking=True)
                self.here = back, self.stream.record_event()
        return self.here

    def tensor(self) -> Tensor:
        origin = self.origin()
        if origin is not None:
            check_unwritten(origin, self.version)
        back: Tensor
        back, arrived = self.fetch()
        self.given += 1
        if self.given % self.wanted == 0:
            self.here = None  # with retain_graph=True backward asks again, and the tensor is fetched again
        if arrived is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(arrived)
            back.record_stream(stream)  # a backward pass on another stream may have fetched the tensor
        before = self.before() if self.before is not None else None
        if before is not None and before.given == 0:
            before.fetch()
        return back


class CountedAway(Away):
    """A meta tensor that stands for a GPU tensor: no data is copied; fetching counts the memory again."""

    def __init__(self, t: Tensor, before: weakref.ref[Away] | None) -> None:
        self.before, self.origin, self.version = before, weakref.ref(t), t._version
        self.wanted = self.given = 0
        self.here: Any = None
        self.like = t.size(), t.stride(), t.dtype

    def fetch(self) -> Any:
        if self.here is None:
            size, stride, dtype = self.like
            self.here = torch.empty_strided(size, stride, dtype=dtype, device="meta"), None
        return self.here
