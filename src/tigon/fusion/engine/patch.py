"""Installs a forward on a module instance, and removes the forward again."""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint
from torch import nn

from tigon.fusion.engine.ledger import Ledger
from tigon.fusion.engine.probe import INSTALLED


def load_as_none() -> None:
    """Patches and Fusions are pickled as a call to this function, so they load as None."""
    return


class BoundForward:
    """A function bound to a module without keeping the module alive; a bound method would, until gc runs."""

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        self.__func__ = function
        self._module = weakref.ref(module)

    @property
    def __self__(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError(
                "tigon: the module of this forward no longer exists. Keep the model, not only its forward."
            )
        return module

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.__func__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        return self.__func__(self.__self__ if module is None else module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("__func__", "_module"):  # copy and pickle ask an uninitialised object
            raise AttributeError(name)
        return getattr(self.__func__, name)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, BoundForward) and (self.__func__, self._module) == (other.__func__, other._module)

    def __hash__(self) -> int:
        return hash((self.__func__, self._module))

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundForward:
        return BoundForward(self.__func__, copy.deepcopy(self.__self__, memo))

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, "forward")  # by name: a loaded module has the class's forward


class Patch:
    """The state behind a replaced forward, in the module's `_tigon`, and copied along with the module.

    part: the Part whose forward this is; None for a model's forward, which begins a step.
    before: the forward set on this instance before, if there was one.
    act: the activation module whose formula was recognised. If another module replaces it, the plain forward runs.
    watched: the attributes that the module's code reads, with their values when the formula was recognised, except
        attributes that the formula reads at each call, such as eps. watched_act: the same for the activation module.
    fusion: the Fusion that owns this patch. The modules keep the Fusion alive; the Fusion does not keep the modules.
    is_head_norm: whether this norm acts on attention heads, whose result the module around it rotates next.
    fp8: what the module needs to run in FP8; None for bf16.
    is_inner: whether this is a backbone's forward, which begins a step only where it is called alone.
    packed: in a decoder, what runs packed calls: packed(ledger, module, forward, *args, **kwargs).
    rewritten_by: parts that have rewritten this forward since, in order.
    whole: for a decoder layer, what runs the whole layer where all its parts are plain; see parts/decoder_layer.py.
    """

    fusion: Any = None
    watched: tuple[tuple[str, Any], ...] = ()
    watched_act: tuple[tuple[str, Any], ...] = ()
    key: Any = None  # the ledger key under which calls are counted
    is_head_norm = False
    fp8: Any = None
    is_inner = False
    packed: Callable[..., Any] | None = None
    rewritten_by: tuple[Any, ...] = ()
    whole: Callable[..., Any] | None = None

    def __init__(
        self,
        part: Any,
        ledger: Ledger,
        formula: Any = None,
        act: Any = None,
        *,
        before: Any = None,
        labels_at: int | None = None,
    ) -> None:
        self.part, self.ledger, self.formula, self.act = part, ledger, formula, act
        self.before, self.labels_at = before, labels_at
        self.function: Callable[..., Any] | None = None

    def is_installed_on(self, module: nn.Module) -> bool:
        return getattr(vars(module).get("forward"), "__func__", None) is self.function

    def still_holds(self, module: nn.Module) -> bool:
        """Whether the module and its activation are as they were when their formula was recognised."""
        for name, value in self.watched:
            if getattr(module, name, self) != value:
                return False
        if self.act is None:
            return True
        act = get_child(module, self.formula.act_module)
        if act is not self.act or (is_hooked(act) and not has_idle_hooks(act)):
            return False
        return not self.watched_act or all(getattr(act, name, self) == value for name, value in self.watched_act)

    def is_entire_call(self, module: nn.Module, *, idle: bool = False) -> bool:
        """Whether calling the module runs this forward alone: neither the module nor all modules have hooks.

        idle: hooks that have nothing to do now are allowed.
        """
        return (
            self.is_installed_on(module)
            and (not is_hooked(module) or (idle and has_idle_hooks(module)))
            and not torch.nn.modules.module._has_any_global_hook()
        )

    def __reduce__(self) -> Any:
        return load_as_none, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        ledger, act, before, fp8 = (copy.deepcopy(v, memo) for v in (self.ledger, self.act, self.before, self.fp8))
        copy_formula = getattr(self.formula, "copy_for", None)  # a formula that knows modules then knows their copies
        formula = self.formula if copy_formula is None else copy_formula(memo)
        copied = object.__new__(Patch)
        # When the whole model is copied, the copy gets a Fusion once the modules are copied.
        fusion = self.fusion if ledger is self.ledger else None
        vars(copied).update(vars(self), ledger=ledger, act=act, before=before, fp8=fp8, formula=formula, fusion=fusion)
        copied.whole = copy.copy(self.whole)
        return copied


