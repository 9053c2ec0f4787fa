"""What the tests of the command line share: its environment, its result, and the losses that a run has written."""

import contextlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path


def environment(**changes):
    # One thread: results do not depend on how many cores the machine has, and two test processes do not fight for them.
    plain = {
        k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "TIGON_BACKEND", "RANK", "WORLD_SIZE")
    }
    return {**plain, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200", **changes}


class Result:
    def __init__(self, done):
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    def problem(self, *words, code=2):
        """Assert that the command ended with one sentence that has these words, and return it."""
        assert self.code == code, (self.code, self.out, self.err)
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("tigon: ")
        for word in words:
            assert word in lines[0], lines[0]
        return lines[0]

    def refused(self, *words):
        """Assert that the command ended with one sentence that has these words, whatever it printed before."""
        assert "Traceback" not in self.err
        assert [line for line in self.err.splitlines() if line.startswith("tigon: ")] == self.err.splitlines()[-1:]
        self.err = self.err.splitlines()[-1]
        return self.problem(*words)

    def ok(self):
        assert self.code == 0, (self.code, self.out, self.err)
        assert "Traceback" not in self.err
        return self


def run_here(*arguments, cwd=None):
    """Run a command in this process."""
    from tigon.cli import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    handler, before = signal.getsignal(signal.SIGTERM), os.getcwd()
    os.chdir(cwd or ".")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            main([str(a) for a in arguments])
    except SystemExit as end:
        code = end.code or 0
    finally:
        signal.signal(signal.SIGTERM, handler)
        os.chdir(before)
    return Result(subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue()))


class Forks:
    """Processes that have imported already what is large, one run at a time (forked.py)."""

    def __init__(self, folder, *modules, **changes):
        self.server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forked.py")), *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment(**changes),
        )  # fmt: skip
        self.out, self.err = folder / "out.txt", folder / "err.txt"

    def begin(self, ranks, env, *, cwds=None, limit=None, restarts=None):
        """Start a run of as many processes as there are lists of arguments; torchrun's agent and they with restarts."""
        self.out.write_text("")
        self.err.write_text("")
        cwds = cwds and [cwd and str(cwd) for cwd in cwds]
        request = {"ranks": ranks, "cwds": cwds, "env": env, "limit": limit, "restarts": restarts}
        self.server.stdin.write(json.dumps({**request, "out": str(self.out), "err": str(self.err)}).encode() + b"\n")
        return Forked(self, json.loads(self.server.stdout.readline()))

    def run(self, *arguments, **options):
        return self.begin(*arguments, **options).wait()

    def end(self):
        self.server.communicate()


class Forked:
    """What the tests use of subprocess.Popen."""

    def __init__(self, forks, pids):
        self.forks, self.pids, self.pid, self.returncode = forks, pids, pids[0], None

    def poll(self):
        if self.returncode is None and select.select([self.forks.server.stdout], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self):
        if self.returncode is None:
            self.returncode = int(self.forks.server.stdout.readline())
            self.stdout, self.stderr = self.forks.out.read_text(), self.forks.err.read_text()
        return self

    def communicate(self, timeout=None):
        end = time.monotonic() + (timeout or 240)
        while self.poll() is None:
            if time.monotonic() > end:
                self.kill()
                raise subprocess.TimeoutExpired("tigon", timeout)
            time.sleep(0.01)
        return self.stdout, self.stderr

    def send_signal(self, number):
        for pid in self.pids if self.poll() is None else ():
            os.kill(pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)
        self.wait()


def losses(output):
    """The loss of each logged step of a finished run."""
    history = json.loads((Path(output) / "trainer_state.json").read_text())["log_history"]
    return {row["step"]: row["loss"] for row in history if "loss" in row}


def write_model(folder, text, **sizes):
    """A tiny Llama with weights and a tokenizer, as a model directory."""
    import torch
    from transformers import AutoModelForCausalLM

    from tigon.cli.tokens import train_tokenizer
    from tigon.presets import preset_config

    tokenizer = train_tokenizer([text.read_text()], 400)
    torch.manual_seed(0)
    sizes = {"vocab_size": 448, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, **sizes}
    config = preset_config("llama-tiny", **sizes)
    config.eos_token_id = tokenizer.eos_token_id
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
