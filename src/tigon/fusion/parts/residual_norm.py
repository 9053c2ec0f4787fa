"""Layers whose residual sum and norm run as one kernel: in a rewritten forward `add_rms_norm` does both steps.

A decoder layer adds to the residual stream and norms the sum:

    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)

The rewritten forward is made from the layer's source. Where a norm follows the sum, both statements become

    hidden_states, _tigon_norm = _tigon_add_norm(self.post_attention_layernorm, residual, hidden_states)
    residual = hidden_states
    hidden_states = _tigon_norm

which computes the same by construction, for any other code in the layer: where `add_rms_norm` does not apply,
`_tigon_add_norm` adds and calls the norm's module. Line numbers, globals and decorators stay.

The rewritten forward joins two more pairs of statements, in the same way. Where the stream goes on beside a norm,
the norm's backward pass sums the stream's two gradients, and an adapted MLP adds the result to the stream itself:

    residual = hidden_states                                →  residual, _tigon_norm = _tigon_fork_norm(
    hidden_states = self.input_layernorm(hidden_states)            self.input_layernorm, hidden_states)
                                                               hidden_states = _tigon_norm

    hidden_states = self.mlp(hidden_states)                 →  hidden_states = _tigon_add_unit(
    hidden_states = residual + hidden_states                       self.mlp, residual, hidden_states)

Where the statements are those of a whole layer (norm, attention, sum, norm, MLP, sum), they run only if the layer does
not run as a whole (decoder_layer.py):

    _tigon_y = _tigon_layer(self, hidden_states, "hidden_states", attention_mask=attention_mask, …)
    if _tigon_y is None:
        the statements
    else:
        hidden_states = _tigon_y
"""

from __future__ import annotations

import ast
import functools
import itertools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tigon.fusion.engine.part import ForwardCache, Part, Site, Stage, register
from tigon.fusion.engine.patch import Patch, get_child, is_functorch_active
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.engine.rewrite import list_bodies, name_forward, parse_function, rewrite_forward
from tigon.fusion.fp8.layers import norm_in_rows
from tigon.fusion.logits.recipe import DTYPES
from tigon.fusion.parts.norm import is_rms_norm, norm_fits
from tigon.fusion.parts.sharded_rows import is_dtensor
from tigon.ops.add_rms_norm import add_rms_norm
from tigon.ops.forked_rms_norm import forked_rms_norm
from tigon.ops.rms_norm import rms_norm

_SUM, _FORK, _UNIT, _RESULT = "_tigon_add_norm", "_tigon_fork_norm", "_tigon_add_unit", "_tigon_norm"
_LAYER, _WHOLE = "_tigon_layer", "_tigon_y"


class ResidualNorm(Part):
    """Layers whose forward norms a sum: they run a rewritten forward."""

    kind, stage = "add_norm", Stage.AROUND

    def fuse(self, site: Site, module: nn.Module) -> None:
        forward = type(module).forward
        norms = [name for name in find_norms(forward) if is_rms_norm(getattr(module, name, None))]
        if norms and site.find_patch(module) is None:
            what = f"the residual sum and {', '.join(norms)} in one pass"
            rewritten = make_layer_forward(site, forward, "add_norm", _make_globals, _join_statements)
            site.replace(self, module, rewritten, None, what, key=name_forward(forward))


@functools.lru_cache(maxsize=4096)
def find_norms(forward: Any) -> tuple[str, ...]:
    """The names of the norms that a forward calls on a sum just computed, in order."""
    function = parse_function(forward)
    return () if function is None else tuple(str(edit.norm) for edit in _find_sums(function))


