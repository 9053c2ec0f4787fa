"""A step of length rho along the gradient, for all model parameters at once, and back to the same bits.

    p ← p + rho · g / ‖g‖                 one norm over all parameters
    p ← p + rho · s² g / ‖s g‖            adaptive, with s = |p| + eta

Subtracting the step again would round. The old weights are kept instead, in the memory of the no longer needed
gradients, without an allocation.

Source: Foret et al. 2020, https://arxiv.org/abs/2010.01412; adaptive: Kwon et al. 2021,
https://arxiv.org/abs/2102.11600
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.kernels import cdiv, do_not_specialize, jit, launch, tl, use_triton


def squared_norm(
    params: Sequence[Tensor], grads: Sequence[Tensor], *, adaptive: bool = False, eta: float = 0.0
) -> Tensor:
    """Σ g², or adaptive Σ ((|p| + eta) g)², over all elements in all tensors. The host does not wait.

    Args:
        params: tensors in any float dtypes and on any devices, at least one.
        grads: with the same shapes.
        adaptive, eta: weigh each gradient by its weight's own size, |p| + eta.
    Returns: (), on the first tensor's device; fp64 if a parameter is fp64, else fp32. The same bits on every run.
    """
    squares = []
    for members in _by_device(params):
        # For a model spread over several devices: a sum per device, combined at the end.
        mine, theirs = [params[i] for i in members], [grads[i] for i in members]
        # The kernel walks over memory and knows no shapes: a parameter with gaps in memory uses torch.
        if use_triton(*mine, *theirs) and all(map(_in_one_piece, mine)):
            squares.append(_squared_norm(mine, theirs, adaptive, eta))
        else:
            squares.append(squared_norm_reference(mine, theirs, adaptive=adaptive, eta=eta))
    dtype = functools.reduce(torch.promote_types, [s.dtype for s in squares])
    # Between GPUs the streams order these copies. The fixed summation order gives the same bits on every run.
    return torch.stack([s.to(params[0].device, dtype, non_blocking=True) for s in squares]).sum()


def perturb(
    params: Sequence[Tensor], grads: Sequence[Tensor], squares: Tensor, rho: Sequence[float], *,
    adaptive: bool = False, eta: float = 0.0,
) -> list[Tensor]:  # fmt: skip
    """Move the parameters along their gradients, in place, computed in fp32 and rounded once.

    Args:
        params: tensors that do not overlap.
        grads: with the same shapes. Their memory is overwritten.
        squares: the result of `squared_norm`, or a sum of several. If zero, infinite or NaN, nothing moves.
        rho: the step length, for each parameter.
        adaptive, eta: as in `squared_norm`.
    Returns: the old parameters, for `restore`: in the gradient's memory where the gradient is a whole, unshared storage
        in the parameter's dtype, else in new memory.
    """
    # Allocated before anything moves: an out-of-memory error here leaves every parameter unchanged.
    kept = _room(params, grads)
    # An advanced version means that this tensor now holds an old parameter. Nothing else records the loop's progress.
    versions = [t._version for t in kept]
    try:
        for members in _by_device(params):
            mine, theirs, old = ([tensors[i] for i in members] for tensors in (params, grads, kept))
            lengths = [float(rho[i]) for i in members]
            # The norm stays on the device: kernels read the norm there, and decide there whether anything moves.
            local = squares.to(mine[0].device, non_blocking=True)
            if use_triton(*mine, *theirs) and all(map(_in_one_piece, mine)):
                _perturb(mine, theirs, old, local, lengths, adaptive, eta)
            else:
                perturb_reference(mine, theirs, old, local, lengths, adaptive=adaptive, eta=eta)
    except BaseException:  # such as out of memory: restore the moved parameters
        # Only those: the others' `kept` still hold gradients, which must not become parameters.
        moved = [i for i, t in enumerate(kept) if t._version != versions[i]]
        restore([params[i] for i in moved], [kept[i] for i in moved])
        raise
    return kept


def restore(params: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    """Restore the parameters' old bits, in one fused copy per dtype on a GPU.

    Args:
        params: the moved parameters.
        kept: the result of `perturb`.
    """
    # A bit copy. Subtracting the step would round, and weights would drift from step to step.
    copy_all(params, kept)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into the target of the same shape."""
    pairs: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}  # PyTorch only fuses copies within one dtype
    for target, source in zip(targets, sources, strict=True):
        mine, theirs = pairs.setdefault((target.device, target.dtype, source.dtype), ([], []))
        mine.append(target)
        theirs.append(source)
    with torch.no_grad():
        for mine, theirs in pairs.values():
            # One launch for many tensors: a copy per parameter would cost the host more than the device.
            torch._foreach_copy_(mine, theirs)


