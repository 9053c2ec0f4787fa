"""Every public name has an entry in the reference, and every parameter of it a row with a type and a text."""

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

griffe = pytest.importorskip("griffe")
ROOT = Path(__file__).parents[2]
PACKAGES = (
    "tigon", "tigon.losses", "tigon.training", "tigon.training", "tigon.retrieve", "tigon.rank", "tigon.data",
    "tigon.rank.models.prompt",
)  # fmt: skip
# Public by being documented: their packages import what a host brings, and declare nothing.
HOSTS = (
    "trainer.TigonCallback", "lightning.TigonCallback", "sam.MicroBatchSAMCallback", "axolotl.TigonPlugin",
    "torchtitan.FuseConverter", "torchtitan.LinearCrossEntropyLoss", "trl.fuse", "hub.mapping", "hub.kernel_config",
)  # fmt: skip
# What functions return: nobody makes one, so that its fields are in the signature, with their types, and not in rows.
RETURNED = {
    "Fusion", "Report", "Row", "TrainerFusion", "TrainerReport", "Hpz", "Plan", "Traffic", "LogProb", "GraphStep",
    "Hits", "MemoryPlan", "Explanation", "Impressions", "Batch", "Ragged", "Cache", "FitResult", "Progress",
    "Evaluation", "MetricValue", "Scores", "Interaction", "Interactions", "FieldMLP", "RefitResult", "SearchResult",
    "SearchProgress", "Stream",
}  # fmt: skip


@pytest.fixture(scope="module")
def extension():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("docstrings")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def entries(extension):
    """What mkdocstrings is asked for, on all pages, as griffe has it."""
    hook = importlib.import_module("docs_pages")
    texts = []
    for page in sorted(hook.DOCS.rglob("*.md")):
        place = SimpleNamespace(file=SimpleNamespace(src_uri=str(page.relative_to(hook.DOCS))))
        marks = re.findall(
            r"^(?:<!-- (?:modules|reference)[^\n]*|::: [^\n]*|      members: [^\n]*)$", page.read_text(), re.M
        )
        texts.append(hook.on_page_markdown("\n".join(marks), page=place))
    for kind in hook.KINDS:
        texts += [f"::: {hook.path_of(name)}" for name in hook.operators(kind)]
    paths = {path for text in texts for path in re.findall(r"^::: ([\w.]+)", text, re.MULTILINE)}
    for module, members in re.findall(r"^::: ([\w.]+)\n      members: \[([\w, ]+)\]", "\n".join(texts), re.MULTILINE):
        paths |= {f"{module}.{name}" for name in members.split(", ")}
    package = griffe.load(
        "tigon", search_paths=[ROOT / "src"], extensions=griffe.load_extensions(extension.Docstrings()),
        docstring_parser="google", docstring_options={"warn_unknown_params": False, "warn_missing_types": False},
    )  # fmt: skip
    found = {path: package[path.removeprefix("tigon.")] for path in paths}
    return {path: thing.final_target if thing.is_alias else thing for path, thing in found.items()}


def test_every_public_name_has_an_entry(entries):
    shown = {(thing.name, thing.canonical_path.split(".")[1]) for thing in entries.values()}
    names = {name for name, _ in shown}
    for package in PACKAGES:
        module = importlib.import_module(package)
        public = {name for name in module.__all__ if not inspect.ismodule(getattr(module, name))}
        assert public <= names, public - names
    nn = importlib.import_module("tigon.nn")
    modules = {n: c.__module__ for n, c in vars(nn).items() if inspect.isclass(c) and n[0] != "_"}
    classes = {n for n, module in modules.items() if module.startswith("tigon.nn.")}
    assert {(name, "nn") for name in classes} <= shown
    assert {f"tigon.integrations.{path}" for path in HOSTS} <= set(entries)
    assert RETURNED - {"Fusion", "LogProb"} <= names


def test_nothing_private_has_an_entry(entries):
    assert not [path for path in entries if re.search(r"\._", path)]


