"""A policy's step of GRPO where completions share a prompt: TRL's own, a fused model's, and shared.

    python benchmarks/studies/shared_prefix.py --output results              every case, in about 120 s on one H200

Qwen3-1.7B's shape with random weights in bf16: log-probabilities of the completions, the clipped ratio, the backward
pass. Generation and the optimizer are left out. TRL's side is its fused head, where TRL is installed, and otherwise
`log_softmax`, a sequence at a time. "fused" is `tigon.fuse(model)` on TRL's sequences with torch's attention. Sides are
compared in each case: log-probabilities, and gradients of some weights. The file is written after every case.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import report
from harness.training import build, peak_gib, synchronize
from torch import Tensor

import tigon

# Prompts, tokens of each, completions of each, tokens of each. The last shares nothing: what sharing costs there.
CASES = ((1, 4096, 8, 512), (1, 8192, 4, 512), (16, 512, 1, 512))
SIDES = ("trl", "fused", "shared")
WARMUP, STEPS = 2, 5
CLIP = 0.2
COMPARED = 6  # weights whose gradients are compared
Group = tuple[Tensor, list[Tensor]]  # a prompt, and its completions, all of one length
Logprobs = Callable[[Any, list[Group]], Tensor]


@dataclass
class Row:
    """One side of a case. activations_gib: the most memory of a step, less weights and gradients."""

    model: str
    prompts: int
    prompt: int
    completions: int
    length: int
    checkpointing: bool
    side: str
    status: str = "ok"  # ok | failed
    reason: str = ""
    note: str = ""
    step_ms: float | None = None
    steps_ms: list[float] = field(default_factory=list)
    activations_gib: float | None = None
    # Beside TRL's side: the mean distance of log-probabilities, and the cosine between the gradients.
    logprob_apart: float | None = None
    gradient_cosine: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _sequences(groups: list[Group]) -> tuple[Tensor, int]:
    """Every completion behind a copy of its prompt, and how many tokens a completion has."""
    ids = torch.stack([torch.cat([prompt, c]) for prompt, completions in groups for c in completions])
    return ids, groups[0][1][0].numel()


def plain(model: Any, groups: list[Group]) -> Tensor:
    """TRL's way."""
    ids, n = _sequences(groups)
    if _trl_head() is not None:
        labels = ids.clone()
        labels[:, :-n] = -100
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True)
        found: Tensor = out.log_probs[:, -n:]
        return found
    logits = model(input_ids=ids, logits_to_keep=n + 1).logits[:, :-1]
    rows = zip(logits, ids[:, -n:], strict=True)
    return torch.stack([F.log_softmax(z.float(), -1).gather(-1, c[:, None])[:, 0] for z, c in rows])


def run_fused(model: Any, groups: list[Group]) -> Tensor:
    ids, n = _sequences(groups)
    x = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, -n - 1 : -1]
    found: Tensor = tigon.linear_logprob(x.flatten(0, 1), model.lm_head.weight, ids[:, -n:].flatten()).logprob
    return found.view(-1, n)


def run_shared(model: Any, groups: list[Group]) -> Tensor:
    prompts, completions = zip(*groups, strict=True)
    batch = tigon.SharedPrefixBatch(list(prompts), list(completions))
    return batch.logprob(model).logprob.view(-1, completions[0][0].numel())


def _trl_head() -> Callable[[Any], None] | None:
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError:
        return None
    head: Callable[[Any], None] = add_fused_lm_head
    return head


def step(logprobs: Logprobs, model: Any, groups: list[Group], advantages: Tensor) -> Tensor:
    """A policy's first step on new completions: the ratio is 1, and has a gradient."""
    logp = logprobs(model, groups)
    ratio = (logp.float() - logp.detach().float()).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
    loss.backward()
    return logp.detach().float()


