"""What all replaced forwards of one model share, written while the model runs."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tigon.memory.recompute import Recompute


class Ledger:
    """The state that all replaced forwards of one model share.

    active: False after remove(), for forwards that somebody has wrapped in the meantime and that remain in use.
    lazy: the model's forward is running with labels, so that its head may leave the logits unbuilt.
    fusion: whose ledger it is, for who meets a part of the model first.
    check_arguments: raises for keyword arguments of the model's forward that the host of this fusion does not honour.
    recompute: what is computed again in the backward pass instead of being kept.
    """

    def __init__(self, owner: nn.Module, recompute: Recompute | None = None) -> None:
        self.owner = weakref.ref(owner)
        self.active = True
        self.fusion: Any = None
        self.recompute = recompute or Recompute("none")
        self.lazy = False
        self.check_arguments: Callable[[Mapping[str, Any]], None] | None = None
        self.valid: tuple[Any, int] | None = None
        self.steps = 0
        self.calls: Counter[tuple[str, Any]] = Counter()
        self.built_by: Counter[str] = Counter()
        self.plain_heads: Counter[str] = Counter()

    def count(self, kind: str, key: Any = None) -> None:
        """key: which of the rows of this kind it was."""
        if not torch.compiler.is_compiling():  # a side effect in compiled code would compile it again at every step
            self.calls[kind, key] += 1

    def built(self, why: str) -> None:
        if not torch.compiler.is_compiling():
            self.built_by[why] += 1

    def plain_head(self, why: str) -> None:
        if not torch.compiler.is_compiling():
            self.plain_heads[why] += 1

    def new_step(self) -> None:
        if not torch.compiler.is_compiling():
            self.steps += 1
            self.calls.clear()
            self.built_by.clear()
            self.plain_heads.clear()

    def see_labels(self, labels: Any, shift_labels: Any) -> None:
        """Start counting the labels on their way to the host, so that the loss can leave ignored rows out.

        The count is of all labels, unshifted. What reaches the loss is some of them, shifted, masked or flattened, and
        maybe padding that is ignored: the count is an upper bound for all of these, at most one row per sequence above
        the exact number for a causal shift. The loss takes an upper bound, and answers one that is too small with NaN.
        Where the bound is not certain (both kinds of labels, another ignore_index, more targets than labels) there is
        none, and no row is left out. On a CPU the loss counts its own targets.
        """
        self.valid = None
        given = labels if shift_labels is None else shift_labels if labels is None else None
        if not isinstance(given, Tensor) or torch.compiler.is_compiling() or not given.is_cuda:
            return
        if given.dtype == torch.int64 and type(given) is Tensor and not torch.cuda.is_current_stream_capturing():
            from tigon.linear.chunks import ValidCount

            self.valid = ValidCount(given, -100), given.numel()

    def valid_targets(self, target: Tensor, ignore_index: int) -> Any:
        if self.valid is None or torch.compiler.is_compiling():
            return None
        count, labels = self.valid
        return count if ignore_index == -100 and target.numel() <= labels else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        owner = memo.get(id(self.owner()))
        if owner is None:  # a part of the model is copied, and stays part of it: PEFT's modules_to_save does that
            return self
        copied = Ledger(owner, copy.deepcopy(self.recompute, memo))
        copied.active, copied.check_arguments = self.active, self.check_arguments
        memo[id(self)] = copied
        return copied
