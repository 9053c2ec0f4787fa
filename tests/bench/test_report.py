"""Result files: what is written is read back, and the tables and charts say what the rows say."""

import io
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tigon.bench import report
from tigon.bench.columns import number
from tigon.bench.host import HostRow
from tigon.bench.matrix import leader, to_matrix
from tigon.bench.runner import Row
from tigon.bench.training import Side

ROWS = [
    Row(
        "rms_norm", (32768, 4096), "bfloat16", "tigon-compact", forward_ms=0.12, backward_ms=0.23, total_ms=0.3456,
        total_range_ms=(0.3412, 0.3499), floor_ms=0.314, times_floor=1.1006, rate=3883.0, rate_unit="GB/s",
        peak_mib=12024.4, errors={"y": 2.0e-3, "dx": 3.1e-3},
    ),
    Row("rms_norm", (32768, 4096), "bfloat16", "other", status="wrong", reason="relative error above 0.01 in dx"),
    Row("rms_norm", (32768, 4096), "bfloat16", "absent", status="failed", reason="absent is not installed"),
]  # fmt: skip
HOST = [HostRow("rms_norm", (8, 64), "bfloat16", "tigon", forward_us=12.3, total_us=45.67, times_eager=0.5)]
SIDES = [
    Side(
        "llama-3-8b", "tigon", 16, 512, False, "bfloat16", tokens_per_s=13000.4, step_ms=630.1, peak_gib=69.04,
        losses=[12.125, 12.0625],
    ),
    Side("llama-3-8b", "hf", 16, 512, False, "bfloat16", status="failed", reason="out of memory"),
]  # fmt: skip


def operators():
    return report.result(
        "ops", ROWS, ceilings={"copy_gbps": 4270.0, "matmul_tflops": 690.0, "matmul": "8192³ bfloat16"}
    )


def damaged(**changes):
    return json.dumps({**operators(), **changes})


def test_a_kind_that_is_not_known_is_shown_as_it_is(tmp_path):
    rows = [{"model": "m", "steps": 3, "curve": [1, 2]}, {"model": "n", "steps": None, "curve": []}]
    report.save(tmp_path / "r.json", {**operators(), "kind": "study", "rows": rows})
    lines = report.to_text(report.load(tmp_path / "r.json")).splitlines()[1:]
    assert [line.split() for line in lines] == [["model", "steps"], ["m", "3"], ["n", "–"]]


def test_what_is_saved_is_loaded(tmp_path):
    content = operators()
    report.save(tmp_path / "deep" / "r.json", content)
    loaded = report.load(tmp_path / "deep" / "r.json")
    assert loaded == json.loads(json.dumps(content))
    assert loaded["rows"][0]["times_floor"] == 1.1006
    assert loaded["schema"] == report.SCHEMA
    assert loaded["environment"]["packages"]["torch"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["r.json"]  # nothing half-written stays


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "not a result file"),
        ('{"kind": "x"}', "not a result file of"),
        ('{"kind": "ops", "schema": 0}', "schema 0"),
        ('{"kind": "ops", "schema": 1}', "its head lacks 'environment'"),
        ('{"kind": "ops", "schema": 1, "environment": [], "date": "d"}', "its head has a field of another type"),
        (damaged(command=3), "its head has a field of another type"),
        (damaged(rows=[{"op": "rms_norm"}]), "row 1 lacks 'shape'"),
        (damaged(rows=[ROWS[0].to_dict(), {**ROWS[0].to_dict(), "total_ms": "fast"}]), "row 2 has a field of another"),
        (damaged(rows=3), "its head has a field of another type"),
    ],
)
def test_other_files_get_a_sentence(tmp_path, text, match, capsys):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        report.load(path)
    assert report.main([str(path)]) == 2
    assert match in capsys.readouterr().err


@pytest.mark.parametrize("write", [report.to_text, report.to_markdown])
def test_tables_say_what_the_rows_say(write):
    table = write(operators())
    for cell in ("32768×4096", "0.346 ±1.3%", "1.10×", "3,883", "12,024", "3.1e-3", "4,270 GB/s"):
        assert cell in table
    assert "WRONG: relative error above 0.01 in dx" in table
    assert "FAILED: absent is not installed" in table


@pytest.mark.parametrize("write", [report.to_text, report.to_markdown])
def test_model_tables_say_what_the_rows_say(write):
    table = write(report.result("model", SIDES))
    for cell in ("16×512", "13,000", "630", "69.0", "12.12500", "12.06250", "FAILED: out of memory"):
        assert cell in table


