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

from tigon.compress.finding import FeedForward, weight_of
from tigon.compress.low_rank import Spectrum
from tigon.compress.options import Bits
from tigon.compress.packing import GROUP, LARGEST, groups_of, quantize_groups, stored_bytes, widen_groups
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

    x: (T, d), calibration inputs. bits: sort neurons by 3-bit loss instead of score. seed: random order.
    """

    def __init__(
        self, model: nn.Module, found: FeedForward, x: Tensor, *, bits: bool = False, seed: int | None = None
    ) -> None:  # fmt: skip
        self.found = found
        self._rounded_at: dict[int, tuple[Tensor, Tensor]] = {}
        up, down = model.get_submodule(found.up), model.get_submodule(found.down)
        self.gate: Tensor | None = None
        self.gate_bias: Tensor | None = None
        self.up, self.up_bias = weight_of(up).float(), _bias(up)
        self.dtype = weight_of(up).dtype
        if found.gate is not None:
            gate = model.get_submodule(found.gate)
            self.gate, self.gate_bias = weight_of(gate).float(), _bias(gate)
        elif found.packed:
            self.gate, self.up = self.up.chunk(2)
            if self.up_bias is not None:
                self.gate_bias, self.up_bias = self.up_bias.chunk(2)
        self.down, self.down_bias = weight_of(down).float(), _bias(down)
        self._check()
        self.neurons, self.width = self.up.shape
        each = max(5, len(x) // HELD)
        apart = torch.arange(len(x), device=x.device) % each == each - 1
        self.fit, self.held = x[~apart].float(), x[apart].float()
        self.h_fit = self.inner(self.fit)
        score = self.h_fit.abs().mean(0) * self.down.norm(dim=0)
        if seed is None:
            order = (self._lost() if bits else score).argsort(descending=True)
        else:
            draw = torch.Generator().manual_seed(seed)
            order = torch.randperm(self.neurons, generator=draw).to(score.device)
        self._sort(order)
        total = float(score.sum())
        self.tenth = float(score.sort(descending=True).values[: max(1, self.neurons // 10)].sum()) / (total or 1.0)
        self.h_held = self.inner(self.held)
        self.y = self.h_held @ self.down.t()
        self.size = float(self.y.square().sum()) or 1.0

    def _check(self) -> None:
        for weight in (self.gate, self.up, self.down):
            if weight is not None and not bool((weight.abs() <= LARGEST).all()):  # NaN fails this check too
                raise ValueError(
                    f"feed_forward: the weights of {self.found.name} must be finite and within ±65504, got others "
                    "(NaN, infinite or larger)."
                )

    def _sort(self, order: Tensor) -> None:
        """Reorder the neurons; the layer's function does not change."""
        self.up, self.down = self.up[order], self.down[:, order]
        self.gate = None if self.gate is None else self.gate[order]
        self.up_bias, self.gate_bias = (None if b is None else b[order] for b in (self.up_bias, self.gate_bias))
        self.h_fit = self.h_fit[:, order]

    def _lost(self) -> Tensor:
        """Squared output error when a neuron's weights are rounded to 3 bits, for each neuron."""
        h = self.inner(self.fit, _rounded(self.up, 3), None if self.gate is None else _rounded(self.gate, 3))
        moved = (h - self.h_fit).square().mean(0) * self.down.square().sum(0)
        return moved + self.h_fit.square().mean(0) * (_rounded(self.down, 3) - self.down).square().sum(0)

    def inner(self, x: Tensor, up: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
        """h (T, N) for inputs x; up and gate replace the layer's weights if given."""
        u = F.linear(x, self.up if up is None else up, self.up_bias)
        act = ACTS[self.found.act].value
        if self.gate is None:
            return act(u)
        return act(F.linear(x, self.gate if gate is None else gate, self.gate_bias)) * u

    @functools.cached_property
    def matrices(self) -> int:
        return 2 if self.gate is None else 3

    @functools.cached_property
    def bias_bytes(self) -> int:
        biases = (self.gate_bias, self.up_bias, self.down_bias)
        return sum(b.numel() * self.dtype.itemsize for b in biases if b is not None)

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes the original layer takes."""
        return self.matrices * self.neurons * self.width * self.dtype.itemsize + self.bias_bytes

    def error(self, y: Tensor) -> float:
        return float((y - self.y).square().sum()) / self.size

    # ------------------------------------------------------------------------------------------------------- by bits

    def _at(self, bits: int) -> tuple[Tensor, Tensor]:
        """h for the held-out inputs, and down, with all weights rounded to `bits`. Cached for the layer's lifetime."""
        if bits not in self._rounded_at:
            gate = None if self.gate is None else _rounded(self.gate, bits)
            h = self.inner(self.held, _rounded(self.up, bits), gate)
            self._rounded_at[bits] = h, _rounded(self.down, bits)
        return self._rounded_at[bits]

    def split_by_bits(self, heavy: int, bits: tuple[int, int]) -> Candidate:
        (h, down), (h_rest, down_rest) = (self._at(b) for b in bits)
        y = h[:, :heavy] @ down[:, :heavy].t() + h_rest[:, heavy:] @ down_rest[:, heavy:].t()
        rest, size = self.neurons - heavy, self.bias_bytes
        for count, width in ((heavy, bits[0]), (rest, bits[1])):
            if count:
                size += (self.matrices - 1) * stored_bytes(count, self.width, width)
                size += stored_bytes(len(self.down), count, width)
        return Candidate("bits", heavy, bits, 0, size, self.error(y))

    def by_bits(self, budget: float) -> Iterator[Candidate]:
        """All sizes; there are only a few."""
        for width in (2, 3, 4, 5, 6, 8):
            yield self.split_by_bits(self.neurons, (width, width))
        for heavy in self._counts(SHARES):
            for pair in PAIRS:
                yield self.split_by_bits(heavy, pair)

    def heavy_of(self, share: float) -> int:
        """Heavy-neuron count for a share, rounded to whole groups when down has several groups per row."""
        step = groups_of(self.neurons)[1] if self.neurons >= 8 * GROUP else 1
        return min(self.neurons, round(share * self.neurons / step) * step)

    def _counts(self, shares: Iterable[float]) -> list[int]:
        return sorted({k for share in shares if 0 < (k := self.heavy_of(share)) < self.neurons})

    # -------------------------------------------------------------------------------------------------- without bits

    def by_prune(self, budget: float) -> Iterator[Candidate]:
        """Sizes around the budget, which is a fraction of the layer's bytes."""
        for share in self._shares(budget):
            yield self.pruned(max(1, _even(int(share * self.neurons))))

    def _shares(self, budget: float) -> list[float]:
        return [share for size in SIZES if (share := size * budget) < 1]

    def pruned(self, heavy: int) -> Candidate:
        each = self.matrices * self.width * self.dtype.itemsize
        y = self.h_held[:, :heavy] @ self.down[:, :heavy].t()
        biases = self.bias_bytes * heavy // self.neurons
        return Candidate("prune", heavy, None, 0, heavy * each + biases, self.error(y))

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
        rows = [weight[heavy:] for weight in (self.gate, self.up) if weight is not None]
        down = Spectrum(self.down[:, heavy:], self.inner_moment[heavy:, heavy:])
        return [*(Spectrum(w, self.outer_moment) for w in rows), down]

    def by_rank(self, budget: float) -> Iterator[Candidate]:
        for heavy in self._counts((budget / 4, budget / 2, 3 * budget / 4)):
            yield from self._ranks(heavy, "rank", budget)

    def by_svd(self, budget: float) -> Iterator[Candidate]:
        yield from self._ranks(0, "svd", budget)

    def _ranks(self, heavy: int, method: str, budget: float) -> Iterator[Candidate]:
        spectra = self.spectra(heavy)
        rest = self.neurons - heavy
        for share in self._shares(budget):
            rank = _even(int((share * self.neurons - heavy) * self.width / (rest + self.width)))
            if 1 <= rank < rest * self.width // (rest + self.width):
                yield self.split_by_rank(heavy, rank, method, [s.factors(rank) for s in spectra])

    def split_by_rank(
        self, heavy: int, rank: int, method: str, factors: list[tuple[Tensor, Tensor]]
    ) -> Candidate:  # fmt: skip
        *rows, (outer, inner) = factors
        up = torch.cat((self.up[:heavy], rows[-1][0] @ rows[-1][1]))
        gate = None if self.gate is None else torch.cat((self.gate[:heavy], rows[0][0] @ rows[0][1]))
        h = self.inner(self.held, up, gate)
        y = h[:, :heavy] @ self.down[:, :heavy].t() + (h[:, heavy:] @ inner.t()) @ outer.t()
        rest = self.neurons - heavy
        numbers = self.matrices * (heavy * self.width + rank * (rest + self.width))
        return Candidate(method, heavy, None, rank, numbers * self.dtype.itemsize + self.bias_bytes, self.error(y))


def _rounded(weight: Tensor, bits: int) -> Tensor:
    return widen_groups(*quantize_groups(weight, bits), weight.shape[1], torch.float32)


def _bias(module: Any) -> Tensor | None:
    bias = module._parameters.get("bias")
    return None if bias is None else bias.detach().float()


def _even(count: int) -> int:
    """Round large counts to multiples of 16: other sizes make GPU matmuls several times slower."""
    return count // EVEN * EVEN if count >= 8 * EVEN else count


def fixed(layer: Layer, chosen: Bits) -> Candidate:
    """The single candidate that `Bits` describes."""
    return layer.split_by_bits(layer.heavy_of(chosen.share), (chosen.heavy, chosen.rest))
