"""MkDocs hook: result files become tables and charts, so that the documentation holds no typed figure.

In mkdocs.yml `hooks: [benchmarks/docs_tables.py]`; in a page, on a line of its own, a pattern over benchmarks/results:

    <!-- results: h200-ops.json -->
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from tigon.bench import plots, report

RESULTS = Path(__file__).parent / "results"
MARK = re.compile(r"^<!-- results: (\S+) -->$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Draw the chart of every result file and add it to the site as charts/<name>.png."""
    from mkdocs.structure.files import File

    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(RESULTS.glob("*.json")):
            picture = Path(folder, path.stem + ".png")
            plots.plot(report.load(path), picture)
            files.append(File.generated(config, f"charts/{picture.name}", content=picture.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    up = "../" * page.file.src_uri.count("/")
    return MARK.sub(lambda mark: section(mark[1], up), markdown)


def section(pattern: str, up: str = "") -> str:
    """Table and chart of every result file whose name matches; a sentence when there is none."""
    paths = sorted(RESULTS.glob(pattern))
    if not paths:
        return f"No result file matches `{pattern}`."
    parts = [f"{report.to_markdown(report.load(p))}\n![{p.stem}]({up}charts/{p.stem}.png)\n" for p in paths]
    return "\n".join(parts)
