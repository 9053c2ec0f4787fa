"""MkDocs hook: the code and the result files become pages, tables and charts, so that no figure is typed by hand.

Every operator of the benchmarks gets a page, from one template: formula and source from the docstring of its module,
the function by mkdocstrings, what was measured from benchmarks/results. In a page, on a line of its own:

    <!-- results: h200-ops.json -->     table and chart of the result files that match, whatever GPU they are from
    <!-- matrix: *-memory.json -->      the same, with one line per case and one column per implementation
    <!-- goals: *-models.json -->       what Tigon reached in them beside what was aimed at (goals.json)
    <!-- first: Results -->            the section of this title comes before the others
    <!-- if: *-models.json -->          what follows stands in the page only if a file matches, down to
    <!-- end -->
    <!-- operators -->                  the operators by kind, with what they replace
    <!-- counted -->                    the bytes that the floors count
    <!-- modules -->                    the classes of tigon.nn
    <!-- reference: tigon.losses -->    the public names of a package that stand on no other page
    <!-- hardware -->                   the machines and versions of all result files
    <!-- peaks: MODEL -->               the measured peaks of a model, plain and fused
    <!-- activations -->                the activations that `act=` takes
    <!-- families -->                   what fuse does to every class of transformers
    <!-- card: h100 -->                 the quoted cases of one GPU in short, and in which of them Tigon is not first
    <!-- engines: *-composition.json -->  what fused models miss under each way to spread a step over processes
    <!-- sweep: *-sweep.json -->       drawn cases: how often Tigon is first, and where it is not
    <!-- adapters -->              a step with adapters, of several libraries
    <!-- sft -->                        a fine-tuning of adapters through the command line, beside PEFT's
    <!-- sam -->, <!-- samcost -->      the study of sharpness-aware minimization, and what its steps cost
    <!-- study: links -->               a part of the study of retrieval: filters, cold, every, links, edges, towers,
                                        source or towers-source
    <!-- clicks: quality -->            a part of the study of clicks: quality, differences, verdict, calibration,
                                        int8, speed or source
    <!-- sequences: quality -->         a part of the study of next items: quality, verdict, speed, sittings or source
    <!-- scaling -->                    loss against compute of LiGR, widths and shares of the users
    <!-- searched: refit -->           likewise of the study of searches: objective, trials, refit, hand, fitted, source
    <!-- crosses: quality -->          the study of clicks with and without crosses: quality or source
    <!-- prompts: films -->             likewise of the study of prompt rankers: bars, films, garments, speed or source
    <!-- graphs: accuracy -->           likewise of embeddings of graphs: accuracy, costs, rate or source
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import cards
import guides
from families import page as families
from operator_examples import EXAMPLES, IMPORTS
from studies import (
    adapters,
    convergence,
    crosses,
    graphs,
    interactions,
    prompts,
    rank_search,
    retrieve,
    scaling,
    sequences,
    sft,
    sharpness,
)
from studies import compression as compression  # its columns
from studies.clicks import page as clicks

import tigon
from tigon.bench import plots, report, verdicts
from tigon.bench.cases import KINDS, OPS
from tigon.bench.matrix import MATRICES, bold, leaders, to_matrix
from tigon.bench.page import ORDER
from tigon.lazy import homes_of
from tigon.ops.acts import ACTS

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
GOALS = Path(__file__).parent / "goals.json"
MARK = re.compile(r"^<!-- (\w+)(?:: (\S+))? -->$", re.MULTILINE)
# How tests/pages runs the block below.
TESTED = re.compile(r"^<!-- (?:not run|needs|tested with): .+ -->\n", re.MULTILINE)
PART = re.compile(r"^<!-- if: (\S+) -->\n(.*?)^<!-- end -->\n?", re.MULTILINE | re.DOTALL)
# An image that an inline chart replaces, since a chart takes its colours from the page.
CHART = re.compile(r"!\[(?P<title>[^\]]*)\]\((?:\.\./)*charts/(?P<name>[^)]+)\.png\)")
# A chart of more cases is unreadable; the operators' own pages have charts.
CHART_CASES = 24

# A search for words of a guide finds the guide first.
BEHIND_GUIDES = "---\nsearch:\n  boost: 0.2\n---\n\n"
PAGE = """# {name}

