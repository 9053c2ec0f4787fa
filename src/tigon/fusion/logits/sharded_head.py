"""A head whose weight exists only while the head's forward runs, although the loss needs the weight afterwards.

FSDP2, if the head forms a separate group, FSDP1, if the head is a unit, and DeepSpeed's ZeRO-3 free the weight when the
head's forward ends. Tigon gathers the weight again for the product, and frees it afterwards. For the backward pass each
of them gathers the weight by a hook on the logits, ZeRO-3 by an autograd node; Recipe hands them on to the loss.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
_ZERO3 = "deepspeed.runtime.zero.parameter_offload"


class Regather:
    """A forward through a head whose weight FSDP2 frees.

    keeps_memory: whether the gathered values come to the memory where they were, so that views of the weight stay.
    """

    keeps_memory = True

    def __init__(self, head: nn.Module) -> None:
        self.head: Any = head

    @contextmanager
    def gather(self, weight: Tensor) -> Iterator[None]:
        """Inside, the weight's memory holds the values. A collective, unless the weight is gathered already."""
        if not is_released(weight):
            yield
            return
        self._unshard()
        try:
            yield
        finally:
            self._reshard()

    def _unshard(self) -> None:
        self.head.unshard()

    def _reshard(self) -> None:
        self.head.reshard()


class UnitRegather(Regather):
    """The same for a head that is an FSDP1 unit."""

    def _unshard(self) -> None:
        from torch.distributed.fsdp import _runtime_utils
        from torch.distributed.fsdp._common_utils import HandleTrainingState

        unit = self.head
        # In a forward FSDP1 makes views of the flat parameter, not parameters: the recipe holds such a view.
        unit._handle._training_state = HandleTrainingState.FORWARD
        _runtime_utils._unshard(unit, unit._handle, unit._unshard_stream, unit._pre_unshard_stream)
        unit._device_handle.current_stream().wait_stream(unit._unshard_stream)

    def _reshard(self) -> None:
        from torch.distributed.fsdp import _runtime_utils
        from torch.distributed.fsdp._common_utils import HandleTrainingState

        unit = self.head
        _runtime_utils._reshard(unit, unit._handle, True)
        unit._handle._training_state = HandleTrainingState.IDLE


class ZeroRegather(Regather):
    """The same for a head that DeepSpeed's ZeRO-3 partitions. Each gather makes new memory."""

    keeps_memory = False

    @contextmanager
    def gather(self, weight: Tensor) -> Iterator[None]:
        released = [p for p in self.head.parameters(recurse=False) if is_released(p)]
        if not released:  # ZeRO-3 keeps a weight that it needs again soon
            yield
            return
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(released):
            yield


def find_regather(head: Any) -> Regather | None:
    """How to gather the head's weight again; None for a head whose weight stays. torch has no public way to ask.

    The weight stays under Accelerate, after `lm_head.set_reshard_after_forward(False)`, and in the root's group.
    """
    if not hasattr(type(head), "unshard"):
        if hasattr(head.weight, "ds_id"):
            return ZeroRegather(head)
        # In an FSDP1 unit the weight is a view of the flat parameter.
        unit = None if isinstance(head.weight, nn.Parameter) else _find_unit(head)
        return None if unit is None else UnitRegather(unit)
    try:
        group = head._get_fsdp_state()._fsdp_param_group
        stays = group is None or not group._reshard_after_forward
    except (AssertionError, AttributeError):
        stays = False
    return None if stays else Regather(head)


def is_released(t: Tensor) -> bool:
    status = getattr(t, "ds_status", None)
    if status is not None:
        return bool(status.name != "AVAILABLE")
    return t.numel() > 0 and t.device.type != "meta" and t.untyped_storage().size() == 0


def full_shape(t: Tensor) -> torch.Size:
    """The shape of a weight, also while ZeRO-3 has it partitioned."""
    return getattr(t, "ds_shape", t.shape)


def is_zero3_caller() -> bool:
    """Whether ZeRO-3 calls from the autograd node that it puts behind each module's output."""
    return find_frame(_ZERO3, 6) is not None


def find_zero3_hook(node: Any) -> Callable[[Tensor], None] | None:
    """What ZeRO-3's node behind a module's output does in the backward pass, as a hook; None for any other node."""
    if getattr(getattr(type(node), "_forward_cls", None), "__module__", "") != _ZERO3:
        return None
    return functools.partial(_run_before_backward, node.pre_backward_function, node.module)


def find_frame(module: str, depth: int) -> FrameType | None:
    """The nearest of the callers' frames, up to this depth, whose code is in a module."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and depth and frame.f_globals.get("__name__") != module:
        frame, depth = frame.f_back, depth - 1
    return frame if depth else None


def _run_before_backward(function: Callable[[nn.Module], None], module: nn.Module, gradient: Tensor) -> None:
    function(module)


def _find_unit(head: nn.Module) -> Any:
    """The FSDP1 unit around a head whose forward runs now; None for a head inside a larger unit."""
    frame = find_frame(_FSDP1, 12)
    unit = None if frame is None else frame.f_locals.get("self")
    return unit if getattr(unit, "_fsdp_wrapped_module", None) is head else None
