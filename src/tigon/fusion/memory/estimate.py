"""How much memory a training step takes on a GPU, computed without a GPU: the step runs on the meta device.

Meta tensors have shapes and no memory. The step is a real forward and backward pass through the whole model,
plain or fused. A dispatch mode sees every allocation and every release, and counts the live bytes:

    weights         parameters and buffers
    optimizer       the optimizer's states, as after a first step
    gradients       gradients that have record_gradient in `.grad`
    activations     tensors that the layers allocated in the forward pass, and that are still alive
    head and loss   tensors that the head and all code after it allocated in the forward pass
    temporary       tensors that the backward pass allocated, on the way to a gradient

The step imitates a GPU: `scaled_dot_product_attention` takes a kernel that does not build the scores, `tigon` takes
its kernels' path (`meta_as_gpu`), and autocast casts as on CUDA. The count misses the allocator's fragmentation, the
CUDA context, and memory that library kernels allocate inside.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from tigon.kernels.autocast import autocast_device
from tigon.kernels.dispatch import meta_as_gpu

PARTS = ("weights", "optimizer", "gradients", "activations", "head and loss", "temporary")
# Optimizer state bytes per trainable parameter, by the parameter's own size in bytes.
OPTIMIZERS: dict[str, Callable[[int], float]] = {
    "adamw": lambda size: 2 * size,  # torch's: two moments in the weight's dtype
    "adamw-fp32": lambda size: 8,
    "adamw-8bit": lambda size: 2 + 2 * 4 / 256,  # two one-byte moments, and a scale per 256 values in each
    "sgd-momentum": lambda size: size,
    "sgd": lambda size: 0,
}
# cuBLAS keeps a workspace for each thread that multiplies: forward and backward. 32 MiB on Hopper; elsewhere 8 MiB.
WORKSPACES = 2 * 32 * 2**20


@dataclass(frozen=True)
class MemorySnapshot:
    """The memory at one moment in a step: bytes by part (PARTS). during: forward, loss, backward or optimizer."""

    during: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        return {"during": self.during, "bytes": self.total, **{name: self.parts[name] for name in PARTS}}


@dataclass(frozen=True)
class StepMemory:
    """The memory of a single step.

    peak: the moment at which most memory is allocated. kept: the end of the forward pass, when every tensor that the
    backward pass needs is alive. update: the optimizer's step.
    """

    peak: MemorySnapshot
    kept: MemorySnapshot
    update: MemorySnapshot

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name).to_dict() for name in ("peak", "kept", "update")}


class CannotEstimate(Exception):
    """The model's code looks at tensor values, which the meta device lacks. The message says which."""


