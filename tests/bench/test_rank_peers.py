"""Peers in the study of next items: their items are the study's, and their packages measure what the study does."""

import importlib.util
import math

import pytest
import rank_sequences as script
import torch
from studies import rank_peers

CPU = torch.device("cpu")


@pytest.fixture
def data(tmp_path):
    """Rings of ten items, whose names are not in the order of the ring; the last user ends with two of its own."""
    names = [17, 3, 90, 41, 5, 66, 28, 12, 70, 54]
    lines = [[names[(7 * user + n) % 10] for n in range(5 + user % 3)] for user in range(40)]
    lines[-1][-2:] = [99, 98]
    (tmp_path / "rings.txt").write_text("".join(f"{u} {' '.join(map(str, line))}\n" for u, line in enumerate(lines)))
    rows = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    rows += [
        f"{u}\t{item}\t3\t{900 + 86400 * u + 3600 * n * n}"
        for u, line in enumerate(lines)
        for n, item in enumerate(line)
    ]
    (tmp_path / "timed.inter").write_text("\n".join(rows) + "\n")
    return {name: script.read(tmp_path, name) for name in ("rings", "timed")}


def events(data, user, left_out):
    return data.items[data.offsets[user] : data.offsets[user + 1] - left_out].tolist()


def test_histories_are_the_latest_that_a_peer_knows(data):
    data = data["rings"]
    draw = torch.Generator().manual_seed(0)
    codes = torch.cat((torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(data.catalogue, generator=draw)))
    codes[4] = 0
    for left_out, longest in ((1, 50), (2, 3)):
        x, where = rank_peers.histories(data, codes, left_out, longest)
        for user in range(data.users):
            known = [item for item in events(data, user, left_out) if item != 4][-longest:]
            assert x[user].tolist() == [0] * (longest - len(known)) + codes[known].tolist()
            assert data.items[where[user]][x[user] > 0].tolist() == known


class Reversed(rank_peers.Peer):
    """Counts items from the last on, and does not know item 2. It scores what came last, and by what the user is."""

    def __init__(self, data):
        codes = data.catalogue + 1 - torch.arange(data.catalogue + 1)
        codes[0] = codes[2] = 0
        self.weight = torch.rand(data.catalogue + 1, data.catalogue + 1, generator=torch.Generator().manual_seed(1))
        super().__init__(torch.nn.Linear(1, 1), data, 3, codes)

    def inputs(self, left_out):
        return {"x": rank_peers.histories(self.data, self.codes, left_out, self.longest)[0]}

    def logits(self, batch):
        last = self.data.catalogue + 1 - batch["x"][:, -1]
        found = self.weight[last].flip(1)[:, :-1]  # items from the last to the first
        found[:, 4] = math.nan
        return found[:, [n for n in range(self.data.catalogue) if n != self.data.catalogue - 2]]


def test_measures_of_scores_are_those_by_hand(data):
    data = data["rings"]
    peer = Reversed(data)
    for left_out in (0, 1):
        for new in (False, True):
            found = script.ranks(peer, data, left_out, new, size=7)
            for user in range(data.users):
                history = events(data, user, left_out + 1)
                target = events(data, user, left_out)[-1]
                last = [item for item in history if item != 2][-1]
                score = {item: peer.weight[last, item].item() for item in range(1, data.catalogue + 1)}
                score[2] = score[data.catalogue - 4] = -math.inf
                rivals = [i for i in score if i != target and not (new and i in history)]
                # As good is better: the place is the worst one. Item 0 and what was had are as good as −inf.
                least = score[target] == -math.inf
                behind = 1 + (len(score) - 1 - len(rivals)) if least else 0
                assert found[user] == 1 + sum(score[i] >= score[target] for i in rivals) + behind


