"""The figures of the README are those of the recorded run."""

from pathlib import Path

import pytest

from tigon.bench import report
from tigon.bench.matrix import to_matrix

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["h200-4gpus.json", "h200-models.json"])
def test_the_tables_of_models_are_the_result_files(name):
    assert to_matrix(report.load(ROOT / "benchmarks" / "results" / name)).strip() in (ROOT / "README.md").read_text()


def test_its_pictures_and_links_are_there():
    text = (ROOT / "README.md").read_text()
    links = [part.split(")")[0].split("#")[0] for part in text.split("](")[1:]]
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert links
    assert not missing


def test_the_figures_of_experts_are_the_result_files():
    rows = report.load(ROOT / "benchmarks" / "results" / "h200-matmul.json")["rows"]
    text = (ROOT / "README.md").read_text()
    for name, op, experts in (
        ("Mixtral-8x7B", "moe_mlp", 8),
        ("Qwen3-30B-A3B", "moe_mlp", 128),
        ("gpt-oss-20b", "moe_mlp-gpt-oss", 32),
    ):
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
        by = {row["implementation"]: row for row in rows if row["op"] == op and row["shape"][3] == experts}
        cells = [by.get(who) for who in ("tigon", "liger", "transformers", "eager")]
        shown = ["–" if c is None else f"{c['total_ms']:.1f} ms, {c['peak_mib'] / 1024:.2f} GiB" for c in cells]
        assert line == f"| {name} | **{shown[0]}** | " + " | ".join(shown[1:]) + " |"
