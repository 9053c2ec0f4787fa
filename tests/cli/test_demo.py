"""`tigon demo`: two runs, one seed, one table; the numbers are those of the runs."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import environment

pytest.importorskip("transformers")

SMALL = {"batch_size": 2, "seq_len": 48, "vocab_size": 600, "steps": 4, "hidden_size": 32, "intermediate_size": 64,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
# The command with the smallest size, and with little text: spawned children read the same module.
SCRIPT = f"""
import sys
from tigon.cli import demo, main
demo.SIZES = ((0, {tuple(SMALL.values())}),)
demo.read_library = lambda: iter(["some words of a text " * 2000])
if __name__ == "__main__":
    main(["demo", *sys.argv[1:]])
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "small.py").write_text(SCRIPT)
    return [sys.executable, str(tmp_path / "small.py")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_demo(script, device):
    done = subprocess.run([*script, "--device", device], capture_output=True, text=True, env=environment(), timeout=240)
    assert done.returncode == 0, done.stderr
    assert ("plain again" in done.stdout) == (device == "cuda")
    for words in ("parts fused", "2 × 48 tokens, 4 steps", "first loss", "tokens/s", "peak memory, MiB"):
        assert words in " ".join(done.stdout.split()), words


def test_losses_that_differ_are_a_failure(monkeypatch):
    """A fused side that is wrong must not pass: the command compares what the sides report."""
    from tigon.cli import demo as module
    from tigon.cli.problem import Problem

    class Pool:
        def __init__(self, *_, **__): ...
        def __enter__(self):
            return self

        def __exit__(self, *_): ...
        def submit(self, _, spec, __):
            loss = 6.0 + (0.01 if spec["fused"] else 0.0)
            found = {"losses": [6.5, loss], "tokens_per_second": 1.0, "peak": 2, "parameters": 1,
                     "report": "", "device": "CPU"}  # fmt: skip
            return type("Done", (), {"result": lambda _: found})()

    monkeypatch.setattr(module, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(module, "tokenize_library", lambda *_: (None, 600))
    with pytest.raises(Problem, match=r"differ by 1\.00e-02") as caught:
        module.demo(module.DemoOptions(steps=2, device="cpu"))
    assert caught.value.code == 1


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="children are found in /proc")
def test_ctrl_c_ends_the_children(script):
    def reset():
        signal.signal(signal.SIGINT, signal.default_int_handler)

    process = subprocess.Popen(
        [*script, "--device", "cpu", "--steps", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(), preexec_fn=reset, start_new_session=True,
    )  # fmt: skip
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 120

    def is_at_work(pid):  # an interpreter that is still starting would print a traceback of its own
        place = Path(f"/proc/{pid}")
        return "spawn_main" in (place / "cmdline").read_text() and "libtorch" in (place / "maps").read_text()

    while not any(map(is_at_work, children.read_text().split())):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = children.read_text().split()
    import os

    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to the command and its children
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.strip().splitlines()[-1] == "tigon: interrupted"
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
