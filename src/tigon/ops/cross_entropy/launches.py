"""Cross entropy launches, tiles and gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import (
    Plan,
    cdiv,
    dense_like_second,
    differentiable,
    find_sum_parts,
    is_traced,
    launch,
    launcher,
    multiprocessors,
    next_power_of_2,
    uneven,
    use_triton,
    view_rows,
)
from tigon.ops.cross_entropy.kernels import (
    _cross_entropy_bwd_kernel,
    _cross_entropy_fwd_kernel,
    _cross_entropy_grad_kernel,
    _cross_entropy_narrow_fwd_kernel,
    _reduce_kernel,
)
from tigon.ops.cross_entropy.parts import launch_parts
from tigon.ops.cross_entropy.reference import gradient_reference, rows_reference

NARROW = 512  # largest class count for several rows per program
ONE_PROGRAM = 65536  # rows up to which one program takes about as long as a second launch would


def _fwd_tile(V: int, softcap: float, smoothing: float, weighted: bool, details: bool) -> tuple[int, int, int]:
    """Warps, depth (as large as registers allow), columns per block."""
    # A tanh, Σ z and the argmax each take registers in every lane: half the depth for one of them, less for smoothing
    # with weights or a cap. 1024 columns on 4 warps are 8 numbers per thread: 16 bytes in 16 bits.
    depth = 4 if softcap or smoothing or details else 8
    if smoothing and (softcap or weighted):
        depth = 2
    block = min(next_power_of_2(V), 1024)
    return 4, max(1, min(depth, next_power_of_2(V) // block)), block


def _narrow_tile(V: int) -> tuple[int, int, int]:
    """Warps, rows and columns of the forward pass over few classes."""
    block_n = next_power_of_2(V)
    return 4, 2048 // block_n, block_n


def _bwd_tile(V: int) -> tuple[int, int, int]:
    """Warps, rows and columns of the backward pass: 2048 elements per program."""
    # 16 numbers per thread on 4 warps: two 16-byte loads in 16 bits. No sum joins a row's threads, so a row can be many
    # small programs.
    block_n = min(2048, next_power_of_2(V))
    return 4, 2048 // block_n, block_n


def _grad_tile(V: int, softcap: float, smoothing: float) -> tuple[int, int, int, float, str, str, bool]:
    """Warps, depth, block, programs per SM (0: one per row), eviction policies of the first and second reading, and
    whether the second reading goes backwards.

    Many warps per row keep few rows in flight: the sooner a row is read again, the more of the row is in the L2 cache.
    """
    warps = 32 if V > 65536 else 16 if V > 8192 else 4
    depth = 1 if softcap and smoothing else 2  # as deep as registers allow
    block = min(next_power_of_2(V), warps * 32 * 8)
    depth = max(1, min(depth, next_power_of_2(V) // block))
    # "evict_last" keeps the first reading cached, "evict_first" releases lines that the second reading is done with.
    if V > 65536:  # hardly cached by then, and reading backwards is slower
        return warps, depth, block, 0, "evict_last", "evict_first", False
    return warps, depth, block, 0, "", "", True


def cross_entropy_rows(
    logits: Tensor, target: Tensor, loss: Tensor, stats: Tensor | None, factor: Tensor | None, gradient: bool,
    *options: Any,
) -> None:  # fmt: skip
    """Write each row's loss. With `gradient`, overwrite the logits by d(loss)/d(logits), times `factor`.

    logits: (M, V) with unit stride along V, overwritten if `gradient`; target, loss: (M,), dense.
    stats: (4 + 2 M,), filled for the backward kernel, or None; Triton only, without `gradient`.
    factor: None, 0-d, or (M,) with a factor per row.
    options: ignore_index, label_smoothing, z_loss, softcap, scale.
    """
    if not use_triton(logits):
        for part in _cache_sized(logits):
            here = factor[part] if factor is not None and factor.dim() else factor
            loss[part], dlogits = rows_reference(logits[part].to(loss.dtype), target[part], here, gradient, *options)
            if dlogits is not None:
                logits[part] = dlogits
        return
    if not gradient:
        _launch_rows(logits, target, None, loss, stats, None, None, *options)
        return
    M, V = logits.shape
    # For so few rows the gradient is also faster with many programs per row, in separate launches. For more rows, a
    # program that reads its row again from cache is faster, although SMs are idle.
    few = cdiv(2 * M, multiprocessors(logits.device)) == 1
    if few and find_sum_parts(M, V, logits.device) is not None:
        stats = loss.new_empty(4 + 2 * M)
        _launch_rows(logits, target, None, loss, stats, None, None, *options)
        factor = loss.new_ones(()) if factor is None else factor
        _launch_gradient(factor, logits, target, None, stats, logits, False, *options)
        return
    _, label_smoothing, _, softcap, _ = options
    warps, depth, block, programs, keep, drop, back = _grad_tile(V, softcap, label_smoothing)
    edges = uneven(logits)
    # Without a limit three rows would share an SM, where the registers of the even-row kernel allow two: beyond 64 KiB,
    # the L2 cache does not hold three rows until they are read again.
    if edges and V <= 65536 < V * logits.element_size():
        programs = 2
    stride_factor = 0 if factor is None or factor.dim() == 0 else factor.stride(0)
    arguments = (
        M, V, logits.stride(0), stride_factor, *options,
        label_smoothing != 0.0, softcap != 0.0, keep, drop, back, edges, depth, block,
    )  # fmt: skip
    # The plan depends on addresses through `uneven` only, which is among the arguments.
    key = (arguments, logits.dtype, target.dtype, factor is None)
    grid = min(M, int(programs * multiprocessors(logits.device))) if programs else M
    tensors = (logits, target, loss, factor)
    launch(_cross_entropy_grad_kernel, key, tensors, lambda: (grid, arguments, {"num_warps": warps}))


def gradient_rows(logits: Tensor, labels: Tensor, stats: Tensor, factor: Tensor, classes: int, *options: Any) -> None:
    """Overwrite (M, V) logits of some classes by factor · d(loss)/d(logits), from statistics over all classes.

    labels: (M,), counted from the first of the V classes; ignore_index, or outside [0, V) for another device's class.
    stats: (4 + 2 M,), from the forward pass: each row's maximum and log₂ Σ exp(z − max).
    factor: 0-d, or (M,) with a number per row.
    """
    if logits.numel() == 0:
        return
    if use_triton(logits):
        _launch_gradient(factor, logits, labels, None, stats, logits, False, *options, classes=classes)
        return
    rows = stats[4:].view(-1, 2)
    for part in _cache_sized(logits):
        here = factor[part] if factor.dim() else factor
        acc = logits[part].to(stats.dtype)
        logits[part] = gradient_reference(acc, labels[part], rows[part], here, classes, *options)


def _cache_sized(logits: Tensor) -> list[slice]:
    """Slices of a few rows: the torch path's temporaries then stay in CPU caches and out of the memory peak."""
    step = max(1, 2**20 // max(1, logits.shape[1]))
    return [slice(i, i + step) for i in range(0, logits.shape[0], step)]


def _launch_rows(
    logits: Tensor, target: Tensor, weight: Tensor | None, loss: Tensor, stats: Tensor | None, z: Tensor | None,
    predicted: Tensor | None, *options: Any,
) -> None:  # fmt: skip
    """Write each row's loss, and stats, z-loss and predicted class unless None."""
    (M, V), (_, label_smoothing, _, softcap, _) = logits.shape, options
    sizes = V, logits.stride(0), *options
    branches = label_smoothing != 0.0, softcap != 0.0, 2 if weight is None else 3
    edges = uneven(logits)
    tensors = (logits, target, weight, loss, stats, z, predicted)
    dtypes = logits.dtype, target.dtype, None if weight is None else weight.dtype
    # All inputs of the plan, including which results are wanted, since None changes the kernel.
    key = (M, sizes, dtypes, edges, stats is None, z is None, predicted is None)
    parts = find_sum_parts(M, V, logits.device)
    if parts is not None:
        tile = _fwd_tile(V, softcap, label_smoothing, weight is not None, predicted is not None)
        launch_parts(tensors, key, sizes, branches, edges, M, parts, tile)
        return

    def plan() -> Plan:
        if V <= NARROW:
            warps, block_m, block_n = _narrow_tile(V)
            return cdiv(M, block_m), (M, *sizes, *branches, block_m, block_n), {"num_warps": warps}
        warps, depth, block = _fwd_tile(V, softcap, label_smoothing, weight is not None, predicted is not None)
        return M, (*sizes, *branches, edges, depth, block), {"num_warps": warps}

    launch(_cross_entropy_narrow_fwd_kernel if V <= NARROW else _cross_entropy_fwd_kernel, key, tensors, plan)


def _launch_reduction(inputs: tuple[Any, ...], results: tuple[Any, ...], mean: bool, V: int, ignore_index: int) -> None:
    """inputs: rows, z_rows, target, weight, predicted, divisor. results: loss, z, accuracy, stats."""
    rows, z_rows, target, weight, predicted, divisor = inputs
    loss, z, accuracy, _ = results
    M = target.shape[0]
    # For few rows a second launch would take longer than the sum. On 16 warps 4096 rows are 8 per thread, with up to
    # five sums each.
    block = 4096 if M > 1024 else 1024
    parts = 1 if M <= ONE_PROGRAM else min(256, cdiv(M, block))
    partial = rows.new_empty(5 * parts) if parts > 1 else None
    tensors = (*inputs, partial, *results)
    dtypes = [target.dtype, *(None if t is None else t.dtype for t in (weight, divisor))]
    key = (M, V, ignore_index, mean, *dtypes, *(t is None for t in (z_rows, predicted, loss, z, accuracy)))
    sizes = M, parts, V, ignore_index, mean
    if parts == 1:
        launch(_reduce_kernel, key, tensors, lambda: (1, (*sizes, True, True, block), {"num_warps": 16}))
        return
    # The two steps are different kernels (constants differ), so the keys must differ.
    launch(_reduce_kernel, (*key, 0), tensors, lambda: (parts, (*sizes, True, False, block), {"num_warps": 16}))
    launch(_reduce_kernel, (*key, 1), tensors, lambda: (1, (*sizes, False, True, 256), {"num_warps": 4}))


def _forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, divisor: Tensor | None, reduction: str, details: bool,
    *options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Two launches: the rows, then their reduction (none for "none" without details)."""
    outputs = (_details_fake if details else _fwd_fake)(logits, target, weight, divisor, reduction, False, *options)
    loss, *others, stats = outputs
    M, V = target.numel(), logits.shape[-1]
    mean = reduction == "mean"
    # Nothing to read, and an empty grid cannot be launched; the mean over no rows is 0.
    if M == 0 or V == 0:
        loss.zero_()
        if details:
            others[0].copy_(loss)
            others[1].fill_(float("nan"))
            others[2].fill_(-1)
        return outputs
    target = target.reshape(-1).contiguous()
    weight = weight if weight is None else weight.contiguous()
    rows, z, z_rows, accuracy, predicted = loss, None, None, None, None
    if details:
        z, accuracy, predicted = others
        z_rows = z
    if reduction != "none":
        rows = stats.new_empty(M)
        if details or (mean and weight is not None and divisor is None and options[2] != 0.0):
            z_rows = stats.new_empty(M)
    _launch_rows(view_rows(logits), target, weight, rows, stats, z_rows, predicted, *options)
    if reduction != "none" or details:
        out, z_out = (loss, z) if reduction != "none" else (None, None)
        inputs = rows, z_rows, target, weight, predicted, divisor
        _launch_reduction(inputs, (out, z_out, accuracy, stats), mean, V, options[0])
    return outputs


def _fwd_fake(
    logits: Tensor, target: Tensor, weight: Tensor | None, divisor: Tensor | None, reduction: str, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    loss = logits.new_empty(target.shape if reduction == "none" else (), dtype=torch.float32)
    # Four numbers from the reduction for the backward pass, then each row's maximum, log-sum and, with weights, mass.
    stats = logits.new_empty(4 + target.numel() * (2 if weight is None else 3), dtype=torch.float32)
    return loss, stats


def _details_fake(logits: Tensor, target: Tensor, *others: Any) -> tuple[Tensor, ...]:
    loss, stats = _fwd_fake(logits, target, *others)
    predicted = logits.new_empty(target.shape, dtype=torch.int64)
    return loss, torch.empty_like(loss), logits.new_empty((), dtype=torch.float32), predicted, stats


_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, float softcap, float scale"


@launcher(_fwd_fake, rest=_OPTIONS, results=2)
def _cross_entropy_fwd(
    logits: Tensor, target: Tensor, weight: Tensor | None, divisor: Tensor | None, reduction: str, inplace: bool,
    *options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _forward(logits, target, weight, divisor, reduction, False, *options)


@launcher(_details_fake, rest=_OPTIONS, results=5)
def _cross_entropy_details_fwd(
    logits: Tensor, target: Tensor, weight: Tensor | None, divisor: Tensor | None, reduction: str, inplace: bool,
    *options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _forward(logits, target, weight, divisor, reduction, True, *options)


@launcher(dense_like_second, rest=_OPTIONS)
def _cross_entropy_bwd(
    dloss: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, stats: Tensor, mean: bool, *options: Any
) -> Tensor:
    # A new tensor: an operator must not return its input, so the in-place gradient goes through `_backward`.
    dlogits = logits.new_empty(logits.shape)
    x, dx = view_rows(logits), dlogits.view(-1, logits.shape[-1]) if logits.numel() else dlogits
    _launch_gradient(dloss, x, target, weight, stats, dx, mean, *options)
    return dlogits


def _launch_gradient(
    dloss: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, stats: Tensor, dx: Tensor, mean: bool,
    *options: Any, classes: int | None = None,
) -> None:  # fmt: skip
    """dx (M, V) = dloss · d(loss)/dx; dx may be x. classes: over all shards together, None if V covers all."""
    if not x.numel():
        return
    # The rows may share an upstream gradient: 0-d for a reduced loss, strides 0 if a sum over rows expanded it.
    same = not any(dloss.stride())
    rows = dloss if same else dloss.reshape(-1)
    target = target.reshape(-1).contiguous()
    weight = weight if weight is None else weight.contiguous()
    (M, V), (_, label_smoothing, _, softcap, _) = x.shape, options
    warps, block_m, block_n = _bwd_tile(V)
    between = uneven(x, dx)
    block_m, body = (1, V // 4 * 4) if between else (block_m, V)
    arguments = (
        M, V, V if classes is None else classes, 0 if same else rows.stride(0), x.stride(0), dx.stride(0),
        *options, mean, label_smoothing != 0.0, softcap != 0.0, 2 if weight is None else 3, between, block_m, block_n,
    )  # fmt: skip
    plan = cdiv(M, block_m) * cdiv(body, block_n), arguments, {"num_warps": warps}
    key = (arguments, rows.dtype, x.dtype, target.dtype, None if weight is None else weight.dtype)
    launch(_cross_entropy_bwd_kernel, key, (rows, x, target, weight, stats, dx), lambda: plan)


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, weight, _, reduction, ctx.inplace, *ctx.options = inputs
    ctx.mean = reduction == "mean"
    ctx.save_for_backward(logits, target, weight, output[-1])


def _backward(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dloss is None or not ctx.needs_input_grad[0]:
        return ()
    logits, *arguments = ctx.saved_tensors
    # Not while traced: a recorded graph must know all writes, and has no memory to write to.
    rows = _own_rows(logits) if ctx.inplace and not is_traced(logits) else None
    if rows is None:
        return (_cross_entropy_bwd(dloss, logits, *arguments, ctx.mean, *ctx.options),)
    with torch.cuda.device_of(logits):  # direct launches set no device
        _launch_gradient(dloss, rows, *arguments, rows, ctx.mean, *ctx.options)
    # The logits are gone: PyTorch now raises if another backward pass saved them.
    torch.autograd.graph.increment_version(logits)
    return (logits.detach(),)


def _own_rows(logits: Tensor) -> Tensor | None:
    """The logits' memory as (M, V), or None if no such view can be overwritten."""
    rows = view_rows(logits.detach())
    # Overlapping rows, as in a sliding window, share elements that have several gradients.
    apart = rows.shape[0] <= 1 or rows.stride(0) >= rows.shape[1]
    return rows if rows.data_ptr() == logits.data_ptr() and rows.numel() and apart else None


loss_of_logits = differentiable(_cross_entropy_fwd, _setup_context, _backward)
loss_and_details = differentiable(_cross_entropy_details_fwd, _setup_context, _backward, outputs=4)