def get_child(module: nn.Module, name: str) -> Any:
    """module.name for a child or a parameter. nn.Module looks these up last, after Python raises an exception."""
    child: Any = module._modules.get(name)
    if child is None:
        child = module._parameters.get(name)
    return getattr(module, name) if child is None else child


def is_hooked(module: nn.Module) -> bool:
    """Whether the module itself has hooks."""
    # Asked several times a layer. Hooks with keyword arguments, and those that always run, are among the forward hooks.
    state = vars(module)
    return bool(
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state.get("_backward_pre_hooks")
    )


def has_idle_hooks(module: nn.Module) -> bool:
    """Whether all hooks on a module are those of DeepSpeed's ZeRO-3, which has nothing to gather for its call now.

    ZeRO-3 has hooks on every module, also on activations. Small weights it keeps from one step to the next, but frees
    them at any time when the modules come in another order than before: who goes without the call copies the weight.
    """
    state = vars(module)
    if "ds_id" not in state or state["_modules"] or state["_backward_hooks"] or state.get("_backward_pre_hooks"):
        return False
    for p in state["_parameters"].values():
        if p is not None and not (getattr(p, "ds_persist", False) and p.ds_status.name == "AVAILABLE"):
            return False
    hooks = (*state["_forward_pre_hooks"].values(), *state["_forward_hooks"].values())
    return all((getattr(hook, "__module__", None) or "").startswith("deepspeed.") for hook in hooks)


def install(module: nn.Module, function: Callable[..., Any], patch: Patch) -> None:
    state = vars(module)
    function.__name__ = "forward"
    patch.function = function
    state["_tigon"] = patch
    state["forward"] = BoundForward(function, module)
    state["_replicate_for_data_parallel"] = BoundForward(_replicate_for_data_parallel, module)
    if sys.version_info >= (3, 11):
        # copy and pickle look __getstate__ up on the instance. Before 3.11 no class had a __getstate__, and a wrapper
        # that passes missing attributes on to the wrapped model, as PEFT does, would find this method. There each patch
        # pickles as None, and copy.copy copies the patches.
        state["__getstate__"] = BoundForward(_state, module)


def restore(module: nn.Module) -> None:
    state = vars(module)
    patch = state.get("_tigon")
    if patch is None:
        # The base layer of an adapted layer that has left the model, as PEFT's `unload` makes.
        for name, p in module._parameters.items():
            if (give_back := getattr(p, "give_back", None)) is not None:
                module._parameters[name] = give_back()
        return
    give_back = getattr(patch.fp8, "give_back", None)
    if give_back is not None:
        give_back(module)
    # If other code has wrapped the replaced forward since, the wrapper stays; the replaced forward, inactive now,
    # calls the plain forward. If `forward` still equals `before`, install was interrupted: the rest goes too.
    if not patch.is_installed_on(module) and state.get("forward") is not patch.before:
        return
    for name in INSTALLED:
        state.pop(name, None)
    if patch.before is not None:
        state["forward"] = patch.before


class _State(dict[str, Any]):
    """A fused module's state for copy and pickle: the plain module's state; a deep copy stays fused.

    A shallow copy shares child modules with the original, but the copy's children may be replaced later: a forward
    bound to the original would ignore the replacements.
    """

    def __init__(self, state: dict[str, Any], plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self.fused = state

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.fused, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(self.items())


def _state(self: Any) -> Any:
    getstate = getattr(type(self), "__getstate__", None)
    state = vars(self) if getstate is None or getstate is getattr(object, "__getstate__", None) else getstate(self)
    if type(state) is not dict:
        return state
    patch: Patch = vars(self)["_tigon"]
    left_out = {*INSTALLED, "_tigon_fusion"}
    if not patch.is_installed_on(self):  # other code has wrapped the forward
        left_out.remove("forward")
    ours = {name for name, value in state.items() if isinstance(value, BoundForward)}
    plain = {name: value for name, value in state.items() if name not in left_out | ours}
    if patch.before is not None:
        plain.setdefault("forward", patch.before)
    return _State(state, plain)


def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
    """A replica for torch.nn.DataParallel, which copies `__dict__` with the forward bound to the original."""
    kind: Any = type(self)
    replica: nn.Module = kind._replicate_for_data_parallel(self)
    for name, value in vars(self).items():
        if isinstance(value, BoundForward):
            vars(replica)[name] = BoundForward(value.__func__, replica)
    return replica


def is_functorch_active() -> bool:
    """Whether this code runs inside torch.func.grad, vmap and the like; the fused operators have no rules for them."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def plain_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)
