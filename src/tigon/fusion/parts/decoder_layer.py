"""Decoder layers whose parts are all plain: the work before attention is one autograd node, and the work after it one.

Fused by itself, each part checks its module at each call, is called through the module, and adds its own nodes. Where
a layer is norm, attention, sum, norm, MLP, sum (residual_norm.py), and attention is

    query_states = self.q_norm(self.q_proj(hidden_states).view(hidden_shape)).transpose(1, 2)    with or without norms
    key_states, value_states = …
    query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
    …                                                              any statements: cache, mask, attention function
    attn_output = self.o_proj(attn_output)
    return attn_output, attn_weights

the layer's modules are checked together, once a call, and `enter_attention` and `leave_attention` compute what the
parts compute, with the same bits. The statements between run unchanged: attention's forward is rewritten to

    query_states, key_states, value_states = _tigon_heads(hidden_states, cos, sin, hidden_shape)
    …
    return attn_output, attn_weights

A module with a hook, an adapter, another forward or a changed attribute, a weight in another dtype or sharded, FP8,
offloading, recompute="mlp", a checkpoint, autocast to another dtype, and a call without gradients all run the parts.
"""

from __future__ import annotations

import ast
import functools
import inspect
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tigon.fusion.engine.part import Part, Site, Stage, register
from tigon.fusion.engine.patch import Patch, get_child, is_hooked
from tigon.fusion.engine.reasons import Reason
from tigon.fusion.engine.rewrite import name_forward, parse_function
from tigon.fusion.memory.recompute import without_recipes
from tigon.fusion.parts.mlp_formula import Gated
from tigon.fusion.parts.norm import is_rms_norm, norm_fits
from tigon.fusion.parts.norm_formula import Norm, RMSForm
from tigon.fusion.parts.plain_linear import plain_layers
from tigon.fusion.parts.projections import find_groups
from tigon.fusion.parts.residual_norm import LayerNames, ResidualNorm, read_layer
from tigon.fusion.parts.rotary import find_rotary
from tigon.fusion.parts.rotary_formula import Rotary
from tigon.fusion.shared_prefix.attention import REGISTRY
from tigon.kernels import autocast_dtype, is_traced, use_triton
from tigon.ops.linear.decoder_layer import Heads, enter_attention, leave_attention
from tigon.ops.qk_norm_rope import qk_norm_rope
from tigon.ops.rope import DEFAULT, NEIGHBOURS

_HEADS = "_tigon_heads"


class DecoderLayerPart(Part):
    """Layers whose norms, projections, rotation and gated MLP are fused: they get a runner for the whole layer."""

    kind, stage = "linear", Stage.LAST

    def fuse(self, site: Site, module: nn.Module) -> None:
        for layer in site.modules():
            patch = site.find_patch(layer)
            if patch is not None and isinstance(patch.part, ResidualNorm):
                form = _read_form(site, layer)
                patch.whole = None if form is None else WholeLayer(form)


class AttentionNames(NamedTuple):
    """The children and the global function that an attention's forward calls. norms: q's and k's head norms, if any."""

    projections: tuple[str, ...]
    norms: tuple[str, ...]
    rotate: str
    output: str


