"""The benchmark of next items: its protocol by hand, fits that go on, and the costs of equal numbers."""

import math
import statistics
from pathlib import Path

import pytest
import rank_sequences as script
import rank_sittings
import torch
from harness import report
from studies import sequences as page

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    """Rings of ten items, and one line that is too short to be a test; the same with ratings and times."""
    lines = [" ".join(map(str, (user, *(1 + (user + n) % 10 for n in range(5 + user % 3))))) for user in range(30)]
    (tmp_path / "rings.txt").write_text("\n".join([*lines, "99 1 2"]) + "\n")
    rows = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    rows += [f"{u}\t{1 + (u + n) % 10}\t{1 + n}\t{1000 - 7 * n}" for u in range(6) for n in range(5)]
    (tmp_path / "stars.inter").write_text("\n".join(rows) + "\n")
    return tmp_path


def test_events_are_read_in_the_order_of_time(folder):
    rings, stars = script.read(folder, "rings"), script.read(folder, "stars")
    assert (rings.users, rings.catalogue, rings.seconds) == (30, 10, None)  # who has two events is left out
    assert rings.offsets.diff().tolist() == [5 + user % 3 for user in range(30)]
    assert stars.seconds[:5].tolist() == [972, 979, 986, 993, 1000]
    assert stars.stars[:5].tolist() == [5, 4, 3, 2, 1]
    chosen = script.slices(rings, torch.tensor([1, 0]), 2, 3)
    assert rings.items[chosen.rows(CPU)].tolist() == [*rings.items[6:9].tolist(), *rings.items[:3].tolist()]
    places, there = script.slices(rings, torch.tensor([1, 0]), 3, 50).padded(CPU)
    assert there.tolist() == [[True, True, True], [True, True, False]]
    assert places[1, :2].tolist() == [0, 1]
    with pytest.raises(SystemExit, match=r"must hold nothing.txt or nothing.inter"):
        script.read(folder, "nothing")


