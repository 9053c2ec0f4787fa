"""4-bit weights back as floats: w = table[code] · absmax of the code's block, in one launch.

Source: Dettmers et al. 2023, QLoRA, https://arxiv.org/abs/2305.14314: NF4, and double quantisation of the absolute
maxima. The layout in memory is that of bitsandbytes: two codes a byte, the first of the two in the high four bits.

    bytes     0.5 (codes) + 1/64 (8-bit maxima) read, 2 (bf16) written for each weight
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.kernels import cdiv, jit, launch, launcher, tl, use_triton


# eq=False: weights are compared by identity, as `==` of tensors is a tensor.
@dataclass(frozen=True, eq=False)
class NestedAbsmax:
    """Absolute maxima in 8 bits ("double quantisation"): absmax = table[code] · scale of the code's block + offset.

    Args:
        table: (256,) fp32.
        scale: one fp32 number for each block of `blocksize` maxima.
        offset: () or (1,) fp32, on the weight's device; the mean that was taken off.
        blocksize: maxima that share a scale.
    """

    table: Tensor
    scale: Tensor
    offset: Tensor
    blocksize: int = 256


@dataclass(frozen=True, eq=False)
class FourBit:
    """A frozen weight in 4 bits, as `dequantize_4bit` takes it.

    Args:
        packed: uint8, two codes each, in any shape; another dtype (of FSDP's `quant_storage`) is read as bytes.
        absmax: one for each block of `blocksize` weights: fp32, or uint8 codes of `nested`.
        table: (16,) fp32, the number that each code stands for: the quantiles of NF4, or FP4.
        shape: of the weight.
        dtype: of the weight when it is made dense: bf16, fp16 or fp32.
        blocksize: consecutive weights that share a maximum, a power of two.
        nested: where the maxima are quantised themselves.
    Raises: ValueError for tensors whose sizes, dtypes or devices do not fit together.
    """

    packed: Tensor
    absmax: Tensor
    table: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    blocksize: int = 64
    nested: NestedAbsmax | None = None

    def __post_init__(self) -> None:  # here, once: a layer makes its weight dense several times a step
        _check(self)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight as a plain tensor of this dtype."""
        # Made dense in the dtype of the quantised weight first, then cast: the numbers are those that bitsandbytes
        # multiplies by.
        w = dequantize_4bit(self)
        return w if w.dtype == dtype else w.to(dtype)

    @classmethod
    def of(cls, weight: Any) -> FourBit:
        """The weight of a 4-bit layer of bitsandbytes, a `Params4bit`: the same memory, nothing copied.

        Raises: ValueError where the weight has no `quant_state` yet: bitsandbytes quantises when the layer is moved to
            its device.
        """
        state = getattr(weight, "quant_state", None)
        if state is None:
            raise ValueError(
                f"FourBit: weight must be a quantised Params4bit of bitsandbytes, got {type(weight).__name__} "
                f"{tuple(weight.shape)} without quant_state; move the layer to its device first."
            )
        nested = None
        if state.nested:
            # bitsandbytes names the second quantisation state2; its absmax are the scales of blocks of maxima.
            second = state.state2
            nested = NestedAbsmax(second.code, second.absmax, state.offset, second.blocksize)
        # A Parameter's .data is the plain tensor of the same memory, which the kernels take. A 4-bit weight is frozen:
        # no gradient is cut off.
        packed = weight.data if isinstance(weight, torch.nn.Parameter) else weight
        return cls(packed, state.absmax, state.code, tuple(state.shape), state.dtype, state.blocksize, nested)


def dequantize_4bit(weight: FourBit) -> Tensor:
    """The weight as floats: table[code] · absmax in fp32, rounded once to the weight's dtype.

    Args:
        weight: see `FourBit`. None of its tensors gets a gradient.
    Returns: weight.shape in weight.dtype; bit for bit what bitsandbytes gives on the same device.
    Raises: ValueError nowhere here: `FourBit` refuses what does not fit together when it is made.

    With `FourBit.of(weight)` it stands for `bitsandbytes.functional.dequantize_4bit`, and for plain maxima it

    Replaces::

        codes = torch.stack((packed >> 4, packed & 15), -1).view(-1).long()
        w = (table[codes] * absmax.repeat_interleave(blocksize)).to(torch.bfloat16).view(shape)
    """
    # use_triton asks for float tensors, which packed and 8-bit maxima are not. The table is one, on the same device.
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
    # A view, whatever dtype FSDP stores the bytes in: its shards of quant_storage are floats by name alone.
    packed = weight.packed.reshape(-1).view(torch.uint8)
    # The high four bits first, as bitsandbytes packs them. An odd number of weights leaves half of the last byte
    # unused.
    codes = torch.stack((packed >> 4, packed & 15), -1).view(-1)[:numel]
    absmax, nested = weight.absmax.reshape(-1), weight.nested
    if nested is not None:
        # Two roundings, as bitsandbytes has them: of the product and of the sum.
        scale = nested.scale.repeat_interleave(nested.blocksize)[: absmax.numel()]
        absmax = nested.table[absmax.long()] * scale + nested.offset
    # One product in fp32, and one rounding to the weight's dtype: the order of operations is bitsandbytes'.
    values = weight.table[codes.long()] * absmax.repeat_interleave(weight.blocksize)[:numel]
    return values.to(weight.dtype).view(weight.shape)


def _check(weight: FourBit) -> None:
    numel, nested = math.prod(weight.shape), weight.nested
    # In bytes, not in elements, for packed may be of any dtype.
    if weight.packed.numel() * weight.packed.element_size() != cdiv(numel, 2):
        raise ValueError(
            f"FourBit: packed must hold {cdiv(numel, 2)} bytes, two of the {numel} weights of "
            f"{tuple(weight.shape)} in each, got {weight.packed.numel() * weight.packed.element_size()}."
        )
    size = weight.blocksize
    # At least 8: a word of eight codes must not straddle two blocks. A power of two, so that the division is a shift.
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
        # fp32 alone: the kernel's product would round elsewhere with a narrower table.
        if t.numel() != count or t.dtype != torch.float32:
            raise ValueError(f"FourBit: {name} must be {count} numbers of torch.float32, got {t.numel()} of {t.dtype}.")
    for name, t in (("absmax", weight.absmax), *((name, t) for name, t, _ in tables)):
        if t.device != weight.packed.device:
            raise ValueError(f"FourBit: {name} must be on {weight.packed.device}, where packed is, got {t.device}.")
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"FourBit: dtype must be bfloat16, float16 or float32, got {weight.dtype}.")


