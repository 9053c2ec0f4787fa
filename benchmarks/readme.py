"""The README's tables and charts, made from the result files.

    python benchmarks/readme.py            say which of them are not what the files say
    python benchmarks/readme.py --write    write them into the README, and the charts into docs/images

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, NAME one of TABLES. `tests/test_readme.py` holds them.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from studies import adapters as adapter_study

from tigon.bench import report
from tigon.bench.columns import format_share
from tigon.bench.matrix import By, bold, cases_of, leaders, scatter_of, to_matrix
from tigon.bench.training import WARMUP_STEPS

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
TITLES = {
    "tigon": "Tigon", "liger": "Liger", "cce": "CCE", "quack": "QuACK", "trl": "TRL", "compile": "compiled",
    "eager": "eager",
}  # fmt: skip
# Remarks on peers' figures, by (operator, implementation).
REMARKS = {
    ("grpo", "liger"): "By its default, `chunk_size=1`, Liger takes one sequence at a time, and 4,096 classes of it.",
}


def four_gpus() -> str:
    name = "h200-4gpus.json"
    content = report.load(RESULTS / name)
    return f"{to_matrix(content)}\n{describe_steps(content)} {describe_masks(content)} {source(name, content)}\n"


SAME_ATTENTION = "h200-same-attention.json"


def one_gpu() -> str:
    """All sides with one attention kernel, and the other cases of the models' record; no means over both."""
    name = "h200-models.json"
    content, record = report.load(RESULTS / SAME_ATTENTION), report.load(RESULTS / name)
    cases = {report.case_of(row) for row in content["rows"]}
    both = [*content["rows"], *(row for row in record["rows"] if report.case_of(row) not in cases)]
    content["rows"] = [row for row in both if row["side"] in ("hf", "compile-layers", "liger", "tigon")]
    lines = [line for line in to_matrix(content).splitlines() if not line.startswith("| mean of ")]
    last = f"Last three rows: [another record](benchmarks/results/{name}), {dates(record)}."
    sources = f"{source(SAME_ATTENTION, report.load(RESULTS / SAME_ATTENTION))} {last}"
    return "\n".join(lines) + f"\n\n{describe_steps(content)} {sources}\n"


def describe_steps(content: dict[str, Any]) -> str:
    rows = [row for row in content["rows"] if row["steps_ms"]]
    counts = sorted({len(row["steps_ms"]) for row in rows})
    count = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    return (
        f"The sides of a row in one run, medians of {count} steps after {WARMUP_STEPS} of warm-up, quartile deviation "
        f"{100 * max(map(scatter_of, rows)):.1f} % at most."
    )


# The head of a model, width × classes, and the rate at which an H200 computes its products.
HEADS = {
    "llama-3-8b": (4096, 128256), "llama-3.2-1b": (2048, 128256), "qwen2-7b": (3584, 152064),
    "qwen3-1.7b": (2048, 151936), "gemma-7b": (3072, 256000), "gemma-2-2b": (2304, 256000), "mistral-7b": (4096, 32768),
    "phi-3-mini": (3072, 32064),
}  # fmt: skip
PRODUCTS_TFLOPS = 650


def describe_masks(content: dict[str, Any]) -> str:
    """What share of Tigon's steps the head's products of masked tokens would take, at PRODUCTS_TFLOPS."""
    shares = []
    for row in content["rows"]:
        if row["side"] == "tigon" and row["masked"]:
            flops = 6 * row["masked"] * row["batch"] * row["seq"] / row["gpus"] * math.prod(HEADS[row["model"]])
            shares.append(flops / PRODUCTS_TFLOPS / 1e7 / row["step_ms"])
    masked = {format_share(row["masked"]) for row in content["rows"]}
    return (
        f"{' or '.join(sorted(masked))} of the labels is masked. Only Tigon skips masked tokens in the head, "
        f"which saves about {', '.join(f'{share:.1f}' for share in shares)} % of its steps, in the order of the rows."
    )


