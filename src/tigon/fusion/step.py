"""The forward of a model that was fused: it begins a step, and tells the head inside whether there are labels."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tigon.fusion.ledger import Ledger
from tigon.fusion.patch import Patch
from tigon.logits.labels import counted


def step_of(model: nn.Module, ledger: Ledger) -> tuple[Callable[..., Any], Patch]:
    """The forward that replaces a model's own, with its patch."""
    before = vars(model).get("forward")
    patch = Patch(None, ledger, before=before, labels_at=labels_at(model))
    return _model_forward(type(model).forward if before is None else before, before is not None), patch


def labels_at(model: nn.Module) -> int | None:
    """The position of `labels` in the signature of the model's forward; None if the forward takes no labels."""
    try:
        names = list(inspect.signature(type(model).forward).parameters)[1:]
    except (TypeError, ValueError):
        return None
    return names.index("labels") if "labels" in names else None


def _model_forward(before: Callable[..., Any], bound: bool) -> Callable[..., Any]:
    """The model's forward, which also tells the head whether the caller passed labels.

    before: the forward that this one replaces: the class's or, where `bound`, one set on the instance.
    """

    # Dynamo puts a CrossEntropyLoss that the forward creates into its graph without tracing the module. Such a graph
    # node takes only tensors, and the lazy logits under torch.compile are none.
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
        if not ledger.active:
            return run(*args, **kwargs)
        if ledger.around is not None:
            run = functools.partial(ledger.around, ledger, run)
        if ledger.check_arguments is not None:
            ledger.check_arguments(kwargs)
        if not torch.compiler.is_compiling() and not getattr(self, "_is_replica", False):
            patch.fusion._see_changes()
        at = patch.labels_at
        if at is not None and len(args) > at:
            args = (*args[:at], labels := counted(args[at]), *args[at + 1 :])
        else:
            labels = kwargs.get("labels")
        # A new dictionary: the labels are replaced in the copy, never in a dictionary that belongs to the caller.
        kwargs = {**kwargs, **{name: counted(kwargs[name]) for name in ("labels", "shift_labels") if name in kwargs}}
        has_labels = labels is not None or kwargs.get("shift_labels") is not None
        compiling = torch.compiler.is_compiling()
        call = ledger.enter((has_labels or ledger.lazy) and not (compiling and makes_loss_module))
        try:
            if compiling:  # torch.compile's partitioner decides which activations are kept
                return run(*args, **kwargs)
            with ledger.recompute.forward(args, kwargs):
                return run(*args, **kwargs)
        except RuntimeError as error:
            if "support saved tensor hooks" in str(error):
                raise RuntimeError(f"{error} Fuse with recompute='product', which needs none.") from error
            raise
        finally:
            ledger.leave(call)

    return forward