def make_layer_forward(site: Site, forward: Any, name: Any, make_globals: Any, edit: Any) -> Any:
    """The rewritten forward, behind the decorators that the instance's class has at call time.

    name: tells apart the rewritten forwards of one forward. make_globals, edit: as in `rewrite_forward`.

    transformers wraps the forward of a layer class, and of every derived class, in the function that
    checkpoints. FSDP2 derives such a class from the class of layers that fuse() has replaced already.
    """

    rewritten = site.get_cached(ForwardCache)  # not the site, which holds the model

    def rewrite(function: Any) -> Any:
        key = function, name
        if key not in rewritten:
            rewritten[key] = rewrite_forward(function, make_globals, edit)
        return rewritten[key]

    first = rewrite(forward)
    if isinstance(first, Reason):
        return first

    def layer_forward(self_: Any, *args: Any, **kwargs: Any) -> Any:
        now = type(self_).forward
        run = first if now is forward else rewrite(now)
        return (now if isinstance(run, Reason) else run)(self_, *args, **kwargs)

    return layer_forward


def _make_globals(fn: types.FunctionType) -> dict[str, Any]:
    return {_SUM: functools.partial(add_norm, name_forward(fn)), _FORK: fork_norm, _UNIT: add_unit, _LAYER: run_whole}


def add_norm(layer: str, norm: Any, one: Any, other: Any) -> tuple[Any, Any]:
    """one + other, and norm(one + other). layer: the name of the layer's forward, for the report."""
    patch: Patch | None = vars(norm).get("_tigon") if isinstance(norm, nn.Module) else None
    if patch is None or not patch.ledger.active or not _is_plain_sum(one, other) or is_functorch_active():
        total = one + other
        return total, norm(total)
    formula = patch.formula
    weight = None if formula.weight is None else get_child(norm, formula.weight)
    dtype = one.dtype if one.dtype == other.dtype else torch.promote_types(one.dtype, other.dtype)
    if not patch.is_entire_call(norm, idle=True) or not norm_fits(one, weight, formula, dtype):
        total = one + other
        return total, norm(total)
    patch.ledger.count("norm", patch.key)
    patch.ledger.count("add_norm", layer)
    if patch.fp8 is not None and (made := norm_in_rows(norm, patch, other, one, False)):
        return made
    weight, options = _keep(weight), formula.form(norm).options
    normed, total = add_rms_norm(other, one, weight, **options)
    patch.ledger.recompute.note(normed, functools.partial(rms_norm, **options), total, weight)
    return total, normed


def fork_norm(norm: Any, x: Any) -> tuple[Any, Any]:
    """x, and norm(x): where x goes on as the residual stream, and x's two gradients are summed."""
    # Without a gradient for x there are no gradients to sum.
    if torch.compiler.is_compiling() or type(x) is not Tensor or is_functorch_active():
        return x, norm(x)
    patch: Patch | None = vars(norm).get("_tigon") if is_rms_norm(norm) else None
    if patch is None or not patch.ledger.active or not patch.is_entire_call(norm, idle=True):
        return x, norm(x)
    if not x.requires_grad and patch.fp8 is None:
        return x, norm(x)
    formula = patch.formula
    weight = None if formula.weight is None else get_child(norm, formula.weight)
    # A norm that would cut x into heads gives no tensor.
    if patch.is_head_norm or not patch.still_holds(norm) or not norm_fits(x, weight, formula) or is_dtensor(weight):
        return x, norm(x)
    if patch.fp8 is not None and (made := norm_in_rows(norm, patch, x, None, x.requires_grad)):
        patch.ledger.count("norm", patch.key)
        return (x if made[0] is None else made[0]), made[1]
    if not x.requires_grad:
        return x, norm(x)
    patch.ledger.count("norm", patch.key)
    weight, options = _keep(weight), formula.form(norm).options
    normed, stream = forked_rms_norm(x, weight, **options)
    patch.ledger.recompute.note(normed, functools.partial(rms_norm, **options), x, weight)
    return stream, normed


def add_unit(unit: Any, residual: Any, x: Any) -> Any:
    """residual + unit(x), by the unit's own part where that part has a single pass for it: an MLP with adapters has."""
    patch: Patch | None = vars(unit).get("_tigon") if isinstance(unit, nn.Module) else None
    add = None if patch is None else getattr(patch.part, "add", None)
    total = None if add is None else add(unit, residual, x)
    return residual + unit(x) if total is None else total


