"""The forwards that stand in for a module's own, and how they are put on one instance and taken off again."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from tigon.backend import autocast_dtype
from tigon.models.compiled_logits import CompiledLogits
from tigon.models.head_norm import HeadNorm
from tigon.models.lazy_logits import LazyLogits
from tigon.models.recipe import DTYPES, Recipe
from tigon.models.recognize import HOOKS, Norm
from tigon.models.recognize_mlp import Gated
from tigon.models.regather import regather_of
from tigon.models.report import Ledger
from tigon.models.shards import is_dtensor, on_own_rows, rows_are_whole
from tigon.models.split_head import is_gathered, is_split
from tigon.ops.gated import geglu, reglu, swiglu
from tigon.ops.gated_linear import gated_linear
from tigon.ops.gated_mlp import gated_mlp, is_one_tile
from tigon.ops.layer_norm import layer_norm
from tigon.ops.relu2 import relu2
from tigon.ops.rms_norm import rms_norm


def nothing() -> None:
    """What patches and fusions are pickled as."""
    return


class Patch:
    """What a replaced forward needs, in its module's `_tigon`: copied along with the module.

    before: the forward that this instance had of its own, if it had one.
    act: the activation whose formula was recognised; another one in its place is honoured.
    heads: a norm whose result the module around it rotates next, if it is one of heads.
    """

    key: Any = None  # of its row in the report
    heads = False

    def __init__(
        self,
        kind: str,
        ledger: Ledger,
        formula: Any,
        act: Any = None,
        *,
        before: Any = None,
        labels_at: int | None = None,
    ) -> None:
        self.kind, self.ledger, self.formula, self.act = kind, ledger, formula, act
        self.before, self.labels_at = before, labels_at
        self.function: Callable[..., Any] | None = None

    def installed_on(self, module: nn.Module) -> bool:
        return getattr(vars(module).get("forward"), "__func__", None) is self.function

    def is_all_of(self, module: nn.Module) -> bool:
        """Whether to call the module is to call this forward: no hook on it, and none on all modules."""
        state = vars(module)
        hooked = torch.nn.modules.module._has_any_global_hook() or any(state.get(name) for name in HOOKS)
        return self.installed_on(module) and not hooked

    def __reduce__(self) -> Any:
        return nothing, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        ledger, act, before = (copy.deepcopy(v, memo) for v in (self.ledger, self.act, self.before))
        copied = Patch(self.kind, ledger, self.formula, act, before=before, labels_at=self.labels_at)
        copied.function, copied.key, copied.heads = self.function, self.key, self.heads
        return copied


def install(module: nn.Module, function: Callable[..., Any], patch: Patch) -> None:
    # A bound method, so that a deep copy of the module binds it to the copy.
    state = vars(module)
    # Methods are pickled by name: a loaded module then has its class's own.
    function.__name__ = "forward"
    patch.function = function
    state["_tigon"] = patch
    state["forward"] = types.MethodType(function, module)
    state["_replicate_for_data_parallel"] = types.MethodType(_replicate_for_data_parallel, module)


def restore(module: nn.Module) -> None:
    state = vars(module)
    patch = state.get("_tigon")
    # Where somebody has wrapped our forward since, theirs stays; ours, inactive now, passes through to the plain one.
    if patch is None or not patch.installed_on(module):
        return
    for name in ("_tigon", "forward", "_replicate_for_data_parallel"):
        state.pop(name, None)
    if patch.before is not None:
        state["forward"] = patch.before


def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
    """torch.nn.DataParallel copies `__dict__`, and with it a forward that is bound to the original."""
    replica: Any = type(self)._replicate_for_data_parallel(self)  # type: ignore[operator]
    forward = vars(self).get("forward")
    if isinstance(forward, types.MethodType):
        vars(replica)["forward"] = types.MethodType(forward.__func__, replica)
    return replica


# ---------------------------------------------------------------------------------------------------------- forwards


def transformed() -> bool:
    """Inside torch.func.grad, vmap and their like, for which the fused operators have no rules."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _plain(self: Any, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


