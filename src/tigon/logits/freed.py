"""A head whose weight is there only while the head's own forward runs, and the loss that needs it afterwards.

FSDP2 frees the weight of a head in a group of its own when that forward ends. It is gathered again for the product,
and freed behind it. For the backward pass FSDP gathers it by a hook on the logits, which Recipe hands on to the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class Regather:
    """One forward of such a head."""

    def __init__(self, head: nn.Module) -> None:
        self.head: Any = head

    @contextmanager
    def gathered(self, weight: Tensor) -> Iterator[None]:
        """The weight's memory holds its values. A collective, unless something else has gathered it already."""
        if not is_released(weight):
            yield
            return
        self.head.unshard()
        try:
            yield
        finally:
            self.head.reshard()


def regather_of(head: Any) -> Regather | None:
    """None for a head whose weight stays; torch has no public way to ask.

    Accelerate lets it stay, and so do `lm_head.set_reshard_after_forward(False)` and the group of the root.
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
