"""Graphs of blocks in a LiRank: what each computes by its formula, the hand-written model as a graph, its folder."""

import json

import pytest
import torch
from requests_made import SCHEMA, batch, randomly

from tigon import rank
from tigon.rank.data.fields import Id, Number, Text
from tigon.rank.models.lirank.blocks import count_flops
from tigon.rank.models.lirank.graph import Block, blocks_to_json, find_outputs, parse_blocks

WIDTH = 8
EVERY = (
    Block("mlp", 6, (0,)), Block("cross", 3, (0, 1)), Block("residual-cross", 4, (0, 2)), Block("gate", 5, (1, 3)),
    Block("fm", 7, (0, 4)), Block("dot", 9, (0, 1)), Block("fm", 5, (1, 5)),
)  # fmt: skip


def made(blocks, **options):
    return rank.LiRank(SCHEMA, rank.LiRankConfig(WIDTH, blocks=blocks, **options))


def drawn(seed=0):
    return batch([0, 0, 0], [3, 1, 4], SCHEMA, seed)


def test_the_hand_written_model_is_a_graph():
    """The same weights by other names, the same bits and as many FLOPs."""
    hand = rank.LiRank(SCHEMA, rank.LiRankConfig(WIDTH, "residual", 2, 4, (6, 5), False)).eval()
    cross = [Block("residual-cross", 4, (n,)) for n in (0, 1)]
    graph = made([*cross, Block("mlp", 6, (0,)), Block("mlp", 5, (3,))]).eval()
    randomly(hand)
    hand.float()
    graph.load_state_dict(dict(zip(graph.state_dict(), hand.state_dict().values(), strict=True)))
    of_hand, of_graph = hand(drawn()), graph(drawn())
    assert all(torch.equal(of_hand[label], of_graph[label]) for label in of_hand)
    # By hand: 2 for a product and its sum.
    wide = hand.inputs.width
    crosses = 2 * (2 * wide * 12 + 2 * 4 * wide + 4 * 4 * 4)
    heads = 2 * 2 * (wide + 5)
    assert count_flops(graph) == count_flops(hand) == crosses + 2 * wide * 6 + 2 * 6 * 5 + heads


def test_each_block_is_its_formula():
    model = randomly(made(EVERY, norm="none", temperature=0.7)).eval()
    graph = model.blocks
    x = torch.randn(5, model.inputs.width, dtype=torch.float64)
    w = dict(graph.named_parameters())

    def linear(name, h):
        return h @ w[f"layers.{name}.weight"].T + w.get(f"layers.{name}.bias", torch.zeros(1, dtype=torch.float64))

    one = linear("0.linear", x).relu()
    two = x * linear("1.up", linear("1.down", torch.cat((x, one), 1))) + x  # x alone is as wide
    q, k, v = linear("2.down", torch.cat((x, two), 1)).chunk(3, 1)
    h = torch.einsum("nij,nj->ni", (q[:, :, None] * k[:, None] / 0.7).softmax(2), v) + v
    three = x * linear("2.up", h) + (x + two) / 2
    four = 2 * three * linear("3.up", linear("3.down", torch.cat((one, three), 1))).sigmoid()
    fields, at = [], 0
    for n, width in enumerate(model.inputs.vectors):
        part = x[:, at : at + width]
        fields.append((n, width, part))
        at += width
    assert {width for _, width, _ in fields} == {WIDTH, 4}

    def vectors(layer, others):
        own = [part if width == WIDTH else linear(f"{layer}.fields.{n}", part) for n, width, part in fields]
        return torch.stack([*own, *(linear(f"{layer}.others.{n}", h) for n, h in enumerate(others))], 1)

    def pairs(v):
        return [(v[:, i] * v[:, j]) for i in range(v.shape[1]) for j in range(i + 1, v.shape[1])]

    five = linear("4.up", sum(pairs(vectors(4, [four]))))
    six = linear("5.up", torch.stack([p.sum(1) for p in pairs(vectors(5, [one]))], 1))
    v = torch.stack([linear("6.others.0", one), linear("6.others.1", five)], 1)
    seven = linear("6.up", v[:, 0] * v[:, 1])
    assert find_outputs(EVERY) == [6, 7]
    torch.testing.assert_close(graph(x), torch.cat((six, seven), 1), rtol=1e-11, atol=1e-11)
    assert graph(x).shape[1] == graph.width == 14


def test_products_in_bf16_say_nearly_the_same():
    torch.manual_seed(0)
    model = made(EVERY)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    with torch.autocast("cpu", torch.bfloat16):
        sum(z.sum() for z in model(drawn()).values()).backward()
        narrow = model.eval()(drawn())
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    for label, z in model(drawn()).items():
        assert narrow[label].dtype == torch.float32
        torch.testing.assert_close(narrow[label], z, rtol=0.05, atol=0.05)