{formula}

```python
{example}```

::: {path}
    options:
      heading_level: 2

## Measured

{measured}
"""


# ------------------------------------------------------------------------------------------------------------ MkDocs


def on_config(config: Any) -> Any:
    """Put the pages of the operators behind the overview, by kind."""
    latest.cache_clear()  # mkdocs serve builds again and again
    charts.cache_clear()
    chart_of.cache_clear()
    memory_of.cache_clear()
    for entry in config.nav or []:
        if "Operators" in entry:
            entry["Operators"] += [
                {kind: [{name: f"ops/{name}.md"} for name in operators(kind)]} for kind in KINDS if operators(kind)
            ]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add a page for every operator."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "first-steps.md", content=guides.notebook()))
    for kind in KINDS:
        for name in operators(kind):
            files.append(File.generated(config, f"ops/{name}.md", content=BEHIND_GUIDES + page_of(name)))
    return files


@functools.cache
def charts() -> dict[str, Callable[[], str]]:
    """By the name that pages call them by, what draws the charts of operators and result files as SVG."""
    found: dict[str, Callable[[], str]] = {}
    for name in charted():
        if content := chart_of(name):
            found[f"ops/{name}"] = functools.partial(plots.svg, content)
        if content := memory_of(name):
            found[f"memory/{name}"] = functools.partial(plots.svg, content, "memory")
    for path in sorted(RESULTS.glob("*.json")):
        content = report.load(path)
        if has_chart(content):
            found[path.stem] = functools.partial(plots.svg, content)
        if plots.has_profile(content):
            found[f"profile/{path.stem}"] = functools.partial(plots.svg, content, "profile")
        if content["kind"] == "converge":
            for name, drawn in convergence.pictures(path, content).items():
                draw = functools.partial(convergence.plot, content, picture=drawn[0], dtype=drawn[1])
                found[name.removesuffix(".png")] = functools.partial(plots.inline, draw)
        if content["kind"] == "sft":
            found[path.stem] = functools.partial(plots.inline, functools.partial(sft.plot, content))
        if content["kind"] == scaling.KIND:
            found[path.stem] = functools.partial(plots.inline, functools.partial(scaling.plot, content))
        if content["kind"] == "sam":
            found[path.stem] = functools.partial(plots.inline, functools.partial(sharpness.plot, content))
    return found


def drawn(image: re.Match[str]) -> str:
    """A chart inside the page, where it has the theme's colours, and text that you can search."""
    if image["name"] not in charts():
        return image[0]
    svg = re.sub(r"\s*\n\s*", " ", charts()[image["name"]]().strip())
    title = escape(image["title"])
    return f'<figure class="chart" role="img" aria-label="{title}" data-search-exclude>{svg}</figure>'


