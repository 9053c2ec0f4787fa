"""Two towers: pooling against dense matrices, and what they refuse."""

import pytest
import torch

from tigon import retrieve


@pytest.mark.parametrize("hops", [0, 1, 3])
def test_vectors_and_gradients_are_those_of_dense_matrices(hops):
    torch.manual_seed(0)
    dense = torch.rand(9, 7) < 0.4
    dense[2], dense[:, 3] = False, False  # a user and an item without pairs
    pairs = dense.nonzero()
    towers = retrieve.TwoTowers(9, 7, 4, torch.cat((pairs, pairs[:2])), hops=hops).double()
    user, item = (t.weight.detach().clone().requires_grad_() for t in (towers.user, towers.item))
    degree = dense.double()
    a = degree / (degree.sum(1, keepdim=True) * degree.sum(0)).clamp(min=1).sqrt()
    x, total = torch.cat((user, item)), torch.cat((user, item))
    square = torch.zeros(16, 16, dtype=torch.float64)
    square[:9, 9:], square[9:, :9] = a, a.t()
    for _ in range(hops):
        x = square @ x
        total = total + x
    expected = torch.nn.functional.normalize(total, dim=1)
    got = torch.cat(towers())
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)  # weights were rounded to fp32
    g = torch.randn_like(got)
    (got * g).sum().backward()
    (expected * g).sum().backward()
    torch.testing.assert_close(towers.user.weight.grad, user.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(towers.item.weight.grad, item.grad, atol=1e-5, rtol=1e-5)


def test_what_makes_no_towers():
    pairs = torch.tensor([[0, 1], [2, 0]])
    for arguments, words in (
        ((0, 3, 4, pairs), "users, items and dim must be positive and hops 0 or more, got 0, 3, 4 and 2"),
        ((3, 3, 4), "pairs must be the training pairs that 2 hops pool, got None"),
        ((2, 3, 4, pairs), "pairs must hold users from 0 to 1, got 2"),
        ((3, 1, 4, pairs), "pairs must hold items from 0 to 0, got 1"),
        ((3, 3, 4, pairs.float()), r"pairs must be \(pairs, 2\) integers"),
    ):
        with pytest.raises(ValueError, match=words):
            retrieve.TwoTowers(*arguments)
