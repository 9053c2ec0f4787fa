"""An index on the disk: kills and a full disk at every step, flipped bits, and journals."""

import copy
import os
import shutil
import signal
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tigon.retrieve import Category, Index, Number, Retriever, Schema, Tags
from tigon.retrieve.index import snapshot
from tigon.retrieve.index.snapshot_manifest import read_manifest
from tigon.retrieve.storage import disk
from tigon.retrieve.storage import journal as journal_module
from tigon.retrieve.storage.folder_lock import LOCK

D = 8
STEPS = ("write", "flush", "flush_folder", "rename", "truncate", "remove")


def schema():
    return Schema(country=Category(), tags=Tags(5), price=Number())


def vectors(numbers, version=0):
    return torch.tensor([[float(n % 50 + version + 1)] + [1.0] * (D - 1) for n in numbers])


def table(numbers):
    return {
        "country": [f"c{n % 4}" for n in numbers],
        "tags": [[n % 5] for n in numbers],
        "price": [n / 4 for n in numbers],
    }


def named(strings):
    return (lambda numbers: [f"id {n} é" for n in numbers]) if strings else list


def made(name, count=20, dtype="float16", metric="ip"):
    index = Index(D, 30, dtype, metric, schema())
    index.upsert(name(range(count)), vectors(range(count)), table(range(count)))
    index.delete(name([3, 4]))
    return index


def snapshot_id(folder):
    return read_manifest("test", folder)["id"]


def listed(folder):
    """What is in an index's folder beside its lock."""
    return sorted({path.name for path in folder.iterdir()} - {LOCK})


def contents(index):
    """Every item: its vector's first component and its attributes."""
    rows = np.flatnonzero(index.table.rows.live_mask())
    assert len(rows) == len(index)
    ids = index.table.directory.ids.to_ids(index.table.item_ids.numpy()[rows]).tolist() if len(rows) else []
    words = index.table.words.numpy()[:, rows]
    found = {}
    for i, id in enumerate(ids):
        code = int(index.schema.decode("country", words[:, i : i + 1])[0])
        price = int(index.schema.decode("price", words[:, i : i + 1])[0])
        country = index.schema["country"].values[code - 1]
        found[id] = (float(index.embeddings[rows[i], 0]), country, price)
        assert index.table.directory.ids.find([id])[1].tolist() == [rows[i]]
    return found


@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize(
    ("dtype", "metric"), [("float16", "l2"), ("bfloat16", "ip"), ("float8_e4m3fn", "ip"), ("float32", "cosine")]
)
def test_what_is_loaded_is_what_was_saved(tmp_path, strings, dtype, metric, device):
    name = named(strings)
    index = made(name, dtype=dtype, metric=metric).to(device)
    before = index.search(torch.ones(1, D), k=30, where="price < 4")
    index.save(tmp_path / "jobs.index")
    index.save(tmp_path / "jobs.index")  # beside the first, which goes
    assert listed(tmp_path / "jobs.index") == ["snapshot-000002"]
    again = Index.load(tmp_path / "jobs.index", device=device)
    assert (again.dtype, again.metric, again.capacity, len(again)) == (index.dtype, metric, 30, 18)
    hits = again.search(torch.ones(1, D), k=30, where="price < 4")
    assert hits.scores.tolist() == before.scores.tolist()
    found, wanted = (h.ids if strings else h.ids.cpu() for h in (hits, before))
    assert np.asarray(found).tolist() == np.asarray(wanted).tolist()
    again.upsert(name([3, 50]), vectors([3, 50]), table([3, 50]))
    assert len(again) == 20
    assert contents(again.cpu()).keys() == {*contents(index.cpu()), *name([3, 50])}
    tensors = load_file(tmp_path / "jobs.index" / "snapshot-000002" / "items.safetensors")
    assert tensors["embeddings"].shape == (18, D)


def test_an_index_that_never_had_an_item_is_saved_too(tmp_path):
    Index(D, 30, schema=schema()).save(tmp_path / "a")
    again = Index.load(tmp_path / "a")
    again.upsert(["x"], torch.ones(1, D), table([1]))
    assert "x" in again


def test_large_items_are_written_and_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "PIECE", 64)
    index = made(list, metric="l2")
    index.save(tmp_path / "a")
    again = Index.load(tmp_path / "a")
    assert contents(again) == contents(index)
    assert torch.equal(again.table.bias[:18], index.table.bias[torch.from_numpy(index.table.rows.live_mask())])
    assert again.search(torch.ones(1, D), k=3).scores.tolist() == index.search(torch.ones(1, D), k=3).scores.tolist()


