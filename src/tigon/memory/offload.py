"""Saved activations in host memory: copied out while the forward pass goes on, and back while the backward pass does.

With gradient checkpointing what is saved is the input of each layer, used once, in reverse order: each is sent for
when the one after it is handed out. The copies run on a stream of their own, from and to pinned memory.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from tigon.runtime.dispatch import stands_for_gpu

# Below, a copy's launch costs more than the memory is worth.
LEAST_BYTES = 2**20
# Nodes of views that keep the order of the elements, by the names that torch gives them.
VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")


class Offload:
    """What a fused model sends to host memory, one trip for each forward pass."""

    def __init__(self) -> None:
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self._last: Trip | None = None

    @property
    def bytes(self) -> int:
        """What the last forward pass has sent."""
        return 0 if self._last is None else self._last.bytes

    def begin(self) -> Trip:
        self._last = Trip(self.streams)
        return self._last


class Trip:
    """What one forward pass has sent away, in order."""

    def __init__(self, streams: dict[torch.device, torch.cuda.Stream]) -> None:
        self.bytes = 0
        self._streams = streams
        self._last: dict[torch.device, weakref.ref[Away]] = {}
        self._known: dict[Any, weakref.ref[Away]] = {}

    def send(self, t: Tensor) -> Away | None:
        """Start copying t out; None for what stays: parameters, what has no gradient (masks, angles), what is small."""
        if type(t) is not Tensor or t.layout is not torch.strided or t.is_leaf or is_weight(t):
            return None
        counted = stands_for_gpu(t)
        size = t.numel() * t.element_size()
        if size < LEAST_BYTES or not (counted or t.is_cuda):
            return None
        if not counted and torch.cuda.is_current_stream_capturing():
            return None
        key = t.untyped_storage()._cdata, t._version, t.dtype, t.size(), t.stride(), t.storage_offset()
        known = self._known.get(key)
        away = None if known is None else known()
        if away is None or away.origin() is None:  # its memory may be another tensor's by now
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
    """A parameter, a view of one, or what autocast makes of it: all there again in the backward pass, or soon."""
    node = t.grad_fn
    while node is not None and node.name() in (*VIEWS, "TBackward0", "TransposeBackward0", "ToCopyBackward0"):
        node = node.next_functions[0][0]
    return isinstance(t._base, nn.Parameter) or (node is not None and node.name().endswith("AccumulateGrad"))


def check_unwritten(t: Tensor, version: int) -> None:
    """torch does not look at the versions of what it saved where there are hooks: its own error, for them."""
    if t._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{t.type()} {list(t.shape)}] is at version {t._version}; expected version {version} instead."
        )


class Away:
    """A tensor in host memory. before: the one that was sent before it, and will be wanted after it."""

    def __init__(self, t: Tensor, stream: torch.cuda.Stream, before: weakref.ref[Away] | None) -> None:
        self.device, self.stream, self.before = t.device, stream, before
        self.origin, self.version = weakref.ref(t), t._version
        self.wanted = self.given = 0
        self.here: tuple[Tensor, torch.cuda.Event] | None = None
        t = t.detach()
        self.host = torch.empty_like(t, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(t, non_blocking=True)
        t.record_stream(stream)  # its memory is free for others when the copy is done, not before

    def fetch(self) -> tuple[Tensor, torch.cuda.Event]:
        if self.here is None:
            # The copy waits for what the stream at hand was given so far: the memory may have been another tensor's.
            back = torch.empty_like(self.host, device=self.device)
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            back.record_stream(self.stream)  # nobody may ask for it: the copy must not end in another tensor's memory
            with torch.cuda.stream(self.stream):
                back.copy_(self.host, non_blocking=True)
                self.here = back, self.stream.record_event()
        return self.here

    def tensor(self) -> Tensor:
        origin = self.origin()
        if origin is not None:
            check_unwritten(origin, self.version)
        back, arrived = self.fetch()
        self.given += 1
        if self.given % self.wanted == 0:
            self.here = None  # a graph that is kept is walked again, and sends for it again
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(arrived)
        back.record_stream(stream)  # it may have been fetched by a pass on another one
        before = self.before() if self.before is not None else None
        if before is not None and before.given == 0:
            before.fetch()
        return back


class CountedAway(Away):
    """A meta tensor that stands for a GPU's: nothing to copy, and memory again from when it would be fetched."""

    def __init__(self, t: Tensor, before: weakref.ref[Away] | None) -> None:
        self.before, self.origin, self.version = before, weakref.ref(t), t._version
        self.wanted = self.given = 0
        self.here: Any = None
        self.like = t.size(), t.stride(), t.dtype

    def fetch(self) -> Any:
        if self.here is None:
            size, stride, dtype = self.like
            self.here = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return self.here

    def tensor(self) -> Tensor:
        back: Tensor = self.fetch()
        self.given += 1
        if self.given % self.wanted == 0:
            self.here = None
        before = self.before() if self.before is not None else None
        if before is not None and before.given == 0:
            before.fetch()
        return back
