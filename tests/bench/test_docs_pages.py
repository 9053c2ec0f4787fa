"""The documentation's pages, tables and charts come from the code and from result files."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import tigon
from tigon.bench import report
from tigon.bench.cases import OPS
from tigon.bench.host import HostRow
from tigon.bench.runner import Row
from tigon.bench.sweep import SweepRow
from tigon.bench.training import Side
from tigon.install import REPOSITORY

HOOK = Path(__file__).parents[2] / "benchmarks" / "docs_pages.py"


def row(op, shape, by, ms, **more):
    return Row(op, shape, "bfloat16", by, total_ms=ms, total_range_ms=(ms, ms), floor_ms=1.0, times_floor=ms, **more)


@pytest.fixture
def hook(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("docs_pages", HOOK)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.syspath_prepend(HOOK.parent)  # as MkDocs loads a hook
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    shape = OPS["rope"].shapes[0]
    old = [row("rope", shape, "tigon", 3.0), row("rope", shape, "liger", 1.75), row("rope", shape, "eager", 17.0)]
    save(tmp_path / "h200-ops.json", report.result("ops", old), "2026-01-01")
    return module


def save(path, content, date):
    report.save(path, {**content, "date": f"{date}T00:00:00+00:00"})


def rendered(hook, text, uri="guide/page.md"):
    return hook.on_page_markdown(text, page=SimpleNamespace(file=SimpleNamespace(src_uri=uri)))


def test_marks_become_tables(hook):
    text = rendered(hook, "before\n\n<!-- results: *-ops.json -->\n\nafter")
    assert text.startswith("before\n")
    assert text.endswith("\nafter")
    assert "| rope | 4×4096×32×8×128 |" in text
    assert "1.75×" in text
    assert '<figure class="chart" role="img" aria-label="h200-ops" data-search-exclude><svg ' in text
    assert "currentColor" in text, "it has the colour of the page"
    (figure,) = [line for line in text.splitlines() if line.startswith("<figure")]
    assert figure.endswith("</svg></figure>"), "Markdown sees one block"
    assert "<!--" not in text


def test_a_mark_without_a_file_is_said_and_a_comment_stays(hook):
    assert hook.section("b300-*.json") == "No result file matches `b300-*.json`."
    assert rendered(hook, "<!-- remark -->") == "<!-- remark -->"


def test_no_page_says_that_a_result_file_is_missing(hook, monkeypatch):
    monkeypatch.setattr(hook, "RESULTS", HOOK.parent / "results")
    for page in (HOOK.parents[1] / "docs").rglob("*.md"):
        for pattern in re.findall(r"^<!-- (?:results|matrix): (\S+) -->$", page.read_text(), re.MULTILINE):
            found = list(hook.RESULTS.glob(pattern)) or f"<!-- if: {pattern} -->" in page.read_text()
            assert found, f"{page.name}: {pattern}"


def test_what_depends_on_a_file_is_absent_without_it(hook, tmp_path):
    text = "before\n<!-- if: *-models.json -->\n\n## Models\n\n<!-- matrix: *-models.json -->\n\n<!-- end -->\nafter\n"
    assert rendered(hook, text) == "before\nafter\n"
    sides = [Side("llama-3-8b", "tigon", 16, 512, False, "bfloat16", tokens_per_s=1e4, step_ms=800.0, peak_gib=70.0)]
    sides[0].profile_ms = {"matmul": 700.0, "idle": 1.0}
    save(tmp_path / "h200-models.json", report.result("model", sides), "2026-01-01")
    shown = rendered(hook, text)
    assert "## Models" in shown
    assert "| llama-3-8b | 16×512 | 10,000, 70.0 GiB |" in shown
    assert 'aria-label="h200-models"' in shown
    assert 'aria-label="kinds of kernel, h200-models"' in shown
    assert shown.endswith("after\n")
    assert "<!--" not in shown


def test_every_part_of_the_page_that_depends_on_a_file_ends(hook):
    page = (HOOK.parents[1] / "docs" / "bench.md").read_text()
    assert page.count("<!-- if: ") == page.count("<!-- end -->") == len(hook.PART.findall(page))


def test_a_sweep_stands_on_the_page_once_it_is_recorded(hook, tmp_path):
    text = (HOOK.parents[1] / "docs" / "bench.md").read_text()
    (part,) = [part for part in hook.PART.findall(text) if part[0] == "*-sweep.json"]
    text = f"<!-- if: {part[0]} -->\n{part[1]}<!-- end -->\n"
    assert rendered(hook, text) == ""
    rows = [
        SweepRow(**vars(row("rope", (1, 3, 2, 1, 64), by, ms)), draw=f"rope/{number}")
        for number, times in enumerate(((1.0, 2.0), (1.0, 0.8), (1.0, 1.0)))
        for by, ms in zip(("tigon", "liger"), times, strict=True)
    ]
    about = {"seed": 4, "gib": 64, "draws": 3, "redrawn": 0, "skipped": 0, "not_begun": 0}
    save(tmp_path / "h200-sweep.json", report.result("sweep", rows, sweep=about), "2026-01-01")
    shown = rendered(hook, text)
    assert "Of 3 draws (seed 4) Tigon is first in 1 of 3 (33 %), tie in 1, behind in 1." in shown
    assert "| rope | 1×3×2×1×64 | bfloat16 | 1.00 | 0.800 | liger | +25.0 % |" in shown
    assert "2026-01-01" in shown


def test_a_line_an_engine_has_the_worst_of_its_cases(hook, tmp_path):
    def case(engine, world, side, loss, gradient, status="ok", logits="none"):
        eager = {"loss_error": loss / 2, "gradient_error": gradient / 4}
        errors = {"loss_error": loss, "gradient_error": gradient, "eager": eager}
        return {"engine": engine, "world": world, "side": side, "logits": logits, "status": status, **errors}

    rows = [
        case("DDP", 2, "plain", 1.0, 1.0, logits="–"),
        case("DDP", 4, "fused before", 2e-7, 1e-6),
        case("DDP", 2, "fused after", 1e-7, 4e-6),
        case("ZeRO-3", 2, "fused before", 3e-7, 3e-6, "wrong", "real: partitioned"),
    ]
    save(tmp_path / "h200-composition.json", report.result("composition", [], gpus=4) | {"rows": rows}, "2026-01-01")
    lines = rendered(hook, "<!-- engines: *-composition.json -->").splitlines()
    assert lines[0].startswith("4 × ")
    assert lines[-2:] == [
        "| DDP | 2, 4 | none | 2.0e-7 | 1.0e-7 | 4.0e-6 | 1.0e-6 |  |",
        "| ZeRO-3 | 2 | real: partitioned | 3.0e-7 | 1.5e-7 | 3.0e-6 | 7.5e-7 | FAILED |",
    ]
    assert len(lines) == 6


def test_heads_that_are_split_stand_beside_one_gpu(hook, tmp_path):
    def side(name, ms, **more):
        row = {"shape": [8, 4, 99], "side": name, "status": "ok", "reason": "", "ms": ms, "peak_gib": 1.5, "errors": {}}
        return {**row, **more}

    errors = {"loss": 0.5, "dx": 0.25, "dw": 0.125}
    rows = [
        side("tigon, one GPU", 30.0, errors=errors),
        side("tigon", 20.0, errors=errors),
        side("peer", None, status="skipped", reason="not installed", peak_gib=None),
        side("collectives", 1.0, reason="bytes: [1]", peak_gib=None),
    ]
    content = report.result("vocabulary-parallel", [], gpus=2) | {"rows": rows}
    save(tmp_path / "h200-vocabulary-parallel.json", content, "2026-01-01")
    lines = rendered(hook, "<!-- results: *-vocabulary-parallel.json -->").strip().splitlines()
    assert lines[-4:] == [
        "| 8×4×99 | tigon, one GPU | 30.0 | – | 1.50 | 0.250 | 0.125 |  |",
        "| 8×4×99 | tigon | 20.0 | 1.50× | 1.50 | 0.250 | 0.125 |  |",
        "| 8×4×99 | peer | – | – | – | – | – | SKIPPED: not installed |",
        "| 8×4×99 | collectives | 1.00 | – | – | – | – |  |",
    ]
    rows = [
        side(name, ms, op=op, errors=errors)
        for op, times in {"jsd": (30.0, 20.0), "kl": (8.0, 5.0)}.items()
        for name, ms in zip(("tigon, one GPU", "tigon"), times, strict=True)
    ]
    save(tmp_path / "h200-vocabulary-parallel-distill.json", content | {"rows": rows}, "2026-01-01")
    lines = rendered(hook, "<!-- results: *-vocabulary-parallel-distill.json -->").strip().splitlines()
    assert lines[-1] == "| kl | 8×4×99 | tigon | 5.00 | 1.60× | 1.50 | 0.250 | 0.125 |"


def test_searches_of_several_gpus_stand_beside_one(hook, tmp_path):
    def side(name, queries, ms, graph_ms, **more):
        row = {"items": 9, "queries": queries, "k": 5, "filters": "none", "share": 1.0, "side": name, "status": "ok"}
        return {**row, "reason": "", "ms": ms, "graph_ms": graph_ms, "same": None, **more}

    rows = [
        side("tigon, one GPU", 16, 1.0, 0.95), side("tigon, 2 GPUs", 16, 0.6, 0.5, same=True),
        side("exchange", 16, 0.05, 0.02), side("tigon, one GPU", 256, 2.0, 2.0),
        side("tigon, 2 GPUs", 256, 1.5, None, same=False, status="wrong", reason="other ids"),
    ]  # fmt: skip
    save(
        tmp_path / "h200-sharded-search.json",
        report.result("sharded-search", [], gpus=2) | {"rows": rows},
        "2026-01-01",
    )
    lines = rendered(hook, "<!-- results: *-sharded-search.json -->").strip().splitlines()
    assert lines[0].startswith("2 × ")
    assert lines[-5:] == [
        "| 16 | none | tigon, one GPU | 1.00 | 0.950 | – | – |  |",
        "| 16 | none | tigon, 2 GPUs | 0.600 | 0.500 | 0.526× | yes |  |",
        "| 16 | none | exchange | 0.0500 | 0.0200 | – | – |  |",
        "| 256 | none | tigon, one GPU | 2.00 | 2.00 | – | – |  |",
        "| 256 | none | tigon, 2 GPUs | 1.50 | – | 0.750× | NO | WRONG: other ids |",
    ]


def test_another_gpu_appears_by_itself_and_changes_nothing_of_the_first(hook, tmp_path):
    shape = OPS["rope"].shapes[0]
    more = [row(name, OPS[name].shapes[0], "tigon", 2.0) for name in ("rms_norm", "layer_norm")]
    save(tmp_path / "h200-memory.json", report.result("ops", more), "2026-01-01")
    page, overview = hook.page_of("rope"), hook.overview()
    new = report.result("ops", [row("rope", shape, "tigon", 9.25), row("rope", shape, "eager", 99.0)])
    new["environment"]["device"] = "NVIDIA GeForce RTX 4090"
    assert report.file_name(new) == "geforce-rtx-4090-ops.json"
    save(tmp_path / report.file_name(new), new, "2027-01-01")
    alone = report.result("ops", [row("swiglu", OPS["swiglu"].shapes[0], "tigon", 7.5)])
    alone["environment"]["device"] = "NVIDIA GeForce RTX 4090"
    save(tmp_path / "more-ops.json", alone, "2027-01-01")
    hook.latest.cache_clear()
    hook.chart_of.cache_clear()
    assert hook.devices()[0] != "NVIDIA GeForce RTX 4090", "three cases against two"
    with_both = hook.page_of("rope")
    assert with_both.startswith(page.rstrip()), "the newer file is of another device"
    added = with_both[len(page.rstrip()) :]
    assert "### NVIDIA GeForce RTX 4090" in added
    assert "**9.25 (9.25×)** | 99.0 (99.00×)" in added
    assert hook.overview() == overview
    assert "### NVIDIA GeForce RTX 4090" in hook.page_of("swiglu"), "measured there alone"
    assert "Not yet" not in hook.page_of("swiglu")
    shown = rendered(hook, "<!-- if: *-ops.json -->\n<!-- matrix: *-ops.json -->\n<!-- end -->\n")
    assert "NVIDIA GeForce RTX 4090, " in shown
    assert 'aria-label="geforce-rtx-4090-ops"' in shown


def test_a_matrix_has_one_line_per_case(hook):
    lines = [line for line in rendered(hook, "<!-- matrix: *-ops.json -->").splitlines() if line.startswith("| rope")]
    assert lines == ["| rope | 4×4096×32×8×128 | bfloat16 | 1.00 | 3.00 (3.00×) | 17.0 (17.00×) | **1.75 (1.75×)** |"]


def test_the_newest_file_has_the_word_case_by_case(hook, tmp_path):
    shape = OPS["rope"].shapes[0]
    new = [row("rope", shape, "tigon", 1.25), row("rope-interleaved", shape, "tigon", 1.5)]
    save(tmp_path / "h200-memory.json", report.result("ops", new), "2026-02-01")
    page = hook.page_of("rope")
    assert page.startswith("# rope\n")
    assert "::: tigon.rope" in page
    assert "1.25 (1.25×)" in page
    assert "1.75" not in page  # of the older run, whose times cannot be compared
    assert page.index("| rope |") < page.index("| rope-interleaved |")
    assert "](../charts/ops/rope.png)" in page
    assert hook.times_floor("rope") == "1.25"


def test_the_example_of_every_operator_runs(hook, capsys):
    names = {name for kind in hook.KINDS for name in hook.operators(kind)}
    assert set(hook.EXAMPLES) == names
    for name, code in hook.EXAMPLES.items():
        assert f"{name}(" in code
        exec(compile(f"{hook.IMPORTS}\n{code}", name, "exec"), {})
    assert f"```python\n{hook.IMPORTS}\n{hook.EXAMPLES['rope']}```" in hook.page_of("rope")


def test_a_long_table_folds_and_keeps_its_rows(hook):
    rows = [f"| {i} | x |" for i in range(40)]
    table = "\n".join(["| a | b |", "| :-- | :-- |", *rows]) + "\n"
    folded = hook.fold_table(table)
    assert [line for line in folded.splitlines() if line in rows] == rows
    assert folded.count("| a | b |") == 2
    assert "<summary>28 more rows</summary>" in folded
    assert hook.fold_table("\n".join(table.splitlines()[:20])) == "\n".join(table.splitlines()[:20])


def test_the_results_of_the_main_gpu_come_first(hook, tmp_path):
    content = report.load(tmp_path / "h200-ops.json")
    save(tmp_path / "a100-ops.json", content, "2026-02-01")
    text = rendered(hook, "<!-- matrix: *-ops.json -->")
    assert text.index('aria-label="h200-ops"') < text.index('aria-label="a100-ops"')


def test_a_section_that_is_named_comes_first(hook):
    text = rendered(
        hook, "# Page\n\nintro\n\n<!-- first: Results -->\n\n## Run\n\nrun\n\n## Results\n\n### A\n\n## More\n"
    )
    assert text == "# Page\n\nintro\n\n## Results\n\n### A\n\n## Run\n\nrun\n\n## More\n"
    page = (HOOK.parents[1] / "docs" / "bench.md").read_text()
    assert "<!-- first: Results -->" in page
    assert "\n## Results\n" in page


def test_markers_of_the_tests_are_not_in_the_site(hook):
    text = "<!-- not run: needs four GPUs -->\n```bash\ntorchrun\n```\n<!-- needs: bitsandbytes -->\nend"
    assert rendered(hook, text) == "```bash\ntorchrun\n```\nend"


def test_host_times_stand_on_the_page(hook, tmp_path):
    rows = [HostRow("rope", (2, 4), "bfloat16", "tigon", forward_us=12.3, total_us=45.6, times_eager=0.5)]
    save(tmp_path / "h200-host.json", report.result("host", rows), "2026-02-01")
    assert "| rope | bfloat16 | tigon | 12.3 | 45.6 | 0.50× |" in hook.page_of("rope")


def test_an_operator_that_was_not_measured_says_so(hook):
    assert hook.page_of("swiglu").rstrip().endswith("Not yet.")


def test_the_overview_links_every_operator_and_compares_with_the_best(hook):
    text = rendered(hook, "<!-- operators -->", "ops.md")
    for kind in hook.KINDS:
        for name in hook.operators(kind):
            assert f"(ops/{name}.md)" in text
    assert "3.00 (**liger 1.75**)" in text


def test_what_is_replaced_is_shown_whole(hook):
    for kind in hook.KINDS:
        for name in hook.operators(kind):
            line = hook.replaced(name)
            assert line.count("(") == line.count(")"), f"{name}: {line}"
            assert " = " in line or name in tigon.losses.__all__, name  # their pages have formulas


def test_modules_and_counted_bytes_are_listed(hook):
    assert "::: tigon.nn.RMSNorm" in hook.modules()
    assert "| `rms_norm` | x, weight → y | dy, x, weight → dx, dweight |" in hook.counted()


def test_pages_and_charts_are_added_to_the_site(hook):
    files_module = pytest.importorskip("mkdocs.structure.files")
    config = SimpleNamespace(
        docs_dir="docs", site_dir="site", use_directory_urls=True, plugins=SimpleNamespace(_current_plugin="hook")
    )
    files = {file.src_uri: file for file in hook.on_files(files_module.Files([]), config)}
    assert "\n# rope\n" in files["ops/rope.md"].content_string
    assert {"h200-ops", "ops/rope"} <= set(hook.charts())
    assert "ops/swiglu" not in hook.charts()
    shown = rendered(hook, files["ops/rope.md"].content_string, "ops/rope.md")
    assert 'aria-label="rope"' in shown
    assert rendered(hook, "![other](../images/rope.png)") == "![other](../images/rope.png)"
    assert rendered(hook, "![gone](../charts/ops/swiglu.png)") == "![gone](../charts/ops/swiglu.png)", "strict says so"


def test_the_navigation_has_every_operator_by_kind(hook):
    config = hook.on_config(SimpleNamespace(nav=[{"Start": "index.md"}, {"Operators": [{"Overview": "ops.md"}]}]))
    sections = {title: pages for entry in config.nav[1]["Operators"][1:] for title, pages in entry.items()}
    assert {"rms_norm": "ops/rms_norm.md"} in sections["Norms"]


def test_the_hook_is_in_the_configuration():
    assert f"hooks: [benchmarks/{HOOK.name}]" in (HOOK.parents[1] / "mkdocs.yml").read_text()


def test_the_machines_of_all_runs_stand_in_one_table(hook, tmp_path):
    content = report.result("ops", [])
    for name, torch in (("h200-old", "2.11.0"), ("h200-more", "2.11.0"), ("h200-new", "2.13.0")):
        about = {"device": "NVIDIA H200", "memory_gib": 139.8, "driver": "580.1", "packages": {"torch": torch}}
        save(tmp_path / f"{name}.json", content | {"environment": content["environment"] | about}, "2026-02-01")
    about = {"device": "Some CPU", "memory_gib": None, "driver": None, "packages": {"torch": "2.13.0"}}
    save(tmp_path / "cpu-study.json", content | {"environment": content["environment"] | about}, "2026-01-01")
    (tmp_path / "h200-ops.json").unlink()
    lines = rendered(hook, "<!-- hardware -->").splitlines()
    line, where = "| NVIDIA H200 | 140 GiB | 580.1 |", f"{REPOSITORY}/blob/main/benchmarks/results"
    assert sorted(lines[2:]) == [
        f"{line} 2.11.0 | – | – | [more]({where}/h200-more.json), [old]({where}/h200-old.json) |",
        f"{line} 2.13.0 | – | – | [new]({where}/h200-new.json) |",
        f"| Some CPU | – | – | 2.13.0 | – | – | [study]({where}/cpu-study.json) |",
    ]


def test_the_peaks_of_a_model_are_those_of_its_file(hook, tmp_path):
    def side(name, checkpointing, peak):
        return Side("llama-3-8b", name, 16, 512, checkpointing, "bfloat16", tokens_per_s=1.0, peak_gib=peak)

    sides = [side("hf", False, 105.96), side("tigon", False, 70.91), side("hf", True, 1.0), side("tigon", True, 2.0)]
    save(tmp_path / "h200-models.json", report.result("model", sides), "2026-01-01")
    said = rendered(hook, "<!-- peaks: llama-3-8b -->")
    assert said.endswith(": **106.0 GiB** plain, **70.9 GiB** fused.")
    assert rendered(hook, "<!-- peaks: gemma-7b -->") == ""


def test_the_memory_of_a_loss_is_drawn_over_its_tokens(hook, tmp_path):
    from tigon.bench import plots

    rows = [
        row("orpo", (2, t, 64, 1000), by, 1.0, peak_mib=float(mib))
        for t, mib in ((128, 10), (512, 20), (2048, 30))
        for by in ("tigon", "eager")
    ]
    assert hook.memory_of("orpo") is None
    save(tmp_path / "h200-matmul.json", report.result("ops", rows), "2026-02-01")
    for cached in (hook.latest, hook.charts, hook.chart_of, hook.memory_of):
        cached.cache_clear()
    assert len(hook.memory_of("orpo")["rows"]) == 6
    assert "../charts/memory/orpo.png" in hook.page_of("orpo")
    plots.plot(hook.memory_of("orpo"), tmp_path / "m.png", "memory")
    assert (tmp_path / "m.png").stat().st_size > 5000
    assert hook.memory_of("rope") is None


def test_goals_stand_beside_what_was_reached(hook, tmp_path):
    reached = Side("llama-3-8b", "tigon", 16, 512, False, "bfloat16", tokens_per_s=12350.0, peak_gib=69.0)
    peer = Side("llama-3-8b", "liger", 16, 512, False, "bfloat16", tokens_per_s=12000.0, peak_gib=80.0)
    other = Side("llama-3-8b", "tigon", 3, 512, False, "bfloat16", tokens_per_s=1.0, peak_gib=1.0)
    save(tmp_path / "h200-models.json", report.result("model", [peer, reached, other]), "2026-01-01")
    other = report.result("other", [SimpleNamespace(to_dict=lambda: {"model": "llama-3-8b"})])
    save(tmp_path / "h200-other-models.json", other, "2026-01-01")  # of another kind, with a name that matches
    lines = rendered(hook, "<!-- goals: *-models.json -->").strip().split("\n")
    assert rendered(hook, "<!-- matrix: *-models.json -->").count("| model |") == 1
    assert lines[2:] == ["| llama-3-8b | 16×512 | 12,350 | 13,000 | −5.0 % | 69.0 | 69 | +0.0 % |"]


WANTED = (
    "windows",
    "packing",
    "streaming",
    "wandb",
    "fp8",
    "unsloth",
    "h100",
    "consumer",
    "troubleshooting",
    "memory",
    "glossary",
)


@pytest.mark.parametrize("word", WANTED)
def test_the_search_finds_what_users_look_for(word):
    pages = [path.read_text().lower() for path in (HOOK.parents[1] / "docs").rglob("*.md")]
    assert any(word in text for text in pages)


def test_no_two_entries_of_the_navigation_have_nearly_the_same_name():
    nav = (HOOK.parents[1] / "mkdocs.yml").read_text().partition("\nnav:")[2].partition("\nvalidation:")[0]
    titles = re.findall(r"- ([^:\n]+): [\w/-]+\.md$", nav, re.MULTILINE)
    told = [
        frozenset(re.findall(r"[a-z]{3,}", title.lower())) - {"the", "and", "find", "train", "with"} for title in titles
    ]
    near = [(a, b) for i, a in enumerate(told) for b in told[i + 1 :] if a & b and len(a ^ b) <= 1]
    assert len(titles) > 40
    assert not near


def test_adapters_are_shown_once_they_are_measured(hook, tmp_path):
    text = "before\n<!-- if: *-adapters.json -->\n<!-- adapters -->\n<!-- end -->\nafter"
    assert rendered(hook, text) == "before\nafter"
    rows = [hook.adapters.Row("llama-3-8b", side, 4, 2048, tokens_per_s=v) for side, v in (("hf", 2.0), ("tigon", 3.0))]
    save(tmp_path / "h100-adapters.json", report.result("adapters", rows), "2026-01-01")
    assert "| Llama-3-8B 4×2048 LoRA | 2 | **3** |" in rendered(hook, text)
