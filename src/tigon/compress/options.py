"""The `method` options for `feed_forward` and their checks."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tigon.compress.packing import WIDTHS

Method = Literal["bits", "rank", "prune", "svd", "auto"]
NAMES = ("bits", "rank", "prune", "svd")


@dataclass(frozen=True)
class Bits:
    """A fixed bit split for all layers, instead of a budget.

    Args:
        heavy: weight bits for heavy neurons: 2, 3, 4, 5, 6 or 8.
        rest: weight bits for the other neurons, same choices.
        share: fraction of heavy neurons, 0 to 1.
        fit: False rounds each weight to nearest instead of fitting the calibration inputs, as an ablation.
    Raises: ValueError for other widths and shares.
    """

    heavy: int = 4
    rest: int = 3
    share: float = 0.25
    fit: bool = True

    def __post_init__(self) -> None:
        for name in ("heavy", "rest"):
            if getattr(self, name) not in WIDTHS:
                raise ValueError(
                    f"Bits: {name} must be one of {', '.join(map(str, WIDTHS))}, got {getattr(self, name)}."
                )
        if not 0 <= self.share <= 1:
            raise ValueError(f"Bits: share must be a fraction of the neurons from 0 to 1, got {self.share}.")


def check_method(method: Any, budget: Any, recover: Any) -> None:
    """Raise an error if the options are incompatible."""
    known = get_args(Method)
    if not isinstance(method, Bits) and method not in known:
        near = difflib.get_close_matches(str(method), known, 1)
        meant = f"; did you mean {near[0]!r}?" if near else "."
        kind = ValueError if isinstance(method, str) else TypeError
        raise kind(f"feed_forward: method must be one of {', '.join(known)}, Bits(…), got {method!r}{meant}")
    if isinstance(method, Bits):
        if budget is not None:
            raise ValueError(f"feed_forward: budget must be left out when method is Bits(…), got {budget}.")
    elif not isinstance(budget, (int, float)) or isinstance(budget, bool) or not 0 < budget <= 1:
        raise ValueError(
            "feed_forward: budget must be a fraction of the feed-forward layers' present bytes, above 0 and at most "
            f"1, got {budget}."
        )
    if not isinstance(recover, int) or recover < 0:
        raise ValueError(f"feed_forward: recover must be a step count, 0 or more, got {recover}.")
