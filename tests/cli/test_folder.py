"""One run at a time works in a folder."""

import os
import signal
import time

import pytest

from tigon.cli.folder import Claim
from tigon.cli.problem import Problem


@pytest.mark.skipif(os.name != "posix", reason="the lock is POSIX's")
def test_a_killed_holder_does_not_block_and_a_living_one_does(tmp_path):
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        claim = Claim()
        claim.take(tmp_path)
        grandchild = os.fork()  # as a worker that reads data, which outlives its parent
        if grandchild == 0:
            time.sleep(60)
            os._exit(0)
        os.write(tell, str(grandchild).encode())
        time.sleep(60)
        os._exit(0)
    grandchild = int(os.read(ready, 20))
    try:
        with Claim() as claim, pytest.raises(Problem, match=rf"another run is at work in .* \(process {child} on "):
            claim.take(tmp_path)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with Claim() as claim:
            claim.take(tmp_path)
            claim.take(tmp_path)  # it is held already
            with pytest.raises(Problem, match=f"process {os.getpid()} on"):
                Claim().take(tmp_path)
        assert not (tmp_path / ".lock").exists()
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_nothing_is_held_where_nothing_can_be(tmp_path):
    for place in (tmp_path / "gone", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        with Claim() as claim:
            claim.take(place)
            assert claim.file is None
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
