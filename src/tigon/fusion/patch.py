"""How a forward is put on one module instance, and taken off again."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint
from torch import nn

from tigon.fusion.ledger import Ledger
from tigon.fusion.probe import HOOKS


def nothing() -> None:
    """What patches and fusions are pickled as."""
    return


class Patch:
    """What a replaced forward needs, in its module's `_tigon`: copied along with the module.

    before: the forward that this instance had of its own, if it had one.
    act: the activation whose formula was recognised; another one in its place is honoured.
    heads: a norm whose result the module around it rotates next, if it is one of heads.
    """

    key: Any = None  # of its row in the report
    heads = False

    def __init__(
        self,
        kind: str,
        ledger: Ledger,
        formula: Any,
        act: Any = None,
        *,
        before: Any = None,
        labels_at: int | None = None,
    ) -> None:
        self.kind, self.ledger, self.formula, self.act = kind, ledger, formula, act
        self.before, self.labels_at = before, labels_at
        self.function: Callable[..., Any] | None = None

    def installed_on(self, module: nn.Module) -> bool:
        return getattr(vars(module).get("forward"), "__func__", None) is self.function

    def is_all_of(self, module: nn.Module) -> bool:
        """Whether to call the module is to call this forward: no hook on it, and none on all modules."""
        state = vars(module)
        hooked = torch.nn.modules.module._has_any_global_hook() or any(state.get(name) for name in HOOKS)
        return self.installed_on(module) and not hooked

    def __reduce__(self) -> Any:
        return nothing, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        ledger, act, before = (copy.deepcopy(v, memo) for v in (self.ledger, self.act, self.before))
        copied = Patch(self.kind, ledger, self.formula, act, before=before, labels_at=self.labels_at)
        copied.function, copied.key, copied.heads = self.function, self.key, self.heads
        return copied


def install(module: nn.Module, function: Callable[..., Any], patch: Patch) -> None:
    # A bound method, so that a deep copy of the module binds it to the copy.
    state = vars(module)
    # Methods are pickled by name: a loaded module then has its class's own.
    function.__name__ = "forward"
    patch.function = function
    state["_tigon"] = patch
    state["forward"] = types.MethodType(function, module)
    state["_replicate_for_data_parallel"] = types.MethodType(_replicate_for_data_parallel, module)


def restore(module: nn.Module) -> None:
    state = vars(module)
    patch = state.get("_tigon")
    if patch is None:
        return
    # Where somebody has wrapped our forward since, theirs stays; ours, inactive now, passes through to the plain one.
    # A forward that is still the one of before means that install was interrupted: then the rest goes too.
    if not patch.installed_on(module) and state.get("forward") is not patch.before:
        return
    for name in ("_tigon", "forward", "_replicate_for_data_parallel"):
        state.pop(name, None)
    if patch.before is not None:
        state["forward"] = patch.before


def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
    """torch.nn.DataParallel copies `__dict__`, and with it a forward that is bound to the original."""
    replica: Any = type(self)._replicate_for_data_parallel(self)  # type: ignore[operator]
    forward = vars(self).get("forward")
    if isinstance(forward, types.MethodType):
        vars(replica)["forward"] = types.MethodType(forward.__func__, replica)
    return replica


def transformed() -> bool:
    """Inside torch.func.grad, vmap and their like, for which the fused operators have no rules."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _plain(self: Any, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)
