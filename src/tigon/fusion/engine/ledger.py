"""The state that all replaced forwards of a model share, written while the model runs."""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tigon.fusion.engine.reasons import ADAPTERS_OFF, NO_LABELS_CAME
from tigon.fusion.memory.recompute import Recompute


class Call:
    """A call to a fused model, or to a model around it, on the calling thread.

    lazy: the call has labels, so the head may leave the logits unbuilt.
    outer: the call that this call is nested in.
    """

    def __init__(self, lazy: bool, outer: Call | None) -> None:
        self.lazy, self.outer, self.is_over = lazy, outer, False


class _Calls(threading.local):
    def __init__(self) -> None:
        self.innermost: Call | None = None
        # The first layer that gets a shared input computes the other layers' results, which wait here.
        self.waiting: dict[Any, Any] = {}


class Ledger:
    """The state that all replaced forwards of a model share.

    owner: the model whose replaced forwards share this ledger, by weak reference.
    active: False after remove(), for replaced forwards that other code wrapped before, and still calls.
    check_arguments: raises for keyword arguments to the model's forward that this fusion's host does not honour.
    around: called in place of the model's forward: around(ledger, forward, *args, **kwargs).
    fallbacks: why replaced forwards ran their module's own code in the last step, by the key given to `count`.
    outside: how often parts ran outside the model's forward, since the last step began.
    has_entrance: whether a forward begins steps. Where the model itself is a part none does, and all calls count.
    adviser: returns the warning about a library that computes the loss itself; called once, at the first step with
        gradients and without labels.
    recompute: which activations the backward pass recomputes instead of keeping them.
    fp8_head: whether the head's loss multiplies in FP8 where it can.
    fp8_least_tokens: of a call whose layers run in FP8, launched by the host.
    fp8_gather: gathers sharded weights in e4m3; None for the parameters' dtype.
    is_sharded, is_split: whether a library shards the parameters, and whether tensor parallelism splits layers, as of
        the step `sharding_seen_at`.

    A `Call` belongs to a single thread: threads may run one model at the same time, as in torch.nn.DataParallel.
    """

    def __init__(self, owner: nn.Module, recompute: Recompute | None = None) -> None:
        self.owner = weakref.ref(owner)
        self.active = True
        self.recompute = recompute or Recompute("none")
        self.check_arguments: Callable[[Mapping[str, Any]], None] | None = None
        self.around: Callable[..., Any] | None = None
        self.steps = 0
        self._counts: Counter[tuple[str, Any]] = Counter()
        # By the identity of a tuple of keys: the tuple, and how often all of its keys have been counted together.
        self._together: dict[int, list[Any]] = {}
        self.built_by: Counter[str] = Counter()
        self.fallbacks: dict[tuple[str, Any], Counter[str]] = {}
        self.outside = 0
        self.has_entrance = False
        self.adviser: Callable[[], str] | None = None
        self.adapters_before = 0
        self.is_sharded, self.is_split, self.sharding_seen_at = False, False, -1
        self.fp8_head, self.fp8_least_tokens = False, 0
        self.fp8_gather: Any = None
        self._calls = _Calls()
        self.lock = threading.RLock()
        self._running = 0

    @property
    def lazy(self) -> bool:
        """Whether the head that runs on this thread now may leave the logits unbuilt."""
        call = self._calls.innermost
        return call is not None and call.lazy

    @property
    def waiting(self) -> dict[Any, Any]:
        """Results that wait on this thread for the layers they belong to; cleared when the model call ends."""
        return self._calls.waiting

    def enter(self, lazy: bool) -> Call:
        """A model call begins. Calls inside this call, and concurrent calls, belong to the same step."""
        outer = self._calls.innermost
        call = self._calls.innermost = Call(lazy, outer)
        if outer is None and not torch.compiler.is_compiling():
            with self.lock:
                self._running += 1
                alone = self._running == 1
            if alone:
                self.new_step()
        return call

    def leave(self, call: Call) -> None:
        """The call has ended. Calls that generators run end in any order."""
        call.is_over = True
        innermost = self._calls.innermost
        while innermost is not None and innermost.is_over:
            innermost = innermost.outer
        self._calls.innermost = innermost
        if innermost is None:
            self._calls.waiting.clear()
        if call.outer is None and not torch.compiler.is_compiling():
            with self.lock:
                self._running -= 1

    @contextlib.contextmanager
    def allow_lazy(self) -> Iterator[None]:
        """Inside, heads leave their logits unbuilt even without labels."""
        call = self.enter(lazy=True)
        try:
            yield
        finally:
            self.leave(call)

    @property
    def is_running(self) -> bool:
        """Whether the model is being called on this thread."""
        return self._calls.innermost is not None

    def count(self, kind: str, key: Any = None, *, outside: bool = False) -> None:
        """Count one call to a part. key: tells which row in the report, among those with this kind.

        outside: the call belongs to the step although the model's forward does not run, as in another library's loss.
        The backward pass, in which checkpoints run parts again, belongs to the step as well.
        """
        if torch.compiler.is_compiling():  # a counter in compiled code would cause a recompilation at every step
            return
        if outside or not self.has_entrance or self.is_running or torch._C._current_graph_task_id() != -1:
            self._counts[kind, key] += 1
        else:
            self.outside += 1

    @property
    def calls(self) -> Counter[tuple[str, Any]]:
        """How often each part ran in this step, by kind and key."""
        for keys, number in list(self._together.values()):
            for key in keys:
                self._counts[key] += number
        self._together.clear()
        return self._counts

    def count_all(self, keys: tuple[tuple[str, Any], ...]) -> None:
        """Count one call for each kind and key, as `count` does. The same tuple each time: keys are slow to hash."""
        if self.has_entrance and not self.is_running and torch._C._current_graph_task_id() == -1:
            self.outside += len(keys)
            return
        counted = self._together.get(id(keys))
        if counted is None:
            self._together[id(keys)] = [keys, 1]
        else:
            counted[1] += 1

    @contextlib.contextmanager
    def leave_uncounted(self) -> Iterator[None]:
        """Calls of the model inside are no steps, and none of them counts."""
        steps, calls = self.steps, self.calls.copy()
        try:
            yield
        finally:
            self.steps, self._counts = steps, calls
            self._together.clear()

    def count_fallback(self, kind: str, key: Any, why: str) -> None:
        """Count a replaced forward that ran the module's own code. key: as in `count`; None for a whole kind.

        why: a clause.
        """
        if not torch.compiler.is_compiling():
            reasons = self.fallbacks.get((kind, key))
            if reasons is None:
                reasons = self.fallbacks[kind, key] = Counter()
            reasons[why] += 1

    @property
    def unfused_heads(self) -> dict[str, int]:
        """Why heads had real logits although there were labels."""
        return self._list_fallbacks("head", NO_LABELS_CAME)

    @property
    def unfused_adapters(self) -> dict[str, int]:
        """Why adapters ran in PEFT's own code."""
        return self._list_fallbacks("adapters", ADAPTERS_OFF)

    @property
    def adapters_off(self) -> int:
        """The layers whose adapters were switched off or merged, as in a reference model's forward pass."""
        return self.fallbacks.get(("adapters", None), Counter())[ADAPTERS_OFF]

    def _list_fallbacks(self, kind: str, usual: str) -> dict[str, int]:
        return {why: n for why, n in self.fallbacks.get((kind, None), {}).items() if why != usual}

    def count_materialized_logits(self, why: str) -> None:
        if not torch.compiler.is_compiling():
            self.built_by[why] += 1

    def new_step(self) -> None:
        if not torch.compiler.is_compiling():
            ran = sum(count for (kind, _), count in self.calls.items() if kind in ("adapters", "expert_adapters"))
            self.adapters_before = ran or self.adapters_before
            self.steps += 1
            self.calls.clear()
            self.built_by.clear()
            self.fallbacks.clear()
            self.outside = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        owner = memo.get(id(self.owner()))
        if owner is None:  # PEFT's modules_to_save copies a module inside the model: the copy shares the ledger
            return self
        copied = Ledger(owner, copy.deepcopy(self.recompute, memo))
        copied.active, copied.check_arguments = self.active, self.check_arguments
        copied.has_entrance, copied.adviser, copied.fp8_head = self.has_entrance, self.adviser, self.fp8_head
        copied.fp8_least_tokens = self.fp8_least_tokens
        memo[id(self)] = copied
        copied.around, copied.fp8_gather = copy.deepcopy(self.around, memo), copy.deepcopy(self.fp8_gather, memo)
        return copied
