"""A step of length rho along the gradient, for all parameters of a model at once, and back to the same bits.

    p ← p + rho · g / ‖g‖                 one norm over all parameters
    p ← p + rho · s² g / ‖s g‖            adaptive, with s = |p| + eta

Subtracting the step again would round. The old weights are kept instead, in the memory of the gradients, which are no
longer needed: nothing is allocated for them.

Source: Foret et al. 2020, https://arxiv.org/abs/2010.01412; adaptive: Kwon et al. 2021, https://arxiv.org/abs/2102.11600
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
    """Σ g², or adaptive Σ ((|p| + eta) g)², over all elements of all tensors. The host does not wait for it.

    Args:
        params: tensors of any float dtypes and devices, at least one.
        grads: of the same shapes.
        adaptive, eta: weigh each gradient by its weight's own size, |p| + eta.
    Returns: (), on the device of the first; fp64 if a parameter is fp64, else fp32. The same bits on every run.
    """
    squares = []
    for members in _by_device(params):
        # A model may be spread over several devices: one sum for each, and the sums meet at the end.
        mine, theirs = [params[i] for i in members], [grads[i] for i in members]
        # The kernel walks over memory and knows no shapes: a parameter with holes between its elements goes to torch.
        if use_triton(*mine, *theirs) and all(map(_in_one_piece, mine)):
            squares.append(_squared_norm(mine, theirs, adaptive, eta))
        else:
            squares.append(squared_norm_reference(mine, theirs, adaptive=adaptive, eta=eta))
    dtype = functools.reduce(torch.promote_types, [s.dtype for s in squares])
    # Between GPUs the streams order these copies. The sum is taken in one order, so its bits are the same on every run.
    return torch.stack([s.to(params[0].device, dtype, non_blocking=True) for s in squares]).sum()


def perturb(
    params: Sequence[Tensor], grads: Sequence[Tensor], squares: Tensor, rho: Sequence[float], *,
    adaptive: bool = False, eta: float = 0.0,
) -> list[Tensor]:  # fmt: skip
    """Move the parameters along their gradients, in place, computed in fp32 and rounded once.

    Args:
        params: tensors that do not overlap.
        grads: of the same shapes. Their memory is overwritten.
        squares: the result of `squared_norm`, or a sum of several. If it is zero, infinite or NaN, nothing moves.
        rho: the length of the step, of each parameter.
        adaptive, eta: as in `squared_norm`.
    Returns: the old parameters, for `restore`: in the memory of the gradient where that is a whole storage, in the
        parameter's dtype and of no other gradient, else in a new one.
    """
    # Room for the old weights is made before anything moves: memory that runs out here leaves every parameter as it
    # was.
    kept = _room(params, grads)
    # A version that has grown says that this tensor holds an old parameter by now. Nothing else records how far the
    # loop came.
    versions = [t._version for t in kept]
    try:
        for members in _by_device(params):
            mine, theirs, old = ([tensors[i] for i in members] for tensors in (params, grads, kept))
            lengths = [float(rho[i]) for i in members]
            # The norm stays on the device: kernels read it there, and decide there whether anything moves.
            local = squares.to(mine[0].device, non_blocking=True)
            if use_triton(*mine, *theirs) and all(map(_in_one_piece, mine)):
                _perturb(mine, theirs, old, local, lengths, adaptive, eta)
            else:
                perturb_reference(mine, theirs, old, local, lengths, adaptive=adaptive, eta=eta)
    except BaseException:  # such as out of memory: parameters that have moved go back
        # Only those: the others' `kept` still hold gradients, which must not become parameters.
        moved = [i for i, t in enumerate(kept) if t._version != versions[i]]
        restore([params[i] for i in moved], [kept[i] for i in moved])
        raise
    return kept


def restore(params: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    """Give the parameters their old bits back, in one fused copy for all parameters of one dtype on a GPU.

    Args:
        params: those that were moved.
        kept: the result of `perturb`.
    """
    # A copy of bits. Subtracting the step would round, and weights would drift from step to step.
    copy_all(params, kept)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source, of the same shape, into its target."""
    pairs: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}  # PyTorch fuses copies of one dtype only
    for target, source in zip(targets, sources, strict=True):
        mine, theirs = pairs.setdefault((target.device, target.dtype, source.dtype), ([], []))
        mine.append(target)
        theirs.append(source)
    with torch.no_grad():
        for mine, theirs in pairs.values():
            # One launch for many tensors: a copy for each parameter would cost the host more than the device.
            torch._foreach_copy_(mine, theirs)


