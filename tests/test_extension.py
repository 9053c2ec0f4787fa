"""One place for each kind of thing: a dummy is added where CONTRIBUTING.md says, and is found everywhere.

Parts of `fuse` are added in fusion/test_parts.py, types of losses in losses/test_complete.py.
"""

from dataclasses import dataclass
from types import ModuleType

import cases
import ops_table
import pytest
import tables
import torch

import tigon.ops
from tigon.cli import checks
from tigon.ops.acts import ACTS, Activation, checked_act

OPERATOR = """
from tigon.ops.example import ROWS, Example

def twice(x):
    return 2 * x

EXAMPLES = {"twice": Example("Gated units", (ROWS,), twice)}
"""
TESTED = """
from ops_table.row import Case, Op, randn
from tigon.ops.twice import twice

def make(shape, dtype, generator):
    return (randn(shape, dtype, generator),)

TWICE = Op("twice", twice, twice, twice, make, (Case("masked", (3, 5)),), (), (), (), ())
"""
MEASURED = """
from dataclasses import replace
from cases import gated

OPS = (replace(gated.OPS[0], name="twice"),)
"""


def test_an_operator(tmp_path, monkeypatch):
    for package, text in ((tigon.ops, OPERATOR), (ops_table, TESTED), (cases, MEASURED)):
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / "twice.py").write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    public = checks.find_homes
    monkeypatch.setattr(checks, "find_homes", lambda package: {**public(package), "twice": "tigon.ops.twice"})
    example = checks.load_examples()["twice"]
    assert checks.check_operator("twice", example, torch.device("cpu"), torch.float32)["status"] == "ok"
    assert "::: tigon.twice" in tables.on_page_markdown("<!-- operators: Gated units -->")
    assert "twice" in {op.name for op in ops_table.collect_rows()}
    assert "twice" in cases.collect_rows()


def test_an_activation(monkeypatch):
    monkeypatch.setitem(ACTS, "twice", Activation("twice", lambda x: 2 * x, None, "2 g", ("double",)))
    assert checked_act("gated_linear", "twice") == "twice"
    assert "| `twice` | 2 g | `double` |" in tables.on_page_markdown("<!-- activations -->")
    x = torch.randn(3, 4)
    with tigon.use_backend("torch"):
        y = tigon.gated_linear(x, x, torch.eye(4), act="twice")
    torch.testing.assert_close(y, 2 * x * x)


def test_a_format_of_tables(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    from tigon.data.formats import FORMATS, read

    monkeypatch.setitem(FORMATS, ".words", lambda path: pa.table({"word": path.read_text().split()}))
    (tmp_path / "a.words").write_text("one two")
    (tmp_path / "b.words").write_text("three")
    assert read("test", tmp_path).to_pydict() == {"word": ["one", "two", "three"]}
    with pytest.raises(ValueError, match=r"a file must end in .*\.words, got"):
        read("test", __file__)


def test_a_command(monkeypatch, capsys):
    typer = pytest.importorskip("typer")
    from tigon.cli.app import add_commands
    from tigon.cli.options import argument, option

    @dataclass(frozen=True, kw_only=True)
    class TwiceOptions:
        number: int = argument("A number.")
        times: int = option(2, "The factor.")

    def twice(options: TwiceOptions) -> None:
        """Multiply a number."""
        print(options.number * options.times)

    module = ModuleType("twice_command")
    module.twice, twice.__module__ = twice, "twice_command"
    module.TwiceOptions = TwiceOptions
    monkeypatch.setitem(__import__("sys").modules, "twice_command", module)
    app = typer.Typer()
    app.callback()(lambda: None)
    add_commands(app, {"twice": "twice_command"}, {})
    app(["twice", "21"], standalone_mode=False)
    assert capsys.readouterr().out == "42\n"
    app(["twice", "--help"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "Multiply a number." in shown
    assert "--times" in shown
