"""Linear layers with one input: the first call computes for all, in the calling module's rewritten forward.

    query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
    key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
    value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)

The rewritten forward is made from the original source. Where that source always calls two or more linear layers, each
once and with the same local name, these statements become

    _tigon_ys = _tigon_projections(self, ("q_proj", "k_proj", "v_proj"), hidden_states)
    query_states = (self.q_proj(hidden_states) if _tigon_ys is None else _tigon_ys[0]).view(…)
    …

which computes the same by construction. The layers themselves stay unpatched. `_tigon_projections` checks
them at each call, and gives None wherever a layer is not plain: the forward then calls each as before.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.fusion.engine.part import Part, Site, Stage, register
from tigon.fusion.engine.patch import Patch
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.engine.rewrite import ChildCall, group_calls, list_bodies, name_forward, read_groups
from tigon.fusion.fp8.layers import multiply_in_fp8, why_not_in_fp8
from tigon.fusion.logits.deferred import as_tensor
from tigon.fusion.parts.plain_linear import plain_layers, why_not_plain
from tigon.kernels import use_triton
from tigon.ops.linear.projections import projections

_CALL, _RESULT = "_tigon_projections", "_tigon_ys"
Groups = tuple[tuple[str, ...], ...]


class ProjectionsPart(Part):
    """Modules whose forward always calls several linear layers with the same input: attention."""

    kind, stage = "linear", Stage.AROUND

    def fuse(self, site: Site, module: nn.Module) -> None:
        forward = type(module).forward
        groups = find_groups(module)
        if not groups:
            return
        patch = site.find_patch(module)
        if patch is None and site.why_not(module) is None:
            original = forward
        elif patch is not None and _shares_code(vars(module)["forward"], forward):
            original = vars(module)["forward"].__func__  # another part's, with the code from the class's forward
        else:
            return  # a fused MLP joins the layers itself, and no other replacement is to be undone
        rewritten = _rewrite(site, original, groups)
        if isinstance(rewritten, Reason):
            site.record_skipped(self, module, rewritten)
            return
        if patch is None:
            site.install(module, rewritten, Patch(self, site.ledger))
        else:
            site.rewrite(self, module, rewritten)
        what = "; ".join(", ".join(names) for names in groups) + " in one"
        site.record_fused(self, module, what, key=(name_forward(forward), groups))

    def forward_of_copy(self, site: Site, module: nn.Module) -> Callable[..., Any] | None:
        if vars(module)["_tigon"].part is self:
            return None  # the rewritten forward holds no state that belongs to a single model
        rewritten = _rewrite(site, vars(module)["forward"].__func__, find_groups(module))
        return None if isinstance(rewritten, Reason) else rewritten


def _rewrite(site: Site, forward: Any, groups: Groups) -> Any:
    make_globals = lambda fn: {_CALL: functools.partial(run_together, (name_forward(fn), groups))}  # noqa: E731
    return site.get_rewritten(forward, groups, make_globals, functools.partial(_join_calls, groups))


def find_groups(module: nn.Module) -> Groups:
    """The names of the module's own linear layers that the forward calls with the same input, in groups."""
    children = module._modules
    linear = ([n for n in names if type(children.get(n)) is nn.Linear] for names in read_groups(type(module).forward))
    return tuple(tuple(names) for names in linear if len(names) > 1)


def _shares_code(installed: Any, forward: Any) -> bool:
    """Whether an installed forward runs the code of the class's forward, with other globals."""
    function = getattr(installed, "__func__", None)
    ours, theirs = (getattr(inspect.unwrap(f), "__code__", f) if callable(f) else None for f in (function, forward))
    return ours is not None and ours is theirs


def run_together(key: Any, module: Any, names: tuple[str, ...], x: Any) -> tuple[Tensor, ...] | None:
    """The layers' results for x; None where each has to be called. key: the ledger's key for the calls."""
    patch: Patch | None = module.__dict__.get("_tigon")
    if patch is None or not patch.ledger.active:
        return None
    modules = module._modules
    group = patch.fp8.get(names) if type(patch.fp8) is dict else None
    if group is not None:
        ys = multiply_in_fp8(group, [modules.get(name) for name in names], x, patch.ledger)
        if ys is not None:
            patch.ledger.count("fp8", (type(module), names))
            patch.ledger.count("linear", key)
            return ys
        patch.ledger.count_fallback("fp8", (type(module), names), why_not_in_fp8(x, patch.ledger))
    if torch.compiler.is_compiling():
        return None
    x = as_tensor(x)
    layers = plain_layers([modules.get(name) for name in names], x)
    if layers is None:
        patch.ledger.count_fallback("linear", key, why_not_plain(x))
        return None
    patch.ledger.count("linear", key)
    # Without kernels every part runs torch's operations, which can be differentiated twice.
    return projections(*layers) if use_triton(layers.x, *layers.weights) else None


# ------------------------------------------------------------------------------------------------------- the source


def _join_calls(groups: Groups, function: ast.FunctionDef) -> None:
    for number, calls in enumerate(group_calls(function)):
        calls = [call for call in calls if any(call.name in names for names in groups)]
        if len(calls) > 1:
            _join(function, calls, f"{_RESULT}{number or ''}")


def _join(function: ast.FunctionDef, calls: list[ChildCall], result: str) -> None:
    """Put a joint call before the first call's statement, and the results in the calls' places."""
    statements, at = next(
        (body, i)
        for body in reversed(list(list_bodies(function)))  # the innermost, as ast.walk goes from the outside in
        for i, statement in enumerate(body)
        if any(node is calls[0].node for node in ast.walk(statement))
    )
    names = ast.Tuple([ast.Constant(call.name) for call in calls], ast.Load())
    made = ast.Call(ast.Name(_CALL, ast.Load()), [calls[0].own, names, calls[0].x], [])
    _InPlace({id(call.node): i for i, call in enumerate(calls)}, result).visit(function)
    statement = ast.Assign([ast.Name(result, ast.Store())], made)
    statements.insert(at, ast.copy_location(statement, statements[at]))


class _InPlace(ast.NodeTransformer):
    """Replaces each call by its result where a result exists."""

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
