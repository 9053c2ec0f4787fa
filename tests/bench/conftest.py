"""The scripts of benchmarks/, which are no package, as modules."""

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def script():
    """A script by its name. It is known to sys.modules meanwhile, where dataclasses look for theirs."""
    loaded = []

    def load(name):
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "benchmarks" / f"{name}.py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        loaded.append(name)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in loaded:
        del sys.modules[name]
