"""The study of prompt rankers: what it shows whom, that both ways of tuning are one, and what it records."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("pyarrow")
pytest.importorskip("transformers")
from harness import report
from studies import prompt_tables, prompts

ROOT = Path(__file__).parents[2]
GROUPS = ("new members", "known members", "new films", "known films")


@pytest.fixture(scope="module")
def study(script):
    sys.path.insert(0, str(ROOT / "tests" / "rank"))
    try:
        yield script("rank_prompts")
    finally:
        sys.path.remove(str(ROOT / "tests" / "rank"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Eight members, one after the other, of 24 ratings each; 32 films."""
    folder = tmp_path_factory.mktemp("ml")
    ratings = [(u, i, 1 + (u * i) % 5, 1000 * u + 10 * k) for u in range(1, 9) for k, i in enumerate(range(u, u + 24))]
    text = ["user_id:token\titem_id:token\trating:float\ttimestamp:float", *("\t".join(map(str, r)) for r in ratings)]
    (folder / "ml-100k.inter").write_text("\n".join(text))
    films = [f'{i}\tThe "Film" {i}\t{1980 + i}\tDrama Crime' for i in range(1, 33)]
    (folder / "ml-100k.item").write_text(
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n" + "\n".join(films)
    )
    members = [f"{u}\t{20 + u}\tM\tcook\t1" for u in range(1, 9)]
    (folder / "ml-100k.user").write_text(
        "user_id:token\tage:token\tgender:token\toccupation:token\tzip:token\n" + "\n".join(members)
    )
    return folder


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"Clothing ID": n // 25, "Age": 20 + n, "Title": "Fine" if n % 2 else None, "Review Text": f"It is {n}.",
             "Recommended IND": int(n % 3 > 0), "Department Name": "Tops", "Class Name": "Knits"}
            for n in range(100)]  # fmt: skip
    path = tmp_path_factory.mktemp("garments") / "reviews.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_requests_are_ten_ratings_and_what_came_before(folder):
    films = prompt_tables.Films(folder, few=8)
    hidden = prompt_tables.hidden_films([str(i) for i in range(1, 33)])
    assert len(hidden) == 2
    said = {f'The "Film" {i}' for i in hidden}
    early = [*films.train, *films.validation]
    assert len(early) + len(films.test) == 24
    for request in early:
        assert len(request.candidates) <= 10
        assert not said & {row["title"] for row in (*request.candidates, *request.events)}
    assert any(row["title"] in said for request in films.test for row in request.candidates)
    assert not any(row["title"] in said for request in films.test for row in request.events)
    assert {len(r.events) for r in films.train} <= set(range(21))
    assert films.train[0].candidates[0]["genres"] == "Drama, Crime"
    told = films.told()
    for kind in ("members", "films"):
        assert told[f"test rows new {kind}"] + told[f"test rows known {kind}"] == told["test rows"] > 0
    assert told["test rows new films"] > 0
    worth = films.worth(films.labels * 0.5 + 0.25)
    assert worth["auc"] == worth["ndcg@10"] == worth["auc known films"] == 1


def test_ligr_sees_the_same_requests(folder):
    films = prompt_tables.Films(folder, few=8)
    few, train, validation, test = films.for_ligr()
    assert (len(few), len(train), len(validation), len(test)) == (
        8, len(films.train), len(films.validation), len(films.test),
    )  # fmt: skip
    batch = test.batch(torch.arange(len(test)))
    assert torch.equal(batch.labels["like"], films.labels)
    assert torch.equal(batch.offsets, films.offsets)
    assert (batch.items["item"] == 0).tolist() == films.rows[" new films"].tolist()
    assert few.schema == train.schema


def test_garments_are_ten_reviews_of_one(reviews):
    garments = prompt_tables.Garments(reviews, most=3)
    assert [len(r.candidates) for r in (*garments.train, *garments.test)] == [10] * 6
    said = [row["text"] for r in (*garments.train, *garments.test) for row in r.candidates]
    assert len(set(said)) == 60
    for r in garments.train:
        for row, place in zip(r.candidates, r.labels["recommend"], strict=True):
            assert place == int(int(row["text"].split()[2][:-1]) % 3 == 0)
    assert garments.worth(garments.labels)["auc"] == 1


