"""benchmarks/compress.py: what it records of a model of a few weights, and that it goes on where a file ends."""

import pytest

from tigon.bench import report


@pytest.fixture(scope="module")
def study(script):
    pytest.importorskip("transformers")
    return script("compress")


def test_ways_are_recorded_and_not_measured_again(study, tmp_path, monkeypatch, capsys):
    (tmp_path / "data").mkdir()
    for name in ("a.md", "b.txt"):
        (tmp_path / "data" / name).write_text(f"The text of {name} says what it says. " * 40)
    monkeypatch.setattr(study, "LENGTH", 64)
    monkeypatch.setattr(study, "SHORT", 16)
    ways = ["whole", "bits 3", "bits 4", "bits 4/3 0.25", "prune"]
    arguments = ["--data", str(tmp_path / "data"), "--model", "relu", "--output", str(tmp_path), "--name", "c.json",
                 "--tokens", "512", "--held", "256", "--steps", "3", "--only"]  # fmt: skip
    assert study.main([*arguments, *ways[:2]]) == 0
    first = report.load(tmp_path / "c.json")["rows"]
    assert study.main([*arguments, *ways]) == 0
    content = report.load(tmp_path / "c.json")
    assert content["kind"] == "compress"
    assert content["rows"][:2] == first
    rows = {row["method"]: row for row in content["rows"]}
    assert list(rows) == ways
    assert {row["status"] for row in rows.values()} == {"ok"}, rows
    assert rows["whole"]["distance"] == 0 < rows["bits 4"]["distance"] < rows["bits 3"]["distance"]
    assert rows["bits 3"]["bits"] < rows["bits 4/3 0.25"]["bits"] < rows["bits 4"]["bits"] < 5
    assert rows["prune"]["share"] <= 0.6
    assert "bits 4/3 0.25 takes back" in capsys.readouterr().out


def test_data_that_do_not_do_get_a_sentence(study, tmp_path):
    with pytest.raises(SystemExit, match=r"--data must hold at least two .md or .txt files, got 0"):
        study.main(["--data", str(tmp_path), "--model", "relu", "--output", str(tmp_path)])
