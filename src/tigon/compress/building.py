"""Build the modules that replace a feed-forward layer for a given storage method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tigon.compress.candidates import Candidate, Layer
from tigon.compress.finding import FeedForward
from tigon.compress.layers import LowRank, Packed, Part, SplitLinear, Stacked
from tigon.compress.packing import pack
from tigon.compress.rounding import DAMPING, fitted
from tigon.ops.acts import ACTS

Modules = dict[str, nn.Module]  # keyed by module name in the model
Parts = list[Any]  # heavy neurons and the rest: a Part each, or None where the group is empty


@torch.no_grad()
def built(layer: Layer, chosen: Candidate, *, fit: bool = True) -> Modules:
    """Build the new layers for a candidate.

    fit: round weights to fit the calibration inputs (`rounding`), unless rounding to nearest does as well on held-out
        rows. False: round each weight to nearest.
    """
    if chosen.method == "prune":
        return _pruned(layer, chosen.heavy)
    if chosen.bits is None:
        return _assembled(layer, *_low_rank(layer, chosen.heavy, chosen.rank))
    near = _assembled(layer, *_nearest(layer, chosen.heavy, chosen.bits))
    if not fit:
        return near
    return min(_assembled(layer, *_fitted(layer, chosen.heavy, chosen.bits)), near, key=lambda one: error(layer, one))


def output(found: FeedForward, layers: Mapping[str, nn.Module], x: Tensor) -> Tensor:
    """Output of the feed-forward layer computed by the given modules."""
    u = layers[found.up](x)
    act = ACTS[found.act].value
    if found.packed:
        gate, u = u.chunk(2, -1)
        h = act(gate) * u
    else:
        h = act(u) if found.gate is None else act(layers[found.gate](x)) * u
    return layers[found.down](h)  # type: ignore[no-any-return]


@torch.no_grad()
def error(layer: Layer, layers: Mapping[str, nn.Module]) -> float:
    """E‖y − ŷ‖² / E‖y‖² on the held-out rows, rounding to the layers' dtype included."""
    dtype = next((p.dtype for module in layers.values() for p in module.parameters()), layer.dtype)
    y: Tensor = output(layer.found, layers, layer.held.to(dtype)).float()
    return layer.error(y if layer.down_bias is None else y - layer.down_bias)


# --------------------------------------------------------------------------------------------------------------- bits


def _rows(layer: Layer) -> list[Tensor]:
    return [weight for weight in (layer.gate, layer.up) if weight is not None]


def _nearest(layer: Layer, heavy: int, bits: tuple[int, int]) -> tuple[list[Parts], Parts]:
    def parts(pieces: tuple[Tensor, Tensor]) -> Parts:
        return [Packed.of(w, b) if w.numel() else None for w, b in zip(pieces, bits, strict=True)]

    rows = [parts((w[:heavy], w[heavy:])) for w in _rows(layer)]
    return rows, parts((layer.down[:, :heavy], layer.down[:, heavy:]))


def _fitted(layer: Layer, heavy: int, bits: tuple[int, int]) -> tuple[list[Parts], Parts]:
    """Fit gate and up to the calibration inputs, then down to their new outputs and the original targets."""
    rows: list[Parts] = []
    for weight in _rows(layer):
        pieces = zip((weight[:heavy], weight[heavy:]), bits, strict=True)
        rows.append([_fitted_rows(w, layer.outer_moment, b) if len(w) else None for w, b in pieces])
    *gate, up = [torch.cat([part.widened(torch.float32) for part in row if part is not None]) for row in rows]
    h = layer.inner(layer.fit, up, gate[0] if gate else None)
    hh = h.t() @ h / len(h)
    ridge = DAMPING * float(hh.diagonal().mean()) + 1e-12
    eye = torch.eye(len(hh), device=hh.device)
    wanted = h.t() @ (layer.h_fit @ layer.down.t()) / len(h) + ridge * layer.down.t()
    down = torch.linalg.solve(hh + ridge * eye, wanted).t()
    widths = [(n, b) for n, b in zip((heavy, layer.neurons - heavy), bits, strict=True) if n]
    made: Parts = [Packed.holding(*one, n, b) for one, (n, b) in zip(fitted(down, hh, widths), widths, strict=True)]
    return rows, made if len(made) == 2 else [made[0], None] if heavy else [None, made[0]]