# -------------------------------------------------------------------------------------------------------------- journal


@pytest.mark.parametrize("strings", [False, True])
def test_a_journal_brings_back_every_update(tmp_path, strings):
    name = named(strings)
    made(name).save(tmp_path / "a")
    index = Index.open(tmp_path / "a")
    index.upsert(name([3, 19, 40]), vectors([3, 19, 40], 5), {**table([3, 19, 40]), "country": ["new", "c1", "c2"]})
    assert index.delete(name([0, 1, 77])) == 2
    index.grow(60)
    index.upsert(name(range(100, 140)), vectors(range(100, 140)), table(range(100, 140)))
    expected = contents(index)
    assert contents(Index.load(tmp_path / "a")) == expected  # reads beside the one that writes
    with pytest.raises(ValueError, match=r"is open for writing in another index or process \(this process\)\."):
        Index.open(tmp_path / "a")
    copied = copy.deepcopy(index)
    assert copied.journal is None
    copied.delete(name([5]))
    index.close()
    again = Index.open(tmp_path / "a")
    assert contents(again) == expected
    assert again.capacity == 60
    again.save(tmp_path / "a")
    folder = tmp_path / "a" / "snapshot-000002"
    for ids, factor in (([1], torch.nan), (range(200, 300), 1)):  # refused, and not in the journal
        with pytest.raises(ValueError, match=r"NaN|do not fit"):
            again.upsert(name(ids), vectors(ids) * factor, table(ids))
    assert [kind for kind, _, _ in journal_module.read_records(folder / "journal", snapshot_id(folder))] == ["snapshot"]
    again.delete(name([2]))
    again.save(tmp_path / "b")  # elsewhere: the journal stays where it is
    again.delete(name([5]))
    again.close()
    assert contents(Index.load(tmp_path / "a")).keys() == expected.keys() - set(name([2, 5]))
    assert contents(Index.load(tmp_path / "b")).keys() == expected.keys() - set(name([2]))


# -------------------------------------------------------------------------------------------------- kills and full disk


class Stop:
    """Stands before the steps on the disk, and stops at the n-th: by `stop`, or after half of a write by `stop`."""

    def __init__(self, monkeypatch, at, stop, half=False, steps=STEPS):
        self.count, self.at, self.stop, self.half = 0, at, stop, half
        for name in steps:
            monkeypatch.setattr(disk, name, self.step(name, getattr(disk, name)))

    def step(self, name, real):
        def step(*args):
            self.count += 1
            if self.count == self.at + 1:
                if name == "write" and self.half:
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                self.stop()
            return real(*args)

        return step


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def killed(work, at, half):
    """Whether a process of its own, which runs work, was killed at a step; it may end before that step."""
    process = os.fork()
    if process == 0:
        patch = pytest.MonkeyPatch()
        try:
            Stop(patch, at, kill, half, ("write",) if half else STEPS)
            work()
            os._exit(0)
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def every_kill(work, check, halves=(False, True)):
    """Work is killed at each of its steps, and within each of its writes; check sees what it left."""
    for half in halves:
        at = 0
        while killed(work, at, half):
            check()
            at += 1
        assert at > 3
        check()


def test_a_kill_at_any_step_of_save_leaves_the_old_or_the_new(tmp_path):
    first, second = made(list), made(list, count=25)
    first.save(tmp_path / "a")
    old, new = contents(first), contents(second)
    assert old != new
    seen = []

    def check():
        found = contents(Index.load(tmp_path / "a"))
        assert found in (old, new)
        seen.append(found == new)
        again = Index.open(tmp_path / "a")  # takes away what was left
        assert contents(again) == found
        again.close()
        assert len(listed(tmp_path / "a")) == 1
        first.save(tmp_path / "a")

    every_kill(lambda: second.save(tmp_path / "a"), check)
    assert {False, True} == set(seen)


def test_a_kill_at_any_step_of_the_first_save_leaves_no_index_or_the_whole(tmp_path):
    index, seen = made(list), []

    def check():
        whole = bool(snapshot.list_snapshots(tmp_path / "a"))
        seen.append(whole)
        if whole:
            assert contents(Index.load(tmp_path / "a")) == contents(index)
            shutil.rmtree(tmp_path / "a")
        else:
            with pytest.raises(ValueError, match="which holds no snapshot"):
                Index.load(tmp_path / "a")

    every_kill(lambda: index.save(tmp_path / "a"), check)
    assert {False, True} == set(seen)


