"""`tigon demo`: train the same small Llama twice from one seed, plain and fused, on Python's own library."""

from __future__ import annotations

import multiprocessing
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tigon.cli.options import device_option, option
from tigon.cli.problem import Problem, find_device, needs

# On a CPU both sides compute in fp32, so that the losses may differ only by rounding.
CPU_TOLERANCE = 1e-3
# On a CPU the plain side stops after this many seconds, and the fused side after as many steps.
CPU_SECONDS = 50.0
LEAST_STEPS = 5
WARMUP = 3  # untimed steps: allocations, kernel choice, compilation
# The first row that fits the GPU's free memory, in GiB; the last row is for the CPU.
_NAMES = ("batch_size", "seq_len", "vocab_size", "steps", "hidden_size", "intermediate_size", "num_hidden_layers",
          "num_attention_heads", "num_key_value_heads")  # fmt: skip
# fmt: off
SIZES = (
    (110, (16, 2048, 32768, 60, 2048, 8192, 16, 32, 8)),
    (60,   (8, 2048, 32768, 60, 2048, 8192, 16, 32, 8)),
    (20,   (8, 1024, 32768, 60, 1024, 4096, 12, 16, 8)),
    (4,    (4,  512, 32768, 60,  512, 1408,  8,  8, 4)),
    (0,    (8,  256, 16384, 30,  192,  512,  4,  6, 2)),
)
# fmt: on


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    steps: int | None = option(None, "Training steps per model, plain and fused.", min=1)
    seed: int = option(0, "Seed for weights and data order.", min=0, max=2**32 - 1)
    device: str = device_option()


