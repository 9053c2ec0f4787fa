"""G2R on a made graph: classes are planted, and are found without labels."""

import re

import pytest
import torch

import tigon
from tigon.graph import G2R, group_neighbors
from tigon.losses import RowGroups, coding_rate


def planted(nodes=240, classes=4, features=32):
    """(x, edge_index, labels): edges nearly all within a class, features that say little, and a node without edges."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(nodes) % classes
    inside = labels[:, None] == labels
    edges = torch.rand(nodes, nodes, generator=draw) < torch.where(inside, 0.03, 0.0005)
    edges = (edges | edges.T).fill_diagonal_(False)
    edges[0] = edges[:, 0] = False
    x = torch.randn(classes, features, generator=draw)[labels] + 8 * torch.randn(nodes, features, generator=draw)
    return x, edges.nonzero().T, labels


def nearest_class(z, labels):
    """Accuracy of the classes' means, taken of half of the nodes, on the other half."""
    z = torch.nn.functional.normalize(z)
    half = torch.arange(len(z)) // 4 % 2 == 0
    means = torch.stack([z[half & (labels == c)].mean(0) for c in labels.unique()])
    return float(((z[~half] @ means.T).argmax(1) == labels[~half]).float().mean())


def across(z, labels):
    """Cosines of nodes of two classes, over those of nodes of one."""
    z = torch.nn.functional.normalize(z)
    cosines, same = (z @ z.T).abs(), labels[:, None] == labels
    return float(cosines[~same].mean() / cosines[same].mean())


def test_planted_classes_are_found():
    x, edges, labels = planted()
    torch.manual_seed(0)
    model = tigon.graph.G2R(x.shape[1], hidden=64, out=64)
    before = model.encode(x, edges)
    losses = model.fit(x, edges, epochs=30, nodes=100)
    z = model.encode(x, edges)
    assert len(losses) == 30
    assert losses[-1] < 0.7 * losses[0]
    assert nearest_class(x, labels) < 0.5 < nearest_class(before, labels) < nearest_class(z, labels) - 0.05
    assert across(z, labels) < 0.6 * across(before, labels)
    torch.testing.assert_close(z.abs().sum(1), torch.ones(len(x)))
    assert not z.requires_grad
    assert model.training


def test_the_first_loss_is_the_formula():
    x, edges, _ = planted(40)
    model = G2R(x.shape[1], hidden=16, out=6, eps=0.2, gamma=0.7)
    n, adjacency = 40, torch.zeros(40, 40)
    adjacency[edges[1], edges[0]] = 1
    wide = adjacency + torch.eye(n)
    A = wide / (wide.sum(1)[:, None] * wide.sum(1)).sqrt()
    of = dict(model.encoder.named_parameters())
    z = A @ (torch.relu(A @ (x @ of["weight1"]) + of["bias1"]) @ of["weight2"]) + of["bias2"]
    z = (z / z.abs().sum(1, keepdim=True).clamp(min=1e-12)).detach()
    torch.testing.assert_close(model.encode(x, edges), z)
    torch.testing.assert_close(model.encode(x.to_sparse(), edges), z)
    eye, loss = torch.eye(6), 0.0
    for row in adjacency:
        if row.sum():
            loss += torch.logdet(eye + 6 / 0.2 * z.T @ torch.diag(row / row.sum()) @ z) / (2 * n)
    loss -= 0.7 * torch.logdet(eye + 0.7 * 6 / (n * 0.2) * z.T @ z) / 2
    assert model.fit(x, edges, epochs=1)[0] == pytest.approx(float(loss), rel=1e-5)


def test_a_fit_that_goes_on_is_the_whole_fit():
    x, edges, _ = planted(40)
    model, stopped = (G2R(x.shape[1], hidden=8, out=6) for _ in range(2))
    stopped.load_state_dict(model.state_dict())
    optimizer, seen = stopped.optimizer(), []

    def after(*found):
        seen.append(found)
        return len(seen) == 2

    whole = model.fit(x, edges, epochs=5, nodes=10)
    first = stopped.fit(x, edges, epochs=5, nodes=10, optimizer=optimizer, after=after)
    assert [epoch for epoch, _ in seen] == [1, 2]
    assert [float(loss) for _, loss in seen] == first == whole[:2]
    assert stopped.fit(x, edges, epochs=5, nodes=10, optimizer=optimizer, done=2) == whole[2:]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), stopped.parameters(), strict=True))
    assert model.fit(x, edges, epochs=5, done=5) == []


def test_neighbourhoods_by_columns_are_those_of_groups_of():
    x, edges, _ = planted(40)
    model = G2R(x.shape[1], hidden=8, out=6)
    z = model.encode(x, edges)
    apart = coding_rate(z, group_neighbors(edges, 40, normalize="columns"), eps=0.05)
    loss = apart - 0.5 * coding_rate(z, eps=0.05, gamma=0.5)
    assert model.fit(x, edges, epochs=1, normalize="columns")[0] == pytest.approx(float(loss), rel=1e-5)


def test_neighbourhoods_of_no_node_and_of_one():
    edges = torch.tensor([[1, 0, 3, 2], [0, 1, 2, 3]])  # two pairs; 4 and 5 stand alone
    model = G2R(3, hidden=8, out=6)
    x = torch.randn(6, 3)
    losses = model.fit(x, edges, epochs=3, nodes=100)
    assert torch.tensor(losses).isfinite().all()
    assert all(p.isfinite().all() for p in model.parameters())
    assert model.encode(x, edges).shape == (6, 6)


