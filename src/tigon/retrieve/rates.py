"""What a GPU does in a second, measured once: how long a search takes at least follows from its bytes and products."""

from __future__ import annotations

import itertools
import statistics
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# Bytes that are copied, far more than a cache holds, and the width of the matrices; with little memory free, no rate.
COPIED, WIDTH = 1 << 28, 4096


class Rates(NamedTuple):
    """copy: bytes a second that a large copy reads and writes. product: operations a second of a large bf16 product."""

    copy: float
    product: float

    def ms(self, size: int, flop: int) -> float:
        """How long bytes or operations take, whichever take longer."""
        return 1e3 * max(size / self.copy, flop / self.product)


_measured: dict[torch.device, Rates] = {}
_measuring = threading.Lock()


def rates_of(device: torch.device) -> Rates | None:
    """Of a GPU, measured at the first call in some 20 ms; None for a CPU, and where too little memory is free."""
    if device.type != "cuda":
        return None
    with _measuring:
        if device not in _measured:
            if torch.cuda.mem_get_info(device)[0] < 4 * COPIED:
                return None
            _measured[device] = _measure(device)
        return _measured[device]


def _measure(device: torch.device) -> Rates:
    with torch.cuda.device(device):
        source, target = torch.empty(2, COPIED, dtype=torch.uint8, device=device)
        copy = _seconds(lambda: target.copy_(source))
        a, b = torch.randn(2, WIDTH, WIDTH, dtype=torch.bfloat16, device=device)
        product = _seconds(lambda: a @ b)
    return Rates(2 * COPIED / copy, 2 * WIDTH**3 / product)


def _seconds(call: Callable[[], Any]) -> float:
    """The median of some calls, after others that bring the clock up."""
    for _ in range(5):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
    for mark in marks:
        mark.record()
        call()
    torch.cuda.synchronize()
    taken: list[float] = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return statistics.median(taken) / 1e3
