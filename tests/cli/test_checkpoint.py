"""A checkpoint is whole or absent, and one that is damaged is recognised, by name and reason."""

import pytest

from tigon.cli.checkpoint import MANIFEST, checkpoints, defect, newest_whole, prune, publish, seal
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
    (cut, "model.safetensors has 200 bytes and must have 256"),
    (flip, "the contents of model.safetensors are not what was written"),
    (lose, "sub/state.json is missing"),
    (unseal, "it has no manifest.json"),
    (garble, "its manifest.json is not readable"),
    (replace, "its manifest.json is not readable"),
    *(
        (manifest(text), "its manifest.json is not readable")
        for text in (
            b"\xff",
            b"[" * 100_000,
            b"[]",
            b"5",
            b'{"files": 5}',
            b'{"files": []}',
            b'{"files": {}}',
            b'{"files": {"a": 5}}',
            b'{"files": {"a": {}}}',
            b'{"files": {"a": {"bytes": "256"}}}',
        )
    ),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_damage_is_found_and_the_one_before_is_taken(tmp_path, damage, reason):
    older, newer = write(tmp_path, 9), write(tmp_path, 10)
    assert newest_whole(tmp_path) == (newer, [])
    damage(newer)
    assert reason in defect(newer)
    found, notes = newest_whole(tmp_path)
    assert found == older
    assert len(notes) == 1
    assert "checkpoint-10" in notes[0]
    assert reason in notes[0]
    damage(older)
    with pytest.raises(Problem, match="no whole checkpoint"):
        newest_whole(tmp_path)


def test_a_file_that_cannot_be_read_is_a_defect(tmp_path, monkeypatch):
    """Root reads every file, so the system's answer is made here."""
    folder = write(tmp_path, 5)

    def refuse(self, *_):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(type(folder), "open", refuse)
    assert defect(folder) == "model.safetensors cannot be read (Permission denied)"


def test_what_was_not_published_is_no_checkpoint(tmp_path):
    (tmp_path / ".incomplete" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "checkpoint-best").mkdir()
    assert checkpoints(tmp_path) == []
    with pytest.raises(Problem, match="there is no checkpoint"):
        newest_whole(tmp_path)


def test_publishing_over_a_damaged_one_keeps_it_aside(tmp_path):
    cut(write(tmp_path, 5))
    write(tmp_path, 5)
    assert defect(tmp_path / "checkpoint-5") is None
    assert (tmp_path / "checkpoint-5.broken" / "model.safetensors").stat().st_size == 200


def test_the_newest_are_kept(tmp_path):
    for step in (8, 9, 10, 11):
        write(tmp_path, step)
    prune(tmp_path, 2)
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-11", "checkpoint-10"]
