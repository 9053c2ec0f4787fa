"""Make every launch in the operator table, and print as JSON how each was made.

    python tests/known_launches.py

The operators run forward and backward on meta tensors, at sizes that differ in rows. Triton gets a driver without a
device, and Triton's `run` selects the kernel for the arguments; a stand-in replaces each compiled kernel and records
the kernel's launch arguments. Each launch is repeated through Triton's own path, from newly planned arguments: both
must have started the same kernel with the same grid and arguments.

Runs in a separate process: TRITON_INTERPRET, which the other tests set, turns kernels into Python.
"""

from __future__ import annotations

import collections
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from compile_launches import Target
from numerics import evaluate
from ops_table import OPS, Case, Op
from ops_table.shards import OVER_SHARDS
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction
from triton.runtime.driver import driver

from tigon.kernels import dispatch as backend
from tigon.kernels import launch_cache

counts: collections.Counter[str] = collections.Counter()
started: list[tuple[Any, ...]] = []


class Kernel:
    """Stand-in for a compiled kernel that records launch arguments."""

    function, packed_metadata = 0, ()

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, x: int, y: int, z: int, *rest: Any) -> None:
        # After the grid: stream, function, metadata and hook arguments, then the kernel's arguments.
        started.append((self, x, *(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in rest[6:])))


def instead_of_compiling(self: JITFunction, key: str, signature: Any, device: int, *_: Any, **__: Any) -> Kernel:
    counts["compiled"] += 1
    self.device_caches[device][0][key] = kernel = Kernel()
    return kernel


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two launches are equal, including types and signs of zeros."""
    return one[0] is other[0] and [(type(a), str(a)) for a in one] == [(type(a), str(a)) for a in other]


def watch(wrong: list[str]) -> None:
    """Compare each launch with Triton's own launch for the same arguments."""
    run, launch = JITFunction.run, launch_cache.launch

    def dispatched(self: JITFunction, *args: Any, **options: Any) -> Any:
        counts["dispatched"] += 1
        return run(self, *args, **options)

    def compared(kernel: Any, key: Any, tensors: Any, plan: Any) -> None:
        counts["launches"] += 1
        launch(kernel, key, tensors, plan)
        ours = started.pop()
        grid, arguments, options = plan()
        before = counts["compiled"]
        run(kernel, *tensors, *arguments, grid=(grid,), warmup=False, **options)
        if counts["compiled"] > before:
            wrong.append(f"{kernel.fn.__name__}: Triton has no kernel yet for {arguments}, {options}")
        if not same(ours, started.pop()):
            wrong.append(f"{kernel.fn.__name__}: not launched as planned: {arguments}, {options}")

    JITFunction.run = dispatched
    for module in list(sys.modules.values()):
        if module.__name__.startswith("tigon.") and vars(module).get("launch") is launch:
            module.launch = compared


def sizes(op: Op, draw: random.Random) -> Iterator[Case]:
    """Each case as listed, and with a different row count."""
    # grpo runs few cases: its many cases repeat linear_logprob's launches.
    for case in (*op.cases[: 3 if op.name.startswith("grpo") else None], op.models[0]):
        yield case
        rows = draw.choice((1, 16)) * draw.randrange(1, 40)
        yield replace(case, shape=(rows, *case.shape[1:]))


def make_launches() -> dict[str, Any]:
    wrong: list[str] = []
    driver.set_active(Target(GPUTarget("cuda", 90, 32)))
    JITFunction._do_compile = instead_of_compiling
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    # Meta tensors stand for tensors on the GPU.
    backend.why_not_triton = lambda *tensors: None
    watch(wrong)
    draw = random.Random(0)
    operators = {}
    with backend.use_backend("triton"), torch.device("meta"):
        for op in (*OPS, *OVER_SHARDS):
            counts.clear()
            # Twice: the second time every key is known.
            for case in [*(all_sizes := list(sizes(op, draw))), *all_sizes]:
                inputs = op.draw(case, torch.bfloat16, torch.device("meta"), None)
                evaluate(op.public, inputs, case.options, op.differentiable(inputs), seed=None)
            operators[op.name] = dict(counts)
    return {
        "operators": operators,
        "wrong": wrong,
        "keys": len(launch_cache._plans),
        "kernels": len(launch_cache._kernels),
    }


if __name__ == "__main__":
    json.dump(make_launches(), sys.stdout)