def test_a_watch_stops_and_keeps_the_best():
    module = torch.nn.Linear(1, 1)
    peer = type("P", (), {"module": module, "device": CPU})()
    said = iter([0.1, 0.3, 0.2, 0.25, 0.9])

    def judge(_):
        module.eval()
        return next(said)

    setting = {"seconds": 60.0, "epochs": 100, "every": 2, "patience": 2}
    watch = rank_peers.Watch(peer, judge, setting)
    for epoch in range(1, 9):
        torch.nn.init.constant_(module.weight, float(epoch))
        assert watch.ends(1.0) == (epoch == 8)  # the second validation without a better one
        assert module.training
    watch.restore()
    assert (watch.best, watch.best_epoch, module.weight.item(), len(watch.losses)) == (0.3, 4, 4.0, 8)
    assert watch.ended == "patience"
    late = rank_peers.Watch(peer, lambda _: 0.5, {**setting, "seconds": 0.0})
    assert late.ends(1.0)
    assert late.ended == "seconds"
    assert late.best_epoch == 1  # judged all the same: what is measured must have been validated


def run(monkeypatch, folder, *words):
    monkeypatch.setattr(
        "sys.argv", ["rank_sequences.py", "--output", str(folder), "--data", str(folder), "--device", "cpu", *words]
    )
    script.main()


def test_what_is_not_installed_is_said(data, tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "recbole" else find(name))
    run(monkeypatch, tmp_path, "--sets", "rings", "--methods", "recbole-sasrec")
    said = capsys.readouterr().out
    assert "left out, recbole-sasrec: it needs the package recbole" in said
    assert "there is no recbole" in said
    with pytest.raises(SystemExit, match=r"no 'rectools-sasrek'; did you mean 'rectools-sasrec'"):
        run(monkeypatch, tmp_path, "--sets", "", "--methods", "ligr; rectools-sasrek")


def test_a_package_that_fails_ends_a_run_that_goes_on(data, tmp_path, monkeypatch, capsys):
    def fit(*_):
        raise ImportError("no float_")

    monkeypatch.setattr(rank_peers, "lacks", lambda method: None)
    monkeypatch.setattr(rank_peers, "fit", fit)
    with pytest.raises(SystemExit, match="packages failed: rings, rectools-ligr, seed 0: ImportError: no float_"):
        run(
            monkeypatch, tmp_path, "--sets", "rings", "--methods", "rectools-ligr; sasrec", "--epochs", "1", "--seeds",
            "1", "--width", "8", "--layers", "1", "--peer-dropout", "0.1",
        )  # fmt: skip
    assert "rings, sasrec, seed 0" in capsys.readouterr().out


def test_a_peer_is_tried_with_its_own_defaults_too():
    class Options:
        dropout, lr, peer_dropout = "0.3,0.5", "0.001", None

    def tried(method):
        return [point["dropout"] for point in script.points(method, Options)]

    assert tried("ligr") == [0.3, 0.5]
    assert tried("rectools-ligr") == [0.3, 0.5, 0.2]
    assert tried("recbole-sasrec") == [0.3, 0.5]
    Options.peer_dropout = "0.4"
    assert (tried("ligr"), tried("rectools-ligr")) == ([0.3, 0.5], [0.4])


# ---------------------------------------------------------------------------------------------- the packages themselves

SETTING = {
    "width": 16, "layers": 2, "heads": 2, "dropout": 0.1, "lr": 0.01, "epochs": 80, "every": 5, "patience": 100,
    "seconds": 60.0, "warmup": 5, "weight_decay": 0.0, "batch_size": 3,
}  # fmt: skip
TOP = 5


def fitted(method, data, longest=4):
    if lacks := rank_peers.lacks(method):
        pytest.skip(lacks)
    peer, own, seconds = rank_peers.fit(
        method, data, 0, SETTING, longest, lambda peer: script.measures(script.ranks(peer, data, 1, False))["ndcg@10"]
    )
    assert own["batch_size"] == rank_peers.PEERS[method].batch_size
    assert own["versions"][rank_peers.PEERS[method].package]
    assert len(own["losses"]) == own["epochs_run"]
    assert 0 < seconds <= 61
    return peer, own


def learned(peer, data):
    """What comes next in a ring is certain: a peer whose items are shifted by one would have it far from the top."""
    places = script.ranks(peer, data, 0, False)
    assert script.measures(places[:-1])["ndcg@10"] > 0.8
    return places


