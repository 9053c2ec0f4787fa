"""Dequantize 4-bit weights: w = table[code] · absmax of the code's block, in a single launch.

Source: Dettmers et al. 2023, QLoRA, https://arxiv.org/abs/2305.14314: NF4, and double quantization for the absolute
maxima. The memory layout is bitsandbytes': two codes per byte, the first in the high four bits.

    bytes per weight     read 0.5 (codes) + 1/64 (8-bit maxima), write 2 (bf16)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.kernels import cdiv, jit, launch, launcher, tl, use_triton


# eq=False: compare by identity, since `==` on tensors returns a tensor.
@dataclass(frozen=True, eq=False)
class NestedAbsmax:
    """8-bit absolute maxima ("double quantization"): absmax = table[code] · (scale of the code's block) + offset.

    Args:
        table: (256,) fp32.
        scale: an fp32 number per block of `blocksize` maxima.
        offset: () or (1,) fp32, on the weight's device; the mean subtracted before quantization.
        blocksize: maxima that share a scale.
    """

    table: Tensor
    scale: Tensor
    offset: Tensor
    blocksize: int = 256


@dataclass(frozen=True, eq=False)
class FourBit:
    """A frozen 4-bit weight, the input of `dequantize_4bit`.

    Args:
        packed: uint8, two codes per byte, any shape; other dtypes (FSDP's `quant_storage`) are read as bytes.
        absmax: a number per block of `blocksize` weights: fp32, or uint8 codes for `nested`.
        table: (16,) fp32, the value of each code: NF4's quantiles, or FP4.
        shape: the weight's shape.
        dtype: the dequantized weight's dtype: bf16, fp16 or fp32.
        blocksize: consecutive weights that share a maximum, a power of two.
        nested: for quantized maxima.
    Raises: ValueError for inconsistent sizes, dtypes or devices.
    """

    packed: Tensor
    absmax: Tensor
    table: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    blocksize: int = 64
    nested: NestedAbsmax | None = None

    def __post_init__(self) -> None:  # checked once: a layer dequantizes several times per step
        _check(self)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as a plain tensor with the given dtype."""
        w = dequantize_4bit(self)
        return w if w.dtype == dtype else w.to(dtype)

    @classmethod
    def from_parameter(cls, weight: Any, *, state: Any = None) -> FourBit:
        """Wrap the weight of a bitsandbytes 4-bit layer, a `Params4bit`, without copying.

        Args:
            weight: the packed codes.
            state: their `quant_state`; None for the weight's own. A weight that FSDP2 gathered has none, its layer has.
        Raises: ValueError if there is no `quant_state` yet: bitsandbytes quantizes when the layer is moved to a device.
        """
        state = getattr(weight, "quant_state", None) if state is None else state
        if state is None:
            raise ValueError(
                f"FourBit: weight must be a quantised bitsandbytes Params4bit, got {type(weight).__name__} "
                f"{tuple(weight.shape)} without quant_state; move the layer to its device first."
            )
        nested = None
        if state.nested:
            # bitsandbytes' state2 is the second quantization; state2.absmax are the scales for blocks of maxima.
            second = state.state2
            nested = NestedAbsmax(second.code, second.absmax, state.offset, second.blocksize)
        packed = weight.data if isinstance(weight, torch.nn.Parameter) else weight
        return cls(packed, state.absmax, state.code, tuple(state.shape), state.dtype, state.blocksize, nested)


def dequantize_4bit(weight: FourBit) -> Tensor:
    """Dequantize: table[code] · absmax in fp32, rounded once to the weight's dtype.

    Args:
        weight: see `FourBit`. Gets no gradient.
    Returns: weight.shape in weight.dtype; bitwise equal to bitsandbytes on the same device.
    Raises: nothing; `FourBit` validates when constructed.

    With `FourBit.from_parameter(weight)` equivalent to `bitsandbytes.functional.dequantize_4bit`. The code below is for
    unquantized maxima.


    Replaces::

        codes = torch.stack((packed >> 4, packed & 15), -1).view(-1).long()
        w = (table[codes] * absmax.repeat_interleave(blocksize)).to(torch.bfloat16).view(shape)
    """
    if not use_triton(weight.table):
        return dequantize_4bit_reference(weight)
    nested = weight.nested
    second = (None, None, None) if nested is None else (nested.table, nested.scale, nested.offset)
    return _dequantize_4bit(
        weight.table,
        weight.packed,
        weight.absmax,
        *second,
        list(weight.shape),
        weight.dtype,
        weight.blocksize,
        1 if nested is None else nested.blocksize,
    )


def dequantize_4bit_reference(weight: FourBit) -> Tensor:
    numel = math.prod(weight.shape)
    # View as bytes: FSDP's quant_storage shards have a float dtype in name only.
    packed = weight.packed.reshape(-1).view(torch.uint8)
    codes = torch.stack((packed >> 4, packed & 15), -1).view(-1)[:numel]
    absmax, nested = weight.absmax.reshape(-1), weight.nested
    if nested is not None:
        scale = nested.scale.repeat_interleave(nested.blocksize)[: absmax.numel()]
        absmax = nested.table[absmax.long()] * scale + nested.offset
    values = weight.table[codes.long()] * absmax.repeat_interleave(weight.blocksize)[:numel]
    return values.to(weight.dtype).view(weight.shape)


def _check(weight: FourBit) -> None:
    numel, nested = math.prod(weight.shape), weight.nested
    if weight.packed.numel() * weight.packed.element_size() != cdiv(numel, 2):
        raise ValueError(
            f"FourBit: packed must hold {cdiv(numel, 2)} bytes, two of the {numel} weights of "
            f"{tuple(weight.shape)} in each, got {weight.packed.numel() * weight.packed.element_size()}."
        )
    size = weight.blocksize
    # At least 8: a word with eight codes must not straddle two blocks. A power of two: the division is a shift.
    if size < 8 or size & (size - 1):
        raise ValueError(f"FourBit: blocksize must be a power of two, 8 or more, got {size}.")
    blocks, codes = cdiv(numel, size), torch.float32 if nested is None else torch.uint8
    if weight.absmax.numel() != blocks or weight.absmax.dtype != codes:
        raise ValueError(
            f"FourBit: absmax must be {blocks} numbers of {codes}, one for each block of {size} weights, "
            f"got {weight.absmax.numel()} of {weight.absmax.dtype}."
        )
    tables: list[tuple[str, Tensor, int]] = [("table", weight.table, 16)]
    if nested is not None:
        tables += [
            ("nested.table", nested.table, 256),
            ("nested.scale", nested.scale, cdiv(blocks, nested.blocksize)),
            ("nested.offset", nested.offset, 1),
        ]
    for name, t, count in tables:
        # fp32 only: a narrower table would change the rounding.
        if t.numel() != count or t.dtype != torch.float32:
            raise ValueError(f"FourBit: {name} must be {count} numbers of torch.float32, got {t.numel()} of {t.dtype}.")
    for name, t in (("absmax", weight.absmax), *((name, t) for name, t, _ in tables)):
        if t.device != weight.packed.device:
            raise ValueError(f"FourBit: {name} must be on {weight.packed.device}, where packed is, got {t.device}.")
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"FourBit: dtype must be bfloat16, float16 or float32, got {weight.dtype}.")


# ---------------------------------------------------------------------------------------------------------- kernel


# One program dequantizes BLOCK words of CODES codes each: 8 codes in 32 bits, whose bf16 results a thread stores as 16
# bytes, or 2 codes in a byte if numel is no multiple of 8 or the address is unaligned.
# packed (words,), absmax (blocks,), table (16,): inputs. nested_table (256,), nested_scale, offset: for uint8 absmax
# codes, else None. w (numel,): result.
# Neighbouring threads share absmax: with 64 weights per block 8 words have the same maximum. Each thread recomputes the
# nested maximum; a table in memory would need a second launch, as in bitsandbytes. L1 serves nearly all nested_scale
# loads, a scale per 16,384 weights by default, and the table, half a cache line.
@jit
def _dequantize_4bit_kernel(
    packed_ptr, absmax_ptr, table_ptr, nested_table_ptr, nested_scale_ptr, offset_ptr, w_ptr, numel, words,
    BLOCKSIZE: tl.constexpr, NESTED_BLOCKSIZE: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = word < words
    q = tl.load(packed_ptr + word, mask=mask, other=0).to(tl.int32)
    block = word * CODES // BLOCKSIZE  # a word never straddles blocks
    absmax = tl.load(absmax_ptr + block, mask=mask, other=0)
    if nested_table_ptr is not None:
        scale = tl.load(nested_scale_ptr + block // NESTED_BLOCKSIZE, mask=mask, other=0.0)
        # No mask: masked lanes have code 0.
        absmax = tl.load(nested_table_ptr + absmax.to(tl.int32)) * scale + tl.load(offset_ptr)
    # The first code of a byte is in the high bits, the first byte of a word in the low bits.
    i = tl.arange(0, CODES)
    # Shift 4 · (i ^ 1): code 0 is in bits 4 to 7, code 1 in bits 0 to 3, code 2 in bits 12 to 15. The shift is
    # arithmetic on int32; `& 15` removes the sign bits.
    code = (q[:, None] >> (i // 2 * 8 + 4 - i % 2 * 4)[None, :]) & 15
    w = tl.load(table_ptr + code) * absmax[:, None]
    element = (word * CODES)[:, None] + i[None, :]
    # With CODES = 2 the last byte may hold a single code. A mask per element would narrow the word stores.
    kept = element < numel if CODES == 2 else mask[:, None]
    tl.store(w_ptr + element, w.to(w_ptr.dtype.element_ty), mask=kept)


# ---------------------------------------------------------------------------------------------------------- launch


def _dequantize_4bit_fake(
    table: Tensor, packed: Tensor, absmax: Tensor, nested_table: Tensor | None, nested_scale: Tensor | None,
    offset: Tensor | None, shape: list[int], dtype: torch.dtype, *_: Any,
) -> Tensor:  # fmt: skip
    return table.new_empty(shape, dtype=dtype)


@launcher(_dequantize_4bit_fake)
def _dequantize_4bit(
    table: Tensor, packed: Tensor, absmax: Tensor, nested_table: Tensor | None, nested_scale: Tensor | None,
    offset: Tensor | None, shape: list[int], dtype: torch.dtype, blocksize: int, nested_blocksize: int,
) -> Tensor:  # fmt: skip
    w = table.new_empty(shape, dtype=dtype)
    numel = w.numel()
    if not numel:
        return w
    packed = packed.reshape(-1).view(torch.uint8)
    # 32-bit loads need 4-byte alignment, which views into a larger buffer may lack.
    codes = 8 if numel % 8 == 0 and not packed.data_ptr() & 3 else 2
    if codes == 8:
        packed = packed.view(torch.int32)
    tensors = packed, absmax, table, nested_table, nested_scale, offset, w

    def plan() -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        # 256 words were the fastest between 128 and 1024 on an H100. Without fusion, product and sum round separately,
        # as in bitsandbytes' two launches.
        block, warps = 256, 2
        words = cdiv(numel, codes)
        arguments = (numel, words, blocksize, nested_blocksize, codes, block)
        return cdiv(words, block), arguments, {"num_warps": warps, "enable_fp_fusion": False}

    launch(
        _dequantize_4bit_kernel, (numel, blocksize, nested_blocksize, codes, dtype, nested_table is None), tensors, plan
    )
    return w