def measure(row: Row, logprobs: Logprobs, model: Any, data: tuple[Any, ...], device: torch.device) -> list[Tensor]:
    """Fill a row; log-probabilities and gradients of its last step."""
    held = sum(2 * p.numel() * p.element_size() for p in model.parameters())
    for turn in range(WARMUP + STEPS):
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        synchronize(device)
        start = time.perf_counter()
        logp = step(logprobs, model, *data)
        synchronize(device)
        if turn >= WARMUP:
            row.steps_ms.append(1e3 * (time.perf_counter() - start))
    row.step_ms = statistics.median(row.steps_ms)
    peak = peak_gib(device)
    row.activations_gib = None if peak is None else peak - held / 2**30
    weights = [p for name, p in model.named_parameters() if name.endswith(("q_proj.weight", "down_proj.weight"))]
    return [logp, torch.cat([p.grad.float().flatten() for p in weights[:COMPARED]])]


def case(
    model: Any, prompts: int, prompt: int, count: int, length: int, checkpointing: bool, device: torch.device
) -> list[Row]:
    draw = torch.Generator().manual_seed(1)

    def drawn(n: int) -> Tensor:
        return torch.randint(model.config.vocab_size, (n,), generator=draw).to(device)

    groups = [(drawn(prompt), [drawn(length) for _ in range(count)]) for _ in range(prompts)]
    data = groups, torch.randn(prompts * count, 1, generator=draw).to(device)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    rows, expected = [], None
    for side, logprobs in zip(SIDES, (plain, run_fused, run_shared), strict=True):
        row = Row("qwen3-1.7b", prompts, prompt, count, length, checkpointing, side)
        if side == "trl" and _trl_head() is None:
            row.note = "TRL is not installed: log_softmax, a sequence at a time"
        fusion = None if side == "trl" else tigon.fuse(model, shared_prefix=side == "shared")
        try:
            found = measure(row, logprobs, model, data, device)
            if side == "trl":
                expected = found
            elif expected is not None:
                row.logprob_apart = (found[0] - expected[0]).abs().mean().item()
                row.gradient_cosine = F.cosine_similarity(found[1], expected[1], dim=0).item()
        except torch.OutOfMemoryError:
            row.status, row.reason = "failed", "out of memory"
        if fusion is not None:
            fusion.remove()
        model.zero_grad(set_to_none=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        rows.append(row)
    return rows


def table(rows: list[Row]) -> str:
    lines = []
    plains = {(r.prompts, r.prompt, r.completions, r.checkpointing): r for r in rows if r.side == "trl"}
    for r in rows:
        name = f"{r.prompts} × ({r.prompt} + {r.completions} × {r.length})"
        name += ", checkpoints" if r.checkpointing else ""
        said = f"{r.step_ms:9.1f} ms" if r.step_ms else r.reason
        if r.activations_gib is not None:
            said += f"  {r.activations_gib:7.2f} GiB"
        before = plains[r.prompts, r.prompt, r.completions, r.checkpointing]
        if r.logprob_apart is not None and r.step_ms and before.step_ms:
            said += f"  {before.step_ms / r.step_ms:5.2f} ×"
            said += f"  log-probabilities apart {r.logprob_apart:.1e}, cosine of gradients {r.gradient_cosine:.5f}"
        lines.append(f"{name:36} {r.side:10} {said}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, help="folder for the result file")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds; no case is begun after them")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    began = time.monotonic()
    model: Any = build("qwen3-1.7b", device, dtype)
    head = _trl_head()
    if head is not None:
        head(model)
    rows: list[Row] = []
    cases = CASES
    for number, (sizes, checkpointing) in enumerate((c, on) for c in cases for on in (True, False)):
        if time.monotonic() - began > options.budget:
            print(f"the budget of {options.budget:.0f} s was spent: {2 * len(cases) - number} cases are missing")
            break
        rows += case(model, *sizes, checkpointing, device)
        if options.output:
            content = report.result("shared-prefix", rows, device=device)
            report.save(options.output / report.file_name(content), content)
        print(f"{time.monotonic() - began:6.1f} s  {number + 1} of {2 * len(cases)} cases", flush=True)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
