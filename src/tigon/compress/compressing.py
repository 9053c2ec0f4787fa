"""`feed_forward`: which neurons stay whole, and what becomes of the others, within a budget of bytes."""

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

LEAST = 256  # tokens, for scores of neurons
TIMES = 4  # tokens for each input of down, for a second moment
CHECKED = 4096  # tokens on which whole models are compared
PROBED = 256  # and on which one layer's weight in the plan is found


def feed_forward(
    model: nn.Module, calibration: Any, *, method: Method | Bits = "bits", budget: float | None = None,
    tokenizer: Any = None, recover: int = 0,
) -> Report:  # fmt: skip
    """Store a model's feed-forward layers in fewer bytes, in place: heavy neurons in one way, the others in another.

    Args:
        model: any module whose feed-forward layers are act(up(x)) or act(gate(x)) · up(x) through down, as those of
            Hugging Face models are. They are recognised by their numbers.
        calibration: texts, with the tokenizer; token ids (sequences, length); or batches, mappings of the model's
            arguments. At least 256 tokens; "rank" and "svd" need 4 for each neuron of a layer.
        method: "bits": heavy neurons at one width, the others at a smaller one; "rank": heavy neurons as they are, the
            others of low rank; "svd": all of low rank; "prune": heavy neurons alone; "auto": each of these and their
            mixture, layer by layer, and the one that is nearest to the model before on the calibration text. `Bits`
            takes the same widths and share for all layers.
        budget: bytes that the layers may take, as a share of those that they take now, above 0 and at most 1. `Bits`
            has its own size and takes none.
        tokenizer: the model's, where calibration is texts.
        recover: steps of a fine-tune of each changed layer on the outputs it had before; 0 for none.
    Returns: a `Report`; its `remove()` puts the layers back.
    Raises: ValueError for a budget, a calibration or a model that does not do; TypeError for another method.

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
        model.get_submodule(child).train(old.training)  # the mode that `_resting` has given back
    describe(model)
    return Report(rows, methods, left, tokens, pass_.whole.unit, pass_.notes, model, before)


@contextlib.contextmanager
def _resting(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, without a cache of keys and values, and as before afterwards."""
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
    """One call of `feed_forward`."""

    def __init__(
        self, model: nn.Module, found: list[FeedForward], batches: list[texts.Batch], tokens: int, method: Any
    ) -> None:  # fmt: skip
        self.model, self.found, self.method = model, found, method
        self.seed = 0 if isinstance(method, Bits) and not method.chosen else None
        self.fit = method.fit if isinstance(method, Bits) else True
        self.packed: dict[tuple[int, int, Any], dict[str, nn.Module]] = {}  # layers in bits, which take time to make
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
        """One layer, its neurons in the order that the method takes them in."""
        one, seed = self.found[place], None if self.seed is None else self.seed + place
        return Layer(self.model, one, self.inputs[one.down], bits=method == "bits", seed=seed)

    def _possible(self, tokens: int) -> list[str]:
        """The methods that so many tokens are enough for."""
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
        """The candidates to take, and a row for each method within the same bytes."""
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
        """The candidate's layers; those in bits are made once and kept, since `auto` and the end take the same."""
        key = place, candidate.heavy, candidate.bits
        if candidate.bits is not None and key in self.packed:
            return self.packed[key]
        made = self._ready(building.built(layer, candidate, fit=self.fit), self.found[place])
        if candidate.bits is not None:
            self.packed[key] = made
        return made

    def _ready(self, layers: dict[str, nn.Module], found: FeedForward) -> dict[str, nn.Module]:
        """New layers trained or frozen, and in the mode, as those whose places they take."""
        for name, layer in layers.items():
            old: Any = self.model.get_submodule(name)
            layer.eval()
            layer.requires_grad_(old.weight.requires_grad)
            # What `widen` reads: where weights stood transposed, and how many neurons there were. A pruned layer is
            # plain, so that it fuses.
            vars(layer)["transposed"] = is_conv1d(old)
            if type(layer) is nn.Linear:
                halves = 2 if found.packed and name == found.up else 1
                vars(layer)["pruned_from"] = (*weight_of(old).shape, halves)
        return layers

    def _tried(self, chosen: Sequence[Candidate]) -> tuple[float, float]:
        """The layers' mean error, and the whole model's distance from itself before."""
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
        """How far the model moves for a unit of each layer's error, and the candidates with the errors they will have.

        Both are measured where the layer is at 3 bits. Candidates in bits were measured with weights rounded to
        nearest: rounding for the inputs makes all errors of a layer smaller by about the same factor.
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
        """Put the new layers in, recovered where that is asked for; rows, and the layers from before."""
        rows: list[LayerRow] = []
        new: dict[str, nn.Module] = {}
        for place, (one, candidate) in enumerate(zip(self.found, chosen, strict=True)):
            size, error = candidate.bytes, candidate.error
            if candidate.method != "whole":
                layer = self.layer(place, candidate.method)
                layers = self._built(place, candidate, layer)
                size = _bytes(layers)
                error = self._recovered(layer, layers, steps) if steps else building.error(layer, layers)
                new |= self._ready(layers, one)  # again: recovery trains all of a layer
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