def _read_form(site: Site, layer: Any) -> LayerForm | None:
    """The form of a layer that can run as a whole; None where a part of it is not fused, or has another form."""
    names = read_layer(type(layer).forward)
    if names is None:
        return None
    first, attention, second, mlp = (get_child(layer, name) for name in names)
    inner = read_attention(type(attention).forward)
    patches = [site.find_patch(m) for m in (first, attention, second, mlp)]
    if inner is None or None in patches or not (is_rms_norm(first) and is_rms_norm(second)):
        return None
    rotary = find_rotary(site, type(attention).forward).get(inner.rotate)
    norms = [get_child(attention, name) for name in inner.norms]
    unit = vars(mlp)["_tigon"].formula
    groups = find_groups(attention)
    if not isinstance(rotary, Rotary) or not _is_plain_turn(rotary) or set(*groups[:1]) != set(inner.projections):
        return None
    if not isinstance(unit, Gated) or unit.up is None or not unit.is_bare or unit.same_dtypes:
        return None
    if any(value is not None for value in (unit.scale, unit.dropout, unit.after)):
        return None
    if not all(is_rms_norm(norm) and vars(norm)["_tigon"].is_head_norm for norm in norms):
        return None
    # The part "documents" has put another registry of attention functions in place of transformers'.
    state = vars(attention)
    installed = inspect.unwrap(state["forward"].__func__).__globals__
    scope = {_HEADS: make_heads} | {name: installed[name] for name in (REGISTRY,) if name in installed}
    key = _HEADS, state["_tigon"].rewritten_by
    core = site.get_rewritten(type(attention).forward, key, lambda fn: scope, _cut_attention)
    if isinstance(core, Reason):
        return None
    forward = name_forward(type(attention).forward)
    counted: list[tuple[str, Any]] = [("norm", vars(norm)["_tigon"].key) for norm in (first, second, *norms)]
    counted += [("add_norm", name_forward(type(layer).forward)), ("linear", (forward, groups))]
    counted += [("rotary", forward), ("mlp", vars(mlp)["_tigon"].key), *([("qk_norm", forward)] if norms else [])]
    formulas = tuple(vars(m)["_tigon"].formula for m in (first, second, *norms))
    own = inspect.unwrap(type(attention).forward).__globals__
    return LayerForm(names, inner, formulas, unit, rotary, own, own[inner.rotate], core, (*counted, ("layer", forward)))


def _is_plain_turn(rotary: Rotary) -> bool:
    """Whether the rotation is a plain `tigon.rope` of q and k (B, H, T, D), with the model's own cos and sin."""
    turn = rotary.turn
    plain = turn.angles == "whole" and turn.pairs != "parted" and not turn.back and not turn.tail
    return plain and rotary.default == 1 and rotary.names == ("q", "k", "cos", "sin")


@dataclass(frozen=True, eq=False)
class LayerForm:
    """A layer's names and formulas; no module, so that the layers of a model and of its copies can share it.

    norms: the formulas of the layer's norms, then of q's and k's. scope: the globals of attention's own forward, and
    rotate: the rotary function there when it was recognised. core: attention's rewritten forward. counted: the
    ledger's kinds and keys.
    """

    names: LayerNames
    inner: AttentionNames
    norms: tuple[Norm, ...]
    unit: Gated
    rotary: Rotary
    scope: dict[str, Any]
    rotate: Any
    core: Any
    counted: tuple[tuple[str, Any], ...]


class WholeLayer:
    """Runs one layer as a whole, in a patch's `whole`. It keeps what it found at the last call, until that changes."""

    def __init__(self, form: LayerForm) -> None:
        self.form = form
        self._found: Operands | None = None

    def __copy__(self) -> WholeLayer:
        return WholeLayer(self.form)

    def __call__(self, layer: nn.Module, x: Any, name: str | None, *args: Any, **kwargs: Any) -> Tensor | None:
        """The layer's result; None if anything in the layer may do more than its formula, or another rule applies.

        name: the keyword by which attention takes the hidden states; None: they are the first argument. args, kwargs:
        attention's other arguments.
        """
        if not torch.is_grad_enabled() or type(x) is not Tensor:
            return None
        ledger = layer.__dict__["_tigon"].ledger
        recompute = ledger.recompute
        if not ledger.active or recompute.mlp or recompute.offload is not None or recompute.is_elsewhere():
            return None
        if x.dim() != 3 or not x.is_contiguous() or not x.numel():
            return None
        found = self._found
        if found is None or not found.hold(layer, x):
            found = self._found = find_operands(self.form, layer, x)
            if found is None:
                return None
        if not use_triton(x) or is_traced(x) or torch._C._are_functorch_transforms_active():
            return None
        if torch.nn.modules.module._has_any_global_hook():
            return None
        # Under autocast to x's own dtype all casts are empty, but torch's own norms return fp32.
        narrow = autocast_dtype(x.device.type)
        if narrow is not None and (narrow is not x.dtype or any(norm.native for norm in self.form.norms)):
            return None
        if self.form.scope.get(self.form.inner.rotate) is not self.form.rotate:
            return None  # another library has replaced the function since
        call = LayerCall(self.form, ledger, x, found)
        try:
            if name is None:
                made = self.form.core(found.attention, call, *args, **kwargs)
            else:
                made = self.form.core(found.attention, *args, **{name: call}, **kwargs)
        except _Unfit:
            return None
        return call.leave(made[0])


