"""Linear layers of one input: the first call computes for all, in a clone of the forward that calls them.

    query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
    key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
    value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)

The clone is made from the forward's own source. Where it always calls two or more linear layers, each once and with the
same local name, these statements become

    _tigon_ys = _tigon_projections(self, ("q_proj", "k_proj", "v_proj"), hidden_states)
    query_states = (self.q_proj(hidden_states) if _tigon_ys is None else _tigon_ys[0]).view(…)
    …

which computes the same by construction. Nothing is installed on the layers themselves. `_tigon_projections` looks at
them at each call, and gives None wherever a layer is not plain: the forward then calls each as it did.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.fusion.engine.clones import clone, name_of, rebuilt
from tigon.fusion.engine.part import Part, Stage, register
from tigon.fusion.engine.patch import Patch
from tigon.fusion.engine.reading import writes_globals
from tigon.fusion.engine.reasons import NO_SOURCE, Reason
from tigon.fusion.engine.site import Site
from tigon.fusion.engine.source import ChildCall, bodies, calls_together, compiled, function_of, may_rebuild, tree_of
from tigon.fusion.parts.plain import plain_layers, why_not_plain
from tigon.kernels import use_triton
from tigon.ops.linear.projections import projections

_CALL, _RESULT = "_tigon_projections", "_tigon_ys"
Groups = tuple[tuple[str, ...], ...]


class ProjectionsPart(Part):
    """Modules whose forward always calls several linear layers with one input: attention."""

    kind, option, stage = "linear", "projections", Stage.AROUND

    def fuse(self, site: Site, module: nn.Module) -> None:
        joins, forward = site.kept(Joins), type(module).forward
        groups = joins.groups(module, forward)
        if not groups:
            return
        patch = site.patch_of(module)
        if patch is None and site.why_not(module) is None:
            installed = forward
        elif patch is not None and joins.is_clone(vars(module)["forward"], forward):
            installed = vars(module)["forward"].__func__  # of another part, with the code of the class's forward
        else:
            return  # a fused MLP joins its layers itself, and no other replacement is to be undone
        made = joins.of(installed, groups)
        if isinstance(made, Reason):
            site.left(self, module, made)
            return
        if patch is None:
            site.install(module, made, Patch(self, site.ledger))
        else:
            site.rewrite(self, module, made)
        what = "; ".join(", ".join(names) for names in groups) + " in one"
        site.fused(self, module, what, key=(name_of(forward), groups))

    def forward_of_copy(self, site: Site, module: nn.Module) -> Callable[..., Any] | None:
        if vars(module)["_tigon"].part is self:
            return None  # nothing in the clone belongs to one model
        joins = site.kept(Joins)
        made = joins.of(vars(module)["forward"].__func__, joins.groups(module, type(module).forward))
        return None if isinstance(made, Reason) else made


class Joins:
    """The forwards that call linear layers with one input, and their clones."""

    def __init__(self) -> None:
        self._found: dict[Any, Groups] = {}
        self._clones: dict[Any, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Joins:
        return Joins()

    def groups(self, module: nn.Module, forward: Any) -> Groups:
        """The names of the module's own linear layers that its forward calls with one input, in groups."""
        inner = inspect.unwrap(forward) if callable(forward) else None
        if inner not in self._found:
            self._found[inner] = _groups_of(inner) if isinstance(inner, types.FunctionType) else ()
        children = module._modules
        found = ([n for n in names if type(children.get(n)) is nn.Linear] for names in self._found[inner])
        return tuple(tuple(names) for names in found if len(names) > 1)

    @staticmethod
    def is_clone(installed: Any, forward: Any) -> bool:
        """Whether an installed forward runs the code of the class's forward, with other globals."""
        function = getattr(installed, "__func__", None)
        mine, theirs = (getattr(inspect.unwrap(f), "__code__", f) if callable(f) else None for f in (function, forward))
        return mine is not None and mine is theirs

    def of(self, forward: Any, groups: Groups) -> Any:
        key = forward, groups
        if key not in self._clones:
            unfit = NO_SOURCE if writes_globals(forward) else None
            self._clones[key] = unfit or clone(forward, lambda fn: _joined(fn, groups))
        return self._clones[key]


def joined(key: Any, module: Any, names: tuple[str, ...], x: Any) -> tuple[Tensor, ...] | None:
    """What the layers of these names give for x; None where each has to be called. key: by which calls are counted."""
    if torch.compiler.is_compiling():
        return None
    patch: Patch | None = module.__dict__.get("_tigon")
    if patch is None or not patch.ledger.active:
        return None
    modules = module._modules
    layers = plain_layers([modules.get(name) for name in names], x)
    if layers is None:
        patch.ledger.ran_plain("linear", key, why_not_plain(x))
        return None
    patch.ledger.count("linear", key)
    # Without kernels every part runs torch's operations, which can be differentiated twice.
    return projections(*layers) if use_triton(layers.x, *layers.weights) else None


# ------------------------------------------------------------------------------------------------------- the source


def _groups_of(fn: types.FunctionType) -> Groups:
    tree = tree_of(fn) if may_rebuild(fn.__code__) else None
    return () if tree is None else tuple(tuple(c.name for c in calls) for calls in calls_together(function_of(tree)))


def _joined(fn: types.FunctionType, groups: Groups) -> types.FunctionType | Reason:
    tree = tree_of(fn) if may_rebuild(fn.__code__) else None
    if tree is None:
        return NO_SOURCE
    function = function_of(tree)
    for number, calls in enumerate(calls_together(function)):
        calls = [call for call in calls if any(call.name in names for names in groups)]
        if len(calls) > 1:
            _join(function, calls, f"{_RESULT}{number or ''}")
    ast.fix_missing_locations(tree)
    scope = dict(fn.__globals__)
    scope[_CALL] = functools.partial(joined, (name_of(fn), groups))
    # Dynamo guards a global through the module `__name__`, which does not have `joined` under this name.
    scope.pop("__name__", None)
    return rebuilt(fn, scope, None, code=compiled(tree, fn))


def _join(function: ast.FunctionDef, calls: list[ChildCall], result: str) -> None:
    """Put a call for all of the calls before the statement of the first, and its results in their places."""
    statements, at = next(
        (body, i)
        for body in reversed(list(bodies(function)))  # the innermost, as ast.walk goes from the outside in
        for i, statement in enumerate(body)
        if any(node is calls[0].node for node in ast.walk(statement))
    )
    names = ast.Tuple([ast.Constant(call.name) for call in calls], ast.Load())
    made = ast.Call(ast.Name(_CALL, ast.Load()), [calls[0].own, names, calls[0].x], [])
    _InPlace({id(call.node): i for i, call in enumerate(calls)}, result).visit(function)
    statement = ast.Assign([ast.Name(result, ast.Store())], made)
    statements.insert(at, ast.copy_location(statement, statements[at]))


class _InPlace(ast.NodeTransformer):
    """Replaces each call by its result where there is one."""

    def __init__(self, places: dict[int, int], result: str) -> None:
        self.places, self.result = places, result

    def visit_Call(self, node: ast.Call) -> Any:
        place = self.places.get(id(node))
        if place is None:
            return self.generic_visit(node)
        result = ast.Name(self.result, ast.Load())
        absent = ast.Compare(result, [ast.Is()], [ast.Constant(None)])
        value = ast.Subscript(result, ast.Constant(place), ast.Load())
        return ast.copy_location(ast.IfExp(absent, node, value), node)


register(ProjectionsPart())
