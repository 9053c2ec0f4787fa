"""Activations that the backward pass recomputes instead of the forward pass keeping them: norms, rotated heads.

A linear layer keeps the input for the weight gradient. Where a norm made that input, the norm keeps its own input
as well, and running the norm again costs one pass over the memory. So while a fused model runs forward,
`torch.autograd.graph.saved_tensors_hooks` replace such a tensor by a recipe, whichever operation saves the tensor: a
projection, an adapter, a router, attention. The recipe gives the backward pass the same bits.

    saved by the norm          x
    saved by q, k and v        norm(x)        → the recipe "norm, of x", computed once for the three
    … under autocast           norm(x).to()   → the recipe "cast, of the norm, of x"; for adapters in fp32 as well
    saved by attention         rotated heads  → the recipe "norm and rotation, of the heads", where these are kept

Checkpoints, other saved-tensor hooks (offloading, say) and torch.compile keep the tensors that they save: no recipe
replaces those. Where a step is so small that the hooks would take longer than they are worth, "auto" runs without hooks
(auto.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAlias, cast, get_args
from weakref import ref

import torch
import torch.utils.checkpoint
from torch import Tensor

from tigon.fusion.memory.auto import Choice, Extent
from tigon.fusion.memory.offload import VIEWS, Away, Offload, check_unwritten
from tigon.kernels import autocast_dtype
from tigon.kernels.autocast import autocast_as

Level = Literal["auto", "none", "product", "cheap", "mlp"]
LEVELS: tuple[Level, ...] = get_args(Level)
# At most this many recomputed results are alive per device. Normally the last consumer frees a result; this bounds the
# case where backward skips a consumer.
HELD = 2
# torch's name for a cast's autograd node, and how many casts in a row are followed back.
CAST, LONGEST = "ToCopyBackward0", 3
# torch's names for the nodes of the weight view that a linear layer takes, and of the view on its product.
TRANSPOSED, PRODUCT = ("TBackward0", "TransposeBackward0"), "UnsafeViewBackward0"

# torch has no public way to ask which hooks are on top, or whether hooks are allowed.
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_is_tracing: None)
_hooks_allowed = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", lambda: True)
_pass_by_hooks = getattr(torch._C._autograd, "_saved_tensors_hooks_set_tracing", lambda passing: False)


class Recompute:
    """The tensors that one fused model recomputes, by level. Each level from "none" on includes the levels before.

    none: no tensors. product: act(gate) · up, in `gated_linear`. cheap: also norm results, and heads that are normed
    and rotated. mlp: also gate and up, with the projections that make them. auto: cheap or product, chosen anew for
    each forward pass.

    extent: the model sizes by which "auto" chooses. choice: the decision for the last forward pass.
    """

    def __init__(self, level: Level, offload: bool = False) -> None:
        self.level = level
        self.auto = level == "auto"
        rank = LEVELS.index("cheap" if self.auto else level)
        self.product, self.cheap, self.mlp = (rank >= LEVELS.index(least) for least in ("product", "cheap", "mlp"))
        # Either offload or recipes, not both: a recipe keeps inputs on the device, and offload sends them away.
        self.offload = Offload() if offload else None
        self.cheap = self.cheap and not offload
        self.extent = Extent()
        self.choice: Choice | None = None
        self._last: Pass | None = None

    def __deepcopy__(self, memo: Any) -> Recompute:
        copied = Recompute(self.level, self.offload is not None)
        copied.extent = self.extent
        return copied

    @property
    def tensors(self) -> int:
        """How many tensors the last forward pass did not keep."""
        return 0 if self._last is None else self._last.tensors

    @property
    def bytes(self) -> int:
        """The bytes that the last forward pass did not keep."""
        return 0 if self._last is None else self._last.bytes

    @property
    def why(self) -> str:
        """The "auto" choice for the last forward pass, with the reason; "" at other levels, and before a pass."""
        if self.auto and self.offload is not None:
            return "product: norm results are saved, since saved activations are offloaded to host memory"
        return "" if self.choice is None else str(self.choice)

    @contextlib.contextmanager
    def forward(self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Around the model's forward pass: puts recipes in the place of the tensors given to `note`.

        args, kwargs: the arguments to that forward, by which "auto" chooses.
        """
        # Other hooks are on top: from a model around this one, or from code that handles every saved tensor itself.
        wanted = self.cheap or self.offload is not None
        if not wanted or not torch.is_grad_enabled() or not _hooks_allowed() or _top_hooks(False) is not None:
            yield
            return
        if self.auto and self.offload is None:
            # Installed hooks mark the choice: code that asks for the level in this pass looks at the hooks on top.
            self.choice = self.extent.choice(args, kwargs or {})
            if not self.choice.cheap:
                self._last = None
                yield
                return
        # The pass holds a single forward's state: two threads may run the same model at the same time.
        current = self._last = Pass(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(current.pack, current.unpack):
                yield
        finally:
            current.end()

    def note(
        self,
        results: Tensor | tuple[Tensor, ...],
        again: Callable[..., Any],
        *inputs: Tensor | None,
        where_known: bool = False,
    ) -> None:
        """Note that again(*inputs) gives the same results, bit for bit. The operator keeps these inputs in any case.

        where_known: the operator does not keep the inputs, so note the results only if an input has a recipe.
        """
        if not self.cheap or torch.compiler.is_compiling():
            return
        running = _running()
        # None in a checkpoint and outside a forward pass. The pass may belong to the Fusion on an enclosing model.
        if running is not None and running.cheap:
            running.note(results, again, *inputs, where_known=where_known)

    @staticmethod
    def leave_out(count: int, size: int) -> None:
        """Count results, of `size` bytes together, that an operator recomputes by itself where `is_cheap` holds."""
        running = _running()
        if running is not None:
            running.tensors += count
            running.bytes += size

    def is_cheap(self) -> bool:
        """Whether norm results of the operations that run now are recomputed."""
        running = _running() if self.cheap else None
        return running is not None and running.cheap

    @staticmethod
    def is_running() -> bool:
        """Whether Tigon's hooks see the tensors saved now: not inside a checkpoint, and not outside `forward()`."""
        return _running() is not None

    @staticmethod
    def is_elsewhere() -> bool:
        """Whether other hooks see the tensors saved now: a checkpoint's, or offloading's."""
        return _top_hooks(False) is not None and _running() is None

    @staticmethod
    def checkpoint_hooks() -> tuple[Any, Any] | None:
        """The hooks set by the checkpoint that sees the tensors saved now; None if no checkpoint's hooks are on top.

        Only non-reentrant checkpoints, which stop recomputing early, work by hooks.
        """
        hooks = None if torch.compiler.is_compiling() else _top_hooks(False)
        return hooks if hooks and getattr(hooks[0], "__module__", None) == torch.utils.checkpoint.__name__ else None


class without_recipes:
    """Inside, autograd saves tensors without asking the hooks: for an operator that recomputes results by itself."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        if self._wanted:
            self._before = _pass_by_hooks(True)

    def __exit__(self, *error: Any) -> None:
        if self._wanted:
            _pass_by_hooks(self._before)


class Pass:
    """One forward pass under `Recompute.forward`, and the backward passes through its graph."""

    def __init__(self, owner: Recompute) -> None:
        self.cheap = owner.cheap
        self.offload = None if owner.offload is None else owner.offload.begin()
        # The count of tensors that were not kept, and their bytes.
        self.tensors = self.bytes = 0
        self._results: dict[int, _Result] = {}  # by their memory address
        self._nodes: dict[Any, _Result] = {}  # by the autograd node that made the tensor, and the output index
        self._held: dict[torch.device, list[ref[_Work]]] = {}  # the works whose results are alive

    def end(self) -> None:
        """The forward pass is over: tensors saved from now on do not belong to this pass."""
        self._results.clear()
        self._nodes.clear()

    def note(
        self, results: Tensor | tuple[Tensor, ...], again: Callable[..., Any], *inputs: Tensor | None, where_known: bool
    ) -> None:
        """As `Recompute.note`."""
        if where_known and not any(t is not None and self._find_result(t) for t in inputs):
            return
        results = results if isinstance(results, tuple) else (results,)
        for y in results:
            # A result without a gradient has no autograd node that keeps the inputs.
            if not _is_plain(y) or not y.requires_grad or not y.numel() or y.storage_offset():
                return
        for t in inputs:
            if t is not None and not _is_plain(t):
                return
        work = _Work(again, [t if t is None else self._stand_in(t) for t in inputs], results[0].device)
        for index, y in enumerate(results):
            self._remember(y, work, index)

    def _remember(self, y: Tensor, work: _Work, index: int) -> None:
        address, results = _address(y.untyped_storage()), self._results

        def forget(reference: Any) -> None:
            result = results.get(address)
            if result is not None and result.tensor is reference:
                results.pop(address, None)  # the allocator may give this memory to another tensor

        result = results[address] = _Result(y, ref(y, forget), work, index)
        self._nodes[y.grad_fn, y.output_nr] = result

    def _find_result(self, t: Tensor) -> _Result | None:
        if not self._results or not _is_plain(t):
            return None
        storage = t.untyped_storage()
        result = self._results.get(_address(storage))
        if result is None or result.version != t._version or result.dtype != t.dtype or t.is_neg():
            return None  # differing versions: other code wrote into the tensor since
        y = result.tensor()
        # After `y.data = …` another tensor may have y's old address.
        return result if y is not None and y.untyped_storage()._cdata == storage._cdata else None

    def _cast(self, t: Tensor) -> tuple[_Work, int] | None:
        """How to make t, and which result t is, if t is a noted result cast to other dtypes, else None.

        Under autocast each projection narrows the input itself. Each adapter in fp32 widens the input, and autocast
        narrows the input again: a chain of casts, whose end may have the numbers from the beginning.
        """
        node, _ = _behind_views(t.grad_fn, 0)
        if node is None or node.name() != CAST:
            return None
        dtypes, edge = [t.dtype], node.next_functions[0]
        result = self._nodes.get(edge) or self._nodes.get(_behind_views(*edge))
        while result is None and len(dtypes) < LONGEST:
            node, _ = _behind_views(*edge)
            made = getattr(node, "_input_metadata", None)  # of the gradient: the dtype that this cast gave
            if not made or node.name() != CAST:
                return None
            dtypes.insert(0, made[0].dtype)
            edge = node.next_functions[0]
            result = self._nodes.get(edge) or self._nodes.get(_behind_views(*edge))
        if result is None or t.device != result.work.device or not result.lies_like(t):
            return None
        y = result.tensor()
        if t._version or (y is not None and y._version != result.version):
            return None  # other code wrote into the result, or into the cast
        if t.dtype == result.dtype and all(torch.promote_types(d, t.dtype) == d for d in dtypes):
            return result.work, result.index  # widened and narrowed again
        key = tuple(dtypes)
        if key not in result.casts:
            given = _Again(result.work, result.index, result.size, result.stride, 0)
            result.casts[key] = _Work(functools.partial(_cast_along, dtypes=key), [given], t.device)
        return result.casts[key], 0

    # --------------------------------------------------------------------------------------------- called by autograd

    def pack(self, t: Tensor) -> Kept | _Again | Away:
        away = None if self.offload is None else self.offload.send(t)
        if away is not None:
            return away
        packed = self._stand_in(t)
        if type(packed) is _Again:
            work = packed.work
            work.wanted += 1
            if packed.index not in work.left_out:
                work.left_out.add(packed.index)
                self.tensors += 1
                self.bytes += t.untyped_storage().nbytes()
        return packed

    def unpack(self, packed: Kept | _Again | Away) -> Tensor:
        if type(packed) is tuple:
            t, version = packed
            if t._version != version:
                check_unwritten(t, version)
            return t
        if isinstance(packed, Away):
            return packed.tensor()
        again = cast(_Again, packed)
        again.work.given += 1
        return self._value(again)

    def _stand_in(self, t: Tensor) -> Kept | _Again:
        # The hooks run for every tensor that autograd saves, so the common cases return as early as they can. No
        # version is read from an inference tensor: torch refuses to save such a tensor before calling a hook.
        if type(t) is torch.nn.Parameter:  # not a computed result
            return t, t._version
        node = t.grad_fn
        if node is None:
            result = self._find_result(t) if t.dim() > 1 else None
            if result is None:
                return t, t._version
            return _Again(result.work, result.index, t.size(), t.stride(), t.storage_offset())
        name, version = node.name(), t._version
        transposed = name in TRANSPOSED
        if transposed and type(base := t._base) is torch.nn.Parameter and base.is_leaf:
            return t, version
        is_view = transposed or name in VIEWS
        if t.dim() > 1 and name != PRODUCT:
            result = self._find_result(t)
            if result is not None:
                return _Again(result.work, result.index, t.size(), t.stride(), t.storage_offset())
            if (name == CAST or name in VIEWS) and self._nodes and t.storage_offset() == 0 and _is_plain(t):
                made = self._cast(t)
                if made is not None:
                    return _Again(*made, t.size(), t.stride(), 0)
        # Detached, since t's own autograd node may save t, which would form a reference cycle. A view's
        # node saves no tensors, unless an operation wrote into the view: then that operation's node is behind the view.
        return t if is_view and not version else t.detach(), version

    def _value(self, packed: Kept | _Again) -> Tensor:
        if type(packed) is tuple:
            t, version = packed
            check_unwritten(t, version)
            return t
        packed = cast(_Again, packed)
        work = packed.work
        results = work.results or self._compute(work)  # a local name: another thread may drop work.results now
        value = results[packed.index].as_strided(packed.size, packed.stride, packed.offset)
        if not work.wanted or work.given % work.wanted == 0:  # %: with retain_graph=True backward runs again
            self._drop(work)
        return value

    def _compute(self, work: _Work) -> tuple[Tensor, ...]:
        inputs = [t if t is None else self._value(t) for t in work.inputs]
        for t in inputs:
            if t is not None and t.numel() and not t.untyped_storage().nbytes():
                raise RuntimeError(
                    "tigon: a norm's input or weight was released before the backward pass of the next layer, so the "
                    "norm cannot be recomputed. Shard the norm with that layer, or fuse with recompute='product'."
                )
        if torch.is_grad_enabled() or autocast_dtype(work.device.type) != work.autocast:
            with torch.no_grad(), autocast_as(work.device.type, work.autocast):
                made = work.again(*inputs)
        else:  # the usual case: backward itself records no gradients
            made = work.again(*inputs)
        results = work.results = made if isinstance(made, tuple) else (made,)
        held = self._held.setdefault(work.device, [])
        held[:] = [r for r in held if r() is not None]
        if len(held) >= HELD:
            self._drop(held[0]())
        held.append(ref(work))
        return results

    def _drop(self, work: Any) -> None:
        work.results = None
        held = self._held[work.device]
        held[:] = [r for r in held if r() is not work]


def _running() -> Pass | None:
    """The pass whose hooks see the tensors saved now; None if other hooks do, or none."""
    hooks = _top_hooks(False)
    owner = None if hooks is None else getattr(hooks[0], "__self__", None)
    return owner if isinstance(owner, Pass) else None


def _is_plain(t: Tensor) -> bool:
    """Whether t's memory address identifies t: t is no DTensor, nested or sparse tensor."""
    kind = type(t)
    return (kind is Tensor or kind is torch.nn.Parameter) and t.layout is torch.strided


Kept: TypeAlias = tuple[Tensor, int]  # a saved tensor that is kept unchanged, and the version when saved


class _Again:
    """A saved tensor that is recomputed: a view of a `_Work`'s result."""

    __slots__ = ("index", "offset", "size", "stride", "work")

    def __init__(self, work: _Work, index: int, size: Any, stride: Any, offset: Any) -> None:
        self.work, self.index, self.size, self.stride, self.offset = work, index, size, stride, offset


class _Work:
    """A computation that stands for its results.

    wanted: how often autograd saved a result. given: how often backward got them.
    """

    __slots__ = (
        "__weakref__", "again", "autocast", "device", "given", "inputs", "left_out", "results", "wanted",
    )  # fmt: skip

    def __init__(self, again: Callable[..., Any], inputs: list[Any], device: torch.device) -> None:
        self.again, self.inputs, self.device = again, inputs, device
        self.autocast = autocast_dtype(device.type)
        self.results: tuple[Tensor, ...] | None = None
        self.left_out: set[int] = set()
        self.wanted = self.given = 0


class _Result:
    """A tensor given to `note`, while the tensor is alive."""

    __slots__ = ("casts", "contiguous", "dtype", "index", "size", "stride", "tensor", "version", "work")

    def __init__(self, y: Tensor, tensor: ref[Tensor], work: _Work, index: int) -> None:
        self.tensor, self.work, self.index = tensor, work, index
        self.dtype, self.version, self.size, self.stride = y.dtype, y._version, y.size(), y.stride()
        self.contiguous = y.is_contiguous()
        self.casts: dict[tuple[torch.dtype, ...], _Work] = {}

    def lies_like(self, t: Tensor) -> bool:
        """Whether the elements of t, a cast of this result's views, are in the result's order."""
        if self.contiguous:
            return t.is_contiguous() and t.numel() == self.size.numel()
        return (t.size(), t.stride()) == (self.size, self.stride)


def _cast_along(t: Tensor, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    for dtype in dtypes:
        t = t.to(dtype)
    return t


def _address(storage: torch.UntypedStorage) -> int:
    """A storage's address. Meta storages have no address, so their identity stands in."""
    return storage.data_ptr() or storage._cdata


def _behind_views(node: Any, index: int) -> tuple[Any, int]:
    """The node, and the output index, that made the tensor below a chain of views."""
    while node is not None and node.name() in VIEWS:
        node, index = node.next_functions[0]
    return node, index