class Operands:
    """What a layer's modules hold for a call, and whether they still hold it: a few comparisons for each module.

    attention: the module. weights, biases: q, k, v, o, gate, up and down. norm_weights, forms: the norms', in the
    order of `LayerForm.norms`.
    """

    def __init__(
        self, form: LayerForm, layer: nn.Module, linears: list[Any], norms: list[Any], forms: list[RMSForm]
    ) -> None:
        children: dict[str, Any] = layer._modules
        self.attention: Any = children[form.names.attention]
        mlp: Any = children[form.names.mlp]
        self.forms = forms
        self.weights = [m._parameters["weight"] for m in linears]
        self.biases = [m._parameters["bias"] for m in linears]
        self.norm_weights = [get_child(m, f.weight) for m, f in zip(norms, form.norms, strict=True)]  # type: ignore[arg-type]
        act = mlp.__dict__["_tigon"].act
        # A module's class, dictionary and entries. In the layer's own dictionary is the patch that keeps this object.
        self._states: list[tuple[Any, type, dict[str, Any], Any, Any]] = []
        self._others: list[tuple[Any, str, Any]] = []  # attributes from elsewhere, such as the class
        modules = [self.attention, mlp, *norms, *([] if act is None else [act])]
        for module in modules:
            patch = module.__dict__.get("_tigon")
            names = ["_modules", "_parameters"]
            if patch is not None:
                live = [n for n in getattr(patch.formula, "live", ()) if isinstance(n, str)]
                names += ["_tigon", "forward", *live, *(name for name, _ in patch.watched)]
            elif module is act:
                names += [name for name, _ in mlp.__dict__["_tigon"].watched_act]
            state = module.__dict__
            read = operator.itemgetter(*(name for name in names if name in state))
            self._states.append((module, type(module), state, read, read(state)))
            self._others += [(module, name, getattr(module, name)) for name in names if name not in state]
        # Each dictionary of hooks, and torch's count of the hooks registered so far, by which most calls need no look.
        self._hooks = [m.__dict__[name] for m in (*modules, *linears) for name in _HOOKS]
        self._registered = RemovableHandle.next_id
        self._children = [(name, children[name]) for name in form.names]
        self._inside: list[tuple[dict[str, Any], Any, tuple[Any, ...]]] = []
        for module in (self.attention, mlp):
            read = operator.itemgetter(*module._modules)
            self._inside.append((module._modules, read, read(module._modules)))
        self._linears = [
            (m, m.__dict__, m._parameters, weight, bias)
            for m, weight, bias in zip(linears, self.weights, self.biases, strict=True)
        ]
        self._weights = [(t, t.shape) for t in (*self.weights, *self.norm_weights, *self.biases) if t is not None]
        self._norms: list[tuple[dict[str, Any], Any, Any]] = [
            (m._parameters, f.weight, w) for m, f, w in zip(norms, form.norms, self.norm_weights, strict=True)
        ]
        first = self.weights[0]
        self._dtype, self._device, self._width = first.dtype, first.get_device(), first.shape[1]

    def hold(self, layer: nn.Module, x: Tensor) -> bool:
        """Whether a look at all modules and weights, for x, would find the same again."""
        dtype, device = self._dtype, self._device
        if x.dtype is not dtype or x.get_device() != device or x.shape[2] != self._width:
            return False
        if self._registered != RemovableHandle.next_id:
            if any(self._hooks):
                return False
            self._registered = RemovableHandle.next_id
        children = layer._modules
        for name, child in self._children:
            if children.get(name) is not child:
                return False
        try:
            # Tuples compare their elements by identity first.
            for module, kind, state, read, values in self._states:
                if type(module) is not kind or read(state) != values:
                    return False
            for modules, read, values in self._inside:
                if read(modules) != values:
                    return False
            for module, name, value in self._others:
                if getattr(module, name, self) != value:
                    return False
        except KeyError:  # taken away since
            return False
        for module, state, parameters, weight, bias in self._linears:
            if type(module) is not nn.Linear or "forward" in state or state["_parameters"] is not parameters:
                return False
            if parameters.get("weight") is not weight or parameters.get("bias") is not bias:
                return False
        for parameters, weight_name, weight in self._norms:
            if parameters.get(weight_name) is not weight:
                return False
        for weight, shape in self._weights:
            if weight.dtype is not dtype or weight.get_device() != device or weight.shape != shape:
                return False
        return True


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def find_operands(form: LayerForm, layer: nn.Module, x: Tensor) -> Operands | None:
    """A layer's operands for x; None if any module may do more than its formula, or has weights of another kind."""
    unit, children = form.unit, layer._modules
    first, attention, second, mlp = (children.get(name) for name in form.names)
    if first is None or attention is None or second is None or mlp is None:
        return None
    inner, parts = attention._modules, mlp._modules
    linears = [inner.get(name) for name in (*form.inner.projections, form.inner.output)]
    linears += [parts.get(name) for name in (unit.gate, unit.up, unit.down) if name is not None]
    layers = plain_layers(linears, x)
    norms = [first, second, *[inner.get(name) for name in form.inner.norms]]
    if layers is None or not _holds(attention, form.rotary) or not _holds(mlp, unit):
        return None
    if not all(norm is not None and _holds(norm, f) for norm, f in zip(norms, form.norms, strict=True)):
        return None
    forms = [f.form(norm) for norm, f in zip(norms, form.norms, strict=True)]
    act = mlp.__dict__["_tigon"].act
    if forms[2:3] != forms[3:] or (act is not None and parts.get(unit.act_module or "") is not act):
        return None
    try:
        found = Operands(form, layer, linears, norms, forms)
    except KeyError:  # a module from a file of an older torch, without a dictionary for some kind of hooks
        return None
    for t in (*found.weights, *found.norm_weights, *(b for b in found.biases if b is not None)):
        if type(t) is not nn.Parameter or t.dtype is not x.dtype:
            return None
    if not all(norm_fits(x, w, f) for w, f in zip(found.norm_weights[:2], form.norms, strict=False)):
        return None
    return found if use_triton(x, *found.weights, *found.norm_weights) else None


