"""`tigon demo`: two runs, one seed, one table; the numbers are those of the runs."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SMALL = ("--steps", 4, "--batch-size", 2, "--seq-len", 48, "--vocab-size", 600)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_demo(tigon, tmp_path, device):
    output = tmp_path / "demo"
    done = tigon("demo", "--output", output, "--device", device, *SMALL).ok()
    found = json.loads((output / "demo.json").read_text())
    names = ["plain", "fused"] if device == "cpu" else ["plain", "plain again", "fused"]
    assert list(found["sides"]) == names
    plain, fused = found["sides"]["plain"], found["sides"]["fused"]
    assert plain["fusion"] is None
    assert fused["fusion"]
    assert len(plain["losses"]) == len(fused["losses"]) == 4
    assert 5.5 < plain["losses"][0] < 7.5  # ln 600 = 6.4
    apart = max(abs(a - b) for a, b in zip(plain["losses"], fused["losses"], strict=True))
    assert found["difference"] == apart
    if device == "cpu":
        assert apart < 1e-3
        assert plain["losses"] != sorted(plain["losses"])  # it trains, or at least the batches differ
    else:  # in bf16 equal runs drift apart from the first update on; before it they share their weights
        assert abs(plain["losses"][0] - fused["losses"][0]) < 1e-2
    assert len(set(plain["losses"])) > 1
    for side in found["sides"].values():
        assert side["peak_bytes"] > 1 << 20
        assert side["tokens_per_second"] > 0
    assert found["versions"]["torch"]
    assert found["machine"]["device"] == device
    for figure in ("loss.png", "bars.png"):
        assert (output / figure).read_bytes().startswith(b"\x89PNG")
    assert f"{plain['losses'][-1]:.4f}" in done.out
    assert "tokens/s" in done.out
    assert ("peak resident size" if device == "cpu" else "max_memory_allocated") in " ".join(done.out.split())


def test_losses_that_differ_are_a_failure(tmp_path, monkeypatch):
    """A fused side that is wrong must not pass: the command compares what the sides report."""
    from tigon.cli import demo as module
    from tigon.cli.problem import Problem

    def side(name):
        loss = 6.0 + (0.01 if name == "fused" else 0.0)
        return {
            "losses": [6.5, loss],
            "seconds": [1.0, 1.0],
            "tokens_per_second": 1.0,
            "parameters": 1,
            "resident_before_training": 1 << 20,
            "peak_bytes": 2 << 20,
            "fusion": None,
        }

    monkeypatch.setattr(module, "_run_sides", lambda names, *_: {name: side(name) for name in names})
    monkeypatch.setattr(module, "_prepare", lambda *_: 600)
    with pytest.raises(Problem, match=r"differ by 1\.00e-02") as caught:
        module.demo(output=tmp_path, steps=2, device="cpu")
    assert caught.value.code == 1


def test_the_text_is_the_same_at_every_call():
    from tigon.cli.demo import library_texts

    texts = library_texts(200_000)
    assert texts == library_texts(200_000)
    assert sum(map(len, texts)) >= 200_000
    assert len(library_texts(1)) == 1


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the counters are Linux's")
def test_the_peak_is_that_of_the_process():
    # In a process of its own: this one may have had its peak long ago.
    code = (
        "import os; from tigon.cli.demo_side import peak_resident as peak; before = peak()\n"
        "held = bytearray(os.urandom(1 << 20)) * 200; after = peak(); del held\n"
        "print(after - before, peak() - before)"
    )
    held, later = map(int, subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.split())
    assert held > 150 << 20
    assert later > 150 << 20  # a peak, not what is held now


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="children are found in /proc")
def test_ctrl_c_ends_the_children(start, tmp_path):
    process = start("demo", "--output", tmp_path / "demo", "--device", "cpu", "--steps", 10000, *SMALL[2:])
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 120
    while len(pids := [int(pid) for pid in children.read_text().split() if _is_side(pid)]) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    deadline = time.monotonic() + 20
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.strip().splitlines()[-1] == "tigon: interrupted"
    # A child that had only just been started ends by itself, when it finds its input closed.
    while any(map(_runs, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _is_side(pid):
    try:
        return "tigon.cli.demo_side" in Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _runs(pid):
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