def put_first(markdown: str) -> str:
    """The page with the section that a marker names right behind its introduction."""
    marker = re.search(r"^<!-- first: (.+) -->\n+", markdown, re.MULTILINE)
    if marker is None:
        return markdown
    introduction, *sections = re.split(r"^(?=## )", markdown.replace(marker[0], "", 1), flags=re.MULTILINE)
    return introduction + "".join(sorted(sections, key=lambda text: not text.startswith(f"## {marker[1]}\n")))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    up = "../" * page.file.src_uri.count("/")
    makers: dict[str, Callable[[str], str]] = {
        "results": lambda pattern: section(pattern, up),
        "matrix": lambda pattern: section(pattern, up, report_as=lambda content: to_matrix(content, ORDER)),
        "goals": goals,
        "engines": engines,
        "sweep": sweeps,
        "card": lambda name: cards.page(RESULTS, name),
        "operators": lambda _: overview(),
        "counted": lambda _: counted(),
        "modules": lambda _: modules(),
        "activations": lambda _: activations(),
        "reference": reference,
        "families": lambda _: families.page(),
        "hardware": lambda _: guides.hardware(RESULTS),
        "peaks": lambda model: guides.peaks(RESULTS, model),
        "adapters": lambda _: adapters.page(RESULTS),
        "converge": lambda _: convergence.page(RESULTS, f"{up}charts"),
        "sft": lambda _: sft.page(RESULTS, f"{up}charts"),
        "scaling": lambda _: scaling.page(RESULTS, f"{up}charts"),
        "sam": lambda _: sharpness.page(RESULTS, f"{up}charts"),
        "samcost": lambda _: sharpness.cost_page(RESULTS),
        "study": lambda what: retrieve.page(RESULTS, what),
        "clicks": lambda what: clicks.page(RESULTS, what),
        "sequences": lambda what: sequences.page(RESULTS, what),
        "searched": lambda what: rank_search.page(RESULTS, what),
        "prompts": lambda what: prompts.page(RESULTS, what),
        "crosses": lambda what: crosses.page(RESULTS, what),
        "interactions": lambda what: interactions.page(RESULTS, what),
        "graphs": lambda what: graphs.page(RESULTS, what),
    }
    markdown = TESTED.sub("", put_first(markdown))
    markdown = PART.sub(lambda part: part[2] if any(RESULTS.glob(part[1])) else "", markdown)
    markdown = MARK.sub(lambda mark: makers[mark[1]](mark[2] or "") if mark[1] in makers else mark[0], markdown)
    return CHART.sub(drawn, markdown)


# ---------------------------------------------------------------------------------------------------------- operators


def operators(kind: str) -> list[str]:
    return list(dict.fromkeys(op.operator for op in KINDS[kind] if home(op.operator) is not None))


def home(name: str) -> str | None:
    """The module of an operator: that of a public name, of one of `tigon.losses`, or one of its own."""
    for package in ("tigon", "tigon.losses"):
        if name in homes_of(package):
            return homes_of(package)[name]
    own = f"tigon.ops.{name}"
    return own if importlib.util.find_spec(own) else None


@functools.cache
def function(name: str) -> Any:
    return getattr(importlib.import_module(str(home(name))), name)


def path_of(name: str) -> str:
    return f"tigon.{name}" if name in tigon.__all__ else f"{home(name)}.{name}"


def page_of(name: str) -> str:
    path = path_of(name)
    formula = inspect.getdoc(importlib.import_module(str(home(name)))) or ""
    example = f"{IMPORTS}\n{EXAMPLES[name]}"
    return PAGE.format(name=name, formula=linked(formula), example=example, path=path, measured=measured(name))


def linked(text: str) -> str:
    """Addresses in a docstring as links."""
    return re.sub(r"https://[^\s)>]*[^\s)>.,;]", r"<\g<0>>", text)


def overview() -> str:
    lines = []
    for kind in KINDS:
        lines += [f"### {kind}", "", "| operator | computes | in place of | × floor |", "| :-- | :-- | :-- | :-- |"]
        for name in operators(kind):
            summary = (inspect.getdoc(function(name)) or "").split("\n")[0]
            row = [f"[`{name}`](ops/{name}.md)", summary.replace("|", "\\|"), code(replaced(name)), times_floor(name)]
            lines.append("| " + " | ".join(row) + " |")
        lines.append("")
    return "\n".join(lines)


