"""Learned similarities beyond the inner product: a mixture of inner products, and an MLP of a product by elements.

    score(q, x) = Σ_m π_m(q, x) ⟨q_p, x_p'⟩,   m = (p, p'),   π = softmax(u(q) ∘ v(x) + w(⟨q_p, x_p'⟩ of all m))

Sources: mixture of logits, Zhai et al. 2023, https://arxiv.org/abs/2306.04039, and its search by components, Ding and
Zhai 2024, https://arxiv.org/abs/2407.15462.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tigon.retrieve.arguments import as_int, as_number

Gating = Callable[[Tensor, Tensor], Tensor]


class MixtureOfLogits(nn.Module):
    """A similarity of P vectors a query and P' vectors an item: their inner products, weighted by a softmax of both.

    An inner product gives a query one taste. A mixture lets the pair of vectors that fits count, as where a query has
    several interests.

    Args:
        components: (P, P'), how many vectors a query and an item have; an integer for as many of both.
        dim: the width of each.
        gating: a module of the query (B, P · dim) and of items (B or 1, C, P' · dim) that returns (B, C, P · P'),
            such as a `HadamardMLP` of as many outputs. None: an MLP of the query times one of the item. An MLP of the
            inner products is added to either, and the softmax of the sum weighs these.
        hidden: the width of the MLPs' hidden layers.
        scale: multiplies the score, not the inputs of the MLPs: one over the temperature, for vectors of length 1.
    Raises: ValueError for numbers that are not positive.
    """

    def __init__(
        self, components: int | tuple[int, int], dim: int, gating: Gating | None = None, *, hidden: int = 64,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        both = [*components] if isinstance(components, (tuple, list)) else [components, components]
        P, own = [as_int(number) or 0 for number in both] if len(both) == 2 else (0, 0)
        if min(P, own, as_int(dim) or 0, as_int(hidden) or 0) < 1 or not (as_number(scale) or 0) > 0:
            raise ValueError(
                "MixtureOfLogits: components, dim, hidden and scale must be positive, got "
                f"{components}, {dim}, {hidden} and {scale}."
            )
        self.components, self.dim, self.scale = (P, own), dim, scale
        self.gating = _Product(P * dim, own * dim, hidden, P * own) if gating is None else gating
        self.of_products = _mlp(P * own, hidden, P * own)

    def vectors(self, query: Tensor) -> Tensor:
        """The vectors that search an index of the items: for each pair of vectors one with the same inner product.

        Args:
            query: (B, P · dim), the query's vectors one after another.
        Returns: (B, P · P', P' · dim), zeros but for a query's vector where the item's stands.
        Raises: ValueError for another shape.
        """
        (P, own), dim = self.components, self.dim
        if query.dim() != 2 or query.shape[1] != P * dim:
            raise ValueError(f"MixtureOfLogits: query must be (B, {P * dim}), {P} of {dim}, got {tuple(query.shape)}.")
        one = torch.eye(own, dtype=query.dtype, device=query.device)
        placed = query.view(-1, P, 1, 1, dim) * one.view(1, 1, own, own, 1)
        return placed.reshape(-1, P * own, own * dim)

    def forward(self, query: Tensor, items: Tensor) -> Tensor:
        """The scores of items, for `similarity_softmax` and for `Retriever.search(rerank=…)`.

        Args:
            query: (B, P · dim), or the output of `vectors`.
            items: (B, C, P' · dim), or (1, C, P' · dim) for items that all queries share; the items' vectors one after
                another, in any float dtype.
        Returns: (B, C) in query's dtype.
        Raises: ValueError for other shapes, of the gating as well.
        """
        (P, own), dim = self.components, self.dim
        if query.dim() == 3 and query.shape[1:] == (P * own, own * dim):
            query = query.view(-1, P, own, own, dim)[:, :, 0, 0].reshape(-1, P * dim)
        if query.dim() != 2 or query.shape[1] != P * dim:
            raise ValueError(f"MixtureOfLogits: query must be (B, {P * dim}), {P} of {dim}, got {tuple(query.shape)}.")
        if items.dim() != 3 or len(items) not in (1, len(query)) or items.shape[2] != own * dim:
            raise ValueError(
                f"MixtureOfLogits: items must be ({len(query)} or 1, C, {own * dim}), {own} of {dim}, got "
                f"{tuple(items.shape)}."
            )
        items = items.to(query.dtype)
        C = items.shape[1]
        x = items.reshape(len(items), C * own, dim)
        products = query.view(-1, P, dim) @ x.mT
        products = products.view(-1, P, C, own).transpose(1, 2).reshape(-1, C, P * own)
        gates = self.gating(query, items)
        if gates.shape != products.shape:
            raise ValueError(
                f"MixtureOfLogits: gating must return {tuple(products.shape)}, a number for each product, got "
                f"{tuple(gates.shape)}."
            )
        gates = gates + self.of_products(products)
        scores: Tensor = (gates.softmax(-1) * products).sum(-1) * self.scale
        return scores

    def extra_repr(self) -> str:
        return f"{self.components[0]} × {self.components[1]} of {self.dim}"


class HadamardMLP(nn.Module):
    """An MLP of the product by elements, mlp(q ∘ x): a similarity of its own, or the gating of a mixture.

    Args:
        dim: the width of query and items.
        hidden: of the hidden layer.
        outputs: numbers for each item; with 1, the default, they are its score.
    Raises: ValueError for numbers that are not positive.

    Source: neural collaborative filtering, He et al. 2017, https://arxiv.org/abs/1708.05031.
    """

    def __init__(self, dim: int, hidden: int = 64, outputs: int = 1) -> None:
        super().__init__()
        if min(as_int(number) or 0 for number in (dim, hidden, outputs)) < 1:
            raise ValueError(
                f"HadamardMLP: dim, hidden and outputs must be positive, got {dim}, {hidden} and {outputs}."
            )
        self.dim, self.outputs = dim, outputs
        self.mlp = _mlp(dim, hidden, outputs)

    def forward(self, query: Tensor, items: Tensor) -> Tensor:
        """Scores of items.

        Args:
            query: (B, dim). items: (B, C, dim), or (1, C, dim) for items that all queries share.
        Returns: (B, C), or (B, C, outputs) for more than one.
        Raises: ValueError for other shapes.
        """
        if query.dim() != 2 or query.shape[1] != self.dim:
            raise ValueError(f"HadamardMLP: query must be (B, {self.dim}), got {tuple(query.shape)}.")
        if items.dim() != 3 or len(items) not in (1, len(query)) or items.shape[2] != self.dim:
            raise ValueError(
                f"HadamardMLP: items must be ({len(query)} or 1, C, {self.dim}), got {tuple(items.shape)}."
            )
        output: Tensor = self.mlp(query.unsqueeze(1) * items.to(query.dtype))
        return output.squeeze(-1) if self.outputs == 1 else output


class _Product(nn.Module):
    """u(q) ∘ v(x), an MLP each: of an item that all queries share once."""

    def __init__(self, query: int, item: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.of_query, self.of_item = _mlp(query, hidden, outputs), _mlp(item, hidden, outputs)

    def forward(self, query: Tensor, items: Tensor) -> Tensor:
        output: Tensor = self.of_query(query).unsqueeze(1) * self.of_item(items)
        return output


def _mlp(width: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, outputs))
