"""Compress a model's feed-forward layers: compare the methods on each layer, and choose within a byte budget."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tigon.compress import calibration as data
from tigon.compress.builder import Modules, build_layers, measure_error
from tigon.compress.candidates import Candidate, Layer
from tigon.compress.layout import swap_layers, write_layout
from tigon.compress.options import NAMES, Bits, Method, check_method
from tigon.compress.plan import count_least_bytes, plan
from tigon.compress.recognition import FeedForward, find_feed_forwards, is_conv1d, read_weight
from tigon.compress.recovery import recover as recover_layers
from tigon.compress.report import LayerRow, MethodRow, Report, Skipped

LEAST = 256  # minimum tokens for neuron scores
TIMES = 4  # minimum tokens per input to down, for a second moment
CHECKED = 4096  # tokens for whole-model comparisons
PROBED = 256  # tokens for the sensitivity weight per layer in the plan

Rows = dict[str, list[list[Candidate]]]  # by method and layer


def feed_forward(
    model: nn.Module, calibration: Any, *, method: Method | Bits = "bits", budget: float | None = None,
    tokenizer: Any = None, recover: int = 0,
) -> Report:  # fmt: skip
    """Compress a model's feed-forward layers in place: heavy neurons stored one way, the others another.

    Args:
        model: any module with feed-forward layers down(act(up(x))) or down(act(gate(x)) · up(x)), as in Hugging Face
            models. Layers are recognised from recorded activations.
        calibration: texts, with the tokenizer; token ids (sequences, length); or batches, mappings from the model's
            argument names to tensors. At least 256 tokens; "rank" and "svd" need 4 per neuron in a layer.
        method: "bits": heavy neurons at one bit width, the others at a smaller width; "rank": heavy neurons unchanged,
            the others low-rank; "svd": all low-rank; "prune": heavy neurons only; "auto": tries each method and a
            per-layer mixture, and keeps the result closest to the original model on the calibration text. `Bits`
            applies the same widths and share to all layers.
        budget: target bytes as a fraction of the layers' current bytes, above 0 and at most 1. Must be omitted with
            `Bits`, which fixes the size.
        tokenizer: the model's, if calibration is texts.
        recover: fine-tuning steps for each changed layer on its original outputs; 0 disables recovery.
    Returns: a `Report`; its `remove()` restores the original layers.
    Raises: ValueError for an unsuitable budget, calibration or model; TypeError for an unknown method type.

    Source: FFSplit, Liu et al. 2024, https://arxiv.org/abs/2401.04044
    """
    check_method(method, budget, recover)
    batches = data.make_batches(model, calibration, tokenizer)
    tokens = sum(map(data.count_tokens, batches))
    if tokens < LEAST:
        raise ValueError(
            f"feed_forward: {tokens:,} calibration tokens are too few to identify heavy neurons; give at least {LEAST}."
        )
    with _evaluation_mode(model):
        first = {k: v[:1] if isinstance(v, torch.Tensor) and v.dim() else v for k, v in batches[0].items()}
        layers, skipped = find_feed_forwards(model, first)
        if not layers:
            raise ValueError(_explain_no_layers(skipped))
        compressor = _Compressor(model, layers, batches, tokens, method)
        chosen, methods = compressor.choose(1.0 if budget is None else budget)
        rows, before = compressor.install(chosen, recover)
        if recover and before:
            distance = compressor.outputs.measure()
            methods = [replace(row, distance=distance) if row.chosen else row for row in methods]
    for name, old in before.items():
        model.get_submodule(name).train(old.training)  # `_evaluation_mode` has restored this mode
    write_layout(model)
    return Report(rows, methods, skipped, tokens, compressor.outputs.unit, compressor.notes, model, before)


@contextlib.contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without a key-value cache; restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    config: Any = getattr(model, "config", None)
    cache = getattr(config, "use_cache", None)
    model.eval()
    if cache:
        config.use_cache = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        if cache:
            config.use_cache = cache


def _explain_no_layers(skipped: Sequence[Skipped]) -> str:
    reasons = "; ".join(f"{row.name}: {row.reason}" for row in skipped[:3])
    return "feed_forward: the model has no feed-forward layer that can be compressed" + (
        f" ({reasons})." if reasons else ": no linear layer takes the activation of an earlier linear layer as input."
    )


class _Compressor:
    """State for a single `feed_forward` call."""

    def __init__(
        self, model: nn.Module, layers: list[FeedForward], batches: list[data.Batch], tokens: int, method: Method | Bits
    ) -> None:  # fmt: skip
        self.model, self.layers, self.batches, self.method = model, layers, batches, method
        self.name = "bits" if isinstance(method, Bits) else method
        self.quantized: dict[tuple[int, int, Any], Modules] = {}  # cache: quantized layers are slow to build
        self.widest = max(read_weight(model.get_submodule(one.down)).shape[-1] for one in layers)
        need = TIMES * self.widest if method in ("rank", "svd", "auto") else 1
        self.inputs = data.record_inputs(model, layers, batches, need=need)
        self.outputs = data.OutputDistance(model, data.take_batches(batches, CHECKED))
        self.notes: list[str] = []
        self.names = self._select_methods(tokens)
        self.sizes: list[int] = []

    def _select_methods(self, tokens: int) -> list[str]:
        """Methods for which there are enough calibration tokens."""
        need, rows = TIMES * self.widest, min(tokens, *(len(x) for x in self.inputs.values()))
        if rows >= need:
            return list(NAMES)
        sentence = (
            f"{rows:,} tokens cannot determine the second moment of {self.widest:,} inputs; give {need:,}, 4 times the "
            "number of neurons"
        )
        if self.method in ("rank", "svd"):
            raise ValueError(f"feed_forward: {sentence}, or use a method other than {self.method}.")
        self.notes.append(f"rank and svd were not tried: {sentence}.")
        return ["bits", "prune"]

    def analyze(self, place: int, method: str) -> Layer:
        """A layer with its neurons in the method's order."""
        found = self.layers[place]
        return Layer(self.model, found, self.inputs[found.down], bits=method == "bits")

    def choose(self, budget: float) -> tuple[list[Candidate], list[MethodRow]]:
        """Choose candidates, and return a row for each method at the same byte budget."""
        name, rows = self.name, self._list_candidates(budget)
        plans = self._plan(budget, rows)
        possible = {method: chosen for method, chosen in plans.items() if chosen is not None}
        if name not in possible and (name != "auto" or not possible):
            if name == "auto":
                raise ValueError(f"feed_forward: no method can make the layers small enough: got budget {budget}.")
            least = count_least_bytes(rows[name]) / sum(self.sizes)
            raise ValueError(
                f"feed_forward: budget must be at least {least:.3f} for {name}, which cannot make the layers smaller, "
                f"got {budget}."
            )
        tried = possible if name == "auto" else {name: possible[name]}
        results = {method: self._evaluate(chosen) for method, chosen in tried.items()}
        best = min(results, key=lambda method: results[method][1])
        methods = []
        for method, chosen in possible.items():
            error, distance = results.get(method, (statistics.fmean(c.error for c in chosen), None))
            methods.append(MethodRow(method, sum(c.bytes for c in chosen), error, distance, method == best))
        return possible[best], methods

    def _list_candidates(self, budget: float) -> Rows:
        rows: Rows = {"bits": []} if isinstance(self.method, Bits) else {name: [] for name in self.names}
        for place in range(len(self.layers)):
            layer = self.analyze(place, "bits")
            self.sizes.append(layer.bytes)
            if isinstance(self.method, Bits):
                heavy = layer.count_heavy(self.method.share)
                rows["bits"].append([layer.split_by_bits(heavy, (self.method.heavy, self.method.rest))])
                continue
            whole = Candidate("whole", layer.neurons, None, 0, layer.bytes, 0.0)
            by_score = self.analyze(place, "score") if budget < 1 else layer
            for name, row in rows.items():
                by_method = getattr(layer if name == "bits" else by_score, f"by_{name}")
                row.append([whole, *(by_method(budget) if budget < 1 else ())])
        return rows

    def _plan(self, budget: float, rows: Rows) -> dict[str, list[Candidate] | None]:
        if isinstance(self.method, Bits):
            return {"bits": [candidate for (candidate,) in rows["bits"]]}
        room = int(budget * sum(self.sizes))
        weights, rows = self._weigh_layers(rows) if budget < 1 else ([1.0] * len(self.layers), rows)
        plans = {name: plan(row, room, weights) for name, row in rows.items()}
        if self.name == "auto":
            mixed = [[c for row in rows.values() for c in row[place]] for place in range(len(self.layers))]
            plans["mixed"] = plan(mixed, room, weights)
        return plans

    def _weigh_layers(self, rows: Rows) -> tuple[list[float], Rows]:
        """Model sensitivity to each layer's error, and candidates with expected errors.

        Both are measured with the layer at 3 bits. Candidate errors from rounding to nearest are rescaled, since fitted
        rounding reduces all errors in a layer by about the same factor.
        """
        probe = data.OutputDistance(self.model, data.take_batches(self.batches, PROBED))
        weights, bits = [], []
        for place, row in enumerate(rows["bits"]):
            layer = self.analyze(place, "bits")
            candidate = layer.split_by_bits(layer.neurons, (3, 3))
            modules = self._build(place, candidate, layer)
            error = max(measure_error(layer, modules), 1e-9)
            weights.append(max(self._measure_distance(probe, modules), 1e-9) / error)
            gain = error / max(candidate.error, 1e-9)
            bits.append([replace(c, error=gain * c.error) for c in row])
        return weights, {**rows, "bits": bits}

    def _build(self, place: int, candidate: Candidate, layer: Layer) -> Modules:
        """The candidate's layers. Quantized layers are cached, since `auto` and the final step use the same layers."""
        key = place, candidate.heavy, candidate.bits
        if candidate.bits is not None and key in self.quantized:
            return self.quantized[key]
        fit = not isinstance(self.method, Bits) or self.method.fit
        modules = build_layers(layer, candidate, fit=fit)
        for name, module in modules.items():
            old: Any = self.model.get_submodule(name)
            module.eval()
            # `dequantize` reads these: weight transposition and the neuron count. A pruned layer is a plain Linear, so
            # that it can fuse.
            vars(module)["transposed"] = is_conv1d(old)
            if type(module) is nn.Linear:
                halves = 2 if layer.feed_forward.packed and name == layer.feed_forward.up else 1
                vars(module)["pruned_from"] = (*read_weight(old).shape, halves)
        if candidate.bits is not None:
            self.quantized[key] = modules
        return modules

    def _evaluate(self, chosen: Sequence[Candidate]) -> tuple[float, float]:
        """Mean layer error, and the whole model's distance from the original."""
        modules: Modules = {}
        errors = []
        for place, candidate in enumerate(chosen):
            if candidate.method == "whole":
                errors.append(0.0)
                continue
            layer = self.analyze(place, candidate.method)
            own = self._build(place, candidate, layer)
            errors.append(measure_error(layer, own))
            modules |= own
        return statistics.fmean(errors), self._measure_distance(self.outputs, modules) if modules else 0.0

    def _measure_distance(self, outputs: data.OutputDistance, modules: Modules) -> float:
        before = swap_layers(self.model, modules)
        try:
            distance = outputs.measure()
        finally:
            swap_layers(self.model, before)
        return distance if math.isfinite(distance) else math.inf

    def install(self, chosen: Sequence[Candidate], steps: int) -> tuple[list[LayerRow], dict[str, nn.Module]]:
        """Install the new layers, fine-tuned if requested; return the rows and the replaced layers."""
        rows: list[LayerRow] = []
        new: Modules = {}
        for place, (found, candidate) in enumerate(zip(self.layers, chosen, strict=True)):
            size, error, layer = candidate.bytes, candidate.error, self.analyze(place, candidate.method)
            if candidate.method != "whole":
                modules = self._build(place, candidate, layer)
                tensors = (t for module in modules.values() for t in (*module.parameters(), *module.buffers()))
                size = sum(t.numel() * t.element_size() for t in tensors)
                error = recover_layers(layer, modules, steps) if steps else measure_error(layer, modules)
                for name, module in modules.items():
                    old: Any = self.model.get_submodule(name)
                    module.requires_grad_(old.weight.requires_grad)
                new |= modules
            share = candidate.heavy / layer.neurons
            rows.append(
                LayerRow(found.name, str(found), candidate.method, share, candidate.bits, candidate.rank, size,
                         layer.bytes, error, layer.tenth)
            )  # fmt: skip
        return rows, swap_layers(self.model, new)