def test_both_ways_have_one_loss_and_one_gradient(study, folder):
    from prompts import model, tokenizer

    films = prompt_tables.Films(folder, few=3)
    ranker = study.PromptRanker(model(positions=2048).double(), tokenizer(), study.FILMS, prefix_len=150)
    encoded = study.encoded(ranker, films.train[3:5])
    batch = study.joined(encoded)
    loss = ranker.loss(batch)
    want = torch.autograd.grad(loss, list(ranker.model.parameters()))
    total, tokens = study.separate_loss(ranker, batch, 1000)
    torch.testing.assert_close(total.double(), loss.detach().double(), rtol=1e-5, atol=0)
    assert tokens >= batch.shared.separate_rows > 1.5 * batch.shared.rows
    largest = max(g.abs().max() for g in want)
    for p, g in zip(ranker.model.parameters(), want, strict=True):
        assert (p.grad - g).abs().max() <= 1e-5 * largest
    probabilities = ranker.probabilities(films.train[3:5])["like"]
    torch.testing.assert_close(study.answered(ranker, encoded), probabilities)


def test_a_whole_run_is_recorded_shown_and_gone_on_with(study, folder, reviews, tmp_path, monkeypatch, capsys):
    from prompts import model, tokenizer

    model(positions=2048).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(study, "PREFIX", 150)
    monkeypatch.setattr(study, "BATCH", 2)
    monkeypatch.setattr(study, "EXTRA", 1)
    monkeypatch.setattr(study, "LIGR", [{**study.LIGR[0], "width": 8}, {**study.LIGR[3], "width": 8}])

    def run(output, *more):
        words = (
            "--data", folder, "--model", tmp_path / "model", "--output", tmp_path / output, "--requests", 4,
            "--train-requests", 4, "--test-requests", 2, "--student-epochs", 1, "--ligr-epochs", 1, "--shape",
            "24,3,4,1", "--device", "cpu", *more,
        )  # fmt: skip
        monkeypatch.setattr("sys.argv", ["rank_prompts.py", *map(str, words)])
        study.main()
        (path,) = (tmp_path / output).glob("*-rank-prompts.json")
        return path, report.load(path)["rows"]

    first, rows = run("first", "--parts", "speed,steps,zero,rates", "--rates", "1e-3,1e-2", "--garments", reviews)
    best = max((row for row in rows if row["part"] == "rates"), key=lambda row: row["validation"]["auc"])
    second, rows = run(
        "second", "--parts", "ligr,ways,two,all,alone", "--seeds", "3", "--garments", reviews, "--resume", first,
    )  # fmt: skip
    by = {row["method"]: row for row in rows if row["part"] == "films"}
    assert set(by) == set(prompts.FILMS)
    assert by["shared"]["setting"]["rate"] == by["separate"]["setting"]["rate"] == best["setting"]["rate"]
    assert by["shared"]["setting"]["steps"] == 2
    assert by["shared"]["measures"]["auc"] == pytest.approx(by["separate"]["measures"]["auc"], abs=0.02)
    assert by["shared"]["setting"]["tokens"] < by["separate"]["setting"]["tokens"] / 1.5
    assert by["student taught"]["setting"]["weights"] < by["LiGR, all requests"]["setting"]["weights"] * 1000
    tried = [row["validation"]["auc"] for row in rows if row["method"].startswith("LiGR, all requests, setting")]
    assert len(tried) == 2
    assert by["LiGR, all requests"]["validation"]["auc"] == max(tried)
    monkeypatch.setattr(study.Study, "ranker", lambda *_: pytest.fail("it was there"))
    _, third = run("third", "--parts", "ways,two,all,alone,ligr,zero", "--seeds", "3", "--resume", first, second)
    assert third == rows

    folder_of = second.parent
    said = capsys.readouterr().out
    for part in prompts.PARTS:
        shown = prompts.page(folder_of, part)
        assert shown in said
    assert len(prompts.page(folder_of, "films").splitlines()) == 2 + len(prompts.FILMS)
    assert len(prompts.page(folder_of, "garments").splitlines()) == 2 + len(prompts.GARMENTS)
    speed = prompts.page(folder_of, "speed").splitlines()
    assert [line.split(" | ")[0] for line in speed[2:]] == ["| scoring", "| training", "| a step of training"]
    assert prompts.apart(rows) == [by["shared"]["measures"]["auc"] - by["separate"]["measures"]["auc"]]
    assert len(prompts.page(folder_of, "bars").splitlines()) == 2 + 4
    assert prompts.page(tmp_path / "none", "films") == "No run has been recorded yet."


