"""Turn a launch function into an operator: a torch.library op when traced, an autograd.Function in eager mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from tigon.kernels.dispatch import _PLAIN

R = TypeVar("R")

_library = torch.library.Library("tigon", "DEF")


@functools.cache
def _gpus() -> int:
    return torch.cuda.device_count()


def is_traced(x: Tensor) -> bool:
    """True if x is a placeholder in a graph being recorded, with no memory to launch on."""
    return torch.compiler.is_compiling() or type(x) not in _PLAIN or _is_recorded()


def is_exporting() -> bool:
    """Whether torch.export traces the caller.

    Before torch 2.13, Dynamo evaluates torch's own function with this name to true under torch.compile as well.
    """
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def is_concrete(x: Tensor) -> bool:
    """Whether x holds values that the host may read."""
    return not is_traced(x) and not x.is_meta and x.numel() > 0


def _is_recorded() -> bool:
    """Whether `make_fx` records operations on plain tensors, or a FakeTensorMode treats plain tensors as fake."""
    if not torch._C._len_torch_dispatch_stack():  # the common case, in 30 ns
        return False
    modes = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (modes.PROXY, modes.FAKE))


def is_graph_retained() -> bool:
    """Inside a backward pass: whether the graph is retained for another pass, so that saved tensors must not change."""
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if keeps_graph is None else keeps_graph()


# The type of an integer argument that may be symbolic, such as a number of classes.
SymInt = int

_TYPES = {kind: kind for kind in ("Tensor", "int", "SymInt", "float", "bool", "str")} | {"torch.dtype": "ScalarType"}


def _write_type(hint: str) -> str:
    """An annotation in torch's schema language."""
    if hint.endswith(" | None"):
        return _write_type(hint.removesuffix(" | None")) + "?"
    if hint.startswith("list["):
        return _write_type(hint[5:-1]) + "[]"
    if hint.startswith("tuple["):
        return f"({', '.join(map(_write_type, hint[6:-1].split(', ')))})"
    return _TYPES[hint]


def _write_schema(fn: Callable[..., Any], rest: str, results: int) -> str:
    """The schema of a function with annotated arguments: "(Tensor x, float eps) -> Tensor"."""
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    arguments = [f"{_write_type(fn.__annotations__[name])} {name}" for name in names]
    defaults = fn.__defaults__ or ()
    for i, value in enumerate(defaults, len(names) - len(defaults)):
        arguments[i] += f"={value}"
    returns = f"tuple[{', '.join(['Tensor'] * results)}]" if results else fn.__annotations__["return"]
    return f"({', '.join([*arguments, rest] if rest else arguments)}) -> {_write_type(returns)}"


