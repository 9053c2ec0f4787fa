"""Products of e4m3 factors.

On Hopper cuBLAS multiplies them (`torch._scaled_mm`), with a scale for each row and each column, or with one for each
factor. It reads both factors along the sum, in multiples of 16 numbers, and any number of rows. Elsewhere the reference
multiplies in fp32.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tigon.kernels import autocast_device
from tigon.kernels.dispatch import stands_for_gpu, torch_is_forced
from tigon.kernels.tiles.divergence import KNOWS_TARGET
from tigon.ops.fp8.constants import read_constant
from tigon.ops.fp8.recipe import Rows, Weight
from tigon.ops.fp8.reference import multiply_columns_reference, multiply_rows_reference


def why_unsupported(device: torch.device) -> str:
    """The reason, as a sentence, why FP8 products do not run in FP8 on a device; "" if they do."""
    return _find_obstacle(device)


# As `torch.compiler.assume_constant_result` does, which imports all of Dynamo: graphs call no driver.
why_unsupported._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _find_obstacle(device: torch.device) -> str:
    if device.type != "cuda":
        return f"FP8 products need an NVIDIA GPU with compute capability 9.0, not a device of type {device.type!r}."
    if not torch.cuda.is_available():
        return "FP8 products need an NVIDIA GPU: torch finds none."
    if torch.version.hip is not None:
        return "FP8 products need an NVIDIA GPU: AMD's have another e4m3, or have not been measured."
    if (capability := torch.cuda.get_device_capability(device)) != (9, 0):
        return "FP8 products need compute capability 9.0 (H100, H200), got {}.{}: not measured.".format(*capability)
    if not KNOWS_TARGET:
        return "FP8 products need a later Triton: this one cannot tell kernels the GPU's vendor."
    version = torch.version.cuda or "none"
    if tuple(map(int, version.split(".")[:2])) < (12, 9):
        return f"FP8 products need a torch built with CUDA 12.9 or later, whose cuBLAS scales rows, got {version}."
    return ""


def multiply_rows(
    rows: Rows, weight: Weight, bias: Tensor | None = None, *, is_exact: bool = False, out: Tensor | None = None
) -> Tensor:
    """rows · weightᵀ + bias in bf16.

    Args:
        rows: data (M, K), scale (M, 1).
        weight: data (N, K), scale (N,); N and K are multiples of 16.
        bias: (N,), any float dtype: rounded to bf16 first.
        is_exact: add up in fp32 after every 128 terms, and not in the tensor cores' narrower sums.
        out: the result's memory, contiguous.
    Returns: (M, N) bf16.
    """
    if stands_for_gpu(rows.data):
        return rows.scale.new_empty((len(rows.data), len(weight.data)), dtype=torch.bfloat16) if out is None else out
    bias = None if bias is None else bias.to(torch.bfloat16)
    if torch_is_forced() or why_unsupported(rows.data.device):
        with torch.autocast(autocast_device(rows.data.device.type), enabled=False):
            y = multiply_rows_reference(rows, weight, bias, torch.bfloat16)
        return y if out is None else out.copy_(y)
    own = {} if out is None else {"out": out}
    return torch._scaled_mm(
        rows.data, weight.data.t(), scale_a=rows.scale, scale_b=weight.scale.view(1, -1), bias=bias,
        out_dtype=torch.bfloat16, use_fast_accum=not is_exact, **own,
    )  # fmt: skip


def multiply_columns(
    a: Tensor, b: Tensor, c: Tensor, dtype: torch.dtype, *, is_exact: bool = False, out: Tensor | None = None
) -> Tensor:
    """c · a bᵀ, a weight's gradient.

    Args:
        a: (N, M) e4m3. b: (K, M) e4m3. K and M are multiples of 16.
        c: 0-d fp32.
        dtype: the result's: bf16, fp16 or fp32.
        is_exact, out: as for `multiply_rows`.
    Returns: (N, K).
    """
    if stands_for_gpu(a):
        return c.new_empty((len(a), len(b)), dtype=dtype) if out is None else out
    if torch_is_forced() or why_unsupported(a.device):
        with torch.autocast(autocast_device(a.device.type), enabled=False):
            y = multiply_columns_reference(a, b, c, dtype)
        return y if out is None else out.copy_(y)
    own = {} if out is None else {"out": out}
    one = read_constant(1.0, torch.float32, a.device)
    return torch._scaled_mm(a, b.t(), scale_a=c, scale_b=one, out_dtype=dtype, use_fast_accum=not is_exact, **own)
