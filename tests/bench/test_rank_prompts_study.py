"""The study of prompt rankers on a table like MovieLens': what it shows whom, and that both ways of tuning are one."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("pyarrow")
pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def study():
    places = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "rank")]
    sys.path[:0] = places
    try:
        yield importlib.import_module("rank_prompts")
    finally:
        for place in places:
            sys.path.remove(place)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ml")
    ratings = [(u, i, 1 + (u * i) % 5, 1000 * u + 10 * k) for u in range(1, 9) for k, i in enumerate(range(u, u + 24))]
    text = ["user_id:token\titem_id:token\trating:float\ttimestamp:float", *("\t".join(map(str, r)) for r in ratings)]
    (folder / "ml-100k.inter").write_text("\n".join(text))
    films = [f"{i}\tFilm {i}\t{1980 + i}\tDrama Crime" for i in range(1, 33)]
    (folder / "ml-100k.item").write_text(
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n" + "\n".join(films)
    )
    members = [f"{u}\t{20 + u}\tM\tcook\t1" for u in range(1, 9)]
    (folder / "ml-100k.user").write_text(
        "user_id:token\tage:token\tgender:token\toccupation:token\tzip:token\n" + "\n".join(members)
    )
    return folder


def test_requests_are_ten_ratings_and_what_came_before(study, folder):
    split = study.Split(folder, train=8, test=4)
    requests = {len(r.candidates): r for r in split.all_train}
    assert set(requests) == {10, 4}
    assert {len(r.events) for r in split.all_train} == {0, 10, 20}
    told = split.told()
    assert (told["train_requests"], told["test_requests"]) == (8, 4)
    assert told["rows_of_new_members"] + told["rows_of_known_members"] == told["test_rows"]
    assert 0 < told["rows_of_new_films"] < told["test_rows"]
    worth = split.worth(split.labels * 0.5 + 0.25)
    assert worth["auc all"] == worth["ndcg@10"] == 1


def test_both_ways_have_one_loss_and_one_gradient(study, folder):
    from prompts import model, tokenizer

    split = study.Split(folder, train=3, test=1)
    ranker = study.PromptRanker(model(positions=2048).double(), tokenizer(), study.PROMPT, prefix_len=400)
    (batch,) = ranker.batches(split.train, tokens=1 << 30, labelled=True)
    loss = ranker.loss(batch)
    want = torch.autograd.grad(loss, list(ranker.model.parameters()))
    total, tokens = study.separate_loss(ranker, batch, 2000)
    torch.testing.assert_close(total.double(), loss.detach().double(), rtol=1e-5, atol=0)
    assert tokens > 2 * batch.shared.rows
    largest = max(g.abs().max() for g in want)
    for p, g in zip(ranker.model.parameters(), want, strict=True):
        assert (p.grad - g).abs().max() <= 1e-5 * largest


def test_a_whole_run_writes_its_record(study, folder, tmp_path, monkeypatch):
    from prompts import model, tokenizer

    model(positions=2048).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(study, "PREFIX", 200)
    monkeypatch.setattr(study, "BATCH", 4)
    monkeypatch.setattr(sys, "argv", [
        "rank_prompts.py", "--data", str(folder), "--model", str(tmp_path / "model"), "--json",
        str(tmp_path / "out.json"), "--seeds", "1", "--train-requests", "8", "--test-requests", "4", "--only",
        "zero,shared,separate",
    ])  # fmt: skip
    study.main()
    runs = {run["way"]: run for run in json.loads((tmp_path / "out.json").read_text())["runs"]}
    assert runs["shared"]["steps"] == runs["separate"]["steps"] == 2
    assert runs["shared"]["auc all"] == pytest.approx(runs["separate"]["auc all"], abs=0.02)
    assert runs["shared"]["tokens"] < runs["separate"]["tokens"] / 2
