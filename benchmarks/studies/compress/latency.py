"""How long a compressed model takes, beside the dense one and torchao's weight-only layers.

    python -m studies.compress.latency --model DIR --model DIR --output benchmarks/results
    python -m studies.compress.latency --shape 2048x8192 --tokens 8192 --output benchmarks/results

--model is a folder of a model of transformers, an encoder or a causal language model, in fp32, on the CPU at batch 1.
Each is timed with 128 tokens at once, and encoders with 16, language models with one token after 128 that are cached.
--shape is the width and the inner width of two layers of Llama with random weights, in bf16 on a GPU with thousands
of tokens; the whole model is timed, and the feed-forward part of its first layer. All sides of a model are called by
turns, so that other programs do not favour one; `ms` is the median of the rounds, with the quartiles.

    prune, rank           at 0.57 of the feed-forward layers' bytes; calibrated on random tokens: only times are read
    bits 4/3 0.25         packed, and widened at each call; "widened": once, by `compress.dequantize`
    torchao int8, int4    its weight-only layers, in the places of the same linear layers; left out if it is missing
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from harness import report
from torch import Tensor, nn

from tigon import compress
from tigon.compress.recognition import find_feed_forwards

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


def store_model(dense: nn.Module, way: str) -> nn.Module:
    """A copy of the model with its feed-forward layers stored in this way."""
    model: Any = copy.deepcopy(dense)
    device = next(model.parameters()).device
    draw, words = torch.Generator().manual_seed(0), model.config.vocab_size
    if way.startswith("torchao"):
        return with_torchao(model, way, torch.randint(words, (1, 16), generator=draw).to(device))
    if way != "dense":
        tokens = 4 * model.config.intermediate_size if way == "rank" else 512
        ids = torch.randint(words, (tokens // LENGTH, LENGTH), generator=draw).to(device)
        options: dict[str, Any] = {"method": way, "budget": BUDGET} if way in ("prune", "rank") else {"method": PACKED}
        compress.feed_forward(model, ids, **options).forget()
    kept: nn.Module = compress.dequantize(model) if way.endswith("widened") else model
    return kept


def with_torchao(model: nn.Module, way: str, ids: Tensor) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, MappingType, PerGroup, quantize_

    layers, _ = find_feed_forwards(model, {"input_ids": ids})
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
        return {f"{LENGTH} tokens": lambda m: m(input_ids=ids), "16 tokens": lambda m: m(input_ids=ids[:, :16])}
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values

    def next_token(m: Any) -> None:
        m(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return {f"{LENGTH} tokens": lambda m: m(input_ids=ids, use_cache=False), "1 token": next_token}


def of_shape(shape: str, device: torch.device) -> Any:
    """Two layers of Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, inner = map(int, shape.split("x"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=2,
        num_attention_heads=max(1, hidden // 128), num_key_value_heads=max(1, hidden // 128), use_cache=False,
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model: Any = LlamaForCausalLM(config)
    return model.to(dtype).eval()


def large_calls(model: Any, tokens: int) -> dict[str, Callable[[Any], Any]]:
    """Eight sequences of so many tokens in all, and the first feed-forward layers on as many rows."""
    like = model.model.embed_tokens.weight
    ids = torch.randint(like.shape[0], (8, tokens // 8), device=like.device)
    x = torch.randn(tokens, like.shape[1], device=like.device, dtype=like.dtype)
    return {
        f"{tokens:,} tokens, feed-forward": lambda m: m.model.layers[0].mlp(x),
        f"{tokens:,} tokens, two layers": lambda m: m.model(input_ids=ids),
    }


@torch.no_grad()
def time_call(models: dict[str, nn.Module], call: Callable[[Any], Any], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round, all models by turns; every other round in reverse."""
    found: dict[str, list[float]] = {way: [] for way in models}
    gpu = next(next(iter(models.values())).parameters()).device.type == "cuda"
    for turn in range(-2, rounds):
        for way in list(models)[:: -1 if turn % 2 else 1]:
            began = time.perf_counter()
            call(models[way])
            if gpu:  # which was idle before: the turn before ended so, too
                torch.cuda.synchronize()
            if turn >= 0:
                found[way].append(1e3 * (time.perf_counter() - began))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", action="append", default=[], type=Path, help="a folder; may be repeated")
    parser.add_argument("--shape", action="append", default=[], help="such as 2048x8192; may be repeated")
    parser.add_argument("--tokens", type=int, default=8192, help="of --shape, a multiple of 8")
    parser.add_argument("--output", required=True, type=Path, help="folder for the result file; a begun study goes on")
    parser.add_argument("--name", help="name of the result file; default: the device's, compress-latency.json")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), help="what is timed beside the dense")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="of --model")
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args(arguments)
    if bool(options.model) == bool(options.shape):
        parser.error("give --model or --shape")
    device = torch.device("cuda" if options.shape and torch.cuda.is_available() else "cpu")
    empty = report.result("compress-latency", [], device=device)
    name = "cpu-compress-latency.json" if device.type == "cpu" else report.file_name(empty, "compress-latency")
    study = Study(options, device, options.output / (options.name or name))
    for folder in options.model:
        study.folder(folder)
    for shape in options.shape:
        model = of_shape(shape, device)
        study.measure(f"llama {shape.replace('x', '×')}", study.sides(model), large_calls(model, options.tokens))
    return 0


class Study:
    """The rows of a result file, saved after each call."""

    def __init__(self, options: argparse.Namespace, device: torch.device, path: Path) -> None:
        self.options, self.device, self.path = options, device, path
        self.rows = [Row(**row) for row in report.load(path)["rows"]] if path.exists() else []

    def sides(self, model: nn.Module) -> dict[str, nn.Module]:
        ways = [way for way in WAYS if way in self.options.only or way == "dense"]
        if find_spec("torchao") is None:
            ways = [way for way in ways if not way.startswith("torchao")]
        return {way: store_model(model, way) for way in ways}

    def folder(self, folder: Path) -> None:
        import transformers

        config = transformers.AutoConfig.from_pretrained(folder)
        kind = getattr(transformers, (config.architectures or ["AutoModel"])[0])
        model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        models = self.sides(model)
        for threads in self.options.threads:
            torch.set_num_threads(threads)
            self.measure(f"{config.model_type} {config.hidden_size}×{config.num_hidden_layers}", models, calls(model))
        torch.set_num_threads(1)

    def measure(self, name: str, models: dict[str, nn.Module], of: dict[str, Callable[[Any], Any]]) -> None:
        threads = torch.get_num_threads()
        for what, call in of.items():
            found = time_call(models, call, self.options.rounds)
            dense = statistics.median(found["dense"])
            for way, ms in found.items():
                low, middle, high = statistics.quantiles(ms, n=4)
                row = Row(name, way, what, threads, middle, (low, high), min(ms), dense / middle, len(ms))
                self.rows.append(row)
                print(f"{name}, {threads} threads, {what}: {way}: {middle:.2f} ms ({low:.2f} to {high:.2f}), "
                      f"{row.speed:.2f} ×", file=sys.stderr, flush=True)  # fmt: skip
            self.path.parent.mkdir(parents=True, exist_ok=True)
            report.save(self.path, report.result("compress-latency", self.rows, device=self.device))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