def losses() -> str:
    """The losses in the file in which the peers were measured in one run; CCE's figures are those of another run."""
    name = "h200-losses.json"
    content, other = report.load(RESULTS / name), report.load(RESULTS / "h200-matmul.json")
    ours = {report.case_of(row): row["total_ms"] for row in other["rows"] if row["implementation"] == "tigon"}
    content["rows"] += [
        {**row, "beside": {"tigon": ours[report.case_of(row)]}}
        for row in other["rows"]
        if row["implementation"] == "cce"
    ]
    columns = ("tigon", "liger", "cce", "quack", "trl", "compile", "eager")
    return operators(name, content, LOSSES, "loss", columns, digits=1)


def adapters() -> str:
    """The section with the table of adapters, of the cases that Unsloth ran too; nothing before they are measured."""
    name = "h100-adapters.json"
    if not (RESULTS / name).exists():
        return ""
    content = report.load(RESULTS / name)
    table = adapter_study.to_table(select_unsloth_cases(content))
    return f"{ADAPTERS}\n{table}\n{source(name, content, ADAPTER_PACKAGES)}\n"


def select_unsloth_cases(content: dict[str, Any]) -> dict[str, Any]:
    """The speed and memory of the cases that Unsloth ran; without the gradients' distances from fp32."""
    both = [by for by in cases_of(content["rows"], "side") if by.get("unsloth", {}).get("status") == "ok"]
    rows = [row for by in both for row in by.values() if row["measure"] != "gradients"]
    return {**content, "rows": rows}


ADAPTERS = (
    "### Adapters (LoRA, QLoRA)\n\n"
    "Steps on one H100 with 80 GB: adapters in fp32 on all seven projections, bf16 autocast, AdamW, random weights. "
    'Unsloth checkpoints in host memory, its default. Tigon runs `recompute="cheap"` or `"mlp"`, not its default. '
    "[All cases and gradients](docs/bench.md#adapters).\n"
)


def operators(
    name: str,
    content: dict[str, Any],
    lines: dict[str, tuple[str, tuple[int, ...]]],
    what: str,
    columns: Sequence[str],
    digits: int,
) -> str:
    """Milliseconds and GiB of each case in bf16; columns that nobody measured are left out."""
    cases = {case(by): by for by in cases_of(content["rows"], "implementation")}
    shown = {title: cases[op, shape, "bfloat16"] for title, (op, shape) in lines.items()}
    present = [column for column in columns if any(column in by for by in shown.values())]
    header = [TITLES[column] for column in present]
    notes: list[str] = []
    table = [[f"{what}, forward + backward", *header], [":--", *("--:" for _ in present)]]
    for title, by in shown.items():
        fastest, smallest = leaders(by)
        table.append([title, *(cell(by.get(c), c == fastest, c == smallest, digits, notes) for c in present)])
    text = "\n".join("| " + " | ".join(line) + " |" for line in table)
    marked = " ".join(f"{RAISED[number]} {note}" for number, note in enumerate(notes))
    return f"{text}\n\n" + " ".join(filter(None, [marked, source(name, content)])) + "\n"


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
    return "·".join(RAISED[notes.index(remark)] for remark in remarks)


def source(name: str, content: dict[str, Any], packages: dict[str, str] | None = None) -> str:
    """Where the figures come from, in a sentence. packages: those that it names, with their titles."""
    env = content["environment"]
    gpus = content.get("gpus") or max((row.get("gpus", 1) for row in content["rows"]), default=1)
    versions = ", ".join(
        f"{title} {env['packages'][key]}" for key, title in (packages or PACKAGES).items() if env["packages"].get(key)
    )
    device = env["device"].removeprefix("NVIDIA ")
    return f"[{gpus} × {device}](benchmarks/results/{name}), {versions}; {dates(content)}."


def dates(content: dict[str, Any]) -> str:
    """The days of the rows, or of the runs of the file, and how many rows have none of their own."""
    known = [run for row in content["rows"] if (run := report.find_origin(content, row))]
    days = sorted({day[:10] for day, _ in known} or {run["date"][:10] for run in runs(content)})
    unknown = len(content["rows"]) - len(known)
    note = f", {unknown} of {len(content['rows'])} rows without a recorded command" if unknown else ""
    return (days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}") + note


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


