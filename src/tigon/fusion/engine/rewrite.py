"""Rewritten forwards: a forward's code with other globals or statements, behind the same decorators.

A function rebuilt from source with some statements changed computes the same by construction.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tigon.fusion.engine.bytecode import writes_globals
from tigon.fusion.engine.reasons import NO_SOURCE, WRITES_GLOBALS, Reason


def rewrite_forward(
    forward: Any,
    make_globals: Callable[[types.FunctionType], dict[str, Any]],
    edit: Callable[[ast.FunctionDef], None] | None = None,
) -> Any:
    """The forward with other globals and statements in the innermost function, or the Reason why there is none.

    make_globals: the innermost function → the globals to add. edit: changes that function's syntax tree; None
    leaves the code as it is. Defaults, decorators and line numbers stay.
    """
    if writes_globals(forward):
        return WRITES_GLOBALS
    if not isinstance(forward, types.FunctionType):
        return Reason("its forward is not a plain function")
    inner = getattr(forward, "__wrapped__", None)
    if inner is None:
        return _rewrite_function(forward, make_globals, edit)
    # A decorator holds the wrapped function in a closure cell: the rewritten function goes into that cell.
    cells = forward.__closure__ or ()
    if sum(cell.cell_contents is inner for cell in cells) != 1:
        return Reason("its forward is decorated in a way that cannot be rewritten")
    made = rewrite_forward(inner, make_globals, edit)
    if isinstance(made, Reason):
        return made
    closure = tuple(types.CellType(made) if cell.cell_contents is inner else cell for cell in cells)
    outer = rebuild_function(forward, forward.__globals__, closure)
    outer.__wrapped__ = made  # type: ignore[attr-defined]
    return outer


def _rewrite_function(
    fn: types.FunctionType,
    make_globals: Callable[[types.FunctionType], dict[str, Any]],
    edit: Callable[[ast.FunctionDef], None] | None,
) -> types.FunctionType | Reason:
    code, closure = fn.__code__, fn.__closure__
    if edit is not None:
        tree = _parse_source(fn)
        if tree is None:
            return NO_SOURCE
        edit(_first_function(tree))
        ast.fix_missing_locations(tree)
        code, closure = _compile_tree(tree, fn), None
    # Dynamo guards a global through the module `__name__`, which does not have the added globals.
    scope = {k: v for k, v in fn.__globals__.items() if k != "__name__"} | make_globals(fn)
    return rebuild_function(fn, scope, closure, code)


def name_forward(forward: Any) -> str:
    """The qualified name of the function inside a forward's decorators; a rewritten forward has the same name."""
    inner = inspect.unwrap(forward)
    return f"{inner.__module__}.{inner.__qualname__}"


def rebuild_function(
    fn: types.FunctionType, scope: dict[str, Any], closure: Any, code: types.CodeType | None = None
) -> types.FunctionType:
    """A function like `fn`, with these globals, closure and code."""
    made = types.FunctionType(fn.__code__ if code is None else code, scope, fn.__name__, fn.__defaults__, closure)
    made.__kwdefaults__, made.__qualname__ = fn.__kwdefaults__, fn.__qualname__
    made.__module__ = fn.__module__
    made.__dict__.update(fn.__dict__)
    return made


# ------------------------------------------------------------------------------------------------------- the source


def parse_function(forward: Any) -> ast.FunctionDef | None:
    """The syntax tree for a forward's innermost function; None if that function cannot be rebuilt from source."""
    inner = inspect.unwrap(forward) if callable(forward) else None
    tree = _parse_source(inner) if isinstance(inner, types.FunctionType) else None
    return None if tree is None else _first_function(tree)


def _may_rebuild(code: types.CodeType) -> bool:
    # A closure (as made by super()) cannot be compiled alone, nor can a private name outside its class.
    return not code.co_freevars and not any(n.startswith("__") and not n.endswith("__") for n in code.co_names)


