"""The figures of the README are those of the recorded run."""

import importlib.util
from pathlib import Path
from statistics import mean
from xml.etree import ElementTree

import pytest

from tigon.bench import report
from tigon.bench.runner import Row

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def readme():
    spec = importlib.util.spec_from_file_location("readme", ROOT / "benchmarks" / "readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_table_is_there_and_is_what_the_result_files_say(readme):
    text = (ROOT / "README.md").read_text()
    for name in readme.TABLES:
        assert f"<!-- table: {name} -->" in text
    assert readme.filled(text) == text, "python benchmarks/readme.py --write renews the tables"
    changed = text.replace("46,752", "46,753", 1)
    assert changed != text
    assert readme.filled(changed) == text


def test_the_first_chart_is_what_the_result_file_says_in_both_themes(readme):
    text = (ROOT / "README.md").read_text()
    rows = report.load(ROOT / "benchmarks" / "results" / "h200-4gpus.json")["rows"]
    by = {(row["model"], row["side"]): row["tokens_per_s"] for row in rows}
    for path, svg in readme.pictures().items():
        assert path.relative_to(ROOT).as_posix() in text
        assert path.read_text() == svg, "python benchmarks/readme.py --write renews the chart"
        words = [element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]
        for model in {model for model, _ in by}:
            assert model in words
            assert f"{100 * (by[model, 'tigon'] / by[model, 'hf'] - 1):+.1f} %" in words
    light, dark = readme.pictures().values()
    assert light != dark


def losses(**totals):
    rows = [
        Row("orpo", (1, 8, 4, 16), "bfloat16", name, total_ms=ms, total_range_ms=(ms, ms), peak_mib=mib, **more)
        for name, (ms, mib, more) in totals.items()
    ]
    return report.result("ops", rows)


def shown(readme, monkeypatch, **totals):
    monkeypatch.setattr(readme.report, "load", lambda path: losses(**totals))
    columns = ("tigon", "liger", "quack", "trl")
    return readme.operators("x.json", {"ORPO": ("orpo", (1, 8, 4, 16))}, "loss", columns, 1).splitlines()


def test_speed_and_memory_are_bold_apart_and_not_within_noise(readme, monkeypatch):
    header, _, line, *_ = shown(readme, monkeypatch, tigon=(1.0, 2048, {}), liger=(1.1, 1024, {}), trl=(2.0, 4096, {}))
    assert header == "| loss, forward + backward | Tigon | Liger | TRL |"
    assert line == "| ORPO | **1.0 ms**, 2.0 GiB | 1.1 ms, **1.0 GiB** | 2.0 ms, 4.0 GiB |"
    _, _, line, *_ = shown(readme, monkeypatch, tigon=(1.0, 1000, {}), liger=(1.01, 1010, {}))
    assert "**" not in line


def test_a_peer_of_another_run_is_marked_with_what_tigon_took_there(readme, monkeypatch):
    monkeypatch.setattr(readme.report, "load", lambda path: content)
    content = losses(tigon=(2.0, 2048, {}), quack=(1.0, 1024, {}))
    content["rows"][1]["beside"] = {"tigon": 2.5}
    _, _, line, _, notes = readme.operators(
        "x.json", {"ORPO": ("orpo", (1, 8, 4, 16))}, "loss", ("tigon", "quack"), 1
    ).splitlines()
    assert line.endswith("GiB**¹ |")
    assert "¹ Measured in another run, in which Tigon took 2.5 ms." in notes


def test_wrong_results_are_marked_and_lead_nothing(readme, monkeypatch):
    wrong = {"status": "wrong", "reason": "relative error above 0.01 in dx"}
    _, _, line, _, notes = shown(
        readme, monkeypatch, tigon=(2.0, 2048, {}), liger=(1.0, 1024, wrong), trl=(3.0, 4096, {})
    )
    assert line == "| ORPO | **2.0 ms**, **2.0 GiB** | 1.0 ms, 1.0 GiB¹ | 3.0 ms, 4.0 GiB |"
    assert "¹ Wrong by our bound: relative error above 0.01 in dx." in notes


def test_its_pictures_and_links_are_there():
    text = (ROOT / "README.md").read_text()
    links = [part.split(")")[0].split("#")[0] for part in text.split("](")[1:]]
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert links
    assert not missing


def test_the_gain_that_opens_it_is_the_mean_over_the_models_of_the_result_file():
    rows = report.load(ROOT / "benchmarks" / "results" / "h200-4gpus.json")["rows"]
    by = {(row["model"], row["side"]): row for row in rows}
    models = sorted({model for model, _ in by})
    assert len(models) == 5
    text = " ".join((ROOT / "README.md").read_text().partition("```")[0].split())
    for side, shown in (("tigon", "**{} tokens/s and {} peak memory**"), ("liger", "Liger-Kernel: {}, {}")):
        gains = [mean(by[m, side][key] / by[m, "hf"][key] - 1 for m in models) for key in ("tokens_per_s", "peak_gib")]
        assert shown.format(*map(percent, gains)) in text


def test_what_it_says_of_compile_is_of_the_models_measured_with_both():
    rows = report.load(ROOT / "benchmarks" / "results" / "h200-models.json")["rows"]
    speed = {(row["model"], row["batch"], row["seq"], row["side"]): row.get("tokens_per_s") for row in rows}
    both = [case[:3] for case, value in speed.items() if case[3] == "compile" and value]
    compiled, tigon = (
        mean(speed[(*case, side)] / speed[(*case, "hf")] - 1 for case in both) for side in ("compile", "tigon")
    )
    assert len(both) == 2
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"On the two models that we measured with both, it gains {compiled:.1%} tokens/s".replace("%", " %") in text
    assert f"and Tigon {100 * tigon:.1f} %." in text


def test_what_it_says_of_unsloth_is_of_the_steps_measured_with_both():
    rows = report.load(ROOT / "benchmarks" / "results" / "h100-adapters.json")["rows"]
    speed = {(*report.case_of(row), row["side"]): row["tokens_per_s"] for row in rows if row["status"] == "ok"}
    gains = [v / speed[(*case, "unsloth")] - 1 for (*case, side), v in speed.items()
             if side == "tigon" and v and speed.get((*case, "unsloth"))]  # fmt: skip
    assert len(gains) == 6
    text = " ".join((ROOT / "README.md").read_text().split())
    said = f"measured with both, Tigon is {100 * min(gains):.1f} to {100 * max(gains):.1f} % faster."
    assert f"On the six [LoRA and QLoRA steps](#adapters-lora-qlora) that we {said}" in text


def percent(gain: float) -> str:
    return f"{100 * gain:+.1f} %".replace("-", "−")
