"""Coding rate: nats needed to code z's rows up to a squared error ε each.

    R(z)         = ½ log det(I + γ d/(n ε) zᵀz)
    R(z, groups) = Σ_j t_j/(2n) log det(I + γ d/(t_j ε) zᵀ diag(p_j) z),   t_j = the sum of the weights p_j of group j

For a group with k members S, y = √(γ d/(t ε) p) z_S is (k, d), and det(I + yᵀy) = det(I + y yᵀ): the smaller side is
taken. Groups are padded to powers of two; each size is a batched product and a batched Cholesky factorisation, in
pieces. The gradient of ½ log det(I + y yᵀ) is (I + y yᵀ)⁻¹ y, two triangular solves with the factor, which repeated
eigenvalues do not disturb. The forward pass computes the gradient, while y and the factor are in memory.

Sources: MCR², Yu et al. 2020, https://arxiv.org/abs/2006.08558; G2R, whose groups are the neighbourhoods of a graph,
Han et al. 2022, https://arxiv.org/abs/2202.06241.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels import check_tensors, is_concrete, next_power_of_2, run_once_differentiable
from tigon.kernels.dispatch import torch_is_forced
from tigon.losses.options import check_positive

# Memory budget for a piece: rows, Gram matrices and gradients, in bytes.
PIECE_BYTES = 2**28
# On a GPU each size costs about forty launches. A size below both limits (rows, Gram matrix elements) is merged into
# the next larger size.
FEW_ROWS, FEW_NUMBERS = 2**14, 2**20
LAUNCHES = ("cuda",)  # device types with launch overhead


class _Block(NamedTuple):
    """Groups with the same padded size K: members (B, K), √(p/t) (B, K), and t (B,), both in fp64.

    The padding repeats the group's own members, with root 0: a NaN stays within its groups, and a group writes to each
    row at most twice.
    """

    members: Tensor
    root: Tensor
    trace: Tensor


class RowGroups:
    """Groups of rows, padded once for all calls of `coding_rate`.

    Args:
        offsets: (G + 1,) integers, from 0 to M: group j has the members offsets[j] to offsets[j + 1] − 1. Groups may be
            empty, and may share rows.
        members: (M,) integers, rows of z. A row named twice by a group counts with both weights.
        weights: (M,) finite floats, not negative; 1 each if left out. A row with weight 0 is not a member.
    Raises: ValueError for shapes, dtypes and numbers that do not fit.

    The groups lie on the `members` device. The host prepares them and waits for the device; calls do not wait.
    """

    def __init__(self, offsets: Tensor, members: Tensor, weights: Tensor | None = None) -> None:
        check_tensors("RowGroups", offsets=offsets, members=members, weights=weights)
        _check_integers("offsets", offsets)
        _check_integers("members", members)
        device = members.device
        bounds, rows = offsets.cpu().long(), members.cpu().long()
        M = len(rows)
        if not len(bounds) or bounds[0] != 0 or bounds[-1] != M or bool((bounds.diff() < 0).any()):
            raise ValueError(
                f"RowGroups: offsets must rise from 0 to {M:,}, the number of members, got {_format(bounds)}."
            )
        if M and rows.min() < 0:
            raise ValueError(f"RowGroups: members must be rows, 0 or more, got {int(rows.min())}.")
        if weights is None:
            p = torch.ones(M, dtype=torch.float64)
        elif weights.shape != members.shape or not weights.dtype.is_floating_point:
            raise ValueError(
                f"RowGroups: weights must be ({M},) floats, one for each member, got {tuple(weights.shape)} "
                f"{weights.dtype}."
            )
        else:
            p = weights.detach().cpu().double()
            if weights.requires_grad:
                raise ValueError("RowGroups: weights must not require a gradient, which they do not get, got one.")
            if not bool((p.isfinite() & (p >= 0)).all()):
                at = int((~(p.isfinite() & (p >= 0))).nonzero()[0])
                raise ValueError(f"RowGroups: weights must be finite and not negative, got {float(p[at])} at {at:,}.")
        self.device = device
        self._rows: int | None = None
        self._least = int(rows.max()) + 1 if M else 0
        self._blocks, self._block, self._line = _pad_groups(bounds, rows, p, device)

    @classmethod
    def from_labels(cls, labels: Tensor) -> RowGroups:
        """Make a group for each label from the rows that have that label.

        Args:
            labels: (n,) integers. Rows with a negative label are in no group.
        """
        check_tensors("RowGroups.from_labels", labels=labels)
        _check_integers("labels", labels)
        values, order = labels.cpu().long().sort(stable=True)
        _, counts = values[values >= 0].unique_consecutive(return_counts=True)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        groups = cls(offsets, order[values >= 0].to(labels.device))
        groups._rows = len(labels)
        return groups

    def __len__(self) -> int:
        """The number of groups, including empty groups."""
        return len(self._block)

    def select(self, which: Tensor) -> RowGroups:
        """Select groups without padding them again, such as the groups sampled for a step.

        Args:
            which: (m,) integers from 0 to G − 1, in any order; a group that is named twice counts twice. On the CPU, so
                that nothing waits for the device.
        """
        check_tensors("RowGroups.select", which=which)
        _check_integers("which", which)
        which, G = which.cpu().long(), len(self)
        bad = which[(which < 0) | (which >= G)]
        if len(bad):
            raise ValueError(f"RowGroups: which must lie in [0, {G:,}), the groups, got {int(bad[0]):,}.")
        taken = object.__new__(RowGroups)
        taken.device, taken._rows, taken._least, taken._blocks = self.device, self._rows, self._least, []
        block, line = self._block[which], self._line[which]
        taken._block, taken._line = torch.full_like(block, -1), torch.zeros_like(line)
        for b, whole in enumerate(self._blocks):
            at = (block == b).nonzero()[:, 0]
            if len(at):
                lines = line[at].to(self.device, non_blocking=True)
                taken._block[at], taken._line[at] = len(taken._blocks), torch.arange(len(at))
                taken._blocks.append(_Block(*(t.index_select(0, lines) for t in whole)))
        return taken

    def to(self, device: torch.device | str) -> RowGroups:
        """Move the groups to another device."""
        moved = object.__new__(RowGroups)
        blocks = [_Block(*(t.to(device) for t in block)) for block in self._blocks]
        vars(moved).update(vars(self), device=torch.empty(0, device=device).device, _blocks=blocks)
        return moved


def coding_rate(
    z: Tensor, groups: RowGroups | Tensor | tuple[Tensor, ...] | None = None, *, eps: float, gamma: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The coding rate of z's rows, or of groups of rows.

        ½ log det(I + γ d/(n ε) zᵀz)    or    Σ_j t_j/(2n) log det(I + γ d/(t_j ε) zᵀ diag(p_j) z)

    Args:
        z: (n, d) floats. Rows of a common length, such as 1, make rates comparable.
        groups: `RowGroups`; or the arguments for `RowGroups`, then padded in each call: (offsets, members),
            (offsets, members, weights), or labels (n,). t_j is the sum of group j's weights p_j. A group without
            members has rate 0.
        eps: ε, the squared error allowed per row, in squared units of z.
        gamma: γ, which divides eps.
        dtype: torch.float32 or torch.float64 for the computation; by default fp64 for fp64 inputs, else fp32.
    Returns: 0-d in that dtype, in nats, 0 without rows. Only z gets a gradient, in z's dtype.
    Raises: ValueError for shapes, dtypes and numbers that do not fit, and for members that are not rows of z.

    A NaN in z makes the rate NaN, unless the row is in no group. So does a matrix that rounding leaves without a
    Cholesky factor: in fp32 where an eigenvalue of γ d/(n ε) zᵀz nears 1e7, and much sooner where products may use
    TF32. Take dtype=torch.float64 there. The rate has a second gradient only under `tigon.use_backend("torch")`.
    """
    name = "coding_rate"
    check_tensors(name, z=z)
    check_positive(name, eps=eps, gamma=gamma)
    if z.dim() != 2 or not z.dtype.is_floating_point:
        raise ValueError(f"{name}: z must be (n, d) floats, got {tuple(z.shape)} {z.dtype}.")
    if hasattr(z, "device_mesh"):
        raise ValueError(f"{name}: z must be a plain tensor, got a DTensor: pass to_local().")
    if dtype not in (None, torch.float32, torch.float64):
        raise ValueError(f"{name}: dtype must be torch.float32, torch.float64 or None, got {dtype}.")
    wide = dtype or torch.promote_types(z.dtype, torch.float32)
    blocks = None if groups is None else _blocks_for(z, groups)
    scale = gamma * z.shape[1] / eps
    if torch_is_forced():
        return _rate(z, blocks, scale, wide, False)[0]
    rate: Tensor = _CodingRate.apply(z, blocks, scale, wide, z.requires_grad and torch.is_grad_enabled())
    return rate