def test_a_model_is_saved_and_loaded(tmp_path):
    pytest.importorskip("safetensors")
    x, edges, _ = planted(40)
    model = G2R(x.shape[1], hidden=8, out=6, eps=0.2, gamma=0.7)
    model.save_pretrained(tmp_path / "a")
    again = G2R.from_pretrained(tmp_path / "a")
    assert torch.equal(again.encode(x, edges), model.encode(x, edges))
    assert (again.eps, again.gamma, again.training) == (0.2, 0.7, False)
    own = G2R(3, encoder=torch.nn.Linear(3, 3))
    (tmp_path / "file").write_text("")
    broken = tmp_path / "b"
    model.save_pretrained(broken)
    (broken / "config.json").write_text((broken / "config.json").read_text().replace(": 8", ": 9"))
    with pytest.raises(ValueError, match=r"config.json has changed since it was written"):
        G2R.from_pretrained(broken)
    (broken / "manifest.json").unlink()  # as of somebody who has changed the file on purpose
    for call, words in (
        (lambda: own.save_pretrained(tmp_path / "c"), "encoder must be the two convolutions, got a Linear"),
        (lambda: model.save_pretrained(tmp_path / "file"), "folder must be a folder, got the file"),
        (lambda: G2R.from_pretrained(tmp_path), "folder must hold config.json, which"),
        (lambda: G2R.from_pretrained(broken), "does not fit"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            call()


def test_an_encoder_and_an_optimizer_of_your_own():
    class Linear(torch.nn.Linear):
        def forward(self, x, edge_index):
            assert edge_index.shape[0] == 2
            return super().forward(x)

    x, edges, _ = planted(40)
    model = G2R(32, encoder=Linear(32, 6))
    weight = model.encoder.weight.detach().clone()
    model.fit(x, edges, epochs=2, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    assert torch.equal(model.encoder.weight, weight)
    model.fit(x, edges, epochs=2)
    assert not torch.equal(model.encoder.weight, weight)
    assert model.encode(x, edges).shape == (40, 6)


def test_groups_are_neighbourhoods():
    # 1 and 2 lead to 0, one of them twice; 0 and 3 to 1; 3 leads to itself; nothing leads to 2 and 3.
    edges = torch.tensor([[2, 1, 1, 0, 3, 3], [0, 0, 0, 1, 1, 3]])
    offsets, members = torch.tensor([0, 2, 4, 4, 4]), torch.tensor([1, 2, 0, 3])
    z = torch.randn(4, 3, dtype=torch.float64)
    for normalize, weights in (("rows", [0.5, 0.5, 0.5, 0.5]), ("columns", [1.0, 1.0, 1.0, 1.0])):
        groups = group_neighbors(edges, 4, normalize=normalize)
        assert len(groups) == 4
        right = coding_rate(z, RowGroups(offsets, members, torch.tensor(weights)), eps=0.1)
        torch.testing.assert_close(coding_rate(z, groups, eps=0.1), right)
    both = group_neighbors(torch.tensor([[0, 0], [1, 2]]), 3, normalize="columns")
    right = coding_rate(z[:3], (torch.tensor([0, 0, 1, 2]), torch.tensor([0, 0]), torch.tensor([0.5, 0.5])), eps=0.1)
    torch.testing.assert_close(coding_rate(z[:3], both, eps=0.1), right)
    assert coding_rate(z, group_neighbors(torch.empty(2, 0, dtype=torch.long), 4), eps=0.1) == 0


X, EDGES = torch.ones(4, 3), torch.tensor([[0, 1], [1, 0]])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: group_neighbors(torch.zeros(5, 2).long(), 4),
            "group_neighbors: edge_index must be (2, e) integers, sources and targets, got (5, 2) torch.int64.",
        ),
        (lambda: group_neighbors(EDGES.float(), 4), "got (2, 2) torch.float32."),
        (lambda: group_neighbors(EDGES, 1), "group_neighbors: edge_index must lie in [0, 1), the nodes, got 1."),
        (lambda: group_neighbors(-EDGES, 4), "group_neighbors: edge_index must lie in [0, 4), the nodes, got -1."),
        (lambda: group_neighbors(EDGES, 4, normalize="all"), "normalize must be one of 'rows', 'columns', got 'all'."),
        (lambda: G2R(0), "G2R: features must be positive, got 0."),
        (lambda: G2R(3, eps=0), "G2R: eps must be positive, got 0."),
        (lambda: G2R(5).encode(X, EDGES), "G2R: x must be (n, 5), got (4, 3)."),
        (lambda: G2R(3).encode(X.tolist(), EDGES), "G2R: x must be a tensor, got list."),
        (lambda: G2R(3).fit(X.double(), EDGES), "weights' dtype, torch.float32, got torch.float64: x.to("),
        (lambda: G2R(3).encode(X[:1], EDGES), "G2R: edge_index must lie in [0, 1), the nodes, got 1."),
        (lambda: G2R(3).fit(X, EDGES, nodes=0), "G2R.fit: nodes must be positive, got 0."),
        (lambda: G2R(3).fit(X * torch.nan, EDGES), "G2R.fit: x must be finite, got nan, one of 12 such numbers."),
        (lambda: G2R(3).fit((X / 0).to_sparse(), EDGES), "G2R.fit: x must be finite, got inf, one of 12 such numbers."),
        (lambda: G2R(3).fit(X, EDGES, normalize="all"), "normalize must be one of 'rows', 'columns', got 'all'."),
        (lambda: G2R(3).fit(X, torch.zeros(3, 2).long()), "G2R.fit: edge_index must be (2, e) integers, "),
        (
            lambda: G2R(3).fit(X, torch.tensor([[2], [2]])),
            "G2R.fit: edge_index must hold an edge between two nodes, got none.",
        ),
    ],
)  # fmt: skip
def test_bad_input_gets_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        call()
