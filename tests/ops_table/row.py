"""The row type in the operator table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from numerics import FP32_ROUNDINGS
from torch import Tensor

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """A call: the shape for `make`, keyword arguments for the op and for `make`, and the reason for the case."""

    why: str
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    # With few numbers, errors are luck: small shapes are drawn several times and their errors pooled.
    draws: int = 1

    def __str__(self) -> str:
        return f"{self.why} {'x'.join(map(str, self.shape))}".replace(" ", "-")


@dataclass(frozen=True)
class Bad:
    """A call that must be refused with a sentence."""

    inputs: Callable[[], Inputs]
    message: str  # regular expression
    options: dict[str, Any] = field(default_factory=dict)
    # Whether the refusal must read the numbers, which on a GPU only happens in the checked mode.
    looks: bool = False


@dataclass(frozen=True)
class Replaced:
    """A call, its result names, and the docstring's equivalent code blocks, in order."""

    call: str
    results: str
    names: dict[str, Any]
    blocks: tuple[int, ...] = (0,)

    def __str__(self) -> str:
        return self.call


@dataclass(frozen=True)
class Op:
    """An operator.

    public: the function users call. reference: its specification, the truth in fp64. eager: user code without Tigon,
    whose error is doubled to bound the operator's. make(shape, dtype, generator, **): inputs; the first dimension in
    shape varies from step to step. launches: the operator's torch.ops.tigon names.
    """

    name: str
    public: Callable[..., Any]
    reference: Callable[..., Any]
    eager: Callable[..., Any]
    make: Callable[..., Inputs]
    cases: tuple[Case, ...]
    empty: tuple[tuple[int, ...], ...]
    bad: tuple[Bad, ...]
    launches: tuple[str, ...]
    # Calls as in real models, compiled ahead of time. The first also in fp16 and fp32, and with each input frozen in
    # turn.
    models: tuple[Case, ...]
    # Calls that agree with the code under "Replaces::" in the docstring.
    replaces: tuple[Replaced, ...] = ()
    # Batches that test_large.py repeats until a tensor has 2³¹ elements: one for each row addressing in the kernels.
    # Each has enough rows to be launched like a larger batch. Losses are unreduced.
    large: tuple[Case, ...] = ()
    # Floating-point inputs that get no gradient, by position.
    fixed: tuple[int, ...] = ()
    # Inputs whose gradient is always computed, since another input's gradient needs the result.
    needed: tuple[int, ...] = ()
    # Whether contiguous bf16 is read 16 bytes per thread and load.
    wide_loads: bool = True
    # Register bytes per thread that a launch may spill on sm_90 and sm_100.
    spills: int = 0
    # fp32 roundings allowed besides twice eager's error (numerics.py).
    roundings: int = FP32_ROUNDINGS
    # DTensors give "right" results, by torch's own operations, or are "refused" with a sentence.
    dtensor: str = "right"
    # Whether the op runs matrix products: autocast changes those, and GPU libraries pick algorithms by strides.
    products: bool = False

    def __str__(self) -> str:
        return self.name

    def draw(
        self, case: Case, dtype: torch.dtype, device: torch.device, seed: int | torch.Generator | None = 0
    ) -> Inputs:
        generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
        inputs = self.make(case.shape, dtype, generator, **case.inputs)
        return tuple(t.to(device) if hasattr(t, "to") else t for t in inputs)

    def differentiable(self, inputs: Inputs) -> list[int]:
        """Positions of inputs that can get a gradient."""
        floats = [i for i, t in enumerate(inputs) if isinstance(t, Tensor) and t.is_floating_point()]
        return [i for i in floats if i not in self.fixed]

    def rows(self, case: Case, inputs: Inputs) -> list[int | None]:
        """The dimension with the varying row count in each input, or None."""
        longer = Case(case.why, (case.shape[0] + 1, *case.shape[1:]), case.options, case.inputs)
        drawn = self.draw(longer, torch.float32, torch.device("cpu"))
        return [
            next((d for d in range(t.dim()) if t.shape[d] != other.shape[d]), None) if isinstance(t, Tensor) else None
            for t, other in zip(inputs, drawn, strict=True)
        ]

    @property
    def typical(self) -> Case:
        return self.cases[0]


def sample(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def randn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


# Names in the code that norms replace.
ROW = {"x": sample(3, 8), "residual": sample(8, 3).t(), "weight": sample(8), "bias": sample(1, 8)[0], "eps": 1e-5}
