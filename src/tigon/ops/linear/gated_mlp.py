"""A gated MLP that saves only its input and computes a tile of tokens at a time: y = (act(x Wgᵀ) · x Wuᵀ) Wdᵀ.

Gate, up and their product are the widest activations in a transformer layer, each 3.5 times the hidden width in Llama.
The backward pass recomputes gate and up tile by tile, which adds two matrix products to the step's nine. Only a single
tile's gate and up exist at a time, however long the sequence. Weight gradients are summed over the tiles in fp32 and
rounded once.

Source: the unit, Shazeer 2020, https://arxiv.org/abs/2002.05202; recomputation in the backward pass, Chen et al. 2016,
https://arxiv.org/abs/1604.06174.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import (
    Layer,
    autocast_device,
    autocast_dtype,
    check_tensors,
    differentiable,
    launcher,
    unknown_keyword,
    use_triton,
    weight_and_bias,
)
from tigon.ops.acts import Act, checked_act
from tigon.ops.gated import _gated_fwd, gated_backward, gated_reference
from tigon.ops.linear import weight_gradient
from tigon.ops.linear.chunk_size import chunk_budget, chunk_rows

# Per-tile tensors alive at once in the backward pass: gate, up, and the product's gradient.
HELD = 3


HOMES = {
    f"{layer}_{part}": f"{layer}=({layer}_weight, {layer}_bias)"
    for layer in ("gate", "up", "down")
    for part in ("weight", "bias")
}


def gated_mlp(
    x: Tensor, gate: Layer, up: Layer | None, down: Layer, *, act: Act = "silu", tile_bytes: int | None = None,
    **unknown: NoReturn,
) -> Tensor:  # fmt: skip
    """down(act(gate(x)) · up(x)) for three linear layers, saving only x.

    Args:
        x: (..., H).
        gate: a weight (N, H), a pair (weight, bias (N,)), or a `torch.nn.Linear`. Where up is None gate has 2N rows:
            gate's, then up's.
        up: likewise, (N, H); or None.
        down: likewise, (M, N).
        act: a name in `tigon.ops.acts`: "silu", "gelu_tanh", "gelu", "relu", "relu2" (relu squared) or "sigmoid".
        tile_bytes: bytes per tile for gate, up and a gradient with their width, together. By default TIGON_CHUNK_BYTES,
            else 1 GiB (32 MiB on a CPU).

    All tensors have x's dtype; under autocast they are cast as in `F.linear`.

    Returns: (..., M) in x's dtype.

    Raises: ValueError for mismatched shapes or dtypes, or an unknown act.

    Replaces::

        y = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    """
    if unknown:
        raise unknown_keyword("gated_mlp", unknown, HOMES)
    checked_act("gated_mlp", act)
    check_tensors("gated_mlp", x=x)
    gate_weight, gate_bias = weight_and_bias("gated_mlp", "gate", gate)
    up_weight, up_bias = (None, None) if up is None else weight_and_bias("gated_mlp", "up", up)
    down_weight, down_bias = weight_and_bias("gated_mlp", "down", down)
    tensors = (x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    device = x.device.type
    # Autocast does not see into the operator, so the casts that F.linear would make are made here.
    dtype = autocast_dtype(device)
    if dtype is not None and x.dtype != torch.float64:
        cast = [t if t is None else t.to(dtype) for t in tensors]
        with torch.autocast(autocast_device(device), enabled=False):
            return _run(*cast, act, tile_bytes)  # type: ignore[arg-type,call-arg]
    return _run(*tensors, act, tile_bytes)


def _run(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, down_weight: Tensor, gate_bias: Tensor | None,
    up_bias: Tensor | None, down_bias: Tensor | None, act: str, tile_bytes: int | None,
) -> Tensor:  # fmt: skip
    if not x.dtype.is_floating_point or x.dim() == 0:
        raise ValueError(f"gated_mlp: x must be (..., H) floats, got {tuple(x.shape)} {x.dtype}.")
    H, rows = x.shape[-1], gate_weight.shape[0] if gate_weight.dim() == 2 else -1
    if up_weight is None and rows % 2:
        raise ValueError(f"gated_mlp: gate must be (2N, {H}) where up is None, got {tuple(gate_weight.shape)}.")
    N = rows if up_weight is not None else rows // 2
    M = down_weight.shape[0]
    for name, t, shape in (
        ("gate must be", gate_weight, (rows, H)), ("gate must have a bias", gate_bias, (rows,)),
        ("up must be", up_weight, (N, H)), ("up must have a bias", up_bias, (N,)),
        ("down must be", down_weight, (M, N)), ("down must have a bias", down_bias, (M,)),
    ):  # fmt: skip
        if t is not None and (tuple(t.shape) != shape or t.dtype != x.dtype):
            raise ValueError(
                f"gated_mlp: {name} {shape} {x.dtype}, to fit x {tuple(x.shape)}, got {tuple(t.shape)} {t.dtype}."
            )
    tensors = (x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    if not use_triton(*tensors):
        return gated_mlp_reference(*tensors, act)
    # Resolve the budget here: the operator must not depend on the environment, and both passes must use the same tiles.
    return _gated_mlp(*tensors, act, chunk_budget(x.device, tile_bytes))


def is_one_tile(x: Tensor, width: int) -> bool:
    """Whether gate and up for all tokens, and a gradient with their width, fit the budget."""
    tokens = x.numel() // max(1, x.shape[-1])
    return tokens * HELD * width * x.element_size() <= chunk_budget(x.device)


def gated_mlp_reference(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, down_weight: Tensor, gate_bias: Tensor | None,
    up_bias: Tensor | None, down_bias: Tensor | None, act: str,
) -> Tensor:  # fmt: skip
    gate = F.linear(x, gate_weight, gate_bias)
    up = None if up_weight is None else F.linear(x, up_weight, up_bias)
    return F.linear(gated_reference(gate, up, act), down_weight, down_bias)


# --------------------------------------------------------------------------------------------------------- launches


def _tiles(x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, budget: int) -> list[slice]:
    N = gate_weight.shape[0] if up_weight is not None else gate_weight.shape[0] // 2
    rows = chunk_rows(x.shape[0], HELD * N * x.element_size(), budget)
    return [slice(start, min(start + rows, x.shape[0])) for start in range(0, x.shape[0], rows)]


def _gate_and_up(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, gate_bias: Tensor | None, up_bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    return F.linear(x, gate_weight, gate_bias), None if up_weight is None else F.linear(x, up_weight, up_bias)


def _gated_mlp_fwd_fake(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, down_weight: Tensor, *_: Any,
) -> Tensor:  # fmt: skip
    return x.new_empty((*x.shape[:-1], down_weight.shape[0]))


@launcher(_gated_mlp_fwd_fake)
def _gated_mlp_fwd(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, down_weight: Tensor, gate_bias: Tensor | None,
    up_bias: Tensor | None, down_bias: Tensor | None, act: str, budget: int,
) -> Tensor:  # fmt: skip
    rows = x.reshape(-1, x.shape[-1])
    y = x.new_empty((*x.shape[:-1], down_weight.shape[0]))
    out = y.view(-1, down_weight.shape[0])
    for tile in _tiles(rows, gate_weight, up_weight, budget):
        product = _gated_fwd(*_gate_and_up(rows[tile], gate_weight, up_weight, gate_bias, up_bias), act, 1.0, 1.0)
        if down_bias is None:
            torch.mm(product, down_weight.t(), out=out[tile])
        else:
            torch.addmm(down_bias, product, down_weight.t(), out=out[tile])
    return y


def _gated_mlp_bwd_fake(dy: Tensor, need: list[bool], x: Tensor, *others: Any) -> list[Tensor]:
    parameters = (x, *others)[: len(need)]
    return [x.new_empty(t.shape if n and t is not None else 0) for n, t in zip(need, parameters, strict=True)]


@launcher(_gated_mlp_bwd_fake, rest="str act, int budget")
def _gated_mlp_bwd(
    dy: Tensor, need: list[bool], x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, down_weight: Tensor,
    gate_bias: Tensor | None, up_bias: Tensor | None, down_bias: Tensor | None, *options: Any,
) -> list[Tensor]:  # fmt: skip
    act, budget = options
    need_x, need_gate, need_up, need_down, need_gate_bias, need_up_bias, need_down_bias = need
    rows, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, down_weight.shape[0])
    # Uninitialised: every token is in exactly one tile, which writes its row.
    dx = torch.empty_like(rows) if need_x else x.new_empty(0)
    tiles = _tiles(rows, gate_weight, up_weight, budget)
    sums = [
        _Sum(weight, wanted and weight is not None, wide=len(tiles) > 1)
        for weight, wanted in ((gate_weight, need_gate), (up_weight, need_up), (down_weight, need_down))
    ]
    gate_sum, up_sum, down_sum = sums
    # Half-precision sums over tokens accumulate in fp32 and are rounded once at the end.
    acc = torch.promote_types(x.dtype, torch.float32)
    biases = [
        None if not wanted or bias is None else torch.zeros_like(bias, dtype=acc)
        for bias, wanted in ((gate_bias, need_gate_bias), (up_bias, need_up_bias))
    ]
    above = any((need_x, need_gate, need_up, need_gate_bias, need_up_bias))
    for tile in tiles:
        rows_here, dy_here = rows[tile], dy[tile]
        gate, up = _gate_and_up(rows_here, gate_weight, up_weight, gate_bias, up_bias)
        if above:
            scratch = torch.mm(dy_here, down_weight)
            # In place: each element is read before being overwritten.
            gated_backward(scratch, gate, up, act, 1.0, 1.0, gate, up, scratch if need_down else None)
        elif need_down:
            scratch = _gated_fwd(gate, up, act, 1.0, 1.0)
        if need_down:
            down_sum.add(dy_here, scratch)
        if need_x:
            # gate and up now hold their gradients. The second product accumulates onto the first in the epilogue, with
            # dx rounded in between.
            torch.mm(gate, gate_weight, out=dx[tile])
            if up is not None and up_weight is not None:
                dx[tile].addmm_(up, up_weight)
        for grad, total, bias in ((gate, gate_sum, biases[0]), (up, up_sum, biases[1])):
            if grad is not None:
                total.add(grad, rows_here)
                if bias is not None:
                    bias += grad.sum(0, dtype=bias.dtype)
    return [
        dx.view(x.shape) if need_x else dx, *(total.result(x) for total in sums),
        *(x.new_empty(0) if b is None else b.to(x.dtype) for b in biases),
        dy.sum(0) if need_down_bias and down_bias is not None else x.new_empty(0),
    ]  # fmt: skip


class _Sum:
    """A weight's gradient: a single product for a single tile, else an fp32 sum over tiles, rounded at the end."""

    def __init__(self, weight: Tensor | None, wanted: bool, wide: bool) -> None:
        self.wanted = wanted and weight is not None
        self.first = True
        if weight is not None:
            # Stored separately: a wide dw without a second part is fp32 and does not show the result's dtype.
            self.dtype = weight.dtype
            self.dw, self.more = weight_gradient.places(weight, weight.dtype, wide, 0, self.wanted)

    def add(self, grad: Tensor, x: Tensor) -> None:
        if self.wanted:
            weight_gradient.accumulate(weight_gradient.parts(self.dw, self.more), grad, x, self.first)
            self.first = False

    def result(self, x: Tensor) -> Tensor:
        if not self.wanted:
            return x.new_empty(0)
        if self.first:  # x has no tokens, so the sums are uninitialised
            return torch.zeros_like(self.dw, dtype=self.dtype)
        return weight_gradient.narrow_sum(self.dw, self.more) if self.more.numel() else self.dw.to(self.dtype)


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.act, ctx.budget = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    need = [n and t is not None for n, t in zip(ctx.needs_input_grad[:7], saved, strict=True)]
    grads = _gated_mlp_bwd(dy, need, *saved, ctx.act, ctx.budget)
    return tuple(g if n else None for g, n in zip(grads, need, strict=True))


_gated_mlp = differentiable(_gated_mlp_fwd, _setup_context, _backward)