def model_forward(before: Callable[..., Any]) -> Callable[..., Any]:
    """The model's forward, which also tells the head whether labels are given.

    before: the forward that it stands for: the class's, or one of the instance's own, bound.
    """

    # Dynamo puts a CrossEntropyLoss that is made in the forward into its graph unseen, and takes tensors alone for it.
    code = getattr(inspect.unwrap(before), "__code__", None)
    makes_loss_module = "CrossEntropyLoss" in getattr(code, "co_names", ())

    @functools.wraps(before)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch: Patch | None = getattr(self, "_tigon", None)
        if patch is None or patch.function is not forward:
            # Removed, but kept in use by a wrapper, around which the model was fused again.
            own = () if isinstance(before, types.MethodType) else (self,)
            return before(*own, *args, **kwargs)
        run = functools.partial(type(self).forward, self) if patch.before is None else patch.before
        ledger = patch.ledger
        if not ledger.active:
            return run(*args, **kwargs)
        at = patch.labels_at
        labels = kwargs.get("labels")
        if labels is None and at is not None and len(args) > at:
            labels = args[at]
        shifted = kwargs.get("shift_labels")
        outer = ledger.lazy
        if not outer:  # a model inside a model is part of the same step
            ledger.new_step()
            ledger.see_labels(labels, shifted)
        ledger.lazy = outer or labels is not None or shifted is not None
        if makes_loss_module and torch.compiler.is_compiling():
            ledger.lazy = False
        try:
            if torch.compiler.is_compiling():  # its partitioner decides what is kept
                return run(*args, **kwargs)
            with ledger.recompute.forward():
                return run(*args, **kwargs)
        except RuntimeError as error:
            if "support saved tensor hooks" in str(error):
                raise RuntimeError(f"{error} Fuse with recompute='product', which needs none.") from error
            raise
        finally:
            ledger.lazy = outer
            if not outer:
                ledger.valid = None

    return forward


def head_forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    patch: Patch = self._tigon
    ledger, plain = patch.ledger, patch.before or functools.partial(_plain, self)
    if not (ledger.active and ledger.lazy) or args or kwargs:
        return plain(input, *args, **kwargs)
    compiling = torch.compiler.is_compiling()
    regather = regather_of(self)
    if regather is not None and compiling:
        return plain(input)
    # Under torch.compile the lazy object is no tensor: evaluation, which gathers logits, gets real ones.
    if transformed() or (compiling and not torch.is_grad_enabled()):
        return plain(input)
    known = not is_split(self.weight) or (is_gathered(self) and not compiling)
    recipe = Recipe.of(input, self.weight, self.bias, ledger, regather) if known else None
    if recipe is None:
        ledger.plain_head(_why_plain(self))
        return plain(input)
    return CompiledLogits(recipe) if compiling else LazyLogits.of(recipe)


def _why_plain(head: Any) -> str:
    if is_dtensor(head.weight):
        return "its weight is a DTensor, and its logits are not gathered in a way that is known"
    if hasattr(head.weight, "ds_id"):
        return "its weight is partitioned by DeepSpeed's ZeRO-3"
    return f"its weight, {str(head.weight.dtype).removeprefix('torch.')}, does not fit the hidden states it was given"


