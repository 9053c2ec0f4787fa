"""Attention of packed documents in plain PyTorch: the specification and the CPU path."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from tigon.kernels import is_captured, is_concrete


def varlen_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *, scale: float | None = None, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, causal: bool = True,
) -> Tensor:  # fmt: skip
    wide = torch.promote_types(q.dtype, torch.float32)  # fp64 stays fp64: the tests' yardstick
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    G = k.shape[1]

    def attend(heads: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        z = torch.einsum("ignd,jgd->gnij", heads.to(wide).unflatten(1, (G, -1)), keys.to(wide)) * scale
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        z = z.masked_fill(~seen, -torch.inf)
        if sinks is not None:  # one more key, whose value is zero
            z = torch.cat((z, sinks.to(wide).view(G, -1, 1, 1).expand(*z.shape[:3], 1)), -1)
        weights = torch.softmax(z, -1)[..., : len(keys)]
        return torch.einsum("gnij,jgd->ignd", weights, values.to(wide)).flatten(1, 2).to(q.dtype)

    row = torch.arange(q.shape[0], device=q.device, dtype=offsets.dtype)
    if not is_concrete(offsets) or is_captured(q):
        # All rows at once: a graph must hold for all offsets and cannot depend on their values.
        document = torch.searchsorted(offsets.contiguous(), row, right=True)
        return attend(q, k, v, (document[:, None] == document) & _see(row, window, causal))
    # Per document, which avoids a score matrix over all rows.
    spans = [slice(*span) for span in pairwise(offsets.tolist()) if span[0] < span[1]] or [slice(0, 0)]
    return torch.cat([attend(q[own], k[own], v[own], _see(row[own], window, causal)) for own in spans])


def _see(row: Tensor, window: int | None, causal: bool) -> Tensor:
    """Return (n, n) bool: which rows each row sees, of causal attention the earlier ones, within the window."""
    seen = row <= row[:, None] if causal else row.new_ones((len(row), len(row)), dtype=torch.bool)
    return seen if window is None else seen & (row > row[:, None] - window)
