"""Triton functions that several files use: where they stand, what they are called, and what they compute."""

import ast
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch

import tigon
from tigon.kernels import language

ROOT = Path(tigon.__file__).parent


def _modules() -> dict[str, ast.Module]:
    return {
        ".".join(("tigon", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in ROOT.rglob("*.py")
    }


def _decorators(function: ast.FunctionDef) -> list[str]:
    return [ast.unparse(d) for d in function.decorator_list]


def _triton_names(module: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Names of a module's Triton functions and constants."""
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef) and "jit" in _decorators(statement):
            yield statement.name, statement
        elif isinstance(statement, ast.Assign) and ast.unparse(statement.value).startswith("tl.constexpr("):
            for target in statement.targets:
                yield ast.unparse(target), statement


MODULES = _modules()
TRITON = {name: dict(_triton_names(module)) for name, module in MODULES.items()}


def _imports(module: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.module, alias.name) for alias in node.names)


def test_private_triton_functions_stay_in_their_file():
    # A kernel is launched, not called: the launches of its package may lie in a file of their own.
    wrong = [
        f"{name} imports {imported} from {source}"
        for name, module in MODULES.items()
        for source, imported in _imports(module)
        if imported in TRITON.get(source, {}) and imported.startswith("_")
        if not (imported.endswith("_kernel") and source.rpartition(".")[0] == name.rpartition(".")[0])
    ]
    assert not wrong, "\n".join(wrong)


def test_a_triton_function_of_two_packages_stands_in_tiles():
    wrong = [
        f"{name} imports {imported} from {source}"
        for name, module in MODULES.items()
        for source, imported in _imports(module)
        if imported in TRITON.get(source, {}) and not source.startswith("tigon.kernels.tiles.")
        if source.rpartition(".")[0] != name.rpartition(".")[0]
        and (source, imported) != ("tigon.ops.cross_entropy.kernels", "HEAD")  # where that operator's statistics begin
        and source != "tigon.ops.acts"  # whose functions kernels take as an argument, too
    ]
    assert not wrong, "\n".join(wrong)


def test_shared_triton_functions_are_public_and_say_what_they_compute():
    for name in (name for name in MODULES if name.startswith("tigon.kernels.tiles.")):
        for function, statement in TRITON[name].items():
            assert not function.startswith("_"), f"{name}.{function}"
            if isinstance(statement, ast.FunctionDef):
                assert ast.get_docstring(statement), f"{name}.{function} has no docstring"
    package = ast.get_docstring(MODULES["tigon.kernels.tiles"])
    for name in (name.rpartition(".")[2] for name in MODULES if name.startswith("tigon.kernels.tiles.")):
        assert f"\n{name} " in package, f"tigon.kernels.tiles does not say what {name} is"


def test_one_decorator_makes_kernels():
    # mypy knows `jit` as typing.no_type_check: under triton.jit the kernels would count as untyped functions.
    for name, module in MODULES.items():
        for function in (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)):
            for decorator in _decorators(function):
                assert not decorator.startswith("triton."), f"{name}.{function.name} stands under @{decorator}"
            if any(d.startswith("do_not_specialize(") for d in _decorators(function)):
                assert _decorators(function)[0] == "jit", f"{name}.{function.name}"
                (marked,) = (d for d in function.decorator_list if isinstance(d, ast.Call))
                known = {argument.arg for argument in function.args.args}
                assert {ast.literal_eval(a) for a in marked.args} <= known, f"{name}.{function.name}"


def test_sizes_that_vary_are_named_to_triton(monkeypatch):
    monkeypatch.setattr(language, "triton", SimpleNamespace(jit=lambda fn, **options: (fn.__name__, options)))

    @language.do_not_specialize("M", "start")
    def kernel(x_ptr, M, N, start):
        pass

    assert language.jit(kernel) == ("kernel", {"do_not_specialize": ("M", "start")})


def test_constants():
    from tigon.kernels.tiles import constants

    def value(constant):
        return getattr(constant, "value", constant)

    assert value(constants.LOG2E) == 1 / math.log(2)
    assert value(constants.LN2) == math.log(2)
    assert value(constants.LOWEST) == torch.finfo(torch.float32).min