def step_memory(
    model: nn.Module, inputs: dict[str, Any], *, optimizer: str = "adamw", autocast: torch.dtype | None = None,
    shards: int = 1, stored: torch.dtype | None = None,
) -> StepMemory:  # fmt: skip
    """The memory that this model's training step takes on a GPU: forward, backward, optimizer update.

    Args:
        model: on the meta device, in the dtype and state in which you train it: fused or not, with adapters, with
            gradient checkpointing (`use_reentrant=False`).
        inputs: arguments to the model's forward, on the meta device, with labels.
        optimizer: a key in OPTIMIZERS; the states exist, as after a first step.
        autocast: the autocast dtype around the forward pass, if any.
        shards: the number of GPUs that weights, gradients and states are sharded over, layer by layer, as FSDP2 does.
        stored: the shards' dtype, by default the model's.
    Raises: ValueError for a model that is not on the meta device, and for an unknown optimizer. CannotEstimate.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"step_memory: optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}.")
    if any(not p.is_meta for p in model.parameters()):
        raise ValueError("step_memory: model must be on the meta device; build it under torch.device('meta').")
    tracker = AllocationTracker()
    units = _Units(model, shards, stored)
    for t in (*model.parameters(), *model.buffers()):
        tracker.add(t, "weights", units.count_stored_bytes(t) // shards)
    for t in tree_iter(inputs):
        if _is_counted(t):
            tracker.add(t, "activations")
    trained = {id(p): p for p in model.parameters() if p.requires_grad}.values()
    states = sum(p.numel() * OPTIMIZERS[optimizer](units.itemsize(p)) for p in trained)
    tracker.change("optimizer", int(states) // shards)
    tracker.change("temporary", WORKSPACES)
    tracker.change("weights", units.gathered)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_arriving(tracker, units))
        stack.enter_context(_marked_head(model, tracker))
        stack.enter_context(_meta_autocast())
        for mode in (meta_as_gpu(), tracker, _GPU(tracker)):
            stack.enter_context(mode)
        try:
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                loss = model(**inputs).loss
            tracker.casts.clear()
            kept = tracker.snapshot("forward")
            tracker.phase = "temporary"
            # Not loss.backward(): a function mode is off during a call that it has seen, and backward needs the mode.
            torch.autograd.graph._engine_run_backward(
                (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
            units.end(tracker)
        except Exception as error:
            raise CannotEstimate(" ".join(str(error).split()) or type(error).__name__) from error
        update = tracker.snapshot("optimizer")
        for p in trained:
            p.grad = None
    return StepMemory(tracker.peak if tracker.peak.total > update.total else update, kept, update)


class AllocationTracker(TorchDispatchMode):
    """Which storages are alive, and for which part.

    phase: the part that new storages belong to. casts: autocast's weight copies, by the weights' ids.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "activations"
        self.totals = dict.fromkeys(PARTS, 0)
        self.now = 0
        self.peak = MemorySnapshot("forward", dict(self.totals))
        self.casts: dict[int, Tensor] = {}
        self._alive: dict[int, tuple[Any, str, int]] = {}  # by storage: a weak reference, part, bytes

    def add(self, t: Tensor, part: str | None = None, size: int | None = None) -> None:
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        part, size = part or self.phase, storage.nbytes() if size is None else size
        # A storage's wrapper lives as long as the storage itself.
        self._alive[key] = weakref.ref(storage, lambda _: self._remove(key)), part, size
        self.change(part, size)

    def _remove(self, key: int) -> None:
        _, part, size = self._alive.pop(key)
        self.change(part, -size)

    def change(self, part: str, size: int) -> None:
        self.totals[part] += size
        self.now += size
        if self.now > self.peak.total:
            self.peak = self.snapshot(self._during())

    def move(self, t: Tensor, part: str, size: int | None = None) -> None:
        """Count t's storage as another part, or with another size."""
        key = t.untyped_storage()._cdata
        if key in self._alive:
            watch, before, old = self._alive[key]
            size = old if size is None else size
            self._alive[key] = watch, part, size
            self.change(before, -old)
            self.change(part, size)

    def snapshot(self, during: str) -> MemorySnapshot:
        return MemorySnapshot(during, dict(self.totals))

    def _during(self) -> str:
        return {"activations": "forward", "head and loss": "loss"}.get(self.phase, "backward")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            # transformers asks whether masks hide no token and sequences are not packed. Both hold in this step.
            return True
        out = func(*args, **kwargs)
        given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if _is_counted(t)}
        for t in tree_iter(out):
            # A view into a tensor that is not counted, such as the shape of unbuilt logits, is not counted either.
            if _is_counted(t) and t.untyped_storage()._cdata not in given:
                self.add(t)
        return out


def _is_counted(t: Any) -> bool:
    return isinstance(t, Tensor) and type(t) in (Tensor, nn.Parameter) and t.is_meta and t.layout is torch.strided


# ---------------------------------------------------------------------------------------------------- GPU imitation