def _by_device(tensors: Sequence[Tensor]) -> list[list[int]]:
    members: dict[torch.device, list[int]] = {}
    for i, t in enumerate(tensors):
        members.setdefault(t.device, []).append(i)
    return list(members.values())


def _room(params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    # Gradients may share memory: a and b in a.view(6) + b.view(6) get the same gradient storage. Such a storage cannot
    # keep two parameters.
    # By storage and not by view: a gradient may be a slice of a buffer that holds other gradients, as with FSDP2.
    storages = [g.untyped_storage() for g in grads]
    places = [s.data_ptr() for s in storages]
    owners = Counter(places)
    # Same dtype, or the old bits would not fit; same strides, since kernels copy in memory order; a storage of its own,
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
        # fp32 for half precision: fp16's squares would underflow, and a sum in 8 or 11 bits would stop growing.
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


@jit
def _find(addresses_ptr, sizes_ptr, owner_ptr, first_ptr, BLOCK: tl.constexpr):
    """The tensor of this program, its block's first element, and how many elements the tensor has."""
    block = tl.program_id(0)
    # One launch for tensors of any sizes: a table says which tensor a program's block belongs to. No block spans two
    # tensors.
    t = tl.load(owner_ptr + block)
    # int64: one tensor of 2**31 elements is an embedding of 512k tokens and width 4096.
    start = (block - tl.load(first_ptr + t)).to(tl.int64) * BLOCK
    return t, start, tl.load(sizes_ptr + t)


@jit
def _pointer(addresses_ptr, index, start, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    # An address from memory says nothing about its alignment. With the hint a thread's loads may be 16 bytes wide.
    return tl.multiple_of(tl.load(addresses_ptr + index).to(tl.pointer_type(DTYPE)), ALIGN) + start


@jit
def _sum_squares(p_ptr, g_ptr, mask, eta, ADAPTIVE: tl.constexpr):
    other = None if mask is None else 0.0
    g = tl.load(g_ptr, mask=mask, other=other).to(tl.float32)
    if ADAPTIVE:
        # (|p| + eta) · g: the gradient measured in the weight's own size. Without ADAPTIVE p is not read at all.
        g *= tl.abs(tl.load(p_ptr, mask=mask, other=other).to(tl.float32)) + eta
    return tl.sum(g * g, 0)


@jit
@do_not_specialize("T", "eta")
def _squared_norm_kernel(
    addresses_ptr, sizes_ptr, owner_ptr, first_ptr, partial_ptr, T, eta,
    P: tl.constexpr, G: tl.constexpr, ALIGN: tl.constexpr, ADAPTIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t, start, n = _find(addresses_ptr, sizes_ptr, owner_ptr, first_ptr, BLOCK)
    cols = tl.arange(0, BLOCK)
    p_ptr = _pointer(addresses_ptr, t, start, P, ALIGN) + cols
    # Addresses of the parameters come first, then those of the gradients.
    g_ptr = _pointer(addresses_ptr, T + t, start, G, ALIGN) + cols
    # A mask against a number from memory makes loads narrow, so only a tensor's last block has a mask.
    if start + BLOCK <= n:
        squares = _sum_squares(p_ptr, g_ptr, None, eta, ADAPTIVE)
    else:
        squares = _sum_squares(p_ptr, g_ptr, start + cols < n, eta, ADAPTIVE)
    # A partial sum for each program, added up by a second launch in one order: atomics would change the bits from run
    # to run.
    tl.store(partial_ptr + tl.program_id(0), squares)


@jit
def _move(p_ptr, g_ptr, kept_ptr, mask, step, eta, ADAPTIVE: tl.constexpr):
    other = None if mask is None else 0.0
    # p keeps its dtype: these are the bits that `kept` receives. The arithmetic uses a widened copy.
    p = tl.load(p_ptr, mask=mask, other=other)
    g = tl.load(g_ptr, mask=mask, other=other).to(tl.float32)
    p32 = p.to(tl.float32)
    e = step * g
    if ADAPTIVE:
        # e = rho · s² g / ‖s g‖: one s from the gradient's measure, and one from the way back to the weight's units.
        size = tl.abs(p32) + eta
        e *= size * size
    # A select: if the norm is not finite, g may be infinite too, and 0 · g NaN.
    e = tl.where(step > 0, e, 0.0)
    # kept may be g's memory: all threads read the block before any writes.
    tl.debug_barrier()
    tl.store(kept_ptr, p, mask=mask)
    # One rounding for the whole step.
    tl.store(p_ptr, (p32 + e).to(p.dtype), mask=mask)


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
    # In the parameter's dtype, where it lies over the gradient too: `_room` allows that for equal dtypes alone.
    kept_ptr = _pointer(addresses_ptr, 2 * T + t, start, P, ALIGN) + cols
    # Every program reads the norm from the device, so this launch can be queued before the norm is known.
    squares = tl.load(squares_ptr)
    # NaN fails both comparisons.
    finite = (squares > 0) & (squares < float("inf"))
    # The inner select keeps the division away from 0 and infinity, whose quotient the outer select would drop, NaN or
    # not.
    step = tl.where(finite, tl.load(rho_ptr + t) / tl.sqrt(tl.where(finite, squares, 1.0)), 0.0)
    if start + BLOCK <= n:
        _move(p_ptr, g_ptr, kept_ptr, None, step, eta, ADAPTIVE)
    else:
        _move(p_ptr, g_ptr, kept_ptr, start + cols < n, step, eta, ADAPTIVE)


# --------------------------------------------------------------------------------------------------------- launches


def _block() -> tuple[int, int]:
    """Elements and warps of a program: a thread takes 16 elements of each tensor."""
    return 4096, 8


def _in_one_piece(t: Tensor) -> bool:
    """Whether a tensor fills its memory, in any order of its dimensions, so that a kernel may ignore its shape."""
    # The two common cases first; the loop below costs the host a sort for each parameter and step.
    if t.is_contiguous() or (t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)):
        return True
    dense = 1
    # From the smallest stride up: memory is filled if each stride is the product of the sizes below. Dimensions of size
    # 1 may have any stride.
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1):
        if stride != dense:
            return False
        dense *= size
    return True


def upload(on_host: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on a device, without a wait."""
    # Only a copy from pinned memory does not make the host wait.
    return (on_host.pin_memory() if device.type == "cuda" else on_host).to(device, non_blocking=True)


@functools.lru_cache(maxsize=64)
def _table(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on the device. Cached: from step to step the allocator tends to give gradients the same addresses."""
    return upload(torch.tensor(values, dtype=dtype, device="cpu"), device)


@functools.lru_cache(maxsize=64)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Each tensor's size and first block, and each block's tensor."""
    block, _ = _block()
    counts = torch.tensor([cdiv(n, block) for n in sizes], device="cpu")
    # Built on the host, once for a list of sizes: the cache returns it in every later step.
    owner = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), counts)
    first = counts.cumsum(0) - counts
    return (
        _table(sizes, torch.int64, device),
        upload(first.to(torch.int32), device),
        upload(owner.to(torch.int32), device),
    )


def _launches(
    params: list[Tensor], grads: list[Tensor], kept: list[Tensor] | None
) -> Iterator[tuple[list[int], tuple[Any, ...], tuple[Tensor, Tensor, Tensor, Tensor]]]:
    """One launch for all tensors of the same dtypes and alignment: the tensors' indices, options, and tables."""
    # The order of the tables of addresses: T of parameters, T of gradients, T of kept.
    lists = [params, grads] if kept is None else [params, grads, kept]
    places = [[t.data_ptr() for t in tensors] for tensors in lists]
    counts = [p.numel() for p in params]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        if counts[i]:
            # 16 bytes for all tensors of an entry, or none: views into flat buffers may begin anywhere. Each alignment
            # is a kernel of its own.
            aligned = not any(of[i] & 15 for of in places)
            align = 16 if aligned else min(p.element_size(), g.element_size())
            groups.setdefault((p.dtype, g.dtype, align), []).append(i)
    device = params[0].device
    for options, members in groups.items():
        # Tables of numbers in place of arguments: a launch takes any number of tensors.
        addresses = tuple(of[i] for of in places for i in members)
        sizes, first, owner = _blocks(tuple(counts[i] for i in members), device)
        yield members, options, (_table(addresses, torch.int64, device), sizes, owner, first)


def _like(params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """The gradients with their elements in the order of the parameters' memory."""
    return [
        # The kernel pairs elements by their place in memory. A gradient in another order is copied into the
        # parameter's.
        g if g.stride() == p.stride() else torch.empty_like(p, dtype=g.dtype).copy_(g)
        for p, g in zip(params, grads, strict=True)
    ]


def _squared_norm(params: list[Tensor], grads: list[Tensor], adaptive: bool, eta: float) -> Tensor:
    grads = _like(params, grads)
    device = params[0].device
    partial = []
    # Triton launches on the current device, which need not be the parameters'.
    with _on(device):
        for members, options, tables in _launches(params, grads, None):
            programs = tables[2].numel()
            partial.append(torch.empty(programs, dtype=torch.float32, device=device))
            _run(_squared_norm_kernel, (*tables, partial[-1]), len(members), programs, options, adaptive, eta)
    # All tensors empty: no launch, and a norm of 0, along which nothing moves.
    return torch.cat(partial).sum() if partial else torch.zeros((), device=device)


def _perturb(
    params: list[Tensor], grads: list[Tensor], kept: list[Tensor], squares: Tensor, rho: list[float], adaptive: bool,
    eta: float,
) -> None:  # fmt: skip
    grads = _like(params, grads)
    device = params[0].device
    # The norm may be fp64 if another parameter is; the kernel computes in fp32.
    squares = squares.to(torch.float32)
    with _on(device):
        for members, options, tables in _launches(params, grads, kept):
            lengths = _table(tuple(rho[i] for i in members), torch.float32, device)
            tensors = (*tables, lengths, squares)
            _run(_perturb_kernel, tensors, len(members), tables[2].numel(), options, adaptive, eta)
            # Kernels write behind autograd's back. A graph that has saved one of these tensors then raises instead of
            # using new numbers. After each launch: should memory run out before the next, versions tell which weights
            # have moved.
            torch.autograd.graph.increment_version([of[i] for of in (params, kept) for i in members])


def _run(
    kernel: Any, tensors: tuple[Tensor, ...], count: int, programs: int, options: tuple[Any, ...], adaptive: bool,
    eta: float,
) -> None:  # fmt: skip
    # 16 elements a thread: two loads of 16 bytes for bf16, four for fp32.
    block, warps = _block()
    p, g, align = options

    def plan() -> tuple[int, tuple[Any, ...], dict[str, int]]:
        # torch.bfloat16 → tl.bfloat16: addresses carry no dtype, so the kernel is compiled for it.
        constants = (getattr(tl, str(p)[6:]), getattr(tl, str(g)[6:]), align, adaptive, block)
        return programs, (count, eta, *constants), {"num_warps": warps}

    launch(kernel, (count, programs, options, adaptive, eta), tensors, plan)


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
