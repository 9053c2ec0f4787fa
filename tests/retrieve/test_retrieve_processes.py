"""Several processes and one folder: the lock, kills, readers beside writers, journals of other indexes, forks."""

import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from tigon.retrieve import Batcher, Index
from tigon.retrieve.index import snapshot
from tigon.retrieve.storage import disk, folder_lock
from tigon.retrieve.storage import journal as journal_module
from tigon.retrieve.storage.folder_lock import LOCK

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
D = 4


def made(ids, capacity=100):
    index = Index(D, capacity)
    index.upsert(ids, torch.ones(len(ids), D))
    return index


def ids_in(index):
    return {id for id in map(str, range(60)) if id in index}


UPDATES = {
    "upsert": lambda index, folder, ids: index.upsert(ids, torch.ones(len(ids), D)),
    "delete": lambda index, folder, ids: index.delete(ids),
    "save": lambda index, folder, ids: index.save(folder),
    "close": lambda index, folder, ids: index.close(),
    "make": lambda index, folder, ids: made(ids).save(folder),
}
READS = {
    "open": Index.open,
    "load": Index.load,
    "repair": lambda folder: Index.open(folder, repair=True),
}


class Worker:
    """A process that makes calls on an index of its own, one after another."""

    def __init__(self, folder):
        self.pipe, there = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=self._serve, args=(there, folder))
        self.process.start()
        there.close()

    @staticmethod
    def _serve(pipe, folder):
        index = None
        while True:
            name, ids = pipe.recv()
            try:
                if name in READS:
                    index = READS[name](folder)
                else:
                    UPDATES[name](index, folder, ids)
                pipe.send((True, None if index is None else ids_in(index)))
            except (ValueError, OSError) as error:
                pipe.send((False, str(error)))

    def begin(self, name, ids=None):
        self.pipe.send((name, ids))

    def result(self):
        assert self.pipe.poll(60), "a worker hangs"
        return self.pipe.recv()

    def call(self, name, ids=None):
        self.begin(name, ids)
        return self.result()

    def kill(self):
        self.process.kill()
        self.process.join()


@pytest.fixture
def worker(tmp_path):
    found = Worker(tmp_path / "a")
    yield found
    found.kill()


# ------------------------------------------------------------------------------------------------------------ the lock


def test_one_process_at_a_time_writes_to_a_folder(tmp_path, worker):
    folder = tmp_path / "a"
    made(["1"]).save(folder)
    assert worker.call("open") == (True, {"1"})
    worker.call("upsert", ["2"])
    before = (folder / "snapshot-000001" / "journal").read_bytes()
    pid = worker.process.pid
    for write in (
        lambda: Index.load(folder).save(folder),
        lambda: made(["9"]).save(folder),
        lambda: Index.open(folder),
        lambda: Index.open(folder, journal=False),
        lambda: Index.open(folder, repair=True),
        lambda: folder_lock.check_free("Index.save", folder),
    ):
        with pytest.raises(
            ValueError,
            match=rf"^Index\.(save|open): .*a is open for writing in another index or process \(process {pid}\)",
        ):
            write()
    assert (folder / "snapshot-000001" / "journal").read_bytes() == before
    assert ids_in(Index.load(folder)) == {"1", "2"}  # reading needs no lock
    assert worker.call("upsert", ["3"]) == (True, {"1", "2", "3"})
    worker.kill()
    again = Index.open(folder)  # the lock ended with its process
    assert ids_in(again) == {"1", "2", "3"}
    again.close()
    folder_lock.check_free("Index.save", folder)
    folder_lock.check_free("Index.save", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_without_a_journal_the_folder_is_locked_too(tmp_path):
    made(["1"]).save(tmp_path)
    first = Index.open(tmp_path, journal=False)
    with pytest.raises(ValueError, match=r"is open for writing in another index or process \(this process\)"):
        Index.open(tmp_path, journal=False)
    first.upsert(["2"], torch.ones(1, D))
    first.save(tmp_path)
    assert first.journal is None
    first.close()
    assert ids_in(Index.load(tmp_path)) == {"1", "2"}
    del first
    Index.open(tmp_path)  # a lock whose index is gone is free
    Index.open(tmp_path).close()


def test_folders_without_a_lock_are_read_and_warned_of(tmp_path, monkeypatch):
    def raise_error(number, words):
        def step(*arguments):
            raise OSError(number, words)

        return step

    made(["1"]).save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "FolderLock", raise_error(13, "Permission denied"))
        assert ids_in(Index.open(tmp_path, journal=False)) == {"1"}
        with pytest.raises(PermissionError):
            Index.open(tmp_path)
    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", raise_error(37, "No locks available"))
    with pytest.warns(UserWarning, match="has no locks .*: let only one process write to the folder"):
        made(["2"]).save(tmp_path / "b")
    assert ids_in(Index.load(tmp_path / "b")) == {"2"}


