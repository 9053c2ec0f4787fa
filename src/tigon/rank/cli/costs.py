"""A ranker's parameters, and its cost per request on a table."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tigon.rank.data.batches import BatchOptions, eval_mode, get_device
from tigon.rank.models.ligr.model import LiGR

# Maximum batches to count and time; no further batch starts after this many seconds.
BATCHES, SECONDS = 5, 2.0


def list_fields(schema: Any) -> list[dict[str, Any]]:
    """A row per field: name, kind, side, and embedding-table rows."""
    return [
        {"name": name, "kind": field.kind, "side": field.side, "rows": getattr(field, "rows", None)}
        for name, field in schema.fields.items()
    ]


def count_parameters(ranker: nn.Module) -> dict[str, int]:
    """Parameter counts by part, largest first; each field is a part. 8-bit codes count as parameters."""
    counts: dict[str, int] = {}
    codes = [(name, b) for name, b in ranker.named_buffers() if name.endswith(".codes")]
    for name, p in [*ranker.named_parameters(), *codes]:
        words = name.split(".")
        part = ".".join(words[:3]) if words[0] == "tokens" else words[0]
        counts[part] = counts.get(part, 0) + p.numel()
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def measure_costs(ranker: Any, data: Any, batch_options: BatchOptions) -> dict[str, Any]:
    """Means per request over some batches: events, candidates, FLOPs and milliseconds.

    FLOPs cover linear layers, and attention if the ranker's config gives its width.
    """
    device = get_device(ranker)
    seen, events, candidates, flops, seconds = 0, 0, 0, 0.0, []
    began = time.perf_counter()
    with eval_mode(ranker):
        for number, batch in enumerate(batch_options.batches(data, device)):
            if number == BATCHES or (number and time.perf_counter() - began > SECONDS):
                break
            with _count_linear(ranker) as linear, batch_options.autocast(device):
                ranker(batch)
            flops += sum(linear) + _count_attention(ranker, batch)
            seconds.append(_time_forward(ranker, batch, batch_options) / batch.requests)
            seen, events, candidates = seen + batch.requests, events + batch.events, candidates + batch.candidates
    return {
        "requests": len(data), "events": events / seen, "candidates": candidates / seen,
        "tokens": (events + candidates) / seen + 1, "MFLOP": flops / seen / 1e6,
        "milliseconds, in a batch": 1e3 * sorted(seconds)[len(seconds) // 2],
    }  # fmt: skip


def _time_forward(ranker: Any, batch: Any, batch_options: BatchOptions) -> float:
    """Seconds for a forward pass on a batch that already ran once, so that compilation is excluded."""
    device = get_device(ranker)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    with batch_options.autocast(device):
        ranker(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _count_attention(ranker: Any, batch: Any) -> int:
    """FLOPs for q kᵀ and the product with v, over each token's visible tokens."""
    if not isinstance(ranker, LiGR):
        return 0
    config = ranker.config
    width, layers = config.width, config.layers
    prefix, own = batch.history_offsets.diff() + 1, batch.offsets.diff()
    causal = prefix * (prefix + 1) // 2
    alone, across = own * (prefix + 1), own * (prefix + own)
    setwise = config.setwise_layers
    pairs = layers * causal + (layers - setwise) * alone + setwise * across
    return int(4 * width * pairs.sum())


@contextmanager
def _count_linear(module: nn.Module) -> Iterator[list[int]]:
    """`with _count_linear(module) as flops`: matmul FLOPs of linear layers, 2 · rows · in · out, a number per call."""
    flops: list[int] = []

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], _: Any) -> None:
        assert isinstance(layer, nn.Linear)
        flops.append(2 * inputs[0].numel() * layer.out_features)

    handles = [m.register_forward_hook(count) for m in module.modules() if isinstance(m, nn.Linear)]
    yield flops
    for handle in handles:
        handle.remove()
