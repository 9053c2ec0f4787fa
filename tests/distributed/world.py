"""A world of several processes in which tests run functions: gloo on the CPU, or NCCL with a GPU for each rank.

    from world import world_of

    pytestmark = pytest.mark.xdist_group("distributed")  # one worker pays for the imports
    four = world_of(4)  # a fixture of the module

    def sums(rank, world, device, x):  # at the top of a module, so that it is found by its name
        x = torch.full((3,), x, device=device)
        dist.all_reduce(x)
        return x

    def test_sums(four):
        assert [x.tolist() for x in four.run(sums, 2.0)] == [[8.0] * 3] * 4

The processes are forked from one that has imported what is large, and serve all tests of a module. A function that
raises, or takes longer than its limit, ends them; the next one gets others. TIGON_TEST_WORLD=cuda asks for GPUs (`make
gpu-test-distributed`): a world that is larger than the machine is then skipped, and one of several sizes is the first
that is not. Otherwise none is seen.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

GPUS = os.environ.get("TIGON_TEST_WORLD") == "cuda"
LARGE = (
    "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama",
    "accelerate", "tigon.cli.train.run", "tigon.integrations.trl",
)  # fmt: skip
# Once one rank has failed the others may wait for it until the end of days.
PATIENCE = 2


class World:
    """`size` processes of one process group, started when first needed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.processes: list[Any] = []
        self.pipes: list[connection.Connection] = []
        self.folder = tempfile.TemporaryDirectory(prefix="tigon-world-")

    @property
    def device_type(self) -> str:
        return "cuda" if GPUS else "cpu"

    def run(self, function: Callable[..., Any], *arguments: Any, limit: float = 90, **options: Any) -> list[Any]:
        """What function(rank, world, device, *arguments, **options) returned, by rank; its tensors on the CPU.

        A crash in native code is a warning, with its place, unless it comes again: malloc has found broken memory once
        in thousands of runs, which no check of our own kernels' accesses explains.

        Args:
            function: of the top of a module. torch.manual_seed(0) was called before it.
            limit: seconds, also of each collective.
        Raises: RankError, with the traceback of each rank that failed, or where those were that did not end.
        """
        try:
            return self._run(function, arguments, options, limit)
        except CrashError as crash:
            warnings.warn(f"run again after a crash: {crash}", stacklevel=2)
            return self._run(function, arguments, options, limit)

    def _run(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any], limit: float
    ) -> list[Any]:
        if not self.processes:
            self._start(limit)
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((function, arguments, options, limit)))
        answers: dict[int, tuple[bool, Any]] = {}
        has_crashed = False
        end = time.monotonic() + limit + PATIENCE
        while len(answers) < self.size:
            pending = {self.pipes[rank]: rank for rank in range(self.size) if rank not in answers}
            ready = connection.wait(list(pending), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = pending[pipe]  # type: ignore[index]
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    self.processes[rank].join(5)
                    status = self.processes[rank].exitcode
                    has_crashed |= status is not None and status < 0
                    ended = f"the process ended, status {status}\n{self._place(rank)}"
                    answers[rank] = (False, ended)
                if not answers[rank][0]:
                    end = min(end, time.monotonic() + PATIENCE)
        if len(answers) == self.size and all(right for right, _ in answers.values()):
            return [answers[rank][1] for rank in range(self.size)]
        complaints = [f"rank {rank}: {said}" for rank, (right, said) in sorted(answers.items()) if not right]
        silent = [rank for rank in range(self.size) if rank not in answers]
        places = [f"rank {rank} had not ended.\n{self._place(rank)}" for rank in silent]
        self.end()
        error = CrashError if has_crashed else RankError
        raise error("\n".join([f"{function.__name__} in a world of {self.size}:", *complaints, *places]))

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        deadline = time.monotonic() + 1
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        self.processes, self.pipes = [], []

    def _start(self, limit: float) -> None:
        context = multiprocessing.get_context("forkserver")
        _warm()
        store = tempfile.mktemp(dir=self.folder.name)
        for rank in range(self.size):
            Path(self._log(rank)).unlink(missing_ok=True)
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, self.size, self.device_type, store, self._log(rank), limit)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def _log(self, rank: int) -> str:
        return f"{self.folder.name}/{rank}.txt"

    def _place(self, rank: int) -> str:
        file = Path(self._log(rank))
        return file.read_text(errors="replace").partition("\nExtension modules")[0] if file.exists() else ""


class RankError(AssertionError):
    """A function failed in one or several processes of a world."""


class CrashError(RankError):
    """A process of a world was ended by a signal."""


def world_of(*sizes: int) -> Any:
    """A fixture: a World of the first of these sizes that the machine has GPUs for, for the tests of a module.

    On the CPU, of the first.
    """

    @pytest.fixture(scope="module")
    def world():
        if not dist.is_available() or not (dist.is_nccl_available() if GPUS else dist.is_gloo_available()):
            pytest.skip("torch.distributed has not the backend")
        size = next((n for n in sizes if not GPUS or n <= torch.cuda.device_count()), None)
        if size is None:
            pytest.skip(f"needs {sizes[-1]} GPUs")
        world = World(size)
        yield world
        world.end()

    return world


def _warm() -> None:
    """Start the process that the others are forked from. It takes its environment, and the modules, once."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(LARGE))
    changes = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if not GPUS:
        changes |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(
    pipe: connection.Connection, rank: int, size: int, device_type: str, store: str, log: str, limit: float
) -> None:
    # What a launcher would have set, for libraries that look there.
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}.items():
        os.environ[name] = str(value)
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Both: objects are gathered by way of the CPU.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=size,
            timeout=timedelta(seconds=limit), device_id=device,
        )  # fmt: skip
    else:
        _mend_interpreter()
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=limit)
        )
    with open(log, "w") as places:
        faulthandler.enable(file=places)  # where a crash in native code was
        while True:
            try:
                request = pipe.recv_bytes()
            except EOFError:
                break
            places.truncate(0)
            places.seek(0)
            try:
                function, arguments, options, limit = pickle.loads(request)
                faulthandler.dump_traceback_later(limit, file=places)
                torch.manual_seed(0)
                result = function(rank, size, device, *arguments, **options)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                answer = pickle.dumps((True, tree_map_only(torch.Tensor, _alone, result)))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc()))
            finally:
                faulthandler.cancel_dump_traceback_later()
            try:
                pipe.send_bytes(answer)
            except BrokenPipeError:
                break
    sys.stdout.flush()
    # Taking apart what was imported, and NCCL's communicators, takes longer than most tests.
    os._exit(0)


def _alone(x: torch.Tensor) -> torch.Tensor:
    """On the CPU, and without the rest of the storage that it is a view of."""
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    return x.detach().cpu().clone()


def _mend_interpreter() -> None:
    """As tests/conftest.py does in the process of the tests."""
    from tigon.kernels import dispatch as backend

    if backend.INTERPRET and backend.HAS_TRITON:
        import interpreter

        interpreter.mend()
