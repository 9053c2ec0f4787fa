"""The options of FP8 layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Keep = Literal["bf16", "fp8"]
Weights = Literal["auto", "use", "step"]
WeightGradients = Literal["fp8", "bf16"]
Sums = Literal["fast", "exact"]
AllGather = Literal["bf16", "fp8"]
Base = Literal["keep", "release"]


@dataclass(frozen=True)
class FP8:
    """How `tigon.fuse(model, fp8=…)` runs the linear layers inside decoder layers in FP8.

    Args:
        first, last: decoder layers at the two ends of the model that stay in bf16. The first layer makes more than half
            of the gradient noise; the last layer makes little.
        head: multiply in FP8 in the loss of the head, too: `tigon.losses.ChunkOptions(fp8=True)`.
        keep: dtype in which gate and up wait for the backward pass. "fp8" halves the largest activation.
        weights: when weights are quantised. "use": before each product, and nothing is kept. "step": once until the
            optimizer changes them, and both copies are kept: 2 bytes a parameter, for gradient accumulation. "auto":
            frozen weights once; others at each use, or where gradients are accumulated and the GPU has room, once a
            step from the second step on. Weights that FSDP2 or ZeRO-3 gathers are never kept.
        dw: dtype of the products of weight gradients.
        sums: "fast": the tensor cores' own accumulator. "exact": fp32 sums after every 128 terms, about 7 % slower
            products.
        experts: run the stacked experts of a mixture in FP8, too, where their activation is a plain gated unit. Routers
            stay in the model's dtype.
        skip: names, or parts of names, of layers that stay in bf16.
        all_gather: what FSDP2 gathers of the weights of FP8 layers: the parameters' own dtype, or with "fp8" e4m3, one
            byte a parameter. The same numbers in FP8 layers; other code that reads such a weight while it is gathered
            reads the rounded weight.
        base: frozen weights under LoRA adapters. "keep": they stay, beside FP8 copies. "release": one FP8 copy takes
            their place, and half of their memory; `remove()` and merging give them back as rounded.
    Raises: ValueError for a negative count or an unknown choice.
    """

    first: int = 1
    last: int = 0
    head: bool = False
    keep: Keep = "bf16"
    weights: Weights = "auto"
    dw: WeightGradients = "fp8"
    sums: Sums = "fast"
    experts: bool = False
    skip: tuple[str, ...] = ()
    all_gather: AllGather = "bf16"
    base: Base = "keep"

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"FP8: {name} must be an integer of at least 0, got {value!r}.")
        for name in ("head", "experts"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"FP8: {name} must be True or False, got {getattr(self, name)!r}.")
        choices = {
            "keep": Keep, "weights": Weights, "dw": WeightGradients, "sums": Sums, "all_gather": AllGather,
            "base": Base,
        }  # fmt: skip
        for name, kind in choices.items():
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"FP8: {name} must be one of {get_args(kind)}, got {getattr(self, name)!r}.")
        if not isinstance(self.skip, list | tuple | set | frozenset) or not all(isinstance(n, str) for n in self.skip):
            raise ValueError(f"FP8: skip must be names of layers, got {self.skip!r}.")
        object.__setattr__(self, "skip", tuple(self.skip))  # a list, as YAML gives, would not be hashable


def parse_fp8(value: bool | FP8 | None) -> FP8 | None:
    """The options that `fuse(fp8=…)` stands for.

    Raises: ValueError for anything but True, False, None and an FP8.
    """
    if value is None or value is False:
        return None
    if value is True:
        return FP8()
    if not isinstance(value, FP8):
        raise ValueError(f"fuse: fp8 must be True, False or a tigon.FP8, got {value!r}.")
    return value