def run_whole(layer: Any, x: Any, name: str | None, *args: Any, **kwargs: Any) -> Any:
    """The layer's result for x, by a part that runs whole layers; None where the statements have to run.

    name: the keyword by which attention takes the hidden states; None: they are the first argument. args, kwargs:
    attention's other arguments.
    """
    if torch.compiler.is_compiling():
        return None
    patch: Patch | None = vars(layer).get("_tigon")
    whole = None if patch is None else patch.whole
    return None if whole is None else whole(layer, x, name, *args, **kwargs)


def _keep(weight: Tensor | None) -> Tensor | None:
    """The weight until the backward pass: a copy where ZeRO-3 may free the weight, which its hooks would gather."""
    return weight.clone() if weight is not None and hasattr(weight, "ds_id") else weight


def _is_plain_sum(one: Any, other: Any) -> bool:
    plain = (Tensor, nn.Parameter)
    if type(one) not in plain or type(other) not in plain or one.shape != other.shape or one.device != other.device:
        return False
    return one.dtype in DTYPES and other.dtype in DTYPES


# ------------------------------------------------------------------------------------------------------- the source


class _Edit(NamedTuple):
    """Two statements of a body: `made` replaces the first; in the last, `norm`'s result replaces its call.

    Without a norm the last statement goes.
    """

    statements: list[ast.stmt]
    at: int
    until: int
    made: ast.stmt
    norm: str | None


class LayerNames(NamedTuple):
    """The children of a layer whose forward is norm, attention, sum, norm, MLP, sum."""

    first_norm: str
    attention: str
    second_norm: str
    mlp: str


class _WholeLayer(NamedTuple):
    """The statements of such a layer, from `at` on in a body. x, y: its input's and its result's name."""

    names: LayerNames
    statements: list[ast.stmt]
    at: int
    x: str
    y: str
    call: ast.Call
    keyword: str | None


_STATEMENTS = 8


def _join_statements(function: ast.FunctionDef) -> None:
    whole = _find_layer(function)
    # A statement is rewritten once: a norm after a sum comes first, then a unit's sum, then the stream beside a norm.
    edits: list[_Edit] = []
    for find in (_find_sums, _find_units, _find_forks):
        used = [edit.statements[i] for edit in edits for i in (edit.at, edit.until)]
        edits += list(find(function, used))
    # From the last on: where a sum's term is itself the norm of the sum before, that norm's result goes into `made`.
    for statements, at, until, made, norm in reversed(edits):
        last = statements[until]
        statements[at] = made
        statements[until] = ast.copy_location(ast.Pass(), last) if norm is None else _ResultInPlace(norm).visit(last)
    if whole is not None:
        _run_whole_first(whole)


def _run_whole_first(whole: _WholeLayer) -> None:
    """Put the call that runs a whole layer before its statements."""
    statements, call, until = whole.statements, whole.call, whole.at + _STATEMENTS
    first = statements[whole.at]
    leading = [_make_load("self"), _make_load(whole.x), ast.Constant(whole.keyword)]
    arguments = call.args if whole.keyword else call.args[1:]
    keywords = [k for k in call.keywords if k.arg is None or k.arg != whole.keyword]
    run = ast.Call(_make_load(_LAYER), [*leading, *arguments], keywords)
    is_none = ast.Compare(_make_load(_WHOLE), [ast.Is()], [ast.Constant(None)])
    done = ast.Assign([ast.Name(whole.y, ast.Store())], _make_load(_WHOLE))
    statements[whole.at : until] = [
        ast.copy_location(ast.Assign([ast.Name(_WHOLE, ast.Store())], run), first),
        ast.copy_location(ast.If(is_none, statements[whole.at : until], [ast.copy_location(done, first)]), first),
    ]


