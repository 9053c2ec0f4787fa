"""Experts' layer in plain PyTorch: the specification, the CPU path and the kernels' oracle."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops.acts import ACTS
from tigon.ops.experts.options import Options


def moe_mlp_reference(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, options: Options,
) -> Tensor:  # fmt: skip
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    # unbind once: indexing per expert would allocate a full-size gradient for each expert.
    matrices = (w.unbind() for w in (gate_up, down))
    biases = ([None] * gate_up.shape[0] if b is None else b.unbind() for b in (gate_up_bias, down_bias))
    of_experts = list(zip(*matrices, *biases, strict=True))
    for expert, (first, second, first_bias, second_bias) in enumerate(of_experts):
        # A graph (and meta) cannot know an expert's rows: run all rows through each expert, most with weight 0.
        if torch.compiler.is_compiling() or x.is_meta:
            share = torch.where(index == expert, weights.to(wide), 0.0).sum(-1)
            out = out + share[:, None] * _one_expert(x, first, second, first_bias, second_bias, options).to(wide)
        else:
            # Synchronizes with the device. As in the kernels, indices outside [0, E) match no expert.
            token, choice = torch.where(index == expert)
            y = _one_expert(x[token], first, second, first_bias, second_bias, options).to(wide)
            out.index_add_(0, token, weights[token, choice, None].to(wide) * y)
    return out.to(x.dtype)


def _one_expert(
    x: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None, options: Options
) -> Tensor:
    return F.linear(activation_reference(F.linear(x, gate_up, gate_up_bias), options), down, down_bias)


def activation_reference(z: Tensor, options: Options) -> Tensor:
    """Compute h from z = x gate_upᵀ + bias in fp32, rounded once."""
    act, alpha, limit = ACTS[options.act].value, options.alpha, options.limit
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    if not options.gated:
        return act(wide).to(z.dtype)
    gate, up = (wide[..., ::2], wide[..., 1::2]) if options.interleaved else wide.chunk(2, -1)
    if limit is not None:
        # clamp has slope 0 beyond the limit and propagates NaN; gate has no lower limit.
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    gate = act(gate) if alpha == 1.0 else act(gate * alpha) / alpha
    return (gate * (up + options.up_offset)).to(z.dtype)
