"""What shared prefixes save a prompt ranker: a request of 4096 tokens and 32 candidates of 128, shape of Qwen3-1.7B.

    python -m studies.prompt_speed --output results

Random weights; beside it the same by a sequence for each candidate, of several batch sizes the fastest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import report
from torch import Tensor

import tigon
from studies.rows import Row


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_call(run: Any, device: torch.device, repeats: int = 5) -> float:
    """Median of milliseconds by the clock, after a run that compiles."""
    run()
    times = []
    for _ in range(repeats if device.type == "cuda" else 1):
        finish(device)
        begin = time.perf_counter()
        run()
        finish(device)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def speed(device: torch.device, prefix: int, candidates: int, length: int, layers: int) -> Iterator[Row]:
    """Scoring, and a training step's forward and backward, shared and by a sequence a candidate, in bf16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    wide = device.type == "cuda"
    config = Qwen3Config(
        vocab_size=151936 if wide else 512, hidden_size=2048 if wide else 64, intermediate_size=6144 if wide else 128,
        num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=8, head_dim=128 if wide else 16,
        max_position_embeddings=40960, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    answers = [config.vocab_size // 2, config.vocab_size // 3]
    draw = torch.Generator().manual_seed(0)
    one = torch.randint(config.vocab_size, (prefix,), generator=draw)
    own = [torch.randint(config.vocab_size, (length,), generator=draw) for _ in range(candidates)]
    labels = torch.randint(2, (candidates,), generator=draw).to(device)
    whole = torch.stack([torch.cat((one, suffix)) for suffix in own]).to(device)
    tigon.fuse(model, shared_prefix=True)
    batch = tigon.SharedPrefixBatch([one], [own]).to(device)
    head = model.get_output_embeddings().weight

    def separate(size: int, backward: bool) -> Tensor:
        found = []
        for some, right in zip(whole.split(size), labels.split(size), strict=True):
            z = F.linear(model.base_model(some, use_cache=False).last_hidden_state[:, -1], head[answers]).float()
            if backward:
                (F.cross_entropy(z, right, reduction="sum") / candidates).backward()
            found.append(z.detach())
        return torch.cat(found)

    def training(run: Any) -> None:
        run()
        for p in model.parameters():
            p.grad = None

    with torch.no_grad():
        a, b = batch.next_logits(model, answers).softmax(-1), separate(2, False).softmax(-1)
        scoring = time_call(lambda: batch.next_logits(model, answers), device)
        by_size = {size: time_call(lambda size=size: separate(size, False), device, 3) for size in (1, 2, 8)}
    model.train()
    step = time_call(
        lambda: training(lambda: F.cross_entropy(batch.next_logits(model, answers), labels).backward()), device
    )
    step_by_size = {
        size: time_call(lambda size=size: training(lambda: separate(size, True)), device, 3) for size in (1, 2, 4)
    }
    shape = f"Qwen3-1.7B, {prefix} + {candidates} × {length}"
    for method, ms, of_sizes in (("scoring", scoring, by_size), ("training", step, step_by_size)):
        size = min(of_sizes, key=lambda size: of_sizes[size])
        measures = {
            "shared ms": ms, "separate ms": of_sizes[size], "shared tokens": batch.rows,
            "separate tokens": batch.separate_rows, "candidates a second": 1e3 * candidates / ms,
        }  # fmt: skip
        if method == "scoring":
            measures["largest difference"] = float((a - b).abs().max())
        tried = {f"ms, {n} at once": value for n, value in of_sizes.items()}
        yield Row("speed", "random", 0, method, {"shape": shape, "layers": layers, "at once": size, **tried}, measures)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="4096,32,128,28", help="prefix, candidates, tokens, layers")
    parser.add_argument("--output", type=Path, required=True, help="folder of the result file")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = list(speed(device, *map(int, options.shape.split(","))))
    content = report.result("rank-prompts", rows, device=device)
    report.save(options.output / report.file_name(content, "rank-prompts"), content)
    print(report.to_text(content))


if __name__ == "__main__":
    main()
