"""What a ranker is made of, and what a request of a table costs it."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from tigon.rank.data.batches import BatchOptions, eval_mode, get_device
from tigon.rank.models.ligr.model import LiGR

# Batches that are counted and timed, at most, and after how many seconds no other one is begun.
BATCHES, SECONDS = 5, 2.0


def fields_of(schema: Any) -> list[dict[str, Any]]:
    """A row for each field: name, kind, side, and how many rows its embedding table has."""
    return [
        {"name": name, "kind": field.kind, "side": field.side, "rows": getattr(field, "rows", None)}
        for name, field in schema.fields.items()
    ]


def parameters_of(ranker: nn.Module) -> dict[str, int]:
    """Parameters by part, the largest first; fields have a part each. Codes of 8 bits count as what they stand for."""
    counts: dict[str, int] = {}
    codes = [(name, b) for name, b in ranker.named_buffers() if name.endswith(".codes")]
    for name, p in [*ranker.named_parameters(), *codes]:
        words = name.split(".")
        part = ".".join(words[:3]) if words[0] == "tokens" else words[0]
        counts[part] = counts.get(part, 0) + p.numel()
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def costs(ranker: Any, data: Any, batch_options: BatchOptions) -> dict[str, Any]:
    """Means of a request over some batches: events, candidates, FLOPs, milliseconds, and their floor on a GPU.

    FLOPs are those of linear layers, and of attention where the ranker's config says how wide it is. The floor is the
    time of so many FLOPs at the rate of the largest matrix product that the device reaches.
    """
    device = get_device(ranker)
    seen, events, candidates, flops, seconds = 0, 0, 0, 0.0, []
    began = time.perf_counter()
    with eval_mode(ranker):
        for number, batch in enumerate(batch_options.batches(data, device)):
            if number == BATCHES or (number and time.perf_counter() - began > SECONDS):
                break
            with _Linear(ranker) as linear, batch_options.autocast(device):
                ranker(batch)
            flops += linear.flops + _attention(ranker, batch)
            seconds.append(_timed(ranker, batch, batch_options) / batch.requests)
            seen, events, candidates = seen + batch.requests, events + batch.events, candidates + batch.candidates
    found: dict[str, Any] = {
        "requests": len(data), "events": events / seen, "candidates": candidates / seen,
        "tokens": (events + candidates) / seen + 1, "MFLOP": flops / seen / 1e6,
        "milliseconds, in a batch": 1e3 * sorted(seconds)[len(seconds) // 2],
    }  # fmt: skip
    if device.type == "cuda":
        found["floor, milliseconds"] = 1e3 * flops / seen / _measure_matmul_rate(device)
    return found


def _measure_matmul_rate(device: torch.device) -> float:
    """FLOP a second of a large product in bf16."""
    from triton.testing import do_bench

    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2e3 * n**3 / float(do_bench(lambda: a @ b, return_mode="median"))


def _timed(ranker: Any, batch: Any, batch_options: BatchOptions) -> float:
    """Seconds of a forward pass, of a batch that was counted and so has compiled what it needs."""
    device = get_device(ranker)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    with batch_options.autocast(device):
        ranker(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _attention(ranker: Any, batch: Any) -> int:
    """FLOPs of q kᵀ and of its product with v, over the tokens that a token reads."""
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


class _Linear:
    """`with _Linear(module) as linear`: the FLOPs of the products of linear layers, 2 · rows · in · out."""

    def __init__(self, module: nn.Module) -> None:
        self.flops = 0
        self.layers = [m for m in module.modules() if isinstance(m, nn.Linear)]
        self.handles: list[Any] = []

    def __enter__(self) -> _Linear:
        def count(layer: nn.Module, inputs: tuple[Tensor, ...], _: Any) -> None:
            assert isinstance(layer, nn.Linear)
            self.flops += 2 * inputs[0].numel() * layer.out_features

        self.handles = [layer.register_forward_hook(count) for layer in self.layers]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
