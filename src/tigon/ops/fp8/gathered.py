"""A weight whose shards other processes have sent in e4m3: bytes, and the scale that all shards share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tigon.ops.fp8.columns import transpose_rows
from tigon.ops.fp8.recipe import E4M3, Weight

_aten = torch.ops.aten


class GatheredWeight(Tensor):
    """A weight (N, K) that exists in e4m3 alone, with the dtype that the layer's parameter has.

    FP8 layers multiply by the bytes. Any other operation reads the rounded weight, `data · scale` in the weight's
    dtype; an operation that writes to the weight raises.

    Args:
        rows: (M, K) uint8, e4m3 bytes. The first N rows are the weight's, the others padding. Their memory may be
            freed and filled again between uses.
        scale: (1,) fp32, a power of two.
        shape: (N, K).
        dtype: bf16, fp16 or fp32.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    rows: Tensor
    scale: Tensor

    def __new__(cls, rows: Tensor, scale: Tensor, shape: Sequence[int], dtype: torch.dtype) -> GatheredWeight:
        weight: GatheredWeight = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=rows.device)
        weight.rows, weight.scale = rows, scale
        return weight

    def read_bytes(self) -> Tensor:
        """The weight's bytes, (N, K) uint8.

        Raises: RuntimeError while their memory is freed.
        """
        if self.rows.untyped_storage().nbytes() == 0 and self.numel():
            raise RuntimeError("FP8: a weight is read after its gathered bytes were freed, and before the next gather.")
        return self.rows[: self.shape[0]]

    def restore(self) -> Tensor:
        """The rounded weight, a plain tensor."""
        return (self.read_bytes().view(E4M3).float() * self.scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        weight = args[0] if args and isinstance(args[0], GatheredWeight) else None
        is_same = func is _aten.detach.default or (
            func is _aten.as_strided.default
            and weight is not None
            and (tuple(args[1]), tuple(args[2])) == (tuple(weight.shape), weight.stride())
        )
        if is_same and weight is not None:
            return GatheredWeight(weight.rows, weight.scale, weight.shape, weight.dtype)
        written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        names = [a.name for a in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if any(isinstance(given.get(name), GatheredWeight) for name in written):
            raise RuntimeError(
                f"FP8: {func} would write to a weight that was gathered in e4m3, and the write would be lost. Write "
                'to the sharded parameter, or use FP8(all_gather="bf16").'
            )
        args, kwargs = tree_map_only(GatheredWeight, GatheredWeight.restore, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight(shape={tuple(self.shape)}, dtype={self.dtype})"


class GatheredCopies:
    """`store.Copies` of weights that were gathered in e4m3 with one scale: nothing is measured, rounded or kept."""

    keeps, nbytes = False, 0

    def read_rows(self, parameters: Sequence[Tensor]) -> Weight:
        """The weights as they are, stacked: (N, K)."""
        return _repeat_scale(_stack_bytes(parameters), parameters)

    def read_transposed(self, parameters: Sequence[Tensor]) -> Weight:
        """Their transposition (K, N); or that of some of them."""
        data = _stack_bytes(parameters)
        return _repeat_scale(transpose_rows(data)[:, : len(data)].contiguous(), parameters)


def _stack_bytes(parameters: Sequence[Any]) -> Tensor:
    parts = [p.read_bytes() for p in parameters]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(E4M3)


def _repeat_scale(data: Tensor, parameters: Sequence[Any]) -> Weight:
    return Weight(data, parameters[0].scale.expand(len(data)).contiguous())
