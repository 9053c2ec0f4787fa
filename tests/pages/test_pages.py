"""The code blocks of every page of the documentation run in order, as a reader pastes them (run_page.py says how)."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checks import BEFORE, CHECKS
from run_page import SHELLS, parse_blocks

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
DOCS = ROOT / "docs"
BLOCKS = {
    path.relative_to(DOCS).as_posix(): blocks
    for path in sorted(DOCS.rglob("*.md"))
    if (blocks := parse_blocks(path.read_text(encoding="utf-8")))
}
RUN = [page for page, blocks in BLOCKS.items() if any(
    block.language in ("python", *SHELLS) and not block.not_run and not block.is_quotation() for block in blocks
)]  # fmt: skip
# Imported once, by the process that the pages are forked from.
IMPORTS = (
    *(f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "kto", "grpo")), "tigon.cli.app", "tigon.rank",
    "tigon.retrieve", "tigon.compress", "tigon.graph", "pyarrow.parquet", "pyarrow.compute", "pandas",
)  # fmt: skip
# What a page needs besides what is named before its blocks.
NEEDS = {
    "retrieve": "pyarrow, pandas, safetensors, typer",
    "rank": "pyarrow, safetensors, accelerate, typer, matplotlib",
    "rank/search": "optuna, lightgbm",
    "retrieve/serve": "starlette",
    "graph": "sklearn, matplotlib, safetensors",
    "how-to/rank": "pyarrow, safetensors, accelerate",
    "how-to/rank-by-prompts": "transformers, jinja2",
    "losses": "",
    "how-to/own-model": "",
    "how-to/from-faiss": "",
    "how-it-works/experts": "",
    "how-it-works/fp8": "",
    "how-it-works/losses": "",
    "backends": "",
    "how-to/add-a-part": "",
    "troubleshooting": "",
    "compress": "transformers, matplotlib, typer",
    "": "transformers, accelerate, trl, peft, datasets, typer",
}


def find_needs(page: str) -> str:
    return next(NEEDS[start] for start in sorted(NEEDS, key=len, reverse=True) if page.startswith(start))


@pytest.fixture(scope="session")
def read_aloud(tmp_path_factory):
    """Run a page in a folder of its own. Without a GPU it is forked from a process that has the imports."""
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "TIGON_BACKEND")}
    environment |= {
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "80", "PYTHONPATH": str(ROOT / "src"),
    }  # fmt: skip
    script = str(Path(__file__).with_name("run_page.py"))
    forks = None
    if not torch.cuda.is_available():  # a process that has asked for a GPU cannot be forked
        spec = importlib.util.spec_from_file_location("forks", TESTS / "cli" / "command.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        forks = module.Forks(tmp_path_factory.mktemp("said"), *IMPORTS)

    def run(page):
        folder, arguments = tmp_path_factory.mktemp("reader"), [script, page]
        if forks is not None:
            return forks.run([arguments], environment, cwds=[folder])
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)

    yield run
    if forks is not None:
        forks.end()


@pytest.mark.xdist_group("pages")
@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs(page, read_aloud):
    for package in filter(None, find_needs(page).split(", ")):
        pytest.importorskip(package)
    result = read_aloud(page)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    # Tables of commands fold to 80 columns, and none cuts a cell.
    table = [line for line in result.stdout.splitlines() if line.startswith(("│", "┃"))]
    assert not [line for line in table if re.search("… *[│┃]", line) or len(line) > 80]
    # Warnings of other libraries about each other are theirs. Before 2.13 torch also warns, once in a process, about
    # checks that the call has switched off explicitly.
    warned = re.findall(r"^.*(?:\.md|src/tigon/\S+):\d+: \w*Warning: .*", result.stderr, re.MULTILINE)
    assert not [line for line in warned if "Sparse invariant checks are implicitly disabled" not in line]


def test_blocks_that_are_not_run_say_why():
    reasons = [block.not_run for blocks in BLOCKS.values() for block in blocks if block.not_run]
    assert all(len(reason.split()) > 1 for reason in reasons)


def test_every_block_has_a_language():
    assert not [(page, block.line) for page, blocks in BLOCKS.items() for block in blocks if not block.language]


def test_every_page_of_checks_is_there():
    assert set(CHECKS) | set(BEFORE) <= set(RUN)


QUOTATIONS = [(page, block) for page, blocks in BLOCKS.items() for block in blocks if block.is_quotation()]


@pytest.mark.parametrize(("page", "block"), QUOTATIONS, ids=lambda value: getattr(value, "file", value))
def test_a_quotation_is_in_its_file(page, block):
    code = block.code.partition("\n")[2]
    assert code.strip()
    assert code in (ROOT / block.file).read_text(encoding="utf-8")


def test_the_small_model_is_the_same_on_all_pages():
    small = {block.code for blocks in BLOCKS.values() for block in blocks if "GPT2Tokenizer" in block.code}
    assert len(small) == 1
    used = {
        page for page in RUN for block in BLOCKS[page] if '"path/to/model"' in block.code and block.language == "python"
    }
    made = {page for page, blocks in BLOCKS.items() if any("GPT2Tokenizer" in block.code for block in blocks)}
    assert used == made


def test_python_that_is_not_run_is_python_all_the_same():
    for page, blocks in BLOCKS.items():
        for block in blocks:
            if block.language == "python" and block.not_run:
                ast.parse(block.code, page)
