"""Linear layers with one input as an autograd node, all products in FP8: yᵢ = x Wᵢᵀ + bᵢ.

    forward     q, sx = rows of x, or of its norm as they are;  y = q Wᵀ, one product for all layers
    backward    qd, sd = rows of dy₁, dy₂, … side by side;  dx = qd W;  dW = c · qdᵀ x' (see `recipe`);  dbᵢ = Σ dyᵢ
    saved       for dW x and sx, or for a norm what it is computed from: its input, 1/rms and weight; for dx the weights

No copy of an activation is saved. A result without a gradient takes no part in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import add_anchor, load_tensors, make_function, save_tensors, view_rows
from tigon.ops.fp8.columns import fold_scales, to_columns, transpose_rows
from tigon.ops.fp8.normed import Normed, norm_rows_again
from tigon.ops.fp8.products import multiply_columns, multiply_rows
from tigon.ops.fp8.recipe import Norm, Rows
from tigon.ops.fp8.rows import quantize_rows
from tigon.ops.fp8.store import JointWeight

Hooks = tuple[Any, Any] | None
BESIDE = 3  # tensors that `quantize_rows` reads side by side


@dataclass(frozen=True)
class Products:
    """How products are computed.

    dw: weight gradients in "fp8" or "bf16". is_exact: sums in fp32, and not in the tensor cores' narrower accumulator.
    """

    dw: Literal["fp8", "bf16"] = "fp8"
    is_exact: bool = False

    def __post_init__(self) -> None:
        if self.dw not in ("fp8", "bf16"):
            raise ValueError(f'Products: dw must be "fp8" or "bf16", got {self.dw!r}.')


def multiply(
    source: Tensor | Normed, weights: JointWeight, parameters: Sequence[Tensor], biases: Sequence[Tensor | None],
    options: Products, saved_by: Hooks = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """x Wᵢᵀ + bᵢ for each weight.

    Args:
        source: x (..., K) in bf16, fp16 or fp32; or the norm from `norm_to_rows`.
        weights: the copies of the parameters.
        parameters: (Nᵢ, K), bf16, fp16 or fp32. K and every Nᵢ are multiples of 16.
        biases: (Nᵢ,) or None, for each weight.
        saved_by: a checkpoint's hooks (pack, unpack), used to save before the product.
    Returns: (..., Nᵢ) bf16 for each weight, parts of one tensor's rows.
    """
    carrier, normed = (source.handle, source) if isinstance(source, Normed) else (source, None)
    saved_by = saved_by if torch.is_grad_enabled() else None
    tensors = (*parameters, *biases)
    ys = _fp8_linear(carrier, normed, weights, options, saved_by, len(parameters), *tensors)
    return tuple(ys[: len(parameters)])


def _fp8_linear_fwd(
    ctx: Any, carrier: Tensor, normed: Normed | None, weights: JointWeight, options: Products, saved_by: Hooks,
    count: int, *tensors: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    ctx.set_materialize_grads(False)
    parameters, biases = tensors[:count], tensors[count:]
    ctx.options, ctx.copies, ctx.count = options, weights.read(parameters), count
    ctx.shape, ctx.dtypes = carrier.shape, [None if t is None else t.dtype for t in tensors]
    rows = quantize_rows(view_rows(carrier)) if normed is None else normed.rows
    needs = ctx.needs_input_grad
    saved = [*save_input(ctx, carrier, normed, rows, needed=True in needs[6 : 6 + count])]
    saved += parameters if needs[0] else [None] * count
    save_tensors(ctx, saved_by, *saved)
    y = multiply_rows(
        rows, ctx.copies.read_rows(parameters), join_biases(parameters, biases), is_exact=options.is_exact
    )
    anchor = () if saved_by is not None else anchor_unsaved(ctx, saved, normed, (carrier, *(None,) * 5, *tensors))
    sizes = [len(p) for p in parameters]
    # Parts without a view's history, so that callers may write to them.
    parts = [y] if count == 1 else [*torch.unsafe_split_with_sizes(y, sizes, 1)]
    if count > 1 and True in needs:
        # Attention keeps the values as they are, and queries and keys rotated, in new memory: a view of y would keep
        # the memory of all three.
        parts[-1] = parts[-1].clone()
    return *(reshape_rows(part, carrier.shape) for part in parts), *anchor


def _backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
    count, needs, options = ctx.count, ctx.needs_input_grad, ctx.options
    loaded = load_tensors(ctx)
    saved, parameters = read_input(ctx, loaded), loaded[4 : 4 + count]
    present = [i for i in range(count) if given[i] is not None]
    dys = [view_rows(dy) for dy in given[:count] if dy is not None]
    wanted = [needs[6 + i] for i in present]
    rows = None
    if needs[0] or (True in wanted and options.dw == "fp8"):
        rows = quantize_rows(*dys) if len(dys) <= BESIDE else quantize_rows(torch.cat(dys, 1))
    dx = None
    if needs[0] and rows is not None:
        dx = multiply_rows(
            rows, ctx.copies.read_transposed([parameters[i] for i in present]), is_exact=options.is_exact
        )
        dx = reshape_rows(dx, ctx.shape)
    gradients: list[Tensor | None] = [None] * (2 * count)
    if True in wanted:
        dtypes = [ctx.dtypes[i] for i in present]
        if options.dw == "fp8" and rows is not None:
            sizes = [dy.shape[1] for dy in dys]
            found = differentiate_weights(rows, saved, sizes, wanted, dtypes, options.is_exact)
        else:
            x = saved.again()
            found = [
                torch.mm(dy.to(x.dtype).t(), x).to(dtype) if w else None
                for dy, w, dtype in zip(dys, wanted, dtypes, strict=True)
            ]
        for i, dw in zip(present, found, strict=True):
            gradients[i] = dw
    for i, dy in zip(present, dys, strict=True):
        if needs[6 + count + i]:
            gradients[count + i] = dy.sum(0, dtype=ctx.dtypes[count + i])
    return dx, None, None, None, None, None, *gradients


_fp8_linear = make_function(_fp8_linear_fwd, _backward)


# ------------------------------------------------------------------------------------- shared with the gated MLP's node


class Input(NamedTuple):
    """An input for weight gradients: x, or a norm's input and how to compute the norm; and the rows' scales."""

    x: Tensor
    norm: Norm | None
    eps: float
    scale: Tensor

    def columns(self, factor: Tensor) -> Tensor:
        return to_columns(view_rows(self.x), factor, self.norm)

    def again(self) -> Tensor:
        """The rows (M, K) in bf16."""
        x = view_rows(self.x)
        return x.to(torch.bfloat16) if self.norm is None else norm_rows_again(x, self.norm, self.eps)


def save_input(
    ctx: Any, carrier: Tensor, normed: Normed | None, rows: Rows, *, needed: bool
) -> tuple[Tensor | None, ...]:
    """The four tensors that `read_input` reads first; None unless needed."""
    ctx.norm = None if normed is None else (normed.norm.offset, normed.norm.cast, normed.eps)
    if not needed:
        return (None,) * 4
    if normed is None:
        return carrier, None, None, rows.scale
    return normed.total, normed.norm.rstd, normed.norm.weight, rows.scale


def read_input(ctx: Any, loaded: Sequence[Any]) -> Input:
    x, rstd, weight, scale = loaded[:4]
    if ctx.norm is None:
        return Input(x, None, 0.0, scale)
    offset, cast, eps = ctx.norm
    return Input(x, Norm(rstd, weight, offset, cast), eps, scale)


def anchor_unsaved(
    ctx: Any, saved: Sequence[Tensor | None], normed: Normed | None, inputs: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """`add_anchor` for the inputs that no saved tensor leads to. inputs: a tensor or None for each argument."""
    unsaved = [i for i, t in enumerate(inputs) if t is not None and not any(t is other for other in saved)]
    # A norm's handle and its stream are results of the same node.
    if normed is not None and saved[0] is normed.total and normed.total.grad_fn is normed.handle.grad_fn:
        unsaved.remove(0)
    return add_anchor(ctx, inputs, tuple(unsaved)) if unsaved else ()


def reshape_rows(rows: Tensor, shape: torch.Size) -> Tensor:
    """rows (M, N) as (..., N), with the leading dimensions of shape. Not a view for autograd."""
    if len(shape) == 2:
        return rows
    reshaped: Tensor = torch.ops.aten._unsafe_view(rows, (*shape[:-1], rows.shape[1]))
    return reshaped


def join_biases(parameters: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    """The biases of stacked weights: one tensor, with zeros for None."""
    if all(bias is None for bias in biases):
        return None
    if len(biases) == 1:
        return biases[0]
    return torch.cat(
        [p.new_zeros(len(p)) if bias is None else bias for p, bias in zip(parameters, biases, strict=True)]
    )


def differentiate_weights(
    rows: Rows, saved: Input, sizes: Sequence[int], wanted: Sequence[bool], dtypes: Sequence[torch.dtype],
    is_exact: bool,
) -> list[Tensor | None]:  # fmt: skip
    """dyᵀ x for stacked weights of so many rows each: gradients' bytes transposed, by x with the scales in it."""
    factor, c = fold_scales(rows.scale, saved.scale)
    columns = saved.columns(factor)
    wide = transpose_rows(rows.data)
    if all(wanted) and len({*dtypes}) == 1:
        return [*multiply_columns(wide, columns, c, dtypes[0], is_exact=is_exact).split([*sizes])]
    return [
        multiply_columns(part, columns, c, dtype, is_exact=is_exact) if w else None
        for part, w, dtype in zip(wide.split([*sizes]), wanted, dtypes, strict=True)
    ]