def _blocks_for(z: Tensor, groups: Any) -> list[_Block]:
    n = len(z)
    if isinstance(groups, Tensor):
        if groups.shape != (n,):
            raise ValueError(f"coding_rate: groups must be ({n},) labels, one per row of z, got {tuple(groups.shape)}.")
        groups = RowGroups.from_labels(groups)
    elif isinstance(groups, (tuple, list)) and len(groups) in (2, 3):
        groups = RowGroups(*groups)
    if not isinstance(groups, RowGroups):
        raise ValueError(
            "coding_rate: groups must be tigon.losses.RowGroups, labels (n,) or (offsets, members, weights), got "
            f"{type(groups).__name__}."
        )
    if groups._rows not in (None, n):
        raise ValueError(f"coding_rate: groups must have {n:,} labels, one per row of z, got {groups._rows:,}.")
    if groups._least > n:
        raise ValueError(
            f"coding_rate: groups must have members below {n:,}, the rows of z, got {groups._least - 1:,}."
        )
    if groups.device != z.device:
        raise ValueError(f"coding_rate: groups must be on z's device {z.device}, got {groups.device}.")
    return groups._blocks


# ----------------------------------------------------------------------------------------------------------- computing


def _rate(
    z: Tensor, blocks: list[_Block] | None, scale: float, dtype: torch.dtype, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The rate, and the gradient with respect to z, (n, d) in dtype."""
    n, d = z.shape
    with torch.autocast(z.device.type, enabled=False):
        z = z.to(dtype)
        if blocks is None:
            length = math.sqrt(scale / max(n, 1))
            logdet, dy = _solve(z.unsqueeze(0) * length, gradient)
            return logdet.sum() / 2, None if dy is None else dy[0] * length
        rate = z[:0].sum()  # 0, but connected to z for autograd
        dz = torch.zeros_like(z) if gradient else None
        for members, root, trace in _pieces(blocks, d, dtype.itemsize):
            y = (root * math.sqrt(scale)).to(dtype).unsqueeze(2)
            share = (trace / n).to(dtype)
            logdet, dy = _solve(z[members] * y, gradient)
            rate = rate + (share * logdet).sum() / 2
            if dz is not None and dy is not None:
                _add_rows(dz, members, dy * y * share[:, None, None])
        return rate, dz


def _solve(y: Tensor, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """log det(I + y yᵀ) for each matrix in y (B, K, d), and (I + y yᵀ)⁻¹ y if requested."""
    tall = y.shape[1] > y.shape[2]
    rows = y.mT if tall else y  # the smaller side first
    gram = rows @ rows.mT
    gram.diagonal(dim1=-2, dim2=-1).add_(1)
    # cholesky checks on the host, and waits; cholesky_ex, where it fails, leaves half a factor without NaN.
    factor, info = torch.linalg.cholesky_ex(gram)
    failed = info != 0
    logdet = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    logdet = logdet.masked_fill(failed, torch.nan)
    if not gradient:
        return logdet, None
    solved = torch.linalg.solve_triangular(factor, rows, upper=False)
    solved = torch.linalg.solve_triangular(factor.mT, solved, upper=True)
    solved = solved.masked_fill(failed[:, None, None], torch.nan)
    # (I + y yᵀ)⁻¹ y = y (I + yᵀy)⁻¹
    return logdet, solved.mT if tall else solved


def _pieces(blocks: list[_Block], d: int, itemsize: int) -> Iterator[_Block]:
    for block in blocks:
        B, K = block.members.shape
        # y, two solutions and the gradient's rows; the Gram matrix and the factor.
        each = itemsize * (4 * K * d + 2 * min(K, d) ** 2)
        step = max(1, PIECE_BYTES // max(each, 1))
        for start in range(0, B, step):
            yield _Block(*(t[start : start + step] for t in block))


def _add_rows(dz: Tensor, members: Tensor, rows: Tensor) -> None:
    """Add rows (B, K, d) to dz, in the same order on every run."""
    index, rows = members.flatten(), rows.flatten(0, 1)
    if dz.is_cuda:  # index_put_ sorts; index_add_ uses atomics on a GPU
        dz.index_put_((index,), rows, accumulate=True)
    else:
        dz.index_add_(0, index, rows)


class _CodingRate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, blocks: list[_Block] | None, scale: float, dtype: torch.dtype, gradient: bool
    ) -> Tensor:
        rate, dz = _rate(z, blocks, scale, dtype, gradient)
        ctx.save_for_backward(z, dz)
        return rate

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        found: tuple[Any, ...] = run_once_differentiable(_backward, ctx, g)
        return found


def _backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    z, dz = ctx.saved_tensors
    return (dz * g).to(z.dtype), None, None, None, None


# ----------------------------------------------------------------------------------------------------------- preparing


def _check_integers(argument: str, t: Tensor) -> None:
    if t.dim() != 1 or t.dtype.is_floating_point or t.dtype.is_complex or t.dtype == torch.bool:
        raise ValueError(f"RowGroups: {argument} must be 1-d integers, got {tuple(t.shape)} {t.dtype}.")
    if t.numel() and not is_concrete(t):
        raise ValueError(f"RowGroups: {argument} must hold data, got a tensor without data: prepare outside of graphs.")


def _format(t: Tensor) -> str:
    return str(t.tolist()) if len(t) <= 8 else f"{len(t):,} from {int(t[0]):,} to {int(t[-1]):,}"


def _pad_groups(
    offsets: Tensor, members: Tensor, weights: Tensor, device: torch.device
) -> tuple[list[_Block], Tensor, Tensor]:
    """Blocks on the device; on the host, each group's block (−1 for none) and line in that block."""
    G = len(offsets) - 1
    group = torch.repeat_interleave(torch.arange(G), offsets.diff())
    own = weights > 0
    group, members, weights = group[own], members[own], weights[own]
    counts = group.bincount(minlength=G)
    starts = counts.cumsum(0) - counts
    trace = torch.zeros(G, dtype=torch.float64).index_add_(0, group, weights)
    root = (weights / trace[group]).sqrt()
    block, line = torch.full((G,), -1), torch.zeros(G, dtype=torch.long)
    found, which = counts.unique(return_inverse=True)
    sizes = torch.tensor([next_power_of_2(k) if k else 0 for k in found.tolist()], dtype=torch.long)[which]
    if device.type in LAUNCHES:
        sizes = _merge_small_sizes(sizes)
    blocks: list[_Block] = []
    for K in sizes.unique().tolist():
        if not K:
            continue
        at = (sizes == K).nonzero()[:, 0]
        block[at], line[at] = len(blocks), torch.arange(len(at))
        k = counts[at].unsqueeze(1)
        slots = torch.arange(K).expand(len(at), K)
        places = starts[at].unsqueeze(1) + slots % k
        padded = root[places].masked_fill(slots >= k, 0.0)
        blocks.append(_Block(*(t.to(device) for t in (members[places], padded, trace[at]))))
    return blocks, block, line


def _merge_small_sizes(sizes: Tensor) -> Tensor:
    """The groups' padded sizes, (G,), with rare sizes raised to the next larger existing size."""
    sizes = sizes.clone()
    known, counts = (t.tolist() for t in sizes[sizes > 0].unique(return_counts=True))
    for place in range(len(known) - 1):
        size, count = known[place + 1], counts[place]
        if count * size <= FEW_ROWS and count * size**2 <= FEW_NUMBERS:
            sizes[sizes == known[place]] = size
            counts[place + 1] += count
    return sizes
