"""Two towers over ids: users and items by their own embeddings and those of their pairs.

    X₀ = own embeddings;  Xₗ = A Xₗ₋₁;  vectors = normalised own · X₀ + X₁ + … + X_L,   A_ui = A_iu = 1 / √(dᵤ dᵢ)

With one hop a user's vector is the user's own embedding plus the items' pooled embeddings; more hops add users with the
same items, and so on.

Source: LightGCN, He et al. 2020, https://arxiv.org/abs/2002.02126, which has own = 1, no bias, and also pools over the
training pair itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.kernels.sparse import make_csr_matrix
from tigon.retrieve.arguments import as_int, as_number, require_tensors


class TwoTowers(nn.Module):
    """User and item vectors from ids and training pairs.

    Args:
        users, items: their numbers.
        dim: the vector width.
        pairs: (P, 2) integers, training pairs with a user's and an item's row, the history that hops pool.
        hops: how far pooling reaches; 0 for own embeddings alone.
        own: the weight of own embeddings beside pooled embeddings. 0 gives the smoothest vectors, and a zero vector to
            a user or item without a pair.
        bias: whether each item has a learned bias that is added to its products, initially 0. The bias takes the last
            of the `dim` numbers in the item's vector, where users have a 1.

    Raises: ValueError for numbers that make no table, and for pairs outside the tables.
    """

    def __init__(
        self, users: int, items: int, dim: int = 64, pairs: Tensor | None = None, *, hops: int = 2, own: float = 1.0,
        bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes, weight, bias = [as_int(number) for number in (users, items, dim, hops)], as_number(own), bool(bias)
        whole = [number for number in sizes if number is not None]
        fits = len(whole) == len(sizes) and weight is not None and 0 <= weight < float("inf")
        if not fits or min(whole[0], whole[1], whole[2] - bias) < 1 or whole[3] < 0:
            raise ValueError(
                "TwoTowers: users, items and dim must be positive (dim 2 or more with a bias), hops and own 0 or more, "
                f"got {users}, {items}, {dim}, {hops} and {own}."
            )
        users, items, dim, hops = whole
        self.hops, self.own = hops, own
        self.user = nn.Embedding(users, dim - bias)
        self.item = nn.Embedding(items, dim - bias)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.1)
        self.bias = nn.Parameter(torch.zeros(items)) if bias else None
        if hops and pairs is None:
            raise ValueError(f"TwoTowers: pairs must be the training pairs for {hops} hops, got None.")
        if hops and pairs is not None:
            self._connect(users, items, pairs)

    def _connect(self, users: int, items: int, pairs: Tensor) -> None:
        require_tensors("TwoTowers", pairs=pairs)
        if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype.is_floating_point:
            raise ValueError(f"TwoTowers: pairs must be (pairs, 2) integers, got {tuple(pairs.shape)} {pairs.dtype}.")
        for name, column, count in (("users", pairs[:, 0], users), ("items", pairs[:, 1], items)):
            if len(column) and not 0 <= int(column.min()) <= int(column.max()) < count:
                wrong = column[(column < 0) | (column >= count)][0]
                raise ValueError(f"TwoTowers: pairs must hold {name} from 0 to {count - 1:,}, got {int(wrong)}.")
        pairs = torch.unique(pairs.long(), dim=0)
        user, item = pairs[:, 0], pairs[:, 1]
        weights = (user.bincount(minlength=users)[user] * item.bincount(minlength=items)[item]).float().rsqrt()
        by_item = item.argsort(stable=True)
        # Both directions are stored as rows: neither a product nor its gradient adds atomically.
        graph = {
            "of_users_starts": F.pad(user.bincount(minlength=users).cumsum(0), (1, 0)).int(),
            "of_users_columns": item.int(),
            "of_items_starts": F.pad(item.bincount(minlength=items).cumsum(0), (1, 0)).int(),
            "of_items_columns": user[by_item].int(),
            "by_item": by_item,
            "weights": weights,
            "keys": user * items + item,
        }
        for name, values in graph.items():
            self.register_buffer(name, values, persistent=False)

    def _matrix(self, name: str, weights: Tensor) -> Tensor:
        starts, columns = (getattr(self, f"{name}_{part}") for part in ("starts", "columns"))
        size = (self.user.num_embeddings, self.item.num_embeddings)
        size = size if name == "of_users" else (size[1], size[0])
        return make_csr_matrix(starts, columns, weights, size)

    def _weights_without(self, pairs: Tensor) -> Tensor:
        """The graph's pair weights, 0 for excluded pairs."""
        weights, keys = self.get_buffer("weights"), self.get_buffer("keys")
        require_tensors("TwoTowers", leave_out=pairs)
        if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype.is_floating_point:
            raise ValueError(f"TwoTowers: leave_out must be (B, 2) integers, got {tuple(pairs.shape)} {pairs.dtype}.")
        asked = pairs[:, 0].long() * self.item.num_embeddings + pairs[:, 1]
        place = torch.searchsorted(keys, asked).clamp(max=max(len(keys) - 1, 0))
        # A pair that is not in the graph gets the position after all pairs.
        place = torch.where(keys[place] == asked, place, len(keys)) if len(keys) else place
        return F.pad(weights, (0, 1)).index_fill(0, place, 0.0)[:-1]

    def forward(self, leave_out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The vectors for all users, (users, dim), and for all items, (items, dim).

        Args:
            leave_out: (B, 2) integers, pairs that hops skip this time, such as those in the step's loss: a pair to be
                predicted then does not predict itself.

        Returns: vectors with length 1, so that their products are cosines; with a bias, the part before the bias has
            length 1.
        """
        user, item = self.user.weight, self.item.weight
        if self.hops:
            weights = self.get_buffer("weights") if leave_out is None else self._weights_without(leave_out)
            of_users = self._matrix("of_users", weights)
            of_items = self._matrix("of_items", weights[self.get_buffer("by_item")])
            total_user, total_item = self.own * user, self.own * item
            for _ in range(self.hops):
                user, item = _Pooled.apply(of_users, of_items, item), _Pooled.apply(of_items, of_users, user)
                total_user, total_item = total_user + user, total_item + item
            user, item = total_user, total_item
        user, item = F.normalize(user, dim=1), F.normalize(item, dim=1)
        if self.bias is not None:
            user, item = F.pad(user, (0, 1), value=1.0), torch.cat((item, self.bias.unsqueeze(1)), 1)
        return user, item


class _Pooled(torch.autograd.Function):
    """matrix @ x, whose gradient is a product with the precomputed transposed matrix."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, transposed: Tensor, x: Tensor) -> Tensor:
        ctx.transposed = transposed
        return torch.mm(matrix, x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, Tensor]:
        return None, None, torch.mm(ctx.transposed, g.contiguous())
