"""`import tigon` is cheap, and works without Triton and the extras."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import torch

SRC = str(Path(__file__).parent.parent / "src")
OPTIONAL = (
    "transformers", "triton", "accelerate", "peft", "trl", "datasets", "tokenizers", "typer", "rich", "matplotlib",
    "liger_kernel", "cut_cross_entropy", "pyarrow", "safetensors", "tigon.retrieve", "tigon.rank", "tigon.data",
    "tigon.compress", "tigon.graph",
    "starlette", "uvicorn", "prometheus_client",
)  # fmt: skip

# A finder that hides Triton, as on macOS or with a CPU-only install.
HIDE_TRITON = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
sys.meta_path.insert(0, Hide())
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Run code in a process with torch at most, as a user does: without the other tests' interpreter mode."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "TIGON_"))} | {"PYTHONPATH": SRC}
    if torch.cuda.is_available():  # a process that has asked for a GPU cannot be forked

        def run(code, **env):
            command = [sys.executable, "-c", code]
            return subprocess.run(command, env=kept | env, capture_output=True, text=True, check=False)

        yield run
        return
    spec = importlib.util.spec_from_file_location("forks", Path(__file__).parent / "cli" / "command.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Importing torch takes most of the time: tests are forked from a process that has imported only torch.
    forks = module.Forks(tmp_path_factory.mktemp("said"), "only", "torch")
    script = tmp_path_factory.mktemp("code") / "script.py"

    def fork(code, **env):
        script.write_text(code)
        return forks.run([[str(script)]], kept | env)

    yield fork
    forks.end()


@pytest.fixture(scope="module")
def printed(python):
    def run(code, **env):
        done = python(code, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def test_import_costs_little_more_than_torch(printed):
    code = "import time, torch; start = time.perf_counter(); import tigon; print(time.perf_counter() - start)"
    assert median(float(printed(code)) for _ in range(5)) <= 0.1


def test_import_brings_nothing_optional(printed):
    loaded = f"[m for m in {OPTIONAL!r} if m in sys.modules]"
    assert printed(f"import torch, sys; before = {loaded}; import tigon; print(before, {loaded})") == "[] []"


def test_every_public_name_is_there(printed):
    printed(
        "import tigon\nfor name in tigon.__all__: getattr(tigon, name)\nassert set(tigon.__all__) <= set(dir(tigon))\n"
        # Optional packages, too: the documentation calls them tigon.rank and so on.
        "assert {'compress', 'graph', 'rank', 'retrieve'} <= set(tigon.__all__)"
    )


def test_integrations_are_found_by_name_where_their_host_is_installed(printed):
    pytest.importorskip("trl")
    code = "import sys, tigon; assert 'trl' not in sys.modules; print(tigon.integrations.trl.fuse.__name__)"
    assert printed(code) == "fuse"
    here = Path(SRC) / "tigon" / "integrations"
    hosts = {path.stem for path in here.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert hosts - {"__init__", "__pycache__"} == set(importlib.import_module("tigon.integrations").__all__)


def test_an_unknown_name_is_an_attribute_error(python):
    assert "module 'tigon' has no attribute 'rms_nrom'" in python("import tigon; tigon.rms_nrom").stderr


RUN_EVERYTHING = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from numerics import evaluate
from ops_table import OPS
from tigon.kernels import HAS_TRITON, why_not_triton
import tigon.nn, tigon.fusion.engine.model, tigon.losses.head.chunks, tigon.training
for op in OPS:
    inputs = op.draw(op.typical, torch.float32, torch.device("cpu"))
    evaluate(op.public, inputs, op.typical.options, grad=op.differentiable(inputs))
w = torch.nn.Parameter(torch.ones(3))
tigon.training.MicroBatchSAM(torch.optim.SGD([w], lr=1.0)).step(lambda: w.square().sum())
print(HAS_TRITON, why_not_triton(torch.ones(1)))
"""


def test_everything_runs_without_triton(printed):
    assert printed(HIDE_TRITON + RUN_EVERYTHING) == "False Triton is not installed"


def test_forcing_triton_where_it_is_not_installed_raises(python):
    done = python(HIDE_TRITON + RUN_EVERYTHING, TIGON_BACKEND="triton")
    assert "RuntimeError: tigon: the triton backend was forced, but Triton is not installed." in done.stderr


def test_the_environment_variable_forces_a_backend(printed, python):
    code = "import tigon.kernels as b, torch; print(b.use_triton(torch.ones(1)))"
    assert printed(code, TIGON_BACKEND="torch") == "False"
    assert "the kernels run on CUDA and ROCm devices, not on 'cpu'" in python(code, TIGON_BACKEND="triton").stderr


def test_a_wrong_environment_variable_gets_a_sentence(printed):
    names = ["cuda", "Triton", "none"]
    # A single process for all: each import fails before anything is registered, and importing torch takes seconds.
    said = printed(f"""
import os, sys, torch
for name in {names!r}:
    os.environ["TIGON_BACKEND"] = name
    try:
        import tigon
        tigon.rms_norm
    except ValueError as error:
        print(error)
    for module in [m for m in sys.modules if m.split(".")[0] == "tigon"]:
        del sys.modules[module]
""")
    assert said.splitlines() == [f"TIGON_BACKEND must be 'triton', 'torch' or 'auto', got {n!r}." for n in names]
