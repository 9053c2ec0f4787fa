"""Tables and charts of README.md and docs, rendered from benchmarks/results.

    python benchmarks/tables.py            write README's tables and the charts of docs/images

README holds its tables between `<!-- table: NAME -->` and `<!-- end -->`. Pages of docs hold the first line alone, and
MkDocs, which loads this file as a hook, puts the table in its place:

    <!-- table: four-gpus -->       a table of README: a key of README_TABLES
    <!-- matrix: *-memory.json -->  one line per case and one column per implementation, for each file that matches
    <!-- families -->               what `fuse` does to every class of transformers
    <!-- family: gpt-oss-20b -->    a model's memory by method and size, its fused parts, and its measured steps
    <!-- activations -->            the activations of gated units
    <!-- operators: Norms -->       the documentation of the operators with an example in this group

Bold: best in its row by more than 2 % and by more than the scatter of the two measurements.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from families import memory
from families import page as families

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FILES = "https://github.com/tigon-ml/tigon/blob/main/benchmarks/results"
NOISE = 0.02
LONG = 40  # lines from which a page folds a table
ORDER = ("hf", "eager", "torch", "compile", "compile-layers", "compile-causal", "liger", "quack", "cce", "trl", "tigon")
CASE = ("op", "shape", "dtype", "options", "model", "batch", "seq", "layers", "checkpointing", "masked", "accumulation",
        "rank", "quantized", "measure", "gpus")  # fmt: skip
TITLES = {"tigon": "Tigon", "liger": "Liger", "cce": "CCE", "quack": "QuACK", "trl": "TRL", "compile": "compiled",
          "eager": "eager"}  # fmt: skip
VERSIONS = ("torch", "triton", "transformers", "liger-kernel", "quack-kernels")
Row = dict[str, Any]
By = dict[str, Row]  # the rows of one case by implementation or side


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())  # type: ignore[no-any-return]


def group_cases(rows: Sequence[Row]) -> list[By]:
    cases: dict[str, By] = {}
    for row in rows:
        cases.setdefault(repr([row.get(key) for key in CASE]), {})[row.get("side") or row["implementation"]] = row
    return list(cases.values())


def measure_scatter(row: Row) -> float:
    """Half the range of the rounds, or half the distance of the steps' quartiles, as a share of the median."""
    if row.get("total_range_ms"):
        return float((row["total_range_ms"][1] - row["total_range_ms"][0]) / 2 / row["total_ms"])
    if len(row.get("steps_ms") or ()) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(row["steps_ms"])
    return float((high - low) / 2 / middle)


def find_leaders(values: Mapping[str, float | None], scatter: Mapping[str, float] | None = None) -> set[str]:
    """The sides below every other library beyond noise. A library's sides within noise of each other lead together."""
    known = {side: value for side, value in values.items() if value is not None}

    def beats(side: str, other: str) -> bool:
        noise = (scatter or {}).get(side, 0.0) + (scatter or {}).get(other, 0.0)
        return known[other] > known[side] * (1 + max(NOISE, noise))

    def library(side: str) -> str:
        return side.partition("-")[0] if side.startswith("tigon") else side

    found = set()
    for side in known:
        others = [other for other in known if library(other) != library(side)]
        siblings = [other for other in known if library(other) == library(side)]
        if others and all(beats(side, other) for other in others) and not any(beats(other, side) for other in siblings):
            found.add(side)
    return found


def find_best(by: By) -> tuple[set[str], set[str]]:
    """The sides that lead in time and in memory, among those with right results."""
    right = {side: row for side, row in by.items() if row["status"] == "ok" and side != "floor"}
    scatter = {side: measure_scatter(row) for side, row in right.items()}
    times = {side: 1 / row["tokens_per_s"] if row.get("tokens_per_s") else row.get("total_ms")
             for side, row in right.items()}  # fmt: skip
    memory = {side: row.get("peak_gib", row.get("peak_mib")) for side, row in right.items()}
    return find_leaders(times, scatter), find_leaders(memory)


# ------------------------------------------------------------------------------------------------------------ formats


def format_number(value: float | None) -> str:
    """Three significant digits, without an exponent."""
    if value is None:
        return "–"
    return f"{value:,.{max(0, 2 - int(f'{value:e}'.split('e')[1]))}f}" if value else "0"


def format_change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %".replace("-", "−")


def bold(text: str, is_best: bool) -> str:
    return f"**{text}**" if is_best else text


