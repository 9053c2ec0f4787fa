"""Patch embeddings: convolutions whose kernels lie side by side, which are a matrix product over the patches.

    y[b, :, i, j] = W vec(x[b, :, i·p : (i + 1)·p, j·p : (j + 1)·p]) + bias

An input that is cut into patches already, as in Qwen's vision models, is not even copied.

Source: Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tigon.fusion.engine.part import ModulePart, register
from tigon.fusion.engine.patch import is_functorch_active, plain_forward
from tigon.fusion.logits.deferred import as_tensor


@dataclass(frozen=True)
class Patches:
    """A convolution with this kernel, whose stride is the kernel's size."""

    kernel: tuple[int, ...]

    def __str__(self) -> str:
        return f"patches of {' × '.join(map(str, self.kernel))} as a matrix product"


def recognize_patches(module: Any) -> Patches | None:
    """The kernel of a convolution over patches side by side, without padding; None for any other module."""
    if type(module) not in (nn.Conv2d, nn.Conv3d) or module.groups != 1 or math.prod(module.kernel_size) == 1:
        return None
    if module.stride != module.kernel_size or {*module.dilation} != {1} or module.padding == "same":
        return None
    return Patches(module.kernel_size) if module.padding == "valid" or {*module.padding} == {0} else None


def patches_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    patch, formula = self._tigon, self._tigon.formula
    x: Any = as_tensor(args[0]) if len(args) == 1 and not kwargs else None
    if not patch.ledger.active or is_functorch_active() or not patch.still_holds(self) or not _fits(self, x, formula):
        return plain_forward(self, *args, **kwargs)
    patch.ledger.count("patches", patch.key)
    return multiply_patches(x, self.weight, self.bias, formula.kernel)


def _fits(module: Any, x: Any, formula: Patches) -> bool:
    weight = module.weight
    if not isinstance(x, Tensor) or x.dim() != weight.dim() or x.shape[1] != weight.shape[1]:
        return False
    if any(hasattr(t, "device_mesh") for t in (x, weight)) or not x.is_contiguous():
        return False  # a channels-last input gives a channels-last result
    return all(n >= size for n, size in zip(x.shape[2:], formula.kernel, strict=True))


def multiply_patches(x: Tensor, weight: Tensor, bias: Tensor | None, kernel: tuple[int, ...]) -> Tensor:
    """F.conv2d or F.conv3d(x, weight, bias, stride=kernel), x (B, C, …) and weight (O, C, *kernel), by F.linear.

    As in a convolution, a remainder at the far edges that fills no patch is left out.
    """
    counts = [n // size for n, size in zip(x.shape[2:], kernel, strict=True)]
    for dim, (count, size) in enumerate(zip(counts, kernel, strict=True), 2):
        x = x.narrow(dim, 0, count * size)
    n = len(kernel)
    x = x.unflatten(2, (counts[0], kernel[0]))
    for dim in range(1, n):
        x = x.unflatten(2 + 2 * dim, (counts[dim], kernel[dim]))
    # (B, C, count, size, …) → (B, count, …, C, size, …)
    x = x.permute(0, *range(2, 2 + 2 * n, 2), 1, *range(3, 3 + 2 * n, 2)).flatten(n + 1)
    y = F.linear(x, weight.flatten(1), bias)
    return y.movedim(-1, 1).contiguous()


register(ModulePart("patches", recognize_patches, patches_forward))