def _holds(module: Any, formula: Any) -> bool:
    """Whether calling the module runs the forward of this formula alone."""
    patch: Patch | None = module.__dict__.get("_tigon")
    if patch is None or patch.formula is not formula or patch.fp8 is not None or is_hooked(module):
        return False
    return patch.is_installed_on(module) and patch.still_holds(module)


class LayerCall:
    """One call of a layer: it stands for the hidden states in attention's rewritten forward.

    shape: the hidden states'.
    """

    __slots__ = ("form", "found", "ledger", "shape", "stream", "x")

    def __init__(self, form: LayerForm, ledger: Any, x: Tensor, found: Operands) -> None:
        self.form, self.ledger, self.found, self.x, self.shape = form, ledger, found, x, x.shape
        self.stream = x

    def enter(self, cos: Any, sin: Any, shape: Any) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v for attention. shape: the heads'. Raises: _Unfit where `tigon.rope` does not fit the angles."""
        found, x = self.found, self.x
        weights, forms = found.norm_weights, found.forms
        if not self._fit(cos, sin, shape):
            raise _Unfit
        recompute, rotary = self.ledger.recompute, self.form.rotary
        is_cheap = recompute.is_cheap()
        pair = (weights[2], weights[3]) if len(forms) == 4 else (None, None)
        heads = Heads(shape[-1], rotary.turn.pairs == "neighbours", forms[2] if len(forms) == 4 else None)
        with without_recipes(is_cheap):
            entered = enter_attention(
                x, weights[0], found.weights[:3], found.biases[:3], pair, (cos, sin), norm=forms[0], heads=heads,
                recompute=is_cheap, show_before=is_cheap and len(forms) == 4,
            )  # fmt: skip
        self.ledger.count_all(self.form.counted)
        if entered.before is not None:
            config = NEIGHBOURS if heads.interleaved else DEFAULT
            again = functools.partial(qk_norm_rope, **forms[2].options, unsqueeze_dim=1, config=config)
            recompute.note((entered.q, entered.k), again, *entered.before, *pair, cos, sin)
        if is_cheap:
            recompute.leave_out(2, 2 * x.numel() * x.element_size())
        self.stream = entered.stream
        return entered.q, entered.k, entered.v

    def _fit(self, cos: Any, sin: Any, shape: Any) -> bool:
        x, rotary = self.x, self.form.rotary
        B, T = x.shape[:2]
        if type(cos) is not Tensor or type(sin) is not Tensor or cos.dim() != 3 or cos.shape != sin.shape:
            return False
        if cos.dtype is not x.dtype or sin.dtype is not x.dtype or cos.requires_grad or sin.requires_grad:
            return False
        if tuple(shape[:-1]) != (B, T, -1) or cos.shape[0] not in (1, B) or cos.shape[1] != T:
            return False
        rotated, width = cos.shape[2], shape[-1]
        if any(weight.shape != (width,) for weight in self.found.norm_weights[2:]):
            return False
        if not rotary.turn.fits(rotated, width) or not (rotary.full if rotated == width else rotary.partial):
            return False
        return use_triton(x, cos, sin)

    def leave(self, a: Tensor) -> Tensor:
        """The layer's result, from attention's before its output projection."""
        found, recompute = self.found, self.ledger.recompute
        is_cheap = recompute.is_cheap()
        with without_recipes(is_cheap):
            return leave_attention(
                a, self.stream, found.norm_weights[1], found.weights[3:], found.biases[3:], norm=found.forms[1],
                act=self.form.unit.act, product=recompute.product, recompute=is_cheap,
            )  # fmt: skip


