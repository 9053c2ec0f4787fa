"""Linear layers whose result goes through relu, and next a dropout: one node in the module's rewritten forward.

    hidden_states = self.wi(hidden_states)
    hidden_states = self.act(hidden_states)          →  hidden_states = _tigon_relu(self, "wi", "act", "dropout",
    hidden_states = self.dropout(hidden_states)                                     hidden_states)

and likewise `self.activation_fn(self.fc1(x))` in any expression. The statements compute the same by construction:
where the layer, the relu or the dropout is not torch's own, or has a hook, each module is called. The layers themselves
stay unpatched. A torch.nn.Sequential has no statements: its forward calls its children in order.

relu keeps its result alone, which the next layer keeps as well. The node saves one pass over the widest tensor of an
MLP where the layer has a bias, the memory of the product's result, and with a dropout relu's result and the mask.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from tigon.fusion.engine.part import Part, Site, Stage, register
from tigon.fusion.engine.patch import Patch, is_hooked
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.engine.rewrite import list_bodies, name_forward, parse_function
from tigon.fusion.logits.deferred import as_tensor
from tigon.fusion.parts.plain_linear import plain_layers, why_not_plain
from tigon.fusion.parts.residual_norm import make_layer_forward
from tigon.kernels import use_triton
from tigon.ops.linear.relu_linear import relu_linear

_CALL = "_tigon_relu"


class Unit(NamedTuple):
    """The children that a forward calls one after another. dropout: None if something else follows."""

    linear: str
    act: str
    dropout: str | None

    def fits(self, children: Any) -> bool:
        """Whether the children are torch's own layer, relu, and dropout."""
        kinds = tuple(type(children.get(name)) for name in self if name is not None)
        return kinds == (nn.Linear, nn.ReLU, nn.Dropout)[: len(kinds)]

    def run_plain(self, module: Any, x: Any) -> Any:
        for name in self:
            x = x if name is None else getattr(module, name)(x)
        return x

    def __str__(self) -> str:
        return f"relu of {self.linear}" + (", and the dropout behind it" if self.dropout else "")


class ReluLayers(Part):
    """Modules whose forward takes the relu of a linear layer: MLPs without a gate, and layers with these inside."""

    kind, stage = "mlp", Stage.AROUND

    def fuse(self, site: Site, module: nn.Module) -> None:
        if site.find_patch(module) is not None:
            return
        units = find_units(module)
        if units:
            what = "; ".join(map(str, units)) + " in one node"
            site.replace(self, module, _make_forward(site, module, units), None, what, key=_get_key(module))


def _get_key(module: nn.Module) -> Any:
    return name_forward(type(module).forward), find_units(module)


def _make_forward(site: Site, module: nn.Module, units: tuple[Unit, ...]) -> Callable[..., Any] | Reason:
    forward = type(module).forward
    if forward is nn.Sequential.forward:
        return sequential_forward
    run = functools.partial(run_unit, _get_key(module))
    made: Callable[..., Any] | Reason = make_layer_forward(
        site, forward, units, lambda _: {_CALL: run}, functools.partial(_join_calls, units)
    )
    return made


def find_units(module: nn.Module) -> tuple[Unit, ...]:
    """The units that the module's forward calls, whose children are torch's own."""
    children = module._modules
    if type(module).forward is nn.Sequential.forward:
        return tuple(unit for unit, _ in _read_sequence(children))
    found = []
    for unit in read_units(type(module).forward):
        units = (unit, unit._replace(dropout=None))
        found += [made for made in units if made.fits(children)][:1]
    return tuple(found)


def run_unit(key: Any, module: Any, linear: str, act: str, dropout: str | None, x: Any) -> Any:
    """dropout(act(linear(x))). key: the ledger's key for the calls."""
    unit = Unit(linear, act, dropout)
    patch: Patch | None = module.__dict__.get("_tigon")
    children = module._modules
    if patch is None or not patch.ledger.active or torch.compiler.is_compiling() or not unit.fits(children):
        return unit.run_plain(module, x)
    x = as_tensor(x)
    layers = plain_layers([children[linear]], x)
    others = [children[name] for name in unit[1:] if name is not None]
    # A hook on relu or on the dropout sees a result that one node does not have. At p = 1 all is zero, also in relu.
    share = others[-1].p if dropout is not None and others[-1].training else 0.0
    if layers is None or any(is_hooked(m) or "forward" in vars(m) for m in others) or share >= 1.0:
        patch.ledger.count_fallback("mlp", key, why_not_plain(x))
        return unit.run_plain(module, x)
    patch.ledger.count("mlp", key)
    # Without kernels every part runs torch's operations, which can be differentiated twice.
    if not use_triton(layers.x, *layers.weights):
        return unit.run_plain(module, x)
    return relu_linear(layers.x, layers.weights[0], layers.biases[0], dropout=share)


