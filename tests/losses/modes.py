"""Dispatch modes that watch a loss: what it calls, how much it multiplies, and whether the host waits."""

import math

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim", "lift_fresh")


class Watch(TorchDispatchMode):
    """calls: operators. names: theirs. products: multiplications in matrix products, rows: rows of their first factors.

    largest: elements of the largest float tensor that is made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.products = self.rows = self.largest = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.calls += 1
        self.names.add(name)
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor) and t.is_floating_point():
                self.largest = max(self.largest, t.numel())
        if name in ("mm", "addmm", "addmm_"):
            first, second = [t for t in args if isinstance(t, Tensor)][-2:]  # an out_dtype may follow
            self.products += math.prod(first.shape) * second.shape[1]
            self.rows += first.shape[0]
        return out


class NothingWaits(TorchDispatchMode):
    """Refuses what reads a number of the device, copies numbers of the host, or has a shape that depends on one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in WAITS, name
        assert name != "index" or not any(t is not None and t.dtype.itemsize == 1 for t in args[1])
        return func(*args, **(kwargs or {}))
