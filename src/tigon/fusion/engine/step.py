"""A fused model's forward: begins a step, and tells the head inside whether there are labels.

The backbone inside has such a forward too, for losses that call the backbone alone.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from tigon.fusion.engine.ledger import Ledger
from tigon.fusion.engine.patch import Patch
from tigon.fusion.engine.reasons import OWN_LOSSES
from tigon.fusion.logits.labels import count_labels


def make_step_forward(model: nn.Module, ledger: Ledger, *, inner: bool = False) -> tuple[Callable[..., Any], Patch]:
    """The forward that replaces a model's own, with its patch. inner: for a backbone, which begins a step only when
    called alone."""
    before = vars(model).get("forward")
    patch = Patch(None, ledger, before=before, labels_at=find_labels_position(model))
    patch.is_inner = inner
    return _model_forward(type(model).forward if before is None else before, before is not None), patch


def find_labels_position(model: nn.Module) -> int | None:
    """The position that `labels` has in the model's forward signature; None if the forward takes no labels."""
    try:
        names = list(inspect.signature(type(model).forward).parameters)[1:]
    except (TypeError, ValueError):
        return None
    return names.index("labels") if "labels" in names else None


def _model_forward(before: Callable[..., Any], bound: bool) -> Callable[..., Any]:
    """The model's forward, which also tells the head whether the caller passed labels.

    before: the forward being replaced: the class's or, where `bound`, the instance's.
    """

    # Dynamo puts a CrossEntropyLoss that the forward creates into the graph without tracing the module. Such a graph
    # node takes only tensors, and the lazy logits under torch.compile are not tensors.
    code = getattr(inspect.unwrap(before), "__code__", None)
    makes_loss_module = "CrossEntropyLoss" in getattr(code, "co_names", ())

    @functools.wraps(before)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch: Patch | None = getattr(self, "_tigon", None)
        if patch is None or patch.function is not forward:
            # This forward was removed, but a wrapper still calls it, and the model was fused again around the wrapper.
            return before(*args, **kwargs) if bound else before(self, *args, **kwargs)
        run = functools.partial(type(self).forward, self) if patch.before is None else patch.before
        ledger = patch.ledger
        if patch.packed is not None and ledger.active:
            run = functools.partial(patch.packed, ledger, self, run)
        if not ledger.active or (
            # In the backward pass a checkpoint calls the function again; that call begins no step.
            patch.is_inner
            and (torch.compiler.is_compiling() or ledger.is_running or torch._C._current_graph_task_id() != -1)
        ):
            return run(*args, **kwargs)
        if ledger.around is not None and not patch.is_inner:
            run = functools.partial(ledger.around, ledger, run)
        if ledger.check_arguments is not None:
            ledger.check_arguments(kwargs)
        if not torch.compiler.is_compiling() and not getattr(self, "_is_replica", False):
            patch.fusion._refresh()
            if ledger.fp8_gather is not None:
                ledger.fp8_gather.install(patch.fusion.model)
        at = patch.labels_at
        if at is not None and len(args) > at:
            args = (*args[:at], labels := count_labels(args[at]), *args[at + 1 :])
        else:
            labels = kwargs.get("labels")
        # A new dictionary: the labels are replaced in the copy, never in a dictionary that belongs to the caller.
        kwargs = {
            **kwargs,
            **{name: count_labels(kwargs[name]) for name in ("labels", "shift_labels") if name in kwargs},
        }
        has_labels = labels is not None or kwargs.get("shift_labels") is not None
        compiling = torch.compiler.is_compiling()
        if ledger.adviser is not None and not has_labels and not compiling and torch.is_grad_enabled():
            _advise(ledger)
        call = ledger.enter((has_labels or ledger.lazy) and not (compiling and makes_loss_module))
        try:
            if compiling:  # torch.compile's partitioner decides which activations are kept
                return run(*args, **kwargs)
            with ledger.recompute.forward(args, kwargs):
                return run(*args, **kwargs)
        except RuntimeError as error:
            if "support saved tensor hooks" in str(error):
                raise RuntimeError(f"{error} Fuse with recompute='product', which needs no hooks.") from error
            raise
        finally:
            ledger.leave(call)

    return forward


def _advise(ledger: Ledger) -> None:
    """Warn once, by `ledger.adviser`, if a library that computes the loss itself calls the model."""
    adviser, ledger.adviser = ledger.adviser, None
    advice = "" if adviser is None or ledger.lazy else adviser()
    if advice:
        warnings.warn(advice, stacklevel=4)


def describe_foreign_loss() -> str:
    """The advice for a library on the stack that computes the loss itself; else empty."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        library = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if library in OWN_LOSSES:
            return OWN_LOSSES[library]
        frame = frame.f_back
    return ""


def find_backbones(model: nn.Module, is_replaced: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """The modules inside a model that hold every replaced module, and which a loss may call in the model's place."""
    backbones: list[nn.Module] = []
    holder = model
    while True:
        inside = [c for c in holder.children() if any(is_replaced(m) for m in c.modules())]
        if len(inside) != 1 or is_replaced(inside[0]):
            return backbones
        holder = inside[0]
        if type(holder).forward is not nn.ModuleList.forward:  # containers cannot be called
            backbones.append(holder)
