"""The figures of the README are those of the recorded run."""

from pathlib import Path

from tigon.bench import report

ROOT = Path(__file__).parents[1]


def test_the_table_is_the_result_file():
    result = report.load(ROOT / "benchmarks" / "results" / "h200-llama-3-8b-16x512.json")
    table = report.to_markdown(result).split("\n\n", 1)[1].strip()
    assert table in (ROOT / "README.md").read_text()


def test_its_pictures_and_links_are_there():
    text = (ROOT / "README.md").read_text()
    links = [part.split(")")[0].split("#")[0] for part in text.split("](")[1:]]
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert links
    assert not missing
