"""A search: which graphs there are and which are tried, what a trial is trained on, and a study that goes on."""

import dataclasses
import json
import math
import threading
from random import Random

import numpy as np
import pytest
import torch

for package in ("optuna", "lightgbm", "pyarrow", "accelerate", "safetensors"):
    pytest.importorskip(package)
import optuna  # noqa: E402
from requests_made import SCHEMA, batch  # noqa: E402

from tigon import rank  # noqa: E402
from tigon.rank.models.lirank.blocks import count_flops  # noqa: E402
from tigon.rank.models.lirank.graph import KINDS, Block, parse_blocks  # noqa: E402
from tigon.rank.search import evolution, guide  # noqa: E402
from tigon.rank.search import search as module  # noqa: E402
from tigon.rank.search.evolution import choose_graph, select_distinct, select_survivors, shared_fraction  # noqa: E402
from tigon.rank.search.fidelity import ReducedData  # noqa: E402
from tigon.rank.search.measures import measure  # noqa: E402
from tigon.rank.search.space import WIDTHS, Space, Trial, depth, graph_key  # noqa: E402

SPACE = Space()


def draw_graphs(n, space=SPACE, seed=0):
    random = Random(seed)
    return [space.draw(random) for _ in range(n)]


# ---------------------------------------------------------------------------------------------------------- the space


def test_random_graphs_are_of_every_kind_and_size():
    graphs = draw_graphs(300)
    assert all(SPACE.allows(graph) and parse_blocks(graph) == graph for graph in graphs)
    assert {len(graph) for graph in graphs} == set(range(1, 8))
    assert {(b.kind, b.width) for graph in graphs for b in graph} == {(k, w) for k in KINDS for w in WIDTHS[k]}
    assert len({graph_key(graph) for graph in graphs}) > 280
    small = Space(("mlp", "fm"), 2, vectors=1)
    for graph in draw_graphs(50, small):
        assert len(graph) <= 2
        assert all(b.kind == "mlp" or b.inputs == (0, 1) for b in graph)  # one vector has no pair


def test_a_mutant_differs_in_one_respect():
    random = Random(1)
    ways = set()
    for graph in draw_graphs(150, seed=2):
        found = SPACE.mutate(graph, random)
        assert SPACE.allows(found)
        assert graph_key(found) != graph_key(graph) or found != graph
        if len(found) != len(graph):
            ways.add(len(found) - len(graph))
            if len(found) > len(graph):
                assert found[:-1] == graph
            continue
        (pair,) = [(a, b) for a, b in zip(graph, found, strict=True) if a != b]
        a, b = pair
        level = [WIDTHS[one.kind].index(one.width) for one in pair]
        changed = [a.kind != b.kind, level[0] != level[1], len(set(a.inputs) ^ set(b.inputs)) == 1]
        assert sum(changed) == 1
        ways.add(changed.index(True) + 10)
    assert ways == {1, -1, 10, 11, 12}


def test_what_read_a_block_that_goes_reads_what_it_read():
    graph = (Block("mlp", 32, (0,)), Block("cross", 8, (1,)), Block("dot", 16, (0, 2)))
    gone = set()
    for seed in range(200):
        found = SPACE.mutate(graph, Random(seed))
        if len(found) == 2:
            gone.add(found)
    assert gone == {
        (Block("cross", 8, (0,)), Block("dot", 16, (0, 1))),
        (Block("mlp", 32, (0,)), Block("dot", 16, (0, 1))),
        (Block("mlp", 32, (0,)), Block("cross", 8, (1,))),
    }


def test_a_key_has_no_order():
    a, b = Block("mlp", 32, (0,)), Block("cross", 8, (0,))
    first = (a, b, Block("gate", 8, (1,)))
    second = (b, a, Block("gate", 8, (2,)))
    other = (b, a, Block("gate", 8, (1,)))
    assert graph_key(first) == graph_key(second) != graph_key(other)
    assert (depth(first), depth((a,))) == (2, 1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"most": 0}, r"most must be from 1 to 7 blocks, got 0: without a block no path leads"),
        ({"kinds": ()}, r"kinds must name one of mlp, .*, got none: without a block no path leads"),
        ({"kinds": ("dott",)}, r"there is no block kind 'dott'; did you mean 'dot'\?"),
        ({"kinds": ("fm", "dot"), "vectors": 1}, r"a single vector, so no block can read the features"),
    ],
)
def test_a_space_without_a_path_is_refused(options, sentence):
    with pytest.raises(ValueError, match=rf"^rank\.search_blocks: .*{sentence}"):
        Space(**options)


# -------------------------------------------------------------------------------------------------------- what is tried


