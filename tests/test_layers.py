"""Imports point down: each core layer imports only lower layers, and the core imports no system.

Late imports and imports for type checkers count. `ALLOWED` and `CIRCLES` may only shrink.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
FLOORS = ("cli", "integrations", "training", "fusion", "nn", "losses", "ops", "kernels")
SYSTEMS = ("retrieve", "rank", "compress", "graph")  # beside the core, on top of `data`
FOLDERS = {*FLOORS, *SYSTEMS, "data"}
# Imports that point up, "importer imports imported", with the reason or the plan for each.
ALLOWED: set[str] = set()
# Total number of modules in import cycles.
CIRCLES = 0


def find_modules(source: Path) -> dict[str, Path]:
    return {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
        for path in source.rglob("*.py")
    }


def list_imports(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """A module's imports, at the top, inside functions and for type checkers."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            package = parts[: len(parts) + 1 - node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            imported.update(full if (full := f"{base}.{alias.name}") in modules else base for alias in node.names)
    return {module for module in imported if module in modules and module != name}


def find_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Import cycles: strongly connected components with two or more modules (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph.get(name, ())):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            group = [stack.pop()]
            while group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                circles.append(sorted(group))

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return circles


MODULES = find_modules(SOURCE)
GRAPH = {name: list_imports(name, path, MODULES) for name, path in MODULES.items()}


def folder(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def is_allowed(importer: str, imported: str) -> bool:
    above, below = folder(importer), folder(imported)
    if below not in FOLDERS or above == below or above not in FOLDERS:  # root modules, such as tigon.lazy
        return True
    if above in (*SYSTEMS, "data"):
        return below not in SYSTEMS
    if below not in FLOORS:
        return False
    return FLOORS.index(above) < FLOORS.index(below)


def test_imports_point_down():
    wrong = {f"{a} imports {b}" for a, imports in GRAPH.items() for b in imports if not is_allowed(a, b)}
    assert wrong <= ALLOWED, "imports that point up:\n" + "\n".join(sorted(wrong - ALLOWED))
    assert wrong >= ALLOWED, "take these out of ALLOWED:\n" + "\n".join(sorted(ALLOWED - wrong))


def test_no_modules_import_each_other():
    circles = find_circles(GRAPH)
    shown = "\n".join(" ".join(group) for group in circles)
    assert sum(map(len, circles)) == CIRCLES, f"{sum(map(len, circles))} modules in circles:\n{shown}"


def test_the_library_does_not_import_its_benchmarks():
    for path in MODULES.values():
        words = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not {"benchmarks", "cases", "harness", "studies"} & set(words), path


def test_folders_are_those_of_the_picture():
    folders = {path.name for path in (SOURCE / "tigon").iterdir() if (path / "__init__.py").exists()}
    assert folders == FOLDERS
    for name in folders:
        text = (SOURCE / "tigon" / name / "__init__.py").read_text(encoding="utf-8")
        assert ast.get_docstring(ast.parse(text)), f"tigon/{name}/__init__.py does not say what lives there"


def test_a_circle_is_found():
    graph = defaultdict(set, a={"b"}, b={"c"}, c={"a", "d"}, d={"e"}, e=set())
    assert find_circles(graph) == [["a", "b", "c"]]
