"""Layers whose residual sum and norm run as one kernel: in a clone of their forward `add_rms_norm` does both steps.

A decoder layer adds to the residual stream and norms the sum:

    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)

The clone is made from the layer's own source. Where the norm of a sum follows the sum, the two statements become

    hidden_states, _tigon_norm = _tigon_add_norm(self.post_attention_layernorm, residual, hidden_states)
    residual = hidden_states
    hidden_states = _tigon_norm

which computes the same by construction, whatever the layer does elsewhere: where `add_rms_norm` does not apply,
`_tigon_add_norm` adds and calls the norm's module. The clone keeps line numbers, globals and decorators.

Such a layer's clone joins two more pairs of statements, in the same way. The stream that goes on beside its norm
gets its two gradients summed by the norm's backward pass, and an adapted MLP adds its result to the stream itself:

    residual = hidden_states                                →  residual, _tigon_norm = _tigon_fork_norm(
    hidden_states = self.input_layernorm(hidden_states)            self.input_layernorm, hidden_states)
                                                               hidden_states = _tigon_norm

    hidden_states = self.mlp(hidden_states)                 →  hidden_states = _tigon_add_unit(
    hidden_states = residual + hidden_states                       self.mlp, residual, hidden_states)
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tigon.fusion.engine.clones import clone, name_of, rebuilt
from tigon.fusion.engine.part import Part, Stage, register
from tigon.fusion.engine.patch import Patch, child_of, transformed
from tigon.fusion.engine.reading import writes_globals
from tigon.fusion.engine.reasons import NO_SOURCE, WRITES_GLOBALS, Reason
from tigon.fusion.engine.site import Site
from tigon.fusion.engine.source import bodies, compiled, function_of, may_rebuild, tree_of
from tigon.fusion.logits.recipe import DTYPES
from tigon.fusion.parts.norm import is_rms_norm, norm_fits
from tigon.fusion.parts.sharded_rows import is_dtensor
from tigon.ops.add_rms_norm import add_rms_norm
from tigon.ops.forked_rms_norm import forked_rms_norm
from tigon.ops.rms_norm import rms_norm

_SUM, _FORK, _UNIT, _RESULT = "_tigon_add_norm", "_tigon_fork_norm", "_tigon_add_unit", "_tigon_norm"


class ResidualNorm(Part):
    """Layers whose forward norms a sum: they run its clone."""

    kind, option, stage = "add_norm", "norms", Stage.AROUND

    def fuse(self, site: Site, module: nn.Module) -> None:
        sums, forward = site.kept(Sums), type(module).forward
        norms = [name for name in sums.found(forward) if is_rms_norm(getattr(module, name, None))]
        if norms and site.patch_of(module) is None:
            what = f"the residual sum and {', '.join(norms)} in one pass"
            site.replace(self, module, sums.of(forward), None, what, key=name_of(forward))


class Sums:
    """The layer forwards that norm a sum, with one clone for each."""

    def __init__(self) -> None:
        self._found: dict[Any, tuple[str, ...]] = {}
        self._clones: dict[Any, Any] = {}

    def found(self, forward: Any) -> tuple[str, ...]:
        """The names of the norms that a forward calls on a sum it has just computed, in order."""
        inner = inspect.unwrap(forward) if callable(forward) else None
        if inner not in self._found:
            tree = tree_of(inner) if isinstance(inner, types.FunctionType) and may_rebuild(inner.__code__) else None
            self._found[inner] = () if tree is None else tuple(norm for _, _, _, norm in _sites(function_of(tree)))
        return self._found[inner]

    def of(self, forward: Any) -> Any:
        """The clone that replaces a forward, behind the decorators of the instance's class at the time of the call.

        transformers wraps the forward of a layer class, and of every class derived from it, in the function that
        checkpoints. FSDP2 derives such a class from the class of layers that fuse() has replaced already.
        """
        first = WRITES_GLOBALS if writes_globals(forward) else self._clone(forward)
        if isinstance(first, Reason):
            return first

        def layer_forward(self_: Any, *args: Any, **kwargs: Any) -> Any:
            now = type(self_).forward
            run = first if now is forward else self._clone(now)
            return (now if isinstance(run, Reason) else run)(self_, *args, **kwargs)

        return layer_forward

    def _clone(self, forward: Any) -> Any:
        if forward not in self._clones:
            self._clones[forward] = clone(forward, _with_sums)
        return self._clones[forward]


def add_norm(layer: str, norm: Any, one: Any, other: Any) -> tuple[Any, Any]:
    """one + other, and norm(one + other). layer: the name of the layer's forward, for the report."""
    patch: Patch | None = vars(norm).get("_tigon") if isinstance(norm, nn.Module) else None
    if patch is None or not patch.ledger.active or not _is_plain_sum(one, other) or transformed():
        total = one + other
        return total, norm(total)
    formula = patch.formula
    weight = None if formula.weight is None else child_of(norm, formula.weight)
    dtype = one.dtype if one.dtype == other.dtype else torch.promote_types(one.dtype, other.dtype)
    if not patch.is_all_of(norm) or not norm_fits(one, weight, formula, dtype):
        total = one + other
        return total, norm(total)
    patch.ledger.count("norm", patch.key)
    patch.ledger.count("add_norm", layer)
    options = formula.form(norm).options
    normed, total = add_rms_norm(other, one, weight, **options)
    patch.ledger.recompute.note(normed, functools.partial(rms_norm, **options), total, weight)
    return total, normed


