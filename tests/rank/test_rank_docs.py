"""The pages on ranking say what the library has, and every name is described."""

import inspect
import re
from pathlib import Path

import pytest

from tigon import rank
from tigon.lazy import homes_of

PAGE = Path(__file__).parents[2] / "docs" / "rank" / "index.md"
NAMES = [(module, name) for module in (rank.losses, rank.metrics) for name in module.__all__]


def test_the_page_on_tables_lists_fields_and_endings():
    from tigon.data.formats import COMPRESSED, FORMATS
    from tigon.rank.fields import KINDS

    text = (PAGE.parent / "data.md").read_text()
    assert set(re.findall(r"^\| `([A-Z]\w+)", text, re.MULTILINE)) == set(KINDS)
    endings = text.partition("| ending | read as |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\.\w+)`", endings)) == {*FORMATS, *COMPRESSED}


def test_the_page_on_fitting_names_what_the_library_has():
    pytest.importorskip("accelerate")
    from tigon.rank.cli.fitting import WRITTEN
    from tigon.rank.fitting import LOSSES

    text = (PAGE.parent / "fit.md").read_text()
    rows = set(re.findall(r"^\| `([\w./-]+)` \|", text, re.MULTILINE))
    assert rows == {"model/", "run.json", "checkpoint-N/"} | {*WRITTEN} - {"model"}
    losses = text.partition("- **Which loss**: ")[2].partition("\n")[0]
    assert set(re.findall(r"`(\w+)`", losses)) == set(LOSSES)


@pytest.mark.parametrize(("page", "ranker"), [("rank-sequences", rank.LiGR), ("rank-clicks", rank.LiRank)])
def test_the_options_of_a_page_are_those_of_its_ranker(page, ranker):
    text = (PAGE.parents[1] / "how-to" / f"{page}.md").read_text()
    options = set(re.findall(r"^\| `(\w+)=", text, re.MULTILINE))
    assert options < set(inspect.signature(ranker).parameters)
    # 512 · (512 + 1) + 512 tokens are 512 sequences of a history and a candidate.
    assert page != "rank-sequences" or "262,656" in text


def test_the_page_on_searches_lists_the_blocks_and_their_widths():
    for package in ("optuna", "lightgbm"):
        pytest.importorskip(package)
    from tigon.rank.features.blocks import KINDS
    from tigon.rank.searching.space import WIDTHS

    page = (PAGE.parent / "search.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \| .* \| (?:rank )?([\d, ]+) \|$", page, re.MULTILINE))
    assert {kind: tuple(map(int, widths.split(", "))) for kind, widths in rows.items()} == WIDTHS
    assert set(rows) == set(KINDS)


def test_the_public_names_are_the_modules():
    assert set(homes_of("tigon.rank")) == set(rank.__all__) >= {"losses", "metrics"}
    public = {name for module in (rank.losses, rank.metrics) for name, value in vars(module).items()
              if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"}  # fmt: skip
    assert public <= {name for _, name in NAMES}


@pytest.mark.parametrize(("module", "name"), NAMES, ids=lambda x: x if isinstance(x, str) else "")
def test_a_name_is_described_here_and_on_the_page(module, name):
    value = getattr(module, name)
    doc = inspect.getdoc(value)
    if inspect.isfunction(value):
        arguments = doc.partition("\nArgs:\n")[2].partition("\nReturns: ")[0]
        assert "\nRaises: ValueError " in doc
        parameters = inspect.signature(value).parameters
        assert len(parameters) <= 6
        assert not [one for one in parameters if not re.search(rf"(^    |\. |, ){one}[:,]", arguments, re.MULTILINE)]
    else:
        assert all(re.search(rf"\b{field}\b", doc.partition("\nAttributes:\n")[2]) for field in value._fields)
    members = PAGE.read_text().partition(f"::: {module.__name__}\n")[2].partition("members: [")[2].partition("]")[0]
    assert name in re.split(r",\s*", members)
