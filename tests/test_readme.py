"""The figures of the README are those of the recorded run."""

import importlib.util
import json
from collections import Counter
from pathlib import Path
from statistics import mean
from xml.etree import ElementTree

import pytest

from tigon.bench import report
from tigon.bench.matrix import cases_of
from tigon.bench.runner import Row

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


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


def test_the_charts_are_what_the_result_files_say_in_both_themes(readme):
    text = (ROOT / "README.md").read_text()
    rows = report.load(RESULTS / "h200-4gpus.json")["rows"]
    by = {(row["model"], row["side"]): row["tokens_per_s"] for row in rows}
    pictures = readme.pictures()
    for path, svg in pictures.items():
        assert path.relative_to(ROOT).as_posix() in text
        assert path.read_text() == svg, "python benchmarks/readme.py --write renews the charts"
        words = [element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]
        for model in {model for model, _ in by} if "headline" in path.name else ():
            assert model in words
            assert f"{100 * (by[model, 'tigon'] / by[model, 'hf'] - 1):+.1f} %" in words
    assert len(set(pictures.values())) == len(pictures) == 4


def test_the_curves_of_the_chart_are_those_of_the_record(readme):
    row = {"loss": "2.0 1.0", "runs": [{"side": side, "loss": loss} for side, loss in
                                      (("tigon", "0.5 0.25"), ("exact", "9 9"), ("hf", "-0.5 0"))]}  # fmt: skip
    assert readme.read_losses(row) == [("hf", [1.5, 1.0]), ("tigon", [2.5, 1.25])]


def losses(**totals):
    rows = [
        Row("orpo", (1, 8, 4, 16), "bfloat16", name, total_ms=ms, total_range_ms=(ms, ms), peak_mib=mib, **more)
        for name, (ms, mib, more) in totals.items()
    ]
    return report.result("ops", rows)


def shown(readme, **totals):
    columns = ("tigon", "liger", "quack", "trl")
    return readme.operators(
        "x.json", losses(**totals), {"ORPO": ("orpo", (1, 8, 4, 16))}, "loss", columns, 1
    ).splitlines()


def test_speed_and_memory_are_bold_apart_and_not_within_noise(readme):
    header, _, line, *_ = shown(readme, tigon=(1.0, 2048, {}), liger=(1.1, 1024, {}), trl=(2.0, 4096, {}))
    assert header == "| loss, forward + backward | Tigon | Liger | TRL |"
    assert line == "| ORPO | **1.0 ms**, 2.0 GiB | 1.1 ms, **1.0 GiB** | 2.0 ms, 4.0 GiB |"
    _, _, line, *_ = shown(readme, tigon=(1.0, 1000, {}), liger=(1.01, 1010, {}))
    assert "**" not in line


def test_a_peer_of_another_run_is_marked_with_what_tigon_took_there(readme):
    content = losses(tigon=(2.0, 2048, {}), quack=(1.0, 1024, {}))
    content["rows"][1]["beside"] = {"tigon": 2.5}
    _, _, line, _, notes = readme.operators(
        "x.json", content, {"ORPO": ("orpo", (1, 8, 4, 16))}, "loss", ("tigon", "quack"), 1
    ).splitlines()
    assert line.endswith("GiB**¹ |")
    assert "¹ Measured in another run, in which Tigon took 2.5 ms." in notes


def test_wrong_results_are_marked_and_lead_nothing(readme):
    wrong = {"status": "wrong", "reason": "relative error above 0.01 in dx"}
    _, _, line, _, notes = shown(readme, tigon=(2.0, 2048, {}), liger=(1.0, 1024, wrong), trl=(3.0, 4096, {}))
    assert line == "| ORPO | **2.0 ms**, **2.0 GiB** | 1.0 ms, 1.0 GiB¹ | 3.0 ms, 4.0 GiB |"
    assert "¹ Wrong by our bound: relative error above 0.01 in dx." in notes


def test_its_pictures_and_links_are_there():
    text = (ROOT / "README.md").read_text()
    links = [part.split(")")[0].split("#")[0] for part in text.split("](")[1:]]
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert links
    assert not missing


def rows_by_side(name):
    """Of each case of a result file the rows by side."""
    return [by for by in cases_of(report.load(RESULTS / name)["rows"], "side") if "tigon" in by]


def gain(by, side, key="tokens_per_s", than="hf"):
    return by[side][key] / by[than][key] - 1


def test_the_gains_that_open_it_are_those_of_the_result_file():
    cases = rows_by_side("h200-4gpus.json")
    assert len(cases) == 5
    text = prose()
    for side in ("tigon", "liger"):
        speed, memory = (mean(gain(by, side, key) for by in cases) for key in ("tokens_per_s", "peak_gib"))
        assert percent(speed) in text.split("```")[0]
        assert percent(memory) in text.split("```")[0]
    faster = sorted(100 * gain(by, "tigon", than="liger") for by in cases)
    less = sorted(-100 * gain(by, "tigon", "peak_gib", "liger") for by in cases)
    # The case of the least lead is a tie, by the measure of the table.
    assert faster[0] < 2 < faster[1]
    assert f"{faster[1]:.1f} to {faster[-1]:.1f} % faster on the other four" in text
    assert f"needs {less[0]:.0f} to {less[-1]:.0f} % less memory" in text