def test_a_kill_at_any_step_of_updates_leaves_the_last_whole_one(tmp_path):
    made(list).save(tmp_path / "a")
    stages = [contents(Index.load(tmp_path / "a"))]
    index = Index.load(tmp_path / "a")
    updates = [
        lambda i: i.upsert([3, 19], vectors([3, 19], 5), {**table([3, 19]), "country": ["new", "c1"]}),
        lambda i: i.delete([0, 1]),
        lambda i: i.grow(40),
        lambda i: i.save(tmp_path / "a"),
        lambda i: i.upsert([7], vectors([7], 9), table([8])),
    ]
    for update in (updates[0], updates[1], updates[4]):
        update(index)
        stages.append(contents(index))

    def work():
        opened = Index.open(tmp_path / "a")
        for update in updates:
            update(opened)

    seen = set()

    def check():
        again = Index.open(tmp_path / "a")
        found = contents(again)
        assert found in stages
        seen.add(stages.index(found))
        again.upsert([500], vectors([5]), table([5]))  # what follows the last whole record is readable
        again.close()
        assert contents(Index.load(tmp_path / "a")).keys() == {*found, 500}
        shutil.rmtree(tmp_path / "a")
        made(list).save(tmp_path / "a")

    every_kill(work, check)
    assert seen == {0, 1, 2, 3}


def test_a_kill_at_any_step_of_a_repair_leaves_what_was_before_the_damage(tmp_path):
    made(list).save(tmp_path / "a")
    index = Index.open(tmp_path / "a")
    expected, path = contents(index), index.journal.path
    index.delete([6])
    index.close()
    flip(path, path.stat().st_size - 1)
    damaged = path.read_bytes()

    def check():
        again = Index.open(tmp_path / "a", repair=True)
        assert contents(again) == expected
        again.close()
        path.write_bytes(damaged)

    every_kill(lambda: Index.open(tmp_path / "a", repair=True).close(), check, halves=(False,))


def test_a_kill_at_any_step_of_saving_a_retriever_leaves_one_that_is_read(tmp_path):
    encoders = [torch.nn.Linear(2, D), torch.nn.Linear(2, D)]
    retrievers = [Retriever(encoder, made(list, count)) for encoder, count in zip(encoders, (20, 25), strict=True)]
    wanted = [(encoder.weight.tolist(), contents(one.index)) for encoder, one in zip(encoders, retrievers, strict=True)]
    retrievers[0].save_pretrained(tmp_path / "r")
    seen = set()

    def check():
        again = Retriever.from_pretrained(tmp_path / "r", torch.nn.Linear(2, D))
        weights, items = again.encoder.weight.tolist(), contents(again.index)
        seen.add((weights == wanted[1][0], items == wanted[1][1]))
        assert weights in (wanted[0][0], wanted[1][0])
        assert items in (wanted[0][1], wanted[1][1])
        retrievers[0].save_pretrained(tmp_path / "r")
        assert len(list((tmp_path / "r").glob("encoder-*"))) == 1

    every_kill(lambda: retrievers[1].save_pretrained(tmp_path / "r"), check, halves=(False,))
    assert {(False, False), (True, True)} <= seen


def full():
    raise OSError(28, "No space left on device")


def test_a_full_disk_at_any_step_of_save_leaves_the_old(tmp_path, monkeypatch):
    first, second = made(list), made(list, count=25)
    old, new = contents(first), contents(second)
    steps = [name for name in STEPS if name != "remove"]  # frees room
    for half in (False, True):
        at, done = 0, False
        while not done:
            first.save(tmp_path / "a")
            with monkeypatch.context() as patch:
                stop = Stop(patch, at, full, half, steps)
                try:
                    second.save(tmp_path / "a")
                    said = ""
                except OSError as error:
                    said = str(error)
            done = stop.count <= at
            assert done == (not said)
            late = "the snapshot is written, but the disk did not confirm the write" in said
            assert done or late or "No space left on device; the previous content is unchanged" in said
            assert contents(Index.load(tmp_path / "a")) == (new if done or late else old)
            assert late or len(listed(tmp_path / "a")) == 1
            at += 1
        assert at > 8


def test_a_full_disk_at_any_step_of_an_update_leaves_the_index_as_it_was(tmp_path, monkeypatch):
    made(list).save(tmp_path / "a")
    index = Index.open(tmp_path / "a")
    before, size = contents(index), index.journal.size
    for update in (
        lambda: index.upsert([3], vectors([3]), table([3])),
        lambda: index.delete([3, 5]),
        lambda: index.grow(40),
        lambda: index.grow(35),
    ):
        for at, half in ((0, False), (0, True), (1, False), (1, True), (2, False)):
            with monkeypatch.context() as patch:
                Stop(patch, at, full, half)
                with pytest.raises(OSError, match=r"No space left on device.*the index is unchanged"):
                    update()
            assert (contents(index), index.capacity) == (before, 30)
            assert (index.journal.path.stat().st_size, index.journal.size) == (size, size)
    index.upsert([3], vectors([3]), table([3]))
    index.close()
    assert contents(Index.load(tmp_path / "a")) == contents(index)


