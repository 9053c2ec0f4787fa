"""Mined negatives and rules against slow loops."""

import numpy as np
import pytest
import torch

from tigon import retrieve
from tigon.retrieve import col, negatives

N, D, B = 90, 8, 7
GROUPS = [i % 3 for i in range(N)]
WHERES = ["group == 0", None, col("group") != 1, "group == 0", None, "group == 2", "group == 9"]


def passes(where, row):
    group = GROUPS[row]
    return {"group == 0": group == 0, "group == 2": group == 2, "group == 9": False}.get(str(where), True) and not (
        "!=" in str(where) and group == 1
    )


def named(kind):
    """Ids of the items: they are no rows."""
    return [f"i{i * 7}" for i in range(N)] if kind == "str" else [1000 - 3 * i for i in range(N)]


def made(kind="int", **options):
    torch.manual_seed(0)
    x = torch.randint(-3, 4, (N, D)).float()  # many ties
    index = retrieve.Index(D, 2 * N, "float32", schema=retrieve.Schema(group=retrieve.Category()), **options)
    index.upsert(named(kind), x, {"group": GROUPS})
    return index, x, torch.randint(-3, 4, (B, D)).float()


def slow(x, q, right, k, skip, wheres, gone=()):
    """Of each query the rows that are left, the best first, equal ones by row."""
    found = torch.full((B, k), -1)
    for b in range(B):
        order = sorted(range(N), key=lambda row, b=b: (-float(q[b] @ x[row]), row))
        left = [row for row in order if row not in right[b] and row not in gone and passes(wheres[b], row)]
        left = left[skip : skip + k]
        found[b, : len(left)] = torch.tensor(left, dtype=torch.long)
    return found


def best(x, q, every=2, most=9):
    """Positives that a search finds: of each query another number of its best rows."""
    order = (q @ x.T).argsort(dim=1, descending=True)
    return [order[b, : every * (b + 1) : every][:most].tolist() for b in range(B)]


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("kind", ["int", "str"])
@pytest.mark.parametrize("skip", [0, 4])
def test_the_best_that_are_not_right(kind, skip, narrow, monkeypatch):
    index, x, q = made(kind)
    right, ids = best(x, q), named(kind)
    if not narrow:  # as where positives are more than a search can find beside
        monkeypatch.setattr(negatives, "MOST", 6 + skip)
        monkeypatch.setattr(negatives, "PIECE", 3)
    width = max(map(len, right))
    nothing = None if kind == "str" else -1
    padded = [[ids[row] for row in rows] + [nothing] * (width - len(rows)) for rows in right]
    pairs = [(b, ids[row]) for b in reversed(range(B)) for row in right[b]]
    pairs += [(0, "new" if kind == "str" else 10**6), pairs[0]]  # of an item that is not there, and one again
    vectors = torch.tensor([b for b, _ in pairs]), [id for _, id in pairs]
    padded = np.array(padded, dtype=object) if kind == "str" else torch.tensor(padded)
    for where in (None, "group == 0", WHERES):
        want = slow(x, q, right, 6, skip, where if isinstance(where, list) else [where] * B)
        for positives in (padded, vectors):
            assert torch.equal(negatives.mine(index, q, positives, 6, skip_first=skip, where=where), want)
    found = negatives.mine(index, q, padded, 6, skip_first=skip, where=WHERES, ids=True)
    assert found.tolist() == [[ids[row] if row >= 0 else nothing for row in rows] for rows in want.tolist()]


def test_one_positive_a_query_and_items_that_are_gone():
    index, x, q = made()
    ids, top = named("int"), (q @ x.T).argmax(1)
    gone = (q @ x.T).topk(3).indices[:, 1:].unique().tolist()
    index.delete([ids[row] for row in gone])
    positives = torch.tensor(ids)[top]
    want = slow(x, q, top[:, None].tolist(), 5, 0, [None] * B, gone)
    assert torch.equal(negatives.mine(index, q, positives, 5), want)
    assert torch.equal(negatives.mine(index, q.double().numpy(), positives.tolist(), 5), want)


def test_over_a_parameter_they_are_those_of_the_weights_of_the_moment():
    torch.manual_seed(0)
    items, q = torch.nn.Embedding(N, D), torch.randn(B, D, requires_grad=True)
    index = retrieve.Index.over(items, codes="int8")
    positives = torch.arange(B)
    for _ in range(2):
        scores = (q @ items.weight.T).detach()
        scores[torch.arange(B), positives] = -torch.inf
        mined = negatives.mine(index, q, positives, 4)
        assert torch.equal(mined, scores.topk(4).indices)
        before = (q @ items.weight.T).detach().gather(1, mined).mean()
        retrieve.sampled_softmax(q, items, positives, mined).backward()
        with torch.no_grad():
            items.weight -= 3 * items.weight.grad
        assert (q @ items.weight.T).gather(1, mined).mean() < before


