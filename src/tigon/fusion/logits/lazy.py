"""Logits that are not computed until code looks at their values.

A fused head returns `LazyLogits` in place of x Wᵀ + bias. They hold the hidden states, the weight, the bias and the
elementwise steps applied since (`Recipe`), and answer three kinds of use:

    * / by a number, + a vector, tanh, float,     noted, no computation
    log_softmax, views, slices, DDP's clone
    a stack of several heads' logits              noted, in `tigon.fusion.logits.stacked`
    F.cross_entropy(logits, target), or           tigon.linear_cross_entropy with the scale and softcap that were noted
    anything else                                 the logits are built, as the plain head builds them, with autograd

So the model's own forward and loss run unchanged, and soft-capping and logit scaling are observed, not configured.
`tigon.fusion.logits.compiled.CompiledLogits` does the same under torch.compile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tigon.fusion.logits.recipe import Recipe, fusable, is_number
from tigon.fusion.logits.sharded_head import find_frame, find_zero3_hook, is_zero3_caller
from tigon.fusion.logits.stacked import StackedLogits
from tigon.kernels import autocast_dtype


class LazyLogits(Tensor):
    """The (..., V) logits as a tensor without data. `recipe` builds the real tensor, which `built` then holds.

    A view taken from unbuilt logits keeps the `origin`, and is built as the same view into the built origin: a write to
    either is then seen in the other, as with real tensors.
    """

    recipe: Recipe
    built: Tensor | None
    value: Tensor | None
    origin: tuple[LazyLogits, Callable[[Tensor], Tensor]] | None
    like: Tensor
    node: Any

    @staticmethod
    def build_lazy(recipe: Recipe) -> LazyLogits:
        shape = (*recipe.hidden.shape[:-1], recipe.weight.shape[0])
        return LazyLogits._make(recipe, _make_meta(shape, recipe.dtype))

    @staticmethod
    def _make(
        recipe: Recipe, like: Tensor, origin: tuple[LazyLogits, Callable[[Tensor], Tensor]] | None = None
    ) -> LazyLogits:
        # Through an autograd node, so that code below Python's reach (custom autograd functions, backward hooks, DDP)
        # finds a tensor with a gradient, connected to the hidden states and the weight.
        inputs = recipe.hidden, recipe.weight, recipe.bias
        lazy: LazyLogits = _Unbuilt.apply(recipe, like, *inputs)
        lazy.recipe, lazy.like, lazy.origin = recipe, like, origin
        lazy.built = lazy.value = None
        with torch._C.DisableTorchFunctionSubclass():
            lazy.node = lazy.grad_fn
        return lazy

    def then(self, step: str, value: Any = None) -> LazyLogits:
        with self._grad_mode():
            recipe = self.recipe.then(step, value)
            return LazyLogits._make(recipe, _make_meta(self.like.shape, recipe.dtype))

    def make_view(self, view: Callable[[Tensor], Tensor], take: Callable[[Recipe], Recipe]) -> LazyLogits:
        """A view into these logits. `view` maps the logits and `take` the recipe, to the same rows and columns."""
        like = view(self.like)
        # A copy (reshape of a slice, a mask) shares no memory with the logits that it was taken from.
        shares = like.untyped_storage()._cdata == self.like.untyped_storage()._cdata
        with self._grad_mode():
            return LazyLogits._make(take(self.recipe), like, (self, view) if shares else None)

    def _grad_mode(self) -> Any:
        """The gradient mode for these logits' results: on if the logits require a gradient and recording is on now.

        The hidden states and the weight may require a gradient where the logits, made under no_grad, do not.
        """
        return torch.set_grad_enabled(torch.is_grad_enabled() and self._graph() is not None)

    def _graph(self) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn

    def has_foreign_node(self) -> bool:
        """Whether other code put an autograd node on this tensor. That node has to see the gradient.

        Reentrant checkpointing adds such a node.
        """
        graph = self._graph()
        if graph is self.node or _only_passes_on(graph):
            return False
        hook = find_zero3_hook(graph)
        if hook is None:
            return True
        self.recipe.waiting.hooks.append(hook)
        self.node = graph
        return False

    def pending(self) -> bool:
        """Whether neither these logits nor the logits that they view have been built."""
        if self.has_foreign_node():
            return False
        origin = self
        while origin.built is None and origin.value is None:
            if origin.origin is None:
                return True
            origin = origin.origin[0]
        return False

    def build(self, why: str) -> Tensor:
        """The real logits, built under the gradient mode and autocast state in which these were made."""
        if self.built is None:
            has_foreign_node = self.has_foreign_node()
            with torch.set_grad_enabled(self._graph() is not None):
                if has_foreign_node or self.value is not None:
                    self.built = _Built.apply(self, why)
                elif self.origin is not None:
                    self.built = self.origin[1](self.origin[0].build(why))
                else:
                    self.recipe.ledger.count_materialized_logits(why)
                    with _kept_from_checkpoints():
                        self.built = self.recipe.hand_on(self.recipe.logits())
        return self.built

    def data_only(self, why: str) -> Tensor:
        """The logits' values, for code that runs below autograd."""
        if self.built is not None:
            return self.built.detach()
        if self.value is None:
            if self.origin is not None:
                self.value = self.origin[1](self.origin[0].data_only(why))
            else:
                self.recipe.ledger.count_materialized_logits(why)
                with torch.no_grad():
                    self.value = self.recipe.logits()
        return self.value

    # Dynamo would compile this frame for one function and reuse the code for another, so inside a compiled function
    # the frame is not compiled.
    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        lazy = args[0] if args else None
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(lazy, LazyLogits) and lazy.pending():
            handler = _HANDLERS.get(func)
            answer = NotImplemented if handler is None else handler(*args, **kwargs)
            if answer is not NotImplemented:
                return answer
        if func is torch.stack and (stacked := _stack(*args, **kwargs)) is not None:
            return stacked
        if func is torch.autograd.grad:
            return _grad(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        args, kwargs = tree_map_only(LazyLogits, lambda x: x.build(name), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name = str(getattr(func, "overloadpacket", func))
        args, kwargs = tree_map_only(LazyLogits, lambda x: x.data_only(name), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.built is not None:
            return repr(self.built)
        # Printing, or a debugger that shows locals, should not allocate gigabytes.
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r}, not built)"


def _make_meta(shape: Any, dtype: torch.dtype) -> Tensor:
    """A meta tensor like the logits, hidden from the modes that count meta tensors' memory."""
    with torch._C._DisableTorchDispatch():
        return torch.empty(shape, dtype=dtype, device="meta")


class GatheredLogits(LazyLogits):
    """The logits from a head that is split over a mesh: whole already, although torch's hook expects a DTensor."""

    @property
    def placements(self) -> tuple[Any, ...]:
        from torch.distributed.tensor import Replicate

        return (Replicate(),)

    def to_local(self) -> LazyLogits:
        return self


def _kept_from_checkpoints() -> AbstractContextManager[Any]:
    """Hide the tensors that building saves from the hooks of a checkpoint that these logits were handed to.

    The checkpoint counts the tensors that the function saves, and runs the function again in the backward pass. There
    the logits are built already and save no tensors. Offloading hooks stay in force.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if top is None else top(True)
    if hooks is None or getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _only_passes_on(graph: Any) -> bool:
    """Whether DDP's node around the outputs hands gradients on unchanged.

    When DDP looks for unused parameters, the Trainer's default, DDP clones the model's outputs in an extra node. Only
    a static graph's node does more in the backward pass.
    """
    ddp = getattr(graph, "ddp_weakref", None)
    ddp = None if ddp is None else ddp()
    return ddp is not None and not getattr(ddp, "static_graph", True)


class _Unbuilt(torch.autograd.Function):
    """hidden, weight, bias → a tensor without data. Backward, if ever reached, goes through the real logits."""

    @staticmethod
    def forward(
        ctx: Any, recipe: Recipe, like: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> LazyLogits:
        # Not save_for_backward: saved-tensor hooks (CPU offload) would copy a weight that is rarely needed. The recipe
        # checks versions itself.
        ctx.recipe = recipe
        kind = GatheredLogits if recipe.split else LazyLogits
        return Tensor._make_wrapper_subclass(
            kind, like.shape, strides=like.stride(), dtype=like.dtype, device=hidden.device
        )

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Any, ...]:
        needed, recipe = ctx.needs_input_grad[2:], ctx.recipe
        again = torch.is_grad_enabled()  # create_graph=True: the gradient keeps a graph
        with recipe.gather():
            with torch.enable_grad():
                leaves = [
                    t if t is None or again else t.detach().requires_grad_(need)
                    for t, need in zip((recipe.hidden, recipe.weight, recipe.bias), needed, strict=True)
                ]
                logits = recipe._with(**dict(zip(("hidden", "weight", "bias"), leaves, strict=True))).logits()
            wanted = [t for t, need in zip(leaves, needed, strict=True) if t is not None and need]
            grads = iter(torch.autograd.grad(logits, wanted, dlogits, create_graph=again))
        return None, None, *(next(grads) if need else None for need in needed)


class _Built(torch.autograd.Function):
    """Lazy logits → their values; the gradient goes back to the lazy tensor's own node."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits, why: str) -> Tensor:
        return lazy.data_only(why).clone()

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Any, ...]:
        return dlogits, None


