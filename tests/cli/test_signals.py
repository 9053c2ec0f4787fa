"""A signal whose exception Python drops ends a command all the same."""

import os
import signal

import pytest

pytest.importorskip("typer")

from tigon import cli
from tigon.cli import app, signals


class Dropped:
    """What a handler raises while this is deleted is printed, and goes no further."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):  # the handler runs between two of them
            pass


@pytest.fixture(autouse=True)
def before():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signals._received.clear()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dropped_exception_ends_the_loop_that_begins_after_it():
    signals.catch_sigterm()
    Dropped()
    with signals.Interrupts() as interrupts:
        assert interrupts.signal == signal.SIGTERM


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("work", "status"), [(lambda *_, **__: Dropped() and None, 143), (lambda *_, **__: None, 0)])
def test_a_dropped_exception_is_the_status_of_a_command(work, status, monkeypatch):
    monkeypatch.setattr(app, "app", work)
    with pytest.raises(SystemExit) as end:
        cli.main(["rank"])
    assert end.value.code == status


def test_sigterm_runs_what_is_to_be_run_at_the_end():
    signals.catch_sigterm()
    with pytest.raises(SystemExit) as end:
        signal.raise_signal(signal.SIGTERM)
    assert end.value.code == 143