def launcher(
    fake: Callable[..., Any], schema: str | None = None, *, rest: str = "", results: int = 0
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Register a launch function as `torch.ops.tigon.<name>`: a direct call in eager mode, the op when traced.

    Args:
        fake: same arguments; returns empty outputs with the right shape, dtype and strides.
        schema: arguments and results in torch's schema language, by default from the function's annotations.
        rest: the arguments behind `*args`, likewise: "bool mean, float scale".
        results: the number of tensors that a function with results `tuple[Tensor, ...]` returns.

    The first argument must be a tensor; its device becomes the current device. Keyword-only arguments are not in the
    schema: a call with keywords runs the function directly.
    """

    def register(fn: Callable[..., R]) -> Callable[..., R]:
        name = fn.__name__.lstrip("_")

        def on_device(*args: Any, **own: Any) -> Any:
            x = args[0]
            # get_device() is -1 on a CPU. With a single GPU in the process there is no device to switch to.
            if x.is_cuda and _gpus() > 1 and x.get_device() != torch.cuda.current_device():
                with torch.cuda.device(x.device):
                    return fn(*args, **own)
            return fn(*args, **own)

        _library.define(name + (schema or _write_schema(fn, rest, results)))
        _library.impl(name, on_device, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tigon::{name}", fake, lib=_library)
        op = getattr(torch.ops.tigon, name).default

        @functools.wraps(fn)
        def launch(*args: Any, **own: Any) -> Any:
            return op(*args) if not own and is_traced(args[0]) else on_device(*args, **own)

        launch.op, launch.direct = op, on_device  # type: ignore[attr-defined]
        return launch

    return register


def run_once_differentiable(backward: Callable[..., Any], ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    """Run backward and return a gradient for each input. With `create_graph`, differentiating them again raises.

    backward: (ctx, *gradients) → gradients for the first inputs. Not called without any upstream gradient.

    The recorded graph leads from each gradient to the operator's inputs and to the upstream gradients.
    `torch.autograd.grad(…, w)` prunes paths that do not lead to w. If no path led to w, the error would be pruned
    too, and the loss differentiated without that term. torch's `once_differentiable` gives no error at all where
    the upstream gradient does not require grad, as for a plain sum.
    Without `create_graph` this is free. Saved tensors lead to the inputs.
    """
    count = len(ctx.needs_input_grad)
    if gradients[0] is None and _are_none(gradients):
        if getattr(ctx, "saved_by", None) is not None:
            load_tensors(ctx)  # releases the tensors that a checkpoint's hooks have packed
        return (None,) * count
    if not torch.is_grad_enabled():
        found = backward(ctx, *gradients)
        return (*found, *(None,) * (count - len(found)))
    unpacked = _Unpacked(ctx)
    with torch.no_grad():
        found = backward(unpacked, *gradients)
    ways = [t for t in (*gradients, *unpacked.saved_tensors, *_leaves(ctx, unpacked.saved_tensors)) if t is not None]
    given = [g for g in found if g is not None]
    # The gradients are leaves too: if there is no other path, `.backward()` still reaches the error.
    refused = iter(_Refused.apply(len(given), *(g.detach().requires_grad_() for g in given), *ways) if given else ())
    return (*(g if g is None else next(refused) for g in found), *(None,) * (count - len(found)))


def _are_none(gradients: tuple[Any, ...]) -> bool:
    return all(g is None for g in gradients)


def add_anchor(ctx: Any, args: Any, unsaved: tuple[int, ...]) -> tuple[Tensor, ...]:
    """In forward: return and save an empty output, where no saved tensor leads to the inputs in `unsaved`.

    A saved input leads to itself, and leaves are found through the graph. The operator's result would also lead to
    the inputs, but users write `loss += penalty`, and saved tensors must not be modified in place.
    """
    if any(ctx.needs_input_grad[i] and not args[i].is_leaf for i in unsaved):
        anchor = args[unsaved[0]].new_empty(0)
        ctx.save_for_backward(*(ctx.to_save or ()), anchor)
        return (anchor,)
    return ()


def save_tensors(ctx: Any, hooks: tuple[Any, Any] | None, *tensors: Tensor | None) -> None:
    """Save tensors for the backward pass; if a checkpoint gave hooks (pack, unpack), save them immediately.

    A checkpoint recomputes up to the last saved tensor. torch saves a Function's inputs after the forward pass, so
    all work after this call would be recomputed for nothing.
    """
    ctx.saved_by = hooks
    if hooks is None:
        ctx.save_for_backward(*tensors)
    else:
        ctx.packed = [t if t is None else hooks[0](t) for t in tensors]


def load_tensors(ctx: Any) -> list[Any]:
    """Load the tensors from `save_tensors`. Call once per backward pass: checkpoints do not hand them out twice."""
    if ctx.saved_by is None:
        return list(ctx.saved_tensors)
    if ctx.packed is None:
        raise RuntimeError(
            "tigon: trying to go backward through the graph a second time, after the saved tensors were freed. Pass "
            "retain_graph=True the first time."
        )
    packed, (_, unpack) = ctx.packed, ctx.saved_by
    if not is_graph_retained():
        ctx.packed, ctx.saved_by = None, (None, None)  # both: the hooks hold the checkpoint's inputs
    return [t if t is None else unpack(t) for t in packed]


class _Unpacked:
    """A context with saved tensors already unpacked: activation checkpointing does not hand them out twice."""

    def __init__(self, ctx: Any) -> None:
        vars(self).update(ctx=ctx, saved_tensors=ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.ctx, name, value)


class _Refused(torch.autograd.Function):
    """Identity on an operator's gradients, with everything they depend on as further inputs. Backward raises."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "tigon: trying to differentiate twice: the gradient of a fused operator is not differentiable. Operators "
            "on tensors can be differentiated twice `with tigon.use_backend('torch')`; head losses cannot."
        )


def _leaves(ctx: Any, saved: tuple[Any, ...]) -> list[Tensor]:
    """Return the leaves behind an operator's inputs that were not saved; empty if an output was saved."""
    reached = {torch.autograd.graph.get_gradient_edge(t)[:2] for t in saved if t is not None and t.requires_grad}
    if any(node is ctx for node, _ in reached):  # the operator's output leads to every input
        return []
    nodes = [edge[0] for edge in ctx.next_functions if edge[0] is not None and tuple(edge) not in reached]
    leaves, seen = [], set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
    return leaves