def demo(options: DemoOptions) -> None:
    """Train the same small Llama twice from one seed, plain and fused, and compare loss, speed and memory.

    The text is this Python's standard library, source and documentation; the tokenizer is trained on the same text. On
    a CPU in fp32 the losses must be equal to 1e-3 at every step, or the exit code is 1. On a GPU, in bf16, a second
    plain run shows the difference between two equal runs.
    """
    needs("tigon demo", "train", "torch", "numpy", "transformers", "tokenizers")
    import torch

    place, steps = find_device(options.device), options.steps
    on_gpu = place.type == "cuda"
    free = torch.cuda.mem_get_info()[0] / 2**30 if on_gpu else 0.0
    size = dict(zip(_NAMES, next(row for least, row in SIZES if free >= least), strict=True))
    print("training a tokenizer on Python's standard library", flush=True)
    blocks, vocabulary = tokenize_library(size, 16 << 20 if on_gpu else 4 << 20)
    wanted = steps or size["steps"]
    spec = {**size, "steps": wanted, "vocab_size": vocabulary, "seed": options.seed, "device": place.type,
            "warmup": max(1, wanted // 10), "seconds": None if on_gpu or steps else CPU_SECONDS}  # fmt: skip
    sides: dict[str, dict[str, Any]] = {}
    for name in ("plain", "plain again", "fused") if on_gpu else ("plain", "fused"):
        print(f"training: {name}", flush=True)
        # A process per side, for separate memory peaks.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                sides[name] = pool.submit(train_side, {**spec, "fused": name == "fused"}, blocks).result()
            except BrokenProcessPool as error:
                raise Problem(f"the {name} side was killed, possibly out of memory", code=1) from error
        spec |= {"steps": len(sides[name]["losses"]), "seconds": None}
    show_table(sides, spec)
    difference = compute_difference(sides["plain"], sides["fused"])
    if not on_gpu and not difference <= CPU_TOLERANCE:
        raise Problem(f"the losses of plain and fused differ by {difference:.2e}, above {CPU_TOLERANCE:g}", code=1)


def read_library() -> Iterator[str]:
    """Read the sources of Python's standard library. The topics of help() come first, since they are prose."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "lib2to3", "idlelib"}
    for file in dict.fromkeys([root / "pydoc_data" / "topics.py", *sorted(root.rglob("*.py"))]):
        if not skipped & set(file.relative_to(root).parts) and file.is_file():
            yield file.read_text(encoding="utf-8", errors="replace")


def tokenize_library(size: dict[str, int], limit: int) -> tuple[Any, int]:
    """Tokenize at most `limit` characters of the library as (n, seq_len) ids; also returns the vocabulary size."""
    import torch

    from tigon.cli.tokens import train_tokenizer

    texts, total = [], 0
    for text in read_library():
        texts.append(text)
        total += len(text)
        if total >= limit:
            break
    if not texts:
        raise Problem("the demo trains on Python's standard library, whose source files are missing here")
    tokenizer = train_tokenizer(texts, size["vocab_size"])
    tokens: list[int] = []
    for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        tokens += [*ids, tokenizer.eos_token_id]
    count = len(tokens) // size["seq_len"]
    return torch.tensor(tokens[: count * size["seq_len"]]).view(count, size["seq_len"]), len(tokenizer)


def train_side(spec: dict[str, Any], blocks: Any) -> dict[str, Any]:
    """Train one side in this process, and return its losses, seconds and memory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    on_gpu = spec["device"] == "cuda"
    torch.manual_seed(spec["seed"])
    config = LlamaConfig(
        **{name: spec[name] for name in ("vocab_size", *_NAMES[4:])}, max_position_embeddings=spec["seq_len"],
        tie_word_embeddings=True, use_cache=False, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).to(spec["device"], torch.bfloat16 if on_gpu else torch.float32).train()
    if spec["fused"]:
        from tigon import fuse

        fusion = fuse(model)
    peak_lr = 3e-4 if on_gpu else 1e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(spec["seed"]))
    began = time.perf_counter()
    losses, seconds = [], []
    for step in range(spec["steps"]):
        if spec["seconds"] and step >= LEAST_STEPS and time.perf_counter() - began > spec["seconds"]:
            break
        start = time.perf_counter()
        rows = torch.arange(step * spec["batch_size"], (step + 1) * spec["batch_size"]) % len(order)
        ids = blocks[order[rows]].to(spec["device"])
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * min(1.0, (step + 1) / spec["warmup"])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the step's work
        seconds.append(time.perf_counter() - start)
    return {
        "losses": losses,
        "tokens_per_second": spec["batch_size"] * spec["seq_len"] / median(seconds[WARMUP:] or seconds),
        "peak": torch.cuda.max_memory_allocated() if on_gpu else read_peak(),
        "parameters": model.num_parameters(),
        "report": str(fusion.report()) if spec["fused"] else "",
        "device": torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU",
    }


def read_peak() -> int:
    """The most bytes that this process has had in memory; 0 on systems that do not say."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux counts into a child's ru_maxrss what its parent had in memory
        return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)


def compute_difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest loss difference between two sides, at any step."""
    return max(abs(float(x - y)) for x, y in zip(a["losses"], b["losses"], strict=True))


def show_table(sides: dict[str, dict[str, Any]], spec: dict[str, Any]) -> None:
    """Print each side's loss, speed and memory, and compare the fused side with the plain side."""
    from rich.table import Table

    from tigon.cli.screen import show

    plain, fused = sides["plain"], sides["fused"]
    on_gpu = spec["device"] == "cuda"
    table = Table(
        title=f"Llama, {plain['parameters'] / 1e6:,.1f}M parameters, vocabulary {spec['vocab_size']:,}, "
        f"{spec['batch_size']} × {spec['seq_len']} tokens, {spec['steps']} steps, {'bf16' if on_gpu else 'fp32'}, "
        f"{plain['device']}",
        caption="In bf16, identical runs diverge; the second plain run shows by how much."
        if on_gpu
        else "The kernels run on GPUs; on a CPU, fusing saves memory by computing the loss without logits.",
    )
    for name in ("", *sides, "fused against plain"):
        table.add_column(name, justify="right" if name else "left")

    def add_ratio(label: str, key: str, unit: float = 1.0) -> None:
        a, b = fused[key], plain[key]
        ratio = f"{a / b - 1:+.1%}" if a and b else ""
        table.add_row(label, *(f"{side[key] / unit:,.0f}" for side in sides.values()), ratio)

    for label, step in (("first loss", 0), ("final loss", -1)):
        values = [f"{side['losses'][step]:.4f}" for side in sides.values()]
        table.add_row(label, *values, f"{fused['losses'][step] - plain['losses'][step]:+.1e}")
    apart = [f"{compute_difference(plain, side):.1e}" if side is not plain else "" for side in sides.values()]
    table.add_row("largest loss difference from plain", *apart, "")
    add_ratio("tokens/s", "tokens_per_second")
    add_ratio(f"peak memory, MiB ({'allocated' if on_gpu else 'resident'})", "peak", 2**20)
    print(fused["report"])
    show(table)
