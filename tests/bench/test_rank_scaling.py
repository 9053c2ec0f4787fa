"""Loss against compute: FLOPs beside a counter, a loss by hand, and a run whose curve goes on and is drawn."""

import json
from pathlib import Path

import pytest
import rank_scaling as script
import torch
import torch.nn.functional as F
from harness import report
from rank_sequences import LiGRSide, read, slices
from studies import scaling
from torch.utils.flop_counter import FlopCounterMode


@pytest.fixture
def folder(tmp_path):
    """Rings of ten items."""
    lines = [" ".join(map(str, (user, *(1 + (user + n) % 10 for n in range(5 + user % 3))))) for user in range(30)]
    (tmp_path / "rings.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_flops_are_those_of_the_matrices_and_of_attention(folder):
    data = read(folder, "rings")
    side = LiGRSide(data, 32, 2, 1, 0.0)
    users = torch.arange(8)
    chosen = slices(data, users, 2, 50)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for layer in side.ranker.layers:  # the matrices alone: kernels of attention count for nothing there
            layer(torch.randn(int(chosen.lengths.sum()) + 8, 32), lambda q, k, v: v)
    tokens, n = chosen.lengths + 1, chosen.lengths.sum()
    attention = sum(2 * 2 * 32 * int(t) ** 2 / 2 for t in tokens) * 2
    head = 2 * 32 * 10 * int(n)
    assert script.flops(side, chosen.lengths) == counter.get_total_flops() + attention + head


def test_the_loss_is_of_the_event_that_was_held_out_among_all_items(folder):
    data = read(folder, "rings")
    side = LiGRSide(data, 32, 1, 1, 0.0).eval().requires_grad_(False)
    terms = []
    for user in range(data.users):
        z = side.scores(torch.tensor([user]), 2)[0, 1:]
        terms.append(F.cross_entropy(z, data.items[data.offsets[user + 1] - 2] - 1))
    found = script.judged(side, data, 1, size=7)
    assert found["loss"] == pytest.approx(float(torch.stack(terms).mean()), rel=1e-5)
    assert 0 <= found["hr@10"] <= 1


def test_curves_of_widths_and_shares(folder, monkeypatch, capsys):
    def run(*more):
        words = ("--data", folder, "--sets", "rings", "--output", folder / "out", "--device", "cpu", "--epochs", 6,
                 "--batch-size", 8, "--lr", 0.01, "--warmup", 5, "--dropout", 0.0, "--layers", 1, *more)  # fmt: skip
        monkeypatch.setattr("sys.argv", ["rank_scaling.py", *map(str, words)])
        script.main()
        (path,) = (folder / "out").glob("*-rank-scaling.json")
        return path, report.load(path)["rows"]

    path, first = run("--seeds", 1, "--widths", "32", "--shares", "0.5,1")
    assert [(row["setting"]["share"], row["setting"]["users"]) for row in first] == [(0.5, 15), (1.0, 30)]
    for row in first:
        losses = [loss for _, loss in row["setting"]["curve"]]
        assert row["validation"]["loss"] == pytest.approx(min(losses), abs=1e-4)
        assert row["validation"]["flops"] == row["setting"]["curve"][losses.index(min(losses))][0]
    assert first[1]["validation"]["loss"] < 1  # a ring: what comes next is certain
    assert first[1]["setting"]["all_flops"] > 1.5 * first[0]["setting"]["all_flops"]
    _, second = run("--seeds", 2, "--widths", "32", "--shares", "1", "--resume", path, "--epochs", 1)
    assert second[:2] == first
    assert [(row["seed"], row["setting"]["share"]) for row in second[2:]] == [(1, 1.0)]
    assert path.with_suffix(".png").stat().st_size > 5000
    told = capsys.readouterr().out
    assert "| rings | 32 | 100% | 2 |" in told
    text = scaling.page(path.parent, "charts")
    assert "![loss against compute](charts/" in text
    assert " ± " in text
    rows = json.loads(path.read_text())["rows"]
    (low, off), both = scaling.spread(rows[1:]), [row["validation"]["loss"] for row in rows[1:]]
    assert low == pytest.approx(sum(both) / 2)
    assert off == pytest.approx(abs(both[0] - both[1]) / 2**0.5)
    with pytest.raises(SystemExit):
        run("--widths", "48")
    assert "--widths must be multiples of 32, got 48" in capsys.readouterr().err


def test_what_the_page_says_is_in_the_record():
    path = Path(script.__file__).parent / "results" / "h200-rank-scaling.json"
    by = scaling.points(report.load(path)["rows"])
    sets = {data for data, *_ in by}
    assert len(sets) == 4
    assert {len(some) for some in by.values()} == {3}
    for data in sets:
        (narrow, around), (wide, spread) = (scaling.spread(by[data, width, 0.1]) for width in (32, 256))
        assert wide > narrow - max(around, spread)
        losses = [scaling.spread(by[data, width, 1.0])[0] for width in (32, 64, 128, 256)]
        assert losses[0] > losses[1] > losses[2] < losses[3]
    whole = [row for (_, _, share), some in by.items() if share == 1 for row in some]
    assert sum(row["setting"]["ended"] == "seconds" for row in whole) > 0.85 * len(whole)