def _parse_source(fn: types.FunctionType) -> ast.Module | None:
    """A function's syntax tree, without decorators, defaults and annotations; None if the source is another function's.

    The function is the first statement. Imports may follow, which are compiled along and never run.
    """
    if not _may_rebuild(fn.__code__):
        return None
    try:
        lines, first = inspect.getsourcelines(fn)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        return None
    ast.increment_lineno(tree, first - 1)
    function = tree.body[0]
    function.decorator_list, function.returns = [], None
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    # `rebuild_function` copies the defaults' values from the function: the tree only needs as many.
    none = ast.Constant(None)
    function.args.defaults = [none for _ in function.args.defaults]
    function.args.kw_defaults = [d if d is None else none for d in function.args.kw_defaults]
    # Python compiles a method call in another way where the file imports the name before the dot.
    imported = _imported_names(fn.__code__.co_filename).intersection(fn.__code__.co_names)
    tree.body += [ast.Import([ast.alias(name)]) for name in sorted(imported)]
    ast.fix_missing_locations(tree)
    code = _compile_tree(tree, fn)
    # They differ if the file was edited since, or another function's source made this function.
    return tree if (code.co_code, code.co_names) == (fn.__code__.co_code, fn.__code__.co_names) else None


def _first_function(tree: ast.Module) -> ast.FunctionDef:
    """The function that `_parse_source` parsed."""
    (function, *_) = tree.body
    assert isinstance(function, ast.FunctionDef)
    return function


@functools.lru_cache(maxsize=256)
def _imported_names(filename: str) -> frozenset[str]:
    """The names that a file imports at module level."""
    try:
        todo: list[ast.AST] = list(ast.parse("".join(linecache.getlines(filename))).body)
    except SyntaxError:
        return frozenset()
    names = set()
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While, ast.ExceptHandler)):
            todo += ast.iter_child_nodes(node)
    return frozenset(names)


def _compile_tree(tree: ast.Module, fn: types.FunctionType) -> types.CodeType:
    module = compile(tree, fn.__code__.co_filename, "exec", fn.__code__.co_flags & _FUTURES, dont_inherit=True)
    return next(c for c in module.co_consts if isinstance(c, types.CodeType))


_FUTURES = __import__("__future__").annotations.compiler_flag


def list_bodies(function: Any) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for statements in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
            if isinstance(statements, list):
                yield statements


@functools.lru_cache(maxsize=4096)
def read_groups(forward: Any) -> tuple[tuple[str, ...], ...]:
    """The names of the children that a forward always calls with the same input, in groups."""
    function = parse_function(forward)
    return () if function is None else tuple(tuple(c.name for c in calls) for calls in group_calls(function))


class ChildCall(NamedTuple):
    """A child's call `own.name(x)`, by syntax node."""

    node: ast.Call
    own: ast.expr
    name: str
    x: ast.Name


def group_calls(function: ast.FunctionDef) -> list[list[ChildCall]]:
    """The child calls that a forward always makes, once and with the same local name as their only argument.

    Grouped by this argument, in order; only groups with two or more calls.
    """
    if not function.args.args:
        return []
    own = function.args.args[0].arg
    calls: dict[str, list[tuple[ast.Call, ast.expr]]] = {}
    stores: dict[str, list[int]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_name(node.func.value, own):
            calls.setdefault(node.func.attr, []).append((node, node.func.value))
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            stores.setdefault(node.id, []).append(node.lineno)
    always = {id(node) for node in _always(function.body)}
    inputs: dict[str, list[ChildCall]] = {}
    for name, nodes in calls.items():
        node, own_name = nodes[0]
        alone = len(nodes) == 1 and len(node.args) == 1 and not node.keywords
        if alone and isinstance(x := node.args[0], ast.Name) and id(node) in always:
            inputs.setdefault(x.id, []).append(ChildCall(node, own_name, name, x))
    groups = []
    for argument, group in inputs.items():
        group.sort(key=lambda call: (call.node.lineno, call.node.col_offset))
        first, last = group[0].node.lineno, group[-1].node.lineno
        if len(group) > 1 and not any(first <= line <= last for line in stores.get(argument, ())):
            groups.append(group)
    return groups


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _always(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """The nodes that every call runs, unless an error interrupts: outside conditions, loops, and nested functions."""
    sometimes = (
        ast.If, ast.For, ast.While, ast.Try, ast.IfExp, ast.BoolOp, ast.Lambda, ast.FunctionDef, ast.ListComp,
        ast.GeneratorExp, ast.SetComp, ast.DictComp, ast.Match, ast.ClassDef, ast.AsyncFunctionDef,
    )  # fmt: skip
    todo: list[ast.AST] = []
    for statement in body:
        if any(isinstance(node, ast.Return) for node in ast.walk(statement)) and isinstance(statement, sometimes):
            break  # later statements run only where this statement did not return
        todo.append(statement)
    while todo:
        node = todo.pop()
        if isinstance(node, sometimes):
            continue
        yield node
        todo += ast.iter_child_nodes(node)
