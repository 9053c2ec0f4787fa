"""The README's tables and its first chart, made from the result files.

    python benchmarks/readme.py            say which of them are not what the files say
    python benchmarks/readme.py --write    write them into the README, and the chart into docs/images

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, NAME one of TABLES. `tests/test_readme.py` holds them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from studies import adapters as adapter_study

from tigon.bench import report
from tigon.bench.matrix import CAPTION, By, bold, cases_of, leaders, to_matrix

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
MARK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
RAISED = "¹²³⁴⁵⁶⁷⁸⁹"

# The name of a line, and its case.
LOSSES = {
    "`linear_cross_entropy`, 32,768 tokens": ("linear_cross_entropy", (32768, 4096, 128256)),
    "the same, half of the labels ignored": ("linear_cross_entropy-ignored50", (32768, 4096, 128256)),
    "`losses.dpo` with a reference head": ("dpo", (16, 1024, 4096, 128256)),
    "`losses.orpo`": ("orpo", (16, 1024, 4096, 128256)),
    "`losses.grpo`": ("grpo", (16, 1024, 4096, 128256)),
    "`losses.distill`, JSD, 4,096 tokens": ("distill", (4096, 4096, 128256)),
}
EXPERTS = {
    "Mixtral-8x7B": ("moe_mlp", (8192, 4096, 14336, 8, 2)),
    "Qwen3-30B-A3B": ("moe_mlp", (8192, 2048, 768, 128, 8)),
    "gpt-oss-20b": ("moe_mlp-gpt-oss", (8192, 2880, 2880, 32, 4)),
}
TITLES = {
    "tigon": "Tigon", "liger": "Liger", "quack": "QuACK", "trl": "TRL", "compile": "compiled", "eager": "eager",
    "transformers": "`grouped_mm`",
}  # fmt: skip
# Remarks on peers' figures, by (operator, implementation).
REMARKS = {
    ("grpo", "liger"): "By its default, `chunk_size=1`, Liger takes one sequence at a time, and 4,096 classes of it.",
}


def four_gpus() -> str:
    return models("h200-4gpus.json")


def one_gpu() -> str:
    return models("h200-models.json", ("floor", "hf", "compile", "liger", "tigon", "tigon-compile"))


def models(name: str, order: Sequence[str] = ()) -> str:
    content = report.load(RESULTS / name)
    return f"{to_matrix(content, order)}\n{CAPTION} {source(name, content)}\n"


def losses() -> str:
    """Of the file in which all peers were measured in one run, if there is one; else of the record of all products."""
    name = "h200-losses.json" if (RESULTS / "h200-losses.json").exists() else "h200-matmul.json"
    return operators(name, LOSSES, "loss", ("tigon", "liger", "quack", "trl", "compile", "eager"), digits=1)


def experts() -> str:
    columns = ("tigon", "liger", "transformers", "eager")
    return operators("h200-matmul.json", EXPERTS, "experts", columns, digits=2, titles={"eager": "loop"})


def adapters() -> str:
    """The section with the table of adapters; nothing before they are measured."""
    name = "h100-adapters.json"
    if not (RESULTS / name).exists():
        return ""
    content = report.load(RESULTS / name)
    return f"{ADAPTERS}\n{adapter_study.to_table(content)}\n{source(name, content, ADAPTER_PACKAGES)}\n"


def search() -> str:
    """Milliseconds of each search in a CUDA graph, torch's as called where no graph holds them."""
    name = "h200-search.json"
    content = report.load(RESULTS / name)
    shown: dict[tuple[str, float], dict[int, dict[str, Any]]] = {}
    for row in content["rows"]:
        if row["p99_ms"] is None and row["status"] == "ok" and "vectors" not in row:  # that: of searches with codes
            by = shown.setdefault((row["filters"], row["share"]), {}).setdefault(row["queries"], {})
            if (side := row["implementation"].partition("-")[0]) not in by or found(row) < found(by[side]):
                by[side] = row
    counts = sorted({queries for by in shown.values() for queries in by})
    table = [["what passes", *(f"{n} {'query' if n == 1 else 'queries'}" for n in counts)]]
    table.append([":--", *("--:" for _ in counts)])
    for (filters, share), by in shown.items():
        title = {"none": "all rows", "one": f"{100 * share:.0f} %"}.get(filters, "a filter for each query")
        table.append([title, *(f"**{found(by[n]['tigon']):.3g}**, {found(by[n]['torch']):.3g}" for n in counts)])
    lines = "\n".join("| " + " | ".join(line) + " |" for line in table)
    torchs = [row["equal"] for row in content["rows"] if row["implementation"].startswith("torch")]
    said = SEARCHED.format(f"{min(torchs):.0%}"[:-1], f"{max(torchs):.0%}"[:-1])
    return f"{lines}\n\n{said} {source(name, content, {'torch': 'torch', 'triton': 'Triton'})}\n"


