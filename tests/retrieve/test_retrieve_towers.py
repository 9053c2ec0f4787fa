"""Two towers: pooling against dense matrices, and what they refuse."""

import pytest
import torch

from tigon import retrieve


@pytest.mark.parametrize(
    ("hops", "own", "bias", "leave"),
    [(0, 1.0, False, False), (1, 1.0, True, True), (3, 1.0, False, False), (3, 0.5, True, True)],
)
def test_vectors_and_gradients_are_those_of_dense_matrices(hops, own, bias, leave):
    torch.manual_seed(0)
    dense = torch.rand(9, 7) < 0.4
    dense[2], dense[:, 3] = False, False  # a user and an item without pairs
    pairs = dense.nonzero()
    towers = retrieve.TwoTowers(9, 7, 4, torch.cat((pairs, pairs[:2])), hops=hops, own=own, bias=bias).double()
    user, item = (t.weight.detach().clone().requires_grad_() for t in (towers.user, towers.item))
    degree = dense.double()
    a = degree / (degree.sum(1, keepdim=True) * degree.sum(0)).clamp(min=1).sqrt()
    # Two of the graph's pairs, one of them twice, and one that it does not have.
    leave_out = torch.cat((pairs[[4, 9, 4]], torch.tensor([[2, 3]]))) if leave else None
    if leave:
        a[pairs[[4, 9], 0], pairs[[4, 9], 1]] = 0.0
    x = torch.cat((user, item))
    total = x * (own if hops else 1.0)
    square = torch.zeros(16, 16, dtype=torch.float64)
    square[:9, 9:], square[9:, :9] = a, a.t()
    for _ in range(hops):
        x = square @ x
        total = total + x
    expected = torch.nn.functional.normalize(total, dim=1)
    if bias:
        with torch.no_grad():
            towers.bias.copy_(torch.linspace(-1, 1, 7))
        last = torch.cat((torch.ones(9), torch.linspace(-1, 1, 7))).double()
        expected = torch.cat((expected, last[:, None]), 1)
    got = torch.cat(towers(leave_out))
    assert got.shape == (16, 4)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)  # weights were rounded to fp32
    g = torch.randn_like(got)
    (got * g).sum().backward()
    (expected * g).sum().backward()
    torch.testing.assert_close(towers.user.weight.grad, user.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(towers.item.weight.grad, item.grad, atol=1e-5, rtol=1e-5)
    if bias:
        torch.testing.assert_close(towers.bias.grad, g[9:, -1])
    if leave:  # of that call alone
        assert not torch.equal(torch.cat(towers()), got)


def test_towers_without_own_embeddings_give_nothing_to_who_has_no_pair():
    towers = retrieve.TwoTowers(3, 3, 4, torch.tensor([[0, 0], [1, 0], [1, 2]]), hops=2, own=0.0)
    users, items = towers()
    assert users.norm(dim=1).tolist() == pytest.approx([1, 1, 0])
    assert items.norm(dim=1).tolist() == pytest.approx([1, 0, 1])
    users.sum().backward()
    assert torch.isfinite(towers.item.weight.grad).all()


def test_what_makes_no_towers():
    pairs = torch.tensor([[0, 1], [2, 0]])
    for arguments, words in (
        ((0, 3, 4, pairs), "users, items and dim must be positive .*, hops and own 0 or more, got 0, 3, 4, 2 and 1.0"),
        ((3, 3, 4), "pairs must be the training pairs for 2 hops, got None"),
        ((2, 3, 4, pairs), "pairs must hold users from 0 to 1, got 2"),
        ((3, 1, 4, pairs), "pairs must hold items from 0 to 0, got 1"),
        ((3, 3, 4, pairs.float()), r"pairs must be \(pairs, 2\) integers"),
    ):
        with pytest.raises(ValueError, match=words):
            retrieve.TwoTowers(*arguments)
