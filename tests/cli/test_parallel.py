"""`tigon train` on several processes: whatever --parallel says, the losses are those of data parallel."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
from command import environment, losses
from safetensors.torch import load_file

pytestmark = pytest.mark.xdist_group("cli-parallel")
SMALL = ("--batch-size", 2, "--seq-len", 32, "--log-every", 4, "--save-every", 2, "--eval-fraction", 0.01)
STEPS = 4


@pytest.fixture(scope="module")
def arguments(checkpoint, text):
    return ("train", "--model", checkpoint, "--data", text, *SMALL, "--steps", STEPS, "--precision", "fp32")


@pytest.fixture(scope="module")
def expected(together, arguments, tmp_path_factory):
    """The losses of data parallel: four sequences in a step."""
    output = tmp_path_factory.mktemp("ddp") / "run"
    done = together(2, *arguments, "--output", output).ok()
    assert done.out.count("final loss") == 1, "one process speaks"
    assert list(losses(output)) == list(range(1, STEPS + 1))
    assert len(list((output / f"checkpoint-{STEPS}").glob("rng_state_*.pth"))) == 2
    return output


@pytest.mark.parametrize(
    ("world", "parallel", "batch"),
    [(2, "fsdp", 2), (4, "hsdp=2", 1), (2, "tp=2", 4)],
)
def test_losses_are_those_of_data_parallel(together, arguments, expected, tmp_path, world, parallel, batch):
    output = tmp_path / "run"
    more = ("--parallel", parallel, "--batch-size", batch, "--output", output)
    together(world, *arguments, *more).ok()
    assert losses(output) == pytest.approx(losses(expected), rel=2e-5)
    trained, right = (load_file(folder / "model.safetensors") for folder in (output, expected))
    assert trained.keys() == right.keys()
    for name, weight in right.items():
        assert (trained[name] - weight).abs().max() <= 1e-4 * weight.abs().max(), name
    assert json.loads((output / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_sharded_run_resumes(together, arguments, expected, tmp_path):
    output = tmp_path / "run"
    options = (*arguments, "--output", output, "--parallel", "fsdp")
    first = [*map(str, options)]
    first[first.index("--steps") + 1] = "2"
    together(2, *first, "--schedule", "constant", "--warmup", 0).ok()
    whole = tmp_path / "whole"
    together(2, "train", "--resume", "--output", output, "--steps", STEPS).ok()
    together(2, *options, "--output", whole, "--schedule", "constant", "--warmup", 0).ok()
    assert losses(output) == losses(whole)
    one, other = (load_file(folder / "model.safetensors") for folder in (output, whole))
    assert all((one[name] == weight).all() for name, weight in other.items())
    together(2, "train", "--resume", "--output", output, "--parallel", "ddp").problem("--parallel was fsdp")
    together(1, "train", "--resume", "--output", output, "--steps", 8).problem("had 2 processes", "got 1")


@pytest.mark.parametrize(
    ("different", "sentence"),
    [
        (("--lr", 1e-3), "the processes of this run disagree: --lr is 0.0003 on rank 0 .* and 0.001 on rank 1"),
        (("--data", "{longer}"), "disagree: --data is .*text.txt on rank 0 .* and .*longer.txt on rank 1"),
        (("--data", "nowhere.txt"), r"rank 1 \(.*\) cannot go on: .*nowhere.txt"),
    ],
)
def test_processes_that_disagree(together, arguments, tmp_path, different, sentence):
    longer = tmp_path / "longer.txt"
    longer.write_text("one two three " * 3000)
    different = [str(value).format(longer=longer) for value in different]
    done = together(2, *arguments, "--output", tmp_path / "run", others={1: different})
    assert re.search(sentence, done.problem())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("world", "parallel", "more", "words"),
    [
        (1, "fsdp", (), ("is for several processes", "torchrun")),
        (1, "pp", (), ("--parallel must be ddp, fsdp",)),
        (1, "tp", (), ("--parallel tp=4",)),
        (1, "fsdp=2", (), ("--parallel must be",)),
        (1, "fsdp", ("--lora", 4), ("--lora 4 goes with --parallel ddp",)),
        (1, "fsdp", ("--precision", "fp16"), ("--precision fp16 goes with --parallel ddp",)),
        pytest.param(
            2,
            "zero3",
            (),
            ("--parallel zero3 needs deepspeed: pip install 'tigon[deepspeed]'",),
            marks=pytest.mark.skipif(find_spec("deepspeed") is not None, reason="deepspeed is installed"),
        ),
        (2, "hsdp=4", (), ("groups of 4 do not divide the 2 processes",)),
        (2, "hpz", (), ("--parallel hpz: a group must not have all 2 processes",)),
        (4, "tp=4", (), ("num_key_value_heads must be a multiple of", "got 2")),
    ],
)
def test_what_cannot_be(together, arguments, tmp_path, world, parallel, more, words):
    before = tmp_path / "run" / "checkpoint-2" / "model.safetensors"  # of a run that is to be replaced
    before.parent.mkdir(parents=True)
    before.write_bytes(b"weights")
    done = together(world, *arguments, "--output", tmp_path / "run", "--overwrite", "--parallel", parallel, *more)
    done.problem(*words)
    assert before.exists()


def test_a_killed_process_is_started_again_and_the_run_goes_on(arguments, expected, tmp_path):
    """The launcher ends the others and starts all again; the run takes itself up at its newest checkpoint."""
    output = tmp_path / "run"
    launcher = ("torch.distributed.run", "--standalone", "--max-restarts", 1, "--nproc-per-node", 2)
    command = (*launcher, "-m", "tigon.cli", *arguments, "--output", output, "--device", "cpu", "--parallel", "fsdp")
    process = subprocess.Popen(
        [sys.executable, "-m", *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment(),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while process.poll() is None and not (output / "checkpoint-2").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        os.kill(workers(process.pid)[-1], signal.SIGKILL)
        said = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "from step 2" in said
    assert losses(output) == pytest.approx(losses(expected), rel=2e-5)


def workers(launcher):
    import psutil

    return sorted(child.pid for child in psutil.Process(launcher).children() if "tigon.cli" in child.cmdline())
