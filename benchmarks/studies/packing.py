"""Training steps on samples of many lengths: padded, without padding, and packed by best fit.

    python benchmarks/studies/packing.py --output results      every side, in about 150 s on an H200
    python benchmarks/studies/packing.py --shares              the padding in batches of stated lengths; needs no GPU

The lengths are drawn from a lognormal distribution with median 300 and σ = 1, at most 2,048 tokens. All sides train on
the same samples, in micro-batches of 8, with gradient checkpointing. A packed row has at most 4,096 tokens. Speed
counts the samples' own tokens alone. Before any update each side's loss over the first samples is recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness import report
from harness.training import build, synchronize

import tigon
from tigon.fusion.memory.checkpointing import checkpoint_activations
from tigon.integrations.packing import PackedDataset, PackingCollator, measure_padding
from tigon.integrations.packing.padding_free import drop_padding

MEDIAN, SIGMA, MOST = 300, 1.0, 2048
SAMPLES, BATCH, BUDGET = 96, 8, 4096
FIRST = 16  # samples whose loss is compared
RANK, PROJECTIONS = 16, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = (("Llama-3-8B, LoRA", "llama-3-8b", RANK), ("Qwen3-1.7B", "qwen3-1.7b", 0))
# Median, σ and maximum of lengths, for the table of shares.
DISTRIBUTIONS = ((120, 0.8, 1024), (300, 1.0, 2048), (800, 0.8, 4096))


@dataclass
class Row:
    """One side: real tokens per second over all samples, forward, backward and optimizer.

    computed: the tokens that the layers ran on, as a multiple of the real ones. loss: over the first samples, before
    training.
    """

    model: str
    side: str
    status: str = "ok"  # ok | failed
    reason: str = ""
    tokens_per_s: float | None = None
    seconds: float | None = None
    tokens: int = 0
    computed: float = 1.0
    peak_gib: float | None = None
    loss: float | None = None
    date: str = ""
    command: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def draw_lengths(
    count: int, median: float = MEDIAN, sigma: float = SIGMA, most: int = MOST, seed: int = 0
) -> list[int]:
    """Lengths of a lognormal distribution, at least 2 and at most `most`."""
    draw = random.Random(seed)
    return [max(2, min(most, round(draw.lognormvariate(math.log(median), sigma)))) for _ in range(count)]


def draw_samples(lengths: Sequence[int], vocabulary: int) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(1, vocabulary, (n,), generator=draw).tolist()} for n in lengths]


def pad(samples: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    shape = len(samples), longest
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.int64),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
    }
    batch["labels"] = torch.full(shape, -100)
    for i, sample in enumerate(samples):
        ids = torch.tensor(sample["input_ids"])
        for name, values in (("input_ids", ids), ("labels", ids), ("attention_mask", torch.ones_like(ids))):
            batch[name][i, : len(ids)] = values
    return batch


def make_batches(samples: Sequence[Any], packed: bool, budget: int) -> list[dict[str, Any]]:
    if packed:
        collate = PackingCollator()
        return [collate([row]) for row in PackedDataset(samples, budget)]  # type: ignore[arg-type]
    return [pad(samples[i : i + BATCH]) for i in range(0, len(samples), BATCH)]


def count_labels(batch: dict[str, Any]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


@contextlib.contextmanager
def run_as(side: str, model: Any) -> Iterator[None]:
    """The model as a side has it: plain, fused, or fused and without padding."""
    if side.startswith("hf"):
        before = model.config._attn_implementation
        model.set_attn_implementation("flash_attention_2" if "flash" in side else before)
        try:
            yield
        finally:
            model.set_attn_implementation(before)
        return
    fusion = tigon.fuse(model)
    made = drop_padding(fusion, model, True, Counter(), Counter()) if "without padding" in side else None
    if isinstance(made, str):
        raise RuntimeError(made)
    try:
        yield
    finally:
        if made is not None:
            made.remove()
        fusion.remove()


SIDES = ("hf, padded", "tigon, padded", "tigon, without padding", "hf, packed", "tigon, packed")
FLASH = "hf, packed, flash"  # where flash-attn is installed


def run_model(model: Any, batch: dict[str, Any], device: torch.device) -> Any:
    """The loss of a batch that lies on the host."""
    moved = {k: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    return model(**moved, use_cache=False).loss


@torch.no_grad()
def measure_loss(row: Row, model: Any, samples: Sequence[Any], budget: int, device: torch.device) -> None:
    total, count = 0.0, 0
    try:
        with run_as(row.side, model):
            for batch in make_batches(samples, "packed" in row.side, budget):
                total += float(run_model(model, batch, device)) * count_labels(batch)
                count += count_labels(batch)
    except (RuntimeError, ValueError) as error:
        row.status, row.reason = "failed", f"{type(error).__name__}: {str(error)[:200]}"
        return
    row.loss = total / count


def measure_speed(row: Row, model: Any, samples: Sequence[Any], budget: int, device: torch.device) -> None:
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-6, fused=device.type == "cuda")
    batches = make_batches(samples, "packed" in row.side, budget)
    row.tokens = sum(len(sample["input_ids"]) for sample in samples)
    computed = row.tokens if "without" in row.side else sum(batch["input_ids"].numel() for batch in batches)
    row.computed = computed / row.tokens

    def step(batch: dict[str, Any]) -> None:
        run_model(model, batch, device).backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        with run_as(row.side, model):
            for batch in sorted(batches, key=lambda batch: -batch["input_ids"].numel())[:3]:
                step(batch)
            synchronize(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            for batch in batches:
                step(batch)
            synchronize(device)
            row.seconds = time.perf_counter() - began
            row.tokens_per_s = row.tokens / row.seconds
            if device.type == "cuda":
                row.peak_gib = torch.cuda.max_memory_allocated() / 2**30
    except (RuntimeError, ValueError) as error:
        row.status, row.reason = "failed", f"{type(error).__name__}: {str(error)[:200]}"
        optimizer.zero_grad()


def make_model(preset: str, rank: int, device: torch.device, **overrides: Any) -> Any:
    model = build(preset, device, torch.bfloat16 if device.type == "cuda" else torch.float32, **overrides)
    checkpoint_activations(model)
    if rank:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
        model.enable_input_require_grads()
        return get_peft_model(model, lora)
    return model


def measure_all(
    cases: Sequence[tuple[str, str, int]], device: torch.device, save: Callable[[list[Row]], None],
    lengths: Sequence[int], budget: int = BUDGET, **overrides: Any,
) -> list[Row]:  # fmt: skip
    rows: list[Row] = []
    for name, preset, rank in cases:
        model = make_model(preset, rank, device, **overrides)
        samples = draw_samples(lengths, model.config.vocab_size)
        sides = [*SIDES, *([FLASH] if importlib.util.find_spec("flash_attn") else [])]
        own = [Row(name, side) for side in sides]
        rows += own
        for row in own:
            measure_loss(row, model, samples[:FIRST], budget, device)
        for row in own:
            if row.status == "ok":
                measure_speed(row, model, samples, budget, device)
            save(rows)
            print(table([row]), flush=True)
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if row.status != "ok" or row.tokens_per_s is None:
            lines.append(f"{row.model:18} {row.side:24} {row.status}: {row.reason}")
            continue
        peak = f"{row.peak_gib:6.1f} GiB" if row.peak_gib else ""
        lines.append(
            f"{row.model:18} {row.side:24} {row.tokens_per_s:10,.0f} tokens/s  {row.computed:4.2f} × computed  {peak}"
            f"  loss {row.loss:.5f}"
        )
    return "\n".join(lines)


def shares() -> str:
    """A table of the padding in batches, and in rows packed by best fit, for each of DISTRIBUTIONS."""
    lines = [
        "| median | σ | longest | batches of 4 | of 8 | of 32 | packed rows |",
        "| --: | --: | --: | --: | --: | --: | --: |",
    ]
    for median, sigma, most in DISTRIBUTIONS:
        lengths = draw_lengths(20_000, median, sigma, most)
        padded = [measure_padding(lengths, size) for size in (4, 8, 32)]
        packed = PackedDataset([{"input_ids": range(n)} for n in lengths], most).padding
        cells = " | ".join(f"{share:.0%}".replace("%", " %") for share in padded)
        lines.append(f"| {median} | {sigma} | {most:,} | {cells} | {100 * packed:.1f} % |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, help="folder for the result file")
    parser.add_argument("--shares", action="store_true", help="print the padding of stated lengths, and end")
    options = parser.parse_args()
    if options.shares:
        print(shares())
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def save(rows: list[Row]) -> None:
        if options.output:
            content = report.result("packing", rows, device=device)
            report.save(options.output / report.file_name(content), content)

    rows = measure_all(CASES, device, save, draw_lengths(SAMPLES))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