def sequential_forward(self: Any, input: Any) -> Any:
    units = {unit.linear: (unit, length) for unit, length in _read_sequence(self._modules)}
    names, at = list(self._modules), 0
    while at < len(names):
        unit, length = units.get(names[at], (None, 1))
        if unit is None:
            input = self._modules[names[at]](input)
        else:
            input = run_unit(_get_key(self), self, *unit, input)
        at += length
    return input


def _read_sequence(children: Any) -> Iterator[tuple[Unit, int]]:
    """The units in a torch.nn.Sequential that end in front of another linear layer, each with its number of modules."""
    names = list(children)
    for at in range(len(names) - 2):
        for unit in (Unit(*names[at : at + 3]), Unit(names[at], names[at + 1], None)):
            length = len(unit) - (unit.dropout is None)
            behind = [type(children[name]) for name in names[at + length : at + length + 1]]
            if unit.fits(children) and behind == [nn.Linear]:
                yield unit, length


# ------------------------------------------------------------------------------------------------------- the source


@functools.lru_cache(maxsize=4096)
def read_units(forward: Any) -> tuple[Unit, ...]:
    """The children that a forward calls as `act(linear(x))`, with and without the child that it calls on the result."""
    function = parse_function(forward)
    if function is None or not function.args.args:
        return ()
    source = _Source(function.args.args[0].arg)
    found = [unit for body in list_bodies(function) for at in range(len(body)) for unit, *_ in source.find(body, at)]
    nested = (source.read_nested(node) for node in ast.walk(function) if isinstance(node, ast.Call))
    return tuple(dict.fromkeys((*found, *(Unit(*read[:2], None) for read in nested if read is not None))))


def _join_calls(units: tuple[Unit, ...], function: ast.FunctionDef) -> None:
    """Replace the calls of each unit by one call."""
    source = _Source(function.args.args[0].arg)
    for body in list_bodies(function):
        at = 0
        while at < len(body):
            for unit, x, count in source.find(body, at):
                if unit in units:
                    first: Any = body[at]
                    made = ast.Assign([ast.Name(first.targets[0].id, ast.Store())], source.make_call(unit, x, first))
                    body[at : at + count] = [ast.copy_location(made, first)]
                    break
            at += 1
    _InPlace(source, units).visit(function)


class _Source(NamedTuple):
    """Reads and makes calls in the source of a forward. own: the name of the module."""

    own: str

    def find(self, statements: list[ast.stmt], at: int) -> Iterator[tuple[Unit, ast.expr, int]]:
        """The possible units that begin with a statement and assign one name, longest first: (unit, x, statements)."""
        match statements[at]:
            case ast.Assign([ast.Name(target)], ast.Call() as call):
                pass
            case _:
                return
        nested, single = self.read_nested(call), self.read_call(call)
        starts: list[tuple[tuple[str, ...], ast.expr]] = [] if nested is None else [(nested[:2], nested[2])]
        starts += [] if single is None else [(single[:1], single[1])]
        for names, x in starts:
            chain = [(name, 1) for name in names]  # each child's name, and how many statements end with its call
            for count, statement in enumerate(statements[at + 1 : at + 3], 2):
                match statement:
                    case ast.Assign([ast.Name(name)], ast.Call(_, [ast.Name(read)], []) as call) if (
                        name == read == target and (called := self.read_call(call)) is not None
                    ):
                        chain.append((called[0], count))
                    case _:
                        break
            if len(chain) > 2:
                yield Unit(chain[0][0], chain[1][0], chain[2][0]), x, chain[2][1]
            if len(chain) > 1:
                yield Unit(chain[0][0], chain[1][0], None), x, chain[1][1]

    def make_call(self, unit: Unit, x: ast.expr, at: Any) -> ast.Call:
        arguments = ast.Name(self.own, ast.Load()), *map(ast.Constant, unit), x
        return ast.copy_location(ast.Call(ast.Name(_CALL, ast.Load()), list(arguments), []), at)

    def read_nested(self, node: ast.expr) -> tuple[str, str, ast.expr] | None:
        """linear, act and x in a call `self.act(self.linear(x))`."""
        outer = self.read_call(node)
        inner = None if outer is None else self.read_call(outer[1])
        return None if outer is None or inner is None else (inner[0], outer[0], inner[1])

    def read_call(self, node: ast.expr) -> tuple[str, ast.expr] | None:
        """name and x in a call `self.name(x)`."""
        match node:
            case ast.Call(ast.Attribute(ast.Name(own), name), [x], []) if own == self.own:
                return None if isinstance(x, ast.Starred) else (name, x)
        return None


class _InPlace(ast.NodeTransformer):
    """Replaces the calls of a unit inside any expression."""

    def __init__(self, source: _Source, units: tuple[Unit, ...]) -> None:
        self.source, self.units = source, units

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        read = self.source.read_nested(node)
        if read is None or (unit := Unit(*read[:2], None)) not in self.units:
            return node
        return self.source.make_call(unit, read[2], node)


register(ReluLayers())
