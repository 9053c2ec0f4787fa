"""One GPU's record in short: what its tables say, and that the figures in the text beside them are the record's."""

import re
from pathlib import Path

import cards
import pytest

from tigon.bench import report
from tigon.bench.cases import OPS
from tigon.bench.runner import Row
from tigon.bench.training import Side

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def rows(op, shape, floor=1.0, **times):
    """times: of each implementation a Row's milliseconds and peak, or its status."""
    for by, found in times.items():
        if isinstance(found, str):
            yield Row(op, shape, "bfloat16", by, status=found)
            continue
        ms, mib, *device = found
        known = {"device_ms": device[0]} if device else {}
        yield Row(
            op, shape, "bfloat16", by, total_ms=ms, total_range_ms=(ms, ms), floor_ms=floor, times_floor=ms / floor,
            peak_mib=mib, **known,
        )  # fmt: skip


@pytest.fixture
def shown(tmp_path):
    shape, (tall, *_) = OPS["rms_norm"].shapes[0], OPS["swiglu"].shapes
    memory = [
        *rows("rms_norm", shape, tigon=(3.0, 64, 1.5), liger=(2.0, 96, 1.75), eager=(9.0, 128, 9.0)),
        *rows("rms_norm", (1, 8), tigon=(99.0, 1), eager=(1.0, 1)),
        *rows("swiglu", tall, tigon=(4.0, 64, 4.0), liger="wrong", torch=(6.0, 32, 6.0), eager=(5.0, 96, 5.0)),
    ]
    head = rows("linear_cross_entropy", OPS["linear_cross_entropy"].shapes[1], tigon=(30.0, 50), liger=(60.0, 20))
    report.save(tmp_path / "h9-memory.json", report.result("ops", memory))
    report.save(tmp_path / "h9-matmul.json", report.result("ops", head))
    odd = [
        *rows("rms_norm", (3, 8), tigon=(3.0, 64), eager=(9.0, 128)),
        *rows("rms_norm", (5, 7), tigon=(6.0, 64), eager=(9.0, 128)),
    ]
    report.save(tmp_path / "h9-odd-shapes.json", report.result("ops", odd))
    steps = {"tokens_per_s": 1e4, "step_ms": 800.0, "peak_gib": 70.0}
    sides = [
        Side("llama-3-8b", "tigon", 16, 512, False, "bfloat16", **steps),
        Side("llama-3-8b", "liger", 16, 512, False, "bfloat16", status="failed", reason="out of memory"),
    ]
    report.save(tmp_path / "h9-models.json", report.result("model", sides))
    return cards.page(tmp_path, "h9")


def test_each_case_stands_beside_liger_and_the_best_of_the_others(shown):
    assert "| rms_norm | 32768×4096 | 1.00 | 3.00 (3.00×) | **2.00 (2.00×)** | eager 9.00 (9.00×) |" in shown
    assert "| swiglu | 16384×14336 | 1.00 | **4.00 (4.00×)** | wrong | eager 5.00 (5.00×) |" in shown
    assert "| linear_cross_entropy | 32768×4096×128256 | 1.00 | **30.0 (30.00×)** | 60.0 (60.00×) | – |" in shown
    assert "| 1×8 |" not in shown, "no table quotes that shape"
    assert "| rms_norm | 3×8 | 1.00 | **3.00 (3.00×)** | – | eager 9.00 (9.00×) |" in shown
    assert "| rms_norm | 5×7 |" in shown, "of shapes that nothing was tuned on, all"
    assert "| llama-3-8b | 16×512 | out of memory | 10,000, 70.0 GiB |" in shown


def test_where_tigon_is_not_first_is_listed_with_what_limits_it(shown):
    assert "Of 3 cases Tigon is first in 2, behind in 1." in shown
    assert "without the host's time, it is first in 3." in shown
    assert "| rms_norm | 32768×4096 | 3.00 | 2.00 | liger | +50.0 % | host | first, 1.50 to 1.75 |" in shown
    slow, _, small = shown.partition("Not least in memory")
    assert "| swiglu |" not in slow.partition("Not first in time")[2]
    assert re.findall(r"^\| (\w+) \|.*\| (\w+) \|$", small.split("Tokens/s")[0], re.MULTILINE)[1:] == [
        ("linear_cross_entropy", "liger"), ("swiglu", "torch"),
    ]  # fmt: skip