def replaced(name: str) -> str:
    """The last line of the code that the docstring says the operator replaces."""
    doc = inspect.getdoc(function(name)) or ""
    found = re.search(r"^Replaces[^\n]*::\n\n((?:    [^\n]*\n?|\n)+)", doc, re.MULTILINE)
    lines = [line.split("  #")[0].strip() for line in found[1].splitlines() if line.strip()] if found else []
    # A call over several lines counts as one line.
    while len(lines) > 1 and lines[-1].count(")") > lines[-1].count("("):
        lines[-2:] = [f"{lines[-2]} {lines[-1]}"]
    return lines[-1] if lines else ""


def code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


def counted() -> str:
    lines = ["| operator | counted, forward | counted, backward |", "| :-- | :-- | :-- |"]
    lines += [f"| `{op.name}` | {op.counted[0]} | {op.counted[1]} |" for op in OPS.values() if home(op.operator)]
    return "\n".join(lines)


def activations() -> str:
    lines = ["| `act=` | computes | in configurations of transformers |", "| :-- | :-- | :-- |"]
    lines += [f"| `{a.name}` | {a.formula} | {', '.join(f'`{name}`' for name in a.aliases)} |" for a in ACTS.values()]
    return "\n".join(lines)


def modules() -> str:
    nn = importlib.import_module("tigon.nn")
    found = {name: member for name, member in vars(nn).items() if inspect.isclass(member) and name[0] != "_"}
    return "\n\n".join(f"::: tigon.nn.{name}" for name, c in found.items() if c.__module__.startswith("tigon.nn."))


def reference(package: str) -> str:
    """Entries for what a package declares public, of what has none elsewhere: operators have pages."""
    module = importlib.import_module(package)
    public = {name: getattr(module, name) for name in module.__all__}
    pages = {name for kind in KINDS for name in operators(kind)} | written()
    wanted = [name for name, value in public.items() if name not in pages and not inspect.ismodule(value)]
    return "\n\n".join(f"::: {package}.{name}" for name in wanted)


@functools.cache
def written() -> set[str]:
    """Names that have an entry in a hand-written page."""
    found = set()
    for page in DOCS.rglob("*.md"):
        text = page.read_text()
        found |= {path.rpartition(".")[2] for path in re.findall(r"^::: ([\w.]+)", text, re.MULTILINE)}
        for members in re.findall(r"^      members: \[([\w, ]+)\]", text, re.MULTILINE):
            found |= set(members.split(", "))
    return found


# ------------------------------------------------------------------------------------------------------------ results


def fold_table(table: str, rows: int = 12) -> str:
    """The first rows of a long table; the others are under a line that opens."""
    lines = table.strip().split("\n")
    header, body = lines[:2], lines[2:]
    if len(body) <= 2 * rows:
        return table
    more = "\n".join(header + body[rows:])
    shown = "\n".join(header + body[:rows])
    return f'{shown}\n\n<details markdown="1"><summary>{len(body) - rows} more rows</summary>\n\n{more}\n\n</details>\n'


def section(pattern: str, up: str = "", report_as: Callable[[dict[str, Any]], str] | None = None) -> str:
    """Table and chart of every result file whose name matches; a sentence when there is none."""
    parts = []
    for path in find_results(pattern):
        content = report.load(path)
        if report_as is not None and content["kind"] not in MATRICES:
            continue  # another kind's file, whose name matches as well
        table = report_as(content) if report_as else report.to_table(content)
        parts.append(f"{report.source(content)}\n\n{fold_table(table)}\n")
        if has_chart(content):
            parts.append(f"![{path.stem}]({up}charts/{path.stem}.png)\n")
        if plots.has_profile(content):
            parts.append(f"![kinds of kernel, {path.stem}]({up}charts/profile/{path.stem}.png)\n")
    return "\n".join(parts) or f"No result file matches `{pattern}`."


def find_results(pattern: str) -> list[Path]:
    """The result files whose names match, those of the GPU that tiles were chosen on first."""
    return sorted(RESULTS.glob(pattern), key=lambda path: (not path.name.startswith("h200"), path.name))