def _make_load(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def _make_call(target: ast.expr, function: str, child: str, *args: ast.expr, line: ast.stmt) -> ast.stmt:
    """target = function(self.child, *args)"""
    call = ast.Call(_make_load(function), [ast.Attribute(_make_load("self"), child, ast.Load()), *args], [])
    return ast.copy_location(ast.Assign([target], call), line)


def _make_pair(name: str) -> ast.expr:
    """The target `name, _tigon_norm`."""
    return ast.Tuple([ast.Name(name, ast.Store()), ast.Name(_RESULT, ast.Store())], ast.Store())


class _ResultInPlace(ast.NodeTransformer):
    """Replaces the norm's call by the name that holds the norm's result."""

    def __init__(self, norm: str) -> None:
        self.norm = norm

    def visit_Call(self, node: ast.Call) -> Any:
        called = _read_call(node)
        if called is not None and called[0] == self.norm:
            return ast.copy_location(ast.Name(_RESULT, ast.Load()), node)
        return self.generic_visit(node)


@functools.lru_cache(maxsize=4096)
def read_layer(forward: Any) -> LayerNames | None:
    """The children that a forward calls, if it is a whole layer's; None for any other forward."""
    function = parse_function(forward)
    whole = None if function is None else _find_layer(function)
    return None if whole is None else whole.names


def _find_layer(function: Any) -> _WholeLayer | None:
    body = function.body
    return next(filter(None, (_read_layer(function, body, at) for at in range(len(body) - _STATEMENTS + 1))), None)


def _read_layer(function: Any, body: list[ast.stmt], at: int) -> _WholeLayer | None:
    match body[at : at + _STATEMENTS]:
        case [
            ast.Assign([ast.Name(stream)], ast.Name(x)),
            ast.Assign([ast.Name(normed)], ast.Call() as first),
            ast.Assign([ast.Tuple([ast.Name(made), ast.Name(weights)])], ast.Call() as call),
            ast.Assign([ast.Name(total)], ast.BinOp(ast.Name(left), ast.Add(), ast.Name(right))),
            ast.Assign([ast.Name(second_stream)], ast.Name(kept)),
            ast.Assign([ast.Name(second_normed)], ast.Call() as second),
            ast.Assign([ast.Name(unit)], ast.Call() as mlp),
            ast.Assign([ast.Name(y)], ast.BinOp(ast.Name(last_left), ast.Add(), ast.Name(last_right))),
        ]:
            pass
        case _:
            return None
    calls = [called for node in (first, second, mlp) if (called := _read_call(node)) is not None]
    attention = call.func
    if len(calls) != 3 or not isinstance(attention, ast.Attribute) or not isinstance(attention.value, ast.Name):
        return None
    flow = (x, total, second_normed), (left, right), (kept,), (last_left, last_right)
    if flow != (tuple(c[1] for c in calls), (stream, made), (total,), (second_stream, unit)):
        return None
    # Attention takes the normed states once, and nothing else that these statements make.
    given: list[tuple[str | None, ast.expr]] = [(None, call.args[0])] if call.args else []
    given += [(k.arg, k.value) for k in call.keywords if k.arg is not None]
    places = [name for name, value in given if isinstance(value, ast.Name) and value.id == normed]
    values = [*call.args, *(k.value for k in call.keywords)]
    names = [value.id for value in values if isinstance(value, ast.Name)]
    if attention.value.id != "self" or len(places) != 1 or len(names) != len(values) or names.count(normed) != 1:
        return None
    if {stream, weights} & {*names, y, x} or weights in (made, stream, normed):
        return None
    if stream in (normed, made) or second_stream in (second_normed, unit):
        return None
    # Later statements see the layer's result alone.
    inside = {stream, normed, made, weights, total, second_stream, second_normed, unit} - {y}
    for statement in body[at + _STATEMENTS :]:
        if any(isinstance(node, ast.Name) and node.id in inside for node in ast.walk(statement)):
            return None
    found = LayerNames(calls[0][0], attention.attr, calls[1][0], calls[2][0])
    return _WholeLayer(found, body, at, x, y, call, places[0])


def _find_sums(function: Any, used: Any = ()) -> Iterator[_Edit]:
    """The places where a name is assigned a sum, and the next statement that is no renaming norms the sum."""
    for statements in list_bodies(function):
        for at, statement in enumerate(statements):
            match statement:
                case ast.Assign([ast.Name(total)], ast.BinOp(left, ast.Add(), right)):
                    norm = _find_norm_after(statements, at, total)
                    if norm is not None:
                        made = _make_call(_make_pair(total), _SUM, norm[1], left, right, line=statement)
                        yield _Edit(statements, at, norm[0], made, norm[1])


def _find_forks(function: Any, used: list[ast.stmt]) -> Iterator[_Edit]:
    """The places where a name keeps x as the residual stream, and the next statement norms x."""
    for statements, at, first, second in _list_pairs(function, used):
        match first, second:
            case ast.Assign([ast.Name(stream)], ast.Name(x)), ast.Assign([ast.Name()], value):
                calls = _find_calls(value, {x})
                if len(calls) == 1 and stream != x and _only_added(function, stream):
                    # At the line of the norm, which is the statement that may raise.
                    made = _make_call(_make_pair(stream), _FORK, calls[0], _make_load(x), line=second)
                    yield _Edit(statements, at, at + 1, made, calls[0])


def _find_units(function: Any, used: list[ast.stmt]) -> Iterator[_Edit]:
    """The places where a name is assigned `self.unit(x)`, and next the sum of another name and that name."""
    for statements, at, first, second in _list_pairs(function, used):
        match first, second:
            case (
                ast.Assign([ast.Name(name)], ast.Call() as call),
                ast.Assign([ast.Name(total)], ast.BinOp(ast.Name(residual), ast.Add(), ast.Name(made))),
            ):
                called = _read_call(call)
                if called is not None and name == total == made != residual:
                    terms = _make_load(residual), _make_load(called[1])
                    target = ast.Name(name, ast.Store())
                    edit = _make_call(target, _UNIT, called[0], *terms, line=first)
                    yield _Edit(statements, at, at + 1, edit, None)


def _list_pairs(function: Any, used: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int, ast.stmt, ast.stmt]]:
    """Pairs of adjacent statements, neither of them used."""
    for statements in list_bodies(function):
        for at, (first, second) in enumerate(itertools.pairwise(statements)):
            if first not in used and second not in used:
                yield statements, at, first, second