# ---------------------------------------------------------------------------------------------------------- kernel


@jit
def _dequantize_4bit_kernel(
    packed_ptr, absmax_ptr, table_ptr, nested_table_ptr, nested_scale_ptr, offset_ptr, w_ptr, numel, words,
    BLOCKSIZE: tl.constexpr, NESTED_BLOCKSIZE: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A thread takes words of CODES codes: eight in 32 bits, whose eight bf16 results are one store of 16 bytes. Where
    # the weight is no whole number of words, a word is a byte.
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = word < words
    # int32 also where words are bytes: shifts of one kind serve both.
    q = tl.load(packed_ptr + word, mask=mask, other=0).to(tl.int32)
    # Neighbouring threads read neighbouring maxima, or the same one: 8 words of 32 bits share a block of 64 weights.
    block = word * CODES // BLOCKSIZE  # a block is a whole number of words, so a word has one maximum
    absmax = tl.load(absmax_ptr + block, mask=mask, other=0)
    if nested_table_ptr is not None:
        # One scale for NESTED_BLOCKSIZE maxima, by default for 16,384 weights: L1 answers all but the first load.
        scale = tl.load(nested_scale_ptr + block // NESTED_BLOCKSIZE, mask=mask, other=0.0)
        # absmax was a uint8 code until here. The maximum is computed again by each of the block's eight threads: a
        # table of maxima in memory would be a second launch, as bitsandbytes has it. No mask: masked lanes have code 0.
        absmax = tl.load(nested_table_ptr + absmax.to(tl.int32)) * scale + tl.load(offset_ptr)
    # The first code of a byte is in its high bits, the first byte of a word in the word's low ones.
    i = tl.arange(0, CODES)
    # Bit 4 · (i ^ 1): code 0 is in bits 4 to 7, code 1 in bits 0 to 3, code 2 in bits 12 to 15. The shift is arithmetic
    # on an int32, and `& 15` takes the sign bits away.
    code = (q[:, None] >> (i // 2 * 8 + 4 - i % 2 * 4)[None, :]) & 15
    # The table is half a cache line: a warp's look-ups are one access to L1 each.
    w = tl.load(table_ptr + code) * absmax[:, None]
    # int64, as `word` is: a stacked weight of experts may exceed 2**31 elements.
    element = (word * CODES)[:, None] + i[None, :]
    # The last byte may hold one code. A mask of single elements would narrow the stores of whole words.
    kept = element < numel if CODES == 2 else mask[:, None]
    # A thread stores its CODES results as one run: 16 bytes of bf16.
    tl.store(w_ptr + element, w.to(w_ptr.dtype.element_ty), mask=kept)


# ---------------------------------------------------------------------------------------------------------- launch


def _dequantize_4bit_fake(
    table: Tensor, packed: Tensor, absmax: Tensor, nested_table: Tensor | None, nested_scale: Tensor | None,
    offset: Tensor | None, shape: list[int], dtype: torch.dtype, blocksize: int, nested_blocksize: int,
) -> Tensor:  # fmt: skip
    # From the table, the first tensor: `launcher` takes the device from there.
    return table.new_empty(shape, dtype=dtype)


@launcher(
    "(Tensor table, Tensor packed, Tensor absmax, Tensor? nested_table, Tensor? nested_scale, Tensor? offset,"
    " int[] shape, ScalarType dtype, int blocksize, int nested_blocksize) -> Tensor",
    _dequantize_4bit_fake,
)
def _dequantize_4bit(
    table: Tensor, packed: Tensor, absmax: Tensor, nested_table: Tensor | None, nested_scale: Tensor | None,
    offset: Tensor | None, shape: list[int], dtype: torch.dtype, blocksize: int, nested_blocksize: int,
) -> Tensor:  # fmt: skip
    w = table.new_empty(shape, dtype=dtype)
    numel = w.numel()
    if not numel:
        return w
    # A view for dense bytes; a strided `packed` would be copied.
    packed = packed.reshape(-1).view(torch.uint8)
    # 32 bits at once need an address that 4 divides: views into a larger buffer may have another.
    codes = 8 if numel % 8 == 0 and not packed.data_ptr() & 3 else 2
    # Little-endian: the first byte is in the word's low bits, as the kernel's shifts expect.
    if codes == 8:
        packed = packed.view(torch.int32)
    tensors = packed, absmax, table, nested_table, nested_scale, offset, w

    def plan() -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        # Of 128 to 1024 words on an H100, 256 were the fastest. A product and a sum stay two roundings: the bits are
        # those of bitsandbytes, which does them in two launches.
        block, warps = 256, 2
        words = cdiv(numel, codes)
        # The absence of nested tensors is in the key below: None is a constant to the compiler, and makes another
        # kernel.
        arguments = (numel, words, blocksize, nested_blocksize, codes, block)
        return cdiv(words, block), arguments, {"num_warps": warps, "enable_fp_fusion": False}

    launch(
        _dequantize_4bit_kernel, (numel, blocksize, nested_blocksize, codes, dtype, nested_table is None), tensors, plan
    )
    return w
