"""Learned similarities beyond the inner product: a mixture of inner products, and an MLP on an elementwise product.

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
    """A similarity between P query vectors and P' item vectors: their inner products, weighted by a softmax of both.

    An inner product gives a query one taste. A mixture selects the vector pair that fits, for queries with several
    interests.

    Args:
        components: (P, P'), the vector counts of a query and an item; an integer for the same count on both sides.
        dim: each vector's width.
        gating: a module that takes the query (B, P · dim) and items (B or 1, C, P' · dim) and returns (B, C, P · P'),
            such as a `HadamardMLP` with as many outputs. None: an MLP on the query times an MLP on the item. An MLP on
            the inner products is added in both cases, and the softmax of the sum gives the weights.
        hidden: the MLPs' hidden width.
        scale: multiplies the score, not the MLP inputs: the inverse temperature, for vectors with length 1.
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
        """The vectors that search an item index: for each vector pair a vector with the same inner product.

        Args:
            query: (B, P · dim), the query's vectors concatenated.
        Returns: (B, P · P', P' · dim), zeros except for a query vector at the item vector's position.
        Raises: ValueError for another shape.
        """
        (P, own), dim = self.components, self.dim
        _check_query("MixtureOfLogits", query, P, dim)
        one = torch.eye(own, dtype=query.dtype, device=query.device)
        placed = query.view(-1, P, 1, 1, dim) * one.view(1, 1, own, own, 1)
        return placed.reshape(-1, P * own, own * dim)

    def forward(self, query: Tensor, items: Tensor) -> Tensor:
        """Score items, for `similarity_softmax` and for `Retriever.search(rerank=…)`.

        Args:
            query: (B, P · dim), or the output of `vectors`.
            items: (B, C, P' · dim), or (1, C, P' · dim) for items that all queries share; the item vectors
                concatenated, in any float dtype.
        Returns: (B, C) in query's dtype.
        Raises: ValueError for other shapes, also from the gating.
        """
        (P, own), dim = self.components, self.dim
        if query.dim() == 3 and query.shape[1:] == (P * own, own * dim):
            query = query.view(-1, P, own, own, dim)[:, :, 0, 0].reshape(-1, P * dim)
        _check_query("MixtureOfLogits", query, P, dim)
        _check_items("MixtureOfLogits", items, len(query), own, dim)
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
    """An MLP on the elementwise product, mlp(q ∘ x): a similarity by itself, or the gating in a mixture.

    Args:
        dim: the query and item width.
        hidden: the hidden width.
        outputs: numbers per item; with 1, the default, the output is the score.
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
        """Score items.

        Args:
            query: (B, dim). items: (B, C, dim), or (1, C, dim) for items that all queries share.
        Returns: (B, C), or (B, C, outputs) for more than one output.
        Raises: ValueError for other shapes.
        """
        _check_query("HadamardMLP", query, 1, self.dim)
        _check_items("HadamardMLP", items, len(query), 1, self.dim)
        output: Tensor = self.mlp(query.unsqueeze(1) * items.to(query.dtype))
        return output.squeeze(-1) if self.outputs == 1 else output


def _check_query(name: str, query: Tensor, count: int, dim: int) -> None:
    if query.dim() != 2 or query.shape[1] != count * dim:
        raise ValueError(f"{name}: query must be (B, {count * dim}), {count} of {dim}, got {tuple(query.shape)}.")


def _check_items(name: str, items: Tensor, queries: int, count: int, dim: int) -> None:
    if items.dim() != 3 or len(items) not in (1, queries) or items.shape[2] != count * dim:
        raise ValueError(
            f"{name}: items must be ({queries} or 1, C, {count * dim}), {count} of {dim}, got {tuple(items.shape)}."
        )


class _Product(nn.Module):
    """u(q) ∘ v(x), an MLP each: computed once for an item that all queries share."""

    def __init__(self, query: int, item: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.of_query, self.of_item = _mlp(query, hidden, outputs), _mlp(item, hidden, outputs)

    def forward(self, query: Tensor, items: Tensor) -> Tensor:
        output: Tensor = self.of_query(query).unsqueeze(1) * self.of_item(items)
        return output


def _mlp(width: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, outputs))
