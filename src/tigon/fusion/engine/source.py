"""The source of a forward: its syntax tree, the calls in it, and code made from a changed tree.

A function that is rebuilt from its own source, with some statements changed, computes the same by construction.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
import types
from collections.abc import Iterator
from typing import Any, NamedTuple


def may_rebuild(code: types.CodeType) -> bool:
    # A closure (super() makes one) cannot be compiled by itself, nor can a private name outside its class.
    return not code.co_freevars and not any(n.startswith("__") and not n.endswith("__") for n in code.co_names)


def tree_of(fn: types.FunctionType) -> ast.Module | None:
    """A function's syntax tree, without decorators, defaults and annotations; None if the source is not its own.

    The function is the first statement. Behind it may stand imports, which are compiled along and never run.
    """
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
    # `rebuilt` copies the defaults' values from the function: the tree only needs as many.
    none = ast.Constant(None)
    function.args.defaults = [none for _ in function.args.defaults]
    function.args.kw_defaults = [d if d is None else none for d in function.args.kw_defaults]
    # Python compiles a method call in another way where the name before the dot is one that its file imports.
    imported = _imported(fn.__code__.co_filename).intersection(fn.__code__.co_names)
    tree.body += [ast.Import([ast.alias(name)]) for name in sorted(imported)]
    ast.fix_missing_locations(tree)
    code = compiled(tree, fn)
    # They differ if the file was edited since its import, or another function's source made this function.
    return tree if (code.co_code, code.co_names) == (fn.__code__.co_code, fn.__code__.co_names) else None


def function_of(tree: ast.Module) -> ast.FunctionDef:
    """The function of `tree_of`."""
    (function, *_) = tree.body
    assert isinstance(function, ast.FunctionDef)
    return function


@functools.lru_cache(maxsize=256)
def _imported(filename: str) -> frozenset[str]:
    """The names that a file imports outside of its functions and classes."""
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


def compiled(tree: ast.Module, fn: types.FunctionType) -> types.CodeType:
    module = compile(tree, fn.__code__.co_filename, "exec", fn.__code__.co_flags & _FUTURES, dont_inherit=True)
    return next(c for c in module.co_consts if isinstance(c, types.CodeType))


_FUTURES = __import__("__future__").annotations.compiler_flag


def bodies(function: Any) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for statements in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
            if isinstance(statements, list):
                yield statements


class ChildCall(NamedTuple):
    """A call `own.name(x)` of a child, by its node."""

    node: ast.Call
    own: ast.expr
    name: str
    x: ast.Name


def calls_together(function: ast.FunctionDef) -> list[list[ChildCall]]:
    """The calls of children that a forward always makes, once and with the same local name as their only argument.

    Grouped by this argument, in order; groups of two and more.
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
        node, self = nodes[0]
        alone = len(nodes) == 1 and len(node.args) == 1 and not node.keywords
        if alone and isinstance(x := node.args[0], ast.Name) and id(node) in always:
            inputs.setdefault(x.id, []).append(ChildCall(node, self, name, x))
    groups = []
    for argument, found in inputs.items():
        found.sort(key=lambda call: (call.node.lineno, call.node.col_offset))
        first, last = found[0].node.lineno, found[-1].node.lineno
        if len(found) > 1 and not any(first <= line <= last for line in stores.get(argument, ())):
            groups.append(found)
    return groups


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _always(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """The nodes that every call runs, unless it raises: outside of conditions, loops, and functions of their own."""
    sometimes = (
        ast.If, ast.For, ast.While, ast.Try, ast.IfExp, ast.BoolOp, ast.Lambda, ast.FunctionDef, ast.ListComp,
        ast.GeneratorExp, ast.SetComp, ast.DictComp, ast.Match, ast.ClassDef, ast.AsyncFunctionDef,
    )  # fmt: skip
    todo: list[ast.AST] = []
    for statement in body:
        if any(isinstance(node, ast.Return) for node in ast.walk(statement)) and isinstance(statement, sometimes):
            break  # what follows runs only where this did not return
        todo.append(statement)
    while todo:
        node = todo.pop()
        if isinstance(node, sometimes):
            continue
        yield node
        todo += ast.iter_child_nodes(node)