def norm_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    patch: Patch = self._tigon
    formula: Norm = patch.formula
    if not patch.ledger.active or kwargs or len(args) != 1 + formula.gated or transformed():
        return _plain(self, *args, **kwargs)
    x = args[0]
    weight = None if formula.weight is None else getattr(self, formula.weight)
    bias = None if formula.bias is None else getattr(self, formula.bias)
    if not norm_fits(x, weight, formula) or (bias is not None and not norm_fits(x, bias, formula)):
        return _plain(self, *args)
    if formula.gated and not (isinstance(args[1], Tensor) and _fit_each_other(args[1], x)):
        return _plain(self, *args)
    eps = getattr(self, formula.eps) if isinstance(formula.eps, str) else formula.eps
    if patch.heads and weight is not None and x.dim() == 4 and patch.is_all_of(self):
        return HeadNorm(x, weight, eps, formula.offset, formula.cast, patch)
    split = is_dtensor(x) or is_dtensor(weight)
    if split and not (is_dtensor(x) and rows_are_whole(x, weight, bias)):
        return _plain(self, *args)
    patch.ledger.count("norm", patch.key)
    if formula.centered:
        if formula.offset and weight is not None:
            weight = weight + formula.offset
        norm: Callable[..., Tensor] = functools.partial(layer_norm, eps=eps)
        inputs: tuple[Tensor | None, ...] = x, weight, bias
    else:
        norm = functools.partial(rms_norm, eps=eps, offset=formula.offset, cast=formula.cast)
        inputs = x, weight
    y = on_own_rows(norm, *inputs) if split else norm(*inputs)
    if not split and patch.is_all_of(self):  # hooks on the norm may gather its weight, and take it away again
        patch.ledger.recompute.note(y, norm, *inputs)
    return swiglu(args[1], y) if formula.gated else y


def norm_fits(x: Any, weight: Tensor | None, formula: Norm, dtype: torch.dtype | None = None) -> bool:
    """Whether the formula was shown for inputs such as x, of this dtype instead of its own."""
    if not isinstance(x, Tensor) or x.dim() not in formula.ranks or x.dtype not in DTYPES:
        return False
    if formula.native and autocast_dtype(x.device.type) is not None:
        return False
    if weight is None:
        return formula.width in (None, x.shape[-1])
    if weight.dtype != (dtype or x.dtype) and not (formula.mixed and weight.dtype == torch.float32):
        return False
    return weight.device == x.device and weight.shape == x.shape[-1:]


def mlp_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    patch: Patch = self._tigon
    formula: Gated = patch.formula
    if not patch.ledger.active or kwargs or len(args) != 1 or transformed() or not _act_is_known(self, patch):
        return _plain(self, *args, **kwargs)
    if any(getattr(self, name, None) != value for name, value in formula.held):
        return _plain(self, *args)
    x = args[0]
    if formula.between is not None and not _same_dtype(getattr(self, formula.gate), getattr(self, formula.down)):
        return _plain(self, x)  # T5 in fp16 keeps its last layer in fp32, and casts to it
    recompute = patch.ledger.recompute
    if recompute.mlp and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        tiled = _tiled_mlp(self, patch, x)
        if tiled is not None:
            return _after_mlp(self, formula, tiled)
        if recompute.is_running():  # an adapter, a hook: what they make takes part, and is not kept either
            run = functools.partial(_mlp, self, patch)
            return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
    return _mlp(self, patch, x)


def _tiled_mlp(self: Any, patch: Patch, x: Tensor) -> Tensor | None:
    formula: Gated = patch.formula
    gate, down = getattr(self, formula.gate), getattr(self, formula.down)
    up = None if formula.up is None else getattr(self, formula.up)
    if formula.between is not None or formula.gate_scale is not None or not isinstance(x, Tensor):
        return None
    if not all(_is_plain_linear(layer, x) for layer in (gate, up, down) if layer is not None):
        return None
    width = gate.out_features if up is not None else gate.out_features // 2
    if patch.ledger.recompute.is_elsewhere() and is_one_tile(x, width):
        return None  # a checkpoint computes it all again as it is; only what is too wide for that is cut into tiles
    patch.ledger.count("mlp", patch.key)
    return gated_mlp(
        x, gate.weight, None if up is None else up.weight, down.weight, gate_bias=gate.bias,
        up_bias=None if up is None else up.bias, down_bias=down.bias, act=formula.act,
    )  # fmt: skip


