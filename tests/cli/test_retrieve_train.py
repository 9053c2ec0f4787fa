"""`tigon retrieve train`: from pairs of users and items to an index, however the run is cut."""

import json
import signal
import time

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
for package in ("safetensors", "accelerate", "matplotlib"):
    pytest.importorskip(package)
import pyarrow.parquet as parquet  # noqa: E402

USERS, ITEMS, GROUPS = 60, 48, 4
SMALL = ("--device", "cpu", "--batch-size", 64, "--dim", 8, "--lr", 0.01, "--eval-every", 1)


def drawn():
    """Users and items of groups, and pairs within them: (train, test)."""
    draw = np.random.default_rng(0)
    same = np.arange(USERS)[:, None] % GROUPS == np.arange(ITEMS) % GROUPS
    pairs = np.argwhere(same & (draw.random((USERS, ITEMS)) < 0.8))
    late = draw.random(len(pairs)) < 0.15
    return pairs[~late], pairs[late]


def lists(path, pairs):
    rows = [f"{u} {' '.join(str(i) for i in pairs[pairs[:, 0] == u, 1])}".strip() for u in range(USERS)]
    path.write_text("\n".join(rows) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    train, test = drawn()
    lists(folder / "train.txt", train)
    lists(folder / "test.txt", test)
    for name, pairs in (("train", train), ("test", test)):
        ids = {"user": [f"u{u}" for u in pairs[:, 0]], "item_id": pairs[:, 1] + 1000}
        parquet.write_table(pa.table(ids), folder / f"{name}.parquet")
    return folder


def results(output):
    return json.loads((output / "results.json").read_text())


def test_a_run_finds_the_groups_and_its_index_is_searched(folder, here, tmp_path):
    out = tmp_path / "run"
    shown = here("retrieve", "train", folder, *SMALL, "--epochs", 8, "--seed", "0,3", "-k", "5,20", "-o", out).ok()
    assert "recall@20" in shown.out
    found = results(out)
    assert [row["seed"] for row in found["seeds"]] == [0, 3]
    assert all(row["recall@20"] > 0.9 for row in found["seeds"])  # by chance below 0.5
    values = [row["recall@5"] for row in found["seeds"]]
    assert found["summary"]["recall@5"] == pytest.approx({"mean": np.mean(values), "sd": np.std(values, ddof=1)})
    assert found["versions"]["torch"]
    assert (out / "recall.png").stat().st_size > 1000
    assert not list(out.glob("checkpoint-*"))
    search = ("retrieve", "search", out / "items.index", "--vectors", out / "users.npy", "-k", 10, "--json")
    rows = [json.loads(line) for line in here(*search).ok().out.splitlines()]
    assert len(rows) == 10 * USERS
    assert np.mean([row["id"] % GROUPS == row["query"] % GROUPS for row in rows]) > 0.9
    here("retrieve", "train", folder, "-o", out).problem("holds a run", "--overwrite replaces it")
    here("retrieve", "train", "--resume", "-o", out).problem("is at its end")
    here("retrieve", "train", folder, *SMALL, "--epochs", 1, "-o", out, "--overwrite", "--val-split", "block").ok()
    assert len(results(out)["seeds"]) == 1


def test_a_split_by_blocks_holds_out_neighbours_of_each_user():
    from tigon.retrieve.cli.pairs import split_blocks

    train = drawn()[0]
    kept, held = split_blocks(train, 0.3, 5)
    both = np.concatenate((kept, held))
    assert np.array_equal(both[np.lexsort(both.T[::-1])], train)
    assert len(held) == pytest.approx(0.3 * len(train), rel=0.1)
    assert len(np.unique(kept[:, 0])) == len(np.unique(train[:, 0]))
    for user in range(USERS):
        whole = np.sort(train[train[:, 0] == user, 1])
        out = np.isin(whole, held[held[:, 0] == user, 1])
        assert (out != np.roll(out, 1)).sum() <= 2, "one run, which may go on at the beginning"
    assert not np.array_equal(held, split_blocks(train, 0.3, 6)[1])


@pytest.mark.parametrize("leave_out", [True, False])
def test_the_pairs_of_a_step_are_left_out_of_its_pooling(leave_out):
    import torch

    from tigon import retrieve
    from tigon.retrieve.cli import loop
    from tigon.retrieve.cli.train_options import TrainOptions

    pairs = torch.from_numpy(drawn()[0])
    torch.manual_seed(0)
    towers = retrieve.TwoTowers(USERS, ITEMS, 8, pairs, hops=2)
    user, item = pairs[:99].unbind(1)
    loss = loop.Objective(towers, pairs, TrainOptions(leave_out=leave_out), narrow=False)(user, item)
    losses = [retrieve.item_softmax(u[user], i, item, scale=12.0) for u, i in (towers(), towers(pairs[:99]))]
    torch.testing.assert_close(loss, losses[leave_out])
    assert abs(losses[0] - losses[1]) > 0.01


# The best items of a user's group that are not in its pairs are those of the test: hard negatives leave them out.
HARD = ("--hard-after", 5, "--hard-negatives", 4, "--hard-skip", 8)


@pytest.mark.parametrize("loss", ["in_batch", "in_batch_logq", "sampled", "hard"])
def test_a_table_of_ids_and_other_losses(loss, folder, here, tmp_path):
    more = HARD if loss == "hard" else ()
    here("retrieve", "train", folder / "train.parquet", "--test", folder / "test.parquet", "--loss", loss, "--hops", 0,
          *SMALL, *more, "--epochs", 40, "--scale", 5, "--val-fraction", 0, "-o", tmp_path / "run").ok()  # fmt: skip
    (row,) = results(tmp_path / "run")["seeds"]
    assert row["epochs"] == 40
    assert row["recall@20"] > 0.9
    near = here("retrieve", "search", tmp_path / "run" / "items.index", "--like", 1000, "-k", 3, "--json").ok().out
    assert all(json.loads(line)["id"] % GROUPS == 0 for line in near.splitlines())


def test_hard_negatives_are_mined_after_the_schedule_and_after_a_resume(monkeypatch):
    import copy

    import torch

    from tigon.retrieve.cli import loop
    from tigon.retrieve.cli.train_options import TrainOptions

    pairs = torch.from_numpy(drawn()[0])
    settings = TrainOptions(
        loss="hard", dim=8, batch_size=64, lr=0.01, epochs=5, hard_after=3, hard_negatives=6, hard_skip=1
    )
    monkeypatch.setattr(loop, "MINED", 25)  # users in three pieces
    mined, states = [], {}
    mine = loop.Miner.mine
    monkeypatch.setattr(loop.Miner, "mine", lambda self: mine(self) or mined.append(self.objective.hard.clone()))

    def fitted(state=None):
        def after(epoch, loss, found, made):
            states[epoch] = copy.deepcopy(made())

        return loop.fit(pairs, (USERS, ITEMS), settings, 0, device=torch.device("cpu"), state=state, after_epoch=after)

    whole = fitted().towers
    assert len(mined) == 2  # in epochs 4 and 5
    towers = copy.deepcopy(whole)
    towers.load_state_dict(states[4]["towers"])
    with torch.no_grad():
        users, items = towers()
    scores = users @ items.T
    scores[pairs[:, 0], pairs[:, 1]] = -torch.inf
    torch.testing.assert_close(scores.gather(1, mined[1]), scores.topk(7).values[:, 1:])
    again = fitted(states[4]).towers
    assert torch.equal(mined[2], mined[1])
    assert torch.equal(again.item.weight, whole.item.weight)


def test_a_matrix_is_read_where_the_lists_are_not_whole(folder, here, tmp_path):
    train, test = drawn()
    whole = np.zeros((USERS + ITEMS, USERS + ITEMS), dtype=bool)
    whole[train[:, 0], USERS + train[:, 1]] = whole[USERS + train[:, 1], train[:, 0]] = True
    starts = np.concatenate([[0], whole.sum(1).cumsum()])
    place = tmp_path / "data"
    place.mkdir()
    np.savez(place / "s_adj_mat.npz", indptr=starts, indices=whole.nonzero()[1], format=b"csr", shape=whole.shape)
    lists(place / "test.txt", test)
    same = (*SMALL, "--epochs", 3, "--val-fraction", 0)
    here("retrieve", "train", place, *same, "-o", tmp_path / "a").ok()
    here("retrieve", "train", folder, *same, "-o", tmp_path / "b").ok()
    first, second = results(tmp_path / "a"), results(tmp_path / "b")
    assert first["seeds"][0]["recall@20"] == second["seeds"][0]["recall@20"]
    assert (np.load(tmp_path / "a" / "users.npy") == np.load(tmp_path / "b" / "users.npy")).all()


def test_a_run_that_was_stopped_goes_on_to_the_same_vectors(folder, here, start, tmp_path):
    same = (*SMALL, "--epochs", 60, "--val-fraction", 0)
    here("retrieve", "train", folder, *same, "-o", tmp_path / "whole").ok()
    cut = tmp_path / "cut"
    process = start("retrieve", "train", folder, *same, "-o", cut)
    end = time.monotonic() + 60
    while not list(cut.glob("checkpoint-*")) and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130, said
    assert "with a checkpoint; go on by: tigon retrieve train --resume" in said
    assert not (cut / "items.index").exists()
    again = here("retrieve", "train", "--resume", "--device", "cpu", "-o", cut).ok()
    assert "seed 0: from epoch" in again.err
    assert (np.load(cut / "users.npy") == np.load(tmp_path / "whole" / "users.npy")).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere.txt",), ("there is no file", "nowhere.txt")),
        ((), ("training pairs must be given",)),
        (("{folder}", "--loss", "bpr"), ("--loss must be one of item_softmax, in_batch", "got bpr")),
        (("{folder}", "--lr", "0"), ("--lr must be positive, got 0",)),
        (("{folder}", "--seed", "a"), ("--seed must be integers", "got a")),
        (("{folder}", "--val-fraction", "1e-9"), ("leaves the validation set empty",)),
        (
            ("{folder}/train.parquet", "--item", "thing"),
            ("--item must be a column in", "got 'thing'; there are 'user', 'item_id'"),
        ),
        (("{folder}/train.txt", "--test", "far.txt"), ("pair 1: item 99 is not among the 48 items",)),
        (("bad.txt",), ("line 2: must be integers",)),
        (("empty.txt",), ("has no pairs",)),
        (("--resume",), ("there is no run in", "to resume")),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments, words, folder, here, tmp_path):
    (tmp_path / "far.txt").write_text("0 4 99\n")
    (tmp_path / "bad.txt").write_text("0 4\n1 x\n")
    (tmp_path / "empty.txt").write_text("\n")
    arguments = [word.format(folder=folder) for word in arguments]
    here("retrieve", "train", *arguments, "-o", "x", "--device", "cpu", cwd=tmp_path).refused(*words)
    assert not (tmp_path / "x").exists()


def test_the_time_ends_a_fit_and_is_validated_before(folder, here, tmp_path):
    shown = here("retrieve", "train", folder, *SMALL, "--eval-every", 50, "--max-minutes", "1e-6", "-o",
                  tmp_path / "run").ok()  # fmt: skip
    assert "validation, epoch 1: loss" in shown.err
    assert results(tmp_path / "run")["seeds"][0]["epochs"] == 1


def test_files_of_others_are_left_alone(folder, here, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    here("retrieve", "train", folder, "-o", tmp_path, "--overwrite").problem("holds files that no run wrote")
    assert (tmp_path / "mine.txt").read_text() == "mine"