def bind_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`, in a third less time where no torch.func transform is active."""
    # Skips the Python half of apply, which looks for functorch's wrappers.
    bare: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    transformed = torch._C._are_functorch_transforms_active

    def apply(*args: Any) -> Any:
        return function.apply(*args) if transformed() else bare(*args)

    return apply


def make_function(forward: Callable[..., Any], backward: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """The `apply` of a Function. forward: (ctx, *inputs) → results; backward: see `run_once_differentiable`."""

    def run_backward(ctx: Any, *gradients: Any) -> Any:
        return run_once_differentiable(backward, ctx, *gradients)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(run_backward)}
    # The graph node's name, shown by profilers and grad_fn: RmsNormBackward.
    name = (name or forward.__name__).removesuffix("_fwd").removesuffix("_launch")
    return bind_apply(type("".join(map(str.title, name.split("_"))), (torch.autograd.Function,), methods))


@overload
def differentiable(
    launch: Callable[..., Tensor | tuple[Any, ...]], setup_context: Callable[..., None], backward: Callable[..., Any],
    *, unsaved: tuple[int, ...] = ...,
) -> Callable[..., Tensor]: ...  # fmt: skip


@overload
def differentiable(
    launch: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any], *, outputs: int,
    unsaved: tuple[int, ...] = ...,
) -> Callable[..., Any]: ...  # fmt: skip


def differentiable(
    launch: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    *,
    outputs: int = 1,
    unsaved: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """Attach a gradient to a launch function, and return the function to call.

    Args:
        launch: a function made by `@launcher`. The first `outputs` results are the operator's; the others are for the
            backward pass.
        setup_context: (ctx, inputs, output) → None; saves tensors for the backward pass.
        backward: (ctx, *gradients) → gradients, or None, for the first inputs. Not all upstream gradients are None.
        unsaved: positions of differentiable inputs that setup_context does not save. An extra tensor may then follow
            the gradients and the saved tensors; backward ignores it: see `add_anchor`.

    Eager mode uses an `autograd.Function` around the direct launch. torch.compile uses the op, with the same two
    functions registered as its autograd formula: Dynamo can trace the Function as well, but rejects an input that is
    passed twice, and fails on a float option made symbolic (torch 2.13, dynamic=True).
    """
    op, direct = launch.op, launch.direct  # type: ignore[attr-defined]
    has_lists = "Tensor[]" in str(op._schema).partition("->")[0]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # A missing upstream gradient stays None: a zero tensor would cost a pass over its memory.
        ctx.set_materialize_grads(False)
        setup_context(ctx, inputs, output)

    def traced_backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        # torch.library wants a gradient for each tensor in a list, which only the operator can give.
        found = () if _are_none(gradients) and not has_lists else backward(ctx, *gradients)
        return (*found, *(None,) * (len(ctx.needs_input_grad) - len(found)))

    def visible(result: Any) -> Any:
        if not isinstance(result, (tuple, list)):
            return result
        return result[0] if outputs == 1 else tuple(result[:outputs])

    def forward(ctx: Any, *args: Any) -> Any:
        result = op(*args) if type(args[0]) not in _PLAIN or _is_recorded() else direct(*args)
        ctx.set_materialize_grads(False)
        ctx.hides = True  # results beyond `outputs`: only the backward pass sees them
        setup_context(ctx, args, result)
        anchor = add_anchor(ctx, args, unsaved) if unsaved else ()
        if not anchor:
            return visible(result)
        return (*(result[:outputs] if isinstance(result, (tuple, list)) else (result,)), *anchor)

    eager = make_function(forward, backward, launch.__name__)
    torch.library.register_autograd(op, traced_backward, setup_context=setup, lib=_library)

    def apply(*args: Any) -> Any:
        return visible(op(*args)) if torch.compiler.is_compiling() else eager(*args)

    def apply_without_anchor(*args: Any) -> Any:
        result = apply(*args)
        return visible(result) if isinstance(result, tuple) else result

    return apply_without_anchor if unsaved else apply


def differentiable_directly(
    launch: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    *,
    outputs: int = 1,
    unsaved: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """Like `differentiable`, for calls with arguments that torch.library cannot take: apply(*args, own).

    own: the launch function's keyword arguments; `ctx.own` in setup_context and backward.
    """

    def forward(ctx: Any, *given: Any) -> Any:
        *args, own = given
        result = launch(*args, **own)
        ctx.set_materialize_grads(False)
        ctx.hides, ctx.own = True, own
        setup_context(ctx, tuple(args), result)
        return (*result[:outputs], *add_anchor(ctx, args, unsaved))

    direct = make_function(forward, backward, launch.__name__)

    def apply(*given: Any) -> Any:
        result = direct(*given)
        return result[0] if outputs == 1 else result[:outputs]

    return apply
