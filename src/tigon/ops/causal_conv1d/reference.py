"""The causal convolution in plain PyTorch: the specification and the CPU path."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import in_order
from tigon.ops.offsets import find_documents


def causal_conv1d_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None,
    initial_state: Tensor | None = None, offsets: Tensor | None = None, return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    B, T, C = x.shape
    N, W = B * T, weight.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    if offsets is None:  # each sequence is a document
        offsets = torch.arange(B + 1, device=x.device) * T
    offsets = offsets.long()
    D = offsets.shape[0] - 1
    state = x.new_zeros((D, C, W - 1)) if initial_state is None else initial_state
    # All tokens, and behind them the inputs before each document.
    inputs = torch.cat((x.reshape(N, C).to(wide), state.to(wide).transpose(1, 2).flatten(0, 1)))

    def look(document: Tensor, position: Tensor) -> Tensor:
        """Return a document's inputs at positions; those before the document are negative."""
        at = torch.where(position < 0, N + (document + 1) * (W - 1) + position, offsets[document] + position)
        # Offsets that do not ascend read no other memory.
        return inputs.index_select(0, at.clamp(0, max(len(inputs) - 1, 0)).flatten()).view(*at.shape, C)

    found = find_documents(offsets, N).long()
    document = found.clamp(max=D - 1)
    position = torch.arange(N, device=x.device) - offsets[document]
    w = weight.to(wide)
    z = look(document, position) * w[:, W - 1]
    for lag in range(1, W):
        z = z + look(document, position - lag) * w[:, W - 1 - lag]
    if bias is not None:
        z = z + bias.to(wide)
    y = F.silu(z) if activation == "silu" else z
    y = y.masked_fill(((found >= D) | (position < 0))[:, None], torch.nan)  # in no document
    y = lay_out(y.to(x.dtype).view(B, T, C), x)
    if not return_state:
        return y
    every = torch.arange(D, device=x.device)[:, None]
    last = look(every, offsets.diff()[:, None] + torch.arange(1 - W, 0, device=x.device))
    return y, last.to(x.dtype).transpose(1, 2).contiguous()


def lay_out(y: Tensor, x: Tensor) -> Tensor:
    """y (B, T, C) in x's memory order: channels last, or channels first where x's tokens have unit stride."""
    if x.stride(2) != 1 and x.stride(1) == 1:
        return in_order(y.transpose(1, 2), x.transpose(1, 2)).transpose(1, 2)
    return in_order(y, x)
