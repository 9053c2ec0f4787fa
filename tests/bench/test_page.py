"""The page of result files: complete, readable by a parser, and in need of nothing beside it."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("typer")
from test_report import CONTENTS

from tigon.bench import report
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