# ----------------------------------------------------------------------------------------------------------- the charts

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
    return draw_picture(width, height, ALT, parts)


def draw_picture(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    family = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{label}" font-family="{family}" font-size="14">\n{body}\n</svg>\n'
    )


ALT = "Tokens/s and peak memory of Liger and Tigon against Hugging Face, five models on four H200"


def text(x: float, y: float, words: str, fill: str, anchor: str = "start", weight: int = 400, size: int = 14) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" text-anchor="{anchor}" font-weight="{weight}" '
        f'font-size="{size}">{words}</text>'
    )


LEARNED = {"llama": "Llama", "qwen3": "Qwen3", "gemma2": "Gemma 2", "qwen3_moe": "Qwen3-MoE"}
FRAME, TALL, STRIDE = 180, 120, 3  # of a family's curves in width and height; every third step is drawn


def draw_curves(theme: str) -> str:
    """The loss over 300 steps on text in bf16 of four families, plain runs below fused ones, as SVG."""
    ink = INKS[theme]
    rows = report.load(RESULTS / "h200-converge.json")["rows"]
    chosen = {row["model"]: row for row in rows if (row["dtype"], row["batches"]) == ("bf16", "rows")}
    losses = {family: read_losses(chosen[family]) for family in LEARNED}
    values = [value for found in losses.values() for _, values in found for value in values]
    low, high = math.floor(min(values)), math.ceil(max(values))
    parts = []

    def height(value: float) -> float:
        return 58 + TALL * (high - value) / (high - low)

    for number, (family, title) in enumerate(LEARNED.items()):
        x, steps = 30 + number * (FRAME + 15), chosen[family]["steps"]
        parts.append(text(x, 48, title, ink["ink"], weight=600))
        parts.append(f'<path d="M{x} 58v{TALL}h{FRAME}" fill="none" stroke="{ink["faint"]}"/>')
        parts += [text(x - 6, height(value) + 4, f"{value}", ink["faint"], "end", size=11) for value in (low, high)]
        parts.append(text(x + FRAME, 58 + TALL + 14, f"{steps} steps", ink["faint"], "end", size=11))
        for side, values in losses[family]:
            shown = list(enumerate(values))[::STRIDE]
            points = " ".join(f"{x + FRAME * step / steps:.0f},{height(value):.1f}" for step, value in shown)
            colour, width, opacity = ("liger", 4, 0.5) if side == "hf" else ("tigon", 1.2, 1)
            stroke = f'stroke="{ink[colour]}" stroke-width="{width}" stroke-opacity="{opacity}"'
            parts.append(f'<polyline points="{points}" fill="none" {stroke}/>')
    for place, (side, name) in enumerate((("liger", "plain runs"), ("tigon", "fused runs"))):
        parts.append(f'<rect x="{30 + 110 * place}" y="8" width="13" height="13" rx="2" fill="{ink[side]}"/>')
        parts.append(text(49 + 110 * place, 19, name, ink["faint"]))
    return draw_picture(30 + len(LEARNED) * (FRAME + 15), 58 + TALL + 24, CURVES_ALT, parts)


def read_losses(row: dict[str, Any]) -> list[tuple[str, list[float]]]:
    """The side and the losses of each plain and fused run, the fused ones last; a record has distances from a mean."""
    middle = [float(word) for word in row["loss"].split()]
    found = [
        (run["side"], [a + float(b) for a, b in zip(middle, run["loss"].split(), strict=True)])
        for run in row["runs"]
        if run["side"] in ("hf", "tigon")
    ]
    return sorted(found, key=lambda pair: pair[0])


CURVES_ALT = "Training loss of four model families on text: fused runs lie on plain runs"


def pictures() -> dict[Path, str]:
    drawn = {"headline": chart, "same-training": draw_curves}
    return {CHARTS / f"{name}-{theme}.svg": draw(theme) for name, draw in drawn.items() for theme in INKS}


TABLES: dict[str, Callable[[], str]] = {
    "four-gpus": four_gpus,
    "one-gpu": one_gpu,
    "losses": losses,
    "adapters": adapters,
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
        "readme.py: tables or charts of README.md differ from the result files; --write renews them.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
