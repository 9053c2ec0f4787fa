"""Kernel launches that skip Triton's dispatch from the second launch on.

Triton inspects every argument on every launch to find the compiled kernel: 13 µs for a small kernel on a slow host,
30 µs for a long signature. Here the caller's key finds the kernel directly. For a new key, such as a new row count,
`_specialization_key` restates Triton's rules for sharing compiled kernels. A new Triton release may break this file:
tests/test_launches.py compares every launch with Triton's, and TIGON_LAUNCH_CACHE=0 always uses Triton's
dispatch.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tigon.kernels.dispatch import INTERPRET, stands_for_gpu
from tigon.kernels.language import HAS_TRITON, TensorDescriptor, tl, triton

ENABLED = os.environ.get("TIGON_LAUNCH_CACHE", "1") != "0"

# Grid, arguments after the tensors, Triton's options.
Plan = tuple[int, tuple[Any, ...], dict[str, Any]]
# A compiled kernel: launcher, function, metadata.
Started = tuple[Any, Any, Any]

# (kernel, device, key) → the compiled kernel, grid, arguments after the tensors.
_plans: dict[tuple[Any, ...], tuple[Any, Any, Any, int, tuple[Any, ...]]] = {}
_MOST_PLANS = 4096
# The result of `_specialization_key` → the compiled kernel. Bounded by the kernels that Triton itself keeps.
_kernels: dict[tuple[Any, ...], Started] = {}


def launch(kernel: Any, key: tuple[Any, ...], tensors: tuple[Any, ...], plan: Callable[[], Plan]) -> None:
    """Launch a Triton kernel on the current device, without Triton's dispatch from the second launch on.

    Args:
        kernel: the jitted function; its first arguments are `tensors`.
        key: everything the launch depends on except the tensors' addresses: shapes, strides, dtypes, options. If the
            key omits something the plan depends on, the next call reuses the wrong kernel.
        tensors: tensors, None, or from the second on descriptors from `describe`.
        plan: () → grid, arguments after the tensors, Triton's options; called once per key.

    Cached kernels assume addresses divisible by 16; launches with other addresses are planned anew each time. The
    interpreter, and launches under a profiler's hooks, go through Triton's dispatch.
    Addresses are passed as numbers: for a tensor, Triton asks the driver whether the GPU can access the memory.
    """
    pointers = []
    address = 0
    for t in tensors:
        if isinstance(t, Tensor):
            t = t.data_ptr()
            address |= t
        pointers.append(t)
    device = tensors[0].get_device()
    key = (kernel.fn, device, key)
    started_plan = _plans.get(key)
    bypass = not ENABLED or _has_launch_hook()
    if started_plan is None or address & 15 or bypass:
        if stands_for_gpu(tensors[0]):
            return
        grid, arguments, options = plan()
        specialization = (
            None if bypass or INTERPRET else _specialization_key(kernel, device, tensors, pointers, arguments, options)
        )
        started = None if specialization is None else _kernels.get(specialization)
        is_compiled = started is not None
        if started is None:
            compiled = kernel[(grid,)](*tensors, *arguments, **options)
            if compiled is None:  # in the interpreter
                return
            started = compiled.run, compiled.function, compiled.packed_metadata
            if specialization is not None:
                _kernels[specialization] = started
        started_plan = *started, grid, arguments
        if not address & 15:
            # Bounded, because every new shape is a new key: ever-changing sequence lengths would fill memory.
            if len(_plans) >= _MOST_PLANS:
                _plans.clear()
            _plans[key] = started_plan
        if not is_compiled:  # Triton has launched it already
            return
    run, function, metadata, grid, arguments = started_plan
    stream = torch._C._cuda_getCurrentRawStream(device)
    run(grid, 1, 1, stream, function, metadata, None, None, None, *pointers, *arguments)


def _specialization_key(
    kernel: Any,
    device: int,
    tensors: tuple[Any, ...],
    pointers: list[Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[Any, ...] | None:
    """Return the key of the compiled kernel that Triton would choose; None where only Triton can decide.

    Launches with equal keys get the same compiled kernel from Triton. Triton compiles separately for
    - the kernel, the device, the options (warps, stages, registers, contraction of products), and Triton's own modes;
    - each tensor's dtype, and whether 16 divides the address: a thread then moves 16 bytes at once. None is a
      constant. For a descriptor: dtype and block;
    - the value and type of each `tl.constexpr`: True is a constant other than 1, although equal in Python;
    - each integer's width: 32 bits, signed 64 or unsigned 64. Unless `do_not_specialize` names the argument,
      also whether the integer is 1, which becomes a constant, and whether 16 divides the integer;
    - only the type, for a float or a non-constant bool.
    """
    knobs, types = triton.knobs, tuple(map(type, arguments))
    # A compiler stage added by a hook may depend on anything.
    if getattr(knobs.runtime, "add_stages_inspection_hook", None) is not None or not _KNOWN.issuperset(types):
        return None
    modes = knobs.runtime.debug, getattr(knobs.compilation, "instrumentation_mode", None)
    parts: list[Any] = [kernel.fn, device, *modes, *options.items(), types]
    for t, pointer in zip(tensors, pointers, strict=True):
        if t is None:
            parts.append(None)
        elif isinstance(t, Tensor):
            parts += t.dtype, pointer & 15 == 0
            if _HIP:  # AMD's compiler takes shorter offsets into tensors below 2 GiB
                parts.append(t.untyped_storage().nbytes() < 2**31)
        elif type(t) is TensorDescriptor:
            parts += "descriptor", t.base.dtype, *t.block_shape
        else:
            return None
    constants, sizes, others = _pickers.get(kernel.fn) or _make_pickers(kernel, len(tensors))
    values = constants(arguments)
    # Floats by their repr: 0.0 and −0.0 are equal, but are two constants.
    parts.append(tuple(map(repr, values)) if float in constants(types) else values)
    parts += [_width(n) for n in sizes(arguments) if type(n) is int]
    parts += [
        ("1" if n == 1 else n & 15 == 0) if -(2**31) <= n < 2**31 else (_width(n), n & 15 == 0)
        for n in others(arguments)
        if type(n) is int
    ]
    return tuple(parts)


# Argument types for which Triton distinguishes nothing beyond value or type.
_KNOWN: set[type] = {bool, int, float, str, type(None)}
if HAS_TRITON:
    _KNOWN |= {triton.runtime.JITFunction, tl.dtype}
_HIP = torch.version.hip is not None

Picker = Callable[[tuple[Any, ...]], tuple[Any, ...]]
# A kernel's Python function → three pickers for its arguments after the tensors: constants, integers specialized on
# width only, and others.
_pickers: dict[Any, tuple[Picker, Picker, Picker]] = {}


def _make_pickers(kernel: Any, tensors: int) -> tuple[Picker, Picker, Picker]:
    parameters = list(enumerate(kernel.params[tensors:]))
    pickers = (
        _picker([i for i, p in parameters if p.is_constexpr]),
        _picker([i for i, p in parameters if not p.is_constexpr and p.do_not_specialize]),
        _picker([i for i, p in parameters if not p.is_constexpr and not p.do_not_specialize]),
    )
    _pickers[kernel.fn] = pickers
    return pickers


def _picker(places: list[int]) -> Picker:
    """Return a function that picks these positions from a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: tuple([values[i] for i in places])


def _width(n: int) -> int:
    """An integer's width in a kernel, in bits; 65 means unsigned."""
    return 32 if -(2**31) <= n < 2**31 else 64 if n < 2**63 else 65


def _has_launch_hook() -> bool:
    """Whether a hook, such as Triton's profiler, must see every launch."""
    hook = triton.knobs.runtime.launch_enter_hook
    # Up to Triton 3.4 a function or None, since then a chain of functions.
    return hook is not None and bool(getattr(hook, "calls", True))
