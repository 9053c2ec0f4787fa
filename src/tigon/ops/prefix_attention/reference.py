"""Prefix attention in plain PyTorch: the specification and the CPU path."""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.kernels import is_traced
from tigon.ops.prefix_attention.layout import PrefixLayout


def prefix_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, layout: PrefixLayout, *, across: str = "none", scale: float | None = None,
    softcap: float | None = None, window: int | None = None,
) -> Tensor:  # fmt: skip
    wide = torch.promote_types(q.dtype, torch.float32)  # fp64 stays fp64: the tests' yardstick
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def attend(heads: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        z = torch.einsum("ignd,jgd->gnij", heads.to(wide).unflatten(1, (k.shape[1], -1)), keys.to(wide)) * scale
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        weights = torch.softmax(z.masked_fill(~seen, -torch.inf), -1)
        return torch.einsum("gnij,jgd->ignd", weights, values.to(wide)).flatten(1, 2).to(q.dtype)

    every = torch.arange(layout.rows, device=q.device)
    if is_traced(q):
        # All rows at once: a graph must hold for every layout and cannot depend on the lengths.
        return attend(q, k, v, _mask_keys(layout, every, across, window))
    prefixes, suffixes = [], []
    p, s = 0, layout.prefix_rows
    # Per request, which avoids a score matrix over all rows.
    for length, own in zip(layout.prefix_lengths, layout.suffix_lengths, strict=True):
        rows = torch.cat((every[p : p + length], every[s : s + sum(own)]))
        o = attend(q[rows], k[rows], v[rows], _mask_keys(layout, rows, across, window))
        prefixes.append(o[:length])
        suffixes.append(o[length:])
        p, s = p + length, s + sum(own)
    return torch.cat(prefixes + suffixes)


def _mask_keys(layout: PrefixLayout, rows: Tensor, across: str, window: int | None) -> Tensor:
    """Return (n, n) bool: which of these rows each row sees."""
    request, sequence, position = (t[rows] for t in (layout._of_row, layout._first, layout._position))
    same = sequence[:, None] == sequence
    own = same & (position <= position[:, None])
    suffix, of_prefix = (rows >= layout.prefix_rows)[:, None], rows < layout.prefix_rows
    # A suffix sees the request's prefix, and with `across` the other suffixes too.
    shared = suffix & (of_prefix | ~same) if across == "suffixes" else suffix & of_prefix
    seen = (request[:, None] == request) & (own | shared)
    return seen if window is None else seen & (position > position[:, None] - window)
