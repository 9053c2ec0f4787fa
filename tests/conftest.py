"""What every test shares: the environment, set before anything imports Triton, and the device.

On a machine without CUDA the Triton kernels run in Triton's interpreter. The switch is read when a kernel is decorated,
so it is set here, before the first import of a kernel file.
"""

import gc
import itertools
import os
import socket
import sys

import pytest
import torch
from extras import EXTRAS

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Otherwise each worker has compile processes of its own, as many as there are cores, and waits for them at its end.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Python collects garbage when there is enough of it.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # For devices that may come yet torch keeps the stack of each call that seeds them, once a kind: 1.3 ms of a test's.
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        kind.manual_seed_all = lambda seed: None

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
    # Programs run one after another: a thousand of 16 columns each would be most of a wide row's time.
    sum_rows._tile = lambda: (64, 256, 8)
    # As many queries as of 16-bit numbers, where registers are no limit: blocks of keys, which order the sums, stay.
    attention.TILES_FP32 = {D: tile._replace(rows=64) for D, tile in attention.TILES_FP32.items()}


# A third of all tests, which share nothing: by handfuls they keep both workers busy to the end. One by one, a worker
# would wait for each next test until the controller has heard of the one before: 15 ms, as long as the test itself.
BY_HANDFULS = "test_invariants.py"
HANDFUL = 16


@pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")  # before xdist's, after the folders' own
def pytest_a_file_to_a_worker(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What a module fixture made, fitted or compiled for a file is made once, not once by each worker that runs of it.

    Groups with a name of their own take minutes, and come first (the Makefile lets xdist keep this order).
    """
    if not getattr(config.option, "loadgroup", False):
        return

    def turn(item: pytest.Item) -> int:
        return 0 if item.get_closest_marker("xdist_group") else 2 if item.path.name == BY_HANDFULS else 1

    items.sort(key=turn)
    handfuls = (f"{n // HANDFUL}" for n in itertools.count())
    for item in items:
        if turn(item):
            item.add_marker(pytest.mark.xdist_group(item.path.name if turn(item) == 1 else next(handfuls)))


@pytest.hookimpl(trylast=True)  # after xdist's
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # xdist 3.8 writes a test's group where pytest 9.2 no longer looks: groups would not be kept together.
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
    """A file that imports a package of an extra which is not installed is skipped."""
    report = yield
    cause = report.call.excinfo.value.__cause__ if report.failed else None
    if isinstance(cause, ModuleNotFoundError) and (name := (cause.name or "").partition(".")[0]) in EXTRAS:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 1, f"Skipped: {name} is not installed")
    return report


def pytest_collection_finish() -> None:
    """Modules and tests stay: a collection of garbage need not go through them each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_runtest_call() -> None:
    """torch measures the guards of each graph with an empty cache, for its log: 0.2 s to empty it."""
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest):
    """Each implementation in turn, forced: the Triton kernels are interpreted where there is no CUDA device."""
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
    """A test that leaves a backend forced would make the later ones compare the library with itself."""
    forced = backend_module._forced
    torch.manual_seed(0)
    yield
    assert backend_module._forced == forced, "the test left a backend forced"


@pytest.fixture(autouse=True)
def _products_of_fp32_are_exact():
    """A trainer that compiles lets them be TF32 from then on, also those that later tests compare with."""
    yield
    places = [place for place in (torch.backends, torch.backends.cuda.matmul) if hasattr(place, "fp32_precision")]
    if any(place.fp32_precision == "tf32" for place in places) or not places:
        torch.set_float32_matmul_precision("highest")
        for place in places:
            place.fp32_precision = "none"


@pytest.fixture(autouse=True)
def _large_batches(monkeypatch):
    """recompute="auto" takes a test's tiny batch for a large one, and recomputes; `batches_as_they_are` undoes this."""
    monkeypatch.setattr(auto, "LEAST_WORK", 0)


@pytest.fixture
def batches_as_they_are(_large_batches, monkeypatch):
    """recompute="auto" decides as users see it."""
    monkeypatch.setattr(auto, "LEAST_WORK", LEAST_WORK)


@pytest.fixture
def process_group(tmp_path):
    """torch.distributed, with a group of this process alone."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs gloo")
    if dist.is_initialized():  # accelerate leaves its own behind where the tests run under a launcher
        dist.destroy_process_group()
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backends, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="session")
def environment():
    """A user's: without the interpreter, and no part of a distributed run that the tests are started in.

    Where a process group is made nevertheless, it meets at a port of its own: others may run at the same time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plain = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", *LAUNCHER)}
    return plain | {"MASTER_PORT": str(port)}
