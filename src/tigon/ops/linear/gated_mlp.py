"""A gated MLP that keeps only its input, and computes a tile of tokens at a time: y = (act(x Wgᵀ) · x Wuᵀ) Wdᵀ.

Gate, up and their product are the widest activations of a transformer layer, 3.5 times the hidden width each in Llama.
The backward pass computes gate and up again, tile by tile, which adds two matrix products to the step's nine. Only one
tile's gate and up exist at a time, however long the sequence. The weights' gradients are summed over the tiles in fp32
and rounded once.

Source: the unit, Shazeer 2020, https://arxiv.org/abs/2002.05202; computing again in the backward pass, Chen et al.
2016, https://arxiv.org/abs/1604.06174.
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

# Tensors of a tile that are alive at once in the backward pass: gate, up, and the product's gradient.
HELD = 3


# Names that the function had before it took layers: an old keyword gets a sentence that says where the value goes now.
HOMES = {
    f"{layer}_{part}": f"{layer}=({layer}_weight, {layer}_bias)"
    for layer in ("gate", "up", "down")
    for part in ("weight", "bias")
}


def gated_mlp(
    x: Tensor, gate: Layer, up: Layer | None, down: Layer, *, act: Act = "silu", tile_bytes: int | None = None,
    **unknown: NoReturn,
) -> Tensor:  # fmt: skip
    """down(act(gate(x)) · up(x)) of three linear layers, keeping x alone.

    Args:
        x: (..., H).
        gate: a weight (N, H), a pair of it and a bias (N,), or a `torch.nn.Linear`. Where up is None it has 2N rows, of
            gate and up one after the other.
        up: likewise, (N, H); or None.
        down: likewise, (M, N).
        act: a name in `tigon.ops.acts`: "silu", "gelu_tanh", "gelu", "relu", "relu2" (the square of relu) or "sigmoid".
        tile_bytes: of gate, up and one gradient of their width, together. By default TIGON_CHUNK_BYTES, else 1 GiB
            (32 MiB on a CPU).
    All tensors have x's dtype; under autocast they are cast as `F.linear` casts them.
    Returns: (..., M) in x's dtype.
    Raises: ValueError for shapes, dtypes or an act that do not fit.

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
    # Autocast does not see into the operator, so what F.linear would cast is cast here.
    dtype = autocast_dtype(device)
    if dtype is not None and x.dtype != torch.float64:
        cast = [t if t is None else t.to(dtype) for t in tensors]
        # The reference's F.linear inside must not look at the operands a second time.
        with torch.autocast(autocast_device(device), enabled=False):
            return _checked(*cast, act, tile_bytes)  # type: ignore[arg-type,call-arg]
    return _checked(*tensors, act, tile_bytes)


def _checked(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, down_weight: Tensor, gate_bias: Tensor | None,
    up_bias: Tensor | None, down_bias: Tensor | None, act: str, tile_bytes: int | None,
) -> Tensor:  # fmt: skip
    if not x.dtype.is_floating_point or x.dim() == 0:
        raise ValueError(f"gated_mlp: x must be (..., H) floats, got {tuple(x.shape)} {x.dtype}.")
    H, rows = x.shape[-1], gate_weight.shape[0] if gate_weight.dim() == 2 else -1
    if up_weight is None and rows % 2:
        raise ValueError(f"gated_mlp: gate must be (2N, {H}) where up is None, got {tuple(gate_weight.shape)}.")
    # Checked to be even above: a packed gate holds N rows of gate and N of up.
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
    # The answer is the same without the kernels, and the memory is not: autograd then keeps gate, up and their product
    # whole.
    if not use_triton(*tensors):
        return gated_mlp_reference(*tensors, act)
    # The budget is a number from here on: the operator's schema has no environment to read, and both passes must cut
    # alike.
    return _gated_mlp(*tensors, act, chunk_budget(x.device, tile_bytes))


def is_one_tile(x: Tensor, width: int) -> bool:
    """Whether gate and up of all tokens, and a gradient of their width, fit the budget."""
    # By the rule of `chunk_rows`: what fits is one tile there.
    tokens = x.numel() // max(1, x.shape[-1])
    return tokens * HELD * width * x.element_size() <= chunk_budget(x.device)


def gated_mlp_reference(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, down_weight: Tensor, gate_bias: Tensor | None,
    up_bias: Tensor | None, down_bias: Tensor | None, act: str,
) -> Tensor:  # fmt: skip
    gate = F.linear(x, gate_weight, gate_bias)
    up = None if up_weight is None else F.linear(x, up_weight, up_bias)
    # All activations whole, and kept by autograd: the specification, and the path without kernels.
    return F.linear(gated_reference(gate, up, act), down_weight, down_bias)


