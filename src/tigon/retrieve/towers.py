"""Two towers over ids: users and items by their own embeddings and by what they were paired with.

    X₀ = own embeddings;  Xₗ = A Xₗ₋₁;  vectors = normalised mean of X₀ … X_L,   A_ui = A_iu = 1 / √(dᵤ dᵢ)

With one hop a user's vector is its own embedding and the pooled ones of its items; with more, also of users who had the
same items, and so on.

Source: LightGCN, He et al. 2020, https://arxiv.org/abs/2002.02126.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TwoTowers(nn.Module):
    """Vectors of users and items from ids and training pairs.

    Args:
        users, items: how many there are.
        dim: the width of the vectors.
        pairs: (P, 2) integers, the training pairs of a user's and an item's row, which are the history that hops pool.
        hops: how far pooling reaches; 0 for own embeddings alone.

    Raises: ValueError for numbers that make no table, and for pairs outside the tables.
    """

    def __init__(self, users: int, items: int, dim: int = 64, pairs: Tensor | None = None, *, hops: int = 2) -> None:
        super().__init__()
        if min(users, items, dim) < 1 or hops < 0:
            raise ValueError(
                "TwoTowers: users, items and dim must be positive and hops 0 or more, got "
                f"{users}, {items}, {dim} and {hops}."
            )
        self.hops = hops
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.1)
        if hops and pairs is None:
            raise ValueError(f"TwoTowers: pairs must be the training pairs that {hops} hops pool, got None.")
        if hops and pairs is not None:
            self._connect(users, items, pairs)

    def _connect(self, users: int, items: int, pairs: Tensor) -> None:
        if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype.is_floating_point:
            raise ValueError(f"TwoTowers: pairs must be (pairs, 2) integers, got {tuple(pairs.shape)} {pairs.dtype}.")
        for name, column, count in (("users", pairs[:, 0], users), ("items", pairs[:, 1], items)):
            if len(column) and not 0 <= int(column.min()) <= int(column.max()) < count:
                wrong = column[(column < 0) | (column >= count)][0]
                raise ValueError(f"TwoTowers: pairs must hold {name} from 0 to {count - 1:,}, got {int(wrong)}.")
        pairs = torch.unique(pairs.long(), dim=0)
        user, item = pairs[:, 0], pairs[:, 1]
        weight = (user.bincount(minlength=users)[user] * item.bincount(minlength=items)[item]).float().rsqrt()
        # Both directions as rows of their own: neither a product nor its gradient adds atomically.
        for name, rows, columns, sizes in (
            ("of_users", user, item, (users, items)),
            ("of_items", item, user, (items, users)),
        ):
            order = rows.argsort(stable=True)
            starts = F.pad(rows.bincount(minlength=sizes[0]).cumsum(0), (1, 0)).int()
            self.register_buffer(f"{name}_starts", starts, persistent=False)
            self.register_buffer(f"{name}_columns", columns[order].int(), persistent=False)
            self.register_buffer(f"{name}_weights", weight[order], persistent=False)

    def _matrix(self, name: str) -> Tensor:
        starts, columns, weights = (getattr(self, f"{name}_{part}") for part in ("starts", "columns", "weights"))
        size = (self.user.num_embeddings, self.item.num_embeddings)
        size = size if name == "of_users" else (size[1], size[0])
        # The parts were checked when they were made; a check again would make the host wait.
        return torch.sparse_csr_tensor(starts, columns, weights, size, check_invariants=False)

    def forward(self) -> tuple[Tensor, Tensor]:
        """The vectors of all users, (users, dim), and of all items, (items, dim), of length 1."""
        user, item = self.user.weight, self.item.weight
        if self.hops:
            of_users, of_items = self._matrix("of_users"), self._matrix("of_items")
            total_user, total_item = user, item
            for _ in range(self.hops):
                user, item = _Pooled.apply(of_users, of_items, item), _Pooled.apply(of_items, of_users, user)
                total_user, total_item = total_user + user, total_item + item
            user, item = total_user, total_item  # their mean has the same direction
        return F.normalize(user, dim=1), F.normalize(item, dim=1)


class _Pooled(torch.autograd.Function):
    """matrix @ x, whose gradient is a product with the transposed matrix, which is there."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, transposed: Tensor, x: Tensor) -> Tensor:
        ctx.transposed = transposed
        return torch.mm(matrix, x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, Tensor]:
        return None, None, torch.mm(ctx.transposed, g.contiguous())