def test_a_folder_that_is_removed_under_an_index_takes_no_update_silently(tmp_path):
    folder = tmp_path / "a"
    made(["1"]).save(folder)
    index = Index.open(folder)
    shutil.rmtree(folder)
    with pytest.raises(OSError, match=r"the journal .* was removed: save the index to a folder again"):
        index.upsert(["2"], torch.ones(1, D))
    index.save(folder)  # the folder and the lock are the index's again
    index.upsert(["3"], torch.ones(1, D))
    with pytest.raises(ValueError, match=r"is open for writing in another index or process \(this process\)"):
        Index.open(folder)
    index.close()
    assert ids_in(Index.load(folder)) == {"1", "3"}


# --------------------------------------------------------------------------------------------------------------- forks


def in_child(work):
    """The exit code of a forked child that runs work; it may take 20 seconds."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            torch.set_num_threads(1)  # OpenMP's threads are not in the child
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def test_a_forked_child_searches_and_does_not_write_to_the_journal(tmp_path):
    folder = tmp_path / "a"
    made(["1"]).save(folder)
    index = Index.open(folder)
    size = index.journal.size

    def work():
        updates = [lambda: index.upsert(["2"], torch.ones(1, D)), lambda: index.delete(["1"]), lambda: index.grow(200)]
        for update in updates:
            with pytest.raises(ValueError, match=r"journal .* belongs to process \d+, and this process is a fork"):
                update()
        with pytest.raises(ValueError, match=r"was opened by process \d+, and this process is a fork"):
            index.save(folder)
        assert index.search(torch.ones(1, D), 1).ids.tolist() == [["1"]]
        index.save(tmp_path / "b")
        index.close()
        index.upsert(["2"], torch.ones(1, D))
        with pytest.raises(ValueError, match=r"is open for writing in another index or process \(process \d+\)"):
            index.save(folder)

    assert in_child(work) == 0
    assert index.journal.path.stat().st_size == index.journal.size == size
    index.upsert(["3"], torch.ones(1, D))
    with pytest.raises(ValueError, match=r"is open for writing in another index or process \(this process\)"):
        Index.open(folder)  # the child's end did not release the lock
    index.close()
    assert ids_in(Index.load(folder)) == {"1", "3"}
    assert ids_in(Index.load(tmp_path / "b")) == {"1"}


def test_a_child_that_outlives_its_parent_does_not_keep_the_lock(tmp_path):
    made(["1"]).save(tmp_path)
    here, there = os.pipe()
    parent = os.fork()
    if parent == 0:
        index = Index.open(tmp_path)
        child = os.fork()
        if child == 0:
            time.sleep(60)
        os.write(there, f"{child}".encode())
        os._exit(index.journal is None)
    assert os.waitpid(parent, 0)[1] == 0
    child = int(os.read(here, 100))
    try:
        os.kill(child, 0)
        Index.open(tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_children_forked_beside_searches_and_updates_do_not_hang():
    index, stop = made(["1", "2"]), threading.Event()
    batcher = Batcher(index)

    def search():
        while not stop.is_set():
            index.search(torch.ones(1, D), 2, None)

    def write():
        for n in range(10**9):
            if stop.is_set():
                return
            index.upsert([str(n % 50)], torch.ones(1, D))

    threads = [threading.Thread(target=target) for target in (search, search, write)]

    def work():
        assert len(index.search(torch.ones(1, D), 2).ids[0]) == 2
        count = len(index)
        index.upsert(["55"], torch.ones(1, D))
        assert len(index) == count + 1
        with pytest.raises(RuntimeError, match="was created before this process was forked"):
            batcher.search(torch.ones(1, D), 2)
        batcher.close()

    for thread in threads:
        thread.start()
    try:
        assert [in_child(work) for _ in range(6)] == [0] * 6
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert batcher.search(torch.ones(1, D), 2).ids.shape == (1, 2)
    batcher.close()


def test_a_child_forked_within_a_long_update_searches_only(monkeypatch):
    monkeypatch.setattr("tigon.retrieve.index.scheduler.FORK", 0.05)
    index, go, begun = made(["1"]), threading.Event(), threading.Event()

    def write():
        with index.table.scheduler.update_lock:
            begun.set()
            go.wait(30)

    def work():
        assert index.search(torch.ones(1, D), 1).ids.tolist() == [["1"]]
        for update in (lambda: index.upsert(["2"], torch.ones(1, D)), lambda: index.delete(["1"])):
            with pytest.raises(RuntimeError, match="this process was forked while another thread wrote to the index"):
                update()
        assert in_child(lambda: index.search(torch.ones(1, D), 1)) == 0

    thread = threading.Thread(target=write)
    thread.start()
    begun.wait()
    try:
        assert in_child(work) == 0
    finally:
        go.set()
        thread.join()
    index.upsert(["2"], torch.ones(1, D))


# ------------------------------------------------------------------------------------------------- readers and saves


def test_readers_beside_a_process_that_saves_without_pause_see_whole_snapshots(tmp_path):
    folder = tmp_path / "a"
    made(["0", "1"]).save(folder)
    pid = os.fork()
    if pid == 0:
        try:
            index = Index.open(folder)
            for n in range(10**9):  # the journal has one of the two at each moment
                index.upsert([str(n % 2)], torch.ones(1, D))
                index.delete([str((n + 1) % 2)])
                index.save(folder)
        finally:
            os._exit(1)
    try:
        numbers, began = set(), time.monotonic()
        for _ in range(100):
            found = ids_in(Index.load(folder))
            assert found
            assert found <= {"0", "1"}
            numbers.add(snapshot.find_newest("test", folder).name)
            if time.monotonic() - began > 1.5:
                break
        assert len(numbers) > 3
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    Index.open(folder).close()
    assert len(list(folder.iterdir())) == 2


def test_a_snapshot_that_vanishes_while_it_is_read_is_looked_for_again(tmp_path, monkeypatch):
    """At each file that a reader opens, another process replaces the snapshot."""
    folder = tmp_path / "a"
    for at in range(4):
        shutil.rmtree(folder, ignore_errors=True)
        first = made(["1"])
        first.save(folder)
        opened = Index.open(folder)
        opened.upsert(["2"], torch.ones(1, D))
        count = 0

        def step(real, opened=opened, at=at):
            def replaced(*args, **options):
                nonlocal count
                count += 1
                if count == at + 1:
                    opened.save(folder)
                return real(*args, **options)

            return replaced

        with monkeypatch.context() as patch:
            patch.setattr(snapshot, "read_manifest", step(snapshot.read_manifest))
            patch.setattr(snapshot, "check_files", step(snapshot.check_files))
            patch.setattr(snapshot, "fill", step(snapshot.fill))
            patch.setattr(snapshot, "replay", step(snapshot.replay))
            assert ids_in(Index.load(folder)) == {"1", "2"}
        assert count > 4
        opened.close()


def test_a_folder_that_is_always_replaced_gets_a_sentence(tmp_path, monkeypatch):
    made(["1"]).save(tmp_path)
    opened, real = Index.open(tmp_path), snapshot.fill

    def fill(*args):
        opened.save(tmp_path)
        return real(*args)

    monkeypatch.setattr(snapshot, "fill", fill)
    monkeypatch.setattr(snapshot, "TRIES", 5)
    with pytest.raises(ValueError, match="was replaced during each of 5 reads: load the index again"):
        Index.load(tmp_path)
    opened.close()


class KilledAt:
    """Stands before `os.rename`, `os.unlink` and `os.rmdir` within `disk.remove`, and kills the process at one."""

    def __init__(self, at):
        self.left, self.remove = at, disk.remove
        disk.remove = self

    def __call__(self, path):
        for name in ("rename", "unlink", "rmdir"):
            setattr(os, name, self.step(getattr(os, name)))
        self.remove(path)

    def step(self, real):
        def step(*args):
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            return real(*args)

        return step


@pytest.mark.parametrize("at", range(6))
def test_a_kill_while_an_old_snapshot_is_removed_leaves_the_new_one(at, tmp_path):
    folder = tmp_path / "a"
    made(["1"]).save(folder)
    opened = Index.open(folder)
    opened.upsert(["2"], torch.ones(1, D))
    opened.close()

    def work():
        KilledAt(at)
        made(["3"]).save(folder)

    assert os.WIFSIGNALED(in_child(work)) == (at < 5)
    assert ids_in(Index.load(folder)) == {"3"}
    Index.open(folder).close()
    assert sorted(path.name for path in folder.iterdir()) == ["snapshot-000002", LOCK]


def test_what_others_put_into_the_folder_stays(tmp_path):
    made(["1"]).save(tmp_path)
    for name in ("snapshot-000007", "snapshot-000009", "notes", "snapshot-000020.partial", "snapshot-000001"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "mine.txt").write_text("mine")
    (tmp_path / "snapshot-000009" / "manifest.json").write_text('{"mine": 1}')
    (tmp_path / "snapshot-000030").write_text("a file")
    made(["2"]).save(tmp_path)
    made(["3"]).save(tmp_path)
    assert ids_in(Index.load(tmp_path)) == {"3"}
    Index.open(tmp_path).close()
    mine = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("mine.txt")}
    assert {"snapshot-000007", "snapshot-000009", "notes", "snapshot-000020.partial"} < mine
    assert len(mine) == 5  # that of the first snapshot, which has another name now
    assert (tmp_path / "snapshot-000030").read_text() == "a file"
    assert [path.name for path in snapshot.list_snapshots(tmp_path)][-1] == "snapshot-000032"


# ------------------------------------------------------------------------------------------------------------ journals


@pytest.mark.parametrize("repair", [False, True])
def test_the_journal_of_another_snapshot_is_refused(tmp_path, repair):
    for name in ("a", "b"):
        made(["1"]).save(tmp_path / name)
        index = Index.open(tmp_path / name)
        index.upsert([name], torch.ones(1, D))
        index.close()
    a, b = (tmp_path / name / "snapshot-000001" / "journal" for name in ("a", "b"))
    content = b.read_bytes()
    first = journal_module.SIZE + 32
    for foreign in (content, content[:-1], content[:first], content[first:]):
        a.write_bytes(foreign)
        for load in (Index.load, lambda path: Index.open(path, repair=repair)):
            with pytest.raises(ValueError, match=r"the journal .* does not belong to the snapshot beside it"):
                load(tmp_path / "a")
        assert a.read_bytes() == foreign
    a.unlink()
    assert "a" not in Index.load(tmp_path / "a")
    Index.open(tmp_path / "a").close()  # and the lock is free


def record(kind, tensors):
    body = b"".join(disk.serialize(tensors))
    return journal_module.make_head(kind, body) + body


def test_records_that_do_not_fit_the_index_are_refused(tmp_path):
    """Written with right checksums."""
    folder = tmp_path / "a"
    made([1]).save(folder)
    Index.open(folder).close()
    path = folder / "snapshot-000001" / "journal"
    begin = path.read_bytes()
    good = {
        "vectors": torch.ones(1, D, dtype=torch.float16), "words": torch.zeros(0, 1, dtype=torch.int64),
        "growth": torch.frombuffer(bytearray(b"{}"), dtype=torch.uint8), "ids": torch.tensor([7]),
    }  # fmt: skip
    path.write_bytes(begin + record("upsert", good))
    assert 7 in Index.load(folder)
    text, growth = (torch.frombuffer(bytearray(b), dtype=torch.uint8) for b in (b"ab", b'{"no": [1]}'))
    long = {name: torch.cat([value] * 200, int(name == "words")) for name, value in good.items()}
    changes = (
        {"vectors": torch.ones(1, D + 1, dtype=torch.float16)}, {"vectors": torch.ones(1, D)},
        {"words": torch.zeros(1, 1, dtype=torch.int64)}, {"ids": torch.tensor([7, 8])}, {"ids": torch.tensor([-1])},
        {"growth": None}, {"ids": None}, {"growth": growth}, {"growth": text[:1]},
        long | {"growth": good["growth"], "ids": torch.arange(200)},
    )  # fmt: skip
    upserts = [{name: value for name, value in (good | change).items() if value is not None} for change in changes]
    for kind, tensors in (
        *(("upsert", tensors) for tensors in upserts),
        *(("delete", {"id_bytes": text, "id_ends": torch.tensor(ends)}) for ends in ([2], [1], [3, 2])),
        ("delete", {}), ("grow", {"capacity": torch.tensor([3])}),
        ("grow", {"capacity": torch.zeros(0, dtype=torch.int64)}), ("snapshot", {}),
    ):  # fmt: skip
        path.write_bytes(begin + record(kind, tensors))
        with pytest.raises(ValueError, match=r"the journal .* does not (match its|belong to the) snapshot"):
            Index.load(folder)


# ------------------------------------------------------------------------------------------------------- interleavings


class Folder:
    """What an index's folder and the workers' indexes must hold, by what the workers were told."""

    def __init__(self, ids):
        self.ids, self.holder, self.indexes = set(ids), None, [None, None]

    def choose(self, draw, who):
        names = ["make"]
        if self.holder != who:  # an index that is opened anew would let go of what it holds
            names += ["open", "repair", "load"]
        if self.indexes[who] is not None:
            names += ["upsert", "delete", "save", "close"] * 2
        return draw.choice(names)

    def check(self, who, name, ids, result):
        """Whether a call was made, or refused, as it had to be, and what it left."""
        done, said = result
        if name in ("open", "repair", "make") or (name == "save" and self.holder != who):
            refused = self.holder is not None
            assert done != refused, (name, said)
            if refused:
                assert re.search(r"is open for writing in another .* \((this process|process \d+)\)", said)
                return
        assert done, (name, said)
        if name == "make":
            self.ids = set(ids)
            return
        if name in ("open", "repair", "load"):
            assert said == self.ids, name
            self.indexes[who] = set(self.ids)
            self.holder = self.holder if name == "load" else who
        held = self.indexes[who]
        if name == "upsert":
            held |= set(ids)
        elif name == "delete":
            held -= set(ids)
        if name == "save" or (name in ("upsert", "delete") and self.holder == who):
            self.ids = set(held)
        if name == "close" and self.holder == who:
            self.holder = None


def test_two_processes_interleaved_at_random_lose_nothing(tmp_path, monkeypatch):
    """80 sequences of calls, of which some are made at once, and some end with a kill."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # a kill of a process loses nothing that was written
    draw, folder = random.Random(0), tmp_path / "a"
    workers, calls = [Worker(folder), Worker(folder)], 0
    try:
        for _ in range(80):
            shutil.rmtree(folder, ignore_errors=True)
            assert workers[0].call("make", ["1", "2"])[0]
            told = Folder(["1", "2"])
            for _ in range(draw.randint(2, 6)):
                who = draw.randrange(2)
                ids = [str(n) for n in draw.sample(range(20), draw.randint(1, 3))]
                if draw.random() < 0.03:
                    workers[who].kill()
                    workers[who] = Worker(folder)
                    told.indexes[who], told.holder = None, None if told.holder == who else told.holder
                    continue
                name, other = told.choose(draw, who), told.holder
                both = other not in (None, who) and name != "load" and draw.random() < 0.5
                if both:  # the one that has it open writes while the other calls
                    workers[other].begin("upsert", ids)
                result = workers[who].call(name, ids)
                if both:
                    told.check(other, "upsert", ids, workers[other].result())
                told.check(who, name, ids, result)
                calls += 1 + both
            for who, worker in enumerate(workers):
                if told.indexes[who] is not None:
                    worker.call("close")
            assert ids_in(Index.load(folder)) == told.ids
        assert calls > 220
    finally:
        for worker in workers:
            worker.kill()


