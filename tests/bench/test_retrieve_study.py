"""benchmarks/retrieve.py: its loader and splits, what it records of made-up films, and the tables of it."""

import json

import numpy as np
import pytest
import torch
from harness import report
from studies import movielens
from studies import retrieve as tables

USERS, FILMS = 40, 60


@pytest.fixture(scope="module")
def study(script):
    pytest.importorskip("pyarrow")
    return script("retrieve")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Files in MovieLens' form: women like drama of the nineties, men crime; others are liked seldom."""
    folder = tmp_path_factory.mktemp("films")
    draw = np.random.default_rng(0)
    kinds = ["Drama", "Crime", "Comedy Romance"]
    items = [f"{i}\tFilm of {'the' if i % 2 else 'my'} town\t{1990 + i % 9 - 10 * (i % 3 == 1)}\t{kinds[i % 3]}"
             for i in range(1, FILMS)]  # fmt: skip
    items.append(f"{FILMS}\tunknown\tunkonwn\tunknown")
    people = [f"{u}\t{16 + u}\t{'FM'[u % 2]}\twriter\t12345" for u in range(1, USERS + 1)]
    ratings = []
    for u in range(1, USERS + 1):
        for i in range(1, FILMS + 1):
            fits = i % 3 == u % 2
            if draw.random() < (0.7 if fits else 0.25):
                ratings.append(f"{u}\t{i}\t{5 if fits or draw.random() < 0.3 else 2}\t88")
    for kind, header, lines in (
        ("user", "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token", people),
        ("item", "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq", items),
        ("inter", "user_id:token\titem_id:token\trating:float\ttimestamp:float", ratings),
    ):
        (folder / f"ml-100k.{kind}").write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return folder


def test_the_loader_reads_what_is_there(data, tmp_path):
    films = movielens.load(data)
    assert films.people["age"][:2] == ["under 18", "18–24"]
    assert films.people["age"][-1] == "from 56"
    assert films.films["decade"][:3] == ["1980s", "1990s", "1990s"]
    assert films.films["genres"][1:3] == [["Comedy", "Romance"], ["Drama"]]
    assert (films.films["decade"][-1], films.films["genres"][-1], films.films["year"][-1]) == ("unknown", [], None)
    assert films.liked.shape[1] == 2
    assert not {tuple(p) for p in films.liked} & {tuple(p) for p in films.disliked}
    of_content = movielens.content(films)
    assert of_content.isfinite().all()
    assert torch.equal(of_content[1], of_content[37])  # "my" is too short to tell, so genres and decade are all
    assert not torch.equal(of_content[1], of_content[2])
    with pytest.raises(SystemExit, match=r"--data must hold ml-100k.inter, .* without ml-100k.user"):
        movielens.load(tmp_path)
    (tmp_path / "ml-100k.user").write_text("user_id:token\tage:token\n1\t2\n")
    with pytest.raises(SystemExit, match="must have a column gender, got user_id, age"):
        movielens.load(tmp_path)


