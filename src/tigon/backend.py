"""The one place that decides which implementation runs: the Triton kernels or the torch reference.

    triton   CUDA and ROCm tensors in bf16, fp16 and fp32 (and CPU tensors under TRITON_INTERPRET=1, when forced)
    torch    everything else: any device, any dtype; the specification of every operator

The choice is made per call, from the tensors, by `use_triton`. `use_backend("torch" | "triton")` or the environment
variable TIGON_BACKEND forces it. Forced means forced: where the forced backend cannot run, the call raises.

Launches are registered as `torch.library` ops by `@launcher`, and go through them only under `torch.compile`: the
dispatcher costs 36 µs a call in eager mode, a direct launch nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # macOS, Windows and CPU-only installs: the torch reference serves every call

    class _NoTriton:
        """Lets a kernel file be imported without Triton. Its kernels are never launched."""

        @staticmethod
        def jit(fn: Any = None, **_: Any) -> Any:
            return fn if fn is not None else lambda f: f

        @staticmethod
        def constexpr(value: Any) -> Any:
            return value

    triton = tl = _NoTriton()
    HAS_TRITON = False
else:
    HAS_TRITON = True

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
BACKENDS = ("triton", "torch")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PLAIN = (Tensor, torch.nn.Parameter)


def _checked_backend(name: str | None, where: str) -> str | None:
    if name in (None, "", "auto"):
        return None
    if name not in BACKENDS:
        raise ValueError(f"{where} must be 'triton', 'torch' or 'auto', got {name!r}.")
    return name


_forced = _checked_backend(os.environ.get("TIGON_BACKEND"), "TIGON_BACKEND")


class use_backend:
    """Force one implementation for the calls inside a `with` block, in every thread of the process.

    Args:
        name: "triton", "torch", or "auto" (decide from the tensors, the default outside any block).
    Raises:
        ValueError for another name. A call inside the block raises RuntimeError where the forced backend cannot run.

    The choice is made in the forward pass: a backward pass runs on the backend of its forward.
    """

    def __init__(self, name: str) -> None:
        self.name = _checked_backend(name, "use_backend: name")
        self._outer: list[str | None] = []

    def __enter__(self) -> use_backend:
        global _forced
        self._outer.append(_forced)
        _forced = self.name
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _forced
        _forced = self._outer.pop()


def why_not_triton(*tensors: Tensor | None) -> str | None:
    """The reason why the Triton kernels cannot take these tensors, or None when they can."""
    if not HAS_TRITON:
        return "Triton is not installed"
    device = None
    for t in tensors:
        if t is None:
            continue
        if t.dtype not in DTYPES:
            return f"the kernels take bfloat16, float16 and float32, not {str(t.dtype).removeprefix('torch.')}"
        if t.device.type != "cuda" and not (INTERPRET and t.device.type == "cpu"):
            return f"the kernels run on CUDA and ROCm devices, not on {t.device.type!r}"
        if device is not None and t.device != device:
            return f"the tensors are on different devices ({device} and {t.device})"
        if type(t) is not Tensor and hasattr(t, "__tensor_flatten__"):  # made of other tensors: no memory of its own
            return f"the kernels take plain tensors, not {type(t).__name__}"
        device = t.device
    return None


def use_triton(*tensors: Tensor | None) -> bool:
    """True when the Triton kernels serve this call. The only question an operator asks about backends."""
    if _forced is None and HAS_TRITON:
        # The common case, in a fifth of the time that its reasons take: plain tensors on the first one's GPU.
        device = tensors[0].get_device()  # type: ignore[union-attr]
        for t in tensors:
            if t is not None and (
                not t.is_cuda or t.dtype not in DTYPES or type(t) not in _PLAIN or t.get_device() != device
            ):
                break
        else:
            return True
    if _forced == "torch":
        return False
    reason = why_not_triton(*tensors)
    if _forced == "triton":
        if reason is not None:
            raise RuntimeError(f"tigon: the triton backend was forced, but {reason}.")
        return True
    # The interpreter is for testing kernels, not for speed: on the CPU it serves only when it is asked for.
    return reason is None and not all(t is None or t.device.type == "cpu" for t in tensors)


_library = torch.library.Library("tigon", "DEF")


@functools.cache
def _gpus() -> int:
    return torch.cuda.device_count()


def is_traced(x: Tensor) -> bool:
    """True where x stands for a tensor in a graph that is being recorded, and no memory is there to launch on."""
    return torch.compiler.is_compiling() or type(x) not in _PLAIN


def graph_is_kept() -> bool:
    """Inside a backward pass: whether there may be another one, so that what was saved for it has to stay as it is."""
    kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if kept is None else kept()


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype that autocast casts to on this type of device; None where it is off, and on meta, which has none."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def launcher(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a launch function as `torch.ops.tigon.<name>`; call it directly in eager mode, as the op when traced.

    Args:
        schema: arguments and results in torch's schema language, "(Tensor x, float eps) -> Tensor".
        fake: same arguments; returns empty outputs of the right shape, dtype and strides.
    The first argument of the launch function is a tensor, and its device becomes the current one. Called with keyword
    arguments, which the schema does not have, it runs directly.
    """

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        name = fn.__name__.lstrip("_")

        def on_device(*args: Any, **own: Any) -> Any:
            x = args[0]
            # get_device() is -1 on a CPU. With one GPU in the process there is nothing to switch, nor to ask.
            if x.is_cuda and _gpus() > 1 and x.get_device() != torch.cuda.current_device():
                with torch.cuda.device(x.device):
                    return fn(*args, **own)
            return fn(*args, **own)

        _library.define(name + schema)
        _library.impl(name, on_device, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tigon::{name}", fake, lib=_library)
        op = getattr(torch.ops.tigon, name).default

        @functools.wraps(fn)
        def launch(*args: Any, **own: Any) -> Any:
            return op(*args) if not own and is_traced(args[0]) else on_device(*args, **own)

        launch.op, launch.direct = op, on_device  # type: ignore[attr-defined]
        return launch

    return register


def first_order(backward: Callable[..., Any], ctx: Any, *gradients: Any) -> Any:
    """What backward gives; where it is differentiated itself, as a graph that says what is missing.

    torch's `once_differentiable` says so only where the incoming gradient requires one; that of a plain sum does not,
    and all would be lost. It costs 5 µs, and only where there is need.
    """
    if not torch.is_grad_enabled():
        return backward(ctx, *gradients)
    with torch.no_grad():
        found = backward(ctx, *gradients)
    error = torch._C._functions.DelayedError(
        b"tigon: trying to differentiate twice: the gradient of a fused operator has no gradient of its own.", 1
    )
    return tuple(g if g is None else error(g.detach().requires_grad_()) for g in found)


def differentiable(
    launch: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any], *, outputs: int = 1
) -> Callable[..., Any]:
    """Give a launch function its gradient, and return the function to call.

    Args:
        launch: what `@launcher` made; its first `outputs` results are the operator's, the others are for the backward.
        setup_context: (ctx, inputs, output) → None; saves what the backward needs.
        backward: (ctx, *gradients) → one gradient, or None, for each input. Gradients may be None.

    In eager mode this is an `autograd.Function` around the direct launch. Under torch.compile it is the op, with the
    same two functions registered as its autograd formula: Dynamo can trace the Function as well, but rejects one input
    given twice, and fails on a float option that it has made symbolic (torch 2.13, dynamic=True).
    """
    op, direct = launch.op, launch.direct  # type: ignore[attr-defined]

    def setup(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.set_materialize_grads(False)
        setup_context(ctx, inputs, output)

    def visible(result: Any) -> Any:
        if not isinstance(result, (tuple, list)):
            return result
        return result[0] if outputs == 1 else tuple(result[:outputs])

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            result = direct(*args) if type(args[0]) in _PLAIN else op(*args)
            ctx.set_materialize_grads(False)
            ctx.hides = True  # what is beyond `outputs`: nobody but the backward pass ever sees it
            setup_context(ctx, args, result)
            return visible(result)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return first_order(backward, ctx, *gradients)

    _name(Eager, launch)
    torch.library.register_autograd(op, backward, setup_context=setup, lib=_library)
    # Function.apply without its Python half, which looks for functorch's wrappers: a third of what an apply costs.
    bare_apply = super(torch.autograd.Function, Eager).apply
    transformed = torch._C._are_functorch_transforms_active

    def apply(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return visible(op(*args))
        return Eager.apply(*args) if transformed() else bare_apply(*args)

    return apply


def differentiable_directly(
    launch: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any], *, outputs: int = 1
) -> Callable[..., Any]:
    """As `differentiable`, of calls with what no op of torch.library can be given: apply(*args, own).

    own: keyword arguments of the launch function; `ctx.own` in the other two.
    """

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            *args, own = given
            result = launch(*args, **own)
            ctx.set_materialize_grads(False)
            ctx.hides, ctx.own = True, own
            setup_context(ctx, tuple(args), result)
            return result[0] if outputs == 1 else tuple(result[:outputs])

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return *first_order(backward, ctx, *gradients), None

    _name(Direct, launch)
    return Direct.apply  # type: ignore[no-any-return]


def _name(function: Any, launch: Callable[..., Any]) -> None:
    """The node in the graph, which profilers show and grad_fn prints: RmsNormBackward."""
    name = launch.__name__.removesuffix("_fwd").removesuffix("_launch")
    function.__name__ = function.__qualname__ = "".join(part.title() for part in name.split("_"))
    function._backward_cls.__name__ = f"{function.__name__}Backward"


# (kernel, device, key) → (compiled kernel's launcher, its function, its metadata, grid, arguments after the tensors).
_plans: dict[tuple, tuple[Any, Any, Any, int, tuple]] = {}
_PLANS_KEPT = 4096


def launch(
    kernel: Any, key: tuple, tensors: tuple[Any, ...], plan: Callable[[], tuple[int, tuple, dict[str, int]]]
) -> None:
    """Launch a Triton kernel on the current device; from the second time on without Triton's dispatch.

    Args:
        kernel: the jitted function; its first arguments are `tensors`.
        key: all that the launch depends on but the tensors' addresses: shapes, strides, dtypes, options.
        tensors: tensors, None, or from the second on what `describe` made of one.
        plan: () → (grid, arguments after the tensors, Triton's options); asked once a key.

    Triton looks at every argument of every launch to find the compiled kernel: 13 µs for a small kernel on a slow host,
    30 for a long signature. The key finds it at once. Addresses matter only in that kernels are compiled for those
    that 16 divides, so others take the ordinary way; so does the interpreter, and so do launches under a profiler's
    hooks. Addresses are handed over as numbers: of a tensor Triton asks the driver whether the GPU can see it.
    """
    pointers = []
    address = 0
    for t in tensors:
        if isinstance(t, Tensor):
            t = t.data_ptr()
            address |= t
        pointers.append(t)
    device = tensors[0].get_device()
    key = (kernel, device, key)
    found = _plans.get(key)
    if found is None or address & 15 or _hooked():
        grid, arguments, options = plan()
        compiled = kernel[(grid,)](*tensors, *arguments, **options)
        if compiled is not None and not address & 15:
            if len(_plans) >= _PLANS_KEPT:
                _plans.clear()
            _plans[key] = compiled.run, compiled.function, compiled.packed_metadata, grid, arguments
        return
    run, function, metadata, grid, arguments = found
    stream = torch._C._cuda_getCurrentRawStream(device)
    run(grid, 1, 1, stream, function, metadata, None, None, None, *pointers, *arguments)


def _hooked() -> bool:
    """Whether somebody, Triton's profiler for one, wants to see every launch."""
    hook = triton.knobs.runtime.launch_enter_hook
    # Up to Triton 3.4 a function or None, since then a chain of functions.
    return hook is not None and bool(getattr(hook, "calls", True))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of a device: what a persistent grid is sized by."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 2 if device.type == "cpu" else 132  # cpu: the interpreter runs programs one after another


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use: what bounds the tiles in flight."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 65536))
    return 232448  # of Hopper


@functools.cache
def has_copy_engine(device: torch.device) -> bool:
    """Whether the device brings tiles of tensors into shared memory by itself: NVIDIA's, from Hopper on."""
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    return True


def can_describe(*tensors: Tensor) -> bool:
    """Whether tensors can be handed to a kernel as descriptors, of which it loads tile by tile."""
    return has_copy_engine(tensors[0].device) and all(
        t.stride(-1) == 1
        and t.numel() > 0
        and t.data_ptr() % 16 == 0
        and all(stride > 0 and stride * t.element_size() % 16 == 0 for stride in t.stride()[:-1])
        for t in tensors
    )


def describe(t: Tensor, block: tuple[int, ...]) -> Any:
    """A descriptor of a tensor that `can_describe` accepts: what its copy engine loads tiles of shape `block` by."""
    return TensorDescriptor(t, list(t.shape), list(t.stride()), list(block))


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own costs 9 µs a call on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1


def rows_of(x: Tensor) -> Tensor:
    """View x (..., N) as (M, N) with unit stride along N; copies only where no single row stride describes x."""
    n = x.shape[-1] if x.dim() else 1
    if x.dim() == 2 and (x.stride(1) == 1 or n == 1):
        return x
    if x.dim() and (x.stride(-1) == 1 or n == 1):
        try:
            return x.view(-1, n) if n else x.reshape(0, 0)
        except RuntimeError:
            pass
    return x.contiguous().view(-1, n) if n else x.new_empty(0, 0)


def row_groups(x: Tensor, order: tuple[int, ...] | None = None) -> tuple[Tensor, int, int, int]:
    """Where the rows of x (..., N) lie, in the order of its leading dimensions, or in another order of them.

    Returns: (x, inner, outer_stride, inner_stride), such that row r starts at
        (r // inner) · outer_stride + (r % inner) · inner_stride, and runs with unit stride. The heads of a packed
        projection are such a view. x is a copy where two strides do not describe it.
    """
    if order is None and x.is_contiguous():
        return x, 1, x.shape[-1], 0
    if x.stride(-1) == 1:
        groups: list[tuple[int, int]] = []
        for d in range(x.dim() - 1) if order is None else order:
            size, stride = x.shape[d], x.stride(d)
            if groups and groups[-1][1] == size * stride:
                groups[-1] = groups[-1][0] * size, stride
            elif size != 1:
                groups.append((size, stride))
        if len(groups) < 2:
            return x, 1, groups[0][1] if groups else 0, 0
        if len(groups) == 2:
            return x, groups[1][0], groups[0][1], groups[1][1]
    return (x if order is None else x.permute(*order, -1)).contiguous(), 1, x.shape[-1], 0


def memory_order(dense: Tensor) -> tuple[int, ...] | None:
    """The leading dimensions of what `empty_rows` made, from the slowest to the fastest; None where contiguous."""
    if dense.is_contiguous():
        return None
    strides = dense.stride()
    return tuple(sorted(range(len(strides) - 1), key=lambda d: -strides[d]))


def empty_rows(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Room for a result of x's shape, in the order of x's memory, dense along the rows."""
    if x.is_contiguous() or (x.stride(-1) == 1 and x.dim() > 1):
        y = torch.empty_like(x, dtype=dtype)
        # Of rows that overlap, such as the windows of `unfold`, torch may choose another dimension for the fastest.
        if y.stride(-1) == 1 or y.is_contiguous():
            return y
    return x.new_empty(x.shape, dtype=dtype)
