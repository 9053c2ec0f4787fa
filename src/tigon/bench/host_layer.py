"""The host's time for one layer of a model: forwards, autograd and launches of everything in it, plain and fused.

A tiny Llama is built with one layer, and with LAYERS more. Steps of both take turns, and the difference divided by
LAYERS is a layer's share: embedding, head and loss are in both. Nodes of autograd are counted in the graph of the loss,
and on a GPU kernels by torch's profiler, in the same way.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tigon.bench.host import HELD_UP, HostRow, HostSettings, Timed, take_turns
from tigon.bench.runner import one_line
from tigon.bench.training import SIDES, build
from tigon.kernels import use_triton

LAYER = "layer"
LAYERS = 8
MODEL, WIDTH, BATCH, SEQ = "llama-3.2-1b", 256, 1, 32
SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 512,
}  # fmt: skip
# The plain model stands under the name that the table's column "× eager" divides by.
EAGER = "eager"
NAMES = {EAGER: "hf", **{name: name for name in ("tigon", "tigon-none", "tigon-product", "tigon-cheap")}}


def run_layer(
    dtype: torch.dtype,
    device: torch.device,
    *,
    names: Sequence[str] | None = None,
    sides: Mapping[str, Callable[[Any], None]] = SIDES,
    settings: HostSettings | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[HostRow]:
    """Host time of a layer, forward and with its backward pass, for the plain model and for levels of recompute.

    names: of NAMES, those to measure besides the plain model; all by default. sides: how a side changes the model.
    """
    settings = settings or HostSettings()
    # A step is hundreds of calls: fewer of them are a batch, and the device's queue does not fill.
    settings = HostSettings(max(1, settings.calls // 25), settings.batches, max(1, settings.warmup // 5))
    ids = torch.randint(SIZES["vocab_size"], (BATCH, SEQ), device=device)
    rows: dict[str, HostRow] = {}
    timed: dict[tuple[str, str, int], Timed] = {}
    for name, side in NAMES.items():
        if names is not None and name not in (EAGER, *names):
            continue
        say(f"{LAYER}: {name}")
        row = rows[name] = HostRow(LAYER, (BATCH, SEQ, WIDTH), str(dtype).removeprefix("torch."), name)
        try:
            models = {depth: build(MODEL, device, dtype, num_hidden_layers=depth, **SIZES) for depth in (1, 1 + LAYERS)}
            for depth, model in models.items():
                sides[side](model)
                calls: dict[str, Callable[[], Any]] = {
                    "forward": functools.partial(_loss, model, ids),
                    "total": functools.partial(_step, model, ids),
                }
                for _ in range(settings.warmup):
                    calls["total"]()
                timed |= {(name, part, depth): Timed(call, [], []) for part, call in calls.items()}
            row.note = _counted(models, ids)
            if name != EAGER and not use_triton(next(model.parameters())):
                row.note = f"the reference: no kernels on this device; {row.note}"
        except Exception as error:  # a model may fail in any way; its row then says how
            row.status, row.reason = "failed", one_line(error)
            timed = {key: one for key, one in timed.items() if key[0] != name}
    say(f"{LAYER}: {settings.batches} batches")
    take_turns(timed, device, settings)
    _fill(rows, timed)
    return list(rows.values())


def _loss(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _step(model: nn.Module, ids: Tensor) -> None:
    _loss(model, ids).backward()
    model.zero_grad(set_to_none=True)


def _fill(rows: dict[str, HostRow], timed: dict[tuple[str, str, int], Timed]) -> None:
    for (name, part, depth), deep in timed.items():
        if depth == 1:
            continue
        # Of each round by itself: both depths ran while the host was as fast.
        shallow = timed[name, part, 1]
        pairs = zip(deep.us, shallow.us, strict=True)
        setattr(rows[name], f"{part}_us", statistics.median((more - less) / LAYERS for more, less in pairs))
        if statistics.median(deep.waits) > HELD_UP and "device" not in rows[name].note:
            rows[name].note += "; in part held up by the device"
    eager = rows[EAGER].total_us
    for row in rows.values():
        if row.total_us is not None and eager:
            row.times_eager = row.total_us / eager


def _counted(models: dict[int, Any], ids: Tensor) -> str:
    """What a layer has of what costs the host time: "12 nodes of autograd, 40 kernels"."""
    counts = {"nodes of autograd": [_nodes(_loss(model, ids)) for model in models.values()]}
    if ids.is_cuda:
        counts["kernels"] = [_kernels(model, ids) for model in models.values()]
    return ", ".join(f"{(more - less) / LAYERS:g} {what}" for what, (less, more) in counts.items())


def _nodes(loss: Tensor) -> int:
    """The nodes of a graph, but for those that add to the gradient of a weight."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen and not hasattr(node, "variable"):
            seen.add(node)
            waiting += [parent for parent, _ in node.next_functions]
    return len(seen)


def _kernels(model: Any, ids: Tensor) -> int:
    """Kernels, copies and fillings on the device in one forward and backward pass."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        _step(model, ids)
        torch.cuda.synchronize(ids.device)
    return sum(event.device_type.name == "CUDA" for event in profiler.events())
