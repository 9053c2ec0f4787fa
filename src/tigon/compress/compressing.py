"""`feed_forward`: choose heavy neurons and compress the rest within a byte budget."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tigon.compress import building, candidates, texts
from tigon.compress.candidates import Candidate, Layer
from tigon.compress.finding import FeedForward, Left, find, is_conv1d, weight_of
from tigon.compress.options import NAMES, Bits, Method, checked_method
from tigon.compress.planning import least_bytes, plan
from tigon.compress.recovering import recover as recovered
from tigon.compress.report import LayerRow, MethodRow, Report, swap
from tigon.compress.saving import describe

LEAST = 256  # minimum tokens for neuron scores
TIMES = 4  # minimum tokens per input to down, for a second moment
CHECKED = 4096  # tokens for whole-model comparisons
PROBED = 256  # tokens for the sensitivity weight per layer in the plan


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
    name = checked_method(method, budget, recover)
    batches = texts.batches_of(model, calibration, tokenizer)
    tokens = sum(map(texts.tokens_of, batches))
    if tokens < LEAST:
        raise ValueError(
            f"feed_forward: {tokens:,} tokens of calibration are too few to tell heavy neurons from others; give at "
            f"least {LEAST}."
        )
    with _resting(model):
        found, left = find(model, texts.first_rows(batches[0]))
        if not found:
            raise ValueError(_nothing(left))
        pass_ = _Pass(model, found, batches, tokens, method)
        chosen, methods = pass_.choose(name, 1.0 if budget is None else budget)
        rows, before = pass_.finish(chosen, recover)
        for place, row in enumerate(methods):
            if row.chosen and recover and before:
                methods[place] = replace(row, distance=pass_.whole.distance())
    for child, old in before.items():
        model.get_submodule(child).train(old.training)  # `_resting` has restored this mode
    describe(model)
    return Report(rows, methods, left, tokens, pass_.whole.unit, pass_.notes, model, before)


@contextlib.contextmanager
def _resting(model: nn.Module) -> Iterator[None]:
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


def _nothing(left: Sequence[Left]) -> str:
    why = "; ".join(f"{one.name}: {one.reason}" for one in left[:3])
    return "feed_forward: the model has no feed-forward layer that can be changed" + (
        f" ({why})." if why else ": no input of a linear layer is an activation of the results of those before it."
    )


class _Pass:
    """State for a single `feed_forward` call."""

    def __init__(
        self, model: nn.Module, found: list[FeedForward], batches: list[texts.Batch], tokens: int, method: Any
    ) -> None:  # fmt: skip
        self.model, self.found, self.method = model, found, method
        self.seed = 0 if isinstance(method, Bits) and not method.chosen else None
        self.fit = method.fit if isinstance(method, Bits) else True
        self.packed: dict[tuple[int, int, Any], dict[str, nn.Module]] = {}  # cache: quantized layers are slow to build
        self.widest = max(weight_of(model.get_submodule(one.down)).shape[-1] for one in found)
        low_rank = method in ("rank", "svd", "auto")
        self.inputs = texts.inputs_of(model, found, batches, need=TIMES * self.widest if low_rank else 1)
        self.batches = batches
        self.whole = texts.Whole(model, texts.share(batches, CHECKED))
        self.notes: list[str] = []
        self.names = self._possible(tokens)
        self.sizes: list[int] = []
        self.tenths: list[float] = []
        self.neurons: list[int] = []

    def layer(self, place: int, method: str) -> Layer:
        """A layer with its neurons in the method's order."""
        one, seed = self.found[place], None if self.seed is None else self.seed + place
        return Layer(self.model, one, self.inputs[one.down], bits=method == "bits", seed=seed)

    def _possible(self, tokens: int) -> list[str]:
        """Methods for which there are enough calibration tokens."""
        need = TIMES * self.widest
        rows = min(tokens, *(len(x) for x in self.inputs.values()))
        if rows >= need:
            return list(NAMES)
        sentence = (
            f"{rows:,} tokens cannot fix the second moment of {self.widest:,} inputs; give {need:,}, 4 times as many "
            "as there are neurons"
        )
        if self.method in ("rank", "svd"):
            raise ValueError(f"feed_forward: {sentence}, or take another method than {self.method}.")
        self.notes.append(f"rank and svd were not tried: {sentence}.")
        return ["bits", "prune"]

    def choose(self, name: str, budget: float) -> tuple[list[Candidate], list[MethodRow]]:
        """Choose candidates, and return a row for each method at the same byte budget."""
        rows: dict[str, list[list[Candidate]]] = {one: [] for one in self.names}
        fixed: list[Candidate] = []
        for place in range(len(self.found)):
            self._look(place, budget, rows, fixed)
        plans: dict[str, list[Candidate] | None] = {name: fixed} if fixed else self._plans(name, budget, rows)
        possible = {one: row for one, row in plans.items() if row is not None}
        if not possible.get(name) and (name != "auto" or not possible):
            least = least_bytes(rows[name]) / sum(self.sizes) if name in rows else None
            raise ValueError(
                f"feed_forward: budget must be at least {least:.3f} for {name}, which cannot make the layers smaller, "
                f"got {budget}."
                if least is not None
                else f"feed_forward: no method can make the layers so small: got a budget of {budget}."
            )
        tried = possible if name == "auto" else {name: possible[name]}
        far = {one: self._tried(row) for one, row in tried.items()}
        best = min(far, key=lambda one: far[one][1])
        found = []
        for one, row in possible.items():
            error, distance = far.get(one, (statistics.fmean(c.error for c in row), None))
            found.append(MethodRow(one, sum(c.bytes for c in row), error, distance, one == best))
        return possible[best], found

    def _look(
        self, place: int, budget: float, rows: dict[str, list[list[Candidate]]], fixed: list[Candidate]
    ) -> None:  # fmt: skip
        layer = self.layer(place, "bits")
        self.sizes.append(layer.bytes)
        self.tenths.append(layer.tenth)
        self.neurons.append(layer.neurons)
        if isinstance(self.method, Bits):
            fixed.append(candidates.fixed(layer, self.method))
            return
        as_it_is = Candidate("whole", layer.neurons, None, 0, layer.bytes, 0.0)
        by_score = self.layer(place, "score") if budget < 1 else layer
        for name, own in rows.items():
            sorted_ = layer if name == "bits" else by_score
            own.append([as_it_is, *(getattr(sorted_, f"by_{name}")(budget) if budget < 1 else ())])

    def _plans(
        self, name: str, budget: float, rows: dict[str, list[list[Candidate]]]
    ) -> dict[str, list[Candidate] | None]:  # fmt: skip
        room = int(budget * sum(self.sizes))
        weights, rows = self._weighed(rows) if budget < 1 else ([1.0] * len(self.found), rows)
        plans = {one: plan(own, room, weights) for one, own in rows.items()}
        if name == "auto":
            mixed = [[c for own in rows.values() for c in own[place]] for place in range(len(self.found))]
            plans["mixed"] = plan(mixed, room, weights)
        return plans

    def _built(self, place: int, candidate: Candidate, layer: Layer) -> dict[str, nn.Module]:
        """The candidate's layers. Quantized layers are cached, since `auto` and the final step use the same layers."""
        key = place, candidate.heavy, candidate.bits
        if candidate.bits is not None and key in self.packed:
            return self.packed[key]
        made = self._ready(building.built(layer, candidate, fit=self.fit), self.found[place])
        if candidate.bits is not None:
            self.packed[key] = made
        return made

    def _ready(self, layers: dict[str, nn.Module], found: FeedForward) -> dict[str, nn.Module]:
        """Copy requires_grad and training mode from the replaced layers."""
        for name, layer in layers.items():
            old: Any = self.model.get_submodule(name)
            layer.eval()
            layer.requires_grad_(old.weight.requires_grad)
            # `widen` reads these: weight transposition and the neuron count. A pruned layer is a plain Linear, so that
            # it can fuse.
            vars(layer)["transposed"] = is_conv1d(old)
            if type(layer) is nn.Linear:
                halves = 2 if found.packed and name == found.up else 1
                vars(layer)["pruned_from"] = (*weight_of(old).shape, halves)
        return layers

    def _tried(self, chosen: Sequence[Candidate]) -> tuple[float, float]:
        """Mean layer error, and the whole model's distance from the original."""
        layers: dict[str, nn.Module] = {}
        errors = []
        for place, candidate in enumerate(chosen):
            if candidate.method == "whole":
                errors.append(0.0)
                continue
            layer = self.layer(place, candidate.method)
            own = self._built(place, candidate, layer)
            errors.append(building.error(layer, own))
            layers |= own
        return statistics.fmean(errors), self._distance(self.whole, layers) if layers else 0.0

    def _distance(self, whole: texts.Whole, layers: dict[str, nn.Module]) -> float:
        before = swap(self.model, layers)
        try:
            found = whole.distance()
        finally:
            swap(self.model, before)
        return found if math.isfinite(found) else math.inf

    def _weighed(
        self, rows: dict[str, list[list[Candidate]]]
    ) -> tuple[list[float], dict[str, list[list[Candidate]]]]:  # fmt: skip
        """Model sensitivity to each layer's error, and candidates with expected errors.

        Both are measured with the layer at 3 bits. Candidate errors from rounding to nearest are rescaled, since fitted
        rounding reduces all errors in a layer by about the same factor.
        """
        probe = texts.Whole(self.model, texts.share(self.batches, PROBED))
        weights, found = [], {name: list(own) for name, own in rows.items()}
        for place in range(len(self.found)):
            layer = self.layer(place, "bits")
            candidate = layer.split_by_bits(layer.neurons, (3, 3))
            layers = self._built(place, candidate, layer)
            error = max(building.error(layer, layers), 1e-9)
            weights.append(max(self._distance(probe, layers), 1e-9) / error)
            gain = error / max(candidate.error, 1e-9)
            found["bits"][place] = [replace(c, error=gain * c.error) for c in rows["bits"][place]]
        return weights, found

    def finish(self, chosen: Sequence[Candidate], steps: int) -> tuple[list[LayerRow], dict[str, nn.Module]]:
        """Install the new layers, fine-tuned if requested; return the rows and the replaced layers."""
        rows: list[LayerRow] = []
        new: dict[str, nn.Module] = {}
        for place, (one, candidate) in enumerate(zip(self.found, chosen, strict=True)):
            size, error = candidate.bytes, candidate.error
            if candidate.method != "whole":
                layer = self.layer(place, candidate.method)
                layers = self._built(place, candidate, layer)
                size = _bytes(layers)
                error = self._recovered(layer, layers, steps) if steps else building.error(layer, layers)
                new |= self._ready(layers, one)  # again: recovery trains all weights in a layer
            neurons = self.neurons[place]
            share = candidate.heavy / neurons
            rows.append(
                LayerRow(one.name, str(one), candidate.method, share, candidate.bits, candidate.rank, size,
                         self.sizes[place], error, self.tenths[place])
            )  # fmt: skip
        return rows, swap(self.model, new)

    def _recovered(self, layer: Layer, layers: Mapping[str, nn.Module], steps: int) -> float:
        target = layer.h_fit @ layer.down.t()
        if layer.down_bias is not None:
            target = target + layer.down_bias
        return recovered(layer.found, layers, layer.fit, target, steps, lambda: building.error(layer, layers))


def _bytes(layers: Mapping[str, nn.Module]) -> int:
    tensors = (t for module in layers.values() for t in (*module.parameters(), *module.buffers()))
    return sum(t.numel() * t.element_size() for t in tensors)
