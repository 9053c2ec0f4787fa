"""The language-model head, which returns lazy logits, and the model's forward, which tells the head of its labels."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint
from torch import Tensor

from tigon.fusion.patch import Patch, plain_forward, transformed
from tigon.logits.compiled import CompiledLogits
from tigon.logits.freed import regather_of
from tigon.logits.labels import counted
from tigon.logits.lazy import LazyLogits
from tigon.logits.recipe import Recipe
from tigon.logits.split import is_gathered, is_split
from tigon.parts.sharded_rows import is_dtensor
from tigon.runtime import is_exporting


def model_forward(before: Callable[..., Any], bound: bool = False) -> Callable[..., Any]:
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
        if ledger.check_arguments is not None:
            ledger.check_arguments(kwargs)
        if not torch.compiler.is_compiling() and not getattr(self, "_is_replica", False):
            patch.fusion._see_heads()
        at = patch.labels_at
        if at is not None and len(args) > at:
            args = (*args[:at], labels := counted(args[at]), *args[at + 1 :])
        else:
            labels = kwargs.get("labels")
        # A new dictionary: the labels are replaced in the copy, never in a dictionary that belongs to the caller.
        kwargs = {**kwargs, **{name: counted(kwargs[name]) for name in ("labels", "shift_labels") if name in kwargs}}
        given = labels is not None or kwargs.get("shift_labels") is not None
        compiling = torch.compiler.is_compiling()
        call = ledger.enter((given or ledger.lazy) and not (compiling and makes_loss_module))
        try:
            if compiling:  # torch.compile's partitioner decides which activations are kept
                return run(*args, **kwargs)
            with ledger.recompute.forward():
                return run(*args, **kwargs)
        except RuntimeError as error:
            if "support saved tensor hooks" in str(error):
                raise RuntimeError(f"{error} Fuse with recompute='product', which needs none.") from error
            raise
        finally:
            ledger.leave(call)

    return forward


def head_forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    patch: Patch = self._tigon
    ledger, plain = patch.ledger, patch.before or functools.partial(plain_forward, self)
    if not (ledger.active and ledger.lazy) or args or kwargs:
        return plain(input, *args, **kwargs)
    compiling = torch.compiler.is_compiling()
    regather = regather_of(self)
    if regather is not None and compiling:
        return plain(input)
    # Under torch.compile the lazy object is no tensor. Evaluation gathers logits, and the graph of torch.export
    # returns only tensors: both get real logits.
    if transformed() or (compiling and (is_exporting() or not torch.is_grad_enabled())):
        return plain(input)
    known = not is_split(self.weight) or (is_gathered(self) and not compiling)
    recipe = Recipe.of(input, self.weight, self.bias, ledger, regather) if known else None
    if recipe is None:
        ledger.plain_head(_why_plain(self))
        return plain(input)
    return CompiledLogits(recipe) if compiling else LazyLogits.of(recipe)


def _why_plain(head: Any) -> str:
    if is_dtensor(head.weight):
        return "its weight is a DTensor, and its logits are not gathered in a way that is known"
    if hasattr(head.weight, "ds_id"):
        return "its weight is partitioned by DeepSpeed's ZeRO-3"
    return f"its weight, {str(head.weight.dtype).removeprefix('torch.')}, does not fit the hidden states it was given"