def test_survivors_are_young_and_good_and_cheap():
    graphs = draw_graphs(70, seed=3)
    tried = [Trial(n, graph, 0.5 + 0.001 * n, 10_000 - n) for n, graph in enumerate(graphs)]
    found = select_survivors(tried)
    assert [one.number for one in found] == list(range(20, 40))  # 0 to 19 are too old
    # A tenth of the rank by FLOPs: 11 places there are worth more than one place by loss.
    assert evolution.dense_ranks([0.3, 0.1, 0.3, 0.2]) == [2, 0, 2, 1]
    costs = [300, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130]
    close = [Trial(n, graphs[n], 0.1 * n, costs[n]) for n in range(13)]
    assert [one.number for one in select_survivors(close)][:2] == [1, 0]


def test_the_best_that_are_fitted_are_no_mutants_of_one_another():
    def graph(*blocks):
        return tuple(Block(kind, width, (0,)) for kind, width in blocks)

    a, b, c, d = ("mlp", 32), ("mlp", 64), ("cross", 8), ("gate", 8)
    graphs = [graph(a, b, c), graph(a, b, d), graph(b, b, c, d), graph(a, d), graph(c)]
    assert shared_fraction(graphs[0], graphs[1]) == pytest.approx(2 / 3)
    assert shared_fraction(graphs[0], graphs[2]) == pytest.approx(4 / 7)  # b, which the first has once, counts once
    assert shared_fraction(graphs[0], graphs[0]) == 1
    tried = [Trial(9 - n, one, 0.1 + n, 1) for n, one in enumerate(graphs)]

    def numbers(most, of=tried):
        return [one.number for one in select_distinct(of, most)]

    # Of the second and third more than half is the first's; of the fourth two of five, of the fifth one of two.
    assert numbers(3) == [9, 6, 5]
    assert numbers(1) == [9]
    assert numbers(0) == []
    # Fewer are apart than asked for: the best of the others follow, so that a larger number keeps the smaller's.
    assert numbers(4) == [9, 6, 5, 8]
    assert numbers(9) == [9, 6, 5, 8, 7]
    assert numbers(2, tried[::-1]) == [9, 6]


def test_the_first_are_random_and_then_the_guide_is_followed(monkeypatch):
    graphs = draw_graphs(20, seed=4)
    tried = [Trial(n, graph, 1.0 + n, 1) for n, graph in enumerate(graphs)]
    seen = {graph_key(graph) for graph in graphs}
    for sampler in ("random", "evolution"):
        assert choose_graph(SPACE, sampler, tried[:19], seen, 0, 19) == choose_graph(
            SPACE, "random", tried[:19], seen, 0, 19
        )
    offered = []

    def pick_graph(tried, mutants, seed):
        offered[:] = mutants
        return mutants[7]

    monkeypatch.setattr(evolution, "pick_graph", pick_graph)
    found = choose_graph(SPACE, "evolution", tried, seen, 0, 20)
    assert found == offered[7]
    assert len(offered) == len({graph_key(one) for one in offered}) > 50
    assert not seen & {graph_key(one) for one in offered}
    again = choose_graph(SPACE, "evolution", tried, seen, 0, 20)
    assert again == found != choose_graph(SPACE, "evolution", tried, seen, 1, 20)


def test_the_guide_learns_what_makes_a_graph_good():
    """The loss falls with the crosses of a graph: of 40 that are new, the pick is among those with the most."""

    def loss(graph):
        return -sum(block.kind == "cross" for block in graph)

    graphs = draw_graphs(140, seed=5)
    tried = [Trial(n, graph, loss(graph), 1) for n, graph in enumerate(graphs[:100])]
    found = guide.pick_graph(tried, graphs[100:], 0)
    assert loss(found) <= sorted(map(loss, graphs[100:]))[3]
    assert guide.pick_graph(tried, graphs[100:], 0) == found
    assert guide.grades([0.5, 0.1, 0.9, 0.2]).tolist() == [2, 7, 0, 5]


# ---------------------------------------------------------------------------------------------- what it is trained on


class Ten:
    """Ten batches of a request with two candidates."""

    schema = SCHEMA

    def __len__(self):
        return 10

    def batches(self, *, requests=None, skip=0, **_):
        for n in range(skip, 10):
            yield batch([0], [2], SCHEMA, n)