def test_no_pair_is_in_two_parts(data):
    part = movielens.split(data, 1)
    sets = [set(map(tuple, pairs.tolist())) for pairs in (part.train, part.validation, part.test, part.new)]
    assert sum(map(len, sets)) == len(set().union(*sets)) == len(part.data.liked)
    new = {user for user, _ in sets[3]}
    assert len(new) == USERS // 5
    assert not new & {user for pairs in sets[:3] for user, _ in pairs}
    # Films were shuffled with all that is said of them.
    before = movielens.load(data)
    degree = np.bincount(before.liked[:, 1], minlength=FILMS)
    assert sorted(np.bincount(part.data.liked[:, 1], minlength=FILMS)) == sorted(degree)
    assert part.data.films["title"] != before.films["title"]
    unknown = part.data.films["title"].index("unknown")
    assert np.bincount(part.data.liked[:, 1], minlength=FILMS)[unknown] == degree[-1]

    cold = movielens.cold_split(data, 1)
    assert [len(cold.groups[name]) for name in ("test", "validation")] == [FILMS // 5, FILMS // 10]
    rows = torch.cat((cold.warm, *cold.groups.values()))
    assert rows.sort().values.tolist() == list(range(FILMS))
    many = [cold.train, cold.validation, cold.test, *cold.pairs.values()]
    assert sum(map(len, many)) == len(part.data.liked)


def test_the_auc_is_that_of_pairs(study):
    scores = torch.tensor([[3.0, 1.0, 2.0, 2.0]])
    pairs = torch.tensor([[0, 2]])
    assert study.auc(scores, pairs, torch.tensor([[True, True, False, True]])) == pytest.approx(0.5)
    assert study.auc(scores, torch.tensor([[0, 0], [0, 1]]), torch.tensor([[False, False, True, False]])) == 0.5


def test_a_study_is_recorded_shown_and_gone_on_with(study, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "SIZES", (4,))
    monkeypatch.setattr(study, "L1", (1e-2, 3e-2))
    monkeypatch.setattr(study, "ALPHAS", (1.0, 4.0))
    monkeypatch.setattr(study, "DEPTHS", (10, 100))
    monkeypatch.setattr(study, "K", 5)
    monkeypatch.setattr(study, "BATCH", 128)
    monkeypatch.setattr(tables, "WAYS", ("where", "top 100", "top 10"))
    arguments = ["--data", str(data), "--output", str(tmp_path), "--seeds", "1", "--epochs", "6"]
    assert study.main([*arguments, "--parts", "links", "cold"]) == 0
    (path,) = tmp_path.glob("*-retrieve-study.json")
    first = report.load(path)["rows"]
    assert {(row["part"], row["seed"]) for row in first} == {("links", 0), ("cold", 0)}
    monkeypatch.setattr(study, "links", lambda *_: pytest.fail("it was there"))
    assert study.main(arguments) == 0
    said = capsys.readouterr().out
    rows = report.load(path)["rows"]
    assert rows[: len(first)] == first

    by = tables.groups(rows, "links")
    assert tables.mean(by["links",], "new auc") > 0.6  # of people and films by what they are, as it was made
    assert "new auc" not in by["vectors",][0]["measures"]
    alone = by["links",][0]
    assert alone["setting"]["l1"] == float(max(alone["validation"], key=alone["validation"].get))
    assert {"gender", "genres"} <= {edge[side] for edge in alone["edges"] for side in ("query_column", "item_column")}

    by = tables.groups(rows, "cold")
    assert tables.mean(by["clusters", "4", "0.3"], "new") > tables.mean(by["ids",], "new") + 0.05
    assert by["ids",][0]["measures"]["warm"] == by["ids, nearest by content",][0]["measures"]["warm"]

    found = {(row["method"], row["setting"]["attribute"], row["setting"]["share"]): row["measures"]
             for row in rows if row["part"] == "filters" and row["seed"] == 0}  # fmt: skip
    for (way, attribute, share), measures in found.items():
        exact = found["where", attribute, share]
        assert measures["of exact"] <= exact["of exact"] == 1
        assert measures["recall"] <= exact["recall"] or way == "top 10"
        if way == "top 100":  # all films
            assert measures == exact
    assert found["top 10", "made up", 0.5]["of exact"] < 1
    assert found["where", "made up", 0.1]["passing"] == 0.1

    only = tmp_path / "only"
    report.save(
        only / "h100-retrieve-study.json", report.load(path) | {"rows": [r for r in rows if r["part"] == "filters"]}
    )
    assert tables.page(only, "filters") == tables.page(tmp_path, "filters")
    assert tables.page(only, "every") == "No run has been recorded yet."
    for what in ("filters", "cold", "every", "links", "edges", "source"):
        assert "No run" not in tables.page(tmp_path, what)
    assert "| clusters, 4 a level, dropout 0.3 |" in tables.page(tmp_path, "every")
    assert "| vectors + links |" in said
    assert tables.page(tmp_path / "none", "links") == "No run has been recorded yet."


def test_filters_on_a_run_of_the_command(study, tmp_path, monkeypatch):
    from tigon import retrieve

    items, users = torch.eye(8)[torch.arange(24) % 8], torch.eye(8)
    index = retrieve.Index(8, 24, dtype="float32")
    index.upsert(np.arange(24), items)
    run = tmp_path / "run"
    run.mkdir()
    index.save(run / "items.index")
    np.save(run / "users.npy", users.numpy())
    # A user likes the three items of their axis; two are tests.
    (tmp_path / "pairs.txt").write_text("".join(f"{u} {u + 16}\n" for u in range(8)))
    (tmp_path / "later.txt").write_text("".join(f"{u} {u} {u + 8}\n" for u in range(8)))
    options = {"data": str(tmp_path / "pairs.txt"), "test": str(tmp_path / "later.txt"), "user": None, "item": None}
    (run / "run.json").write_text(json.dumps({"options": options}))
    monkeypatch.setattr(study, "K", 2)
    monkeypatch.setattr(study, "DEPTHS", (2, 100))
    monkeypatch.setattr(study, "SHARES", (0.25, 0.5))
    rows = list(study.of_run(run, 0))
    assert {row.data for row in rows} == {"pairs"}
    for row in rows:
        assert row.setting["attribute"] == "made up"
        if row.method != "top 2":
            assert row.measures["of exact"] == 1
        if row.method == "where" and row.setting["share"] == 0.5:
            assert row.measures["recall"] == 1
            assert row.measures["hits"] == 2


def test_two_towers_are_trained_by_each_side_and_gone_on_with(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    import two_towers

    draw = np.random.default_rng(0)
    pairs = np.argwhere((np.arange(40)[:, None] % 4 == np.arange(32) % 4) & (draw.random((40, 32)) < 0.8))
    late = draw.random(len(pairs)) < 0.2
    for name, some in (("train", pairs[~late]), ("test", pairs[late])):
        rows = [f"{user} {' '.join(map(str, some[some[:, 0] == user, 1]))}".strip() for user in range(40)]
        (tmp_path / f"{name}.txt").write_text("\n".join(rows) + "\n")

    def run(*more):
        words = ("--data", tmp_path, "--name", "made", "--output", tmp_path, "--device", "cpu", "--epochs", 2, *more)
        monkeypatch.setattr("sys.argv", ["two_towers.py", *map(str, words)])
        two_towers.main()
        (path,) = tmp_path.glob("*-retrieve-towers.json")
        return path, report.load(path)["rows"]

    path, first = run("--seeds", 2, "--sides", "item_softmax; item_softmax, epochs by random pairs")
    assert [(row["method"][:20], row["seed"]) for row in first[:2]] == [("item_softmax", 0), ("item_softmax", 1)]
    assert [row["setting"]["val_split"] for row in first] == ["block", "block", "random", "random"]
    assert all(0 < row["measures"]["recall@20"] <= 1 and row["validation"] for row in first)
    _, second = run("--seeds", 1, "--sides", "item_softmax; in_batch", "--resume", path)
    assert second[:4] == first
    assert [row["setting"]["loss"] for row in second[4:]] == ["in_batch"]
