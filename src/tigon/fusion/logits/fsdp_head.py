"""A head whose weight exists only while the head's forward runs, although the loss needs the weight afterwards.

FSDP2 frees the weight when the head's forward ends, if the head forms a separate group. Tigon gathers the weight again
for the product, and frees it afterwards. For the backward pass FSDP gathers the weight by a hook on the logits; Recipe
hands this hook on to the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class Regather:
    """A forward through a head whose weight FSDP2 frees."""

    def __init__(self, head: nn.Module) -> None:
        self.head: Any = head

    @contextmanager
    def gather(self, weight: Tensor) -> Iterator[None]:
        """Inside, the weight's memory holds the values. A collective, unless the weight is gathered already."""
        if not is_released(weight):
            yield
            return
        self.head.unshard()
        try:
            yield
        finally:
            self.head.reshard()


def find_regather(head: Any) -> Regather | None:
    """How to gather the head's weight again; None for a head whose weight stays. torch has no public way to ask.

    The weight stays under Accelerate, after `lm_head.set_reshard_after_forward(False)`, and in the root's group.
    """
    if not hasattr(type(head), "unshard"):
        return None
    try:
        group = head._get_fsdp_state()._fsdp_param_group
        stays = group is None or not group._reshard_after_forward
    except (AssertionError, AttributeError):
        stays = False
    return None if stays else Regather(head)


def is_released(t: Tensor) -> bool:
    return t.numel() > 0 and t.device.type != "meta" and t.untyped_storage().size() == 0
