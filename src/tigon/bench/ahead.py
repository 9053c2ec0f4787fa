"""Compile what a sweep will run before it is measured, in as many processes as there are processors for.

torch.compile, Triton and the peers compile for seconds what then runs for microseconds, one thread for each case. The
processes run each implementation of their draws once: what they compile stays in the caches on disk (torch.compile's
and Triton's), where the measuring process finds it. Nothing is measured meanwhile, and what fails here only takes
longer afterwards.

python -m tigon.bench.ahead      a process: reads a request and then draws on standard input, says "done" after each
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tigon.bench import drawn_models
from tigon.bench.cases import OPS
from tigon.bench.children import end, start
from tigon.bench.inputs import DTYPES, Shape
from tigon.bench.runner import choose, free, run_once, within

DONE = "done"
SLOWER = 3.0  # than alone on the machine
# A model has dozens of kernels where an operator has two, and its compilation would end after all the others'.
MODEL_SLOWER, MODEL_THREADS = 12.0, 4
CACHE, TRITON_CACHE, THREADS = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"
# Of the device's memory, for all processes together, as if a third of them needed any at a time.
MEMORY_SHARE = 0.85 * 3
SPARE_CORES = 1  # this process only imports meanwhile
# A larger number of CUDA contexts needs more memory than it saves time.
MOST = 16
# These have nothing to compile, or keep nothing of it on disk.
NOT_AHEAD = ("eager", "torch", "transformers", "trl", "quack")


@contextlib.contextmanager
def private_cache() -> Iterator[None]:
    """A folder for what torch.compile and Triton compile, of this run alone: nothing lies there that another has tuned.

    Named to both: torch.compile would tell Triton of a folder in its own, from its first kernel on, and what was
    compiled before would lie elsewhere. Inside, torch.compile has no processes of its own: a pool of as many as there
    are processors would import torch while the host's time is measured.
    """
    before = {name: os.environ.get(name) for name in (CACHE, TRITON_CACHE, THREADS)}
    with tempfile.TemporaryDirectory(prefix="tigon-sweep-", ignore_cleanup_errors=True) as folder:
        os.environ |= {CACHE: folder, TRITON_CACHE: os.path.join(folder, "triton"), THREADS: "1"}
        inductor: Any = sys.modules.get("torch._inductor.config")  # it has read the number if it is imported already
        threads = getattr(inductor, "compile_threads", None)
        if inductor is not None:
            inductor.compile_threads = 1
        try:
            yield
        finally:
            if inductor is not None:
                inductor.compile_threads = threads
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def _forget_tuning() -> None:
    """Remove what torch.compile has tuned while other processes were on the device: the choice would be of chance."""
    if folder := os.environ.get(CACHE):
        for file in Path(folder).rglob("*.best_config"):
            file.unlink(missing_ok=True)


def processes() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST, cores - SPARE_CORES))


def compile_ahead(
    draws: Sequence[dict[str, Any]],
    device: torch.device,
    peers: Sequence[str] | None,
    *,
    start_s: float,
    deadline_s: float,
    count: int | None = None,
    say: Callable[[int], None] = lambda done: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> int:
    """Run draws once in `count` processes; returns how many were run until the deadline.

    Each process is handed its next draw when it has done one, in the order of the draws: what is measured first is
    compiled first, and no process waits while another has several left. All processes have ended when this returns.

    Args:
        draws: each with "op", "shape", "dtype" and "options".
        start_s: seconds after which a first call is given up.
        say: called with the number of draws that are done.
        meanwhile: called once, while the processes work.
    """
    count = min(count or processes(), len(draws))
    began, done, lock = time.monotonic(), [0], threading.Lock()
    request = {
        "device": str(device),
        "peers": peers,
        "start_s": start_s,
        "memory": min(0.85, MEMORY_SHARE / max(1, count)),
    }
    # Models take longest. Begun last, one of them would hold the others up.
    waiting = iter(sorted(draws, key=lambda draw: draw["op"] != drawn_models.NAME))

    def feed(child: subprocess.Popen[str]) -> None:
        requests, answers = child.stdin, child.stdout
        assert requests is not None
        assert answers is not None

        def hand(message: dict[str, Any]) -> None:
            requests.write(json.dumps(message) + "\n")
            requests.flush()

        def hand_next() -> None:
            with lock:
                draw = next(waiting, None)
            if draw is None:
                requests.close()
            else:
                hand(draw)

        with contextlib.suppress(OSError, ValueError):  # the process has died, or was ended
            hand(request)
            hand_next()
            for line in answers:
                if line.strip() == DONE:
                    with lock:
                        done[0] += 1
                    hand_next()

    children: list[subprocess.Popen[str]] = []
    feeders: list[threading.Thread] = []
    try:
        for _ in range(count):
            # A process compiles by itself: pools of the compilers' own would outnumber the processors.
            child = start("tigon.bench.ahead", environment={THREADS: "1", "OMP_NUM_THREADS": "1"})
            children.append(child)
            feeders.append(threading.Thread(target=feed, args=(child,), daemon=True))
            feeders[-1].start()
        meanwhile()
        while any(child.poll() is None for child in children) and time.monotonic() - began < deadline_s:
            say(done[0])
            time.sleep(0.2)
    finally:
        for child in children:
            end(child)
        for feeder in feeders:
            feeder.join(5.0)
    _forget_tuning()
    return done[0]


# ------------------------------------------------------------------------------------------------------------- process


def run_draw(
    name: str, shape: Shape, dtype: str, options: dict[str, Any], device: torch.device, peers: Any, start_s: float
) -> None:
    """Run every implementation once, whatever fails."""
    if name == drawn_models.NAME:
        inputs = drawn_models.labelled(shape, options["vocabulary"], device)
        for side in ("tigon", "compile", "liger"):
            if side == "tigon" or peers is None or side in peers:
                with contextlib.suppress(Exception), drawn_models.contained(), within(MODEL_SLOWER * start_s):
                    model = drawn_models.prepared(side, drawn_models.build(shape, dtype, options, device))
                    with _threads(MODEL_THREADS if side == "compile" else 1):
                        drawn_models.step(model, inputs)
            free(device)
        return
    op, options = OPS[name], dict(options)
    ignored = options.pop("ignored", 0.0)
    own = op.make(shape, DTYPES[dtype], device, ignored)
    own.arguments |= options
    torch._dynamo.reset()
    for by, implementation in choose(op, peers, device).items():
        if by in NOT_AHEAD:
            continue
        with contextlib.suppress(Exception), within(SLOWER * start_s):
            # A copy only for those that write into their inputs: with it the largest heads do not fit beside others.
            run_once(implementation.load(), own.clone() if implementation.overwrites else own)
        free(device)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch.compile use so many processes of its own, which end with the block."""
    if count == 1:
        yield
        return
    import torch._inductor.async_compile as compiling
    import torch._inductor.config as config

    before, config.compile_threads = config.compile_threads, count
    try:
        yield
    finally:
        config.compile_threads = before
        compiling.shutdown_compile_workers()


def _once(fn: Callable[[], object], *_: object, quantiles: Sequence[float] | None = None, **__: object) -> Any:
    """In the place of Triton's do_bench: autotuning compiles every configuration, and chooses when it is measured."""
    fn()
    return 1.0 if quantiles is None else [1.0] * len(quantiles)


def _serve() -> int:
    with contextlib.suppress(ImportError):
        import triton.testing

        triton.testing.do_bench = _once
    request = json.loads(sys.stdin.readline() or "null")
    if request is None:  # nothing is wanted any more
        return 0
    device = torch.device(request["device"])
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(request["memory"], torch.cuda.current_device())
    for line in sys.stdin:
        draw = json.loads(line)
        with contextlib.suppress(Exception):
            shape = tuple(draw["shape"])
            run_draw(draw["op"], shape, draw["dtype"], draw["options"], device, request["peers"], request["start_s"])
        free(device)
        print(DONE, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(_serve())
