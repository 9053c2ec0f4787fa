"""Tests for extras are skipped if packages are missing: the suite is collected without an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from extras import EXTRAS

TESTS = Path(__file__).parent
# These import no package from an extra, and have most tests.
PLAIN = "test_invariants.py", "test_large.py", "test_kernels_compile.py", "ops", "losses", "nn"
WITHOUT = """
import sys
from importlib.machinery import PathFinder

missing, find = set(sys.argv[1].split()), PathFinder.find_spec


def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in missing else find(name, path, target)


PathFinder.find_spec = classmethod(find_spec)  # bound, since pytest keeps it in a class of its own
import pytest

options = ["--collect-only", "-p", "no:hypothesispytest", "-p", "no:cacheprovider", "-W", "ignore"]
sys.exit(pytest.main([*sys.argv[2:], *options]))
"""


# As on a machine that tests only kernels and fused models.
INSTALLED = {"numpy", "safetensors", "tokenizers", "transformers", "yaml"}


def test_the_suite_is_collected():
    options = [str(TESTS), f"--rootdir={TESTS.parent}", *(f"--ignore={TESTS / name}" for name in PLAIN)]
    paths = str(TESTS.parent / "src"), os.environ.get("PYTHONPATH")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, " ".join(EXTRAS - INSTALLED), *options],
        cwd=TESTS.parent, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if line.startswith(("ERROR", "E  "))]
    assert done.returncode == 0, "\n".join(errors) or done.stdout[-2000:] + done.stderr[-2000:]
