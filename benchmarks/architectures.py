"""Ten architectures at their real widths, plain and fused: checks loss and gradients, measures speed and memory.

    python benchmarks/architectures.py --output results
    python benchmarks/architectures.py --output results --only qwen3-8b,gpt-oss-20b --layers 4 --batch 4 --seq 2048

Each model is built with a few layers and random weights in bf16. The same weights in fp32 give the loss and gradients
that both sides are held to; then plain and fused take turns with a forward and backward pass, without an optimizer. The
file is written after every model. Whole training steps, also Liger's: benchmarks/models.py.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import report

import tigon
from tigon.presets import auto_class, preset_config

MODELS = (
    "llama-3.1-8b", "qwen3-8b", "qwen3-30b-a3b", "gemma-3-4b", "mistral-7b", "phi-4", "granite-3.1-8b", "olmo-2-7b",
    "gpt-oss-20b", "qwen2.5-vl-7b",
)  # fmt: skip
LAYERS = {"gemma-3-4b": 6}  # the first two layers are not of all kinds
FACTOR = 2.0  # a fused gradient may be this many times as far from fp32 as the plain one is
WARMUP, ROUNDS = 3, 4


@dataclass
class Side:
    """One side of one model. error: of the worst tensor's gradient, relative to fp32's in the Euclidean norm."""

    model: str
    side: str
    batch: int
    seq: int
    layers: int
    checkpointing: bool = False
    status: str = "ok"  # ok | wrong | failed
    reason: str = ""
    note: str = ""
    step_ms: float | None = None
    steps_ms: list[float] = field(default_factory=list)
    tokens_per_s: float | None = None
    peak_gib: float | None = None
    loss: float | None = None
    loss_fp32: float | None = None
    error: float | None = None
    calls: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def build(name: str, layers: int, device: torch.device, **overrides: Any) -> Any:
    config = preset_config(name, **overrides)
    text = config.get_text_config()
    before = text.num_hidden_layers
    text.num_hidden_layers = min(layers, before)
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == before:  # a list with an entry for each layer
            setattr(text, key, value[:layers])
    config.use_cache = False
    torch.manual_seed(0)
    with device:
        model = auto_class(config).from_config(config, dtype=torch.bfloat16)
    return model.train()


def step(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    return loss.detach()


def gradients(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    loss = float(step(model, ids, labels))
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss, found


def errors(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    return {n: float((found[n].float() - g).norm() / g.norm().clamp(min=1e-30)) for n, g in exact.items() if n in found}


@contextlib.contextmanager
def as_side(name: str, model: Any) -> Iterator[Any]:
    if name == "hf":
        yield None
        return
    with tigon.fuse(model) as fusion:
        yield fusion


def compare(rows: dict[str, Side], model: Any, ids: torch.Tensor, labels: torch.Tensor) -> None:
    """Losses and gradients of both sides beside those of the same weights in fp32."""
    wide = copy.deepcopy(model).float()
    loss, exact = gradients(wide, ids, labels)
    del wide
    found: dict[str, dict[str, float]] = {}
    for name, row in rows.items():
        with as_side(name, model) as fusion:
            row.loss, mine = gradients(model, ids, labels)
            row.calls = {} if fusion is None else fusion.report().calls
        row.loss_fp32 = loss
        if mine.keys() != exact.keys():
            row.status, row.reason = "wrong", f"gradients of {len(mine)} parameters, of {len(exact)} in fp32"
        found[name] = errors(mine, exact)
        row.error = max(found[name].values())
        del mine
    # A gradient made of a few exact numbers may differ by one bf16 rounding.
    beyond = [n for n, e in found["tigon"].items() if not e <= max(FACTOR * found["hf"].get(n, 0.0), 2**-8)]
    ours, plain = rows["tigon"], rows["hf"]
    if beyond:
        ours.status, ours.reason = "wrong", f"more than {FACTOR:g} × the plain error in {', '.join(beyond[:3])}"
    assert ours.loss is not None
    assert plain.loss is not None
    if not abs(ours.loss - loss) <= FACTOR * abs(plain.loss - loss) + 2**-9 * abs(loss):
        ours.status, ours.reason = "wrong", f"loss {ours.loss:.5f}, plain {plain.loss:.5f}, fp32 {loss:.5f}"


def measure(rows: dict[str, Side], model: Any, ids: torch.Tensor, labels: torch.Tensor, steps: int) -> None:
    """Times and peak memory, the sides in turns."""
    on_gpu = ids.is_cuda
    for _ in range(ROUNDS):
        for name, row in rows.items():
            with as_side(name, model):
                for _ in range(WARMUP):
                    step(model, ids, labels)
                if on_gpu:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                for _ in range(steps):
                    start = time.perf_counter()
                    step(model, ids, labels)
                    if on_gpu:
                        torch.cuda.synchronize()
                    row.steps_ms.append(1e3 * (time.perf_counter() - start))
                if on_gpu:
                    row.peak_gib = torch.cuda.max_memory_allocated() / 2**30
    for row in rows.values():
        row.step_ms = statistics.median(row.steps_ms)
        row.tokens_per_s = 1e3 * row.batch * row.seq / row.step_ms


def examine(name: str, options: argparse.Namespace, device: torch.device, overrides: dict[str, Any]) -> list[Side]:
    layers = max(options.layers, LAYERS.get(name, 0))
    rows = {side: Side(name, side, options.batch, options.seq, layers) for side in ("hf", "tigon")}
    try:
        model = build(name, layers, device, **overrides)
        draw = torch.Generator(device).manual_seed(1)
        size = (options.batch, options.seq)
        ids = torch.randint(model.get_input_embeddings().weight.shape[0], size, generator=draw, device=device)
        labels = ids.clone()
        labels[:, : options.seq // 8] = -100
        attention = model.config.get_text_config()._attn_implementation
        for row in rows.values():
            row.note = "" if attention == "sdpa" else f"{attention} attention"
        short = slice(0, options.compare_seq)
        compare(rows, model, ids[:1, short], labels[:1, short])
        measure(rows, model, ids, labels, options.steps)
    except Exception as error:  # the record says so, and the next model goes on
        for row in rows.values():
            row.status, row.reason = "failed", " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return list(rows.values())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", required=True, type=Path, help="folder for the result file")
    parser.add_argument("--name", default="architectures", help="end of the file's name, after the device's")
    parser.add_argument("--only", default=",".join(MODELS), help="presets, separated by commas")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--compare-seq", type=int, default=1024, help="tokens of the one sequence that is run in fp32")
    parser.add_argument("--steps", type=int, default=5, help="in each of four rounds")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=N", help="of the configuration")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no further model is begun")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    overrides = {key: int(value) for key, value in (pair.split("=") for pair in options.set)}
    start, rows = time.perf_counter(), []
    for name in options.only.split(","):
        if time.perf_counter() - start > options.budget:
            print(f"{name}: not begun, the budget is spent", flush=True)
            continue
        rows += examine(name, options, device, overrides)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        content = report.result("architecture", rows, device=device)
        report.save(options.output / report.file_name(content).replace("architecture", options.name), content)
        print("\n".join(report.to_text({**content, "rows": content["rows"][-2:]}).split("\n")[-2:]), flush=True)


if __name__ == "__main__":
    main()
