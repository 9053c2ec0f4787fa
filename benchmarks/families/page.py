"""The page of the families: the transformers-*.json beside this file, which `make sweep` writes, as Markdown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TASKS = {
    "causal": "causal language models", "image": "image and text to text", "seq2seq": "sequence to sequence",
    "multimodal": "several kinds of input", "speech": "speech to text", "ctc": "speech, by CTC",
}  # fmt: skip
KINDS = {
    "head": "loss", "norm": "norms", "add_norm": "with the sum", "rotary": "rotary", "qk_norm": "with the norm",
    "mlp": "MLP", "experts": "experts",
}  # fmt: skip


def page() -> str:
    files = sorted((json.loads(path.read_text()) for path in FOLDER.glob("transformers-*.json")), key=_version)[::-1]
    if not files:
        return "No sweep has been recorded yet."
    newest = files[0]
    ran = {name: row for name, row in newest["classes"].items() if row["status"] != "not run"}
    return "\n".join(
        [
            "## In numbers", "", *summary(files), "", *coverage(ran), "",
            f"## Every class that runs, transformers {newest['versions']['transformers']}", "", *table(ran), "",
            "## Classes that do not run here", "", *unrunnable(newest["classes"]),
        ]
    )  # fmt: skip


def _version(content: dict[str, Any]) -> tuple[int, ...]:
    return tuple(map(int, content["versions"]["transformers"].split(".")[:3]))


def summary(files: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| transformers | classes | listed | run | with pixels or sound | equal | wrong | "
        + " | ".join(KINDS.values())
        + " |",
        "| :-- | :-- |" + " --: |" * (5 + len(KINDS)),
    ]
    for content in files:
        for task, name in TASKS.items():
            rows = [row for row in content["classes"].values() if task in row["tasks"]]
            if not rows:
                continue
            ran = [row for row in rows if row["status"] != "not run"]
            cells = [content["versions"]["transformers"], name, len(rows), len(ran)]
            cells.append(sum(row.get("media", "").startswith("with ") for row in ran))
            cells += [sum(row["status"] == status for row in ran) for status in ("equal", "wrong")]
            cells += [sum(bool(row.get("calls", {}).get(kind)) for row in ran) for kind in KINDS]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


WHOLE = {"head": ("head",), "norms": ("norm",), "MLP": ("mlp", "experts")}


def coverage(rows: dict[str, Any]) -> list[str]:
    """How many classes run a head, norms and an MLP or experts fused, and what the other classes lack."""
    calls = {name: row.get("calls", {}) for name, row in rows.items()}
    lacking = {
        name: [part for part, kinds in WHOLE.items() if not any(counts.get(kind) for kind in kinds)]
        for name, counts in calls.items()
    }
    lacking = {name: parts for name, parts in lacking.items() if parts}
    names = ", ".join(f"`{name}` ({', '.join(parts)})" for name, parts in lacking.items())
    fused = len(rows) - len(lacking)
    return [
        f"{fused} of the {len(rows)} classes that run, {fused / max(len(rows), 1):.1%}, have the loss, norms and an "
        f"MLP or experts fused. The others, with what is missing in the step: {names or 'none'}."
    ]


def table(rows: dict[str, Any]) -> list[str]:
    lines = [
        "| class | " + " | ".join(KINDS.values()) + " | inputs | left, and why |",
        "| :-- |" + " --: |" * len(KINDS) + " :-- | :-- |",
    ]
    for name, row in rows.items():
        calls = [str(row.get("calls", {}).get(kind, "–")) for kind in KINDS]
        lines.append(
            "| "
            + " | ".join([f"`{name}`", *calls, escape_markdown(row.get("media", "text")), "; ".join(reasons(row))])
            + " |"
        )
    return lines


def reasons(row: dict[str, Any]) -> list[str]:
    found = [f"**wrong**: {row['why']}"] if row["status"] == "wrong" else []
    found += [f"loss: logits built by `{name}`" for name in row.get("logits_built_by", {})]
    found += [f"`{name}`: {why}" for _, name, _, why in row.get("left", [])]
    return [escape_markdown(text) for text in dict.fromkeys(found)]


def unrunnable(rows: dict[str, Any]) -> list[str]:
    lines = ["| class | why |", "| :-- | :-- |"]
    for name, row in rows.items():
        if row["status"] == "not run":
            lines.append(f"| `{name}` | {escape_markdown(row['why'][:160])} |")
    return lines


def escape_markdown(text: str) -> str:
    return re.sub(r"([|<>])", r"\\\1", text)
