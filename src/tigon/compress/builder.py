"""Build the modules that replace a feed-forward layer for a given storage method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tigon.compress.candidates import Candidate, Layer
from tigon.compress.layers import LowRank, Packed, SplitLinear, make_linear
from tigon.compress.recognition import FeedForward
from tigon.compress.rounding import DAMPING, fit_codes
from tigon.ops.acts import ACTS

Modules = dict[str, nn.Module]  # keyed by module name in the model
Parts = list[Any]  # heavy neurons and the rest, as far as there are any
T = TypeVar("T")


@torch.no_grad()
def build_layers(layer: Layer, candidate: Candidate, *, fit: bool = True) -> Modules:
    """Build the new layers for a candidate.

    fit: round weights to fit the calibration inputs (`rounding`), unless rounding to nearest does as well on held-out
        rows. False: round each weight to nearest.
    """
    heavy = candidate.heavy
    if candidate.method == "prune":
        return _prune(layer, heavy)
    if candidate.bits is None:
        return _assemble(layer, *_factorize(layer, heavy, candidate.rank))
    near = _assemble(layer, *_round(layer, heavy, candidate.bits))
    if not fit:
        return near
    fitted = _assemble(layer, *_fit(layer, heavy, candidate.bits))
    return min(fitted, near, key=lambda layers: measure_error(layer, layers))


def compute_output(feed_forward: FeedForward, layers: Mapping[str, nn.Module], x: Tensor) -> Tensor:
    """Output of the feed-forward layer computed by the given modules."""
    u = layers[feed_forward.up](x)
    act = ACTS[feed_forward.act].value
    if feed_forward.packed:
        gate, u = u.chunk(2, -1)
        h = act(gate) * u
    else:
        h = act(u) if feed_forward.gate is None else act(layers[feed_forward.gate](x)) * u
    return layers[feed_forward.down](h)  # type: ignore[no-any-return]


@torch.no_grad()
def measure_error(layer: Layer, layers: Mapping[str, nn.Module]) -> float:
    """E‖y − ŷ‖² / E‖y‖² on the held-out rows, rounding to the layers' dtype included."""
    dtype = next((p.dtype for module in layers.values() for p in module.parameters()), layer.dtype)
    y: Tensor = compute_output(layer.feed_forward, layers, layer.held.to(dtype)).float()
    return layer.error(y if layer.down_bias is None else y - layer.down_bias)


def _round(layer: Layer, heavy: int, bits: tuple[int, int]) -> tuple[list[Parts], Parts]:
    def quantize(*pieces: Tensor) -> Parts:
        return [Packed.quantize(w, b) for w, b in zip(pieces, bits, strict=True) if w.numel()]

    return [quantize(w[:heavy], w[heavy:]) for w in layer.rows], quantize(layer.down[:, :heavy], layer.down[:, heavy:])


def _fit(layer: Layer, heavy: int, bits: tuple[int, int]) -> tuple[list[Parts], Parts]:
    """Fit gate and up to the calibration inputs, then down to their new outputs and the original targets."""
    rows: list[Parts] = []
    for weight in layer.rows:
        pieces = [(w, [(w.shape[1], b)]) for w, b in zip((weight[:heavy], weight[heavy:]), bits, strict=True) if len(w)]
        rows.append([Packed.from_codes(*fit_codes(w, layer.outer_moment, b)[0], *b[0]) for w, b in pieces])
    *gate, up = [torch.cat([part.dequantize(torch.float32) for part in row]) for row in rows]
    h = layer.inner(layer.fit, up, gate[0] if gate else None)
    hh = h.t() @ h / len(h)
    ridge = DAMPING * float(hh.diagonal().mean()) + 1e-12
    eye = torch.eye(len(hh), device=hh.device)
    target = h.t() @ (layer.h_fit @ layer.down.t()) / len(h) + ridge * layer.down.t()
    down = torch.linalg.solve(hh + ridge * eye, target).t()
    widths = [(n, b) for n, b in zip((heavy, layer.neurons - heavy), bits, strict=True) if n]
    return rows, [Packed.from_codes(*c, *w) for c, w in zip(fit_codes(down, hh, widths), widths, strict=True)]


def _factorize(layer: Layer, heavy: int, rank: int) -> tuple[list[Parts], Parts]:
    def split(weight: Tensor, factors: tuple[Tensor, Tensor]) -> Parts:
        dense = [make_linear(weight.to(layer.dtype))] if heavy else []
        return [*dense, LowRank.from_factors(*(t.to(layer.dtype).contiguous() for t in factors))]

    *rows, down = [s.factors(rank) for s in layer.spectra(heavy)]
    return [split(w[:heavy], f) for w, f in zip(layer.rows, rows, strict=True)], split(layer.down[:, :heavy], down)


def _prune(layer: Layer, heavy: int) -> Modules:
    modules: Modules = {
        layer.feed_forward.down: make_linear(layer.down[:, :heavy].to(layer.dtype), _cast(layer, layer.down_bias))
    }
    for name, weights, biases in _group_by_module(layer, layer.rows):
        kept = [None if b is None else b[:heavy] for b in biases]
        modules[name] = make_linear(torch.cat([w[:heavy] for w in weights]).to(layer.dtype), _cast(layer, *kept))
    return modules


def _assemble(layer: Layer, rows: list[Parts], columns: Parts) -> Modules:
    bias = _cast(layer, layer.down_bias)
    modules: Modules = {layer.feed_forward.down: SplitLinear("columns", columns, bias, layer.dtype)}
    for name, parts, biases in _group_by_module(layer, rows):
        modules[name] = SplitLinear("rows", [part for row in parts for part in row], _cast(layer, *biases), layer.dtype)
    return modules


def _group_by_module(layer: Layer, rows: Sequence[T]) -> Iterator[tuple[str, list[T], list[Tensor | None]]]:
    """Gate's and up's values and biases by module: packed, both are in one module."""
    feed_forward, biases = layer.feed_forward, layer.row_biases
    if feed_forward.packed:
        yield feed_forward.up, list(rows), biases
    else:
        for name, row, bias in zip(feed_forward.layers[:-1], rows, biases, strict=True):
            yield name, [row], [bias]


def _cast(layer: Layer, *biases: Tensor | None) -> Tensor | None:
    """The bias of one module: gate and up in one module have a bias each, or neither has one."""
    tensors = [bias for bias in biases if bias is not None]
    return torch.cat(tensors).to(layer.dtype) if tensors else None
