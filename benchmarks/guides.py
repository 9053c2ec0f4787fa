"""What the guides show of the result files and of the notebook: machines, the peaks of a model, first steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tigon.bench import report
from tigon.install import REPOSITORY

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"
PACKAGES = ("torch", "triton", "transformers")


def hardware(results: Path) -> str:
    """A line for each set of machine and versions, with the runs that were made on it, newest first."""
    found: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for path in results.glob("*.json"):
        content = report.load(path)
        about = content["environment"]
        versions = tuple(about["packages"].get(name) or "–" for name in PACKAGES)
        memory = "–" if about["memory_gib"] is None else f"{about['memory_gib']:.0f} GiB"
        machine = (about["device"], memory, about["driver"] or "–", *versions)
        found.setdefault(machine, []).append((content["date"][:10], path.stem))
    lines = ["| device | memory | driver | torch | Triton | transformers | runs |", "| :-- " * 7 + "|"]
    for machine, runs in sorted(found.items(), key=lambda item: max(item[1]), reverse=True):
        where = f"{REPOSITORY}/blob/main/benchmarks/results"
        links = ", ".join(f"[{stem.partition('-')[2] or stem}]({where}/{stem}.json)" for _, stem in sorted(runs))
        lines.append("| " + " | ".join([*machine, links]) + " |")
    return "\n".join(lines)


def peaks(results: Path, model: str) -> str:
    """The measured peaks of a model on one GPU without checkpointing, plain and fused, in a sentence."""
    for path in sorted(results.glob("*-models.json")):
        content = report.load(path)
        by: dict[str, Any] = {
            row["side"]: row["peak_gib"]
            for row in content["rows"]
            if (row["model"], row["checkpointing"], row["gpus"]) == (model, False, 1) and row["status"] == "ok"
        }
        if {"hf", "tigon"} <= set(by):
            device = content["environment"]["device"]
            return f"Measured on one {device}: **{by['hf']:.1f} GiB** plain, **{by['tigon']:.1f} GiB** fused."
    return ""


def notebook(path: Path = NOTEBOOK) -> str:
    """The notebook as a page: its texts, its code, and what its cells printed when it was stored."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        said = "".join("".join(output["text"]) for output in cell["outputs"])
        if said:
            parts.append(f"```text\n{said.rstrip()}\n```")
    parts.insert(1, f"This page is [a notebook]({REPOSITORY}/blob/main/{path.relative_to(ROOT)}); the tests run it.")
    return "\n\n".join(parts) + "\n"