def test_every_parameter_has_a_row_with_a_type_and_a_text(entries):
    wanting = []
    for path, thing in entries.items():
        if thing.is_module or thing.is_attribute or thing.name in RETURNED or "torchtitan" in path:
            continue
        rows = {}
        for section in thing.docstring.parsed if thing.docstring is not None else ():
            if section.kind is griffe.DocstringSectionKind.parameters:
                rows = {row.name.lstrip("*"): row for row in section.value}
        for parameter in thing.parameters:
            row = rows.get(parameter.name)
            if parameter.name not in ("self", "cls") and (row is None or not row.annotation or not row.description):
                wanting.append(f"{path}: {parameter.name}")
    assert not wanting, "\n".join(wanting)


def test_sections_are_sections_and_code_is_code(entries):
    kinds = griffe.DocstringSectionKind
    for path, thing in entries.items():
        if thing.is_module or thing.docstring is None:
            continue
        for section in thing.docstring.parsed:
            if section.kind is kinds.text:
                assert not re.search(r"^(Args|Returns|Raises):|::$", section.value, re.MULTILINE), path
            if section.kind is kinds.raises:
                assert all(re.fullmatch(r"[A-Z]\w+", str(error.annotation)) for error in section.value), path
    sections = {section.kind for section in entries["tigon.rms_norm"].docstring.parsed}
    assert sections == {kinds.text, kinds.parameters, kinds.returns, kinds.raises}
    assert "```python\nvariance = " in entries["tigon.rms_norm"].docstring.parsed[-1].value


def test_a_docstring_of_this_house_becomes_one_of_googles(extension):
    text = """Sum and norm.

Args:
    x: (..., N). residual: (..., N), what x
        is added to; see more: below.
    weight, eps and what follows cast: as for `rms_norm`.
    cast: what is rounded:
        "llama"  before the weight.
        "none"   never.
Returns: (norm, sum): two tensors
    of one shape.
Raises: ValueError for a shape; TypeError for no tensor.

Replaces (always)::

    y = x + residual
"""
    assert (
        extension.google(text, ["x", "residual", "weight", "eps", "cast", "group", "chunk"])
        == """Sum and norm.

Args:
    x: (..., N).
    residual: (..., N), what x is added to; see more: below.
    weight: as for `rms_norm`.
    eps: as for `rms_norm`.
    cast: what is rounded:

        - `"llama"`: before the weight.
        - `"none"`: never.
    group: as for `rms_norm`.
    chunk: as for `rms_norm`.

Returns:
    : (norm, sum): two tensors of one shape.

Raises:
    ValueError: for a shape
    TypeError: for no tensor.

**Replaces (always):**

```python
y = x + residual
```"""
    )


def test_what_a_module_does_not_explain_its_operator_does(extension):
    text = "`tigon.swiglu` with its options fixed."
    assert extension.google(text, ["multiplier", "dtype"], "as in `tigon.swiglu`.") == (
        f"{text}\n\nArgs:\n    multiplier: as in `tigon.swiglu`.\n    dtype: dtype of the parameters."
    )


def test_fields_have_rows_with_their_types(extension, tmp_path):
    (tmp_path / "values.py").write_text('''
from dataclasses import dataclass
from typing import NamedTuple

class Head(NamedTuple):
    """A head.

    Args:
        weight, bias: of the classes. scale: of the logits.
    """
    weight: int
    bias: int | None = None
    scale: float = 1.0

@dataclass(frozen=True)
class Options:
    """Options.

    Args:
        beta, gamma: weights of terms.
    """
    beta: float = 0.1
    gamma: float = 0.2
''')
    package = griffe.load(
        "values", search_paths=[tmp_path], extensions=griffe.load_extensions(extension.Docstrings()),
        docstring_parser="google",
    )  # fmt: skip
    for name, kind, rows in (
        ("Head", "attributes", {"weight": "int", "bias": "int | None", "scale": "float"}),
        ("Options", "parameters", {"beta": "float", "gamma": "float"}),
    ):
        (section,) = [part for part in package[name].docstring.parsed if part.kind.value == kind]
        assert {row.name: str(row.annotation) for row in section.value} == rows
        assert all(row.description for row in section.value)