class _Unfit(Exception):
    """Attention's angles are of a form that the whole layer has no operator for. Nothing has been computed yet."""


def make_heads(call: LayerCall, cos: Any, sin: Any, shape: Any) -> tuple[Tensor, Tensor, Tensor]:
    return call.enter(cos, sin, shape)


# ------------------------------------------------------------------------------------------------------- the source


class _Attention(NamedTuple):
    """Statements of an attention's forward: `heads` and `turn` make q, k and v from x; the last but one projects."""

    names: AttentionNames
    heads: list[ast.stmt]
    turn: ast.stmt
    targets: tuple[str, str, str]
    arguments: tuple[str, str, str, str]  # x, cos, sin, shape


@functools.lru_cache(maxsize=4096)
def read_attention(forward: Any) -> AttentionNames | None:
    """What an attention's forward calls, if it has the form that can be cut; None for any other forward."""
    function = parse_function(forward)
    found = None if function is None else _read_attention(function)
    return None if found is None else found.names


def _read_attention(function: ast.FunctionDef) -> _Attention | None:
    body = function.body
    match body[-2:]:
        case [
            ast.Assign([ast.Name(a)], ast.Call(ast.Attribute(ast.Name("self"), output), [ast.Name(given)], [])),
            ast.Return(ast.Tuple([ast.Name(returned), _])),
        ] if a == given == returned:
            pass
        case _:
            return None
    heads: dict[str, _Head] = {}
    turn = None
    for statement in body[:-2]:
        head = _read_head(statement)
        if head is not None:
            heads[head.target] = head
        match statement:
            case ast.Assign(
                [ast.Tuple([ast.Name(q), ast.Name(k)])],
                ast.Call(ast.Name(rotate), [ast.Name(q_given), ast.Name(k_given), ast.Name(cos), ast.Name(sin)], []),
            ) if (q, k) == (q_given, k_given) and {q, k} <= heads.keys():
                turn = statement
                break
    values = [name for name in heads if turn is not None and name not in (q, k)]
    if turn is None or len(heads) != 3 or len(values) != 1:
        return None
    targets = q, k, values[0]
    ordered = [heads[name] for name in targets]
    norms = tuple(head.norm for head in ordered)
    x, shape = ordered[0].x, ordered[0].shape
    if any((head.x, head.shape) != (x, shape) for head in ordered) or norms[2] or bool(norms[0]) != bool(norms[1]):
        return None
    statements = [head.statement for head in ordered]
    if not _may_cut(function, statements, turn, targets, x, shape):
        return None
    names = AttentionNames(tuple(head.layer for head in ordered), tuple(filter(None, norms)), rotate, output)
    return _Attention(names, statements, turn, targets, (x, cos, sin, shape))