def fork_norm(norm: Any, x: Any) -> tuple[Any, Any]:
    """x, and norm(x): where x goes on as the residual stream, and its two gradients are summed."""
    # Without a gradient of x there is nothing to sum.
    if torch.compiler.is_compiling() or type(x) is not Tensor or not x.requires_grad or transformed():
        return x, norm(x)
    patch: Patch | None = vars(norm).get("_tigon") if is_rms_norm(norm) else None
    if patch is None or not patch.ledger.active or not patch.is_all_of(norm):
        return x, norm(x)
    formula = patch.formula
    weight = None if formula.weight is None else child_of(norm, formula.weight)
    # A norm that would cut x into heads gives no tensor.
    if patch.heads or not patch.still_holds(norm) or not norm_fits(x, weight, formula) or is_dtensor(weight):
        return x, norm(x)
    patch.ledger.count("norm", patch.key)
    options = formula.form(norm).options
    normed, stream = forked_rms_norm(x, weight, **options)
    patch.ledger.recompute.note(normed, functools.partial(rms_norm, **options), x, weight)
    return stream, normed


def add_unit(unit: Any, residual: Any, x: Any) -> Any:
    """residual + unit(x), by the unit's own part where that has one pass for it: an MLP with adapters has."""
    patch: Patch | None = vars(unit).get("_tigon") if isinstance(unit, nn.Module) else None
    add = None if patch is None else getattr(patch.part, "add", None)
    total = None if add is None else add(unit, residual, x)
    return residual + unit(x) if total is None else total


def _is_plain_sum(one: Any, other: Any) -> bool:
    plain = (Tensor, nn.Parameter)
    if type(one) not in plain or type(other) not in plain or one.shape != other.shape or one.device != other.device:
        return False
    return one.dtype in DTYPES and other.dtype in DTYPES


# ------------------------------------------------------------------------------------------------------- the source


def _with_sums(fn: types.FunctionType) -> types.FunctionType | Reason:
    tree = tree_of(fn) if may_rebuild(fn.__code__) else None
    if tree is None:
        return NO_SOURCE
    function = function_of(tree)
    sites = list(_sites(function))
    # A statement is rewritten once: a norm of a sum comes first, then a unit's sum, then the stream beside its norm.
    taken = [statements[i] for statements, at, until, _ in sites for i in (at, until)]
    units = list(_units(function, taken))
    taken += [statements[i] for statements, at, *_ in units for i in (at, at + 1)]
    forks = list(_forks(function, taken))
    for statements, at, until, norm in sites:
        before, after = statements[at], statements[until]
        total = _sum_of(before)
        assert total is not None
        name, left, right = total
        statements[at] = ast.copy_location(_pair(name, _call(_SUM, norm, left, right)), before)
        statements[until] = _Result(norm).visit(after)
    for statements, at, norm, stream, x in forks:
        second = statements[at + 1]
        # At the line of the norm, which is the statement that may raise.
        statements[at] = ast.copy_location(_pair(stream, _call(_FORK, norm, _loaded(x))), second)
        statements[at + 1] = _Result(norm).visit(second)
    for statements, at, unit, residual, x in units:
        first, second = statements[at : at + 2]
        name = _assigned(second)[0]  # type: ignore[index]
        call = _call(_UNIT, unit, _loaded(residual), _loaded(x))
        statements[at] = ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], call), first)
        statements[at + 1] = ast.copy_location(ast.Pass(), second)
    ast.fix_missing_locations(tree)
    scope = dict(fn.__globals__)
    scope[_SUM], scope[_FORK], scope[_UNIT] = functools.partial(add_norm, name_of(fn)), fork_norm, add_unit
    # Dynamo guards a global through the module `__name__`, which does not have `add_norm` under this name.
    scope.pop("__name__", None)
    return rebuilt(fn, scope, None, code=compiled(tree, fn))


