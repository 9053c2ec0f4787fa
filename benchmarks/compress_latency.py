"""How long a compressed model takes on a CPU at batch 1, beside the dense one and torchao's weight-only layers.

    PYTHONPATH=src python benchmarks/compress_latency.py --model DIR --model DIR --output benchmarks/results

--model is a folder of a model of transformers, an encoder or a causal language model, in fp32. Each is timed with 128
tokens at once, and encoders with 16, language models with one token after 128 that are cached. All sides of a model are
called by turns, so that other programs do not favour one; `ms` is the median of the rounds, with the quartiles.

    prune, rank           at 0.57 of the feed-forward layers' bytes; calibrated on random tokens: only times are read
    bits 4/3 0.25         packed, and widened at each call; "widened": once, by `compress.widen`
    torchao int8, int4    its weight-only layers, in the places of the same linear layers
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tigon import compress
from tigon.bench import report
from tigon.compress.finding import find

BUDGET, LENGTH = 0.57, 128
PACKED = compress.Bits(4, 3, 0.25, fit=False)  # rounded to nearest: as fast as what is fitted
WAYS = ("dense", "prune", "rank", "bits 4/3 0.25", "bits 4/3 0.25 widened", "torchao int8", "torchao int4")


@dataclass
class Row:
    """One model stored in one way, called in one way."""

    model: str
    method: str
    call: str
    threads: int
    ms: float  # the median
    quartiles: tuple[float, float]
    least: float
    speed: float  # the dense model's median over this one's, of the same rounds
    rounds: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def stored(model: nn.Module, way: str) -> nn.Module:
    """A copy of the model with its feed-forward layers stored in this way."""
    model = copy.deepcopy(model)
    draw, words = torch.Generator().manual_seed(0), int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    if way.startswith("torchao"):
        return with_torchao(model, way, torch.randint(words, (1, 16), generator=draw))
    if way != "dense":
        tokens = 4 * int(model.config.intermediate_size) if way == "rank" else 512  # type: ignore[union-attr, arg-type]
        ids = torch.randint(words, (tokens // LENGTH, LENGTH), generator=draw)
        options: dict[str, Any] = {"method": way, "budget": BUDGET} if way in ("prune", "rank") else {"method": PACKED}
        compress.feed_forward(model, ids, **options).forget()
    return compress.widen(model) if way.endswith("widened") else model


def with_torchao(model: nn.Module, way: str, ids: Tensor) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, MappingType, PerGroup, quantize_

    layers, _ = find(model, {"input_ids": ids})
    names = {name for one in layers for name in one.layers}
    config = Int8WeightOnlyConfig()
    if way.endswith("int4"):
        four: Any = vars(torch)["int4"]  # that PyTorch's stubs leave out
        config = IntxWeightOnlyConfig(four, PerGroup(64), MappingType.ASYMMETRIC)
    quantize_(model, config, filter_fn=lambda _, name: name in names)
    return model


def calls(model: Any) -> dict[str, Callable[[Any], Any]]:
    """What is timed: functions of a model."""
    ids = torch.randint(int(model.config.vocab_size), (1, LENGTH), generator=torch.Generator().manual_seed(1))
    if not hasattr(model, "lm_head"):
        return {f"{n} tokens": lambda m, n=n: m(input_ids=ids[:, :n]) for n in (LENGTH, 16)}  # type: ignore[misc]
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values

    def next_token(m: Any) -> None:
        m(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return {f"{LENGTH} tokens": lambda m: m(input_ids=ids, use_cache=False), "1 token": next_token}


@torch.no_grad()
def timed(models: dict[str, nn.Module], call: Callable[[Any], Any], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round, all models by turns; every other round in reverse."""
    found: dict[str, list[float]] = {way: [] for way in models}
    for turn in range(-2, rounds):
        for way in list(models)[:: -1 if turn % 2 else 1]:
            began = time.perf_counter()
            call(models[way])
            if turn >= 0:
                found[way].append(1e3 * (time.perf_counter() - began))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", action="append", required=True, type=Path, help="a folder; may be repeated")
    parser.add_argument("--output", required=True, type=Path, help="folder for the result file; a begun study goes on")
    parser.add_argument("--name", default="cpu-compress-latency.json", help="name of the result file")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), help="what is timed beside the dense")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args(arguments)
    import transformers

    path = options.output / options.name
    rows = [Row(**row) for row in report.load(path)["rows"]] if path.exists() else []
    for folder in options.model:
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = getattr(transformers, (config.architectures or ["AutoModel"])[0])
        model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        name = f"{config.model_type} {config.hidden_size}×{config.num_hidden_layers}"
        models = {way: stored(model, way) for way in WAYS if way in options.only or way == "dense"}
        for threads in options.threads:
            torch.set_num_threads(threads)
            for what, call in calls(model).items():
                found = timed(models, call, options.rounds)
                dense = statistics.median(found["dense"])
                for way, ms in found.items():
                    low, middle, high = statistics.quantiles(ms, n=4)
                    row = Row(name, way, what, threads, middle, (low, high), min(ms), dense / middle, len(ms))
                    rows.append(row)
                    print(f"{name}, {threads} threads, {what}: {way}: {middle:.2f} ms ({low:.2f} to {high:.2f}), "
                          f"{row.speed:.2f} ×", file=sys.stderr, flush=True)  # fmt: skip
                options.output.mkdir(parents=True, exist_ok=True)
                report.save(path, report.result("compress-latency", rows, device=torch.device("cpu")))
        torch.set_num_threads(1)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
