"""Saved activations in host memory: copied out while the forward pass goes on, and back while the backward pass does.

With gradient checkpointing what is saved is the input of each layer, used once, in reverse order: each is sent for
when the one after it is handed out. The copies run on a stream of their own, from and to pinned memory.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

# Below, a copy's launch costs more than the memory is worth.
LEAST_BYTES = 2**20


class Offload:
    """What one forward pass has sent away, in order."""

    def __init__(self) -> None:
        self.bytes = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._sent: list[weakref.ref[Away]] = []

    def begin(self) -> None:
        self.bytes = 0
        self._sent = [r for r in self._sent if r() is not None]

    def send(self, t: Tensor) -> Away | None:
        """Start copying t out; None for what stays: parameters, what has no gradient (masks, angles), what is small."""
        base = t._base
        if not t.is_cuda or t.is_leaf or isinstance(base, nn.Parameter) or t.untyped_storage().nbytes() < LEAST_BYTES:
            return None
        if t.numel() * t.element_size() < LEAST_BYTES or torch.cuda.is_current_stream_capturing():
            return None
        stream = self._streams.setdefault(t.device, torch.cuda.Stream(t.device))
        away = Away(t.detach(), stream, self._sent[-1] if self._sent else None)
        self._sent.append(weakref.ref(away))
        self.bytes += t.numel() * t.element_size()
        return away


class Away:
    """A tensor in host memory. before: the one that was sent before it, and will be wanted after it."""

    def __init__(self, t: Tensor, stream: torch.cuda.Stream, before: weakref.ref[Away] | None) -> None:
        self.device, self.stream, self.before = t.device, stream, before
        self.here: tuple[Tensor, torch.cuda.Event] | None = None
        self.host = torch.empty_like(t, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(t, non_blocking=True)
        t.record_stream(stream)  # its memory is free for others when the copy is done, not before

    def fetch(self) -> None:
        if self.here is None:
            # Made on the stream that will use it. The copy waits for what that stream has been given so far: the memory
            # may have been another tensor's.
            back = torch.empty_like(self.host, device=self.device)
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            back.record_stream(self.stream)  # nobody may ask for it: the copy must not end in another tensor's memory
            with torch.cuda.stream(self.stream):
                back.copy_(self.host, non_blocking=True)
                self.here = back, self.stream.record_event()

    def tensor(self) -> Tensor:
        self.fetch()
        assert self.here is not None
        back, arrived = self.here
        self.here = None  # a graph that is kept is walked again, and sends for it again
        torch.cuda.current_stream(self.device).wait_event(arrived)
        before = self.before() if self.before is not None else None
        if before is not None:
            before.fetch()
        return back
