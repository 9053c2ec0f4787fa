"""The page of result files: complete, readable by a parser, and in need of nothing beside it."""

import contextlib
import functools
import json
import operator
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("typer")
from test_report import CONTENTS

from tigon.bench import plots, report
from tigon.bench.page import page
from tigon.bench.runner import Row
from tigon.cli.bench import bench
from tigon.cli.problem import Problem

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
VOID = {"meta", "br", "link", "img", "hr", "input"}


class Reader(HTMLParser):
    """Holds every element closed by its own tag, and collects ids, links, rows, headings and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.tags, self.text = [], [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        found = dict(attributes)
        for name in ("src", "href", "xlink:href"):
            if name in found:
                self.links.append(found[name])
        if tag == "section":
            self.ids.append(found["id"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open = self.open[:-1] if tag not in VOID else self.open

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def self_contained(text):
    read = Reader(text)
    assert all(link.startswith("#") for link in read.links), "everything is in the page"
    assert not re.search(r"@import|url\((?!#)|<script", text)
    assert {link[1:] for link in read.links if link.startswith("#part")} == set(read.ids)
    return read


@pytest.mark.parametrize("kind", CONTENTS)
def test_every_kind_has_a_part(kind):
    content = CONTENTS[kind]()
    read = self_contained(page([content]))
    assert "svg" in read.tags
    header, rows = report.cells(content)
    for cell in [*header, *(cell for row in rows for cell in row)]:
        assert cell in read.text


def test_parts_are_ordered_by_kind_and_device():
    other = CONTENTS["model"]()
    other["environment"] = {**other["environment"], "device": "AMD Instinct MI300X"}
    read = self_contained(page([CONTENTS["host"](), CONTENTS["model"](), other]))
    assert len(read.ids) == 3
    places = [read.text.rindex(title) for title in ("Whole models, Instinct MI300X", "Whole models, ", "Host time, ")]
    assert places == sorted(places)


def test_what_was_not_measured_has_no_chart_and_no_markup_of_its_own():
    row = Row("rope", (1, 8), "bfloat16", "tigon", status="failed", reason="<script>alert(1)</script>")
    text = page([report.result("ops", [row])])
    assert "svg" not in self_contained(text).tags
    assert "&lt;script&gt;" in text


def test_a_loss_is_also_drawn_over_its_tokens():
    rows = [
        Row("dpo", (2, t, 64, 1000), "bfloat16", "tigon", total_ms=1.0, total_range_ms=(1.0, 1.0), floor_ms=1.0,
            times_floor=1.0, peak_mib=float(t))
        for t in (128, 512, 2048)
    ]  # fmt: skip
    assert self_contained(page([report.result("ops", rows)])).tags.count("svg") == 2
    assert self_contained(page([report.result("ops", rows[:2])])).tags.count("svg") == 1


def test_files_are_shown_without_measuring(tmp_path, capsys):
    for kind in ("model", "host"):
        report.save(tmp_path / f"{kind}.json", CONTENTS[kind]())
    # As `tigon bench --from model.json host.json`: what follows an option's value is an argument.
    files = {"source": [tmp_path / "model.json"], "ops": [str(tmp_path / "host.json")]}
    bench(**files, html=tmp_path / "r.html")
    assert len(self_contained((tmp_path / "r.html").read_text(encoding="utf-8")).ids) == 2
    capsys.readouterr()
    bench(**files)
    printed = capsys.readouterr().out
    assert "13,000" in printed
    assert "45.7" in printed


def test_a_run_writes_its_page(tmp_path, capsys):
    bench(ops=["swiglu"], quick=True, peers="eager", shape=["8x8"], device="cpu", html=tmp_path / "r.html")
    assert "swiglu" in self_contained((tmp_path / "r.html").read_text(encoding="utf-8")).text
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"source": [Path("no-such.json")]}, "no-such.json: No such file"),
        ({"source": [RESULTS / "h200-memcheck.txt"]}, "is not a result file"),
        ({"source": [RESULTS / "h200-counters.json"], "peers": "eager"}, "takes --html alone"),
        ({"html": RESULTS}, "--html must be a file"),
    ],
)
def test_wrong_arguments_get_a_sentence(arguments, match):
    with pytest.raises(Problem, match=match):
        bench(**arguments)


WRONG = [None, 5, "text", [], {}, [[]], float("nan"), -1]


@pytest.mark.parametrize("kind", CONTENTS)
def test_fields_that_are_missing_or_mistyped_get_a_sentence(kind, tmp_path, capsys):
    """Every field of the file, of its environment and of its first row: left out, and of other types."""
    content = json.loads(json.dumps(CONTENTS[kind]()))
    file = tmp_path / "result.json"
    shown = tried = 0
    for inside in ((), ("environment",), ("rows", 0)):
        place = functools.reduce(operator.getitem, inside, content)
        for name, right in list(place.items()):
            for wrong in ("missing", *WRONG):
                if wrong == "missing":
                    del place[name]
                else:
                    place[name] = wrong
                file.write_text(json.dumps(content))
                with contextlib.suppress(Problem):  # whose sentence the other tests read
                    bench(source=[file])
                    shown += 1
                tried += 1
                place[name] = right
    assert 40 < shown < tried - 40
    capsys.readouterr()


def test_a_page_of_a_file_that_cannot_be_drawn_names_the_file(tmp_path):
    content = CONTENTS["ops"]()
    report.save(tmp_path / "good.json", content)
    for row in content["rows"]:
        row["times_floor"] = -0.0 if row["times_floor"] else None
        row["op"] = ["swiglu"]
    report.save(tmp_path / "bad.json", content)
    with pytest.raises(Problem, match=r"--from .*bad.json"):
        bench(source=[tmp_path / "good.json", tmp_path / "bad.json"], html=tmp_path / "r.html")


def test_names_with_dollar_signs_are_no_formulas(tmp_path):
    content = CONTENTS["ops"]()
    for row in content["rows"]:
        row["op"], row["implementation"] = r"$\frac{", "$x_{$"
    content["environment"]["device"] = r"GPU $\nope$"
    report.save(tmp_path / "r.json", content)
    bench(source=[tmp_path / "r.json"], html=tmp_path / "r.html")
    assert r"$\frac{" in (tmp_path / "r.html").read_text(encoding="utf-8")
    plots.plot(content, tmp_path / "r.png")