def test_two_processes_that_open_at_once_are_one_at_a_time(tmp_path):
    folder = tmp_path / "a"
    made(["1"]).save(folder)
    workers = [Worker(folder), Worker(folder)]
    try:
        seen = {"1"}
        for n in range(2, 14):
            for worker in workers:
                worker.begin("open")
            results = [worker.result() for worker in workers]
            opened = [worker for worker, (done, _) in zip(workers, results, strict=True) if done]
            assert len(opened) == 1
            assert next(said for done, said in results if done) == seen
            assert opened[0].call("upsert", [str(n)])[0]
            seen.add(str(n))
            if n % 3 == 0:
                assert opened[0].call("save")[0]
            opened[0].call("close")
        assert ids_in(Index.load(folder)) == seen
    finally:
        for worker in workers:
            worker.kill()


def test_a_pickled_index_finds_its_ids_in_another_process(tmp_path):
    index = made([f"é {n}" for n in range(40)])
    index.delete(["é 7"])
    torch.save({"index": index, "module": torch.nn.ModuleList([index])}, tmp_path / "index.pt")
    code = f"""if True:
        import torch, tigon.retrieve
        found = torch.load({str(tmp_path / "index.pt")!r}, weights_only=False)
        index = found["index"]
        assert found["module"][0] is index
        ids = [f"é {{n}}" for n in range(40)]
        assert [id for id in ids if id not in index] == ["é 7"], len(index)
        assert index.delete(ids[:3]) == 3
        index.upsert(ids, torch.ones(40, {D}))
        assert len(index) == 40
        assert index.search(torch.ones(1, {D}), 100).ids[0, :40].tolist().sort() == ids.sort()
        index.grow(200)
        index.save({str(tmp_path / "b")!r})
    """
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONHASHSEED": "12345"}, timeout=120)
    assert len(Index.load(tmp_path / "b")) == 40
