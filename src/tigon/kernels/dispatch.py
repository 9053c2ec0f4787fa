"""Backend dispatch: the only place that chooses between the Triton kernels and the torch reference.

    triton   CUDA and ROCm tensors in bf16, fp16 and fp32 (and CPU tensors under TRITON_INTERPRET=1, when forced)
    torch    everything else: any device, any dtype; the specification of every operator

`use_triton` decides per call, from the tensors. `use_backend("torch" | "triton")` or the environment variable
TIGON_BACKEND forces a backend. If the forced backend cannot run, the call raises.

`@launcher` registers launches as `torch.library` ops, used only under `torch.compile`: the dispatcher costs 36 µs per
call in eager mode, a direct launch nothing.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from tigon.kernels.language import HAS_TRITON

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
BACKENDS = ("triton", "torch")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PLAIN = (Tensor, torch.nn.Parameter)


def _checked_backend(name: str | None, where: str) -> str | None:
    if name in (None, "", "auto"):
        return None
    if name not in BACKENDS:
        raise ValueError(f"{where} must be 'triton', 'torch' or 'auto', got {name!r}.")
    return name


_forced = _checked_backend(os.environ.get("TIGON_BACKEND"), "TIGON_BACKEND")


class use_backend:
    """Force a backend for calls inside a `with` block, in every thread of the process.

    Args:
        name: "triton", "torch", or "auto" (decide from the tensors; the default outside any block).

    Raises:
        ValueError for another name. A call inside the block raises RuntimeError if the forced backend cannot run.

    The choice is made in the forward pass: a backward pass runs on its forward's backend.
    """

    def __init__(self, name: Literal["triton", "torch", "auto"]) -> None:
        self.name = _checked_backend(name, "use_backend: name")
        self._outer: list[str | None] = []

    def __enter__(self) -> use_backend:
        global _forced
        self._outer.append(_forced)
        _forced = self.name
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _forced
        _forced = self._outer.pop()


class Mode:
    """A mode that holds inside a `with` block, in every thread of the process: the class is `active` there."""

    active = False

    def __enter__(self) -> Mode:
        kind = type(self)
        self._outer, kind.active = kind.active, True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        type(self).active = self._outer


class meta_as_gpu(Mode):
    """Inside a `with` block meta tensors take the GPU path, in every thread of the process.

    Operators then allocate the same memory as on a GPU and launch no kernel: a training step on the meta device gives
    the memory that the step takes on a GPU (tigon.fusion.memory.estimate). Meta tensors, for which torch has no
    autocast, follow the CPU's autocast setting.
    """


def stands_for_gpu(t: Tensor) -> bool:
    """Whether t is on the meta device, inside `meta_as_gpu`."""
    return meta_as_gpu.active and t.is_meta


def why_not_triton(*tensors: Tensor | None) -> str | None:
    """Return the reason why the Triton kernels cannot take these tensors, or None if they can.

    Args:
        tensors: a call's inputs; None for an omitted optional input.
    Returns: a clause for a sentence, or None.
    """
    if not HAS_TRITON and not meta_as_gpu.active:
        return "Triton is not installed"
    device = None
    for t in tensors:
        if t is None:
            continue
        if t.dtype not in DTYPES:
            return f"the kernels take bfloat16, float16 and float32, not {str(t.dtype).removeprefix('torch.')}"
        if t.device.type != "cuda" and not (INTERPRET and t.device.type == "cpu") and not stands_for_gpu(t):
            return f"the kernels run on CUDA and ROCm devices, not on {t.device.type!r}"
        if device is not None and t.device != device:
            return f"the tensors are on different devices ({device} and {t.device})"
        if type(t) is not Tensor and hasattr(t, "__tensor_flatten__"):  # composed of other tensors, without own memory
            return f"the kernels take plain tensors, not {type(t).__name__}"
        device = t.device
    return None


def torch_is_forced() -> bool:
    """Whether `use_backend("torch")` or TIGON_BACKEND forces the reference. For operators without a kernel."""
    return _forced == "torch"


def use_triton(*tensors: Tensor | None) -> bool:
    """True if the Triton kernels serve this call. Operators make no other backend check."""
    if _forced is None and HAS_TRITON:
        # Fast path for plain tensors on one GPU: a fifth of the time `why_not_triton` takes.
        device = tensors[0].get_device()  # type: ignore[union-attr]
        for t in tensors:
            if t is not None and (
                not t.is_cuda or t.dtype not in DTYPES or type(t) not in _PLAIN or t.get_device() != device
            ):
                break
        else:
            return True
    if _forced == "torch":
        return False
    reason = why_not_triton(*tensors)
    if _forced == "triton":
        if reason is not None:
            raise RuntimeError(f"tigon: the triton backend was forced, but {reason}.")
        return True
    # The interpreter is for testing, not for speed: CPU tensors reach the kernels only when Triton is forced.
    return reason is None and not all(t is None or t.device.type == "cpu" for t in tensors)