def to_markdown(header: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    rule = [":--" if n < left else "--:" for n in range(len(header))]
    return "".join("| " + " | ".join(line) + " |\n" for line in (header, rule, *lines))


def describe_source(name: str) -> str:
    """The machine, the versions and the day of a record, with a link to its file, which has the commands."""
    content = load(name)
    env = content["environment"]
    gpus = content.get("gpus") or max((row.get("gpus", 1) for row in content["rows"]), default=1)
    versions = [f"{package} {env['packages'][package]}" for package in VERSIONS if env["packages"].get(package)]
    return f"{gpus} × {env['device']}, {', '.join(versions)}, {content['date'][:10]}: [{name}]({FILES}/{name})."


# ----------------------------------------------------------------------------------------------------------- matrices


def make_matrix(rows: Sequence[Row]) -> str:
    """One line per case, one column per implementation or side; models also have a line of means."""
    cases = group_cases(rows)
    present = dict.fromkeys(side for by in cases for side in by)
    sides = [*(side for side in ORDER if side in present), *(side for side in present if side not in ORDER)]
    if "op" in rows[0]:
        return _make_operator_matrix(cases, [side for side in sides if side != "floor"])
    masked = len({row.get("masked") for row in rows}) > 1
    lines = []
    for by in cases:
        first = next(iter(by.values()))
        micro = f"{first['accumulation']} × " if first.get("accumulation", 1) > 1 else ""
        size = f"{micro}{first['batch']}×{first['seq']}" + ", checkpointing" * first["checkpointing"]
        share = [f"{100 * first['masked']:.3g} %"] if masked else []
        fast, small = find_best(by)
        cells = [make_cell(by.get(side), by.get("hf"), side in fast, side in small) for side in sides]
        lines.append([first["model"], size, *share, *cells])
    plain = [by for by in cases if by.get("hf", {}).get("status") == "ok"]
    if not masked and len({by["hf"]["model"] for by in plain}) == len(cases) > 2:
        lines.append([f"mean of {len(plain)}", "", *(_make_mean(plain, side) for side in sides)])
    return to_markdown(["model", "batch×seq", *(["masked"] if masked else []), *sides], lines, left=2)


def _make_operator_matrix(cases: list[By], sides: list[str]) -> str:
    lines = []
    for by in cases:
        first = next(iter(by.values()))
        fast, _ = find_best(by)
        floor = next((row["floor_ms"] for row in by.values() if row.get("floor_ms")), None)
        cells = []
        for side in sides:
            row = by.get(side)
            if row is None or row["total_ms"] is None:
                cells.append("–" if row is None else row["reason"] if len(row["reason"]) <= 30 else row["status"])
                continue
            text = format_number(row["total_ms"]) + (f" ({row['times_floor']:.2f}×)" if row["times_floor"] else "")
            cells.append(bold(text, side in fast) + ("" if row["status"] == "ok" else f", {row['status']}"))
        lines.append([first["op"], "×".join(map(str, first["shape"])), first["dtype"], format_number(floor), *cells])
    return to_markdown(["op", "shape", "dtype", "floor ms", *sides], lines, left=3)


def make_cell(row: Row | None, plain: Row | None, is_fastest: bool, is_smallest: bool) -> str:
    """Tokens/s and peak GiB, with the changes against `plain`."""
    if row is None:
        return "–"
    if row["status"] != "ok":
        return row["reason"] if len(row["reason"]) <= 30 else "failed"
    if plain is None or plain["status"] != "ok" or row["side"] in ("hf", "floor"):
        plain = None
    cells = []
    for key, style, is_best in (("tokens_per_s", "{:,.0f}", is_fastest), ("peak_gib", "{:.1f} GiB", is_smallest)):
        if row[key] is not None:
            change = f" ({format_change(row[key] / plain[key])})" if plain else ""
            cells.append(bold(style.format(row[key]) + change, is_best))
    return ", ".join(cells)


def _make_mean(cases: list[By], side: str) -> str:
    if side in ("hf", "floor") or not all(by.get(side, {}).get("status") == "ok" for by in cases):
        return ""
    speed, memory = ([by[side][key] / by["hf"][key] for by in cases] for key in ("tokens_per_s", "peak_gib"))
    span = f"{format_change(min(speed)).removesuffix(' %')} to {format_change(max(speed))}"
    return f"{format_change(statistics.fmean(speed))} ({span}), memory {format_change(statistics.fmean(memory))}"


# ------------------------------------------------------------------------------------------------------------- README


def make_one_gpu_table() -> str:
    """The record with one attention kernel for all sides, then the other cases of the models' record."""
    rows = load("h200-same-attention.json")["rows"]
    models = {row["model"] for row in rows}
    more = [row for row in load("h200-models.json")["rows"] if row["model"] not in models or row["checkpointing"]]
    return make_matrix([row for row in rows + more if row["side"] in ("hf", "compile-layers", "liger", "tigon")])


LOSSES = {
    "`linear_cross_entropy`, 32,768 tokens": ("linear_cross_entropy", [32768, 4096, 128256]),
    "the same, half of the labels ignored": ("linear_cross_entropy-ignored50", [32768, 4096, 128256]),
    "`losses.dpo` with a reference head": ("dpo", [16, 1024, 4096, 128256]),
    "`losses.orpo`": ("orpo", [16, 1024, 4096, 128256]),
    "`losses.grpo`": ("grpo", [16, 1024, 4096, 128256]),
    "`losses.distill`, JSD, 4,096 tokens": ("distill", [4096, 4096, 128256]),
}  # fmt: skip


def make_loss_table() -> str:
    """Milliseconds and GiB. ¹: wrong by the bound of the benchmarks; ²: measured in another run than Tigon's."""
    rows = load("h200-losses.json")["rows"]
    other = [{**row, "beside": True} for row in load("h200-matmul.json")["rows"] if row["implementation"] == "cce"]
    cases = {(row["op"], tuple(row["shape"])): by for by in group_cases(rows + other)
             if (row := next(iter(by.values())))["dtype"] == "bfloat16"}  # fmt: skip
    lines = []
    for title, (op, shape) in LOSSES.items():
        by, cells = cases[op, tuple(shape)], []
        fast, small = find_best(by)
        for side in TITLES:
            row = by.get(side)
            marks = ["¹"] * (row["status"] == "wrong") + ["²"] * ("beside" in row) if row else []
            cells.append("–" if row is None else bold(f"{row['total_ms']:.1f} ms", side in fast) + ", "
                         + bold(f"{row['peak_mib'] / 1024:.1f} GiB", side in small) + "·".join(marks))  # fmt: skip
        lines.append([title, *cells])
    return to_markdown(["loss, forward + backward", *TITLES.values()], lines)


ADAPTER_SIDES = {
    "hf": "HF + PEFT", "liger": "Liger", "unsloth": "Unsloth", "tigon": "Tigon (`cheap`)",
    "tigon-offload": "Tigon (`cheap`, offload)", "tigon-mlp-offload": "Tigon (`mlp`, offload)",
}  # fmt: skip


FP8_ADAPTER_SIDES = {
    "tigon": "bf16 base", "tigon-fp8": 'FP8 base, `"keep"`', "tigon-fp8-release": 'FP8 base, `"release"`',
}  # fmt: skip


MODELS_2026 = ("h200-models-2026.json", "h200-triton-3.7.1-models-2026.json")
MODELS_2026_SIDES = {"hf": "HF", "unsloth": "Unsloth", "tigon": "Tigon"}


def make_adapter_table(
    files: Sequence[str] = ("h100-adapters.json",), titles: dict[str, str] = ADAPTER_SIDES, first: str = "adapters"
) -> str:
    """Tokens/s and peak memory of one step, of the cases that were measured by several sides."""
    lines = []
    rows = [row for file in files for row in load(file)["rows"]]
    for by in group_cases([row for row in rows if row["measure"] == "speed"]):
        if len(by) == 1:
            continue
        row, (fast, small) = next(iter(by.values())), find_best(by)
        method = "QLoRA " + row["quantized"] if row["quantized"] else "LoRA" if row["rank"] else "all weights"
        title = f"{row['model']} {row['batch']}×{row['seq']} {method}" + ", checkpointing" * row["checkpointing"]
        title += f", rank {row['rank']}" * (row["rank"] not in (0, 16))
        title += f", {row['layers']} layers" if row.get("layers") else ""
        lines.append([title, *(make_cell(by.get(side), None, side in fast, side in small) for side in titles)])
    return to_markdown([first, *titles.values()], lines)


README_TABLES: dict[str, Callable[[], str]] = {
    "four-gpus": lambda: make_matrix(load("h200-4gpus.json")["rows"]),
    "one-gpu": make_one_gpu_table,
    "losses": make_loss_table,
    "adapters": make_adapter_table,
    "fp8-adapters": lambda: make_adapter_table(("h200-fp8-adapters.json",), FP8_ADAPTER_SIDES),
    "models-2026": lambda: make_adapter_table(MODELS_2026, MODELS_2026_SIDES, "step"),
}


# ------------------------------------------------------------------------------------------------------------- charts


def draw_headline(axes: Any, colours: dict[str, str]) -> None:
    """Speed and memory of the models on four GPUs, Liger and Tigon against Hugging Face."""
    cases = group_cases(load("h200-4gpus.json")["rows"])
    for axis, key, title in zip(axes, ("tokens_per_s", "peak_gib"), ("Tokens/s", "Peak memory"), strict=True):
        for place, side in enumerate(("liger", "tigon")):
            ratios = [by[side][key] / by["hf"][key] for by in cases]
            lengths = [abs(ratio - 1) for ratio in ratios]
            bars = axis.barh([n + 0.38 * place for n in range(len(cases))], lengths, 0.36, color=colours[side])
            axis.bar_label(bars, list(map(format_change, ratios)), padding=3)
        axis.set(title=f"{title}, against Hugging Face", xticks=[])
        axis.margins(x=0.25)
        axis.invert_yaxis()
        axis.set_yticks([n + 0.19 for n in range(len(cases))], [by["hf"]["model"] for by in cases])
    axes[1].set(yticks=[])
    axes[0].legend(axes[0].containers, ["Liger", "Tigon"], frameon=False, loc="center right")


def draw_same_training(axes: Any, colours: dict[str, str]) -> None:
    """The loss over 300 steps on text in bf16 of four families, plain runs below fused ones."""
    rows = {row["model"]: row for row in load("h200-converge.json")["rows"]
            if (row["dtype"], row["batches"]) == ("bf16", "rows")}  # fmt: skip
    for axis, family in zip(axes, ("llama", "qwen3", "gemma2", "qwen3_moe"), strict=True):
        mean = [float(word) for word in rows[family]["loss"].split()]
        for run in sorted(rows[family]["runs"], key=lambda run: run["side"]):
            if run["side"] in ("hf", "tigon"):
                losses = [a + float(b) for a, b in zip(mean, run["loss"].split(), strict=True)]
                colour, width = (colours["liger"], 4) if run["side"] == "hf" else (colours["tigon"], 1)
                (line,) = axis.plot(losses[::5], color=colour, linewidth=width, alpha=0.5 if run["side"] == "hf" else 1)
                line.set_label({"hf": "plain runs", "tigon": "fused runs"}[run["side"]])
        axis.set(title=family, xticks=[], xlabel="300 steps")
    handles = dict(zip(*axes[0].get_legend_handles_labels()[::-1], strict=True))
    axes[0].legend(handles.values(), handles, frameon=False)


THEMES = {"light": {"ink": "#1f2328", "liger": "#3b6ea5", "tigon": "#d9480f"},
          "dark": {"ink": "#f0f6fc", "liger": "#6f9fd0", "tigon": "#ff8a50"}}  # fmt: skip


def draw_charts() -> None:
    """One SVG for each of GitHub's themes, which an image cannot follow."""
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "tigon"}
    plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
    coloured = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    for (name, draw, panels), (theme, colours) in itertools.product(
        (("headline", draw_headline, 2), ("same-training", draw_same_training, 4)), THEMES.items()
    ):
        with plt.rc_context(dict.fromkeys(coloured, colours["ink"])):
            figure, axes = plt.subplots(1, panels, figsize=(10, 3), layout="constrained")
            draw(axes, colours)
            path = ROOT / "docs" / "images" / f"{name}-{theme}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None})
            plt.close(figure)


