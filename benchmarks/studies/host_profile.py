"""The host's share of a decoder layer: what Python, torch and Tigon do to launch one layer's forward and backward pass.

    python benchmarks/studies/host_profile.py --output results          every model and side, in about a minute

A stack of decoder layers runs forward and backward without embedding, head and optimizer, and all numbers are divided
by the layers. Counted: autograd nodes, torch's operators, Triton launches, calls of Python functions. Timed: until
Python returns, from an idle device. cProfile then splits that time by the code's owner; the cost of cProfile is not in
the time. The backward pass runs on the calling thread, where cProfile sees it.

On a CPU the layers are so narrow that products cost little more than their calls, and a launch ends where the GPU's
driver would be called. Such times compare sides on one machine; they are not a GPU's host times.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import report
from harness.training import build, synchronize
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tigon
from tigon.kernels import dispatch, launch_cache
from tigon.kernels.device import is_hopper

CASES = (
    ("Llama-3.2-1B", "llama-3.2-1b", {}),
    ("Qwen3-0.6B", "qwen3-1.7b", {"hidden_size": 1024, "intermediate_size": 3072}),
)
# The sizes on a CPU: the same operators, with little arithmetic.
NARROW = {
    "hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256,
}  # fmt: skip
SIDES: dict[str, dict[str, Any] | None] = {
    "hf": None,
    "tigon, parts": {},  # each part by itself, as in layers that do not run as a whole
    "tigon": {},
    "tigon, cheap": {"recompute": "cheap"},
    "tigon, fp8": {"fp8": True},  # on a GPU that has FP8 alone
}
# The owner of a code file, by the first of these pieces in its path.
OWNERS = (
    ("tigon/fusion", "checks of replaced forwards"),
    ("tigon/ops", "Tigon's operators"),
    ("tigon/kernels", "Tigon's operators"),
    ("transformers/", "the model's Python"),
    ("torch/nn/modules", "the model's Python"),
    ("torch/", "torch's Python"),
    ("~", "torch's operators"),
)
LAYERS, TOKENS, ROUNDS = 4, 256, 60


@dataclass
class HostRow:
    """One side of one model, per layer: counts, microseconds, and the microseconds by owner."""

    model: str
    side: str
    tokens: int
    nodes: float = 0.0
    operators: float = 0.0
    launches: float = 0.0
    calls: float = 0.0
    forward_us: float = 0.0
    backward_us: float = 0.0
    by_owner_us: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class CountedOperators(TorchDispatchMode):
    """Counts torch's operators, views among them, and looks no further."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def launches_end_at_the_driver(device: torch.device) -> Iterator[None]:
    """On a CPU: operators take their kernels' path up to the compiled kernel's launcher, which does nothing."""
    if device.type == "cuda":
        yield
        return
    replaced = [
        (launch_cache, "INTERPRET", False),
        (launch_cache, "_specialization_key", lambda *_: ()),
        (launch_cache, "_kernels", {(): (lambda *_: None, None, None)}),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
        (dispatch, "why_not_triton", lambda *tensors: None),
    ]
    before = [(owner, name, getattr(owner, name, None)) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        with tigon.use_backend("triton"):
            yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


class Stack:
    """A model's decoder layers alone, called as the model calls them."""

    def __init__(self, preset: str, sizes: dict[str, Any], side: str, device: torch.device, layers: int) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        narrow = {} if device.type == "cuda" else NARROW
        self.model = build(preset, device, dtype, num_hidden_layers=layers, **{**sizes, **narrow})
        self.model.config.use_cache = False
        options = SIDES[side]
        if options is not None:
            tigon.fuse(self.model, **options)
        if side == "tigon, parts":
            for module in self.model.modules():
                if "_tigon" in vars(module):
                    vars(module)["_tigon"].whole = None
        self.layers = layers
        hidden = self.model.config.hidden_size
        self.x = torch.randn(1, TOKENS if device.type == "cuda" else 16, hidden, device=device, dtype=dtype)
        self.x.requires_grad_()
        self.device = device

    def forward(self) -> Tensor:
        y: Tensor = self.model.model(inputs_embeds=self.x, use_cache=False).last_hidden_state
        return y

    def free_gradients(self) -> None:
        self.x.grad = None
        for p in self.model.parameters():
            p.grad = None


def time_passes(stack: Stack) -> tuple[float, float]:
    """Microseconds until Python returns from the forward, and from the backward pass."""
    synchronize(stack.device)
    start = time.perf_counter()
    y = stack.forward()
    middle = time.perf_counter()
    synchronize(stack.device)
    dy = torch.ones_like(y)
    synchronize(stack.device)
    again = time.perf_counter()
    y.backward(dy)
    end = time.perf_counter()
    stack.free_gradients()
    return 1e6 * (middle - start), 1e6 * (end - again)


def count_nodes(y: Tensor) -> int:
    """Autograd nodes behind y, without those that accumulate a leaf's gradient."""
    seen, todo = set(), [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return sum("AccumulateGrad" not in node.name() for node in seen)


def count_launches(run: Callable[[], Any]) -> int:
    """Launches of Triton kernels in run(): every launch looks its plan up."""

    class Counted(dict[Any, Any]):
        lookups = 0

        def get(self, key: Any, default: Any = None) -> Any:
            Counted.lookups += 1
            return super().get(key, default)

    plans = launch_cache._plans
    launch_cache._plans = Counted(plans)
    try:
        run()
    finally:
        launch_cache._plans = plans
    return Counted.lookups


def step(stack: Stack) -> None:
    stack.forward().sum().backward()
    stack.free_gradients()


def count(stack: Stack) -> tuple[dict[str, float], dict[str, float]]:
    """Counts, and the seconds that cProfile found by owner."""
    nodes = count_nodes(stack.forward())
    with CountedOperators() as operators:
        step(stack)
    launches = count_launches(lambda: step(stack))
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        profile.enable()
        for _ in range(8):
            step(stack)
        profile.disable()
    synchronize(stack.device)
    owners: dict[str, float] = {}
    calls = 0.0
    for (file, _, _), (_, times, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        owner = next((owner for piece, owner in OWNERS if piece in file), "torch's Python")
        owners[owner] = owners.get(owner, 0.0) + own
        calls += 0 if file == "~" else times / 8
    found = {"nodes": nodes, "operators": operators.counts.total(), "launches": launches, "calls": calls}
    return found, owners


def measure(name: str, preset: str, sizes: dict[str, Any], device: torch.device) -> list[HostRow]:
    """The sides in turns. What the stack does once, around its layers, is measured by a stack of half as many."""
    rows = []
    sides = [side for side in SIDES if "fp8" not in side or is_hopper(device)]
    stacks = {side: [Stack(preset, sizes, side, device, n) for n in (LAYERS, 2 * LAYERS)] for side in sides}
    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for turn in range(ROUNDS):
        for side, pair in stacks.items():
            for number, stack in enumerate(pair):
                passes = time_passes(stack)
                if turn >= ROUNDS // 4:
                    times.setdefault((side, number), []).append(passes)
    for side, pair in stacks.items():
        (few, _), (many, by_owner) = (count(stack) for stack in pair)
        row = HostRow(name, side, pair[0].x.shape[1], **{k: (many[k] - few[k]) / LAYERS for k in few})
        least = [[statistics.median(t) for t in zip(*times[side, number], strict=True)] for number in (0, 1)]
        row.forward_us, row.backward_us = ((b - a) / LAYERS for a, b in zip(*least, strict=True))
        scale = (row.forward_us + row.backward_us) / sum(by_owner.values())
        row.by_owner_us = {owner: seconds * scale for owner, seconds in by_owner.items()}
        rows.append(row)
    return rows


def table(rows: list[HostRow]) -> str:
    owners = list(dict.fromkeys(owner for _, owner in OWNERS))
    heads = ("", "nodes", "operators", "launches", "calls", "forward µs", "backward µs", *owners)
    lines = [f"{heads[0]:30}" + "".join(f"{head:>{max(len(head) + 2, 11)}}" for head in heads[1:])]
    for row in rows:
        counts = (row.nodes, row.operators, row.launches, row.calls, row.forward_us, row.backward_us)
        cells = (*counts, *(row.by_owner_us.get(owner, 0.0) for owner in owners))
        line = "".join(f"{n:>{max(len(head) + 2, 11)}.0f}" for head, n in zip(heads[1:], cells, strict=True))
        lines.append(f"{row.model + ', ' + row.side:30}" + line)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, help="folder for the result file")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[HostRow] = []
    with launches_end_at_the_driver(device):
        for case in CASES:
            rows += measure(*case, device)
    if options.output:
        content = report.result("host-profile", rows, device=device)
        report.save(options.output / report.file_name(content), content)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