def test_a_share_is_drawn_and_codes_are_folded():
    data = Ten()
    small = ReducedData(data, 0.25, 4)
    drawn = list(small.batches(requests=1))
    assert (len(small), len(drawn), len(list(small.batches(requests=1, skip=2)))) == (3, 3, 1)
    assert {name: field.rows for name, field in small.schema.fields.items() if name in small.sizes} == {
        "item": 5, "genres": 5, "words": 5
    }  # fmt: skip
    for one, full in zip(drawn, data.batches(requests=1), strict=False):
        want = [0 if code == 0 else 1 + (code - 1) % 4 for code in full.items["item"].tolist()]
        assert one.items["item"].tolist() == want
        assert torch.equal(one.items["genres"].offsets, full.items["genres"].offsets)
        assert one.items["genres"].values.le(4).all()
        assert torch.equal(one.items["position"].isnan(), full.items["position"].isnan())
    ranker = rank.LiRank(small.schema, rank.LiRankConfig(4, blocks=[Block("dot", 3, (0,))]))
    assert set(ranker(drawn[0])) == {"click", "like"}
    assert ReducedData(data, 1.0, None).schema is SCHEMA


# ------------------------------------------------------------------------------------------------------------ a search


def table(rows=240, seed=0, label="click"):
    draw = np.random.default_rng(seed)
    banner, visitor = draw.integers(6, size=rows), draw.integers(5, size=rows)
    return {"banner": [f"b{b}" for b in banner], "visitor": [f"v{v}" for v in visitor],
            label: ((banner + visitor) % 2).astype(int)}  # fmt: skip


@pytest.fixture(scope="module")
def parts():
    data = rank.Impressions.read(table(), labels="click")
    return data.split(by="request", fraction=0.3)


FIT = rank.FitOptions(epochs=1, batch_size=60, lr=0.02, precision="fp32")
MODEL = {"width": 4, "norm": "layer"}


def options(trials, **more):
    return rank.SearchOptions(trials, **{"rows": 0.5, "best": 2, "fit": FIT, "model": MODEL} | more)


@pytest.fixture(scope="module")
def whole_search(parts, tmp_path_factory):
    """A search of six trials, the last two of which are not random, here and in the tests that follow."""
    folder = tmp_path_factory.mktemp("studies") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evolution, "FIRST", 4)
        yield folder, rank.search_blocks(*parts, options(6), folder=folder, test=parts[1])


def losses(found):
    return [(one.number, graph_key(one.graph), one.loss) for one in found.trials]


def test_a_search_finds_and_fits(whole_search, parts):
    folder, found = whole_search
    assert [one.number for one in found.trials] == list(range(6))
    assert len({graph_key(one.graph) for one in found.trials}) == 6
    assert (found.failed, found.stopped) == (0, False)
    assert found.best.loss == min(one.loss for one in found.trials)
    assert {one.number for one in found.refits} == {one.number for one in select_distinct(found.trials, 2)}
    assert found.best.number in {one.number for one in found.refits}
    first = found.refits[0]
    assert first.validation["log_loss"] <= found.refits[1].validation["log_loss"]
    assert first.test == first.validation  # the same table
    ranker = rank.Ranker.from_pretrained(first.folder)
    assert measure(ranker, parts[1], FIT) == pytest.approx(first.validation, rel=1e-6)
    assert count_flops(ranker) == first.flops
    assert parse_blocks(json.loads((folder / "blocks.json").read_text())) == first.graph
    # What Optuna, and so its dashboard, sees of it.
    (study,) = optuna.get_all_study_summaries(f"sqlite:///{folder / 'study.db'}")
    assert study.best_trial.value == found.best.loss
    assert parse_blocks(study.best_trial.user_attrs["graph"]) == found.best.graph


def test_a_trial_is_a_fit_on_the_share(whole_search, parts):
    """The second trial by hand, as the formula of a trial says."""
    _, found = whole_search
    train, val = parts
    torch.manual_seed(0)
    ranker = rank.LiRank(train.schema, rank.LiRankConfig(blocks=found.trials[1].graph, **MODEL))
    rank.fit(ranker, ReducedData(train, 0.5, None), None, FIT)
    assert measure(ranker, val, FIT)["log_loss"] == pytest.approx(found.trials[1].loss, rel=1e-6)


def test_a_search_that_was_stopped_or_killed_goes_on(whole_search, parts, tmp_path, monkeypatch):
    _, want = whole_search
    monkeypatch.setattr(module, "HEARTBEAT", 1)
    monkeypatch.setattr(module, "GRACE", 1)
    steps = []

    def after(progress):
        steps.append(progress)
        return progress.trials == 4 and progress.result is None  # in the midst of the next trial

    first = rank.search_blocks(*parts, options(6), folder=tmp_path, after=after)
    assert (first.stopped, len(first.trials), first.refits) == (True, 4, [])
    assert steps[-1].best == first.best
    assert any(step.result == first.trials[3] for step in steps)
    # A killed process leaves a trial at work whose heart has stopped.
    study = module.open_study(tmp_path)
    dead = study.ask()
    study._storage.record_heartbeat(dead._trial_id)
    assert module.is_active(tmp_path)
    found = rank.search_blocks(*parts, options(6), folder=tmp_path, test=parts[1])
    assert not module.is_active(tmp_path)
    assert [graph_key(one.graph) for one in found.trials[:4]] == [graph_key(one.graph) for one in want.trials[:4]]
    assert [one.number for one in found.trials[4:]] == [6, 7]  # 4 was stopped, 5 killed
    # Nothing is left to do: what was fitted stays, and is not fitted again.
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("refits/*/*")}
    again = rank.search_blocks(*parts, options(6), folder=tmp_path, test=parts[1])
    assert again.refits == found.refits
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("refits/*/*")} == kept
    assert losses(again) == losses(found)


