"""Each extra installs what its commands import: they are run where no other package can be imported."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from command import write_model

tomllib = pytest.importorskip("tomllib")
requirements = pytest.importorskip("packaging.requirements")
pytest.importorskip("typer")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# Hides packages as if they were not installed, also from importlib.util.find_spec, and then runs the commands.
SCRIPT = """
import json, sys
from importlib.machinery import PathFinder
hidden, commands = json.loads(sys.argv[1])
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)
sys.meta_path[:] = [Finder if one is PathFinder else one for one in sys.meta_path]
from tigon.cli import main
for command in commands:
    try:
        main(command)
    except SystemExit as end:
        if end.code:
            sys.exit(f"{command}: {end.code}")
"""
FIT = ["rank", "fit", "--data", "shown.parquet", "--model", "lirank", "--width", "4", "--epochs", "1", "--draws", "0"]
CASES = {
    "retrieve": [
        ["retrieve", "build", "items.parquet", "-o", "i"], ["retrieve", "search", "i", "--like", "3", "-k", "2"],
        ["retrieve", "evaluate", "i", "items.parquet", "-k", "2"],
    ],
    "serve": [["retrieve", "serve", "--help"], ["retrieve", "build", "items.parquet", "-o", "served"]],
    "graph": [
        ["graph", "fit", "--data", "graph.npz", "--epochs", "2", "--hidden", "4", "--out", "2", "--device", "cpu"],
        ["graph", "probe", "graph-run", "--plot", "angles.png", "--dims", "2"],
    ],
    "rank": [[*FIT, "--device", "cpu"], ["rank", "eval", "rank-run", "--data", "shown.parquet", "--draws", "0"]],
    "search": [["rank", "search", "--help"]],
    "train": [["train", "--model_name_or_path", "llama-tiny", "--dataset_name", "text.txt", "--max_steps", "1",
               "--max_length", "16", "--use_cpu", "true"]],
    "export": [["export", "model", "-o", "copy"], ["export", "model", "--to", "gguf", "-o", "model.gguf"]],
    "compress": [["compress", "model", "--data", "text.txt", "--budget", "0.4", "-o", "small"]],
}  # fmt: skip


def closure(extra):
    """The names of all distributions that an extra installs, with those that they need."""
    found, waiting = set(), [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]
    seen = set()
    while waiting:
        text = waiting.pop()
        one = requirements.Requirement(text)
        name = one.name.lower().replace("_", "-")
        if text in seen:
            continue
        seen.add(text)
        if name == "tigon":
            waiting += [text for more in one.extras for text in PROJECT["optional-dependencies"][more]]
            continue
        found.add(name)
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for text in needed:
            marker = requirements.Requirement(text).marker
            if marker is None or any(marker.evaluate({"extra": more}) for more in (one.extras or {""})):
                waiting.append(text)
    return found


def hidden(extra):
    """Top-level modules of all other distributions."""
    wanted = closure(extra)
    return sorted(
        module
        for module, homes in metadata.packages_distributions().items()
        if module != "tigon" and not any(home.lower().replace("_", "-") in wanted for home in homes)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text):
    for package in ("transformers", "sklearn", "accelerate", "datasets"):
        pytest.importorskip(package)
    np, pa, parquet = (pytest.importorskip(name) for name in ("numpy", "pyarrow", "pyarrow.parquet"))
    folder, draw = tmp_path_factory.mktemp("extras"), np.random.default_rng(0)
    items = {"id": np.arange(9), "v": draw.normal(size=(9, 4)).tolist(), "n": draw.random(9)}
    shown = {"request_id": np.arange(40).repeat(4), "item_id": draw.integers(9, size=160), "click": np.arange(160) % 2}
    for name, columns in (("items", items), ("shown", shown)):
        parquet.write_table(pa.table(columns), folder / f"{name}.parquet")
    parts = {"train": np.arange(10), "val": np.arange(10, 20), "test": np.arange(20, 30)}
    edges = draw.integers(0, 30, (2, 90))
    np.savez(folder / "graph.npz", x=draw.random((30, 4)), edge_index=edges, y=np.arange(30) % 2, **parts)
    (folder / "text.txt").write_text(text.read_text()[:6000])
    write_model(folder / "model", text)
    return folder


def test_every_extra_is_tried():
    left = {"hf", "quantize", "embed", "deepspeed", "docs"}  # which have no command of their own
    assert {*CASES} == {*PROJECT["optional-dependencies"]} - left


@pytest.mark.parametrize("extra", CASES)
def test_an_extra_brings_what_its_commands_need(extra, folder):
    if extra == "export":
        pytest.importorskip("gguf")
    names = hidden(extra)
    assert "pytest" in names
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([names, CASES[extra]])], cwd=folder, env=environment,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
