"""Stacked expert weights in 4 bits: w = table[code] · scale of the code's block, blocks along each row.

    nf4      codes of normal quantiles, an fp32 absolute maximum per 64 weights: bitsandbytes' format, 4.5 bits a weight
    mxfp4    e2m1 floats, an e8m0 power of two per 32 weights: gpt-oss's format, 4.25 bits a weight

Two codes share a byte: in nf4 the first is in the high four bits, in mxfp4 in the low four bits. The packed bytes and
the scales are what the checkpoints hold, without a copy. Both are kept as bytes, nf4's maxima too: casts of a model,
and engines that shard or gather parameters, with or without mixed precision, leave bytes as they are.

Source: Dettmers et al. 2023, QLoRA, https://arxiv.org/abs/2305.14314; OCP Microscaling Formats 1.0,
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tigon.kernels import cdiv, check_tensors, use_triton
from tigon.ops.dequantize_4bit import FourBit
from tigon.ops.experts.quantized_products import Packed, expand

Format = Literal["nf4", "mxfp4"]


class Layout(NamedTuple):
    """A format: weights per block, the scales' dtype, and the value of each code."""

    blocksize: int
    scales: torch.dtype
    table: tuple[float, ...]


_E2M1 = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0
LAYOUTS = {
    "nf4": Layout(64, torch.float32, (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    )),
    "mxfp4": Layout(32, torch.uint8, (*_E2M1, *(-value for value in _E2M1))),
}  # fmt: skip


