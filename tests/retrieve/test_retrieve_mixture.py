"""Learned similarities: against slow loops, and trained, searched and reranked where no inner product can do it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tigon import retrieve


def slow(mixture, query, items):
    """Of one query and one item."""
    (P, own), dim = mixture.components, mixture.dim
    q, x = query.view(P, dim), items.view(own, dim)
    products = torch.stack([q[p] @ x[other] for p in range(P) for other in range(own)])
    gates = mixture.gating(query[None], items[None, None])[0, 0] + mixture.of_products(products)
    return mixture.scale * (gates.softmax(0) * products).sum()


@pytest.mark.parametrize(
    ("components", "hadamard"), [((2, 2), False), ((3, 2), False), ((1, 4), False), ((1, 1), False), ((2, 2), True)]
)
def test_a_mixture_is_its_formula(components, hadamard):
    (P, own), dim = components, 4
    given = retrieve.HadamardMLP(P * dim, 8, P * own) if hadamard else None
    mixture = retrieve.MixtureOfLogits(components, dim, given, hidden=8, scale=3.0)
    q, x = torch.randn(5, P * dim), torch.randn(5, 6, own * dim)
    want = torch.stack([torch.stack([slow(mixture, q[b], x[b, c]) for c in range(6)]) for b in range(5)])
    torch.testing.assert_close(mixture(q, x), want)
    torch.testing.assert_close(mixture(mixture.vectors(q), x), want)
    torch.testing.assert_close(mixture(q, x[:1]), mixture(q, x[:1].expand(5, -1, -1)))
    each = torch.einsum("bpd,bcod->bcpo", q.view(5, P, dim), x.view(5, 6, own, dim)).flatten(2)
    torch.testing.assert_close(mixture.vectors(q) @ x.mT, each.mT)
    if (P, own) == (1, 1):
        torch.testing.assert_close(mixture(q, x), 3.0 * (q[:, None] * x).sum(-1))


def test_an_mlp_of_the_product_is_trained_and_reranks():
    similarity, items = retrieve.HadamardMLP(4, 8), torch.randn(50, 4)
    q, x = torch.randn(3, 4), torch.randn(3, 5, 4)
    want = [[similarity.mlp(q[b] * x[b, c]).item() for c in range(5)] for b in range(3)]
    torch.testing.assert_close(similarity(q, x), torch.tensor(want))
    loss = retrieve.similarity_softmax(similarity, q, items, torch.arange(3), torch.arange(50), torch.zeros(50))
    with torch.no_grad():
        scores = torch.stack([torch.stack([similarity(q[b : b + 1], items[None, c : c + 1])[0, 0] for c in range(50)])
                              for b in range(3)])  # fmt: skip
    torch.testing.assert_close(loss.detach(), F.cross_entropy(scores, torch.arange(3)))
    loss.backward()
    assert all(p.grad.any() for p in similarity.parameters() if p is not similarity.mlp[2].bias)
    index = retrieve.Index(4, 50, "float16")
    index.upsert(range(50), items.half())
    hits = retrieve.Retriever(lambda q: q, index)(q, 5, rerank=similarity, candidates=50)
    torch.testing.assert_close(hits.scores, similarity(q, items.half()[None]).topk(5).values)


class Towers(nn.Module):
    """Two vectors of length 1 for each query and item."""

    def __init__(self):
        super().__init__()
        self.query, self.item = nn.Linear(16, 16), nn.Linear(16, 16)
        for layer in (self.query, self.item):
            nn.init.eye_(layer.weight)

    def forward(self, layer, features):
        return F.normalize(layer(features).view(-1, 2, 8), dim=-1).flatten(1)


def test_a_mixture_finds_what_no_inner_product_does():
    """Queries like items for the better of two aspects. Queries of the test were never seen."""
    features = F.normalize(torch.randn(200, 2, 8), dim=-1)

    def liked(queries):
        return torch.einsum("bpd,npd->bnp", queries, features).amax(-1).topk(5).indices

    def drawn(B):
        queries = F.normalize(torch.randn(B, 2, 8), dim=-1)
        return queries.flatten(1), liked(queries)

    test, right = drawn(100)
    found = {}
    for kind in ("inner product", "mixture"):
        torch.manual_seed(1)
        towers = Towers()
        mixture = retrieve.MixtureOfLogits(2, 8, hidden=16, scale=20.0) if kind == "mixture" else None
        parameters = [*towers.parameters(), *(mixture.parameters() if mixture is not None else ())]
        optimizer = torch.optim.Adam(parameters, lr=0.01)
        for _ in range(80):
            queries, best = drawn(128)
            target, negatives = best[torch.arange(128), torch.randint(0, 5, (128,))], torch.randint(0, 200, (64,))
            q, x = towers(towers.query, queries), towers(towers.item, features.flatten(1))
            if mixture is None:
                loss = retrieve.sampled_softmax(q, x, target, negatives, scale=10.0)
            else:
                loss = retrieve.similarity_softmax(mixture, q, x, target, negatives)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        index = retrieve.Index(16, 200, "float32")
        with torch.no_grad():
            index.upsert(range(200), towers(towers.item, features.flatten(1)))

        def encode(queries, towers=towers, mixture=mixture):
            q = towers(towers.query, queries)
            return q if mixture is None else mixture.vectors(q)

        options = {} if mixture is None else {"rerank": mixture, "candidates": 20}
        hits = retrieve.Retriever(encode, index)(test, 5, **options)
        found[kind] = (hits.ids[:, :, None] == right[:, None]).any(1).float().mean().item()
        if mixture is not None:
            # 20 items a component are enough: they hold what scoring all items finds.
            with torch.no_grad():
                scores = mixture(encode(test), index.embeddings[:200][None])
            assert (scores.topk(5).indices == hits.ids).float().mean() > 0.95
    assert found["mixture"] > 0.7, found
    assert found["inner product"] < 0.5, found


def test_what_they_refuse():
    mixture, mlp = retrieve.MixtureOfLogits((2, 3), 4), retrieve.HadamardMLP(4)
    mlp2 = retrieve.HadamardMLP(8)
    q, x = torch.randn(5, 8), torch.randn(5, 6, 12)
    for call, words in (
        (
            lambda: retrieve.MixtureOfLogits(0, 4),
            "components, dim, hidden and scale must be positive, got 0, 4, 64 and",
        ),
        (lambda: retrieve.MixtureOfLogits(2, 4, scale=0.0), r"must be positive, got 2, 4, 64 and 0\.0"),
        (lambda: mixture(q[:, :4], x), r"query must be \(B, 8\), 2 of 4, got \(5, 4\)"),
        (lambda: mixture.vectors(q[:, :4]), r"query must be \(B, 8\), 2 of 4, got \(5, 4\)"),
        (lambda: retrieve.MixtureOfLogits(2, 4, mlp2)(q, x[:, :, :8]), r"gating must return \(5, 6, 4\).*got \(5, 6\)"),
        (lambda: mixture(q, x[:2]), r"items must be \(5 or 1, C, 12\), 3 of 4, got \(2, 6, 12\)"),
        (lambda: retrieve.HadamardMLP(4, 0), "dim, hidden and outputs must be positive, got 4, 0 and 1"),
        (lambda: mlp(q, x), r"query must be \(B, 4\), 1 of 4, got \(5, 8\)"),
        (lambda: mlp(q[:, :4], x), r"items must be \(5 or 1, C, 4\), 1 of 4, got \(5, 6, 12\)"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