def goals(pattern: str) -> str:
    """Tigon's tokens/s and GiB beside those aimed at, which were set for one device before anything was measured."""
    wanted = {(g["model"], g["batch"], g["seq"], g["gpus"]): g for g in json.loads(GOALS.read_text())}
    lines = ["| model | batch×seq | tokens/s | aimed at | | GiB | aimed at | |", "| :-- | :-- " + "| --: " * 6 + "|"]
    for path in find_results(pattern):
        content = report.load(path)
        for row in content["rows"] if content["kind"] == "model" else ():
            goal = wanted.get((row["model"], row["batch"], row["seq"], row["gpus"]))
            if goal is None or row["side"] != "tigon" or row["status"] != "ok":
                continue
            cells = [row["model"], f"{row['batch']}×{row['seq']}" + (", checkpointing" if row["checkpointing"] else "")]
            for key, style in (("tokens_per_s", "{:,.0f}"), ("peak_gib", "{:.1f}")):
                more = f"{100 * (row[key] / goal[key] - 1):+.1f} %".replace("-", "−")
                cells += [style.format(row[key]), f"{goal[key]:,}", more]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def engines(pattern: str) -> str:
    """A line an engine: the worst of its worlds, and of fusing before and after the engine has had the model."""
    parts = []
    for path in find_results(pattern):
        content = report.load(path)
        found: dict[str, list[dict[str, Any]]] = {}
        for row in content["rows"]:
            if row["side"] != "plain":
                found.setdefault(row["engine"], []).append(row)
        table = report.to_table({"kind": content["kind"], "rows": [worst(rows) for rows in found.values()]})
        parts.append(f"{report.source(content)}\n\n{table}\n")
    return "\n".join(parts)


def sweeps(pattern: str) -> str:
    return "\n".join(verdicts.to_page(report.load(path)) for path in find_results(pattern))