# Functions that shape, dtype, device or the autograd node can answer, without the values.
_METADATA = {
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized",
        "is_nested", "is_xla", "is_mps", "itemsize", "nbytes", "requires_grad", "is_leaf", "output_nr",
        "grad_fn", "_base",
    )),
    *(getattr(Tensor, name) for name in (
        "dim", "size", "numel", "nelement", "stride", "ndimension", "is_floating_point", "is_complex", "is_contiguous",
        "__len__", "get_device", "element_size", "is_inference", "is_signed", "storage_offset", "_is_view",
    )),
    torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip


def _mul(lazy: LazyLogits, other: Any = None, *rest: Any, **options: Any) -> Any:
    return lazy.then("mul", other) if is_number(other) and not rest and not options else NotImplemented


def _div(lazy: LazyLogits, other: Any = None, *rest: Any, **options: Any) -> Any:
    return lazy.then("div", other) if is_number(other) and not rest and not options else NotImplemented


def _add(lazy: LazyLogits, other: Any = None, *rest: Any, **options: Any) -> Any:
    recipe = None if rest or options or lazy.origin is not None else lazy.recipe.plus(other)
    if recipe is None:
        return NotImplemented
    with lazy._grad_mode():
        return LazyLogits._make(recipe, _make_meta(lazy.like.shape, recipe.dtype))


