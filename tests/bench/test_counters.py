"""benchmarks/counters.py: what is read of ncu's output, with what stands for ncu."""

import pytest
from harness import report


@pytest.fixture(scope="module")
def counters(script):
    return script("counters")


CASE = "layer_norm 8x16 bf16 tigon"


def page(metrics, *values: str) -> str:
    names = ["ID", "Kernel Name", "Block Size", "Grid Size", *metrics.values()]
    line = ["0", "void ns::my_kernel<float>(int)", "(128, 1, 1)", "(8, 1, 1)", *values]
    quoted = [",".join(f'"{cell}"' for cell in cells) for cells in (names, [""] * len(names), line)]
    return "\n".join(["==PROF== Connected to process 1", *quoted, ""])


def stand_in(tmp_path, monkeypatch, text: str, code: int = 0) -> None:
    """An ncu on the PATH that writes text to its log."""
    (tmp_path / "page").write_text(text)
    ncu = tmp_path / "ncu"
    find_log = 'while [ "$1" != --log-file ]; do shift; done'
    ncu.write_text(f'#!/bin/sh\n{find_log}\ncp {tmp_path}/page "$2"\necho trouble >&2\nexit {code}\n')
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_a_kernel_becomes_a_row(counters, tmp_path, monkeypatch):
    values = ("2,500", "1048576", "2097152", "50", "25", "12.5", "64", "2048", "1.5", "0")
    stand_in(tmp_path, monkeypatch, page(counters.METRICS, *values))
    counters.main(["--output", str(tmp_path / "out"), "--only", CASE])
    content = report.load(next((tmp_path / "out").glob("*-counters.json")))
    (row,) = content["rows"]
    assert (row["op"], row["shape"], row["implementation"]) == ("layer_norm", [8, 16], "tigon")
    assert row["kernel"] == "ns::my_kernel"
    found = row["counters"]
    assert (found["us"], found["read_mib"], found["written_mib"], found["shared_kib"]) == (2.5, 1.0, 2.0, 2.0)
    assert row["needed_mib"] > 0


def test_no_kernel_is_a_failure_with_a_reason(counters, tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "==ERROR== nothing\n", code=1)
    counters.main(["--output", str(tmp_path / "out"), "--only", CASE])
    (row,) = report.load(next((tmp_path / "out").glob("*-counters.json")))["rows"]
    assert (row["status"], row["reason"]) == ("failed", "trouble")


def test_without_ncu_a_sentence(counters, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="ncu, of NVIDIA Nsight Compute, is not on the PATH"):
        counters.main(["--output", str(tmp_path)])