def worst(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest of each error, beside the plain model's in the same case."""
    by_loss, by_gradient = (max(rows, key=lambda row: row[f"{name}_error"]) for name in ("loss", "gradient"))
    return {
        **rows[0], "side": "", "world": ", ".join(str(n) for n in sorted({row["world"] for row in rows})),
        "logits": max((row["logits"] for row in rows), key=len),
        "loss_error": by_loss["loss_error"], "gradient_error": by_gradient["gradient_error"],
        "eager": {
            "loss_error": by_loss["eager"]["loss_error"], "gradient_error": by_gradient["eager"]["gradient_error"],
        },
        "status": "ok" if all(row["status"] == "ok" for row in rows) else "wrong",
    }  # fmt: skip


def has_chart(content: dict[str, Any]) -> bool:
    """Counters have none, and what has too many cases for one."""
    return content["kind"] in plots.KINDS and len({report.case_of(row) for row in content["rows"]}) <= CHART_CASES


@functools.cache
def latest(kind: str) -> dict[tuple[Any, ...], tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The rows of each case on each device in the newest file that has them, with the file."""
    contents = [report.load(path) for path in RESULTS.glob("*.json")]
    found: dict[tuple[Any, ...], tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    for content in sorted((c for c in contents if c["kind"] == kind), key=lambda c: c["date"]):
        cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in content["rows"]:
            cases.setdefault(report.case_of(row), []).append(row)
        found |= {(device_of(content), *case): (content, rows) for case, rows in cases.items()}
    return found


def device_of(content: dict[str, Any]) -> str:
    return str(content["environment"]["device"])


def devices(kind: str = "ops") -> list[str]:
    """Those of the result files, the one of which there is most first: its figures stand for an operator."""
    found = Counter(device for device, *_ in latest(kind))
    return sorted(found, key=lambda device: (-found[device], device))


def rows_of(
    name: str, kind: str = "ops", device: str | None = None
) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Cases of an operator and of its uses, in the order of the table of benchmarks; the shapes as they were run.

    device: by default the first of `devices`.
    """
    uses = [op.name for op in OPS.values() if op.operator == name]
    wanted = device or next(iter(devices(kind)), "")
    found = [
        (content, rows)
        for content, rows in latest(kind).values()
        if rows[0]["op"] in uses and device_of(content) == wanted
    ]
    return sorted(found, key=lambda part: uses.index(part[1][0]["op"]))


def measured(name: str) -> str:
    cases = rows_of(name)
    if not cases:
        return elsewhere(name) or "Not yet."
    rows = [row for _, members in cases for row in members]
    sources = dict.fromkeys(report.source(content) for content, _ in cases)
    parts = [
        "Forward + backward in milliseconds, and as a multiple of the [floor](../bench.md#reading-the-table).",
        "",
        to_matrix({"kind": "ops", "rows": rows}, ORDER),
        f"![{name}](../charts/ops/{name}.png)\n" if chart_of(name) else "",
        f"![memory of {name}](../charts/memory/{name}.png)\n" if memory_of(name) else "",
        '<details markdown="1"><summary>All columns</summary>\n',
        report.to_table({"kind": "ops", "rows": rows}),
        "\n</details>\n",
    ]
    if hosts := [row for _, members in rows_of(name, "host") for row in members]:
        parts += ["Host time per call, on tiny inputs:\n", report.to_table({"kind": "host", "rows": hosts}), ""]
    return "\n".join([*parts, *sources, elsewhere(name)])


def elsewhere(name: str) -> str:
    """The figures of the other devices, from files that were contributed."""
    parts = []
    for device in devices()[1:]:
        if cases := rows_of(name, device=device):
            rows = [row for _, members in cases for row in members]
            sources = dict.fromkeys(report.source(content) for content, _ in cases)
            parts += ["", f"### {device}", "", to_matrix({"kind": "ops", "rows": rows}, ORDER), *sources]
    return "\n".join(parts)


def charted() -> list[str]:
    return [name for kind in KINDS for name in operators(kind)]


@functools.cache
def chart_of(name: str) -> dict[str, Any] | None:
    """What the chart of an operator shows: the shapes of the quoted tables where they were measured, else all."""
    main = {(op.name, tuple(shape)) for op in OPS.values() for shape in op.shapes}
    cases = [part for part in rows_of(name) if part[1][0]["dtype"] == "bfloat16"] or rows_of(name)
    quoted = [part for part in cases if (part[1][0]["op"], tuple(part[1][0]["shape"])) in main] or cases
    if not any(row["times_floor"] for _, rows in quoted for row in rows):
        return None
    newest = max((content for content, _ in quoted), key=lambda content: content["date"])
    return {**newest, "rows": [row for _, rows in quoted for row in rows]}


@functools.cache
def memory_of(name: str) -> dict[str, Any] | None:
    """A loss of a linear head at three and more numbers of tokens, the rest the same: its memory over their number."""
    if name not in [op.operator for op in KINDS["Losses of a linear head"]]:
        return None
    cases = [(content, rows) for content, rows in rows_of(name) if rows[0]["op"] == name]
    rows = plots.over_tokens([row for _, members in cases for row in members])
    newest = max((content for content, _ in cases), key=lambda content: content["date"], default=None)
    return {**newest, "rows": rows} if newest and rows else None


def times_floor(name: str) -> str:
    """Ours and the best peer's on the first shape that was measured; who leads is bold."""
    for _, rows in rows_of(name):
        by = {r["implementation"]: r for r in rows if r["status"] == "ok" and r["times_floor"]}
        ours = by.get("tigon")
        peers = {who: row["times_floor"] for who, row in by.items() if not who.startswith("tigon")}
        if ours is None:
            continue
        best = min(peers, key=lambda who: peers[who]) if peers else ""
        first, _ = leaders({who: by[who] for who in ("tigon", best) if who})
        shown = bold(f"{ours['times_floor']:.2f}", first == "tigon")
        return shown + (" (" + bold(f"{best} {peers[best]:.2f}", first == best) + ")" if best else "")
    return ""
