"""Examples run as a user runs them: each is a process of its own, and must end with 0.

Without a GPU the processes are forked from one that has imported already what is large (tests/cli/forked.py): imports
are most of an example's time. All tests that run examples share a worker, so that there is one such process.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples"
TRAINERS = [f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "kto", "grpo")]


@pytest.hookimpl(tryfirst=True)  # before xdist's, which reads the groups
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent and "example" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("examples"))


@pytest.fixture(scope="session")
def example(tmp_path_factory, environment):
    """What a script printed: example(path), in a directory of its own or in cwd, by as many processes of torchrun's."""
    # One thread, for the same numbers everywhere.
    path = f"{EXAMPLES}:{TESTS.parent / 'src'}"
    environment = environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    forks = None
    if not torch.cuda.is_available():  # a process that has asked for a GPU cannot be forked
        spec = importlib.util.spec_from_file_location("forks", TESTS / "cli" / "command.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        forks = module.Forks(tmp_path_factory.mktemp("said"), *TRAINERS)

    def run(path, cwd=None, processes=None):
        cwd = cwd or tmp_path_factory.mktemp("example")
        if forks is None:
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            command = [sys.executable, *(torchrun if processes else ()), str(path)]
            done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
        elif processes:
            done = forks.run([[str(path)]] * processes, environment, cwds=[cwd] * processes, restarts=0)
        else:
            done = forks.run([[str(path)]], environment, cwds=[cwd])
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    yield run
    if forks is not None:
        forks.end()