def test_other_data_labels_and_options_are_refused(whole_search, parts, tmp_path):
    folder, _ = whole_search
    train, val = parts
    fewer = rank.Impressions.read(table(100, 1), schema=train.schema)
    other = rank.Impressions.read(table(label="bought"), labels="bought").split(by="request", fraction=0.3)
    for arguments, sentence in (
        ((*other, options(6)), r"started with labels click, but got bought;"),
        ((fewer, val, options(6)), r"started with training data 168 requests, \w+, but got 100 requests, "),
        ((train, fewer, options(6)), r"started with held-out data 72 requests, .* but got 100 requests, "),
        ((*parts, options(6, sampler="random")), r"with sampler evolution, but got random;"),
        ((*parts, options(6, seed=1)), r"started with seed 0, but got 1;"),
        ((*parts, options(6, fit=dataclasses.replace(FIT, lr=0.5))), r"with fit lr 0\.02, but got 0\.5;"),
    ):
        with pytest.raises(ValueError, match=sentence):
            rank.search_blocks(*arguments, folder=folder)
    (tmp_path / "study.db").write_bytes(b"no database, but as long as a header of one" * 90)
    with pytest.raises(ValueError, match=r"study.db is not a readable study: .*file is not a database"):
        rank.search_blocks(*parts, options(1), folder=tmp_path)
    assert not module.is_active(tmp_path)  # so that another search may overwrite the study


def test_a_loss_that_is_not_finite_fails_its_trial_alone(parts, tmp_path, monkeypatch):
    real = module.measure
    calls = []

    def sometimes(*arguments):
        calls.append(arguments)
        return {"log_loss": math.nan} if len(calls) == 2 else real(*arguments)

    monkeypatch.setattr(module, "measure", sometimes)
    found = rank.search_blocks(*parts, options(3, sampler="random"), folder=tmp_path)
    assert ([one.number for one in found.trials], found.failed) == ([0, 2], 1)
    monkeypatch.setattr(module, "measure", lambda *_: {"log_loss": math.nan})
    with pytest.raises(FloatingPointError, match="no trial had a finite loss; a lower lr"):
        rank.search_blocks(*parts, options(1), folder=tmp_path / "none")


def test_a_trial_killed_before_its_first_heartbeat_is_replaced(tmp_path, monkeypatch):
    study = module.open_study(tmp_path)
    study.ask()
    assert module._count_states(study) == {"RUNNING": 1}
    monkeypatch.setattr(module, "GRACE", -1)
    assert module._count_states(study) == {"FAIL": 1}


def test_two_searches_share_the_trials_of_a_study(parts, tmp_path):
    """Each waits for the trials and the refits of the other, and has the same result."""
    results = []

    def search():
        results.append(rank.search_blocks(*parts, options(4, best=1), folder=tmp_path))

    threads = [threading.Thread(target=search) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one, two = results
    assert losses(one) == losses(two)
    assert len(one.trials) == 4  # also where both start the last trial at once
    assert one.refits == two.refits


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"trials": 0}, r"trials must be an integer of at least 1, got 0\.$"),
        ({"rows": 0.0}, r"rows must be a fraction, above 0 and at most 1, got 0\.0\.$"),
        ({"sampler": "tpe"}, r"sampler must be evolution or random, got 'tpe'\.$"),
        ({"fit": rank.FitOptions(loss="softmax")}, r"fit must use loss bce"),
        ({"model": {"cross": "dcn"}}, r"model must leave cross to the blocks, got cross='dcn'\.$"),
        ({"model": {"widht": 3}}, r"model has no 'widht'; did you mean 'width'\?"),
        ({"most": 8}, r"most must be from 1 to 7 blocks, got 8"),
    ],
)
def test_options_out_of_range_are_refused(changes, sentence):
    with pytest.raises(ValueError, match=rf"^rank\.search_blocks: {sentence}"):
        rank.SearchOptions(**changes)


def test_what_is_missing_is_named(parts, tmp_path, monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optuna" else found(name))
    with pytest.raises(
        ImportError, match=r"^rank\.search_blocks needs optuna: pip install '\.\[search\]' in a checkout"
    ):
        rank.search_blocks(*parts, folder=tmp_path)
