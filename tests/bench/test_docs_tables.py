"""The documentation's tables and charts come from result files."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from tigon.bench import report
from tigon.bench.runner import Row

HOOK = Path(__file__).parents[2] / "benchmarks" / "docs_tables.py"


@pytest.fixture
def hook(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("docs_tables", HOOK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    row = Row("rope", (1, 2), "bfloat16", "tigon", total_ms=1.25, total_range_ms=(1.2, 1.3), times_floor=1.5)
    report.save(tmp_path / "h200-ops.json", report.result("ops", [row]))
    return module


def test_marks_become_tables(hook):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guide/bench.md"))
    text = hook.on_page_markdown("before\n\n<!-- results: *-ops.json -->\n\nafter", page=page)
    assert text.startswith("before\n")
    assert text.endswith("\nafter")
    assert "| rope | 1×2 |" in text
    assert "1.50×" in text
    assert "(../charts/h200-ops.png)" in text
    assert "<!--" not in text


def test_a_mark_without_a_file_is_said(hook):
    assert hook.section("b300-*.json") == "No result file matches `b300-*.json`."


def test_charts_are_added_to_the_site(hook):
    files_module = pytest.importorskip("mkdocs.structure.files")
    config = SimpleNamespace(
        docs_dir="docs", site_dir="site", use_directory_urls=True, plugins=SimpleNamespace(_current_plugin="hook")
    )
    files = hook.on_files(files_module.Files([]), config)
    (chart,) = list(files)
    assert chart.src_uri == "charts/h200-ops.png"
    assert chart.content_bytes.startswith(b"\x89PNG")
