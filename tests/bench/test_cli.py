"""`tigon bench` and `tigon doctor` as a user runs them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from tigon.bench import report
from tigon.cli.bench import bench
from tigon.cli.problem import Problem

IMPORTED = "torch", "triton", "triton.language", "typer", "typer._adapters", "rich.table", "matplotlib.pyplot"


@pytest.fixture(scope="module")
def tigon(tmp_path_factory):
    """The command in a process of its own, which imports tigon by the variables that it is given."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("TIGON_", "TRITON_"))}
    own |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if torch.cuda.is_available():  # a process that has asked for a GPU cannot be forked

        def run(*arguments, **variables):
            command = [sys.executable, "-m", "tigon", *arguments]
            return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**own, **variables})

        yield run
        return
    spec = importlib.util.spec_from_file_location("forks", Path(__file__).parents[1] / "cli" / "command.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Importing torch is most of a short command: what they run is forked from a process that has it.
    forks = module.Forks(tmp_path_factory.mktemp("said"), "only", *IMPORTED)
    yield lambda *arguments, **variables: forks.run([[*arguments]], {**own, **variables})
    forks.end()


def test_bench_writes_table_json_and_png(tigon, tmp_path):
    done = tigon("bench", "swiglu", "--quick", "--peers", "eager", "--shape", "32x64", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("swiglu")]
    assert [line[3] for line in lines] == ["tigon", "eager"]
    (results,) = tmp_path.glob("*-ops.json")
    content = report.load(results)
    assert [row["status"] for row in content["rows"]] == ["ok", "ok"]
    assert content["rows"][0]["shape"] == [32, 64]
    assert results.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_cpu_is_told_what_its_rows_are_and_who_is_left_out(capsys):
    bench(ops=["swiglu"], quick=True, shape=["8x8"], device="cpu")
    out = capsys.readouterr().out
    assert "Tigon's rows are its PyTorch reference: the kernels do not run on this device." in out
    assert "Left out: liger (runs on a GPU only)." in out
    assert "--peers compile" in out
    rows = [line for line in out.splitlines() if line.startswith("swiglu")]
    assert ["the PyTorch reference" in row for row in rows] == [True, False]


def test_bench_host_writes_table_and_json(tmp_path, capsys):
    bench(ops=["swiglu"], host=True, quick=True, peers="eager", device="cpu", json=tmp_path / "r.json")
    assert [row["op"] for row in report.load(tmp_path / "r.json")["rows"]] == [*["floor"] * 3, "swiglu", "swiglu"]
    assert "fwd+bwd µs" in capsys.readouterr().out


def test_an_unknown_operator_gets_one_sentence_and_exit_2(tigon):
    done = tigon("bench", "softmux")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "'softmux'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"ops": ["rope"], "shape": ["8x8"]}, "rope: shape must be"),
        ({"shape": ["8x8"]}, "exactly one OP"),
        ({"peers": "eager,triton"}, "'triton'"),
        ({"dtype": "int4"}, "--dtype must be"),
        ({"device": "tpu"}, "--device must be"),
        ({"model": "llama-9"}, "llama-9"),
        ({"model": "llama-tiny", "ops": ["rope"]}, "takes no operators"),
        ({"model": "llama-tiny", "peers": "eager"}, "'eager'"),
        ({"host": True, "shape": ["8x8"]}, "--host takes no"),
    ],
)
def test_wrong_arguments_get_a_sentence(arguments, match):
    with pytest.raises(Problem, match=match) as caught:
        bench(**{"device": "cpu", **arguments})
    assert caught.value.code == 2


def test_an_output_that_cannot_be_written_is_said_before_measuring(tmp_path):
    with pytest.raises(Problem, match="is a directory"):
        bench(json=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(Problem, match="there is a file of that name"):
        bench(plot=tmp_path / "file" / "r.png")


def test_a_wrong_result_of_ours_ends_with_exit_1(monkeypatch, capsys):
    import typer

    from tigon.bench.cases import OPS, Implementation

    monkeypatch.setitem(OPS["swiglu"].implementations, "tigon", Implementation(lambda: lambda gate, up: gate + up))
    with pytest.raises(typer.Exit) as caught:
        bench(ops=["swiglu"], quick=True, peers="eager", shape=["8x8"], device="cpu")
    assert caught.value.exit_code == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "the kernels run on CUDA and ROCm devices, not on 'cpu'"),
        ({"TIGON_BACKEND": "torch"}, "TIGON_BACKEND=torch"),
        ({"TIGON_BACKEND": "triton"}, "the triton backend was forced"),
        ({"TIGON_BACKEND": "nonsense"}, "TIGON_BACKEND must be"),
        ({"CC": "no-such-compiler"}, "no no-such-compiler on PATH"),
    ],
)
def test_doctor_runs_whatever_is_set(tigon, variables, expected):
    done = tigon("doctor", **variables)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    assert "torch" in done.stdout


def test_doctor_checks_every_operator_and_prints_json(tigon):
    import inspect

    import tigon as library
    from tigon.bench.cases import OPS
    from tigon.lazy import homes_of

    done = tigon("doctor", "--json", "--check")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    homes = homes_of("tigon").items()
    public = {name for name, home in homes if home.startswith(("tigon.ops.", "tigon.losses."))}
    public = {name for name in public if inspect.isfunction(getattr(library, name))}
    public -= {"dequantize_4bit", "filtered_topk", "encode_items"}  # codes and attributes, which no case draws
    public -= {"quantize_rows"}  # codes as well
    assert {row["op"] for row in found["paths"]} == {*public, "gated_linear", "dpo", "orpo", "grpo", "distill"}
    assert {row["path"] for row in found["paths"]} == {"torch"}
    assert {row["op"]: row["status"] for row in found["checks"]} == dict.fromkeys(OPS, "ok")
    assert found["versions"]["torch"]


def test_doctor_says_what_is_missing(monkeypatch):
    import importlib.metadata

    from tigon.cli import doctor

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    monkeypatch.setattr(doctor, "_devices", lambda: 1 / 0)
    found = doctor.examine()
    assert found["versions"]["transformers"] is None
    assert "ZeroDivisionError" in found["devices"]["error"]
