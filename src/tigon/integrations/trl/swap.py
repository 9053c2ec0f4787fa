"""The attributes replaced on a trainer's instances, and the state that the replacements share."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tigon.fusion.engine.ledger import Ledger
from tigon.fusion.engine.report import Row
from tigon.fusion.engine.rewrite import rebuild_function
from tigon.fusion.logits.lazy import LazyLogits
from tigon.fusion.logits.split import is_split
from tigon.losses.head.head import Head, Hidden


class Swaps:
    """The attributes replaced on a trainer's instances, and how often the replacements ran.

    active: False after `restore`, for replacements that other code wrapped before, and still calls.
    ledgers: the models' Fusion ledgers, by role. left: calls that went to TRL's own code, by reason.
    projections: roles whose log-probabilities Tigon computes. sharing: how a role's forward shares prompts.
    shared: rows computed in the last step, and the rows that separate sequences would take. unshared: calls that ran as
    separate sequences, by reason. whole_logits: why the trainer uses whole logits; otherwise empty. tokens, padded: as
    in `TrainerReport`.
    """

    def __init__(self) -> None:
        self.active = True
        self.ledgers: dict[str, Ledger] = {}
        self.rows: list[Row] = []
        self.steps = 0
        self.calls: Counter[str] = Counter()
        self.total: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.projections: set[str] = set()
        self.sharing: dict[str, Any] = {}
        self.shared: Counter[str] = Counter()
        self.unshared: Counter[str] = Counter()
        self.whole_logits = ""
        self.tokens: Counter[str] = Counter()
        self.padded: Counter[str] = Counter()
        self._done: list[tuple[dict[str, Any], str, Any, bool, Any]] = []

    def put(self, instance: Any, name: str, value: Any) -> None:
        state = vars(instance)
        self._done.append((state, name, value, name in state, state.get(name)))
        state[name] = value

    def restore(self) -> None:
        self.active = False
        for state, name, value, had, before in reversed(self._done):
            if state.get(name) is not value:
                continue  # another wrapper stays; the replacement inside, now inactive, passes through
            if had:
                state[name] = before
            else:
                del state[name]
        self._done.clear()

    def record_replaced(self, role: str, what: str) -> None:
        self.rows.append(Row("loss", role, 1, True, what))

    def record_kept(self, role: str, reason: str) -> None:
        self.rows.append(Row("loss", role, 1, False, reason))

    def count(self, what: str, *roles: str) -> None:
        self.calls[what] += 1
        self.total[what] += 1
        for role in roles:
            if role in self.ledgers:
                self.ledgers[role].count("head", outside=True)

    def count_shared(self, rows: int, separate: int) -> None:
        self.shared["rows"] += rows
        self.shared["separate"] += separate

    def new_step(self) -> None:
        self.steps += 1
        self.calls.clear()
        self.shared.clear()

    def new_forward(self) -> None:
        """Start a new step in the ledgers, since this trainer does not call the models' own forward."""
        for ledger in self.ledgers.values():
            if not ledger.lazy:
                ledger.new_step()

    @contextlib.contextmanager
    def lazily(self) -> Iterator[None]:
        """A context in which heads leave their logits unbuilt even without labels."""
        with contextlib.ExitStack() as stack:
            for ledger in self.ledgers.values():
                stack.enter_context(ledger.allow_lazy())
            yield


def trls_own(trainer: Any, *methods: str) -> bool:
    """Whether a trainer has these methods and they are TRL's: a subclass may use the same name for another loss."""
    found = [getattr(type(trainer), name, None) for name in methods]
    return all((getattr(method, "__module__", None) or "").startswith("trl.") for method in found)


def global_names(function: Any) -> tuple[str, ...]:
    return getattr(getattr(function, "__code__", None), "co_names", ())


def clone(function: types.FunctionType, **instead: Any) -> types.FunctionType:
    """Copy a function, with other values for some globals."""
    return rebuild_function(function, {**function.__globals__, **instead}, function.__closure__)


def read_signature(function: Any, known: set[str], skip: int = 0) -> inspect.Signature | None:
    """The signature that binds this function's arguments by name; None for arguments beyond `known`."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    return inspect.Signature(parameters) if {p.name for p in parameters} <= known else None


def bind(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


class Side(NamedTuple):
    """The inputs to logits: hidden states x, the head, and the autocast state in the head's forward."""

    x: Tensor
    head: Head
    autocast: torch.dtype | None = None

    @classmethod
    def from_logits(cls, logits: Any) -> Side | None:
        """The Side for unbuilt logits whose head's weight is still in memory; None for other logits."""
        if not isinstance(logits, LazyLogits) or not logits.pending():
            return None
        recipe = logits.recipe
        head = recipe.head()
        return None if head is None or recipe.regather is not None else cls(recipe.hidden, head, recipe.autocast)

    def gather(self) -> Side:
        """The same with a whole head, as in TRL: FSDP2's shards are rows too, but each rank has other tokens."""
        return self._with_head(weight=_whole(self.head.weight), bias=_whole(self.head.bias))

    def _with_head(self, **changes: Any) -> Side:
        return self._replace(head=self.head._replace(**changes))

    @property
    def as_hidden(self) -> Hidden:
        return Hidden(self.x, self.head)

    def unusual(self) -> str | None:
        """The reason why TRL's own code must handle this head."""
        for t in self.head[:2]:
            if t is not None and hasattr(t, "ds_id"):
                return "ZeRO-3 gathers the head again in the backward pass"
            if t is not None and not isinstance(t, nn.Parameter) and type(t) is not Tensor:
                return f"the head's weight is a {type(t).__name__}"
        positive = self.head.scale > 0 and (self.head.softcap is None or self.head.softcap > 0)
        return None if positive else "the scale of the logits is not positive"

    def rows(self, mask: Tensor) -> Side:
        return self._replace(x=self.x[mask])

    def in_one_dtype(self) -> Side:
        """The same with the head in the hidden states' dtype, as TRL computes; autocast does its own casts."""
        if torch.is_autocast_enabled(self.x.device.type):
            return self
        weight, bias = self.head[:2]
        bias = None if bias is None else bias.to(self.x.dtype)
        return self._with_head(weight=weight.to(self.x.dtype), bias=bias)

    def as_in_its_forward(self) -> Any:
        """A context with the autocast state in which the head ran."""
        return torch.autocast(self.x.device.type, dtype=self.autocast, enabled=self.autocast is not None)


def _whole(t: Any) -> Any:
    return t.full_tensor() if is_split(t) else t