class Fixed(script.Side):
    """Scores that are known: item i has score i for each user."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(11.0)[:, None])

    def hidden(self, users, left_out):
        return torch.ones(len(users), 1)

    @property
    def table(self):
        return self.weight


def test_ranks_are_among_all_items_or_among_new_ones(folder):
    data = script.read(folder, "rings")
    code = data.items.tolist()
    for left_out in (0, 1):
        places, new = (script.ranks(Fixed(), data, left_out, fresh, size=7) for fresh in (False, True))
        for user in range(data.users):
            mine = code[data.offsets[user] : data.offsets[user + 1]]
            target, had = mine[-1 - left_out], set(mine[: len(mine) - 1 - left_out])
            better = [item for item in range(1, 11) if item > target]
            assert places[user] == 1 + len(better)
            assert new[user] == 1 + len([item for item in better if item not in had])
    found = script.measures(torch.tensor([1, 3, 11]))
    assert found["hr@10"] == pytest.approx(2 / 3)
    assert found["ndcg@10"] == pytest.approx((1 + 1 / math.log2(4)) / 3)


def test_both_learn_and_a_run_goes_on(folder, monkeypatch, capsys):
    def run(*more):
        words = (
            "--data", folder, "--sets", "rings", "--output", folder / "out", "--device", "cpu", "--width", 16,
            "--every", 3, "--epochs", 15, "--batch-size", 8, "--lr", 0.01, "--warmup", 5, "--dropout", 0.1, *more,
        )  # fmt: skip
        monkeypatch.setattr("sys.argv", ["rank_sequences.py", *map(str, words)])
        script.main()
        (path,) = (folder / "out").glob("*-rank-sequences.json")
        return path, report.load(path)["rows"]

    path, first = run("--seeds", 1, "--sides", "sasrec; ligr")
    assert [(row["method"], row["seed"], row["data"]) for row in first] == [
        ("sasrec", 0, "rings"),
        ("ligr", 0, "rings"),
    ]
    for row in first:  # a ring: what comes next is certain
        assert row["measures"]["ndcg@10"] > 0.8, row["method"]
        assert row["setting"]["losses"][-1] < row["setting"]["losses"][0]
    _, second = run("--seeds", 1, "--sides", "sasrec; ligr, no gate; ligr, stars", "--resume", path, "--epochs", 3)
    assert second[:2] == first
    assert [row["method"] for row in second[2:]] == ["ligr, no gate"]  # the set has no ratings
    assert "ndcg@10" in capsys.readouterr().out
    # Side by side, by other processes: settings are chosen by seed 0, and a seed's fit is the one that it is alone.
    both = ("--seeds", 2, "--sides", "sasrec", "--epochs", 3, "--dropout", "0.1,0.3")
    rows = {jobs: run(*both, "--jobs", jobs)[1] for jobs in (1, 2)}
    for row in (row for found in rows.values() for row in found):
        del row["seconds"]
    assert [row["seed"] for row in rows[2]] == [0, 1]
    assert len(rows[2][0]["setting"].pop("tried")) == len(rows[1][0]["setting"].pop("tried")) == 2
    assert rows[1] == rows[2]


def test_costs_are_of_equal_numbers():
    rows = list(script.cost(CPU, tiny=True))
    assert {row.method for row in rows} >= {"ligr", "ligr, from a cache", "padded torch", "padded torch, in groups"}
    for row in rows:
        if "error" in row.measures:
            assert row.measures["error"] < 1e-5, row
        else:
            assert row.measures["gradient_cosine"] > 1 - 1e-6, row


def test_sittings_know_what_was_rated_before_them(tmp_path, monkeypatch, capsys):
    """Three users of four, two and one sittings; films of one genre are liked."""
    rows, at = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"], 0
    draw = torch.Generator().manual_seed(0)
    for user, sittings in enumerate((4, 2, 1)):
        for sitting in range(sittings):
            for film in torch.randperm(12, generator=draw)[: 4 + sitting].tolist():
                at += 10
                rows.append(f"{user}\t{film}\t{5 if film % 2 else 2}\t{at}")
            at += 1000
        rows.append(f"{user}\t0\t3\t{at}")  # one film is no sitting, but history
        at += 1000
    (tmp_path / "ml-100k.inter").write_text("\n".join(rows) + "\n")
    films = ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"]
    films += [f'{film}\tA "film"\t1990\t{"Drama War" if film % 2 else "Comedy"}' for film in range(12)]
    (tmp_path / "ml-100k.item").write_text("\n".join(films) + "\n")
    data, schema = rank_sittings.sittings_of(tmp_path)
    assert data.part.tolist() == [0, 0, 1, 2, 0, 2, 0]
    assert (data.end - data.first).tolist() == [4, 5, 6, 7, 4, 5, 4]
    made = data.batch(torch.tensor([3, 0]))
    assert made.history_offsets.tolist() == [0, 15, 15]
    assert (made.age > rank_sittings.PAUSE).all()
    names = script.read(tmp_path, "ml-100k").names
    liked = [int(names[film]) % 2 for film in data.film[made.rows].tolist()]
    assert made.labels["liked"].tolist() == liked
    assert [len(some) for some in made.items["genres"].lists()] == [1 + one for one in liked]
    unseen = data.film[(data.item == 0)]
    assert not set(unseen.tolist()) & set(data.item.tolist())
    # All of the best are of one genre, or none are like another.
    assert rank_sittings.diversity(made.labels["liked"], made, 2, 4) < 1e-6
    words = (
        "--data",
        tmp_path,
        "--output",
        tmp_path,
        "--epochs",
        2,
        "--seeds",
        1,
        "--sides",
        "ligr; by itself",
        "--device",
        "cpu",
    )
    monkeypatch.setattr("sys.argv", ["rank_sittings.py", *map(str, words)])
    rank_sittings.main()
    (path,) = tmp_path.glob("*-rank-sittings.json")
    found = report.load(path)["rows"]
    assert [row["method"] for row in found] == ["ligr", "by itself"]
    assert all(0 <= row["measures"][key] <= 1 for row in found for key in ("ndcg@10", "gauc", "auc", "diversity@5"))
    assert capsys.readouterr().out.startswith("4 train, 1 validate, 2 test")
    assert schema.fields["genres"].vocab == ("Comedy", "Drama", "War")


# ------------------------------------------------------------------------------------------------------------ its page


def recorded(method, *scores, seconds=50.0, data="set"):
    setting = {"seconds": 100.0, "epochs_run": 7}
    return [
        {
            "part": "quality", "data": data, "seed": seed, "method": method, "setting": setting, "seconds": seconds,
            "measures": {"hr@10": 2 * score, "ndcg@10": score, "ndcg@10_new": score},
        }
        for seed, score in enumerate(scores)
    ]  # fmt: skip


def test_the_page_names_the_best_peer_and_whom_time_ended():
    rows = [
        *recorded("rectools-hstu", 0.04, seconds=101.0), *recorded("ligr", 0.060, 0.064),
        *recorded("sasrec", 0.05, 0.05), *recorded("ligr", 0.05, data="other"), *recorded("sasrec", 0.06, data="other"),
    ]  # fmt: skip
    said = page.verdict(rows)
    assert (
        "by NDCG@10 above it on set (SASRec, loss of Tigon, +0.0120); below it on other (SASRec, loss of Tigon, "
        "−0.0100). By NDCG@10 among items that are new" in said
    )
    assert "Time ended fits of RecTools HSTU on set**, which" in said
    lines = page.quality(rows).splitlines()
    assert lines[2].startswith("| other | **LiGR** | 1 | 0.1000 | 0.0500 |")
    assert "| set | **LiGR** | 2 | 0.1240 ± 0.0057 | 0.0620 ± 0.0028 | 0.0620 ± 0.0028 | 7 | 50 | – |" in lines
    assert lines[-1].endswith("| 7 | 101 | 1 |")
    assert page.quality([]) == page.verdict([]) == page.speed([]) == ""


def test_what_the_page_says_of_the_record_is_in_it():
    text = (ROOT / "docs" / "rank" / "sequences-study.md").read_text()
    found = page.grouped(report.load(ROOT / "benchmarks" / "results" / "h200-rank-sequences.json")["rows"])

    def mean(data, method, measure="ndcg@10"):
        return statistics.fmean(page.values(found[data][method], measure))

    films = found["ml-100k"]
    assert not any(page.cut(row) for name, some in films.items() if name != "recbole-sasrec" for row in some)
    assert mean("ml-100k", "rectools-ligr") > mean("ml-100k", "ligr")
    assert mean("ml-100k", "rectools-ligr", "hr@10") == pytest.approx(mean("ml-100k", "ligr", "hr@10"), abs=0.001)
    assert mean("ml-100k", "rectools-ligr", "ndcg@10_new") < mean("ml-100k", "ligr", "ndcg@10_new")
    assert mean("ml-100k", "rectools-ligr") == pytest.approx(mean("ml-100k", "ligr, times and stars"), abs=0.0015)
    gates = sorted(mean(data, "ligr") - mean(data, "ligr, no gate") for data in ("Beauty", "ml-100k"))
    assert f"add {gates[0]:.4f} and {gates[1]:.4f} to the NDCG@10" in text
    assert [row["setting"]["epochs_run"] for row in found["Beauty"]["rectools-ligr"]] == [50]
    assert min(row["setting"]["epochs_run"] for row in found["Beauty"]["ligr"]) == 56
    assert "came to 50 epochs on Beauty, where LiGR came to 56 and more" in text
    for data, by in found.items():
        peers = [name for name in by if not name.startswith("ligr")]
        for measure in ("ndcg@10_new", "hr@10"):
            ahead = mean(data, "ligr", measure) - max(mean(data, name, measure) for name in peers)
            assert ahead > (-0.0055 if data == "ml-100k" else 0)
    assert mean("Toys_and_Games", "rectools-hstu") > mean("Toys_and_Games", "ligr")
    for data in ("Beauty", "Sports_and_Outdoors", "Yelp"):
        peers = [name for name in found[data] if not name.startswith("ligr")]
        assert mean(data, "ligr") > max(mean(data, name) for name in peers)


def test_what_the_page_says_of_a_step_is_in_the_record():
    text = (ROOT / "docs" / "rank" / "sequences-study.md").read_text()
    rows = report.load(ROOT / "benchmarks" / "results" / "h100-rank-sequences.json")["rows"]
    ms = {(row["data"], row["method"]): row["measures"]["ms"] for row in rows}
    ours = ms["training, ragged", "ligr"]
    known = [ours / ms["training, ragged", f"padded torch, in groups{more}"] for more in ("", " by length")]
    assert f"ragged rows take {known[0]:.2f} of the time" in text
    assert f"and {known[1]:.2f} of groups by length" in text
    for requests in (1, 16):
        assert ms[f"{requests} requests", "ligr"] > ms[f"{requests} requests", "padded torch"]
    shown = page.speed(rows)
    assert "| 16 requests | LiGR, layout kept | 11.1 | 4.16 | – | 0.010 |" in shown
    assert "| training, ragged | LiGR | 292 | – | 69.7 | – |" in shown


def test_what_the_page_says_of_lists_is_in_the_record():
    rows = report.load(ROOT / "benchmarks" / "results" / "h200-rank-sittings.json")["rows"]
    by = {side: [row for row in rows if row["method"] == side] for side in page.SIDES}
    assert {len(some) for some in by.values()} == {5}

    def apart(side, measure):
        """By how much LiGR is above a side, and the larger spread of the two."""
        ours, other = (page.values(by[name], measure) for name in ("ligr", side))
        return statistics.fmean(ours) - statistics.fmean(other), max(map(statistics.stdev, (ours, other)))

    assert 0.03 < apart("no actions", "auc")[0] < 0.035
    for side in ("by itself", "no gate", "no times"):
        assert all(abs(gain) < spread for gain, spread in (apart(side, of) for of in page.OF_LISTS))
    for measure in ("ndcg@10", "gauc"):
        gain, spread = apart("no actions", measure)
        assert abs(gain) < spread
        assert apart("all layers set-wise", measure)[0] > 0
    shown = page.page(ROOT / "benchmarks" / "results", "sittings").splitlines()
    assert len(shown) == 2 + len(page.SIDES)
    assert shown[2].startswith("| **LiGR** | 0.8400 ± 0.0011 | 0.6844")
    assert "rank_sittings.py" in page.page(ROOT / "benchmarks" / "results", "sittings source")