def test_what_is_left_of_the_lead_over_compile():
    """With one attention kernel, in speed and in memory, on both pages; and what a mask costs the whole model."""
    cases = rows_by_side("h200-same-attention.json")
    assert len(cases) == 5
    attention = [by[side]["profile_ms"]["attention"] for by in cases for side in by if by[side]["profile_ms"]]
    assert max(attention[:10]) < 1.2 * min(attention[:10])
    assert max(attention[10:]) < 1.2 * min(attention[10:])
    compiled, tigon = (sorted(100 * gain(by, side) for by in cases) for side in ("compile-layers", "tigon"))
    text, page = prose(), " ".join((ROOT / "docs" / "bench.md").read_text().split())
    assert f"gains {compiled[0]:.1f} to {compiled[-1]:.1f} % tokens/s" in text
    assert f"Tigon {tigon[0]:.1f} to {tigon[-1]:.1f} %" in text
    faster = sorted(100 * gain(by, "tigon", than="compile-layers") for by in cases)
    unmasked = [100 * gain(by, "tigon", than="compile-layers") for by in cases if not by["tigon"]["masked"]]
    less = sorted(-100 * gain(by, "tigon", "peak_gib", "compile-layers") for by in cases)
    for said in (text, page):
        assert f"{faster[0]:.1f} to {faster[-1]:.1f} %" in said
        assert f"{max(unmasked):.1f} % at most without masked labels" in said
        assert f"{less[0]:.0f} to {less[-1]:.0f} % less" in said
    whole = [by for by in rows_by_side("h200-models.json") if "compile" in by]
    assert "{:.1f} and {:.1f} %".format(*sorted(100 * gain(by, "compile") for by in whole)) in text
    assert all(by["compile-causal"]["step_ms"] > by["compile-layers"]["step_ms"] for by in cases)


def test_what_it_says_of_unsloth_is_of_the_steps_measured_with_both():
    cases = [
        by
        for by in rows_by_side("h100-adapters.json")
        if by["tigon"]["tokens_per_s"] and by.get("unsloth", {}).get("tokens_per_s")
    ]
    assert len(cases) == 6
    text = prose()
    faster = sorted(100 * gain(by, "tigon", than="unsloth") for by in cases)
    assert f"{faster[0]:.1f} to {faster[-1]:.1f} % faster" in text
    more = [100 * gain(by, "tigon", "peak_gib", "unsloth") for by in cases]
    checkpointed = [by["tigon"]["checkpointing"] for by in cases]
    with_, without = (sorted(abs(m) for m, c in zip(more, checkpointed, strict=True) if c is b) for b in (True, False))
    assert all((m > 0) is c for m, c in zip(more, checkpointed, strict=True))
    assert f"{with_[0]:.0f} to {with_[-1]:.0f} % more memory" in text
    assert f"{without[0]:.0f} to {without[-1]:.0f} % less" in text


def test_the_classes_of_transformers_that_train_the_same():
    newest = max((ROOT / "benchmarks" / "families").glob("transformers-*.json"))
    statuses = Counter(row["status"] for row in json.loads(newest.read_text())["classes"].values())
    assert set(statuses) == {"equal", "not run"}
    text = prose()
    assert f"[{statuses['equal']} classes]" in text
    assert f"{statuses['not run']} of {statuses.total()} do not run" in text
    runs = report.load(RESULTS / "h200-converge.json")["rows"]
    assert {row["status"] for row in runs} == {"ok"}
    fused = sum(run["side"] == "tigon" for row in runs for run in row["runs"])
    assert f"all {fused} fused runs of {len(runs)} settings" in text


def test_the_share_of_masked_labels_is_beside_each_table_of_models(readme):
    assert {row["masked"] for row in report.load(RESULTS / "h200-4gpus.json")["rows"]} == {0.125}
    assert "12.5 % of the labels is masked" in readme.four_gpus()
    header, _, *lines = readme.one_gpu().split("\n\n")[0].splitlines()
    assert header.startswith("| model | batch×seq | masked | hf | compile-layers |")
    assert {line.split(" | ")[2] for line in lines} == {"12.5 %", "0 %"}


def test_the_heads_whose_products_masks_save_are_those_of_the_presets(readme):
    pytest.importorskip("transformers")
    from tigon.presets import preset_config

    for model, (width, classes) in readme.HEADS.items():
        config = preset_config(model).get_text_config()
        assert (config.hidden_size, config.vocab_size) == (width, classes)


def test_its_length():
    assert len((ROOT / "README.md").read_text().split()) < 2600


def prose():
    return " ".join((ROOT / "README.md").read_text().split())


def percent(gain: float) -> str:
    return f"{100 * gain:+.1f} %".replace("-", "−")
