"""The launch of a Triton kernel; from the second time on without Triton's dispatch.

Triton looks at every argument of every launch to find the compiled kernel: 13 µs for a small kernel on a slow host,
30 µs for a long signature. Here the caller's key finds the kernel at once. For a new key, such as another number of
rows, `_specialization_key` restates Triton's own rules for sharing compiled kernels. A new Triton may break
this file: tests/kernels/test_launches.py compares every launch with Triton's, and TIGON_LAUNCH_CACHE=0 goes through
Triton's dispatch each time.
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
# The result of `_specialization_key` → the compiled kernel. As many as Triton has compiled, which keeps them as well.
_kernels: dict[tuple[Any, ...], Started] = {}


def launch(kernel: Any, key: tuple[Any, ...], tensors: tuple[Any, ...], plan: Callable[[], Plan]) -> None:
    """Launch a Triton kernel on the current device; from the second time on without Triton's dispatch.

    Args:
        kernel: the jitted function; its first arguments are `tensors`.
        key: everything but the tensors' addresses on which the launch depends: shapes, strides, dtypes, options. If the
            key omits something the plan depends on, the next call reuses the wrong kernel.
        tensors: tensors, None, or from the second on descriptors of `describe`.
        plan: () → grid, arguments after the tensors, Triton's options; called once a key.

    Kernels of `key` are compiled for addresses that 16 divides; launches with other addresses are planned anew each
    time. The interpreter, and launches under a profiler's hooks, go through Triton's dispatch.
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
            # A bound, since every new shape is a new key: sequences of ever-changing lengths would fill memory.
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
    """The key of the compiled kernel that Triton would choose for these arguments; None where only Triton can tell.

    Launches of one key get the same compiled kernel from Triton, which compiles one for each of

    - the kernel, the device, the options (warps, stages, registers, contraction of products), and Triton's own modes;
    - the dtype of each tensor, and whether 16 divides its address: a thread then moves 16 bytes at once. A None is a
      constant. Of a descriptor dtype and block;
    - the value of each `tl.constexpr`, and its type: True is a constant other than 1, although Python has them equal;
    - the width of each whole number: 32 bits, signed 64 or unsigned 64. Unless `do_not_specialize` names the argument,
      also whether the number is 1, which becomes a constant, and whether 16 divides the number;
    - the type alone of a float, or of a bool that is no constant.
    """
    knobs, types = triton.knobs, tuple(map(type, arguments))
    # A stage that a hook adds may depend on anything.
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
    # The texts where there are floats: 0.0 and −0.0 are equal, and two constants.
    parts.append(tuple(map(repr, values)) if float in constants(types) else values)
    # Of which arguments these are numbers, the types tell.
    parts += [_width(n) for n in sizes(arguments) if type(n) is int]
    parts += [
        ("1" if n == 1 else n & 15 == 0) if -(2**31) <= n < 2**31 else (_width(n), n & 15 == 0)
        for n in others(arguments)
        if type(n) is int
    ]
    return tuple(parts)


# Types of arguments that are the same to Triton where they are equal, or where the type is.
_KNOWN: set[type] = {bool, int, float, str, type(None)}
if HAS_TRITON:
    _KNOWN |= {triton.runtime.JITFunction, tl.dtype}
_HIP = torch.version.hip is not None

Picker = Callable[[tuple[Any, ...]], tuple[Any, ...]]
# A kernel's Python function → those of its arguments after the tensors that are constants, whole numbers of which
# Triton sees only the width, and others.
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
    """A function that picks these places of a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: tuple([values[i] for i in places])


def _width(n: int) -> int:
    """The bits that a whole number takes in a kernel; 65 where they are unsigned."""
    return 32 if -(2**31) <= n < 2**31 else 64 if n < 2**63 else 65


def _has_launch_hook() -> bool:
    """Whether a hook, such as that of Triton's profiler, is to see every launch."""
    hook = triton.knobs.runtime.launch_enter_hook
    # Up to Triton 3.4 a function or None, since then a chain of functions.
    return hook is not None and bool(getattr(hook, "calls", True))