class _Head(NamedTuple):
    """target = self.norm(self.layer(x).view(shape)).transpose(1, 2), or the same without a norm."""

    statement: ast.stmt
    target: str
    layer: str
    norm: str
    x: str
    shape: str


def _read_head(statement: ast.stmt) -> _Head | None:
    match statement:
        case ast.Assign(
            [ast.Name(target)],
            ast.Call(ast.Attribute(inner, "transpose"), [ast.Constant(1), ast.Constant(2)], []),
        ):
            norm = ""
            match inner:
                case ast.Call(ast.Attribute(ast.Name("self"), norm), [ast.Call() as inner], []):
                    pass
            match inner:
                case ast.Call(
                    ast.Attribute(ast.Call(ast.Attribute(ast.Name("self"), layer), [ast.Name(x)], []), "view"),
                    [ast.Name(shape)], [],
                ):  # fmt: skip
                    return _Head(statement, target, layer, norm, x, shape)
    return None


def _may_cut(
    function: ast.FunctionDef, heads: list[ast.stmt], turn: ast.stmt, targets: tuple[str, ...], x: str, shape: str
) -> bool:
    """Whether the heads can be made at the rotation, and x is elsewhere only asked for its shape."""
    body = function.body
    before = body[: body.index(turn)]
    first = min(body.index(head) for head in heads)
    for at, statement in enumerate(before):
        if statement in heads:
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and (node.id in targets or (at > first and _is_stored(node, shape))):
                return False
    asked: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and node.attr == "shape" and isinstance(node.value, ast.Name):
            asked.add(id(node.value))
    used = {id(node) for head in heads for node in ast.walk(head)}
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    others = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == x and id(n) not in asked | used]
    return len(returns) == 1 and not others


def _is_stored(node: ast.Name, name: str) -> bool:
    return node.id == name and isinstance(node.ctx, ast.Store)


def _cut_attention(function: ast.FunctionDef) -> None:
    found = _read_attention(function)
    assert found is not None  # `read_attention` found the same source
    target = ast.Tuple([ast.Name(name, ast.Store()) for name in found.targets], ast.Store())
    made = ast.Call(ast.Name(_HEADS, ast.Load()), [ast.Name(name, ast.Load()) for name in found.arguments], [])
    heads = ast.copy_location(ast.Assign([target], made), found.turn)
    kept = [statement for statement in function.body if statement not in found.heads]
    kept[kept.index(found.turn)] = heads
    function.body = [*kept[:-2], kept[-1]]


register(DecoderLayerPart())
