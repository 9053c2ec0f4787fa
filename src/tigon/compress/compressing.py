"""`feed_forward`: which neurons stay whole, and what becomes of the others, within a budget of bytes."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from tigon.compress import candidates, texts
from tigon.compress.candidates import Candidate, Layer
from tigon.compress.finding import FeedForward, Left, find, is_conv1d, weight_of
from tigon.compress.options import NAMES, Bits, Method
from tigon.compress.planning import least_bytes, plan
from tigon.compress.recovering import output, recover
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
    unit = "nats a token" if pass_.whole.nats else "of the mean square of its answers"
    return Report(rows, methods, left, tokens, unit, pass_.notes, model, before)


def checked_method(method: Any, budget: Any, recover: Any) -> str:
    """The method's name; a sentence for what does not fit together."""
    known = (*get_args(Method), "Bits(…)")
    if not isinstance(method, Bits) and method not in known[:-1]:
        near = difflib.get_close_matches(str(method), known[:-1], 1)
        meant = f"; did you mean {near[0]!r}?" if near else "."
        kind = ValueError if isinstance(method, str) else TypeError
        raise kind(f"feed_forward: method must be one of {', '.join(known)}, got {method!r}{meant}")
    if isinstance(method, Bits):
        if budget is not None:
            raise ValueError(f"feed_forward: budget must be left out where method is Bits(…), got {budget}.")
    elif not isinstance(budget, (int, float)) or isinstance(budget, bool) or not 0 < budget <= 1:
        raise ValueError(
            "feed_forward: budget must be a share of the bytes that the feed-forward layers take now, above 0 and at "
            f"most 1, got {budget}."
        )
    if not isinstance(recover, int) or recover < 0:
        raise ValueError(f"feed_forward: recover must be a number of steps, 0 or more, got {recover}.")
    return "bits" if isinstance(method, Bits) else str(method)


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
        self.inputs = texts.inputs_of(model, found, batches)
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
        widest = max(self.model.get_submodule(one.down).weight.numel() // self._width(one) for one in self.found)  # type: ignore[operator]
        need = TIMES * widest
        rows = min(tokens, *(len(x) for x in self.inputs.values()))
        if rows >= need:
            return list(NAMES)
        sentence = (
            f"{rows:,} tokens cannot fix the second moment of {widest:,} inputs; give {need:,}, 4 times as many as "
            "there are neurons"
        )
        if self.method in ("rank", "svd"):
            raise ValueError(f"feed_forward: {sentence}, or take another method than {self.method}.")
        self.notes.append(f"rank and svd were not tried: {sentence}.")
        return ["bits", "prune"]

    def _width(self, one: FeedForward) -> int:
        return self.inputs[one.down].shape[1]

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
        far = {one: self._distance(row) for one, row in tried.items()}
        best = min(far, key=lambda one: far[one])
        found = [
            MethodRow(one, sum(c.bytes for c in row), _mean(row), far.get(one), one == best)
            for one, row in possible.items()
        ]
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
        weights = self._weights() if budget < 1 else [1.0] * len(self.found)
        plans = {one: plan(own, room, weights) for one, own in rows.items()}
        if name == "auto":
            mixed = [[c for own in rows.values() for c in own[place]] for place in range(len(self.found))]
            plans["mixed"] = plan(mixed, room, weights)
        return plans

    def _built(self, chosen: Sequence[Candidate]) -> dict[str, nn.Module]:
        layers: dict[str, nn.Module] = {}
        for place, (one, candidate) in enumerate(zip(self.found, chosen, strict=True)):
            if candidate.method != "whole":
                layers |= self._ready(self.layer(place, candidate.method).built(candidate), one)
        return layers

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

    def _distance(self, chosen: Sequence[Candidate]) -> float:
        layers = self._built(chosen)
        if not layers:
            return 0.0
        before = swap(self.model, layers)
        try:
            return self.whole.distance()
        finally:
            swap(self.model, before)

    def _weights(self) -> list[float]:
        """How far the whole model moves for each unit of one layer's error, measured at 3 bits or where it prunes."""
        probe = texts.Whole(self.model, texts.share(self.batches, PROBED))
        weights = []
        for place, one in enumerate(self.found):
            layer = self.layer(place, "bits")
            candidate = layer.split_by_bits(layer.neurons, (3, 3))
            before = swap(self.model, self._ready(layer.built(candidate), one))
            try:
                weights.append(max(probe.distance(), 1e-9) / max(candidate.error, 1e-9))
            finally:
                swap(self.model, before)
        return weights

    def finish(self, chosen: Sequence[Candidate], steps: int) -> tuple[list[LayerRow], dict[str, nn.Module]]:
        """Put the new layers in, recovered where that is asked for; rows, and the layers from before."""
        rows, new = [], {}
        for place, (one, candidate) in enumerate(zip(self.found, chosen, strict=True)):
            size, error = candidate.bytes, candidate.error
            if candidate.method != "whole":
                layer = self.layer(place, candidate.method)
                layers = layer.built(candidate)
                size, error = _bytes(layers), _error(layer, layers)
                if steps:
                    error = self._recovered(layer, layers, steps)
                new |= self._ready(layers, one)
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
        return recover(layer.found, layers, layer.fit, target, steps, lambda: _error(layer, layers))


@torch.no_grad()
def _error(layer: Layer, layers: Mapping[str, nn.Module]) -> float:
    """Of the new layers as they are, rounding of their dtype included."""
    dtype = next((p.dtype for module in layers.values() for p in module.parameters()), layer.dtype)
    y: Tensor = output(layer.found, layers, layer.held.to(dtype)).float()
    return layer.error(y if layer.down_bias is None else y - layer.down_bias)


def _bytes(layers: Mapping[str, nn.Module]) -> int:
    tensors = (t for module in layers.values() for t in (*module.parameters(), *module.buffers()))
    return sum(t.numel() * t.element_size() for t in tensors)


def _mean(row: Sequence[Candidate]) -> float:
    return sum(c.error for c in row) / len(row)