def _mlp(self: Any, patch: Patch, x: Tensor) -> Any:
    formula: Gated = patch.formula
    # The layers are called as modules: what is on them (LoRA, hooks, quantisation) takes part.
    if formula.up is None:
        gate, up = getattr(self, formula.gate)(x), None
    elif formula.up_first:
        up = getattr(self, formula.up)(x)
        gate = getattr(self, formula.gate)(x)
    else:
        gate = getattr(self, formula.gate)(x)
        up = getattr(self, formula.up)(x)
    down = getattr(self, formula.down)
    plain = formula.between is None and formula.gate_scale is None
    recompute = patch.ledger.recompute
    if plain and recompute.product and _fit_each_other(gate, up) and _is_plain_linear(down, gate):
        patch.ledger.count("mlp", patch.key)
        # What two plain layers have just made is seen by nobody else, and may be written over in the end.
        makers = (getattr(self, name) for name in (formula.gate, formula.up) if name is not None)
        own = isinstance(x, Tensor) and all(_is_plain_linear(layer, x) for layer in makers)
        y = gated_linear(
            gate, up, down.weight, down.bias, act=formula.act, inplace=own, saved_by=recompute.checkpoint_hooks()
        )
    else:
        product = _gated_product(self, patch, gate, up)
        if formula.between is not None:
            product = getattr(self, formula.between)(product)
        y = down(product)
    return _after_mlp(self, formula, y)


def _after_mlp(self: Any, formula: Gated, y: Tensor) -> Any:
    if formula.scale is not None:
        y = y * getattr(self, formula.scale)
    if formula.dropout is not None:
        y = F.dropout(y, getattr(self, formula.dropout), self.training)
    return y if formula.after is None else getattr(self, formula.after)(y)


def _is_plain_linear(layer: Any, x: Tensor) -> bool:
    """Whether calling the layer does no more than F.linear: then its input need not be kept for its backward pass.

    Anything on it (an adapter, a hook, another forward, a sharded weight) needs the call itself. So does torch.compile,
    whose partitioner decides what is kept.
    """
    if type(layer) is not nn.Linear or torch.compiler.is_compiling() or torch.nn.modules.module._has_any_global_hook():
        return False
    state = vars(layer)
    if "forward" in state or any(state.get(name) for name in HOOKS):
        return False
    weight = layer.weight
    plain = type(weight) in (Tensor, nn.Parameter) and weight.device == x.device
    return plain and (weight.dtype == x.dtype or autocast_dtype(x.device.type) is not None)


def relu2_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    ledger: Ledger = self._tigon.ledger
    x = args[0] if len(args) == 1 and not kwargs else None
    if not ledger.active or not isinstance(x, Tensor) or x.dtype not in DTYPES or transformed():
        return _plain(self, *args, **kwargs)
    ledger.count("mlp", self._tigon.key)
    y = relu2(x)
    ledger.recompute.note(y, relu2, x)
    return y


def _same_dtype(one: Any, other: Any) -> bool:
    return getattr(getattr(one, "weight", None), "dtype", None) == getattr(
        getattr(other, "weight", None), "dtype", None
    )


def _act_is_known(self: Any, patch: Patch) -> bool:
    if patch.act is None:
        return True
    act = getattr(self, patch.formula.act_module)
    return act is patch.act and not any(vars(act).get(name) for name in HOOKS)


def _fit_each_other(gate: Tensor, up: Tensor | None) -> bool:
    if not gate.dtype.is_floating_point or gate.dim() == 0:
        return False
    if up is None:
        return gate.shape[-1] % 2 == 0
    return up.dtype == gate.dtype and up.shape == gate.shape and up.device == gate.device


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "silu": swiglu,
    "gelu_tanh": functools.partial(geglu, approximate="tanh"),
    "gelu": functools.partial(geglu, approximate="none"),
    "relu": reglu,
    "relu2": functools.partial(reglu, squared=True),
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def _gated_product(self: Any, patch: Patch, gate: Tensor, up: Tensor | None) -> Tensor:
    formula: Gated = patch.formula
    scale = 1.0 if formula.gate_scale is None else getattr(self, formula.gate_scale)
    if _fit_each_other(gate, up):
        patch.ledger.count("mlp", patch.key)
        unit = functools.partial(OPERATORS[formula.act], gate_multiplier=scale)
        product = unit(gate, up)
        patch.ledger.recompute.note(product, unit, gate, up)
        return product
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return ACTIVATIONS[formula.act](gate if scale == 1.0 else gate * scale) * up
