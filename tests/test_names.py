"""Functions are named by verb phrases, modules by nouns. The files in tests/allowances may only shrink."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWANCES = Path(__file__).parent / "allowances"
IRREGULAR = frozenset(
    """begun bound built chosen done drawn driven fallen forgotten found frozen given gone grown had held hidden kept
    laid left lent lost made meant met paid said seen sent shown sold sought spoken stood struck swept taken taught
    thrown told torn understood won woven written known been""".split()  # noqa: SIM905
)
VERBS = frozenset({"need", "seed", "feed", "shed", "embed", "speed", "exceed", "proceed"})  # end in -ed
NOUNS = frozenset(  # established nouns that end in -ing
    """embedding padding packing batching routing rounding string pooling checkpointing indexing sharding scheduling
    training scoring ranking warning lightning""".split()  # noqa: SIM905
)


def is_participle(name: str) -> bool:
    word = name.strip("_")
    return word in IRREGULAR or (word.endswith("ed") and "_" not in word and word not in VERBS)


def read_functions(folder: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Each function under a folder with its place, "path: name"."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{path.relative_to(ROOT)}: {node.name}", node


def read_allowance(name: str) -> set[str]:
    file = ALLOWANCES / f"{name}.txt"
    return set(file.read_text(encoding="utf-8").splitlines()) if file.exists() else set()


def list_participles() -> set[str]:
    return {place for place, node in read_functions(ROOT / "src") if is_participle(node.name)}


def list_of_names() -> set[str]:
    return {place for place, node in read_functions(ROOT / "src") if node.name == "of" or node.name.endswith("_of")}


def list_gerund_files() -> set[str]:
    paths = (ROOT / "src").rglob("*.py")
    return {str(p.relative_to(ROOT)) for p in paths if p.stem.endswith("ing") and p.stem not in NOUNS}


def list_long_signatures() -> set[str]:
    """Functions with more than ten arguments. Kernels need as many as they take."""

    def count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        return len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)

    def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        return any("jit" in ast.unparse(d) for d in node.decorator_list)

    return {place for place, node in read_functions(ROOT / "src") if count(node) > 10 and not is_kernel(node)}


RULES = {
    "participles": list_participles,
    "of_names": list_of_names,
    "gerund_files": list_gerund_files,
    "long_signatures": list_long_signatures,
}


@pytest.mark.parametrize("rule", RULES)
def test_names_keep_the_rule(rule):
    wrong, allowed = RULES[rule](), read_allowance(rule)
    assert wrong <= allowed, f"{rule}:\n" + "\n".join(sorted(wrong - allowed))
    assert wrong >= allowed, f"take these out of tests/allowances/{rule}.txt:\n" + "\n".join(sorted(allowed - wrong))


@pytest.mark.parametrize(
    ("name", "bad"),
    [("found", True), ("_kept", True), ("joined", True), ("find_joined", False), ("embed", False), ("seed", False)],
)
def test_participles_are_seen(name, bad):
    assert is_participle(name) is bad


if __name__ == "__main__":  # writes the allowances anew
    for rule, list_wrong in RULES.items():
        lines = sorted(list_wrong())
        file = ALLOWANCES / f"{rule}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8") if lines else file.unlink(
            missing_ok=True
        )
        print(rule, len(lines))