class _GPU(TorchFunctionMode):
    """Attention and autocast as on CUDA. Autocast is on wherever the CPU's autocast is on (see `meta_as_gpu`)."""

    def __init__(self, tracker: AllocationTracker) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        if dtype is not None and kwargs.get("out") is None:
            if func in _NARROW:
                args, kwargs = tree_map_only(Tensor, lambda t: self._narrow(t, dtype), (args, kwargs))
            elif func in _WIDE and kwargs.get("dtype") is None:
                args, kwargs = tree_map_only(Tensor, lambda t: t.float() if _is_half(t) else t, (args, kwargs))
        if func is F.scaled_dot_product_attention and args[0].is_meta:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _narrow(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        if not _is_counted(t) or t.dtype != torch.float32:
            return t.to(dtype) if _is_half(t) and t.dtype != dtype else t
        if not (t.is_leaf and t.requires_grad) or self.tracker.phase == "temporary":
            return t.to(dtype)
        # Autocast casts a weight once in a forward pass.
        cast = self.tracker.casts.get(id(t))
        if cast is None:
            cast = self.tracker.casts[id(t)] = t.to(dtype)
        return cast


def _is_half(t: Tensor) -> bool:
    return t.dtype in (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def _meta_autocast() -> Iterator[None]:
    """Let `torch.autocast("meta")` switch the CPU's autocast: PEFT's adapters on stacked experts name their device."""
    plain = torch.autocast

    class Autocast(plain):  # type: ignore[misc, valid-type]
        def __init__(self, device_type: str, *args: Any, **options: Any) -> None:
            super().__init__(autocast_device(device_type), *args, **options)

    torch.autocast = Autocast  # type: ignore[misc]
    try:
        yield
    finally:
        torch.autocast = plain  # type: ignore[misc]


# Functions that language models call, from torch's lists (https://docs.pytorch.org/docs/stable/amp.html, CUDA).
_NARROW = {
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.scaled_dot_product_attention, torch.einsum, torch.matmul, Tensor.matmul,
    Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm, torch.addmm, Tensor.addmm, torch.baddbmm,
    Tensor.baddbmm, getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None),
}  # fmt: skip
_WIDE = {
    F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, torch.log_softmax, Tensor.log_softmax, F.layer_norm,
    F.group_norm, F.cross_entropy, F.nll_loss, F.softplus, F.mse_loss, torch.exp, Tensor.exp, torch.log, Tensor.log,
    torch.pow, Tensor.pow, Tensor.__pow__, torch.rsqrt, Tensor.rsqrt, Tensor.reciprocal, torch.sum, Tensor.sum,
    torch.cumsum, Tensor.cumsum, torch.prod, Tensor.prod, torch.norm, Tensor.norm, F.normalize,
}  # fmt: skip


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    return _Attention.apply(q, k, v, attn_mask)  # type: ignore[no-any-return]


class _Attention(torch.autograd.Function):
    """Saves the tensors that flash and memory-efficient attention save: inputs, result, one number for each row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, length, _ = q.shape
        out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, mask, out, q.new_empty(batch, heads, length, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, _, _ = ctx.saved_tensors
        bias = mask if mask is not None and ctx.needs_input_grad[3] else None
        # dq is accumulated in fp32; k and v first get a gradient for each q head.
        wide = torch.empty_like(q, dtype=torch.float32)
        each = [t.new_empty(*q.shape[:2], *t.shape[2:]) for t in (k, v)] if k.shape[1] != q.shape[1] else []
        gradients = [torch.empty_like(t) for t in (q, k, v)]
        del wide, each
        return *gradients, None if bias is None else torch.empty_like(bias)


# -------------------------------------------------------------------------------------------------------- the tracker


class _Units:
    """The units that FSDP2 gathers and reduces: each layer, and the rest together. Without shards: the whole model.

    gathered: weight bytes that are whole during a step: the weights that belong to no layer, the current layer's,
        and the next layer's.
    """

    def __init__(self, model: nn.Module, shards: int, dtype: torch.dtype | None) -> None:
        self.shards, self.dtype = shards, dtype
        names = set(getattr(model, "_no_split_modules", None) or ())
        layers = [m for m in model.modules() if type(m).__name__ in names] if shards > 1 else []
        self.of = {id(p): number for number, layer in enumerate(layers) for p in layer.parameters()}
        self.members: dict[int, dict[int, nn.Parameter]] = {}
        for p in model.parameters():
            self.members.setdefault(self.of.get(id(p), -1), {})[id(p)] = p
        sizes = {unit: sum(p.numel() * p.element_size() for p in ps.values()) for unit, ps in self.members.items()}
        largest = max((size for unit, size in sizes.items() if unit >= 0), default=0)
        self.gathered = sizes.get(-1, 0) + 2 * largest if shards > 1 else 0
        self._left = {unit: {i for i, p in ps.items() if p.requires_grad} for unit, ps in self.members.items()}
        self._reducing: int | None = None

    def itemsize(self, t: Tensor) -> int:
        return t.element_size() if self.dtype is None else self.dtype.itemsize

    def count_stored_bytes(self, t: Tensor) -> int:
        return t.numel() * self.itemsize(t)

    def record_gradient(self, p: nn.Parameter, tracker: AllocationTracker) -> None:
        if p.grad is None:
            return
        tracker.move(p.grad, "gradients")
        unit = self.of.get(id(p), -1)
        self._left[unit].discard(id(p))
        if unit >= 0 and not self._left[unit]:
            # A layer's gradients are reduced while the preceding layer's gradients are computed.
            self._reduce(self._reducing, tracker)
            self._reducing = unit

    def end(self, tracker: AllocationTracker) -> None:
        for unit in (self._reducing, -1):
            self._reduce(unit, tracker)
        tracker.change("weights", -self.gathered)

    def _reduce(self, unit: int | None, tracker: AllocationTracker) -> None:
        for p in () if unit is None or self.shards == 1 else self.members.get(unit, {}).values():
            if p.grad is not None:
                tracker.move(p.grad, "gradients", self.count_stored_bytes(p) // self.shards)


@contextlib.contextmanager
def _arriving(tracker: AllocationTracker, units: _Units) -> Iterator[None]:
    """Count gradients as gradients once they have record_gradient in `.grad`."""
    parameters = [p for members in units.members.values() for p in members.values() if p.requires_grad]
    handles = [p.register_post_accumulate_grad_hook(lambda p: units.record_gradient(p, tracker)) for p in parameters]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _marked_head(model: nn.Module, tracker: AllocationTracker) -> Iterator[None]:
    """Count memory that the head, and all code after it, allocates as "head and loss"."""

    def begins(*_: Any) -> None:
        if tracker.phase == "activations":
            tracker.phase = "head and loss"

    heads = []
    for module in model.modules():
        if callable(getattr(type(module), "get_output_embeddings", None)):
            with contextlib.suppress(AttributeError, NotImplementedError):
                heads.append(module.get_output_embeddings())  # type: ignore[operator]
    handles = [head.register_forward_pre_hook(begins) for head in {id(h): h for h in heads if h is not None}.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