# ------------------------------------------------------------------------------------------------------------- MkDocs


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables into a page, and leave out how the tests run its code."""
    markdown = re.sub(r"^<!-- (?:not run|needs|tested with): .+ -->\n", "", markdown, flags=re.MULTILINE)
    makers: dict[str, Callable[[str], str]] = {
        "table": lambda name: README_TABLES[name](),
        "matrix": make_matrices,
        "families": lambda _: families.page(),
        "family": memory.page,
        "activations": lambda _: make_activations(),
        "operators": list_operators,
    }
    pattern = re.compile(rf"^<!-- ({'|'.join(makers)})(?:: (.+?))? -->$", re.MULTILINE)
    return pattern.sub(lambda mark: makers[mark[1]](mark[2] or ""), markdown)


def make_activations() -> str:
    from tigon.ops.acts import ACTS

    header = ["`act=`", "computes", "in transformers' configurations"]
    lines = [[f"`{row.name}`", row.formula, ", ".join(f"`{alias}`" for alias in row.aliases)] for row in ACTS.values()]
    return to_markdown(header, lines, left=3)


def list_operators(group: str) -> str:
    from tigon.cli.checks import load_examples

    return "\n\n".join(f"::: tigon.{name}" for name, example in load_examples().items() if example.group == group)


def make_matrices(pattern: str) -> str:
    parts = []
    for path in sorted(RESULTS.glob(pattern), key=lambda path: (not path.name.startswith("h200"), path.name)):
        if load(path.name)["kind"] in ("ops", "model", "sequence"):
            table = make_matrix(load(path.name)["rows"])
            if table.count("\n") > LONG:
                table = f'<details markdown="1"><summary>{path.stem}</summary>\n\n{table}\n</details>\n'
            parts += [describe_source(path.name), "", table]
    return "\n".join(parts)


def main() -> None:
    readme = ROOT / "README.md"
    pattern = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
    readme.write_text(pattern.sub(lambda mark: mark[1] + README_TABLES[mark[2]]() + mark[3], readme.read_text()))
    draw_charts()


if __name__ == "__main__":
    main()