def _loaded(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def _call(function: str, module: str, *args: ast.expr) -> ast.expr:
    """function(self.module, *args)"""
    return ast.Call(_loaded(function), [ast.Attribute(_loaded("self"), module, ast.Load()), *args], [])


def _pair(name: str, call: ast.expr) -> ast.stmt:
    """name, _tigon_norm = call"""
    return ast.Assign([ast.Tuple([ast.Name(name, ast.Store()), ast.Name(_RESULT, ast.Store())], ast.Store())], call)


class _Result(ast.NodeTransformer):
    """Replaces the call of the norm by the name that holds the norm's result."""

    def __init__(self, norm: str) -> None:
        self.norm = norm

    def visit_Call(self, node: ast.Call) -> Any:
        called = _called(node)
        if called is not None and called[0] == self.norm:
            return ast.copy_location(ast.Name(_RESULT, ast.Load()), node)
        return self.generic_visit(node)


def _sites(function: Any) -> Iterator[tuple[list[ast.stmt], int, int, str]]:
    """The places where a name is assigned a sum, and the next statement that does more than rename the sum norms it."""
    for statements in bodies(function):
        for at, statement in enumerate(statements):
            total = _sum_of(statement)
            found = None if total is None else _norm_after(statements, at, total[0])
            if found is not None:
                yield statements, at, *found


def _forks(function: Any, taken: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int, str, str, str]]:
    """The places where a name keeps x as the residual stream, and the next statement norms x: norm, stream and x."""
    for statements, at, first, second in _pairs(function, taken):
        kept, normed = _assigned(first), _assigned(second)
        if kept is None or normed is None or not isinstance(kept[1], ast.Name):
            continue
        stream, x = kept[0], kept[1].id
        calls = [c for call in _always_evaluated(normed[1]) if (c := _called(call)) is not None and c[1] == x]
        if len(calls) == 1 and stream != x and _only_added(function, stream):
            yield statements, at, calls[0][0], stream, x


def _units(function: Any, taken: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int, str, str, str]]:
    """The places where a name is assigned `self.unit(x)`, and next the sum of another name and itself: unit, the other
    name and x."""
    for statements, at, first, second in _pairs(function, taken):
        made, total = _assigned(first), _sum_of(second)
        called = None if made is None else _called(made[1])
        if made is None or called is None or total is None:
            continue
        name, (unit, x), (target, left, right) = made[0], called, total
        own = isinstance(right, ast.Name) and right.id == name == target
        if own and isinstance(left, ast.Name) and left.id != name:
            yield statements, at, unit, left.id, x


def _pairs(function: Any, taken: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int, ast.stmt, ast.stmt]]:
    """Statements that follow one another, neither of them taken."""
    for statements in bodies(function):
        for at, (first, second) in enumerate(itertools.pairwise(statements)):
            if first not in taken and second not in taken:
                yield statements, at, first, second


def _assigned(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """The one name that a statement assigns, and its value; None for any other statement."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    (target,) = statement.targets
    return (target.id, statement.value) if isinstance(target, ast.Name) else None


def _sum_of(statement: ast.stmt) -> tuple[str, ast.expr, ast.expr] | None:
    """The name that is assigned a sum, and the sum's terms; None for any other statement."""
    found = _assigned(statement)
    if found is None or not isinstance(found[1], ast.BinOp) or not isinstance(found[1].op, ast.Add):
        return None
    return found[0], found[1].left, found[1].right


def _only_added(function: Any, name: str) -> bool:
    """Whether a name is read as a term of sums alone: a view of the stream may go there, and nobody writes into it."""
    nodes = list(ast.walk(function))
    sums = [node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)]
    added = {id(term) for node in sums for term in (node.left, node.right)}
    for node in nodes:
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return False
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) and id(node) not in added:
            return False
    return True


def _norm_after(statements: list[ast.stmt], at: int, total: str) -> tuple[int, str] | None:
    names = {total}
    for until in range(at + 1, len(statements)):
        statement = statements[until]
        if not isinstance(statement, (ast.Assign, ast.Return, ast.Expr)) or statement.value is None:
            return None
        renamed = _assigned(statement)
        if renamed is not None and isinstance(renamed[1], ast.Name):
            (names.add if renamed[1].id in names else names.discard)(renamed[0])
            continue
        calls = [c for call in _always_evaluated(statement.value) if (c := _called(call)) is not None and c[1] in names]
        return (until, calls[0][0]) if len(calls) == 1 else None
    return None


def _always_evaluated(node: ast.AST) -> Iterator[ast.Call]:
    """The calls in an expression that it always makes, and makes once."""
    if isinstance(node, (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _always_evaluated(child)


def _called(node: ast.AST) -> tuple[str, str] | None:
    """name and x of a call `self.name(x)`; None for any other node."""
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1 or not isinstance(node.args[0], ast.Name):
        return None
    func = node.func
    if not isinstance(func, ast.Attribute) or not isinstance(func.value, ast.Name) or func.value.id != "self":
        return None
    return func.attr, node.args[0].id


register(ResidualNorm())
