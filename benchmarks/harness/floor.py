"""The floor of a dense model's training step: no step is faster than its matrix products, attention and optimizer.

Each is timed alone on random data of the step's sizes, in the same dtype and on the same device, as often as the step
runs it: every linear layer forward, and backward for its input and its weight; SDPA forward and backward in every
layer, also where the model has eager attention; one step of fused AdamW over all parameters. With checkpointing the
layers' forward counts twice, except the last product of each layer, whose result no backward pass needs. The head
counts only the unmasked tokens, since a loss may leave out the others. Norms, activations, residual sums, the loss
and the embedding count nothing. Products and attention count once a micro-batch.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from harness.training import RunResult, build
from torch import nn

ROUNDS = 4  # the first round is not counted


def count_linear_shapes(model: nn.Module, checkpointing: bool) -> Counter[tuple[tuple[int, ...], int]]:
    """How many linear layers have each ((out, in), number of forward passes in a step), without the head."""
    decoder = model.get_decoder()
    counts: Counter[tuple[tuple[int, ...], int]] = Counter()
    for layer in decoder.layers:
        shapes = [tuple(m.weight.shape) for m in layer.modules() if isinstance(m, nn.Linear)]
        counts.update((shape, 2 if checkpointing else 1) for shape in shapes[:-1])
        counts[shapes[-1], 1] += 1
    return counts


def measure_floor(
    row: RunResult,
    device: torch.device,
    overrides: dict[str, Any],
    say: Callable[[str], None] = print,
    done: Callable[[list[RunResult]], None] = lambda rows: None,
) -> list[RunResult]:
    """The row with the sum of what was timed as its step. Its profile has the parts."""
    row.profile_ms = time_parts(row, device, overrides)
    row.step_ms = sum(row.profile_ms.values())
    row.tokens_per_s = 1e3 * row.batch * row.seq / row.step_ms
    row.note = "matrix products, attention and optimizer alone"
    say(f"{row.side}: step of {row.step_ms:.0f} ms")
    return [row]


def time_parts(side: RunResult, device: torch.device, overrides: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a step's "matmul", "attention" and "optimizer"."""
    model = build(side.model, torch.device("meta"), getattr(torch, side.dtype), **overrides)
    tokens = side.batch * side.seq
    # Each token predicts the next, so the first label is never used.
    valid = side.batch * (side.seq - max(1, int(side.seq * side.masked)))
    head = tuple(model.get_output_embeddings().weight.shape)
    parts = {"matmul": _time_products(head, valid, 1, 1, side, device)}
    for (shape, forwards), count in count_linear_shapes(model, side.checkpointing).items():
        parts["matmul"] += _time_products(shape, tokens, count, forwards, side, device)
    parts["attention"] = _time_attention(model.config.get_text_config(), side, device)
    times = {name: side.accumulation * ms for name, ms in parts.items()}
    times["optimizer"] = _time_optimizer([p.shape for p in model.parameters()], side, device)
    return times


def _time_products(
    shape: tuple[int, ...], tokens: int, count: int, forwards: int, side: RunResult, device: torch.device
) -> float:
    dtype = getattr(torch, side.dtype)
    x, dy = (torch.randn(tokens, n, device=device, dtype=dtype) for n in reversed(shape))
    weight = torch.randn(shape, device=device, dtype=dtype)
    y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(weight)

    def run() -> None:
        for _ in range(count):
            for _ in range(forwards):
                torch.mm(x, weight.t(), out=y)
            torch.mm(dy, weight, out=dx)
            torch.mm(dy.t(), x, out=dw)

    return _time_median(run, device)


def _time_attention(config: Any, side: RunResult, device: torch.device) -> float:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    q, k, v = (
        torch.randn(side.batch, n, side.seq, width, device=device, dtype=getattr(torch, side.dtype)).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )
    dy = torch.randn_like(q)

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

    def run() -> None:
        for _ in range(config.num_hidden_layers):
            if side.checkpointing:
                with torch.no_grad():
                    forward()
            torch.autograd.grad(forward(), (q, k, v), dy)

    return _time_median(run, device)


def _time_optimizer(shapes: list[torch.Size], side: RunResult, device: torch.device) -> float:
    parameters = [nn.Parameter(torch.randn(shape, device=device, dtype=getattr(torch, side.dtype))) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=device.type == "cuda")
    return _time_median(optimizer.step, device)


def _time_median(run: Callable[[], object], device: torch.device) -> float:
    times: list[float] = []
    for _ in range(ROUNDS):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[1:])