def _tanh(lazy: LazyLogits, **options: Any) -> Any:
    return NotImplemented if options else lazy.then("tanh")


def _float(lazy: LazyLogits, **options: Any) -> Any:
    return NotImplemented if options else _cast(lazy, torch.float32)


def _to(lazy: LazyLogits, *args: Any, **options: Any) -> Any:
    wanted = [*args, *options.values()]
    if len(wanted) != 1 or not set(options) <= {"dtype", "device"}:
        return NotImplemented
    if isinstance(wanted[0], torch.dtype):
        return _cast(lazy, wanted[0])
    here = lazy.device
    # "cuda" without an index is the current device, which need not be the device of the logits.
    same = isinstance(wanted[0], (str, torch.device)) and torch.device(wanted[0]) in (here, torch.device("cpu"))
    return lazy if same and torch.device(wanted[0]).type == here.type else NotImplemented


def _cast(lazy: LazyLogits, dtype: torch.dtype) -> Any:
    if dtype == lazy.dtype:
        return lazy
    # Only widening is noted: rounding to a narrower dtype would show in the loss.
    return lazy.then("cast", dtype) if dtype == torch.float32 else NotImplemented


def _log_softmax(lazy: LazyLogits, dim: Any = None, dtype: Any = None) -> Any:
    if dim not in (-1, lazy.dim() - 1):
        return NotImplemented
    wanted = dtype or (lazy.dtype if autocast_dtype(lazy.device.type) is None else torch.float32)
    wide = _cast(lazy, wanted)
    if wide is NotImplemented:
        return NotImplemented
    with lazy._grad_mode():
        recipe = wide.recipe.then("log_softmax")

        def read(z: Tensor) -> Tensor:
            """The result from built logits, so that other uses of the logits share one product."""
            # Written to since, unlike a view's origin: the result is that of the values before.
            is_changed = z.is_inference() or z._version != 0
            return recipe.hand_on(recipe.logits()) if is_changed else torch.log_softmax(z, dim=-1, dtype=wanted)

        return LazyLogits._make(recipe, _make_meta(lazy.like.shape, wanted), (lazy, read))


