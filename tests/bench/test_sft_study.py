"""benchmarks/sft.py: a fine-tuning through the command line, recorded and shown; all of it at tiny widths."""

import contextlib
import io
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import report
from studies import sft as study

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def sft(script):
    return script("sft")


class Here:
    """A Worker in this process, which has imported already what the command needs."""

    def __init__(self, folder, name):
        self.folder = folder

    def await_ready(self): ...

    def end(self): ...

    def run(self, arguments, limit_s):
        from tigon.cli import main

        before, handler, said = os.getcwd(), signal.getsignal(signal.SIGTERM), io.StringIO()
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
                main(arguments)
        finally:
            os.chdir(before)
            signal.signal(signal.SIGTERM, handler)
        return said.getvalue()


@pytest.fixture(scope="module")
def recorded(sft, tmp_path_factory):
    for name in ("transformers", "peft", "accelerate", "typer", "rich", "matplotlib"):
        pytest.importorskip(name)
    output = tmp_path_factory.mktemp("sft")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "Worker", Here)
        code = sft.main(["--output", str(output), "--name", "tiny-sft.json", "--tiny", "--seeds", "2"])
    assert code == 0
    return output


def test_both_sides_learn_the_same(recorded):
    content = report.load(recorded / "tiny-sft.json")
    assert [(row["side"], row["seed"]) for row in content["rows"]] == [
        ("hf", 0), ("tigon", 0), ("tigon", 1), ("hf", 1),
    ]  # fmt: skip
    assert {row["side"]: row["adapters"] for row in content["rows"]} == {"hf": 0, "tigon": 14}
    found = study.apart(content)
    assert found["largest"] < 1e-4, "fp32 on a CPU"
    assert found["held_out"] < 1e-4
    assert found["seeds"] > 1e-3
    for row in content["rows"]:
        assert len(study.curve(row)) == row["steps"] == 6
        assert row["tokens_per_s"] > 0
    base = content["base"]
    assert base["parameters"] == 512 * 64 + 2 * (64 * 64 * 3 + 3 * 64 * 128 + 2 * 64) + 64
    assert base["loss"][1] < base["loss"][0]
    assert [("--plain" in one, "--lora 4" in one) for one in content["commands"]] == [
        (False, False), (True, True), (False, True),
    ]  # fmt: skip
    plain, fused = content["commands"][1:]
    assert plain.replace(" --plain", "").replace("hf-0", "tigon-0") == fused


def test_what_is_shown_of_it(sft, recorded, tmp_path, monkeypatch, script):
    pages = script("docs_pages")
    content = report.load(recorded / "tiny-sft.json")
    assert sft.main(["--draw", str(recorded / "tiny-sft.json"), str(tmp_path / "sft.png")]) == 0
    assert (tmp_path / "sft.png").stat().st_size > 10_000
    monkeypatch.setattr(pages, "RESULTS", recorded)
    pages.charts.cache_clear()
    text = (pages.DOCS / "how-to" / "lora.md").read_text()

    shown = pages.on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri="how-to/lora.md")))
    pages.charts.cache_clear()
    assert "## A whole fine-tuning, compared with PEFT's" in shown
    assert "| Tigon | 2 |" in shown
    assert study.sentences(content) in shown
    assert "<svg" in shown
    assert "currentColor" in shown, "text in the colour of the page, light or dark"


SOURCE = """
class A:
    def f(self, x):
        '''Add one to x, slowly.

        More.'''
        return x + 1

    def g(self):
        '''No body here at all.'''
"""


def test_functions_lose_their_docstring(sft):
    (row,) = sft.functions(SOURCE, 200)
    assert row["input"] == "def f(self, x):\n    return x + 1"
    assert row["output"] == "Add one to x, slowly."
    assert not list(sft.functions(SOURCE, 20))
    assert not list(sft.functions("def (", 200))


def test_a_module_is_in_one_of_the_data_sets_alone(sft, tmp_path, monkeypatch):
    modules = [(part, SOURCE.replace("def f", f"def f{part}")) for part in range(10)]
    monkeypatch.setattr(sft, "sources", lambda: modules)
    counts = sft.write_data(tmp_path, sft.FULL)
    where = {name: (tmp_path / name).read_text() for name in ("base.txt", "train.jsonl", "held_out.jsonl")}
    found = {name: [part for part, _ in modules if f"def f{part}(" in text] for name, text in where.items()}
    assert found == {"base.txt": [0, 1, 2, 3, 4], "train.jsonl": [5, 6, 7, 8], "held_out.jsonl": [9]}
    assert (counts["train"], counts["held_out"]) == (4, 1)


def test_this_python_has_rows_for_every_step(sft):
    rows = [row for part, source in sft.sources() if 5 <= part < 9 for row in sft.functions(source, sft.FULL.longest)]
    assert len(rows) > sft.FULL.tuned["batch"] * sft.FULL.tuned["steps"], "no row comes twice"
    assert all(row["input"].startswith(("def ", "async def ")) and row["output"] for row in rows)


def test_a_budget_leaves_out_whole_seeds_last(sft):
    options = sft.parse(["--output", "x"])
    assert options.budget == 100
    sides = [(run.side, run.seed) for run in sft.planned(options, sft.FULL)]
    assert sides == [("hf", 0), ("tigon", 0), ("tigon", 1), ("hf", 1), ("hf", 2), ("tigon", 2)]
    for wrong in ([], ["--output", "x", "--seeds", "0"]):
        with pytest.raises(SystemExit):
            sft.parse(wrong)


def test_a_run_that_fails_says_why(sft, tmp_path):
    """In a process of its own, as all runs are."""
    pytest.importorskip("peft")
    worker = sft.Worker(tmp_path, "wrong")
    worker.await_ready()
    with pytest.raises(RuntimeError, match=r"ended with status 2: .*tigon: --data"):
        worker.run(["train", "--model", "llama-tiny", "--data", "nowhere.txt"], 60)
    worker.end()


def test_what_was_recorded_on_a_gpu():
    """Equal curves: the sides of one seed are nearer to each other than two seeds, and no held-out loss is worse.

    A record of one seed alone has the fall of the loss to compare with.
    """
    for path in RESULTS.glob("*-sft.json"):
        content = report.load(path)
        assert all(row["status"] == "ok" for row in content["rows"])
        assert all(row["adapters"] > 0 for row in content["rows"] if row["side"] == "tigon")
        found = study.apart(content)
        falls = [study.curve(row)[0] - study._end(row) for row in content["rows"]]
        assert found["sides"] < (0.2 * found["seeds"] if "seeds" in found else 0.01 * min(falls))
        assert found["held_out"] < max(0.01, found.get("held_out_seeds", 0.0))