def found(row: dict[str, Any]) -> float:
    return float(row["graph_ms"] or row["ms"])


SEARCHED = (
    "Milliseconds of the 100 best of 15.5 million rows of 128 numbers in fp16, in a CUDA graph where one can be "
    "captured: **Tigon**, then the faster of two ways with torch. Of 16 queries, Tigon's ids are those of a sort of "
    "all fp64 scores; torch's, whose scores are rounded to fp16, are so in {} to {} % of the places."
)
ADAPTERS = (
    "## Adapters (LoRA, QLoRA)\n\n"
    "One training step on one GPU beside Hugging Face with PEFT, Liger and Unsloth: adapters in fp32 on all seven "
    "projections, bf16 autocast,\nAdamW, sequences of 2048 tokens, random weights, the sides of a line in [one run]"
    "(docs/bench.md#adapters). Unsloth checkpoints as it does by default, in host memory.\n"
)


def operators(
    name: str,
    lines: dict[str, tuple[str, tuple[int, ...]]],
    what: str,
    columns: Sequence[str],
    digits: int,
    titles: dict[str, str] | None = None,
) -> str:
    """Milliseconds and GiB of each case in bf16; columns that nobody measured are left out."""
    content = report.load(RESULTS / name)
    cases = {case(by): by for by in cases_of(content["rows"], "implementation")}
    shown = {title: cases[op, shape, "bfloat16"] for title, (op, shape) in lines.items()}
    present = [column for column in columns if any(column in by for by in shown.values())]
    header = [TITLES[column] if column not in (titles or {}) else (titles or {})[column] for column in present]
    notes: list[str] = []
    table = [[f"{what}, forward + backward", *header], [":--", *("--:" for _ in present)]]
    for title, by in shown.items():
        fastest, smallest = leaders(by)
        table.append([title, *(cell(by.get(c), c == fastest, c == smallest, digits, notes) for c in present)])
    text = "\n".join("| " + " | ".join(line) + " |" for line in table)
    marked = " ".join(f"{RAISED[number]} {note}" for number, note in enumerate(notes))
    return f"{text}\n\n" + " ".join(filter(None, [CAPTION, marked, source(name, content)])) + "\n"


def case(by: By) -> tuple[Any, ...]:
    row = next(iter(by.values()))
    return row["op"], tuple(row["shape"]), row["dtype"]


def cell(row: dict[str, Any] | None, fastest: bool, smallest: bool, digits: int, notes: list[str]) -> str:
    if row is None:
        return "–"
    remarks = [REMARKS[key]] if (key := (row["op"], row["implementation"])) in REMARKS else []
    if row["status"] == "wrong":
        remarks.append(f"Wrong by our bound: {row['reason']}.")
    if "beside" in row:
        ms = row["beside"]["tigon"]
        remarks.append(f"Measured in another run, in which Tigon took {ms:.1f} ms.")
    if row["total_ms"] is None:
        return "failed" + marks(remarks, notes)
    time = bold(f"{row['total_ms']:.1f} ms", fastest)
    return f"{time}, " + bold(f"{row['peak_mib'] / 1024:.{digits}f} GiB", smallest) + marks(remarks, notes)


def marks(remarks: Sequence[str], notes: list[str]) -> str:
    """The raised numbers of some remarks, which take their place in the notes when they are new."""
    notes += [remark for remark in remarks if remark not in notes]
    return "".join(RAISED[notes.index(remark)] for remark in remarks)


def source(name: str, content: dict[str, Any], packages: dict[str, str] | None = None) -> str:
    """Where the figures come from, in a sentence. packages: those that it names, with their titles."""
    env = content["environment"]
    gpus = content.get("gpus") or max((row.get("gpus", 1) for row in content["rows"]), default=1)
    versions = ", ".join(
        f"{title} {env['packages'][key]}" for key, title in (packages or PACKAGES).items() if env["packages"].get(key)
    )
    device = env["device"].removeprefix("NVIDIA ")
    days = sorted({run["date"][:10] for run in runs(content)})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"[{gpus} × {device}](benchmarks/results/{name}), {versions}; {when}."


PACKAGES = {
    "torch": "torch", "triton": "Triton", "transformers": "transformers", "liger-kernel": "Liger",
    "quack-kernels": "QuACK", "trl": "TRL",
}  # fmt: skip
ADAPTER_PACKAGES = {
    "torch": "torch", "transformers": "transformers", "peft": "PEFT", "bitsandbytes": "bitsandbytes",
    "liger-kernel": "Liger", "unsloth": "Unsloth",
}  # fmt: skip