def test_flops_are_those_of_the_products():
    counted = count_flops(made([Block("fm", 7, (0,)), Block("dot", 9, (0, 1)), Block("gate", 3, (2,))]).blocks)
    inputs = made([Block("mlp", 1, (0,))]).inputs
    k, wide = len(inputs.vectors), inputs.width
    narrow = sum(2 * w * WIDTH for w in inputs.vectors if w != WIDTH)
    fm = narrow + 4 * k * WIDTH + 2 * WIDTH * 7
    dot = narrow + 2 * 7 * WIDTH + 2 * (k + 1) ** 2 * WIDTH + 2 * (k * (k + 1) // 2) * 9
    assert counted == fm + dot + 2 * 9 * 3 + 2 * 3 * wide


def test_a_graph_is_trained_kept_compressed_and_exported(tmp_path):
    model = made(EVERY, dropout=0.1)
    sum(z.square().sum() for z in model(drawn()).values()).backward()
    assert all(p.grad is not None for p in model.blocks.parameters())
    model.eval().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["blocks"][3] == {
        "kind": "gate", "width": 5, "inputs": [1, 3]
    }  # fmt: skip
    again = rank.Ranker.from_pretrained(tmp_path)
    want = model(drawn())
    assert all(torch.equal(z, want[label]) for label, z in again(drawn()).items())
    small = rank.quantize_tables(model)
    assert small.config.blocks == model.config.blocks
    assert (small(drawn())["click"] - want["click"]).abs().max() < 0.02


def test_the_program_of_a_graph_says_what_the_ranker_says(tmp_path):
    schema = rank.Schema({"labels": ["click"]}, {"a": Id(hash_rows=9), "b": Id(hash_rows=5), "c": Number(scale="none")})
    model = rank.LiRank(schema, rank.LiRankConfig(4, blocks=EVERY)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    features = {"a": torch.tensor([3, 0, 9, 1]), "b": torch.tensor([5, 1, 0, 2]), "c": torch.tensor([0.5, -1, 2, 0])}
    (file,) = rank.export(model, tmp_path)
    x = model.inputs({}, features, None)
    said = torch.export.load(file).module()(features)["click"]
    torch.testing.assert_close(said, model.logits(model.run_layers(x))["click"], rtol=1e-5, atol=1e-5)
    assert said.std() > 0.01


def test_text_and_ids_of_a_graph():
    assert parse_blocks(json.loads(blocks_to_json(EVERY))) == EVERY
    assert str(EVERY[3]) == "gate 5 of 1, 3"
    assert str(EVERY[1]) == "cross 3 of x, 1"


MLP = {"kind": "mlp", "width": 4, "inputs": [0]}


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        ([], r"^LiRank: blocks must be a list of blocks.*no path leads from the features to the towers; got \[\]\.$"),
        (MLP, r"blocks must be a list of blocks"),
        ([{**MLP, "kind": "croos"}], r"there is no kind 'croos'; did you mean 'cross'\?"),
        ([{**MLP, "width": 0}], r"block 1, mlp, must have a positive width, got 0\.$"),
        ([{**MLP, "inputs": []}], r"block 1, mlp, must read .*no path leads to the block\), got \[\]\.$"),
        ([{**MLP, "inputs": [1]}], r"block 1, mlp, is the first and can read only the features, 0, got 1\.$"),
        ([MLP, {**MLP, "inputs": [0, 2]}], r"block 2, mlp, must read .*from 1 to 1, got 2\.$"),
        ([{**MLP, "inputs": [0, 0]}], r"must read each input once, got \[0, 0\]\.$"),
        ([{"kind": "mlp", "inputs": [0]}], r"block 1 must have kind, width, inputs, .* got \{'kind': 'mlp'"),
        ([MLP, Block("fm", 4, (1,))], r"blocks: fm 4 of 1 must read two vectors or more .* got one\.$"),
    ],
)
def test_what_is_no_graph_is_refused(blocks, sentence):
    with pytest.raises(ValueError, match=sentence):
        made(blocks)


def test_vectors_are_those_of_all_inputs():
    schema = SCHEMA.replace({"hashed": Id(hash_rows=5, hash="qr", side="row"), "note": Text()})
    inputs = rank.LiRank(schema, rank.LiRankConfig(WIDTH, blocks=[MLP])).inputs
    # genres are 4 wide; words attend; the hash's two tables make one vector, and a time two.
    assert sorted(inputs.vectors) == [4] + [WIDTH] * 8
    assert sum(inputs.vectors) == inputs.width
