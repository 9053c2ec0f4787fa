"""The next item of a history: the loss of all events, scores of the catalogue, and programs without Tigon."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from requests_made import ITEMS, SCHEMA, batch, chosen, randomly

from tigon import rank
from tigon.rank.data.fields import Id
from tigon.rank.data.schema import Schema
from tigon.rank.models.ligr.config import LiGRConfig
from tigon.rank.models.ligr.model import LiGR

HISTORIES = [4, 0, 7, 1]
NARROW = SCHEMA.replace({"item": Id(hash_rows=ITEMS, side="item", history=True, dim=6)})


def ranker(schema=SCHEMA, **options):
    return randomly(LiGR(schema, LiGRConfig(16, 2, 2, **options)), std=0.3)


def catalogue(model):
    """(codes, 16), each item as wide as the stream."""
    tokens = model.tokens.field_tokens("item")
    return tokens.project(tokens.table)


@pytest.mark.parametrize("schema", [SCHEMA, NARROW], ids=["as wide as the stream", "narrower"])
def test_the_loss_is_that_of_every_event_by_what_came_before_it(schema):
    model, made = ranker(schema), batch(HISTORIES, [1] * 4)
    items = made.history["item"]
    items[[1, 6]] = 0  # unseen items are no targets
    loss = model.next_item_loss(made)
    loss.backward()
    gradient = model.tokens.field_tokens("item").table.grad.clone()
    model.zero_grad()
    terms = []
    for r, n in enumerate(HISTORIES):
        for event in range(n):
            before = chosen(made, events=[[*range(event)] if s == r else [] for s in range(4)])
            x, _, layout = model.encode_histories(before, context=False)
            z = x[layout.cu_suffix[r + 1].long() - 1] @ catalogue(model)[1:].t()
            target = items[int(made.history_offsets[r]) + event]
            if target:
                terms.append(F.cross_entropy(z, target.long() - 1))
    expected = torch.stack(terms).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    expected.backward()
    torch.testing.assert_close(gradient, model.tokens.field_tokens("item").table.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seen", [True, False])
def test_recommendations_and_ranks_are_those_of_sorted_scores(seen, monkeypatch):
    from tigon.rank.models.ligr import next_item

    monkeypatch.setattr(next_item, "MOST", 2 * (ITEMS + 1))  # two requests at a time
    model, made = ranker(), batch(HISTORIES, [2, 3, 1, 2])
    with torch.no_grad():
        scores = model.next_item_scores(made)
        x, _, layout = model.encode_histories(made, context=False)
        expected = x[layout.cu_suffix[1:].long() - 1] @ catalogue(model).t()
        torch.testing.assert_close(scores[:, 1:], expected[:, 1:])
        assert (scores[:, 0] == -torch.inf).all()
        codes, best = model.recommend(made, 5, exclude_seen=seen)
        target = torch.tensor([3, 7, int(made.history["item"][5]), 0])
        ranks = model.next_item_ranks(made, target, exclude_seen=seen)
    for r in range(4):
        events = slice(made.history_offsets[r], made.history_offsets[r + 1])
        had = set(made.history["item"][events].tolist()) if seen else set()
        order = [c for c in scores[r].argsort(descending=True).tolist() if c and c not in had]
        assert codes[r].tolist() == order[:5]
        torch.testing.assert_close(best[r], scores[r][codes[r]])
        wanted = int(target[r])
        better = [c for c in order if scores[r, c] > scores[r, wanted] and c != wanted]
        assert int(ranks[r]) == (len(better) + 1 if wanted else 0)


def test_no_event_is_predicted_by_what_its_request_says():
    """A request comes after the events of its history: a field of it that names the last of them is of the future."""
    fields = {
        "item": Id(hash_rows=12, side="item", history=True), "query": Id(hash_rows=12, side="context"),
        "at": SCHEMA.fields["at"],
    }  # fmt: skip
    schema = Schema({"item": "item"}, fields)
    model, made = ranker(schema), batch(HISTORIES, [1] * 4, schema)
    ends = made.history_offsets[1:] - 1
    last = torch.where(made.history_offsets.diff() > 0, made.history["item"][ends], 0)
    told = dataclasses.replace(made, context={"query": last, "at": made.context["at"] + 3_600_000_000})
    loss = model.next_item_loss(told)
    assert torch.equal(loss, model.next_item_loss(made))
    loss.backward()
    assert all(p.grad is None for name in ("query", "at") for p in model.tokens.field_tokens(name).parameters())
    assert model.tokens.start.grad.norm() > 0
    with torch.no_grad():
        assert torch.equal(model.next_item_scores(told), model.next_item_scores(made))
        # Candidates are shown by the request itself, and read it.
        told, made = (model.encode_histories(one)[0] for one in (told, made))
        assert not torch.allclose(told, made)


def test_the_target_is_the_first_positive_candidate():
    model, made = ranker(), batch(HISTORIES, [2, 3, 1, 2])
    click = torch.tensor([0, 1, 0, 0, 0, 1, 1, 1]).float()
    made = dataclasses.replace(made, labels={**made.labels, "click": click})
    item = made.items["item"]
    target = torch.stack([item[1], torch.zeros_like(item[0]), item[5], item[6]]).long()
    with torch.no_grad():
        assert torch.equal(model.next_item_ranks(made), model.next_item_ranks(made, target))


def test_a_catalogue_that_was_seen_runs_out():
    schema = Schema({"item": "item"}, {"item": Id(vocab=(1, 2, 3), side="item", history=True)})
    model, made = ranker(schema), batch([3, 0], [1, 1], schema)
    made = dataclasses.replace(made, history={"item": torch.tensor([1, 2, 2])})
    codes, scores = model.recommend(made, 3)
    assert codes[0].tolist() == [3, -1, -1]
    assert scores[0].isfinite().tolist() == [True, False, False]
    assert sorted(codes[1].tolist()) == [1, 2, 3]


def test_what_has_no_next_item_is_refused():
    schema = Schema({"item": "item", "labels": ["click"]}, {"item": Id(hash_rows=9, side="item")})
    with pytest.raises(ValueError, match="the history must have the items' field 'item' to predict"):
        LiGR(schema, LiGRConfig(16, 1, 2)).next_item_loss(batch([1], [1], schema))
    model, made = ranker(), batch([1], [1])
    with pytest.raises(ValueError, match=r"recommend: k must lie in \[1, 30\].*got 31"):
        model.recommend(made, 31)
    with pytest.raises(ValueError, match=r"next_item_ranks: target must be \(1,\), got \(2,\)"):
        model.next_item_ranks(made, torch.ones(2, dtype=torch.int64))


# --------------------------------------------------------------------------------------------------------------- export

# What a reader runs where Tigon is not: pads the requests, and scores them.
WITHOUT = """
import sys, torch
given = torch.load(sys.argv[1] + "/given.pt")
encode, score = (torch.export.load(f"{sys.argv[1]}/{name}.pt2").module() for name in ("encode", "score"))
keys, values, newest = encode(given["history"], given["context"], given["age"], given["lengths"])
logits = score(keys, values, newest, given["lengths"], given["candidates"], given["present"])
torch.save(logits, sys.argv[1] + "/logits.pt")
assert not [name for name in sys.modules if name.split(".")[0] == "tigon"]
"""


def padded(value, starts):
    lengths = starts.diff().tolist()
    most = max(1, *lengths)
    rows = [[*range(a, a + n), *[0] * (most - n)] for a, n in zip(starts.tolist(), lengths, strict=False)]
    if isinstance(value, torch.Tensor):
        value = value if value.is_floating_point() else value.long()
        return value[torch.tensor(rows)]
    width = max(1, *value.lengths.tolist())
    lists = torch.tensor([[*one, *[-1] * (width - len(one))] for one in value.lists()])
    return lists[torch.tensor(rows)]


def test_exported_programs_give_the_same_logits_without_tigon(tmp_path):
    torch.manual_seed(0)
    names = "item", "genres", "position", "country"  # a field of each kind but Time: tracing takes seconds
    schema = Schema({"item": "item", "labels": ["click", "like"]}, {name: SCHEMA.fields[name] for name in names})
    model = LiGR(schema, LiGRConfig(16, 2, 2))  # one layer of candidates by themselves, and one of a set
    files = rank.export(model, tmp_path / "programs")
    assert [path.name for path in files] == ["encode.pt2", "score.pt2"]
    assert model.training
    made = batch([3, 0, 9, 1, 2], [4, 1, 2, 7, 3], schema, seed=5)
    counts = made.offsets.diff()
    given = {
        "history": {name: padded(value, made.history_offsets) for name, value in made.history.items()},
        "context": {name: value.long() for name, value in made.context.items()},
        "age": padded(made.age, made.history_offsets),
        "lengths": made.history_offsets.diff(),
        "candidates": {name: padded(value, made.offsets) for name, value in made.items.items()},
        "present": torch.arange(int(counts.max())) < counts[:, None],
    }  # fmt: skip
    torch.save(given, tmp_path / "programs" / "given.pt")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(tmp_path / "programs")], env=environment, capture_output=True, text=True,
        check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "programs" / "logits.pt")
    with torch.no_grad():
        expected = model.eval()(made)
    assert set(found) == {"click", "like"}
    for label, logits in expected.items():
        assert (found[label][given["present"]] - logits).abs().max() <= 1e-5 * logits.abs().max()


def test_a_file_is_no_folder_of_programs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"rank.export: folder must be a folder, got the file"):
        rank.export(LiGR(SCHEMA, LiGRConfig(16, 1, 2)), tmp_path / "file")