def runs(content: dict[str, Any]) -> list[dict[str, Any]]:
    return list(content.get("runs") or [{"date": content["date"], "command": content["command"]}])


# ------------------------------------------------------------------------------------------------------ the first chart

CHARTS = ROOT / "docs" / "images"
# GitHub shows a page in the reader's theme, but an image cannot follow it: there is one picture for each theme.
INKS = {
    "light": {"ink": "#1f2328", "faint": "#59636e", "liger": "#3b6ea5", "tigon": "#d9480f"},
    "dark": {"ink": "#f0f6fc", "faint": "#9198a1", "liger": "#6f9fd0", "tigon": "#ff8a50"},
}
PANELS = (("tokens_per_s", "Tokens/s, against Hugging Face"), ("peak_gib", "Peak memory, against Hugging Face"))
PANEL, LABELS, LINE, BAR = 330, 120, 44, 15  # of a panel, of the models' names, of a model, of a bar


def chart(theme: str) -> str:
    """Speed and memory of the models on four GPUs, Liger and Tigon beside Hugging Face, as SVG."""
    ink = INKS[theme]
    cases = cases_of(report.load(RESULTS / "h200-4gpus.json")["rows"], "side")
    width, height = LABELS + 2 * PANEL, 62 + LINE * len(cases)
    shares = {
        key: [{side: by[side][key] / by["hf"][key] - 1 for side in ("liger", "tigon")} for by in cases]
        for key, _ in PANELS
    }
    parts = []
    for number, by in enumerate(cases):
        y = 66 + number * LINE
        parts.append(text(LABELS - 12, y + BAR + 4, by["hf"]["model"], ink["ink"], anchor="end"))
    for panel, (key, title) in enumerate(PANELS):
        x = LABELS + panel * PANEL
        scale = (PANEL - 84) / max(abs(share) for shown in shares[key] for share in shown.values())
        parts.append(text(x, 48, title, ink["ink"], weight=600))
        for number, shown in enumerate(shares[key]):
            for place, (side, share) in enumerate(shown.items()):
                y = 66 + number * LINE + place * (BAR + 2)
                length = abs(share) * scale
                label = f"{100 * share:+.1f} %".replace("-", "−")
                parts.append(f'<rect x="{x}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" fill="{ink[side]}"/>')
                parts.append(text(x + length + 6, y + 12, label, ink["ink"], size=13))
    for place, side in enumerate(("liger", "tigon")):
        x = LABELS + place * 80
        parts.append(f'<rect x="{x}" y="8" width="13" height="13" rx="2" fill="{ink[side]}"/>')
        parts.append(text(x + 19, 19, TITLES[side], ink["faint"]))
    parts.append(text(width, 19, "4 × H200, FSDP2, bf16", ink["faint"], anchor="end"))
    body = "\n".join(parts)
    family = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{ALT}" font-family="{family}" font-size="14">\n{body}\n</svg>\n'
    )


ALT = "Tokens/s and peak memory of Liger and Tigon against Hugging Face, five models on four H200"


def text(x: float, y: float, words: str, fill: str, anchor: str = "start", weight: int = 400, size: int = 14) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" text-anchor="{anchor}" font-weight="{weight}" '
        f'font-size="{size}">{words}</text>'
    )


def pictures() -> dict[Path, str]:
    return {CHARTS / f"headline-{theme}.svg": chart(theme) for theme in INKS}


TABLES: dict[str, Callable[[], str]] = {
    "four-gpus": four_gpus,
    "one-gpu": one_gpu,
    "losses": losses,
    "experts": experts,
    "adapters": adapters,
    "search": search,
}


def filled(text: str) -> str:
    """The README with its tables as the result files have them."""
    return MARK.sub(lambda mark: f"{mark[1]}{TABLES[mark[2]]()}{mark[3]}", text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    old = README.read_text()
    new = filled(old)
    missing = [name for name in TABLES if f"<!-- table: {name} -->" not in old]
    if missing:
        print(f"readme.py: README.md has no table {', '.join(missing)}.", file=sys.stderr)
    drawn = {path: svg for path, svg in pictures().items() if not path.exists() or path.read_text() != svg}
    if new == old and not drawn:
        return 1 if missing else 0
    if options.write:
        README.write_text(new)
        for path, svg in drawn.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(svg)
        return 0
    print(
        "readme.py: tables of README.md or its chart differ from the result files; --write renews them.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
