"""Launching a Triton kernel; from the second time on without Triton's dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tigon.runtime.dispatch import stands_for_gpu
from tigon.runtime.language import triton

# Grid, arguments after the tensors, Triton's options.
Plan = tuple[int, tuple[Any, ...], dict[str, Any]]

# (kernel, device, key) → (compiled kernel's launcher, its function, its metadata, grid, arguments after the tensors).
_plans: dict[tuple[Any, ...], tuple[Any, Any, Any, int, tuple[Any, ...]]] = {}
_PLANS_KEPT = 4096


def launch(kernel: Any, key: tuple[Any, ...], tensors: tuple[Any, ...], plan: Callable[[], Plan]) -> None:
    """Launch a Triton kernel on the current device; from the second time on without Triton's dispatch.

    Args:
        kernel: the jitted function; its first arguments are `tensors`.
        key: everything but the tensors' addresses on which the launch depends: shapes, strides, dtypes, options. If the
            key omits something the plan depends on, the next call reuses the wrong kernel.
        tensors: tensors, None, or from the second on descriptors of `describe`.
        plan: () → grid, arguments after the tensors, Triton's options; called once a key.

    Triton looks at every argument of every launch to find the compiled kernel: 13 µs for a small kernel on a slow host,
    30 µs for a long signature. The key finds the kernel at once. Kernels are compiled for addresses that 16 divides;
    other addresses go through Triton's dispatch, as do the interpreter and launches under a profiler's hooks.
    Addresses are passed as numbers: for a tensor Triton asks the driver whether the GPU can see it.
    """
    pointers = []
    address = 0
    for t in tensors:
        if isinstance(t, Tensor):
            t = t.data_ptr()
            # The lowest four bits of all addresses together: 0 if 16 divides each of them.
            address |= t
        pointers.append(t)
    device = tensors[0].get_device()
    key = (kernel, device, key)
    found = _plans.get(key)
    if found is None or address & 15 or _hooked():
        if stands_for_gpu(tensors[0]):
            return
        grid, arguments, options = plan()
        compiled = kernel[(grid,)](*tensors, *arguments, **options)
        if compiled is not None and not address & 15:
            # A bound, since every new shape is a new key: sequences of ever-changing lengths would fill memory.
            if len(_plans) >= _PLANS_KEPT:
                _plans.clear()
            _plans[key] = compiled.run, compiled.function, compiled.packed_metadata, grid, arguments
        return
    run, function, metadata, grid, arguments = found
    stream = torch._C._cuda_getCurrentRawStream(device)
    run(grid, 1, 1, stream, function, metadata, None, None, None, *pointers, *arguments)


def _hooked() -> bool:
    """Whether a hook, such as that of Triton's profiler, is to see every launch."""
    hook = triton.knobs.runtime.launch_enter_hook
    # Up to Triton 3.4 a function or None, since then a chain of functions.
    return hook is not None and bool(getattr(hook, "calls", True))
