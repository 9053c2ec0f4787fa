"""The command line as a user runs it: a process of its own, its exit status, and what it says."""

import random
import signal
import subprocess
import sys

import pytest
from command import Result, environment


@pytest.fixture(scope="session")
def tigon():
    def run(*arguments, cwd=None, limit=None, **changes):
        before = None
        if limit is not None:
            import resource

            def before():
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        command = [sys.executable, "-m", "tigon", *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=cwd, env=environment(**changes), timeout=240, preexec_fn=before
        )
        return Result(done)

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
