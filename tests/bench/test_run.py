"""benchmarks/run.py: what it records, that it goes on where it stopped, and what a result file holds."""

import re

import pytest
import run
from cases import OPS, Implementation
from harness import report
from harness.runner import Case


def measure(folder, *arguments):
    return run.main([*arguments, "--device", "cpu", "--quick", "--output", str(folder), "--name", "r.json"])


def test_a_result_file_has_hardware_versions_date_and_command(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert measure(tmp_path, "swiglu:32x64", "--peers", "eager", "--plot") == 0
    content = report.load(tmp_path / "r.json")
    assert content["environment"]["device"]
    assert content["environment"]["packages"]["torch"]
    assert content["date"].startswith("20")
    assert content["command"]
    assert content["ceilings"]["copy_gbps"] > 0
    rows = content["rows"]
    assert [(row["implementation"], row["status"], row["shape"]) for row in rows] == [
        ("tigon", "ok", [32, 64]),
        ("eager", "ok", [32, 64]),
    ]
    assert {(row["date"], row["command"]) for row in rows} == {(content["date"], content["command"])}
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "the PyTorch reference: no kernels on this device" in shown
    assert run.main(["--show", str(tmp_path / "r.json")]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == shown.splitlines()[1:]


def test_a_wrong_result_of_ours_ends_with_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(OPS["swiglu"].implementations, "tigon", Implementation(lambda: lambda gate, up: gate + up))
    assert measure(tmp_path, "swiglu:8x8", "--peers", "eager") == 1
    assert "WRONG" in capsys.readouterr().out


def test_host_times_are_recorded(tmp_path, capsys):
    assert measure(tmp_path, "swiglu", "--host", "--peers", "eager") == 0
    rows = report.load(tmp_path / "r.json")["rows"]
    assert [row["op"] for row in rows] == [*["floor"] * 3, "swiglu", "swiglu"]
    assert "fwd+bwd µs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["softmux"], "OP must be among .*softmux"),
        (["rope:8x8"], "rope: shape must be"),
        (["--peers", "eager,triton"], "--peers must be among .*triton"),
        (["--dtype", "int4"], "--dtype"),
        (["--record", "memory", "--part", "4/3"], "I/N"),
    ],
)
def test_wrong_arguments_get_a_sentence(arguments, match, capsys):
    with pytest.raises(SystemExit) as caught:
        run.parse(arguments)
    assert caught.value.code == 2
    assert re.search(match, capsys.readouterr().err, re.DOTALL)


def test_every_operator_is_recorded_in_three_dtypes():
    cases = [case for kind in ("memory", "matmul") for case in run.list_record(kind)]
    assert len(cases) == len({str(case) for case in cases})
    for name, op in OPS.items():
        dtypes = {case.dtype for case in cases if case.op.name == name}
        assert len(dtypes) == (3 if op.flops is None or op.extra else 1)
    norms = [case.shape for case in cases if case.op.name == "layer_norm"]
    assert {n for _, n in norms} >= {2304, 3584, 4096, 5120, 12288, 16384}
    assert {m for m, _ in norms} >= {1, 17, 4096, 10**6}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_cover_the_record_once_and_evenly(count):
    cases = run.list_record("memory")
    parts = [run.select_part(cases, f"{i + 1}/{count}") for i in range(count)]
    assert sorted(str(case) for part in parts for case in part) == sorted(map(str, cases))
    assert max(map(len, parts)) < 2 * min(map(len, parts))


def test_what_is_done_is_kept_and_the_budget_ends_a_run(tmp_path, monkeypatch, capsys):
    cases = [Case(OPS["swiglu"], shape, run.DTYPES["bf16"]) for shape in ((4, 8), (2, 8), (1, 8))]
    record = ["--record", "memory", "--peers", "eager"]
    monkeypatch.setattr(run, "list_record", lambda kind: cases[:2])
    assert measure(tmp_path, *record) == 0
    first = report.load(tmp_path / "r.json")
    monkeypatch.setattr(run, "list_record", lambda kind: cases)
    resume = ["--resume", str(tmp_path / "r.json")]
    assert measure(tmp_path / "next", *record, *resume) == 0
    second = report.load(tmp_path / "next" / "r.json")
    assert [tuple(row["shape"]) for row in second["rows"]] == [(4, 8)] * 2 + [(2, 8)] * 2 + [(1, 8)] * 2
    assert second["rows"][:4] == first["rows"]
    assert len(second["runs"]) == 2
    # On shapes that no quoted table has, Tigon alone is compared with fp64.
    assert [bool(row["errors"]) for row in second["rows"]] == [True, False] * 3
    capsys.readouterr()
    assert measure(tmp_path, *record, *resume, "--budget", "0") == 0
    assert "left out, the budget of 0 s was spent: swiglu 1×8 bfloat16" in capsys.readouterr().out
