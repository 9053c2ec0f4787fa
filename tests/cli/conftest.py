"""The command line as a user runs it: a process of its own, its exit status, and what it says."""

import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import Forks, Result, environment, run_here, write_model


@pytest.hookimpl(tryfirst=True)  # before xdist's, which reads the groups
def pytest_collection_modifyitems(items):
    """One worker runs all commands in processes, so that what they import is imported once."""
    for item in items:
        names = set(getattr(item, "fixturenames", ())) if item.path.parent == Path(__file__).parent else set()
        if {"tigon", "together", "start"} & names:
            item.add_marker(pytest.mark.xdist_group("commands"))
        elif "here" in names:  # the tests of a file share its runs
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    """The cache of the Hugging Face hub, of what tests put there; it is read when the commands are imported."""
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="session")
def forks(tmp_path_factory, hub):
    caches = {"HF_HUB_CACHE": str(hub), "HF_DATASETS_CACHE": str(hub / "datasets")}
    server = Forks(tmp_path_factory.mktemp("said"), **caches)
    yield server
    server.end()


@pytest.fixture(scope="session")
def tigon(request, hub):
    def run(*arguments, cwd=None, limit=None, **changes):
        arguments, env = [str(a) for a in arguments], environment(HF_HUB_CACHE=str(hub), **changes)
        # Importing torch and transformers is most of a short command. With a GPU each starts from nothing, as a user's;
        # and so do those by which backend they import tigon.
        if not torch.cuda.is_available() and "TIGON_BACKEND" not in changes:
            return Result(request.getfixturevalue("forks").run([arguments], env, cwds=[cwd], limit=limit))
        before = None
        if limit is not None:
            import resource

            def before():
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        command = [sys.executable, "-m", "tigon", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=240, preexec_fn=before)
        return Result(done)

    return run


@pytest.fixture(scope="session")
def here():
    """Run a command in this process, where what it leaves to the next command and its exit are not the point."""
    torch.set_num_threads(1)  # as the processes of the other fixtures have
    return run_here


@pytest.fixture(scope="session")
def together(forks):
    """One run of several processes on the CPU; what a rank has that differs from the others: others={1: (…)}, cwds."""

    def run(world, *arguments, others=None, cwds=None, **changes):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        # A barrier of accelerate names a GPU for each process, also on the CPU.
        address["CUDA_VISIBLE_DEVICES"] = ""
        ranks = [(*arguments, *(others or {}).get(rank, ())) for rank in range(world)]
        ranks = [[*map(str, given)] for given in ranks]
        return Result(forks.run(ranks, environment(**address, **changes), cwds=cwds))

    return run


@pytest.fixture
def start(request):
    """Start the command and return the process; it is ended with the test."""

    def run(*arguments):
        arguments = [*map(str, arguments)]
        if torch.cuda.is_available():
            process = subprocess.Popen(
                [sys.executable, "-m", "tigon", *arguments],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # see forked.py
            )  # fmt: skip
        else:
            process = request.getfixturevalue("forks").begin([arguments], environment())
        request.addfinalizer(lambda: (process.kill(), process.communicate()))
        return process

    return run


def write_text(file, words=9000):
    """A text with structure to learn, the same at every call."""
    dice = random.Random(0)
    known = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(2, 8))) for _ in range(300)]
    lines = [" ".join(dice.choices(known, k=9)) + "." for _ in range(words // 9)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data") / "text.txt")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, text):
    return write_model(tmp_path_factory.mktemp("model"), text)
