"""The command line as a user runs it: a process of its own, its exit status, and what it says."""

import json
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import Result, environment


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Ask for a process that has imported what is large already, and wait for its end."""
    env = environment()
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("forked.py"))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("said")
    out, err = folder / "out.txt", folder / "err.txt"

    def run(ranks, cwd, limit, env):
        out.write_text("")
        err.write_text("")
        request = {"ranks": ranks, "cwd": cwd and str(cwd), "env": env, "limit": limit}
        print(json.dumps({**request, "out": str(out), "err": str(err)}), file=server.stdin, flush=True)
        return subprocess.CompletedProcess(ranks, int(server.stdout.readline()), out.read_text(), err.read_text())

    yield run
    server.communicate()


@pytest.fixture(scope="session")
def tigon(request):
    def run(*arguments, cwd=None, limit=None, **changes):
        arguments, env = [str(a) for a in arguments], environment(**changes)
        # Importing torch and transformers is most of a short command. With a GPU each starts from nothing, as a user's.
        if not torch.cuda.is_available():
            return Result(request.getfixturevalue("forks")([arguments], cwd, limit, env))
        before = None
        if limit is not None:
            import resource

            def before():
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        command = [sys.executable, "-m", "tigon", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=240, preexec_fn=before)
        return Result(done)

    return run


@pytest.fixture(scope="session")
def together(forks):
    """One run of several processes on the CPU; arguments of a rank that differs from the others: others={1: (…)}."""

    def run(world, *arguments, others=None, **changes):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        ranks = [(*arguments, *(others or {}).get(rank, ())) for rank in range(world)]
        ranks = [[*map(str, given), "--device", "cpu"] for given in ranks]
        return Result(forks(ranks, None, None, environment(**address, **changes)))

    return run


@pytest.fixture
def start(request):
    """Start the command and return the process; it is ended with the test."""

    def run(*arguments, cwd=None):
        process = subprocess.Popen(
            [sys.executable, "-m", "tigon", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=environment(),
            # Where the tests run in the background, as under nohup, Ctrl-C would be ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        request.addfinalizer(lambda: (process.kill(), process.communicate()) if process.poll() is None else None)
        return process

    return run


def write_text(file, words=9000):
    """A text with structure to learn, the same at every call."""
    dice = random.Random(0)
    known = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(2, 8))) for _ in range(300)]
    lines = [" ".join(dice.choices(known, k=9)) + "." for _ in range(words // 9)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data") / "text.txt")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, text):
    """A tiny Llama with weights and a tokenizer, as a model directory."""
    import torch
    from transformers import AutoModelForCausalLM

    from tigon.cli.tokens import train_tokenizer, trained_tokenizer
    from tigon.models.presets import preset_config

    folder = tmp_path_factory.mktemp("model")
    tokenizer = trained_tokenizer(train_tokenizer([text.read_text()], 400))
    torch.manual_seed(0)
    config = preset_config("llama-tiny", vocab_size=448, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    config.eos_token_id = tokenizer.eos_token_id
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
