"""Frozen linear layers from checkpoints in FP8: their products, with the gradient of their input.

transformers' own forward of these layers is for inference in some releases: no gradient comes back through it. Layers
under an adapter are replaced, too, for the calls in which PEFT's own code runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tigon.fusion.engine.part import Part, Site, Stage, register
from tigon.fusion.engine.patch import Patch, is_functorch_active, plain_forward
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.fp8.checkpoint import check_gradient, is_fp8_layer, read_stored
from tigon.fusion.logits.deferred import as_tensor
from tigon.kernels import autocast_dtype
from tigon.kernels.autograd import is_traced
from tigon.ops.fp8.frozen_checkpoint import StoredFP8, multiply_frozen

CALLER = "it was called by torch.compile, by a trace or transform, or with keywords"


class FP8Checkpoint(Part):
    """The linear layers that transformers loads in FP8."""

    kind, stage = "fp8_base", Stage.MODEL
    compiled = "fp8_base: layers run in transformers' own code under torch.compile."

    def fuse(self, site: Site, module: nn.Module) -> None:
        modules = site.modules()
        bases = {id(m._modules["base_layer"]) for m in modules if "base_layer" in m._modules}
        for layer in filter(is_fp8_layer, modules):
            if site.find_patch(layer) is not None:
                continue
            if (reason := site.why_not(layer)) is not None:
                site.record_skipped(self, layer, reason)
                continue
            patch = Patch(self, site.ledger)
            patch.key = type(layer).__name__
            site.install(layer, stored_forward, patch)
            if id(layer) not in bases:  # an adapter's row stands for its base layer
                site.record_fused(self, layer, "frozen, with the gradient of its input", key=patch.key)


def stored_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    patch: Patch = self._tigon
    if not patch.ledger.active:
        return plain_forward(self, *args, **kwargs)
    if kwargs or len(args) != 1 or torch.compiler.is_compiling() or is_functorch_active():
        for x in (*args, *kwargs.values()):
            check_gradient(self, x, CALLER)
        return plain_forward(self, *args, **kwargs)
    x = as_tensor(args[0])
    if is_traced(x) or not x.dim() or not x.dtype.is_floating_point or x.shape[-1] != self.in_features:
        check_gradient(self, x, CALLER)
        return plain_forward(self, x)
    dtype = x.dtype if x.dtype == torch.float64 else autocast_dtype(x.device.type) or x.dtype
    weight = read_stored(self, x, dtype)
    if not isinstance(weight, StoredFP8):
        if isinstance(weight, Reason):
            patch.ledger.count_fallback(patch.part.kind, patch.key, weight.text)
            check_gradient(self, x, weight.text)
        return plain_forward(self, x)
    y = multiply_frozen(x.to(dtype), weight)
    bias = self._parameters.get("bias")
    patch.ledger.count(patch.part.kind, patch.key)
    return (y if bias is None else y + bias.to(dtype)).to(x.dtype)


register(FP8Checkpoint())