@pytest.mark.parametrize("kind", ["ops", "model"])
def test_a_terminal_of_80_columns_loses_no_digit(kind):
    console = pytest.importorskip("rich.console").Console(width=80, record=True, file=io.StringIO())
    content = operators() if kind == "ops" else report.result("model", SIDES)
    console.print(report.to_rich(content))
    shown = " ".join(console.export_text().split())
    header, rows = report.cells(content)
    assert all(cell in shown for row in rows for cell in row)
    assert all(name in shown for name in header if name not in ("op", "shape", "dtype", "model", "batch×seq", "remark"))


def test_columns_that_say_nothing_are_left_out():
    header, _ = report.cells(report.result("ops", ROWS[2:]))
    assert header == ["op", "shape", "dtype", "by", "remark"]


def test_no_path_of_this_machine_is_recorded(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/me/bin/tigon", "bench", "--json", "/home/me/out/r.json"])
    assert operators()["command"] == "tigon bench --json r.json"


def test_files_are_named_after_the_device():
    content = operators()
    content["environment"]["device"] = "NVIDIA H200"
    assert report.file_name(content) == "h200-ops.json"
    content = {**report.result("model", SIDES), "environment": {"device": "NVIDIA H200"}}
    assert report.file_name(content) == "h200-llama-3-8b-16x512.json"


def test_merged_runs_keep_the_last_of_each_case():
    def run(*rows, copy_gbps):
        return report.result("ops", rows, ceilings={"copy_gbps": copy_gbps, "matmul_tflops": 690.0, "matmul": ""})

    wide, narrow = (Row("rope", shape, "bfloat16", "tigon", total_ms=1.0) for shape in ((1, 8), (1, 2)))
    again = Row("rope", (1, 8), "bfloat16", "eager", total_ms=2.0)
    merged = report.merge([run(wide, narrow, copy_gbps=4000.0), run(again, copy_gbps=4100.0)])
    assert [(row["shape"], row["implementation"]) for row in merged["rows"]] == [((1, 8), "eager"), ((1, 2), "tigon")]
    assert [one["ceilings"]["copy_gbps"] for one in merged["runs"]] == [4000.0, 4100.0]
    assert len(report.merge([merged, run(narrow, copy_gbps=4200.0)])["runs"]) == 3


def test_runs_on_different_devices_are_not_merged():
    one, other = operators(), operators()
    other["environment"]["device"] = "another"
    with pytest.raises(ValueError, match="differ in device"):
        report.merge([one, other])


def test_a_matrix_has_a_line_per_case_and_marks_the_fastest():
    rows = [
        Row("rope", (1, 8), "bfloat16", "eager", total_ms=2.0, floor_ms=0.5, times_floor=4.0),
        Row("rope", (1, 8), "bfloat16", "tigon", total_ms=0.6, floor_ms=0.5, times_floor=1.2),
        Row("rope", (1, 8), "bfloat16", "liger", status="wrong", total_ms=0.4, floor_ms=0.5, times_floor=0.8),
        Row("rope", (1, 9), "bfloat16", "tigon", status="failed"),
    ]
    header, _, first, second = to_matrix(report.result("ops", rows), ["tigon"]).splitlines()
    assert header == "| op | shape | dtype | floor ms | tigon | eager | liger |"
    assert first == "| rope | 1×8 | bfloat16 | 0.500 | **0.600 (1.20×)** | 2.00 (4.00×) | 0.400 (0.80×), wrong |"
    assert second == "| rope | 1×9 | bfloat16 | – | failed | – | – |"


def test_a_matrix_of_models_compares_them_with_the_plain_one():
    plain = replace(SIDES[1], status="ok", reason="", tokens_per_s=10000.0, step_ms=819.0, peak_gib=100.0)
    floor = replace(SIDES[0], side="floor", tokens_per_s=14000.0, peak_gib=None)
    other = [replace(row, model="other") for row in (replace(plain, tokens_per_s=20000.0), SIDES[1], SIDES[0])]
    other[1] = replace(other[1], side="liger")
    lines = to_matrix(report.result("model", [floor, SIDES[0], plain, *other]), ["hf", "floor"]).splitlines()
    assert lines[0] == "| model | batch×seq | hf | floor | tigon | liger |"
    assert lines[2] == (
        "| llama-3-8b | 16×512 | 10,000, 100.0 GiB | 14,000 | **13,000 (+30.0 %)**, **69.0 GiB (−31.0 %)** | – |"
    )
    assert lines[3] == (
        "| other | 16×512 | **20,000**, 100.0 GiB | – | 13,000 (−35.0 %), **69.0 GiB (−31.0 %)** | out of memory |"
    )
    assert lines[4] == "| mean of 2 |  |  |  | −2.5 %, memory −31.0 % |  |"


def test_means_are_over_equal_sets_of_models():
    plain = [replace(SIDES[0], side="hf", model=f"m{n}", tokens_per_s=100.0, peak_gib=10.0) for n in range(4)]
    fused = [replace(row, side="tigon", tokens_per_s=110.0 + 10 * n, peak_gib=5.0) for n, row in enumerate(plain)]
    peer = [replace(row, side="liger", tokens_per_s=150.0, peak_gib=8.0) for row in plain[:2]]
    _, _, *lines = to_matrix(report.result("model", [*plain, *fused, *peer])).splitlines()
    assert lines[4:] == [
        "| mean of 4 |  |  | +25.0 % (+10.0 to +40.0 %), memory −50.0 % |  |",
        "| mean of 2 | m0 16×512 and m1 16×512 |  | +15.0 %, memory −50.0 % | +50.0 %, memory −20.0 % |",
    ]


def test_the_share_of_masked_labels_has_a_column_where_it_differs():
    rows = [replace(SIDES[0], side=side, masked=masked) for masked in (0.125, 0.0) for side in ("hf", "tigon")]
    header, _, *lines = to_matrix(report.result("model", rows)).splitlines()
    assert header == "| model | batch×seq | masked | hf | tigon |"
    assert [line.split(" | ")[1:3] for line in lines[:2]] == [["16×512", "12.5 %"], ["16×512", "0 %"]]
    assert lines[2].startswith("| mean of 2 |")
    assert all(line.count("|") == 6 for line in (header, *lines))


def test_who_is_ahead_within_noise_does_not_lead():
    assert leader({"a": 1.0, "b": 1.03}) == "a"
    assert leader({"a": 1.0, "b": 1.01}) is None
    assert leader({"a": 1.0, "b": 1.03}, {"a": 0.02, "b": 0.02}) is None, "their rounds overlap"
    assert leader({"a": 1.0}) is leader({"a": 1.0, "b": None}) is None, "nobody to be ahead of"


def test_a_matrix_of_lengths_has_speed_and_memory_and_ends_with_the_longest():
    rows = [replace(SIDES[1], seq=2048), *(replace(SIDES[0], seq=seq) for seq in (1024, 2048))]
    _, _, *lines = to_matrix(report.result("sequence", rows)).splitlines()
    assert lines == [
        "| 1,024 | – | 13,000, 69.0 GiB |",
        "| 2,048 | out of memory | 13,000, 69.0 GiB |",
        "| longest | 0 | 2,048 |",
    ]


def test_host_times_are_shown():
    table = report.to_text(report.result("host", HOST))
    assert table.splitlines()[-1].split()[3:] == ["12.3", "45.7", "0.50×"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (0.0123456, "0.0123"), (9.876, "9.88"), (157.84, "158"), (4270.3, "4,270")],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


ARCHITECTURES = [
    {
        "model": "llama", "side": side, "batch": 1, "seq": 8, "layers": 2, "status": "ok", "step_ms": ms,
        "tokens_per_s": 8000 / ms, "peak_gib": gib, "loss": 1.5, "loss_fp32": 1.25, "error": 0.01,
    }
    for side, ms, gib in (("hf", 4.0, 2.0), ("tigon", 2.0, 1.0))
]  # fmt: skip


def test_architectures_are_shown():
    content = {**report.result("architecture", []), "rows": ARCHITECTURES}
    line = report.to_text(content).splitlines()[-1].split()
    assert line == ["llama,", "2", "layers", "1×8", "tigon", "4,000", "2.00", "1.0", "+2.5e-01", "1.0e-02"]


def test_counters_are_shown():
    counters = {"us": 309.0, "read_mib": 512.0, "written_mib": 249.0, "registers": 128.0}
    row = {
        "op": "layer_norm", "shape": [8, 16], "dtype": "bfloat16", "implementation": "tigon", "kernel": "k" * 99,
        "needed_mib": 1280.0, "counters": counters, "status": "ok", "reason": "",
    }  # fmt: skip
    table = report.to_text({**report.result("counters", []), "rows": [row]}).splitlines()
    assert table[-1].split()[4:] == ["k" * 40, "1,280", "309", "512", "249", "128"]
    assert "occupancy" not in table[-2], "what was not measured has no column"


def lengths():
    return report.result("sequence", [replace(SIDES[0], seq=seq) for seq in (1024, 2048)])


CONTENTS = {
    "ops": operators,
    "host": lambda: report.result("host", HOST),
    "model": lambda: report.result("model", SIDES),
    "profile": lambda: report.result("model", [replace(SIDES[0], profile_ms={"matmul": 400.0, "idle": 4.0})]),
    "sequence": lengths,
    "architecture": lambda: {**report.result("architecture", []), "rows": ARCHITECTURES},
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_charts_are_drawn(tmp_path, kind):
    plots = pytest.importorskip("tigon.bench.plots")
    pytest.importorskip("matplotlib")
    plots.plot(CONTENTS[kind](), tmp_path / "r.png", kind)
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    drawn = plots.svg(CONTENTS[kind](), kind)
    assert drawn.startswith("<svg ")
    assert "currentColor" in drawn
    assert plots.INK not in drawn
    assert " height=" not in drawn.split(">", 1)[0], "it would not shrink with the page"


def test_models_are_compared_with_the_plain_one():
    rows = [SIDES[0], replace(SIDES[1], status="ok", reason="", tokens_per_s=10000.0, step_ms=819.0, peak_gib=100.0)]
    table = report.to_text(report.result("model", [replace(rows[0], side="floor"), *rows])).splitlines()
    assert "13,000 (+30.0%)" in table[3]
    assert "69.0 (-31.0%)" in table[3]
    assert "(" not in table[2], "a floor is no side"
    assert "(" not in table[4]
    other = replace(rows[1], seq=1024)
    assert "(" not in report.to_text(report.result("model", [rows[0], other])).split("\n", 2)[2], "of another case"


def test_memory_over_the_length_is_shown():
    line = report.to_text(lengths()).splitlines()[-1].split()
    assert line[:5] == ["llama-3-8b", "2,048", "tigon", "13,000", "69.0"]
    timed = replace(SIDES[0], seq=8, step_ms=10.0, steps_ms=[9.0, 11.0], sm_mhz=1710.0, watts=698.6)
    assert report.to_text(report.result("sequence", [timed])).split()[-5:] == [
        "10.0",
        "±10.0%",
        "1,710",
        "699",
        "12.12500",
    ]
    assert report.file_name({**lengths(), "environment": {"device": "NVIDIA H200"}}) == "h200-sequence.json"


def test_what_a_peer_failed_with_is_taken_from_another_run():
    def row(name, **more):
        return Row("rope", (1, 8), "bfloat16", name, **more)

    broken = report.result("ops", [row("tigon", total_ms=1.0), row("quack", status="failed", reason="no DSL")])
    again = report.result("ops", [row("tigon", total_ms=1.1), row("quack", total_ms=2.0)])
    taken = report.take(broken, {**again, "date": "later"}, "quack")
    assert [(r["implementation"], r["total_ms"], r.get("beside")) for r in taken["rows"]] == [
        ("tigon", 1.0, None),
        ("quack", 2.0, {"tigon": 1.1}),
    ]
    assert [run["date"] for run in taken["runs"]] == [broken["date"], "later"]
    again["environment"]["device"] = "another"
    with pytest.raises(ValueError, match="differ in device"):
        report.take(broken, again, "quack")


def test_rows_of_other_runs_say_so(monkeypatch):
    content = {**report.result("model", SIDES), "date": "2026-01-02T00:00:00", "command": "b"}
    for row in content["rows"]:
        row.update(date=report.NOT_RECORDED, command=report.NOT_RECORDED)
    assert report.provenance(content)[0].startswith("llama-3-8b 512 tigon, llama-3-8b 512 hf: measured in earlier runs")
    content["rows"][0].update(date="2026-01-02T00:00:00", command="b")
    content["rows"][1].update(date="2026-01-01T00:00:00", command="a")
    assert report.provenance(content) == ["llama-3-8b 512 hf: measured on 2026-01-01 by `a`."]
    assert "`b` llama-3-8b 512 hf: measured on" in report.source(content)
    assert report.provenance(operators()) == []


def test_a_module_is_recorded_by_its_name(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/thing/__main__.py", "--quick"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="thing.__main__"), raising=False)
    assert report.command() == "python -m thing --quick"
