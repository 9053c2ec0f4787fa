"""Experts' layer in plain PyTorch: the specification, the CPU path and the kernels' oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.ops.acts import ACTS
from tigon.ops.experts.adapter import NO_FACTORS, Factors, multiply_adapted
from tigon.ops.experts.options import Options


def moe_mlp_reference(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, options: Options, gate_up_factors: Factors = NO_FACTORS,
    down_factors: Factors = NO_FACTORS,
) -> Tensor:  # fmt: skip
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    # unbind once: indexing per expert would allocate a full-size gradient for each expert.
    E = gate_up.shape[0]
    first, second = (
        list(zip(*([None] * E if t is None else t.unbind() for t in (w, bias, a, b)), [scale] * E, strict=True))
        for w, bias, (a, b, scale) in ((gate_up, gate_up_bias, gate_up_factors), (down, down_bias, down_factors))
    )

    def run_expert(x: Tensor, expert: int) -> Tensor:
        z = multiply_adapted(x, *first[expert])
        return multiply_adapted(activation_reference(z, options), *second[expert]).to(wide)

    for expert in range(E):
        # A graph (and meta) cannot know an expert's rows: run all rows through each expert, most with weight 0.
        if torch.compiler.is_compiling() or x.is_meta:
            share = torch.where(index == expert, weights.to(wide), 0.0).sum(-1)
            out = out + share[:, None] * run_expert(x, expert)
        else:
            # Synchronizes with the device. As in the kernels, indices outside [0, E) match no expert.
            token, choice = torch.where(index == expert)
            out.index_add_(0, token, weights[token, choice, None].to(wide) * run_expert(x[token], expert))
    return out.to(x.dtype)


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
    if options.gate_softcap is not None:
        gate = options.gate_softcap * torch.tanh(gate / options.gate_softcap) * torch.sigmoid(gate)
    else:
        gate = act(gate) if alpha == 1.0 else act(gate * alpha) / alpha
    if options.up_softcap is not None:
        up = options.up_softcap * torch.tanh(up / options.up_softcap)
    return (gate * (up + options.up_offset)).to(z.dtype)