def test_more_than_there_are_leaves_places_empty():
    index, _, q = made()
    found = negatives.mine(index, q, torch.tensor(named("int")[:B]), 100, skip_first=3)
    assert ((found >= 0).sum(1) == N - 4).all()
    assert (found[:, N - 4 :] == -1).all()
    assert negatives.mine(index, q[:0], torch.zeros(0, dtype=torch.long), 3).shape == (0, 3)
    empty = retrieve.Index(D, 5, "float32")
    assert negatives.mine(empty, q, torch.zeros(B, 1, dtype=torch.long), 3).tolist() == [[-1] * 3] * B


@pytest.mark.parametrize("tested", [64, 3])
def test_what_is_allowed_is_what_passes(tested, monkeypatch):
    monkeypatch.setattr(negatives, "TESTED", tested)
    index, _, _ = made()
    index.delete(named("int")[4:6])
    shared, own = torch.randint(-1, N, (40,)), torch.randint(-1, 2 * N, (B, 11))

    def slowly(where, row):
        return 0 <= row < N and row not in (4, 5) and passes(where, row)

    for rows in (shared, own):
        lines = rows.expand(B, -1).tolist()
        found = negatives.find_allowed(index, WHERES, rows.int())
        want = [[slowly(where, row) for row in line] for where, line in zip(WHERES, lines, strict=True)]
        assert found.tolist() == want
        assert 0 < found.sum() < 0.6 * found.numel()
        for where in ("group == 0", None):
            found = negatives.find_allowed(index, where, rows)
            assert found.shape == rows.shape
            assert found.expand(B, -1).tolist() == [[slowly(where, row) for row in line] for line in lines]
        assert negatives.find_allowed(index, [None] * B, rows).tolist() == [
            [slowly(None, row) for row in line] for line in lines
        ]


def test_losses_among_what_a_query_could_have_been_shown():
    """The masks of rules: the loss of all negatives at once is that of each query among its own."""
    index, x, q = made()
    row, drawn = torch.tensor([0, 5, 3, 9, 4, 8, 2]), torch.randint(0, N, (30,))
    rules = retrieve.Negatives(row, allowed=negatives.find_allowed(index, WHERES, row))
    scores = q @ x[row].T
    total = 0.0
    for b in range(B):
        others = [j for j in range(B) if j != b and passes(WHERES[b], int(row[j]))]
        total += torch.logsumexp(scores[b, [b, *others]], 0) - scores[b, b]
    torch.testing.assert_close(retrieve.in_batch_softmax(q, x[row], rules), total / B)
    mask = negatives.find_allowed(index, WHERES, drawn)
    shared = retrieve.sampled_softmax(q, x, row, retrieve.Negatives(drawn, allowed=mask), torch.zeros(N))
    alone = retrieve.sampled_softmax(q, x, row, drawn.expand(B, -1).masked_fill(~mask, -1))
    torch.testing.assert_close(shared, alone)


def test_what_they_refuse():
    index, _, q = made()
    strings, _, _ = made("str")
    one = torch.zeros(B, dtype=torch.long)
    for call, words in (
        (lambda: negatives.mine(q, q, one, 3), "index must be an Index, got Tensor"),
        (lambda: negatives.mine(index, q, one, 0), "k must be a positive integer, got 0"),
        (lambda: negatives.mine(index, q, one, 3, skip_first=-1), "skip_first must be an integer, 0 or more, got -1"),
        (
            lambda: negatives.mine(index, q, one, 2000, skip_first=49),
            r"k \+ skip_first must be at most 2,048, got 2,049",
        ),
        (lambda: negatives.mine(index, q, one[:3], 3), r"positives must be \(7,\) or \(7, P\) ids.*got \(3, 1\)"),
        (
            lambda: negatives.mine(index, q, q, 3),
            "positives must be integers, like the index's ids, got torch.float32",
        ),
        (lambda: negatives.mine(strings, q, one, 3), "positives must be strings, like the index's ids"),
        (lambda: negatives.mine(index, q, ["a"] * B, 3), "positives must be ids with the index's type"),
        (lambda: negatives.mine(index, q, (one, one, one), 3), r"a tuple must be \(queries, ids\), got 3 values"),
        (lambda: negatives.mine(index, q, (one, one[:3]), 3), r"two equally long vectors.*and \(3,\)"),
        (lambda: negatives.mine(index, q, (one + 7, one), 3), "positives must have queries from 0 to 6, got 7"),
        (lambda: negatives.find_allowed(q, None, one), "index must be an Index, got Tensor"),
        (lambda: negatives.find_allowed(index, WHERES, one.view(1, B)), r"rows must be \(K,\) or \(7, K\) integers"),
        (lambda: negatives.find_allowed(index, None, q), r"rows must be \(K,\) or \(B, K\) integers, got \(7, 8\)"),
    ):
        with pytest.raises(ValueError, match=f"negatives\\.(mine|find_allowed): .*{words}"):
            call()
