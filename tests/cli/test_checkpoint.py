"""A checkpoint is whole or absent, and one that is damaged is recognised, by name and reason."""

import os
import signal
import time

import pytest

from tigon.cli.checkpoint import (
    MANIFEST,
    find_checkpoints,
    find_defect,
    find_newest,
    load_checkpoint,
    lock_folder,
    prune,
    publish,
    save_checkpoint,
    seal,
)
from tigon.cli.problem import Problem


def write(output, step):
    staged = output / ".incomplete" / f"checkpoint-{step}"
    (staged / "sub").mkdir(parents=True)
    (staged / "model.safetensors").write_bytes(bytes(range(256)))
    (staged / "sub" / "state.json").write_text("{}")
    seal(staged)
    publish(staged, output / staged.name)
    return output / staged.name


def cut(folder):
    (folder / "model.safetensors").write_bytes(bytes(range(200)))


def flip(folder):
    (folder / "model.safetensors").write_bytes(bytes(range(255)) + b"\x00")


def lose(folder):
    (folder / "sub" / "state.json").unlink()


def unseal(folder):
    (folder / MANIFEST).unlink()


def garble(folder):
    (folder / MANIFEST).write_text("{")


def manifest(text):
    def write(folder):
        (folder / MANIFEST).write_bytes(text)

    return write


def replace(folder):
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()


DAMAGE = [
    (cut, "model.safetensors has 200 bytes, expected 256"),
    (flip, "model.safetensors is corrupt"),
    (lose, "sub/state.json is missing"),
    (unseal, "manifest.json is missing"),
    (garble, "manifest.json cannot be read"),
    (replace, "manifest.json cannot be read"),
    *((manifest(text), "manifest.json cannot be read") for text in (b"\xff", b"[]", b'{"files": {}}')),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_damage_is_found_and_the_one_before_is_taken(tmp_path, damage, reason):
    older, newer = write(tmp_path, 9), write(tmp_path, 10)
    assert find_newest(tmp_path) == (newer, [])
    damage(newer)
    assert reason in find_defect(newer)
    found, notes = find_newest(tmp_path)
    assert found == older
    assert len(notes) == 1
    assert "checkpoint-10" in notes[0]
    assert reason in notes[0]
    damage(older)
    with pytest.raises(Problem, match="no complete checkpoint"):
        find_newest(tmp_path)


def test_a_file_that_cannot_be_read_is_a_defect(tmp_path, monkeypatch):
    """Root reads every file, so the system's answer is made here."""
    folder = write(tmp_path, 5)

    def refuse(self, *_):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(type(folder), "open", refuse)
    assert find_defect(folder) == "model.safetensors cannot be read (Permission denied)"


def test_what_was_not_published_is_no_checkpoint(tmp_path):
    (tmp_path / ".incomplete" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "checkpoint-best").mkdir()
    assert find_checkpoints(tmp_path) == []
    with pytest.raises(Problem, match="no checkpoint"):
        find_newest(tmp_path)


def test_publishing_over_a_damaged_one_keeps_it_aside(tmp_path):
    cut(write(tmp_path, 5))
    write(tmp_path, 5)
    assert find_defect(tmp_path / "checkpoint-5") is None
    assert (tmp_path / "checkpoint-5.broken" / "model.safetensors").stat().st_size == 200


def test_the_newest_are_kept(tmp_path):
    for step in (8, 9, 10, 11):
        write(tmp_path, step)
    prune(tmp_path, 2)
    assert [p.name for p in find_checkpoints(tmp_path)] == ["checkpoint-11", "checkpoint-10"]


def test_a_checkpoint_of_tensors_and_facts_comes_back(tmp_path):
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("safetensors")
    layer = torch.nn.Linear(2, 3)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    assert load_checkpoint(tmp_path) is None
    for epoch in (1, 2):
        save_checkpoint(tmp_path, {"model": layer.state_dict()}, optimizer.state_dict(), {"epoch": epoch})
    assert [path.name for path in find_checkpoints(tmp_path)] == ["checkpoint-2"]
    found = load_checkpoint(tmp_path)
    assert found["epoch"] == 2
    assert torch.equal(found["model"]["weight"], layer.weight)
    state = optimizer.state_dict()
    assert found["optimizer"]["param_groups"][0]["lr"] == state["param_groups"][0]["lr"]
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], state["state"][0]["exp_avg"])


@pytest.mark.skipif(os.name != "posix", reason="the lock is POSIX's")
def test_a_killed_holder_does_not_block_and_a_living_one_does(tmp_path):
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with lock_folder(tmp_path):
            grandchild = os.fork()  # as a worker that reads data, which outlives its parent
            if grandchild:
                os.write(tell, str(grandchild).encode())
            time.sleep(60)
        os._exit(0)
    grandchild = int(os.read(ready, 20))
    try:
        with pytest.raises(Problem, match=r"another run is using "), lock_folder(tmp_path):
            pass
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with lock_folder(tmp_path):
            pass
        assert not (tmp_path / ".lock").exists()
    finally:
        os.kill(grandchild, signal.SIGKILL)


@pytest.mark.skipif(os.name != "posix", reason="the lock is POSIX's")
def test_the_lock_of_a_file_that_its_holder_has_deleted_guards_nothing(tmp_path, monkeypatch):
    import fcntl

    monkeypatch.setattr(fcntl, "lockf", lambda *_: (tmp_path / ".lock").unlink())
    with pytest.raises(Problem, match="another run has just ended in"), lock_folder(tmp_path):
        pass