def test_what_nobody_measured_is_said(shown):
    (said,) = [line for line in shown.splitlines() if line.startswith("Not measured on this GPU so far: ")]
    assert "`dpo`" in said
    assert "`swiglu`" not in said
    assert "`rms_norm` of 16384×8192 and " in said
    assert "llama-3-8b-16x512 (floor, hf)" in said
    assert "llama-3.2-1b-16x2048," in said


def cases(name):
    found = {}
    for row in report.load(RESULTS / name)["rows"]:
        found.setdefault((row["op"], *row["shape"]), {})[row["implementation"]] = row
    return found


def test_the_page_of_the_h100_has_every_case_in_which_tigon_is_slower():
    shown = cards.page(RESULTS, "h100").partition("Not first in time")[2].partition("Not least")[0]
    behind = []
    for name in ("h100-memory.json", "h100-matmul.json"):
        for (op, *shape), by in cases(name).items():
            ours = by["tigon"]
            assert ours["status"] == "ok"
            right = [row for who, row in by.items() if row["status"] == "ok" and not who.startswith("tigon")]
            if not right:  # no other has room for it
                assert {row["status"] for row in by.values()} == {"ok", "failed"}
                continue
            best = min(right, key=lambda row: row["total_ms"])
            if ours["total_ms"] > best["total_ms"]:
                line = f"| {op} | {'×'.join(map(str, shape))} | {ours['total_ms']:.3g} | {best['total_ms']:.3g} | "
                assert line + f"{best['implementation']} | " in shown
            apart = sum(
                (row["total_range_ms"][1] - row["total_range_ms"][0]) / 2 / row["total_ms"] for row in (ours, best)
            )
            if ours["total_ms"] / best["total_ms"] - 1 > max(0.02, apart):
                behind.append(f"| {100 * (ours['total_ms'] / best['total_ms'] - 1):+.1f} % |")
    assert len(behind) == shown.count("+") > 0
    assert all(more in shown for more in behind)


def test_what_the_text_says_of_the_h100_is_in_the_files():
    text = " ".join((ROOT / "docs" / "bench.md").read_text().partition("### H100")[2].partition("### Other")[0].split())
    copy = {gpu: report.load(RESULTS / f"{gpu}-memory.json")["ceilings"]["copy_gbps"] for gpu in ("h100", "h200")}
    assert f"less memory, and {100 * copy['h100'] / copy['h200']:.0f} % of its bandwidth" in text
    heads = [by for case, by in cases("h100-matmul.json").items() if case[0] == "linear_cross_entropy"]
    small = [by["liger"]["peak_mib"] / by["tigon"]["peak_mib"] for by in heads]
    assert 0.32 < min(small) <= max(small) < 0.5
    assert "`linear_cross_entropy` of Liger needs a third to a half of the memory" in text
    full = [by["liger-fp32"] for by in heads]
    slow = [one["total_ms"] / by["tigon"]["total_ms"] for one, by in zip(full, heads, strict=True)]
    much = [one["peak_mib"] / by["tigon"]["peak_mib"] for one, by in zip(full, heads, strict=True)]
    assert (
        f"as much as Tigon or {min(much):.1f} times as much, and takes {min(slow):.1f} to {max(slow):.1f} times" in text
    )
    assert max(much) == pytest.approx(1.0, abs=0.01)
    sides = report.load(RESULTS / "h100-models.json")["rows"]
    plain = {row["model"]: row["reason"] for row in sides if row["side"] == "hf"}
    assert [model for model, reason in plain.items() if not reason] == ["olmo-2-7b"]
    assert set(plain.values()) == {"", "out of memory"}
    odd = cases("h100-odd-shapes.json")
    assert odd["cross_entropy", 20000, 49155]["tigon"]["times_floor"] < 1.03
    assert odd["softmax", 20000, 49155]["tigon"]["times_floor"] == pytest.approx(4 / 3, abs=0.03)
    assert {row["model"] for row in sides if row["side"] == "liger" and row["status"] != "ok"} == {"llama-3-8b"}
    norm = cases("h100-memory.json")["rms_norm", 8192, 4096]
    assert norm["torch"]["total_ms"] < norm["tigon"]["total_ms"]
    assert norm["torch"]["device_ms"] > norm["tigon"]["device_ms"]
