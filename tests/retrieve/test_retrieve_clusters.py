"""Clusters of content: planted ones are found, levels are residual, and a new item has a vector by them."""

import pytest
import torch

from tigon.retrieve import ClusteredEmbedding, clusters


def planted(count=400, seed=0):
    """Items of 4 far groups, each of 3 nearer ones: (embeddings, group, subgroup)."""
    g = torch.Generator().manual_seed(seed)
    far, near = torch.eye(4, 6) * 100, torch.eye(3, 6).flip(1) * 10
    group, sub = (torch.randint(0, n, (count,), generator=g) for n in (4, 3))
    return far[group] + near[sub] + 0.1 * torch.randn(count, 6, generator=g), group, sub


def same(found, expected):
    return bool(((found[:, None] == found) == (expected[:, None] == expected)).all())


def test_planted_clusters_are_found_level_by_level():
    x, group, sub = planted()
    found = clusters.fit(x, levels=2, size=4, iterations=50, seed=2)
    names = found(x)
    assert same(names[:, 0], group)
    assert same(names[:, 0] * 4 + names[:, 1], group * 3 + sub)
    # A level is the means of its items, of what the level before left over.
    rest = x
    for level in range(2):
        for c in names[:, level].unique():
            torch.testing.assert_close(
                found.centers[level, c], rest[names[:, level] == c].mean(0), atol=1e-4, rtol=1e-4
            )
        rest = rest - found.centers[level, names[:, level]]
    new, group_of_new, _ = planted(50, seed=5)
    named = found(new)[:, 0]
    assert all(named[i] == names[group == group_of_new[i], 0][0] for i in range(50))
    again = clusters.fit(x, levels=2, size=4, iterations=50, seed=2)
    assert torch.equal(again.centers, found.centers)


def test_as_many_clusters_as_items_and_equal_items():
    x = torch.randn(12, 3)
    assert len(clusters.fit(x, levels=1, size=12)(x).unique()) == 12
    equal = torch.ones(8, 3)
    assert clusters.fit(equal, levels=2, size=4)(equal).shape == (8, 2)
    alone = torch.full((30, 3), 10.0)
    alone[7] = 15  # a centre that began beside another one moves here
    assert all(len(clusters.fit(alone, levels=1, size=2, seed=seed)(alone).unique()) == 2 for seed in range(4))


def test_an_item_has_the_vector_of_its_clusters_without_its_id():
    names = torch.tensor([[0, 1], [2, 1], [0, 0]])
    tower = ClusteredEmbedding(names, 3, 5, dropout=0.5)
    level = tower.level.weight
    by_hand = torch.stack([level[a] + level[3 + b] for a, b in names.tolist()])
    torch.testing.assert_close(tower.embed_clusters(names), by_hand)
    tower.eval()
    torch.testing.assert_close(tower(), tower.id.weight + by_hand)
    torch.testing.assert_close(tower(torch.tensor([2, 0])), tower()[[2, 0]])
    tower.train()
    torch.manual_seed(0)
    drawn = torch.stack([tower() for _ in range(400)])
    bare = (drawn == by_hand).all(2)
    assert ((drawn == tower.id.weight + by_hand).all(2) ^ bare).all()  # an id is there whole, or not at all
    assert bare.float().mean(0) == pytest.approx(0.5, abs=0.1)
    tower(torch.tensor([0])).sum().backward()
    assert tower.level.weight.grad[0].eq(1).all()
    assert "clusters" in tower.state_dict()


def test_what_makes_no_clusters():
    x = torch.randn(5, 3)
    for call, words in (
        (lambda: clusters.fit(x), "size from 1 to 5, the number of items, got 2, 25 and 1024"),
        (lambda: clusters.fit(x.long()), r"embeddings must be \(items, D\) floats, got \(5, 3\) torch.int64"),
        (lambda: clusters.fit(x * float("nan"), 1, 2), "NaN or infinity in row 0"),
        (lambda: clusters.fit(x, 1, 2)(x[:, :2]), r"embeddings must be \(n, 3\), .* got \(5, 2\)"),
        (lambda: ClusteredEmbedding(torch.tensor([[3]]), 3), "clusters must be from 0 to 2, got 3 to 3"),
        (lambda: ClusteredEmbedding(torch.tensor([[0]]), 3, dropout=2), "dropout must be from 0 to 1"),
        (
            lambda: ClusteredEmbedding(torch.tensor([[0]]), 3).embed_clusters(torch.tensor([[0, 1]])),
            "must have 1 levels",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()