# --------------------------------------------------------------------------------------------------------- launches


def _tiles(x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, budget: int) -> list[slice]:
    N = gate_weight.shape[0] if up_weight is not None else gate_weight.shape[0] // 2
    # Both passes take the tiles of the backward pass, which holds the most. Tiles are multiples of 128 rows, the tile
    # of the products.
    rows = chunk_rows(x.shape[0], HELD * N * x.element_size(), budget)
    return [slice(start, min(start + rows, x.shape[0])) for start in range(0, x.shape[0], rows)]


def _gate_and_up(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, gate_bias: Tensor | None, up_bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    return F.linear(x, gate_weight, gate_bias), None if up_weight is None else F.linear(x, up_weight, up_bias)


def _gated_mlp_fwd_fake(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, down_weight: Tensor, gate_bias: Tensor | None,
    up_bias: Tensor | None, down_bias: Tensor | None, act: str, budget: int,
) -> Tensor:  # fmt: skip
    # Shapes alone: the number of tiles is a matter of the launch, and not of the graph.
    return x.new_empty((*x.shape[:-1], down_weight.shape[0]))


@launcher(
    "(Tensor x, Tensor gate_weight, Tensor? up_weight, Tensor down_weight, Tensor? gate_bias, Tensor? up_bias,"
    " Tensor? down_bias, str act, int budget) -> Tensor",
    _gated_mlp_fwd_fake,
)
def _gated_mlp_fwd(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, down_weight: Tensor, gate_bias: Tensor | None,
    up_bias: Tensor | None, down_bias: Tensor | None, act: str, budget: int,
) -> Tensor:  # fmt: skip
    rows = x.reshape(-1, x.shape[-1])
    y = x.new_empty((*x.shape[:-1], down_weight.shape[0]))
    # A view of the result: each tile's last product writes to its rows, and no tile of y is copied.
    out = y.view(-1, down_weight.shape[0])
    for tile in _tiles(rows, gate_weight, up_weight, budget):
        # The next tile's product takes this one's memory from the allocator: no activation of full length exists.
        product = _gated_fwd(*_gate_and_up(rows[tile], gate_weight, up_weight, gate_bias, up_bias), act, 1.0, 1.0)
        # In both branches the result goes straight to its rows; addmm reads the bias in its epilogue.
        if down_bias is None:
            torch.mm(product, down_weight.t(), out=out[tile])
        else:
            torch.addmm(down_bias, product, down_weight.t(), out=out[tile])
    return y


def _gated_mlp_bwd_fake(
    dy: Tensor, x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, down_weight: Tensor,
    gate_bias: Tensor | None, up_bias: Tensor | None, down_bias: Tensor | None, act: str, budget: int, need: list[bool],
) -> list[Tensor]:  # fmt: skip
    tensors = (x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    # An empty tensor where no gradient is wanted: the schema returns tensors, and never None.
    return [
        x.new_empty(t.shape if n and t is not None else 0) for n, t in zip(need, tensors, strict=True)
    ]  # fmt: skip


@launcher(
    "(Tensor dy, Tensor x, Tensor gate_weight, Tensor? up_weight, Tensor down_weight, Tensor? gate_bias,"
    " Tensor? up_bias, Tensor? down_bias, str act, int budget, bool[] need) -> Tensor[]",
    _gated_mlp_bwd_fake,
)
def _gated_mlp_bwd(
    dy: Tensor, x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, down_weight: Tensor,
    gate_bias: Tensor | None, up_bias: Tensor | None, down_bias: Tensor | None, act: str, budget: int,
    need: list[bool],
) -> list[Tensor]:  # fmt: skip
    need_x, need_gate, need_up, need_down, need_gate_bias, need_up_bias, need_down_bias = need
    # A copy only where x or dy is not dense; tiles are then views of rows.
    rows, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, down_weight.shape[0])
    # Uninitialised: every token is in one tile, which writes its row.
    dx = torch.empty_like(rows) if need_x else x.new_empty(0)
    tiles = _tiles(rows, gate_weight, up_weight, budget)
    sums = [
        # wide: with one tile there is nothing to add up, and the product rounds once to the weight's dtype by itself.
        _Sum(weight, wanted and weight is not None, wide=len(tiles) > 1)
        for weight, wanted in ((gate_weight, need_gate), (up_weight, need_up), (down_weight, need_down))
    ]
    gate_sum, up_sum, down_sum = sums
    # Sums over tokens of half precision are taken in fp32, and rounded once at the end.
    acc = torch.promote_types(x.dtype, torch.float32)
    biases = [
        None if not wanted or bias is None else torch.zeros_like(bias, dtype=acc)
        for bias, wanted in ((gate_bias, need_gate_bias), (up_bias, need_up_bias))
    ]
    # Whether anything but down wants a gradient. If not, neither the product's gradient nor the kernel's backward pass
    # is needed.
    above = any((need_x, need_gate, need_up, need_gate_bias, need_up_bias))
    for tile in tiles:
        # Views. What a tile allocates below is freed, or overwritten, before the next tile's products ask for memory.
        rows_here, dy_here = rows[tile], dy[tile]
        # The two products that tiling costs. Between forward and backward pass nothing of this width exists.
        gate, up = _gate_and_up(rows_here, gate_weight, up_weight, gate_bias, up_bias)
        if above:
            # scratch: first the product's gradient, then the product itself, which dW of down needs.
            scratch = torch.mm(dy_here, down_weight)
            # In place: an element of gate and up, and of the product's gradient, is read before it is written.
            gated_backward(scratch, gate, up, act, 1.0, 1.0, gate, up, scratch if need_down else None)
        # Only down's weight is trained: the forward kernel makes the product, and its gradient is left out.
        elif need_down:
            scratch = _gated_fwd(gate, up, act, 1.0, 1.0)
        if need_down:
            # dW of down = dyᵀ product. scratch holds the product now, and is free for the next tile afterwards.
            down_sum.add(dy_here, scratch)
        if need_x:
            # gate and up hold their gradients by now. The second product adds to the first in its epilogue; dx is
            # rounded in between.
            torch.mm(gate, gate_weight, out=dx[tile])
            if up is not None and up_weight is not None:
                dx[tile].addmm_(up, up_weight)
        # dW = gradᵀ x of each tile, added in the product's epilogue to the sum.
        for grad, total, bias in ((gate, gate_sum, biases[0]), (up, up_sum, biases[1])):
            if grad is not None:
                total.add(grad, rows_here)
                if bias is not None:
                    # No product gives this sum, so each tile's gradient is read once more.
                    bias += grad.sum(0, dtype=bias.dtype)
    return [
        # In the order of the operator's tensors, as `need` is.
        dx.view(x.shape) if need_x else dx, *(total.result(x) for total in sums),
        *(x.new_empty(0) if b is None else b.to(x.dtype) for b in biases),
        # Over all tokens at once: dy exists whole in any case.
        dy.sum(0) if need_down_bias and down_bias is not None else x.new_empty(0),
    ]  # fmt: skip


class _Sum:
    """The gradient of one weight: one product if there is one tile, else an fp32 sum over tiles, rounded at the end."""

    def __init__(self, weight: Tensor | None, wanted: bool, wide: bool) -> None:
        self.wanted = wanted and weight is not None
        self.first = True
        if weight is not None:
            # Kept apart: a wide dw without a second place is fp32, and says nothing about the result's dtype.
            self.dtype = weight.dtype
            # Budget 0: a wide sum always lives inside its result, and takes no memory beyond an fp32 sum's.
            self.dw, self.more = weight_gradient.places(weight, weight.dtype, wide, 0, self.wanted)

    def add(self, grad: Tensor, x: Tensor) -> None:
        if self.wanted:
            # The first tile overwrites, which spares a pass that zeroes the sum.
            weight_gradient.accumulate(weight_gradient.parts(self.dw, self.more), grad, x, self.first)
            self.first = False

    def result(self, x: Tensor) -> Tensor:
        if not self.wanted:
            return x.new_empty(0)
        if self.first:  # x has no tokens, and the places are uninitialised
            return torch.zeros_like(self.dw, dtype=self.dtype)
        # With a second place the sum lives inside the result, and is narrowed there. Else .to() copies, or does nothing
        # where one tile has rounded.
        return weight_gradient.narrow_sum(self.dw, self.more) if self.more.numel() else self.dw.to(self.dtype)


# --------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.act, ctx.budget = inputs
    # x and the parameters: under a checkpoint or offloading the hooks see no other tensor of this layer.
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    # Nothing used the result: no tile is computed again.
    if dy is None:
        return (None,) * 9
    saved = ctx.saved_tensors
    # An absent bias has a place in needs_input_grad too.
    need = [n and t is not None for n, t in zip(ctx.needs_input_grad[:7], saved, strict=True)]
    grads = _gated_mlp_bwd(dy, *saved, ctx.act, ctx.budget, need)
    # None for act and budget, which are no tensors.
    return *(g if n else None for g, n in zip(grads, need, strict=True)), None, None


_gated_mlp = differentiable(_gated_mlp_fwd, _setup_context, _backward)
