"""Row-wise Adagrad for embedding tables: one fp32 number per row, and only rows with a gradient are touched.

    g ← g + weight_decay · w
    s ← s + mean(g²)                          over the row's columns
    w ← w − lr · g / (√s + eps)

Source: Duchi et al. 2011, https://jmlr.org/papers/v12/duchi11a.html; by rows: Khudia et al. 2021, FBGEMM,
https://arxiv.org/abs/2101.05615, there EXACT_ROWWISE_ADAGRAD
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tigon.kernels import Plan, cdiv, do_not_specialize, jit, launch, next_power_of_2, tl, use_triton
from tigon.ops.embedding_bag.rows import coalesce_rows
from tigon.training.perturb import triton_dtype, upload_table, use_device

WIDEST = 8192  # the most columns per row that a program holds


class RowAdagrad(Optimizer):
    """Adagrad with one accumulator per row, for two-dimensional parameters.

    Args:
        params: tables (V, D) in any float dtype, or groups of tables, each with its own options.
        lr: the learning rate.
        eps: added to the accumulator's square root.
        weight_decay: times w, added to the gradient in touched rows. Other rows do not decay.
        initial_accumulator_value: for every row.
    Raises: ValueError for a parameter that is not a table, and for options that are negative or not finite.

        optimizer = tigon.training.RowAdagrad([table], lr=0.05)
        tigon.embedding_bag(values, table, offsets, grad="rows").square().sum().backward()
        optimizer.step()

    **Touched rows** are rows with a nonzero gradient. With a sparse gradient, as from `embedding_bag(grad="rows")` or
    `nn.Embedding(sparse=True)`, only those table rows are read and written; repeated rows are summed first, in fp32. A
    dense gradient is read whole. Both give the same bits.

    **Rounding**: a step is computed in fp32 (fp64 for fp64), including the state, and rounded once to the parameter's
    dtype, to the nearest. A step below half a unit in the last place of a weight is lost, in bf16 1/512 of the weight
    or less: keep tables in fp32 where learning rates are small.

    A step is one launch for all tables in a group with the same dtypes and width, and waits for no device. The state is
    `state[p]["sum"]`, (V,) fp32 (fp64 for fp64), in state_dict as in torch's optimizers.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.01, *, eps: float = 1e-8, weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "eps": eps, "weight_decay": weight_decay, "initial_accumulator_value": initial_accumulator_value,
        }  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with its own options.

        Args:
            param_group: {"params": tables, "lr": …}, as in torch.
        Raises: ValueError as for the optimizer.
        """
        for name in ("lr", "eps", "weight_decay", "initial_accumulator_value"):
            value = param_group.get(name, self.defaults[name])
            if not 0 <= value < float("inf"):
                raise ValueError(f"RowAdagrad: {name} must be at least 0 and finite, got {value}.")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            if p.dim() != 2 or not p.is_floating_point():
                self.param_groups.pop()
                raise ValueError(f"RowAdagrad: params must be float tables (V, D), got {tuple(p.shape)} {p.dtype}.")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved optimizer's state and options; accumulators stay fp32 for 16-bit tables.

        Args:
            state_dict: from a `RowAdagrad` with the same numbers of groups and tables.
        """
        sums = {i: state["sum"] for i, state in state_dict["state"].items()}
        super().load_state_dict(state_dict)
        # torch casts state to its parameter's dtype.
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(saved, params, strict=True):
            if i in sums:
                self.state[p]["sum"] = sums[i].to(p.device, _state_dtype(p), copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient.

        Args:
            closure: () → the loss, called with gradients enabled, before the step.
        Returns: the closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            sums, rows, grads = [], [], []
            for p in given:
                if "sum" not in self.state[p]:
                    start = group["initial_accumulator_value"]
                    self.state[p]["sum"] = torch.full((p.shape[0],), start, dtype=_state_dtype(p), device=p.device)
                sums.append(self.state[p]["sum"])
                sparse = _rows_and_gradients(p.grad)
                rows.append(sparse[0])
                grads.append(sparse[1])
            row_adagrad(given, sums, rows, grads, group["lr"], group["eps"], group["weight_decay"])
        return loss


def _state_dtype(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)


def _rows_and_gradients(grad: Tensor) -> tuple[Tensor | None, Tensor]:
    """(rows, their gradients), without duplicate rows; (None, the gradient) where the gradient is dense."""
    if not grad.is_sparse:
        return None, grad
    if grad.is_coalesced():
        return grad.indices()[0], grad.values()
    indices, values = grad._indices()[0], grad._values()
    if not use_triton(values):
        exact = grad.to(torch.promote_types(grad.dtype, torch.float32)).coalesce()
        return exact.indices()[0], exact.values().to(grad.dtype)
    # `embedding_bag`'s sums for bags with a single row: in fp32, the same bits on every run.
    return coalesce_rows(indices, values, grad.shape[0])


def row_adagrad(
    params: list[Tensor], sums: list[Tensor], rows: list[Tensor | None], grads: list[Tensor], lr: float, eps: float,
    weight_decay: float,
) -> None:  # fmt: skip
    """Step each table: rows[i] (U,) int64 and grads[i] (U, D), or None and (V, D)."""
    groups: dict[Any, list[int]] = {}
    for i, (p, s, g) in enumerate(zip(params, sums, grads, strict=True)):
        if not g.numel():
            continue
        if not (use_triton(p, g) and s.dtype == torch.float32 and p.is_contiguous() and p.shape[1] <= WIDEST):
            row_adagrad_reference(p, s, rows[i], g, lr, eps, weight_decay)
            continue
        grads[i] = g.contiguous()
        aligned = not (p.data_ptr() | grads[i].data_ptr()) & 15
        groups.setdefault((p.device, p.dtype, g.dtype, p.shape[1], rows[i] is None, aligned), []).append(i)
    for (_, _, _, width, dense, aligned), members in groups.items():
        tables, states, given = ([of[i] for i in members] for of in (params, sums, grads))
        # A dense gradient has no row list; the kernel does not read this placeholder.
        at = [g if rows[i] is None else rows[i] for i, g in zip(members, given, strict=True)]
        _row_adagrad(tables, states, given, at, width, dense, aligned, lr, eps, weight_decay)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------- reference


def row_adagrad_reference(
    p: Tensor, s: Tensor, rows: Tensor | None, g: Tensor, lr: float, eps: float, weight_decay: float
) -> None:
    g = g.to(s.dtype)
    touched = (g != 0).any(1)
    old = p if rows is None else p[rows]
    w = old.to(s.dtype)
    g = g + weight_decay * w
    mean = torch.where(touched, g.square().mean(1), 0.0)
    total = (s if rows is None else s[rows]) + mean
    # A select: for a row without a gradient so far, 0 / (√0 + eps) is NaN where eps is 0.
    new = torch.where(touched[:, None], (w - (lr / (total.sqrt() + eps))[:, None] * g).to(p.dtype), old)
    if rows is None:
        s.copy_(total)
        p.copy_(new)
    else:
        s[rows], p[rows] = total, new


# ---------------------------------------------------------------------------------------------------------- kernels


# One launch for many tables. A program owns BLOCK_R gradient rows of one table, and all D ≤ BLOCK_N columns: the last
# table whose first block is not after this program. table_ptr holds T addresses each for weights, accumulators,
# gradients and row lists, then T row counts, then T first blocks. DENSE: gradient row i belongs to table row i, and the
# row list is not read. ALIGN: the common alignment of weights and gradients in bytes.
@jit
@do_not_specialize("T", "lr", "eps", "weight_decay")
def _row_adagrad_kernel(
    table_ptr, T, lr, eps, weight_decay, D, P: tl.constexpr, G: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr,
    DECAYS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tables = tl.arange(0, BLOCK_T)
    first = tl.load(table_ptr + 5 * T + tables, mask=tables < T, other=9223372036854775807)
    block = tl.program_id(0).to(tl.int64)
    t = tl.sum((first <= block).to(tl.int32), 0) - 1
    p_ptr = tl.multiple_of(tl.load(table_ptr + t).to(tl.pointer_type(P)), ALIGN)
    s_ptr = tl.load(table_ptr + T + t).to(tl.pointer_type(tl.float32))
    g_ptr = tl.multiple_of(tl.load(table_ptr + 2 * T + t).to(tl.pointer_type(G)), ALIGN)
    place = (block - tl.load(table_ptr + 5 * T + t)) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = place < tl.load(table_ptr + 4 * T + t)
    if DENSE:
        rows = place
    else:
        rows = tl.load(tl.load(table_ptr + 3 * T + t).to(tl.pointer_type(tl.int64)) + place, mask=inside, other=0)
    cols = tl.arange(0, BLOCK_N)
    columns = (cols < D)[None, :]
    # int64, as place and rows are: a table may have more than 2**31 numbers.
    g = tl.load(g_ptr + place[:, None] * D + cols[None, :], mask=inside[:, None] & columns, other=0.0).to(tl.float32)
    # NaN is not 0, so that NaN reaches the weights, as in torch's optimizers.
    touched = inside & (tl.max((g != 0).to(tl.int32), 1) > 0)
    mask = touched[:, None] & columns
    w_ptr = p_ptr + rows[:, None] * D + cols[None, :]
    # Untouched rows are not read: most rows in a dense gradient are zeros.
    w = tl.load(w_ptr, mask=mask, other=0.0).to(tl.float32)
    if DECAYS:
        g += weight_decay * w
    s = tl.load(s_ptr + rows, mask=touched, other=1.0) + tl.sum(g * g, 1) / D
    step = lr / (tl.sqrt(s) + eps)
    tl.store(s_ptr + rows, s, mask=touched)
    tl.store(w_ptr, (w - step[:, None] * g).to(P), mask=mask)


# --------------------------------------------------------------------------------------------------------- launches


def _tile(D: int) -> tuple[int, int, int]:
    """Rows, columns and warps: eight numbers per thread where rows are narrow."""
    block_n = next_power_of_2(D)
    return max(1, 1024 // block_n), block_n, 4 if block_n <= 2048 else 8


def _row_adagrad(
    params: list[Tensor], sums: list[Tensor], grads: list[Tensor], rows: list[Tensor], D: int, dense: bool,
    aligned: bool, lr: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    p, g = params[0], grads[0]
    block_r, block_n, warps = _tile(D)
    rows = [r.contiguous() for r in rows]
    counts = [of.shape[0] for of in grads]
    first, programs = [], 0
    for count in counts:
        first.append(programs)
        programs += cdiv(count, block_r)
    addresses = [t.data_ptr() for tensors in (params, sums, grads, rows) for t in tensors]
    T = len(params)
    options = dense, weight_decay != 0, next_power_of_2(T), block_r, block_n
    # 16 bytes if all weights and gradients in the launch are 16-byte aligned, including each row's start.
    align = 16 if aligned else min(p.element_size(), g.element_size())

    def plan() -> Plan:
        dtypes = triton_dtype(p.dtype), triton_dtype(g.dtype)
        return programs, (T, lr, eps, weight_decay, D, *dtypes, align, *options), {"num_warps": warps}

    with use_device(p.device):
        key = (programs, T, lr, eps, weight_decay, D, p.dtype, g.dtype, align, options)
        table = upload_table((*addresses, *counts, *first), torch.int64, p.device)
        launch(_row_adagrad_kernel, key, (table,), plan)
    # The kernel writes without autograd's knowledge: a graph that has saved a table then raises.
    torch.autograd.graph.increment_version([*params, *sums])
