"""Fixtures for all tests, and the environment, which must be set before anything imports Triton.

On a machine without CUDA the Triton kernels run in Triton's interpreter. The switch is read when a kernel is decorated,
so it is set here, before the first import of a kernel file.
"""

import itertools
import os
import socket

import pytest
import torch
from extras import EXTRAS

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Otherwise each worker starts a compile process per core, and waits for all of them at the end.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tigon import use_backend
from tigon.fusion.memory import auto
from tigon.kernels import dispatch as backend_module

HAS_TRITON = backend_module.HAS_TRITON
LEAST_WORK = auto.LEAST_WORK


if backend_module.INTERPRET and HAS_TRITON:
    import interpreter

    from tigon.ops import sum_rows
    from tigon.ops.prefix_attention import launches as attention

    interpreter.mend()
    # Programs run one after another: on a wide row, a thousand programs of 16 columns would take most of the time.
    sum_rows._tile = lambda: (64, 256, 8)
    # As many queries per tile as for 16-bit numbers, since registers are no limit here. The key blocks, which order the
    # sums, stay the same.
    attention.TILES_FP32 = {D: tile._replace(rows=64) for D, tile in attention.TILES_FP32.items()}


# A third of all tests, without module fixtures: groups of 16 tests keep all workers busy to the end.
SPLIT_FILE = "test_invariants.py"
GROUP_SIZE = 16


@pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")  # before xdist's
def pytest_group_by_file(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run each file on a single worker, so that a module fixture is made once.

    Named groups, such as tests with 2³¹ elements, which must not run at the same time, take minutes and come first.
    """
    if not getattr(config.option, "loadgroup", False):
        return

    def rank(item: pytest.Item) -> int:
        return 0 if item.get_closest_marker("xdist_group") else 2 if item.path.name == SPLIT_FILE else 1

    items.sort(key=rank)
    numbers = itertools.count()
    for item in items:
        if rank(item):
            name = item.path.name if rank(item) == 1 else f"{next(numbers) // GROUP_SIZE}"
            item.add_marker(pytest.mark.xdist_group(name))


@pytest.hookimpl(trylast=True)  # after xdist's
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # xdist 3.8 writes the group to an attribute that pytest 9.2 no longer reads: without this, tests of 2³¹
        # elements would run at the same time.
        grouped = getattr(item, "_nodeid", item.nodeid)
        if grouped != item.nodeid:
            item._id = type(item._id).parse(grouped)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    """Skip files that import a package from an extra that is not installed."""
    report = yield
    cause = report.call.excinfo.value.__cause__ if report.failed else None
    if isinstance(cause, ModuleNotFoundError) and (name := (cause.name or "").partition(".")[0]) in EXTRAS:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 1, f"Skipped: {name} is not installed")
    return report


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest):
    """Each implementation in turn, forced: without a CUDA device, the Triton kernels are interpreted."""
    if request.param == "triton" and not HAS_TRITON:
        pytest.skip("Triton is not installed")
    with use_backend(request.param):
        yield request.param


@pytest.fixture
def triton_backend():
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    with use_backend("triton"):
        yield


@pytest.fixture(autouse=True)
def _same_state_after_every_test():
    """Fail a test that leaves a backend forced: later tests would compare the library with itself."""
    forced = backend_module._forced
    torch.manual_seed(0)
    yield
    assert backend_module._forced == forced, "the test left a backend forced"


@pytest.fixture(autouse=True)
def _products_of_fp32_are_exact():
    """Trainers that compile switch TF32 on for the process; later tests compare with exact fp32 products."""
    yield
    places = [place for place in (torch.backends, torch.backends.cuda.matmul) if hasattr(place, "fp32_precision")]
    if any(place.fp32_precision == "tf32" for place in places) or not places:
        torch.set_float32_matmul_precision("highest")
        for place in places:
            place.fp32_precision = "none"


@pytest.fixture(autouse=True)
def _large_batches(monkeypatch):
    """recompute="auto" treats a test's tiny batch as a large one, and recomputes; `batches_as_they_are` undoes this."""
    monkeypatch.setattr(auto, "LEAST_WORK", 0)


@pytest.fixture
def batches_as_they_are(_large_batches, monkeypatch):
    """recompute="auto" decides as for users."""
    monkeypatch.setattr(auto, "LEAST_WORK", LEAST_WORK)


@pytest.fixture
def process_group(tmp_path):
    """torch.distributed, with a single-process group."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs gloo")
    if dist.is_initialized():  # accelerate leaves a process group behind under a launcher
        dist.destroy_process_group()
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backends, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="session")
def environment():
    """A user's environment: without the interpreter and without a launcher's variables.

    A process group gets a free port, because other tests may run at the same time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plain = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", *LAUNCHER)}
    return plain | {"MASTER_PORT": str(port)}
