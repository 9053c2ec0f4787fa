"""No module of the package imports, by whatever way round, a module that imports it."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (SOURCE / "tigon").rglob("*.py")
}


def imported(name: str, path: Path, modules, everywhere: bool, types: bool = False) -> set[str]:
    """Modules that this one imports when it is imported itself; everywhere: also those that its functions import.
    types: also those that it imports for annotations alone."""
    found = set()

    def visit(body):
        for node in body:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                parts = name.split(".")
                package = parts if path.name == "__init__.py" else parts[:-1]
                base = ".".join(package[: len(package) + 1 - node.level] if node.level else [])
                base = ".".join(filter(None, [base, node.module]))
                found.update(full if (full := f"{base}.{alias.name}") in modules else base for alias in node.names)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not everywhere:
                continue
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not types:
                visit(node.orelse)
            else:
                visit(ast.iter_child_nodes(node))

    visit(ast.parse(path.read_text()).body)
    return {module for module in found if module in modules and module != name}


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one cycle, in its order; none: []."""
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str]:
        if name in way:
            return way[way.index(name) :]
        if name in done:
            return []
        for other in sorted(graph.get(name, ())):
            if found := walk(other, [*way, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := walk(name, []))), [])


def graph_of(modules: dict[str, Path], everywhere: bool) -> dict[str, set[str]]:
    return {name: imported(name, path, modules, everywhere) for name, path in modules.items()}


def test_no_module_imports_itself_by_a_way_round():
    assert cycle(graph_of(MODULES, everywhere=False)) == []


def test_nor_do_the_functions_of_the_benchmarks():
    bench = {name: path for name, path in MODULES.items() if name.startswith("tigon.bench.")}
    assert len(bench) > 15
    assert cycle(graph_of(bench, everywhere=True)) == []


def test_nor_does_retrieval_by_functions_and_annotations():
    starts = ("tigon.retrieve.", "tigon.ops.filtered_topk")
    modules = {name: path for name, path in MODULES.items() if name.startswith(starts)}
    assert len(modules) > 50
    assert cycle({name: imported(name, path, modules, True, types=True) for name, path in modules.items()}) == []


@pytest.mark.parametrize("late", [False, True])
def test_a_cycle_is_seen(tmp_path, late):
    indent = "def f():\n    " if late else ""
    (tmp_path / "a.py").write_text("from tigon.x import b")
    (tmp_path / "b.py").write_text("if TYPE_CHECKING:\n    from . import a\nfrom .c import thing")
    (tmp_path / "c.py").write_text(f"{indent}import tigon.x.a")
    modules = {f"tigon.x.{name}": tmp_path / f"{name}.py" for name in "abc"}
    found = ["tigon.x.a", "tigon.x.b", "tigon.x.c"]
    assert cycle(graph_of(modules, everywhere=True)) == found
    assert cycle(graph_of(modules, everywhere=False)) == ([] if late else found)
