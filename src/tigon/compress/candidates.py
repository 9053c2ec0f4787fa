"""Candidates for storing a feed-forward layer: each method at many sizes, with the layer's output error.

    FFN(x) = Σ_i h_i(x) v_i

    neuron i's score         E|h_i| · ‖v_i‖: its contribution to the output; for "prune", "rank" and "svd"
    neuron i's 3-bit loss    E(h_i − ĥ_i)² ‖v_i‖² + E h_i² ‖v_i − v̂_i‖²: output error from rounding; for "bits"

Neurons are sorted once. A candidate is a heavy-neuron count and a treatment for the rest. Errors are measured on
held-out inputs, which neither scores nor moments have seen.

Source: FFSplit, Liu et al. 2024, https://arxiv.org/abs/2401.04044
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.compress.low_rank import Spectrum
from tigon.compress.packing import (
    GROUP,
    LARGEST,
    WIDTHS,
    count_bytes,
    dequantize_groups,
    quantize_groups,
    split_groups,
)
from tigon.compress.recognition import FeedForward, read_weight
from tigon.ops.acts import ACTS

HELD = 256  # held-out rows for errors, at most a fifth of all rows
PAIRS = ((3, 2), (4, 2), (4, 3), (5, 4), (6, 3), (6, 4), (8, 3), (8, 4), (8, 6))
SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)  # heavy neurons
EVEN = 16  # neurons or ranks
SIZES = (0.5, 0.65, 0.8, 0.9, 1.0, 1.15, 1.35, 1.6)  # fractions of a layer's budget, for methods without bits


@dataclass(frozen=True)
class Candidate:
    """A way to store one layer.

    heavy: neurons kept as floats, or at the wider bit width.
    bits: widths for both groups; None for floats.
    rank: rank for the rest; 0 without a rest.
    error: E‖y − ŷ‖² / E‖y‖² at the layer's output.
    """

    method: str
    heavy: int
    bits: tuple[int, int] | None
    rank: int
    bytes: int
    error: float


class Layer:
    """A feed-forward layer under analysis: fp32 weights, neurons sorted by importance, inputs and outputs.

    rows, row_biases: gate's, where there is one, and up's.

    x: (T, d), calibration inputs. bits: sort neurons by 3-bit loss instead of score.
    """

    def __init__(self, model: nn.Module, feed_forward: FeedForward, x: Tensor, *, bits: bool = False) -> None:
        self.feed_forward = feed_forward
        self._held_at: dict[int, tuple[Tensor, Tensor]] = {}
        *first, down = (model.get_submodule(name) for name in feed_forward.layers)
        self.dtype = read_weight(down).dtype
        self.rows = [read_weight(module).float() for module in first]
        self.row_biases = [_read_bias(module) for module in first]
        self.down, self.down_bias = read_weight(down).float(), _read_bias(down)
        if feed_forward.packed:
            self.rows = list(self.rows[0].chunk(2))
            self.row_biases = [None, None] if self.row_biases[0] is None else list(self.row_biases[0].chunk(2))
        self._check()
        self.neurons, self.width = self.rows[0].shape
        every = max(5, len(x) // HELD)
        is_held = torch.arange(len(x), device=x.device) % every == every - 1
        self.fit, self.held = x[~is_held].float(), x[is_held].float()
        self.h_fit = self.inner(self.fit)
        score = self.h_fit.abs().mean(0) * self.down.norm(dim=0)
        self._sort((self._measure_3_bit_loss() if bits else score).argsort(descending=True))
        total = float(score.sum())
        self.tenth = float(score.sort(descending=True).values[: max(1, self.neurons // 10)].sum()) / (total or 1.0)
        self.h_held = self.inner(self.held)
        self.y = self.h_held @ self.down.t()
        self.size = float(self.y.square().sum()) or 1.0

    def _check(self) -> None:
        for weight in (*self.rows, self.down):
            if not bool((weight.abs() <= LARGEST).all()):  # NaN fails this check too
                raise ValueError(
                    f"feed_forward: the weights in {self.feed_forward.name} must be finite and within ±65504, got NaN, "
                    "infinity or larger values."
                )

    def _sort(self, order: Tensor) -> None:
        """Reorder the neurons; the layer's function does not change."""
        self.rows, self.down = [weight[order] for weight in self.rows], self.down[:, order]
        self.row_biases = [None if bias is None else bias[order] for bias in self.row_biases]
        self.h_fit = self.h_fit[:, order]

    def _measure_3_bit_loss(self) -> Tensor:
        """Squared output error when a neuron's weights are rounded to 3 bits, for each neuron."""
        h, down = self._quantize_inner(self.fit, 3), _quantize(self.down, 3)
        error = (h - self.h_fit).square().mean(0) * self.down.square().sum(0)
        return error + self.h_fit.square().mean(0) * (down - self.down).square().sum(0)

    def inner(self, x: Tensor, up: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
        """h (T, N) for inputs x; up and gate replace the layer's weights if given."""
        act = ACTS[self.feed_forward.act].value
        u = F.linear(x, self.rows[-1] if up is None else up, self.row_biases[-1])
        if len(self.rows) == 1:
            return act(u)
        return act(F.linear(x, self.rows[0] if gate is None else gate, self.row_biases[0])) * u

    def _quantize_inner(self, x: Tensor, bits: int) -> Tensor:
        """h with gate's and up's weights rounded to nearest."""
        *gate, up = (_quantize(weight, bits) for weight in self.rows)
        return self.inner(x, up, *gate)

    @property
    def matrices(self) -> int:
        return len(self.rows) + 1

    @functools.cached_property
    def bias_bytes(self) -> int:
        biases = (*self.row_biases, self.down_bias)
        return sum(b.numel() * self.dtype.itemsize for b in biases if b is not None)

    @property
    def bytes(self) -> int:
        """Bytes the original layer takes."""
        return self.matrices * self.neurons * self.width * self.dtype.itemsize + self.bias_bytes

    def error(self, y: Tensor) -> float:
        """E‖y − ŷ‖² / E‖y‖² for an output without down's bias."""
        return float((y - self.y).square().sum()) / self.size

    # ---------------------------------------------------------------------------------------------------------- bits

    def _quantize_held(self, bits: int) -> tuple[Tensor, Tensor]:
        """h for the held-out inputs, and down, with all weights rounded to `bits`. Cached for the layer's lifetime."""
        if bits not in self._held_at:
            self._held_at[bits] = self._quantize_inner(self.held, bits), _quantize(self.down, bits)
        return self._held_at[bits]

    def split_by_bits(self, heavy: int, bits: tuple[int, int]) -> Candidate:
        (h, down), (h_rest, down_rest) = (self._quantize_held(b) for b in bits)
        y = h[:, :heavy] @ down[:, :heavy].t() + h_rest[:, heavy:] @ down_rest[:, heavy:].t()
        size = self.bias_bytes
        for count, width in ((heavy, bits[0]), (self.neurons - heavy, bits[1])):
            if count:
                size += len(self.rows) * count_bytes(count, self.width, width)
                size += count_bytes(len(self.down), count, width)
        return Candidate("bits", heavy, bits, 0, size, self.error(y))

    def by_bits(self, budget: float) -> Iterator[Candidate]:
        """All sizes; there are only a few."""
        for width in WIDTHS:
            yield self.split_by_bits(self.neurons, (width, width))
        for heavy in self._count_each(SHARES):
            for pair in PAIRS:
                yield self.split_by_bits(heavy, pair)

    def count_heavy(self, share: float) -> int:
        """Heavy-neuron count for a share, rounded to whole groups when down has several groups per row."""
        step = split_groups(self.neurons)[1] if self.neurons >= 8 * GROUP else 1
        return min(self.neurons, round(share * self.neurons / step) * step)

    def _count_each(self, shares: Iterable[float]) -> list[int]:
        return sorted({k for share in shares if 0 < (k := self.count_heavy(share)) < self.neurons})

    # -------------------------------------------------------------------------------------------------- without bits

    def by_prune(self, budget: float) -> Iterator[Candidate]:
        """Sizes around the budget, which is a fraction of the layer's bytes."""
        for share in _list_shares(budget):
            heavy = max(1, _round_down(int(share * self.neurons)))
            y = self.h_held[:, :heavy] @ self.down[:, :heavy].t()
            size = heavy * self.matrices * self.width * self.dtype.itemsize + self.bias_bytes * heavy // self.neurons
            yield Candidate("prune", heavy, None, 0, size, self.error(y))

    @functools.cached_property
    def outer_moment(self) -> Tensor:
        """(d, d), second moment for gate's and up's inputs."""
        return self.fit.t() @ self.fit / len(self.fit)

    @functools.cached_property
    def inner_moment(self) -> Tensor:
        """(N, N), second moment for down's inputs."""
        return self.h_fit.t() @ self.h_fit / len(self.h_fit)

    def spectra(self, heavy: int) -> list[Spectrum]:
        """Spectra for the non-heavy rows or columns in gate, up and down."""
        down = Spectrum(self.down[:, heavy:], self.inner_moment[heavy:, heavy:])
        return [*(Spectrum(weight[heavy:], self.outer_moment) for weight in self.rows), down]

    def by_rank(self, budget: float) -> Iterator[Candidate]:
        for heavy in self._count_each((budget / 4, budget / 2, 3 * budget / 4)):
            yield from self._split_by_rank(heavy, "rank", budget)

    def by_svd(self, budget: float) -> Iterator[Candidate]:
        yield from self._split_by_rank(0, "svd", budget)

    def _split_by_rank(self, heavy: int, method: str, budget: float) -> Iterator[Candidate]:
        spectra = self.spectra(heavy)
        rest = self.neurons - heavy
        for share in _list_shares(budget):
            rank = _round_down(int((share * self.neurons - heavy) * self.width / (rest + self.width)))
            if not 1 <= rank < rest * self.width // (rest + self.width):
                continue
            *rows, (outer, inner) = (spectrum.factors(rank) for spectrum in spectra)
            *gate, up = (torch.cat((w[:heavy], o @ i)) for w, (o, i) in zip(self.rows, rows, strict=True))
            h = self.inner(self.held, up, *gate)
            y = h[:, :heavy] @ self.down[:, :heavy].t() + (h[:, heavy:] @ inner.t()) @ outer.t()
            numbers = self.matrices * (heavy * self.width + rank * (rest + self.width))
            yield Candidate(method, heavy, None, rank, numbers * self.dtype.itemsize + self.bias_bytes, self.error(y))


def _quantize(weight: Tensor, bits: int) -> Tensor:
    return dequantize_groups(*quantize_groups(weight, bits), weight.shape[1], torch.float32)


def _read_bias(module: Any) -> Tensor | None:
    bias = module._parameters.get("bias")
    return None if bias is None else bias.detach().float()


def _list_shares(budget: float) -> list[float]:
    return [share for size in SIZES if (share := size * budget) < 1]


def _round_down(count: int) -> int:
    """Round large counts to multiples of 16: other sizes make GPU matmuls several times slower."""
    return count // EVEN * EVEN if count >= 8 * EVEN else count