@pytest.mark.parametrize(
    ("method", "name"),
    [("rectools-sasrec", "rings"), ("rectools-ligr", "rings"), ("rectools-hstu", "rings"), ("rectools-hstu", "timed")],
)
def test_rectools_ranks_as_its_own_inference_does(data, method, name):
    data = data[name]
    peer, own = fitted(method, data)
    places = learned(peer, data)
    assert own["unknown_items"] == 2  # the last user's own two
    assert places[-1] > data.catalogue
    # It trains on what the study trains on, at most one more than it reads.
    ready = peer.model.data_preparator
    trained = ready.train_dataset.get_raw_interactions().groupby("user_id")["item_id"].apply(list)
    assert trained.to_dict() == {user: events(data, user, 2)[-5:] for user in range(data.users)}
    # Its own lists of the same histories, by its own pipeline from tables.
    import pandas as pd
    from rectools.dataset import Dataset

    user = torch.repeat_interleave(data.offsets.diff())
    last = torch.zeros(len(user), dtype=torch.bool)
    last[data.offsets[1:] - 1] = True
    when = torch.arange(len(user)) if data.seconds is None else data.seconds.long()
    frame = pd.DataFrame(
        {"user_id": user, "item_id": data.items, "weight": 1.0, "datetime": pd.to_datetime(when, unit="s")}
    )
    context = frame[last.numpy()][["user_id", "datetime"]] if name == "timed" else None
    peer.model.recommend_torch_device = "cpu"
    lists = peer.model.recommend(
        users=list(range(data.users)), dataset=Dataset.construct(frame[~last.numpy()]), k=TOP, filter_viewed=False,
        **({} if context is None else {"context": context.assign(weight=1.0)}),
    )  # fmt: skip
    mine = peer.scores(torch.arange(data.users), 1).topk(TOP).indices
    theirs = lists.sort_values(["user_id", "rank"]).groupby("user_id")["item_id"].apply(list)
    assert mine.tolist() == [theirs[user] for user in range(data.users)]
    hits = sum(events(data, user, 0)[-1] in theirs[user] for user in range(data.users)) / data.users
    assert script.measures(places)["hr@5"] == pytest.approx(hits)


def test_recbole_ranks_as_its_own_evaluation_does(data):
    data = data["rings"]
    peer, own = fitted("recbole-sasrec", data)
    places = learned(peer, data)
    assert own["unknown_items"] == 0
    names = {code: item for item, code in enumerate(peer.codes.tolist()) if code}
    from recbole.data import create_dataset, data_preparation
    from recbole.trainer import Trainer
    from studies.rank_peers.recbole import apart, recbole_parts

    with apart() as folder:
        config, _, loader, model = recbole_parts(data, SETTING, 0, 4, folder)
        # It trains on each next item of what the study trains on.
        seen = loader.dataset.inter_feat
        pairs = sorted(
            ([names[i] for i in row[:length]], names[target])
            for row, length, target in zip(
                seen[model.ITEM_SEQ].tolist(),
                seen[model.ITEM_SEQ_LEN].tolist(),
                seen[model.POS_ITEM_ID].tolist(),
                strict=True,
            )
        )
        mine = [events(data, user, 2) for user in range(data.users)]
        assert pairs == sorted((line[max(0, n - 4) : n], line[n]) for line in mine for n in range(1, len(line)))
        model.load_state_dict(peer.module.state_dict())
        for key, value in (("metrics", ["Hit", "NDCG"]), ("topk", [TOP])):
            config[key] = value
        _, valid, test = data_preparation(config, create_dataset(config))
        trainer = Trainer(config, model)
        trainer.eval_collector.data_collect(loader)
        for left_out, part in ((1, valid), (0, test)):
            theirs = trainer.evaluate(part, load_best_model=False)
            found = script.measures(script.ranks(peer, data, left_out, False))
            assert found["hr@5"] == pytest.approx(theirs[f"hit@{TOP}"], abs=1e-4)
            assert found["ndcg@5"] == pytest.approx(theirs[f"ndcg@{TOP}"], abs=1e-4)
        trainer.tensorboard.close()
    assert places.shape == (data.users,)
