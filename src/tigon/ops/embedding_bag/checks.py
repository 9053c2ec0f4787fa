"""Validation and shapes of bags."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.kernels import is_concrete
from tigon.ops.targets import CHECKS


def check_bags(
    name: str, table: Tensor, values: Tensor, offsets: Tensor | None, mode: str, per_sample_weights: Tensor | None,
    padding_idx: int | None, field_offsets: Tensor | None,
) -> int:  # fmt: skip
    """Raise a ValueError for arguments that do not fit the table (V, D). Returns: the skipped id, -1 for none."""
    V, device = table.shape[0], table.device
    if mode not in ("sum", "mean"):
        raise ValueError(f"{name}: mode must be 'sum' or 'mean', got {mode!r}.")
    if values.dtype.is_floating_point or values.dtype == torch.bool or values.dtype.is_complex:
        raise ValueError(f"{name}: values must hold integer ids, got {values.dtype}.")
    for what, t in (("offsets", offsets), ("field_offsets", field_offsets)):
        if t is not None and (t.dim() != 1 or t.dtype != torch.int64 or not t.shape[0]):
            raise ValueError(
                f"{name}: {what} must be 1-d int64, the start of each and the end of the last, got "
                f"{tuple(t.shape)} {t.dtype}."
            )
    fields = None if field_offsets is None else field_offsets.shape[0] - 1
    if fields == 0:
        raise ValueError(f"{name}: field_offsets must have one entry more than there are fields, got 1 entry.")
    if offsets is not None:
        if values.dim() != 1:
            raise ValueError(f"{name}: values must be (M,) where offsets are given, got {tuple(values.shape)}.")
        if offsets.shape[0] == 1 and values.numel():
            raise ValueError(
                f"{name}: offsets must ascend from 0 to {values.numel()}, got none for {values.numel()} values."
            )
        if fields and (offsets.shape[0] - 1) % fields:
            raise ValueError(
                f"{name}: offsets must have B · {fields} + 1 entries, {fields} bags per sample, got {offsets.shape[0]}."
            )
    elif fields is None and values.dim() != 2:
        raise ValueError(f"{name}: values must be (B, L), or (M,) with offsets, got {tuple(values.shape)}.")
    elif fields is not None and (values.dim() not in (2, 3) or values.shape[1] != fields):
        raise ValueError(
            f"{name}: values must be (B, {fields}) or (B, {fields}, L), since field_offsets define {fields} fields, "
            f"or (M,) with offsets, got {tuple(values.shape)}."
        )
    if per_sample_weights is not None:
        if mode != "sum":
            raise ValueError(f"{name}: mode must be 'sum' with per_sample_weights, got {mode!r}.")
        if per_sample_weights.shape != values.shape or not per_sample_weights.dtype.is_floating_point:
            raise ValueError(
                f"{name}: per_sample_weights must be floats with values' shape {tuple(values.shape)}, got "
                f"{tuple(per_sample_weights.shape)} {per_sample_weights.dtype}."
            )
    others = {"values": values, "offsets": offsets, "per_sample_weights": per_sample_weights,
              "field_offsets": field_offsets}  # fmt: skip
    for what, t in others.items():
        if t is not None and t.device != device:
            raise ValueError(f"{name}: {what} must be on the table's device {device}, got {t.device}.")
    least = -V if fields is None else 0
    if padding_idx is not None and not least <= padding_idx < V:
        raise ValueError(f"{name}: padding_idx must lie in [{least}, {V}) or be None, got {padding_idx}.")
    padding = -1 if padding_idx is None else padding_idx % V
    # Reading values stalls a GPU, so GPUs check only with TIGON_CHECKS=1; otherwise the kernels return NaN.
    if device.type == "cpu" or CHECKS:
        _look(name, V, values, offsets, field_offsets, padding)
    return padding


def _look(
    name: str, V: int, values: Tensor, offsets: Tensor | None, field_offsets: Tensor | None, padding: int
) -> None:
    for what, t, last in (("offsets", offsets, values.numel()), ("field_offsets", field_offsets, V)):
        if t is not None and is_concrete(t):
            ends = int(t[0]), int(t[-1])
            exact = ends == (0, last) if what == "offsets" else ends[0] >= 0 and ends[1] <= last
            if not exact or bool((t.diff() < 0).any()):
                raise ValueError(f"{name}: {what} must ascend from 0 to {last}, got {t.tolist()[:8]}.")
    if not is_concrete(values) or (field_offsets is not None and not is_concrete(field_offsets)):
        return
    ids = values.long().reshape(-1)  # in uint8, PyTorch would compare with V modulo 256
    size: Tensor | int = V
    if field_offsets is not None:
        size = field_offsets.diff()[locate_fields(values, offsets, field_offsets)]
    wrong = (ids < 0) | (ids >= size)
    if padding >= 0:
        wrong &= ids != padding
    if wrong.any():
        where = "" if field_offsets is None else ", the rows of its field's table"
        bound = V if isinstance(size, int) else int(size[wrong][0])
        raise ValueError(f"{name}: values must lie in [0, {bound}){where}, got {int(ids[wrong][0])}.")


def complete_offsets(values: Tensor, offsets: Tensor | None, include_last_offset: bool) -> Tensor | None:
    """Return offsets that end with the number of values."""
    if offsets is None or include_last_offset or offsets.dim() != 1:
        return offsets
    return torch.cat((offsets, offsets.new_full((1,), values.numel())))


def bags_shape(values: Tensor, offsets: Tensor | None, field_offsets: Tensor | None) -> tuple[int, ...]:
    """Return (B,), or with fields (B, F)."""
    if field_offsets is None:
        return (values.shape[0] if offsets is None else offsets.shape[0] - 1,)
    fields = field_offsets.shape[0] - 1
    return (values.shape[0] if offsets is None else (offsets.shape[0] - 1) // fields), fields


def flat_bags(t: Tensor | None, field_offsets: Tensor | None) -> Any:
    """Reshape values or weights to (bags, L): with fields a sample's bags are contiguous. (M,) is unchanged."""
    if t is None or t.dim() == 1 or field_offsets is None:
        return t
    B, fields, *rest = t.shape
    return t.reshape(B * fields, rest[0] if rest else 1)


def locate_fields(values: Tensor, offsets: Tensor | None, field_offsets: Tensor) -> Tensor:
    """Return the field of each value."""
    at = torch.arange(values.numel(), device=values.device)
    if offsets is None:
        bag = at // (values.shape[2] if values.dim() == 3 else 1)
    else:
        bag = torch.searchsorted(offsets, at, right=True) - 1
    return bag % (field_offsets.shape[0] - 1)
