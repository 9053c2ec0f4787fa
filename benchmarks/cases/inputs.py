"""The inputs and the right outputs of a benchmark case: random inputs from one seed, and the answer in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
# The compared part of an output or gradient and its fp64 value: (index, expected).
Expected = dict[str, list[tuple[Any, Tensor]]]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
# A result counts as wrong above this ‖out − ref‖ / ‖ref‖: a few roundings of the dtype (fp32 lets tf32 through).
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-3, torch.float64: 1e-9}
# The number of elements that the fp64 reference holds at a time.
REFERENCE_ELEMENTS = 1 << 24


@dataclass
class Inputs:
    """The arguments of one case by name, the names that get gradients, and upstream gradients (None: a loss's 1).

    Without a name that gets a gradient, the case is of the forward alone.
    """

    arguments: dict[str, Any]
    wrt: tuple[str, ...]
    outputs: tuple[str, ...]
    grads: tuple[Tensor, ...] | None = None

    def clone(self) -> Inputs:
        """The same values and strides in fresh memory, for implementations that overwrite their inputs."""
        arguments = {
            k: _clone(v).requires_grad_(k in self.wrt) if isinstance(v, Tensor) else v
            for k, v in self.arguments.items()
        }
        grads = None if self.grads is None else tuple(_clone(g) for g in self.grads)
        return Inputs(arguments, self.wrt, self.outputs, grads)

    @property
    def sample(self) -> Tensor:
        """A tensor of floats, whose dtype and device tell whether kernels run."""
        if self.wrt:
            tensor: Tensor = self.arguments[self.wrt[0]]
            return tensor
        return next(t for t in self.arguments.values() if isinstance(t, Tensor) and t.is_floating_point())

    @property
    def loss_scale(self) -> Any:
        """The upstream gradient of a loss."""
        return 1.0 if self.grads is None else self.grads[0].double()


def _clone(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t.detach())


@dataclass
class Draw:
    """Random tensors from one seed. Never zeros, which can run faster than real data, and hide unwritten outputs."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        t = torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)
        return t if scale == 1.0 else t.mul_(scale)

    def loss_grads(self, tokens: int) -> tuple[Tensor, ...] | None:
        """1, as in `loss.backward()`; in fp16 scaled as in training, or most gradients would round to 0.

        Of a few tokens each gradient is large: eager code overflows, and the scaler of a training run would come down.
        """
        scale = min(2.0**15, 2.0**10 * tokens)
        return (torch.full((), scale, device=self.device),) if self.dtype == torch.float16 else None

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def targets(self, n: int, v: int, ignored: float) -> Tensor:
        target = torch.randint(v, (n,), generator=self.generator, device=self.device)
        if ignored:
            target[torch.randperm(n, generator=self.generator, device=self.device)[: int(n * ignored)]] = -100
        return target


def make_elementwise(*names: str) -> Callable[[Shape, torch.dtype, torch.device, float], Inputs]:
    """Draws tensors of one shape by name, which all get gradients, and an upstream gradient of one output, y."""

    def make(shape: Shape, dtype: torch.dtype, device: torch.device, ignored: float) -> Inputs:
        draw = Draw(device, dtype)
        arguments: dict[str, Any] = {name: draw.normal(*shape).requires_grad_() for name in names}
        return Inputs(arguments, names, ("y",), (draw.normal(*shape),))

    return make


# -------------------------------------------------------------------------------------------------------- references


def split_rows(rows: int, row_elements: int) -> Iterator[slice]:
    step = max(1, REFERENCE_ELEMENTS // max(1, row_elements))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def expect_rows(
    formula: Callable[..., Any], rowwise: tuple[str, ...], summed: tuple[str, ...] = (), second: tuple[str, ...] = ()
) -> Callable[[Inputs], Expected]:
    """Expected values of an operator that works row by row (along the first dimension), by autograd in fp64.

    Rows lie along the first dimension of the tensors named in `rowwise`, and along the second of those in `second`.

    Only the first and the last chunk of rows are compared: offsets beyond 2³¹ would fail in the last. Gradients named
    in `summed` add over all rows.
    """

    def expect(inputs: Inputs) -> Expected:
        assert inputs.grads is not None
        first = inputs.arguments[rowwise[0]]
        chunks = list(split_rows(first.shape[0], first[0].numel()))
        compared = [chunks[0]] if len(chunks) == 1 else [chunks[0], chunks[-1]]
        expected: Expected = {}
        totals: dict[str, Tensor] = {}
        for rows in chunks if summed else compared:
            part = {
                k: v.detach()[rows if k in rowwise else (slice(None), rows) if k in second else ...]
                .double()
                .requires_grad_(k in inputs.wrt)
                if isinstance(v, Tensor)
                else v
                for k, v in inputs.arguments.items()
            }
            out = formula(**part)
            outs = out if isinstance(out, tuple) else (out,)
            grads = torch.autograd.grad(outs, [part[k] for k in inputs.wrt], [g[rows].double() for g in inputs.grads])
            for k, g in zip(inputs.wrt, grads, strict=True):
                if k in summed:
                    totals[k] = totals[k] + g if k in totals else g
                elif rows in compared:
                    expected.setdefault(f"d{k}", []).append((rows, g))
            if rows in compared:
                for name, o in zip(inputs.outputs, outs, strict=True):
                    expected.setdefault(name, []).append((rows, o.detach()))
        return expected | {f"d{k}": [(..., total)] for k, total in totals.items()}

    return expect


def expect_loss(
    formula: Callable[..., Tensor], rowwise: tuple[str, ...], divisor: Callable[[Inputs], Any]
) -> Callable[[Inputs], Expected]:
    """Expected values of a loss that is a sum over rows, divided by a number: the loss, and some rows' gradients."""

    def expect(inputs: Inputs) -> Expected:
        first = inputs.arguments[rowwise[0]]
        chunks = list(split_rows(*first.shape))
        compared = [chunks[0]] if len(chunks) == 1 else [chunks[0], chunks[-1]]
        count = divisor(inputs)
        total = torch.zeros((), dtype=torch.float64, device=first.device)
        expected: Expected = {}
        for rows in chunks:
            wrt = inputs.wrt if rows in compared else ()
            part = {
                k: (v.detach()[rows].double() if v.is_floating_point() else v[rows]).requires_grad_(k in wrt)
                if isinstance(v, Tensor)
                else v
                for k, v in inputs.arguments.items()
            }
            loss = formula(**part) / count
            total += loss.detach()
            for k, g in zip(wrt, torch.autograd.grad(loss, [part[k] for k in wrt]) if wrt else (), strict=True):
                expected.setdefault(f"d{k}", []).append((rows, g * inputs.loss_scale))
        return {"loss": [(..., total)], **expected}

    return expect