def _only_added(function: Any, name: str) -> bool:
    """Whether a name is only read as a sum's term: a view into the stream may go there, and no code writes to it."""
    nodes = list(ast.walk(function))
    sums = [node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)]
    added = {id(term) for node in sums for term in (node.left, node.right)}
    for node in nodes:
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return False
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) and id(node) not in added:
            return False
    return True


def _find_norm_after(statements: list[ast.stmt], at: int, total: str) -> tuple[int, str] | None:
    names = {total}
    for until in range(at + 1, len(statements)):
        match statements[until]:
            case ast.Assign([ast.Name(name)], ast.Name(value)):
                (names.add if value in names else names.discard)(name)
            case ast.Assign() | ast.Return() | ast.Expr() as statement if statement.value is not None:
                calls = _find_calls(statement.value, names)
                return (until, calls[0]) if len(calls) == 1 else None
            case _:
                return None
    return None


def _find_calls(node: ast.AST, names: set[str]) -> list[str]:
    """The children that an expression always calls, exactly once, with one of these names alone."""
    calls = (_read_call(call) for call in _list_certain_calls(node))
    return [child for child, x in filter(None, calls) if x in names]


def _list_certain_calls(node: ast.AST) -> Iterator[ast.Call]:
    """The calls that an expression always makes, exactly once."""
    if isinstance(node, (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _list_certain_calls(child)


def _read_call(node: ast.AST) -> tuple[str, str] | None:
    """name and x in a call `self.name(x)`; None for any other node."""
    match node:
        case ast.Call(ast.Attribute(ast.Name("self"), name), [ast.Name(x)], []):
            return name, x
    return None


register(ResidualNorm())