def test_a_journal_that_cannot_be_cut_takes_no_more(tmp_path, monkeypatch):
    made(list).save(tmp_path / "a")
    index = Index.open(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(disk, "write", lambda file, content: (file.write(content[:20]), full()))
        patch.setattr(disk, "truncate", lambda *args: full())
        with pytest.raises(OSError, match="the index is unchanged"):
            index.delete([5])
    with pytest.raises(OSError, match="reopen the index"):
        index.delete([5])
    assert 5 in index
    index.close()
    again = Index.open(tmp_path / "a")
    assert again.delete([5]) == 1


# --------------------------------------------------------------------------------------------------------- flipped bits


def flip(path, at, bit=1):
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(content)


def test_flipped_bits_are_found(tmp_path):
    made(list).save(tmp_path / "a")
    for file in ("items.safetensors", "manifest.json"):
        path = tmp_path / "a" / "snapshot-000001" / file
        for at in range(0, path.stat().st_size, 29):
            flip(path, at)
            with pytest.raises(ValueError, match=f"Index.load: .*{file} is damaged"):
                Index.load(tmp_path / "a")
            flip(path, at)
    (tmp_path / "a" / "snapshot-000001" / "items.safetensors").unlink()
    with pytest.raises(ValueError, match=r"items.safetensors is missing"):
        Index.load(tmp_path / "a")


def test_flipped_bits_of_a_journal_are_found_and_repair_keeps_what_is_before(tmp_path):
    made(list).save(tmp_path / "a")
    index = Index.open(tmp_path / "a")
    ends, known = [index.journal.size], snapshot_id(index.journal.path.parent)
    for n in (5, 6, 7):
        index.delete([n])
        ends.append(index.journal.size)
    index.close()
    path = index.journal.path if index.journal else tmp_path / "a" / "snapshot-000001" / "journal"
    good = path.read_bytes()
    for at in range(0, len(good), 3):
        flip(path, at, 1 << at % 8)
        with pytest.raises(ValueError, match=r"record \d of the journal .* is damaged, at byte"):
            journal_module.measure(path, known)
        flip(path, at, 1 << at % 8)
    flip(path, ends[1] + 40)
    with pytest.raises(ValueError, match=r"record 3 of the journal .*repair=True"):
        Index.open(tmp_path / "a")
    mended = Index.open(tmp_path / "a", repair=True)
    assert (5 in mended, 6 in mended, 7 in mended) == (False, True, True)
    assert path.read_bytes() == good[: ends[1]]
    mended.close()


def delete_twice(folder):
    """The journal of an index from which items 5 and 6 were deleted, its content, and its size after the first."""
    made(list).save(folder)
    index = Index.open(folder)
    index.delete([5])
    size = index.journal.size
    index.delete([6])
    index.close()
    path = folder / "snapshot-000001" / "journal"
    return path, path.read_bytes(), size


def test_half_a_record_is_cut_off_and_zeros_too(tmp_path):
    path, good, size = delete_twice(tmp_path / "a")
    for content in (*(good[:end] for end in range(size, len(good), 7)), good[:size] + b"\0" * 100):
        path.write_bytes(content)
        again = Index.open(tmp_path / "a")
        assert (5 in again, 6 in again) == (False, True)
        again.close()
        assert path.read_bytes() == good[:size]


def test_zeros_before_a_record_are_no_end(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "PIECE", 64)
    path, good, size = delete_twice(tmp_path / "a")
    path.write_bytes(good[:size] + b"\0" * 1000 + good[size:])
    with pytest.raises(ValueError, match=r"of the journal .*repair=True"):
        Index.open(tmp_path / "a")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda p: Index.load(p / "none"), r"Index.load: path must be a folder that Index.save wrote, got .*none"),
        (lambda p: Index.open(p), "Index.open: path must be a folder that Index.save wrote"),
        (lambda p: made(list).save(p / "file"), "Index.save: path must be a folder.*got the file"),
        (lambda p: Index.over(torch.zeros(3, 2)).save(p), "an index over a parameter is saved in the model"),
    ],
)
def test_a_bad_path_gets_a_sentence(tmp_path, make, sentence):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=sentence):
        make(tmp_path)
