"""Errors that a user can do something about are sentences with status 2, wherever they are raised; bugs are raised."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("typer")

from tigon import cli
from tigon.cli import app
from tigon.files import DamagedFileError, check_memory


def allocate_on_the_host():
    torch.empty(1 << 60)


def allocate_in_numpy():
    np.zeros(1 << 57)


def wrap():
    try:
        raise MemoryError
    except MemoryError as error:
        raise RuntimeError("a worker died") from error


def ask_for_more_than_there_is():
    check_memory("small.npz", 1 << 60)


def damaged():
    raise DamagedFileError("run.json is not JSON.")


def loop():
    raise RuntimeError("Symlink loop from 'x'")


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (allocate_on_the_host, "too little memory"),
        (allocate_in_numpy, "too little memory"),
        (wrap, "too little memory"),
        (ask_for_more_than_there_is, "small.npz needs 1,073,741,824.0 GiB of memory, but"),
        (damaged, "tigon: run.json is not JSON"),
        (lambda: Path("/nowhere/x").read_text(), "/nowhere/x: No such file or directory"),
        (loop, "Symlink loop from"),
    ],
)
def test_an_error_of_the_surroundings_is_a_sentence(work, words, monkeypatch, capsys):
    monkeypatch.setattr(app, "app", lambda *_, **__: work())
    with pytest.raises(SystemExit) as end:
        cli.main(["rank"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_bug_is_raised(monkeypatch):
    monkeypatch.setattr(app, "app", lambda *_, **__: {}["x"])
    with pytest.raises(KeyError):
        cli.main(["rank"])
