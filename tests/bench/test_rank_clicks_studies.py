"""The studies of exploring and of fits that go on, on small tables of their files' forms."""

import csv

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")
pytest.importorskip("accelerate")

import open_bandit
import rank_crosses
import rank_incremental
from harness import report

from tigon import rank


@pytest.fixture(scope="module")
def bandit(tmp_path_factory):
    """Item 0 is clicked half of the time, others never; the uniform log shows all, the other one mostly item 0."""
    folder, draw = tmp_path_factory.mktemp("bandit"), np.random.default_rng(0)
    for log in open_bandit.LOGS:
        for campaign in open_bandit.CAMPAIGNS:
            place = folder / "obd" / log / campaign
            place.mkdir(parents=True)
            with (place / "item_context.csv").open("w", newline="") as file:
                rows = csv.writer(file)
                rows.writerow(["", "item_id", *open_bandit.ITEM])
                rows.writerows([n, n, 0.5 * n, f"a{n}", f"b{n % 2}", "c"] for n in (2, 0, 1, 3))
            with (place / f"{campaign}.csv").open("w", newline="") as file:
                rows = csv.writer(file)
                names = [f"user-item_affinity_{n}" for n in range(3)]
                rows.writerow(
                    ["", "timestamp", "item_id", "position", "click", "propensity_score", *open_bandit.USER, *names]
                )
                p = np.full(3, 1 / 3) if log == "random" else np.array([0.8, 0.1, 0.1])
                for n in range(400):
                    item = draw.choice(3, p=p)
                    click = int(item == 0 and draw.random() < 0.5)
                    time = f"2019-11-24 {n // 60:02d}:{n % 60:02d}:00+00:00"
                    rows.writerow([n, time, item, 1 + n % 3, click, p[item], "u", "v", f"w{n % 2}", "x", 0.0, 0.0, 1.0])
    return folder


def test_open_bandit_finds_the_item_that_is_clicked(bandit, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(open_bandit, "CAMPAIGNS", ("men",))
    words = ("open_bandit.py", "--data", bandit, "--output", tmp_path, "--seeds", 1, "--draws", 50)
    monkeypatch.setattr("sys.argv", [*map(str, words)])
    threads = torch.get_num_threads()
    try:
        open_bandit.main()
    finally:
        torch.set_num_threads(threads)
    rows = report.load(tmp_path / "cpu-open-bandit.json")["rows"]
    of = {(row["policy"], row["explore"], row["estimator"]): row for row in rows}
    log = open_bandit.Log.read(bandit, "bts", "men")
    assert log.items == 3
    assert of["bts", None, "logged"]["value"] == pytest.approx(float(log.click.mean()))
    assert of["random", None, "logged"]["rows"] == 200
    # What bts earns, by the log of the other policy.
    for estimator in ("ips", "snips", "dr"):
        assert of["bts", None, estimator]["value"] == pytest.approx(0.4, abs=0.12)
        assert of["thompson", 0.0, estimator]["value"] > 0.35
    assert of["thompson", 0.0, "replay"]["low"] > of["random", None, "logged"]["value"]
    assert "thompson" in capsys.readouterr().out


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    """Seven weeks of ratings by taste, with new users in each."""
    folder, draw = tmp_path_factory.mktemp("films"), np.random.default_rng(1)
    users, items, lines = [], [], []
    for film in range(12):
        genres = ("Drama", "War Comedy")[film % 2]
        items.append(f"{film}\tFilm {film}\t{1990 + film if film else 'unkonwn'}\t{genres}")
    for user in range(70):
        users.append(f"{user}\t{20 + user % 30}\t{'MF'[user % 2]}\twriter\t1234")
        for film in draw.permutation(12)[:6]:
            liked = (film % 2 == user % 2) ^ (draw.random() < 0.1)
            second = 1000 + rank_incremental.WEEK * (user // 10) + draw.integers(10_000)
            lines.append(f"{user}\t{film}\t{5 if liked else 2}\t{second}")
    heads = {"user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token",
             "item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq",
             "inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float"}  # fmt: skip
    for name, rows in (("user", users), ("item", items), ("inter", lines)):
        (folder / f"ml-100k.{name}").write_text("\n".join([heads[name], *rows]) + "\n")
    return folder


def test_weeks_are_fitted_both_ways(films, tmp_path, monkeypatch, capsys):
    for name, few in (("COLD_EPOCHS", (1,)), ("EPOCHS", (1,)), ("RATES", (1e-3,)), ("STRENGTHS", (1.0,))):
        monkeypatch.setattr(rank_incremental, name, few)
    words = ("rank_incremental.py", "--data", films, "--output", tmp_path, "--seeds", 1, "--choose-from", 1,
             "--start", 3)  # fmt: skip
    monkeypatch.setattr("sys.argv", [*map(str, words)])
    threads = torch.get_num_threads()
    try:
        rank_incremental.main()
    finally:
        torch.set_num_threads(threads)
    rows = report.load(tmp_path / "cpu-rank-incremental.json")["rows"]
    weeks = [row for row in rows if row["part"] == "weeks"]
    assert [(row["method"], row["week"], row["trained"]) for row in weeks] == [
        ("cold", 4, 300), ("anchored", 4, 60), ("free", 4, 60), ("stale", 4, 240),
        ("cold", 5, 360), ("anchored", 5, 60), ("free", 5, 60), ("stale", 5, 240),
    ]  # fmt: skip
    assert all(row["measured"] == 60 for row in weeks)
    assert (
        max(row["week"] for row in rows if row["part"] == "choice") == 2
    )  # measured on week 3, before what is reported
    said = capsys.readouterr().out
    assert "anchored  AUC" in said


def test_crosses_of_a_table_whose_clicks_are_of_pairs(tmp_path, monkeypatch, capsys):
    draw = np.random.default_rng(0)
    place = tmp_path / "frappe"
    place.mkdir()
    for file, rows in (("frappe.validation.libfm", 1000), ("frappe.test.libfm", 300)):
        lines = []
        for _ in range(rows):
            ids = draw.integers(0, 4, 10)
            click = int((ids[1] + ids[2]) % 2 == 0) ^ int(draw.random() < 0.1)
            lines.append(" ".join([str(2 * click - 1), *(f"{10 * n + value}:1" for n, value in enumerate(ids))]))
        (place / file).write_text("\n".join(lines))
    monkeypatch.setattr(rank_crosses, "COUNTS", (1,))
    monkeypatch.setitem(rank_crosses.MODELS, "lirank", rank_crosses.LIRANK | {"mlp": (16,), "cross": "none"})
    monkeypatch.setattr(rank_crosses, "OPTIONS", rank.FitOptions(lr=0.03, epochs=4, batch_size=75))
    words = ("rank_crosses.py", "--data", tmp_path, "--output", tmp_path, "--sets", "frappe", "--seeds", 1)
    monkeypatch.setattr("sys.argv", [*map(str, words)])
    threads = torch.get_num_threads()
    try:
        rank_crosses.main()
    finally:
        torch.set_num_threads(threads)
    rows = report.load(tmp_path / "cpu-rank-crosses.json")["rows"]
    of = {(row["setting"]["model"], row["method"]): row for row in rows}
    assert len(of) == 6
    assert of["linear", "without"]["measures"]["auc"] < 0.6
    assert of["linear", "found"]["setting"]["crosses"] == ["item × daytime"]
    assert of["linear", "found"]["measures"]["auc"] > 0.85  # 0.9 knows all
    assert of["linear", "drawn at random"]["measures"]["auc"] < 0.6
    assert "| frappe | linear | found | 1 | 1 |" in capsys.readouterr().out