def _log_softmax_function(lazy: LazyLogits, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return _log_softmax(lazy, dim, dtype)


def _nll_loss(lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    recipe = lazy.recipe.before("log_softmax")
    if recipe is None:
        return NotImplemented
    with lazy._grad_mode():
        return _eager_cross_entropy(LazyLogits._make(recipe, lazy.like), *args, **kwargs)


def _transpose(lazy: LazyLogits, dim0: int, dim1: int) -> Any:
    rows = lazy.dim() - 1
    one, other = (dim if dim >= 0 else dim + lazy.dim() for dim in (dim0, dim1))
    if not (0 <= one < rows and 0 <= other < rows):
        return NotImplemented
    return lazy.make_view(
        lambda z: z.transpose(one, other), lambda r: r.rows(lambda hidden: hidden.transpose(one, other))
    )


def _stack(tensors: Any, dim: int = 0, **options: Any) -> Any:
    """Several heads' logits for the same rows, not built; None where the stack has to be built."""
    parts = list(tensors)
    if options or not torch.is_grad_enabled() or not all(isinstance(p, LazyLogits) and p.pending() for p in parts):
        return None
    dim = dim if dim >= 0 else dim + parts[0].dim() + 1
    if not 0 <= dim < parts[0].dim() or len({(p.shape, p.dtype, p.device) for p in parts}) != 1:
        return None
    return StackedLogits(parts, dim)


def _clone(lazy: LazyLogits, **options: Any) -> Any:
    """Note DDP's clone of the model's outputs. Any other caller wants today's values: the weight may change."""
    if options or find_frame("torch.nn.parallel.distributed", 8) is None:
        return NotImplemented
    with lazy._grad_mode():
        return LazyLogits._make(lazy.recipe, torch.empty_like(lazy.like))


def _detach(lazy: LazyLogits) -> Any:
    """Note the step by which ZeRO-3 puts its node behind a module's output."""
    return LazyLogits._make(lazy.recipe, lazy.like) if is_zero3_caller() else NotImplemented


def _contiguous(lazy: LazyLogits, **options: Any) -> Any:
    if options:
        return NotImplemented
    return lazy if lazy.like.is_contiguous() else lazy.make_view(lambda z: z.contiguous(), lambda r: r.rows(_same))


def _same(t: Tensor) -> Tensor:
    return t


def _reshape(lazy: LazyLogits, shape: tuple[Any, ...], *, view: bool) -> Any:
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = tuple(shape[0])
    if not shape or not all(isinstance(n, int) for n in shape):
        return NotImplemented
    reshape = Tensor.view if view else Tensor.reshape
    try:
        like = reshape(lazy.like, shape)
    except RuntimeError:
        return NotImplemented  # PyTorch's own message, from real logits
    if like.shape[-1] != lazy.shape[-1] or lazy.shape[-1] == 0:
        return NotImplemented
    width = lazy.recipe.hidden.shape[-1]
    return lazy.make_view(
        lambda z: reshape(z, shape), lambda r: r.rows(lambda hidden: hidden.reshape(*like.shape[:-1], width))
    )


def _view(lazy: LazyLogits, *shape: Any, **options: Any) -> Any:
    return NotImplemented if options else _reshape(lazy, shape, view=True)


def _reshape_method(lazy: LazyLogits, *shape: Any, **options: Any) -> Any:
    if not shape and set(options) == {"shape"}:
        return _reshape(lazy, (options["shape"],), view=False)
    return NotImplemented if options else _reshape(lazy, shape, view=False)


def _flatten(lazy: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if start_dim not in (0, -lazy.dim()) or end_dim not in (-2, lazy.dim() - 2) or lazy.dim() < 3:
        return NotImplemented
    return _reshape(lazy, (-1, lazy.shape[-1]), view=False)


def _getitem(lazy: LazyLogits, index: Any) -> Any:
    """Note row slices and numbers, the first words, and masks over whole leading dimensions."""
    if isinstance(index, Tensor):
        if index.dtype != torch.bool or not 0 < index.dim() < lazy.dim():
            return NotImplemented
        if index.shape != lazy.shape[: index.dim()] or index.device != lazy.device:
            return NotImplemented
        with lazy._grad_mode():
            recipe = lazy.recipe.rows(lambda hidden: hidden[index])
            shape = (*recipe.hidden.shape[:-1], lazy.shape[-1])
            return LazyLogits._make(recipe, _make_meta(shape, recipe.dtype))
    index = index if isinstance(index, tuple) else (index,)
    if not all(i is Ellipsis or type(i) is int or (isinstance(i, slice) and _plain(i)) for i in index):
        return NotImplemented
    dots = [at for at, i in enumerate(index) if i is Ellipsis]
    if len(dots) > 1 or len(index) - len(dots) > lazy.dim():
        return NotImplemented
    at = dots[0] if dots else len(index)
    fill = (slice(None),) * (lazy.dim() - len(index) + len(dots))
    index = (*index[:at], *fill, *index[at + len(dots) :])
    rows, words = index[:-1], index[-1]
    if type(words) is int or all(type(i) is int for i in rows):  # one token's logits, a look at numbers
        return NotImplemented
    start, count, step = words.indices(lazy.shape[-1])
    if start != 0 or step != 1 or count == 0 or (count != lazy.shape[-1] and not lazy.recipe.has_columns):
        return NotImplemented

    def take(recipe: Recipe) -> Recipe:
        recipe = recipe.rows(lambda hidden: hidden[rows])
        return recipe if count == lazy.shape[-1] else recipe.columns(count)

    return lazy.make_view(lambda z: z[index], take)


def _plain(s: slice) -> bool:
    return all(i is None or isinstance(i, int) for i in (s.start, s.stop, s.step))


def _eager_cross_entropy(lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    arguments = fusable(lazy, *args, **kwargs)
    if arguments is None:
        return NotImplemented
    with lazy._grad_mode():
        return lazy.recipe.cross_entropy(*arguments)


def _register_hook(lazy: LazyLogits, hook: Any) -> Any:
    author = _find_author(hook)
    if author.startswith(("torch.distributed.", "deepspeed.")):
        # FSDP and DeepSpeed put a hook on every output, to prepare for the backward pass. The loss that the model
        # returns has such a hook too; a loss that is computed from these logits later is given this hook.
        lazy.recipe.waiting.hooks.append(hook)
    elif author.startswith("torch."):
        pass  # torch's module trackers and operation counters only observe; they miss these logits' backward pass
    else:
        _wait_for_gradient(lazy, "register_hook")
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.register_hook(lazy, hook)  # type: ignore[no-untyped-call]


def _retain_grad(lazy: LazyLogits) -> Any:
    _wait_for_gradient(lazy, "retain_grad")
    return lazy.build("retain_grad").retain_grad()


def _wait_for_gradient(lazy: LazyLogits, what: str) -> None:
    """Compute the logits now, so that the loss is computed from them and their gradient arrives."""
    if lazy.recipe.waiting.in_vain:
        raise _no_gradient(what)
    lazy.data_only(what)


def _find_author(hook: Any) -> str:
    """The module that defines a hook, looked up through functools.partial and `register_multi_grad_hook`."""
    inner = inspect.unwrap(getattr(hook, "func", hook))
    module = getattr(inner, "__module__", None) or ""
    if module == "torch.autograd.graph" and (code := getattr(inner, "__code__", None)) is not None:
        cells = dict(zip(code.co_freevars, inner.__closure__ or (), strict=True))
        return _find_author(cells["fn"].cell_contents) if "fn" in cells else ""
    return module


def _grad(*args: Any, **kwargs: Any) -> Any:
    """torch.autograd.grad with lazy logits among its arguments.

    The logits are built first. A None gradient would say that the loss does not depend on the logits.
    """
    given = kwargs["inputs"] if "inputs" in kwargs else args[1]
    inputs = given if isinstance(given, (list, tuple)) else (given,)
    args, kwargs = tree_map_only(LazyLogits, lambda x: x.build("autograd.grad"), (args, kwargs))
    gradients = torch.autograd.grad(*args, **kwargs)
    for x, gradient in zip(inputs, gradients, strict=True):
        if gradient is None and isinstance(x, LazyLogits) and x.recipe.waiting.in_vain:
            raise _no_gradient("autograd.grad")
    return gradients


def _no_gradient(what: str) -> RuntimeError:
    return RuntimeError(
        f"tigon: {what} on logits that the loss never builds: they have no gradient. Call the model "
        "without labels and take the loss from outputs.logits, or fusion.remove() first."
    )


def _format(lazy: LazyLogits, spec: str) -> str:
    return format(repr(lazy), spec)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _eager_cross_entropy, F.nll_loss: _nll_loss,
    F.log_softmax: _log_softmax_function, torch.log_softmax: _log_softmax, Tensor.log_softmax: _log_softmax,
    Tensor.transpose: _transpose, torch.transpose: _transpose,
    Tensor.mul: _mul, torch.mul: _mul, Tensor.multiply: _mul, torch.multiply: _mul,
    Tensor.__mul__: _mul, Tensor.__rmul__: _mul,
    Tensor.div: _div, torch.div: _div, Tensor.divide: _div, torch.divide: _div, Tensor.true_divide: _div,
    torch.true_divide: _div, Tensor.__truediv__: _div,
    Tensor.add: _add, torch.add: _add, Tensor.__add__: _add,
    Tensor.tanh: _tanh, torch.tanh: _tanh, F.tanh: _tanh,
    Tensor.float: _float, Tensor.to: _to, Tensor.contiguous: _contiguous,
    Tensor.clone: _clone, torch.clone: _clone, Tensor.detach: _detach,
    Tensor.view: _view, Tensor.reshape: _reshape_method,
    torch.reshape: _reshape_method, Tensor.flatten: _flatten, torch.flatten: _flatten,
    Tensor.__getitem__: _getitem, Tensor.__format__: _format,
    Tensor.register_hook: _register_hook, Tensor.retain_grad: _retain_grad,
}  # fmt: skip