class QuantizedExperts(nn.Module):
    """Frozen weights of stacked experts in 4 bits, which `moe_mlp` takes in place of a weight.

    Args:
        packed: (E, N, ceil(K / 2)) uint8, two codes a byte.
        scales: (E, N, ceil(K / blocksize)): nf4's maxima in fp32, or mxfp4's exponents in uint8.
        shape: (E, N, K), the weight's shape: experts, output width, input width.
        format: "nf4" with blocks of 64 weights, or "mxfp4" with blocks of 32.
        by_columns: as a parametrization give the weight as (E, K, N), as gpt-oss stores it.
    Raises: ValueError for inconsistent shapes, dtypes or devices.

    `packed` and `scales` are uint8 parameters without gradients, scales as the bytes of the given numbers: they move,
    save and are sharded with their module, and casts leave them as they are. Registered with
    `torch.nn.utils.parametrize`, the module gives the dense weight in the original's dtype; see
    `tigon.quantize_experts`.
    """

    packed: Tensor
    scales: Tensor

    def __init__(
        self, packed: Tensor, scales: Tensor, *, shape: tuple[int, int, int], format: Format = "nf4",
        by_columns: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        layout = find_layout(format)
        check_tensors("QuantizedExperts", packed=packed, scales=scales)
        if len(shape) != 3 or min(shape) < 1:
            raise ValueError(f"QuantizedExperts: shape must be three positive numbers (E, N, K), got {tuple(shape)}.")
        E, N, K = shape
        for name, t, width, dtype in (
            ("packed", packed, cdiv(K, 2), torch.uint8), ("scales", scales, cdiv(K, layout.blocksize), layout.scales),
        ):  # fmt: skip
            if t.shape != (E, N, width) or t.dtype != dtype:
                raise ValueError(
                    f"QuantizedExperts: {name} must be {(E, N, width)} {dtype} for {format} weights {(E, N, K)}, "
                    f"got {tuple(t.shape)} {t.dtype}."
                )
        if packed.device != scales.device:
            raise ValueError(f"QuantizedExperts: scales must be on {packed.device}, as packed, got {scales.device}.")
        self.shape, self.format, self.by_columns = (E, N, K), format, by_columns
        as_bytes = packed.contiguous(), scales.contiguous().view(torch.uint8)
        self.packed, self.scales = (nn.Parameter(t, requires_grad=False) for t in as_bytes)
        self._table = torch.tensor(layout.table, device=packed.device)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def table(self) -> Tensor:
        """(16,) fp32, the codes' values, on the weights' device."""
        if self._table.device != self.device:
            self._table = torch.tensor(LAYOUTS[self.format].table, device=self.device)
        return self._table

    @classmethod
    def quantize(cls, weight: Tensor, format: Format = "nf4", *, by_columns: bool = False) -> QuantizedExperts:
        """Quantize a stack of weights on its device, one expert after another.

        Args:
            weight: (E, N, K), any float dtype and strides.
            format: "nf4" rounds w / absmax to the nearest code, as bitsandbytes does; "mxfp4" takes the least power of
                two with which no weight of the block exceeds 6, and rounds ties to the even code.
            by_columns: see `QuantizedExperts`.
        Raises: ValueError for other shapes or dtypes, and for weights that are not finite; this synchronizes.

        A dequantized mxfp4 weight is quantized to itself.
        """
        layout = find_layout(format)
        check_tensors("QuantizedExperts.quantize", weight=weight)
        if weight.dim() != 3 or not weight.is_floating_point() or weight.element_size() == 1:
            raise ValueError(
                f"QuantizedExperts.quantize: weight must be (E, N, K) floats, got {tuple(weight.shape)} {weight.dtype}."
            )
        E, N, K = weight.shape
        packed = weight.new_empty((E, N, cdiv(K, 2)), dtype=torch.uint8)
        scales = weight.new_empty((E, N, cdiv(K, layout.blocksize)), dtype=layout.scales)
        encode = _encode_nf4 if format == "nf4" else _encode_mxfp4
        for e, matrix in enumerate(weight.detach().unbind()):
            if not matrix.is_meta and not bool(torch.isfinite(matrix).all()):
                raise ValueError(f"QuantizedExperts.quantize: weight must be finite, and expert {e}'s is not.")
            padded = nn.functional.pad(matrix.float(), (0, -K % layout.blocksize))
            codes, scales[e] = encode(padded.reshape(N, -1, layout.blocksize).contiguous())
            first, second = codes.view(N, -1).to(torch.uint8)[:, : 2 * packed.shape[2]].reshape(N, -1, 2).unbind(2)
            packed[e] = first << 4 | second if format == "nf4" else second << 4 | first
        return cls(packed, scales, shape=(E, N, K), format=format, by_columns=by_columns)

    @classmethod
    def from_mxfp4(cls, blocks: Tensor, scales: Tensor, *, by_columns: bool = False) -> QuantizedExperts:
        """Wrap a checkpoint's blocks (E, N, K / 32, 16) and scales (E, N, K / 32), both uint8, without a copy."""
        check_tensors("QuantizedExperts.from_mxfp4", blocks=blocks, scales=scales)
        if blocks.dim() != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
            raise ValueError(
                "QuantizedExperts.from_mxfp4: blocks must be (E, N, K / 32, 16) beside scales (E, N, K / 32), got "
                f"{tuple(blocks.shape)} and {tuple(scales.shape)}."
            )
        E, N, G, _ = blocks.shape
        return cls(blocks.reshape(E, N, -1), scales, shape=(E, N, 32 * G), format="mxfp4", by_columns=by_columns)

    @classmethod
    def from_four_bit(cls, weight: FourBit) -> QuantizedExperts:
        """Wrap a stack (E, N, K) that bitsandbytes has quantized to nf4, see `tigon.FourBit.from_parameter`.

        The codes are not copied. Maxima in 8 bits are expanded to fp32.
        Raises: ValueError for other tables and block sizes, and where a row is no multiple of a block.
        """
        layout = LAYOUTS["nf4"]
        if len(weight.shape) != 3 or weight.shape[2] % layout.blocksize or weight.blocksize != layout.blocksize:
            raise ValueError(
                "QuantizedExperts.from_four_bit: weight must be (E, N, K) in blocks of 64 weights with K a multiple of "
                f"64, got {tuple(weight.shape)} in blocks of {weight.blocksize}."
            )
        if not torch.equal(weight.table, torch.tensor(layout.table, device=weight.device)):
            raise ValueError("QuantizedExperts.from_four_bit: weight must have nf4's table, got another.")
        E, N, K = weight.shape
        absmax, nested = weight.absmax.reshape(-1), weight.nested
        if nested is not None:
            scale = nested.scale.repeat_interleave(nested.blocksize)[: absmax.numel()]
            absmax = nested.table[absmax.long()] * scale + nested.offset
        return cls(weight.packed.reshape(-1).view(torch.uint8).view(E, N, -1), absmax.view(E, N, -1), shape=(E, N, K))

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the weight (E, N, K): table[code] · scale in fp32, rounded once to dtype."""
        packed = self.pack()
        if dtype != torch.float64 and use_triton(self.table):
            return expand(packed, torch.empty(self.shape, dtype=dtype, device=self.device))
        return dequantize_experts_reference(packed, self.shape[2], dtype)

    def pack(self) -> Packed:
        """Return the tensors for a launch. Raises: ValueError where FSDP2 has not gathered the bytes, or cast them."""
        packed, scales = self.packed, self.scales
        if hasattr(packed, "device_mesh"):
            raise ValueError(
                "QuantizedExperts: packed must be whole, and is sharded (DTensor): read the weight in the forward of "
                "the module that fully_shard was applied to, or after its unshard()."
            )
        if packed.dtype != torch.uint8:
            raise ValueError(
                f"QuantizedExperts: packed must be torch.uint8, got {packed.dtype}: this torch's FSDP2 casts bytes to "
                "MixedPrecisionPolicy(param_dtype). Cast the model to that dtype, and leave param_dtype out."
            )
        return Packed(packed, scales.view(LAYOUTS[self.format].scales), self.table)

    def forward(self, original: Tensor) -> Tensor:
        """As a parametrization: the dense weight in the original's dtype."""
        w = self.dequantize(original.dtype)
        return w.transpose(1, 2) if self.by_columns else w

    def extra_repr(self) -> str:
        return f"shape={self.shape}, format={self.format!r}"


def find_layout(format: Any) -> Layout:
    if format not in LAYOUTS:
        raise ValueError(f"QuantizedExperts: format must be 'nf4' or 'mxfp4', got {format!r}.")
    return LAYOUTS[format]


def count_bytes(shape: tuple[int, ...], format: Format) -> int:
    """Bytes of a stack (E, N, K): codes and scales."""
    layout = find_layout(format)
    E, N, K = shape
    return E * N * (cdiv(K, 2) + cdiv(K, layout.blocksize) * layout.scales.itemsize)


def dequantize_experts_reference(packed: Packed, K: int, dtype: torch.dtype) -> Tensor:
    """Dequantize one expert after another, in fp32."""
    codes, scales, table = packed
    E, N, _ = codes.shape
    w = torch.empty((E, N, K), dtype=dtype, device=codes.device)
    for e in range(E):
        nibbles = codes[e] >> 4, codes[e] & 15
        values = table[torch.stack(nibbles if packed.high_first else nibbles[::-1], -1).view(N, -1).int()][:, :K]
        # The exponent's bits: 2^(scale − 127), of which 2^−127 is subnormal.
        bits = scales[e].int()
        scale = scales[e] if packed.high_first else torch.where(bits > 0, bits << 23, 1 << 22).view(torch.float32)
        w[e] = values * scale.repeat_interleave(packed.blocksize, 1)[:, :K]
    return w


def _encode_nf4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of blocks (N, G, 64) fp32."""
    table = torch.tensor(LAYOUTS["nf4"].table, device=blocks.device)
    absmax = blocks.abs().amax(-1)
    # bitsandbytes multiplies by the reciprocal; a block of zeros has zeros for codes.
    normal = blocks * torch.where(absmax > 0, absmax.reciprocal(), 0.0)[..., None]
    # A value between two codes takes the nearer one, the lower one in the middle.
    return torch.bucketize(normal, (table[1:] + table[:-1]) / 2), absmax


def _encode_mxfp4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of blocks (N, G, 32) fp32."""
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1))
    # absmax / 6 = mantissa / 0.75 · 2^(exponent − 3), rounded up to a power of two.
    exponent = (exponent - torch.where(mantissa <= 0.75, 3, 2)).clamp(-127, 127)
    size = torch.ldexp(blocks.abs().double(), -exponent[..., None])
    # The middles between magnitudes; in every second middle the even code is the upper one.
    middles = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), dtype=torch.float64, device=blocks.device)
    middles[1::2] = torch.nextafter(middles[1::2], middles.new_zeros(()))
    return torch.bucketize(size, middles) + 8 * torch.signbit(blocks), (exponent + 127).to(torch.uint8)