def made(part, method, seed=0, **measures):
    return {"part": part, "method": method, "seed": seed, "measures": measures}


def test_what_was_asked_for_is_met_or_missed():
    rows = [made("speed", way, **{"separate ms": 99.0, "shared ms": 10.0}) for way in ("scoring", "training")]
    rows += [made("films", "shared", seed, auc=0.70 + 0.01 * seed) for seed in range(3)]
    rows += [made("films", "separate", seed, auc=0.709 + 0.01 * seed) for seed in (2, 0, 1)]
    rows += [made("films", prompts.TEACHER, auc=0.8), made("films", "student taught", auc=0.7961)]
    assert prompts.apart(rows) == pytest.approx([-0.009] * 3)
    lines = [line.strip("| ").split(" | ") for line in prompts.bars(rows).splitlines()[2:]]
    assert [line[1:] for line in lines] == [
        ["10 ×", "9.9 ×", "missed"], ["8 ×", "9.9 ×", "met"], ["the seeds' 0.0100", "0.0090", "met"],
        ["0.5 %", "0.49 %", "met"],
    ]  # fmt: skip
    rows[-1]["measures"]["auc"] = 0.795
    for row in rows[2:5]:
        row["measures"]["auc"] -= 0.002
    assert [line.split(" | ")[-1] for line in prompts.bars(rows).splitlines()[4:]] == ["missed |", "missed |"]
    assert prompts.behind(rows) == pytest.approx(0.00625)


def test_what_the_page_says_is_in_the_record():
    rows = report.load(ROOT / "benchmarks" / "results" / "h200-rank-prompts.json")["rows"]
    by = prompts.sides(row for row in rows if row["part"] == "films")
    assert all(len(some) == 3 for name, some in by.items() if name != "zero-shot")

    def auc(name, group=""):
        return prompts.mean(by[name], f"auc{group}")

    teacher, ligr = "shared, all requests", "LiGR, all requests"
    assert 0.015 < auc(ligr) - auc(teacher) < 0.025 < auc("LiGR, as many requests") - auc("shared")
    assert [round(auc(name, " new films"), 3) for name in (teacher, ligr)] == [0.734, 0.696]
    assert 0.024 < auc("student taught") - auc("student alone") < 0.026
    assert abs(auc("student taught") - auc(teacher)) < 0.005 * auc(teacher)
    assert auc("student taught", " new films") < auc(teacher, " new films")
    assert 134_515_008 / by["student taught"][0]["setting"]["weights"] == pytest.approx(14, abs=0.5)
    assert all(line.endswith("| met |") for line in prompts.bars(rows).splitlines()[2:])
    own = prompts.sides(row for row in rows if row["part"] == "garments")
    lost = prompts.mean(own["garments alone"], "auc") - prompts.mean(own["films too"], "auc")
    assert round(lost, 3) == 0.005
    of = {row["method"]: row["measures"] for row in rows if row["part"] == "speed"}
    faster = [of[way]["separate ms"] / of[way]["shared ms"] for way in ("scoring", "training")]
    said = "scored {:.1f} times as fast as 32 sequences, and trained on {:.1f} times as fast"
    assert said.format(*faster) in (ROOT / "README.md").read_text()