def _fitted_rows(weight: Tensor, moment: Tensor, bits: int) -> Packed:
    width = weight.shape[1]
    return Packed.holding(*fitted(weight, moment, [(width, bits)])[0], width, bits)


# ------------------------------------------------------------------------------------------------- low rank and pruned


def _low_rank(layer: Layer, heavy: int, rank: int) -> tuple[list[Parts], Parts]:
    factors = [s.factors(rank) for s in layer.spectra(heavy)]

    def parts(kept: Tensor, own: tuple[Tensor, Tensor]) -> Parts:
        whole = _dense(kept.to(layer.dtype)) if heavy else None
        return [whole, LowRank.of(*(t.to(layer.dtype).contiguous() for t in own))]

    rows = [parts(w[:heavy], own) for w, own in zip(_rows(layer), factors[:-1], strict=True)]
    return rows, parts(layer.down[:, :heavy], factors[-1])


def _pruned(layer: Layer, heavy: int) -> Modules:
    found, dtype = layer.found, layer.dtype
    made: Modules = {found.down: _dense(layer.down[:, :heavy].to(dtype), _kept(layer, layer.down_bias))}
    weights, biases = _rows(layer), [layer.gate_bias, layer.up_bias][-len(_rows(layer)) :]
    weights, biases = [w[:heavy] for w in weights], [None if b is None else b[:heavy] for b in biases]
    if found.packed:
        weights, biases = [torch.cat(weights)], [_joined(*biases)]
    names = [name for name in (found.gate, found.up) if name is not None]
    for name, weight, bias in zip(names, weights, biases, strict=True):
        made[name] = _dense(weight.to(dtype), _kept(layer, bias))
    return made


# ----------------------------------------------------------------------------------------------------------- together


def _assembled(layer: Layer, rows: list[Parts], columns: Parts) -> Modules:
    found, dtype = layer.found, layer.dtype
    made: Modules = {
        found.down: SplitLinear("columns", columns[0], columns[1], _kept(layer, layer.down_bias), dtype=dtype)
    }
    if found.packed:
        stacked = [None if g is None else _stacked(g, u) for g, u in zip(*rows, strict=True)]
        bias = _kept(layer, _joined(layer.gate_bias, layer.up_bias))
        made[found.up] = SplitLinear("rows", stacked[0], stacked[1], bias, halves=2, dtype=dtype)
        return made
    names = [name for name in (found.gate, found.up) if name is not None]
    biases = [layer.gate_bias, layer.up_bias][-len(names) :]
    for name, own, bias in zip(names, rows, biases, strict=True):
        made[name] = SplitLinear("rows", own[0], own[1], _kept(layer, bias), dtype=dtype)
    return made


def _kept(layer: Layer, bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(layer.dtype)


def _joined(gate: Tensor | None, up: Tensor | None) -> Tensor | None:
    """gate and up share one layer, so either both have a bias or neither has."""
    return None if gate is None or up is None else torch.cat((gate, up))


def _dense(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    with torch.device("meta"):
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    made.weight = nn.Parameter(weight.contiguous())
    if bias is not None:
        made.bias = nn.Parameter(bias)
    return made


def _stacked(gate: Any, up: Any) -> Part:
    """Stack gate's rows above up's; both parts must have the same kind."""
    if isinstance(gate, nn.Linear):
        return _dense(torch.cat((gate.weight, up.weight)))
    if isinstance(gate, LowRank):
        return Stacked(gate, up)
    made = Packed(gate.in_features, gate.out_features + up.out_features, gate.bits, gate.group)
    codes = torch.cat((gate.unpacked()[0], up.unpacked()[0]))
    made.codes, made.scales = pack(codes, gate.bits), torch.cat((gate.scales, up.scales))
    return made
