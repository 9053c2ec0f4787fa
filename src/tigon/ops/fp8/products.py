"""Products of e4m3 factors.

On Hopper cuBLAS multiplies them (`torch._scaled_mm`), with a scale for each row and each column, or with one for each
factor. It reads both factors along the sum, in multiples of 16 numbers, and any number of rows. With scales for blocks
(`torch.nn.functional.scaled_mm`) cuBLAS reads a multiple of 4 rows, and scales of the weight in rows of 16 bytes.
Elsewhere the reference multiplies in fp32.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import autocast_device
from tigon.kernels.dispatch import stands_for_gpu, torch_is_forced
from tigon.kernels.tiles.divergence import KNOWS_TARGET
from tigon.ops.fp8.constants import read_constant
from tigon.ops.fp8.recipe import Rows, Weight, round_up
from tigon.ops.fp8.reference import multiply_blocks_reference, multiply_columns_reference, multiply_rows_reference


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


def why_no_blocks(device: torch.device) -> str:
    """As `why_unsupported`, for `multiply_blocks`."""
    why = why_unsupported(device)
    return why if why or hasattr(F, "scaled_mm") else "FP8 products in blocks need torch 2.10 or later."


def multiply_blocks(rows: Rows, data: Tensor, scale: Tensor) -> Tensor:
    """rows · weightᵀ in bf16, for a weight with a scale for each block of 128 × 128 numbers. Sums in fp32.

    Args:
        rows: data (M, K), scale (M, K / 128), from `quantize_blocks`.
        data: (N, K) e4m3, contiguous; N and K are multiples of 128.
        scale: (N / 128, K / 128) fp32, any numbers.
    Returns: (M, N) bf16.
    """
    M, N = len(rows.data), len(data)
    if stands_for_gpu(data) or not M:
        return rows.scale.new_empty((M, N), dtype=torch.bfloat16)
    if torch_is_forced() or why_no_blocks(data.device):
        with torch.autocast(autocast_device(data.device.type), enabled=False):
            return multiply_blocks_reference(rows, data, scale, torch.bfloat16)
    left, left_scale = pad_rows(rows)
    kind = F.ScalingType
    y = F.scaled_mm(
        left, data.t(), left_scale, kind.BlockWise1x128, pad_scales(scale).t(), kind.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip
    return y[:M]


def pad_rows(rows: Rows) -> Rows:
    """A multiple of 16 rows, where `quantize_blocks` has left memory for them; else in new memory."""
    (data, scale), M = rows, len(rows.data)
    P = round_up(M)
    sizes = (P, data.shape[1]), (P, scale.shape[1])
    strides = (data.shape[1], 1), (1, P)
    if (data.stride(), scale.stride()) == strides and _has_memory(data, sizes[0]) and _has_memory(scale, sizes[1]):
        return Rows(data.as_strided(sizes[0], strides[0]), scale.as_strided(sizes[1], strides[1]))
    padded = scale.new_zeros((scale.shape[1], P)).t()
    padded[:M] = scale
    return Rows(F.pad(data.view(torch.uint8), (0, 0, 0, P - M)).view(data.dtype), padded)


def _has_memory(t: Tensor, size: tuple[int, int]) -> bool:
    """Whether a tensor of this size fits the memory of t, from its beginning."""
    return not t.storage_offset() and t.untyped_storage().nbytes() >= size[0] * size[1] * t.element_size()


def pad_scales(scale: Tensor) -> Tensor:
    """Rows of a multiple of four numbers: cuBLAS reads others in silence as if they were."""
    return F.pad(scale, (0, -scale.shape[1] % 4)).contiguous()


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
