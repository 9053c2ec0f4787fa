"""Whether a module normalises rows, and by which eps: both are read off the results, wherever the code has eps."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tigon.fusion.engine.probe import build_probe, get_full_shape, run

# Row magnitudes from which eps is read: for any eps from 1e-24 to 1, some magnitude is near the root.
_SIZES = torch.logspace(-12, 0, 25, dtype=torch.float64)
SILU_IS_ONE = 1.2784645  # a gate with this number changes nothing, before the norm or after
_CLOSE = 2e-6  # how near, relatively, an eps measured on fp32 results lies to the eps in the code


@dataclass(frozen=True)
class Look:
    """Facts that a norm's results show.

    eps: the number added to the mean square, approximately; 0 if rows of any magnitude give the same result.
    centered: adding a number to all elements in a row changes no result.
    group_size: how many numbers are normed together; None for whole rows.
    """

    eps: float
    centered: bool
    group_size: int | None = None

    def is_near(self, eps: float) -> bool:
        return abs(eps - self.eps) <= 100 * _CLOSE * self.eps

    def numbers(self) -> Iterator[float]:
        """The numbers that eps may be in the code, the likeliest first."""
        machine = (torch.finfo(dtype).eps for dtype in (torch.float32, torch.float16, torch.bfloat16))
        short = (float(f"{self.eps:.{digits}e}") for digits in range(8))
        near = [n for n in (*machine, *short) if abs(n - self.eps) <= _CLOSE * self.eps]
        yield from dict.fromkeys(near[:2])


@functools.lru_cache(maxsize=16)
def _rows(width: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(width, generator=generator, dtype=torch.float64)
    u = (u - u.mean()) / (u - u.mean()).square().mean().sqrt()
    other = torch.cat([u[: width // 2], 3 * u[width // 2 :]])
    rows = torch.stack([10 * u, 100 * u, -100 * u, 100 * other, -100 * other, 100 * (u + 1), *(s * u for s in _SIZES)])
    return rows.float()[None]


def look_at(module: nn.Module, width: int, *, gated: bool = False) -> Look | None:
    """The Look for a module that normalises its input's rows; None for any other module.

    A norm's results are odd in the row, apart from a bias, do not depend on a large row's magnitude, and each
    element depends on the others.
    """
    probe = build_probe(
        module, {k: torch.ones(get_full_shape(p)) for k, p in module._parameters.items() if p is not None}
    )
    probe.training = False
    group_size = _find_group(probe, width, gated)
    groups, width = (1, width) if group_size is None else (width // group_size, group_size)
    x = _rows(width).repeat(1, 1, groups)
    # A clone: the module may write into the input.
    y = run(probe, x.clone(), torch.full_like(x, SILU_IS_ONE)) if gated else run(probe, x.clone())
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype or not bool(torch.isfinite(y).all()):
        return None
    y = y[..., :width]
    bias = (y[0, 1] + y[0, 2]).double() / 2
    ten, large, _, changed, negative, shifted, *small = (y[0].double() - bias).unbind()
    scale = float(large.abs().max())
    if not scale > 0:
        return None

    def is_same(one: Tensor, two: Tensor) -> bool:
        return bool(((one - two).abs() <= 1e-3 * scale).all())

    half = width // 2
    if not is_same(ten, large) or not is_same(changed, -negative) or is_same(changed[:half], large[:half]):
        return None
    # The share that eps leaves: size / sqrt(size² + eps), as the mean square of u is 1.
    shares = torch.stack(small) @ large / large.square().sum()
    at = int((shares - 0.7).abs().argmin())
    share = float(shares[at])
    if not 0 < share < 1.01:
        return None
    eps = 0.0 if share > 1 - 1e-5 else float(_SIZES[at]) ** 2 * (share**-2 - 1)
    return Look(eps, is_same(shifted, large), group_size)


def _find_group(probe: nn.Module, width: int, gated: bool) -> int | None:
    """How many of a row's numbers, from the first on, depend on the first; None for all, or if that is no group."""
    x = torch.randn(1, 2, width, generator=torch.Generator().manual_seed(0))
    x[0, 1] = x[0, 0]
    x[0, 1, 0] += 10
    y = run(probe, x, torch.ones_like(x)) if gated else run(probe, x.clone())
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    changed = y[0, 0] != y[0, 1]
    size = int(changed.sum())
    return size if 1 < size < width and width % size == 0 and bool(changed[:size].all()) else None


def list_epsilons(module: nn.Module, look: Look) -> list[str | float]:
    """Where eps may be: the attributes with this value, on the module or the class, then the number itself."""
    names = [*vars(module), *(k for base in type(module).__mro__ for k in vars(base) if base not in nn.Module.__mro__)]
    values: dict[str, Any] = {k: vars(module).get(k, getattr(type(module), k, None)) for k in names}
    attributes = [k for k, v in values.items() if type(v) is float and look.is_near(v)]
    return [*attributes, *look.numbers()]