def _by_device(tensors: Sequence[Tensor]) -> list[list[int]]:
    members: dict[torch.device, list[int]] = {}
    for i, t in enumerate(tensors):
        members.setdefault(t.device, []).append(i)
    return list(members.values())


def _room(params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    # Gradients may share memory: a and b in a.view(6) + b.view(6) get the same gradient storage, which cannot keep two
    # parameters. Compared by storage, not by view: a gradient may be a slice of a buffer with other gradients, as in
    # FSDP2.
    storages = [g.untyped_storage() for g in grads]
    places = [s.data_ptr() for s in storages]
    owners = Counter(places)
    # Same dtype, or the old bits would not fit; same strides, since kernels copy in memory order; an unshared storage,
    # or the write would reach a neighbour's gradient.
    return [
        g
        if g.dtype == p.dtype and g.stride() == p.stride() and owners[place] == 1 and s.nbytes() == g.nbytes
        else torch.empty_like(p)
        for p, g, s, place in zip(params, grads, storages, places, strict=True)
    ]


# -------------------------------------------------------------------------------------------------------- reference


def squared_norm_reference(
    params: Sequence[Tensor], grads: Sequence[Tensor], *, adaptive: bool = False, eta: float = 0.0
) -> Tensor:
    squares = []
    for p, g in zip(params, grads, strict=True):
        # fp32 for half precision: fp16 squares would underflow, and a sum in 8 or 11 bits would stop growing.
        acc = torch.promote_types(p.dtype, torch.float32)
        squares.append((_size(p, eta) * g.to(acc) if adaptive else g.to(acc)).square().sum())
    dtype = functools.reduce(torch.promote_types, [s.dtype for s in squares])
    return torch.stack([s.to(dtype) for s in squares]).sum()


def perturb_reference(
    params: Sequence[Tensor], grads: Sequence[Tensor], kept: Sequence[Tensor], squares: Tensor, rho: Sequence[float], *,
    adaptive: bool = False, eta: float = 0.0,
) -> None:  # fmt: skip
    # A boolean tensor, not an `if`: the host would have to wait for the norm.
    finite = (squares > 0) & squares.isfinite()
    inverse = torch.where(finite, squares.rsqrt(), 0.0)
    for p, g, old, length in zip(params, grads, kept, rho, strict=True):
        acc = torch.promote_types(p.dtype, torch.float32)
        step = (length * inverse.to(acc)) * g.to(acc)
        if adaptive:
            step *= _size(p, eta).square()
        moved = p.to(acc) + torch.where(finite, step, 0.0)  # a select: infinite g times 0 is NaN
        old.copy_(p)  # old is g's memory, and g has been read
        p.copy_(moved)


def _size(p: Tensor, eta: float) -> Tensor:
    return p.to(torch.promote_types(p.dtype, torch.float32)).abs() + eta


# ---------------------------------------------------------------------------------------------------------- kernels
#
# Both kernels take any number of tensors in one launch. A program owns one block of BLOCK elements in one tensor;
# owner_ptr maps the program to its tensor t, first_ptr maps t to its first block, sizes_ptr to its element count.
# addresses_ptr holds T parameter addresses, then T gradient addresses, then, for `_perturb_kernel`, T `kept` addresses.


@jit
def _find(addresses_ptr, sizes_ptr, owner_ptr, first_ptr, BLOCK: tl.constexpr):
    """This program's tensor, its block's first element, and the tensor's element count."""
    block = tl.program_id(0)
    t = tl.load(owner_ptr + block)
    # int64: a tensor with 2**31 elements is an embedding with 512k tokens and width 4096.
    start = (block - tl.load(first_ptr + t)).to(tl.int64) * BLOCK
    return t, start, tl.load(sizes_ptr + t)


@jit
def _pointer(addresses_ptr, index, start, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    # A loaded address carries no alignment. With the hint a thread's loads may be 16 bytes wide.
    return tl.multiple_of(tl.load(addresses_ptr + index).to(tl.pointer_type(DTYPE)), ALIGN) + start


@jit
def _sum_squares(p_ptr, g_ptr, mask, eta, ADAPTIVE: tl.constexpr):
    other = None if mask is None else 0.0
    g = tl.load(g_ptr, mask=mask, other=other).to(tl.float32)
    if ADAPTIVE:
        g *= tl.abs(tl.load(p_ptr, mask=mask, other=other).to(tl.float32)) + eta
    return tl.sum(g * g, 0)


# Writes a partial sum of squares per program to partial_ptr. A second launch adds these in a fixed order: atomics would
# change the bits between runs. ADAPTIVE multiplies g by |p| + eta; otherwise p is not read.
@jit
@do_not_specialize("T", "eta")
def _squared_norm_kernel(
    addresses_ptr, sizes_ptr, owner_ptr, first_ptr, partial_ptr, T, eta,
    P: tl.constexpr, G: tl.constexpr, ALIGN: tl.constexpr, ADAPTIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t, start, n = _find(addresses_ptr, sizes_ptr, owner_ptr, first_ptr, BLOCK)
    cols = tl.arange(0, BLOCK)
    p_ptr = _pointer(addresses_ptr, t, start, P, ALIGN) + cols
    g_ptr = _pointer(addresses_ptr, T + t, start, G, ALIGN) + cols
    # A mask against a loaded number narrows the loads, so that only a tensor's last block is masked.
    if start + BLOCK <= n:
        squares = _sum_squares(p_ptr, g_ptr, None, eta, ADAPTIVE)
    else:
        squares = _sum_squares(p_ptr, g_ptr, start + cols < n, eta, ADAPTIVE)
    tl.store(partial_ptr + tl.program_id(0), squares)


@jit
def _move(p_ptr, g_ptr, kept_ptr, mask, step, eta, ADAPTIVE: tl.constexpr):
    other = None if mask is None else 0.0
    p = tl.load(p_ptr, mask=mask, other=other)
    g = tl.load(g_ptr, mask=mask, other=other).to(tl.float32)
    p32 = p.to(tl.float32)
    e = step * g
    if ADAPTIVE:
        size = tl.abs(p32) + eta
        e *= size * size
    # A select: if the norm is not finite, g may be infinite too, and 0 · g NaN.
    e = tl.where(step > 0, e, 0.0)
    # kept may be g's memory: all threads read the block before any writes.
    tl.debug_barrier()
    tl.store(kept_ptr, p, mask=mask)
    tl.store(p_ptr, (p32 + e).to(p.dtype), mask=mask)


# Moves a block of p by step · g, or step · s² g with s = |p| + eta if ADAPTIVE, computed in fp32 and rounded once. The
# old bits of p go to `kept`, which may be g's memory: `_room` allows that only for equal dtypes. rho_ptr holds one step
# length per tensor. The norm is read from squares_ptr, so that this launch is queued before the norm is known.
@jit
@do_not_specialize("T", "eta")
def _perturb_kernel(
    addresses_ptr, sizes_ptr, owner_ptr, first_ptr, rho_ptr, squares_ptr, T, eta,
    P: tl.constexpr, G: tl.constexpr, ALIGN: tl.constexpr, ADAPTIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t, start, n = _find(addresses_ptr, sizes_ptr, owner_ptr, first_ptr, BLOCK)
    cols = tl.arange(0, BLOCK)
    p_ptr = _pointer(addresses_ptr, t, start, P, ALIGN) + cols
    g_ptr = _pointer(addresses_ptr, T + t, start, G, ALIGN) + cols
    kept_ptr = _pointer(addresses_ptr, 2 * T + t, start, P, ALIGN) + cols
    squares = tl.load(squares_ptr)
    # NaN fails both comparisons.
    finite = (squares > 0) & (squares < float("inf"))
    # The inner select avoids dividing by 0 and infinity; the outer select drops the result in any case.
    step = tl.where(finite, tl.load(rho_ptr + t) / tl.sqrt(tl.where(finite, squares, 1.0)), 0.0)
    if start + BLOCK <= n:
        _move(p_ptr, g_ptr, kept_ptr, None, step, eta, ADAPTIVE)
    else:
        _move(p_ptr, g_ptr, kept_ptr, start + cols < n, step, eta, ADAPTIVE)


# --------------------------------------------------------------------------------------------------------- launches


def _block() -> tuple[int, int]:
    """Elements and warps per program: 16 elements per thread and tensor, two 16-byte loads in bf16, four in fp32."""
    return 4096, 8


def triton_dtype(dtype: torch.dtype) -> Any:
    """torch.bfloat16 → tl.bfloat16. Addresses carry no dtype, so a kernel is compiled for the dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def _in_one_piece(t: Tensor) -> bool:
    """Whether a tensor fills its memory, in any dimension order, so that a kernel may ignore its shape."""
    # The two common cases first; the loop below costs the host a sort per parameter and step.
    if t.is_contiguous() or (t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)):
        return True
    dense = 1
    # By ascending stride: memory is filled if each stride is the product of the smaller sizes. Dimensions with size 1
    # may have any stride.
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1):
        if stride != dense:
            return False
        dense *= size
    return True


def upload(on_host: Tensor, device: torch.device) -> Tensor:
    """Copy host numbers to a device, without waiting."""
    # Only a copy from pinned memory is asynchronous.
    return (on_host.pin_memory() if device.type == "cuda" else on_host).to(device, non_blocking=True)


@functools.lru_cache(maxsize=64)
def upload_table(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on the device. Cached: the allocator tends to give gradients the same addresses in each step."""
    return upload(torch.tensor(values, dtype=dtype, device="cpu"), device)


@functools.lru_cache(maxsize=64)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Each tensor's size and first block, and each block's tensor."""
    block, _ = _block()
    counts = torch.tensor([cdiv(n, block) for n in sizes], device="cpu")
    # Built on the host, once per list of sizes: cached for later steps.
    owner = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), counts)
    first = counts.cumsum(0) - counts
    return (
        upload_table(sizes, torch.int64, device),
        upload(first.to(torch.int32), device),
        upload(owner.to(torch.int32), device),
    )


def _launches(
    params: list[Tensor], grads: list[Tensor], kept: list[Tensor] | None
) -> Iterator[tuple[list[int], tuple[Any, ...], tuple[Tensor, Tensor, Tensor, Tensor]]]:
    """One launch for all tensors with the same dtypes and alignment: the tensors' indices, options, and tables."""
    # The address tables' order: T parameters, T gradients, T kept.
    lists = [params, grads] if kept is None else [params, grads, kept]
    places = [[t.data_ptr() for t in tensors] for tensors in lists]
    counts = [p.numel() for p in params]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        if counts[i]:
            # 16 bytes for all tensors in an entry, or none: views into flat buffers may start anywhere. Each alignment
            # is a separate kernel.
            aligned = not any(of[i] & 15 for of in places)
            align = 16 if aligned else min(p.element_size(), g.element_size())
            groups.setdefault((p.dtype, g.dtype, align), []).append(i)
    device = params[0].device
    for options, members in groups.items():
        # Tables in place of arguments: a launch takes any number of tensors.
        addresses = tuple(of[i] for of in places for i in members)
        sizes, first, owner = _blocks(tuple(counts[i] for i in members), device)
        yield members, options, (upload_table(addresses, torch.int64, device), sizes, owner, first)


def _like(params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """The gradients, with elements in the order of the parameters' memory."""
    return [
        # The kernel pairs elements by their position in memory. A gradient in another order is copied.
        g if g.stride() == p.stride() else torch.empty_like(p, dtype=g.dtype).copy_(g)
        for p, g in zip(params, grads, strict=True)
    ]


def _squared_norm(params: list[Tensor], grads: list[Tensor], adaptive: bool, eta: float) -> Tensor:
    grads = _like(params, grads)
    device = params[0].device
    partial = []
    with use_device(device):
        for members, options, tables in _launches(params, grads, None):
            programs = tables[2].numel()
            partial.append(torch.empty(programs, dtype=torch.float32, device=device))
            _run(_squared_norm_kernel, (*tables, partial[-1]), len(members), programs, options, adaptive, eta)
    # All tensors empty: no launch, and norm 0, along which nothing moves.
    return torch.cat(partial).sum() if partial else torch.zeros((), device=device)


def _perturb(
    params: list[Tensor], grads: list[Tensor], kept: list[Tensor], squares: Tensor, rho: list[float], adaptive: bool,
    eta: float,
) -> None:  # fmt: skip
    grads = _like(params, grads)
    device = params[0].device
    # The norm may be fp64 if another parameter is; the kernel computes in fp32.
    squares = squares.to(torch.float32)
    with use_device(device):
        for members, options, tables in _launches(params, grads, kept):
            lengths = upload_table(tuple(rho[i] for i in members), torch.float32, device)
            tensors = (*tables, lengths, squares)
            _run(_perturb_kernel, tensors, len(members), tables[2].numel(), options, adaptive, eta)
            # Kernels write without autograd's knowledge. A graph that has saved any of these tensors then raises
            # instead of using new numbers. After each launch: if memory runs out before the next, versions tell which
            # weights have moved.
            torch.autograd.graph.increment_version([of[i] for of in (params, kept) for i in members])


def _run(
    kernel: Any, tensors: tuple[Tensor, ...], count: int, programs: int, options: tuple[Any, ...], adaptive: bool,
    eta: float,
) -> None:  # fmt: skip
    block, warps = _block()
    p, g, align = options

    def plan() -> tuple[int, tuple[Any, ...], dict[str, int]]:
        constants = (triton_dtype(p), triton_dtype(g), align, adaptive, block)
        return programs, (count, eta, *constants), {"num_warps": warps}

    launch(kernel, (count, programs, options, adaptive, eta), tensors, plan)


def use_device(device: torch.device) -> Any:
    """A context for launches: Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
